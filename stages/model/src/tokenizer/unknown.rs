//! Characters of a text that have no piece.

use super::model_file::PieceKind;
use super::{SPACE, Tokenizer};

impl Tokenizer {
    /// The characters of a text, normalised, that [`Tokenizer::encode`] replaces by the unknown piece: each as often as it
    /// is there, in the order of the text. Those that become bytes are not among them.
    pub fn unknown_letters(&self, text: &str) -> Vec<char> {
        let normalised = self.normaliser.normalise(text);
        let mut unknown = Vec::new();
        // Nearly all texts end here: a character that is a piece of its own is never unknown.
        if self.each_is_a_piece(&normalised) {
            return unknown;
        }
        self.segment(&normalised, |id, part| {
            if id == self.unknown && !self.becomes_bytes(part) {
                unknown.extend(part.chars().map(|c| if c == SPACE { ' ' } else { c }));
            }
        });
        unknown
    }

    /// Whether each character of a normalised text is a piece of its own, or (with BPE) within a user-defined one.
    fn each_is_a_piece(&self, normalised: &str) -> bool {
        let mut rest = normalised;
        while !rest.is_empty() {
            let (length, user_defined) = self.normaliser.symbol_length(rest);
            let (symbol, after) = rest.split_at(length);
            let is_used = |id: &u32| self.file.pieces[*id as usize].kind != PieceKind::Unused;
            // A unigram model may cut a user-defined piece.
            let known = match user_defined {
                true => self.unigram.is_none(),
                false => self.ids.get(symbol).is_some_and(is_used),
            };
            if !known {
                return false;
            }
            rest = after;
        }
        true
    }

    fn becomes_bytes(&self, part: &str) -> bool {
        let has_piece = |byte: u8| self.reserved.contains_key(&format!("<0x{byte:02X}>"));
        self.file.byte_fallback && part.bytes().all(has_piece)
    }
}
