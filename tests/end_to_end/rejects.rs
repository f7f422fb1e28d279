//! `flow rejects` shows the selected run, whatever ran before in the same state directory.

use std::collections::BTreeSet;
use std::path::Path;

use crate::binary::{Workplace, expect_code, program, read_rejects};
use crate::training::finetune;

/// The stages and reasons of the rejects of the last run of `pipelines/finetune.yaml`, or of that with these settings.
fn rejects(place: &Workplace, settings: &[String]) -> (BTreeSet<String>, String) {
    let file = place.path("rejects.parquet");
    let mut flow = program();
    flow.args(["rejects", "pipelines/finetune.yaml", "--state"])
        .arg(place.path("state"));
    for setting in settings {
        flow.args(["--set", setting]);
    }
    let output = flow.output().unwrap();
    expect_code(&output, 0);
    expect_code(&flow.arg("--export").arg(&file).output().unwrap(), 0);
    let reasons = read_rejects(&file).into_iter().map(|reject| reject.reason).collect();
    (reasons, String::from_utf8(output.stdout).unwrap())
}

/// The settings that a command was given.
fn settings_of(command: &std::process::Command) -> Vec<String> {
    let all: Vec<String> = command
        .get_args()
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let set = all.windows(2).filter(|pair| pair[0] == "--set");
    set.map(|pair| pair[1].clone()).collect()
}

#[test]
fn a_run_from_given_manifests_has_no_rejects_of_an_earlier_run_from_shards() {
    let place = Workplace::new("micro");
    let mut shards = finetune(&place, &[]);
    expect_code(&shards.args(["--until", "fitting"]).output().unwrap(), 0);
    let (reasons, of_shards) = rejects(&place, &[]);
    assert!(of_shards.contains("\nmanifest/"), "{of_shards}");
    assert!(reasons.len() > 2, "{reasons:?}");
    place.build_manifests(&[]);

    // The same pipeline in the same state directory: nothing of the shards is in it.
    let file = |name: &str| place.out().join(name);
    let given = |name: &str, path: &Path| format!("{name}={}", path.display());
    let manifests = [
        given("train_manifest", &file("train_manifest_v2.parquet")),
        given("val_manifest", &file("val_manifest_v2.parquet")),
    ];
    let manifests = manifests.each_ref().map(String::as_str);
    for until in ["fitting", "held_out"] {
        let mut flow = finetune(&place, &manifests);
        expect_code(&flow.args(["--until", until]).output().unwrap(), 0);
        let (reasons, said) = rejects(&place, &[]);
        assert!(!said.contains("manifest/"), "{said}");
        // The corpus has one text of hundreds of words over a second of audio.
        let expected: &[&str] = if until == "fitting" { &["too_many_tokens"] } else { &[] };
        assert_eq!(
            reasons.iter().map(String::as_str).collect::<Vec<_>>(),
            expected,
            "{said}"
        );
    }

    // What a run leaves alone is not its own, though the run before it had it.
    let mut flow = finetune(&place, &[]);
    expect_code(&flow.args(["--until", "pieces"]).output().unwrap(), 0);
    assert_eq!(rejects(&place, &[]).1, "no rejects\n");

    // A run is found by the values of its parameters: the last one from manifests, though another came after it.
    let settings = settings_of(&finetune(&place, &manifests));
    assert_eq!(rejects(&place, &settings).1, "no rejects\n");
    let mut flow = finetune(&place, &["split_seed=9"]);
    expect_code(&flow.args(["--until", "pieces"]).output().unwrap(), 0);
    let mut flow = finetune(&place, &[]);
    expect_code(&flow.args(["--until", "fitting"]).output().unwrap(), 0);
    let mut flow = finetune(&place, &["split_seed=9"]);
    expect_code(&flow.args(["--until", "pieces"]).output().unwrap(), 0);
    let settings = settings_of(&finetune(&place, &[]));
    assert_eq!(rejects(&place, &[]).1, "no rejects\n");
    assert_eq!(rejects(&place, &settings).1, of_shards);
}
