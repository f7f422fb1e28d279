//! Sets in object storage, read by the names of their folders.

use std::fs;
use std::path::{Path, PathBuf};

use flow_kind::StageError;
use flow_runtime::harness::Output;
use flow_storage::Storage;
use flow_storage_testing::TestServer;

use super::data::{Row, layout, read, read_from, rows_in, write_as, write_to};

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (from, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        match from.is_dir() {
            true => copy_folder(&from, &to),
            false => drop(fs::copy(&from, &to).unwrap()),
        }
    }
}

/// Rows with their samples, or the message of the stage.
fn shown(storage: &Storage, read: Result<Output, StageError>) -> Result<Vec<Row>, String> {
    match read {
        Ok(output) => Ok(rows_in(storage, &output)),
        Err(error) => Err(format!("{error:?}")),
    }
}

/// What is below each root on disk is what is below it in a bucket: of a copy of the folder, of a set that was written there, and of
/// a folder that was copied out of the bucket.
#[test]
fn sets_in_a_bucket_are_found_by_their_roots() {
    let disk = tempfile::tempdir().unwrap();
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("bucket")).unwrap();
    let server = TestServer::start(root.path()).unwrap();
    let storage = server.storage();
    let rows = read(&layout("lhotse"), "");
    let ids: &[&str] = &["segment_id=segment_id"];
    for (number, (format, more, columns, names)) in [
        ("parquet", "", &[][..], vec!["", "train_manifest_v2.parquet"]),
        ("parquet", ", jsonl: true", &[], vec!["", "train_manifest_v2.jsonl"]),
        (
            "huggingface",
            "",
            ids,
            vec!["", "data", "data/train-00000-of-00001.parquet"],
        ),
        ("lhotse", "", &[], vec!["", "cuts_train.jsonl.gz"]),
        ("shar", "", &[], vec!["", "train"]),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("{number}-{format}");
        let out = disk.path().join(&name);
        write_as(format, &[("train", &rows), ("val", &rows)], &out, more).unwrap();
        copy_folder(&out, &root.path().join("bucket/copied").join(&name));
        let written = format!("s3://bucket/written/{name}");
        write_to(
            &storage,
            format,
            &[("train", &rows), ("val", &rows)],
            Path::new(&written),
            more,
        )
        .unwrap();
        let back = disk.path().join("back").join(&name);
        copy_folder(&root.path().join("bucket/written").join(&name), &back);
        let roots: [PathBuf; 3] = [format!("s3://bucket/copied/{name}").into(), written.into(), back];
        for below in names {
            let read =
                |storage: &Storage, root: &Path| shown(storage, read_from(storage, &root.join(below), "", columns));
            let expected = read(&storage, &out);
            for root in &roots {
                let found = read(&storage, root);
                match (&found, &expected) {
                    (Ok(found), Ok(expected)) => assert!(found == expected, "{}, {below}", root.display()),
                    (Err(found), Err(_)) => assert!(found.contains(&root.display().to_string()), "{found}"),
                    _ => panic!("{}, {below}: {:?}", root.display(), found.err().or(expected.err())),
                }
            }
            // The folder of manifests alone has several.
            assert_eq!(
                expected.is_err(),
                below.is_empty() && format == "parquet",
                "{name} {below}"
            );
        }
    }
}

/// A set in a bucket is checked as one on disk: what was uploaded in other parts is known by its
/// digest, what is of another set is refused.
#[test]
fn copies_of_sets_are_checked() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("bucket")).unwrap();
    let server = TestServer::start(root.path()).unwrap();
    let storage = server.storage();
    let rows = read(&layout("lhotse"), "");
    let out = root.path().join("bucket/out");
    write_to(
        &storage,
        "parquet",
        &[("train", &rows)],
        Path::new("s3://bucket/out"),
        "",
    )
    .unwrap();
    let list = fs::read_to_string(out.join("flow.json")).unwrap();
    let set: serde_json::Value = serde_json::from_str(&list).unwrap();
    let file = out
        .join(set["prefix"].as_str().unwrap())
        .join("train_manifest_v2.parquet");
    let bytes = fs::read(&file).unwrap();
    let (bucket, disk) = ("s3://bucket/out", out.to_str().unwrap());
    let read = |top: &str| {
        storage.forget_all();
        let path = Path::new(top).join("train_manifest_v2.parquet");
        shown(&storage, read_from(&storage, &path, "", &[])).map(|rows| rows.len())
    };
    assert_eq!((read(bucket), read(disk)), (Ok(2), Ok(2)));
    let mut copied = set.clone();
    for file in copied["files"].as_object_mut().unwrap().values_mut() {
        file["etag"] = "of-two-parts".into();
    }
    fs::write(out.join("flow.json"), copied.to_string()).unwrap();
    assert_eq!((read(bucket), read(disk)), (Ok(2), Ok(2)));
    let mut other = bytes.clone();
    other[bytes.len() / 2] ^= 1;
    fs::write(&file, &other).unwrap();
    for top in [bucket, disk] {
        let error = read(top).unwrap_err();
        assert!(error.contains("it is not as the flow.json beside it says"), "{error}");
    }
    fs::write(&file, &bytes).unwrap();
    fs::remove_file(out.join("flow.json")).unwrap();
    for top in [bucket, disk] {
        assert!(read(top).is_err());
        let inner = format!("{top}/{}", set["prefix"].as_str().unwrap());
        assert!(read(&inner).unwrap_err().contains("its set was not written to the end"));
    }
}
