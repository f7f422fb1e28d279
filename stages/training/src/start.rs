//! Where a run of training starts.

use std::path::{Path, PathBuf};

use flow_storage::Storage;

use crate::checkpoint::bucket::{self, Wanted};
use crate::checkpoint::{self, CheckpointRecord, Ranking, StoredCheckpoint};
use crate::error::TrainingError;
use crate::init::check_init;
use crate::resolved_settings::ResolvedSettings;
use crate::settings::{ModelFrom, OnChange, TrainSettings};

/// Where training starts or continues.
#[derive(Clone, Debug, PartialEq)]
pub enum Start {
    /// From the first step, in this folder.
    Fresh { folder: PathBuf },
    /// After a checkpoint. `changes` are those that `on_change: continue` accepted, `damaged` newer checkpoints that
    /// are damaged.
    Resume {
        checkpoint: StoredCheckpoint,
        record: Box<CheckpointRecord>,
        changes: Vec<String>,
        damaged: Vec<Damage>,
    },
}

/// A damaged checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Damage {
    pub folder: PathBuf,
    pub message: String,
}

impl Start {
    /// Steps that are done.
    pub fn step(&self) -> u64 {
        match self {
            Start::Fresh { .. } => 0,
            Start::Resume { checkpoint, .. } => checkpoint.step,
        }
    }

    /// Whether no step is left to do.
    pub fn is_over(&self, settings: &TrainSettings) -> bool {
        match self {
            Start::Fresh { .. } => false,
            Start::Resume { record, .. } => settings.is_over(record),
        }
    }
}

impl TrainSettings {
    /// The folder of this machine with the checkpoints. Those that only a bucket has are fetched into it, as far as they are
    /// needed to go on.
    ///
    /// # Errors
    /// Where they cannot be fetched.
    pub fn checkpoint_root(&self, storage: &Storage) -> Result<PathBuf, TrainingError> {
        let wanted = Wanted {
            best: match self.model_from {
                ModelFrom::Best => Some(Ranking {
                    keep: 1,
                    ..self.ranking()
                }),
                ModelFrom::AverageBest => Some(self.ranking()),
                ModelFrom::Last | ModelFrom::Average => None,
            },
            last: match self.model_from {
                ModelFrom::Average => self.keep_checkpoints,
                ModelFrom::Last | ModelFrom::Best | ModelFrom::AverageBest => 1,
            },
        };
        bucket::local_root(storage, &self.checkpoints, wanted)
    }
}

/// Finds where training starts, from the checkpoint folder alone, into which what only a bucket has is fetched first. Changes
/// nothing else. `data` is the digest of the train
/// rows, where it is known.
pub fn find_start(storage: &Storage, settings: &ResolvedSettings, data: Option<&str>) -> Result<Start, TrainingError> {
    let root = &settings.checkpoint_root(storage)?;
    let folder = checkpoint::current(root)?;
    let identity = settings.identity(storage)?;
    let Some((standing, record, damaged)) = checkpoint::newest_sound(&folder)? else {
        check_init(settings)?;
        return Ok(Start::Fresh { folder });
    };
    let damage = |error| match error {
        TrainingError::Damaged { folder, message } => Some(Damage { folder, message }),
        _ => None,
    };
    let damaged = damaged.into_iter().filter_map(damage).collect();
    let mut others = checkpoint::identity_changes(&record.identity, &identity);
    let another_run = !others.is_empty();
    others.extend(checkpoint::changes(&record, &settings.recorded(), data));
    if !others.is_empty() && settings.on_change == OnChange::Restart {
        return Ok(Start::Fresh {
            folder: checkpoint::next_restart(root)?,
        });
    }
    if let Some(refusal) = refusal(settings.on_change, &folder, &others, another_run) {
        return Err(refusal);
    }
    Ok(Start::Resume {
        checkpoint: standing,
        record: Box::new(record),
        changes: others,
        damaged,
    })
}

/// Why training is refused in a folder; none where it continues, or restarts. `another_run`: some of the changes are of
/// the identity.
fn refusal(on_change: OnChange, folder: &Path, changes: &[String], another_run: bool) -> Option<TrainingError> {
    match on_change {
        _ if changes.is_empty() => return None,
        OnChange::Restart => return None,
        OnChange::Continue if !another_run => return None,
        OnChange::Continue | OnChange::Refuse => {}
    }
    Some(TrainingError::refused(
        format!(
            "training in {} cannot simply continue: {}",
            folder.display(),
            changes.join("; ")
        ),
        if another_run {
            "undo the change, set `train.on_change: restart` to start over beside it, or give another folder as `checkpoints`"
        } else {
            "undo the change, set `train.on_change: continue` to continue with it, or `restart` to start over beside it"
        },
    ))
}

/// Refuses settings with which training cannot continue from the existing checkpoint, before the stages run that make
/// its inputs. Properties of the inputs (the tokenizer, how micro-batches are made, the train rows) are compared later
/// by [`find_start`].
///
/// # Errors
/// As [`find_start`].
pub fn check_changes(storage: &Storage, settings: &TrainSettings) -> Result<(), TrainingError> {
    let settings = ResolvedSettings::from(settings.clone());
    let folder = checkpoint::current(&settings.checkpoint_root(storage)?)?;
    let of_record = |record: &CheckpointRecord| {
        let mut identity = record.identity.clone();
        identity.init.clone_from(&settings.init);
        identity.seed = settings.seed;
        if settings.init == "none" {
            identity.model = settings.fresh_model();
        }
        let mut changes = checkpoint::identity_changes(&record.identity, &identity);
        let another_run = !changes.is_empty();
        // Taken from the record where it does not follow from the settings alone.
        let mut now = record.settings.clone();
        // Those that settings may leave out.
        now.remove("long_texts");
        now.remove("lora");
        now.remove("groups");
        now.remove("prompts");
        now.extend(settings.recorded());
        changes.extend(checkpoint::changes(record, &now, None));
        refusal(settings.on_change, &folder, &changes, another_run)
    };
    // The files of a checkpoint are verified only where its record is a reason to refuse.
    match checkpoint::latest(&folder) {
        Ok(None) => return Ok(()),
        Ok(Some((_, record))) if of_record(&record).is_none() => return Ok(()),
        _ => {}
    }
    match checkpoint::newest_sound(&folder)? {
        Some((_, record, _)) => of_record(&record).map_or(Ok(()), Err),
        None => Ok(()),
    }
}
