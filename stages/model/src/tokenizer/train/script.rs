//! Which strings of characters may be a piece.

use unicode_script::{Script, UnicodeScript};

use super::super::SPACE;
use super::words::UNKNOWN;

/// Longest piece, in characters.
pub(super) const LONGEST: usize = 16;

/// A piece has at most [`LONGEST`] characters of one script, and a space in the first place only. Digits, punctuation and
/// symbols are a script of their own; combining marks go with what is before them; kana count as Chinese characters.
pub(super) fn may_be_piece(characters: impl IntoIterator<Item = char>) -> bool {
    let mut before: Option<Script> = None;
    let mut length = 0;
    for character in characters {
        length += 1;
        match character {
            UNKNOWN | '\0' | '\t' | ' ' => return false,
            SPACE if length > 1 => return false,
            SPACE => continue,
            _ => {}
        }
        let script = match character.script() {
            _ if character == '\u{30fc}' => Some(Script::Han),
            Script::Hiragana | Script::Katakana => Some(Script::Han),
            Script::Inherited => before,
            Script::Unknown => Some(Script::Common),
            script => Some(script),
        };
        if before.is_some() && script.is_some() && before != script {
            return false;
        }
        before = script;
    }
    length > 0 && length <= LONGEST
}
