//! LoRA, and rates and freezing by patterns of names.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use flow_model::checkpoint::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_safetensors};
use flow_model::model::TdtModel;
use flow_storage::Storage;
use flow_training::TrainingError;
use flow_training::resolved_settings::ResolvedSettings;
use flow_training::session::Session;
use flow_training::settings::{
    BatchNormStatistics, GroupSettings, LoraSettings, OnChange, Optimizer, Precision, ScheduleShape, TrainSettings,
};

use super::{begin, bytes, micro_batches, settings, train};

/// A model to begin with, in a folder.
fn base(place: &Path) -> PathBuf {
    let folder = place.join("base");
    let session = begin(&settings(&place.join("of-base"), 1));
    session.model().save(&folder).expect("a model");
    folder
}

fn adapted(folder: &Path, init: &Path, steps: u64) -> TrainSettings {
    TrainSettings {
        init: init.to_string_lossy().into_owned(),
        tokenizer: String::new(),
        unfreeze_step: 0,
        batch_norm: BatchNormStatistics::Frozen,
        lora: Some(LoraSettings {
            rank: 3,
            alpha: 6.0,
            targets: vec!["linear.*".into(), "pointwise_conv1".into(), "joint.pred".into()],
            dropout: 0.0,
        }),
        ..settings(folder, steps)
    }
}

#[test]
fn an_adapter_is_trained_and_resumed_to_the_bit() {
    let place = tempfile::tempdir().expect("folder");
    let init = base(place.path());
    let settings = |name: &str| adapted(&place.path().join(name), &init, 8);
    let whole = train(&settings("whole"), 0..8);
    train(&settings("halves"), 0..3);
    let resumed = train(&settings("halves"), 3..8);
    let other = |name: &str, change: &dyn Fn(&mut TrainSettings)| {
        let mut settings = settings(name);
        change(&mut settings);
        train(&settings, 0..8)
    };
    let recomputed = other("recomputed", &|settings| settings.recompute = true);
    let offloaded = other("offloaded", &|settings| settings.offload = true);
    let begun = other("averaged", &|settings| settings.average_decay = 0.9);
    for (what, checkpoint) in [
        ("resumed", &resumed),
        ("recomputed", &recomputed),
        ("offloaded", &offloaded),
    ] {
        for name in [
            "model.safetensors",
            ADAPTER_CONFIG,
            ADAPTER_WEIGHTS,
            "optimizer.safetensors",
        ] {
            assert!(bytes(&whole, name) == bytes(checkpoint, name), "{what}: {name} differs");
        }
    }
    assert!(bytes(&whole, ADAPTER_WEIGHTS) != bytes(&begun, ADAPTER_WEIGHTS));
    // The model beside the adapter is the one that training began with, and the optimizer has nothing of it.
    for checkpoint in [&whole, &begun] {
        assert!(bytes(&init, "model.safetensors") == bytes(checkpoint, "model.safetensors"));
    }
    let matrices = read_safetensors(&whole.join(ADAPTER_WEIGHTS)).expect("an adapter");
    // Attention 5, feed-forward 4, convolution 1, joint 1.
    assert_eq!(matrices.len(), 2 * 11);
    let moments = read_safetensors(&whole.join("optimizer.safetensors")).expect("a state");
    assert_eq!(moments.len(), 2 * matrices.len());
    assert!(moments.iter().all(|(name, _)| name.contains(".lora_")));
    // Opened, it has learned.
    let loss = |folder: &Path| {
        let model = TdtModel::load(folder, DType::F32, &Device::Cpu).expect("a model");
        let losses = (0..8).flat_map(micro_batches);
        let losses = losses.map(|loaded| model.evaluate_loss(&loaded.batch).expect("a loss").loss);
        losses.sum::<f64>()
    };
    let (before, after) = (loss(&init), loss(&whole));
    assert!(after < 0.997 * before, "{before} before, {after} after");
}

