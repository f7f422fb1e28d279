//! Normalises transcriptions: the clean text on which a model is trained, and the key by which two texts count as the
//! same words.
//!
//! White space is Python's (`str.isspace`): Unicode `White_Space` plus U+001C to U+001F, for compatibility with
//! existing manifests.

use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

use regex::Regex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use unicode_normalization::char::{canonical_combining_class, compose};
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// Tags that [`TextRules`] deletes by default: `[...]` and `<...>` within one line, shortest first.
pub const DEFAULT_TAGS: &str = r"\[.*?\]|<.*?>";

/// Characters that [`TextRules`] deletes by default.
pub const DEFAULT_PUNCTUATION: &str = "।॥.,!?;:\"'\\-—()…%/+=$*@#&_^>|<`~。";

/// How `clean_text` cleans.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TextSettings {
    /// Pattern of the tags to delete before anything else, as a regular expression.
    pub tags: String,
    /// Characters to delete; each counts for itself, none represents a range or a class.
    pub punctuation: String,
}

impl Default for TextSettings {
    fn default() -> Self {
        TextSettings {
            tags: DEFAULT_TAGS.into(),
            punctuation: DEFAULT_PUNCTUATION.into(),
        }
    }
}

/// [`TextSettings`], compiled.
#[derive(Clone, Debug)]
pub struct TextRules {
    /// `None` for the default pattern, which has a faster implementation.
    tags: Option<Regex>,
    /// What cleaning does with each code point below [`TABLE`].
    table: Arc<[Action]>,
    /// Deleted characters beyond the table, sorted.
    beyond: Vec<char>,
    /// Whether a bracket that opens no tag is deleted as punctuation.
    deletes_square: bool,
    deletes_angle: bool,
}

/// Code points that tables cover: every script of the bundled language table, and general punctuation.
const TABLE: usize = 0x3100;

/// What cleaning does with a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Keep,
    Delete,
    Space,
    /// `[` or `<`, where tags are those of the default pattern.
    Open,
}

impl Default for TextRules {
    fn default() -> Self {
        TextRules::of(None, DEFAULT_PUNCTUATION)
    }
}

impl TextRules {
    /// # Errors
    /// When the pattern of the tags is not a regular expression.
    pub fn new(settings: &TextSettings) -> Result<Self, regex::Error> {
        let tags = if settings.tags == DEFAULT_TAGS {
            None
        } else {
            Some(Regex::new(&settings.tags)?)
        };
        Ok(TextRules::of(tags, &settings.punctuation))
    }

    fn of(tags: Option<Regex>, punctuation: &str) -> Self {
        let mut table = vec![Action::Keep; TABLE];
        let mut beyond = Vec::new();
        for c in punctuation.chars() {
            match table.get_mut(c as usize) {
                Some(action) => *action = Action::Delete,
                None => beyond.push(c),
            }
        }
        beyond.sort_unstable();
        beyond.dedup();
        for (code, action) in (0u32..).zip(&mut table) {
            if char::from_u32(code).is_some_and(is_space) {
                *action = Action::Space;
            }
        }
        if tags.is_none() {
            for open in ['[', '<'] {
                table[open as usize] = Action::Open;
            }
        }
        TextRules {
            tags,
            table: table.into(),
            beyond,
            deletes_square: punctuation.contains('['),
            deletes_angle: punctuation.contains('<'),
        }
    }

    fn action(&self, c: char) -> Action {
        match self.table.get(c as usize) {
            Some(action) => *action,
            None if self.beyond.binary_search(&c).is_ok() => Action::Delete,
            None if is_space(c) => Action::Space,
            None => Action::Keep,
        }
    }

    /// Deletes tags, then punctuation, and makes every run of white space one space, none at either end.
    /// Neither case nor normalisation form changes.
    pub fn clean(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        self.clean_into(text, &mut out);
        out
    }

