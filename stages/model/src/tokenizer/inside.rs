//! Access to the internals of a SentencePiece model, for other tokenizer formats and changes of a vocabulary.

use super::Tokenizer;
use super::model_file::{ModelFile, read_model_file};
use crate::{Error, Result};

impl Tokenizer {
    /// The scores of all pieces, in the order of their ids.
    pub fn scores(&self) -> Result<Vec<f32>> {
        Ok(self.model_file()?.pieces.iter().map(|piece| piece.score).collect())
    }

    /// The parsed model file, with its character map.
    pub(crate) fn model_file(&self) -> Result<ModelFile> {
        read_model_file(self.bytes()).map_err(Error::Tokenizer)
    }

    /// The ids into which this tokenizer splits a piece of another vocabulary: its text with marks for spaces, without
    /// normalisation. Unknown characters are left out.
    pub fn encode_piece(&self, piece: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        self.segment(piece, |id, part| {
            if id != self.unknown {
                ids.push(id);
            } else if self.file.byte_fallback {
                ids.extend(part.bytes().filter_map(|byte| self.id(&format!("<0x{byte:02X}>"))));
            }
        });
        ids
    }
}
