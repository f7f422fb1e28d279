//! The presets of `configs/`: each fits the device of its name, also if the program was not built for that device.

use std::path::{Path, PathBuf};
use std::process::Output;

use flow_runtime::registry::Registry;
use flow_runtime::spec::{self, Overrides, yaml};
use flow_training::settings::{Precision, TrainSettings};

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

/// The settings of training that the pipeline has with these overlays.
fn resolved(configs: &[PathBuf]) -> TrainSettings {
    let overrides = Overrides {
        configs: configs.to_vec(),
        ..Overrides::default()
    };
    let registry = Registry::new(flow::kinds::all()).expect("kinds");
    let pipeline = spec::load(Path::new(PIPELINE), &overrides, &registry)
        .map_err(|_| configs)
        .expect("a pipeline");
    let pipeline = spec::check(pipeline, &registry)
        .map_err(|_| configs)
        .expect("a right one")
        .pipeline;
    let mut stages = pipeline.stages.iter().filter(|stage| stage.uses == "training.train");
    let stage = stages.next().expect("training");
    yaml::typed(&stage.with)
        .map_err(|error| error.message)
        .expect("settings")
}

#[test]
fn every_preset_trains_where_its_name_says() {
    for device in overlays("configs/devices") {
        let (ranks, _) = promised(&device);
        for model in overlays("configs") {
            let configs = [model, device.clone()];
            expect_code(&flow("check", &configs, &[]), 0);
            let train = resolved(&configs);
            assert_eq!(
                (train.device.as_str(), train.precision, train.ranks),
                ("cuda", Precision::Bf16, ranks),
                "{configs:?}"
            );
        }
    }
    // That of a model for GPUs says so alone too.
    let parakeet = [PathBuf::from("configs/parakeet_tdt_0.6b_v3.yaml")];
    expect_code(&flow("check", &parakeet, &[]), 0);
    let train = resolved(&parakeet);
    assert_eq!((train.device.as_str(), train.precision), ("cuda", Precision::Bf16));
}

/// The small models of `configs/` need little of any device; that of 0.6 billion parameters is what presets are for.
#[test]
#[ignore = "minutes: predicts the memory of 627 million parameters four times"]
fn every_preset_fits_into_its_memory() {
    for device in overlays("configs/devices") {
        let (_, bytes) = promised(&device);
        // CUDA, cuBLAS and the allocator take some of it for themselves.
        let left = (bytes - 1_000_000_000).to_string();
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
