//! The kinds `speakers.diarize` and `speakers.write`, and the rows between them: all that knows of runs in this crate.

pub mod diarize;
pub mod known;
mod networks;
pub mod rows;
pub mod write;

pub use diarize::Diarize;
pub use write::{Format, Write, recording_name};
