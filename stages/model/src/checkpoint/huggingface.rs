//! The folder of a Parakeet model (TDT, RNN-T or CTC) in Hugging Face's transformers: the same weights under other names, the
//! configuration as JSON, the tokenizer as `tokenizer.json`.

use std::io::Write;
use std::path::Path;

use candle_core::{DType, Device};
use serde_json::{Value, json};

use super::hf_tokenizer::{BLANK, PAD, sentencepiece_model, tokenizer_json};
use super::{Format, OpenModel, TOKENIZER_FILE, TensorEntry, WEIGHTS_FILE, broken, one_width};
use crate::config::ModelConfig;
use crate::config::huggingface::{Kind, WRITE_NOTE, read_note};
use crate::heads::ctc::AUXILIARY;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use flow_nn::features::LogMel;
use flow_nn::parameters::{Parameter, ParameterBuilder};
use flow_nn::tensor_files::files::{read_small, write_renamed};
use flow_nn::tensor_files::safetensors::{open_tensor_files, write_entries};
use flow_nn::tensor_files::tensor_entry::written_dtype;

pub(super) const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const PROCESSOR: &str = "processor_config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// All files that such a folder has here.
pub(super) const FILES: [&str; 6] = [CONFIG, GENERATION, PROCESSOR, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS_FILE];

/// Names that begin or end otherwise: (NeMo's, transformers').
const PARTS: [(&str, &str); 13] = [
    ("encoder.pre_encode.conv.", "encoder.subsampling.layers."),
    ("encoder.pre_encode.out.", "encoder.subsampling.linear."),
    (".self_attn.linear_q.", ".self_attn.q_proj."),
    (".self_attn.linear_k.", ".self_attn.k_proj."),
    (".self_attn.linear_v.", ".self_attn.v_proj."),
    (".self_attn.linear_out.", ".self_attn.o_proj."),
    (".self_attn.linear_pos.", ".self_attn.relative_k_proj."),
    (".conv.batch_norm.", ".conv.norm."),
    ("decoder.prediction.embed.", "decoder.embedding."),
    ("decoder.prediction.dec_rnn.lstm.", "decoder.lstm."),
    ("joint.enc.", "encoder_projector."),
    ("joint.pred.", "decoder.decoder_projector."),
    ("decoder.decoder_layers.0.", "ctc_head."),
];
const ENDS: [(&str, &str); 2] = [
    (".self_attn.pos_bias_u", ".self_attn.bias_u"),
    (".self_attn.pos_bias_v", ".self_attn.bias_v"),
];

/// NeMo's name of a tensor of transformers. The last layer of the joint network is `joint_net.2`, as in models with
/// dropout there, which [`ModelConfig::from_huggingface`] makes them.
pub(super) fn nemo_name(name: &str) -> String {
    if let Some(part) = name.strip_prefix("joint.head.") {
        return format!("joint.joint_net.2.{part}");
    }
    renamed(name, |(ours, theirs)| (theirs, ours))
}

fn huggingface_name(name: &str) -> String {
    if let Some((_, part)) = name
        .strip_prefix("joint.joint_net.")
        .and_then(|rest| rest.split_once('.'))
    {
        return format!("joint.head.{part}");
    }
    renamed(name, |pair| pair)
}

/// The name that a module of NeMo's has in transformers.
pub fn huggingface_module(module: &str) -> String {
    let name = huggingface_name(&format!("{module}.weight"));
    name.strip_suffix(".weight").unwrap_or(&name).to_string()
}

fn renamed(name: &str, direction: impl Fn((&'static str, &'static str)) -> (&'static str, &'static str)) -> String {
    for pair in PARTS {
        let (from, to) = direction(pair);
        let at = if from.starts_with('.') {
            name.find(from)
        } else {
            name.starts_with(from).then_some(0)
        };
        if let Some(at) = at {
            return format!("{}{to}{}", &name[..at], &name[at + from.len()..]);
        }
    }
    for pair in ENDS {
        let (from, to) = direction(pair);
        if let Some(stem) = name.strip_suffix(from) {
            return format!("{stem}{to}");
        }
    }
    name.to_string()
}

fn read_json(path: &Path) -> Result<Value> {
    serde_json::from_slice(&read_small(path)?).map_err(|error| broken(path, format!("is not JSON: {error}")))
}

