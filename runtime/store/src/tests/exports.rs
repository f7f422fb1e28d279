//! Exports are complete, or detectably incomplete.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use flow_storage::Storage;
use tempfile::TempDir;

use super::super::crash::{Crash, Remains};
use super::super::*;
use super::key;

/// The files below a folder, but the one that says which of them sets have put there.
fn names(folder: &Path) -> BTreeSet<String> {
    let mut names = super::names(folder);
    names.remove(".flow-files");
    names
}

pub(super) fn export(folder: &Path, version: u64, names: &[&str], files: Files) -> Result<(), StoreError> {
    let mut set = ExportSet::begin_with(folder, "flow.json", key(version), "test", files)?;
    for name in names {
        let path = set.file(name)?;
        std::fs::write(&path, format!("{name} {version}")).unwrap();
    }
    set.finish().map(|_| ())
}

#[test]
fn an_export_is_whole_or_visibly_not() {
    let root = TempDir::new().unwrap();
    let folder = root.path().join("deep/out");
    let sources = SourceDigests::default();
    let standing = |version| ExportSet::status(&folder, "flow.json", &key(version), &sources).unwrap();
    assert_eq!(standing(1), ExportStatus::Missing);
    export(
        &folder,
        1,
        &["train.parquet", "below/a.bin", "gone.txt"],
        Files::default(),
    )
    .unwrap();
    assert_eq!(
        (standing(1), standing(2)),
        (ExportStatus::Whole, ExportStatus::Outdated)
    );
    let made = ["flow.json", "gone.txt", "below/a.bin", "train.parquet"].map(String::from);
    assert_eq!(names(&folder), BTreeSet::from(made));
    // Foreign files stay, and so do permissions; files that the new set does not have are removed.
    let mode = |name: &str| std::fs::metadata(folder.join(name)).unwrap().permissions().mode() & 0o777;
    std::fs::set_permissions(folder.join("train.parquet"), std::fs::Permissions::from_mode(0o640)).unwrap();
    std::fs::write(folder.join("notes.txt"), "mine").unwrap();
    export(&folder, 2, &["train.parquet", "below/a.bin"], Files::default()).unwrap();
    assert_eq!(
        names(&folder),
        BTreeSet::from(["flow.json", "below/a.bin", "notes.txt", "train.parquet"].map(String::from))
    );
    assert_eq!(
        std::fs::read_to_string(folder.join("train.parquet")).unwrap(),
        "train.parquet 2"
    );
    assert_eq!(mode("train.parquet"), 0o640);
    std::fs::write(folder.join("below/a.bin"), "below/a.bin 3").unwrap();
    assert_eq!(
        standing(2),
        ExportStatus::Changed {
            file: "below/a.bin".into()
        }
    );
    std::fs::remove_file(folder.join("below/a.bin")).unwrap();
    assert_eq!(
        standing(2),
        ExportStatus::Changed {
            file: "below/a.bin".into()
        }
    );
    std::fs::write(folder.join("flow.json"), "{").unwrap();
    assert_eq!(
        standing(2),
        ExportStatus::Changed {
            file: "flow.json".into()
        }
    );
    std::fs::write(folder.join("flow.json"), "{\"version\":7}").unwrap();
    assert!(matches!(
        export(&folder, 2, &["x"], Files::default()),
        Err(StoreError::Newer { found: 7, .. })
    ));
    std::fs::remove_file(folder.join("flow.json")).unwrap();

    let mut set = ExportSet::begin(&Storage::default(), &folder, "flow.json", key(3), "one", Path::new("")).unwrap();
    assert!(
        ExportSet::begin(&Storage::default(), &folder, "flow.json", key(3), "two", Path::new(""))
            .err()
            .unwrap()
            .is_held()
    );
    for name in [
        "../x",
        "/etc/passwd",
        "",
        ".",
        "a/../../b",
        "flow.json",
        ".flow-lock",
        ".flow-files",
        "a/",
    ] {
        assert!(matches!(set.file(name), Err(StoreError::Name { .. })), "{name}");
    }
    std::fs::write(set.file("new.txt").unwrap(), "x").unwrap();
    assert!(set.file("new.txt").is_err() && set.file("./new.txt").is_err());
    // Asked for and not written: an error, and nothing has changed.
    set.file("unwritten.txt").unwrap();
    let before = std::fs::read(folder.join("train.parquet")).unwrap();
    assert!(set.finish().is_err());
    assert_eq!(std::fs::read(folder.join("train.parquet")).unwrap(), before);
    assert_eq!(
        names(&folder),
        BTreeSet::from(["notes.txt", "train.parquet"].map(String::from))
    );
    // A folder in the place of a file is found before anything is touched.
    export(&folder, 4, &["train.parquet"], Files::default()).unwrap();
    std::fs::create_dir(folder.join("blocked")).unwrap();
    assert!(export(&folder, 5, &["blocked", "train.parquet"], Files::default()).is_err());
    assert_eq!(standing(4), ExportStatus::Whole);
}