    /// [`TextRules::clean`], added to the end of `out`.
    pub fn clean_into(&self, text: &str, out: &mut String) {
        let text = match &self.tags {
            Some(tags) => tags.replace_all(text, ""),
            None => Cow::Borrowed(text),
        };
        let text: &str = &text;
        let start = out.len();
        let mut tags = OneLineTags {
            text,
            no_square_before: 0,
            no_angle_before: 0,
        };
        let mut pending = false;
        // Characters that stay are copied in runs: from `run` to the current character.
        let mut run = 0;
        let mut chars = text.chars();
        while let Some(c) = chars.next() {
            let mut action = self.action(c);
            if action == Action::Keep {
                continue;
            }
            let mut next = text.len() - chars.as_str().len();
            let position = next - c.len_utf8();
            // A single plain space between kept characters is unchanged, so most texts are one run.
            if c == ' '
                && action == Action::Space
                && position > run
                && chars
                    .clone()
                    .next()
                    .is_some_and(|after| self.action(after) == Action::Keep)
            {
                continue;
            }
            if action == Action::Open {
                // A bracket that opens no tag is punctuation like any other, or stays.
                action = match tags.after_tag(position, c) {
                    Some(after) => {
                        next = after;
                        chars = text[after..].chars();
                        Action::Delete
                    }
                    None if c == '<' && self.deletes_angle => Action::Delete,
                    None if c == '[' && self.deletes_square => Action::Delete,
                    None => Action::Keep,
                };
            }
            if action != Action::Keep {
                flush(out, start, &mut pending, &text[run..position]);
                run = next;
                pending |= action == Action::Space;
            }
        }
        flush(out, start, &mut pending, &text[run..]);
    }
}

/// Adds characters that stay, with one space before them where white space came since the last.
fn flush(out: &mut String, start: usize, pending: &mut bool, run: &str) {
    if !run.is_empty() {
        if std::mem::take(pending) && out.len() > start {
            out.push(' ');
        }
        out.push_str(run);
    }
}

/// Finds where a tag `[...]` or `<...>` ends, and remembers where none does, so that a text full of open
/// brackets is still read in linear time.
struct OneLineTags<'a> {
    text: &'a str,
    no_square_before: usize,
    no_angle_before: usize,
}

impl OneLineTags<'_> {
    /// The position after the tag that begins with `open` at `position`, if one does.
    fn after_tag(&mut self, position: usize, open: char) -> Option<usize> {
        let (close, none_before) = match open {
            '[' => (b']', &mut self.no_square_before),
            '<' => (b'>', &mut self.no_angle_before),
            _ => return None,
        };
        if position < *none_before {
            return None;
        }
        let rest = &self.text.as_bytes()[position + 1..];
        match rest.iter().position(|&b| b == close || b == b'\n') {
            Some(found) if rest[found] == close => Some(position + 1 + found + 1),
            Some(newline) => {
                *none_before = position + 1 + newline;
                None
            }
            None => {
                *none_before = self.text.len();
                None
            }
        }
    }
}

/// Cleans with the default rules; see [`TextRules::clean`].
pub fn clean_text(text: &str) -> String {
    thread_local! {
        static RULES: TextRules = TextRules::default();
    }
    RULES.with(|rules| rules.clean(text))
}

/// The key under which two clean texts count as the same words, for deduplication and split; never written
/// into a manifest. Zero-width characters go, then NFC, lower case, single spaces.
pub fn norm_text(clean: &str) -> String {
    let mut out = String::with_capacity(clean.len());
    norm_into(clean, &mut out);
    out
}

/// [`norm_text`], added to the end of `out`.
pub fn norm_into(clean: &str, out: &mut String) {
    let start = out.len();
    if !norm_plain(clean, out) {
        out.truncate(start);
        norm_any(clean, out);
    }
}

/// How a character is normalised without regard to its neighbours, apart from the order of marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plain {
    step: Step,
    /// Canonical combining class: marks in a row must not descend.
    class: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Keep,
    Drop,
    Space,
    /// ASCII capital.
    Lower,
    /// Stays unless it composes with the character before it, as vowel signs of Bengali or Tamil may.
    Mark,
    /// Composes, decomposes, or has another lower case: handled by the general implementation.
    General,
}

