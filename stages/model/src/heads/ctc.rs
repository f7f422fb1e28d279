//! A CTC head: a linear layer from the encoder's frames to tokens and blank, the last output. It is the only head of NeMo's
//! CTC models, and the second one of its hybrid models.

mod beam;

use std::ops::Range;

use candle_core::{Device, Tensor};
use flow_kernels::ctc::loss_and_gradient;
use flow_kernels::{Float, dispatch, on_cpu, slice};
use rayon::prelude::*;

use super::{Head, HeadInput, HeadKind, HeadPass, SearchState};
use crate::alignment::{self, AlignedTokens, Costs, WordTokens};
use crate::config::{ModelConfig, Reduction};
use crate::decoding::{DecodingSettings, Hypothesis, TokenObserver, check_lengths};
use crate::parameter_groups::{ParameterGroup, PassObserver};
use crate::{Error, Result};
use flow_nn::layers::linear::Linear;
use flow_nn::parameters::{Gradients, Mode, ParameterBuilder, Parameters};

/// What the names of the head's tensors begin with, as in NeMo: in a model with a transducer, and without one.
pub const AUXILIARY: &str = "ctc_decoder.";
pub const ALONE: &str = "decoder.decoder_layers.";

/// The power of probabilities in the entropy that tells which frame of a token is the least certain, NeMo's for confidences.
const ENTROPY_POWER: f32 = 0.33;

/// A linear layer from encoder frames to tokens and blank. Named as NeMo's `ConvASRDecoder`.
#[derive(Debug, Clone)]
pub struct CtcHead {
    projection: Linear,
    /// Tokens without blank.
    vocabulary: usize,
}

impl CtcHead {
    /// Declares `ctc_decoder.decoder_layers.0` beside a transducer and `decoder.decoder_layers.0` without one, a pointwise
    /// convolution with Xavier-uniform initial values.
    pub fn new(config: &ModelConfig, builder: &mut ParameterBuilder) -> Result<Self> {
        let (encoder, vocabulary) = (config.encoder.d_model, config.vocab_size);
        let bound = (6.0 / (encoder + vocabulary + 1) as f64).sqrt();
        let name = match config.transducer {
            Some(_) => format!("{AUXILIARY}decoder_layers.0"),
            None => format!("{ALONE}0"),
        };
        let projection = Linear::with_shape(&name, vec![vocabulary + 1, encoder, 1], true, bound, builder)?;
        Ok(CtcHead { projection, vocabulary })
    }

    /// Logits (batch * frames, tokens and blank) of frames (batch, frames, d_model), and these as rows.
    pub fn logits(&self, parameters: &Parameters, frames: &Tensor) -> Result<(Tensor, Tensor)> {
        let (batch, time, width) = frames.dims3()?;
        let rows = frames.reshape((batch * time, width))?.contiguous()?;
        Ok((self.projection.forward(parameters, &rows)?, rows))
    }

    /// The logits in f32, row by row.
    fn rows(&self, parameters: &Parameters, frames: &Tensor) -> Result<Vec<f32>> {
        let logits = self.logits(parameters, frames)?.0.to_device(&Device::Cpu)?;
        on_cpu(
            || dispatch!(logits.dtype(), T => Ok(slice::<T>(&logits)?.iter().map(|logit| logit.wide() as f32).collect())),
        )
    }
}

/// What the backward pass of a micro-batch needs.
struct CtcPass<'a> {
    projection: &'a Linear,
    rows: Tensor,
    d_logits: Tensor,
    shape: (usize, usize),
    losses: Vec<f64>,
}

impl HeadPass for CtcPass<'_> {
    fn losses(&self) -> &[f64] {
        &self.losses
    }

    fn backward_outputs(
        &mut self,
        parameters: &Parameters,
        encoder_frozen: bool,
        gradients: &mut Gradients,
    ) -> Result<Option<Tensor>> {
        if encoder_frozen {
            self.projection
                .backward_weights(parameters, &self.rows, &self.d_logits, gradients)?;
            return Ok(None);
        }
        let d_rows = self
            .projection
            .backward(parameters, &self.rows, &self.d_logits, gradients)?;
        Ok(Some(d_rows.reshape((self.shape.0, self.shape.1, ()))?))
    }

    fn backward_rest(
        self: Box<Self>,
        _: &Parameters,
        _: &mut Gradients,
        _: &mut (dyn PassObserver + Send),
    ) -> Result<()> {
        Ok(())
    }
}

