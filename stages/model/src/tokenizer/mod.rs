//! SentencePiece tokenizers (BPE and unigram), exactly as NeMo uses them: plain text to ids, no begin or end token.
//!
//! Read from SentencePiece's `.model` file. Normalisation follows the file's own rules (its compiled character map),
//! not those of a Unicode library: they differ for combining marks, which Indian scripts are full of.

mod bpe;
mod inside;
pub(crate) mod message;
pub(crate) mod model_file;
mod normaliser;
mod piece_trie;
pub mod train;
mod unigram;
mod unknown;

use std::collections::HashMap;
use std::path::Path;

use crate::{Error, Result};
pub use model_file::Algorithm;
use model_file::{ModelFile, PieceKind, read_model_file};
use normaliser::Normaliser;
use unigram::Unigram;

/// SentencePiece's mark of a space.
const SPACE: char = '\u{2581}';

/// A tokenizer as SentencePiece has them.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    bytes: Vec<u8>,
    file: ModelFile,
    normaliser: Normaliser,
    /// Ids of the pieces that text may become.
    ids: HashMap<String, u32>,
    /// Ids of control, unknown and byte pieces.
    reserved: HashMap<String, u32>,
    unknown: u32,
    /// None for a BPE model.
    unigram: Option<Unigram>,
}

