//! The kind `audio.webdataset`.

pub mod sample;

use std::fs;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_kind::{
    Body, Conservation, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, ROW, Reject, RejectClass,
    Shape, Source, SourcePartition, StageError,
};
use flow_storage::InputFile;
use rayon::ThreadPool;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::examine;
use crate::probe::{check_formats, decoding_pool, formats_identity, in_order, only_flac};
use flow_audio::error::AudioError;
use flow_audio::format::Format;
use flow_audio::listing::is_passed_over;
use flow_audio::tar::{self, End};
use sample::{Row, Sample};

/// Reads WebDataset tars: recordings and their texts as members of one tar.
///
/// # What it does
///
/// Every `*.tar` below `shards`, at any depth, is a partition, named by its path without `.tar`. Members whose
/// names are the same up to the first dot of the file name (up to the last one, for recordings such as
/// `talk-12.5.flac` that have none beside them under the name up to the first) are one sample: a recording (`.flac`, `.wav`, `.mp3`,
/// `.opus` and others; a film, such as `.mp4`, only where nothing else is), and its text, as `.txt`, `.text` or `.transcript`, or as the field `text_field` of a `.json`. Other members are skipped, as
/// are links to folders and names that begin with a dot. Each recording is decoded once, with the verdicts of
/// `audio.probe`.
///
/// One row per sample: `_row, segment_id, shard_id, text, duration, lang, tar_member_name, tar_path, source,
/// offset, size, audio_hash`. `segment_id` is the common part of the names, `shard_id` the name of the tar
/// without `.tar`, `duration` the decoded length in seconds; `tar_path` is below `shards`, `offset` and `size` are
/// bytes in the tar, so that `sampling.load` reads the recordings where they are. The text is unchanged except for
/// trimmed white space; clean and tag it in `sql`. `EN` and `en-US` are the language `en`.
///
/// Rejects, of class `fault`: `unsafe_name`, `missing_audio`, `several_recordings`, `missing_text`, `bad_text` (not
/// UTF-8, or longer than 1 MiB), `bad_json` (no object, or a field that is not text), `missing_lang`, `empty_text`,
/// and the verdicts of `audio.probe`. A truncated tar is a reject, too (`tar_truncated`), and so is one that does not
/// exist (`missing_tar`: a dangling link) or cannot be read (`unreadable_file`; the next run tries again).
///
/// # Example
///
/// ```yaml
/// samples: {uses: audio.webdataset, with: {shards: /corpus/webdataset, lang: hi}}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WebDatasetSettings {
    /// Folder that holds the tars.
    pub shards: PathBuf,
    /// Formats to accept, detected by content: `flac`, `wav`, `mp3`, `m4a`, `ogg`.
    #[serde(default = "only_flac")]
    pub formats: Vec<Format>,
    /// Language of samples whose `.json` has none; empty: these are rejected as `missing_lang`.
    #[serde(default)]
    pub lang: String,
    /// Field of the `.json` with the text, where there is no `.txt`.
    #[serde(default = "text")]
    pub text_field: String,
    /// Field of the `.json` with the language.
    #[serde(default = "lang")]
    pub lang_field: String,
    /// Value of the column `source`.
    #[serde(default = "webdataset")]
    pub source: String,
}

fn text() -> String {
    "text".into()
}

fn lang() -> String {
    "lang".into()
}

fn webdataset() -> String {
    "webdataset".into()
}

pub struct WebDataset;

impl Kind for WebDataset {
    const NAME: &'static str = "audio.webdataset";
    const VERSION: u32 = 5;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "one row for each recording with a text")];
    const URL_SETTINGS: &'static [(&'static str, flow_kind::UrlUse)] = &[("source", flow_kind::UrlUse::Text)];
    type Settings = WebDatasetSettings;

    fn shape(settings: &WebDatasetSettings, _: &Inputs) -> Result<Shape, StageError> {
        check_formats(&settings.formats)?;
        let port = Port::new("rows", rows_schema());
        Ok(Shape {
            expensive: true,
            conservation: Conservation::Rows,
            ..Shape::source(vec![port])
        })
    }

    fn open(settings: &WebDatasetSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(Reader {
            settings: WebDatasetSettings {
                formats: in_order(&settings.formats),
                ..settings.clone()
            },
            pool: decoding_pool(context)?,
            context: context.clone(),
        })))
    }

    /// Recordings are identified by their bytes, not by their paths.
    fn identity(settings: &WebDatasetSettings) -> serde_json::Value {
        serde_json::json!({
            "formats": formats_identity(&in_order(&settings.formats)),
            "lang": settings.lang,
            "text_field": settings.text_field,
            "lang_field": settings.lang_field,
            "source": settings.source,
        })
    }
}

/// Schema of the port `rows`.
pub fn rows_schema() -> SchemaRef {
    let field = |name: &str, data_type| Field::new(name, data_type, false);
    Arc::new(Schema::new(vec![
        field(ROW, DataType::UInt32),
        field("segment_id", DataType::Utf8),
        field("shard_id", DataType::Utf8),
        field("text", DataType::Utf8),
        field("duration", DataType::Float64),
        field("lang", DataType::Utf8),
        field("tar_member_name", DataType::Utf8),
        field("tar_path", DataType::Utf8),
        field("source", DataType::Utf8),
        field("offset", DataType::Int64),
        field("size", DataType::Int64),
        field("audio_hash", DataType::Utf8),
    ]))
}