impl Head for CtcHead {
    fn kind(&self) -> HeadKind {
        HeadKind::Ctc
    }

    fn reduction(&self, config: &ModelConfig) -> Reduction {
        config.ctc.as_ref().map_or(Reduction::MeanBatch, |ctc| ctc.reduction)
    }

    /// An utterance whose frames cannot hold its target has loss 0 and no gradient, as in NeMo (`zero_infinity`).
    fn forward<'a>(
        &'a self,
        parameters: &Parameters,
        _: &ModelConfig,
        input: &HeadInput,
        _: Mode,
        before: &mut dyn FnMut(ParameterGroup),
    ) -> Result<Box<dyn HeadPass + 'a>> {
        let (batch, time, _) = input.frames.dims3()?;
        before(ParameterGroup::Heads);
        let (logits, rows) = self.logits(parameters, input.frames)?;
        let (mut losses, d_logits) = loss_and_gradient(&logits, time, input.lengths, input.targets, input.factors)?;
        for loss in &mut losses {
            if *loss == f64::INFINITY {
                *loss = 0.0;
            }
        }
        Ok(Box::new(CtcPass {
            projection: &self.projection,
            rows,
            d_logits,
            shape: (batch, time),
            losses,
        }))
    }

    fn check(&self, settings: &DecodingSettings) -> Result<()> {
        settings.fusion.check(self.vocabulary)
    }

    /// Language models and boosted phrases score texts, not outputs of single frames, so with them a beam of one is searched, too.
    fn is_beam_search(&self, settings: &DecodingSettings) -> bool {
        settings.beam > 1 || settings.fusion.has_models()
    }

    fn start(&self, _: &Parameters, settings: &DecodingSettings, batch: usize) -> Result<SearchState> {
        self.check(settings)?;
        if self.is_beam_search(settings) {
            return Err(Error::Input(
                "with `beam`, `lm` or `boost` a CTC head is decoded by beam search, which cannot continue from one part of a recording \
                 to the next: decode windows of it (`window: vad`)"
                    .into(),
            ));
        }
        Ok(SearchState::Ctc(vec![None; batch]))
    }

    /// At each frame the best output; equal ones in a row are one token, blanks none. A token's frame is the first of its
    /// row, its duration the length of the row. The observer sees the logits of the frame of the row that is the least
    /// certain.
    fn search(
        &self,
        parameters: &Parameters,
        _: &ModelConfig,
        settings: &DecodingSettings,
        (encoded, lengths): (&Tensor, &[usize]),
        state: &mut SearchState,
        mut observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>> {
        self.check(settings)?;
        let (batch, padded, _) = encoded.dims3()?;
        check_lengths(lengths, batch, padded)?;
        let SearchState::Ctc(last) = state else {
            return Err(Error::Input(
                "a state of a transducer's search is not one of CTC's".into(),
            ));
        };
        if last.len() != batch {
            let states = last.len();
            return Err(Error::Input(format!(
                "a state of {states} utterances is not one of {batch}"
            )));
        }
        let mut hypotheses = vec![Hypothesis::default(); batch];
        if padded == 0 {
            return Ok(hypotheses);
        }
        let logits = self.logits(parameters, encoded)?.0.to_device(&Device::Cpu)?;
        let outputs = self.vocabulary + 1;
        on_cpu(|| {
            dispatch!(logits.dtype(), T => {
                let logits = slice::<T>(&logits)?;
                let utterances = logits.chunks_exact(padded * outputs).zip(lengths).zip(last.iter_mut());
                for (utterance, ((rows, &length), last)) in utterances.enumerate() {
                    let hypothesis = &mut hypotheses[utterance];
                    let mut observe = |row: &[f32], token: u32| {
                        if let Some(observer) = &mut observer {
                            observer(utterance, token, row);
                        }
                    };
                    let rows = &rows[..length * outputs];
                    let rules = Choice {
                        outputs,
                        blank_penalty: settings.blank_penalty as f32,
                        prior: settings.fusion.prior(),
                    };
                    decode_one(rows, rules, last, hypothesis, &mut observe);
                }
                Ok(())
            })
        })
        .map(|()| hypotheses)
    }

    fn n_best(
        &self,
        parameters: &Parameters,
        config: &ModelConfig,
        settings: &DecodingSettings,
        (encoded, lengths): (&Tensor, &[usize]),
        mut observer: Option<TokenObserver>,
    ) -> Result<Vec<Vec<Hypothesis>>> {
        if !self.is_beam_search(settings) {
            let mut state = self.start(parameters, settings, lengths.len())?;
            let found = self.search(parameters, config, settings, (encoded, lengths), &mut state, observer)?;
            return Ok(found.into_iter().map(|best| vec![best]).collect());
        }
        self.check(settings)?;
        let (batch, padded, _) = encoded.dims3()?;
        check_lengths(lengths, batch, padded)?;
        if padded == 0 {
            return Ok(vec![vec![Hypothesis::default()]; batch]);
        }
        let outputs = self.vocabulary + 1;
        let logits = self.rows(parameters, encoded)?;
        let utterances: Vec<&[f32]> = logits.chunks_exact(padded * outputs).collect();
        let found: Vec<Vec<Hypothesis>> = (utterances.par_iter().zip(lengths).enumerate())
            .map(|(utterance, (rows, &length))| {
                let speech = settings.speech_of(utterance);
                beam_search(&rows[..length * outputs], outputs, settings, speech)
            })
            .collect::<Result<_>>()?;
        if let Some(observer) = &mut observer {
            for (utterance, hypotheses) in found.iter().enumerate() {
                if let Some(best) = hypotheses.first() {
                    let shown = least_certain(best, utterances[utterance], outputs);
                    shown.iter().for_each(|&(token, row)| observer(utterance, token, row));
                }
            }
        }
        Ok(found)
    }

    fn align(
        &self,
        parameters: &Parameters,
        _: &ModelConfig,
        frames: &Tensor,
        text: &WordTokens,
        costs: Costs,
    ) -> Result<AlignedTokens> {
        let outputs = self.vocabulary + 1;
        let log_probs = match frames.dim(0)? {
            0 => Vec::new(),
            _ => log_probabilities(&self.rows(parameters, &frames.unsqueeze(0)?)?, outputs),
        };
        alignment::ctc::align(&log_probs, outputs, text, costs)
    }
}

