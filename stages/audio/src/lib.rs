//! Audio: tars of recordings, their verdicts, their extraction, and decoding to 16 kHz mono; recordings that users name, and
//! their samples.

mod block;
#[cfg(test)]
mod container_tests;
pub mod decode;
mod decode_fault;
pub mod delete_tars;
pub mod embedded;
mod ends;
pub mod error;
pub mod examine;
pub mod extract;
pub mod flac;
pub mod flac_encode;
pub mod format;
pub mod json_line;
pub mod language_tag;
pub mod listing;
mod matroska_tracks;
pub mod member_name;
mod mixer;
mod movie;
mod mpeg_gaps;
mod object_target;
mod opus;
pub mod part;
pub mod place;
pub mod probe;
pub mod recording;
pub mod recording_reader;
pub mod resample;
pub mod row_times;
pub mod samples;
pub mod shards;
pub mod space;
mod stored_bytes;
mod stream;
mod streamed_aiff;
mod streamed_wav;
pub mod subtitle_cues;
pub mod tar;
#[cfg(test)]
#[path = "tests/test_data.rs"]
mod test_data;
mod timeline;
mod wave64;
pub mod webdataset;
pub mod wire_audio;

pub use delete_tars::DeleteTars;
pub use error::AudioError;
pub use extract::Extract;
pub use probe::Probe;
pub use recording_reader::RecordingReader;
pub use webdataset::WebDataset;
