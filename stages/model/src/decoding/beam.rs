//! Beam search: NeMo's batched modified alignment-length synchronous decoding for TDT (`malsd_batch`,
//! `tdt_malsd_batched_computer.py`; Saon et al., "Alignment-length synchronous decoding for RNN transducer", 2020).

use std::cmp::Ordering;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use candle_core::{Device, Tensor};
use flow_kernels::joint::Cell;
use flow_kernels::{Float, dispatch, on_cpu, slice};

use super::expansion::{Candidate, Expansion, ScoredState};
use super::{DecodingSettings, Hypothesis, Networks, TokenObserver, is_speech};
use crate::Result;
use crate::prediction::select_rows;

/// The model's durations, and after how many tokens of duration 0 on one frame a blank is forced.
#[derive(Debug, Clone, Copy)]
pub struct Steps<'a> {
    pub durations: &'a [usize],
    pub max_symbols: usize,
    /// [`DecodingSettings::blank_penalty`], for greedy search.
    pub blank_penalty: f64,
    /// [`DecodingSettings::speech`].
    pub speech: &'a [Vec<Range<usize>>],
}

impl Steps<'_> {
    /// Whether phrases score on a frame of an utterance.
    pub(super) fn is_speech(&self, utterance: usize, frame: usize) -> bool {
        is_speech(self.speech.get(utterance).map(Vec::as_slice), frame)
    }
}

/// The last token of a hypothesis, and those before it.
struct Path {
    before: Option<Rc<Path>>,
    token: u32,
    frame: u32,
    duration: u32,
    /// The logits of tokens and blank from which it was chosen, if there is an observer.
    logits: Option<Rc<[f32]>>,
}

/// Drops a long list iteratively, not recursively.
impl Drop for Path {
    fn drop(&mut self) {
        let mut before = self.before.take();
        while let Some(path) = before {
            before = Rc::try_unwrap(path).ok().and_then(|mut path| path.before.take());
        }
    }
}

/// A hypothesis of the beam.
struct Live {
    score: f64,
    /// The next frame; at or past the end for a finished one.
    frame: usize,
    /// Tokens since it last moved on.
    emitted: usize,
    /// The number of its token sequence: the same for the same tokens.
    sequence: u32,
    tokens: usize,
    path: Option<Rc<Path>>,
    fusion: ScoredState,
    /// Its row in the prediction network's states.
    row: usize,
    /// The token it was just extended by.
    token: Option<u32>,
}

impl Live {
    /// The same hypothesis after a blank, or as it is where it is finished.
    fn copy(&self) -> Self {
        Live {
            score: self.score,
            frame: self.frame,
            emitted: self.emitted,
            sequence: self.sequence,
            tokens: self.tokens,
            path: self.path.clone(),
            fusion: self.fusion.clone(),
            row: self.row,
            token: None,
        }
    }
}

/// The search in one utterance.
struct Utterance {
    frames: usize,
    beam: Vec<Live>,
    /// Numbers of token sequences, by that of all but the last token, and this token.
    sequences: HashMap<(u32, u32), u32>,
}

impl Utterance {
    fn active(&self) -> impl Iterator<Item = &Live> {
        self.beam.iter().filter(|live| live.frame < self.frames)
    }
}

