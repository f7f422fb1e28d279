//! Normalisation of texts before they are compared: Whisper's `BasicTextNormalizer`, and a variant that keeps vowel
//! signs.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use unicode_normalization::UnicodeNormalization;
use unicode_segmentation::UnicodeSegmentation;

use crate::wer::is_white_space;

/// Normalisation of both texts before they are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Normalization {
    /// None: case and punctuation count.
    #[default]
    None,
    /// Whisper's `BasicTextNormalizer`, for every language: lower case, bracketed text removed, NFKC, and a space for each
    /// character of the categories M, S and P (marks, symbols, punctuation). M includes the vowel signs and viramas of
    /// the Indic scripts: their words are split into single letters, so that the rate is no word error rate any more.
    /// Published figures are often computed this way; compare with those only. English has no special rules (Whisper's
    /// `EnglishTextNormalizer` also rewrites numbers, contractions and British spelling).
    WhisperBasic,
    /// As `whisper_basic`, but marks stay: words of every script stay words.
    KeepMarks,
}

/// A normaliser with its options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Normalizer {
    pub normalization: Normalization,
    /// Drop diacritics (category Mn after NFKD, and letters such as `ø`). With [`Normalization::WhisperBasic`] only.
    pub remove_diacritics: bool,
    /// A space between any two letters (grapheme clusters).
    pub split_letters: bool,
}

/// Letters with a stroke or the like that NFKD leaves whole.
const MORE_DIACRITICS: [(char, &str); 16] = [
    ('œ', "oe"),
    ('Œ', "OE"),
    ('ø', "o"),
    ('Ø', "O"),
    ('æ', "ae"),
    ('Æ', "AE"),
    ('ß', "ss"),
    ('ẞ', "SS"),
    ('đ', "d"),
    ('Đ', "D"),
    ('ð', "d"),
    ('Ð', "D"),
    ('þ', "th"),
    ('Þ', "th"),
    ('ł', "l"),
    ('Ł', "L"),
];

/// Constant patterns, which a test compiles.
static BRACKETS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"[<\[][^>\]]*[>\]]").ok());
static PARENTHESES: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\(([^)]+?)\)").ok());
static MARKS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"[\p{M}\p{S}\p{P}]").ok());
static SYMBOLS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"[\p{S}\p{P}]").ok());
static NON_SPACING: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\p{Mn}").ok());

fn replaced<'t>(pattern: &Option<Regex>, text: &'t str, by: &str) -> Cow<'t, str> {
    match pattern {
        Some(pattern) => pattern.replace_all(text, by),
        None => Cow::Borrowed(text),
    }
}

impl Normalizer {
    /// The name of an option that `normalization` does not have, and those that have it.
    pub fn check(&self) -> Result<(), (&'static str, &'static str)> {
        if self.remove_diacritics && self.normalization != Normalization::WhisperBasic {
            return Err(("remove_diacritics", "`whisper_basic`"));
        }
        if self.split_letters && self.normalization == Normalization::None {
            return Err(("split_letters", "`whisper_basic` or `keep_marks`"));
        }
        Ok(())
    }

    /// The normalised text, or the text itself with [`Normalization::None`]. There may be one space at either end, as
    /// in Whisper.
    pub fn apply<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if self.normalization == Normalization::None {
            return Cow::Borrowed(text);
        }
        let lower = text.to_lowercase();
        let text = replaced(&BRACKETS, &lower, "");
        let text = replaced(&PARENTHESES, &text, "");
        let text = match (self.normalization, self.remove_diacritics) {
            (Normalization::KeepMarks, _) => {
                let composed: String = text.nfkc().collect();
                replaced(&SYMBOLS, &composed, " ").into_owned()
            }
            (_, true) => without_diacritics(&text),
            (_, false) => {
                let composed: String = text.nfkc().collect();
                replaced(&MARKS, &composed, " ").into_owned()
            }
        };
        let text = text.to_lowercase();
        let text = if self.split_letters {
            text.graphemes(true).collect::<Vec<_>>().join(" ")
        } else {
            text
        };
        Cow::Owned(squeezed(&text))
    }
}

