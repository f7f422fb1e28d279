//! The script of a word.

use unicode_script::{Script, UnicodeScript};

/// The script of the first letter that has one. Han and the kana are one: Japanese mixes them within words. None of numbers and
/// punctuation alone.
pub fn script_of(word: &str) -> Option<Script> {
    let letters = word.chars().filter(|c| c.is_alphabetic());
    letters.map(|c| c.script()).find_map(|script| match script {
        Script::Common | Script::Inherited | Script::Unknown => None,
        Script::Hiragana | Script::Katakana => Some(Script::Han),
        script => Some(script),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_told_apart() {
        for (one, other) in [
            ("Ärger", "straße"),
            ("\"एक\"", "12दो"),
            ("日本", "かな"),
            ("한", "글"),
            ("ﷲ", "سلام"),
            ("Ёж", "я"),
        ] {
            assert_eq!(script_of(one).unwrap(), script_of(other).unwrap(), "{one} {other}");
        }
        let all = [
            "a", "α", "я", "א", "س", "क", "ক", "ਕ", "ક", "କ", "க", "క", "ಕ", "ക", "ก", "日", "한", "ⵜ",
        ];
        for (place, one) in all.iter().enumerate() {
            for other in &all[place + 1..] {
                assert_ne!(script_of(one).unwrap(), script_of(other).unwrap(), "{one} {other}");
            }
        }
        for word in ["", "12", "१२", "।", "...", "۱۲", "😀"] {
            assert_eq!(script_of(word), None, "{word}");
        }
    }
}