/// Beam search. `encoded` is (batch, frames, encoder), of which `lengths[b]` frames are valid. The result are the hypotheses
/// of each utterance, the best first, at most `settings.beam` of them; one at least where it has frames. Texts are left empty,
/// and scores are log-probabilities with those of fusion. `observer` sees the logits behind the tokens of each best hypothesis.
///
/// In each step every hypothesis that is not finished is extended by its best pairs of token (or blank) and duration; of
/// all those of an utterance the best stay. Those with the same tokens at the same frame become one, their probabilities
/// summed. Scores are compared divided by the number of tokens plus one, unless `settings.score_norm` is false.
///
/// # Errors
/// If the lengths do not fit, or a language model is of another vocabulary.
pub fn decode_beam(
    networks: &Networks,
    settings: &DecodingSettings,
    steps: Steps,
    encoded: &Tensor,
    lengths: &[usize],
    observer: Option<TokenObserver>,
) -> Result<Vec<Vec<Hypothesis>>> {
    let Networks {
        parameters,
        prediction,
        joint,
    } = *networks;
    let (batch, padded, _) = encoded.dims3()?;
    super::check_lengths(lengths, batch, padded)?;
    settings.fusion.check(joint.blank())?;
    let mut utterances: Vec<Utterance> = lengths
        .iter()
        .enumerate()
        .map(|(row, &frames)| Utterance {
            frames,
            beam: vec![Live {
                score: 0.0,
                frame: 0,
                emitted: 0,
                sequence: 0,
                tokens: 0,
                path: None,
                fusion: ScoredState::start(&settings.fusion),
                row,
                token: None,
            }],
            sequences: HashMap::new(),
        })
        .collect();
    if lengths.iter().all(|&length| length == 0) {
        return Ok(lengths.iter().map(|_| vec![Hypothesis::default()]).collect());
    }
    let f = joint.project_encoder(parameters, &encoded.contiguous()?.flatten_to(1)?)?;
    let mut state = prediction.start(parameters, batch)?;
    let predicted = prediction.step(parameters, &vec![None; batch], &vec![true; batch], &mut state)?;
    let mut g = joint.project_prediction(parameters, &predicted)?;
    let mut expansion = Expansion::new(settings, steps.durations, joint.tokens());
    loop {
        let active = utterances.iter().enumerate().flat_map(|(b, utterance)| {
            let cell = move |live: &Live| Cell {
                frame: b * padded + live.frame,
                state: live.row,
                label: None,
                index: b,
            };
            utterance.active().map(cell)
        });
        let cells: Vec<Cell> = active.collect();
        if cells.is_empty() {
            break;
        }
        let logits = joint.logits(parameters, &f, &g, &cells)?.to_device(&Device::Cpu)?;
        let width = logits.dim(1)?;
        let logits = on_cpu(|| values(&logits))?;
        let mut rows = logits.chunks_exact(width);
        for (number, utterance) in utterances.iter_mut().enumerate() {
            extend(
                number,
                utterance,
                settings,
                steps,
                &mut expansion,
                &mut rows,
                observer.is_some(),
            );
        }
        // From here on only the states of hypotheses that are not finished.
        let (mut parents, mut tokens) = (Vec::new(), Vec::new());
        for utterance in &mut utterances {
            let frames = utterance.frames;
            for live in utterance.beam.iter_mut().filter(|live| live.frame < frames) {
                parents.push(live.row as u32);
                tokens.push(live.token);
                live.row = parents.len() - 1;
            }
        }
        if parents.is_empty() {
            break;
        }
        state = state.select(&parents)?;
        g = if tokens.iter().any(Option::is_some) {
            let moves: Vec<bool> = tokens.iter().map(Option::is_some).collect();
            let predicted = prediction.step(parameters, &tokens, &moves, &mut state)?;
            joint.project_prediction(parameters, &predicted)?
        } else {
            select_rows(&g, &parents)?
        };
    }
    Ok(finish(utterances, settings.score_norm, observer))
}

/// The logits in f32.
fn values(logits: &Tensor) -> Result<Vec<f32>> {
    dispatch!(logits.dtype(), T => Ok(slice::<T>(logits)?.iter().map(|logit| logit.wide() as f32).collect()))
}

/// One step of an utterance. Takes a row of logits for each of its active hypotheses.
fn extend<'a>(
    number: usize,
    utterance: &mut Utterance,
    settings: &DecodingSettings,
    steps: Steps,
    expansion: &mut Expansion,
    rows: &mut impl Iterator<Item = &'a [f32]>,
    keep_logits: bool,
) {
    let blank = expansion.blank();
    // Score, hypothesis, and by what it is extended: nothing where it is finished.
    let mut candidates: Vec<(f64, usize, Option<Candidate>)> = Vec::new();
    let mut rows_of: Vec<&[f32]> = vec![&[]; utterance.beam.len()];
    for (index, live) in utterance.beam.iter().enumerate() {
        if live.frame >= utterance.frames {
            candidates.push((live.score, index, None));
            continue;
        }
        let Some(row) = rows.next() else { continue };
        rows_of[index] = row;
        expansion.expand(row, &live.fusion, steps.is_speech(number, live.frame));
        if live.emitted >= steps.max_symbols.max(1) {
            let forced = expansion.forced_blank();
            candidates.push((live.score + f64::from(forced.score), index, Some(forced)));
            continue;
        }
        let best = expansion.best().iter();
        candidates.extend(best.map(|&best| (live.score + f64::from(best.score), index, Some(best))));
    }
    // NaN and negative infinity are never kept.
    candidates.retain(|(score, ..)| score.is_finite());
    candidates.sort_by(|a, b| descending(a.0, b.0));
    candidates.truncate(settings.beam.max(1));
    if candidates.is_empty() {
        // Only where the model's outputs are NaN: the beam is unchanged.
        utterance.beam.iter_mut().for_each(|live| live.frame = usize::MAX);
        return;
    }
    let mut kept_rows: HashMap<usize, Rc<[f32]>> = HashMap::new();
    let mut beam = Vec::with_capacity(candidates.len());
    for (score, index, candidate) in candidates {
        let parent = &utterance.beam[index];
        let mut live = parent.copy();
        live.score = score;
        let Some(Candidate { token, duration, .. }) = candidate else {
            beam.push(live);
            continue;
        };
        let duration = duration.min(u32::MAX as usize);
        live.frame = parent.frame.saturating_add(duration);
        if token != blank {
            live.path = Some(Rc::new(Path {
                before: parent.path.clone(),
                token: token as u32,
                frame: parent.frame as u32,
                duration: duration as u32,
                logits: keep_logits.then(|| {
                    let logits = || rows_of[index][..=blank].into();
                    Rc::clone(kept_rows.entry(index).or_insert_with(logits))
                }),
            }));
            live.token = Some(token as u32);
            live.tokens += 1;
            let speech = steps.is_speech(number, parent.frame);
            live.fusion = parent.fusion.step(&settings.fusion, token as u32, speech);
            let next = utterance.sequences.len() as u32 + 1;
            let sequence = utterance.sequences.entry((parent.sequence, token as u32));
            live.sequence = *sequence.or_insert(next);
        }
        live.emitted = match (duration, token == blank) {
            (0, true) => parent.emitted,
            (0, false) => parent.emitted + 1,
            _ => 0,
        };
        beam.push(live);
    }
    utterance.beam = recombined(beam);
}

