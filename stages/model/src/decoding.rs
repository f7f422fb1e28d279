//! Greedy decoding of a batch.

use candle_core::Tensor;

use crate::joint::Joint;
use crate::kernels::joint::Cell;
use crate::kernels::{Float, dispatch, slice};
use crate::parameters::Parameters;
use crate::prediction::Prediction;
use crate::{Error, Result};

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
        let pairs: Vec<Cell> = searches
            .iter()
            .enumerate()
            .filter(|(b, search)| search.frame < lengths[*b])
            .map(|(b, search)| Cell {
                frame: b * padded + search.frame,
                state: b,
                label: None,
                index: b,
            })
            .collect();
        if pairs.is_empty() {
            return Ok(hypotheses);
        }
        let best = best_outputs(&joint.logits(parameters, &f, &g, &pairs)?, joint.tokens())?;
        tokens.fill(None);
        moves.fill(false);
        for (pair, best) in pairs.iter().zip(best) {
            let b = pair.state;
            let (search, hypothesis) = (&mut searches[b], &mut hypotheses[b]);
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
        }
        if moves.contains(&true) {
            let predicted = prediction.step(parameters, &tokens, &moves, &mut state)?;
            g = joint.project_prediction(parameters, &predicted)?;
        }
    }
}

/// First largest token and duration of each row of logits.
fn best_outputs(logits: &Tensor, tokens: usize) -> Result<Vec<Best>> {
    let width = logits.dim(1)?;
    dispatch!(logits.dtype(), T => {
        let logits = slice::<T>(logits)?;
        let first_largest = |values: &[T]| {
            let mut best = 0;
            for (index, value) in values.iter().enumerate() {
                if *value > values[best] {
                    best = index;
                }
            }
            best
        };
        Ok(logits
            .chunks_exact(width)
            .map(|row| {
                let token = first_largest(&row[..tokens]);
                let duration = if tokens < width { first_largest(&row[tokens..]) } else { 0 };
                Best { token, duration, logit: row[token].wide() }
            })
            .collect())
    })
}
