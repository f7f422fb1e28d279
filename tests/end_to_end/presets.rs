//! The presets of `configs/`: each fits the device of its name, also if the program was not built for that device.

use std::path::{Path, PathBuf};
use std::process::Output;

use flow_kind::registry::Registry;
use flow_spec::{Overrides, yaml};
use flow_training::settings::{Precision, TrainSettings};
use serde_json::Value;

#[cfg(not(feature = "cuda"))]
use crate::binary::{Workplace, stderr};
use crate::binary::{expect_code, program};

const PIPELINE: &str = "pipelines/finetune.yaml";

/// Overlays for pipelines in a folder of the repository, by name.
fn overlays(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap();
    let is_overlay = |path: &PathBuf| {
        let yaml = path.extension().is_some_and(|ending| ending == "yaml");
        // Tables of languages and the like are none.
        yaml && std::fs::read_to_string(path).unwrap().contains("\nparams:")
    };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).filter(is_overlay).collect();
    paths.sort();
    assert!(paths.len() > 2, "{paths:?}");
    paths
}

/// Number of ranks and bytes of each GPU that a name such as `8x80gb` says.
fn promised(device: &Path) -> (u32, u64) {
    let name = device.file_stem().unwrap().to_str().unwrap();
    let (ranks, size) = name.split_once('x').unwrap();
    let gigabytes: u64 = size.strip_suffix("gb").unwrap().parse().unwrap();
    (ranks.parse().unwrap(), gigabytes * 1_000_000_000)
}

fn flow(command: &str, configs: &[PathBuf], more: &[&str]) -> Output {
    let mut flow = program();
    flow.arg(command).arg(PIPELINE);
    for config in configs {
        flow.arg("--config").arg(config);
    }
    flow.args(more).output().unwrap()
}

/// The settings of training that the pipeline has with these overlays, and those of its loader.
fn resolved(configs: &[PathBuf]) -> (TrainSettings, Value) {
    let overrides = Overrides {
        configs: configs.to_vec(),
        ..Overrides::default()
    };
    let registry = Registry::new(flow::kinds::all()).expect("kinds");
    let pipeline = flow_spec::load(Path::new(PIPELINE), &overrides, &registry)
        .map_err(|_| configs)
        .expect("a pipeline");
    let pipeline = flow_spec::check(pipeline, &registry)
        .map_err(|_| configs)
        .expect("a right one")
        .pipeline;
    let with = |kind: &str| {
        let mut stages = pipeline.stages.iter().filter(|stage| stage.uses == kind);
        &stages.next().expect(kind).with
    };
    let train = yaml::typed(with("training.train")).map_err(|error| error.message);
    let load = yaml::typed(with("sampling.load")).map_err(|error| error.message);
    (train.expect("settings"), load.expect("settings"))
}

#[test]
fn every_preset_trains_where_its_name_says() {
    for device in overlays("configs/devices") {
        let (ranks, _) = promised(&device);
        for model in overlays("configs") {
            let configs = [model, device.clone()];
            expect_code(&flow("check", &configs, &[]), 0);
            let (train, _) = resolved(&configs);
            assert_eq!(
                (train.device.as_str(), train.precision, train.ranks),
                ("cuda", Precision::Bf16, ranks),
                "{configs:?}"
            );
        }
    }
}

