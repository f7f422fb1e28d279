//! A further hearing of speech without words: a decoder may stay on blank, or find nothing in a window as it was cut. What was not
//! heard is cut out and decoded again, in other ways, the cheapest first, until sure words are found.

use std::ops::Range;

use flow_model::decoding::DecodingSettings;
use flow_speakers::silero::SAMPLE_RATE;

use super::split::mean;
use super::{Heard, RecognitionSettings, Recognizer, VoiceActivity, batches};
use crate::coverage::{CoverageMode, NARROW, SuspectUse, holes, later, narrow_gaps, spans};
use crate::suspects::{Suspect, suspects};
use crate::word_key::word_key;
use crate::{Result, Word};

/// A way to decode a piece again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Attempt {
    /// By itself: with a decoder and statistics of its own.
    Alone,
    /// The same without its first and last [`SHIFT`] seconds, so that frames of the encoder begin elsewhere.
    Shifted,
    /// With [`SILENCE`] seconds of silence before and after it.
    Padded,
    /// With so much taken from the logit of blank.
    BlankPenalty(f64),
    /// By beam search.
    Beam,
}

/// All of them, in the order of their cost.
pub(super) const ATTEMPTS: [Attempt; 7] = [
    Attempt::Alone,
    Attempt::Shifted,
    Attempt::Padded,
    Attempt::BlankPenalty(4.0),
    Attempt::BlankPenalty(8.0),
    Attempt::BlankPenalty(16.0),
    Attempt::Beam,
];
/// How many of them leave the model's choices as they are.
const PLAIN: usize = 3;
/// Penalties on blank with which whole windows are decoded again.
const PENALTIES: [f64; 3] = [6.0, 12.0, 18.0];
/// What a word adds to the merit of a window is its confidence less this: more words that are less sure are not better.
const ORDINARY: f64 = 0.4;
/// Where the words of a window are less sure, that is this share of their mean confidence, but [`UNSURE`] at least.
const SHARE_OF_MEAN: f64 = 0.6;
/// How much higher the merit of a window that was decoded again must be.
const GAIN: f64 = 0.2;
/// Seconds of speech for each narrow choice of blank, at most, where there is no other sign that words are missing.
const SPEECH_FOR_EACH: f64 = 4.0;
/// Half a frame of the encoder, in seconds.
const SHIFT: f64 = 0.04;
const SILENCE: f64 = 0.3;
/// Audio before the word before a hole and after the word after it that is decoded, too, in seconds.
const CONTEXT: f64 = 0.1;
const BEAM: usize = 4;
/// Shorter pieces are not decoded, in seconds.
const LEAST_PIECE: f64 = 0.2;
/// The least mean confidence of words for them to be used.
const SURE: f64 = 0.5;
/// The least one of words that another attempt found, too.
const UNSURE: f64 = 0.2;
/// A hole that two attempts fill with words whose mean confidence is less than this stays open: the model speaks there, but does not know
/// what it hears.
const UNKNOWN: f64 = 0.1;
/// Share of the words that the other attempt has to have found.
const AGREEMENT: f64 = 0.6;
/// Frames of which the level is computed where a piece is cut, in samples: 10 ms.
const FRAME: usize = SAMPLE_RATE as usize / 100;

/// A part of a window that is decoded again. Times are seconds from the beginning of the window.
#[derive(Clone, Debug)]
struct Piece {
    window: usize,
    /// What is decoded.
    cut: Range<f64>,
    /// Where words are wanted: between the words before and after the hole, or to the ends of the window and beyond, as times may be
    /// late.
    inner: Range<f64>,
    hole: Range<f64>,
    /// What attempts found that did not suffice, with the seconds of the hole that still have no words.
    tried: Vec<(f64, Heard)>,
}

