use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device};
use serde_json::Value;

use super::*;
use crate::checkpoint::StoredModel;
use crate::config::ChunkContext;
use crate::model::chunks::NextSamples;
use crate::model::{MicroBatch, TdtModel, TrainOptions};
use crate::testing::golden;
use flow_nn::parameters::Gradients;
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
        let context = ChunkContext::limited(left.parse().unwrap(), right.parse().unwrap());
        let plan = model.chunk_plan(context).unwrap();
        let mut stream = model.chunk_stream(Arc::new(model.decoding.clone())).unwrap();
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

/// The golden model in f64, with one context, so that training and evaluation see the same frames.
fn wide_model() -> TdtModel {
    let of_f32 = model();
    let mut config = of_f32.config.clone();
    config.encoder.causal.contexts.truncate(1);
    config.encoder.causal.probabilities = vec![1.0];
    let mut model = TdtModel::new(config, None, 3, DType::F64, &Device::Cpu).unwrap();
    for (_, parameter) in of_f32.parameters.iter() {
        let id = model.parameters.id(&parameter.name).unwrap();
        model
            .parameters
            .set(id, parameter.tensor.to_dtype(DType::F64).unwrap())
            .unwrap();
    }
    model
}

fn batch() -> MicroBatch {
    let signals: Vec<Vec<f32>> = waves().into_iter().map(|wave| wave[..24_000].to_vec()).collect();
    MicroBatch {
        tokens: vec![vec![3, 1, 4, 4], vec![5]],
        prompts: vec![1, 5],
        signals,
    }
}

fn quiet() -> TrainOptions {
    TrainOptions {
        spec_augment: false,
        dither: false,
        dropout: false,
        ..TrainOptions::default()
    }
}

/// The loss of a micro-batch whose utterances have different prompts: its gradients of the prompt's layers and of a bias of the
/// encoder below them are its slopes. The tolerance is that of a central difference in f64.
#[test]
fn gradients_through_the_prompt_are_slopes_of_the_loss() {
    const STEP: f64 = 1e-5;
    let mut model = wide_model();
    let batch = batch();
    let mut gradients = Gradients::new(&model.parameters);
    let trained = model.train_micro_batch(&batch, &quiet(), &mut gradients).unwrap();
    assert!((trained.loss - model.evaluate_loss(&batch).unwrap().loss).abs() < 1e-9 * trained.loss);
    for name in [
        "prompt_kernel.0.weight",
        "prompt_kernel.0.bias",
        "prompt_kernel.2.weight",
        "prompt_kernel.2.bias",
        "encoder.layers.1.norm_out.bias",
    ] {
        let id = model.parameters.id(name).unwrap();
        let before = model.parameters.get(id).clone();
        let gradient = flow_kernels::testing::values(gradients.get(id).unwrap());
        let mut noise = flow_kernels::Noise::new(7);
        let direction = flow_kernels::testing::normal(before.dims(), &mut noise)
            .to_dtype(DType::F64)
            .unwrap();
        let along: f64 = flow_kernels::testing::values(&direction)
            .iter()
            .zip(&gradient)
            .map(|(a, b)| a * b)
            .sum();
        let mut at = |step: f64| {
            let moved = (&before + (&direction * step).unwrap()).unwrap();
            model.parameters.set(id, moved).unwrap();
            model.evaluate_loss(&batch).unwrap().loss
        };
        let slope = (at(STEP) - at(-STEP)) / (2.0 * STEP);
        at(0.0);
        assert!(
            (slope - along).abs() < 1e-6 * along.abs().max(1.0),
            "{name}: {slope} {along}"
        );
        assert!(along.abs() > 1e-4, "{name}: {along}");
    }
    // No utterance has prompt 2, so its column of the first layer stays as it is.
    let width = model.config.encoder.d_model;
    let id = model.parameters.id("prompt_kernel.0.weight").unwrap();
    let columns = gradients.get(id).unwrap().narrow(1, width, 6).unwrap();
    for prompt in 0..6 {
        let size: f64 = flow_kernels::testing::values(&columns.narrow(1, prompt, 1).unwrap())
            .iter()
            .map(|x| x.abs())
            .sum();
        assert_eq!(size > 0.0, [1, 5].contains(&prompt), "prompt {prompt}");
    }
}

/// Each utterance of a batch by its own prompt is what it is alone; with the encoder frozen the prompt's layers still learn, by the
/// same gradients.
#[test]
fn utterances_of_a_batch_have_their_own_prompts() {
    let mut model = wide_model();
    let batch = batch();
    let both = model.evaluate_loss(&batch).unwrap().losses;
    for (row, loss) in both.iter().enumerate() {
        model.prompt = Some(batch.prompts[row]);
        let alone = MicroBatch {
            signals: vec![batch.signals[row].clone()],
            tokens: vec![batch.tokens[row].clone()],
            prompts: Vec::new(),
        };
        let own = model.evaluate_loss(&alone).unwrap().losses[0];
        assert!((own - loss).abs() < 1e-9 * own, "{row}: {own} {loss}");
    }
    let signals: Vec<&[f32]> = batch.signals.iter().map(Vec::as_slice).collect();
    let (_, losses) = model
        .transcribe_with_losses(&signals, &batch.tokens, &batch.prompts)
        .unwrap();
    assert_eq!(losses, both);

    let train = |model: &mut TdtModel, freeze_encoder: bool| {
        let mut gradients = Gradients::new(&model.parameters);
        let options = TrainOptions {
            freeze_encoder,
            ..quiet()
        };
        model.train_micro_batch(&batch, &options, &mut gradients).unwrap();
        gradients
    };
    let (whole, frozen) = (train(&mut model, false), train(&mut model, true));
    for (id, parameter) in model.parameters.iter().filter(|(_, parameter)| parameter.trainable) {
        let name = &parameter.name;
        match (name.starts_with("encoder."), frozen.get(id)) {
            (true, found) => assert!(found.is_none(), "{name}"),
            (false, found) => near(name, found.unwrap(), whole.get(id).unwrap()),
        }
    }

    let wrong = |prompts: Vec<usize>, model: &mut TdtModel| {
        let batch = MicroBatch {
            prompts,
            ..batch.clone()
        };
        let mut gradients = Gradients::new(&model.parameters);
        let error = model.train_micro_batch(&batch, &quiet(), &mut gradients).unwrap_err();
        error.to_string()
    };
    model.prompt = None;
    assert!(wrong(vec![1, 6], &mut model).contains("prompt 6: the model has 6"));
    assert!(wrong(vec![1], &mut model).contains("1 prompts are not those of 2 utterances"));
    assert!(wrong(Vec::new(), &mut model).contains("no language prompts"));
    let mut other = TdtModel::load(&golden::file("model.nemo"), DType::F32, &Device::Cpu).unwrap();
    assert!(wrong(vec![1, 5], &mut other).contains("the model has none"));
}
