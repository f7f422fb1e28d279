//! Alignment of a text that is known: the windows of a recording are decoded, what is heard divides recording and text into blocks,
//! and in each block the head's best path gives the times of tokens.

use std::ops::Range;

use candle_core::Tensor;
use flow_model::alignment::{AlignedTokens, WordTokens};
use flow_model::decoding::Hypothesis;
use flow_speakers::silero::SAMPLE_RATE;
use flow_text::language_tag::split_tag;

use super::{FirstPass, RecognitionSettings, Recognizer, SpeechWindows, batches, tag, unique};
use crate::alignment::blocks::{Block, blocks, factors, is_sparse, pairs};
use crate::alignment::spoken_words::SpokenWord;
use crate::alignment::{Aligned, AlignedWord, AlignmentSettings};
use crate::letter_case::Case;
use crate::long_audio::LongAudio;
use crate::streamed::Samples;
use crate::window_groups::group_by_group;
use crate::word_key::word_key;
use crate::{Metadata, Performance, Result, Transcript, TranscriptionError, Word};

/// Bytes of encoded windows that are kept from the first pass over a recording to the second; others are encoded again.
const KEPT_BYTES: usize = 256 << 20;
/// Most cells of a block's lattice. A text that has more for its speech is not searched: its words were not said.
const MOST_CELLS: usize = 8 << 20;
/// Most tokens for each frame of a recording: twelve times those of fast speech.
const MOST_TOKENS_PER_FRAME: usize = 10;
/// What is further from speech was not said, in seconds: voice activity may miss a quiet beginning or end.
const REACH: f64 = 0.5;
/// What the cost of going on behind a passage without text is multiplied by where a segment begins.
const BETWEEN_SEGMENTS: f64 = 0.7;
/// What a score counts for each word that was heard and is not in the text, on top of what the path pays for its passage.
const WITHOUT_TEXT: f64 = -2.0;
/// What may be between two parts of speech that is not in the text, in seconds.
const PAUSE: f64 = 0.5;

/// A text, word by word.
struct Text {
    words: Vec<SpokenWord>,
    /// Words of each segment.
    lengths: Vec<usize>,
    unknown: Vec<char>,
    /// What the cost of leaving out each word is multiplied by ([`factors`]); empty where nothing was compared.
    factors: Vec<f64>,
    /// Whether the first word that was heard is its first, and the last its last.
    meets: [bool; 2],
}

impl Text {
    /// What the cost of going on behind a passage without text is multiplied by before each word and behind the last: a text need not
    /// begin and end with the recording, unless what was heard does, and segments may be far from each other, but the words of one
    /// are together.
    fn borders(&self) -> Vec<f64> {
        let mut borders = vec![1.0; self.words.len() + 1];
        let mut at = 0;
        for length in &self.lengths {
            borders[at] = BETWEEN_SEGMENTS;
            at += length;
        }
        for (border, meets) in [0, self.words.len()].into_iter().zip(self.meets) {
            borders[border] = if meets { BETWEEN_SEGMENTS } else { 0.0 };
        }
        borders
    }

    fn tokens(&self) -> usize {
        self.words.iter().map(|word| word.tokens.len()).sum()
    }

    /// Tokens of the words that a path leaves out.
    fn tokens_left_out(&self, aligned: &[AlignedWord]) -> usize {
        let words = self.words.iter().zip(aligned).filter(|(_, aligned)| !aligned.said);
        words.map(|(word, _)| word.tokens.len()).sum()
    }
}

/// What was heard in a window, and what of it is kept.
#[derive(Clone)]
struct Window {
    samples: Range<u64>,
    frames: usize,
    encoded: Option<Tensor>,
    /// With times from the beginning of the recording.
    words: Vec<Word>,
    /// Tags before and behind the text.
    tags: (Vec<u32>, Vec<u32>),
    languages: Vec<String>,
}

/// The result of a block's words.
struct BlockResult {
    words: Vec<AlignedWord>,
    score: f64,
    /// Seconds.
    without_text: Vec<Range<f64>>,
}

