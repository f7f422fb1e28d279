//! Where a run of training starts.

use std::path::{Path, PathBuf};

use crate::checkpoint::{self, CheckpointRecord, StoredCheckpoint};
use crate::error::TrainingError;
use crate::init::check_init;
use crate::resolved_settings::ResolvedSettings;
use crate::settings::OnChange;

/// Where training goes on.
#[derive(Clone, Debug, PartialEq)]
pub enum Start {
    /// From the first step, in this folder.
    Fresh { folder: PathBuf },
    /// After a checkpoint. `changes` are what `on_change: continue` passed over, `damaged` newer checkpoints that are not
    /// what they were when they were written.
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
}

/// Finds where training goes on, from the checkpoint folder alone. Changes nothing. `data` is the digest of
/// the train rows, where it is known.
pub fn find_start(settings: &ResolvedSettings, data: Option<&str>) -> Result<Start, TrainingError> {
    let root = Path::new(&settings.checkpoints);
    let folder = checkpoint::current(root)?;
    let identity = settings.identity()?;
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
    if others.is_empty() {
        return Ok(Start::Resume {
            checkpoint: standing,
            record: Box::new(record),
            changes: others,
            damaged,
        });
    }
    match settings.on_change {
        OnChange::Restart => Ok(Start::Fresh {
            folder: checkpoint::next_restart(root)?,
        }),
        OnChange::Continue if !another_run => Ok(Start::Resume {
            checkpoint: standing,
            record: Box::new(record),
            changes: others,
            damaged,
        }),
        _ => Err(TrainingError::Refused {
            message: format!(
                "training in {} cannot simply go on: {}",
                folder.display(),
                others.join("; ")
            ),
            help: Some(if another_run {
                "undo the change, set `train.on_change: restart` to begin anew beside it, or give another folder as `checkpoints`".into()
            } else {
                "undo the change, set `train.on_change: continue` to go on with it, or `restart` to begin anew beside it".into()
            }),
        }),
    }
}
