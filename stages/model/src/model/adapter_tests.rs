//! NeMo's linear adapters, against NeMo.

use std::collections::HashMap;

use flow_cuda_emulator::DeviceUnderTest;
use flow_kernels::testing::values;
use serde_yaml::Value;

use super::*;
use crate::checkpoint::{Format, TensorEntry};
use crate::testing::{golden, quiet};
use flow_nn::parameters::{Gradients, ParameterId};
use flow_nn::tensor_files::read_packed;

fn tensors() -> HashMap<String, Tensor> {
    golden::tensors_of(&golden::file_of("adapters", "adapters.safetensors"))
}

fn facts() -> Value {
    // As YAML, which keeps the order of the adapters.
    serde_yaml::from_slice(&read_packed(&golden::file_of("adapters", "adapters.json"), 1).unwrap()).unwrap()
}

/// The golden archive with both adapters, of which these are enabled, and a change of their section.
fn opened(enabled: &[&str], change: impl FnOnce(&mut Value)) -> OpenModel {
    let mut opened = OpenModel::open(&golden::file("model.nemo")).unwrap();
    let facts = facts();
    let mut config: Value = serde_yaml::from_str(&opened.config_yaml).unwrap();
    config["adapters"] = facts["nemo_config_adapters"].clone();
    config["encoder"]["_target_"] = facts["nemo_config_encoder_target"].clone();
    for name in ["pre_ad", "post_ad"] {
        config["adapters"][name]["enabled"] = enabled.contains(&name).into();
    }
    change(&mut config["adapters"]);
    opened.config_yaml = serde_yaml::to_string(&config).unwrap();
    let tensors = tensors().into_iter();
    let tensors = tensors.filter_map(|(name, tensor)| Some((name.strip_prefix("adapter.")?.to_owned(), tensor)));
    opened
        .tensors
        .extend(tensors.map(|(name, tensor)| TensorEntry::in_memory(&name, tensor)));
    opened
}

fn model_of(opened: OpenModel, dtype: DType, device: &Device) -> Result<TdtModel> {
    let config = ModelConfig::from_nemo_yaml(&opened.config_yaml)?;
    TdtModel::from_open(opened, config, dtype, dtype, device)
}

fn model(enabled: &[&str], dtype: DType, device: &Device) -> TdtModel {
    model_of(opened(enabled, |_| ()), dtype, device).unwrap()
}

fn batch() -> MicroBatch {
    let golden = tensors();
    let lengths = golden::lengths(&golden["train.target_len"]);
    let row = |(number, length): (usize, usize)| {
        let row = golden::lengths(&golden["train.targets"].get(number).unwrap());
        row[..length].iter().map(|&token| token as u32).collect()
    };
    MicroBatch {
        signals: golden::waves("train")[..2].to_vec(),
        tokens: lengths.into_iter().enumerate().map(row).collect(),
        prompts: Vec::new(),
    }
}

const CASES: [(&str, &[&str]); 4] = [
    ("both", &["pre_ad", "post_ad"]),
    ("pre_only", &["pre_ad"]),
    ("post_only", &["post_ad"]),
    ("none", &[]),
];

/// Frames and tokens of archives with adapters, each of which is enabled or not, and those of what is written of them.
#[test]
fn frames_and_tokens_are_nemos() {
    let (golden, facts) = (tensors(), facts());
    let waves = golden::waves("eval");
    let waves: Vec<&[f32]> = waves[..2].iter().map(Vec::as_slice).collect();
    let place = tempfile::tempdir().unwrap();
    for (case, enabled) in CASES {
        let archive = place.path().join(format!("{case}.nemo"));
        opened(enabled, |_| ())
            .write(&archive, Format::Nemo, None, false)
            .unwrap();
        let read = TdtModel::load(&archive, DType::F32, &Device::Cpu).unwrap();
        let folder = place.path().join(case);
        read.save(&folder).unwrap();
        for path in [archive, folder] {
            let model = TdtModel::load(&path, DType::F32, &Device::Cpu).unwrap();
            assert!(model.unused_tensors().is_empty(), "{:?}", model.unused_tensors());
            // Also those that are not enabled.
            for (name, tensor) in golden.iter().filter(|(name, _)| name.starts_with("adapter.")) {
                let id = model.parameters.id(&name["adapter.".len()..]).unwrap();
                assert_eq!(values(model.parameters.get(id)), values(tensor), "{name}");
            }
            let (frames, lengths) = model.encode(&waves).unwrap();
            let theirs = golden[&format!("{case}.encoded")].transpose(1, 2).unwrap();
            let difference = golden::valid_difference(&frames, &theirs, &lengths);
            assert!(
                difference < golden::FROM_WAVES * golden::magnitude(&theirs),
                "{case}: {difference:e}"
            );
            let found: Vec<Vec<u32>> = model.transcribe(&waves).unwrap().into_iter().map(|x| x.ids).collect();
            let expected: Vec<Vec<u32>> = serde_yaml::from_value(facts["outputs"][case]["ids"].clone()).unwrap();
            assert_eq!(found, expected, "{case}");
        }
    }
}

