//! Forced alignment: where in a signal the tokens of a text that is known were said. Each head has a search for the most likely
//! path (Viterbi 1967) through its lattice of frames and tokens: [`ctc`], [`transducer`].
//!
//! A text may not fit its signal, so a path may leave out words, each token at a fixed cost, and between words it may pass over
//! frames without text, each at a fixed cost at most. Over a passage in which other words were said it goes as free decoding does,
//! whose score it takes: so a text is compared with what the head hears in the same frames. It costs most to go on with the text
//! behind a passage, so that words stay together.
//!
//! A search holds a byte for each cell (frames times thrice the tokens) for CTC, six for a transducer (frames times tokens), and
//! the scores of a few frames. Callers divide long recordings.

pub mod ctc;
pub mod transducer;

use std::ops::Range;

use crate::{Error, Result};

/// The tokens of a text, word by word.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WordTokens {
    tokens: Vec<u32>,
    /// Where each word begins among the tokens, and behind the last one.
    starts: Vec<usize>,
    /// Of each word, what the cost of leaving it out is multiplied by; 1 for words behind them.
    factors: Vec<f64>,
    /// Before each word and behind the last, what the cost of going on behind a passage is multiplied by; 1 behind them.
    borders: Vec<f64>,
}

impl WordTokens {
    /// The tokens of each word; a word may have none.
    pub fn new<'a>(words: impl IntoIterator<Item = &'a [u32]>) -> Self {
        let (mut tokens, mut starts) = (Vec::new(), vec![0]);
        for word in words {
            tokens.extend_from_slice(word);
            starts.push(tokens.len());
        }
        WordTokens {
            tokens,
            starts,
            factors: Vec::new(),
            borders: Vec::new(),
        }
    }

    /// Multiplies [`Costs::left_out`], and that of passages, for each word by a factor, above 0: below 1 where the word was probably
    /// not said. Words without a factor have 1.
    #[must_use]
    pub fn with_factors(self, factors: Vec<f64>) -> Self {
        WordTokens { factors, ..self }
    }

    /// Multiplies [`PassageCosts::resumes`] before each word, and behind the last, by a factor. Others have 1. A signal that is part
    /// of a longer one begins and ends within its text; if it does not, the first and the last factor are 0.
    #[must_use]
    pub fn with_borders(self, borders: Vec<f64>) -> Self {
        WordTokens { borders, ..self }
    }

    /// All tokens, in order.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The tokens of the word at an index, as a range of [`WordTokens::tokens`].
    pub fn word(&self, index: usize) -> Range<usize> {
        self.starts[index]..self.starts[index + 1]
    }

    /// Number of words.
    pub fn words(&self) -> usize {
        self.starts.len() - 1
    }

    /// For each number of tokens from none to all: whether a word begins or the text ends there, and where that word ends.
    fn boundaries(&self) -> Vec<Boundary> {
        let none = Boundary {
            passage: f64::INFINITY,
            ..Boundary::default()
        };
        let mut found = vec![none; self.tokens.len() + 1];
        for (index, &start) in self.starts.iter().enumerate() {
            // Words without tokens are at the same place as the word behind them.
            let border = self.borders.get(index).copied().unwrap_or(1.0);
            found[start].passage = found[start].passage.min(border);
        }
        for (index, word) in self.starts.windows(2).enumerate() {
            if word[0] < word[1] {
                found[word[0]] = Boundary {
                    between_words: true,
                    word_end: Some(word[1]),
                    left_out: self.factors.get(index).unwrap_or(&1.0) * (word[1] - word[0]) as f64,
                    ..found[word[0]]
                };
            }
        }
        found[self.tokens.len()].between_words = true;
        found
    }

    /// An error where a token is none of a vocabulary of this size.
    fn check(&self, vocabulary: usize) -> Result<()> {
        match self.tokens.iter().find(|token| **token as usize >= vocabulary) {
            Some(token) => Err(Error::Input(format!(
                "token {token} of the text is not in a vocabulary of {vocabulary}"
            ))),
            None => Ok(()),
        }
    }
}

/// A place between two tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Boundary {
    between_words: bool,
    /// The number of tokens up to the end of the word that begins here.
    word_end: Option<usize>,
    /// What [`Costs::left_out`] and [`PassageCosts::left_out`] are multiplied by for that word.
    left_out: f64,
    /// What [`PassageCosts::resumes`] is multiplied by.
    passage: f64,
}

impl Boundary {
    /// What it costs to go on there behind a passage.
    fn resumes(self, costs: PassageCosts) -> f64 {
        match self.passage {
            0.0 => 0.0,
            factor => factor * costs.resumes,
        }
    }
}

