//! Checkpoints: the log of a training run.
//!
//! A checkpoint is a folder `step-000001200` that describes itself: the model (weights, configuration, tokenizer), the
//! optimizer's state, and `training.json`, which says how far training was, what it was made from, and the digest of
//! every other file. It is written under a temporary name, flushed and renamed, so it is complete or absent. One that
//! is damaged all the same is passed over for the one before it, and set aside as `damaged-step-000001200` when
//! training goes on. `restart-001`, `restart-002`, ... beside the checkpoints hold training that was begun anew with
//! `on_change: restart`; the newest of them is the current one.

pub mod average_of;
mod changes;
mod damage;
mod listing;
mod record;
mod resume;
mod verify;
mod writing;

pub use changes::{changes, identity_changes};
pub use listing::{StoredCheckpoint, best, current, latest, list, newest_sound, next_restart};
pub use record::{CHECKPOINT_VERSION, CheckpointRecord, FileDigest, Identity, read_record};
pub use resume::{read_average, read_optimizer};
pub use verify::verify;
pub use writing::{CheckpointFolder, FolderLock, lock};
