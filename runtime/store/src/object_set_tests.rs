use flow_storage_testing::{Fault, FaultRule, TestServer};
use tempfile::TempDir;

use super::*;

/// A bucket, and a folder of this machine for notes and files in the making.
struct Place {
    server: TestServer,
    storage: Storage,
    bucket: PathBuf,
    scratch: TempDir,
    _root: TempDir,
}

impl Place {
    fn new() -> Place {
        let root = TempDir::new().unwrap();
        let bucket = root.path().join("bucket");
        std::fs::create_dir(&bucket).unwrap();
        let server = TestServer::start(root.path()).unwrap();
        Place {
            storage: server.storage(),
            server,
            bucket,
            scratch: TempDir::new().unwrap(),
            _root: root,
        }
    }

    fn begin(&self) -> Result<ObjectSet, StoreError> {
        ObjectSet::begin(&self.storage, &folder(), "flow.json", self.scratch.path())
    }

    /// Each file holds its name and the version.
    fn export(&self, version: u64, names: &[&str]) -> Result<(), StoreError> {
        let set = self.begin()?;
        set.finish(
            key(version),
            &self.files(version, names),
            &Noted::default(),
            &BTreeMap::new(),
        )
    }

    fn files(&self, version: u64, names: &[&str]) -> BTreeMap<String, PathBuf> {
        let file = |(number, name): (usize, &&str)| {
            let path = self.scratch.path().join(format!("file-{number}"));
            std::fs::write(&path, format!("{name} {version}")).unwrap();
            (name.to_string(), path)
        };
        names.iter().enumerate().map(file).collect()
    }

    fn status(&self, version: u64) -> ExportStatus {
        status(&self.storage, &folder(), "flow.json", &key(version)).unwrap()
    }

    /// Objects in the folder, without the token of the prefix, which is another one each time.
    fn names(&self) -> Vec<String> {
        let listed = self.storage.list(&url("s3://bucket/out")).unwrap();
        let name = |entry: &flow_storage::Entry| {
            let below = entry.url.key().strip_prefix("out/").unwrap().to_string();
            match below.split_once('/') {
                Some((prefix, name)) if is_prefix(prefix) => format!("set/{name}"),
                _ => below,
            }
        };
        listed.iter().map(name).collect()
    }

    /// What a reader finds who depends on `flow.json`.
    fn read(&self, name: &str) -> String {
        let named = url("s3://bucket/out").join(name).unwrap();
        let object = object_of_set(&self.storage, &named).unwrap().unwrap();
        String::from_utf8(self.storage.read(&object, 1000).unwrap().to_vec()).unwrap()
    }

    /// Puts another `flow.json` there.
    fn edit(&self, text: &'static str) {
        let list = folder().join("flow.json").unwrap();
        self.storage.put(&list, text.as_bytes()).unwrap();
    }
}

fn url(text: &str) -> ObjectUrl {
    match Location::parse(text).unwrap() {
        Location::Object(url) => url,
        Location::Local(path) => panic!("{}", path.display()),
    }
}

fn folder() -> ObjectUrl {
    url("s3://bucket/out")
}

fn key(version: u64) -> Digest {
    Digest::of(&version.to_le_bytes())
}

#[test]
fn a_set_takes_the_place_of_the_one_before_as_a_whole() {
    let place = Place::new();
    assert_eq!(place.status(1), ExportStatus::Missing);
    place.export(1, &["a", "deep/b", "gone"]).unwrap();
    assert_eq!(
        (place.status(1), place.status(2)),
        (ExportStatus::Whole, ExportStatus::Outdated)
    );
    assert_eq!(place.names(), ["flow.json", "set/a", "set/deep/b", "set/gone"]);
    // What is not ours stays, what the new set does not have goes.
    std::fs::write(place.bucket.join("out/mine"), "mine").unwrap();
    place.export(2, &["a", "deep/b"]).unwrap();
    assert_eq!(place.status(2), ExportStatus::Whole);
    assert_eq!(place.names(), ["flow.json", "mine", "set/a", "set/deep/b"]);
    assert_eq!(place.read("a"), "a 2");
    // The same length, and gone.
    let set = read_manifest(&place.storage, &folder().join("flow.json").unwrap());
    let prefix = set.unwrap().unwrap().set.unwrap().prefix.unwrap();
    let object = folder().join(&prefix).unwrap().join("a").unwrap();
    place.storage.put(&object, &b"a 3"[..]).unwrap();
    let changed = |file: &str| ExportStatus::Changed { file: file.into() };
    assert_eq!(place.status(2), changed("a"));
    place.storage.delete(&object).unwrap();
    assert_eq!(place.status(2), changed("a"));
    // What somebody made of the list.
    place.edit("{\"version\":2");
    assert_eq!(place.status(2), changed("flow.json"));
    place.export(2, &["a"]).unwrap();
    assert_eq!(place.status(2), ExportStatus::Whole);
    place.edit("{\"version\":7}");
    assert!(matches!(
        place.export(2, &["a"]),
        Err(StoreError::Newer { found: 7, .. })
    ));
    place.edit("{\"mine\":1}");
    assert!(matches!(place.export(2, &["a"]), Err(StoreError::OtherSet { .. })));
    let list = place.storage.read(&folder().join("flow.json").unwrap(), 100).unwrap();
    assert_eq!(list, "{\"mine\":1}");
}

