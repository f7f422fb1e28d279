//! Configuration of a model: the parts of NeMo's `model_config.yaml` that determine its architecture and results.

mod adapters;
mod ctc;
pub mod huggingface;
mod prompt;
mod read;
mod section;
#[cfg(test)]
mod tests;
mod transducer;
mod write;

use serde::{Deserialize, Serialize};
use serde_yaml::Mapping;

use crate::heads::HeadKind;
use crate::{Error, Result};

pub use flow_nn::config::{
    Activation, AdapterConfig, AttentionContext, CausalConfig, ChunkContext, EncoderConfig, NormPosition,
    PreprocessorConfig, SpecAugmentConfig, TimeWidth,
};

/// Configuration of a model with a transducer (TDT or RNN-T), a CTC head, or both. Read from and written as NeMo's
/// `model_config.yaml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    pub preprocessor: PreprocessorConfig,
    pub encoder: EncoderConfig,
    /// Tokens without blank; blank has this id.
    pub vocab_size: usize,
    /// The transducer, if the model has one.
    pub transducer: Option<TransducerConfig>,
    /// The CTC head, if the model has one. A model has at least one of the two.
    pub ctc: Option<CtcConfig>,
    /// The language prompt, if the model has one.
    #[serde(default)]
    pub prompt: Option<PromptConfig>,
    /// NeMo's adapters behind each layer of the encoder, in the order in which they are added.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterConfig>,
    pub spec_augment: SpecAugmentConfig,
    pub tokenizer: TokenizerConfig,
    /// The pieces of the vocabulary in the order of their ids (NeMo's `labels`); may be empty.
    pub labels: Vec<String>,
    /// The whole document this was read from: sections that we do not know are written back as they were.
    #[serde(default)]
    source: Mapping,
}

impl ModelConfig {
    /// How the losses of utterances become one: those of the transducer, or of the CTC head where there is none.
    pub fn reduction(&self) -> Reduction {
        match (&self.transducer, &self.ctc) {
            (Some(transducer), _) => transducer.loss.reduction,
            (None, Some(ctc)) => ctc.reduction,
            (None, None) => Reduction::MeanBatch,
        }
    }

    /// Whether the model hears a recording chunk by chunk as it comes, each frame once.
    pub fn is_cache_aware(&self) -> bool {
        self.streamed_contexts().is_ok()
    }

    /// The contexts in which it does, the default one first; at least one.
    ///
    /// # Errors
    /// Where there is none; they say why.
    pub fn streamed_contexts(&self) -> Result<Vec<ChunkContext>> {
        match self.preprocessor.normalized {
            true => Err(EncoderConfig::not_cache_aware()),
            false => self.encoder.streamed_contexts(),
        }
    }

    /// What the heads are called: `TDT`, `RNN-T`, `CTC`, or two of them.
    pub fn heads(&self) -> &'static str {
        match (&self.transducer, &self.ctc) {
            (Some(transducer), None) if transducer.is_rnnt() => "RNN-T",
            (Some(_), None) => "TDT",
            (Some(transducer), Some(_)) if transducer.is_rnnt() => "RNN-T and CTC",
            (Some(_), Some(_)) => "TDT and CTC",
            (None, _) => "CTC",
        }
    }

    /// Checks that the model has a head by which it is to be decoded.
    ///
    /// # Errors
    /// Where it has not.
    pub fn check_decoder(&self, head: HeadKind) -> Result<()> {
        let has = match head {
            HeadKind::Transducer => self.transducer.is_some(),
            HeadKind::Ctc => self.ctc.is_some(),
        };
        match has {
            true => Ok(()),
            false => Err(Error::Input(format!(
                "`decoder` is `{}`, but the model has no such head: it is of {}",
                head.name(),
                self.heads()
            ))),
        }
    }
}

/// The language prompt: which numbers languages have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptConfig {
    /// How many prompts there are.
    pub prompts: usize,
    /// Names of languages, several of which may have one number, in the order of the configuration.
    pub dictionary: Vec<(String, usize)>,
}

/// A transducer: TDT, or RNN-T where the loss has no durations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransducerConfig {
    pub prediction: PredictionConfig,
    pub joint: JointConfig,
    pub loss: LossConfig,
    pub decoding: DecodingConfig,
}

impl TransducerConfig {
    /// Whether this is the plain transducer, in which a token lasts no frames and blank lasts one.
    pub fn is_rnnt(&self) -> bool {
        self.loss.durations.is_empty()
    }
}

/// A CTC head on the encoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CtcConfig {
    /// Share of its loss in training beside a transducer (NeMo's `aux_ctc.ctc_loss_weight`), 0 to 1, the rest being
    /// the transducer's; 1 where there is none.
    pub weight: f64,
    pub reduction: Reduction,
}

/// The prediction network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PredictionConfig {
    pub pred_hidden: usize,
    pub pred_rnn_layers: usize,
    pub dropout: f64,
}

/// The joint network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JointConfig {
    pub joint_hidden: usize,
    /// Dropout before the last layer. With 0 NeMo leaves the module out and the last layer's key is
    /// `joint.joint_net.1`, otherwise `joint.joint_net.2`.
    pub dropout: f64,
}

/// How losses of utterances become one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// Mean over utterances.
    MeanBatch,
    /// Mean over utterances of loss divided by the number of target tokens.
    Mean,
    /// Sum of losses divided by the sum of target lengths.
    MeanVolume,
    Sum,
}

impl Reduction {
    /// From NeMo's name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::MeanBatch, Self::Mean, Self::MeanVolume, Self::Sum]
            .into_iter()
            .find(|reduction| reduction.name() == name)
    }

    /// NeMo's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::MeanBatch => "mean_batch",
            Self::Mean => "mean",
            Self::MeanVolume => "mean_volume",
            Self::Sum => "sum",
        }
    }
}

/// The loss of a transducer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossConfig {
    /// Frames that a token may last; index = duration output. Empty for RNN-T.
    pub durations: Vec<usize>,
    /// Subtracted from every token log-probability; 0 for RNN-T, as is `omega`.
    pub sigma: f64,
    /// Probability that a batch is trained with the plain RNN-T loss instead.
    pub omega: f64,
    pub fastemit_lambda: f64,
    /// Bound on the gradient of token logits; none if not above 0.
    pub clamp: f64,
    pub reduction: Reduction,
}

/// Greedy decoding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecodingConfig {
    /// Tokens per frame at most.
    pub max_symbols: usize,
}

/// Names of the tokenizer's files inside an archive.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenizerConfig {
    /// `bpe` or `wpe`; ours is always SentencePiece.
    pub kind: String,
    /// `nemo:<name>` or a file name.
    pub model_path: Option<String>,
    pub vocab_path: Option<String>,
    pub spe_tokenizer_vocab: Option<String>,
}
