//! The sections of a CTC head in NeMo's `model_config.yaml`: `decoder` of a model that has no other head, `aux_ctc` of one
//! with a transducer.

use serde_yaml::{Mapping, Value};

use super::read::reduction;
use super::section::Section;
use super::write::put;
use super::{CtcConfig, EncoderConfig};
use crate::{Error, Result};

const DECODER: &str = "nemo.collections.asr.modules.ConvASRDecoder";

/// NeMo's share of the CTC loss where `aux_ctc.ctc_loss_weight` is absent.
const DEFAULT_WEIGHT: f64 = 0.5;

/// Whether `decoder` is a CTC head: the prediction network of a transducer has no `num_classes`.
pub(super) fn is_decoder(root: &Section) -> Result<bool> {
    let decoder = root.section("decoder")?;
    Ok(decoder.get("num_classes")?.is_some() || decoder.get("vocabulary")?.is_some())
}

/// The size of the vocabulary, and its texts, of a section of a `ConvASRDecoder`.
pub(super) fn vocabulary(decoder: &Section, encoder: &EncoderConfig) -> Result<(usize, Vec<String>)> {
    decoder.only("_target_", &[DECODER.into()])?;
    decoder.only("feat_in", &[encoder.d_model.into()])?;
    let texts = decoder.texts("vocabulary")?.unwrap_or_default();
    // NeMo takes the number from the vocabulary where it is not positive.
    let stated = decoder.get("num_classes")?.and_then(Value::as_i64);
    let size = match stated {
        Some(number) if number <= 0 && !texts.is_empty() => texts.len(),
        None if !texts.is_empty() => texts.len(),
        _ => decoder.size("num_classes", 1..=1_000_000)?,
    };
    if !texts.is_empty() && texts.len() != size {
        return Err(Error::Config(format!(
            "`{}` is {size}, but there are {} texts in `{}`",
            decoder.key("num_classes"),
            texts.len(),
            decoder.key("vocabulary")
        )));
    }
    Ok((size, texts))
}

/// The head of a model without a transducer.
pub(super) fn read(root: &Section) -> Result<CtcConfig> {
    let inner = root.section("interctc")?;
    for key in ["loss_weights", "apply_at_layers"] {
        inner.only(key, &[Value::Sequence(Vec::new())])?;
    }
    Ok(CtcConfig {
        weight: 1.0,
        reduction: reduction(root, "ctc_reduction")?,
    })
}

/// The head beside a transducer, if there is one.
pub(super) fn read_auxiliary(root: &Section, encoder: &EncoderConfig, vocab_size: usize) -> Result<Option<CtcConfig>> {
    if root.get("aux_ctc")?.is_none() {
        return Ok(None);
    }
    let section = root.section("aux_ctc")?;
    let decoder = section.section("decoder")?;
    if decoder.map.is_some() && (decoder.get("num_classes")?.is_some() || decoder.get("vocabulary")?.is_some()) {
        let (size, _) = vocabulary(&decoder, encoder)?;
        if size != vocab_size {
            return Err(Error::Config(format!(
                "`aux_ctc.decoder` has {size} tokens, the transducer {vocab_size}"
            )));
        }
    }
    Ok(Some(CtcConfig {
        weight: section.probability("ctc_loss_weight", DEFAULT_WEIGHT)?,
        reduction: reduction(&section, "ctc_reduction")?,
    }))
}

/// Writes the head of a model without a transducer.
pub(super) fn write(
    ctc: &CtcConfig,
    root: &mut Mapping,
    encoder: &EncoderConfig,
    vocab_size: usize,
    labels: &[String],
) {
    put(root, &["ctc_reduction"], ctc.reduction.name());
    write_decoder(root, &["decoder"], encoder, vocab_size, labels);
    // They come before the decoder's when they are read.
    if !labels.is_empty() && root.contains_key("labels") {
        put(root, &["labels"], labels);
    }
}

/// Writes the head beside a transducer.
pub(super) fn write_auxiliary(
    ctc: &CtcConfig,
    root: &mut Mapping,
    encoder: &EncoderConfig,
    vocab_size: usize,
    labels: &[String],
) {
    put(root, &["aux_ctc", "ctc_loss_weight"], ctc.weight);
    put(root, &["aux_ctc", "ctc_reduction"], ctc.reduction.name());
    write_decoder(root, &["aux_ctc", "decoder"], encoder, vocab_size, labels);
}

fn write_decoder(root: &mut Mapping, path: &[&str], encoder: &EncoderConfig, vocab_size: usize, labels: &[String]) {
    let mut put = |key: &str, value: Value| put(root, &[path, &[key]].concat(), value);
    put("_target_", DECODER.into());
    put("feat_in", encoder.d_model.into());
    put("num_classes", vocab_size.into());
    if !labels.is_empty() {
        put("vocabulary", labels.to_vec().into());
    }
}
