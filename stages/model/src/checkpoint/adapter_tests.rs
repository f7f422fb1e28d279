use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use flow_kernels::testing::{max_difference, values};

use super::*;
use crate::checkpoint::Format;
use crate::model::TdtModel;
use crate::testing::golden;

fn adapter(case: &str) -> PathBuf {
    golden::file_of("adapters", &format!("lora_{case}"))
}

fn base() -> OpenModel {
    OpenModel::open(&golden::file("hf")).unwrap()
}

fn tensor(model: &OpenModel, name: &str) -> Tensor {
    let entry = model.tensors.iter().find(|entry| entry.name == name);
    entry.unwrap_or_else(|| panic!("{name}")).load().unwrap()
}

/// A copy of an adapter with another configuration, or with one tensor more or less.
fn changed(
    case: &str,
    config: impl FnOnce(&mut Value),
    tensors: impl FnOnce(&mut Vec<(String, Tensor)>),
) -> (tempfile::TempDir, Result<OpenModel>) {
    let place = tempfile::tempdir().unwrap();
    let mut value: Value = serde_json::from_slice(&std::fs::read(adapter(case).join(ADAPTER_CONFIG)).unwrap()).unwrap();
    config(&mut value);
    std::fs::write(place.path().join(ADAPTER_CONFIG), value.to_string()).unwrap();
    let mut all = flow_nn::tensor_files::read_safetensors(&adapter(case).join(ADAPTER_WEIGHTS)).unwrap();
    tensors(&mut all);
    let all: Vec<(&str, &Tensor)> = all.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_safetensors(&place.path().join(ADAPTER_WEIGHTS), &all).unwrap();
    let merged = Adapter::open(place.path()).and_then(|adapter| base().with_adapter(&adapter));
    (place, merged)
}

/// Adapters of PEFT, merged, give the weights and the encoder that PEFT computes.
#[test]
fn adapters_of_peft_are_merged_as_peft_merges_them() {
    let expected = golden::tensors_of(&golden::file_of("adapters", "lora.safetensors"));
    let waves = golden::waves("train");
    let waves: Vec<&[f32]> = waves[..2].iter().map(Vec::as_slice).collect();
    for (case, weight, changes) in [
        ("qkvo", "encoder.layers.0.self_attn.linear_k.weight", 8),
        ("rslora_ff", "encoder.layers.0.feed_forward1.linear2.weight", 8),
        ("mixed_bias_save", "encoder.layers.0.self_attn.linear_q.weight", 11),
        ("conv1d", "encoder.layers.0.conv.pointwise_conv1.weight", 4),
    ] {
        let path = PathBuf::from(format!("{}+{}", golden::file("hf").display(), adapter(case).display()));
        let merged = OpenModel::open(&path).unwrap();
        let theirs = expected
            .iter()
            .find(|(name, _)| name.starts_with(&format!("{case}.merged.")))
            .unwrap();
        // One rounding of f32 of the largest weight at most, by the order of the sum over the rank.
        let difference = max_difference(&tensor(&merged, weight), theirs.1);
        assert!(difference <= 1.2e-7, "{case}: {difference}");
        let before = base();
        let differ = merged.tensors.iter().zip(&before.tensors);
        let differ = differ.filter(|(a, b)| values(&a.load().unwrap()) != values(&b.load().unwrap()));
        assert_eq!(differ.count(), changes, "{case}");

        let model = TdtModel::load(&path, DType::F32, &Device::Cpu).unwrap();
        assert!(model.unused_tensors().is_empty());
        let (frames, lengths) = model.encode(&waves).unwrap();
        let theirs = &expected[&format!("{case}.last_hidden_state")];
        let difference = golden::valid_difference(&frames, theirs, &lengths);
        assert!(
            difference < golden::FROM_WAVES * golden::magnitude(theirs),
            "{case}: encoder differs by {difference}"
        );
    }
}

/// The forms in which models are written hold the merged weights.
#[test]
fn merged_weights_are_written() {
    let place = tempfile::tempdir().unwrap();
    let merged = base()
        .with_adapter(&Adapter::open(&adapter("conv1d")).unwrap())
        .unwrap();
    let name = "encoder.layers.1.conv.pointwise_conv2.weight";
    for (file, format) in [
        ("a.nemo", Format::Nemo),
        ("hf", Format::HuggingFace),
        ("flow", Format::Folder),
    ] {
        let path = place.path().join(file);
        merged.write(&path, format, None, false).unwrap();
        let again = OpenModel::open(&path).unwrap();
        assert_eq!(values(&tensor(&again, name)), values(&tensor(&merged, name)), "{file}");
    }
    assert_ne!(values(&tensor(&base(), name)), values(&tensor(&merged, name)));
}

