//! The utterances that training draws from: columns in memory, found by row number.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use arrow::array::{Array, AsArray, BooleanArray, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow::compute::{cast, filter_record_batch};
use arrow::datatypes::{DataType, Float64Type, Int64Type, Schema, SchemaRef};
use flow_audio::AudioError;
use flow_audio::decode::{decode, read_file, read_range};
use flow_audio::member_name::{safe_components, strip_dot_slash};
use flow_audio::part::{decode_row, decode_rows, is_decoded_from_the_beginning};
use flow_kind::{Artifact, ColumnType, Input, Partition, StageError};
use flow_shards::shards::Shard;
use flow_storage::Storage;

use crate::manifest_rows::{ManifestRows, column, manifest_order};

/// Columns that rows for training or scoring need, beside the place of their recordings.
pub const ROW_COLUMNS: &[(&str, ColumnType)] = &[
    ("segment_id", ColumnType::AnyText),
    ("text", ColumnType::AnyText),
    ("duration", ColumnType::Number),
    ("lang", ColumnType::AnyText),
];

/// The columns that locate the audio of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AudioColumns {
    /// `audio_path`: a file, as `audio.extract` gives it.
    Path,
    /// `audio_path`, and `offset` and `size` where that is a tar, `start` where the row begins later in the recording, as
    /// `manifest.read` gives it. `duration` says how much of the recording the row is.
    PathRange,
    /// `tar_path` (below `shards`), `offset` and `size`.
    TarRange,
    /// `tar_member_name`, to be looked up in the port `members` of an `audio.probe`.
    MemberName,
}

impl AudioColumns {
    /// The columns of a schema; `members`: whether there is an input in which names are looked up.
    pub fn of(schema: &Schema, members: bool) -> Option<Self> {
        let has = |name: &str| schema.field_with_name(name).is_ok();
        if has("audio_path") && has("offset") && has("size") && has("start") {
            Some(AudioColumns::PathRange)
        } else if has("audio_path") {
            Some(AudioColumns::Path)
        } else if has("tar_path") && has("offset") && has("size") {
            Some(AudioColumns::TarRange)
        } else if members && has("tar_member_name") {
            Some(AudioColumns::MemberName)
        } else {
            None
        }
    }

    /// Which of them the rows of an input have; `members`: whether there is an input in which names are looked up.
    ///
    /// # Errors
    /// When they have none, or only some of the columns: without `start`, a part of a recording would be taken for all
    /// of it.
    pub fn of_input(rows: &Input, members: bool) -> Result<Self, StageError> {
        let has = |name: &&str| rows.schema.field_with_name(name).is_ok();
        let (there, missing): (Vec<&str>, Vec<&str>) =
            AudioColumns::PathRange.names().iter().partition(|name| has(name));
        let names_files = there.first() == Some(&"audio_path") && !missing.is_empty();
        if names_files && (there.len() > 1 || were_parts(&rows.before)) {
            return Err(StageError::input(
                rows.name.clone(),
                format!(
                    "`{}` says only in part where the audio is: it has `{}`, but not `{}`",
                    rows.name,
                    there.join("`, `"),
                    missing.join("`, `")
                ),
            )
            .with_help("select `audio_path, start, \"offset\", size` of the rows of manifest.read"));
        }
        AudioColumns::of(&rows.schema, members).ok_or_else(|| {
            let message = format!("`{}` does not say where the audio is", rows.name);
            StageError::input(&rows.name, message).with_help(
                "rows of audio.extract have `audio_path`; or give the port `members` of an audio.probe as the input \
                 `members`",
            )
        })
    }

    fn names(self) -> &'static [&'static str] {
        match self {
            AudioColumns::Path => &["audio_path"],
            AudioColumns::PathRange => &["audio_path", "offset", "size", "start"],
            AudioColumns::TarRange => &["tar_path", "offset", "size"],
            AudioColumns::MemberName => &["tar_member_name"],
        }
    }
}

/// Whether rows, by the columns that they had before, were parts of files that their `audio_path` named already.
fn were_parts(before: &[SchemaRef]) -> bool {
    let has = |schema: &SchemaRef, name: &str| schema.field_with_name(name).is_ok();
    let mut with_path = before.iter().take_while(|schema| has(schema, "audio_path"));
    with_path.any(|schema| AudioColumns::PathRange.names().iter().all(|name| has(schema, name)))
}

/// All rows, in manifest order.
pub struct Dataset {
    pub rows: ManifestRows,
    chunks: Vec<Chunk>,
    /// Number of the first row of each chunk.
    starts: Vec<usize>,
}

struct Chunk {
    segment_ids: StringArray,
    texts: StringArray,
    audio: Audio,
}

