//! Tests of the whole store: committed partitions stay, others leave no trace.

mod crashes;
mod exports;
#[path = "../../tests/failpoints/mod.rs"]
mod hooks;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Float64Array, ListArray, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Int32Type, Schema, SchemaRef};
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use flow_base::partition::Partition;
use flow_base::reject::{Reject, RejectClass};
use flow_storage::Storage;

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("text", DataType::Utf8, true),
        Field::new("score", DataType::Float64, true),
        Field::new_list("tokens", Field::new_list_field(DataType::Int32, true), true),
    ]))
}

/// Rows that depend on `seed` alone.
pub(super) fn rows(seed: u64, count: usize) -> RecordBatch {
    let random = |i: usize| {
        seed.wrapping_mul(6364136223846793005)
            .wrapping_add((i as u64).wrapping_mul(1442695040888963407))
            >> 33
    };
    let tokens = (0..count).map(|i| match random(i) % 4 {
        0 => None,
        n => Some((0..n as i32).map(Some).collect::<Vec<_>>()),
    });
    RecordBatch::try_new(
        schema(),
        vec![
            Arc::new(UInt32Array::from_iter_values(0..count as u32)),
            Arc::new(
                (0..count)
                    .map(|i| (random(i) % 5 > 0).then(|| format!("text {}", random(i) % 97)))
                    .collect::<StringArray>(),
            ),
            Arc::new(
                (0..count)
                    .map(|i| Some(random(i) as f64 / 7.0))
                    .collect::<Float64Array>(),
            ),
            Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(tokens)),
        ],
    )
    .unwrap()
}

fn reject(row: Option<u32>, reason: &str, class: RejectClass) -> Reject {
    let id = row.map(|row| format!("name {row}"));
    Reject {
        row,
        id,
        reason: reason.into(),
        class,
        detail: "why".into(),
        values: "{\"a\":1}".into(),
    }
}

pub(super) fn recipe(n: u8) -> Digest {
    Digest::of(&[n])
}

pub(super) fn key(n: u64) -> Digest {
    Digest::of_parts([n.to_le_bytes()])
}

fn port(name: &str, batches: Vec<RecordBatch>) -> PortRows {
    PortRows::new(name, schema(), batches)
}

fn run(dir: &Path) -> Store {
    Store::open(&Storage::default(), dir, Access::Run { run_id: "test".into() }).unwrap()
}

fn read(dir: &Path) -> Store {
    Store::open(&Storage::default(), dir, Access::Read).unwrap()
}

pub(super) fn writer(store: &Store) -> ArtifactWriter {
    store.writer(&recipe(1), &serde_json::json!({"kind": "test"})).unwrap()
}

pub(super) fn write(writer: &ArtifactWriter, partition: &str, n: u64, count: usize) -> Result<Pending, StoreError> {
    let rejects = if n.is_multiple_of(2) {
        vec![reject(Some(1), "too_long", RejectClass::Rule)]
    } else {
        Vec::new()
    };
    let counts = Counts {
        rows_in: count as u64 + rejects.len() as u64,
        rows_out: count as u64,
        ..Counts::default()
    };
    writer.write_partition(
        &partition.into(),
        key(n),
        vec![],
        vec![port("rows", vec![rows(n, count)])],
        rejects,
        counts,
    )
}

pub(super) fn names(dir: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => {
                    names.insert(path.strip_prefix(dir).unwrap().to_str().unwrap().to_string());
                }
            }
        }
    }
    names
}

