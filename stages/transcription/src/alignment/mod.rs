//! Alignment of a text that is known with its recording: times of words and segments, words that were not said, and speech that is
//! not in the text. [`Recognizer::align`](crate::recognizer::Recognizer::align) does it; here are its results, and what is
//! independent of the model.

pub(crate) mod blocks;
mod known_text;
mod pairs;
pub(crate) mod spoken_words;

use std::ops::Range;

use flow_model::alignment::{Costs, PassageCosts};
use flow_model::heads::HeadKind;
use serde::Serialize;
use serde_json::Value;

use crate::segments::{SegmentRules, segments};
use crate::transcript::number;
use crate::{Format, LineLimits, Result, Segment, Transcript, TranscriptionError, Word};

pub use known_text::segments_of_text;

/// What text and recording that do not fit cost a path. Those of passages were chosen on made speech (docs/alignment.md).
pub const COSTS: Costs = Costs {
    left_out: -5.0,
    no_text: -2.0,
    passed_over: -0.5,
    passage: PassageCosts {
        resumes: -12.0,
        left_out: -1.2,
        heard: -0.25,
    },
};

/// Seconds by which transducers emit tokens late: a frame. (The bundled model is at 0.13 s for beginnings of words and 0.05 s for
/// ends.)
pub const DELAY: f64 = 0.08;

/// How far behind frames without text a word may end that is not in the text either, in seconds.
const LAST_WORD: f64 = 0.5;

/// Settings of alignment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AlignmentSettings {
    /// The head that aligns: if none is named CTC where the model has it, and else the transducer.
    pub head: Option<HeadKind>,
    pub costs: Costs,
    /// Subtracted from all times, in seconds, as far as the window that a word is in goes.
    pub delay: f64,
    /// Groups the words of a text of one segment.
    pub segments: SegmentRules,
}

impl Default for AlignmentSettings {
    fn default() -> Self {
        AlignmentSettings {
            head: None,
            costs: COSTS,
            delay: DELAY,
            segments: SegmentRules::default(),
        }
    }
}

/// A word of the text. Times are seconds from the beginning of the recording.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AlignedWord {
    /// As the text has it.
    pub word: String,
    pub start: f64,
    /// At or after `start`; equal to it where the word was not said.
    pub end: f64,
    /// The mean of the natural logarithms of the probabilities of its tokens. None: it was not said, or nobody knows.
    pub logprob: Option<f64>,
    /// Whether the best path places it.
    pub said: bool,
    /// Whether the model's vocabulary has letters of it. Otherwise nobody knows whether it was said, and where: it is where the word
    /// before it ends.
    pub spelled: bool,
}

/// Words of the text that were not said, one after the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NotSaid {
    /// Which of the segments they are in, from 0: that of the first one.
    pub segment: usize,
    /// Where they would be, in seconds.
    #[serde(serialize_with = "number")]
    pub at: f64,
    pub text: String,
}

/// Speech that is not in the text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WithoutText {
    /// Seconds.
    #[serde(serialize_with = "number")]
    pub start: f64,
    #[serde(serialize_with = "number")]
    pub end: f64,
    /// What the model hears there.
    pub text: String,
}

/// A text with times.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Aligned {
    /// Of the text's segments, in their order, each with its words; a segment of which nothing was said has none of its own time.
    pub segments: Vec<Segment>,
    pub words: Vec<AlignedWord>,
    /// How well text and recording fit: the natural logarithm of the probability of the best path, with the costs of words that
    /// were left out and of speech without text, divided by the number of the text's tokens.
    pub score: f64,
    pub not_said: Vec<NotSaid>,
    pub without_text: Vec<WithoutText>,
    /// Characters of the text that the model does not know, each once, in their order.
    pub unknown: Vec<char>,
    /// Of language tags that the model heard.
    pub languages: Vec<String>,
    /// Frames that the best path passed over without text, in seconds, in order.
    pub(crate) silent: Vec<Range<f64>>,
}

impl Aligned {
    /// Finds speech without text: what was heard where the best path passed over frames, but for words that the text has, too (as
    /// each word comes with).
    pub(crate) fn tell_without_text(&mut self, heard: impl Iterator<Item = (Word, bool)>) {
        let said = self.words.iter().filter(|word| word.said);
        let spoken: Vec<(f64, f64)> = said.map(|word| (word.start, word.end)).collect();
        // Words begin in order.
        let is_said = |at: f64| {
            let next = spoken.partition_point(|(start, _)| *start <= at);
            next.checked_sub(1).is_some_and(|word| at < spoken[word].1)
        };
        let mut heard = heard.peekable();
        for range in std::mem::take(&mut self.silent) {
            let mut found: Option<WithoutText> = None;
            // Of the last word a path may pass over the first frame alone, and stay on blank for the others.
            let next = spoken.partition_point(|(start, _)| *start < range.end);
            let next = spoken.get(next).map_or(f64::INFINITY, |(start, _)| *start);
            let end = next.min(range.end + LAST_WORD);
            loop {
                let until = if found.is_some() { end } else { range.end };
                let is_before = |(word, _): &(Word, bool)| 0.5 * (word.start + word.end) < until;
                let Some((word, is_of_text)) = heard.next_if(is_before) else {
                    break;
                };
                let middle = 0.5 * (word.start + word.end);
                if middle < range.start || is_of_text || is_said(middle) {
                    continue;
                }
                match &mut found {
                    Some(found) => {
                        found.end = word.end;
                        found.text.push(' ');
                        found.text.push_str(&word.word);
                    }
                    None => {
                        found = Some(WithoutText {
                            start: word.start,
                            end: word.end,
                            text: word.word,
                        });
                    }
                }
            }
            self.without_text.extend(found);
        }
    }

