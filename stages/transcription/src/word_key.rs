//! What words are compared by, where spelling and marks should not matter.

/// The letters and digits of a word, in lower case.
pub fn word_key(word: &str) -> String {
    let letters = word.chars().flat_map(char::to_lowercase);
    // Vowel signs of Indic scripts are no letters by themselves.
    letters
        .filter(|c| c.is_alphanumeric() || !c.is_ascii() && !is_mark(*c))
        .collect()
}

/// Whether a character separates, closes or is invisible, as far as words have such.
pub(crate) fn is_mark(c: char) -> bool {
    c.is_whitespace()
        || matches!(c, '\u{2000}'..='\u{206f}' | '\u{3000}'..='\u{303f}' | '\u{ff00}'..='\u{ff0f}' | '\u{ff1a}'..='\u{ff1f}')
        || "¡¿«»·।॥؟،؛۔・".contains(c)
}

#[cfg(test)]
mod tests {
    use super::word_key;

    #[test]
    fn marks_and_case_do_not_matter_and_vowel_signs_do() {
        for (word, key) in [
            ("Way,", "way"),
            ("«Ça»", "ça"),
            ("it's", "its"),
            ("गया।", "गया"),
            ("क्\u{200d}ष", "क्ष"),
            ("1,5", "15"),
            ("—", ""),
            ("。", ""),
        ] {
            assert_eq!(word_key(word), key, "{word}");
        }
        assert_ne!(word_key("की"), word_key("कि"));
    }
}
