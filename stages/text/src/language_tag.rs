//! Codes of languages, and the tags with them that texts begin with: `<|hi|> ...`.
//!
//! The rule, for all who read texts:
//!
//! - A *tag* is a name between `<|` and `|>`, without white space, `<`, `>` and `|`. It belongs to a text that begins with it,
//!   white space aside.
//! - The tag of a text names its language where it is made of ASCII letters, digits, `-` and `_` alone ([`tag_of`]). Whether
//!   there is such a language is another question.
//! - A code has the form of a language's ([`is_language`]) as BCP 47 has it: two or three letters, perhaps with script, region
//!   and variant (`hi`, `pt-BR`, `es-419`, `zh-Hant-TW`).
//! - Two codes name the same language where they are equal but for scripts, regions, variants, the case of letters, and
//!   three letters in place of two ([`same_language`]): a row of `pt-BR` or `por` may have the tag `<|pt|>`, and the other
//!   way round.

use crate::language_codes::{three_letters, two_letters};

/// What BCP 47 calls a language that is not known.
pub const UNDETERMINED: &str = "und";

/// Longest code, as RFC 5646 expects it.
const LONGEST_CODE: usize = 35;

/// The name of the tag that a text begins with, and what follows it: `<|hi|> one two` gives (`hi`, `one two`). A text without
/// one comes back as it is.
pub fn split_tag(text: &str) -> (Option<&str>, &str) {
    let trimmed = text.trim_start_matches(is_white_space);
    let parts = trimmed.strip_prefix("<|").and_then(|rest| rest.split_once("|>"));
    match parts {
        Some((tag, rest)) if !tag.contains(['<', '>', '|']) && !tag.contains(is_white_space) => {
            (Some(tag), rest.trim_start_matches(is_white_space))
        }
        _ => (None, text),
    }
}

/// The code in the tag that a text begins with; it may be that of no language.
pub fn tag_of(text: &str) -> Option<&str> {
    split_tag(text).0.filter(|tag| is_code(tag))
}

/// A text without the tag of a language that it may begin with, and without white space around it.
pub fn untagged(text: &str) -> &str {
    let behind = tag_of(text).map_or(text, |_| split_tag(text).1);
    behind.trim()
}

/// The next tag with a code, wherever it is in a text: what is before it, the code, and what is after it.
pub fn next_tag(text: &str) -> Option<(&str, &str, &str)> {
    let mut from = 0;
    while let Some(found) = text[from..].find("<|") {
        let begin = from + found;
        let inner = &text[begin + 2..];
        let end = inner.bytes().take_while(|byte| is_code_byte(*byte)).count();
        if is_code(&inner[..end]) && inner[end..].starts_with("|>") {
            return Some((&text[..begin], &inner[..end], &inner[end + 2..]));
        }
        from = begin + 2;
    }
    None
}

/// The one name of a language, as rows have it by default: `EN` and `en-US` are `en`. What is not a code stays.
pub fn usual_language(code: &str) -> String {
    match language_and_region(code) {
        Some((language, _)) => language.to_ascii_lowercase(),
        None if is_language(code) => in_usual_case(code),
        None => code.to_owned(),
    }
}

/// A tag in the case that BCP 47 recommends, so that a language has one name: `en`, `zh-Hant-TW`, `sl-rozaj`. Its separators
/// stay.
pub fn in_usual_case(tag: &str) -> String {
    let mut written = String::with_capacity(tag.len());
    let mut after_singleton = false;
    for part in tag.split_inclusive(['-', '_']) {
        let length = part.trim_end_matches(['-', '_']).len();
        let mut cased = part.to_ascii_lowercase();
        match length {
            _ if written.is_empty() || after_singleton => {}
            2 => cased.make_ascii_uppercase(),
            4 if part.starts_with(|letter: char| letter.is_ascii_alphabetic()) => cased[..1].make_ascii_uppercase(),
            _ => {}
        }
        after_singleton |= length == 1;
        written.push_str(&cased);
    }
    written
}

/// A language of two or three letters and a region as BCP 47 has it, two letters or three digits: `en-US`, `es_419`. Tags
/// with more or other parts, such as `zh-Hant-TW` and `sr-Latn`, are none.
pub fn language_and_region(tag: &str) -> Option<(&str, &str)> {
    let (language, region) = tag.split_once(['-', '_'])?;
    let letters = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphabetic());
    let is_region = match region.len() {
        2 => letters(region),
        3 => region.bytes().all(|byte| byte.is_ascii_digit()),
        _ => false,
    };
    ((2..=3).contains(&language.len()) && letters(language) && is_region).then_some((language, region))
}

/// Whether a code has the form of a language's of ISO 639 or BCP 47: two or three letters, perhaps followed by subtags for
/// extended languages, scripts, regions and variants (`hi`, `zh-Hant-TW`, `cmn_hans_cn`, `rm-sursilv`).
pub fn is_language(code: &str) -> bool {
    // Longer than any code that is in use.
    const MOST_SUBTAGS: usize = 5;
    let letters = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphabetic());
    let alphanumeric = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let mut parts = code.split(['-', '_']);
    let is_primary = parts
        .next()
        .is_some_and(|language| (2..=3).contains(&language.len()) && letters(language));
    let mut subtags = parts.clone();
    is_primary
        && parts.count() <= MOST_SUBTAGS
        && subtags.all(|subtag| match subtag.len() {
            2 => letters(subtag),
            3 => letters(subtag) || subtag.bytes().all(|byte| byte.is_ascii_digit()),
            4 => letters(subtag) || (subtag.as_bytes()[0].is_ascii_digit() && alphanumeric(subtag)),
            5..=8 => alphanumeric(subtag),
            _ => false,
        })
}

