//! Unigram segmentation: of all ways to cut a text into pieces, the one whose scores have the greatest sum.

use super::model_file::{ModelFile, PieceKind};
use super::piece_trie::PieceTrie;

/// How much worse than the worst piece an unknown character is.
const UNKNOWN_PENALTY: f32 = 10.0;

/// How much worse than a certain piece one of the user's is: so it is taken wherever it stands.
const USER_DEFINED_PENALTY: f32 = 0.1;

#[derive(Debug, Clone)]
pub(super) struct Unigram {
    trie: PieceTrie,
    unknown: u32,
    unknown_score: f32,
    /// The best score of a normal piece, but at least the smallest positive number: so has the library it, and a
    /// model's scores are logarithms of probabilities, all below it.
    best_score: f32,
}

/// The best segmentation up to a position in the text.
#[derive(Clone, Copy)]
struct Way {
    score: f32,
    /// Where its last piece begins; `usize::MAX` while there is no way.
    start: usize,
    id: u32,
}

impl Unigram {
    pub fn new(file: &ModelFile, unknown: u32) -> Self {
        let texts = file.pieces.iter().enumerate().filter(|(_, piece)| {
            matches!(
                piece.kind,
                PieceKind::Normal | PieceKind::UserDefined | PieceKind::Unused
            )
        });
        let normal = || {
            let normal = file.pieces.iter().filter(|piece| piece.kind == PieceKind::Normal);
            normal.map(|piece| piece.score)
        };
        Unigram {
            trie: PieceTrie::new(texts.map(|(id, piece)| (piece.text.as_str(), id as u32))),
            unknown,
            unknown_score: normal().fold(f32::MAX, f32::min) - UNKNOWN_PENALTY,
            best_score: normal().fold(f32::MIN_POSITIVE, f32::max),
        }
    }

    /// Calls `emit` with every piece of the text, in order: its id and its text. Sums are taken in 32 bits, as
    /// the library has them, since ties decide. Of equals the segmentation that was found first is kept, whose last
    /// piece begins earlier.
    pub fn segment<'t>(&self, file: &ModelFile, text: &'t str, mut emit: impl FnMut(u32, &'t str)) {
        let none = Way {
            score: 0.0,
            start: usize::MAX,
            id: 0,
        };
        let mut ways = vec![none; text.len() + 1];
        for (start, character) in text.char_indices() {
            let here = ways[start].score;
            let single = character.len_utf8();
            let mut has_single = false;
            self.trie.prefixes(&text.as_bytes()[start..], |length, id| {
                let piece = &file.pieces[id as usize];
                let sum = match piece.kind {
                    PieceKind::Unused => return,
                    PieceKind::UserDefined => length as f32 * self.best_score - USER_DEFINED_PENALTY + here,
                    _ => piece.score + here,
                };
                improve(&mut ways[start + length], sum, start, id);
                has_single |= length == single;
            });
            if !has_single {
                let sum = self.unknown_score + here;
                improve(&mut ways[start + single], sum, start, self.unknown);
            }
        }
        let mut cuts = Vec::new();
        let mut end = text.len();
        while end > 0 {
            let way = ways[end];
            cuts.push((way.id, way.start, end));
            end = way.start;
        }
        for (id, start, end) in cuts.into_iter().rev() {
            emit(id, &text[start..end]);
        }
    }
}

fn improve(way: &mut Way, sum: f32, start: usize, id: u32) {
    if way.start == usize::MAX || sum > way.score {
        *way = Way { score: sum, start, id };
    }
}
