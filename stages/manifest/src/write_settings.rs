//! The settings of `manifest.write`.

use std::path::PathBuf;

use flow_datasets::{AudioOfRows, DatasetFormat, DatasetSettings};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Writes manifests into a folder.
///
/// # What it does
///
/// Inputs go by name: `master` becomes `master_manifest.parquet`, `train` becomes `train_manifest_v2.parquet`,
/// `val` becomes `val_manifest_v2.parquet`; each may be missing, not all. The columns are `segment_id, shard_id,
/// text, duration, lang, tar_member_name, tar_path, source`, `duration` in seconds as float64, the rest text, none null; others are
/// written where `extra_columns` names them, and left out, which the log says, where not. `tar_path` gets `shards` before it. Rows are in the order of language, shard and row.
///
/// Rows of `manifest.read` keep their recordings if they keep the columns `audio_path, start, "offset", size`, perhaps through
/// `sql`: their manifests have `audio_filepath` (of a row whose recording is a file; else its tar and member say where it is) and
/// `offset` (seconds into the recording, where it is not 0), in parquet as two more columns. A column `extra` is written, too: its keys
/// become keys of the JSON line, but those that the line has anyway. A row without any place of its recording is an
/// error, and so is a row of `audio.webdataset` whose tar is not there, with and without `jsonl`.
///
/// `rejects.parquet` holds the rejects of all stages before this one: `partition, row, segment_id, stage, reason, class, detail`,
/// and the row's `values` as JSON. `statistics.json` holds, for each manifest, `all` of it and each of its `languages`, `rows`, `hours`, and
/// `mean`, `median` and `p95` of the durations in seconds, and the share of each language's rows that is in `val`.
///
/// With `jsonl`, each manifest is also written as NeMo reads it, one JSON object to a line: `audio_filepath, duration, text,
/// lang, segment_id, shard_id, tar_member_name, tar_path, source`. `audio_filepath` is where `audio.extract` places the
/// recording; it is relative to `out` where `audio` (or `shards`) is relative. Of rows whose recordings are in tars and are not
/// extracted (`audio` is empty, and `offset` and `size` say where in the tar, as rows of `audio.webdataset` do), it is the name
/// of the member, and `shard_id` the number that the tar's name ends with: NeMo's tarred form, for tars called
/// `audio_0.tar, audio_1.tar, ...`, and `manifest.read` finds them by `tar_path`. Where keys of `extra` could be taken for where a
/// row begins (`start_ms`), its line has an `offset` of 0, too.
///
/// With `format: huggingface` the set is a dataset as the library `datasets` loads it (`load_dataset(OUT)`): Parquet files
/// `data/train-00000-of-00001.parquet` of some hours each, and `README.md` with its configuration, features and languages. `train` is
/// the split `train` and `val` the split `validation`; where neither is given, `master` is the split `train`. The columns are
/// `audio` (`bytes` and `path`), `text, duration, lang, segment_id, shard_id, source` and those of `extra_columns`. Each recording
/// is in the files as it is stored; a row that is a part of one becomes FLAC of 16 kHz. Recordings of shards need `audio.extract` before.
/// With `audio_of_rows: path` files stay where they are, and `audio` has their absolute paths. Rows whose recordings cannot be read
/// are left out (`missing_audio`, `unreadable_file`, `decode_error`): a warning counts them, and `rejects.parquet`, which is
/// written only then, lists them. Every recording in the files was decoded from its beginning to its end, also if the row says how
/// long it is. Of files that stay where they are the header is read. `statistics.json` and JSON lines are not written, so that the folder can be published
/// (`flow push`, which leaves out `rejects.parquet`).
///
/// With `format: lhotse` the set has Lhotse's manifests of each split, under the same names of splits: `recordings_train.jsonl.gz`,
/// `supervisions_train.jsonl.gz` and `cuts_train.jsonl.gz` (`CutSet.from_file`). Each row is a supervision, and a `MonoCut` with this
/// supervision. Recordings stay where they are, and are named by their absolute paths or URLs, each once, however many rows are parts
/// of it. They need one channel (`several_channels`), and a file of their own: recordings in tars and tables are an error.
///
/// With `format: shar` the set is Lhotse Shar, which holds the recordings: a folder for each split (`CutSet.from_shar(in_dir="OUT/train")`)
/// with `cuts.000000.jsonl.gz` and `recording.000000.tar` for every `shard_rows` rows. A recording that is FLAC of one channel is there as it is
/// stored; another one of one channel becomes FLAC of its own rate. Parts of recordings, and recordings of several channels, become FLAC
/// of 16 kHz and one channel. Floating-point samples above full scale are clipped; a warning names the first row that has such.
///
/// In both, `lang` is the supervision's `language`. `speaker` and `gender` of `extra` or `extra_columns` are its own, and all
/// other keys and columns are in its `custom`, with `source` and `shard_id`. A row that is the whole recording has the recording's duration. Names that
/// come twice get a number (`name-2`), and those that cannot be names of files in a tar get `_` for some characters; `custom` then has
/// the row's `segment_id`. Rows whose recordings cannot be read are left out as with `huggingface`.
///
/// A set of another format than `parquet` is written again, too, if a recording has changed (its size, time or inode; in object storage
/// its ETag). Files that flow did not write into `out` are never replaced: one with the name of a file of the set is an error, and so is
/// any in the folder `data` (`huggingface`) or that of a split (`shar`), but those whose names begin with a dot. `flow push` leaves out
/// files that are not of the set.
///
/// The set is written as a whole, with `flow.json` in the end. Runs of partitions that have not changed since the set that stands
/// was written are copied from its files, where these are in a folder; the bytes are those of a set that is written from nothing. A set with far fewer rows than the existing one (see
/// `max_shrink`) is not written, as input data may be missing. An empty set is not written where rows were rejected
/// before (see `allow_empty`).
///
/// # Example
///
/// ```yaml
/// write:
///   uses: manifest.write
///   from: {master: master, train: split.train, val: split.val}
///   with: {out: work/manifests, shards: "${shards}"}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteSettings {
    /// Folder that receives the files; may be in object storage (`s3://bucket/folder`, see docs/storage.md).
    pub out: PathBuf,
    /// The folder of shards, which is put before `tar_path`. Empty: nothing is added.
    #[serde(default)]
    pub shards: String,
    /// `parquet` (manifests), `huggingface` (a dataset with its recordings), `lhotse` (manifests of Lhotse) or `shar` (Lhotse's
    /// shards of cuts and recordings).
    #[serde(default)]
    pub format: Format,
    /// License of a dataset, as the hub calls it (`cc-by-4.0`), for its README.md.
    #[serde(default)]
    pub license: String,
    /// Of a dataset: `embed` (the recordings are in its files) or `path` (its files name them, and nothing is copied: for use on
    /// this machine). Rows that are no file of their own, such as parts of recordings and members of tars, are embedded in both.
    #[serde(default)]
    pub audio_of_rows: AudioOfRows,
    /// Rows of a shard of `format: shar`.
    #[serde(default = "thousand")]
    pub shard_rows: usize,
    /// Of all formats but `parquet`: rows whose recordings cannot be read, as a share of 1, past which nothing is written.
    #[serde(default = "half")]
    pub max_unreadable: f64,
    /// Write the manifests as JSON lines too.
    #[serde(default)]
    pub jsonl: bool,
    /// Folder of the extracted recordings, for `audio_filepath` in JSON lines; empty for beside the tars.
    #[serde(default)]
    pub audio: PathBuf,
    /// Further columns of the rows that are written: into parquet as they are, into JSON lines as keys, but where they are
    /// null. Texts, numbers and truth values; each input needs all of them.
    #[serde(default)]
    pub extra_columns: Vec<String>,
    /// Rows that a new set may have less than the one it takes the place of, as a share of 1: of the master manifest, and of
    /// train and validation together. Past it nothing is written, unless the run was started with `--allow-shrink` (or
    /// there were fewer than 100).
    #[serde(default = "half")]
    pub max_shrink: f64,
    /// Write an empty set although rows were rejected before. Otherwise it is an error that names the most frequent
    /// reasons, unless the run was started with `--allow-shrink`.
    #[serde(default)]
    pub allow_empty: bool,
}

