//! Files of others in the folder of a set.

use std::fs;
use std::path::Path;

use super::data::{files, layout, read, write_as};

/// Each format refuses a folder that has a file of others with the name of one of its own, or one that may be of a dataset, and changes
/// nothing there. A set whose `flow.json` was removed is written again.
#[test]
fn files_of_others_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let rows = read(&layout("lhotse"), "");
    for (number, (format, more, mine, expected)) in [
        ("parquet", "", "train_manifest_v2.parquet", "train_manifest_v2.parquet"),
        ("parquet", "", "statistics.json", "statistics.json"),
        ("parquet", "", "rejects.parquet", "rejects.parquet"),
        (
            "parquet",
            ", jsonl: true",
            "train_manifest_v2.jsonl",
            "train_manifest_v2.jsonl",
        ),
        ("huggingface", "", "README.md", "README.md"),
        ("huggingface", "", "data/of-others.parquet", "data"),
        ("lhotse", "", "cuts_train.jsonl.gz", "cuts_train.jsonl.gz"),
        ("shar", "", "train/of-others.tar", "train"),
    ]
    .into_iter()
    .enumerate()
    {
        let out = folder.path().join(number.to_string());
        let write = || write_as(format, &[("train", &rows)], &out, more);
        let mine = out.join(mine);
        fs::create_dir_all(mine.parent().unwrap()).unwrap();
        fs::write(&mine, "mine").unwrap();
        let error = write().unwrap_err();
        let said = format!("{error:?}");
        assert!(said.contains(expected) && said.contains("`out`"), "{format}: {said}");
        let left = files(&out);
        assert!(
            left.len() == 1 && fs::read(&mine).unwrap() == b"mine",
            "{format}: {left:?}"
        );
        fs::remove_file(&mine).unwrap();
        write().unwrap();
        let written = files(&out);
        fs::remove_file(out.join("flow.json")).unwrap();
        write().unwrap();
        assert!(files(&out) == written && is_file(&out, "flow.json"), "{format}");
    }
}

fn is_file(folder: &Path, name: &str) -> bool {
    folder.join(name).is_file()
}
