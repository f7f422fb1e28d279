//! A few steps of training through the whole pipeline: shards to a report.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::binary::{Workplace, expect_code, stderr};

/// A model that takes milliseconds a step.
const SMALL: [&str; 10] = [
    "model.d_model=32",
    "model.layers=1",
    "model.heads=2",
    "model.conv_channels=8",
    "model.pred_hidden=24",
    "model.joint_hidden=32",
    "train.checkpoint_every=4",
    "train.eval_every=8",
    "train.max_batch_seconds=8",
    "train.eval_samples_per_language=1",
];

pub fn finetune(place: &Workplace, settings: &[&str]) -> Command {
    let mut all: Vec<String> = SMALL.iter().map(ToString::to_string).collect();
    for name in ["checkpoints", "report", "audio"] {
        all.push(format!("{name}={}", place.path(name).display()));
    }
    all.extend(settings.iter().map(ToString::to_string));
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    place.command("run", "pipelines/finetune.yaml", &all)
}

/// The bytes of the weights and optimizer state in the last checkpoint.
pub fn last_checkpoint(place: &Workplace, step: u64) -> BTreeMap<String, Vec<u8>> {
    let folder = find(&place.path("checkpoints"), &format!("step-{step:09}"));
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            files.insert(
                path.file_name().unwrap().to_string_lossy().into_owned(),
                std::fs::read(&path).unwrap(),
            );
        }
    }
    assert!(files.len() >= 2, "{files:?}", files = files.keys());
    files
}

fn find(root: &Path, name: &str) -> PathBuf {
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if path.file_name().is_some_and(|found| found == name) {
                    return path;
                }
                folders.push(path);
            }
        }
    }
    panic!("no {name} below {}", root.display());
}

#[test]
fn trains_evaluates_and_resumes_with_the_same_bits() {
    let place = Workplace::new("micro");
    let output = finetune(&place, &["train.max_steps=8"]).output().unwrap();
    expect_code(&output, 0);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        table.contains("WER") && table.contains("all"),
        "{table}\n{}",
        stderr(&output)
    );
    let report = std::fs::read_to_string(place.path("report").join("report.html")).unwrap();
    assert!(report.contains("<svg") && report.contains("WER") && report.contains("quality_too_low"));

    // Nothing left to do; then more steps, which is no change of settings.
    let again = finetune(&place, &["train.max_steps=8"]).output().unwrap();
    expect_code(&again, 0);
    assert!(stderr(&again).contains("nothing to do"), "{}", stderr(&again));

    // Stopped half-way by Ctrl-C, and gone on.
    let other = Workplace::new("micro");
    let mut child = finetune(&other, &["train.max_steps=8"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let first = other.path("checkpoints");
    for _ in 0..600 {
        if first.is_dir() && has_checkpoint(&first) {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    // SAFETY: kill(2) with a process id of our own child; no memory is involved.
    unsafe { libc::kill(child.id() as i32, libc::SIGKILL) };
    child.wait().unwrap();
    expect_code(&finetune(&other, &["train.max_steps=8"]).output().unwrap(), 0);
    assert!(
        last_checkpoint(&place, 8) == last_checkpoint(&other, 8),
        "resumed training gave other bits"
    );

    // The checkpoints alone say where training stands.
    std::fs::remove_dir_all(other.path("state")).unwrap();
    let output = finetune(&other, &["train.max_steps=10"]).output().unwrap();
    expect_code(&output, 0);
    find(&other.path("checkpoints"), "step-000000010");
}

fn has_checkpoint(folder: &Path) -> bool {
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                if path
                    .file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with("step-"))
                {
                    return true;
                }
                folders.push(path);
            }
        }
    }
    false
}

#[test]
fn a_changed_rate_is_refused_until_the_user_decides() {
    let place = Workplace::new("micro");
    expect_code(&finetune(&place, &["train.max_steps=4"]).output().unwrap(), 0);
    let output = finetune(&place, &["train.max_steps=6", "train.phase2_lr=1e-4"])
        .output()
        .unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("phase2_lr"), "{}", stderr(&output));
    let output = finetune(
        &place,
        &["train.max_steps=6", "train.phase2_lr=1e-4", "train.on_change=continue"],
    )
    .output()
    .unwrap();
    expect_code(&output, 0);
}

#[test]
fn a_corrupt_checkpoint_is_named() {
    let place = Workplace::new("micro");
    expect_code(&finetune(&place, &["train.max_steps=4"]).output().unwrap(), 0);
    let folder = find(&place.path("checkpoints"), "step-000000004");
    std::fs::write(folder.join("model.safetensors"), b"damaged").unwrap();
    let output = finetune(&place, &["train.max_steps=6"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("model.safetensors"), "{}", stderr(&output));
}

#[test]
fn training_from_tars_gives_the_same_bits_as_from_files() {
    let files = Workplace::new("micro");
    expect_code(&finetune(&files, &["train.max_steps=2"]).output().unwrap(), 0);
    let tars = Workplace::new("micro");
    expect_code(
        &finetune(&tars, &["train.max_steps=2", "store=tar"]).output().unwrap(),
        0,
    );
    assert!(files.path("audio").is_dir() && !tars.path("audio").exists());
    assert!(
        last_checkpoint(&files, 2) == last_checkpoint(&tars, 2),
        "recordings in tars gave other bits than the same ones in files"
    );
    let deleting = finetune(&tars, &["train.max_steps=2", "store=tar", "delete_tars=true"])
        .output()
        .unwrap();
    expect_code(&deleting, 2);
    assert!(
        stderr(&deleting).contains("leaves its recordings in the tars"),
        "{}",
        stderr(&deleting)
    );
}