/// The child of the test below: begins an export and is killed in the middle of it.
#[test]
fn export_child() {
    let Ok(folder) = std::env::var("FLOW_TEST_EXPORT_CHILD") else {
        return;
    };
    let mut set = ExportSet::begin(
        &Storage::default(),
        Path::new(&folder),
        "flow.json",
        key(1),
        "killed",
        Path::new(""),
    )
    .unwrap();
    std::fs::write(set.file("a").unwrap(), "half").unwrap();
    signal_hook::low_level::raise(signal_hook::consts::SIGKILL).unwrap();
}

#[test]
fn an_export_removes_what_a_crash_left_and_nothing_else() {
    let root = TempDir::new().unwrap();
    let folder = root.path();
    let mine = [
        ".tmp-mine/notes.txt",
        ".tmp-export-1/a.parquet",
        ".tmp-export-0123456789abcdef/b.parquet",
        ".tmp-12-3",
        ".tmp-x",
    ];
    for name in mine {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "mine").unwrap();
    }
    let expected = |more: &[&str]| {
        mine.iter()
            .chain(more)
            .map(|name| name.to_string())
            .collect::<BTreeSet<_>>()
    };
    export(folder, 1, &["a"], Files::default()).unwrap();
    assert_eq!(names(folder), expected(&["a", "flow.json"]));
    // After a kill, temporary files remain until the next export removes them.
    let kill = || {
        let killed = std::process::Command::new(std::env::current_exe().unwrap())
            .args(
                ["--exact", concat!(module_path!(), "::export_child")]
                    .map(|arg| arg.trim_start_matches(concat!(env!("CARGO_CRATE_NAME"), "::"))),
            )
            .env("FLOW_TEST_EXPORT_CHILD", folder)
            .output()
            .unwrap();
        assert!(!killed.status.success());
        let left = names(folder);
        let more = left.difference(&expected(&["a", "flow.json", ".flow-lock"])).count();
        assert!(more == 1 && left.contains(".flow-lock"), "{left:?}");
    };
    kill();
    // The set is whole: the next run makes none.
    ExportSet::clean_up(folder, "next");
    assert_eq!(names(folder), expected(&["a", "flow.json"]));
    kill();
    export(folder, 2, &["a"], Files::default()).unwrap();
    assert_eq!(names(folder), expected(&["a", "flow.json"]));
    // A lock file that somebody else filled does not point us at the user's files.
    let planted =
        r#"{"host":"h","pid":1,"run":"r","temporary":["../x",".tmp-mine",".tmp-export-../a","a",".tmp-12-3"]}"#;
    std::fs::write(folder.join(".flow-lock"), planted).unwrap();
    export(folder, 3, &["a"], Files::default()).unwrap();
    assert_eq!(names(folder), expected(&["a", "flow.json"]));
}

