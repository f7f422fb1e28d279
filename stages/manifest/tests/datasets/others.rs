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

/// Files of others that come into the folders of a set later are refused by the next set, which changes nothing. Files with names that
/// begin with a dot are let be.
#[test]
fn files_of_others_beside_a_set_are_refused_by_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let [rows, others] = [read(&layout("lhotse"), ""), read(&layout("hub"), "train")];
    for (number, (format, mine)) in [
        ("huggingface", "data/of-others.parquet"),
        ("huggingface", "data/train-00007-of-00009.parquet"),
        ("huggingface", "data/more/notes.txt"),
        ("shar", "train/of-others.tar"),
        ("shar", "train/recording.000009.tar"),
    ]
    .into_iter()
    .enumerate()
    {
        let out = folder.path().join(number.to_string());
        write_as(format, &[("train", &rows)], &out, "").unwrap();
        let hidden = out.join(Path::new(mine).parent().unwrap()).join(".notes");
        fs::create_dir_all(hidden.parent().unwrap()).unwrap();
        fs::write(&hidden, "mine").unwrap();
        write_as(format, &[("train", &rows)], &out, "").unwrap();
        fs::write(out.join(mine), "mine").unwrap();
        for has_list in [true, false] {
            if !has_list {
                fs::remove_file(out.join("flow.json")).unwrap();
            }
            let before = files(&out);
            for rows in [&rows, &others] {
                let error = write_as(format, &[("train", rows)], &out, "").unwrap_err();
                let said = format!("{error:?}");
                assert!(said.contains(mine), "{format}, {mine}: {said}");
                assert!(files(&out) == before, "{format}, {mine}");
            }
        }
        fs::remove_file(out.join(mine)).unwrap();
        write_as(format, &[("train", &rows)], &out, "").unwrap();
    }
}

fn is_file(folder: &Path, name: &str) -> bool {
    folder.join(name).is_file()
}
