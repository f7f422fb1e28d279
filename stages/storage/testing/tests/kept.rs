//! Copies of objects that are kept on this machine.

use std::fs;
use std::path::{Path, PathBuf};

use flow_storage::{InputFile, Location, ObjectUrl, Storage, StorageFault};
use flow_storage_testing::{Fault, FaultRule, TestServer};

fn url(text: &str) -> ObjectUrl {
    match Location::parse(text).unwrap() {
        Location::Object(url) => url,
        Location::Local(path) => panic!("{} is a path", path.display()),
    }
}

struct Place {
    folder: tempfile::TempDir,
    server: TestServer,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("bucket")).unwrap();
        let server = TestServer::start(folder.path()).unwrap();
        Place { folder, server }
    }

    fn write(&self, key: &str, bytes: &[u8]) {
        let path = self.folder.path().join("bucket").join(key);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// As another process sees it, whose copies may have this many bytes.
    fn storage(&self, bytes: u64) -> Storage {
        let limit = ("FLOW_STORAGE_CACHE_BYTES".to_string(), bytes.to_string());
        Storage::with_environment(self.server.environment().into_iter().chain([limit]))
    }

    /// Bytes of all files below the folder of copies.
    fn kept(&self) -> u64 {
        below(self.server.cache())
            .iter()
            .map(|path| path.metadata().unwrap().len())
            .sum()
    }
}

fn below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(below(&path)),
            false => found.push(path),
        }
    }
    found
}

fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * at / 7 + at) as u8).collect()
}

fn keep(storage: &Storage, text: &str) -> Result<PathBuf, StorageFault> {
    let kept = storage.keep(&url(text), &|name| name.ends_with(".part"), &mut |_| true);
    kept.map(Option::unwrap).map_err(|error| error.fault)
}

#[test]
fn a_copy_is_made_once_and_again_when_it_must_be() {
    let place = Place::new();
    let all = bytes(20_000_017);
    place.write("models/a.nemo", &all);
    for rule in [
        FaultRule::first(2, Fault::Truncate, "a.nemo"),
        FaultRule::first(2, Fault::Status(503), "a.nemo"),
        FaultRule::first(2, Fault::Drop, "a.nemo"),
    ] {
        place.server.fault(FaultRule {
            method: Some("GET"),
            ..rule
        });
    }
    let first = place.storage(1 << 30);
    let path = keep(&first, "s3://bucket/models/a.nemo").unwrap();
    assert_eq!(path.file_name().unwrap(), "a.nemo");
    assert!(fs::read(&path).unwrap() == all);
    // This process asks no more; another one looks whether the object is another.
    place.server.clear();
    assert_eq!(keep(&first, "s3://bucket/models/a.nemo").unwrap(), path);
    assert_eq!(place.server.requests("a.nemo"), 0);
    let second = place.storage(1 << 30);
    assert_eq!(keep(&second, "s3://bucket/models/a.nemo").unwrap(), path);
    assert_eq!((place.server.requests("GET "), place.server.requests("HEAD ")), (0, 1));
    drop((first, second));

    // A copy that was damaged is made again.
    let mut damaged = all.clone();
    damaged[10_000_000] ^= 1;
    fs::write(&path, &damaged).unwrap();
    assert_eq!(
        keep(&place.storage(1 << 30), "s3://bucket/models/a.nemo").unwrap(),
        path
    );
    assert!(fs::read(&path).unwrap() == all);
    // Not while another process uses it, which is reported.
    let user = place.storage(1 << 30);
    keep(&user, "s3://bucket/models/a.nemo").unwrap();
    fs::write(&path, &all[..1_000]).unwrap();
    let refused = keep(&place.storage(1 << 30), "s3://bucket/models/a.nemo");
    assert_eq!(refused, Err(StorageFault::Cache));
    drop(user);
    keep(&place.storage(1 << 30), "s3://bucket/models/a.nemo").unwrap();
    assert!(fs::read(&path).unwrap() == all);

    // Another object of that name has a copy of its own.
    place.write("models/a.nemo", b"another");
    let other = keep(&place.storage(1 << 30), "s3://bucket/models/a.nemo").unwrap();
    assert!(other != path && fs::read(&other).unwrap() == b"another" && path.exists());
}

