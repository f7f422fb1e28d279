//! The initial pieces of unigram training: all characters, and the most frequent substrings.

use std::cmp::Reverse;
use std::collections::HashSet;

use super::super::SPACE;
use super::alphabet::Alphabet;
use super::script::{LONGEST, may_be_piece};

/// Most seeds.
const MOST: usize = 1_000_000;

/// Pieces with the logarithms of their shares. A substring counts as often as it comes times its length, if it is not
/// always followed by the same character.
pub(super) fn seeds(alphabet: &Alphabet) -> Vec<(String, f64)> {
    let mut seeds: Vec<(String, u64)> = alphabet.characters.iter().map(|(c, n)| (c.to_string(), *n)).collect();
    let mut found = substrings(alphabet);
    found.sort_unstable_by(|(a, n), (b, m)| m.cmp(n).then_with(|| a.cmp(b)));
    found.truncate(MOST.saturating_sub(seeds.len()));
    let known: HashSet<&str> = seeds.iter().map(|(text, _)| text.as_str()).collect();
    let more: Vec<_> = found
        .iter()
        .filter(|(text, _)| !known.contains(text))
        .map(|(text, score)| ((*text).to_owned(), *score))
        .collect();
    drop(known);
    seeds.extend(more);
    let total: f64 = seeds.iter().map(|(_, score)| *score as f64).sum();
    let share = |(text, score): (String, u64)| (text, (score as f64).ln() - total.ln());
    seeds.into_iter().map(share).collect()
}

/// Substrings of at least two characters with their scores, each once, in no useful order.
fn substrings(alphabet: &Alphabet) -> Vec<(&str, u64)> {
    let words = &alphabet.words;
    // Every place at which a substring may begin: word and byte. Sorted by the following text, up to the longest piece,
    // so that equal prefixes are adjacent.
    let mut places: Vec<(u32, u32)> = Vec::new();
    for (word, (text, _)) in words.iter().enumerate() {
        let starts = text.char_indices().map(|(start, _)| (word as u32, start as u32));
        places.extend(starts);
    }
    let reach = |&(word, start): &(u32, u32)| {
        let rest = &words[word as usize].0[start as usize..];
        let end = rest.char_indices().nth(LONGEST + 1).map_or(rest.len(), |(end, _)| end);
        &rest[..end]
    };
    places.sort_unstable_by_key(|place| (reach(place), Reverse(*place)));
    let mut found = Vec::new();
    // Prefixes of the current text.
    let mut open: Vec<Beginning> = Vec::new();
    let mut before = "";
    for place in &places {
        let text = reach(place);
        let shared = shared_length(before, text);
        close(&mut open, before, shared, &mut found);
        let new = text[shared..].char_indices().map(|(at, c)| Beginning {
            length: shared + at + c.len_utf8(),
            count: 0,
            next: Next::Nothing,
        });
        open.extend(new);
        let count = words[place.0 as usize].1;
        for beginning in &mut open {
            beginning.count += count.all;
            match text[beginning.length..].chars().next() {
                Some(character) => beginning.next.see(character),
                None => {
                    if count.all > count.last {
                        beginning.next.see(SPACE);
                    }
                    if count.last > 0 {
                        beginning.next.see('\0');
                    }
                }
            }
        }
        before = text;
    }
    close(&mut open, before, 0, &mut found);
    found
}

/// A beginning that places in a row share.
struct Beginning {
    /// In bytes.
    length: usize,
    count: u64,
    next: Next,
}

/// What comes after a beginning: the end of a text counts as a character.
#[derive(Clone, Copy, PartialEq)]
enum Next {
    Nothing,
    Always(char),
    Different,
}

impl Next {
    fn see(&mut self, character: char) {
        *self = match *self {
            Next::Nothing => Next::Always(character),
            Next::Always(other) if other == character => Next::Always(other),
            _ => Next::Different,
        };
    }
}

/// Takes the beginnings of `text` that are longer than `shared` bytes off, and keeps those that can be seeds.
fn close<'t>(open: &mut Vec<Beginning>, text: &'t str, shared: usize, found: &mut Vec<(&'t str, u64)>) {
    while let Some(beginning) = open.pop_if(|beginning| beginning.length > shared) {
        let piece = &text[..beginning.length];
        let characters = piece.chars().count();
        if beginning.next == Next::Different && characters >= 2 && may_be_piece(piece.chars()) {
            found.push((piece, beginning.count * characters as u64));
        }
    }
}

/// How many bytes at their beginnings, whole characters, two texts share.
fn shared_length(a: &str, b: &str) -> usize {
    let same = a.char_indices().zip(b.chars()).take_while(|((_, x), y)| x == y);
    same.map(|((at, c), _)| at + c.len_utf8()).last().unwrap_or(0)
}