/// Makes one of hypotheses with the same tokens at the same frame: the best of them, with the sum of their probabilities.
fn recombined(beam: Vec<Live>) -> Vec<Live> {
    let mut kept: Vec<(Live, f64)> = Vec::with_capacity(beam.len());
    // The best comes first.
    for live in beam {
        let same = |kept: &&mut (Live, f64)| kept.0.sequence == live.sequence && kept.0.frame == live.frame;
        match kept.iter_mut().find(same) {
            Some((first, sum)) => *sum += (live.score - first.score).exp(),
            None => kept.push((live, 1.0)),
        }
    }
    let summed = kept.into_iter().map(|(mut live, sum)| {
        live.score += sum.ln();
        live
    });
    summed.collect()
}

fn finish(utterances: Vec<Utterance>, score_norm: bool, mut observer: Option<TokenObserver>) -> Vec<Vec<Hypothesis>> {
    let mut found = Vec::with_capacity(utterances.len());
    for (number, mut utterance) in utterances.into_iter().enumerate() {
        let rank = |live: &Live| {
            let tokens = if score_norm { live.tokens as f64 + 1.0 } else { 1.0 };
            live.score / tokens
        };
        utterance.beam.sort_by(|a, b| descending(rank(a), rank(b)));
        if let (Some(observer), Some(best)) = (&mut observer, utterance.beam.first()) {
            for path in path(best).iter().rev() {
                observer(number, path.token, path.logits.as_deref().unwrap_or_default());
            }
        }
        found.push(utterance.beam.iter().map(hypothesis).collect());
    }
    found
}

/// The tokens of a hypothesis, the last first.
fn path(live: &Live) -> Vec<&Path> {
    std::iter::successors(live.path.as_deref(), |path| path.before.as_deref()).collect()
}

fn hypothesis(live: &Live) -> Hypothesis {
    let path = path(live);
    let of = |value: fn(&Path) -> u32| path.iter().rev().map(|path| value(path)).collect();
    Hypothesis {
        ids: of(|path| path.token),
        frames: of(|path| path.frame),
        durations: of(|path| path.duration),
        score: live.score,
        ..Hypothesis::default()
    }
}

fn descending(a: f64, b: f64) -> Ordering {
    b.total_cmp(&a)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live(sequence: u32, frame: usize, probability: f64) -> Live {
        Live {
            score: probability.ln(),
            frame,
            emitted: 0,
            sequence,
            tokens: 1,
            path: None,
            fusion: ScoredState::default(),
            row: 0,
            token: None,
        }
    }

    #[test]
    fn the_same_tokens_at_the_same_frame_become_one() {
        let beam = vec![
            live(1, 4, 0.4),
            live(1, 5, 0.2),
            live(2, 4, 0.1),
            live(1, 4, 0.05),
            live(1, 4, 0.05),
        ];
        let found: Vec<(u32, usize, f64)> = recombined(beam)
            .iter()
            .map(|live| (live.sequence, live.frame, live.score.exp()))
            .collect();
        let expected = [(1, 4, 0.5), (1, 5, 0.2), (2, 4, 0.1)];
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!((found.0, found.1), (expected.0, expected.1));
            assert!((found.2 - expected.2).abs() < 1e-12, "{found:?}");
        }
    }

    #[test]
    fn a_long_hypothesis_is_dropped_without_recursion() {
        let mut last = None;
        for frame in 0..1_000_000 {
            last = Some(Rc::new(Path {
                before: last,
                token: 1,
                frame,
                duration: 1,
                logits: None,
            }));
        }
        let kept = last.as_ref().and_then(|path| path.before.clone());
        drop(last);
        let found = hypothesis(&Live {
            path: kept,
            ..live(1, 0, 1.0)
        });
        assert_eq!(found.frames, (0..999_999).collect::<Vec<u32>>());
    }
}
