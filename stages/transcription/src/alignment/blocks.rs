//! Divides a recording and its text where both certainly are at the same word, so that the parts can be aligned one by one.

use std::ops::Range;

use super::pairs;

/// Windows of a recording with the words of the text that belong there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub windows: Range<usize>,
    pub words: Range<usize>,
    /// Whether its words were heard there, and no others, but for single ones between two that were.
    pub fits: bool,
}

/// A place between two windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Border {
    /// Words of the text that are before it.
    words: usize,
    certainty: Certainty,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Certainty {
    /// The words before and after it are those of the text.
    Sure,
    /// There are as many words between others as in the text.
    Likely,
    /// The text has words there that were not heard, or the model heard words that are not in the text.
    Guessed,
}

/// Frames of a block that ends at a likely border, and at any.
const LIKELY_FRAMES: usize = 125;
const MOST_FRAMES: usize = 750;
/// A text with at most a part this small of the words that were heard is searched in all of a recording of this many frames (two
/// minutes), as what is between words that are alike says little.
const SPARSE: usize = 2;
const MOST_SPARSE_FRAMES: usize = 1500;

/// Factors of the cost of words that were heard, and of passages of at least this many words that were not.
const HEARD: f64 = 4.0;
const UNPAIRED: f64 = 0.4;
const FEWEST_UNHEARD: usize = 4;
/// Most words of a text that fits which were not heard between two that were, and of others that were heard there.
const MOST_OTHERS: usize = 1;

/// The places (in the text, among all heard words) of words that correspond to each other. Words are given by their keys; those of the
/// text may be empty, which correspond to nothing. `lengths`: words of each segment of the text.
pub fn pairs(text: &[&str], lengths: &[usize], heard: &[Vec<String>]) -> Vec<(usize, usize)> {
    let compared = compared(text);
    let numbers = lengths.iter().enumerate();
    let segments: Vec<usize> = numbers
        .flat_map(|(number, length)| std::iter::repeat_n(number, *length))
        .collect();
    let segment = |word: usize| segments.get(word).copied().unwrap_or(lengths.len());
    let said: Vec<_> = compared.iter().map(|&word| (text[word], segment(word))).collect();
    let windows = heard.iter().enumerate();
    let all: Vec<_> = windows
        .flat_map(|(number, words)| words.iter().map(move |word| (word.as_str(), number)))
        .collect();
    let pairs = pairs::pairs(&said, &all).into_iter();
    pairs.map(|(word, at)| (compared[word], at)).collect()
}

/// What the cost of leaving out each word of a text is multiplied by, from its [`pairs()`] with what was heard: words that were
/// heard are seldom left out for others that sound like them, and those of a passage that was not heard easily.
pub fn factors(text: &[&str], heard: &[Vec<String>], pairs: &[(usize, usize)]) -> Vec<f64> {
    let all: Vec<&str> = heard.iter().flatten().map(String::as_str).collect();
    let mut factors = vec![UNPAIRED; text.len()];
    for &(word, at) in pairs {
        factors[word] = if text[word] == all[at] { HEARD } else { 1.0 };
    }
    // A few words may have been overheard.
    for run in factors.chunk_by_mut(|a, b| *a == UNPAIRED && *b == UNPAIRED) {
        if run.len() < FEWEST_UNHEARD && run[0] == UNPAIRED {
            run.fill(1.0);
        }
    }
    factors
}

/// Whether a text has few words for what was heard.
pub fn is_sparse(words: usize, heard: &[Vec<String>]) -> bool {
    SPARSE * words <= heard.iter().map(Vec::len).sum()
}

/// Divides windows with this many frames each, in which `heard` was heard, and a text, by the [`pairs()`] of both.
pub fn blocks(text: &[&str], heard: &[Vec<String>], pairs: &[(usize, usize)], frames: &[usize]) -> Vec<Block> {
    let borders = borders(text, heard, pairs);
    let is_sparse = is_sparse(text.len(), heard) && frames.iter().sum::<usize>() <= MOST_SPARSE_FRAMES;
    let mut blocks: Vec<Block> = Vec::new();
    let (mut first, mut words, mut length) = (0, 0, 0);
    for (window, border) in borders.iter().enumerate() {
        length += frames[window];
        let next = length + frames.get(window + 1).copied().unwrap_or(0);
        let (ends, fits) = match border.certainty {
            Certainty::Sure => (true, false),
            Certainty::Likely if !is_sparse => (length >= LIKELY_FRAMES, next <= MOST_FRAMES),
            _ if is_sparse => (false, true),
            _ => (false, next <= MOST_FRAMES),
        };
        if ends || !fits {
            // Borders that are guessed could be before ones that were not used.
            let until = border.words.max(words);
            blocks.push(Block {
                windows: first..window + 1,
                words: words..until,
                fits: false,
            });
            (first, words, length) = (window + 1, until, 0);
        }
    }
    if first < heard.len() || words < text.len() {
        blocks.push(Block {
            windows: first..heard.len(),
            words: words..text.len(),
            fits: false,
        });
    }
    let all: Vec<&str> = heard.iter().flatten().map(String::as_str).collect();
    let mut before = 0;
    for block in &mut blocks {
        let there = before..before + heard[block.windows.clone()].iter().map(Vec::len).sum::<usize>();
        before = there.end;
        block.fits = fits((text, block.words.clone()), (&all, there), pairs);
    }
    blocks
}

