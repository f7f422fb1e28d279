//! Audio: recordings of all formats, members of tars, and decoding to 16 kHz mono. No stage kind.

pub mod arrow_file;
mod block;
#[cfg(test)]
mod container_tests;
pub mod decode;
mod decode_fault;
pub mod embedded;
mod ends;
pub mod error;
pub mod flac;
pub mod flac_encode;
pub mod format;
pub mod json_line;
pub mod listing;
mod matroska_tracks;
pub mod member_name;
mod mixer;
mod movie;
mod mpeg_gaps;
mod opus;
pub mod part;
pub mod recording;
pub mod recording_reader;
pub mod resample;
pub mod row_times;
pub mod samples;
mod stored_bytes;
mod stream;
mod streamed_aiff;
mod streamed_wav;
pub mod subtitle_cues;
pub mod tar;
pub mod tar_write;
#[cfg(test)]
#[path = "tests/test_data.rs"]
mod test_data;
mod timeline;
mod wave64;
pub mod wire_audio;

pub use error::AudioError;
pub use recording_reader::RecordingReader;