impl Tokenizer {
    /// Reads a SentencePiece model, BPE or unigram.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut file = read_model_file(bytes).map_err(Error::Tokenizer)?;
        let mut ids = HashMap::new();
        let mut reserved = HashMap::new();
        let mut user_defined = Vec::new();
        let mut unknown = None;
        for (index, piece) in file.pieces.iter().enumerate() {
            let id = index as u32;
            let map = match piece.kind {
                PieceKind::Normal | PieceKind::Unused => &mut ids,
                PieceKind::UserDefined => {
                    user_defined.push(piece.text.clone());
                    &mut ids
                }
                PieceKind::Unknown => {
                    unknown = Some(id);
                    &mut reserved
                }
                PieceKind::Control | PieceKind::Byte => &mut reserved,
            };
            if piece.text.is_empty() || map.insert(piece.text.clone(), id).is_some() {
                return Err(Error::Tokenizer(format!(
                    "piece {id} `{}` is empty or appears twice",
                    piece.text
                )));
            }
        }
        let unknown = unknown.ok_or_else(|| Error::Tokenizer("has no unknown piece".into()))?;
        let map = std::mem::take(&mut file.character_map);
        let normaliser = Normaliser::new(&map, user_defined, &file).map_err(Error::Tokenizer)?;
        let unigram = (file.algorithm == Algorithm::Unigram).then(|| Unigram::new(&file, unknown));
        Ok(Tokenizer {
            bytes: bytes.to_vec(),
            file,
            normaliser,
            ids,
            reserved,
            unknown,
            unigram,
        })
    }

    /// Reads a SentencePiece `.model` file.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|source| Error::Io {
            path: path.into(),
            source,
        })?;
        Self::from_bytes(&bytes).map_err(|error| Error::File {
            path: path.into(),
            what: error.to_string(),
        })
    }

    /// The texts of all pieces, in the order of their ids.
    pub fn pieces(&self) -> Vec<String> {
        self.file.pieces.iter().map(|piece| piece.text.clone()).collect()
    }

    /// The text of NeMo's `vocab.txt`: a line for each piece, without the mark of a space, `##` before those that had none.
    pub fn nemo_vocabulary(&self) -> String {
        let line = |piece: String| match piece.strip_prefix('\u{2581}') {
            Some(rest) => format!("{rest}\n"),
            None => format!("##{piece}\n"),
        };
        self.pieces().into_iter().map(line).collect()
    }

    /// The bytes of the model file this was read from.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Number of pieces; the blank of a transducer has this id.
    pub fn vocabulary_size(&self) -> usize {
        self.file.pieces.len()
    }

    /// The text of a piece.
    pub fn piece(&self, id: u32) -> Option<&str> {
        self.file.pieces.get(id as usize).map(|piece| piece.text.as_str())
    }

    /// The id of a piece.
    pub fn id(&self, piece: &str) -> Option<u32> {
        self.reserved.get(piece).or_else(|| self.ids.get(piece)).copied()
    }

    /// Id of the unknown piece.
    pub fn unknown_id(&self) -> u32 {
        self.unknown
    }

    /// Ids of a text. A run of unknown characters becomes one unknown id (or bytes, if the model has byte pieces).
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let normalised = self.normaliser.normalise(text);
        let mut ids = Vec::new();
        let mut after_unknown = false;
        let mut emit = |id: u32, part: &str| {
            let is_unknown = id == self.unknown;
            if is_unknown && self.file.byte_fallback {
                for byte in part.bytes() {
                    let piece = self.reserved.get(&format!("<0x{byte:02X}>"));
                    ids.push(piece.copied().unwrap_or(self.unknown));
                }
            } else if !(is_unknown && after_unknown) {
                ids.push(id);
            }
            after_unknown = is_unknown;
        };
        self.segment(&normalised, &mut emit);
        ids
    }

    /// Calls `emit` with the ids of a normalised text, and what of the text each represents.
    fn segment(&self, normalised: &str, mut emit: impl FnMut(u32, &str)) {
        match &self.unigram {
            Some(unigram) => unigram.segment(&self.file, normalised, emit),
            None => bpe::segment(&self.file, &self.ids, &self.normaliser, normalised, |part, unused| {
                let id = self.id(part).filter(|_| !unused);
                emit(id.unwrap_or(self.unknown), part);
            }),
        }
    }

    /// The number of tokens of a text, if there are more than `limit`. Most texts need not be tokenized for that: a
    /// token has at least one byte.
    pub fn tokens_over(&self, text: &str, limit: usize) -> Option<usize> {
        if self.normaliser.normalise(text).len() <= limit {
            return None;
        }
        Some(self.encode(text).len()).filter(|&tokens| tokens > limit)
    }

    /// The text of ids, as SentencePiece's `DecodeIds`: leading spaces are dropped, an unknown becomes ` U+2047 `,
    /// control pieces nothing. An id outside the vocabulary is an error.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let mut text = String::new();
        let mut pending = Vec::new();
        let at_start = |text: &str| text.is_empty() && (self.file.add_dummy_prefix || self.file.remove_extra_spaces);
        let mut start_space_seen = false;
        for &id in ids {
            let piece = self
                .file
                .pieces
                .get(id as usize)
                .ok_or_else(|| Error::Tokenizer(format!("id {id} is not below {}", self.vocabulary_size())))?;
            if let (PieceKind::Byte, Some(byte)) = (piece.kind, byte_value(&piece.text)) {
                pending.push(byte);
                continue;
            }
            push_bytes(&mut text, &std::mem::take(&mut pending));
            match piece.kind {
                PieceKind::Control => {}
                PieceKind::Unknown => text.push_str(&self.file.unknown_surface),
                _ => {
                    let mut part = piece.text.as_str();
                    if at_start(&text)
                        && !start_space_seen
                        && let Some(rest) = part.strip_prefix(SPACE)
                    {
                        part = rest;
                        start_space_seen = !self.file.remove_extra_spaces;
                    }
                    text.extend(part.chars().map(|c| if c == SPACE { ' ' } else { c }));
                }
            }
        }
        push_bytes(&mut text, &pending);
        Ok(text)
    }

    /// What a token adds to a text, spaces included: [`Tokenizer::decode`] without the rules of its beginning, and without the
    /// check that bytes make characters. An id outside the vocabulary is an error.
    pub fn token_bytes(&self, id: u32) -> Result<Vec<u8>> {
        let piece = self.file.pieces.get(id as usize);
        let piece =
            piece.ok_or_else(|| Error::Tokenizer(format!("id {id} is not below {}", self.vocabulary_size())))?;
        Ok(match (piece.kind, byte_value(&piece.text)) {
            (PieceKind::Byte, Some(byte)) => vec![byte],
            (PieceKind::Control, _) => Vec::new(),
            (PieceKind::Unknown, _) => self.file.unknown_surface.clone().into_bytes(),
            _ => piece.text.replace(SPACE, " ").into_bytes(),
        })
    }
}

/// Appends the characters that bytes make; each byte that belongs to none becomes U+FFFD.
fn push_bytes(text: &mut String, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let valid = match std::str::from_utf8(bytes) {
            Ok(valid) => valid.len(),
            Err(error) => error.valid_up_to(),
        };
        let (good, rest) = bytes.split_at(valid);
        text.push_str(&String::from_utf8_lossy(good));
        bytes = match rest.split_first() {
            Some((_, rest)) => {
                text.push(char::REPLACEMENT_CHARACTER);
                rest
            }
            None => rest,
        };
    }
}

/// The byte of a piece such as `<0x0A>`.
fn byte_value(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 {
        u8::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}

#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod tests;
