//! Training of tokenizers by SentencePiece's algorithms, into its model files.
//!
//! BPE gives the pieces that SentencePiece gives. Unigram follows the same steps (seeds, expectation and maximisation,
//! pruning), in 64-bit numbers and summed in a fixed order, so that the bytes do not depend on the number of threads; of
//! its pieces some differ from the library's.

mod alphabet;
mod bpe;
mod extend;
mod lattice;
mod script;
mod seeds;
mod unigram;
mod words;
mod write;

use super::model_file::{Algorithm, PieceKind};
use super::normaliser::Normaliser;
use crate::{Error, Result};

pub use words::Words;

/// What to train.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    pub algorithm: Algorithm,
    /// Number of pieces, all kinds together.
    pub vocabulary_size: usize,
    /// Share of all characters that have a piece; the rarest others become unknown.
    pub character_coverage: f64,
    /// Pieces that text never becomes, such as `<pad>`.
    pub control: Vec<String>,
    /// Pieces that are never split, wherever they occur in a text, such as `<|hi|>`.
    pub user_defined: Vec<String>,
    /// Unknown characters become bytes, for which there are 256 pieces.
    pub byte_fallback: bool,
    pub normalisation: Normalisation,
    /// A BPE `.model` file whose pieces all stay as they are, with its rules of normalisation: only what
    /// `vocabulary_size` leaves beside them is learned. `control` and `byte_fallback` are the file's own then.
    pub extends: Option<Vec<u8>>,
}

/// How texts are normalised, in training and ever after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Normalisation {
    /// SentencePiece's default: Unicode's form KC with some rules of its own for spaces and control characters.
    NmtNfkc,
    /// Spaces at the ends and repeated ones are removed, nothing else is changed.
    Identity,
}

impl Normalisation {
    fn name(self) -> &'static str {
        match self {
            Normalisation::NmtNfkc => "nmt_nfkc",
            Normalisation::Identity => "identity",
        }
    }

    /// The compiled character map: that of the bundled tokenizer, which SentencePiece 0.2.3 wrote there.
    fn character_map(self) -> Result<Vec<u8>> {
        match self {
            Normalisation::Identity => Ok(Vec::new()),
            Normalisation::NmtNfkc => {
                let bundled = include_bytes!("../../../../../configs/tokenizers/mini.model");
                let file = super::model_file::read_model_file(bundled).map_err(Error::Tokenizer)?;
                Ok(file.character_map)
            }
        }
    }
}

/// Called with messages of progress; an error ends the training.
pub type Tell<'a> = &'a mut dyn FnMut(String) -> Result<()>;

/// The pieces of the new model in the order of their ids: text, score and kind.
type Pieces = Vec<(String, f32, PieceKind)>;

impl Recipe {
    /// Validates the recipe before any text is read.
    pub fn check(&self) -> Result<()> {
        if let Some(old) = &self.extends {
            extend::read(old)?;
            if self.algorithm != Algorithm::Bpe {
                return Err(Error::Tokenizer("only BPE can extend a tokenizer".into()));
            }
        }
        let mut seen = std::collections::BTreeSet::new();
        for (text, _, _) in self.reserved() {
            if text.is_empty() || text.contains(['\0', '\t', '\n', '\r']) {
                return Err(Error::Tokenizer(format!("`{text}` cannot be a piece")));
            }
            if !seen.insert(text.clone()) {
                return Err(Error::Tokenizer(format!("the piece `{text}` is named twice")));
            }
        }
        Ok(())
    }

    /// The pieces that are not learned.
    fn reserved(&self) -> Pieces {
        let mut pieces = vec![("<unk>".to_owned(), 0.0, PieceKind::Unknown)];
        let mut add = |texts: &[String], kind| pieces.extend(texts.iter().map(|text| (text.clone(), 0.0, kind)));
        add(&self.control, PieceKind::Control);
        add(&self.user_defined, PieceKind::UserDefined);
        if self.byte_fallback {
            let bytes: Vec<String> = (0..=255u8).map(|byte| format!("<0x{byte:02X}>")).collect();
            add(&bytes, PieceKind::Byte);
        }
        pieces
    }

    /// An empty collection of words, to which the texts are added.
    pub fn words(&self) -> Result<Words> {
        self.check()?;
        let mut reserved: Vec<String> = self.reserved().into_iter().map(|(text, _, _)| text).collect();
        let map = match &self.extends {
            None => self.normalisation.character_map()?,
            Some(old) => {
                let file = extend::read(old)?;
                let whole = file.pieces.into_iter().filter(|piece| piece.kind != PieceKind::Normal);
                reserved.extend(whole.map(|piece| piece.text));
                reserved.sort();
                reserved.dedup();
                file.character_map
            }
        };
        let normaliser = Normaliser::for_training(&map).map_err(Error::Tokenizer)?;
        Ok(Words::new(normaliser, reserved))
    }

    /// Trains on the words of all texts. Gives the bytes of a `.model` file, which depend on the recipe and on how often
    /// each word is in the texts, and on nothing else.
    pub fn train(&self, words: Words, tell: Tell<'_>) -> Result<Vec<u8>> {
        let reserved = self.reserved();
        let alphabet = alphabet::Alphabet::new(words.counts(), self.character_coverage);
        if alphabet.words.is_empty() {
            return Err(Error::Tokenizer("there is no text to train on".into()));
        }
        if let Some(old) = &self.extends {
            return extend::train(self, old, &alphabet, tell);
        }
        let least = reserved.len() + alphabet.characters.len();
        if self.vocabulary_size < least {
            return Err(Error::Tokenizer(format!(
                "a vocabulary of {} pieces is too small: there are {} reserved pieces and {} characters. Give at least {least}, or a smaller character coverage",
                self.vocabulary_size,
                reserved.len(),
                alphabet.characters.len(),
            )));
        }
        tell(format!(
            "{} different words, {} characters",
            alphabet.words.len(),
            alphabet.characters.len()
        ))?;
        let room = self.vocabulary_size - reserved.len();
        let learned = match self.algorithm {
            Algorithm::Bpe => bpe::train(&alphabet, room, tell)?,
            Algorithm::Unigram => unigram::train(&alphabet, room, self.vocabulary_size, tell)?,
        };
        if learned.len() < room {
            return Err(Error::Tokenizer(format!(
                "a vocabulary of {} pieces is too large: these texts give {}. Give that or less",
                self.vocabulary_size,
                reserved.len() + learned.len(),
            )));
        }
        let mut pieces = reserved;
        // Reserved pieces were removed from the texts, so characters and reserved pieces are distinct.
        pieces.extend(
            learned
                .into_iter()
                .map(|(text, score)| (text, score, PieceKind::Normal)),
        );
        Ok(write::model(self, &pieces, &self.normalisation.character_map()?))
    }
}

/// The `.vocab` file beside a model: a piece and its score to each line.
pub fn vocabulary_text(tokenizer: &super::Tokenizer) -> String {
    let lines = tokenizer.file.pieces.iter();
    lines
        .map(|piece| format!("{}\t{}\n", piece.text, write::score_text(piece.score)))
        .collect()
}

#[cfg(test)]
mod tests;