/// How the output of a row is chosen.
#[derive(Clone, Copy)]
struct Choice<'a> {
    /// Tokens and blank.
    outputs: usize,
    blank_penalty: f32,
    /// Of [`crate::fusion::Fusion::prior`].
    prior: &'a [f32],
}

impl Choice<'_> {
    /// The best output, the first of equal ones; where that is a token, the best one with the prior.
    fn best(&self, row: &[f32]) -> usize {
        let blank = self.outputs - 1;
        let first_largest = |count: usize, score: &dyn Fn(usize) -> f32| {
            (0..count).fold(0, |best, next| if score(next) > score(best) { next } else { best })
        };
        let penalised = |output: usize| row[output] - if output == blank { self.blank_penalty } else { 0.0 };
        let best = first_largest(self.outputs, &penalised);
        if best == blank || self.prior.is_empty() {
            return best;
        }
        first_largest(blank, &|token| row[token] + self.prior[token])
    }
}

/// Decodes rows of logits. `last` is the output of the frame before.
fn decode_one<T: Float>(
    rows: &[T],
    choice: Choice,
    last: &mut Option<u32>,
    hypothesis: &mut Hypothesis,
    observe: &mut dyn FnMut(&[f32], u32),
) {
    let (outputs, blank) = (choice.outputs, (choice.outputs - 1) as u32);
    // The least certain row of the token that goes on, with its entropy.
    let mut shown: Option<(Vec<f32>, f32)> = None;
    let mut end = |shown: &mut Option<(Vec<f32>, f32)>, hypothesis: &Hypothesis| {
        if let (Some((row, _)), Some(&token)) = (shown.take(), hypothesis.ids.last()) {
            observe(&row, token);
        }
    };
    for (frame, row) in rows.chunks_exact(outputs).enumerate() {
        let row: Vec<f32> = row.iter().map(|logit| logit.wide() as f32).collect();
        let best = choice.best(&row);
        let goes_on = *last == Some(best as u32);
        if !goes_on {
            end(&mut shown, hypothesis);
        }
        *last = Some(best as u32);
        if best as u32 == blank {
            continue;
        }
        // With a prior another output may be far above the token.
        let top = match choice.prior.is_empty() {
            true => row[best],
            false => largest(&row),
        };
        let normaliser = log_sum(&row, 1.0, top);
        hypothesis.score += f64::from(row[best] - normaliser);
        if !goes_on {
            hypothesis.ids.push(best as u32);
            hypothesis.frames.push(frame as u32);
            hypothesis.durations.push(1);
        } else if let Some(duration) = hypothesis.durations.last_mut() {
            *duration += 1;
        } else {
            // It began in the part before, where it was found.
            continue;
        }
        let entropy = log_sum(&row, ENTROPY_POWER, top) - ENTROPY_POWER * normaliser;
        if shown.as_ref().is_none_or(|(_, least_certain)| entropy > *least_certain) {
            shown = Some((row, entropy));
        }
    }
    end(&mut shown, hypothesis);
}