static PLAIN: LazyLock<Vec<Plain>> = LazyLock::new(|| {
    let plain = |code: u32| {
        let Some(c) = char::from_u32(code) else {
            return Plain {
                step: Step::General,
                class: 0,
            };
        };
        let step = if is_zero_width(c) {
            Step::Drop
        } else if is_space(c) {
            Step::Space
        } else if c.is_ascii_uppercase() {
            Step::Lower
        } else if !c.to_lowercase().eq(std::iter::once(c)) {
            Step::General
        } else {
            match is_nfc_quick(std::iter::once(c)) {
                IsNormalized::Yes => Step::Keep,
                IsNormalized::Maybe => Step::Mark,
                IsNormalized::No => Step::General,
            }
        };
        Plain {
            step,
            class: canonical_combining_class(c),
        }
    };
    (0..TABLE as u32).map(plain).collect()
});

/// Normalises a text of plain characters; false, with part of the text added, if it is none.
fn norm_plain(clean: &str, out: &mut String) -> bool {
    let table: &[Plain] = &PLAIN;
    let start = out.len();
    let (mut pending, mut class) = (false, 0);
    let mut run = 0;
    // The last character that normalisation sees.
    let mut before = None;
    let mut chars = clean.chars();
    while let Some(c) = chars.next() {
        let Some(plain) = table.get(c as usize) else {
            return false;
        };
        // A mark of a lower class than the one before it would move.
        if plain.class != 0 && plain.class < class {
            return false;
        }
        if plain.step == Step::Mark {
            // After another mark, it could still compose with the base character; a vowel sign (class 0) cannot.
            let apart = before.is_none_or(|before| match (class, plain.class) {
                (0, _) => compose(before, c).is_none(),
                (_, own) => own == 0,
            });
            if !apart {
                return false;
            }
        }
        if matches!(plain.step, Step::Keep | Step::Mark) {
            class = plain.class;
            before = Some(c);
            continue;
        }
        let position = clean.len() - chars.as_str().len() - c.len_utf8();
        // A single plain space between kept characters stays: clean texts are mostly one run.
        let stays = |after: char| {
            let plain = table.get(after as usize);
            plain.is_some_and(|plain| matches!(plain.step, Step::Keep | Step::Mark))
        };
        if c == ' ' && position > run && chars.clone().next().is_some_and(stays) {
            class = 0;
            before = Some(c);
            continue;
        }
        flush(out, start, &mut pending, &clean[run..position]);
        run = position + c.len_utf8();
        match plain.step {
            Step::General => return false,
            // Marks before and after it become adjacent.
            Step::Drop => {}
            Step::Space => {
                pending = true;
                class = 0;
                before = Some(c);
            }
            Step::Lower => {
                if std::mem::take(&mut pending) && out.len() > start {
                    out.push(' ');
                }
                out.push(c.to_ascii_lowercase());
                class = 0;
                before = Some(c);
            }
            Step::Keep | Step::Mark => {}
        }
    }
    flush(out, start, &mut pending, &clean[run..]);
    true
}

/// The rules step by step, for any text.
fn norm_any(clean: &str, out: &mut String) {
    let composed: String = clean.chars().filter(|&c| !is_zero_width(c)).nfc().collect();
    let lower = composed.to_lowercase();
    let start = out.len();
    let mut pending = false;
    for word in lower.split(is_space) {
        flush(out, start, &mut pending, word);
        pending = true;
    }
}

/// Whether nothing but white space is in `text`.
pub fn is_blank(text: &str) -> bool {
    text.chars().all(is_space)
}

/// `text` without white space at its ends, as Python's `str.strip()`.
pub fn python_strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// Adds the text on which a model is trained to the end of `out`: the language tag, a space, the clean text.
pub fn text_into(clean: &str, lang: &str, out: &mut String) {
    for piece in ["<|", lang, "|> ", clean] {
        out.push_str(piece);
    }
}

