//! A [`ModelConfig`] from and to `config.json` and `processor_config.json` of Hugging Face's transformers
//! (`ParakeetForTDT`, `ParakeetForRNNT`, `ParakeetForCTC`).

use serde_json::{Value, json};
use serde_yaml::Mapping;

use super::{
    AttentionContext, CausalConfig, CtcConfig, DecodingConfig, EncoderConfig, JointConfig, LossConfig, ModelConfig,
    PredictionConfig, PreprocessorConfig, Reduction, SpecAugmentConfig, TimeWidth, TokenizerConfig, TransducerConfig,
};
use crate::{Error, Result};

/// Values that `config.json` does not have, from NeMo's standard recipe for these models.
const SIGMA: f64 = 0.02;
const DECODER_DROPOUT: f64 = 0.2;
const DITHER: f64 = 1e-5;

/// Which of transformers' Parakeet models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Tdt,
    Rnnt,
    Ctc,
}

impl Kind {
    /// The one that a configuration is written as: that of its transducer, if it has one.
    pub fn of(config: &ModelConfig) -> Self {
        match &config.transducer {
            Some(transducer) if transducer.is_rnnt() => Kind::Rnnt,
            Some(_) => Kind::Tdt,
            None => Kind::Ctc,
        }
    }

    /// The name of the decoder in `processor_config.json`.
    pub fn decoder(self) -> &'static str {
        match self {
            Kind::Tdt => "tdt",
            Kind::Rnnt => "rnnt",
            Kind::Ctc => "ctc",
        }
    }

    fn model_type(self) -> &'static str {
        match self {
            Kind::Tdt => "parakeet_tdt",
            Kind::Rnnt => "parakeet_rnnt",
            Kind::Ctc => "parakeet_ctc",
        }
    }

    fn class(self) -> &'static str {
        match self {
            Kind::Tdt => "ParakeetForTDT",
            Kind::Rnnt => "ParakeetForRNNT",
            Kind::Ctc => "ParakeetForCTC",
        }
    }
}

fn transducer(root: &Section, kind: Kind) -> Result<TransducerConfig> {
    let durations = match &root.value["durations"] {
        _ if kind == Kind::Rnnt => Vec::new(),
        Value::Null => vec![0, 1, 2, 3, 4],
        value => {
            serde_json::from_value(value.clone()).map_err(|_| root.wrong("durations", "a list of whole numbers"))?
        }
    };
    let hidden = root.size("decoder_hidden_size", Some(640))?;
    Ok(TransducerConfig {
        prediction: PredictionConfig {
            pred_hidden: hidden,
            pred_rnn_layers: root.size("num_decoder_layers", Some(2))?,
            dropout: DECODER_DROPOUT,
        },
        joint: JointConfig {
            joint_hidden: hidden,
            dropout: DECODER_DROPOUT,
        },
        loss: LossConfig {
            durations,
            sigma: if kind == Kind::Tdt { SIGMA } else { 0.0 },
            omega: 0.0,
            fastemit_lambda: 0.0,
            clamp: -1.0,
            reduction: Reduction::MeanBatch,
        },
        decoding: DecodingConfig {
            max_symbols: root.size("max_symbols_per_step", Some(10))?,
        },
    })
}

fn ctc(root: &Section) -> Result<CtcConfig> {
    let reduction = match root.value["ctc_loss_reduction"].as_str() {
        None | Some("mean") => Reduction::Mean,
        Some("sum") => Reduction::Sum,
        Some(_) => return Err(root.wrong("ctc_loss_reduction", "\"mean\" or \"sum\"")),
    };
    root.only("ctc_zero_infinity", json!(true))?;
    Ok(CtcConfig { weight: 1.0, reduction })
}

/// Said to the user when a model is read from such a folder.
pub fn read_note(config: &ModelConfig) -> String {
    let (unsaid, values) = match Kind::of(config) {
        Kind::Tdt => (
            "the loss (sigma, omega, reduction), the dropout of the prediction and joint networks, ",
            "sigma 0.02, omega 0, mean_batch, 0.2, ",
        ),
        Kind::Rnnt => (
            "the reduction of the loss, the dropout of the prediction and joint networks, ",
            "mean_batch, 0.2, ",
        ),
        Kind::Ctc => ("", ""),
    };
    format!(
        "config.json says nothing of {unsaid}SpecAugment and dither: NeMo's defaults are used ({values}2 x 27 bands and \
         10 x 5 % of time, 1e-5)"
    )
}

/// Said to the user when a model is written so.
pub const WRITE_NOTE: &str = "transformers keeps neither the loss (sigma, omega, reduction) nor SpecAugment, dither, \
the dropout of the prediction and joint networks, nor the front end's own window and filter bank, which it computes \
anew";

/// A section of a JSON document, read value by value with errors that name the key.
struct Section<'a> {
    value: &'a Value,
    name: &'static str,
}

