//! Which checkpoint becomes the output model of training.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{self, average_of};
use crate::error::TrainingError;

/// Which checkpoint becomes the output model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ModelFrom {
    /// That of the last step.
    #[default]
    Last,
    /// That with the lowest word error rate on the validation sample. A checkpoint is written at each evaluation that
    /// finds a lower one. Its error rate there is optimistic, as it was chosen by it: score it on other rows.
    Best,
    /// The mean of the weights of the last `keep_checkpoints` checkpoints, which is made when the last step is done. A
    /// checkpoint that was written because training was interrupted counts, too.
    Average,
}

/// The output model of a training.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// A model folder.
    pub path: PathBuf,
    /// Steps that are done; for a mean, those of the newest checkpoint.
    pub step: u64,
    /// Of the files that make the model.
    pub digest: String,
    /// A description for people.
    pub which: String,
}

/// Chooses among the checkpoints of a folder. Reads only.
///
/// # Errors
/// Where there is none of that sort.
pub fn chosen(folder: &Path, from: ModelFrom) -> Result<Chosen, TrainingError> {
    let newest = checkpoint::latest(folder)?.ok_or_else(|| TrainingError::Data {
        message: format!("{} holds no checkpoint", folder.display()),
    })?;
    match from {
        ModelFrom::Last => {
            checkpoint::verify(&newest.0.path, &newest.1)?;
            Ok(Chosen {
                path: newest.0.path,
                step: newest.1.step,
                digest: newest.1.model_digest(),
                which: "last checkpoint".into(),
            })
        }
        ModelFrom::Best => {
            let (standing, record) = checkpoint::best(folder)?.ok_or_else(|| TrainingError::Refused {
                message: format!(
                    "no checkpoint in {} was evaluated, so none is the best",
                    folder.display()
                ),
                help: Some("set `model_from: last`, or train on with it".into()),
            })?;
            checkpoint::verify(&standing.path, &record)?;
            let rate = record.validation_wer.unwrap_or(f64::NAN);
            Ok(Chosen {
                path: standing.path,
                step: record.step,
                digest: record.model_digest(),
                which: format!(
                    "checkpoint with the lowest word error rate on the validation sample, {:.1} %, of step {}",
                    100.0 * rate,
                    record.step
                ),
            })
        }
        ModelFrom::Average => {
            let average = average_of::latest_mean(folder)?.ok_or_else(|| TrainingError::Refused {
                message: format!("{} holds no mean of its checkpoints", folder.display()),
                help: Some("run again: it is made when the last step is done".into()),
            })?;
            let steps: Vec<u64> = average.steps().collect();
            let names: Vec<String> = steps.iter().map(u64::to_string).collect();
            Ok(Chosen {
                step: steps.last().copied().unwrap_or_default(),
                digest: average.model_digest(),
                which: format!("mean of the checkpoints of steps {}", names.join(", ")),
                path: average.path,
            })
        }
    }
}
