//! Escapes text of the user's data before it is shown: control characters that a terminal would interpret become
//! visible.
//!
//! Names of files, members of archives, texts and whatever quotes them may hold escape codes that move the cursor, colour
//! what follows or set the title, and characters that turn the direction of writing around. Files and JSON keep them.

use std::borrow::Cow;

/// Whether a terminal interprets the character instead of showing it.
fn is_obeyed(c: char) -> bool {
    c.is_control()
        // Ends of lines and paragraphs; embedding, overriding and isolating of directions.
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The text with every such character as an escape (`\n`, `\u{1b}`): it stays on its line, and in its column.
pub fn escape_line(text: &str) -> Cow<'_, str> {
    shown(text, is_obeyed)
}

/// The same for a message of several lines: line breaks and tabs stay.
pub fn escape_lines(text: &str) -> Cow<'_, str> {
    shown(text, |c| is_obeyed(c) && c != '\n' && c != '\t')
}

fn shown(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_escaped(c) {
            escaped.extend(c.escape_default());
        } else {
            escaped.push(c);
        }
    }
    Cow::Owned(escaped)
}

/// Replaces such characters by question marks, one for each byte, so that byte offsets into the text remain valid.
pub fn mask(text: &str) -> Cow<'_, str> {
    let is_replaced = |c: char| is_obeyed(c) && c != '\n' && c != '\r' && c != '\t';
    if !text.contains(is_replaced) {
        return Cow::Borrowed(text);
    }
    let mut replaced = String::with_capacity(text.len());
    for c in text.chars() {
        if is_replaced(c) {
            replaced.extend(std::iter::repeat_n('?', c.len_utf8()));
        } else {
            replaced.push(c);
        }
    }
    Cow::Owned(replaced)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_a_terminal_obeys_is_shown() {
        assert_eq!(
            escape_line("a\tb\n\u{1b}[2J\u{9b}1m\r\u{7f}"),
            "a\\tb\\n\\u{1b}[2J\\u{9b}1m\\r\\u{7f}"
        );
        assert_eq!(
            escape_line("\u{202e}gnp.exe\u{2066}\u{2028}"),
            "\\u{202e}gnp.exe\\u{2066}\\u{2028}"
        );
        assert_eq!(
            escape_lines("a\tb\nc\u{1b}]0;x\u{7}\r\n"),
            "a\tb\nc\\u{1b}]0;x\\u{7}\\r\n"
        );
        // Words of any script, with the joiners and marks that belong to them, stay as they are.
        for text in ["नमस्ते क\u{200d}ष", "اردو\u{200f}", "ü ß 😀", ""] {
            assert!(matches!(escape_line(text), Cow::Borrowed(same) if same == text));
        }
        assert_eq!(mask("a\u{1b}b\u{9b}c\u{202e}d\n"), "a?b??c???d\n");
    }

    proptest! {
        #[test]
        fn nothing_is_left_that_a_terminal_obeys(text in "\\PC{0,10}[\u{0}-\u{9f}\u{2020}-\u{2070}]{0,20}") {
            let line = escape_line(&text);
            prop_assert!(!line.chars().any(is_obeyed));
            prop_assert_eq!(escape_line(&line), line.clone());
            prop_assert!(!escape_lines(&text).chars().any(|c| is_obeyed(c) && c != '\n' && c != '\t'));
            prop_assert_eq!(mask(&text).len(), text.len());
        }
    }
}
