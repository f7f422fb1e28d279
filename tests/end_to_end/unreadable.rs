//! Files that are there and cannot be read, and names that a terminal would obey.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use crate::binary::{RejectRow, Workplace, expect_code, read_rejects, stderr};

/// Files of the corpus, and what is put in their places. (Permissions do not bind root, whom tests may run as.)
const DAMAGED: [(&str, &str); 5] = [
    ("hi/hi_0000/hi_0000.tar", "folder"),
    ("te/te_0000/te_0000.tar", "loop"),
    // A plain file by its looks, of which nothing can be read.
    ("en/en_0000/en_0000.tar", "input/output error"),
    ("ta/ta_0000/metadata.parquet", "loop"),
    ("mr/mr_0000/audio_index.parquet", "folder"),
];

fn saved(place: &Workplace, name: &str) -> PathBuf {
    place.path(&name.replace('/', "-"))
}

fn damage(place: &Workplace) {
    for (name, how) in DAMAGED {
        let path = place.shards.join(name);
        std::fs::rename(&path, saved(place, name)).unwrap();
        match how {
            "folder" => std::fs::create_dir(&path).unwrap(),
            "loop" => symlink(&path, &path).unwrap(),
            _ => symlink("/proc/self/mem", &path).unwrap(),
        }
    }
}

fn repair(place: &Workplace) {
    for (name, how) in DAMAGED {
        let path = place.shards.join(name);
        match how {
            "folder" => std::fs::remove_dir(&path).unwrap(),
            _ => std::fs::remove_file(&path).unwrap(),
        }
        std::fs::rename(saved(place, name), &path).unwrap();
    }
}

/// The rejects of whole partitions, by partition.
fn of_shards(place: &Workplace) -> BTreeMap<String, Vec<RejectRow>> {
    let mut found: BTreeMap<String, Vec<RejectRow>> = BTreeMap::new();
    for reject in read_rejects(&place.out().join("rejects.parquet")) {
        if reject.reason == "unreadable_file" {
            found.entry(reject.partition.clone()).or_default().push(reject);
        }
    }
    found
}

fn expect_one_reject_each(place: &Workplace) {
    let refused = of_shards(place);
    let names: Vec<&str> = refused.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        ["en/en_0000", "hi/hi_0000", "mr/mr_0000", "ta/ta_0000", "te/te_0000"]
    );
    for (name, _) in DAMAGED {
        let (shard, file) = name.rsplit_once('/').unwrap();
        let [reject] = refused[shard].as_slice() else {
            panic!("{refused:?}");
        };
        assert_eq!((reject.class.as_str(), reject.segment_id.as_ref()), ("fault", None));
        assert!(reject.detail.contains(file), "{}", reject.detail);
    }
}

#[test]
fn a_file_that_cannot_be_read_is_one_reject_until_it_can() {
    let place = Workplace::with_copy("micro");
    // Most of the rows are in the shards that are damaged here.
    const SETTINGS: &[&str] = &["max_faults=100%", "max_shrink=1"];
    place.build_manifests(SETTINGS);
    let whole = place.out_bytes();
    assert!(of_shards(&place).is_empty());
    let nothing_to_do = || {
        let mut plan = place.manifest_command("plan", SETTINGS);
        expect_code(&plan.arg("--exit-code").output().unwrap(), 0);
    };
    // Read before, and not any more.
    damage(&place);
    place.build_manifests(SETTINGS);
    expect_one_reject_each(&place);
    let without = place.out_bytes();
    // It stays unreadable: nothing is done again, and the rejects stay.
    nothing_to_do();
    place.build_manifests(SETTINGS);
    assert!(place.out_bytes() == without);
    // It can be read again.
    repair(&place);
    place.build_manifests(SETTINGS);
    assert!(place.out_bytes() == whole);
    nothing_to_do();
    // Never read before.
    damage(&place);
    std::fs::remove_dir_all(place.path("state")).unwrap();
    place.build_manifests(SETTINGS);
    expect_one_reject_each(&place);
    assert!(place.out_bytes() == without);
    nothing_to_do();
    repair(&place);
    place.build_manifests(SETTINGS);
    assert!(place.out_bytes() == whole);
}

#[test]
fn what_is_called_like_a_command_to_the_terminal_is_shown() {
    let place = Workplace::with_copy("micro");
    let name = "hi\u{1b}]0;owned\u{7}\u{202e}\u{9b}2J";
    let (from, to) = (place.shards.join("hi/hi_0000"), place.shards.join("hi").join(name));
    std::fs::rename(from, &to).unwrap();
    std::fs::rename(to.join("hi_0000.tar"), to.join(format!("{name}.tar"))).unwrap();
    std::fs::write(to.join("metadata.parquet"), "no parquet").unwrap();
    let run = place.manifest_command("run", &[]).output().unwrap();
    expect_code(&run, 0);
    let mut said = vec![stderr(&run), String::from_utf8(run.stdout).unwrap()];
    let state = place.path("state");
    let partition = format!("hi/{name}");
    let mut look = |command: &[&str]| {
        let output = crate::binary::program()
            .args(command)
            .arg("--state")
            .arg(&state)
            .output()
            .unwrap();
        said.push(stderr(&output));
        said.push(String::from_utf8(output.stdout).unwrap());
        said[said.len() - 1].clone()
    };
    let shown = look(&["rejects", "--reason", "corrupt_metadata"]);
    assert!(
        shown.contains("hi/hi\\u{1b}]0;owned\\u{7}\\u{202e}\\u{9b}2J\t"),
        "{shown}"
    );
    look(&["rejects"]);
    look(&["status"]);
    look(&["log"]);
    look(&["lineage", &format!("{partition}/none")]);
    let mut plan = place.manifest_command("plan", &["min_quality=0.9"]);
    let plan = plan.arg("--partitions").args(["--force", "all"]).output().unwrap();
    said.push(String::from_utf8(plan.stdout).unwrap());
    let obeyed = |c: &char| (c.is_control() && !"\n\t".contains(*c)) || *c == '\u{202e}';
    for text in &said {
        assert_eq!(text.chars().find(obeyed), None, "{text:?}");
    }
    assert!(said.last().unwrap().contains("\\u{202e}"), "{:?}", said.last());
    // Programs get what is there.
    let mut json = place.manifest_command("plan", &[]);
    let json = json.arg("--json").output().unwrap();
    assert!(String::from_utf8(json.stdout).unwrap().contains("\u{202e}\u{9b}2J"));
}
