//! Normalisation of texts before they are compared: Whisper's normalisers, that of the Open ASR Leaderboard for English, and
//! Vistaar's for Indic languages.

mod characters;
mod english;
mod indic;
mod numbers;

use std::borrow::Cow;
use std::collections::BTreeMap;
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
    /// the Indic scripts: their words are split into single letters, so that the rate is not a word error rate any more.
    /// Published figures are often computed this way; compare with those only. English has no special rules: those are
    /// `whisper_english`.
    WhisperBasic,
    /// As `whisper_basic`, but marks stay: words of every script stay words.
    KeepMarks,
    /// Whisper's `EnglishTextNormalizer`, for English: besides case and punctuation, contractions (`won't`), titles (`Mr`),
    /// fillers (`uh`), numbers (`twenty five dollars` is `$25`) and British spellings are written in one way.
    WhisperEnglish,
    /// The `EnglishTextNormalizer` of the Open ASR Leaderboard, for English: Whisper's with more fillers, with compounds
    /// (`wi fi`), spellings of names and acronyms, and with `'s` as `is` after some words only. As of 21 August 2026; the
    /// Leaderboard's figures from before 2026 are those of `whisper_english`.
    OpenAsrEnglish,
    /// The `BasicMultilingualTextNormalizer` of the Open ASR Leaderboard with `remove_diacritics=False`, for languages other than
    /// English: as `whisper_basic`, then without characters that are no letters or digits (control and format characters), and
    /// without white space at the ends. As of 21 August 2026; it splits words of Indic scripts as `whisper_basic` does.
    OpenAsrMultilingual,
    /// As AI4Bharat's Vistaar has it, for Indic languages: punctuation is removed, also within words, and what can be encoded
    /// in several ways is unified by the rules of the language. Case and digits stay. Of Urdu, only punctuation is removed.
    /// A row without language has the rules of the script that most of its characters are of.
    Indic,
    /// By the language of each row: `whisper_english` for `en`, `indic` for as, bn, gu, hi, kn, kok, ml, mr, ne, or, pa, sa,
    /// sd, ta, te and ur, and `keep_marks` for all others and for rows without language.
    ByLanguage,
}

