//! Transcription of recordings: listing them and their channels ([`channels`]), reading their samples ([`streamed`]),
//! voice activity and decoding ([`recognizer`]); the transcript and its file formats, the division of long audio into
//! windows and the joining of their words, confidences, and the speakers of words ([`speakers`]). The kinds are thin
//! stages around these.

mod activity;
mod align_rows;
pub mod alignment;
pub mod assign_speakers;
#[cfg(test)]
mod beam_tests;
pub mod boosted;
pub mod calibration;
pub mod channels;
#[cfg(test)]
mod confidence_tests;
pub mod coverage;
pub mod decoding_request;
pub mod energy;
pub mod error;
pub mod format;
pub mod language_prior;
mod language_scripts;
mod letter_case;
pub mod line_formats;
mod lines;
pub mod long_audio;
pub mod manifest_rows;
pub mod number_words;
pub mod parquet_format;
mod read_ahead;
pub mod recognizer;
pub mod rows;
pub mod segments;
pub mod speakers;
pub mod speech_frames;
pub mod streamed;
pub mod subtitles;
pub mod suspects;
#[cfg(test)]
mod test_data;
pub mod text_style;
mod times;
pub mod tokens;
pub mod transcribe;
mod transcribe_settings;
pub mod transcript;
pub mod utterances;
pub mod window_groups;
pub mod windows;
mod word_key;
pub mod write;

pub use align_rows::Align;
pub use assign_speakers::AssignSpeakers;
pub use error::{Result, TranscriptionError};
pub use format::Format;
pub use lines::LineLimits;
pub use transcribe::Transcribe;
pub use transcript::{Metadata, Performance, Segment, Transcript, Word};
pub use utterances::Utterances;
pub use write::Write;