/// What the model of 0.6 billion parameters is trained with under each preset, and under its own settings alone.
#[test]
fn presets_are_what_they_are_said_to_be() {
    let mut lines = String::new();
    let devices = overlays("configs/devices").into_iter().map(Some);
    for device in [None].into_iter().chain(devices) {
        let name = device.as_deref().and_then(Path::file_stem);
        let name = name.map_or("alone".into(), |name| name.to_string_lossy().into_owned());
        let mut configs = vec![PathBuf::from("configs/parakeet_tdt_0.6b_v3.yaml")];
        configs.extend(device);
        expect_code(&flow("check", &configs, &[]), 0);
        let (train, load) = resolved(&configs);
        let seconds = load["max_batch_seconds"].as_f64().unwrap();
        let minutes = f64::from(train.ranks * train.grad_accum) * seconds / 60.0;
        lines += &format!(
            "{:8} {} {:?}, {} ranks x {} x {seconds} s = {minutes} min a step, clips of {} s at most, {:?}{}{}\n",
            name,
            train.device,
            train.precision,
            train.ranks,
            train.grad_accum,
            train.max_duration,
            train.optimizer,
            if train.recompute { ", recomputed" } else { "" },
            if train.offload { ", offloaded" } else { "" },
        );
        assert_eq!(load["grad_accum"].as_u64(), Some(u64::from(train.grad_accum)));
        assert_eq!(load["ranks"].as_u64(), Some(u64::from(train.ranks)));
    }
    insta::assert_snapshot!(lines, @r"
    alone    cuda Bf16, 1 ranks x 1 x 90 s = 1.5 min a step, clips of 20 s at most, Adamw
    1x24gb   cuda Bf16, 1 ranks x 16 x 180 s = 48 min a step, clips of 20 s at most, Adamw
    1x80gb   cuda Bf16, 1 ranks x 3 x 960 s = 48 min a step, clips of 20 s at most, Adamw
    1x8gb    cuda Bf16, 1 ranks x 32 x 90 s = 48 min a step, clips of 20 s at most, Adamw8bit, recomputed
    8x80gb   cuda Bf16, 8 ranks x 1 x 1200 s = 160 min a step, clips of 20 s at most, Adamw
    ");
}

/// The arguments of a line as a shell would divide it: at blanks, but for those in single quotes.
fn divided(line: &str) -> Vec<String> {
    let mut quoted = false;
    let blank = |letter: char| {
        quoted ^= letter == '\'';
        !quoted && letter == ' '
    };
    let arguments = line.split(blank).filter(|argument| !argument.is_empty());
    arguments.map(|argument| argument.replace('\'', "")).collect()
}

/// Lines of the documentation that run a pipeline pass the check as they are: pipelines, overlays and settings are there. (Files
/// of the user's are not, which is warned of.)
#[test]
fn lines_of_the_documentation_pass_the_check() {
    let mut checked = 0;
    for page in [
        "README.md",
        "docs/pipelines.md",
        "docs/running.md",
        "docs/manifests.md",
        "docs/training.md",
        "docs/evaluation.md",
        "docs/gpu.md",
        "docs/machines.md",
        "docs/models.md",
        "configs/parakeet_tdt_0.6b_v3.yaml",
    ] {
        let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(page)).unwrap();
        for line in text.lines() {
            // Code is indented, in a block, or in a comment of an overlay.
            let line = line.trim_start_matches([' ', '#']);
            let line = line
                .split(" #")
                .next()
                .unwrap_or_default()
                .trim_end_matches(['\\', ' ']);
            let Some(at) = ["flow run ", "flow memory ", "flow check "].iter().find_map(|command| {
                let at = line.find(command)?;
                let before = &line[..at];
                (before.is_empty() || before == "srun " || before.starts_with("HF_TOKEN="))
                    .then_some(at + command.len())
            }) else {
                continue;
            };
            let arguments = divided(&line[at..]);
            let Some((pipeline, rest)) = arguments.split_first() else {
                continue;
            };
            if !pipeline
                .chars()
                .all(|letter| letter.is_ascii_lowercase() || "_/.2".contains(letter))
                || line.contains("...") && !line.starts_with("HF_TOKEN=")
            {
                // `PIPELINE`, or settings that are left out.
                continue;
            }
            let mut flow = program();
            flow.arg("check").arg(pipeline);
            for pair in rest
                .windows(2)
                .filter(|pair| ["--set", "--config"].contains(&pair[0].as_str()))
            {
                flow.args(pair);
            }
            let output = flow.output().unwrap();
            assert_eq!(
                output.status.code(),
                Some(0),
                "{page}: {line}\n{}",
                String::from_utf8_lossy(&output.stderr)
            );
            checked += 1;
        }
    }
    assert!(checked > 25, "{checked} lines were found");
}

/// What a preset leaves free of a GPU: for CUDA, cuBLAS and the allocator's gaps.
fn margin(bytes: u64) -> u64 {
    1_000_000_000.max(bytes / 20)
}

/// The small models of `configs/` need little of any device; that of 0.6 billion parameters is what presets are for.
#[test]
#[ignore = "minutes: predicts the memory of 627 million parameters four times"]
fn every_preset_fits_into_its_memory() {
    for device in overlays("configs/devices") {
        let (_, bytes) = promised(&device);
        // CUDA, cuBLAS and the allocator take some of it for themselves.
        let left = (bytes - margin(bytes)).to_string();
        let configs = [PathBuf::from("configs/parakeet_tdt_0.6b_v3.yaml"), device];
        let output = flow("memory", &configs, &["--device-memory", &left]);
        expect_code(&output, 0);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            said.contains("24 encoder layers") && said.contains("fits into"),
            "{said}"
        );
    }
}

/// A run says so before it reads anything; data is prepared all the same, and a plan is made.
#[cfg(not(feature = "cuda"))]
#[test]
fn a_program_without_cuda_refuses_to_train_and_nothing_else() {
    let place = Workplace::new("micro");
    let run = |command: &str, more: &[&str]| {
        let mut flow = place.command(command, PIPELINE, &["train.max_steps=2"]);
        for name in ["checkpoints", "report", "audio", "model_out"] {
            flow.args(["--set", &format!("{name}={}", place.path(name).display())]);
        }
        flow.args(["--config", "configs/devices/1x8gb.yaml"]);
        flow.args(more).output().unwrap()
    };
    let refused = run("run", &[]);
    expect_code(&refused, 2);
    let said = stderr(&refused);
    assert!(said.contains("without CUDA") && said.contains("train"), "{said}");
    assert!(!place.out().exists() && !place.path("audio").exists() && !place.path("checkpoints").exists());
    expect_code(&run("plan", &[]), 0);
    expect_code(&run("run", &["--until", "fitting"]), 0);
    assert!(place.path("audio").exists());
}
