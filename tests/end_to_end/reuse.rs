//! Only changed partitions run again, and the bytes never depend on how the work was done.

use std::time::Instant;

use crate::binary::{Workplace, expect_code, folder_bytes, stderr};

/// How many partitions `flow run` says it ran, from the events of the run.
fn partitions_run(place: &Workplace, settings: &[&str]) -> std::collections::BTreeMap<String, (u64, u64)> {
    let events = place.path("events.jsonl");
    let mut flow = place.manifest_command("run", settings);
    flow.arg("--events").arg(&events);
    let output = flow.output().unwrap();
    expect_code(&output, 0);
    let text = std::fs::read_to_string(&events).unwrap();
    std::fs::remove_file(&events).unwrap();
    text.lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter(|event| event["event"] == "stage_started")
        .map(|event| {
            let stage = event["stage"].as_str().unwrap().to_string();
            (
                stage,
                (event["run"].as_u64().unwrap(), event["reused"].as_u64().unwrap()),
            )
        })
        .collect()
}

#[test]
fn a_second_run_does_nothing_and_says_so() {
    let place = Workplace::new("micro");
    place.build_manifests(&[]);
    let before = place.out_bytes();
    let plan = place.manifest_command("plan", &[]).arg("--exit-code").output().unwrap();
    expect_code(&plan, 0);

    let started = Instant::now();
    let ran = partitions_run(&place, &[]);
    // Generous: the claim is "a moment"; a run that decodes audio again takes several times as long.
    assert!(started.elapsed().as_secs() < 10);
    assert!(ran.values().all(|(run, _)| *run == 0), "{ran:?}");
    assert_eq!(place.out_bytes(), before);
    let again = place.build_manifests(&[]);
    assert!(stderr(&again).contains("nothing to do"), "{}", stderr(&again));
    let said = String::from_utf8_lossy(&again.stdout);
    let page = said.lines().find_map(|line| line.strip_prefix("report: "));
    assert!(page.is_some_and(|page| std::path::Path::new(page).is_file()), "{said}");
}

#[test]
fn a_new_threshold_decodes_no_audio_again() {
    let place = Workplace::new("micro");
    place.build_manifests(&[]);
    let plan = place
        .manifest_command("plan", &["min_quality=0.8"])
        .arg("--exit-code")
        .output()
        .unwrap();
    expect_code(&plan, 4);
    let text = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert!(
        text.contains("min_quality"),
        "the plan should name the setting:\n{text}"
    );

    let ran = partitions_run(&place, &["min_quality=0.8"]);
    let (probe_run, probe_reused) = ran["probe"];
    assert_eq!(probe_run, 0, "{ran:?}");
    assert!(probe_reused > 0);
    assert!(ran["v1"].0 > 0, "{ran:?}");

    let fresh = Workplace::new("micro");
    fresh.build_manifests(&["min_quality=0.8"]);
    assert_eq!(place.out_bytes(), fresh.out_bytes());
}

#[test]
fn a_setting_changed_back_shows_the_rejects_of_before() {
    let place = Workplace::new("micro");
    let rejects = || {
        let mut flow = crate::binary::program();
        flow.arg("rejects").arg("--state").arg(place.path("state"));
        String::from_utf8(flow.output().unwrap().stdout).unwrap()
    };
    place.build_manifests(&[]);
    let before = rejects();
    place.build_manifests(&["min_quality=0.8"]);
    assert_ne!(rejects(), before);
    let ran = partitions_run(&place, &[]);
    assert_eq!(ran["cleaned"].0, 0, "{ran:?}");
    assert_eq!(rejects(), before);
}

