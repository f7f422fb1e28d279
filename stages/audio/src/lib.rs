//! Audio: tars of recordings, their verdicts, their extraction, and decoding to 16 kHz mono.

pub mod decode;
pub mod error;
pub mod examine;
pub mod extract;
pub mod flac;
pub mod member_name;
pub mod place;
pub mod probe;
pub mod resample;
pub mod shards;
pub mod tar;
#[cfg(test)]
mod test_data;

pub use error::AudioError;
pub use extract::Extract;
pub use probe::Probe;
