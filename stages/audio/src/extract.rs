//! The kind `audio.extract`.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, AsArray, BooleanArray, RecordBatch, StringArray};
use arrow::compute::{concat_batches, filter_record_batch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use flow_runtime::{
    Body, Conservation, Context, Input, Kind, Operator, Out, Partition, Port, Progress, RejectClass, Shape, StageError,
};
use rayon::ThreadPool;
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::AudioError;
use crate::member_name::{safe_components, strip_dot_slash};
use crate::place::{Placed, Range, Target};
use crate::probe::decoding_pool;
use crate::shards::Shard;

/// Copies the recordings of the wanted rows out of their tars.
///
/// # What it does
///
/// Input 0 are rows of a manifest, which need `tar_member_name`; input 1 is the port `members` of
/// `audio.probe`. The bytes of each row's member are copied, unchanged, to
/// `<audio>/<lang>/<shard_id>/<member>`, or beside the tar where `audio` is empty. A file with the same bytes
/// is left as it is. Members that no row names are not copied. Nothing is written outside the target folder,
/// and no link below it is followed.
///
/// The rows go on with the column `audio_path`, the path of the file. Rows are refused (class `fault`) as
/// `unsafe_name` (also a member named like one of the shard's own files), `missing_member`, `unsafe_path` (a
/// folder or a link is in the way), or with the status that `audio.probe` gave the member.
///
/// A file deleted later is not noticed; `--force` this stage to write it again.
///
/// # Example
///
/// ```yaml
/// extract:
///   uses: audio.extract
///   from: [split.train, probe.members]
///   with: {shards: /corpus/shards, audio: /data/audio}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExtractSettings {
    /// Folder that holds `<lang>/<shard_id>/` folders.
    pub shards: PathBuf,
    /// Folder that receives the recordings; empty for beside the tars.
    #[serde(default)]
    pub audio: PathBuf,
}

impl ExtractSettings {
    fn target(&self) -> &Path {
        if self.audio.as_os_str().is_empty() {
            &self.shards
        } else {
            &self.audio
        }
    }
}

const NAME_COLUMN: &str = "tar_member_name";
const PATH_COLUMN: &str = "audio_path";

pub struct Extract;

impl Kind for Extract {
    const NAME: &'static str = "audio.extract";
    const VERSION: u32 = 1;
    type Settings = ExtractSettings;

    fn shape(_: &ExtractSettings, inputs: &[Input]) -> Result<Shape, StageError> {
        let [rows, members] = inputs else {
            let message = format!("audio.extract takes two inputs, it was given {}", inputs.len());
            let help = Some("rows first, then the port `members` of an audio.probe".into());
            return Err(StageError::Input {
                name: "from".into(),
                message,
                help,
            });
        };
        for (input, columns) in [
            (rows, &[(NAME_COLUMN, DataType::Utf8)][..]),
            (
                members,
                &[
                    ("name", DataType::Utf8),
                    ("status", DataType::Utf8),
                    ("offset", DataType::Int64),
                    ("size", DataType::Int64),
                    ("stored", DataType::Utf8),
                ][..],
            ),
        ] {
            for (name, data_type) in columns {
                let found = input.schema.field_with_name(name).ok();
                if found.is_none_or(|field| field.data_type() != data_type) {
                    let message = format!("`{}` has no column `{name}` of type {data_type}", input.name);
                    let help = Some("rows first, then the port `members` of an audio.probe".into());
                    return Err(StageError::Input {
                        name: input.name.clone(),
                        message,
                        help,
                    });
                }
            }
        }
        if rows.schema.field_with_name(PATH_COLUMN).is_ok() {
            let message = format!("`{}` has a column `{PATH_COLUMN}` already", rows.name);
            return Err(StageError::Input {
                name: rows.name.clone(),
                message,
                help: None,
            });
        }
        let port = Port {
            name: "rows".into(),
            schema: with_path(&rows.schema),
        };
        Ok(Shape {
            dear: true,
            conservation: Conservation::Rows,
            ..Shape::local(2, vec![port])
        })
    }

