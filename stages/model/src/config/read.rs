//! NeMo's `model_config.yaml` into a [`ModelConfig`].

use serde_yaml::Value;

use super::section::{Section, wrong};
use super::{
    AttentionContext, CausalConfig, ChunkContext, CtcConfig, EncoderConfig, ModelConfig, PreprocessorConfig, Reduction,
    SpecAugmentConfig, TimeWidth, TokenizerConfig, TransducerConfig, adapters, ctc, prompt, transducer,
};
use crate::{Error, Result};

/// Larger sizes than any model of this family has; they keep a hostile file from asking for terabytes.
pub(super) const MAX_WIDTH: usize = 16_384;

impl ModelConfig {
    /// Reads NeMo's `model_config.yaml`. Keys that do not matter here are ignored; values that this crate does not
    /// support are errors that name them.
    pub fn from_nemo_yaml(text: &str) -> Result<Self> {
        flow_yaml_guard::check(text).map_err(|error| Error::Config(error.to_string()))?;
        let document: Value = serde_yaml::from_str(text).map_err(|error| Error::Config(error.to_string()))?;
        let Value::Mapping(source) = document else {
            return Err(Error::Config("the document is not a mapping".into()));
        };
        let root = Section {
            root: &source,
            path: String::new(),
            map: Some(&source),
        };
        let preprocessor = preprocessor(&root.section("preprocessor")?)?;
        let encoder = encoder(&root.section("encoder")?)?;
        let heads = heads(&root, &encoder)?;
        let spec_augment = spec_augment(&root.section("spec_augment")?)?;
        let tokenizer = root.section("tokenizer")?;
        let tokenizer = TokenizerConfig {
            kind: tokenizer.text("type")?.unwrap_or_else(|| "bpe".into()),
            model_path: tokenizer.text("model_path")?,
            vocab_path: tokenizer.text("vocab_path")?,
            spe_tokenizer_vocab: tokenizer.text("spe_tokenizer_vocab")?,
        };
        let labels = match root.texts("labels")? {
            Some(labels) => labels,
            None => heads.vocabulary,
        };
        if encoder.feat_in != preprocessor.features {
            return Err(Error::Config(format!(
                "`encoder.feat_in` is {}, but `preprocessor.features` is {}",
                encoder.feat_in, preprocessor.features
            )));
        }
        if !labels.is_empty() && labels.len() != heads.vocab_size {
            return Err(Error::Config(format!(
                "`decoder` has {} tokens, but there are {} labels",
                heads.vocab_size,
                labels.len()
            )));
        }
        Ok(Self {
            preprocessor,
            adapters: adapters::read(&root, encoder.d_model)?,
            encoder,
            vocab_size: heads.vocab_size,
            transducer: heads.transducer,
            ctc: heads.ctc,
            prompt: prompt::read(&root)?,
            spec_augment,
            tokenizer,
            labels,
            source,
        })
    }
}