enum Audio {
    Files(StringArray),
    /// Ranges of files below the folder; null where the row's member was not found.
    Ranges(Box<FileRanges>),
    /// Files; where offset and size are not null, ranges of them. And where in the recording a row begins.
    FilesOrRanges(Box<FileRanges>, Float64Array),
}

struct FileRanges {
    folder: PathBuf,
    files: StringArray,
    offsets: Int64Array,
    sizes: Int64Array,
}

/// One row.
#[derive(Clone, Debug, PartialEq)]
pub struct Utterance<'a> {
    pub segment_id: &'a str,
    pub text: &'a str,
    pub lang: &'a str,
    /// In seconds.
    pub duration: f64,
    pub place: Option<Place>,
    /// Where the utterance begins in the recording, in seconds; none for its beginning.
    pub start: Option<f64>,
    /// Whether the utterance is `duration` seconds of the recording; otherwise it is the whole recording.
    pub by_duration: bool,
}

/// Longest part of a recording that is one utterance.
const LONGEST_CUT_SECONDS: f64 = 4.0 * 3600.0;

/// Where a recording is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    File(PathBuf),
    Range { file: PathBuf, offset: u64, size: u64 },
}

impl Place {
    /// The file, and the part of it, by offset and size in bytes.
    fn file_and_range(&self) -> (&Path, Option<(u64, u64)>) {
        match self {
            Place::File(path) => (path, None),
            Place::Range { file, offset, size } => (file, Some((*offset, *size))),
        }
    }

    /// Whether parts of the recording cannot be decoded without what comes before them: then
    /// [`signals_of_one_recording`] of several is faster than each by itself.
    pub fn is_decoded_from_the_beginning(&self, storage: &Storage) -> bool {
        let (path, range) = self.file_and_range();
        is_decoded_from_the_beginning(storage, path, range)
    }
}

/// The signals of utterances that are parts of one recording (`by_duration`), at the place of the first, in their order: each
/// as [`Utterance::signal`] gives it.
pub fn signals_of_one_recording(storage: &Storage, utterances: &[Utterance<'_>]) -> Vec<Result<Vec<f32>, AudioError>> {
    let Some(place) = utterances.first().and_then(|first| first.place.as_ref()) else {
        return utterances.iter().map(|utterance| utterance.signal(storage)).collect();
    };
    let (path, range) = place.file_and_range();
    let row = |utterance: &Utterance<'_>| (utterance.start.unwrap_or(0.0), utterance.duration);
    let rows: Vec<(f64, f64)> = utterances.iter().map(row).collect();
    decode_rows(storage, path, range, &rows, LONGEST_CUT_SECONDS)
}

impl Utterance<'_> {
    /// Reads and decodes the recording: 16 kHz, mono. A recording that is far longer than the row's duration is
    /// refused. Where the row is a part of a recording, only that part is read if the format lets us.
    pub fn signal(&self, storage: &Storage) -> Result<Vec<f32>, AudioError> {
        let Some(place) = &self.place else {
            return Err(AudioError::Decode("the row's member is not in the tar".into()));
        };
        let (path, range) = place.file_and_range();
        if self.by_duration {
            let start = self.start.unwrap_or(0.0);
            return decode_row(storage, path, range, start, self.duration, LONGEST_CUT_SECONDS);
        }
        let bytes = match range {
            None => read_file(storage, path)?,
            Some((offset, size)) => read_range(storage, path, offset, size)?,
        };
        decode(&bytes, self.duration * 2.0 + 30.0)
    }
}

impl Dataset {
    /// Reads rows with `segment_id`, `text`, `duration`, `lang` and one of [`AudioColumns`]. `members` is the
    /// port of an `audio.probe`; `shards` is put before paths of tars. `max_samples` keeps that many rows: those
    /// whose names hash lowest, so that a larger sample holds a smaller one.
    pub fn read(
        rows: &Artifact,
        members: Option<&Artifact>,
        shards: &Path,
        max_samples: Option<u64>,
    ) -> Result<Self, StageError> {
        let audio_columns = AudioColumns::of(rows.schema(), members.is_some())
            .ok_or_else(|| StageError::failed("the rows do not say where their audio is"))?;
        let chosen = max_samples.map(|count| lowest_hashes(rows, count)).transpose()?;
        let mut columns = vec!["segment_id", "text", "duration", "lang"];
        columns.extend(audio_columns.names());
        let mut data = Dataset {
            rows: ManifestRows::default(),
            chunks: Vec::new(),
            starts: Vec::new(),
        };
        let mut row = 0;
        for partition in manifest_order(rows) {
            let ranges = match members {
                Some(members) if audio_columns == AudioColumns::MemberName => Some(ranges_of(members, partition)?),
                _ => None,
            };
            for batch in rows.read(partition, Some(&columns))? {
                let mut batch = batch?;
                let count = batch.num_rows();
                if let Some(chosen) = &chosen {
                    let keep = BooleanArray::from(chosen[row..row + count].to_vec());
                    batch = filter_record_batch(&batch, &keep)?;
                }
                row += count;
                if batch.num_rows() > 0 {
                    data.push(&batch, audio_columns, partition, ranges.as_ref(), shards)?;
                }
            }
        }
        Ok(data)
    }