#[test]
fn a_folder_of_objects_is_copied_as_one() {
    let place = Place::new();
    place.write("model/one.part", b"one");
    place.write("model/two.part", b"two");
    place.write("model/other", b"other");
    place.write("model/below/three.part", b"three");
    let path = keep(&place.storage(1 << 30), "s3://bucket/model/").unwrap();
    assert_eq!(path.file_name().unwrap(), "model");
    let mut names: Vec<_> = fs::read_dir(&path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["one.part", "two.part"]);
    place.write("model/two.part", b"another");
    let other = keep(&place.storage(1 << 30), "s3://bucket/model").unwrap();
    assert!(other != path && fs::read(other.join("two.part")).unwrap() == b"another");
    for (name, fault) in [
        ("s3://bucket/none", StorageFault::NotFound),
        ("s3://bucket/model/below/none.nemo", StorageFault::NotFound),
        ("s3://none/model.nemo", StorageFault::NoSuchBucket),
    ] {
        assert_eq!(keep(&place.storage(1 << 30), name), Err(fault), "{name}");
    }
}

#[test]
fn copies_have_no_more_bytes_than_they_may_and_those_in_use_stay() {
    let place = Place::new();
    for name in ["a", "b", "c"] {
        place.write(name, &bytes(1_000_000));
    }
    let in_use = place.storage(2_500_000);
    let a = keep(&in_use, "s3://bucket/a").unwrap();
    let b = keep(&place.storage(2_500_000), "s3://bucket/b").unwrap();
    assert!(a.exists() && b.exists());
    let c = keep(&place.storage(2_500_000), "s3://bucket/c").unwrap();
    assert!(a.exists() && !b.exists() && c.exists());
    assert!(place.kept() < 2_500_000);
    // Progress that says no ends it, and leaves nothing that is taken for a copy.
    let storage = place.storage(1 << 30);
    let stopped = storage.keep(&url("s3://bucket/b"), &|_| true, &mut |_| false).unwrap();
    assert_eq!(stopped, None);
    assert!(fs::read(keep(&storage, "s3://bucket/b").unwrap()).unwrap() == bytes(1_000_000));
}

#[test]
fn parts_come_from_blocks_that_are_kept() {
    let place = Place::new();
    let all = bytes(20_000_017);
    place.write("a.tar", &all);
    let part = |storage: &Storage, from: usize, length: usize| {
        let reader = storage.open(&url("s3://bucket/a.tar")).unwrap().in_blocks();
        let mut part = vec![0; length];
        let file = InputFile::Object(Box::new(reader));
        file.read_exact_at(&mut part, from as u64).unwrap();
        assert!(part == all[from..from + length], "{from}");
    };
    place.server.fault(FaultRule {
        method: Some("GET"),
        ..FaultRule::first(2, Fault::Truncate, "a.tar")
    });
    let storage = place.storage(1 << 30);
    // The third goes over the end of a block, the last is in the block that is shorter.
    let parts = [
        (5, 100_000),
        (7_000_000, 150_000),
        (8_388_000, 1_000),
        (19_999_017, 1_000),
    ];
    for (from, length) in parts {
        part(&storage, from, length);
    }
    assert_eq!(storage.counts().get, 3 + 2, "{:?}", storage.counts());
    let mut none = [0; 2];
    let reader = storage.open(&url("s3://bucket/a.tar")).unwrap().in_blocks();
    assert_eq!(reader.read_at(&mut none, 20_000_016).unwrap(), 1);
    assert_eq!(reader.read_at(&mut none, 20_000_017).unwrap(), 0);
    let file = InputFile::Object(Box::new(reader));
    let error = file.read_exact_at(&mut none, 20_000_016).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);

    // Another process finds them, and asks again for one that was damaged.
    let other = place.storage(1 << 30);
    part(&other, 100, 1_000);
    assert_eq!(other.counts().get, 0);
    for path in below(server_blocks(&place).as_path()) {
        let mut damaged = fs::read(&path).unwrap();
        damaged[500] ^= 1;
        fs::write(&path, damaged).unwrap();
    }
    let third = place.storage(1 << 30);
    part(&third, 100, 1_000);
    assert_eq!(third.counts().get, 1);

    // What does not fit is not taken in: each part is asked for by itself.
    let small = place.storage(10_000_000);
    part(&small, 1_000_000, 100_000);
    part(&small, 1_200_000, 100_000);
    assert_eq!((small.counts().get, small.counts().bytes_read), (2, 200_000));
}

fn server_blocks(place: &Place) -> PathBuf {
    place.server.cache().join("flow/blocks")
}

#[test]
fn blocks_of_other_objects_make_room() {
    let place = Place::new();
    for name in ["a", "b", "c"] {
        place.write(name, &bytes(3_000_000));
        let storage = place.storage(7_000_000);
        let reader = storage.open(&url(&format!("s3://bucket/{name}"))).unwrap().in_blocks();
        let mut part = vec![0; 1_000];
        assert_eq!(reader.read_at(&mut part, 2_000_000).unwrap(), 1_000);
        assert!(part == bytes(3_000_000)[2_000_000..2_001_000]);
        assert!(place.kept() <= 7_000_000, "{}", place.kept());
    }
    assert!(below(&server_blocks(&place)).len() < 3);
}