/// Opens a folder of one of transformers' Parakeet models.
pub(super) fn open_huggingface(folder: &Path) -> Result<OpenModel> {
    let config_path = folder.join(CONFIG);
    let config = read_json(&config_path)?;
    let processor = folder.join(PROCESSOR);
    let older = folder.join("preprocessor_config.json");
    let features = if processor.exists() {
        read_json(&processor)?["feature_extractor"].take()
    } else if older.exists() {
        read_json(&older)?
    } else {
        Value::Null
    };
    let vocabulary = (config["vocab_size"].as_u64())
        .and_then(|outputs| usize::try_from(outputs).ok()?.checked_sub(1))
        .ok_or_else(|| broken(&config_path, "has no `vocab_size`"))?;
    let (tokenizer, no_tokenizer) = read_tokenizer(folder, vocabulary)?;
    let labels = match &tokenizer {
        Some(bytes) => Tokenizer::from_bytes(bytes)?.pieces(),
        None => Vec::new(),
    };
    let parsed = ModelConfig::from_huggingface(&config, &features, labels).map_err(|error| broken(folder, error))?;
    let mut tensors = open_tensor_files(folder, WEIGHTS_FILE)?;
    for entry in &mut tensors {
        entry.name = nemo_name(&entry.name);
    }
    // Other formats contain the front end's window and filter bank.
    tensors.extend(front_end(&parsed)?);
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(OpenModel {
        path: folder.to_path_buf(),
        format: Format::HuggingFace,
        config_yaml: parsed.to_nemo_yaml()?,
        tokenizer,
        no_tokenizer,
        tensors,
        notes: vec![read_note(&parsed)],
    })
}

/// The SentencePiece model: a `tokenizer.model` beside the other files, or the equivalent of `tokenizer.json`. Without
/// one, the reason.
fn read_tokenizer(folder: &Path, vocabulary: usize) -> Result<(Option<Vec<u8>>, Option<String>)> {
    let own = folder.join(TOKENIZER_FILE);
    if own.exists() {
        return Ok((Some(read_small(&own)?), None));
    }
    let path = folder.join(TOKENIZER);
    if !path.exists() {
        return Ok((None, Some(format!("{} has no {TOKENIZER}", folder.display()))));
    }
    Ok(match sentencepiece_model(&read_json(&path)?, vocabulary) {
        Ok(bytes) => (Some(bytes), None),
        Err(what) => (
            None,
            Some(format!("{} {what}: it is not a SentencePiece model", path.display())),
        ),
    })
}

