//! Files in object storage: what is behind `s3://`, `gs://`, `az://` and `https://`.
//!
//! A [`Location`] is what a user writes. [`Storage`] lists, reads and writes objects; its calls wait for the answer, and may be
//! made from any thread, the threads of timely, rayon and tokio among them. [`InputFile`] is a file to be read, on this machine or
//! in object storage.
//!
//! Without the feature `object-store` there are no clients, and every URL is refused.
//!
//! Settings and rows keep a URL in the field that holds a path otherwise: [`is_url`] tells them apart.

// What only clients use.
#![cfg_attr(not(feature = "object-store"), allow(dead_code))]

mod aws_profile;
mod blocks;
#[cfg(feature = "object-store")]
mod bucket_client;
mod client;
mod conditional;
mod counters;
#[cfg(feature = "object-store")]
mod counting_connector;
mod error;
mod evict;
mod file_version;
mod folder;
mod hub_access;
#[cfg(feature = "object-store")]
mod hub_service;
mod input_file;
mod join;
mod kept;
mod kept_folder;
mod list;
mod listing;
#[cfg(feature = "object-store")]
mod listing_answer;
mod location;
mod object_reader;
mod object_writer;
mod open_bucket;
mod stat;
mod storage;

pub use conditional::ObjectVersion;
pub use counters::StorageCounts;
pub use error::{StorageError, StorageFault};
pub use file_version::{FileVersion, is_one_file};
pub use folder::is_folder;
pub use hub_access::{HubAccess, HubToken, origin};
pub use input_file::{InputFile, is_file};
pub use join::{folder_above, join};
pub use kept::Progress;
pub use list::{Entry, Folder};
pub use listing::ListedObjects;
pub use location::{Location, ObjectUrl, Scheme, is_url, path_of_file_url};
pub use object_reader::{AskedRange, ObjectReader};
pub use object_writer::ObjectWriter;
pub use stat::Stat;
pub use storage::{Storage, folders_two_levels_below};