fn without_diacritics(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.nfkd() {
        match MORE_DIACRITICS.iter().find(|(letter, _)| *letter == c) {
            Some((_, letters)) => plain.push_str(letters),
            None => plain.push(c),
        }
    }
    let plain = replaced(&NON_SPACING, &plain, "");
    replaced(&MARKS, &plain, " ").into_owned()
}

/// One space for each run of white space.
fn squeezed(text: &str) -> String {
    let mut squeezed = String::with_capacity(text.len());
    let mut before = false;
    for c in text.chars() {
        let white = is_white_space(c);
        if !white {
            squeezed.push(c);
        } else if !before {
            squeezed.push(' ');
        }
        before = white;
    }
    squeezed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `normalizer.json` holds, for each text, what `BasicTextNormalizer` of Hugging Face's transformers gives with
    /// (remove_diacritics, split_letters) = (no, no), (yes, no), (no, yes), (yes, yes); 0 where that is what the one before gives. The texts are hand-picked pieces
    /// (brackets, white space, ligatures, jamo, emoji, joiners, presentation forms) and random mixtures of them with
    /// assigned characters of Unicode 14 from the blocks of all scripts of the language table and some others.
    #[test]
    fn it_is_whispers() {
        let text = include_str!("../../../tests/data/golden/normalizer.json");
        let cases: Vec<Vec<serde_json::Value>> = serde_json::from_str(text).expect("golden cases");
        assert!(cases.len() > 200);
        let mut wrong = Vec::new();
        for case in &cases {
            let text = case[0].as_str().expect("a text");
            let mut before = "";
            assert_eq!(case.len(), 5);
            for (index, expected) in case[1..].iter().enumerate() {
                let expected = expected.as_str().unwrap_or(before);
                before = expected;
                let normalizer = Normalizer {
                    normalization: Normalization::WhisperBasic,
                    remove_diacritics: index % 2 == 1,
                    split_letters: index >= 2,
                };
                let ours = normalizer.apply(text);
                if ours != expected {
                    wrong.push(format!("{text:?} ({index}): {ours:?} is not {expected:?}"));
                }
            }
        }
        assert!(wrong.is_empty(), "{} differ: {wrong:#?}", wrong.len());
    }

    #[test]
    fn marks_are_what_the_two_ways_differ_in() {
        let of = |normalization, text| {
            let normalizer = Normalizer {
                normalization,
                ..Normalizer::default()
            };
            normalizer.apply(text).into_owned()
        };
        let text = "<|hi|> नमस्ते, दुनिया!";
        assert_eq!(of(Normalization::None, text), text);
        assert_eq!(of(Normalization::WhisperBasic, text), " नमस त द न य ");
        assert_eq!(of(Normalization::KeepMarks, text), " नमस्ते दुनिया ");
        assert_eq!(of(Normalization::KeepMarks, "Don't (ever) STOP"), "don t stop");
        for pattern in [&*BRACKETS, &*PARENTHESES, &*MARKS, &*SYMBOLS, &*NON_SPACING] {
            assert!(pattern.is_some());
        }
    }

    #[test]
    fn options_need_a_normalization_that_has_them() {
        let of = |normalization, remove_diacritics, split_letters| {
            let normalizer = Normalizer {
                normalization,
                remove_diacritics,
                split_letters,
            };
            normalizer.check().err().map(|(option, _)| option)
        };
        for normalization in [
            Normalization::None,
            Normalization::KeepMarks,
            Normalization::WhisperBasic,
        ] {
            let (none, whisper) = (
                normalization == Normalization::None,
                normalization == Normalization::WhisperBasic,
            );
            assert_eq!(of(normalization, false, false), None);
            assert_eq!(
                of(normalization, true, false),
                (!whisper).then_some("remove_diacritics")
            );
            assert_eq!(of(normalization, false, true), none.then_some("split_letters"));
        }
    }

    proptest! {
        #[test]
        fn white_space_is_squeezed_and_letters_stand_alone(text in any::<String>()) {
            let normalizer = Normalizer { normalization: Normalization::WhisperBasic, remove_diacritics: true, split_letters: true };
            let once = normalizer.apply(&text).into_owned();
            prop_assert!(!once.contains("  "));
            prop_assert!(once.split(' ').all(|word| word.graphemes(true).count() <= 1));
        }
    }
}
