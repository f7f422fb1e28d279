//! Transcription of recordings: which ones ([`listing`], [`channels`]), their samples ([`streamed`]), where speech is and what is said
//! ([`recognizer`]); what transcripts look like and how they are written, how long audio is cut into windows and the words of
//! the windows put together again, how sure the model was. The kinds are thin stages around these.

mod activity;
pub mod channels;
pub mod confidence;
pub mod energy;
pub mod error;
pub mod format;
pub mod line_formats;
mod lines;
pub mod listing;
pub mod recognizer;
pub mod recording;
pub mod rows;
pub mod segments;
pub mod speech_frames;
pub mod streamed;
pub mod subtitles;
#[cfg(test)]
mod test_data;
mod times;
pub mod transcribe;
pub mod transcript;
mod window_groups;
pub mod windows;
pub mod write;

pub use error::{Result, TranscriptionError};
pub use format::Format;
pub use lines::LineLimits;
pub use transcribe::Transcribe;
pub use transcript::{Metadata, Performance, Segment, Transcript, Word};
pub use write::Write;