#[test]
fn a_set_of_something_else_is_not_replaced() {
    let place = Place::new();
    place.export(1, &["train", "val"]).unwrap();
    let error = place.export(2, &["report", "scores"]).unwrap_err();
    assert!(
        matches!(&error, StoreError::OtherSet { found, .. } if found == "train"),
        "{error}"
    );
    assert_eq!(place.status(1), ExportStatus::Whole);
    assert_eq!(place.names(), ["flow.json", "set/train", "set/val"]);
}

#[test]
fn whatever_request_fails_the_old_set_stands_and_the_next_export_clears_up() {
    let place = Place::new();
    place.export(1, &["a", "b"]).unwrap();
    // The second file, the list, and the deletion of the old set.
    let faults = [("/out/set-", 1), ("/out/flow.json", 0)];
    for (path, after) in faults {
        place.server.fault(FaultRule {
            method: Some("PUT"),
            after,
            ..FaultRule::always(Fault::Status(403), path)
        });
        let error = place.export(2, &["a", "b"]).unwrap_err().to_string();
        assert!(
            error.contains("s3://bucket/out") && error.contains("permission denied"),
            "{error}"
        );
        assert!(!error.contains(flow_storage_testing::SECRET_ACCESS_KEY));
        assert_eq!(place.status(1), ExportStatus::Whole);
        assert_eq!((place.read("a"), place.read("b")), ("a 1".into(), "b 1".into()));
        place.server.clear();
    }
    assert!(place.names().len() > 3, "what was written is left: {:?}", place.names());
    // The list is written; the old set cannot be deleted, which is no reason to fail.
    place.server.fault(FaultRule {
        method: Some("DELETE"),
        ..FaultRule::always(Fault::Status(403), "")
    });
    place.server.fault(FaultRule::always(Fault::Status(403), "?delete"));
    place.export(3, &["a", "b"]).unwrap();
    assert_eq!((place.status(3), place.read("a")), (ExportStatus::Whole, "a 3".into()));
    place.server.clear();
    drop(place.begin().unwrap());
    assert_eq!(place.names(), ["flow.json", "set/a", "set/b"]);
    assert_eq!(place.status(3), ExportStatus::Whole);
}

#[test]
fn throttling_and_cut_connections_are_gone_through() {
    let place = Place::new();
    place.server.fault(FaultRule::first(2, Fault::Status(503), "/out/"));
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::first(1, Fault::Drop, "/out/set-")
    });
    // In two parts, of which the second is cut once.
    place.server.fault(FaultRule::first(1, Fault::Drop, "partNumber=2"));
    let mut files = place.files(1, &["a"]);
    let large = place.scratch.path().join("large");
    std::fs::write(&large, vec![7; 17 << 20]).unwrap();
    files.insert("large".into(), large);
    place
        .begin()
        .unwrap()
        .finish(key(1), &files, &Noted::default(), &BTreeMap::new())
        .unwrap();
    assert_eq!(place.status(1), ExportStatus::Whole);
}

