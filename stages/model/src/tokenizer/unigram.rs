//! Unigram segmentation: of all ways to cut a text into pieces, the one whose scores have the greatest sum.

use super::model_file::{ModelFile, PieceKind};
use super::piece_trie::PieceTrie;

/// How much worse than the worst piece an unknown character is.
const UNKNOWN_PENALTY: f32 = 10.0;

#[derive(Debug, Clone)]
pub(super) struct Unigram {
    trie: PieceTrie,
    unknown: u32,
    unknown_score: f32,
    /// The best score of a normal piece, but at least the smallest positive number: so has the library it, and a
    /// model's scores are logarithms of probabilities, all below it.
    best_score: f32,
}

/// The best way to a place in the text.
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

    /// Calls `emit` with every piece of the text, in order: its id and its text. Sums are taken and compared in the widths of
    /// the library (the sum in 64 bits only at a user-defined piece), since ties decide; of equals the way that was
    /// found first stays, whose last piece begins earlier.
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
                    PieceKind::UserDefined => f64::from(length as f32 * self.best_score) - 0.1 + f64::from(here),
                    _ => f64::from(piece.score + here),
                };
                improve(&mut ways[start + length], sum, start, id);
                has_single |= length == single;
            });
            if !has_single {
                let sum = f64::from(self.unknown_score + here);
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

fn improve(way: &mut Way, sum: f64, start: usize, id: u32) {
    if way.start == usize::MAX || sum > f64::from(way.score) {
        *way = Way {
            score: sum as f32,
            start,
            id,
        };
    }
}
