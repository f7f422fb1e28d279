//! A few steps of training through the whole pipeline: shards to a report.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::binary::{Workplace, expect_code, stderr};

/// A model that takes milliseconds a step, from nothing.
const SMALL: [&str; 14] = [
    "init=none",
    "train.average_decay=0",
    "train.speeds=[1.0]",
    "train.unfreeze_step=0",
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

/// The main job with settings, its folders at this place.
pub fn main_job(place: &Workplace, settings: &[&str]) -> Command {
    let folders = ["checkpoints", "report", "audio", "model_out"];
    let folders = folders.map(|name| format!("{name}={}", place.path(name).display()));
    let all: Vec<&str> = (folders.iter().map(String::as_str))
        .chain(settings.iter().copied())
        .collect();
    place.command("run", "pipelines/finetune.yaml", &all)
}

pub fn finetune(place: &Workplace, settings: &[&str]) -> Command {
    let all: Vec<&str> = SMALL.iter().chain(settings).copied().collect();
    main_job(place, &all)
}

/// What is left to do behind the last step needs no step.
#[test]
fn training_that_ended_early_hands_on_the_mean_of_its_checkpoints() {
    let place = Workplace::new("micro");
    let early = [
        "train.max_steps=400",
        "train.eval_every=1",
        "train.checkpoint_every=1",
        "train.early_stopping={\"patience\": 2, \"min_delta\": 1000}",
    ];
    let output = finetune(&place, &early).output().unwrap();
    expect_code(&output, 0);
    let again = [&early[..], &["train.model_from=average"]].concat();
    let mut flow = finetune(&place, &again).stdout(Stdio::null()).spawn().unwrap();
    for _ in 0..1200 {
        if let Some(status) = flow.try_wait().unwrap() {
            assert!(status.success(), "{status}");
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    flow.kill().unwrap();
    panic!("the mean of the checkpoints does not exist after two minutes");
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

pub fn find(root: &Path, name: &str) -> PathBuf {
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
fn steps_that_a_stage_left_out_does_not_give_are_explained() {
    let place = Workplace::new("micro");
    expect_code(&finetune(&place, &["train.max_steps=2"]).output().unwrap(), 0);
    let mut more = finetune(&place, &["train.max_steps=4"]);
    let output = more.args(["--from", "train"]).output().unwrap();
    expect_code(&output, 1);
    let said = stderr(&output);
    assert!(said.contains("no step left to give, but step 3 comes next"), "{said}");
    assert!(said.contains("run without them"), "{said}");
}

/// Two ranks, then one: the epoch in hand goes on as it was planned, with two micro-batches a step, and training needs
/// nobody's leave for that.
#[test]
fn training_goes_on_with_another_number_of_ranks() {
    let place = Workplace::new("micro");
    let run = |ranks: &str, steps: &str| {
        let settings = [ranks, steps, "train.max_batch_seconds=4", "train.checkpoint_every=2"];
        let output = finetune(&place, &settings).output().unwrap();
        expect_code(&output, 0);
        stderr(&output)
    };
    let record = |step: u64| -> serde_json::Value {
        let folder = find(&place.path("checkpoints"), &format!("step-{step:09}"));
        serde_json::from_slice(&std::fs::read(folder.join("training.json")).unwrap()).unwrap()
    };
    run("train.ranks=2", "train.max_steps=4");
    let before = record(4);
    assert_eq!((&before["micro_batches"], &before["epoch"]), (&8.into(), &0.into()));
    run("train.ranks=1", "train.max_steps=6");
    let after = record(6);
    assert_eq!((&after["micro_batches"], &after["epoch"]), (&12.into(), &0.into()));
    let plans = serde_json::json!([
        {"from_step": 0, "ranks": 2, "grad_accum": 1},
        {"from_step": 4, "ranks": 1, "grad_accum": 1},
    ]);
    assert_eq!(after["plans"], plans);
}

/// With a single thread for everything, which waits in the forward pass for an update that needs one too; and with two
/// ranks. The bits are those of updates in place.
#[test]
fn offloaded_updates_are_waited_for_whatever_the_threads() {
    for ranks in ["train.ranks=1", "train.ranks=2"] {
        let [plain, offloaded] = ["train.offload=false", "train.offload=true"].map(|offload| {
            let place = Workplace::new("micro");
            let mut command = finetune(&place, &["train.max_steps=4", ranks, offload]);
            let output = command.env("RAYON_NUM_THREADS", "1").output().unwrap();
            expect_code(&output, 0);
            last_checkpoint(&place, 4)
        });
        assert!(plain == offloaded, "{ranks}");
    }
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

pub fn has_checkpoint(folder: &Path) -> bool {
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

/// Other rows would be exported before training could look at them.
#[test]
fn a_changed_rate_is_refused_before_manifests_are_replaced() {
    let place = Workplace::new("micro");
    expect_code(&finetune(&place, &["train.max_steps=4"]).output().unwrap(), 0);
    let before = place.out_bytes();
    let changed = ["train.max_steps=6", "train.phase2_lr=1e-4", "min_quality=0.8"];
    let output = finetune(&place, &changed).output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("phase2_lr"), "{}", stderr(&output));
    assert!(place.out_bytes() == before);
    assert!(!stderr(&output).contains("to run"), "{}", stderr(&output));
}

/// Which checkpoint is handed on may be changed when training is done; a mean that is gone is made again.
#[test]
fn a_finished_training_hands_on_another_checkpoint() {
    let place = Workplace::new("micro");
    let hand_on = |from: &str| {
        let from = format!("train.model_from={from}");
        let output = finetune(&place, &["train.max_steps=8", &from]).output().unwrap();
        expect_code(&output, 0);
        std::fs::read(place.path("model_out").join("model.nemo")).unwrap()
    };
    let last = hand_on("last");
    let average = hand_on("average");
    assert!(average != last);
    std::fs::remove_dir_all(find(&place.path("checkpoints"), "average-000000008")).unwrap();
    assert!(hand_on("average") == average);
    assert!(hand_on("last") == last);
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

/// The lines of `metrics.jsonl`.
fn lines(checkpoints: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(checkpoints.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The word error rates that evaluations while training found, by step.
fn evaluations(checkpoints: &Path) -> BTreeMap<u64, f64> {
    lines(checkpoints)
        .iter()
        .filter(|line| line["kind"] == "evaluation")
        .map(|line| (line["step"].as_u64().unwrap(), line["wer"].as_f64().unwrap()))
        .collect()
}

/// The bundled model knows the sounds of 13 languages and not the sentences of the corpus: some steps of each phase of
/// the recipe, which is that of the pipeline on a shorter clock, and the error rate falls in each.
#[test]
fn fine_tuning_the_bundled_model_lowers_the_error_rate() {
    let place = Workplace::bundled("mini");
    let output = main_job(
        &place,
        &[
            "train.max_steps=120",
            "train.unfreeze_step=40",
            "train.warmup_steps=5",
            "train.phase2_warmup=5",
            "train.eval_every=40",
            // A moving average of a few steps is still where it began.
            "train.average_decay=0",
            "train.eval_samples_per_language=2",
        ],
    )
    .output()
    .unwrap();
    expect_code(&output, 0);
    let rates = evaluations(&place.path("checkpoints"));
    assert_eq!(rates.keys().copied().collect::<Vec<_>>(), [0, 40, 80, 120]);
    assert!(rates[&40] < rates[&0], "the frozen encoder: {rates:?}");
    let learned = rates[&80].min(rates[&120]);
    assert!(
        learned < 0.9 * rates[&40] && learned < 0.75 * rates[&0],
        "the whole model: {rates:?}"
    );
    let screen = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        screen.contains("Word error rate while training") && screen.contains("before"),
        "{screen}"
    );
    let report = std::fs::read_to_string(place.path("report").join("report.html")).unwrap();
    assert!(report.contains("Word error rate while training") && report.contains("frozen"));
    // The model that comes out is a whole one.
    let archive = place.path("model_out").join("model.nemo");
    let told = crate::binary::program()
        .args(["model", "info"])
        .arg(&archive)
        .output()
        .unwrap();
    expect_code(&told, 0);
    assert!(String::from_utf8_lossy(&told.stdout).contains("1,024 pieces"));
}

/// The marks of the main job, with three seeds.
#[test]
#[ignore = "trains for minutes"]
fn the_main_job_ends_under_fifteen_percent() {
    for seed in [42, 1, 7] {
        let place = Workplace::bundled("mini");
        let output = main_job(&place, &[&format!("train.seed={seed}")]).output().unwrap();
        expect_code(&output, 0);
        let rates = evaluations(&place.path("checkpoints"));
        let (first, last) = (rates.values().next().unwrap(), rates.values().last().unwrap());
        assert!(*last < 0.15 && *last < 0.5 * first, "{seed}: {rates:?}");
        // Batches are always there before they are asked for.
        let seconds = |name: &str| -> f64 {
            lines(&place.path("checkpoints"))
                .iter()
                .filter_map(|line| line[name].as_f64())
                .sum()
        };
        let (waited, all) = (seconds("waited_for_data"), seconds("seconds"));
        assert!(waited < 0.02 * all, "{waited} of {all} s");
    }
}

/// Without a model to begin from, what is trained on is learned by heart.
#[test]
#[ignore = "trains for minutes"]
fn from_nothing_the_corpus_is_learned_by_heart() {
    let place = Workplace::bundled("mini");
    let output = main_job(&place, &[])
        .args(["--config", "configs/from_nothing.yaml"])
        .output()
        .unwrap();
    expect_code(&output, 0);
    let screen = String::from_utf8_lossy(&output.stdout).into_owned();
    let sample = screen.split("Error rates: train sample").nth(1).unwrap();
    let all = sample
        .lines()
        .find(|line| line.trim_start().starts_with("all"))
        .unwrap();
    let rate: f64 = all
        .split('%')
        .next()
        .unwrap()
        .split_whitespace()
        .last()
        .unwrap()
        .parse()
        .unwrap();
    assert!(rate < 20.0, "{screen}");
}