#[test]
fn what_is_committed_is_read_back() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path().join(".flow");
    let store = run(&dir);
    let writer = writer(&store);
    let refused = vec![
        reject(Some(7), "too_long", RejectClass::Rule),
        reject(None, "broken", RejectClass::Fault),
        reject(Some(2), "too_long", RejectClass::Rule),
    ];
    let (a, b) = (Partition::new("hi/a"), Partition::new("hi/b"));
    let ports = vec![port("kept", vec![rows(1, 10), rows(2, 5)]), port("rest", vec![])];
    let counts = Counts {
        rows_in: 18,
        rows_out: 15,
        read: 18,
        merged: 0,
    };
    let first = writer
        .write_partition(&b, key(1), vec![key(7)], ports, refused, counts)
        .unwrap();
    let second = write(&writer, "hi/a", 3, 4).unwrap();
    // Nothing is visible before the commit.
    assert!(store.records(&recipe(1)).unwrap().is_empty());
    let committed = writer.commit(vec![first, second]).unwrap();
    assert_eq!(
        committed.iter().map(|r| r.partition.as_str()).collect::<Vec<_>>(),
        ["hi/b", "hi/a"]
    );

    for finished in [false, true] {
        if finished {
            writer.finish([(&a, &key(3)), (&b, &key(1))]).unwrap();
            let names = names(&dir);
            assert!(
                !names
                    .iter()
                    .any(|name| name.contains("records/") || name.contains(".tmp")),
                "{names:?}"
            );
            assert_eq!(names.iter().filter(|name| name.contains("data/")).count(), 4);
        }
        let store = read(&dir);
        let records = store.records(&recipe(1)).unwrap();
        assert_eq!(records.partitions().collect::<Vec<_>>(), [&a, &b]);
        let record = records.get(&b, &key(1)).unwrap();
        assert_eq!(**record, *committed[0]);
        assert_eq!(
            (record.rows_in, record.rows_out, record.read, record.rejects.rows),
            (18, 15, 18, 3)
        );
        assert_eq!(record.inputs, [key(7)]);
        assert!(records.get(&b, &key(3)).is_none() && records.lost().is_empty());

        let kept = store.artifact(&recipe(1), "kept", schema(), [record]).unwrap();
        assert_eq!(
            (kept.rows(), kept.rows_of(&b), kept.partitions().len()),
            (15, Some(15), 1)
        );
        let whole = kept.read_whole(&b, None).unwrap();
        assert_eq!(
            whole,
            arrow::compute::concat_batches(&schema(), &[rows(1, 10), rows(2, 5)]).unwrap()
        );
        let chosen = kept.read_whole(&b, Some(&["score", "_row"])).unwrap();
        assert_eq!(chosen, whole.project(&[2, 0]).unwrap());
        assert_eq!(kept.read_whole(&b, Some(&[])).unwrap().num_rows(), 15);
        assert!(kept.read(&b, Some(&["nothing"])).is_err() && kept.read(&a, None).is_err());
        let rest = store.artifact(&recipe(1), "rest", schema(), [record]).unwrap();
        assert_eq!(rest.read_whole(&b, None).unwrap().num_rows(), 0);
        assert!(store.artifact(&recipe(1), "none", schema(), [record]).is_err());

        let rejects = store.reject_set(&[
            ("last".into(), recipe(1), vec![record.clone()]),
            ("first".into(), recipe(1), vec![records.latest(&a).unwrap().clone()]),
        ]);
        let all: Vec<_> = rejects.iter().map(Result::unwrap).collect();
        assert!(
            all.iter()
                .all(|(stage, partition, _)| &**stage == "last" && *partition == b)
        );
        assert_eq!(
            all.iter().map(|(_, _, r)| r.row).collect::<Vec<_>>(),
            [None, Some(2), Some(7)]
        );
        assert_eq!(all[2].2, reject(Some(7), "too_long", RejectClass::Rule));
        assert_eq!(rejects.rows(), 3);
        let reasons = &rejects.by_reason()[0].1;
        assert_eq!(
            reasons.iter().map(|c| (&*c.reason, c.rows)).collect::<Vec<_>>(),
            [("broken", 1), ("too_long", 2)]
        );
    }
    assert_eq!(
        store.identity(&recipe(1)).unwrap(),
        Some(serde_json::json!({"kind": "test"}))
    );
}