#[test]
fn an_upload_that_fails_in_its_middle_leaves_the_old_set() {
    let place = Place::new();
    place.export(1, &["large"]).unwrap();
    place
        .server
        .fault(FaultRule::always(Fault::Status(403), "partNumber=2"));
    let large = place.scratch.path().join("large");
    std::fs::write(&large, vec![7; 17 << 20]).unwrap();
    let files = BTreeMap::from([("large".to_string(), large)]);
    place
        .begin()
        .unwrap()
        .finish(key(2), &files, &Noted::default(), &BTreeMap::new())
        .unwrap_err();
    assert_eq!(
        (place.status(1), place.read("large")),
        (ExportStatus::Whole, "large 1".into())
    );
    // Nothing of it is an object.
    assert_eq!(place.names(), ["flow.json", "set/large"]);
}

#[test]
fn of_two_exports_at_the_same_time_one_is_refused() {
    let place = Place::new();
    place.export(1, &["a"]).unwrap();
    let late = place.begin().unwrap();
    let other = TempDir::new().unwrap();
    let early = ObjectSet::begin(&place.storage, &folder(), "flow.json", other.path()).unwrap();
    early
        .finish(key(2), &place.files(2, &["a"]), &Noted::default(), &BTreeMap::new())
        .unwrap();
    let error = late
        .finish(key(3), &place.files(3, &["a"]), &Noted::default(), &BTreeMap::new())
        .unwrap_err();
    assert!(matches!(error, StoreError::SetMeanwhile { .. }), "{error}");
    assert_eq!((place.status(2), place.read("a")), (ExportStatus::Whole, "a 2".into()));
}

#[test]
fn rows_of_the_set_that_stands_are_known() {
    use arrow::array::{ArrayRef, RecordBatch, UInt32Array};
    let place = Place::new();
    let path = place.scratch.path().join("rows");
    let numbers: ArrayRef = std::sync::Arc::new(UInt32Array::from_iter_values(0..150));
    let batch = RecordBatch::try_from_iter([("number", numbers)]).unwrap();
    let mut writer = parquet::arrow::ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let names = ["a.parquet".to_string(), "b.parquet".to_string()];
    let set = place.begin().unwrap();
    assert_eq!(set.rows_before(&names), 0);
    set.finish(
        key(1),
        &BTreeMap::from([(names[0].clone(), path)]),
        &Noted::default(),
        &BTreeMap::new(),
    )
    .unwrap();
    assert_eq!(place.begin().unwrap().rows_before(&names), 150);
}

#[test]
fn a_file_is_told_by_the_set_that_it_is_of() {
    let place = Place::new();
    let of = |folder: &ObjectUrl, name| file_in_set(&place.storage, folder, "flow.json", name).unwrap();
    std::fs::create_dir(place.bucket.join("out")).unwrap();
    std::fs::write(place.bucket.join("out/a"), "mine").unwrap();
    assert_eq!(of(&folder(), "a"), FileInSet::NoSet);
    assert_eq!(
        object_of_set(&place.storage, &folder().join("a").unwrap()).unwrap(),
        None
    );
    place.export(1, &["a"]).unwrap();
    let object = object_of_set(&place.storage, &folder().join("a").unwrap())
        .unwrap()
        .unwrap();
    assert_eq!(of(&object.parent().unwrap(), "a"), FileInSet::AsWritten);
    assert_eq!(of(&object.parent().unwrap(), "b"), FileInSet::Other);
    // The object of that very name is none of the set's.
    assert_eq!(of(&folder(), "a"), FileInSet::Changed);
    place.storage.put(&object, &b"a 2"[..]).unwrap();
    assert_eq!(of(&object.parent().unwrap(), "a"), FileInSet::Changed);
    // Those of a set that was replaced, and of one that was never written to its end.
    place.export(2, &["a"]).unwrap();
    place.storage.put(&object, &b"a 1"[..]).unwrap();
    assert_eq!(of(&object.parent().unwrap(), "a"), FileInSet::Changed);
    place.storage.delete(&folder().join("flow.json").unwrap()).unwrap();
    assert_eq!(of(&object.parent().unwrap(), "a"), FileInSet::CutShort);
}

#[test]
fn a_missing_bucket_is_an_error_that_names_it() {
    let place = Place::new();
    // The server of the tests makes a bucket of any name.
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::always(Fault::Status(404), "/nowhere/")
    });
    let error = ObjectSet::begin(
        &place.storage,
        &url("s3://nowhere/out"),
        "flow.json",
        place.scratch.path(),
    )
    .and_then(|set| set.finish(key(1), &place.files(1, &["a"]), &Noted::default(), &BTreeMap::new()))
    .unwrap_err();
    assert!(error.to_string().contains("s3://nowhere/out"), "{error}");
}
