//! Tars of recordings: what is in them ([`examine`]), and the stage kinds that probe, extract, read and delete them.

pub mod delete_tars;
pub mod examine;
pub mod extract;
mod object_target;
pub mod place;
pub mod probe;
pub mod shards;
pub mod space;
#[cfg(test)]
#[path = "../../audio/src/tests/test_data.rs"]
mod test_data;
pub mod webdataset;

pub use delete_tars::DeleteTars;
pub use extract::Extract;
pub use probe::Probe;
pub use webdataset::WebDataset;

#[cfg(test)]
use flow_audio::{decode, flac, tar};