#[test]
fn an_artifact_in_memory_is_like_one_on_disk() {
    let dir = TempDir::new().unwrap();
    let store = run(dir.path());
    let writer = writer(&store);
    let records = writer
        .commit(vec![
            write(&writer, "b", 1, 9).unwrap(),
            write(&writer, "a", 2, 3).unwrap(),
        ])
        .unwrap();
    let disk = store.artifact(&recipe(1), "rows", schema(), &records).unwrap();
    let batches = vec![
        ("b".into(), vec![rows(1, 9).slice(0, 4), rows(1, 9).slice(4, 5)]),
        ("a".into(), vec![rows(2, 3)]),
    ];
    let memory = Artifact::in_memory(schema(), batches).unwrap();
    assert_eq!(disk.digest(), memory.digest());
    assert_eq!(disk.digest_of(&"b".into()), memory.digest_of(&"b".into()));
    for columns in [None, Some(["text", "_row"].as_slice())] {
        for partition in disk.partitions() {
            assert_eq!(
                disk.read_whole(partition, columns).unwrap(),
                memory.read_whole(partition, columns).unwrap()
            );
        }
    }
    let order: Vec<Partition> = disk.batches(Some(&["_row"])).map(|batch| batch.unwrap().0).collect();
    assert_eq!(order, ["a".into(), "b".into()]);
    assert!(Artifact::in_memory(schema(), vec![("a".into(), vec![]), ("a".into(), vec![])]).is_err());
    assert_eq!(Artifact::empty(schema()).rows(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// How rows are cut into batches, and what is around them in memory, does not show in the bytes.
    #[test]
    fn the_same_rows_give_the_same_bytes(seed in 0u64..1000, count in 0usize..70_000, cuts in prop::collection::vec(0.0f64..1.0, 0..6)) {
        let batch = rows(seed, count);
        let mut ends: Vec<usize> = cuts.iter().map(|cut| (cut * count as f64) as usize).chain([0, count]).collect();
        ends.sort_unstable();
        let pieces: Vec<RecordBatch> = ends.windows(2).map(|w| batch.slice(w[0], w[1] - w[0])).collect();
        let (mut whole, mut cut) = (Vec::new(), Vec::new());
        let one = parquet_file::encode(&mut whole, &schema(), vec![batch]).unwrap();
        let many = parquet_file::encode(&mut cut, &schema(), pieces).unwrap();
        prop_assert_eq!(one, many);
        prop_assert!(whole == cut);
        prop_assert_eq!(one.digest, Digest::of(&whole));
        prop_assert_eq!((one.bytes, one.rows), (whole.len() as u64, count as u64));
    }
}

#[test]
fn rows_that_do_not_fit_their_port_are_refused() {
    let dir = TempDir::new().unwrap();
    let store = run(dir.path());
    let writer = writer(&store);
    let other = Arc::new(Schema::new(vec![Field::new("_row", DataType::UInt32, false)]));
    let counts = Counts::default();
    let wrong = PortRows::new("rows", other, vec![rows(1, 2)]);
    let error = writer
        .write_partition(&"p".into(), key(1), vec![], vec![wrong], vec![], counts)
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("rows") && error.contains("`p`") && error.contains("score"),
        "{error}"
    );
    for name in ["", "../up", "a/b", ".hidden"] {
        let bad = port(name, vec![]);
        assert!(matches!(
            writer.write_partition(&"p".into(), key(1), vec![], vec![bad], vec![], counts),
            Err(StoreError::Name { .. })
        ));
    }
    // Nullability and metadata of a batch are not held against it, nulls where none may be are.
    let loose =
        Schema::new(vec![Field::new("_row", DataType::UInt32, true)]).with_metadata([("a".into(), "b".into())].into());
    let strict = Arc::new(Schema::new(vec![Field::new("_row", DataType::UInt32, false)]));
    for (values, fits) in [(vec![Some(1)], true), (vec![None], false)] {
        let batch = RecordBatch::try_new(Arc::new(loose.clone()), vec![Arc::new(UInt32Array::from(values))]).unwrap();
        let rows = PortRows::new("rows", strict.clone(), vec![batch]);
        assert_eq!(
            writer
                .write_partition(&"p".into(), key(1), vec![], vec![rows], vec![], counts)
                .is_ok(),
            fits
        );
    }
    assert!(
        !names(dir.path()).iter().any(|name| name.contains("data/")),
        "temporary files are left"
    );
}

#[test]
fn partitions_with_one_key_keep_their_own_rows() {
    let dir = TempDir::new().unwrap();
    let store = run(dir.path());
    let writer = writer(&store);
    let write = |partition: &str, seed| {
        let ports = vec![port("rows", vec![rows(seed, 3)])];
        writer
            .write_partition(&partition.into(), key(1), vec![], ports, vec![], Counts::default())
            .unwrap()
    };
    writer
        .commit(vec![write("a", 1), write("b", 2), write("c", 1)])
        .unwrap();
    let records = store.records(&recipe(1)).unwrap();
    for (partition, seed) in [("a", 1), ("b", 2), ("c", 1)] {
        let record = records.get(&partition.into(), &key(1)).unwrap();
        let artifact = store.artifact(&recipe(1), "rows", schema(), [record]).unwrap();
        assert_eq!(artifact.read_whole(&partition.into(), None).unwrap(), rows(seed, 3));
    }
}

#[test]
fn committing_again_keeps_ports_and_writes_nothing_that_stands() {
    let dir = TempDir::new().unwrap();
    let store = run(dir.path());
    let writer = writer(&store);
    let p = Partition::new("p");
    let write = |ports: &[(&str, u64)], rows_out| {
        let ports = ports
            .iter()
            .map(|(name, seed)| port(name, vec![rows(*seed, 3)]))
            .collect();
        let counts = Counts {
            rows_out,
            ..Counts::default()
        };
        writer
            .write_partition(&p, key(1), vec![], ports, vec![], counts)
            .unwrap()
    };
    writer.commit(vec![write(&[("a", 1)], 6)]).unwrap();
    let before = names(dir.path());
    writer.commit(vec![write(&[("a", 1)], 6)]).unwrap();
    writer.commit(vec![write(&[], 6)]).unwrap();
    assert_eq!(names(dir.path()), before);
    // Another port is stored now; the one stored before stays.
    writer.commit(vec![write(&[("b", 2)], 6)]).unwrap();
    let ports = |store: &Store| {
        store
            .records(&recipe(1))
            .unwrap()
            .get(&p, &key(1))
            .unwrap()
            .ports
            .keys()
            .map(str::to_string)
            .collect::<Vec<_>>()
    };
    assert_eq!(ports(&store), ["a", "b"]);
    // Other rows under the same key (a forced run of something that is not deterministic): nothing is mixed.
    let record = writer.commit(vec![write(&[("b", 3)], 6)]).unwrap().remove(0);
    assert_eq!(ports(&store), ["b"]);
    let artifact = store.artifact(&recipe(1), "b", schema(), [&record]).unwrap();
    assert_eq!(artifact.read_whole(&p, None).unwrap(), rows(3, 3));
    assert!(writer.finish([(&p, &key(2))]).is_err());
    writer.finish([(&p, &key(1))]).unwrap();
    let (other, index) = (
        store.writer(&recipe(1), &serde_json::Value::Null).unwrap(),
        dir.path().join("artifacts").join(recipe(1).short()).join("index.json"),
    );
    assert!(Arc::ptr_eq(&other.shared, &writer.shared));
    // Nothing new: the index is not written again.
    let written = std::fs::metadata(&index).unwrap().modified().unwrap();
    other.finish([]).unwrap();
    assert_eq!(std::fs::metadata(&index).unwrap().modified().unwrap(), written);
}

#[test]
fn lost_data_makes_its_partition_run_again_and_damaged_records_are_named() {
    let dir = TempDir::new().unwrap();
    let store = run(dir.path());
    let folder = dir.path().join("artifacts").join(recipe(1).short());
    {
        let writer = writer(&store);
        writer
            .commit(
                ["a", "b", "c"]
                    .iter()
                    .zip(1..)
                    .map(|(p, n)| write(&writer, p, n, 5).unwrap())
                    .collect(),
            )
            .unwrap();
        writer.finish([]).unwrap();
    }
    let records = store.records(&recipe(1)).unwrap();
    let file = |p: &str| {
        let record = records.latest(&p.into()).unwrap();
        let (name, _) = record.files().next().unwrap();
        folder.join("data").join(name)
    };
    let artifact = store
        .artifact(&recipe(1), "rows", schema(), [records.latest(&"b".into()).unwrap()])
        .unwrap();
    std::fs::remove_file(file("a")).unwrap();
    std::fs::File::options()
        .write(true)
        .open(file("b"))
        .unwrap()
        .set_len(10)
        .unwrap();
    let error = artifact.read(&"b".into(), None).err().unwrap().to_string();
    assert!(error.contains("10 bytes") && error.contains(".parquet"), "{error}");
    let after = store.records(&recipe(1)).unwrap();
    assert_eq!(after.partitions().map(Partition::as_str).collect::<Vec<_>>(), ["c"]);
    assert_eq!(
        after
            .lost()
            .iter()
            .map(|l| (l.partition.as_str(), l.found))
            .collect::<Vec<_>>(),
        [("a", None), ("b", Some(10))]
    );
    // Run again, they stand again.
    let writer = writer(&store);
    writer
        .commit(vec![
            write(&writer, "a", 1, 5).unwrap(),
            write(&writer, "b", 2, 5).unwrap(),
        ])
        .unwrap();
    writer.finish([]).unwrap();
    assert_eq!(store.records(&recipe(1)).unwrap().partitions().count(), 3);
    drop(writer);

    // Bytes changed in place, with the size kept, are found when they are read.
    let bytes = std::fs::read(file("c")).unwrap();
    std::fs::write(file("c"), vec![0; bytes.len()]).unwrap();
    let artifact = store
        .artifact(&recipe(1), "rows", schema(), [records.latest(&"c".into()).unwrap()])
        .unwrap();
    assert!(artifact.read_whole(&"c".into(), None).is_err());

    let index = folder.join("index.json");
    let text = std::fs::read_to_string(&index).unwrap();
    std::fs::write(&index, &text[..text.len() / 2]).unwrap();
    let error = store.records(&recipe(1)).unwrap_err();
    assert!(
        matches!(&error, StoreError::Damaged { path, .. } if *path == index),
        "{error}"
    );
    assert!(error.help().unwrap().contains("index.json"));
    let text = super::versioned_json::unsealed(&text);
    std::fs::write(&index, text.replace("\"version\":2", "\"version\":9")).unwrap();
    assert!(matches!(
        store.records(&recipe(1)),
        Err(StoreError::Newer { found: 9, .. })
    ));
    std::fs::write(&index, "{\"version\":9,\"sheets\":{}}").unwrap();
    assert!(matches!(
        store.records(&recipe(1)),
        Err(StoreError::Newer { found: 9, .. })
    ));
    std::fs::write(&index, text.replace(&recipe(1).to_hex(), &recipe(2).to_hex())).unwrap();
    assert!(matches!(store.records(&recipe(1)), Err(StoreError::OtherRecipe { .. })));
}

#[test]
fn a_state_directory_is_opened_with_care() {
    let root = TempDir::new().unwrap();
    let dir = root.path().join("new/.flow");
    // Looking makes nothing.
    let looking = read(&dir);
    assert!(looking.records(&recipe(1)).unwrap().is_empty() && looking.runs().unwrap().is_empty());
    assert!(matches!(
        looking.writer(&recipe(1), &serde_json::Value::Null),
        Err(StoreError::ReadOnly { .. })
    ));
    looking.save_sources().unwrap();
    assert!(!root.path().join("new").exists());
    let first = run(&dir);
    let Err(second) = Store::open(&Storage::default(), &dir, Access::Run { run_id: "b".into() }) else {
        panic!("two runs")
    };
    assert!(second.is_held() && second.to_string().contains("run test"), "{second}");
    assert_eq!(Store::holder(&Storage::default(), &dir).unwrap().run, "test");
    read(&dir);
    let clone = first.clone();
    drop(first);
    assert!(Store::open(&Storage::default(), &dir, Access::Run { run_id: "b".into() }).is_err());
    drop(clone);
    let store = run(&dir);
    for id in ["../x", "", ".", "a/b", "/etc"] {
        assert!(store.run_folder(id).is_err(), "{id}");
    }
    for stage in ["../x", "", "a//b", "a/../../b", "/etc"] {
        assert!(store.scratch(stage).is_err(), "{stage}");
    }
    assert!(store.scratch("group/stage").unwrap().is_dir());
    store.create_run_folder("20260101T000000-abcd").unwrap();
    assert_eq!(store.runs().unwrap(), ["20260101T000000-abcd"]);
    drop(store);
    std::fs::write(dir.join("FORMAT"), "{\"version\":2}").unwrap();
    for access in [Access::Read, Access::Run { run_id: "c".into() }] {
        assert!(matches!(
            Store::open(&Storage::default(), &dir, access),
            Err(StoreError::Newer { found: 2, .. })
        ));
    }
    // A state directory without it is refused, so that it is not to be removed.
    std::fs::write(dir.join("FORMAT"), "{\"versinn\":1}").unwrap();
    let damaged = Store::open(&Storage::default(), &dir, Access::Read).err().unwrap();
    let help = damaged.help().unwrap();
    let content = help.strip_prefix("if this version of flow wrote the state directory, put ");
    let content = content.and_then(|rest| rest.split_once(" into ")).unwrap().0;
    std::fs::write(dir.join("FORMAT"), content).unwrap();
    Store::open(&Storage::default(), &dir, Access::Read).map(drop).unwrap();
    let home = root.path().join("home");
    std::fs::create_dir(&home).unwrap();
    std::fs::write(home.join("thesis.tex"), "").unwrap();
    assert!(matches!(
        Store::open(&Storage::default(), &home, Access::Run { run_id: "c".into() }),
        Err(StoreError::Foreign { .. })
    ));
    assert_eq!(names(&home).len(), 1);
}

/// Whatever a process that follows a run does, and however late: what counts is written by who has the lock.
#[test]
fn who_follows_a_run_commits_nothing_and_the_run_commits_what_it_placed() {
    let dir = TempDir::new().unwrap();
    let store = run(dir.path());
    let leading = writer(&store);
    let follow = Access::Follow { run_id: "test".into() };
    let following = Store::open(&Storage::default(), dir.path(), follow).unwrap();
    let follower = following.follow_writer(&recipe(1), []).unwrap();
    let place = |partition| follower.place(vec![write(&follower, partition, 1, 3).unwrap()]);
    let committed = || -> Vec<String> {
        let records = read(dir.path()).records(&recipe(1)).unwrap();
        assert!(records.lost().is_empty());
        records.partitions().map(ToString::to_string).collect()
    };
    let records = place("a").unwrap();
    assert_eq!(committed(), Vec::<String>::new());
    // Together with what process 0 has written itself, in one group; once more it costs nothing.
    let own = vec![write(&leading, "own", 1, 3).unwrap()];
    assert_eq!(leading.commit_with(own, &records).unwrap().len(), 2);
    assert_eq!(leading.commit_with(Vec::new(), &records).unwrap(), records);
    assert_eq!(committed(), ["a", "own"]);
    let groups = dir.path().join("artifacts").join(recipe(1).short()).join("records");
    assert_eq!(std::fs::read_dir(&groups).unwrap().count(), 1);

    // Process 0 is lost before it commits, and the next run begins.
    place("b").unwrap();
    drop((leading, store));
    assert!(matches!(place("c"), Err(StoreError::NotHeld { .. })));
    let next = Store::open(&Storage::default(), dir.path(), Access::Run { run_id: "next".into() }).unwrap();
    assert!(matches!(place("d"), Err(StoreError::Held { .. })));
    let leading = writer(&next);
    leading.commit(vec![write(&leading, "e", 1, 3).unwrap()]).unwrap();
    leading.finish([]).unwrap();
    assert_eq!(committed(), ["a", "e", "own"]);
}

#[test]
fn readers_beside_a_writer_never_see_less_than_before() {
    let dir = TempDir::new().unwrap();
    let store = run(dir.path());
    let writer = writer(&store);
    let done = std::sync::atomic::AtomicBool::new(false);
    /// Ends the reader, also if the writer fails.
    struct Ends<'a>(&'a std::sync::atomic::AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, std::sync::atomic::Ordering::Release);
        }
    }
    std::thread::scope(|scope| {
        let ends = Ends(&done);
        let reader = scope.spawn(|| {
            let (mut most, mut looks) = (0, 0);
            while !done.load(std::sync::atomic::Ordering::Acquire) {
                let records = read(dir.path()).records(&recipe(1)).unwrap();
                assert!(records.lost().is_empty());
                assert!(records.partitions().count() >= most);
                most = records.partitions().count();
                looks += 1;
            }
            looks
        });
        for n in 0..120 {
            writer
                .commit(vec![write(&writer, &format!("p{n:03}"), n, 1).unwrap()])
                .unwrap();
            if n % 5 == 0 {
                writer.finish([]).unwrap();
            }
        }
        drop(ends);
        assert!(reader.join().unwrap() > 0);
    });
}