/// The language alone: `pt` of `pt-BR`.
pub fn primary(code: &str) -> &str {
    code.split(['-', '_']).next().unwrap_or_default()
}

/// The language alone, by its code of two letters where it has one: `en` of `eng` and `en-US`, `mai` of `mai`.
pub fn shortest(code: &str) -> &str {
    let primary = primary(code);
    two_letters(primary).unwrap_or(primary)
}

/// The codes by which a model may have a language: as it is, without script, region and variant, and with two or three
/// letters.
pub fn codes_of(code: &str) -> Vec<&str> {
    let short = shortest(code);
    let mut codes = vec![code, primary(code), short];
    for three in three_letters(short) {
        codes.push(three);
    }
    codes
}

/// Whether two codes name the same language, whatever script, region and variant they add.
pub fn same_language(one: &str, other: &str) -> bool {
    let equal = !one.is_empty() && one.eq_ignore_ascii_case(other);
    equal || (is_language(one) && is_language(other) && shortest(one).eq_ignore_ascii_case(shortest(other)))
}

fn is_code(tag: &str) -> bool {
    (1..=LONGEST_CODE).contains(&tag.len()) && tag.bytes().all(is_code_byte)
}

fn is_code_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')
}

/// As Python's `str.split()` sees it: Unicode white space and U+001C to U+001F.
fn is_white_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_begins_with_one_tag_or_none() {
        for (text, tag, code, rest) in [
            ("<|hi|> one two", Some("hi"), Some("hi"), "one two"),
            ("\u{a0}\u{1c}<|pt-BR|>um ", Some("pt-BR"), Some("pt-BR"), "um "),
            ("<|null|> x", Some("null"), Some("null"), "x"),
            // Names that are no codes.
            ("<|0.00|> x", Some("0.00"), None, "x"),
            ("<|हि|> x", Some("हि"), None, "x"),
            ("<||> x", Some(""), None, "x"),
            // No tags.
            (" <|a b|> c", None, None, " <|a b|> c"),
            ("<|hi", None, None, "<|hi"),
            ("<|a<|b|> c", None, None, "<|a<|b|> c"),
            ("x <|hi|>", None, None, "x <|hi|>"),
            ("", None, None, ""),
        ] {
            assert_eq!((split_tag(text), tag_of(text)), ((tag, rest), code), "{text:?}");
        }
        assert_eq!(untagged(" <|hi|> one "), "one");
        assert_eq!(untagged(" <|0.00|> one "), "<|0.00|> one");
        let long = "x".repeat(LONGEST_CODE + 1);
        assert_eq!(tag_of(&format!("<|{long}|>")), None);
        assert_eq!(tag_of(&format!("<|{}|>", &long[1..])), Some(&long[1..]));
    }

    #[test]
    fn tags_are_found_anywhere() {
        assert_eq!(next_tag("a <|x y|><|hi|>b<|en|>"), Some(("a <|x y|>", "hi", "b<|en|>")));
        assert_eq!(next_tag("<|<|ta|>"), Some(("<|", "ta", "")));
        for text in ["", "<|", "<|hi", "<||>", "<|हि|>", "<|a|b"] {
            assert_eq!(next_tag(text), None, "{text:?}");
        }
    }

    #[test]
    fn codes_have_the_form_of_languages_or_not() {
        for code in [
            "hi",
            "hin",
            "en-US",
            "en_us",
            "es-419",
            "zh-Hant",
            "zh-Hant-TW",
            "cmn_hans_cn",
            "rm-sursilv",
            "ca-valencia",
            "sl-rozaj-1994",
            "nan-tw",
            "HI",
            UNDETERMINED,
        ] {
            assert!(is_language(code), "{code}");
        }
        for code in [
            "",
            "h",
            "hindi",
            "Klingon",
            "null",
            "nospeech",
            "h1",
            "en-",
            "-en",
            "en--US",
            "en US",
            " hi",
            "हि",
            "en-u",
            "en-toolongatag",
            "/data/a.wav",
            "one two",
            "1.5",
            "aa-bb-cc-dd-ee-ff-gg",
        ] {
            assert!(!is_language(code), "{code}");
        }
    }

    #[test]
    fn a_language_has_several_codes() {
        for (code, codes) in [
            ("eng-US", &["eng-US", "eng", "en", "eng"][..]),
            ("de", &["de", "de", "de", "deu", "ger"]),
            ("mai", &["mai", "mai", "mai"]),
            ("", &["", "", ""]),
        ] {
            assert_eq!(codes_of(code), codes);
        }
    }

    #[test]
    fn regions_and_scripts_make_no_other_language() {
        for (one, other, same) in [
            ("pt", "pt-BR", true),
            ("pt_PT", "pt-BR", true),
            ("PT", "pt", true),
            ("zh-Hant-TW", "zh", true),
            ("noise", "noise", true),
            ("pt", "es", false),
            ("noise-1", "noise", false),
            ("por", "pt", true),
            ("ENG-us", "en", true),
            ("ger", "deu", true),
            ("mai", "mar", false),
            ("eng", "es", false),
            ("", "", false),
        ] {
            assert_eq!(
                (same_language(one, other), same_language(other, one)),
                (same, same),
                "{one} {other}"
            );
        }
    }
}
