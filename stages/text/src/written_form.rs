//! Unicode forms of a text, where the same words can be encoded in several ways.

use std::borrow::Cow;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// `text` in Unicode's normal form C: letters with their marks composed where there is a composed letter.
pub fn nfc(text: &str) -> Cow<'_, str> {
    if text.is_ascii() || is_nfc_quick(text.chars()) == IsNormalized::Yes {
        Cow::Borrowed(text)
    } else {
        Cow::Owned(text.nfc().collect())
    }
}

/// `text` without characters that have no width: spaces, joiners and non-joiners, soft hyphens and byte order marks (those that `norm_text` leaves out). Two words
/// that only such a character separates become one. Joiners are part of the spelling of some Indic words.
pub fn strip_zero_width(text: &str) -> Cow<'_, str> {
    let invisible = |c: char| matches!(c, '\u{200b}'..='\u{200d}' | '\u{2060}' | '\u{feff}' | '\u{ad}');
    if text.is_ascii() || !text.contains(invisible) {
        Cow::Borrowed(text)
    } else {
        Cow::Owned(text.chars().filter(|&c| !invisible(c)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_composed_and_invisible_characters_go() {
        assert_eq!(nfc("cafe\u{301}"), "caf\u{e9}");
        // Composition is excluded for the letters with nukta: they are written apart.
        assert_eq!(nfc("\u{958}"), "\u{915}\u{93c}");
        assert_eq!(nfc("plain"), "plain");
        assert_eq!(strip_zero_width("\u{feff}क\u{94d}\u{200d}ष\u{200b}"), "क\u{94d}ष");
        assert_eq!(strip_zero_width("a\u{ad}b"), "ab");
    }
}
