//! Greedy decoding of a batch.

use std::ops::Range;

use candle_core::{Device, Tensor};
use flow_kernels::joint::Cell;
use flow_kernels::{Float, dispatch, on_cpu, slice};

use crate::joint::Joint;
use crate::parameters::Parameters;
use crate::prediction::Prediction;
use crate::{Error, Result};

/// Rows of logits that are computed at once: those of the frames ahead, as the prediction network's output changes with
/// a token only. The product reads the whole weight, which takes as long for one row as for these.
const ROWS: usize = 16;

/// What greedy decoding found in one utterance.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Hypothesis {
    /// Emitted token ids, without blanks.
    pub ids: Vec<u32>,
    /// Encoder frame at which each token was emitted (80 ms each for sub-sampling by 8).
    pub frames: Vec<u32>,
    /// Predicted duration of each token, in frames.
    pub durations: Vec<u32>,
    /// Sum of the logits of the emitted tokens.
    pub score: f64,
    /// Decoded text; empty when the model has no tokenizer.
    pub text: String,
}

/// Sees the outputs behind each token that greedy search emits: the number of the utterance in its batch, and the logits
/// of all tokens and blank, the last of them, in f32. Tokens of an utterance come in their order.
pub type TokenObserver<'a> = &'a mut (dyn FnMut(usize, &[f32]) + Send);

/// Where one utterance's search stands.
#[derive(Debug, Clone, Default)]
struct Search {
    frame: usize,
    /// Tokens emitted on this frame.
    emitted: usize,
}

/// The best outputs of one row of logits.
#[derive(Debug, Clone, Copy)]
struct Best {
    token: usize,
    duration: usize,
    logit: f64,
}

/// Greedy search: at each frame the best token and the best duration; blank moves on by at least one frame, a token by
/// its duration, and after `max_symbols` tokens on one frame by one.
///
/// `encoded` is (batch, frames, encoder), of which `lengths[b]` frames are valid. Texts are left empty. The result for
/// an utterance does not depend on the others of its batch, but for rounding in the matrix products.
pub fn decode_greedy(
    parameters: &Parameters,
    prediction: &Prediction,
    joint: &Joint,
    durations: &[usize],
    max_symbols: usize,
    encoded: &Tensor,
    lengths: &[usize],
) -> Result<Vec<Hypothesis>> {
    let networks = Networks {
        parameters,
        prediction,
        joint,
    };
    decode_greedy_observed(&networks, durations, max_symbols, encoded, lengths, None)
}

/// The parts of a model that decoding needs.
pub struct Networks<'a> {
    pub parameters: &'a Parameters,
    pub prediction: &'a Prediction,
    pub joint: &'a Joint,
}

/// [`decode_greedy`] that shows the outputs behind each token.
pub fn decode_greedy_observed(
    networks: &Networks,
    durations: &[usize],
    max_symbols: usize,
    encoded: &Tensor,
    lengths: &[usize],
    mut observer: Option<TokenObserver>,
) -> Result<Vec<Hypothesis>> {
    let Networks {
        parameters,
        prediction,
        joint,
    } = *networks;
    let (batch, padded, _) = encoded.dims3()?;
    if lengths.len() != batch || lengths.iter().any(|&length| length > padded) {
        return Err(Error::Input(format!(
            "lengths {lengths:?} do not fit a batch of {batch} x {padded} frames"
        )));
    }
    let mut hypotheses = vec![Hypothesis::default(); batch];
    let mut searches = vec![Search::default(); batch];
    if lengths.iter().all(|&length| length == 0) {
        return Ok(hypotheses);
    }
    let f = joint.project_encoder(parameters, &encoded.contiguous()?.flatten_to(1)?)?;
    let mut state = prediction.start(parameters, batch)?;
    let predicted = prediction.step(parameters, &vec![None; batch], &vec![true; batch], &mut state)?;
    let mut g = joint.project_prediction(parameters, &predicted)?;
    let (mut tokens, mut moves) = (vec![None; batch], vec![false; batch]);
    loop {
        let active: Vec<usize> = (0..batch).filter(|&b| searches[b].frame < lengths[b]).collect();
        if active.is_empty() {
            return Ok(hypotheses);
        }
        let reach = (ROWS / active.len()).max(1);
        let ahead: Vec<Range<usize>> = active
            .iter()
            .map(|&b| searches[b].frame..lengths[b].min(searches[b].frame + reach))
            .collect();
        let cells: Vec<Cell> = active
            .iter()
            .zip(&ahead)
            .flat_map(|(&b, frames)| {
                frames.clone().map(move |frame| Cell {
                    frame: b * padded + frame,
                    state: b,
                    label: None,
                    index: b,
                })
            })
            .collect();
        let logits = joint.logits(parameters, &f, &g, &cells)?.to_device(&Device::Cpu)?;
        let mut first = 0;
        tokens.fill(None);
        moves.fill(false);
        for (&b, frames) in active.iter().zip(&ahead) {
            let (search, hypothesis) = (&mut searches[b], &mut hypotheses[b]);
            // Blanks leave the prediction network's output as it is, so the next frame's logits are there already.
            while frames.contains(&search.frame) {
                let row = first + search.frame - frames.start;
                let best = on_cpu(|| best_output(&logits, row, joint.tokens()))?;
                let duration = durations.get(best.duration).copied().unwrap_or(0);
                if best.token == joint.blank() {
                    search.frame += duration.max(1);
                    search.emitted = 0;
                    continue;
                }
                hypothesis.ids.push(best.token as u32);
                hypothesis.frames.push(search.frame as u32);
                hypothesis.durations.push(duration as u32);
                hypothesis.score += best.logit;
                if let Some(observer) = &mut observer {
                    observer(b, &token_logits(&logits, row, joint.tokens())?);
                }
                tokens[b] = Some(best.token as u32);
                moves[b] = true;
                search.emitted += 1;
                if duration > 0 {
                    search.frame += duration;
                    search.emitted = 0;
                } else if search.emitted >= max_symbols.max(1) {
                    search.frame += 1;
                    search.emitted = 0;
                }
                break;
            }
            first += frames.len();
        }
        if moves.contains(&true) {
            let predicted = prediction.step(parameters, &tokens, &moves, &mut state)?;
            g = joint.project_prediction(parameters, &predicted)?;
        }
    }
}

/// The logits of tokens and blank of a row.
fn token_logits(logits: &Tensor, row: usize, tokens: usize) -> Result<Vec<f32>> {
    let width = logits.dim(1)?;
    dispatch!(logits.dtype(), T => {
        let row = &slice::<T>(logits)?[row * width..][..tokens];
        Ok(row.iter().map(|logit| logit.wide() as f32).collect())
    })
}

/// First largest token and duration of a row of logits.
fn best_output(logits: &Tensor, row: usize, tokens: usize) -> Result<Best> {
    let width = logits.dim(1)?;
    dispatch!(logits.dtype(), T => {
        let logits = slice::<T>(logits)?;
        let row = &logits[row * width..][..width];
        let first_largest = |values: &[T]| {
            let mut best = 0;
            for (index, value) in values.iter().enumerate() {
                if *value > values[best] {
                    best = index;
                }
            }
            best
        };
        let token = first_largest(&row[..tokens]);
        let duration = if tokens < width { first_largest(&row[tokens..]) } else { 0 };
        Ok(Best { token, duration, logit: row[token].wide() })
    })
}
