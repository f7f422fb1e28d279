//! Writes SentencePiece's `.model` file.

use super::super::message::Message;
use super::super::model_file::PieceKind;
use super::Recipe;

/// The file. Field numbers are those of `sentencepiece_model.proto`.
pub(super) fn model(recipe: &Recipe, pieces: &[(String, f32, PieceKind)], character_map: &[u8]) -> Vec<u8> {
    let mut file = Message::default();
    for (text, score, kind) in pieces {
        file.bytes(1, piece(text, *score, *kind).as_slice());
    }
    let mut trainer = Message::default();
    trainer.number(3, recipe.algorithm as i64);
    trainer.number(4, pieces.len() as i64);
    trainer.float(10, recipe.character_coverage as f32);
    for text in &recipe.control {
        trainer.bytes(30, text.as_bytes());
    }
    for text in &recipe.user_defined {
        trainer.bytes(31, text.as_bytes());
    }
    trainer.number(35, i64::from(recipe.byte_fallback));
    let id = |text: &str| {
        let place = pieces.iter().position(|(piece, _, _)| piece == text);
        place.map_or(-1, |id| id as i64)
    };
    for (field, text) in [(40, "<unk>"), (41, "<s>"), (42, "</s>"), (43, "<pad>")] {
        trainer.number(field, id(text));
    }
    file.bytes(2, trainer.as_slice());
    let mut normaliser = Message::default();
    normaliser.bytes(1, recipe.normalisation.name().as_bytes());
    normaliser.bytes(2, character_map);
    for field in [3, 4, 5] {
        normaliser.number(field, 1);
    }
    file.bytes(3, normaliser.as_slice());
    file.into_bytes()
}

/// One piece.
pub(super) fn piece(text: &str, score: f32, kind: PieceKind) -> Message {
    let mut piece = Message::default();
    piece.bytes(1, text.as_bytes());
    piece.float(2, score);
    match kind {
        PieceKind::Normal => {}
        PieceKind::Unknown => piece.number(3, 2),
        PieceKind::Control => piece.number(3, 3),
        PieceKind::UserDefined => piece.number(3, 4),
        PieceKind::Unused => piece.number(3, 5),
        PieceKind::Byte => piece.number(3, 6),
    }
    piece
}

/// A score as SentencePiece's `.vocab` has it: six digits that count.
pub(super) fn score_text(score: f32) -> String {
    if score == 0.0 {
        return if score.is_sign_negative() { "-0" } else { "0" }.to_owned();
    }
    let digits = (5 - f64::from(score).abs().log10().floor() as i32).max(0) as usize;
    let text = format!("{score:.digits$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}