    fn push(
        &mut self,
        batch: &RecordBatch,
        audio_columns: AudioColumns,
        partition: &Partition,
        ranges: Option<&Ranges>,
        shards: &Path,
    ) -> Result<(), StageError> {
        let text = |name: &str| -> Result<StringArray, StageError> {
            let found = column(batch, name, &DataType::Utf8).map_err(StageError::failed)?;
            Ok(found.as_string::<i32>().clone())
        };
        let number = |name: &str| -> Result<Int64Array, StageError> {
            let found = batch
                .column_by_name(name)
                .ok_or_else(|| StageError::failed(format!("no column {name}")))?;
            Ok(cast(found, &DataType::Int64)?.as_primitive::<Int64Type>().clone())
        };
        let audio = match audio_columns {
            AudioColumns::Path => Audio::Files(text("audio_path")?),
            AudioColumns::PathRange => {
                let starts = batch
                    .column_by_name("start")
                    .ok_or_else(|| StageError::failed("no column start"))?;
                let starts = cast(starts, &DataType::Float64)?.as_primitive::<Float64Type>().clone();
                let ranges = FileRanges {
                    folder: PathBuf::new(),
                    files: text("audio_path")?,
                    offsets: number("offset")?,
                    sizes: number("size")?,
                };
                Audio::FilesOrRanges(Box::new(ranges), starts)
            }
            AudioColumns::TarRange => {
                let (offsets, sizes) = (number("offset")?, number("size")?);
                Audio::Ranges(Box::new(FileRanges {
                    folder: shards.to_owned(),
                    files: text("tar_path")?,
                    offsets,
                    sizes,
                }))
            }
            AudioColumns::MemberName => {
                let names = text("tar_member_name")?;
                let shard = Shard::named(shards, partition.as_str())
                    .ok_or_else(|| StageError::failed(format!("`{partition}` is not the name of a shard")))?;
                let of = |name: &str| ranges.and_then(|ranges| ranges.find(name, &shard.shard_id));
                let found: Vec<Option<(String, i64, i64)>> =
                    names.iter().map(|name| of(name.unwrap_or_default())).collect();
                Audio::Ranges(Box::new(FileRanges {
                    folder: shard.folder,
                    files: found
                        .iter()
                        .map(|range| range.as_ref().map(|range| range.0.as_str()))
                        .collect(),
                    offsets: found.iter().map(|range| range.as_ref().map(|range| range.1)).collect(),
                    sizes: found.iter().map(|range| range.as_ref().map(|range| range.2)).collect(),
                }))
            }
        };
        let chunk = Chunk {
            segment_ids: text("segment_id")?,
            texts: text("text")?,
            audio,
        };
        self.starts.push(self.rows.durations.len());
        self.rows.push(batch).map_err(StageError::failed)?;
        self.chunks.push(chunk);
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.rows.durations.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The row of that number; none past the end.
    pub fn utterance(&self, row: u32) -> Option<Utterance<'_>> {
        let row = row as usize;
        let duration = *self.rows.durations.get(row)?;
        let chunk = self.starts.partition_point(|&start| start <= row) - 1;
        let at = row - self.starts[chunk];
        let chunk = &self.chunks[chunk];
        Some(Utterance {
            segment_id: chunk.segment_ids.value(at),
            text: chunk.texts.value(at),
            lang: self.rows.languages.of_row(row)?,
            duration,
            place: chunk.audio.place(at),
            start: chunk.audio.start(at),
            by_duration: matches!(chunk.audio, Audio::FilesOrRanges(..)),
        })
    }
}

impl Audio {
    fn start(&self, at: usize) -> Option<f64> {
        match self {
            Audio::FilesOrRanges(_, starts) if starts.is_valid(at) => Some(starts.value(at)),
            _ => None,
        }
    }