    fn open(settings: &ExtractSettings, context: &Context) -> Result<Body, StageError> {
        let pool = decoding_pool(context)?;
        Ok(Body::Local(Box::new(Extractor {
            settings: settings.clone(),
            pool,
            target: None,
            pending: HashMap::new(),
        })))
    }

    /// Where the files go is what this stage does, so the folder counts.
    fn identity(settings: &ExtractSettings) -> serde_json::Value {
        serde_json::json!({"into": settings.target()})
    }
}

fn with_path(schema: &Schema) -> SchemaRef {
    let mut fields: Vec<Arc<Field>> = schema.fields().iter().cloned().collect();
    fields.push(Arc::new(Field::new(PATH_COLUMN, DataType::Utf8, false)));
    Arc::new(Schema::new(fields))
}

#[derive(Default)]
struct Waiting {
    rows: Vec<RecordBatch>,
    members: Vec<RecordBatch>,
}

struct Extractor {
    settings: ExtractSettings,
    pool: ThreadPool,
    /// Opened with the first partition that has rows.
    target: Option<Target>,
    pending: HashMap<Partition, Waiting>,
}

/// What `audio.probe` says of one member.
#[derive(Clone)]
struct Member {
    status: String,
    offset: u64,
    size: u64,
    in_tar: bool,
}

/// Why a row cannot have a file: reason and detail.
type Refusal = (String, String);