#[test]
fn a_crash_in_an_export_never_passes_for_a_whole_one() {
    for (remains, is_first) in [Remains::All, Remains::Flushed]
        .into_iter()
        .flat_map(|r| [(r, false), (r, true)])
    {
        for at in 0.. {
            let dir = TempDir::new().unwrap();
            let folder = dir.path().join("out");
            if !is_first {
                export(&folder, 1, &["a", "b", "c"], Files::default()).unwrap();
            }
            let crash = Crash::after(at);
            let done = export(&folder, 2, &["a", "b", "d"], Files::stopping(&crash));
            crash.settle(remains);
            let sources = SourceDigests::default();
            for version in [1, 2] {
                if ExportSet::status(&folder, "flow.json", &key(version), &sources).unwrap() == ExportStatus::Whole {
                    for name in if version == 1 { ["a", "b", "c"] } else { ["a", "b", "d"] } {
                        assert_eq!(
                            std::fs::read_to_string(folder.join(name)).unwrap(),
                            format!("{name} {version}")
                        );
                    }
                }
            }
            // Readers that only check `flow.json` get the correct state too.
            if let Ok(text) = std::fs::read(folder.join("flow.json")) {
                let manifest: serde_json::Value = serde_json::from_slice(&text).unwrap();
                for (name, entry) in manifest["files"].as_object().unwrap() {
                    let digest = Digest::of(&std::fs::read(folder.join(name)).unwrap()).to_hex();
                    assert_eq!(entry["digest"], digest.as_str(), "{name} at step {at}");
                }
            }
            if done.is_ok() {
                assert_eq!(
                    ExportSet::status(&folder, "flow.json", &key(2), &sources).unwrap(),
                    ExportStatus::Whole
                );
                assert!(at > 10, "{at}");
                break;
            }
            export(&folder, 2, &["a", "b", "d"], Files::default()).unwrap();
            assert_eq!(
                ExportSet::status(&folder, "flow.json", &key(2), &sources).unwrap(),
                ExportStatus::Whole
            );
            assert!(!names(&folder).iter().any(|name| name.contains(".tmp")));
        }
    }
}