fn preprocessor(section: &Section) -> Result<PreprocessorConfig> {
    let yes = Value::from(true);
    section.only("normalize", &["per_feature".into(), "NA".into()])?;
    section.only("window", &["hann".into()])?;
    section.only("log", &[yes])?;
    section.only("frame_splicing", &[1.into()])?;
    section.only("pad_to", &[0.into()])?;
    // By default NeMo pads to a multiple of 16 frames.
    section.required("pad_to", section.get("pad_to")?)?;
    section.only("pad_value", &[0.0.into(), 0.into()])?;
    section.only("mag_power", &[2.0.into(), 2.into()])?;
    section.only("exact_pad", &[false.into()])?;
    section.only("mel_norm", &["slaney".into()])?;
    section.only("log_zero_guard_type", &["add".into()])?;
    let sample_rate = section.size("sample_rate", 1_000..=768_000)?;
    let window_size = section.number("window_size", 0.02)?;
    let window_stride = section.number("window_stride", 0.01)?;
    let samples = |key: &str, seconds: f64| -> Result<usize> {
        let samples = seconds * sample_rate as f64;
        if (1.0..=65_536.0).contains(&samples) {
            Ok(samples as usize)
        } else {
            Err(Error::Config(format!(
                "`preprocessor.{key}` is {seconds} s, expected 1 to 65536 samples"
            )))
        }
    };
    let window = samples("window_size", window_size)?;
    samples("window_stride", window_stride)?;
    let n_fft = section
        .optional_size("n_fft", 2..=65_536)?
        .unwrap_or_else(|| window.next_power_of_two());
    if n_fft < window || n_fft % 2 == 1 {
        return Err(Error::Config(format!(
            "`preprocessor.n_fft` is {n_fft}, expected an even number not below the window of {window} samples"
        )));
    }
    let low_frequency = section.number("lowfreq", 0.0)?;
    let high_frequency = section.number("highfreq", sample_rate as f64 / 2.0)?;
    if !(0.0 <= low_frequency && low_frequency < high_frequency) {
        return Err(Error::Config(format!(
            "`preprocessor.lowfreq` {low_frequency} is not below `highfreq` {high_frequency}"
        )));
    }
    let dither = section.number("dither", 1e-5)?;
    if dither < 0.0 {
        return Err(Error::Config(format!(
            "`preprocessor.dither` is {dither}, expected 0 or more"
        )));
    }
    Ok(PreprocessorConfig {
        sample_rate,
        window_size,
        window_stride,
        features: section.size("features", 1..=1_024)?,
        n_fft,
        dither,
        preemphasis: section.number("preemph", 0.97)?,
        low_frequency,
        high_frequency,
        normalized: section.text("normalize")?.is_none_or(|kind| kind == "per_feature"),
    })
}

fn encoder(section: &Section) -> Result<EncoderConfig> {
    section.only("subsampling", &["dw_striding".into()])?;
    section.required("subsampling", section.get("subsampling")?)?;
    section.only("subsampling_factor", &[EncoderConfig::SUBSAMPLING.into()])?;
    section.required("subsampling_factor", section.get("subsampling_factor")?)?;
    section.only("reduction", &[])?;
    section.only("reduction_factor", &[1.into()])?;
    section.only("self_attention_model", &["rel_pos".into(), "rel_pos_local_attn".into()])?;
    section.only("att_context_style", &["regular".into(), CHUNKED.into()])?;
    section.only("untie_biases", &[true.into()])?;
    section.only("conv_norm_type", &["batch_norm".into(), "layer_norm".into()])?;
    section.only("global_tokens", &[0.into()])?;
    section.only("stochastic_depth_drop_prob", &[0.0.into(), 0.into()])?;
    section.only("feat_out", &[(-1).into()])?;
    let d_model = section.size("d_model", 2..=MAX_WIDTH)?;
    let n_heads = section.size("n_heads", 1..=1_024)?;
    if d_model % n_heads != 0 || d_model % 2 != 0 {
        return Err(Error::Config(format!(
            "`encoder.d_model` is {d_model}, expected an even multiple of `encoder.n_heads`, {n_heads}"
        )));
    }
    let conv_kernel_size = section.optional_size("conv_kernel_size", 1..=1_023)?.unwrap_or(31);
    if conv_kernel_size % 2 == 0 {
        return Err(Error::Config(format!(
            "`encoder.conv_kernel_size` is {conv_kernel_size}, expected an odd number"
        )));
    }
    let (attention_context, causal) = contexts(section, conv_kernel_size)?;
    let dropout = section.probability("dropout", 0.1)?;
    Ok(EncoderConfig {
        feat_in: section.size("feat_in", 1..=1_024)?,
        n_layers: section.size("n_layers", 1..=1_000)?,
        d_model,
        use_bias: section.flag("use_bias", true)?,
        subsampling_conv_channels: section
            .optional_size("subsampling_conv_channels", 1..=MAX_WIDTH)?
            .unwrap_or(d_model),
        ff_expansion_factor: section.optional_size("ff_expansion_factor", 1..=64)?.unwrap_or(4),
        n_heads,
        attention_context,
        xscaling: section.flag("xscaling", true)?,
        conv_kernel_size,
        causal,
        dropout,
        dropout_pre_encoder: section.probability("dropout_pre_encoder", 0.1)?,
        dropout_emb: section.probability("dropout_emb", 0.1)?,
        dropout_att: section.probability("dropout_att", 0.0)?,
    })
}