impl Piece {
    /// What an attempt found, if that fills the hole: with sure words, or with words of which another attempt found the most, too.
    /// Otherwise it is kept.
    fn takes(&mut self, found: Heard) -> Option<Heard> {
        let all = self.inner.clone();
        if !suspects(&found.words, std::slice::from_ref(&all)).is_empty() {
            return None;
        }
        let left = holes(std::slice::from_ref(&self.hole), &spans(&found));
        let left: f64 = left.iter().map(|hole| hole.end - hole.start).sum();
        let confidence = confidence(&found);
        if left <= 0.0 {
            let agrees = |(left, other): &(f64, Heard)| *left <= 0.0 && share_in_common(&found, other) >= AGREEMENT;
            if confidence >= SURE || (confidence >= UNSURE && self.tried.iter().any(agrees)) {
                return Some(found);
            }
        }
        if confidence > 0.0 {
            self.tried.push((left, found));
        }
        None
    }

    /// Whether further attempts would find nothing.
    fn is_given_up(&self) -> bool {
        let unknown = |(left, found): &&(f64, Heard)| *left <= 0.0 && confidence(found) < UNKNOWN;
        self.tried.iter().filter(unknown).count() > 1
    }

    /// The words of samples that begin at `begin` whose middle is where words are wanted, with times from the beginning of the window.
    fn within(&self, mut found: Heard, begin: f64) -> Heard {
        let is_in = |word: &Word| self.inner.contains(&(begin + 0.5 * (word.start + word.end)));
        let mut kept = found.words.iter().map(is_in).collect::<Vec<_>>().into_iter();
        found.tokens.retain(|_| kept.next().unwrap_or(false));
        found.words.retain(is_in);
        let (first, last) = (self.inner.start.max(self.cut.start), self.inner.end.min(self.cut.end));
        for word in &mut found.words {
            word.start = (begin + word.start).min(last).max(first);
            word.end = (begin + word.end).min(last).max(word.start);
        }
        found
    }
}

/// Words that two hearings have in common, in order, as a share of those of the longer one.
fn share_in_common(a: &Heard, b: &Heard) -> f64 {
    let texts = |heard: &Heard| -> Vec<String> { heard.words.iter().map(|word| word_key(&word.word)).collect() };
    let (a, b) = (texts(a), texts(b));
    let mut row = vec![0usize; b.len() + 1];
    for a in &a {
        let mut before = 0;
        for (at, b) in b.iter().enumerate() {
            let above = row[at + 1];
            row[at + 1] = if a == b { before + 1 } else { above.max(row[at]) };
            before = above;
        }
    }
    row[b.len()] as f64 / a.len().max(b.len()).max(1) as f64
}