impl WriteSettings {
    /// What is written as a dataset; none if manifests are written.
    pub(crate) fn dataset(&self) -> Option<DatasetSettings> {
        let format = match self.format {
            Format::Parquet => return None,
            Format::Huggingface => DatasetFormat::HuggingFace,
            Format::Lhotse => DatasetFormat::Lhotse,
            Format::Shar => DatasetFormat::Shar,
        };
        Some(DatasetSettings {
            format,
            shards: self.shards.clone(),
            license: self.license.clone(),
            audio_of_rows: self.audio_of_rows,
            shard_rows: self.shard_rows,
            max_unreadable: self.max_unreadable,
            max_shrink: self.max_shrink,
            allow_empty: self.allow_empty,
            extra_columns: self.extra_columns.clone(),
        })
    }

    /// What the files follow from: without the output folder; the prefix of `tar_path` is part of the files.
    pub(crate) fn identity(&self) -> serde_json::Value {
        let lines = self.jsonl.then_some((&self.audio, &self.out));
        let mut identity = serde_json::json!({"shards": self.shards, "jsonl": lines});
        if self.format == Format::Huggingface {
            identity["format"] = serde_json::json!([self.format, self.license]);
            if self.audio_of_rows != AudioOfRows::Embed {
                identity["audio_of_rows"] = serde_json::json!(self.audio_of_rows);
            }
        }
        if matches!(self.format, Format::Lhotse | Format::Shar) {
            let rows = (self.format == Format::Shar).then_some(self.shard_rows);
            identity["format"] = serde_json::json!([self.format, rows]);
        }
        if !self.extra_columns.is_empty() {
            identity["extra_columns"] = serde_json::json!(self.extra_columns);
        }
        identity
    }
}

/// What is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Manifests.
    #[default]
    Parquet,
    /// A dataset with its recordings.
    Huggingface,
    /// Recordings, supervisions and cuts of Lhotse.
    Lhotse,
    /// Shards of Lhotse's cuts and recordings.
    Shar,
}

fn thousand() -> usize {
    1000
}

fn half() -> f64 {
    0.5
}
