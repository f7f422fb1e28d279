//! Sizes and settings of the front end, the encoder's layers and SpecAugment.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

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
/// its first one. What is `None` (NeMo's -1) has no limit; without a limit to the right there are no chunks, and a frame sees
/// `left` frames before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkContext {
    pub left: Option<usize>,
    pub right: Option<usize>,
}

impl ChunkContext {
    /// Chunks that are seen before a frame's own where `left` has no limit, and rows that a stream keeps of them: NeMo's numbers.
    pub const MOST_LEFT: usize = 10_000;

    /// One with both limits.
    pub fn limited(left: usize, right: usize) -> Self {
        ChunkContext {
            left: Some(left),
            right: Some(right),
        }
    }

    /// Frames of a chunk; none where a frame sees all that follow, so that a recording cannot be encoded chunk by chunk.
    pub fn chunk(self) -> Option<usize> {
        Some(self.right? + 1)
    }

    /// Rows before a chunk that a stream keeps at most.
    pub fn rows_kept(self) -> usize {
        self.left.unwrap_or(Self::MOST_LEFT)
    }
}

impl fmt::Display for ChunkContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [left, right] = [self.left, self.right].map(|side| side.map_or("-1".into(), |side| side.to_string()));
        write!(f, "[{left}, {right}]")
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
        Err(Error::Input(format!(
            "the context {context} is not one of the model's: {}",
            named(&self.causal.contexts)
        )))
    }

    /// The contexts in which a recording can be encoded chunk by chunk, each frame once, the default one first; at least one.
    ///
    /// # Errors
    /// Where there is none; they say why.
    pub fn streamed_contexts(&self) -> Result<Vec<ChunkContext>> {
        let contexts = &self.causal.contexts;
        if !self.causal.subsampling || !self.causal.convolution || contexts.is_empty() {
            return Err(Self::not_cache_aware());
        }
        let streamed: Vec<_> = contexts.iter().filter(|context| context.right.is_some()).collect();
        match streamed.is_empty() {
            false => Ok(streamed.into_iter().copied().collect()),
            true => Err(Error::Input(format!(
                "the model hears whole recordings, or windows of them: in its contexts, {}, a frame sees all that follow",
                named(contexts)
            ))),
        }
    }

    /// Says that a model hears no recording chunk by chunk.
    pub fn not_cache_aware() -> Error {
        Error::Input("the model is not cache-aware: it hears whole recordings, or windows of them".into())
    }

    /// Frames of a chunk of one of [`EncoderConfig::streamed_contexts`].
    ///
    /// # Errors
    /// Where it is none of them.
    pub fn check_streamed(&self, context: ChunkContext) -> Result<usize> {
        let streamed = self.streamed_contexts()?;
        self.check_context(context)?;
        context.chunk().ok_or_else(|| {
            Error::Input(format!(
                "a recording cannot be heard chunk by chunk in the context {context}, in which a frame sees all that follow, but in {}",
                named(&streamed)
            ))
        })
    }
}

fn named(contexts: &[ChunkContext]) -> String {
    let names: Vec<String> = contexts.iter().map(ToString::to_string).collect();
    names.join(", ")
}

/// A linear adapter behind each layer of the encoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdapterConfig {
    pub name: String,
    /// Width between its two linear layers.
    pub dim: usize,
    pub activation: Activation,
    pub norm_position: NormPosition,
    /// Dropout on what the adapter adds.
    pub dropout: f64,
    /// Whether the model uses it. One that it does not use is kept.
    pub enabled: bool,
    /// Whether NeMo trains it with stochastic depth or a penalty on what it adds.
    pub regularised: bool,
}

/// The function between an adapter's linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activation {
    Silu,
    Relu,
    Identity,
}

/// Where an adapter has its layer norm: before its linear layers, or behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NormPosition {
    Pre,
    Post,
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
