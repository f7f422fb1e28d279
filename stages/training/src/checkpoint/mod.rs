//! Checkpoints: the log of a training run.
//!
//! A checkpoint is a folder `step-000001200` that describes itself: the model (weights, configuration, tokenizer), the
//! optimizer's state, and `training.json`, which records the progress, what the model was made from, and the digest of
//! every other file. It is written under a temporary name, flushed and renamed, so it is complete or absent. A damaged
//! checkpoint is skipped in favour of the previous one, and renamed to `damaged-step-000001200` when training
//! continues. `restart-001`, `restart-002`, ... beside the checkpoints hold the checkpoints of trainings that
//! `on_change: restart` began again; the newest of them is the current one.

pub mod average_of;
pub mod bucket;
mod changes;
mod damage;
mod listing;
mod ranking;
mod record;
mod resume;
mod verify;
mod writing;

pub use changes::{changes, identity_changes};
pub use listing::{StoredCheckpoint, best, current, latest, list, newest_sound, next_restart};
pub use ranking::{Figures, KeepBest, Monitor, Ranking};
pub use record::{CHECKPOINT_VERSION, CheckpointRecord, FileDigest, Identity, read_record};
pub(crate) use record::{LIVE, digest_of_files};
pub use resume::{read_average, read_optimizer};
pub(crate) use verify::digest_file;
pub use verify::verify;
pub use writing::{CheckpointFolder, FolderLock, lock, remove_left};
