//! The settings of `audio.extract`, and the columns of its rows.

use std::path::{Path, PathBuf};

use arrow::array::{AsArray, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field};
use flow_kind::StageError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The columns of the member that a row names, and of the file and its size that it gets.
pub const NAME_COLUMN: &str = "tar_member_name";
pub const PATH_COLUMN: &str = "audio_path";
pub const BYTES_COLUMN: &str = "audio_bytes";

/// Copies the recordings of the wanted rows out of their tars.
///
/// # What it does
///
/// `rows` of a manifest need `tar_member_name`; `members` is the port of `audio.probe`. The bytes of each row's member are copied, unchanged, to
/// `<audio>/<lang>/<shard_id>/<member>`, or beside the tar where `audio` is empty. A file with the same bytes
/// is left as it is. Members that no row names are not copied. Nothing is written outside the target folder,
/// and no link below it is followed. Before a shard's first file is written, the file system must have room for
/// all of them and 64 MiB to spare.
///
/// With `store: flac`, recordings of other formats become FLAC files, `<member>.flac`, whose samples are checked
/// to be those that `audio.probe` hashed; FLAC members are copied. With `store: tar` nothing is written at all:
/// the rows say where in the tar their recordings are, and training reads them there.
///
/// The rows get the columns `audio_path`, the path of the file, and `audio_bytes`, its size (with `store: tar`,
/// `tar_path`, and `offset` and `size` in bytes). Rows are refused (class `fault`) as `unsafe_name` (also a member
/// named like one of the shard's own files), `missing_member`, `unsafe_path` (a folder or a link is in the way),
/// `name_taken` (two recordings would have one file), `missing_tar` (the tar was deleted after an extraction that did
/// not want this row), `unreadable_file` (the next run tries the shard again), or with the status that `audio.probe`
/// gave the member.
///
/// Each run checks that the files exist with their sizes; a shard with missing files is extracted again. (Not rows that
/// were rejected as `missing_tar`: after a deleted tar was restored, `--force` this stage.)
///
/// # Example
///
/// ```yaml
/// extract:
///   uses: audio.extract
///   from: {rows: split.train, members: probe.members}
///   with: {shards: /corpus/shards, audio: /data/audio}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExtractSettings {
    /// Folder that holds `<lang>/<shard_id>/` folders.
    pub shards: PathBuf,
    /// Folder that receives the recordings; empty for beside the tars. May be in object storage (`s3://bucket/folder`, see
    /// docs/storage.md).
    #[serde(default)]
    pub audio: PathBuf,
    /// How recordings are kept: `as_is`, `flac` (others are encoded) or `tar` (in their tars, nothing is written).
    #[serde(default)]
    pub store: Store,
    /// Whether each run checks that the files still exist (about a second for a few hundred thousand files).
    #[serde(default = "yes")]
    pub watch: bool,
}

/// How recordings are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Store {
    /// As files with the bytes of the members.
    #[default]
    AsIs,
    /// As FLAC files: members of other formats are encoded.
    Flac,
    /// In their tars: nothing is written.
    Tar,
}

fn yes() -> bool {
    true
}

impl ExtractSettings {
    pub fn target(&self) -> &Path {
        if self.audio.as_os_str().is_empty() {
            &self.shards
        } else {
            &self.audio
        }
    }

    /// The columns that rows get; each replaces an existing one of its name.
    pub fn columns(&self) -> Vec<Field> {
        let field = |name: &str, data_type| Field::new(name, data_type, false);
        match self.store {
            Store::Tar => vec![
                field("tar_path", DataType::Utf8),
                field("offset", DataType::Int64),
                field("size", DataType::Int64),
            ],
            Store::AsIs | Store::Flac => vec![field(PATH_COLUMN, DataType::Utf8), field(BYTES_COLUMN, DataType::Int64)],
        }
    }
}

/// A text column of a batch.
pub fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a StringArray, StageError> {
    batch
        .column_by_name(name)
        .and_then(|column| column.as_string_opt::<i32>())
        .ok_or_else(|| StageError::failed(format!("a batch has no text column `{name}`")))
}