/// The context of self-attention, and what of the encoder is causal.
fn contexts(section: &Section, kernel: usize) -> Result<(AttentionContext, CausalConfig)> {
    let side = ((kernel - 1) / 2) as u64;
    let sides = |left: u64, right: u64| Value::from(vec![Value::from(left), Value::from(right)]);
    let (symmetric, back) = (sides(side, side), [Value::from("causal"), sides(2 * side, 0)]);
    let [causal, both] = &back;
    section.only("conv_context_size", &[symmetric.clone(), causal.clone(), both.clone()])?;
    let convolution = section.get("conv_context_size")?.filter(|&value| *value != symmetric);
    let layer_norm = section.text("conv_norm_type")?.is_some_and(|kind| kind == "layer_norm");
    if convolution.is_some() && !layer_norm {
        return Err(Error::Config(format!(
            "`{}` is causal, which is supported with `conv_norm_type: layer_norm` alone",
            section.key("conv_context_size")
        )));
    }
    let mut causal = CausalConfig {
        subsampling: section.flag("causal_downsampling", false)?,
        convolution: convolution.is_some(),
        layer_norm,
        ..CausalConfig::default()
    };
    if section.text("att_context_style")?.as_deref() != Some(CHUNKED) {
        return Ok((attention_context(section)?, causal));
    }
    section.only("self_attention_model", &["rel_pos".into()])?;
    causal.contexts = chunk_contexts(section)?;
    causal.probabilities = probabilities(section, causal.contexts.len())?;
    Ok((AttentionContext::Chunks(causal.contexts[0]), causal))
}

/// The style of `att_context_size` that is for chunks.
pub(super) const CHUNKED: &str = "chunked_limited";

/// One pair `[left, right]`, or a list of them, at least one; -1 is no limit.
fn chunk_contexts(section: &Section) -> Result<Vec<ChunkContext>> {
    let key = section.key("att_context_size");
    let expected =
        "a pair [left, right] or a list of them: each -1 (no limit) or from 0 to 100000, left a multiple of right + 1";
    let Some(value) = section.get("att_context_size")? else {
        return Err(Error::Config(format!("`{key}` is missing: expected {expected}")));
    };
    let pair = |value: &Value| -> Option<ChunkContext> {
        let limit = |value: &Value| match value.as_i64()? {
            -1 => Some(None),
            number => Some(Some(usize::try_from(number).ok().filter(|&number| number <= 100_000)?)),
        };
        match value.as_sequence()?.as_slice() {
            [left, right] => {
                let context = ChunkContext {
                    left: limit(left)?,
                    right: limit(right)?,
                };
                let is_whole = |left: usize| context.chunk().is_none_or(|chunk| left.is_multiple_of(chunk));
                context.left.is_none_or(is_whole).then_some(context)
            }
            _ => None,
        }
    };
    let list = value.as_sequence().map_or(&[][..], Vec::as_slice);
    let found = match list.iter().any(Value::is_sequence) {
        true => list.iter().map(pair).collect(),
        false => pair(value).map(|pair| vec![pair]),
    };
    found.ok_or_else(|| wrong(&key, expected, value))
}

/// The probabilities of so many contexts; none where all are alike.
fn probabilities(section: &Section, contexts: usize) -> Result<Vec<f64>> {
    let Some(value) = section.get("att_context_probs")? else {
        return Ok(Vec::new());
    };
    let numbers: Option<Vec<f64>> = value
        .as_sequence()
        .and_then(|list| list.iter().map(Value::as_f64).collect());
    let is_one = |sum: f64| (sum - 1.0).abs() < 1e-3;
    numbers
        .filter(|all| all.len() == contexts && all.iter().all(|&p| p >= 0.0) && is_one(all.iter().sum()))
        .ok_or_else(|| {
            let expected = format!("{contexts} probabilities, one for each context, whose sum is 1");
            wrong(&section.key("att_context_probs"), &expected, value)
        })
}