#[test]
fn a_path_may_name_a_model_and_an_adapter() {
    let place = tempfile::tempdir().unwrap();
    let (model, own) = (place.path().join("a+b"), adapter("qkvo"));
    base().write(&model, Format::Folder, None, false).unwrap();
    let both = PathBuf::from(format!("{}+{}", model.display(), own.display()));
    assert_eq!(base_and_adapter(&both), Some((model.clone(), own.clone())));
    // An existing path is not divided, and what follows the sign has to be an adapter.
    assert_eq!(base_and_adapter(&model), None);
    assert_eq!(base_and_adapter(Path::new("x+y")), None);
    assert!(OpenModel::exists(&both) && !OpenModel::exists(Path::new("x+y")));
    assert_eq!(OpenModel::name(&both), "a+b+lora_qkvo");
    let files = OpenModel::files(&both).unwrap();
    assert!(files.starts_with(&OpenModel::files(&model).unwrap()) && files.contains(&own.join(ADAPTER_WEIGHTS)));
    // Two adapters, one after the other.
    let three = PathBuf::from(format!("{}+{}", both.display(), adapter("conv1d").display()));
    let notes = OpenModel::open(&three).unwrap().notes;
    assert_eq!(
        notes.iter().filter(|note| note.starts_with("adapter ")).count(),
        2,
        "{notes:?}"
    );
    let alone = OpenModel::open(&own).unwrap_err().to_string();
    assert!(
        alone.contains("is an adapter without a model: write `MODEL+"),
        "{alone}"
    );
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let refused = |config: fn(&mut Value), tensors: fn(&mut Vec<(String, Tensor)>)| {
        changed("qkvo", config, tensors).1.unwrap_err().to_string()
    };
    for (config, words) in [
        (
            (|c| c["peft_type"] = json!("LOHA")) as fn(&mut Value),
            "`peft_type` is \"LOHA\"",
        ),
        (|c| c["use_dora"] = json!(true), "`use_dora` is true"),
        (|c| c["use_of_tomorrow"] = json!(true), "`use_of_tomorrow` is true"),
        (|c| c["lora_bias"] = json!(true), "`lora_bias` is true"),
        (|c| c["layer_replication"] = json!([[0, 2]]), "`layer_replication`"),
        (
            |c| c["init_lora_weights"] = json!("pissa_niter_4"),
            "`init_lora_weights` is `pissa_niter_4`",
        ),
        (|c| c["r"] = json!(5), "but adapter_config.json gives it rank 5"),
        (|c| c["r"] = json!(0), "rank"),
        (|c| c["r"] = json!(-1), "invalid value"),
        (|c| c["lora_alpha"] = json!("8"), "invalid type"),
        (
            |c| c["rank_pattern"] = json!({"(": 4}),
            "`(` is not a regular expression",
        ),
        (|c| *c = json!([]), "`peft_type` is null"),
    ] {
        let error = refused(config, |_| ());
        assert!(error.contains(words), "{error}");
    }
    for (tensors, words) in [
        (
            (|all| drop(all.remove(0))) as fn(&mut Vec<(String, Tensor)>),
            "has one of `lora_A` and `lora_B` without the other",
        ),
        (
            |all| all[0].1 = Tensor::zeros((4, 65), DType::F32, &Device::Cpu).unwrap(),
            "k_proj.lora_A.weight` has shape [4, 65], but for",
        ),
        (
            |all| all[1].1 = Tensor::zeros((64, 4, 1), DType::F32, &Device::Cpu).unwrap(),
            "k_proj.lora_B.weight` has shape [64, 4, 1], but for",
        ),
        (
            |all| all[0].1 = (all[0].1.clone() * f64::NAN).unwrap(),
            "k_proj.lora_A.weight` has values that are not finite numbers",
        ),
        (
            |all| all[0].1 = all[0].1.to_dtype(DType::I64).unwrap(),
            "k_proj.lora_A.weight` is of type i64",
        ),
        (
            |all| all[0].1 = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap(),
            "has shape [4], but",
        ),
        (
            |all| {
                for (name, _) in &mut all[..2] {
                    *name = name.replace("layers.0", "layers.9");
                }
            },
            "is for `encoder.layers.9.self_attn.linear_k.weight`, which",
        ),
        (
            |all| {
                for (name, _) in &mut all[..2] {
                    *name = name.replace("self_attn.k_proj", "conv.depthwise_conv");
                }
            },
            "is not a linear layer or pointwise convolution",
        ),
        (
            |all| all[0].0 = "base_model.model.decoder.embedding.lora_embedding_A".into(),
            "lora_embedding_A` is of a form of LoRA that is not supported",
        ),
        (
            |all| all.push(("base_model.model.joint.head.bias".into(), all[0].1.clone())),
            "joint.head.bias` has shape [4, 64], but the model's has",
        ),
        (|all| all.clear(), "has no tensors"),
    ] {
        let error = refused(|_| (), tensors);
        assert!(error.contains(words), "{error}");
    }
    let (place, _) = changed("qkvo", |_| (), |_| ());
    let weights = place.path().join(ADAPTER_WEIGHTS);
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    assert!(Adapter::open(place.path()).unwrap_err().to_string().contains("cut off"));
    std::fs::remove_file(&weights).unwrap();
    assert!(
        Adapter::open(place.path())
            .unwrap_err()
            .to_string()
            .contains(ADAPTER_WEIGHTS)
    );
}

