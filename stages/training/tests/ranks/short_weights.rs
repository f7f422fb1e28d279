//! Weights that are stored in bf16: their averages and master weights are in 32 bits.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use flow_training::settings::{OnChange, Optimizer, Precision, TrainSettings};

use super::{numbers, processes, settings, train, train_distributed};

const MATRIX: &str = "encoder.layers.0.feed_forward1.linear1.weight";

fn short(folder: &Path, ranks: u32, master_weights: bool) -> TrainSettings {
    TrainSettings {
        precision: Precision::Bf16,
        master_weights,
        average_decay: 0.9,
        ..settings(folder, ranks)
    }
}

fn tensor(checkpoint: &Path, file: &str, name: &str) -> Tensor {
    let tensors = candle_core::safetensors::load(checkpoint.join(file), &Device::Cpu).expect("tensors");
    tensors
        .get(name)
        .unwrap_or_else(|| panic!("{file} has no {name}"))
        .clone()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    let wide = tensor.to_dtype(DType::F32).and_then(|tensor| tensor.flatten_all());
    wide.and_then(|wide| wide.to_vec1()).expect("values")
}

/// Averages are not rounded, master weights are those that the weights are rounded from, and training goes on from both with the
/// same bits.
#[test]
fn averages_and_master_weights_are_kept_in_32_bits() {
    let folder = tempfile::tempdir().unwrap();
    for master_weights in [false, true] {
        for optimizer in [Optimizer::Adamw, Optimizer::Adamw8bit] {
            let of = |name: &str| {
                let name = format!("{name} {master_weights} {optimizer:?}");
                let mut settings = short(&folder.path().join(name), 1, master_weights);
                settings.optimizer = optimizer;
                settings
            };
            let mut whole = train(&of("whole"), 0..6);
            let expected = numbers(&mut whole);
            train(&of("halves"), 0..4).checkpoint().expect("a checkpoint");
            assert!(
                numbers(&mut train(&of("halves"), 4..6)) == expected,
                "{master_weights} {optimizer:?}"
            );
            let path = whole.checkpoint().expect("a checkpoint");
            let (average, live) = (
                tensor(&path, "model.safetensors", MATRIX),
                tensor(&path, "live.safetensors", MATRIX),
            );
            assert_eq!((average.dtype(), live.dtype()), (DType::F32, DType::BF16));
            let rounded = average.to_dtype(DType::BF16).expect("a type");
            assert!(values(&rounded) != values(&average), "the average is in bf16");
            let optimizer = path.join("optimizer.safetensors");
            let state = candle_core::safetensors::load(optimizer, &Device::Cpu).expect("the state");
            let masters = state.keys().filter(|name| name.starts_with("master.")).count();
            assert_eq!(masters > 0, master_weights);
            if let Some(master) = state.get(&format!("master.{MATRIX}")) {
                assert!(values(&master.to_dtype(DType::BF16).expect("a type")) == values(&live));
                assert!(values(master) != values(&live));
            }
        }
    }
}

/// On two ranks, of one process or of two, with updates in place or offloaded: the same bits.
#[test]
fn master_weights_are_shared_out_over_the_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, offload| TrainSettings {
        offload,
        ..short(&folder.path().join(name), 2, true)
    };
    let expected = numbers(&mut train(&of("one", false), 0..5));
    assert!(numbers(&mut train(&of("offloaded", true), 0..5)) == expected);
    for steps in [0..3, 3..5] {
        let (first, _others) = processes(2);
        let mut session = train_distributed(&of("two", false), &first, steps.clone());
        let found = numbers(&mut session);
        assert_eq!(found == expected, steps.end == 5);
    }
    // They may be taken up later, and given up.
    let begin = |master_weights| TrainSettings {
        on_change: OnChange::Continue,
        ..short(&folder.path().join("changed"), 2, master_weights)
    };
    for (steps, master_weights) in [(0..2, false), (2..4, true), (4..6, false)] {
        let mut session = train(&begin(master_weights), steps);
        let has = numbers(&mut session).iter().any(|(name, _)| name.contains(": master."));
        assert_eq!(has, master_weights);
    }
}

/// Rates that move weights by less than a step of bf16: master weights follow those in 32 bits closely.
#[test]
fn master_weights_learn_what_weights_in_32_bits_do() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, precision, master_weights| {
        let settings = TrainSettings {
            precision,
            master_weights,
            average_decay: 0.0,
            phase2_lr: 1e-4,
            dropout: false,
            spec_augment: false,
            ..settings(&folder.path().join(name), 1)
        };
        let path = train(&settings, 0..8).checkpoint().expect("a checkpoint");
        let file = if master_weights {
            "optimizer.safetensors"
        } else {
            "model.safetensors"
        };
        let name = if master_weights {
            format!("master.{MATRIX}")
        } else {
            MATRIX.to_owned()
        };
        values(&tensor(&path, file, &name))
    };
    let wide = run("wide", Precision::F32, false);
    let [master, random] = [true, false].map(|master| run(&format!("short {master}"), Precision::Bf16, master));
    let off = |values: &[f32]| -> f64 {
        let squares = values.iter().zip(&wide).map(|(a, b)| f64::from(a - b).powi(2));
        squares.sum::<f64>().sqrt()
    };
    println!(
        "master weights are off by {:e}, rounded ones by {:e}",
        off(&master),
        off(&random)
    );
    // Both begin with rounded weights.
    assert!(off(&master) < 0.8 * off(&random));
}