#[test]
fn adding_changing_and_removing_a_shard_equals_a_build_from_nothing() {
    let place = Workplace::with_copy("micro");
    let shard = place.shards.join("ta/ta_0000");
    let aside = place.path("aside");
    std::fs::rename(&shard, &aside).unwrap();
    place.build_manifests(&[]);

    std::fs::rename(&aside, &shard).unwrap();
    let ran = partitions_run(&place, &[]);
    assert_eq!(ran["scan"].0, 1, "one shard came: {ran:?}");
    assert_eq!(ran["probe"].0, 1, "one shard came: {ran:?}");
    let fresh = |place: &Workplace| {
        let other = Workplace {
            folder: tempfile::tempdir().unwrap(),
            shards: place.shards.clone(),
        };
        other.build_manifests(&[]);
        other.out_bytes()
    };
    assert_eq!(place.out_bytes(), fresh(&place));

    // Another shard's metadata in the place of this one: same names, other content.
    let metadata = place.shards.join("hi/hi_0000/metadata.parquet");
    let bytes = std::fs::read(place.shards.join("hi/hi_0001/metadata.parquet")).unwrap();
    std::fs::write(&metadata, bytes).unwrap();
    let ran = partitions_run(&place, &[]);
    assert_eq!(ran["scan"].0, 1, "one shard changed: {ran:?}");
    assert_eq!(ran["probe"].0, 0, "no tar changed: {ran:?}");
    assert_eq!(place.out_bytes(), fresh(&place));

    std::fs::remove_dir_all(&shard).unwrap();
    let ran = partitions_run(&place, &[]);
    assert_eq!(ran["scan"].0, 0, "{ran:?}");
    assert_eq!(place.out_bytes(), fresh(&place));
}

#[test]
fn the_number_of_workers_changes_no_byte() {
    let mut first = None;
    for workers in ["1", "3", "7"] {
        let place = Workplace::new("micro");
        let output = place
            .manifest_command("run", &[])
            .args(["--workers", workers])
            .output()
            .unwrap();
        expect_code(&output, 0);
        let bytes = place.out_bytes();
        match &first {
            None => first = Some(bytes),
            Some(first) => assert!(*first == bytes, "{workers} workers wrote other bytes than one"),
        }
    }
}

#[test]
fn an_export_that_was_damaged_is_made_again() {
    let place = Workplace::new("micro");
    place.build_manifests(&[]);
    let before = place.out_bytes();
    std::fs::write(place.out().join("val_manifest_v2.parquet"), b"damaged").unwrap();
    place.build_manifests(&[]);
    assert_eq!(place.out_bytes(), before);
    std::fs::remove_file(place.out().join("flow.json")).unwrap();
    place.build_manifests(&[]);
    assert_eq!(folder_bytes(&place.out()), before);
    assert!(place.out().join("flow.json").is_file());
}

#[test]
fn gc_removes_what_the_last_run_did_not_use_and_nothing_else() {
    let place = Workplace::new("micro");
    place.build_manifests(&[]);
    place.build_manifests(&["min_quality=0.8"]);
    let gc = |more: &[&str]| {
        let mut flow = crate::binary::program();
        flow.arg("gc").arg("--state").arg(place.path("state")).args(more);
        let output = flow.output().unwrap();
        expect_code(&output, 0);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let runs_nothing = |settings: &[&str]| {
        let plan = place.manifest_command("plan", settings).arg("--exit-code").output();
        plan.unwrap().status.code() == Some(0)
    };
    // Both runs are among the last twenty, and a look changes nothing.
    assert!(gc(&[]).contains("removed 0 artifacts"));
    let size = || {
        std::fs::read_dir(place.path("state").join("artifacts"))
            .unwrap()
            .count()
    };
    let before = size();
    assert!(gc(&["--keep", "1", "--dry-run"]).starts_with("would remove"));
    assert_eq!(size(), before);
    gc(&["--keep", "1"]);
    assert!(size() < before);
    assert!(runs_nothing(&["min_quality=0.8"]) && !runs_nothing(&[]));
    // What was removed is made again, with the same bytes.
    let bytes = place.out_bytes();
    place.build_manifests(&[]);
    place.build_manifests(&["min_quality=0.8"]);
    assert_eq!(place.out_bytes(), bytes);
}
