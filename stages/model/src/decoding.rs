//! Decoding of a batch: greedy here, beam search in [`beam`].

pub mod beam;
pub(crate) mod expansion;
mod on_device;
mod options;

#[cfg(test)]
mod on_device_tests;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use flow_kernels::joint::Cell;
use flow_kernels::{Float, dispatch, is_gpu, on_cpu, slice};

use self::beam::Steps;
use crate::fusion::{BoostingRules, Fusion, FusionState, Phrase, boosting_tree};
use crate::heads::HeadKind;
use crate::joint::Joint;
use crate::prediction::{Prediction, PredictionState};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use flow_nn::parameters::Parameters;

pub use options::{DecodingOptions, MAX_BEAM};

/// Frames whose logits are computed together: the prediction network's output changes only with a token, so the logits
/// of the next frames are likely to be used. The product reads the whole weight, which takes as long for one row as for
/// these.
const ROWS: usize = 16;

/// What greedy decoding found in one utterance.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Hypothesis {
    /// Emitted token ids, without blanks.
    pub ids: Vec<u32>,
    /// Encoder frame at which each token was emitted (80 ms each for sub-sampling by 8).
    pub frames: Vec<u32>,
    /// Duration of each token in frames: as TDT predicts it; in CTC the length of the row of equal outputs; 1 in RNN-T.
    pub durations: Vec<u32>,
    /// Greedy: the sum of the logits of the emitted tokens, or of the log-probabilities of CTC on the frames of tokens. Beam
    /// search: the log-probability, with that of fusion.
    pub score: f64,
    /// Decoded text; empty when the model has no tokenizer.
    pub text: String,
    /// Frames on which greedy search of a transducer on the CPU chose blank; elsewhere none.
    pub blanks: Vec<Blank>,
}

/// A frame on which greedy search chose blank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Blank {
    pub frame: u32,
    /// How far the logit of blank, less the penalty, is above that of the best token.
    pub lead: f32,
}

/// How a model is decoded.
#[derive(Debug, Clone)]
pub struct DecodingSettings {
    /// The head that decodes; none for the first one of the model: the transducer, or CTC where there is none.
    pub head: Option<HeadKind>,
    /// Hypotheses that are kept; 0 or 1 for greedy search.
    pub beam: usize,
    /// Whether beam search compares scores divided by the number of tokens plus one.
    pub score_norm: bool,
    /// Language models and boosted phrases.
    pub fusion: Fusion,
    /// When beam search leaves out tokens.
    pub pruning: Pruning,
    /// How beam search scores blank.
    pub blank_score: BlankScore,
    /// What greedy search takes from the logit of blank before it compares it with those of tokens; 0 for the model's own choice.
    /// Scores and what observers see stay those of the model. Beam search does not use it.
    pub blank_penalty: f64,
    /// The number of the language prompt, for models that have one; none for the model's own.
    pub prompt: Option<usize>,
    /// The texts of the boosted phrases, as the model writes them.
    pub boosted: Arc<[String]>,
    /// The frames of each utterance in which phrases score ([`Fusion::add_phrases`]), where voice activity has looked for speech; empty
    /// for all frames of all utterances.
    pub speech: Vec<Vec<Range<usize>>>,
    /// What a user has to know of files that were read for these settings.
    pub notes: Vec<String>,
}

/// Greedy search, and NeMo's defaults of beam search.
impl Default for DecodingSettings {
    fn default() -> Self {
        DecodingSettings {
            head: None,
            beam: 0,
            score_norm: true,
            fusion: Fusion::default(),
            pruning: Pruning::default(),
            blank_score: BlankScore::default(),
            blank_penalty: 0.0,
            prompt: None,
            boosted: Arc::default(),
            speech: Vec::new(),
            notes: Vec::new(),
        }
    }
}

impl DecodingSettings {
    /// Where phrases score in an utterance of the batch; none for everywhere.
    pub(crate) fn speech_of(&self, utterance: usize) -> Option<&[Range<usize>]> {
        self.speech.get(utterance).map(Vec::as_slice)
    }

    /// Adds phrases with the weight of their scores; one of 0 adds none.
    ///
    /// # Errors
    /// If the weight is not a number, or a phrase is not of the tokenizer.
    pub fn boost(&mut self, phrases: &[Phrase], weight: f64, tokenizer: &Tokenizer) -> Result<()> {
        let tree = boosting_tree(phrases, &BoostingRules::default(), tokenizer.vocabulary_size())?;
        self.fusion.add_phrases(Arc::new(tree), weight)?;
        if weight != 0.0 {
            let texts: Result<Vec<String>> = phrases.iter().map(|phrase| tokenizer.decode(&phrase.tokens)).collect();
            self.boosted = self.boosted.iter().cloned().chain(texts?).collect();
        }
        Ok(())
    }
}

