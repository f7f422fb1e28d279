//! Line breaking of subtitles.

use unicode_segmentation::UnicodeSegmentation;

use crate::transcript::Word;
use crate::{Result, TranscriptionError};

/// Limits of the text that a subtitle shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LineLimits {
    /// Grapheme clusters (what a reader takes for one character) on a line, the name of the speaker and spaces
    /// included. A longer word is broken.
    pub max_line_width: Option<usize>,
    /// Lines of a subtitle; the rest goes to the next one. Without a width a segment is one line, and this has no
    /// effect.
    pub max_line_count: Option<usize>,
}

impl LineLimits {
    /// An error if a limit is 0.
    pub fn check(&self) -> Result<()> {
        for (setting, limit) in [
            ("max_line_width", self.max_line_width),
            ("max_line_count", self.max_line_count),
        ] {
            if limit == Some(0) {
                return Err(TranscriptionError::setting(setting, "must be 1 at least"));
            }
        }
        Ok(())
    }
}

/// The text on one line: white space and control characters become single spaces, none at either end.
pub fn one_line(text: &str) -> String {
    let words = text.split(|c: char| c.is_whitespace() || c.is_control());
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Width in grapheme clusters.
pub fn width(text: &str) -> usize {
    text.graphemes(true).count()
}

/// A word, or a part of one that is wider than a line. Times in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    pub text: String,
    /// Whether a space is before it, unless it begins a line.
    pub begins_word: bool,
    pub width: usize,
    pub start: f64,
    pub end: f64,
}

/// The pieces of words that are at most `max_width` wide; spaces within a word part it too. A word's time is shared out
/// among its pieces by their width.
pub fn pieces(words: &[Word], max_width: usize) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for word in words {
        let total = width(&word.word.replace(' ', ""));
        let time = |before: usize| {
            if before >= total {
                return word.end;
            }
            word.start + (word.end - word.start) * (before as f64 / total as f64)
        };
        let mut before = 0;
        for part in word.word.split(' ') {
            let mut clusters = part.graphemes(true).peekable();
            let mut begins_word = true;
            while clusters.peek().is_some() {
                let text: Vec<&str> = clusters.by_ref().take(max_width.max(1)).collect();
                pieces.push(Piece {
                    text: text.concat(),
                    begins_word,
                    width: text.len(),
                    start: time(before),
                    end: time(before + text.len()),
                });
                before += text.len();
                begins_word = false;
            }
        }
    }
    pieces
}

/// Fills lines with as many pieces as fit, the `prefix` first: the lines, and how many of `pieces` are on them.
///
/// Every piece fits on a line of its own, as [`pieces`] makes them.
pub fn fill(prefix: &[Piece], pieces: &[Piece], max_width: usize, max_count: usize) -> (Vec<String>, usize) {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for (index, piece) in prefix.iter().chain(pieces).enumerate() {
        let space = usize::from(used > 0 && piece.begins_word);
        if used > 0 && piece.width + space > max_width.saturating_sub(used) {
            if lines.len() >= max_count {
                return (lines, index.saturating_sub(prefix.len()));
            }
            lines.push(String::new());
            used = 0;
        }
        let line = lines.last_mut().expect("there is a line");
        if used > 0 && piece.begins_word {
            line.push(' ');
            used += 1;
        }
        line.push_str(&piece.text);
        used += piece.width;
    }
    (lines, pieces.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn word(text: &str) -> Word {
        Word {
            word: text.to_owned(),
            start: 1.0,
            end: 2.0,
            ..Word::default()
        }
    }

    #[test]
    fn clusters_are_counted_and_kept_whole() {
        // Devanagari with vowel signs and a virama, a family of three joined by ZWJ, a letter with two marks.
        for (text, clusters) in [
            ("नमस्ते", 3),
            ("👨\u{200d}👩\u{200d}👧", 1),
            ("e\u{301}\u{323}", 1),
            ("שלום", 4),
        ] {
            assert_eq!(width(text), clusters, "{text}");
            let texts: Vec<String> = pieces(&[word(text)], 1).into_iter().map(|piece| piece.text).collect();
            assert_eq!(texts.len(), clusters, "{text}");
            assert_eq!(texts.concat(), text);
        }
    }

    #[test]
    fn a_word_wider_than_a_line_shares_its_time() {
        let found = pieces(&[word("abcdefgh"), word("ij")], 4);
        let found: Vec<_> = found
            .iter()
            .map(|piece| (piece.text.as_str(), piece.begins_word, piece.start, piece.end))
            .collect();
        assert_eq!(
            found,
            [
                ("abcd", true, 1.0, 1.5),
                ("efgh", false, 1.5, 2.0),
                ("ij", true, 1.0, 2.0)
            ]
        );
    }

    #[test]
    fn white_space_and_control_characters_become_one_space() {
        assert_eq!(one_line(" a\r\n\n\tb\u{85}c\u{2028}d\u{0}e\u{1f} "), "a b c d e");
        assert_eq!(one_line("\n \t"), "");
        // Joiners and marks of direction stay.
        let text = "\u{202b}می\u{200c}خواهم\u{202c}\u{200f}";
        assert_eq!(one_line(text), text);
    }

    #[test]
    fn limits_of_zero_are_refused() {
        let limits = LineLimits {
            max_line_width: Some(0),
            max_line_count: None,
        };
        assert_eq!(
            limits.check().unwrap_err().to_string(),
            "setting `max_line_width`: must be 1 at least"
        );
        assert!(LineLimits::default().check().is_ok());
    }

    proptest! {
        #[test]
        fn lines_keep_all_text_within_the_limits(
            texts in prop::collection::vec("[a-zא-ת क-ह्ा👨🇦🇧-]{1,9}", 1..12), max_width in 1..12usize, max_count in 1..4usize,
        ) {
            let texts: Vec<String> = texts.iter().map(|text| one_line(text)).filter(|text| !text.is_empty()).collect();
            let words: Vec<Word> = texts.iter().map(|text| word(text)).collect();
            let all = pieces(&words, max_width);
            let mut rest = all.as_slice();
            let mut shown = String::new();
            while !rest.is_empty() {
                let (lines, taken) = fill(&[], rest, max_width, max_count);
                prop_assert!(taken > 0 && lines.len() <= max_count);
                for line in &lines {
                    prop_assert!(width(line) <= max_width, "{line:?}");
                    prop_assert!(!line.is_empty() && line.trim() == line);
                    shown.push_str(line);
                }
                rest = &rest[taken..];
            }
            let without_spaces = |text: &str| text.replace(' ', "");
            prop_assert_eq!(without_spaces(&shown), without_spaces(&texts.concat()));
        }
    }
}
