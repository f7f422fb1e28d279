//! Hugging Face's data sets: Parquet files and Arrow files whose recordings are in a column `struct<bytes, path>`.
//!
//! A recording is named by its place in the file (`flow_audio::embedded`), a row by the file and its number there: what the column
//! `path` says of embedded bytes is neither a place nor unique.

mod arrow_files;
mod columns;
mod data_set;
mod hub;
mod hub_errors;
mod hub_tree;
mod listing;
mod parquet_files;
mod readme;
mod selected;

pub use arrow_files::{detect_arrow, open_arrow};
pub use hub::{Others, open_dataset};
pub use listing::{chosen_files, first_listed, listed};
pub use parquet_files::{detect_parquet, has_recordings, open_named, open_parquet, open_parquet_files};
pub use selected::{Kind, Selected, data_set_above, readme_of_config, selected_at};
