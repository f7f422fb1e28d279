//! Which words of a text correspond to which words that were heard, where whole passages of either may be missing.
//!
//! The fewest edits would put the text between two missing passages beside speech that it does not belong to, word by word. So a
//! gap costs most where it begins (affine gap costs, Gotoh 1982): a path goes over a passage at once, and comes back for several
//! words that match rather than for one. Gaps are cheaper where both texts have a border, so that equal words at either end of a
//! passage stay with their segment.

use std::collections::HashMap;

/// What a path gains or pays for a pair of equal words, a pair of others, the beginning of a gap and each word in it.
const EQUAL: i32 = 8;
const OTHER: i32 = -2;
const OPEN: i32 = -12;
const EXTEND: i32 = -1;
/// What it pays more: for each word that was heard within a segment of the text and is not in it, for words of the text that were
/// not heard from the middle of a segment on, and for a gap that begins in the middle of a window.
const WITHIN_SEGMENT: i32 = -1;
const FROM_WITHIN_SEGMENT: i32 = -2;
const FROM_WITHIN_WINDOW: i32 = -1;

/// The score of no path: small enough for all costs on top of it.
const NEVER: i32 = i32::MIN / 2;

/// How the best path comes into a cell: with a pair, or with the end of a gap.
const PAIR: u8 = 0;
const LEFT_OUT: u8 = 1;
const ADDED: u8 = 2;
const ENDS: u8 = 3;
/// Whether the gap that ends in a cell begins there, too.
const LEFT_OUT_BEGINS: u8 = 4;
const ADDED_BEGINS: u8 = 8;

/// A word, by what it is compared by, and the number of the segment or window that it is in.
pub type Numbered<'a> = (&'a str, usize);

/// Scores of the best paths to each place among the words that were heard, behind one word of the text.
#[derive(Clone)]
struct Row {
    best: Vec<i32>,
    /// Of paths that end with a word of the text that was not heard.
    left_out: Vec<i32>,
}

/// What was heard: the numbers of words, and what it costs to begin a gap before each and behind the last.
struct Heard {
    words: Vec<u32>,
    open: Vec<i32>,
}

impl Row {
    /// Before the first word of the text.
    fn first(heard: usize) -> Self {
        let gap = |length: usize| match length {
            0 => 0,
            length => OPEN.saturating_add(EXTEND.saturating_mul(length as i32)),
        };
        Row {
            best: (0..=heard).map(gap).collect(),
            left_out: vec![NEVER; heard + 1],
        }
    }

    /// Goes on by a word of the text, and tells how each cell was reached. `borders`: whether a segment begins with the word, and
    /// whether one ends with it.
    fn advance(&mut self, word: u32, borders: (bool, bool), heard: &Heard, ways: &mut [u8]) {
        let from_segment = if borders.0 { 0 } else { FROM_WITHIN_SEGMENT };
        let extend = EXTEND + if borders.1 { 0 } else { WITHIN_SEGMENT };
        let mut diagonal = NEVER;
        let (mut before, mut added) = (NEVER, NEVER);
        for (place, way) in ways.iter_mut().enumerate() {
            let (opened, goes_on) = (
                self.best[place] + heard.open[place] + from_segment,
                self.left_out[place],
            );
            let left_out = (opened.max(goes_on) + EXTEND).max(NEVER);
            *way = if opened >= goes_on { LEFT_OUT_BEGINS } else { 0 };
            let mut pair = NEVER;
            if let Some(at) = place.checked_sub(1) {
                pair = diagonal + if heard.words[at] == word { EQUAL } else { OTHER };
                let (opened, goes_on) = (before + heard.open[at], added);
                added = opened.max(goes_on) + extend;
                *way |= if opened >= goes_on { ADDED_BEGINS } else { 0 };
            }
            let best = pair.max(left_out).max(added);
            *way |= match best {
                best if best == pair => PAIR,
                best if best == left_out => LEFT_OUT,
                _ => ADDED,
            };
            diagonal = self.best[place];
            (self.best[place], self.left_out[place], before) = (best, left_out, best);
        }
    }
}

