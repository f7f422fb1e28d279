//! Speech that espeak-ng speaks, where it is installed; elsewhere these tests say that they were skipped.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::binary::{Workplace, expect_code, files, golden, program, read_manifest, read_rejects, stderr};

/// Whether there is the program; says so where there is not.
#[allow(clippy::print_stdout, reason = "tells why a test did nothing")]
fn espeak_is_there() -> bool {
    let asked = Command::new("espeak-ng")
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    let there = asked.is_ok_and(|status| status.success());
    if !there {
        println!("skipped: espeak-ng is not installed");
    }
    there
}

fn command(place: &Workplace, verb: &str, workers: &str, state: &str) -> Command {
    let mut flow = program();
    flow.arg(verb).arg("pipelines/synthesize.yaml");
    flow.arg("--state").arg(place.path(state));
    flow.args(["--set", &format!("out={}", place.path("speech").display())]);
    flow.args(["--set", &format!("manifests={}", place.path("manifests").display())]);
    for setting in [
        "hours=0.03",
        "languages=[en, hi, as]",
        "clips_per_shard=5",
        "held_out.voices=[f5]",
        "held_out.sentences=20",
        "held_out.hours=20",
    ] {
        flow.args(["--set", setting]);
    }
    if verb == "run" {
        flow.args(["--workers", workers, "--progress", "plain"]);
    }
    flow
}

/// Runs; gives the shards that were made and those that were reused.
fn run(place: &Workplace, workers: &str, state: &str) -> (u64, u64) {
    let events = place.path("events.jsonl");
    let _ = fs::remove_file(&events);
    let output = command(place, "run", workers, state)
        .arg("--events")
        .arg(&events)
        .output()
        .unwrap();
    expect_code(&output, 0);
    let text = fs::read_to_string(&events).unwrap();
    let mut events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let speech = events.find(|event| event["event"] == "stage_started" && event["stage"] == "speech");
    speech.map_or((0, 0), |event| {
        (event["run"].as_u64().unwrap(), event["reused"].as_u64().unwrap())
    })
}

/// The words of a text without its language tag.
fn words(text: &str) -> String {
    let (_, words) = text.split_once("|> ").unwrap_or(("", text));
    words.to_lowercase()
}

#[test]
fn speech_is_the_same_again_and_becomes_manifests() {
    if !espeak_is_there() {
        return;
    }
    let mut place = Workplace::new("micro");
    let shards = run(&place, "1", "state");
    assert!(shards.0 == 9 && shards.1 == 0, "{shards:?}");
    let (speech, manifests) = (files(&place.path("speech")), files(&place.path("manifests")));
    assert_eq!(speech.len() as u64, 3 * shards.0);

    // Nothing is left to do; a shard whose files go or change is made again, and no other.
    let plan = command(&place, "plan", "1", "state")
        .arg("--exit-code")
        .output()
        .unwrap();
    expect_code(&plan, 0);
    let folders: BTreeSet<&Path> = speech.keys().filter_map(|path| path.parent()).collect();
    let folders: Vec<&&Path> = folders.iter().collect();
    fs::remove_dir_all(place.path("speech").join(folders[1])).unwrap();
    let plan = command(&place, "plan", "1", "state")
        .arg("--exit-code")
        .output()
        .unwrap();
    expect_code(&plan, 4);
    assert!(String::from_utf8_lossy(&plan.stdout).contains("is gone"));
    assert_eq!(run(&place, "2", "state"), (1, shards.0 - 1));
    assert_eq!(files(&place.path("speech")), speech);
    let cut = speech
        .keys()
        .find(|path| path.extension().is_some_and(|extension| extension == "tar"))
        .unwrap();
    fs::write(place.path("speech").join(cut), b"short").unwrap();
    assert_eq!(run(&place, "2", "state"), (1, shards.0 - 1));
    assert_eq!(files(&place.path("speech")), speech);

    // The same bytes with three workers, from nothing.
    fs::remove_dir_all(place.path("speech")).unwrap();
    fs::remove_dir_all(place.path("manifests")).unwrap();
    assert_eq!(run(&place, "3", "other-state"), (shards.0, 0));
    assert_eq!(files(&place.path("speech")), speech);
    assert_eq!(files(&place.path("manifests")), manifests);

    // What is held out is in validation alone, and no sentence of mini is anywhere.
    let train = read_manifest(&place.path("manifests/train_manifest_v2.parquet"));
    let val = read_manifest(&place.path("manifests/val_manifest_v2.parquet"));
    let sentences =
        |rows: &[crate::binary::ManifestRow]| -> BTreeSet<String> { rows.iter().map(|row| words(&row.text)).collect() };
    assert!(train.len() > 20 && val.len() > 4, "{} and {}", train.len(), val.len());
    assert!(sentences(&train).is_disjoint(&sentences(&val)));
    let mini = sentences(&read_manifest(&golden("mini").join("manifest_v1.parquet")));
    assert!(mini.is_disjoint(&sentences(&train)) && mini.is_disjoint(&sentences(&val)));
    assert!(val.iter().all(|row| row.shard_id.contains("_val_")));

    // The shards are read like any others, and no row is lost.
    place.shards = place.path("speech");
    place.build_manifests(&["val_percent=0"]);
    let rows = read_manifest(&place.out().join("train_manifest_v2.parquet"));
    let rejects = read_rejects(&place.out().join("rejects.parquet"));
    assert!(rejects.is_empty(), "{rejects:?}");
    let texts = |rows: &[crate::binary::ManifestRow]| -> BTreeSet<(String, String)> {
        rows.iter()
            .map(|row| (row.segment_id.clone(), row.text.clone()))
            .collect()
    };
    assert_eq!(texts(&rows), texts(&[train, val].concat()));
}

#[test]
fn without_the_program_the_run_says_what_to_install() {
    let place = Workplace::new("micro");
    expect_code(&command(&place, "check", "1", "state").output().unwrap(), 0);
    let mut flow = command(&place, "run", "1", "state");
    let output = flow.args(["--set", "program=/nowhere/espeak-ng"]).output().unwrap();
    expect_code(&output, 2);
    let said = stderr(&output);
    assert!(
        said.contains("cannot be started") && said.contains("apt-get install"),
        "{said}"
    );
    assert!(!place.path("speech").exists());
}
