//! What other formats of a tokenizer and changes of a vocabulary need to know of a SentencePiece model.

use super::Tokenizer;
use super::model_file::{ModelFile, read_model_file};
use crate::{Error, Result};

impl Tokenizer {
    /// The scores of all pieces, in the order of their ids.
    pub fn scores(&self) -> Result<Vec<f32>> {
        Ok(self.model_file()?.pieces.iter().map(|piece| piece.score).collect())
    }

    /// All that the model file says, its character map too.
    pub(crate) fn model_file(&self) -> Result<ModelFile> {
        read_model_file(self.bytes()).map_err(Error::Tokenizer)
    }

    /// The ids into which a piece of another vocabulary falls: its text as it stands, with marks for spaces and
    /// without normalisation. What this tokenizer does not know is left out.
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