fn rows_file(path: &Path, rows: u32) {
    use arrow::array::{ArrayRef, RecordBatch, UInt32Array};
    let numbers: ArrayRef = std::sync::Arc::new(UInt32Array::from_iter_values(0..rows));
    let batch = RecordBatch::try_from_iter([("number", numbers)]).unwrap();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

#[test]
fn a_set_that_would_shrink_is_seen_before_it_is_in_place() {
    let root = TempDir::new().unwrap();
    let folder = root.path();
    let begin = |version, rows: [u32; 2]| {
        let mut set = ExportSet::begin(
            &Storage::default(),
            folder,
            "flow.json",
            key(version),
            "test",
            Path::new(""),
        )
        .unwrap();
        for (name, rows) in ["a.parquet", "b.parquet"].into_iter().zip(rows) {
            rows_file(&set.file(name).unwrap(), rows);
        }
        let names = ["a.parquet", "b.parquet"].map(String::from).to_vec();
        set.guard_rows("a and b", names, rows.iter().map(|&rows| u64::from(rows)).sum(), 0.5);
        set
    };
    let first = begin(1, [150, 50]);
    assert_eq!(first.shrunk(), []);
    first.finish().unwrap();
    assert_eq!(begin(2, [0, 100]).shrunk(), []);
    let shrunk = |now| Shrunk {
        what: "a and b",
        before: 200,
        now,
    };
    assert_eq!(begin(2, [0, 99]).shrunk(), [shrunk(99)]);
    assert_eq!(begin(2, [0, 0]).shrunk(), [shrunk(0)]);
    // Also where an export was cut short, or somebody removed it.
    std::fs::remove_file(folder.join("flow.json")).unwrap();
    assert_eq!(begin(2, [0, 99]).shrunk(), [shrunk(99)]);
    // What was not put in place is not there.
    begin(2, [60, 0]).finish().unwrap();
    assert_eq!(begin(3, [0, 0]).shrunk(), [], "a trial of 60 rows is not guarded");
}

#[test]
fn rows_that_were_noted_of_a_file_are_guarded() {
    let root = TempDir::new().unwrap();
    let begin = |version, rows| {
        let mut set = ExportSet::begin(
            &Storage::default(),
            root.path(),
            "flow.json",
            key(version),
            "test",
            Path::new(""),
        )
        .unwrap();
        std::fs::write(set.file("lines.jsonl.gz").unwrap(), b"packed").unwrap();
        set.note_rows("lines.jsonl.gz", rows);
        set.guard_rows("lines", vec!["lines.jsonl.gz".into()], rows, 0.5);
        set
    };
    begin(1, 200).finish().unwrap();
    assert_eq!(begin(2, 100).shrunk(), []);
    let shrunk = Shrunk {
        what: "lines",
        before: 200,
        now: 99,
    };
    assert_eq!(begin(2, 99).shrunk(), [shrunk]);
}

#[test]
fn a_set_of_something_else_is_not_replaced() {
    let root = TempDir::new().unwrap();
    let folder = root.path().join("out");
    export(&folder, 1, &["train.parquet", "val.parquet"], Files::default()).unwrap();
    let before = names(&folder);
    let refused = |names: &[&str]| export(&folder, 2, names, Files::default()).unwrap_err();
    let error = refused(&["report.html", "scores.json"]);
    assert!(
        matches!(&error, StoreError::OtherSet { found, .. } if found == "train.parquet"),
        "{error}"
    );
    assert_eq!(names(&folder), before);
    let text = std::fs::read_to_string(folder.join("train.parquet")).unwrap();
    assert_eq!(text, "train.parquet 1");
    // One that has a file of it is the set as it is made now.
    export(&folder, 2, &["train.parquet", "test.parquet"], Files::default()).unwrap();

    // A file of the name that is not a list of a set's files; one of ours that was cut short or edited is rewritten.
    let list = folder.join("flow.json");
    std::fs::write(&list, "{\"mine\":1}").unwrap();
    let error = refused(&["train.parquet"]);
    assert!(matches!(error, StoreError::OtherSet { .. }), "{error}");
    assert_eq!(std::fs::read_to_string(&list).unwrap(), "{\"mine\":1}");
    for damaged in ["{\"version\":1,\"files\":{}", "{\"version\":1,\"files\":7}"] {
        std::fs::write(&list, damaged).unwrap();
        export(&folder, 3, &["train.parquet"], Files::default()).unwrap();
    }
}

/// What a set has not written is not replaced, whatever became of its list.
#[test]
fn files_of_others_are_never_replaced() {
    let root = TempDir::new().unwrap();
    let folder = root.path().join("out");
    let at = |name: &str| folder.join(name);
    let text = |name: &str| std::fs::read_to_string(at(name)).unwrap();
    let refused = |names: &[&str], expected: &str| {
        let before = super::names(&folder);
        let error = export(&folder, 9, names, Files::default()).unwrap_err();
        assert!(
            matches!(&error, StoreError::OtherSet { found, .. } if found == expected),
            "{error}"
        );
        assert_eq!(super::names(&folder), before);
    };
    std::fs::create_dir_all(at("deep")).unwrap();
    std::fs::write(at("deep/b"), "mine").unwrap();
    refused(&["a", "deep/b"], "deep/b");
    // Also where a run was killed before it put anything there.
    std::fs::write(at(".flow-lock"), "").unwrap();
    let error = export(&folder, 9, &["a", "deep/b"], Files::default()).unwrap_err();
    assert!(matches!(error, StoreError::OtherSet { .. }), "{error}");
    assert_eq!(text("deep/b"), "mine");
    std::fs::remove_file(at("deep/b")).unwrap();
    export(&folder, 1, &["a", "deep/b"], Files::default()).unwrap();
    // Beside a set: what its list does not name.
    std::os::unix::fs::symlink("nowhere", at("c")).unwrap();
    refused(&["a", "c"], "c");
    // The list was removed by hand: the set is written again, and nothing else is replaced.
    std::fs::remove_file(at("flow.json")).unwrap();
    refused(&["a", "c"], "c");
    export(&folder, 2, &["a", "deep/b"], Files::default()).unwrap();
    // What is no more of the set, is changed, and so is left: it is its user's now.
    std::fs::write(at("deep/b"), "mine").unwrap();
    export(&folder, 3, &["a"], Files::default()).unwrap();
    refused(&["a", "deep/b"], "deep/b");
    std::fs::remove_file(at("flow.json")).unwrap();
    refused(&["a", "deep/b"], "deep/b");
    // Another set of the folder has files of its own.
    let mut other = ExportSet::begin(
        &Storage::default(),
        &folder,
        "other.flow.json",
        key(1),
        "test",
        Path::new(""),
    )
    .unwrap();
    std::fs::write(other.file("a").unwrap(), "other").unwrap();
    assert!(other.finish().is_err());
    assert_eq!(text("a"), "a 3");
    // As an older flow left it: the list alone says it.
    export(&folder, 4, &["a"], Files::default()).unwrap();
    std::fs::remove_file(at(".flow-files")).unwrap();
    export(&folder, 5, &["a"], Files::default()).unwrap();
    for damaged in [&b"{"[..], b"{\"mine\":1}", b""] {
        std::fs::write(at(".flow-files"), damaged).unwrap();
        std::fs::remove_file(at("flow.json")).unwrap();
        refused(&["a"], "a");
        std::fs::remove_file(at("a")).unwrap();
        export(&folder, 6, &["a"], Files::default()).unwrap();
    }
    std::fs::write(at(".flow-files"), "{\"version\":7}").unwrap();
    assert!(matches!(
        export(&folder, 6, &["a"], Files::default()),
        Err(StoreError::Newer { found: 7, .. })
    ));
}

/// A folder that may be of a set is refused before the set is written.
#[test]
fn folders_of_others_are_refused_at_once() {
    let root = TempDir::new().unwrap();
    let folder = root.path();
    let begin = || ExportSet::begin(&Storage::default(), folder, "flow.json", key(1), "test", Path::new("")).unwrap();
    let refuse = |set: &ExportSet| set.refuse_others(["data", "README.md"].map(String::from));
    std::fs::create_dir(folder.join("data")).unwrap();
    refuse(&begin()).unwrap();
    std::fs::write(folder.join("data/mine"), "").unwrap();
    assert!(refuse(&begin()).is_err());
    std::fs::remove_file(folder.join("data/mine")).unwrap();
    let mut set = begin();
    for name in ["data/a", "README.md"] {
        std::fs::write(set.file(name).unwrap(), "").unwrap();
    }
    set.finish().unwrap();
    // Somebody's file beside those of a set, unless readers leave it out.
    std::fs::write(folder.join("data/.mine"), "").unwrap();
    std::fs::create_dir(folder.join("data/deep")).unwrap();
    for list in ["none", "flow.json"] {
        let _ = std::fs::remove_file(folder.join(list));
        refuse(&begin()).unwrap();
        std::fs::write(folder.join("data/deep/mine"), "").unwrap();
        let refused = refuse(&begin()).unwrap_err().to_string();
        assert!(refused.contains("data/deep/mine"), "{refused}");
        std::fs::remove_file(folder.join("data/deep/mine")).unwrap();
    }
    std::fs::remove_file(folder.join(".flow-files")).unwrap();
    assert!(refuse(&begin()).is_err());
}

#[test]
fn a_file_is_told_by_the_set_that_it_is_of() {
    let root = TempDir::new().unwrap();
    let folder = root.path().join("out");
    export(&folder, 1, &["a", "b"], Files::default()).unwrap();
    let of = |name| file_in_set(&Storage::default(), &folder, "flow.json", name).unwrap();
    std::fs::write(folder.join("mine"), "x").unwrap();
    assert_eq!([of("a"), of("mine")], [FileInSet::AsWritten, FileInSet::Other]);
    std::fs::write(folder.join("b"), "b 2").unwrap();
    assert_eq!([of("a"), of("b")], [FileInSet::AsWritten, FileInSet::Changed]);
    std::fs::remove_file(folder.join("flow.json")).unwrap();
    assert_eq!(of("a"), FileInSet::NoSet);
    std::fs::write(folder.join(".flow-lock"), "").unwrap();
    assert_eq!(of("a"), FileInSet::CutShort);
    std::fs::write(folder.join("flow.json"), "{").unwrap();
    assert!(file_in_set(&Storage::default(), &folder, "flow.json", "a").is_err());
}
