//! Changes the vocabulary of a model: encoder, LSTM and durations keep their weights, and so does every row of
//! embedding and output whose piece is in both vocabularies.

use std::fmt::Write;

use candle_core::{DType, Device, Tensor};
use flow_kernels::Noise;

use crate::checkpoint::{OpenModel, TensorEntry};
use crate::config::ModelConfig;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use flow_nn::tensor_files::broken;

/// How the rows of a piece that the old vocabulary does not have are filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NewPieces {
    /// With the mean of the rows of the pieces into which the old tokenizer splits it; as a fresh model's where it
    /// knows none of them.
    #[default]
    Mean,
    /// As in a new model; those of outputs around the mean of all old ones, so that the pieces are not emitted before
    /// they are trained.
    Random,
}

/// Where the rows of a piece come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From the piece of the same text, which had this id.
    Kept(u32),
    /// The mean of these.
    Mean(Vec<u32>),
    Random,
}

/// The change of a vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VocabularyChange {
    /// Pieces of the old vocabulary.
    pub old_size: usize,
    /// Of each piece of the new one, by id: its text, and where its rows come from.
    pub pieces: Vec<(String, Origin)>,
    /// The texts of the old pieces, by id.
    old_pieces: Vec<String>,
}

impl VocabularyChange {
    /// Compares two tokenizers.
    pub fn between(old: &Tokenizer, new: &Tokenizer, how: NewPieces) -> Self {
        let origin = |piece: &str| match (old.id(piece), how) {
            (Some(id), _) => Origin::Kept(id),
            (None, NewPieces::Random) => Origin::Random,
            (None, NewPieces::Mean) => match old.encode_piece(piece) {
                parts if parts.is_empty() => Origin::Random,
                parts => Origin::Mean(parts),
            },
        };
        VocabularyChange {
            old_size: old.vocabulary_size(),
            pieces: new
                .pieces()
                .into_iter()
                .map(|piece| (piece.clone(), origin(&piece)))
                .collect(),
            old_pieces: old.pieces(),
        }
    }

    /// Pieces whose rows stay.
    pub fn kept(&self) -> usize {
        self.count(|origin| matches!(origin, Origin::Kept(_)))
    }

    /// Pieces whose rows are means of others.
    pub fn averaged(&self) -> usize {
        self.count(|origin| matches!(origin, Origin::Mean(_)))
    }

    /// Pieces whose rows are random.
    pub fn random(&self) -> usize {
        self.count(|origin| matches!(origin, Origin::Random))
    }

    fn count(&self, which: impl Fn(&Origin) -> bool) -> usize {
        self.pieces.iter().filter(|(_, origin)| which(origin)).count()
    }

    /// One line for the screen.
    pub fn summary(&self) -> String {
        format!(
            "vocabulary changed from {} to {} pieces: {} keep their rows, {} begin as a mean of old ones, {} as random \
             numbers; {} old pieces are gone",
            self.old_size,
            self.pieces.len(),
            self.kept(),
            self.averaged(),
            self.random(),
            self.old_size - self.kept()
        )
    }

    /// A table with a line for each piece: its id, its text, `kept`, `mean` or `random`, and the old pieces that its
    /// rows are made of. Tabs part the columns.
    pub fn table(&self) -> String {
        let mut text = String::from("id\tpiece\trows\tfrom\n");
        for (id, (piece, origin)) in self.pieces.iter().enumerate() {
            let (what, from): (&str, &[u32]) = match origin {
                Origin::Kept(old) => ("kept", std::slice::from_ref(old)),
                Origin::Mean(parts) => ("mean", parts),
                Origin::Random => ("random", &[]),
            };
            let from: Vec<&str> = from
                .iter()
                .map(|&id| self.old_pieces.get(id as usize).map_or("", String::as_str))
                .collect();
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{id}\t{piece}\t{what}\t{}", from.join(" "));
        }
        text
    }
}