/// A normaliser with its options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Normalizer {
    pub normalization: Normalization,
    /// Normalisers of single languages, by their codes. That of `en` is also that of `en-GB` if that has none of its own.
    pub languages: BTreeMap<String, Normalization>,
    /// Drop diacritics (category Mn after NFKD, and letters such as `ø`). With [`Normalization::WhisperBasic`] only.
    pub remove_diacritics: bool,
    /// A space between any two letters (grapheme clusters).
    pub split_letters: bool,
    /// Digits of all scripts become those of ASCII. With [`Normalization::Indic`] only; Vistaar leaves them.
    pub ascii_digits: bool,
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
    /// The name of an option that no normaliser in use has, and those that have it.
    pub fn check(&self) -> Result<(), (&'static str, &'static str)> {
        if self.remove_diacritics && !self.uses(Normalization::WhisperBasic) {
            return Err(("remove_diacritics", "`whisper_basic`"));
        }
        if self.split_letters && !self.uses(Normalization::WhisperBasic) && !self.uses(Normalization::KeepMarks) {
            return Err(("split_letters", "`whisper_basic` or `keep_marks`"));
        }
        if self.ascii_digits && !self.uses(Normalization::Indic) {
            return Err(("ascii_digits", "`indic`"));
        }
        Ok(())
    }

    /// Whether rows of some language are normalised.
    pub fn is_given(&self) -> bool {
        self.normalization != Normalization::None || !self.languages.is_empty()
    }

    fn uses(&self, normalization: Normalization) -> bool {
        let is_used = |used: &Normalization| match used {
            Normalization::ByLanguage => matches!(
                normalization,
                Normalization::WhisperEnglish | Normalization::Indic | Normalization::KeepMarks
            ),
            used => *used == normalization,
        };
        is_used(&self.normalization) || self.languages.values().any(is_used)
    }

    /// The normaliser of a row by its language, which may be empty.
    pub fn of(&self, lang: &str) -> Normalization {
        if self.languages.is_empty() && self.normalization != Normalization::ByLanguage {
            return self.normalization;
        }
        let primary = primary(lang);
        let own = self.languages.get(lang).or_else(|| self.languages.get(&primary));
        match own.copied().unwrap_or(self.normalization) {
            Normalization::ByLanguage if primary == "en" => Normalization::WhisperEnglish,
            Normalization::ByLanguage if indic::is_indic(&primary) => Normalization::Indic,
            Normalization::ByLanguage => Normalization::KeepMarks,
            normalization => normalization,
        }
    }

    /// The normalised text of a row in language `lang` (empty where it is not known), or the text itself with
    /// [`Normalization::None`]. There may be one space at either end, as in Whisper.
    pub fn apply<'t>(&self, text: &'t str, lang: &str) -> Cow<'t, str> {
        match self.of(lang) {
            Normalization::None => Cow::Borrowed(text),
            Normalization::WhisperEnglish => Cow::Owned(english::normalized(text, english::Rules::Whisper)),
            Normalization::OpenAsrEnglish => Cow::Owned(english::normalized(text, english::Rules::OpenAsr)),
            Normalization::OpenAsrMultilingual => Cow::Owned(multilingual(text)),
            Normalization::Indic => Cow::Owned(indic::normalized(text, &primary(lang), self.ascii_digits)),
            Normalization::WhisperBasic => Cow::Owned(self.basic(text, false)),
            // [`Self::of`] has decided by language.
            Normalization::KeepMarks | Normalization::ByLanguage => Cow::Owned(self.basic(text, true)),
        }
    }

    /// By the rules of Whisper's `BasicTextNormalizer`, or with marks.
    fn basic(&self, text: &str, keep_marks: bool) -> String {
        let lower = text.to_lowercase();
        let text = without_brackets(&lower);
        let text = match (keep_marks, self.remove_diacritics) {
            (true, _) => {
                let composed: String = text.nfkc().collect();
                replaced(&SYMBOLS, &composed, " ").into_owned()
            }
            (_, true) => without_diacritics(&text),
            (_, false) => without_marks(&text),
        };
        let text = text.to_lowercase();
        let text = if self.split_letters {
            text.graphemes(true).collect::<Vec<_>>().join(" ")
        } else {
            text
        };
        squeezed(&text)
    }
}

/// The code of a language without its region and script, in lower case.
fn primary(lang: &str) -> String {
    lang.split(['-', '_']).next().unwrap_or_default().to_ascii_lowercase()
}

/// Without what is in brackets or parentheses.
fn without_brackets(text: &str) -> String {
    let text = replaced(&BRACKETS, text, "");
    replaced(&PARENTHESES, &text, "").into_owned()
}

/// Composed, with a space for each mark, symbol and punctuation.
fn without_marks(text: &str) -> String {
    let composed: String = text.nfkc().collect();
    replaced(&MARKS, &composed, " ").into_owned()
}

