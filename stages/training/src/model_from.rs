//! Which checkpoint becomes the output model of training.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use flow_model::checkpoint::OpenModel;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::checkpoint::average_of::{self, MeanOf};
use crate::checkpoint::{self, CheckpointRecord, Monitor, Ranking, StoredCheckpoint};
use crate::error::TrainingError;
use crate::settings::TrainSettings;

/// Which checkpoint becomes the output model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ModelFrom {
    /// That of the last step.
    #[default]
    Last,
    /// That with the lowest `monitor` on the validation sample. A checkpoint is written at each evaluation that
    /// finds a lower one. Its error rate there is optimistic, as it was chosen by it: score it on other rows.
    Best,
    /// The mean of the weights of the best checkpoints, as many as `keep_best` says. A checkpoint is written at each evaluation
    /// that is among them.
    AverageBest,
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

impl TrainSettings {
    /// The mean that is handed on, where it is one.
    pub fn mean(&self) -> Option<MeanOf> {
        match self.model_from {
            ModelFrom::Average => Some(MeanOf::Last {
                keep: self.keep_checkpoints,
                max_rise: self.protect.stop.then_some(self.protect.max_rise),
            }),
            ModelFrom::AverageBest => Some(MeanOf::Best(self.ranking())),
            ModelFrom::Last | ModelFrom::Best => None,
        }
    }
}

/// The newest checkpoint that may be handed on; none if a protected language is worse than allowed in each of them.
fn newest(
    folder: &Path,
    settings: &TrainSettings,
) -> Result<Option<(StoredCheckpoint, CheckpointRecord)>, TrainingError> {
    let mut all = checkpoint::list(folder)?;
    if all.is_empty() {
        return Err(TrainingError::data(format!("{} holds no checkpoint", folder.display())));
    }
    while let Some(newest) = all.pop() {
        let record = checkpoint::read_record(&newest.path)?;
        if settings.may_hand_on(&record) {
            return Ok(Some((newest, record)));
        }
    }
    Ok(None)
}

/// The model before training at a path of this machine, which is handed on if none of the checkpoints in `folder` may be.
///
/// # Errors
/// If it cannot be read.
pub fn model_before(path: PathBuf, folder: &Path) -> Result<Chosen, TrainingError> {
    let mut files = BTreeMap::new();
    for file in OpenModel::files(&path)? {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let digest = checkpoint::digest_file(&file).map_err(TrainingError::file(&file))?;
        files.insert(name, digest);
    }
    Ok(Chosen {
        digest: checkpoint::digest_of_files(files.iter()),
        step: 0,
        which: format!(
            "model before training, {}, as a protected language is worse than `protect.max_rise` allows in each checkpoint that {} holds",
            path.display(),
            folder.display()
        ),
        path,
    })
}

/// Chooses among the checkpoints of a folder. Reads only. None if a protected language is worse than allowed in each of them.
///
/// # Errors
/// Where there is none of that sort.
pub fn chosen(folder: &Path, settings: &TrainSettings) -> Result<Option<Chosen>, TrainingError> {
    let Some(newest) = newest(folder, settings)? else {
        return Ok(None);
    };
    let chosen = match settings.model_from {
        ModelFrom::Last => {
            checkpoint::verify(&newest.0.path, &newest.1)?;
            Chosen {
                path: newest.0.path,
                step: newest.1.step,
                digest: newest.1.model_digest(),
                which: "last checkpoint".into(),
            }
        }
        ModelFrom::Best => {
            let monitor = settings.monitor;
            let best = checkpoint::best(folder, Ranking { monitor, keep: 1 })?.pop();
            let (standing, record) = best.ok_or_else(|| {
                TrainingError::refused(
                    format!(
                        "no checkpoint in {} was evaluated, so none is the best",
                        folder.display()
                    ),
                    "set `model_from: last`, or train on with it",
                )
            })?;
            checkpoint::verify(&standing.path, &record)?;
            let figure = record.figure(monitor).unwrap_or(f64::NAN);
            let figure = match monitor {
                Monitor::ValLoss => format!("{figure:.4}"),
                Monitor::ValWer | Monitor::ValCer => format!("{:.1} %", 100.0 * figure),
            };
            Chosen {
                path: standing.path,
                step: record.step,
                digest: record.model_digest(),
                which: format!(
                    "checkpoint with the lowest {monitor} on the validation sample, {figure}, of step {}",
                    record.step
                ),
            }
        }
        ModelFrom::Average | ModelFrom::AverageBest => {
            let average = average_of::latest_mean(folder)?.ok_or_else(|| {
                TrainingError::refused(
                    format!("{} holds no mean of its checkpoints", folder.display()),
                    "run again: it is made when the last step is done, of checkpoints that were evaluated if it is that of the best",
                )
            })?;
            let steps: Vec<u64> = average.steps().collect();
            let names: Vec<String> = steps.iter().map(u64::to_string).collect();
            Chosen {
                step: steps.last().copied().unwrap_or_default(),
                digest: average.model_digest(),
                which: format!("mean of the checkpoints of steps {}", names.join(", ")),
                path: average.path,
            }
        }
    };
    Ok(Some(chosen))
}
