//! The kind `audio.extract`.

mod destination;
mod placing;
mod read_ahead;
mod settings;
mod wanted;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Int64Array, RecordBatch, StringArray};
use arrow::compute::{concat_batches, filter_record_batch};
use arrow::datatypes::{Field, Schema, SchemaRef};
use flow_kind::output_files::missing_by_size;
use flow_kind::{
    Artifact, Body, ColumnType, Conservation, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition,
    Port, Progress, RejectClass, Shape, StageError, UrlUse,
};
use flow_storage::{Location, Storage, is_url};
use rayon::ThreadPool;

use crate::probe::decoding_pool;
use crate::shards::Shard;
use destination::Destination;
use flow_audio::error::AudioError;
use placing::{Kept, Place};
use settings::{BYTES_COLUMN, NAME_COLUMN, PATH_COLUMN};
pub use settings::{ExtractSettings, Store};
use wanted::Refusal;
pub(crate) use wanted::{Member, members_by_name};

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
        storage: &Storage,
        committed: &Artifact,
        threads: usize,
    ) -> Result<BTreeMap<Partition, String>, StageError> {
        if settings.watch && settings.store != Store::Tar {
            let columns = [PATH_COLUMN, BYTES_COLUMN];
            missing_by_size(storage, committed, columns, settings.target(), Path::new(""), threads)
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
            placing::point_into_tar(&self.context.storage, &wanted.jobs, &shard).map_err(StageError::failed)?
        } else {
            let target = match self.target.take() {
                Some(target) => target,
                None => Destination::open(&self.context.storage, self.settings.target()).map_err(cannot_write)?,
            };
            let target = self.target.insert(target);
            let place = Place {
                shard: &shard,
                target,
                settings: &self.settings,
                is_stopped: &self.context.gives_up(),
            };
            self.pool
                .install(|| place.all(&self.context.storage, &wanted.jobs))
                .map_err(cannot_write)?
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

#[cfg(test)]
#[path = "extract_tests.rs"]
mod tests;