fn is_space(c: char) -> bool {
    matches!(c, '\u{1c}'..='\u{1f}') || c.is_whitespace()
}

fn is_zero_width(c: char) -> bool {
    matches!(
        c,
        '\u{200b}' | '\u{200c}' | '\u{200d}' | '\u{2060}' | '\u{feff}' | '\u{ad}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SPACE: &str =
        r"[\t-\r\x1c-\x1f \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]+";

    static BY_PATTERN: LazyLock<TextRules> =
        LazyLock::new(|| TextRules::of(Some(Regex::new(DEFAULT_TAGS).unwrap()), DEFAULT_PUNCTUATION));
    static SPACES: LazyLock<Regex> = LazyLock::new(|| Regex::new(SPACE).unwrap());

    /// So many cases, or as many as `FLOW_TEXT_CASES` says: it was run with a million.
    fn cases(usual: u32) -> ProptestConfig {
        let asked = std::env::var("FLOW_TEXT_CASES").ok();
        ProptestConfig::with_cases(asked.map_or(usual, |asked| asked.parse().unwrap()))
    }

    /// The rules as three substitutions, word for word.
    fn slow_clean(text: &str) -> String {
        static TAGS: LazyLock<Regex> = LazyLock::new(|| Regex::new(DEFAULT_TAGS).unwrap());
        static PUNCTUATION: LazyLock<Regex> =
            LazyLock::new(|| Regex::new("[।॥.,!?;:\"'\\\\\\-—()…%/+=$*@#\\&_^>|<`\\~。]+").unwrap());
        let text = TAGS.replace_all(text, "");
        let text = PUNCTUATION.replace_all(&text, "");
        let text = SPACES.replace_all(&text, " ");
        text.trim_matches(' ').to_string()
    }

    fn slow_norm(clean: &str) -> String {
        let visible: String = clean
            .chars()
            .filter(|c| ![0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF, 0xAD].contains(&u32::from(*c)))
            .collect();
        let lower = visible.nfc().collect::<String>().to_lowercase();
        SPACES.replace_all(&lower, " ").trim_matches(' ').to_string()
    }

    /// Texts in which everything that matters is frequent.
    fn texts() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            Just("[".to_string()),
            Just("]".to_string()),
            Just("<".to_string()),
            Just(">".to_string()),
            Just("\n".to_string()),
            Just(" ".to_string()),
            Just("\u{1c}".to_string()),
            Just("\u{a0}".to_string()),
            Just("\u{85}".to_string()),
            Just("\u{200b}".to_string()),
            Just("\u{95c}".to_string()),
            Just("।".to_string()),
            Just("Σ".to_string()),
            Just("İ".to_string()),
            Just("e\u{301}".to_string()),
            DEFAULT_PUNCTUATION.chars().prop_map_into_strings(),
            any::<char>().prop_map(|c| c.to_string()),
            Just("\u{94d}".to_string()),
            Just("\u{93c}".to_string()),
            Just("\u{9be}".to_string()),
            Just("\u{9c7}".to_string()),
            "[a-zA-Z]{1,4}",
            "[क-ह]{1,3}",
            "[অ-হ]{1,3}",
        ];
        prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
    }

    trait IntoStrings {
        fn prop_map_into_strings(self) -> BoxedStrategy<String>;
    }

    impl IntoStrings for std::str::Chars<'static> {
        fn prop_map_into_strings(self) -> BoxedStrategy<String> {
            prop::sample::select(self.map(String::from).collect::<Vec<_>>()).boxed()
        }
    }

    proptest! {
        #![proptest_config(cases(2000))]

        #[test]
        fn cleans_as_three_substitutions_do(text in texts()) {
            let clean = clean_text(&text);
            prop_assert_eq!(&clean, &slow_clean(&text));
            prop_assert_eq!(&clean, &BY_PATTERN.clean(&text));
            prop_assert_eq!(norm_text(&clean), slow_norm(&clean));
            prop_assert_eq!(is_blank(&text), python_strip(&text).is_empty());
        }
    }

    /// Characters that may compose with what is before them, what they compose with, marks that come between,
    /// and what is dropped or ends a word.
    fn composing() -> Vec<char> {
        let marks = |c: &char| is_nfc_quick(std::iter::once(*c)) != IsNormalized::Yes;
        let marks: Vec<char> = (0..0x3100).filter_map(char::from_u32).filter(marks).collect();
        let parts = marks.iter().flat_map(|c| c.nfd());
        let between = "aEe\u{93c}\u{94d}\u{9bc}\u{9cd}\u{323}\u{302}\u{200d}\u{ad} \u{1100}\u{1161}\u{11a8}\u{ac00}";
        let mut all: Vec<char> = parts.chain(marks.iter().copied()).chain(between.chars()).collect();
        all.extend("\u{9c7}\u{9be}\u{9d7}\u{b47}\u{b3e}\u{bc6}\u{bbe}\u{bd7}\u{cc6}\u{cc2}\u{d46}\u{d3e}".chars());
        all.sort_unstable();
        all.dedup();
        all
    }

    proptest! {
        #![proptest_config(cases(20_000))]

        #[test]
        fn marks_compose_as_in_the_general_way(
            rare in prop::collection::vec(prop::sample::select(composing()), 0..6),
            frequent in prop::collection::vec(prop::sample::select("aE ব\u{9be}\u{9c7}\u{9bc}க\u{bc6}\u{bbe}\u{300}\u{323}\u{200d}".chars().collect::<Vec<_>>()), 0..8),
            mixed in any::<u64>(),
        ) {
            let (mut rare, mut frequent) = (rare.into_iter(), frequent.into_iter());
            let mut text = String::new();
            for place in 0.. {
                let next = if mixed >> (place % 64) & 1 == 0 { rare.next().or_else(|| frequent.next()) }
                    else { frequent.next().or_else(|| rare.next()) };
                let Some(c) = next else { break };
                text.push(c);
            }
            prop_assert_eq!(norm_text(&text), slow_norm(&text));
        }
    }

    #[test]
    fn cleans_the_known_hard_cases() {
        for (text, clean) in [
            ("[a [b] c] two three", "c] two three"),
            ("two < three and four > one", "two one"),
            ("twenty-one, ten;nine", "twentyone tennine"),
            ("[lau\ngh] nine ten", "[lau gh] nine ten"),
            ("five\u{1c}six\u{1f}seven", "five six seven"),
            ("“two” – three’s {four}", "“two” – three’s {four}"),
            ("\u{feff}one two", "\u{feff}one two"),
            ("", ""),
        ] {
            assert_eq!(clean_text(text), clean, "{text:?}");
        }
        assert_eq!(norm_text("\u{95c}"), "\u{921}\u{93c}", "excluded from composition");
        assert_eq!(norm_text("ΟΔΟΣ"), "οδος", "final sigma");
        let mut plain = String::new();
        assert!(
            norm_plain("বাংলা தமிழா", &mut plain),
            "vowel signs that compose with nothing are plain"
        );
        assert!(!norm_plain("\u{9c7}\u{9be}", &mut plain), "these become one sign");
    }

    #[test]
    fn open_brackets_cost_linear_time() {
        let hostile = "[".repeat(2_000_000);
        assert_eq!(clean_text(&hostile).len(), hostile.len());
    }

    #[test]
    fn settings_change_tags_and_punctuation() {
        let rules = TextRules::new(&TextSettings {
            tags: r"\{[a-z]+\}".into(),
            punctuation: "-।".into(),
        })
        .unwrap();
        assert_eq!(rules.clean("{noise} a-b। [c]."), "ab [c].");
        assert!(
            TextRules::new(&TextSettings {
                tags: "[".into(),
                ..TextSettings::default()
            })
            .is_err()
        );
    }
}
