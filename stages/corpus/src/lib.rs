//! Rows of corpora and manifests: settings, files, lines and tables as text, rejects and recordings. `flow-layouts` reads each
//! layout with it.

pub mod column_names;
pub mod columns;
mod corpus;
pub mod decoded_text;
mod error;
pub mod extra;
pub mod files;
pub mod folder;
mod folder_languages;
mod grouped;
pub mod kept_rows;
mod layout;
mod line_search;
pub mod lines;
pub mod listing;
pub mod looks;
mod manifest;
pub mod manifest_row;
pub mod names;
pub mod naming;
pub mod partitions;
pub mod places;
pub mod quoting;
pub mod recordings;
pub mod row_rules;
pub mod rows;
mod settings;
pub mod table_text;
pub mod tables;
pub mod text_tables;
pub mod texts;
pub mod times;
pub mod transcripts;
pub mod tree;
pub mod unpacking;
pub mod written_set;

use std::path::Path;

pub use corpus::{Corpus, LaidOut, Part, Take, take_line};
pub use error::ManifestError;
pub use flow_audio::json_line;
pub use layout::Layout;
pub use line_search::{LineSearch, ManifestLine, plain};
pub use manifest::{Manifest, Opened};
pub use rows::read_schema;
pub use settings::{Fetch, ReadSettings};

/// The name of a file without its extension.
pub fn file_stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}
