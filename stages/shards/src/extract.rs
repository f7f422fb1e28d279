//! The kind `audio.extract`.

mod destination;
mod missing_outputs;
mod placing;
mod read_ahead;
mod wanted;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, BooleanArray, Int64Array, RecordBatch, StringArray};
use arrow::compute::{concat_batches, filter_record_batch};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_kind::{
    Artifact, Body, ColumnType, Conservation, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition,
    Port, Progress, RejectClass, Shape, StageError, UrlUse,
};
use flow_storage::{Location, is_url};
use rayon::ThreadPool;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::probe::decoding_pool;
use crate::shards::Shard;
use destination::Destination;
use flow_audio::error::AudioError;
use placing::{Kept, Place};
use wanted::Refusal;
pub(crate) use wanted::{Member, members_by_name};

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
    fn target(&self) -> &Path {
        if self.audio.as_os_str().is_empty() {
            &self.shards
        } else {
            &self.audio
        }
    }

    /// The columns that rows get; each replaces an existing one of its name.
    fn columns(&self) -> Vec<Field> {
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

const NAME_COLUMN: &str = "tar_member_name";
const PATH_COLUMN: &str = "audio_path";
const BYTES_COLUMN: &str = "audio_bytes";

pub struct Extract;

impl Kind for Extract {
    const NAME: &'static str = "audio.extract";
    const VERSION: u32 = 2;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("rows", "rows of a manifest, whose recordings are placed")
            .columns(&[(NAME_COLUMN, ColumnType::Text)]),
        InputPort::streamed("members", "the port `members` of an audio.probe").columns(&[
            ("name", ColumnType::Text),
            ("status", ColumnType::Text),
            ("offset", ColumnType::Int64),
            ("size", ColumnType::Int64),
            ("audio_hash", ColumnType::Text),
            ("format", ColumnType::Text),
            ("frames", ColumnType::Int64),
            ("channels", ColumnType::Int32),
            ("bits", ColumnType::Int32),
            ("stored", ColumnType::Text),
        ]),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "the rows, with the location of each recording")];
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[("shards", UrlUse::Read), ("audio", UrlUse::Write)];
    type Settings = ExtractSettings;

    fn shape(settings: &ExtractSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        let rows = inputs.required("rows")?;
        if settings.store != Store::Tar && rows.schema.field_with_name(PATH_COLUMN).is_ok() {
            let message = format!("`{}` has a column `{PATH_COLUMN}` already", rows.name);
            return Err(StageError::input(rows.name.clone(), message));
        }
        let port = Port::new("rows", with_columns(&rows.schema, settings));
        Ok(Shape {
            expensive: true,
            conservation: Conservation::Rows,
            ..Shape::local(vec![port])
        })
    }

    fn open(settings: &ExtractSettings, context: &Context) -> Result<Body, StageError> {
        let pool = decoding_pool(context)?;
        // `file:///data` is `/data` from here on.
        let plain = |setting: &'static str, path: &Path| {
            let location = Location::of_path(path).map_err(|error| StageError::setting(setting, error))?;
            Ok::<_, StageError>(location.to_path())
        };
        let settings = ExtractSettings {
            shards: plain("shards", &settings.shards)?,
            audio: plain("audio", &settings.audio)?,
            ..settings.clone()
        };
        Ok(Body::Local(Box::new(Extractor {
            settings,
            context: context.clone(),
            pool,
            target: None,
            pending: HashMap::new(),
        })))
    }

    /// The folder is part of the identity, since the files are the output.
    fn identity(settings: &ExtractSettings) -> serde_json::Value {
        match settings.store {
            Store::Tar => serde_json::json!({"store": settings.store}),
            _ => serde_json::json!({"into": settings.target(), "store": settings.store}),
        }
    }

    fn missing_outputs(
        settings: &ExtractSettings,
        committed: &Artifact,
        threads: usize,
    ) -> Result<BTreeMap<Partition, String>, StageError> {
        if settings.watch && settings.store != Store::Tar {
            missing_outputs::missing_outputs(settings.target(), committed, threads)
        } else {
            Ok(BTreeMap::new())
        }
    }
}

fn with_columns(schema: &Schema, settings: &ExtractSettings) -> SchemaRef {
    let new = settings.columns();
    let mut fields: Vec<Arc<Field>> = schema.fields().iter().cloned().collect();
    fields.retain(|field| new.iter().all(|new| new.name() != field.name()));
    fields.extend(new.into_iter().map(Arc::new));
    Arc::new(Schema::new(fields))
}

#[derive(Default)]
struct Waiting {
    rows: Vec<RecordBatch>,
    members: Vec<RecordBatch>,
}

struct Extractor {
    settings: ExtractSettings,
    context: Context,
    pool: ThreadPool,
    /// Opened with the first partition that has rows.
    target: Option<Destination>,
    pending: HashMap<Partition, Waiting>,
}