struct Reader {
    settings: WebDatasetSettings,
    context: Context,
    pool: ThreadPool,
}

impl Source for Reader {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let names = tars_below(&self.settings.shards).map_err(|error| {
            StageError::setting("shards", error).with_help("`shards` is the folder that holds the tars")
        })?;
        if names.is_empty() {
            let message = format!("{} holds no tar", self.settings.shards.display());
            return Err(StageError::setting("shards", message).with_help("is the disk mounted that it is on?"));
        }
        let partition = |name: String| {
            let tar = self.settings.shards.join(format!("{name}.tar"));
            SourcePartition::new(Partition::from(name), vec![tar], "webdataset")
        };
        Ok(names.into_iter().map(partition).collect())
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        let tar_path = format!("{partition}.tar");
        let path = self.settings.shards.join(&tar_path);
        let failed = |source| StageError::failed(AudioError::read(&path, source));
        let file = match InputFile::open(&self.context.storage, &path).and_then(InputFile::into_local) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                out.reject_partition("missing_tar", RejectClass::Fault, path.display().to_string());
                return Ok(());
            }
            Err(error) => return Err(failed(error)),
        };
        let length = file.metadata().map_err(failed)?.len();
        let listing = tar::list(&mut BufReader::with_capacity(512, &file), length).map_err(failed)?;
        let file = InputFile::Local(file);
        if let End::Cut(why) = &listing.end {
            out.reject_partition("tar_truncated", RejectClass::Fault, why);
        }
        let samples = sample::group(&listing.last_of_each_name());
        let stop = self.context.gives_up();
        let look = |sample: &Sample<'_>| sample.judge(&file, &path, &self.settings);
        let judged = examine::each(&self.pool, &stop, &samples, look)
            .map_err(StageError::failed)?
            .ok_or_else(|| StageError::failed("stopped"))?;
        out.read(samples.len() as u64);
        let mut rows: Vec<(u32, &str, Row)> = Vec::with_capacity(samples.len());
        for (number, (sample, judged)) in samples.iter().zip(judged).enumerate() {
            let row = u32::try_from(number).map_err(|_| StageError::failed("a tar has more than 2^32 samples"))?;
            match judged {
                Ok(found) => rows.push((row, sample.key, found)),
                Err((reason, detail)) => out.reject(Reject {
                    row: Some(row),
                    id: Some(sample.key.to_owned()),
                    reason: reason.to_owned(),
                    class: RejectClass::Fault,
                    detail,
                    values: serde_json::json!({"tar_path": &tar_path, "members": sample.names()}).to_string(),
                }),
            }
        }
        out.send(0, self.batch(partition.as_str(), &tar_path, &rows)?);
        Ok(())
    }
}

impl Reader {
    fn batch(&self, name: &str, tar_path: &str, rows: &[(u32, &str, Row)]) -> Result<RecordBatch, StageError> {
        let shard_id = name.rsplit('/').next().unwrap_or(name);
        let texts = |of: fn(&Row) -> &str| -> ArrayRef {
            Arc::new(StringArray::from_iter_values(rows.iter().map(|(.., row)| of(row))))
        };
        let constant = |text: &str| -> ArrayRef { Arc::new(StringArray::from(vec![text; rows.len()])) };
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt32Array::from_iter_values(rows.iter().map(|(row, ..)| *row))),
            Arc::new(StringArray::from_iter_values(rows.iter().map(|(_, key, _)| key))),
            constant(shard_id),
            texts(|row| &row.text),
            Arc::new(Float64Array::from_iter_values(
                rows.iter().map(|(.., row)| row.duration),
            )),
            texts(|row| &row.lang),
            texts(|row| &row.member),
            constant(tar_path),
            constant(&self.settings.source),
            // Offsets in files are below 2^63.
            Arc::new(Int64Array::from_iter_values(
                rows.iter().map(|(.., row)| row.offset as i64),
            )),
            Arc::new(Int64Array::from_iter_values(
                rows.iter().map(|(.., row)| row.size as i64),
            )),
            texts(|row| &row.audio_hash),
        ];
        Ok(RecordBatch::try_new(rows_schema(), columns)?)
    }
}

/// Names of the tars below a folder, relative to it and without `.tar`, sorted. Names that are not UTF-8, which
/// no manifest could hold, are an error; links to folders, hidden files and folders of programs are stepped over.
fn tars_below(shards: &Path) -> Result<Vec<String>, AudioError> {
    let mut found = Vec::new();
    let mut pending = vec![(shards.to_owned(), String::new())];
    while let Some((folder, prefix)) = pending.pop() {
        let failed = |source| AudioError::read(&folder, source);
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let kind = entry.file_type().map_err(failed)?;
            let is_tar = entry.path().extension().is_some_and(|extension| extension == "tar");
            let hidden = is_passed_over(&entry.file_name());
            // A dangling link, or a pipe, is rejected by name and not skipped silently.
            let wanted = kind.is_dir() || (is_tar && !entry.path().is_dir());
            if hidden || !wanted {
                continue;
            }
            let name = entry
                .file_name()
                .into_string()
                .map_err(|name| AudioError::read(folder.join(name), std::io::Error::other("the name is not UTF-8")))?;
            if kind.is_dir() {
                pending.push((entry.path(), format!("{prefix}{name}/")));
            } else {
                found.push(format!("{prefix}{}", name.strip_suffix(".tar").unwrap_or(&name)));
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
#[path = "webdataset_tests.rs"]
mod tests;