impl Section<'_> {
    fn wrong(&self, key: &str, expected: &str) -> Error {
        let found = match &self.value[key] {
            Value::Null => "missing".to_string(),
            other => format!("{other}"),
        };
        Error::Config(format!("{}: `{key}` is {found}, expected {expected}", self.name))
    }

    fn size(&self, key: &str, default: Option<usize>) -> Result<usize> {
        match &self.value[key] {
            Value::Null => default.ok_or_else(|| self.wrong(key, "a whole number")),
            value => (value.as_u64().and_then(|n| usize::try_from(n).ok()))
                .filter(|&n| (1..=10_000_000).contains(&n))
                .ok_or_else(|| self.wrong(key, "a whole number of at least 1")),
        }
    }

    fn number(&self, key: &str, default: f64) -> Result<f64> {
        match &self.value[key] {
            Value::Null => Ok(default),
            value => value.as_f64().ok_or_else(|| self.wrong(key, "a number")),
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match &self.value[key] {
            Value::Null => Ok(default),
            value => value.as_bool().ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    fn only(&self, key: &str, allowed: Value) -> Result<()> {
        match &self.value[key] {
            Value::Null => Ok(()),
            value if *value == allowed => Ok(()),
            _ => Err(self.wrong(key, &format!("{allowed}; other values are not supported"))),
        }
    }
}

impl ModelConfig {
    /// Reads `config.json` and the section `feature_extractor` of `processor_config.json` (null where there is none).
    /// Keys that are missing have the values that transformers gives them.
    pub fn from_huggingface(config: &Value, feature_extractor: &Value, labels: Vec<String>) -> Result<Self> {
        let root = Section {
            value: config,
            name: "config.json",
        };
        let encoder = Section {
            value: &config["encoder_config"],
            name: "config.json: encoder_config",
        };
        let features = Section {
            value: feature_extractor,
            name: "processor_config.json: feature_extractor",
        };
        let kind = match config["model_type"].as_str() {
            Some("parakeet_tdt") => Kind::Tdt,
            Some("parakeet_rnnt") => Kind::Rnnt,
            Some("parakeet_ctc") => Kind::Ctc,
            _ => {
                return Err(root.wrong("model_type", "\"parakeet_tdt\", \"parakeet_rnnt\" or \"parakeet_ctc\""));
            }
        };
        root.only("hidden_act", json!("relu"))?;
        encoder.only("hidden_act", json!("silu"))?;
        encoder.only("subsampling_factor", json!(EncoderConfig::SUBSAMPLING))?;
        encoder.only("subsampling_conv_kernel_size", json!(3))?;
        encoder.only("subsampling_conv_stride", json!(2))?;
        let outputs = root.size("vocab_size", None)?;
        let vocab_size = outputs - 1;
        // That of CTC pads with blank.
        root.only(
            if kind == Kind::Ctc {
                "pad_token_id"
            } else {
                "blank_token_id"
            },
            json!(vocab_size),
        )?;
        let d_model = encoder.size("hidden_size", Some(1024))?;
        let n_heads = encoder.size("num_attention_heads", Some(8))?;
        encoder.only("num_key_value_heads", json!(n_heads))?;
        let intermediate = encoder.size("intermediate_size", Some(4096))?;
        if intermediate % d_model != 0 {
            return Err(encoder.wrong("intermediate_size", "a multiple of `hidden_size`"));
        }
        let use_bias = encoder.flag("attention_bias", true)?;
        if encoder.flag("convolution_bias", true)? != use_bias {
            return Err(encoder.wrong("convolution_bias", "the same as `attention_bias`"));
        }
        let mels = encoder.size("num_mel_bins", Some(80))?;
        features.only("feature_size", json!(mels))?;
        let sample_rate = features.size("sampling_rate", Some(16_000))?;
        let seconds = |key: &str, default: usize| -> Result<f64> {
            Ok(features.size(key, Some(default))? as f64 / sample_rate as f64)
        };
        let dropout = encoder.number("dropout", 0.1)?;
        let (transducer, ctc) = match kind {
            Kind::Ctc => (None, Some(ctc(&root)?)),
            _ => (Some(transducer(&root, kind)?), None),
        };
        let model = ModelConfig {
            preprocessor: PreprocessorConfig {
                sample_rate,
                window_size: seconds("win_length", 400)?,
                window_stride: seconds("hop_length", 160)?,
                features: mels,
                n_fft: features.size("n_fft", Some(512))?,
                dither: DITHER,
                preemphasis: features.number("preemphasis", 0.97)?,
                low_frequency: 0.0,
                high_frequency: sample_rate as f64 / 2.0,
                normalized: true,
            },
            encoder: EncoderConfig {
                feat_in: mels,
                n_layers: encoder.size("num_hidden_layers", Some(24))?,
                d_model,
                use_bias,
                subsampling_conv_channels: encoder.size("subsampling_conv_channels", Some(256))?,
                ff_expansion_factor: intermediate / d_model,
                n_heads,
                attention_context: AttentionContext::Full,
                xscaling: encoder.flag("scale_input", true)?,
                conv_kernel_size: encoder.size("conv_kernel_size", Some(9))?,
                causal: CausalConfig::default(),
                dropout,
                dropout_pre_encoder: dropout,
                dropout_emb: encoder.number("dropout_positions", 0.0)?,
                dropout_att: encoder.number("attention_dropout", 0.1)?,
            },
            vocab_size,
            transducer,
            ctc,
            prompt: None,
            adapters: Vec::new(),
            spec_augment: SpecAugmentConfig {
                freq_masks: 2,
                time_masks: 10,
                freq_width: 27,
                time_width: TimeWidth::Share(0.05),
            },
            tokenizer: TokenizerConfig {
                kind: "bpe".into(),
                ..TokenizerConfig::default()
            },
            labels,
            source: Mapping::new(),
        };
        // The reader of NeMo's format validates the values.
        Self::from_nemo_yaml(&model.to_nemo_yaml()?)
    }

    /// `config.json` for this model, with the one width that prediction and joint network have there and the id of the
    /// padding token. What transformers cannot express is an error.
    pub fn to_huggingface(&self, width: usize, padding: usize, dtype: &str) -> Result<Value> {
        let e = &self.encoder;
        let refuse = |what: String| {
            Err(Error::Config(format!(
                "{what}, which transformers' Parakeet models cannot express; write a .nemo archive or a model folder \
                 instead"
            )))
        };
        if let AttentionContext::Band(width) = e.attention_context {
            return refuse(format!("attention reaches {width} frames only"));
        }
        if self.prompt.is_some() {
            return refuse("the model has a language prompt".into());
        }
        if let Some(adapter) = self.adapters.first() {
            return refuse(format!("the encoder has the adapter `{}`", adapter.name));
        }
        if e.causal != CausalConfig::default() {
            return refuse("the encoder is causal".into());
        }
        let p = &self.preprocessor;
        if !p.normalized {
            return refuse("features are not normalised".into());
        }
        if p.low_frequency != 0.0 || p.high_frequency != p.sample_rate as f64 / 2.0 {
            return refuse(format!(
                "the filter bank reaches from {} to {} Hz",
                p.low_frequency, p.high_frequency
            ));
        }
        let kind = Kind::of(self);
        let mut document = json!({
            "architectures": [kind.class()],
            "dtype": dtype,
            "encoder_config": {
                "activation_dropout": 0.1,
                "attention_bias": e.use_bias,
                "attention_dropout": e.dropout_att,
                "conv_kernel_size": e.conv_kernel_size,
                "convolution_bias": e.use_bias,
                "dropout": e.dropout,
                "dropout_positions": e.dropout_emb,
                "hidden_act": "silu",
                "hidden_size": e.d_model,
                "initializer_range": 0.02,
                "intermediate_size": e.d_model * e.ff_expansion_factor,
                // Without this key the class would drop whole layers in training.
                "layerdrop": 0.0,
                "max_position_embeddings": 5000,
                "model_type": "parakeet_encoder",
                "num_attention_heads": e.n_heads,
                "num_hidden_layers": e.n_layers,
                "num_key_value_heads": e.n_heads,
                "num_mel_bins": e.feat_in,
                "scale_input": e.xscaling,
                "subsampling_conv_channels": e.subsampling_conv_channels,
                "subsampling_conv_kernel_size": 3,
                "subsampling_conv_stride": 2,
                "subsampling_factor": EncoderConfig::SUBSAMPLING,
            },
            "initializer_range": 0.02,
            "model_type": kind.model_type(),
            "pad_token_id": padding,
            "vocab_size": self.vocab_size + 1,
        });
        let of_head = match (&self.transducer, &self.ctc) {
            (Some(transducer), _) => {
                let mut fields = json!({
                    "blank_token_id": self.vocab_size,
                    "decoder_hidden_size": width,
                    "hidden_act": "relu",
                    "is_encoder_decoder": true,
                    "max_symbols_per_step": transducer.decoding.max_symbols,
                    "num_decoder_layers": transducer.prediction.pred_rnn_layers,
                });
                if !transducer.is_rnnt() {
                    fields["durations"] = json!(transducer.loss.durations);
                }
                fields
            }
            // torch knows two of the reductions. Of NeMo's means, its own has the size that does not depend on the batch.
            (None, Some(ctc)) => json!({
                "ctc_loss_reduction": if ctc.reduction == Reduction::Sum { "sum" } else { "mean" },
                "ctc_zero_infinity": true,
            }),
            (None, None) => json!({}),
        };
        if let (Some(document), Value::Object(of_head)) = (document.as_object_mut(), of_head) {
            document.extend(of_head);
        }
        Ok(document)
    }

    /// The section `feature_extractor` of `processor_config.json`.
    pub fn to_huggingface_features(&self) -> Value {
        let p = &self.preprocessor;
        let samples = |seconds: f64| (seconds * p.sample_rate as f64) as usize;
        json!({
            "feature_extractor_type": "ParakeetFeatureExtractor",
            "feature_size": p.features,
            "hop_length": samples(p.window_stride),
            "n_fft": p.n_fft,
            "padding_side": "right",
            "padding_value": 0.0,
            "preemphasis": p.preemphasis,
            "return_attention_mask": true,
            "sampling_rate": p.sample_rate,
            "win_length": samples(p.window_size),
        })
    }
}