#[test]
fn the_store_may_be_used_from_any_thread() {
    fn shared<T: Send + Sync>() {}
    shared::<Store>();
    shared::<ArtifactWriter>();
    shared::<Pending>();
    shared::<Artifact>();
    shared::<RejectSet>();
    fn sent<T: Send>() {}
    sent::<Batches>();
}

#[test]
fn what_the_last_runs_did_not_plan_with_is_collected() {
    let dir = TempDir::new().unwrap();
    let store = run(dir.path());
    let planned = |run: &str, recipes: &[u8]| {
        let folder = store.create_run_folder(run).unwrap();
        let stages: Vec<_> = recipes
            .iter()
            .map(|n| serde_json::json!({ "recipe": recipe(*n) }))
            .collect();
        std::fs::write(
            folder.join("plan.json"),
            serde_json::json!({ "version": 1, "stages": stages }).to_string(),
        )
        .unwrap();
    };
    let commit = |n: u8| {
        let writer = store.writer(&recipe(n), &serde_json::Value::Null).unwrap();
        writer
            .commit(vec![write(&writer, "a", u64::from(n), 5).unwrap()])
            .unwrap();
    };
    (1..=3).for_each(commit);
    // Nobody says what they are for.
    assert_eq!(store.collect_garbage(5, false).unwrap(), GarbageSummary::default());
    planned("20260101-a", &[1]);
    planned("20260102-b", &[2, 9]);
    planned("20260103-c", &[2]);
    store.create_run_folder("20260104-d").unwrap();
    assert!(matches!(
        read(dir.path()).collect_garbage(5, false),
        Err(StoreError::ReadOnly { .. })
    ));
    {
        let _writer = store.writer(&recipe(1), &serde_json::Value::Null).unwrap();
        assert!(matches!(store.collect_garbage(5, false), Err(StoreError::Busy { .. })));
    }
    let there = |n: u8| dir.path().join("artifacts").join(recipe(n).short()).exists();
    let seen = store.collect_garbage(3, true).unwrap();
    assert_eq!((seen.artifacts, seen.runs, seen.kept), (2, 1, 1));
    assert!(seen.bytes > 0 && there(1) && there(3) && store.runs().unwrap().len() == 4);
    assert_eq!(store.collect_garbage(3, false).unwrap(), seen);
    assert!(!there(1) && there(2) && !there(3));
    assert_eq!(store.runs().unwrap(), ["20260102-b", "20260103-c", "20260104-d"]);
    assert_eq!(store.records(&recipe(2)).unwrap().partitions().count(), 1);
    // A plan that cannot be read may be one that needs everything.
    std::fs::write(dir.path().join("runs/20260103-c/plan.json"), "{").unwrap();
    assert!(
        store
            .collect_garbage(3, false)
            .unwrap_err()
            .to_string()
            .contains("plan.json")
    );
}

