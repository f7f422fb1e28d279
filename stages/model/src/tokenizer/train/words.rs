//! Counts of words in the texts.

use std::collections::HashMap;

use super::super::SPACE;
use super::super::normaliser::Normaliser;

/// Takes the place of a character without a piece, during training.
pub(super) const UNKNOWN: char = '\u{2585}';

/// Takes the place of a reserved piece.
pub(super) const BOUNDARY: char = '\t';

/// How often a word comes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Count {
    pub all: u64,
    /// At the end of a text.
    pub last: u64,
}

impl Count {
    pub fn add(&mut self, other: Count) {
        self.all += other.all;
        self.last += other.last;
    }
}

/// The words of all texts, each with its mark of a space before it, and how often they come.
#[derive(Debug)]
pub struct Words {
    normaliser: Normaliser,
    /// Reserved pieces, by their first byte, the longest first.
    reserved: HashMap<u8, Vec<String>>,
    counts: HashMap<String, Count>,
    skipped: u64,
}

impl Words {
    pub(super) fn new(normaliser: Normaliser, pieces: Vec<String>) -> Self {
        let mut reserved: HashMap<u8, Vec<String>> = HashMap::new();
        for piece in pieces {
            if let Some(&first) = piece.as_bytes().first() {
                reserved.entry(first).or_default().push(piece);
            }
        }
        for pieces in reserved.values_mut() {
            pieces.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        }
        Words {
            normaliser,
            reserved,
            counts: HashMap::new(),
            skipped: 0,
        }
    }

    /// Adds the words of a text. One that holds U+2585, which SentencePiece keeps for itself, is skipped as a whole.
    pub fn add(&mut self, text: &str) {
        if text.contains(UNKNOWN) {
            self.skipped += 1;
            return;
        }
        let normal = self.without_reserved(&self.normaliser.normalise(text));
        let mut rest = normal.as_str();
        while let Some(first) = rest.chars().next() {
            let first = first.len_utf8();
            let end = rest[first..].find(SPACE).map_or(rest.len(), |at| first + at);
            let (word, others) = rest.split_at(end);
            let count = Count {
                all: 1,
                last: u64::from(others.is_empty()),
            };
            match self.counts.get_mut(word) {
                Some(before) => before.add(count),
                None => {
                    self.counts.insert(word.to_owned(), count);
                }
            }
            rest = others;
        }
    }

    /// Texts that were skipped.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// The words, in no order.
    pub(super) fn counts(self) -> HashMap<String, Count> {
        self.counts
    }

    fn without_reserved(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(character) = rest.chars().next() {
            let found = self
                .reserved
                .get(&rest.as_bytes()[0])
                .and_then(|pieces| pieces.iter().find(|piece| rest.starts_with(piece.as_str())));
            match found {
                Some(piece) => {
                    out.push(BOUNDARY);
                    rest = &rest[piece.len()..];
                }
                None => {
                    out.push(character);
                    rest = &rest[character.len_utf8()..];
                }
            }
        }
        out
    }
}
