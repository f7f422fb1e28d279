//! `training.json`: the description of a checkpoint.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use flow_kind::store::{checked_json, sealed_json};
use flow_sampling::planned::Planned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::damage::{damaged, unreadable};
use super::listing::step_of;
use crate::early_stopping::Improvement;
use crate::error::TrainingError;
use crate::protect::ProtectedRates;

/// Version of `training.json`. Newer files are refused with an error.
pub const CHECKPOINT_VERSION: u32 = 3;

/// The file that describes a checkpoint.
pub(super) const RECORD: &str = "training.json";
/// The state of the optimizer.
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";
/// Weights that training continues from, where `model.safetensors` holds an average of them.
pub(crate) const LIVE: &str = "live.safetensors";

/// The identity of a training: where it differs, training cannot be resumed, only restarted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// With `init: none`, the sizes of the model. Otherwise null, or how new pieces of the vocabulary are initialised
    /// where that is not the default.
    pub model: Value,
    /// BLAKE3 of the tokenizer file; null where the tokenizer of `init` is used.
    pub tokenizer: Option<String>,
    /// `none`, or the source of the first weights.
    pub init: String,
    pub seed: u64,
}

/// `training.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointRecord {
    pub version: u32,
    /// Optimizer steps that are done; the next one has this number.
    pub step: u64,
    pub micro_batches: u64,
    /// Utterances trained on.
    pub samples: u64,
    /// Samples of audio at 16 kHz. An integer, so that the sum is exact after a round trip through the file.
    pub audio_samples: u64,
    pub tokens: u64,
    /// Steps skipped because a loss or gradient was not finite, or no utterance of them could be loaded.
    pub skipped_steps: u64,
    /// Epoch of the last micro-batch.
    pub epoch: u64,
    pub identity: Identity,
    /// The settings whose changes are reported (see [`changes`](fn@super::changes)).
    pub settings: BTreeMap<String, Value>,
    /// Digest of the train rows.
    pub data: Option<String>,
    /// How random numbers are made. They are drawn afresh for each micro-batch from the seed, the step, the
    /// rank and the micro-batch, so no state of a generator needs to be kept.
    pub random: String,
    /// Word error rate on the validation sample, where this very model was evaluated.
    #[serde(default)]
    pub validation_wer: Option<f64>,
    /// The same for the character error rate and the loss, where checkpoints are ranked by one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_cer: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// With early stopping: what it knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub improvement: Option<Improvement>,
    /// Error rates of protected languages, as of the last evaluation.
    #[serde(default, skip_serializing_if = "ProtectedRates::is_empty")]
    pub protected: ProtectedRates,
    /// How micro-batches were planned, each with its first step; the last is the present plan.
    #[serde(default)]
    pub plans: Vec<Planned>,
    /// Every other file of the folder.
    pub files: BTreeMap<String, FileDigest>,
}

/// Size and digest of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileDigest {
    pub bytes: u64,
    pub blake3: String,
}

impl CheckpointRecord {
    /// One digest over the files that make the model, for results that refer to this checkpoint.
    pub fn model_digest(&self) -> String {
        let of_model = |(name, _): &(&String, &FileDigest)| *name != OPTIMIZER && *name != LIVE;
        digest_of_files(self.files.iter().filter(of_model))
    }
}

/// One digest over files and their names.
pub(crate) fn digest_of_files<'a>(files: impl Iterator<Item = (&'a String, &'a FileDigest)>) -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, file) in files {
        hasher
            .update(name.as_bytes())
            .update(&[0])
            .update(file.blake3.as_bytes())
            .update(&[0]);
    }
    hasher.finalize().to_hex().to_string()
}

/// Reads `training.json` of a checkpoint.
///
/// # Errors
/// Where it cannot be read, is of a newer version, or its step is not that of the folder.
pub fn read_record(checkpoint: &Path) -> Result<CheckpointRecord, TrainingError> {
    let path = checkpoint.join(RECORD);
    let text = fs::read_to_string(&path).map_err(|e| unreadable(checkpoint, RECORD, e))?;
    let record = record_of(checkpoint, &text)?;
    let named = checkpoint.file_name().and_then(|name| step_of(name.to_str()?));
    if named.is_some_and(|step| step != record.step) {
        return Err(damaged(checkpoint, format!("{RECORD} says step {}", record.step)));
    }
    Ok(record)
}

/// From this version on, `training.json` has a checksum.
const WITH_CHECKSUM: u64 = 3;

/// An object as a file with a checksum.
pub(super) fn sealed_text(path: &Path, object: &impl Serialize) -> Result<String, TrainingError> {
    let wrong = |why: String| TrainingError::data(format!("{}: {why}", path.display()));
    let text = serde_json::to_string_pretty(object).map_err(|e| wrong(e.to_string()))?;
    sealed_json(&text).ok_or_else(|| wrong("is not an object".to_string()))
}

/// The value of a file whose objects have a checksum from the version `with_checksum` on.
pub(super) fn checked_value(
    checkpoint: &Path,
    name: &str,
    text: &str,
    with_checksum: u64,
) -> Result<Value, TrainingError> {
    let wrong = |why: String| damaged(checkpoint, format!("{name}: {why}"));
    let checked = checked_json(Path::new(name), text.as_bytes())
        .map_err(|_| wrong("its checksum is that of other bytes".to_string()))?;
    let value: Value = serde_json::from_slice(&checked).map_err(|e| wrong(e.to_string()))?;
    let is_old = value["version"].as_u64().is_some_and(|version| version < with_checksum);
    if matches!(checked, Cow::Borrowed(_)) && !is_old {
        return Err(wrong("its checksum is not at its end".to_string()));
    }
    Ok(value)
}

/// The record in the text of a `training.json`; `checkpoint` is for messages.
pub(super) fn record_of(checkpoint: &Path, text: &str) -> Result<CheckpointRecord, TrainingError> {
    let value = checked_value(checkpoint, RECORD, text, WITH_CHECKSUM)?;
    match value["version"].as_u64() {
        Some(version) if version > u64::from(CHECKPOINT_VERSION) => {
            return Err(TrainingError::refused(
                format!(
                    "{}: version {version} is newer than this program, which knows {CHECKPOINT_VERSION}",
                    checkpoint.join(RECORD).display()
                ),
                "use the program that wrote it, or a newer one",
            ));
        }
        _ => {}
    }
    serde_json::from_value(value).map_err(|e| damaged(checkpoint, format!("{RECORD}: {e}")))
}
