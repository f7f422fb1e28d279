//! Models and datasets of the Hugging Face hub: `hf://OWNER/NAME[@REVISION][/FILE]` and
//! `hf://datasets/OWNER/NAME[@REVISION][/CONFIG][:SPLIT]` become paths in the hub's own cache, which is shared with the hub's other
//! programs. Files are pushed to such repositories.

mod cache;
mod client;
mod dataset;
mod download;
mod error;
mod hub;
mod push;
mod reference;
mod selection;
#[cfg(test)]
mod tests;

pub use client::TreeFile;
pub use dataset::DatasetFiles;
pub use error::HubError;
pub use flow_storage::HubToken;
pub use hub::{Hub, Progress};
pub use push::{NewFile, Push, Pushed, files_below};
pub use reference::{DatasetReference, HubReference, RepositoryKind};