impl Operator for Extractor {
    fn batch(&mut self, input: &str, partition: &Partition, batch: RecordBatch, _: &mut Out) -> Result<(), StageError> {
        let waiting = self.pending.entry(partition.clone()).or_default();
        match input {
            "rows" => waiting.rows.push(batch),
            _ => waiting.members.push(batch),
        }
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, out: &mut Out) -> Result<Progress, StageError> {
        let Some(Waiting { rows, members }) = self.pending.remove(partition) else {
            return Ok(Progress::Done);
        };
        let Some(first) = rows.first() else {
            return Ok(Progress::Done);
        };
        let rows = concat_batches(&first.schema(), &rows)?;
        let shard = Shard::named(&self.settings.shards, partition.as_str())
            .ok_or_else(|| StageError::failed(format!("`{partition}` is not the name of a shard")))?;
        let members = wanted::members_by_name(&members)?;
        let wanted = wanted::find(&rows, &members, &shard, self.settings.store)?;
        let tar = shard.tar();
        let from_tar = wanted.jobs.iter().any(|job| job.member.in_tar);
        if from_tar && !is_url(&tar) && std::fs::File::open(&tar).is_err() {
            self.context.compare_unreadable(&tar)?;
        }
        let kept = if self.settings.store == Store::Tar {
            placing::point_into_tar(&wanted.jobs, &shard).map_err(StageError::failed)?
        } else {
            let target = match self.target.take() {
                Some(target) => target,
                None => Destination::open(self.settings.target()).map_err(cannot_write)?,
            };
            let target = self.target.insert(target);
            let place = Place {
                shard: &shard,
                target,
                settings: &self.settings,
                is_stopped: &self.context.gives_up(),
            };
            self.pool.install(|| place.all(&wanted.jobs)).map_err(cannot_write)?
        };
        let of_row: Vec<Result<&Kept, &Refusal>> = wanted
            .rows
            .iter()
            .map(|row| row.as_ref().and_then(|&job| kept[job].as_ref()))
            .collect();
        self.send(&rows, &of_row, out)?;
        Ok(Progress::Done)
    }
}

impl Extractor {
    fn send(&self, rows: &RecordBatch, of_row: &[Result<&Kept, &Refusal>], out: &mut Out) -> Result<(), StageError> {
        for (position, refused) in of_row.iter().enumerate() {
            if let Err((reason, detail)) = refused {
                out.reject_rows(rows, &[position], reason, RejectClass::Fault, detail)?;
            }
        }
        let keep = BooleanArray::from_iter(of_row.iter().map(|result| Some(result.is_ok())));
        let left = filter_record_batch(rows, &keep)?;
        let kept: Vec<&Kept> = of_row
            .iter()
            .filter_map(|result| result.as_ref().ok().copied())
            .collect();
        let paths: ArrayRef = Arc::new(StringArray::from_iter_values(kept.iter().map(|kept| &kept.path)));
        // Offsets and sizes of files are below 2^63.
        let offsets: ArrayRef = Arc::new(Int64Array::from_iter_values(kept.iter().map(|kept| kept.offset as i64)));
        let sizes: ArrayRef = Arc::new(Int64Array::from_iter_values(kept.iter().map(|kept| kept.size as i64)));
        let schema = with_columns(&rows.schema(), &self.settings);
        let columns = schema.fields().iter().map(|field| match field.name().as_str() {
            PATH_COLUMN => Some(&paths),
            BYTES_COLUMN => Some(&sizes),
            "tar_path" if self.settings.store == Store::Tar => Some(&paths),
            "offset" if self.settings.store == Store::Tar => Some(&offsets),
            "size" if self.settings.store == Store::Tar => Some(&sizes),
            name => left.column_by_name(name),
        });
        let columns: Option<Vec<ArrayRef>> = columns.map(|column| column.cloned()).collect();
        let columns = columns.ok_or_else(|| StageError::failed("a column of the rows was lost"))?;
        out.send(0, RecordBatch::try_new(schema, columns)?);
        Ok(())
    }
}

fn cannot_write(error: AudioError) -> StageError {
    if let AudioError::Write { path, source } = &error
        && let Some(help) = flow_kind::full_disk(path, source)
    {
        return StageError::failed(&error).with_help(help);
    }
    let help = match &error {
        AudioError::NoSpace { .. } => {
            "make room, or set `audio` to a folder on another file system; nothing of this shard was written, and a rerun goes on here"
        }
        _ => "check the space, the permissions and the quota of the folder; a rerun goes on here",
    };
    StageError::failed(error).with_help(help)
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a StringArray, StageError> {
    batch
        .column_by_name(name)
        .and_then(|column| column.as_string_opt::<i32>())
        .ok_or_else(|| StageError::failed(format!("a batch has no text column `{name}`")))
}

#[cfg(test)]
#[path = "extract_tests.rs"]
mod tests;