/// Recordings of any length go through the layers in blocks: the same tokens.
#[test]
fn a_recording_in_blocks_gives_the_frames_of_the_whole() {
    let model = model(&["pre_ad", "post_ad"], DType::F64, &Device::Cpu);
    let wave = golden::wave("eval", 1);
    let (whole, lengths) = model.encode(&[&wave]).unwrap();
    let features = model.front_end.compute(&[&wave], None).unwrap();
    let valid = features.lengths[0];
    let by_frame = (0..valid).flat_map(|t| {
        let features = &features;
        (0..features.bands).map(move |band| features.values[band * features.frames + t])
    });
    let mut stream = model.encoder.stream(&model.parameters, valid, None).unwrap();
    let parts = stream.feed(&by_frame.collect::<Vec<f32>>()).unwrap();
    let found = Tensor::cat(&parts, 0).unwrap();
    let whole = whole.get(0).unwrap().narrow(0, 0, lengths[0]).unwrap();
    let difference = flow_kernels::testing::max_difference(&found, &whole);
    assert!(difference < 1e-9, "{difference:e}");
}

/// NeMo's loss and gradients of an adapter in training, the rest of the network being frozen.
#[test]
fn gradients_are_nemos() {
    let (golden, facts) = (tensors(), facts());
    let mut model = model(&["pre_ad"], DType::F32, &Device::Cpu);
    model.set_batch_norm(BatchNorm::Frozen);
    let mut gradients = Gradients::new(&model.parameters);
    let output = model.train_micro_batch(&batch(), &quiet(), &mut gradients).unwrap();
    let loss = facts["train"]["loss"].as_f64().unwrap();
    assert!((output.loss - loss).abs() < 1e-5 * loss, "{}, {loss}", output.loss);
    let mut compared = 0;
    for (name, theirs) in &golden {
        let Some(name) = name.strip_prefix("grad.") else {
            continue;
        };
        let found = gradients.get(model.parameters.id(name).unwrap()).unwrap();
        let (found, theirs) = (values(found), values(theirs));
        let difference: f64 = found.iter().zip(&theirs).map(|(a, b)| (a - b).powi(2)).sum();
        let norm: f64 = theirs.iter().map(|x| x * x).sum();
        assert!(
            difference.sqrt() <= 1e-4 * norm.sqrt(),
            "{name}: {difference:e} of {norm:e}"
        );
        compared += 1;
    }
    assert_eq!(compared, 8);
    // An adapter that is not enabled has none.
    let is_other = |(id, _): (ParameterId, &Tensor)| model.parameters.parameter(id).name.contains(".post_ad.");
    assert!(!gradients.iter().any(is_other));
}

/// Gradients of adapters of both forms, and of what is before and between them, against finite differences of the loss in 64 bits;
/// with dropout, and the same from layers that are computed again.
#[test]
fn gradients_agree_with_finite_differences() {
    let with_dropout = |adapters: &mut Value| adapters["pre_ad"]["dropout"] = 0.3.into();
    let both = opened(&["pre_ad", "post_ad"], with_dropout);
    let mut model = model_of(both, DType::F64, &Device::Cpu).unwrap();
    model.set_batch_norm(BatchNorm::Frozen);
    let options = TrainOptions {
        seed: 9,
        ..TrainOptions::default()
    };
    let trained = |model: &mut TdtModel| {
        let mut gradients = Gradients::new(&model.parameters);
        let loss = model
            .train_micro_batch(&batch(), &options, &mut gradients)
            .unwrap()
            .loss;
        (loss, gradients)
    };
    let (_, gradients) = trained(&mut model);
    model.set_recompute(true);
    let (_, again) = trained(&mut model);
    let mut checked = 0;
    for (id, gradient) in gradients.iter() {
        let name = model.parameters.parameter(id).name.clone();
        let gradient = values(gradient);
        assert_eq!(gradient, values(again.get(id).unwrap()), "{name}");
        if !name.contains(".adapter_layer.") && !name.ends_with("norm_out.bias") {
            continue;
        }
        let largest = gradient
            .iter()
            .enumerate()
            .max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()));
        let at = largest.unwrap().0;
        let original = model.parameters.get(id).clone();
        let mut loss_at = |step: f64| {
            let mut moved = values(&original);
            moved[at] += step;
            let moved = Tensor::from_vec(moved, original.dims(), &Device::Cpu).unwrap();
            model.parameters.set(id, moved).unwrap();
            trained(&mut model).0
        };
        let step = 1e-6;
        let slope = (loss_at(step) - loss_at(-step)) / (2.0 * step);
        model.parameters.set(id, original).unwrap();
        let difference = (slope - gradient[at]).abs();
        assert!(
            difference <= 1e-5 * gradient[at].abs().max(1e-2),
            "{name}: {slope}, {}",
            gradient[at]
        );
        checked += 1;
    }
    assert_eq!(checked, 2 * (8 + 1));
}

