//! Byte-pair training: the most frequent pair of neighbours becomes a piece, again and again.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use super::Tell;
use super::alphabet::Alphabet;
use super::script::{LONGEST, may_be_piece};
use super::words::UNKNOWN;
use crate::Result;

/// A symbol: a character, or what was merged.
struct Symbol {
    text: String,
    /// In characters.
    length: usize,
    unknown: bool,
}

/// Two neighbours that may be merged.
struct Pair {
    left: u32,
    right: u32,
    /// How often they are adjacent; overlaps count, as in `aaa`.
    count: i64,
    /// Words in which they are or were adjacent, in no order, with duplicates.
    words: Vec<u32>,
    /// Merged, or merging would give an existing piece: never considered again.
    closed: bool,
}

/// Best first: the most frequent pair, of these the shortest, of these the first by its bytes.
type Entry = (i64, Reverse<usize>, Reverse<String>, u32);

struct Trainer {
    symbols: Vec<Symbol>,
    words: Vec<(Vec<u32>, i64)>,
    pairs: Vec<Pair>,
    /// The number of each pair; none for one that cannot be a piece.
    numbers: HashMap<(u32, u32), Option<u32>>,
    agenda: BinaryHeap<Entry>,
    /// Pairs whose count has grown since the queue was last updated.
    grown: Vec<u32>,
}

/// The learned pieces with their scores, the merged ones first, then the characters.
pub(super) fn train(alphabet: &Alphabet, room: usize, tell: Tell<'_>) -> Result<Vec<(String, f32)>> {
    let mut trainer = Trainer::new(alphabet);
    let mut pieces: Vec<String> = Vec::with_capacity(room);
    let mut known: HashSet<String> = HashSet::new();
    let merges = room - alphabet.characters.len();
    while pieces.len() < merges {
        let Some(pair) = trainer.best() else { break };
        let text = trainer.text(pair);
        // The same piece may be found by another way: `aaa` as `aa` and `a`, and as `a` and `aa`.
        if known.insert(text.clone()) {
            trainer.merge(pair, text.clone());
            pieces.push(text);
            if pieces.len().is_multiple_of(500) {
                tell(format!("{} of {merges} pairs merged", pieces.len()))?;
            }
        }
    }
    pieces.extend(alphabet.characters.iter().map(|(character, _)| character.to_string()));
    let score = |(index, text)| (text, -(index as f32));
    Ok(pieces.into_iter().enumerate().map(score).collect())
}

impl Trainer {
    fn new(alphabet: &Alphabet) -> Self {
        let mut trainer = Trainer {
            symbols: Vec::new(),
            words: Vec::with_capacity(alphabet.words.len()),
            pairs: Vec::new(),
            numbers: HashMap::new(),
            agenda: BinaryHeap::new(),
            grown: Vec::new(),
        };
        let mut characters: HashMap<char, u32> = HashMap::new();
        for (word, count) in &alphabet.words {
            let symbols = word.chars().map(|character| {
                *characters.entry(character).or_insert_with(|| {
                    trainer.symbols.push(Symbol {
                        text: character.to_string(),
                        length: 1,
                        unknown: character == UNKNOWN,
                    });
                    trainer.symbols.len() as u32 - 1
                })
            });
            let symbols: Vec<u32> = symbols.collect();
            trainer.words.push((symbols, count.all as i64));
        }
        for word in 0..trainer.words.len() as u32 {
            trainer.count(word, 1, None);
        }
        trainer.tell_agenda();
        trainer
    }

    /// Adds the pairs of a word to their counts (`sign` 1) or takes them off (-1). Pairs with the symbol `new` are new to
    /// the word; if none is given, all are.
    fn count(&mut self, word: u32, sign: i64, new: Option<u32>) {
        let (symbols, count) = &self.words[word as usize];
        for index in 1..symbols.len() {
            let (left, right) = (symbols[index - 1], symbols[index]);
            let number = match self.numbers.get(&(left, right)) {
                Some(number) => *number,
                None => {
                    let number = valid(&self.symbols, left, right).then_some(self.pairs.len() as u32);
                    self.numbers.insert((left, right), number);
                    if number.is_some() {
                        self.pairs.push(Pair {
                            left,
                            right,
                            count: 0,
                            words: Vec::new(),
                            closed: false,
                        });
                    }
                    number
                }
            };
            let Some(number) = number else { continue };
            let pair = &mut self.pairs[number as usize];
            pair.count += sign * count;
            if sign > 0 && new.is_none_or(|new| new == left || new == right) {
                if pair.words.last() != Some(&word) {
                    pair.words.push(word);
                }
                self.grown.push(number);
            }
        }
    }

    fn tell_agenda(&mut self) {
        let mut grown = std::mem::take(&mut self.grown);
        grown.sort_unstable();
        grown.dedup();
        for number in grown {
            self.push(number);
        }
    }

    fn push(&mut self, number: u32) {
        let pair = &self.pairs[number as usize];
        if pair.count > 0 && !pair.closed {
            let text = self.text(number);
            let (left, right) = (&self.symbols[pair.left as usize], &self.symbols[pair.right as usize]);
            self.agenda
                .push((pair.count, Reverse(left.length + right.length), Reverse(text), number));
        }
    }

    fn text(&self, number: u32) -> String {
        let pair = &self.pairs[number as usize];
        let (left, right) = (&self.symbols[pair.left as usize], &self.symbols[pair.right as usize]);
        format!("{}{}", left.text, right.text)
    }

    /// The pair to merge now, which is then closed.
    fn best(&mut self) -> Option<u32> {
        while let Some((count, _, _, number)) = self.agenda.pop() {
            let pair = &mut self.pairs[number as usize];
            if pair.closed {
                continue;
            }
            if pair.count != count {
                // A stale entry: the pair has become rarer. Where it has become more frequent, another entry has the
                // new count.
                if pair.count < count {
                    self.push(number);
                }
                continue;
            }
            pair.closed = true;
            return Some(number);
        }
        None
    }

    fn merge(&mut self, number: u32, text: String) {
        let pair = &mut self.pairs[number as usize];
        let (left, right) = (pair.left, pair.right);
        let mut words = std::mem::take(&mut pair.words);
        words.sort_unstable();
        words.dedup();
        let new = self.symbols.len() as u32;
        self.symbols.push(Symbol {
            length: text.chars().count(),
            text,
            unknown: false,
        });
        for word in words {
            let symbols = &self.words[word as usize].0;
            if !symbols.windows(2).any(|pair| pair == [left, right]) {
                continue;
            }
            self.count(word, -1, None);
            let symbols = &mut self.words[word as usize].0;
            let (mut read, mut write) = (0, 0);
            while read < symbols.len() {
                let found = symbols[read] == left && symbols.get(read + 1) == Some(&right);
                symbols[write] = if found { new } else { symbols[read] };
                read += if found { 2 } else { 1 };
                write += 1;
            }
            symbols.truncate(write);
            self.count(word, 1, Some(new));
        }
        self.tell_agenda();
    }
}

fn valid(symbols: &[Symbol], left: u32, right: u32) -> bool {
    let (left, right) = (&symbols[left as usize], &symbols[right as usize]);
    !left.unknown
        && !right.unknown
        && left.length + right.length <= LONGEST
        && may_be_piece(left.text.chars().chain(right.text.chars()))
}