/// When beam search leaves out tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pruning {
    /// By the model's scores alone: fusion orders what is left.
    Early,
    /// By scores with fusion.
    #[default]
    Late,
}

/// How beam search scores blank, which language models do not know.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BlankScore {
    /// As the model does.
    NoScore,
    /// As if the language model gave blank the model's own probability, and the rest to tokens.
    #[default]
    LmWeightedFull,
}

/// Called for each emitted token with the index of the utterance in its batch, the token, and the logits in f32 from which
/// it was chosen: all tokens, and blank as the last. Tokens of an utterance come in order. For a token on several frames (CTC)
/// the logits are those of the least certain one.
pub type TokenObserver<'a> = &'a mut (dyn FnMut(usize, u32, &[f32]) + Send);

/// Whether phrases score on a frame, where they do in these frames; none for all.
pub(crate) fn is_speech(speech: Option<&[Range<usize>]>, frame: usize) -> bool {
    speech.is_none_or(|speech| speech.iter().any(|part| part.contains(&frame)))
}

/// The state of the search in one utterance.
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
    let steps = Steps {
        durations,
        max_symbols,
        blank_penalty: 0.0,
        speech: &[],
    };
    decode_greedy_observed(&networks, &Fusion::default(), steps, encoded, lengths, None)
}

/// The parts of a model that decoding needs.
pub struct Networks<'a> {
    pub parameters: &'a Parameters,
    pub prediction: &'a Prediction,
    pub joint: &'a Joint,
}

/// An error if these are not the lengths of a batch of utterances, padded to this many frames.
pub(crate) fn check_lengths(lengths: &[usize], batch: usize, padded: usize) -> Result<()> {
    if lengths.len() == batch && lengths.iter().all(|&length| length <= padded) {
        return Ok(());
    }
    Err(Error::Input(format!(
        "lengths {lengths:?} do not fit a batch of {batch} x {padded} frames"
    )))
}

/// [`decode_greedy`] that shows the outputs behind each token.
///
/// With `fusion`, where the best output is not blank, the token is the one of the best logit with its scores added, as in
/// NeMo; the scores that [`Hypothesis`] and the observer see stay those of the model.
pub fn decode_greedy_observed(
    networks: &Networks,
    fusion: &Fusion,
    steps: Steps,
    encoded: &Tensor,
    lengths: &[usize],
    observer: Option<TokenObserver>,
) -> Result<Vec<Hypothesis>> {
    let (batch, padded, _) = encoded.dims3()?;
    check_lengths(lengths, batch, padded)?;
    fusion.check(networks.joint.blank())?;
    if lengths.iter().all(|&length| length == 0) {
        return Ok(vec![Hypothesis::default(); batch]);
    }
    let mut state = GreedyState::start(networks, fusion, batch)?;
    decode_greedy_on(networks, fusion, steps, encoded, lengths, &mut state, observer)
}

/// The state of greedy search of a batch between two parts of its utterances: the prediction network's state, and how
/// far the last durations reach into the next part.
#[derive(Debug, Clone)]
pub struct GreedyState {
    prediction: PredictionState,
    /// The joint network's projection of the prediction network's output.
    predicted: Tensor,
    fusion: Vec<FusionState>,
    searches: Vec<Search>,
}

impl GreedyState {
    /// The state before the first frame of `batch` utterances.
    ///
    /// # Errors
    /// If the device fails.
    pub fn start(networks: &Networks, fusion: &Fusion, batch: usize) -> Result<Self> {
        let Networks {
            parameters,
            prediction,
            joint,
        } = *networks;
        let mut state = prediction.start(parameters, batch)?;
        let predicted = prediction.step(parameters, &vec![None; batch], &vec![true; batch], &mut state)?;
        Ok(GreedyState {
            prediction: state,
            predicted: joint.project_prediction(parameters, &predicted)?,
            fusion: vec![fusion.start(); batch],
            searches: vec![Search::default(); batch],
        })
    }
}

