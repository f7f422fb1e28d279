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

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_yaml::Mapping;

use crate::error::{Error, Result};
use crate::heads::HeadKind;

pub use adapters::{Activation, AdapterConfig, NormPosition};

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
        self.encoder.is_cache_aware() && !self.preprocessor.normalized
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

/// The log-mel front end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PreprocessorConfig {
    /// Samples per second.
    pub sample_rate: usize,
    /// Length of the analysis window in seconds.
    pub window_size: f64,
    /// Hop between frames in seconds.
    pub window_stride: f64,
    /// Number of mel bands.
    pub features: usize,
    /// FFT length in samples.
    pub n_fft: usize,
    /// Standard deviation of the noise added to the signal in training.
    pub dither: f64,
    /// Pre-emphasis coefficient; 0 for none.
    pub preemphasis: f64,
    /// Lowest frequency of the filter bank in Hz.
    pub low_frequency: f64,
    /// Highest frequency of the filter bank in Hz.
    pub high_frequency: f64,
    /// Whether each band of an utterance is brought to mean 0 and deviation 1 (`per_feature`); otherwise features are as they are
    /// (`NA`).
    #[serde(default = "yes")]
    pub normalized: bool,
}

fn yes() -> bool {
    true
}

/// How far a frame looks in self-attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttentionContext {
    Full,
    /// At most this many frames to either side.
    Band(usize),
    /// Within chunks and some frames before them.
    Chunks(ChunkContext),
}

/// The context of a cache-aware encoder (NeMo's `chunked_limited`): frames are in chunks of `right + 1`, and a frame sees its own
/// chunk and `left` frames before it, a multiple of the chunk. So a chunk can be encoded once it is there, `right` frames after
/// its first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkContext {
    pub left: usize,
    pub right: usize,
}

impl ChunkContext {
    /// Frames of a chunk.
    pub fn size(self) -> usize {
        self.right + 1
    }
}

impl fmt::Display for ChunkContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {}]", self.left, self.right)
    }
}

/// What of an encoder looks back alone, and the contexts that it was trained with. By default nothing does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CausalConfig {
    /// The convolutions of the sub-sampling, which then pad two rows before and one behind, over time and over bands.
    pub subsampling: bool,
    /// The depthwise convolutions of the layers.
    pub convolution: bool,
    /// Layer normalisation in the place of batch normalisation behind the depthwise convolutions.
    pub layer_norm: bool,
    /// Contexts of self-attention of which training draws one for each micro-batch; the first one is the default.
    pub contexts: Vec<ChunkContext>,
    /// The probabilities of the contexts; empty where all are equally likely.
    pub probabilities: Vec<f64>,
}

/// The FastConformer encoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EncoderConfig {
    /// Mel bands.
    pub feat_in: usize,
    pub n_layers: usize,
    pub d_model: usize,
    /// Whether the linear and convolution layers of the Conformer layers have biases.
    pub use_bias: bool,
    pub subsampling_conv_channels: usize,
    pub ff_expansion_factor: usize,
    pub n_heads: usize,
    pub attention_context: AttentionContext,
    /// Multiply by sqrt(d_model) after sub-sampling.
    pub xscaling: bool,
    /// Width of the depthwise convolution in frames; odd.
    pub conv_kernel_size: usize,
    #[serde(default)]
    pub causal: CausalConfig,
    pub dropout: f64,
    pub dropout_pre_encoder: f64,
    /// Dropout on the positional table.
    pub dropout_emb: f64,
    /// Dropout on the attention weights.
    pub dropout_att: f64,
}

impl EncoderConfig {
    /// Log-mel frames per encoder frame.
    pub const SUBSAMPLING: usize = 8;

    /// The size of an axis, of frames or of bands, after sub-sampling: three times half, rounded up; where it is causal, three
    /// times half, rounded down, plus one.
    pub fn subsampled(&self, size: usize) -> usize {
        let rest = usize::from(self.causal.subsampling);
        (0..3).fold(size, |size, _| size.saturating_add(rest).div_ceil(2))
    }

    /// An error unless this is one of the contexts that the encoder was trained with.
    pub fn check_context(&self, context: ChunkContext) -> Result<()> {
        if self.causal.contexts.contains(&context) {
            return Ok(());
        }
        let known: Vec<String> = self.causal.contexts.iter().map(ToString::to_string).collect();
        Err(Error::Input(format!(
            "the context {context} is none of the model's: {}",
            known.join(", ")
        )))
    }

    /// Whether a recording can be encoded chunk by chunk, each frame once, with what [`crate::encoder::cached`] keeps.
    pub fn is_cache_aware(&self) -> bool {
        self.causal.subsampling && self.causal.convolution && !self.causal.contexts.is_empty()
    }
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

/// Widest time mask.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum TimeWidth {
    /// In frames (an integer in the configuration).
    Frames(usize),
    /// As a share of the utterance (a float in the configuration).
    Share(f64),
}

/// SpecAugment; no masks if the configuration has no such section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpecAugmentConfig {
    pub freq_masks: usize,
    pub time_masks: usize,
    /// Widest frequency mask in mel bands; the width itself is never reached.
    pub freq_width: usize,
    pub time_width: TimeWidth,
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