/// Fills a new folder with a model; returns notes for the user.
pub(super) fn fill_huggingface(folder: &Path, model: &OpenModel, dtype: Option<DType>) -> Result<Vec<String>> {
    let config = ModelConfig::from_nemo_yaml(&model.config_yaml).map_err(|error| broken(&model.path, error))?;
    let bytes = model.tokenizer.as_deref().ok_or_else(|| {
        Error::Tokenizer(format!(
            "{}; a Hugging Face folder needs one: give a SentencePiece .model file",
            model.no_tokenizer.as_deref().unwrap_or("there is none")
        ))
    })?;
    let tokenizer = Tokenizer::from_bytes(bytes)?;
    let (pieces, kind) = (config.vocab_size, Kind::of(&config));
    // Blank does not occur in texts, so it is the padding token where the vocabulary has none, and where there are no
    // durations, as transformers wants it then.
    let (padding, padding_text) = match tokenizer.id(PAD) {
        Some(id) if kind == Kind::Tdt => (id as usize, PAD),
        _ => (pieces, BLANK),
    };
    let mut notes = vec![WRITE_NOTE.to_string()];
    notes.extend(one_width::note(&config));
    let mut tensors: Vec<TensorEntry> = Vec::with_capacity(model.tensors.len());
    for entry in &model.tensors {
        if entry.name.starts_with("preprocessor.") || entry.name.starts_with(AUXILIARY) {
            continue;
        }
        let mut entry = one_width::widened(entry, &config)?;
        entry.name = huggingface_name(&entry.name);
        tensors.push(entry);
    }
    if config.transducer.is_some() && config.ctc.is_some() {
        notes.push("the auxiliary CTC head is left out: transformers has no such model".into());
    }
    let weights_dtype = (tensors.iter())
        .find(|entry| ["joint.head.weight", "ctc_head.weight"].contains(&entry.name.as_str()))
        .map_or(DType::F32, |entry| written_dtype(entry, dtype));
    let dtype_name = match weights_dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    };
    let durations = config.transducer.as_ref().map_or(0, |head| head.loss.durations.len());
    let write_json = |name: &str, value: &Value| {
        let path = folder.join(name);
        let mut text = serde_json::to_string_pretty(value).map_err(|error| broken(&path, error))?;
        text.push('\n');
        write_renamed(&path, |file| {
            file.write_all(text.as_bytes()).map_err(|error| broken(&path, error))
        })
    };
    write_json(
        CONFIG,
        &config.to_huggingface(one_width::width(&config), padding, dtype_name)?,
    )?;
    check_front_end(model, &config)?;
    let mut generation = json!({
        "_from_model_config": true,
        "output_attentions": false,
        "output_hidden_states": false,
        "pad_token_id": padding,
    });
    if kind != Kind::Ctc {
        generation["decoder_start_token_id"] = json!(pieces);
    }
    if kind == Kind::Tdt {
        generation["suppress_tokens"] = json!((pieces + 1..=pieces + durations).collect::<Vec<_>>());
    }
    write_json(GENERATION, &generation)?;
    write_json(
        PROCESSOR,
        &json!({
            "blank_token": BLANK,
            "decoder_type": kind.decoder(),
            "feature_extractor": config.to_huggingface_features(),
            "processor_class": "ParakeetProcessor",
        }),
    )?;
    write_json(TOKENIZER, &tokenizer_json(&tokenizer)?)?;
    write_json(
        TOKENIZER_CONFIG,
        &json!({
            "backend": "tokenizers",
            "clean_up_tokenization_spaces": false,
            // Python's own word for no limit.
            "model_max_length": 1_000_000_000_000_000_019_884_624_838_656f64,
            "pad_token": padding_text,
            "processor_class": "ParakeetProcessor",
            "tokenizer_class": "ParakeetTokenizer",
            "unk_token": tokenizer.piece(tokenizer.unknown_id()),
        }),
    )?;
    let path = folder.join(WEIGHTS_FILE);
    write_renamed(&path, |file| {
        write_entries(file, &path, &tensors, |entry| written_dtype(entry, dtype))
    })?;
    Ok(notes)
}

/// Window and filter bank as they are computed from the configuration.
fn front_end(config: &ModelConfig) -> Result<Vec<TensorEntry>> {
    let mut builder = ParameterBuilder::random(DType::F32, Device::Cpu, 0);
    LogMel::new(&config.preprocessor, &mut builder)?;
    let (computed, _) = builder.finish();
    let entry = |parameter: &Parameter| TensorEntry::in_memory(parameter.name.clone(), parameter.tensor.clone());
    Ok(computed.iter().map(|(_, parameter)| entry(parameter)).collect())
}

/// transformers computes window and filter bank itself: a model with different ones would get other features there.
fn check_front_end(model: &OpenModel, config: &ModelConfig) -> Result<()> {
    for computed in front_end(config)? {
        let Some(entry) = model.tensors.iter().find(|entry| entry.name == computed.name) else {
            continue;
        };
        let values = |entry: &TensorEntry| -> Result<Vec<f32>> {
            Ok(entry.load()?.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
        };
        let (stored, computed) = (values(entry)?, values(&computed)?);
        let same = stored.len() == computed.len() && stored.iter().zip(&computed).all(|(a, b)| (a - b).abs() <= 1e-5);
        if !same {
            return Err(broken(
                &model.path,
                format!(
                    "tensor `{}` is not what transformers computes in its place; write a .nemo archive or a model \
                     folder instead",
                    entry.name
                ),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::golden;
    use flow_nn::tensor_files::read_packed;

    #[test]
    fn names_are_those_of_transformers() {
        let outputs: Value =
            serde_json::from_slice(&read_packed(&golden::file("hf_outputs.json"), 1).unwrap()).unwrap();
        let map = outputs["keymap"].as_object().unwrap();
        assert!(!map.is_empty());
        for (ours, theirs) in map {
            let theirs = theirs.as_str().unwrap();
            assert_eq!(huggingface_name(ours), theirs);
            // NeMo counts the modules of the joint network, of which dropout is one.
            assert_eq!(nemo_name(theirs), ours.replace("joint_net.1.", "joint_net.2."));
        }
    }
}