    /// Groups the words of segments of this many words each; a single one is divided by rules.
    ///
    /// # Errors
    /// If a rule is not above 0.
    pub(crate) fn with_segments(mut self, lengths: &[usize], rules: &SegmentRules) -> Result<Self> {
        let word = |word: &AlignedWord| Word {
            word: word.word.clone(),
            start: word.start,
            end: word.end,
            // The probability that corresponds to the mean logarithm; nothing of what was not said is certain.
            confidence: match word.spelled {
                true => Some(word.logprob.map_or(0.0, f64::exp)),
                false => None,
            },
            speaker: None,
        };
        if let [_] = lengths {
            self.segments = segments(self.words.iter().map(word).collect(), rules)?;
        } else {
            let mut rest = &self.words[..];
            for &length in lengths {
                let (words, after) = rest.split_at(length.min(rest.len()));
                rest = after;
                self.segments.push(segment_of(words, words.iter().map(word).collect()));
            }
        }
        self.not_said = self.left_out();
        Ok(self)
    }

    fn left_out(&self) -> Vec<NotSaid> {
        let segment_of_words = self
            .segments
            .iter()
            .enumerate()
            .flat_map(|(number, segment)| segment.words.iter().map(move |_| number));
        let mut found: Vec<NotSaid> = Vec::new();
        let mut goes_on = false;
        let all = self.words.iter().zip(segment_of_words);
        for (word, segment) in all.filter(|(word, _)| word.spelled) {
            match found.last_mut().filter(|_| goes_on && !word.said) {
                Some(last) => {
                    last.text.push(' ');
                    last.text.push_str(&word.word);
                }
                None if !word.said => found.push(NotSaid {
                    segment,
                    at: word.start,
                    text: word.word.clone(),
                }),
                None => {}
            }
            goes_on = !word.said;
        }
        found
    }

    /// How many words were said, as far as the model can spell them.
    pub fn words_said(&self) -> usize {
        self.words.iter().filter(|word| word.said).count()
    }

    /// How many words have no letter that the model's vocabulary has, such as dashes: nobody knows whether they were said.
    pub fn words_not_spelled(&self) -> usize {
        self.words.iter().filter(|word| !word.spelled).count()
    }

    /// A transcript of these segments as a file of a format; JSON is that of [`Aligned::to_json`].
    ///
    /// # Errors
    /// As [`Format::write`].
    pub fn write(&self, transcript: &Transcript, format: Format) -> Result<Vec<u8>> {
        match format {
            Format::Json => self.to_json(transcript).map(String::into_bytes),
            other => other.write(transcript, &LineLimits::default()),
        }
    }

    /// The JSON of a transcript of these segments, with what is known of the fit in `alignment`, on one line.
    ///
    /// # Errors
    /// As [`Transcript::to_json`].
    pub fn to_json(&self, transcript: &Transcript) -> Result<String> {
        let wrong = |error: serde_json::Error| TranscriptionError::transcript("the alignment", error.to_string());
        let mut document: Value = serde_json::from_str(&transcript.to_json()?).map_err(wrong)?;
        document["alignment"] = self.report();
        Ok(serde_json::to_string(&document).map_err(wrong)? + "\n")
    }

    /// `score`, `words`, `words_said`, `words_not_spelled`, `not_said`, `speech_without_text` and `unknown_characters`.
    pub fn report(&self) -> Value {
        let unknown: Vec<String> = self.unknown.iter().map(char::to_string).collect();
        serde_json::json!({
            "score": crate::transcript::rounded(self.score),
            "words": self.words.len(),
            "words_said": self.words_said(),
            "words_not_spelled": self.words_not_spelled(),
            "not_said": self.not_said,
            "speech_without_text": self.without_text,
            "unknown_characters": unknown,
        })
    }
}

/// A segment of the text: from the first of its words that was heard to the last one. Where words without tokens are, such as dashes,
/// nobody knows.
fn segment_of(aligned: &[AlignedWord], words: Vec<Word>) -> Segment {
    let said: Vec<&AlignedWord> = aligned.iter().filter(|word| word.logprob.is_some()).collect();
    let (first, last) = match (said.first(), said.last()) {
        (Some(first), Some(last)) => (first.start, last.end),
        _ => words.first().map_or((0.0, 0.0), |word| (word.start, word.start)),
    };
    let confidences: Vec<f64> = words.iter().filter_map(|word| word.confidence).collect();
    let mean = confidences.iter().sum::<f64>() / confidences.len() as f64;
    let texts: Vec<&str> = words.iter().map(|word| word.word.as_str()).collect();
    Segment {
        start: first,
        end: last,
        text: texts.join(" "),
        confidence: Some(mean).filter(|_| !confidences.is_empty()),
        speaker: None,
        words,
    }
}

#[cfg(test)]
mod tests;