impl Recognizer {
    /// Aligns a text, in segments, with samples (mono, 16 kHz, in [-1, 1]). None if `cancelled` returned true between two batches.
    ///
    /// # Errors
    /// As [`Recognizer::align_again`].
    pub fn align(
        &self,
        samples: &[f32],
        text: &[String],
        recognition: &RecognitionSettings,
        settings: &AlignmentSettings,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Aligned>> {
        let mut first = self.first_pass(recognition);
        first.feed(samples)?;
        self.align_again(first, &samples, text, (recognition, settings), cancelled)
    }

    /// Aligns a text, in segments, with a recording whose first pass was done with the same settings. Its windows are decoded with
    /// the settings of the recognizer, to find out which of them belong to which words; memory does not grow with the length of
    /// the recording, but for the words and what voice activity says.
    ///
    /// A recording of one window at most is aligned as a whole; words that the path puts far from what voice activity hears were
    /// not said.
    ///
    /// # Errors
    /// If the text has no word, the vocabulary none of its letters, or the recording is too short for it; as
    /// [`Recognizer::transcribe_again`]; and in another processing mode than [`LongAudio::Vad`].
    pub fn align_again(
        &self,
        first: FirstPass<'_>,
        recording: &dyn Samples,
        text: &[String],
        (recognition, settings): (&RecognitionSettings, &AlignmentSettings),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Aligned>> {
        if recognition.long_audio != LongAudio::Vad {
            let why = "a text is aligned in windows between pauses alone";
            return Err(TranscriptionError::setting("window", why));
        }
        let segments = text;
        let text = self.spoken(segments, None)?;
        let kept = first.kept.as_deref();
        let recording = kept.as_ref().map_or(recording, |kept| kept as &dyn Samples);
        let samples = first.activity.samples();
        let found = SpeechWindows::of(first.activity, recognition)?;
        let ranges = match samples <= (recognition.max_window * f64::from(SAMPLE_RATE)) as u64 {
            true => std::iter::once(0..samples).collect(),
            false => found.windows,
        };
        let speech: Vec<Range<f64>> = found
            .speech
            .iter()
            .map(|part| seconds(part.start)..seconds(part.end))
            .collect();
        let tokens = text.tokens();
        let frames = self
            .model
            .encoded_frames(usize::try_from(samples).unwrap_or(usize::MAX));
        if tokens > frames.saturating_mul(MOST_TOKENS_PER_FRAME) {
            let why = format!(
                "the recording is too short for the text: {:.2} s, and {} words of {tokens} tokens",
                samples as f64 / f64::from(SAMPLE_RATE),
                text.words.len()
            );
            return Err(refused("text_too_long", why));
        }
        let Some(windows) = self.hear(
            &ranges,
            recording,
            (recognition.batch_seconds, settings.delay),
            cancelled,
        )?
        else {
            return Ok(None);
        };
        self.align_heard(windows, &speech, (segments, text), recording, settings, cancelled)
    }

    /// Aligns a text, in segments and as words, with windows that were heard.
    fn align_heard(
        &self,
        windows: Vec<Window>,
        speech: &[Range<f64>],
        (segments, mut text): (&[String], Text),
        recording: &dyn Samples,
        settings: &AlignmentSettings,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Aligned>> {
        // A model that writes one case alone gives the other no probability.
        let heard = windows.iter().flat_map(|window| &window.words);
        if let Some(case) = Case::of(heard.map(|word| word.word.as_str())) {
            text = self.spoken(segments, Some(case))?;
        }
        let keys: Vec<&str> = text
            .words
            .iter()
            .map(|word| if word.tokens.is_empty() { "" } else { &word.key })
            .collect();
        let heard: Vec<Vec<String>> = windows
            .iter()
            .map(|window| window.words.iter().map(|word| word_key(&word.word)).collect())
            .collect();
        let lengths: Vec<usize> = windows.iter().map(|window| window.frames).collect();
        let pairs = pairs(&keys, &text.lengths, &heard);
        let blocks = blocks(&keys, &heard, &pairs, &lengths);
        text.factors = factors(&keys, &heard, &pairs);
        // Nothing is known of what the words of another language sound like, but there are about as many of them.
        let is_sparse = is_sparse(text.words.len(), &heard);
        let heard: Vec<Word> = windows.iter().flat_map(|window| window.words.iter().cloned()).collect();
        let is_equal = |(word, at): (usize, usize)| keys[word] == word_key(&heard[at].word);
        let meets = |pair: Option<&(usize, usize)>, word: Option<usize>, at: usize| {
            pair.is_some_and(|&pair| word == Some(pair.0) && pair.1 == at && is_equal(pair))
        };
        let is_compared = |key: &&str| !key.is_empty();
        text.meets = [
            meets(pairs.first(), keys.iter().position(is_compared), 0),
            meets(
                pairs.last(),
                keys.iter().rposition(is_compared),
                heard.len().saturating_sub(1),
            ),
        ];
        let (again, of_again) = (windows.clone(), blocks.clone());
        let found = self.align_blocks(windows, blocks, &text, recording, settings, cancelled)?;
        // A model that does not know the language, or a text that is another one: greedy search is no measure.
        let fits_badly = |found: &Aligned| 2 * text.tokens_left_out(&found.words) > text.tokens();
        let has_passages = is_sparse || !found.as_ref().is_some_and(fits_badly);
        let found = match has_passages {
            true => found,
            false => {
                let settings = AlignmentSettings {
                    costs: settings.costs.without_passages(),
                    ..*settings
                };
                self.align_blocks(again, of_again, &text, recording, &settings, cancelled)?
            }
        };
        let Some(mut found) = found else {
            return Ok(None);
        };
        found.leave_out_far_from(speech, &text, settings.costs.left_out);
        let near = |word: &Word| is_near(speech, word.start, word.end);
        // Words that were heard and are in the text, where the text has them, too.
        let mut is_of_text = vec![false; heard.len()];
        for (word, at) in pairs {
            let placed = &found.words[word];
            let is_there = placed.said && (placed.start - heard[at].start).abs() < REACH;
            is_of_text[at] = is_there && is_equal((word, at));
        }
        let heard = heard.into_iter().zip(is_of_text);
        found.tell_without_text(heard.filter(|(word, _)| near(word)));
        if has_passages {
            let words = found
                .without_text
                .iter()
                .map(|part| part.text.split_whitespace().count());
            found.score += WITHOUT_TEXT * words.sum::<usize>() as f64 / text.tokens().max(1) as f64;
        }
        found.with_segments(&text.lengths, &settings.segments).map(Some)
    }

    /// The transcript of an alignment with a recording of this name and number of samples.
    pub fn aligned_transcript(&self, found: &Aligned, name: &str, samples: u64) -> Transcript {
        let metadata = Metadata {
            source_file: name.to_owned(),
            duration_s: samples as f64 / f64::from(SAMPLE_RATE),
            model: self.name.clone(),
            model_digest: self.digest.clone(),
            languages: found.languages.clone(),
            ..Metadata::default()
        };
        Transcript::from_segments(metadata, Performance::default(), found.segments.clone())
    }

    /// The words of a text in segments, spelled in this case if there is one.
    fn spoken(&self, segments: &[String], case: Option<Case>) -> Result<Text> {
        let mut text = Text {
            words: Vec::new(),
            lengths: Vec::with_capacity(segments.len()),
            unknown: Vec::new(),
            factors: Vec::new(),
            meets: [false; 2],
        };
        for segment in segments {
            let before = text.words.len();
            let (_, words) = split_tag(segment);
            let words = words
                .split_whitespace()
                .map(|word| SpokenWord::new(&self.tokenizer, word, case));
            text.words.extend(words);
            text.lengths.push(text.words.len() - before);
        }
        if text.words.is_empty() {
            return Err(refused("empty_text", "the text has no words".to_owned()));
        }
        for c in text.words.iter().flat_map(|word| &word.unknown) {
            // Marks are seldom in a vocabulary, and have no sound.
            if c.is_alphanumeric() && !text.unknown.contains(c) {
                text.unknown.push(*c);
            }
        }
        if text.words.iter().all(|word| word.tokens.is_empty()) {
            let unknown: Vec<String> = text.unknown.iter().take(10).map(char::to_string).collect();
            let why = format!(
                "the model knows no letter of the text{}{}",
                if unknown.is_empty() { "" } else { ": " },
                unknown.join(" ")
            );
            return Err(refused("unknown_letters", why));
        }
        Ok(text)
    }

    /// Encodes and decodes the windows of a recording.
    fn hear(
        &self,
        ranges: &[Range<u64>],
        recording: &dyn Samples,
        (batch_seconds, delay): (f64, f64),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Window>>> {
        let mut windows: Vec<Window> = Vec::with_capacity(ranges.len());
        let mut kept = 0;
        let whole = group_by_group(ranges, recording, &mut |indices, signals| {
            let signals: Vec<&[f32]> = signals.iter().map(Vec::as_slice).collect();
            let mut found: Vec<Option<Window>> = signals.iter().map(|_| None).collect();
            for batch in batches(&signals, batch_seconds) {
                if cancelled() {
                    return Ok(false);
                }
                let of_batch: Vec<&[f32]> = batch.iter().map(|&index| signals[index]).collect();
                let mut encoded = Vec::new();
                let (hypotheses, scores) = self.observed(of_batch.len(), true, |observer| {
                    self.computing(|| {
                        let (frames, lengths) = self.model.encode(&of_batch)?;
                        encoded = valid_frames(&frames, &lengths)?;
                        Ok(self
                            .model
                            .decode_encoded(&frames, &lengths, &self.model.decoding, Some(observer))?)
                    })
                })?;
                for (((index, encoded), hypothesis), scores) in
                    batch.into_iter().zip(encoded).zip(hypotheses).zip(&scores)
                {
                    let samples = ranges[indices.start + index].clone();
                    let heard = self.words(&hypothesis, scores)?;
                    let after = samples.start as f64 / f64::from(SAMPLE_RATE);
                    let words = heard.words.into_iter().map(|word| Word {
                        start: (word.start - delay).max(0.0) + after,
                        end: (word.end - delay).max(0.0) + after,
                        ..word
                    });
                    let bytes = encoded.elem_count() * encoded.dtype().size_in_bytes();
                    found[index] = Some(Window {
                        samples,
                        frames: encoded.dims()[0],
                        encoded: (kept + bytes <= KEPT_BYTES).then_some(encoded),
                        words: words.collect(),
                        tags: self.tags(&hypothesis),
                        languages: heard.languages,
                    });
                    kept += bytes;
                }
            }
            windows.extend(found.into_iter().flatten());
            Ok(true)
        })?;
        Ok(whole.then_some(windows))
    }

    /// The tags that a hypothesis begins and ends with.
    fn tags(&self, hypothesis: &Hypothesis) -> (Vec<u32>, Vec<u32>) {
        let is_tag = |id: &u32| self.tokenizer.piece(*id).and_then(tag).is_some();
        let ids = &hypothesis.ids;
        let before = ids.iter().take_while(|id| is_tag(id)).count();
        let behind = ids[before..].iter().rev().take_while(|id| is_tag(id)).count();
        (ids[..before].to_vec(), ids[ids.len() - behind..].to_vec())
    }

    /// Aligns block by block. Windows that were not kept are encoded again, as they are in the recording.
    fn align_blocks(
        &self,
        mut windows: Vec<Window>,
        blocks: Vec<Block>,
        text: &Text,
        recording: &dyn Samples,
        settings: &AlignmentSettings,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Aligned>> {
        let mut results: Vec<BlockResult> = Vec::with_capacity(blocks.len());
        let borders = text.borders();
        let mut at = 0.0;
        let mut align_until = |windows: &mut [Window], encoded: usize| -> Result<bool> {
            while let Some(block) = blocks.get(results.len()).filter(|block| block.windows.end <= encoded) {
                if cancelled() {
                    return Ok(false);
                }
                let factors = text.factors.get(block.words.clone()).unwrap_or_default();
                let of_block = &borders[block.words.start..=block.words.end];
                let words = (&text.words[block.words.clone()], factors, of_block);
                // Where the text is what was heard, no passage explains the speech better.
                let costs = match block.fits {
                    true => settings.costs.without_passages(),
                    false => settings.costs,
                };
                let settings = AlignmentSettings { costs, ..*settings };
                let result = self.align_block(&windows[block.windows.clone()], words, at, &settings)?;
                at = result.words.last().map_or(at, |word| word.end);
                results.push(result);
                for window in &mut windows[block.windows.clone()] {
                    window.encoded = None;
                }
            }
            Ok(true)
        };
        let first = windows
            .iter()
            .position(|window| window.encoded.is_none())
            .unwrap_or(windows.len());
        if !align_until(&mut windows, first)? {
            return Ok(None);
        }
        let again: Vec<usize> = (first..windows.len())
            .filter(|&index| windows[index].encoded.is_none())
            .collect();
        let ranges: Vec<Range<u64>> = again.iter().map(|&index| windows[index].samples.clone()).collect();
        let whole = ranges.is_empty()
            || group_by_group(&ranges, recording, &mut |indices, signals| {
                for (index, signal) in indices.clone().zip(signals) {
                    if cancelled() {
                        return Ok(false);
                    }
                    let encoded = self.computing(|| Ok(self.model.encode_frames(signal, 0, None)?))?;
                    windows[again[index]].encoded = Some(encoded);
                }
                let next = again.get(indices.end).copied().unwrap_or(windows.len());
                align_until(&mut windows, next)
            })?;
        if !whole || !align_until(&mut windows, usize::MAX)? {
            return Ok(None);
        }
        Ok(Some(joined(&windows, results, text)))
    }

    /// Aligns words, with their factors and borders, with windows. `after`: seconds at which the words before them end.
    fn align_block(
        &self,
        windows: &[Window],
        (words, factors, borders): (&[SpokenWord], &[f64], &[f64]),
        after: f64,
        settings: &AlignmentSettings,
    ) -> Result<BlockResult> {
        let clock = Clock::new(windows, self.model.frame_seconds(), settings.delay);
        let parts: Vec<&Tensor> = windows.iter().filter_map(|window| window.encoded.as_ref()).collect();
        let none: &[u32] = &[];
        let (before, behind) = match (windows.first(), windows.last()) {
            (Some(first), Some(last)) => (&first.tags.0[..], &last.tags.1[..]),
            _ => (none, none),
        };
        let tokens = std::iter::once(before).chain(words.iter().map(|word| &word.tokens[..]));
        let of_words = std::iter::once(1.0).chain(factors.iter().copied()).collect();
        // Tags have the borders of the words beside them.
        let ends = (borders.first().copied(), borders.last().copied());
        let borders = ends
            .0
            .into_iter()
            .chain(borders.iter().copied())
            .chain(ends.1)
            .collect();
        let tokens = WordTokens::new(tokens.chain([behind]))
            .with_factors(of_words)
            .with_borders(borders);
        let cells = (tokens.tokens().len() + 1).saturating_mul(2 * clock.frames.max(1));
        let found = match parts.is_empty() || cells > MOST_CELLS {
            true => {
                let cost = settings.costs.left_out * tokens.tokens().len() as f64;
                AlignedTokens {
                    tokens: vec![None; tokens.tokens().len()],
                    score: cost,
                    left_out: cost,
                    ..AlignedTokens::default()
                }
            }
            false => self.computing(|| {
                let frames = Tensor::cat(&parts, 0).map_err(flow_model::Error::from)?;
                Ok(self.model.align(&frames, &tokens, settings.costs, settings.head)?)
            })?,
        };
        let mut at = windows
            .first()
            .map_or(after, |window| seconds(window.samples.start).max(after));
        let mut aligned = Vec::with_capacity(words.len());
        for (index, word) in words.iter().enumerate() {
            let placed: Vec<_> = found.tokens[tokens.word(index + 1)].iter().flatten().collect();
            let any_sounds = word.sounds.contains(&true);
            let sounding = placed
                .iter()
                .zip(&word.sounds)
                .filter(|(_, sounds)| **sounds || !any_sounds);
            let sounding: Vec<_> = sounding.map(|(token, _)| token).collect();
            let mut result = AlignedWord {
                word: word.text.clone(),
                start: at,
                end: at,
                logprob: None,
                said: false,
                spelled: !word.tokens.is_empty(),
            };
            if let (Some(first), Some(last)) = (sounding.first(), sounding.last()) {
                result.start = clock.start(first.frame).max(at);
                result.end = clock.end(last.frame + last.duration.max(1)).max(result.start);
                let sum: f64 = placed.iter().map(|token| token.logprob).sum();
                result.logprob = Some(sum / placed.len() as f64);
                result.said = true;
                at = result.end;
            }
            aligned.push(result);
        }
        // A score counts each token that was left out alike.
        let left_out = found.tokens.iter().filter(|token| token.is_none()).count();
        let score = found.score - found.left_out + settings.costs.left_out * left_out as f64;
        let without_text = found.without_text.iter();
        Ok(BlockResult {
            words: aligned,
            score,
            without_text: without_text
                .map(|frames| clock.start(frames.start)..clock.end(frames.end))
                .collect(),
        })
    }
}

fn refused(reason: &'static str, why: String) -> TranscriptionError {
    TranscriptionError::Text { reason, why }
}

/// The frames of each utterance of a batch that are valid.
fn valid_frames(encoded: &Tensor, lengths: &[usize]) -> Result<Vec<Tensor>> {
    let frames = |(row, length): (usize, &usize)| {
        // In tensors of their own, so that the batch can be freed: `copy` would take all of its storage along.
        let valid = encoded.get(row)?.narrow(0, 0, *length)?;
        Ok(valid.force_contiguous()?)
    };
    let frames = lengths.iter().enumerate().map(frames);
    let frames: std::result::Result<Vec<_>, flow_model::Error> = frames.collect();
    Ok(frames?)
}

fn seconds(samples: u64) -> f64 {
    samples as f64 / f64::from(SAMPLE_RATE)
}

/// The times of the frames of windows that are behind each other.
struct Clock {
    /// The first frame of each window, and when the window begins and ends, in seconds.
    windows: Vec<(usize, f64, f64)>,
    frames: usize,
    frame_seconds: f64,
    /// Seconds by which tokens come late.
    delay: f64,
}

impl Clock {
    fn new(windows: &[Window], frame_seconds: f64, delay: f64) -> Self {
        let mut clock = Clock {
            windows: Vec::with_capacity(windows.len()),
            frames: 0,
            frame_seconds,
            delay,
        };
        for window in windows {
            let Range { start, end } = window.samples;
            clock.windows.push((clock.frames, seconds(start), seconds(end)));
            clock.frames += window.frames;
        }
        clock
    }

    fn start(&self, frame: usize) -> f64 {
        self.at(frame, 0)
    }

    /// Of what ends before a frame.
    fn end(&self, frame: usize) -> f64 {
        self.at(frame.saturating_sub(1), 1)
    }

    /// This many frames behind the beginning of one, within its window.
    fn at(&self, frame: usize, after: usize) -> f64 {
        let next = self.windows.partition_point(|(first, ..)| *first <= frame);
        let Some((first, start, end)) = next.checked_sub(1).map(|window| self.windows[window]) else {
            return 0.0;
        };
        let time = start + (frame - first + after) as f64 * self.frame_seconds - self.delay;
        time.max(start).min(end)
    }
}

/// Whether a time is near any of these ranges, which are in order.
fn is_near(speech: &[Range<f64>], start: f64, end: f64) -> bool {
    let next = speech.partition_point(|part| part.end + REACH <= start);
    speech.get(next).is_some_and(|part| part.start - REACH < end)
}

impl Aligned {
    /// Leaves out the words that are far from speech, at the cost of words that a path leaves out.
    fn leave_out_far_from(&mut self, speech: &[Range<f64>], text: &Text, left_out: f64) {
        let tokens = text.tokens();
        for (word, spoken) in self.words.iter_mut().zip(&text.words) {
            let Some(logprob) = word.logprob.filter(|_| !is_near(speech, word.start, word.end)) else {
                continue;
            };
            self.score += (left_out - logprob) * spoken.tokens.len() as f64 / tokens.max(1) as f64;
            (word.end, word.logprob, word.said) = (word.start, None, false);
        }
    }
}

/// The results of all blocks.
fn joined(windows: &[Window], results: Vec<BlockResult>, text: &Text) -> Aligned {
    let tokens = text.tokens();
    let mut all = Aligned {
        unknown: text.unknown.clone(),
        languages: unique(windows.iter().flat_map(|window| window.languages.iter().cloned())),
        ..Aligned::default()
    };
    let (mut score, mut silent) = (0.0, Vec::new());
    for result in results {
        all.words.extend(result.words);
        score += result.score;
        silent.extend(result.without_text);
    }
    let said: Vec<f64> = all
        .words
        .iter()
        .filter(|word| word.said)
        .map(|word| word.start)
        .collect();
    let words_before = |at: f64| said.partition_point(|start| *start < at);
    for range in silent {
        // A pause between two is part of them if no word of the text is there.
        let goes_on = |last: &&mut Range<f64>| {
            range.start - last.end <= PAUSE || words_before(range.start) == words_before(last.end)
        };
        match all.silent.last_mut().filter(goes_on) {
            Some(last) => last.end = range.end,
            None => all.silent.push(range),
        }
    }
    all.score = score / tokens.max(1) as f64;
    all
}

#[cfg(test)]
#[path = "aligned_tests.rs"]
mod tests;