/// Whether the words of a part of the text are those of a part of what was heard, but for single ones between two that are.
fn fits(
    (text, words): (&[&str], Range<usize>),
    (all, there): (&[&str], Range<usize>),
    pairs: &[(usize, usize)],
) -> bool {
    let first = pairs.partition_point(|(_, at)| *at < there.start);
    let within = pairs[first..].iter().take_while(|(_, at)| *at < there.end);
    let equal = within.filter(|(word, at)| words.contains(word) && text[*word] == all[*at]);
    let mut from = (words.start, there.start);
    for (number, &to) in equal.chain([&(words.end, there.end)]).enumerate() {
        let is_end = number == 0 || to.0 == words.end;
        let most = if is_end { 0 } else { MOST_OTHERS };
        let left_out = text[from.0..to.0].iter().filter(|key| !key.is_empty()).count();
        if left_out > most || to.1 - from.1 > most {
            return false;
        }
        from = (to.0 + 1, to.1 + 1);
    }
    true
}

/// The words of a text that have a key.
fn compared(text: &[&str]) -> Vec<usize> {
    (0..text.len()).filter(|word| !text[*word].is_empty()).collect()
}

/// The borders behind all windows but the last.
fn borders(text: &[&str], heard: &[Vec<String>], pairs: &[(usize, usize)]) -> Vec<Border> {
    let compared = compared(text);
    let all: Vec<&str> = heard.iter().flatten().map(String::as_str).collect();
    // Places among the words that are compared.
    let place = |word: usize| compared.partition_point(|compared| *compared < word);
    let mut borders = Vec::with_capacity(heard.len());
    let (mut before, mut next) = (0, 0);
    for window in heard.iter().take(heard.len().saturating_sub(1)) {
        before += window.len();
        while pairs.get(next).is_some_and(|(_, at)| *at < before) {
            next += 1;
        }
        let (last, after) = (next.checked_sub(1).map(|last| pairs[last]), pairs.get(next).copied());
        // What is between the pairs around the border.
        let from = last.map_or((0, 0), |(word, at)| (place(word) + 1, at + 1));
        let to = after.map_or((compared.len(), all.len()), |(word, at)| (place(word), at));
        let (words, heard_before, heard_after) = (to.0 - from.0, before - from.1, to.1 - before);
        let matches = |pair: Option<(usize, usize)>| pair.is_some_and(|(word, at)| text[word] == all[at]);
        let certainty = match (words, heard_before + heard_after) {
            (0, 0) if matches(last) && matches(after) => Certainty::Sure,
            (0, _) => Certainty::Likely,
            _ => Certainty::Guessed,
        };
        let share = match heard_before + heard_after {
            0 => words,
            heard => words * heard_before / heard,
        };
        let word = from.0 + share;
        // Words that are not compared stay with the ones before them.
        let words = compared.get(word).copied().unwrap_or(text.len());
        borders.push(Border { words, certainty });
    }
    borders
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn heard(windows: &[&str]) -> Vec<Vec<String>> {
        let words = |window: &&str| window.split_whitespace().map(str::to_owned).collect();
        windows.iter().map(words).collect()
    }

    fn found(text: &str, windows: &[&str], frames: &[usize]) -> Vec<(Range<usize>, String)> {
        let text: Vec<&str> = text
            .split_whitespace()
            .map(|word| if word == "-" { "" } else { word })
            .collect();
        let heard = heard(windows);
        let blocks = blocks(&text, &heard, &pairs(&text, &[], &heard), frames);
        blocks
            .into_iter()
            .map(|block| (block.windows, text[block.words].join(" ")))
            .collect()
    }

    #[test]
    fn windows_are_divided_where_text_and_speech_agree() {
        let all = found("a b c d e", &["a b", "c", "d e"], &[9; 3]);
        assert_eq!(all, [(0..1, "a b".into()), (1..2, "c".into()), (2..3, "d e".into())]);
        // A word that was misheard beside a border, words that were not heard, and windows without words.
        assert_eq!(found("a b c d", &["a x", "c d"], &[9; 2]), [(0..2, "a b c d".into())]);
        assert_eq!(
            found("a b c d", &["a x", "c d"], &[200, 9]),
            [(0..1, "a b".into()), (1..2, "c d".into())]
        );
        assert_eq!(
            found("a b c d e", &["a b", "d e"], &[200; 2]),
            [(0..2, "a b c d e".into())]
        );
        assert_eq!(
            found("a b", &["", "a", "", "b"], &[9; 4]),
            [(0..2, "a".into()), (2..3, String::new()), (3..4, "b".into())]
        );
        // A mark by itself stays with the word before it.
        assert_eq!(
            found("a - b", &["a", "b"], &[9; 2]),
            [(0..1, "a ".into()), (1..2, "b".into())]
        );
    }

    #[test]
    fn passages_that_were_not_heard_are_left_out_easily() {
        let text = ["a", "b", "", "c", "d", "e", "f", "g", "h", "i"];
        let heard = heard(&["a x", "g i"]);
        let pairs = [(0, 0), (1, 1), (7, 2), (9, 3)];
        assert_eq!(
            factors(&text, &heard, &pairs),
            [4.0, 1.0, 0.4, 0.4, 0.4, 0.4, 0.4, 4.0, 1.0, 4.0]
        );
        assert_eq!(factors(&[], &heard, &[]), [0.0; 0]);
    }

    #[test]
    fn a_block_fits_where_its_words_were_heard() {
        let fits = |text: &str, windows: &[&str]| -> Vec<bool> {
            let text: Vec<&str> = text.split_whitespace().map(|word| word.trim_matches('-')).collect();
            let heard = heard(windows);
            let blocks = blocks(&text, &heard, &pairs(&text, &[], &heard), &vec![200; windows.len()]);
            blocks.into_iter().map(|block| block.fits).collect()
        };
        assert_eq!(fits("a b - c d e", &["a b", "c", "d e"]), [true; 3]);
        // One word that was misheard, one that was not heard, and one that is not in the text.
        assert_eq!(fits("a b c d e f", &["a x c", "d e f"]), [true; 2]);
        assert_eq!(fits("a b c d e f", &["a c", "d e f"]), [true; 2]);
        assert_eq!(fits("a b c d", &["a b", "c x d"]), [true; 2]);
        // Two words, and one at an end.
        assert_eq!(fits("a b c d e f", &["a x y d", "e f"]), [false, true]);
        assert_eq!(fits("a b c d", &["x b", "c d"]), [false, true]);
        assert_eq!(fits("a b c d", &["a b", "c d x"]), [true, false]);
        assert_eq!(fits("a", &["b"]), [false]);
        assert_eq!(fits("", &["b"]), [false]);
        assert_eq!(fits("-", &[""]), [true]);
    }

    #[test]
    fn blocks_are_not_too_long() {
        let all = found("a b c d", &["x", "y", "z", "w", "v"], &[400; 5]);
        assert_eq!(all.len(), 5);
        assert_eq!(found("a b", &["", "", ""], &[400; 3]).last().unwrap().0, 2..3);
        // A few words are searched in all of it, but where they certainly are.
        assert_eq!(found("a b", &["x x x", "y", "z"], &[400; 3]), [(0..3, "a b".into())]);
        assert_eq!(
            found("a b", &["x x", "a", "b", "y"], &[300; 4]),
            [(0..2, "a".into()), (2..4, "b".into())]
        );
        assert_eq!(found("a", &["x", "y"], &[1000; 2]).len(), 2);
        assert_eq!(found("", &["a b"], &[9]), [(0..1, String::new())]);
        assert_eq!(blocks(&[], &[], &[], &[]), []);
        assert_eq!(found("a", &[], &[]), [(0..0, "a".into())]);
    }

    proptest! {
        #[test]
        fn every_window_and_every_word_is_in_one_block(
            text in prop::collection::vec("[ab]?", 0..12), windows in prop::collection::vec(prop::collection::vec("[abc]", 0..4), 0..8),
            lengths in prop::collection::vec(0usize..900, 8),
        ) {
            let text: Vec<&str> = text.iter().map(String::as_str).collect();
            let (mut at, mut word) = (0, 0);
            for block in blocks(&text, &windows, &pairs(&text, &[1, 2], &windows), &lengths[..windows.len()]) {
                prop_assert_eq!((block.windows.start, block.words.start), (at, word));
                prop_assert!(block.windows.end >= at && block.words.end >= word);
                let frames: usize = lengths[block.windows.clone()].iter().sum();
                let is_long = is_sparse(text.len(), &windows) && frames <= MOST_SPARSE_FRAMES;
                prop_assert!(frames <= MOST_FRAMES || block.windows.len() == 1 || is_long);
                (at, word) = (block.windows.end, block.words.end);
            }
            prop_assert_eq!((at, word), (windows.len(), text.len()));
        }
    }
}