#[test]
fn what_an_adapter_names_and_lacks_or_has_twice_is_said() {
    let (_place, merged) = changed(
        "qkvo",
        |config| {
            config["modules_to_save"] = json!(["nope"]);
            config["lora_magic"] = json!(true);
            config["lora_other"] = Value::Null;
        },
        |tensors| tensors.retain(|(name, _)| !name.contains("q_proj")),
    );
    let notes = merged.unwrap().notes.join("; ");
    for part in [
        "`target_modules` names `q_proj`",
        "`modules_to_save` names `nope`",
        "the setting `lora_magic` (true) is not known",
    ] {
        assert!(notes.contains(part), "{notes}");
    }
    assert_eq!(notes.matches("is not known").count(), 1, "{notes}");
    let twice = |rename: fn(&str) -> String| {
        let (_place, merged) = changed(
            "qkvo",
            |_| {},
            |tensors| {
                let again: Vec<(String, Tensor)> = tensors
                    .iter()
                    .filter(|(name, _)| name.contains("layers.0.self_attn.q_proj"))
                    .map(|(name, tensor)| (rename(name), tensor.clone()))
                    .collect();
                assert_eq!(again.len(), 2);
                tensors.extend(again);
            },
        );
        merged.map(drop).unwrap_err().to_string()
    };
    let without_prefix = twice(|name| name.replacen(PREFIX, "", 1));
    assert!(without_prefix.contains("are for the same matrix"), "{without_prefix}");
    let by_other_name = twice(|name| name.replacen("q_proj", "linear_q", 1));
    assert!(by_other_name.contains("are for the same module"), "{by_other_name}");
}

#[test]
fn factors_beyond_f32_are_refused_and_so_are_sums() {
    let alpha = |alpha: f64, times: f64| {
        let (place, merged) = changed(
            "qkvo",
            |config| config["lora_alpha"] = json!(alpha),
            |tensors| {
                for (_, tensor) in tensors {
                    *tensor = (&*tensor * times).unwrap();
                }
            },
        );
        let name = "encoder.layers.0.self_attn.linear_k.weight";
        let loaded = merged.and_then(|merged| {
            let entry = merged.tensors.iter().find(|entry| entry.name == name).unwrap();
            entry.load().map(drop)
        });
        drop(place);
        loaded.map_err(|error| error.to_string())
    };
    assert!(alpha(1e300, 1.0).unwrap_err().contains("give no factor"));
    // The factor is finite, the weights are not.
    let error = alpha(1e37, 1e6).unwrap_err();
    assert!(
        error.contains("linear_k.weight") && error.contains("not finite numbers"),
        "{error}"
    );
    alpha(16.0, 1.0).unwrap();
}

#[test]
fn of_several_patterns_the_first_in_the_file_counts() {
    let of = |text: &str| {
        let patterns: Ordered<f64> = serde_json::from_str(text).unwrap();
        value_of(Some(&patterns), "model.encoder.layers.0.self_attn.q_proj")
    };
    assert_eq!(
        of(r#"{"self_attn.q_proj": 16, "layers.0.self_attn.q_proj": 64}"#),
        Some(16.0)
    );
    assert_eq!(
        of(r#"{"layers.0.self_attn.q_proj": 64, "self_attn.q_proj": 16}"#),
        Some(64.0)
    );
    assert_eq!(of(r#"{"k_proj": 1}"#), None);
    assert_eq!(
        of(r#"{"model.encoder.layers.0.self_attn.q_proj": 4, "q_proj": 5}"#),
        Some(4.0)
    );
}