/// On kernels for devices: the frames and gradients of the CPU.
#[test]
fn adapters_are_the_same_on_a_device() {
    let run = |device: &Device| {
        let mut model = model(&["pre_ad", "post_ad"], DType::F32, device);
        model.set_batch_norm(BatchNorm::Frozen);
        let mut gradients = Gradients::new(&model.parameters);
        let output = model.train_micro_batch(&batch(), &quiet(), &mut gradients).unwrap();
        let all = gradients.iter();
        let all = all.map(|(id, gradient)| (model.parameters.parameter(id).name.clone(), values(gradient)));
        let all = all.filter(|(name, _)| name.contains(".adapter_layer."));
        (output.loss, all.collect::<Vec<_>>())
    };
    let (loss, expected) = run(&Device::Cpu);
    let (found_loss, found) = DeviceUnderTest::get().run(run);
    assert!((found_loss - loss).abs() < 1e-4 * loss, "{found_loss}, {loss}");
    assert_eq!(found.len(), expected.len());
    for ((name, found), (_, expected)) in found.iter().zip(&expected) {
        let difference: f64 = found.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
        let norm: f64 = expected.iter().map(|x| x * x).sum();
        assert!(
            difference.sqrt() <= 1e-3 * norm.sqrt(),
            "{name}: {difference:e} of {norm:e}"
        );
    }
}

/// What is not supported, and what is damaged, is named.
#[test]
fn other_adapters_are_refused_by_name() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 9] = [
        (
            |a| a["pre_ad"]["_target_"] = "RelPositionMultiHeadAttentionAdapter".into(),
            "adapters.pre_ad._target_",
        ),
        (
            |a| a["pre_ad"]["activation"] = "selu".into(),
            "adapters.pre_ad.activation",
        ),
        (
            |a| a["pre_ad"]["norm_position"] = 3.into(),
            "adapters.pre_ad.norm_position",
        ),
        (
            |a| a["pre_ad"]["in_features"] = 32.into(),
            "adapters.pre_ad.in_features",
        ),
        (|a| a["pre_ad"]["dim"] = 0.into(), "adapters.pre_ad.dim"),
        (
            |a| a["pre_ad"]["dim"] = 9.into(),
            "encoder.layers.0.adapter_layer.pre_ad.module.1.weight",
        ),
        (|a| a["pre_ad"] = 1.into(), "adapters.pre_ad"),
        (
            |a| a["global_cfg"]["adapter_meta_cfg"]["modules"]["pre_ad"] = "joint".into(),
            "adapters.global_cfg.adapter_meta_cfg.modules.pre_ad",
        ),
        (
            |a| a["more"] = a["pre_ad"].clone(),
            "encoder.layers.0.adapter_layer.more.module.0.weight",
        ),
    ];
    for (change, named) in cases {
        let refused = model_of(opened(&["pre_ad", "post_ad"], change), DType::F32, &Device::Cpu);
        let error = refused.map(drop).unwrap_err().to_string();
        assert!(error.contains(named), "{named}: {error}");
    }
    // One that the configuration does not have.
    let change = |adapters: &mut Value| drop(adapters.as_mapping_mut().unwrap().remove("post_ad"));
    let refused = model_of(opened(&["pre_ad"], change), DType::F32, &Device::Cpu);
    let error = refused.map(drop).unwrap_err().to_string();
    assert!(error.contains(".adapter_layer.post_ad."), "{error}");
    // With fewer layers than the file has, its adapters are not missed.
    let opened_again = opened(&["pre_ad", "post_ad"], |_| ());
    let mut config = ModelConfig::from_nemo_yaml(&opened_again.config_yaml).unwrap();
    config.encoder.n_layers = 1;
    TdtModel::from_open(opened_again, config, DType::F32, DType::F32, &Device::Cpu).unwrap();
    // transformers has none.
    let folder = tempfile::tempdir().unwrap();
    let written = opened(&["pre_ad"], |_| ()).write(&folder.path().join("hf"), Format::HuggingFace, None, false);
    let error = written.unwrap_err().to_string();
    assert!(error.contains("the adapter `pre_ad`"), "{error}");
    // Nor are those trained that NeMo trains otherwise.
    let change = |adapters: &mut Value| adapters["pre_ad"]["adapter_strategy"]["l2_lambda"] = 0.1.into();
    let mut model = model_of(opened(&["pre_ad"], change), DType::F32, &Device::Cpu).unwrap();
    let mut gradients = Gradients::new(&model.parameters);
    let refused = model.train_micro_batch(&batch(), &quiet(), &mut gradients).unwrap_err();
    assert!(refused.to_string().contains("`pre_ad`"), "{refused}");
}