impl Recognizer {
    /// [`Recognizer::decode`] of any number of windows, and what the settings say of speech without words. `speech`: the stretches of
    /// each window ([`super::SpeechWindows::stretches`]). None if `cancelled` returned true between two batches.
    pub(super) fn decode_covered(
        &self,
        signals: &[&[f32]],
        speech: &[Vec<Range<f64>>],
        settings: &RecognitionSettings,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Heard>>> {
        let Some(mut heard) = self.decode_in_batches(signals, speech, settings.batch_seconds, cancelled)? else {
            return Ok(None);
        };
        let wanted = self.recover(signals, speech, (settings, &self.model.decoding), &mut heard, cancelled)?;
        self.calibrate(&mut heard);
        Ok(wanted.then_some(heard))
    }

    /// Does what the settings of coverage say with what was heard in windows: leaves out suspect words, and decodes speech without
    /// words again. `speech`: the stretches of each window ([`super::SpeechWindows::stretches`]). `decoding`: how the windows were
    /// decoded, [`Recognizer::decoding`] where nothing else was said. The result of a window does not depend on the
    /// others, where [`Recognizer::is_batch_invariant`]. False if `cancelled` returned true between two batches.
    ///
    /// # Errors
    /// If the model fails.
    pub fn recover(
        &self,
        signals: &[&[f32]],
        speech: &[Vec<Range<f64>>],
        (settings, decoding): (&RecognitionSettings, &DecodingSettings),
        heard: &mut [Heard],
        cancelled: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let coverage = settings.coverage;
        if coverage.is_off() || settings.voice_activity == VoiceActivity::Off {
            return Ok(true);
        }
        if coverage.suspects == SuspectUse::Drop {
            heard
                .iter_mut()
                .zip(speech)
                .for_each(|(heard, speech)| leave_out_suspects(heard, speech));
        }
        if coverage.mode == CoverageMode::Recover {
            let inputs = (signals, speech);
            let of_window = |window: usize, heard: &Heard| pieces_of(window, signals[window], &speech[window], heard);
            let of_windows = heard.iter().enumerate();
            let mut open: Vec<Piece> = of_windows
                .flat_map(|(window, heard)| of_window(window, heard))
                .collect();
            let (plain, others) = ATTEMPTS.split_at(PLAIN);
            let fill = |attempts, open: &mut Vec<Piece>, heard: &mut [Heard]| {
                self.fill(
                    (attempts, decoding),
                    inputs,
                    settings.batch_seconds,
                    (open, heard),
                    cancelled,
                )
            };
            if !fill(plain, &mut open, heard)? {
                return Ok(false);
            }
            let Some(changed) = self.decode_reluctant(inputs, (settings, decoding), (&open, heard), cancelled)? else {
                return Ok(false);
            };
            open.retain(|piece| !changed.contains(&piece.window));
            open.extend(changed.into_iter().flat_map(|window| of_window(window, &heard[window])));
            if !fill(others, &mut open, heard)? {
                return Ok(false);
            }
            // Of what no attempt filled, the best that is sure.
            for mut piece in open {
                let best = piece
                    .tried
                    .drain(..)
                    .rev()
                    .filter(|(_, found)| confidence(found) >= SURE);
                if let Some((_, best)) = best.min_by(|(a, _), (b, _)| a.total_cmp(b)) {
                    add(&mut heard[piece.window], best, &piece.hole);
                }
            }
        }
        Ok(true)
    }

    /// Makes attempts to fill holes until none is open that is not given up. False if it was cancelled.
    fn fill(
        &self,
        (attempts, decoding): (&[Attempt], &DecodingSettings),
        (signals, speech): (&[&[f32]], &[Vec<Range<f64>>]),
        batch_seconds: f64,
        (open, heard): (&mut Vec<Piece>, &mut [Heard]),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<bool> {
        for &attempt in attempts {
            let (mut left, due): (Vec<Piece>, Vec<Piece>) = open.drain(..).partition(Piece::is_given_up);
            let inputs = (signals, speech);
            let Some(found) = self.attempt((attempt, decoding), inputs, &due, batch_seconds, cancelled)? else {
                return Ok(false);
            };
            for (mut piece, found) in due.into_iter().zip(found) {
                match found.and_then(|found| piece.takes(found)) {
                    Some(found) => add(&mut heard[piece.window], found, &piece.hole),
                    None => left.push(piece),
                }
            }
            *open = left;
        }
        Ok(true)
    }

    /// Decodes windows again in which a decoder stays on blank ([`is_reluctant`]), with penalties on blank; the larger ones if the one
    /// before found words, or the window has holes that are not given up and its words are not worth less by [`GAIN`] with it. Of all
    /// results the one of the highest [`merit`] stays. Gives the windows that changed; none if it was cancelled.
    fn decode_reluctant(
        &self,
        (signals, speech): (&[&[f32]], &[Vec<Range<f64>>]),
        (settings, decoding): (&RecognitionSettings, &DecodingSettings),
        (pieces, heard): (&[Piece], &mut [Heard]),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<usize>>> {
        let has_hole: Vec<bool> = (0..heard.len())
            .map(|window| {
                let given_up = |hole: &Range<f64>| {
                    let mut of_window = pieces.iter().filter(|piece| piece.window == window);
                    of_window.any(|piece| piece.hole == *hole && piece.is_given_up())
                };
                let holes = holes(&speech[window], &spans(&heard[window]));
                !holes.iter().all(given_up)
            })
            .collect();
        let mut open: Vec<usize> = (0..heard.len())
            .filter(|&window| is_reluctant(&heard[window], &speech[window], has_hole[window]))
            .collect();
        let mut better: Vec<Option<Heard>> = vec![None; heard.len()];
        for penalty in PENALTIES {
            let decoding = DecodingSettings {
                beam: 0,
                blank_penalty: penalty,
                ..decoding.clone()
            };
            let samples: Vec<&[f32]> = open.iter().map(|&window| signals[window]).collect();
            #[cfg(test)]
            tests::DECODED.set(tests::DECODED.get() + samples.iter().map(|window| window.len()).sum::<usize>());
            let mut goes_on = vec![false; open.len()];
            for batch in batches(&samples, settings.batch_seconds) {
                if cancelled() {
                    return Ok(None);
                }
                let signals: Vec<&[f32]> = batch.iter().map(|&index| samples[index]).collect();
                let of_batch: Vec<_> = batch.iter().map(|&index| speech[open[index]].clone()).collect();
                for (index, found) in batch
                    .into_iter()
                    .zip(self.decode_with((&signals, &of_batch), &decoding)?)
                {
                    let window = open[index];
                    let (first, best) = (&heard[window], better[window].as_ref());
                    let ordinary = (SHARE_OF_MEAN * confidence(first)).clamp(UNSURE, ORDINARY);
                    let least = best.map_or_else(|| merit(first, ordinary) + GAIN, |best| merit(best, ordinary));
                    let is_as_sure = confidence(&found) >= confidence(first) || has_hole[window];
                    goes_on[index] = has_hole[window] && merit(&found, ordinary) > merit(first, ordinary) - GAIN;
                    if found.words.len() > first.words.len()
                        && is_as_sure
                        && merit(&found, ordinary) > least
                        && suspects(&found.words, &speech[window]).is_empty()
                    {
                        better[window] = Some(found);
                    }
                }
            }
            let mut goes_on = goes_on.into_iter();
            open.retain(|&window| goes_on.next().unwrap_or(false) || better[window].is_some());
        }
        let mut changed = Vec::new();
        for (window, better) in better.into_iter().enumerate() {
            if let Some(better) = better {
                let heard = &mut heard[window];
                *heard = Heard {
                    recovered: heard.recovered + better.words.len() - heard.words.len(),
                    dropped: std::mem::take(&mut heard.dropped),
                    ..better
                };
                changed.push(window);
            }
        }
        Ok(Some(changed))
    }

    /// Decodes pieces in one way: what was found in each, with times from the beginning of its window; none where it cannot be decoded
    /// so. None if it was cancelled.
    fn attempt(
        &self,
        (attempt, decoding): (Attempt, &DecodingSettings),
        (signals, speech): (&[&[f32]], &[Vec<Range<f64>>]),
        pieces: &[Piece],
        batch_seconds: f64,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Option<Heard>>>> {
        let mut found: Vec<Option<Heard>> = pieces.iter().map(|_| None).collect();
        let Some(decoding) = self.decoding_of(attempt, decoding) else {
            return Ok(Some(found));
        };
        let cut = pieces.iter().enumerate().filter_map(|(index, piece)| {
            let (samples, begin) = samples_of(attempt, signals[piece.window], &piece.cut)?;
            Some((index, samples, begin))
        });
        let cut: Vec<(usize, Vec<f32>, f64)> = cut.collect();
        let samples: Vec<&[f32]> = cut.iter().map(|(_, samples, _)| &samples[..]).collect();
        #[cfg(test)]
        tests::DECODED.set(tests::DECODED.get() + samples.iter().map(|piece| piece.len()).sum::<usize>());
        for batch in batches(&samples, batch_seconds) {
            if cancelled() {
                return Ok(None);
            }
            let signals: Vec<&[f32]> = batch.iter().map(|&index| samples[index]).collect();
            let in_piece = |&index: &usize| later(&speech[pieces[cut[index].0].window], -cut[index].2);
            let speech: Vec<_> = batch.iter().map(in_piece).collect();
            for (index, heard) in batch.into_iter().zip(self.decode_with((&signals, &speech), &decoding)?) {
                let (piece, _, begin) = &cut[index];
                found[*piece] = Some(pieces[*piece].within(heard, *begin));
            }
        }
        Ok(Some(found))
    }

    /// The settings of an attempt; none where the model cannot be decoded so, or was.
    fn decoding_of(&self, attempt: Attempt, usual: &DecodingSettings) -> Option<DecodingSettings> {
        let usual = usual.clone();
        match attempt {
            Attempt::Alone | Attempt::Shifted | Attempt::Padded => Some(usual),
            Attempt::BlankPenalty(blank_penalty) => Some(DecodingSettings {
                beam: 0,
                blank_penalty,
                ..usual
            }),
            Attempt::Beam => {
                (!self.decodes_ctc() && usual.beam <= 1).then_some(DecodingSettings { beam: BEAM, ..usual })
            }
        }
    }
}

/// The holes of a window, each with the words beside it as context. Where there is another hole before or after it instead of a
/// word, the piece ends where it is quietest between them.
fn pieces_of(window: usize, signal: &[f32], speech: &[Range<f64>], heard: &Heard) -> Vec<Piece> {
    let length = signal.len() as f64 / f64::from(SAMPLE_RATE);
    let words = spans(heard);
    let holes = holes(speech, &words);
    let piece = |(index, hole): (usize, &Range<f64>)| {
        let before = words.iter().rfind(|word| word.start < hole.start);
        let hole_before = index.checked_sub(1).map(|before| holes[before].end);
        let (cut_start, start) = match (before, hole_before) {
            (Some(word), other) if other.is_none_or(|end| end < word.end) => {
                (word.start - CONTEXT, word.end.max(word.start))
            }
            (_, Some(end)) => [quietest(signal, end..hole.start); 2].into(),
            _ => (0.0, f64::NEG_INFINITY),
        };
        let after = words.iter().find(|word| word.start >= hole.end);
        let (cut_end, end) = match (after, holes.get(index + 1)) {
            (Some(word), other) if other.is_none_or(|hole| word.start < hole.start) => {
                (word.end.max(word.start) + CONTEXT, word.start)
            }
            (_, Some(hole_after)) => [quietest(signal, hole.end..hole_after.start); 2].into(),
            _ => (length, f64::INFINITY),
        };
        Piece {
            window,
            cut: cut_start.clamp(0.0, length)..cut_end.clamp(0.0, length),
            inner: start.min(hole.start)..end.max(hole.end),
            hole: hole.clone(),
            tried: Vec::new(),
        }
    };
    holes.iter().enumerate().map(piece).collect()
}

/// The middle of the quietest frame in a range of seconds, the first of equal ones; the range's beginning where it has no frame.
fn quietest(signal: &[f32], range: Range<f64>) -> f64 {
    let samples = |seconds: f64| ((seconds * f64::from(SAMPLE_RATE)).max(0.0) as usize).min(signal.len());
    let (first, last) = (samples(range.start), samples(range.end));
    let frames = signal.get(first..last).unwrap_or_default().chunks_exact(FRAME);
    let energies = frames.map(|frame| frame.iter().map(|sample| sample * sample).sum::<f32>());
    let quietest = energies.enumerate().min_by(|(_, a), (_, b)| a.total_cmp(b));
    quietest.map_or(range.start, |(frame, _)| {
        (first + frame * FRAME + FRAME / 2) as f64 / f64::from(SAMPLE_RATE)
    })
}

/// The samples of a piece for an attempt, and where they begin in the window, in seconds. None where they would be too short, or were
/// decoded before.
fn samples_of(attempt: Attempt, signal: &[f32], cut: &Range<f64>) -> Option<(Vec<f32>, f64)> {
    let rate = f64::from(SAMPLE_RATE);
    let (start, end) = ((cut.start * rate).round() as usize, (cut.end * rate).round() as usize);
    let piece = signal.get(start..end.min(signal.len()))?;
    if (piece.len() as f64) < LEAST_PIECE * rate {
        return None;
    }
    let begin = start as f64 / rate;
    match attempt {
        // As the window itself.
        Attempt::Alone => (piece.len() < signal.len()).then(|| (piece.to_vec(), begin)),
        Attempt::Shifted => {
            let shift = (SHIFT * rate) as usize;
            let inner = piece.get(shift..piece.len() - shift)?;
            Some((inner.to_vec(), begin + SHIFT))
        }
        Attempt::Padded => {
            let silence = vec![0.0; (SILENCE * rate) as usize];
            Some(([&silence[..], piece, &silence].concat(), begin - SILENCE))
        }
        Attempt::BlankPenalty(_) | Attempt::Beam => Some((piece.to_vec(), begin)),
    }
}

/// Whether words are missing in a window because its decoder stays on blank: blank was a narrow choice in speech without words, and the
/// window has a hole, or that came often between words that are not all unsure. In a window of much speech, only choices count that the
/// first penalty would change.
fn is_reluctant(heard: &Heard, speech: &[Range<f64>], has_hole: bool) -> bool {
    if has_hole {
        return !narrow_gaps(speech, heard, NARROW).is_empty();
    }
    let seconds: f64 = speech.iter().map(|part| part.end - part.start).sum();
    let most = if seconds <= SPEECH_FOR_EACH {
        NARROW
    } else {
        PENALTIES[0] as f32
    };
    let narrow = narrow_gaps(speech, heard, most).len();
    narrow > 0 && narrow as f64 * SPEECH_FOR_EACH >= seconds && confidence(heard) >= UNSURE
}

/// What the words of a window are worth: more of them, as long as they are as sure as `ordinary`.
fn merit(heard: &Heard, ordinary: f64) -> f64 {
    let of_word = |word: &Word| word.confidence.unwrap_or(0.0) - ordinary;
    heard.words.iter().map(of_word).sum()
}

/// The mean confidence of the words; 0 where there are none.
fn confidence(found: &Heard) -> f64 {
    if found.words.is_empty() {
        0.0
    } else {
        mean(found.words.iter())
    }
}

/// Adds the words of a piece to those of its window. A word at the edge that is the one beside it in the window was heard before.
fn add(heard: &mut Heard, found: Heard, hole: &Range<f64>) {
    let Heard {
        mut words,
        mut tokens,
        languages,
        ..
    } = found;
    let place = heard.words.partition_point(|word| word.start < hole.start);
    let same = |a: Option<&Word>, b: Option<&Word>| match (a, b) {
        (Some(a), Some(b)) => word_key(&a.word) == word_key(&b.word),
        _ => false,
    };
    if place > 0 && same(heard.words.get(place - 1), words.first()) {
        words.remove(0);
        tokens.drain(..tokens.len().min(1));
    }
    if same(heard.words.get(place), words.last()) {
        words.pop();
        tokens.pop();
    }
    if words.is_empty() {
        return;
    }
    if heard.words.is_empty() {
        heard.languages = languages;
    }
    heard.recovered += words.len();
    heard.words.splice(place..place, words);
    heard.tokens.splice(place..place, tokens);
}

/// Takes suspect words away, and keeps what they were.
fn leave_out_suspects(heard: &mut Heard, speech: &[Range<f64>]) {
    let found = suspects(&heard.words, speech);
    let dropped = found.iter().cloned().map(|suspect| Suspect {
        dropped: true,
        ..suspect.of(&heard.words, 0.0)
    });
    heard.dropped.extend(dropped);
    for suspect in found.into_iter().rev() {
        heard.words.drain(suspect.words.clone());
        heard.tokens.drain(suspect.words);
    }
}

#[cfg(test)]
#[path = "recover_tests.rs"]
mod tests;