#[test]
fn the_last_complete_run_is_kept_however_many_came_after_it() {
    let dir = TempDir::new().unwrap();
    let store = run(dir.path());
    let writer = store.writer(&recipe(1), &serde_json::Value::Null).unwrap();
    let records = ["a", "b"].map(|partition| {
        let committed = writer.commit(vec![write(&writer, partition, 1, 5).unwrap()]).unwrap();
        Arc::clone(&committed[0])
    });
    drop(writer);
    // An older complete run, the last one, and runs about one partition.
    for (run, had) in [("1", 2), ("2", 2), ("3", 1), ("4", 1), ("5", 1)] {
        let folder = store.create_run_folder(run).unwrap();
        let plan = serde_json::json!({ "version": 1, "stages": [{ "stage": "s", "recipe": recipe(1) }] });
        std::fs::write(folder.join("plan.json"), plan.to_string()).unwrap();
        let snapshots = store.snapshot_writer(run, Path::new("/p.yaml")).unwrap();
        snapshots
            .note("s", "toy", &recipe(1), had == 2, &records[..had])
            .unwrap();
        snapshots.flush().unwrap();
    }
    assert_eq!(store.collect_garbage(2, false).unwrap().runs, 2);
    assert_eq!(store.runs().unwrap(), ["2", "4", "5"]);
    let last = store
        .last_complete_snapshot(Path::new("/p.yaml"), "s", "toy", &mut |_| ())
        .unwrap();
    assert_eq!(last.unwrap().keys.len(), 2);
    assert_eq!(store.records(&recipe(1)).unwrap().partitions().count(), 2);
    // What a run had of which the notes are damaged is not known: all stays.
    let snapshots = dir.path().join("runs/2/snapshots.jsonl");
    let mut text = std::fs::read(&snapshots).unwrap();
    let last = text.len() - 30;
    text[last] ^= 1;
    std::fs::write(&snapshots, text).unwrap();
    let collected = store.collect_garbage(9, false).unwrap();
    assert_eq!((collected.damaged, collected.partitions), (1, 0));
    assert_eq!(store.records(&recipe(1)).unwrap().partitions().count(), 2);
}

#[test]
fn errors_say_what_to_do() {
    let full = StoreError::io("write", Path::new("/x/.flow/a"), std::io::ErrorKind::StorageFull.into());
    assert!(full.to_string().contains("/x/.flow/a") && full.help().unwrap().contains("free some space"));
    let denied = StoreError::io(
        "write",
        Path::new("/x/.flow/a"),
        std::io::ErrorKind::PermissionDenied.into(),
    );
    assert!(denied.help().unwrap().contains("/x/.flow"));
    let external =
        parquet::errors::ParquetError::External(Box::new(std::io::Error::from(std::io::ErrorKind::StorageFull)));
    assert!(
        matches!(StoreError::parquet_written(Path::new("a"), external), StoreError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull)
    );
}
