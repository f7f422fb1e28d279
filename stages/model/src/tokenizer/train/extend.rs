//! Extends a BPE tokenizer: existing pieces keep their ids, scores and merges, so that the texts it was trained for are
//! split as before.

use std::collections::HashSet;

use super::super::message::Message;
use super::super::model_file::{ModelFile, PieceKind, read_model_file};
use super::write::piece;
use super::{Algorithm, Recipe, Tell, alphabet::Alphabet, bpe};
use crate::{Error, Result};

/// The tokenizer to be extended.
pub(super) fn read(bytes: &[u8]) -> Result<ModelFile> {
    let file = read_model_file(bytes).map_err(Error::Tokenizer)?;
    if file.algorithm != Algorithm::Bpe {
        return Err(Error::Tokenizer("only a BPE tokenizer can be extended".into()));
    }
    Ok(file)
}

/// The old file with the new pieces at its end: first those of the recipe that stay whole, then what is merged, the
/// most frequent first, then characters. New merges rank below all old ones.
pub(super) fn train(recipe: &Recipe, old: &[u8], alphabet: &Alphabet, tell: Tell<'_>) -> Result<Vec<u8>> {
    let file = read(old)?;
    let known: HashSet<&str> = file.pieces.iter().map(|piece| piece.text.as_str()).collect();
    let new = |text: &&String| !known.contains(text.as_str());
    let whole: Vec<&String> = recipe.user_defined.iter().filter(new).collect();
    let size = file.pieces.len() + whole.len();
    let characters = alphabet.characters.len();
    let Some(wanted) = recipe.vocabulary_size.checked_sub(size).filter(|wanted| *wanted > 0) else {
        return Err(Error::Tokenizer(format!(
            "a vocabulary of {} pieces is too small: the tokenizer that is extended has {}, and {} new ones stay whole",
            recipe.vocabulary_size,
            file.pieces.len(),
            whole.len()
        )));
    };
    // At worst every old piece is found again.
    let learned = bpe::train(alphabet, characters + file.pieces.len() + wanted, tell)?;
    let (merged, single) = learned.split_at(learned.len() - characters);
    let fresh = |pieces: &[(String, f32)]| -> Vec<String> {
        let texts = pieces.iter().map(|(text, _)| text.clone());
        texts.filter(|text| !known.contains(text.as_str())).collect()
    };
    let (mut merged, single) = (fresh(merged), fresh(single));
    let Some(room) = wanted.checked_sub(single.len()) else {
        return Err(Error::Tokenizer(format!(
            "a vocabulary of {} pieces is too small: the texts have {} characters that the tokenizer lacks. Give at least {}",
            recipe.vocabulary_size,
            single.len(),
            size + single.len()
        )));
    };
    if merged.len() < room {
        return Err(Error::Tokenizer(format!(
            "a vocabulary of {} pieces is too large: these texts give {}. Give that or less",
            recipe.vocabulary_size,
            size + merged.len() + single.len()
        )));
    }
    merged.truncate(room);
    let lowest = file.pieces.iter().map(|piece| piece.score).fold(0.0, f32::min);
    let mut bytes = old.to_vec();
    // A repeated field of a protocol buffer may go on after other fields.
    let mut added = Message::default();
    for text in whole {
        added.bytes(1, piece(text, 0.0, PieceKind::UserDefined).as_slice());
    }
    for (index, text) in merged.iter().chain(&single).enumerate() {
        let score = lowest - 1.0 - index as f32;
        added.bytes(1, piece(text, score, PieceKind::Normal).as_slice());
    }
    bytes.extend(added.into_bytes());
    Ok(bytes)
}