    fn place(&self, at: usize) -> Option<Place> {
        match self {
            Audio::Files(paths) => Some(Place::File(paths.value(at).into())),
            Audio::FilesOrRanges(ranges, _) if ranges.offsets.is_null(at) || ranges.sizes.is_null(at) => {
                Some(Place::File(ranges.files.value(at).into()))
            }
            Audio::Ranges(ranges) | Audio::FilesOrRanges(ranges, _) => {
                let FileRanges {
                    folder,
                    files,
                    offsets,
                    sizes,
                } = ranges.as_ref();
                if files.is_null(at) || offsets.is_null(at) || sizes.is_null(at) {
                    return None;
                }
                let offset = u64::try_from(offsets.value(at)).ok()?;
                let size = u64::try_from(sizes.value(at)).ok()?;
                Some(Place::Range {
                    file: folder.join(files.value(at)),
                    offset,
                    size,
                })
            }
        }
    }
}

/// Where the members of one shard are.
struct Ranges {
    /// The shard's tar, relative to its folder.
    tar: String,
    /// Name -> offset, size, whether it is in the tar.
    members: HashMap<String, (i64, i64, bool)>,
}

impl Ranges {
    fn find(&self, name: &str, shard_id: &str) -> Option<(String, i64, i64)> {
        let &(offset, size, in_tar) = self.members.get(strip_dot_slash(name))?;
        if in_tar {
            return Some((self.tar.clone(), offset, size));
        }
        Some((safe_components(name, shard_id)?.join("/"), 0, size))
    }
}

fn ranges_of(members: &Artifact, partition: &Partition) -> Result<Ranges, StageError> {
    let shard_id = partition.as_str().rsplit('/').next().unwrap_or_default();
    let mut ranges = Ranges {
        tar: format!("{shard_id}.tar"),
        members: HashMap::new(),
    };
    if members.rows_of(partition).is_none() {
        return Ok(ranges);
    }
    for batch in members.read(partition, Some(&["name", "offset", "size", "stored"]))? {
        let batch = batch?;
        let failed = || StageError::failed("the second input is not the port `members` of an audio.probe");
        let text = |index: usize| batch.column(index).as_string_opt::<i32>().ok_or_else(failed);
        let number = |index: usize| batch.column(index).as_primitive_opt::<Int64Type>().ok_or_else(failed);
        let (names, offsets, sizes, stored) = (text(0)?, number(1)?, number(2)?, text(3)?);
        for row in 0..batch.num_rows() {
            let range = (offsets.value(row), sizes.value(row), stored.value(row) == "tar");
            ranges.members.insert(names.value(row).to_owned(), range);
        }
    }
    Ok(ranges)
}

/// For each row of the artifact whether it is among the `count` whose (partition, segment id) hash lowest.
pub(crate) fn lowest_hashes(rows: &Artifact, count: u64) -> Result<Vec<bool>, StageError> {
    Ok(lowest(&name_hashes(rows)?, count))
}

/// For each row the hash of its (partition, segment id), in [`manifest_order`]: of all rows, or of those that
/// `max_samples` keeps.
pub(crate) fn hashes_of_kept(rows: &Artifact, max_samples: Option<u64>) -> Result<Vec<u64>, StageError> {
    let mut hashes = name_hashes(rows)?;
    if let Some(count) = max_samples {
        let mut chosen = lowest(&hashes, count).into_iter();
        hashes.retain(|_| chosen.next().unwrap_or(false));
    }
    Ok(hashes)
}

fn name_hashes(rows: &Artifact) -> Result<Vec<u64>, StageError> {
    let mut hashes: Vec<u64> = Vec::new();
    for partition in manifest_order(rows) {
        for batch in rows.read(partition, Some(&["segment_id"]))? {
            let ids = column(&batch?, "segment_id", &DataType::Utf8).map_err(StageError::failed)?;
            for id in ids.as_string::<i32>().iter().flatten() {
                let mut hasher = blake3::Hasher::new();
                hasher.update(partition.as_str().as_bytes());
                hasher.update(b"\n");
                hasher.update(id.as_bytes());
                let mut first = [0u8; 8];
                first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
                hashes.push(u64::from_be_bytes(first));
            }
        }
    }
    u32::try_from(hashes.len()).map_err(|_| StageError::failed("more than 2^32 rows"))?;
    Ok(hashes)
}

fn lowest(hashes: &[u64], count: u64) -> Vec<bool> {
    let mut chosen = vec![true; hashes.len()];
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    if count < hashes.len() {
        let mut order: Vec<(u64, u32)> = (0u32..).zip(hashes).map(|(row, &hash)| (hash, row)).collect();
        order.select_nth_unstable(count);
        for &(_, row) in &order[count..] {
            chosen[row as usize] = false;
        }
    }
    chosen
}

#[cfg(test)]
#[path = "dataset_tests.rs"]
mod tests;