/// What a path pays where text and signal do not fit, in natural logarithms of probabilities; at most 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// For each token of a word that is left out.
    pub left_out: f64,
    /// For each frame between words, at most: the least that blank costs there.
    pub no_text: f64,
    /// On top of that for each token that free decoding finds there: words that were said are not passed over as silence is.
    pub passed_over: f64,
    pub passage: PassageCosts,
}

/// What a path pays for a passage between words in which other words were said than the text has, on top of the score of free
/// decoding there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassageCosts {
    /// Where the text goes on behind it; for a passage before all words that are placed, at the beginning of the signal.
    pub resumes: f64,
    /// For each token of a word of the text that is left out there.
    pub left_out: f64,
    /// For each token that free decoding finds there.
    pub heard: f64,
}

impl Costs {
    /// Every token is placed, and every frame is scored by the model.
    pub const FORCED: Costs = Costs {
        left_out: f64::NEG_INFINITY,
        no_text: f64::NEG_INFINITY,
        passed_over: 0.0,
        passage: PassageCosts {
            resumes: f64::NEG_INFINITY,
            left_out: f64::NEG_INFINITY,
            heard: f64::NEG_INFINITY,
        },
    };

    /// The same without passages of other words.
    #[must_use]
    pub fn without_passages(self) -> Costs {
        Costs {
            passed_over: 0.0,
            passage: Costs::FORCED.passage,
            ..self
        }
    }

    /// Whether a path may go over passages of other words.
    pub(crate) fn has_passages(&self) -> bool {
        self.passage.resumes > f64::NEG_INFINITY
    }
}

/// What free decoding does on a frame.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HeardFrame {
    /// The natural logarithm of the probability of its steps there.
    pub logprob: f64,
    /// How many tokens it emits there.
    pub tokens: usize,
}

impl HeardFrame {
    /// What the frame costs without text, outside passages.
    fn no_text(self, costs: Costs) -> f64 {
        costs.no_text + costs.passed_over * self.tokens as f64
    }

    /// What the frame costs in a passage without text.
    fn cost(self, costs: PassageCosts) -> f64 {
        match self.tokens {
            0 => self.logprob,
            tokens => self.logprob + costs.heard * tokens as f64,
        }
    }
}

/// A token that was placed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlacedToken {
    /// The frame at which it was emitted (CTC: the first of its frames).
    pub frame: usize,
    /// TDT: the duration with which it was emitted, cut at the end of the signal; RNN-T: 1; CTC: the number of its frames.
    pub duration: usize,
    /// The natural logarithm of its probability among all tokens and blank; for CTC the mean over its frames.
    pub logprob: f64,
}

/// The best path of a text through a signal.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AlignedTokens {
    /// Of each token; none for those of words that were left out.
    pub tokens: Vec<Option<PlacedToken>>,
    /// The natural logarithm of the probability of the path, with its costs.
    pub score: f64,
    /// What of it was paid for words that were left out.
    pub left_out: f64,
    /// Frames without text that cost [`Costs::no_text`] or are in a passage, in order, apart from each other.
    pub without_text: Vec<Range<usize>>,
}

/// Most cells of a lattice, which take up to 768 MiB.
pub const MAX_CELLS: usize = 1 << 27;

/// For each number of tokens where a word ends: where it begins.
fn begins(boundaries: &[Boundary]) -> Vec<usize> {
    let mut begins = vec![0; boundaries.len()];
    for (begin, boundary) in boundaries.iter().enumerate() {
        if let Some(end) = boundary.word_end {
            begins[end] = begin;
        }
    }
    begins
}

/// The number of cells, if that many can be searched.
fn cells(frames: usize, states: usize) -> Result<usize> {
    let cells = frames.checked_mul(states).filter(|cells| *cells <= MAX_CELLS);
    cells.ok_or_else(|| {
        Error::Input(format!(
            "{frames} frames and {states} states of a text are too many to align at once"
        ))
    })
}

/// Adds a frame, which comes before all that were added.
fn add_before(ranges: &mut Vec<Range<usize>>, frame: usize) {
    match ranges.last_mut() {
        Some(range) if range.start == frame + 1 => range.start = frame,
        _ => ranges.push(frame..frame + 1),
    }
}

/// The error where no path leads through a signal.
fn no_path(frames: usize, tokens: usize) -> Error {
    Error::Input(format!(
        "a signal of {frames} frames cannot hold the {tokens} tokens of its text"
    ))
}

#[cfg(test)]
mod tests;
