use std::collections::HashMap;

use candle_core::{DType, Device};
use serde_json::Value;

use super::*;
use crate::checkpoint::StoredModel;
use crate::config::ChunkContext;
use crate::model::TdtModel;
use crate::model::chunks::NextSamples;
use crate::testing::golden;
use flow_nn::tensor_files::read_packed;

fn tensors() -> HashMap<String, Tensor> {
    golden::tensors_of(&golden::file_of("streaming", "extra.safetensors"))
}

fn facts() -> Value {
    serde_json::from_slice(&read_packed(&golden::file_of("streaming", "extra.json"), 1).unwrap()).unwrap()
}

/// NeMo's configuration of the golden model, which has no archive.
fn config(change: impl FnOnce(&mut Value)) -> Result<ModelConfig> {
    let facts = facts();
    let mut config = facts["config"].clone();
    config["preprocessor"] = serde_json::json!({
        "normalize": "NA", "sample_rate": 16_000, "features": config["encoder"]["feat_in"], "n_fft": 512, "window_size": 0.025,
        "window_stride": 0.01, "pad_to": 0, "dither": 0.0,
    });
    change(&mut config);
    ModelConfig::from_nemo_yaml(&config.to_string())
}

fn model() -> TdtModel {
    let config = config(|_| ()).unwrap();
    let tensors = tensors()
        .into_iter()
        .filter_map(|(name, tensor)| Some((name.strip_prefix("p.")?.to_owned(), tensor)));
    let stored = StoredModel {
        config_yaml: config.to_nemo_yaml().unwrap(),
        tokenizer: None,
        tensors: tensors.collect(),
    };
    let model = TdtModel::from_stored(stored, config, DType::F32, &Device::Cpu).unwrap();
    assert!(model.unused_tensors().is_empty(), "{:?}", model.unused_tensors());
    model
}

fn near(name: &str, found: &Tensor, expected: &Tensor) {
    let difference = flow_kernels::testing::max_difference(found, expected);
    let bound = golden::FROM_WAVES * golden::magnitude(expected);
    assert!(difference < bound, "{name}: {difference:e}");
}

fn waves() -> Vec<Vec<f32>> {
    golden::waves_in(&golden::file_of("streaming", "audio"), "eval")
}

#[test]
fn frames_are_nemos_for_each_prompt() {
    let (golden, facts, waves) = (tensors(), facts(), waves());
    let signals: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
    let mut model = model();
    let encoded = |model: &TdtModel| {
        let (encoded, lengths) = model.encode(&signals).unwrap();
        encoded.get(1).unwrap().narrow(0, 0, lengths[1]).unwrap()
    };
    model.prompt = None;
    near("encoder", &encoded(&model), &golden["prompt.encoder_only1"]);
    for (name, case) in facts["cases"].as_object().unwrap() {
        model.prompt = case["prompt_indices"][1].as_u64().map(|prompt| prompt as usize);
        near(name, &encoded(&model), &golden[&format!("prompt.{name}.encoded1")]);
        // The prompts of a golden batch may differ.
        let found = model.transcribe(&signals[1..]).unwrap().remove(0);
        let expected: Vec<u32> = serde_json::from_value(case["nemo_ids"][1].clone()).unwrap();
        assert_eq!(found.ids[..found.ids.len().min(60)], expected, "{name}");
    }
}

#[test]
fn streams_with_a_prompt_are_nemos() {
    let (golden, facts, waves) = (tensors(), facts(), waves());
    let mut model = model();
    model.set_language(Some("de-DE")).unwrap();
    for (name, case) in facts["streaming_prompt_de_DE_utt1"].as_object().unwrap() {
        let (left, right) = name.split_once('_').unwrap();
        let context = ChunkContext {
            left: left.parse().unwrap(),
            right: right.parse().unwrap(),
        };
        let plan = model.chunk_plan(context).unwrap();
        let mut stream = model.chunk_stream().unwrap();
        let next = NextSamples {
            samples: &waves[1],
            is_last: true,
            speech: None,
        };
        let mut found = Vec::new();
        let mut keep = |frames: &Tensor| found.push(frames.clone());
        model
            .hear_seen(&plan, &mut [(&mut stream, next)], None, Some(&mut keep))
            .unwrap();
        let frames = case["frames"].as_u64().unwrap() as usize;
        let found = Tensor::cat(&found, 0).unwrap();
        // NeMo drops the last frame.
        near(
            name,
            &found.narrow(0, 0, frames).unwrap(),
            &golden[&format!("prompt.stream_{name}.all")],
        );
    }
}

#[test]
fn languages_are_found_and_wrong_settings_are_named() {
    let mut model = model();
    let prompt = model.config.prompt.clone().unwrap();
    for (name, number) in &prompt.dictionary {
        assert_eq!(prompt.find(name).unwrap(), *number);
    }
    assert_eq!(prompt.find("DE-de").unwrap(), prompt.find("de-DE").unwrap());
    assert_eq!(prompt.find("fr").unwrap(), prompt.find("fr-FR").unwrap());
    assert_eq!(prompt.find("fr-CA").unwrap(), prompt.find("fr-FR").unwrap());
    let error = prompt.find("xx").unwrap_err().to_string();
    assert!(error.contains("`xx`") && error.contains("fr-FR"), "{error}");
    assert_eq!(model.prompt, prompt.default_prompt());
    model.set_language(Some("fr")).unwrap();
    assert_eq!(model.prompt, Some(prompt.find("fr").unwrap()));
    assert_eq!(model.replica().unwrap().prompt, model.prompt);
    model.set_language(None).unwrap();
    assert_eq!(model.prompt, prompt.find("auto").ok());
    let again = ModelConfig::from_nemo_yaml(&model.config.to_nemo_yaml().unwrap()).unwrap();
    assert_eq!(again.prompt, model.config.prompt);
    let other = TdtModel::load(&golden::file("model.nemo"), DType::F32, &Device::Cpu);
    assert!(other.unwrap().set_language(Some("de")).is_err());
    let refused = |change: fn(&mut Value)| config(change).unwrap_err().to_string();
    let error = refused(|config| config["model_defaults"]["prompt_dictionary"]["de"] = 6.into());
    assert!(error.contains("prompt_dictionary.de"), "{error}");
    let error = refused(|config| config["model_defaults"]["num_prompts"] = 0.into());
    assert!(error.contains("num_prompts"), "{error}");
    // Without the setting there is no prompt.
    let without = config(|config| config["model_defaults"]["initialize_prompt_feature"] = false.into());
    assert!(without.unwrap().prompt.is_none());
}
