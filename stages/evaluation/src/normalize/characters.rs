//! Characters and words as Python's `re` sees them, and replacements in texts.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;

static LETTER_OR_NUMBER: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"^[\p{L}\p{N}]$").ok());
static DIGIT: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"^\p{Nd}$").ok());

fn is_of(class: &LazyLock<Option<Regex>>, c: char) -> bool {
    let mut bytes = [0; 4];
    let text = c.encode_utf8(&mut bytes);
    class.as_ref().is_some_and(|class| class.is_match(text))
}

/// `str.isalnum()` of one character: categories L and N. (Rust's `is_alphanumeric` also has vowel signs.)
pub(super) fn is_letter_or_number(c: char) -> bool {
    match c.is_ascii() {
        true => c.is_ascii_alphanumeric(),
        false => is_of(&LETTER_OR_NUMBER, c),
    }
}

/// `\w`.
pub(super) fn is_word(c: char) -> bool {
    c == '_' || is_letter_or_number(c)
}

/// `\d`: category Nd.
pub(super) fn is_digit(c: char) -> bool {
    match c.is_ascii() {
        true => c.is_ascii_digit(),
        false => is_of(&DIGIT, c),
    }
}

/// The ASCII digit of the same value. Digits of a script stand together, ten from zero to nine; where several tens follow each
/// other, the first begins the run.
pub(super) fn ascii_digit(c: char) -> Option<char> {
    if !is_digit(c) {
        return None;
    }
    if c.is_ascii() {
        return Some(c);
    }
    let mut before = 0;
    while let Some(other) = (c as u32).checked_sub(before + 1).and_then(char::from_u32)
        && is_digit(other)
    {
        before += 1;
    }
    char::from_digit(before % 10, 10)
}

/// A place where a pattern of words may end (`\b` after a character of a word).
pub(super) fn ends_word(rest: &str) -> bool {
    !rest.chars().next().is_some_and(is_word)
}

/// A place where a pattern of words may begin (`\b` before a character of a word).
pub(super) fn begins_word(before: &str) -> bool {
    !before.chars().next_back().is_some_and(is_word)
}

/// Replaces what `find` finds in a text, from left to right: `find` is given what is before a place and what follows it, and
/// returns how many bytes are replaced, at least one, and by what.
pub(super) fn replaced<'t>(
    text: &'t str,
    first: &[char],
    mut find: impl FnMut(&str, &str) -> Option<(usize, Cow<'static, str>)>,
) -> Cow<'t, str> {
    let mut new = String::new();
    // Up to where `new` is made.
    let mut done = 0;
    let mut from = 0;
    while let Some(place) = text[from..].find(first).map(|place| from + place) {
        let (before, rest) = text.split_at(place);
        match find(before, rest) {
            Some((length, by)) => {
                new.push_str(&text[done..place]);
                new.push_str(&by);
                done = place + length;
                from = done;
            }
            None => from = place + rest.chars().next().map_or(1, char::len_utf8),
        }
    }
    if done == 0 {
        return Cow::Borrowed(text);
    }
    new.push_str(&text[done..]);
    Cow::Owned(new)
}
