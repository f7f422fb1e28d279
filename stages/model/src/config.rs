//! Configuration of a model: the parts of NeMo's `model_config.yaml` that determine its architecture and results.

pub mod huggingface;
mod read;
mod section;
#[cfg(test)]
mod tests;
mod write;

use serde::{Deserialize, Serialize};
use serde_yaml::Mapping;

/// Configuration of a TDT model. Read from and written as NeMo's `model_config.yaml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    pub preprocessor: PreprocessorConfig,
    pub encoder: EncoderConfig,
    pub decoder: DecoderConfig,
    pub joint: JointConfig,
    pub loss: LossConfig,
    pub decoding: DecodingConfig,
    pub spec_augment: SpecAugmentConfig,
    /// Share of an auxiliary CTC loss in training (NeMo's `aux_ctc.ctc_loss_weight`), 0 to 1; none if the model has
    /// no such head.
    pub ctc_weight: Option<f64>,
    pub tokenizer: TokenizerConfig,
    /// The pieces of the vocabulary in the order of their ids (NeMo's `labels`); may be empty.
    pub labels: Vec<String>,
    /// The whole document this was read from: sections that we do not know are written back as they were.
    #[serde(default)]
    source: Mapping,
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
}

/// How far a frame looks in self-attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttentionContext {
    Full,
    /// At most this many frames to either side.
    Band(usize),
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
}

/// The prediction network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecoderConfig {
    /// Tokens without blank; blank has this id.
    pub vocab_size: usize,
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
    /// Duration outputs.
    pub num_extra_outputs: usize,
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

/// The TDT loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossConfig {
    /// Frames that a token may last; index = duration output.
    pub durations: Vec<usize>,
    /// Subtracted from every token log-probability.
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
