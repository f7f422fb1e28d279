//! What datasets are written as.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is written, as settings of `manifest.write` say it.
#[derive(Clone, Debug)]
pub struct DatasetSettings {
    pub format: DatasetFormat,
    /// The folder before `tar_path`; may be empty.
    pub shards: String,
    /// As the hub calls it; may be empty. Of Hugging Face alone.
    pub license: String,
    pub audio_of_rows: AudioOfRows,
    /// Rows of a shard of [`DatasetFormat::Shar`].
    pub shard_rows: usize,
    /// Rows whose recordings cannot be read, as a share of 1, past which nothing is written.
    pub max_unreadable: f64,
    /// See [`flow_kind::ExportSet::guard_rows`].
    pub max_shrink: f64,
    /// Whether an empty dataset is written although rows were refused.
    pub allow_empty: bool,
    /// Columns that are written beside those that every dataset has.
    pub extra_columns: Vec<String>,
}

/// The forms of datasets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatasetFormat {
    /// Parquet files with the recordings, and README.md.
    HuggingFace,
    /// Lhotse's recordings, supervisions and cuts.
    Lhotse,
    /// Shards of Lhotse's cuts and recordings.
    Shar,
}

impl DatasetFormat {
    /// The value of the setting `format`.
    pub fn as_str(self) -> &'static str {
        match self {
            DatasetFormat::HuggingFace => "huggingface",
            DatasetFormat::Lhotse => "lhotse",
            DatasetFormat::Shar => "shar",
        }
    }
}

/// Where the recordings of a dataset are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AudioOfRows {
    /// In its files.
    #[default]
    Embed,
    /// Where they are.
    Path,
}