/// The hypotheses of beam search in rows of logits, the best first. Their times are those of the best path of their tokens.
fn beam_search(
    rows: &[f32],
    outputs: usize,
    settings: &DecodingSettings,
    speech: Option<&[Range<usize>]>,
) -> Result<Vec<Hypothesis>> {
    let log_probs = log_probabilities(rows, outputs);
    let texts = beam::search(&log_probs, outputs, settings, speech).into_iter();
    let hypotheses = texts.map(|(ids, score)| {
        let path = alignment::ctc::align(&log_probs, outputs, &WordTokens::new([&ids[..]]), Costs::FORCED)?;
        let placed = || path.tokens.iter().flatten();
        Ok(Hypothesis {
            frames: placed().map(|token| token.frame as u32).collect(),
            durations: placed().map(|token| token.duration as u32).collect(),
            ids,
            score,
            ..Hypothesis::default()
        })
    });
    hypotheses.collect()
}

/// The tokens of a hypothesis, each with the least certain of its rows of logits.
fn least_certain<'a>(hypothesis: &Hypothesis, rows: &'a [f32], outputs: usize) -> Vec<(u32, &'a [f32])> {
    let times = hypothesis.frames.iter().zip(&hypothesis.durations);
    let tokens = hypothesis
        .ids
        .iter()
        .zip(times)
        .filter_map(|(&token, (&frame, &duration))| {
            let rows = rows.chunks_exact(outputs).skip(frame as usize).take(duration as usize);
            let of_token = rows.map(|row| (row, entropy(row)));
            let least = of_token.reduce(|least, next| if next.1 > least.1 { next } else { least });
            least.map(|(row, _)| (token, row))
        });
    tokens.collect()
}

/// Log-probabilities of rows of logits.
fn log_probabilities(rows: &[f32], outputs: usize) -> Vec<f32> {
    let mut log_probs = Vec::with_capacity(rows.len());
    for row in rows.chunks_exact(outputs) {
        let normaliser = log_sum(row, 1.0, largest(row));
        log_probs.extend(row.iter().map(|logit| logit - normaliser));
    }
    log_probs
}

/// What tells how uncertain a row of logits is; it grows with the entropy.
fn entropy(row: &[f32]) -> f32 {
    let top = largest(row);
    log_sum(row, ENTROPY_POWER, top) - ENTROPY_POWER * log_sum(row, 1.0, top)
}

fn largest(row: &[f32]) -> f32 {
    row.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// The logarithm of the sum of `e^(power x)` over a row whose largest value is `top`.
fn log_sum(row: &[f32], power: f32, top: f32) -> f32 {
    power * top + row.iter().map(|x| (power * (x - top)).exp()).sum::<f32>().ln()
}