impl OpenModel {
    /// Gives the model this tokenizer. Where its pieces are others than the model's, the rows of embedding and outputs
    /// are rearranged, newly made as `how` says (from `seed` where they are random), and the change is returned; other
    /// tensors, blank and durations stay as they are.
    pub fn with_tokenizer(
        mut self,
        tokenizer: &Tokenizer,
        how: NewPieces,
        seed: u64,
    ) -> Result<(Self, Option<VocabularyChange>)> {
        let mut config = ModelConfig::from_nemo_yaml(&self.config_yaml).map_err(|error| broken(&self.path, error))?;
        let pieces = tokenizer.pieces();
        let old = self.tokenizer.as_deref().map(Tokenizer::from_bytes).transpose()?;
        let change = match &old {
            Some(old) if old.pieces() == pieces => None,
            Some(old) if old.vocabulary_size() != config.vocab_size => {
                return Err(broken(
                    &self.path,
                    format!(
                        "has a tokenizer of {} pieces, but the model is of {}",
                        old.vocabulary_size(),
                        config.vocab_size
                    ),
                ));
            }
            Some(old) => Some(VocabularyChange::between(old, tokenizer, how)),
            None if pieces.len() != config.vocab_size || !(config.labels.is_empty() || config.labels == pieces) => {
                return Err(Error::Tokenizer(format!(
                    "{}, and the one that is given is not the model's: it has {} pieces, the model {}{}. Give the \
                     model's own first (flow model convert --tokenizer), and change the vocabulary of what comes out",
                    self.no_tokenizer.as_deref().unwrap_or("the model has none"),
                    pieces.len(),
                    config.vocab_size,
                    if pieces.len() == config.vocab_size {
                        " with other texts"
                    } else {
                        ""
                    }
                )));
            }
            None => None,
        };
        if let Some(change) = &change {
            for entry in &mut self.tensors {
                if let Some(kind) = RowKind::of(&entry.name) {
                    // With the initialisation of the layers.
                    let fresh = match kind {
                        RowKind::Embedding => Fresh::Normal,
                        RowKind::Output => {
                            let hidden = config.transducer.as_ref().map_or(1, |head| head.joint.joint_hidden);
                            Fresh::Uniform(1.0 / (hidden as f64).sqrt())
                        }
                        RowKind::Ctc => {
                            let both = config.encoder.d_model + pieces.len() + 1;
                            Fresh::Uniform((6.0 / both as f64).sqrt())
                        }
                    };
                    *entry = changed(entry, fresh, change, seed)?;
                }
            }
            config.vocab_size = pieces.len();
        }
        config.labels = pieces;
        // Names within the archive that the model came from.
        config.tokenizer.model_path = None;
        config.tokenizer.vocab_path = None;
        config.tokenizer.spe_tokenizer_vocab = None;
        self.config_yaml = config.to_nemo_yaml()?;
        self.tokenizer = Some(tokenizer.bytes().to_vec());
        self.no_tokenizer = None;
        Ok((self, change))
    }
}

/// A tensor with a row for each piece, then blank's, then those of the durations where there are such.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowKind {
    Embedding,
    Output,
    Ctc,
}

impl RowKind {
    fn of(name: &str) -> Option<Self> {
        match name {
            "decoder.prediction.embed.weight" => Some(RowKind::Embedding),
            "joint.joint_net.1.weight" | "joint.joint_net.1.bias" => Some(RowKind::Output),
            "joint.joint_net.2.weight" | "joint.joint_net.2.bias" => Some(RowKind::Output),
            "ctc_decoder.decoder_layers.0.weight" | "ctc_decoder.decoder_layers.0.bias" => Some(RowKind::Ctc),
            "decoder.decoder_layers.0.weight" | "decoder.decoder_layers.0.bias" => Some(RowKind::Ctc),
            _ => None,
        }
    }
}

/// How a fresh model fills a row.
#[derive(Clone, Copy)]
enum Fresh {
    Normal,
    /// Between minus and plus this.
    Uniform(f64),
}

/// The tensor with its rows for the new vocabulary.
fn changed(entry: &TensorEntry, fresh: Fresh, change: &VocabularyChange, seed: u64) -> Result<TensorEntry> {
    let (&rows, rest) = entry.shape().split_first().unwrap_or((&0, &[]));
    let width: usize = rest.iter().product();
    let Some(behind) = rows.checked_sub(change.old_size).filter(|&behind| behind > 0) else {
        return Err(Error::TensorShape {
            name: entry.name.clone(),
            found: entry.shape().to_vec(),
            expected: [&[change.old_size + 1], rest].concat(),
        });
    };
    // Means are taken in f64 and rounded once; what is kept comes back to the same bits.
    let values: Vec<f64> = entry.load()?.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?;
    let row = |id: usize| &values[id * width..(id + 1) * width];
    // A trained model nearly always gives nearly all pieces a low score. Outputs that began around zero would exceed
    // all others, and the model would emit nothing else.
    let mean: Vec<f64> = (0..width)
        .map(|at| (0..change.old_size).map(|id| row(id)[at]).sum::<f64>() / change.old_size.max(1) as f64)
        .collect();
    let mut new = Vec::with_capacity((change.pieces.len() + behind) * width);
    let noise = Noise::new(seed).derive(&entry.name);
    for (piece, origin) in &change.pieces {
        match origin {
            Origin::Kept(id) => new.extend_from_slice(row(*id as usize)),
            Origin::Mean(ids) => {
                let count = ids.len() as f64;
                new.extend((0..width).map(|at| ids.iter().map(|&id| row(id as usize)[at]).sum::<f64>() / count));
            }
            Origin::Random => {
                let mut noise = noise.derive(piece);
                new.extend((0..width).map(|at| match fresh {
                    Fresh::Normal => noise.normal(),
                    Fresh::Uniform(bound) => mean[at] + (2.0 * noise.uniform() - 1.0) * bound,
                }));
            }
        }
    }
    new.extend_from_slice(&values[change.old_size * width..]);
    let shape = [&[change.pieces.len() + behind], rest].concat();
    let tensor = Tensor::from_vec(new, shape, &Device::Cpu)?.to_dtype(entry.dtype())?;
    Ok(TensorEntry::in_memory(entry.name.clone(), tensor))
}

#[cfg(test)]
mod tests;