/// [`decode_greedy_observed`] of the next part of each utterance of a batch. Frames of the result count from the
/// beginning of the part. Consecutive parts give the same tokens as the whole.
///
/// # Errors
/// If the lengths do not fit, or `state` is of another batch.
pub fn decode_greedy_on(
    networks: &Networks,
    fusion: &Fusion,
    steps: Steps,
    encoded: &Tensor,
    lengths: &[usize],
    state: &mut GreedyState,
    mut observer: Option<TokenObserver>,
) -> Result<Vec<Hypothesis>> {
    let Networks {
        parameters,
        prediction,
        joint,
    } = *networks;
    let (batch, padded, _) = encoded.dims3()?;
    check_lengths(lengths, batch, padded)?;
    if state.searches.len() != batch {
        let states = state.searches.len();
        return Err(Error::Input(format!(
            "a state of {states} utterances is not one of {batch}"
        )));
    }
    let mut hypotheses = vec![Hypothesis::default(); batch];
    if padded == 0 {
        return Ok(hypotheses);
    }
    let Steps {
        durations,
        max_symbols,
        blank_penalty,
        ..
    } = steps;
    if is_gpu(encoded.device()) && fusion.is_empty() && blank_penalty == 0.0 {
        return on_device::decode_greedy(networks, steps, encoded, lengths, state, observer);
    }
    let GreedyState {
        prediction: predicting,
        predicted: g,
        fusion: fusion_states,
        searches,
    } = state;
    let mut fused = Vec::new();
    let f = joint.project_encoder(parameters, &encoded.contiguous()?.flatten_to(1)?)?;
    let (mut tokens, mut moves) = (vec![None; batch], vec![false; batch]);
    loop {
        let active: Vec<usize> = (0..batch).filter(|&b| searches[b].frame < lengths[b]).collect();
        if active.is_empty() {
            for (search, length) in searches.iter_mut().zip(lengths) {
                search.frame -= length;
            }
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
        let logits = joint.logits(parameters, &f, g, &cells)?.to_device(&Device::Cpu)?;
        let mut first = 0;
        tokens.fill(None);
        moves.fill(false);
        for (&b, frames) in active.iter().zip(&ahead) {
            let (search, hypothesis) = (&mut searches[b], &mut hypotheses[b]);
            // Blanks leave the prediction network's output as it is, so the next frame's logits are there already.
            while frames.contains(&search.frame) {
                let row = first + search.frame - frames.start;
                let (mut best, blank) = on_cpu(|| best_outputs(&logits, row, joint.blank()))?;
                let lead = blank.logit - blank_penalty - best.logit;
                if blank.logit > best.logit && lead >= 0.0 {
                    best = blank;
                    hypothesis.blanks.push(Blank {
                        frame: search.frame as u32,
                        lead: lead as f32,
                    });
                }
                let duration = durations.get(best.duration).copied().unwrap_or(0);
                if best.token == joint.blank() {
                    search.frame += duration.max(1);
                    search.emitted = 0;
                    continue;
                }
                if !fusion.is_empty() {
                    let speech = steps.is_speech(b, search.frame);
                    fusion.scores(&fusion_states[b], speech, &mut fused);
                    best = on_cpu(|| best_fused(&logits, row, &fused, best))?;
                    fusion_states[b] = fusion.step(&fusion_states[b], best.token as u32, speech);
                }
                hypothesis.ids.push(best.token as u32);
                hypothesis.frames.push(search.frame as u32);
                hypothesis.durations.push(duration as u32);
                hypothesis.score += best.logit;
                if let Some(observer) = &mut observer {
                    observer(b, best.token as u32, &token_logits(&logits, row, joint.tokens())?);
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
            let predicted = prediction.step(parameters, &tokens, &moves, predicting)?;
            *g = joint.project_prediction(parameters, &predicted)?;
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

/// The token of a row of logits that is best with the scores of fusion, in place of the best without them.
fn best_fused(logits: &Tensor, row: usize, scores: &[f32], plain: Best) -> Result<Best> {
    let width = logits.dim(1)?;
    dispatch!(logits.dtype(), T => {
        let logits = slice::<T>(logits)?;
        let row = &logits[row * width..][..scores.len()];
        let mut best = (plain.token, f64::NEG_INFINITY);
        for (token, (logit, score)) in row.iter().zip(scores).enumerate() {
            let fused = logit.wide() + f64::from(*score);
            if fused > best.1 {
                best = (token, fused);
            }
        }
        Ok(Best { token: best.0, logit: row[best.0].wide(), ..plain })
    })
}

/// The first largest token of a row of logits, and blank, both with the first largest duration.
fn best_outputs(logits: &Tensor, row: usize, blank: usize) -> Result<(Best, Best)> {
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
        let durations = &row[blank + 1..];
        let duration = if durations.is_empty() { 0 } else { first_largest(durations) };
        let of = |token: usize| Best { token, duration, logit: row[token].wide() };
        Ok((of(first_largest(&row[..blank])), of(blank)))
    })
}