/// By the rules of the Leaderboard's `BasicMultilingualTextNormalizer`, which keeps diacritics.
fn multilingual(text: &str) -> String {
    let lower = text.to_lowercase();
    let text = without_marks(&without_brackets(&lower)).to_lowercase();
    // Once there are no marks and symbols, these are the characters of Python's `\w` and `\s`.
    let kept = |c: &char| c.is_alphanumeric() || is_white_space(*c);
    let text: String = text.chars().filter(kept).collect();
    squeezed(&text).trim_matches(' ').to_owned()
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
                    ..Normalizer::default()
                };
                let ours = normalizer.apply(text, "");
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
            normalizer.apply(text, "").into_owned()
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
                ..Normalizer::default()
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

    /// The lines of a golden file: JSON lists of strings.
    fn golden(text: &str) -> Vec<Vec<String>> {
        let line = |line: &str| serde_json::from_str(line).expect("a list of strings");
        text.lines().map(line).collect()
    }

    fn of(normalization: Normalization) -> Normalizer {
        Normalizer {
            normalization,
            ..Normalizer::default()
        }
    }

    /// `english.jsonl` has texts, what OpenAI's `EnglishTextNormalizer` makes of them, and what that of the Open ASR
    /// Leaderboard makes of them (`make.py` beside it tells the versions).
    #[test]
    fn english_is_whispers_and_the_leaderboards() {
        let cases = golden(include_str!("../../../tests/data/golden/normalizers/english.jsonl"));
        assert!(cases.len() > 1500, "{}", cases.len());
        let mut wrong = Vec::new();
        for case in &cases {
            for (normalization, expected) in [
                (Normalization::WhisperEnglish, &case[1]),
                (Normalization::OpenAsrEnglish, &case[2]),
            ] {
                let ours = of(normalization).apply(&case[0], "").into_owned();
                if ours != *expected {
                    wrong.push(format!(
                        "{:?} ({normalization:?}): {ours:?} is not {expected:?}",
                        case[0]
                    ));
                }
            }
        }
        assert!(wrong.is_empty(), "{} differ: {wrong:#?}", wrong.len());
    }

    /// `multilingual.jsonl` has texts and what the `BasicMultilingualTextNormalizer` of the Open ASR Leaderboard makes of them, of the
    /// same version.
    #[test]
    fn other_languages_are_the_leaderboards() {
        let cases = golden(include_str!(
            "../../../tests/data/golden/normalizers/multilingual.jsonl"
        ));
        assert_eq!(cases.len(), 130);
        for case in &cases {
            assert_eq!(
                of(Normalization::OpenAsrMultilingual).apply(&case[0], ""),
                case[1],
                "{case:?}"
            );
        }
        // Other controls than white space are left out, separators of the controls are white space.
        assert_eq!(
            of(Normalization::OpenAsrMultilingual).apply("\u{1c}A\u{7}\u{85}b\u{2060}_\u{e000}٣Ⅳ", ""),
            "a b ٣iv"
        );
    }

    /// `wheel.jsonl` has what the package whisper_normalizer 0.1.15 makes of the English texts in which it differs from OpenAI's:
    /// it has four contractions more. With these written out before, the result is the same.
    #[test]
    fn the_wheel_differs_from_whisper_in_four_contractions() {
        let cases = golden(include_str!("../../../tests/data/golden/normalizers/wheel.jsonl"));
        assert!(!cases.is_empty());
        let pattern = Regex::new(r"\b(kinda|sorta|dunno|cause)\b").unwrap();
        for case in &cases {
            let lower = case[0].to_lowercase();
            let written = pattern.replace_all(&lower, |word: &regex::Captures| match &word[0] {
                "kinda" => "kind of",
                "sorta" => "sort of",
                "dunno" => "do not know",
                _ => "because",
            });
            assert_ne!(written, lower);
            let ours = of(Normalization::WhisperEnglish).apply(&written, "").into_owned();
            assert_eq!(ours, case[1], "{:?}", case[0]);
        }
    }

    /// `indic.jsonl` has languages, texts, what the Indic NLP Library makes of them, and what Vistaar compares.
    #[test]
    fn indic_is_vistaars() {
        let cases = golden(include_str!("../../../tests/data/golden/normalizers/indic.jsonl"));
        assert!(cases.len() > 200);
        let mut wrong = Vec::new();
        for case in &cases {
            let [lang, text, unified, compared] = &case[..] else {
                panic!("{case:?}");
            };
            let ours = match lang.as_str() {
                "ur" => text.clone(),
                lang => indic::unified(text, lang),
            };
            if ours != *unified {
                wrong.push(format!("{lang} {text:?}: {ours:?} is not {unified:?}"));
            }
            let ours = of(Normalization::Indic).apply(text, lang).into_owned();
            if ours != *compared {
                wrong.push(format!("{lang} {text:?}: {ours:?} is not {compared:?}"));
            }
        }
        assert!(wrong.is_empty(), "{} differ: {wrong:#?}", wrong.len());
    }

    /// `wheel_indic.jsonl` has what the classes of whisper_normalizer make of texts without digits. Of those of ASCII they make
    /// words, and at those of other scripts they fail; Vistaar leaves both.
    #[test]
    fn scripts_are_unified_as_in_the_wheel() {
        let cases = golden(include_str!("../../../tests/data/golden/normalizers/wheel_indic.jsonl"));
        assert!(cases.len() > 30);
        for case in &cases {
            assert_eq!(indic::unified(&case[1], &case[0]), case[2], "{case:?}");
        }
    }

    #[test]
    fn digits_of_all_scripts_become_ascii_where_asked_for() {
        let digits = "२०२४ ১২৩ ੧੨੩ ૧૨૩ ୧୨୩ ௧௨௩ ౧౨౩ ೧೨೩ ൧൨൩ ۱۲۳";
        assert_eq!(of(Normalization::Indic).apply(digits, "hi"), digits);
        let ascii = Normalizer {
            ascii_digits: true,
            ..of(Normalization::Indic)
        };
        assert_eq!(ascii.apply(digits, "hi"), format!("2024{}", " 123".repeat(9)));
    }

    #[test]
    fn languages_have_their_normalisers() {
        let mut normalizer = of(Normalization::ByLanguage);
        for (lang, expected) in [
            ("en-GB", Normalization::WhisperEnglish),
            ("hi", Normalization::Indic),
            ("de", Normalization::KeepMarks),
            ("", Normalization::KeepMarks),
        ] {
            assert_eq!(normalizer.of(lang), expected);
        }
        normalizer.languages = BTreeMap::from([
            ("en".to_owned(), Normalization::OpenAsrEnglish),
            ("hi-Latn".to_owned(), Normalization::None),
        ]);
        assert_eq!(normalizer.of("en-GB"), Normalization::OpenAsrEnglish);
        assert_eq!(normalizer.of("hi"), Normalization::Indic);
        assert_eq!(normalizer.apply("Ja, Ha", "hi-Latn"), "Ja, Ha");
        normalizer.ascii_digits = true;
        assert_eq!(normalizer.check(), Ok(()));
        normalizer.normalization = Normalization::None;
        assert_eq!(normalizer.check().unwrap_err().0, "ascii_digits");
        // Without a language, the script decides.
        assert_eq!(of(Normalization::Indic).apply("க\u{bc6}\u{bbe}", ""), "க\u{bca}");
    }

    proptest! {
        #[test]
        fn white_space_is_squeezed_and_letters_stand_alone(text in any::<String>()) {
            let normalizer = Normalizer { normalization: Normalization::WhisperBasic, remove_diacritics: true, split_letters: true, ..Normalizer::default() };
            let once = normalizer.apply(&text, "").into_owned();
            prop_assert!(!once.contains("  "));
            prop_assert!(once.split(' ').all(|word| word.graphemes(true).count() <= 1));
        }

        #[test]
        fn no_text_is_too_strange(
            any in any::<String>(),
            words in "((minus|point|double|and a half|[0-9]{1,3}|hundred|million|decillions|twenty|one|oh|percent|cents?|per|[.$¢%,' ]) ){0,20}",
        ) {
            for text in [any, words] {
                for normalization in [Normalization::WhisperEnglish, Normalization::OpenAsrEnglish, Normalization::Indic] {
                    let normalizer = Normalizer { normalization, ascii_digits: true, ..Normalizer::default() };
                    prop_assert!(!normalizer.apply(&text, "ml").contains("  "));
                }
            }
        }
    }
}
