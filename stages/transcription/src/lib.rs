//! Transcripts of recordings of any length: what they look like, how they are written, how long audio is cut into
//! windows and the words of the windows put together again, how sure the model was. Pure functions: no audio is
//! decoded and no model is run here.

pub mod confidence;
pub mod energy;
pub mod error;
pub mod format;
pub mod line_formats;
mod lines;
pub mod segments;
pub mod subtitles;
#[cfg(test)]
mod test_data;
mod times;
pub mod transcript;
pub mod voice_activity;
pub mod windows;

pub use error::{Result, TranscriptionError};
pub use format::Format;
pub use lines::LineLimits;
pub use transcript::{Metadata, Performance, Segment, Transcript, Word};