/// The places (in `text`, in `heard`) of words that correspond to each other, in order; they may differ. Memory grows with the
/// product of one length and the square root of the other.
pub fn pairs(text: &[Numbered<'_>], heard: &[Numbered<'_>]) -> Vec<(usize, usize)> {
    let mut numbers = HashMap::new();
    let mut number = |word| {
        let next = numbers.len() as u32;
        *numbers.entry(word).or_insert(next)
    };
    let begins = |words: &[Numbered<'_>], at: usize| at == 0 || at == words.len() || words[at].1 != words[at - 1].1;
    let rows: Vec<(u32, (bool, bool))> = (text.iter().enumerate())
        .map(|(at, (word, _))| (number(*word), (begins(text, at), begins(text, at + 1))))
        .collect();
    let open = |at: usize| OPEN + if begins(heard, at) { 0 } else { FROM_WITHIN_WINDOW };
    let heard = Heard {
        words: heard.iter().map(|(word, _)| number(*word)).collect(),
        open: (0..=heard.len()).map(open).collect(),
    };
    // A row that is kept weighs eight bytes for a cell, those from one to the next a byte each.
    let between = (8 * rows.len()).isqrt().max(1);
    let width = heard.words.len() + 1;
    let mut ways = vec![0; between.min(rows.len()) * width];
    let mut row = Row::first(heard.words.len());
    let mut kept = Vec::with_capacity(rows.len() / between + 1);
    for words in rows.chunks(between) {
        kept.push(row.clone());
        for &(word, borders) in words {
            row.advance(word, borders, &heard, &mut ways[..width]);
        }
    }
    let mut found = Vec::new();
    let (mut at, mut in_gap) = (heard.words.len(), PAIR);
    for (chunk, words) in rows.chunks(between).enumerate().rev() {
        let Some(mut row) = kept.pop() else { break };
        for (&(word, borders), ways) in words.iter().zip(ways.chunks_exact_mut(width)) {
            row.advance(word, borders, &heard, ways);
        }
        let mut word = words.len();
        while let Some(above) = word.checked_sub(1) {
            let way = ways[above * width + at];
            match if in_gap == PAIR { way & ENDS } else { in_gap } {
                LEFT_OUT => {
                    in_gap = if way & LEFT_OUT_BEGINS == 0 { LEFT_OUT } else { PAIR };
                    word = above;
                }
                ADDED => {
                    in_gap = if way & ADDED_BEGINS == 0 { ADDED } else { PAIR };
                    at -= 1;
                }
                _ => {
                    at -= 1;
                    word = above;
                    found.push((chunk * between + word, at));
                }
            }
        }
    }
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The score of a path: what is between pairs is left out or was added, in either order.
    fn score(pairs: &[(usize, usize)], text: &[Numbered<'_>], heard: &[Numbered<'_>]) -> i32 {
        let begins = |words: &[Numbered<'_>], at: usize| at == 0 || at == words.len() || words[at].1 != words[at - 1].1;
        let within = |is_border: bool, cost: i32| if is_border { 0 } else { cost };
        let gap = |from: (usize, usize), to: (usize, usize)| {
            let left_out = |at: usize| match to.0 - from.0 {
                0 => 0,
                length => {
                    let opens = within(begins(text, from.0), FROM_WITHIN_SEGMENT)
                        + within(begins(heard, at), FROM_WITHIN_WINDOW);
                    OPEN + opens + EXTEND * length as i32
                }
            };
            let added = |word: usize| match to.1 - from.1 {
                0 => 0,
                length => {
                    let extend = EXTEND + within(begins(text, word), WITHIN_SEGMENT);
                    OPEN + within(begins(heard, from.1), FROM_WITHIN_WINDOW) + extend * length as i32
                }
            };
            (left_out(from.1) + added(to.0)).max(added(from.0) + left_out(to.1))
        };
        let (mut score, mut from) = (0, (0, 0));
        for &(word, at) in pairs {
            score += gap(from, (word, at));
            score += if text[word].0 == heard[at].0 { EQUAL } else { OTHER };
            from = (word + 1, at + 1);
        }
        score + gap(from, (text.len(), heard.len()))
    }

    fn paths(from: (usize, usize), to: (usize, usize)) -> Vec<Vec<(usize, usize)>> {
        let mut all = vec![Vec::new()];
        for word in from.0..to.0 {
            for at in from.1..to.1 {
                for mut rest in paths((word + 1, at + 1), to) {
                    rest.insert(0, (word, at));
                    all.push(rest);
                }
            }
        }
        all
    }

    fn numbered(words: &[(String, bool)]) -> Vec<Numbered<'_>> {
        let mut number = 0;
        let number_of = |(_, begins): &(String, bool)| {
            number += usize::from(*begins);
            number
        };
        let numbers: Vec<usize> = words.iter().map(number_of).collect();
        words.iter().map(|(word, _)| word.as_str()).zip(numbers).collect()
    }

    proptest! {
        #[test]
        fn pairs_have_the_best_score(
            text in prop::collection::vec(("[abc]", any::<bool>()), 0..6), heard in prop::collection::vec(("[abc]", any::<bool>()), 0..6),
        ) {
            let (text, heard) = (numbered(&text), numbered(&heard));
            let found = pairs(&text, &heard);
            prop_assert!(found.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1));
            let all = paths((0, 0), (text.len(), heard.len())).into_iter();
            prop_assert_eq!(Some(score(&found, &text, &heard)), all.map(|path| score(&path, &text, &heard)).max());
        }

        /// A minute of speech without text and one of text without speech, in either order, with some sentences between that are
        /// heard right but for each ninth word.
        #[test]
        fn missing_passages_do_not_shift_what_is_between(
            words in prop::collection::vec(0u32..40, 480), added in 10..20usize, between in 8..16usize, removed in 10..20usize,
            turned in any::<bool>(),
        ) {
            // Sentences of eight words.
            let words: Vec<String> = words.iter().map(u32::to_string).collect();
            let all: Vec<Numbered<'_>> = words.iter().enumerate().map(|(at, word)| (word.as_str(), at / 8)).collect();
            let without = |lost: std::ops::Range<usize>| -> Vec<Numbered<'_>> {
                all.iter().copied().filter(|word| !lost.contains(&word.1)).collect()
            };
            let lost = 3 + added + between;
            let (text, mut heard) = (without(3..3 + added), without(lost..lost + removed));
            for (at, word) in heard.iter_mut().enumerate() {
                if at % 9 == 4 {
                    word.0 = "misheard";
                }
            }
            let found = match turned {
                false => pairs(&text, &heard),
                true => pairs(&heard, &text).into_iter().map(|(a, b)| (b, a)).collect(),
            };
            // A sentence beside a passage may by chance be like one in it.
            let right = (8 * (4 + added)..8 * (lost - 1)).filter(|at| found.contains(&(at - 8 * added, *at))).count();
            prop_assert_eq!(right, 8 * (between - 2));
        }
    }
}