#[test]
fn other_ways_to_train_an_adapter_learn_about_the_same() {
    let place = tempfile::tempdir().expect("folder");
    let init = base(place.path());
    let trained = |name: &str, change: &dyn Fn(&mut TrainSettings)| {
        let mut settings = adapted(&place.path().join(name), &init, 6);
        change(&mut settings);
        // Also from a checkpoint.
        train(&settings, 0..2);
        let checkpoint = train(&settings, 2..6);
        let mut values = Vec::new();
        for (_, tensor) in read_safetensors(&checkpoint.join(ADAPTER_WEIGHTS)).expect("an adapter") {
            values.extend(tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values"));
        }
        values
    };
    let expected = trained("one", &|_| ());
    let largest = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    for (name, bound, change) in [
        (
            "ranks",
            1e-3,
            (&|settings: &mut TrainSettings| settings.ranks = 2) as &dyn Fn(&mut TrainSettings),
        ),
        ("short", 0.1, &|settings| settings.precision = Precision::Bf16),
        ("eight_bits", 1e-3, &|settings| {
            settings.optimizer = Optimizer::Adamw8bit
        }),
    ] {
        let found = trained(name, change);
        assert_eq!(found.len(), expected.len());
        let difference = found
            .iter()
            .zip(&expected)
            .fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(difference <= bound * largest, "{name}: {difference} of {largest}");
    }
}

fn refused(settings: &TrainSettings) -> String {
    let session = Session::begin(
        &Storage::default(),
        &settings.clone().into(),
        Some("data"),
        None,
        Box::new(|_| {}),
        None,
    );
    match session {
        Err(TrainingError::Setting { path, message }) => format!("{path}: {message}"),
        Err(error) => error.to_string(),
        Ok(_) => panic!("not refused"),
    }
}

#[test]
fn what_an_adapter_cannot_be_trained_with_is_refused() {
    let place = tempfile::tempdir().expect("folder");
    let init = base(place.path());
    let refused_with = |change: &dyn Fn(&mut TrainSettings)| {
        let mut settings = adapted(&place.path().join("none"), &init, 4);
        change(&mut settings);
        refused(&settings)
    };
    let lora =
        |change: &dyn Fn(&mut LoraSettings)| refused_with(&|settings| change(settings.lora.as_mut().expect("LoRA")));
    for (error, words) in [
        (lora(&|lora| lora.rank = 0), "lora.rank: it must be from 1 to 4096"),
        (lora(&|lora| lora.rank = usize::MAX), "lora.rank:"),
        (lora(&|lora| lora.alpha = f64::NAN), "lora.alpha:"),
        (lora(&|lora| lora.alpha = 0.0), "lora.alpha:"),
        (lora(&|lora| lora.dropout = 0.1), "lora.dropout: only 0 is possible"),
        (lora(&|lora| lora.targets.clear()), "lora.targets: name at least one"),
        (
            lora(&|lora| lora.targets = vec!["(".into()]),
            "lora.targets: `(` is not a regular expression",
        ),
        (
            lora(&|lora| lora.targets = vec!["lstm".into()]),
            "lora: LoRA: `lstm` matches the name of no linear layer",
        ),
        (refused_with(&|settings| settings.init = "none".into()), "init:"),
        (
            refused_with(&|settings| settings.unfreeze_step = 3),
            "unfreeze_step: with `lora` it must be 0",
        ),
        (
            refused_with(&|settings| settings.batch_norm = BatchNormStatistics::Rank),
            "batch_norm: with `lora` it must be `frozen`",
        ),
    ] {
        assert!(error.contains(words), "{error}");
    }
    // A checkpoint is continued with the adapter that it has.
    let before = TrainSettings {
        on_change: OnChange::Continue,
        ..adapted(&place.path().join("changed"), &init, 4)
    };
    train(&before, 0..2);
    let changed = |change: &dyn Fn(&mut TrainSettings)| {
        let mut settings = before.clone();
        change(&mut settings);
        refused(&settings)
    };
    for (error, words) in [
        (changed(&|settings| settings.lora = None), "it was trained with `lora`"),
        (
            changed(&|settings| {
                let lora = settings.lora.as_mut().expect("LoRA");
                (lora.rank, lora.alpha) = (4, 8.0);
            }),
            "has shape [3, ",
        ),
        (
            changed(&|settings| settings.lora.as_mut().expect("LoRA").rank = 4),
            "has the factor 2, and the settings ask for 1.5",
        ),
        (
            changed(&|settings| settings.lora.as_mut().expect("LoRA").alpha = 7.0),
            "has the factor 2, and the settings ask for",
        ),
        (
            changed(&|settings| {
                settings
                    .lora
                    .as_mut()
                    .expect("LoRA")
                    .targets
                    .push("pointwise_conv2".into())
            }),
            "it has 22 matrices of LoRA, and the settings ask for 24",
        ),
        (
            changed(&|settings| drop(settings.lora.as_mut().expect("LoRA").targets.pop())),
            "belongs to no target",
        ),
        (
            changed(&|settings| {
                settings.on_change = OnChange::Refuse;
                settings.lora.as_mut().expect("LoRA").rank = 4;
            }),
            "lora: {",
        ),
    ] {
        assert!(error.contains(words), "{error}");
    }
}

fn group(pattern: &str, scale: f64, freeze: bool) -> GroupSettings {
    GroupSettings {
        pattern: pattern.into(),
        scale,
        freeze,
    }
}

/// Factors on the rate are those of a lower rate, and what is frozen keeps its bits and has no moments.
#[test]
fn groups_have_rates_of_their_own_or_are_frozen() {
    let place = tempfile::tempdir().expect("folder");
    let trained = |name: &str, rate: f64, groups: Vec<GroupSettings>| {
        let settings = TrainSettings {
            phase2_lr: rate,
            unfreeze_step: 0,
            schedule: ScheduleShape::Constant,
            groups,
            ..settings(&place.path().join(name), 4)
        };
        train(&settings, 0..2);
        let checkpoint = train(&settings, 2..4);
        let read = |name: &str| read_safetensors(&checkpoint.join(name)).expect("tensors");
        (read("model.safetensors"), read("optimizer.safetensors"))
    };
    let same = |a: &candle_core::Tensor, b: &candle_core::Tensor| {
        let values = |t: &candle_core::Tensor| {
            let t = t.flatten_all().and_then(|t| t.to_dtype(DType::F64));
            t.and_then(|t| t.to_vec1::<f64>()).expect("values")
        };
        values(a) == values(b)
    };
    let all_same = |a: &[(String, candle_core::Tensor)], b: &[(String, candle_core::Tensor)]| {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.0 == b.0 && same(&a.1, &b.1))
    };
    let slow = trained("slow", 0.5e-3, Vec::new());
    let halved = trained("halved", 1e-3, vec![group(".*", 0.5, false)]);
    assert!(all_same(&slow.0, &halved.0) && all_same(&slow.1, &halved.1));

    let fast = trained("fast", 1e-3, Vec::new());
    assert!(!all_same(&slow.0, &fast.0));
    // The first pattern that matches counts.
    let groups = vec![
        group("norm_out.bias", 1.0, false),
        group(r"encoder\..*", 1.0, true),
        group("bias", 2.0, false),
    ];
    let (frozen, moments) = trained("frozen", 1e-3, groups);
    let start = begin(&settings(&place.path().join("start"), 4));
    for (name, tensor) in &frozen {
        let id = start.model().parameters.id(name).expect("the parameter");
        let parameter = start.model().parameters.parameter(id);
        let stands = !parameter.trainable || (name.starts_with("encoder.") && !name.ends_with("norm_out.bias"));
        let is_statistic = name.contains(".running_") || name.contains("num_batches");
        if !is_statistic {
            assert_eq!(same(tensor, &parameter.tensor), stands, "{name}");
        }
        let has_moments = moments.iter().any(|(other, _)| *other == format!("first.{name}"));
        assert_eq!(has_moments, parameter.trainable && !stands, "{name}");
    }

    let wrong = |groups: Vec<GroupSettings>, batch_norm: BatchNormStatistics| {
        refused(&TrainSettings {
            groups,
            batch_norm,
            ..settings(&place.path().join("wrong"), 4)
        })
    };
    for (groups, words) in [
        (
            vec![group("(", 1.0, false)],
            "groups[0].pattern: `(` is not a regular expression",
        ),
        (vec![group("", 1.0, false)], "groups[0].pattern:"),
        (
            vec![group(".*", 1.0, false), group("nothing", 0.5, false)],
            "groups[1].pattern: `nothing` matches",
        ),
        (vec![group(".*", 0.0, false)], "groups[0].scale:"),
        (vec![group(".*", f64::INFINITY, false)], "groups[0].scale:"),
        (vec![group(".*", 0.5, true)], "groups[0].scale: what is frozen"),
        (vec![group(".*", 1.0, true)], "groups: all parameters are frozen"),
    ] {
        let error = wrong(groups, BatchNormStatistics::Rank);
        assert!(error.contains(words), "{error}");
    }
    let error = wrong(vec![group("bias", 1.0, true)], BatchNormStatistics::Sync);
    assert!(error.contains("groups[0].freeze:"), "{error}");
}

/// Settings without these are recorded and written as before.
#[test]
fn what_is_not_used_is_not_recorded() {
    let settings = TrainSettings::default();
    let written = serde_json::to_value(&settings).expect("JSON");
    let recorded = ResolvedSettings::from(settings).recorded();
    for key in ["lora", "groups", "concatenate"] {
        assert!(written.get(key).is_none() && !recorded.contains_key(key));
    }
}