impl Operator for Extractor {
    fn batch(
        &mut self,
        input: usize,
        partition: &Partition,
        batch: RecordBatch,
        _: &mut Out,
    ) -> Result<(), StageError> {
        let waiting = self.pending.entry(partition.clone()).or_default();
        if input == 0 {
            waiting.rows.push(batch)
        } else {
            waiting.members.push(batch)
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
        let target = match self.target.take() {
            Some(target) => target,
            None => Target::open(self.settings.target()).map_err(cannot_write)?,
        };
        let target = self.target.insert(target);
        let placed = place_all(
            &rows,
            &members_by_name(&members)?,
            &shard,
            target,
            &self.settings,
            &self.pool,
        )?;
        send(rows, placed, out)?;
        Ok(Progress::Done)
    }
}

fn cannot_write(error: AudioError) -> StageError {
    StageError::failed(error)
        .with_help("check the space, the permissions and the quota of the folder; a rerun goes on here")
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a StringArray, StageError> {
    batch
        .column_by_name(name)
        .and_then(|column| column.as_string_opt::<i32>())
        .ok_or_else(|| StageError::failed(format!("a batch has no text column `{name}`")))
}

fn members_by_name(batches: &[RecordBatch]) -> Result<HashMap<String, Member>, StageError> {
    let mut members = HashMap::new();
    for batch in batches {
        let (names, statuses, stored) = (
            column(batch, "name")?,
            column(batch, "status")?,
            column(batch, "stored")?,
        );
        let number = |name: &str| {
            let found = batch
                .column_by_name(name)
                .and_then(|column| column.as_primitive_opt::<Int64Type>());
            found.ok_or_else(|| StageError::failed(format!("a batch has no number column `{name}`")))
        };
        let (offsets, sizes) = (number("offset")?, number("size")?);
        for row in 0..batch.num_rows() {
            let unsigned =
                |value: i64| u64::try_from(value).map_err(|_| StageError::failed("a negative offset or size"));
            let member = Member {
                status: statuses.value(row).to_owned(),
                offset: unsigned(offsets.value(row))?,
                size: unsigned(sizes.value(row))?,
                in_tar: stored.value(row) == "tar",
            };
            members.insert(names.value(row).to_owned(), member);
        }
    }
    Ok(members)
}

/// For each row the path of its file, or why it has none.
fn place_all(
    rows: &RecordBatch,
    members: &HashMap<String, Member>,
    shard: &Shard,
    target: &Target,
    settings: &ExtractSettings,
    pool: &ThreadPool,
) -> Result<Vec<Result<String, Refusal>>, StageError> {
    let names = column(rows, NAME_COLUMN)?;
    let mut tar: Option<File> = None;
    // A member that several rows name is placed once.
    let mut wanted: HashMap<&str, usize> = HashMap::new();
    let mut jobs: Vec<(Vec<&str>, &Member)> = Vec::new();
    let mut of_row: Vec<Result<usize, Refusal>> = Vec::with_capacity(rows.num_rows());
    for row in 0..rows.num_rows() {
        let name = if names.is_null(row) { "" } else { names.value(row) };
        of_row.push(
            match (
                safe_components(name, &shard.shard_id),
                members.get(strip_dot_slash(name)),
            ) {
                (None, _) => Err(("unsafe_name".into(), format!("{name:?}"))),
                (_, None) => Err(("missing_member".into(), format!("{name:?}"))),
                (_, Some(member)) if member.status != "ok" => Err((member.status.clone(), format!("{name:?}"))),
                (Some(components), Some(member)) => Ok(*wanted.entry(strip_dot_slash(name)).or_insert_with(|| {
                    jobs.push((components, member));
                    jobs.len() - 1
                })),
            },
        );
    }
    let tar_path = shard.tar();
    if jobs.iter().any(|(_, member)| member.in_tar) {
        let open = File::open(&tar_path);
        tar = Some(open.map_err(|source| {
            StageError::failed(AudioError::Read {
                path: tar_path.clone(),
                source,
            })
        })?);
    }
    let beside = settings.target() == settings.shards;
    let place = |(components, member): &(Vec<&str>, &Member)| -> Result<(String, Option<Placed>), AudioError> {
        let below: Vec<&str> = [shard.lang.as_str(), shard.shard_id.as_str()]
            .iter()
            .chain(components)
            .copied()
            .collect();
        let path = settings.target().join(below.join("/")).to_string_lossy().into_owned();
        if let Some(tar) = tar.as_ref().filter(|_| member.in_tar) {
            let from = Range {
                file: tar,
                path: &tar_path,
                offset: member.offset,
                size: member.size,
            };
            return Ok((path, Some(target.place(&below, from)?)));
        }
        if beside {
            return Ok((path, None));
        }
        let source_path = shard.folder.join(components.join("/"));
        let file = File::open(&source_path).map_err(|source| AudioError::Read {
            path: source_path.clone(),
            source,
        })?;
        let from = Range {
            file: &file,
            path: &source_path,
            offset: 0,
            size: member.size,
        };
        Ok((path, Some(target.place(&below, from)?)))
    };
    let placed: Vec<Result<(String, Option<Placed>), AudioError>> =
        pool.install(|| jobs.par_iter().map(place).collect());
    let mut written = false;
    let mut paths: Vec<Result<String, Refusal>> = Vec::with_capacity(placed.len());
    for result in placed {
        paths.push(match result {
            Ok((path, how)) => {
                written |= how == Some(Placed::Written);
                Ok(path)
            }
            Err(error @ AudioError::UnsafePath { .. }) => Err(("unsafe_path".into(), error.to_string())),
            Err(error) => return Err(cannot_write(error)),
        });
    }
    if written {
        // What is committed must outlive a power cut.
        target.sync().map_err(cannot_write)?;
    }
    Ok(of_row
        .into_iter()
        .map(|job| job.and_then(|job| paths[job].clone()))
        .collect())
}

fn send(rows: RecordBatch, placed: Vec<Result<String, Refusal>>, out: &mut Out) -> Result<(), StageError> {
    for (position, refused) in placed.iter().enumerate() {
        if let Err((reason, detail)) = refused {
            out.reject_rows(&rows, &[position], reason, RejectClass::Fault, detail)?;
        }
    }
    let keep = BooleanArray::from_iter(placed.iter().map(|result| Some(result.is_ok())));
    let kept = filter_record_batch(&rows, &keep)?;
    let paths: StringArray = placed
        .iter()
        .filter_map(|result| result.as_ref().ok())
        .map(Some)
        .collect();
    let mut columns = kept.columns().to_vec();
    columns.push(Arc::new(paths));
    out.send(0, RecordBatch::try_new(with_path(&rows.schema()), columns)?);
    Ok(())
}

#[cfg(test)]
#[path = "extract_tests.rs"]
mod tests;
