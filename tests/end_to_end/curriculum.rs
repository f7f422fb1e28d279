//! Progressive training: stages of growing data in one run, killed in the middle of one and gone on.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::binary::{Workplace, expect_code, stderr};
use crate::training::{finetune, last_checkpoint};

const STAGED: [&str; 4] = [
    "train.curriculum=[30, 0.06k, all]",
    "train.curriculum_steps=[4, 40]",
    "train.max_steps=50",
    "train.eval_every=1000",
];

/// What `metrics.jsonl` says that does not depend on the clock.
fn lines(checkpoints: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(checkpoints.join("metrics.jsonl")).unwrap();
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &mut lines {
        for name in ["seconds", "time", "audio_seconds_per_second"] {
            line.as_object_mut().unwrap().remove(name);
        }
    }
    lines
}

/// Steps of the checkpoints that stand, the newest last.
fn checkpoints(folder: &Path) -> Vec<u64> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let step = |name: String| name.strip_prefix("step-")?.parse().ok();
    let mut steps: Vec<u64> = names
        .filter_map(|entry| step(entry.file_name().into_string().ok()?))
        .collect();
    steps.sort_unstable();
    steps
}

#[test]
fn a_run_killed_in_its_second_stage_ends_with_the_same_bits() {
    let whole = Workplace::new("micro");
    let output = finetune(&whole, &STAGED).output().unwrap();
    expect_code(&output, 0);
    let metrics = lines(&whole.path("checkpoints"));
    let ends: Vec<(u64, &str)> = (metrics.iter())
        .filter(|line| line["kind"] == "evaluation")
        .map(|line| (line["step"].as_u64().unwrap(), line["stage_end"].as_str().unwrap()))
        .collect();
    assert_eq!(ends, [(4, "30"), (44, "60"), (50, "all")]);
    for line in metrics.iter().filter(|line| line["kind"] == "train") {
        let stage = match line["step"].as_u64().unwrap() {
            ..=4 => "30",
            5..=44 => "60",
            _ => "all",
        };
        assert_eq!(line["stage"], stage, "{line}");
    }
    assert!(stderr(&output).contains("end of stage 30"), "{}", stderr(&output));
    let report = std::fs::read_to_string(whole.path("report").join("report.html")).unwrap();
    assert!(report.contains("step 4, end of 30") && report.contains("step 44, end of 60"));

    let often: Vec<&str> = STAGED.iter().copied().chain(["train.checkpoint_every=1"]).collect();
    let (killed, at) = (0..5)
        .find_map(|_| {
            let place = Workplace::new("micro");
            let mut child = finetune(&place, &often)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let folder = place.path("checkpoints");
            while checkpoints(&folder).last().is_none_or(|step| *step < 7) && child.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(5));
            }
            child.kill().unwrap();
            child.wait().unwrap();
            let at = *checkpoints(&folder).last()?;
            (7..44).contains(&at).then_some((place, at))
        })
        .expect("five runs came to the end of their second stage before they could be killed");
    // Another machine forgets what was noted about the epochs, and has other workers.
    std::fs::remove_dir_all(killed.path("state")).unwrap();
    let resumed = finetune(&killed, &STAGED).args(["--workers", "3"]).output().unwrap();
    expect_code(&resumed, 0);
    assert!(
        last_checkpoint(&whole, 50) == last_checkpoint(&killed, 50),
        "killed at step {at}, it ended with other bits"
    );
    let evaluations = |place: &Workplace| -> Vec<Value> {
        let mut lines = lines(&place.path("checkpoints"));
        lines.retain(|line| line["kind"] == "evaluation");
        lines
    };
    assert_eq!(evaluations(&killed), evaluations(&whole));
}

#[test]
fn a_changed_curriculum_is_refused() {
    let place = Workplace::new("micro");
    let short = ["train.max_steps=6", "train.eval_every=0"];
    let run = |settings: &[&str]| {
        let all: Vec<&str> = short.iter().chain(settings).copied().collect();
        finetune(&place, &all).output().unwrap()
    };
    expect_code(&run(&["train.curriculum=[30, all]"]), 0);
    let refused = |settings: &[&str], named: &str| {
        let output = run(settings);
        expect_code(&output, 2);
        assert!(stderr(&output).contains(named), "{}", stderr(&output));
    };
    refused(&["train.curriculum=[40, all]"], "curriculum");
    refused(&[], "curriculum");
    refused(
        &["train.curriculum=[30, all]", "train.curriculum_steps=[3]"],
        "curriculum_steps",
    );
    // It would move the end of the first stage, which is behind.
    refused(&["train.curriculum=[30, all]", "train.max_steps=8"], "max_steps");
    for wrong in ["[all, 30]", "[30, 30]", "[ten]", "[0, all]", "[-3]"] {
        refused(&[&format!("train.curriculum={wrong}")], "curriculum");
    }
    expect_code(&run(&["train.curriculum=[30, all]"]), 0);
}
