//! Heads: what makes losses and tokens of the encoder's frames. A new one is a file with an implementation of [`Head`], a
//! section of the configuration, and an entry in [`of_model`].

pub mod ctc;
pub mod transducer;

use std::fmt;

use candle_core::Tensor;
use flow_kernels::Noise;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::alignment::{AlignedTokens, Costs, WordTokens};
use crate::config::{ModelConfig, Reduction};
use crate::decoding::{DecodingSettings, GreedyState, Hypothesis, TokenObserver};
use crate::parameter_groups::{ParameterGroup, PassObserver};
use crate::{Error, Result};
use flow_nn::parameters::{Gradients, Mode, ParameterBuilder, Parameters};

/// A kind of head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HeadKind {
    /// TDT or RNN-T.
    Transducer,
    Ctc,
}

impl HeadKind {
    /// As settings name it.
    pub fn name(self) -> &'static str {
        match self {
            HeadKind::Transducer => "transducer",
            HeadKind::Ctc => "ctc",
        }
    }
}

/// What a head learns from in a micro-batch.
#[derive(Clone, Copy)]
pub struct HeadInput<'a> {
    /// The encoder's output, (batch, frames, d_model).
    pub frames: &'a Tensor,
    /// Valid frames of each utterance.
    pub lengths: &'a [usize],
    /// Token ids of each utterance.
    pub targets: &'a [Vec<u32>],
    /// The factor of each utterance's loss in the sum of which gradients are taken.
    pub factors: &'a [f64],
    /// The source of random choices that the whole micro-batch has in common; none in evaluation.
    pub choices: Option<&'a Noise>,
}

/// A head. Parameters and configuration come with each call, as both may change between calls.
pub trait Head: fmt::Debug + Send + Sync {
    fn kind(&self) -> HeadKind;

    /// How the losses of utterances become one.
    fn reduction(&self, config: &ModelConfig) -> Reduction;

    /// The losses of utterances, and what the backward pass needs. `before` is called before the parameters of a group are read.
    ///
    /// # Errors
    /// Where shapes do not fit, or a target has a token outside the vocabulary.
    fn forward<'a>(
        &'a self,
        parameters: &Parameters,
        config: &ModelConfig,
        input: &HeadInput,
        mode: Mode,
        before: &mut dyn FnMut(ParameterGroup),
    ) -> Result<Box<dyn HeadPass + 'a>>;

    /// Whether the head can be decoded with these settings.
    ///
    /// # Errors
    /// Where a language model is of another vocabulary.
    fn check(&self, settings: &DecodingSettings) -> Result<()>;

    /// Whether the head is decoded by beam search with these settings, which needs all frames of an utterance: [`Head::n_best`].
    fn is_beam_search(&self, settings: &DecodingSettings) -> bool {
        settings.beam > 1
    }

    /// Greedy search before the first frame of `batch` utterances.
    ///
    /// # Errors
    /// Where the head has no greedy search with these settings, or a language model is of another vocabulary.
    fn start(&self, parameters: &Parameters, settings: &DecodingSettings, batch: usize) -> Result<SearchState>;

    /// Greedy search in the next part of each utterance: frames (batch, frames, d_model), of which so many are valid. Frames of the
    /// result count from the beginning of the part. Texts are left empty.
    ///
    /// # Errors
    /// Where lengths do not fit, or the state is of another head or batch.
    fn search(
        &self,
        parameters: &Parameters,
        config: &ModelConfig,
        settings: &DecodingSettings,
        encoded: (&Tensor, &[usize]),
        state: &mut SearchState,
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>>;

    /// The hypotheses of beam search for each utterance, the best first; one where the settings ask for greedy search.
    ///
    /// # Errors
    /// As those of [`Head::start`] and [`Head::search`].
    fn n_best(
        &self,
        parameters: &Parameters,
        config: &ModelConfig,
        settings: &DecodingSettings,
        encoded: (&Tensor, &[usize]),
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Vec<Hypothesis>>>;

    /// The best path of a known text through the frames of one signal, (frames, d_model).
    ///
    /// # Errors
    /// As those of the searches in [`crate::alignment`].
    fn align(
        &self,
        parameters: &Parameters,
        config: &ModelConfig,
        frames: &Tensor,
        text: &WordTokens,
        costs: Costs,
    ) -> Result<AlignedTokens>;
}

/// The backward pass of a head after [`Head::forward`].
pub trait HeadPass {
    /// Loss of each utterance.
    fn losses(&self) -> &[f64];

    /// Operations of matrix products that the backward pass leaves out on a device.
    fn flops_left_out(&self) -> f64 {
        0.0
    }

    /// Adds the gradients of the group [`ParameterGroup::Heads`], and gives that of the encoder's frames, none if it is not
    /// wanted.
    fn backward_outputs(
        &mut self,
        parameters: &Parameters,
        encoder_frozen: bool,
        gradients: &mut Gradients,
    ) -> Result<Option<Tensor>>;

    /// Adds the gradients of the head's other groups, and tells the observer of each.
    fn backward_rest(
        self: Box<Self>,
        parameters: &Parameters,
        gradients: &mut Gradients,
        observer: &mut (dyn PassObserver + Send),
    ) -> Result<()>;
}

/// A greedy search under way.
#[derive(Debug, Clone)]
pub enum SearchState {
    Transducer(GreedyState),
    /// The output of the frame before, of each utterance.
    Ctc(Vec<Option<u32>>),
}

/// The heads of a model; the first one decodes unless settings name another, and its loss is the model's.
///
/// # Errors
/// Where the configuration has none, or a tensor is missing or has another shape.
pub fn of_model(config: &ModelConfig, builder: &mut ParameterBuilder) -> Result<Vec<Box<dyn Head>>> {
    let mut heads: Vec<Box<dyn Head>> = Vec::new();
    if let Some(transducer) = &config.transducer {
        heads.push(Box::new(transducer::Transducer::new(config, transducer, builder)?));
    }
    if config.ctc.is_some() {
        heads.push(Box::new(ctc::CtcHead::new(config, builder)?));
    }
    if heads.is_empty() {
        return Err(Error::Config("the model has no head".into()));
    }
    Ok(heads)
}

#[cfg(test)]
mod tests;