/// `[-1, -1]` or one symmetric window; a list that holds one of these is the same.
fn attention_context(section: &Section) -> Result<AttentionContext> {
    let Some(value) = section.get("att_context_size")? else {
        return Ok(AttentionContext::Full);
    };
    let refuse = || {
        wrong(
            &section.key("att_context_size"),
            "[-1, -1] or one window [w, w] with w above 0; other contexts are not supported",
            value,
        )
    };
    let mut list = value.as_sequence().ok_or_else(refuse)?;
    if let [Value::Sequence(inner)] = list.as_slice() {
        list = inner;
    }
    match list.as_slice() {
        [left, right] => match (left.as_i64(), right.as_i64()) {
            (Some(-1), Some(-1)) => Ok(AttentionContext::Full),
            (Some(left), Some(right)) if left == right && left > 0 => {
                Ok(AttentionContext::Band(usize::try_from(left).map_err(|_| refuse())?))
            }
            _ => Err(refuse()),
        },
        _ => Err(refuse()),
    }
}

/// The heads that a document describes.
struct Heads {
    vocab_size: usize,
    /// The texts of the tokens, if they are in a section of a head.
    vocabulary: Vec<String>,
    transducer: Option<TransducerConfig>,
    ctc: Option<CtcConfig>,
}

/// A document with a section `joint` or `loss` is that of a transducer, with `aux_ctc` of one with a CTC head beside it;
/// without them the decoder is the CTC head.
fn heads(root: &Section, encoder: &EncoderConfig) -> Result<Heads> {
    if root.get("joint")?.is_some() || root.get("loss")?.is_some() {
        let vocab_size = transducer::vocab_size(root)?;
        return Ok(Heads {
            vocab_size,
            vocabulary: root.section("joint")?.texts("vocabulary")?.unwrap_or_default(),
            transducer: Some(transducer::read(root, encoder, vocab_size)?),
            ctc: ctc::read_auxiliary(root, encoder, vocab_size)?,
        });
    }
    if !ctc::is_decoder(root)? {
        return Err(Error::Config(
            "there is neither a transducer (`joint` and `loss`) nor a CTC head (`decoder.num_classes`)".into(),
        ));
    }
    let (vocab_size, vocabulary) = ctc::vocabulary(&root.section("decoder")?, encoder)?;
    Ok(Heads {
        vocab_size,
        vocabulary,
        transducer: None,
        ctc: Some(ctc::read(root)?),
    })
}

/// The reduction that a key names; `mean_batch` where it is absent, as in NeMo.
pub(super) fn reduction(section: &Section, key: &str) -> Result<Reduction> {
    let Some(name) = section.text(key)? else {
        return Ok(Reduction::MeanBatch);
    };
    Reduction::named(&name).ok_or_else(|| {
        Error::Config(format!(
            "`{}` is `{name}`, expected mean_batch, mean, mean_volume or sum",
            section.key(key)
        ))
    })
}

fn spec_augment(section: &Section) -> Result<SpecAugmentConfig> {
    let time_width = match section.get("time_width")? {
        None => TimeWidth::Frames(10),
        Some(value) => match (value.as_u64(), value.as_f64()) {
            (Some(frames), _) => TimeWidth::Frames(usize::try_from(frames).unwrap_or(usize::MAX)),
            (None, Some(share)) if (0.0..=1.0).contains(&share) => TimeWidth::Share(share),
            _ => {
                return Err(wrong(
                    &section.key("time_width"),
                    "a number of frames or a share from 0.0 to 1.0",
                    value,
                ));
            }
        },
    };
    Ok(SpecAugmentConfig {
        freq_masks: section.optional_size("freq_masks", 0..=10_000)?.unwrap_or(0),
        time_masks: section.optional_size("time_masks", 0..=10_000)?.unwrap_or(0),
        freq_width: section.optional_size("freq_width", 0..=1_024)?.unwrap_or(10),
        time_width,
    })
}
