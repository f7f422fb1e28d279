//! Rows with their recordings, for datasets that hold or name these.

use std::path::Path;

use arrow::array::{Array, RecordBatch, UInt32Array};
use arrow::compute::take_record_batch;
use arrow::datatypes::{DataType, Schema};
use flow_audio::AudioError;
use flow_kind::event::Events;
use flow_kind::{ExportSet, Input, Partition, StageError};
use rayon::prelude::*;

use crate::columns::{self, MANIFEST_COLUMNS};
use crate::dataset_recordings::{RecordingPlaces, RowPlace, refusal};
use crate::dataset_refused::Refused;

/// Columns of a dataset, beside the recordings, that every row has.
pub(crate) const COLUMNS: [&str; 6] = ["text", "duration", "lang", "segment_id", "shard_id", "source"];
/// Columns by which rows say where their recordings are, and their types.
const PLACES: [(&str, DataType); 4] = [
    ("audio_path", DataType::Utf8),
    ("start", DataType::Float64),
    ("offset", DataType::Int64),
    ("size", DataType::Int64),
];

/// What a dataset is written for: the stage, where its messages go, and whether to give up.
pub(crate) struct Writing<'w> {
    pub stage: &'w str,
    pub events: &'w Events,
    pub stop: &'w (dyn Fn() -> bool + Sync),
}

impl Writing<'_> {
    /// # Errors
    /// If the run gives up.
    pub fn go_on(&self) -> Result<(), StageError> {
        match (self.stop)() {
            true => Err(StageError::failed("stopped")),
            false => Ok(()),
        }
    }
}

pub(crate) fn failed_to_write(path: &Path, error: &dyn std::fmt::Display) -> StageError {
    StageError::failed(format!("{}: {error}", path.display()))
}

/// Checks, before a run, that rows say where their recordings are.
///
/// # Errors
/// If they do not, naming the `format` that needs it.
pub(crate) fn check_places(input: &Input, format: &str) -> Result<(), StageError> {
    let has = |name: &str| input.schema.field_with_name(name).is_ok();
    for (name, data_type) in PLACES.iter().filter(|(name, _)| has(name)) {
        columns::expect(input, name, data_type)?;
    }
    if has("audio_path") || (has("offset") && has("size")) {
        return Ok(());
    }
    Err(StageError::Input {
        name: input.name.clone(),
        message: format!(
            "the rows of `{}` do not say where their recordings are, which `format: {format}` puts into the dataset",
            input.name
        ),
        help: Some("rows of manifest.read have `audio_path, start, \"offset\", size`; audio.extract gives them to rows of shards".into()),
    })
}

/// The columns that are read: those of a manifest, where the recordings are, and `further` ones.
pub(crate) fn wanted_columns<'a>(schema: &Schema, further: &'a [String]) -> Vec<&'a str> {
    let places = PLACES.into_iter().map(|(name, _)| name);
    let places = places.filter(|name| schema.field_with_name(name).is_ok());
    let further = further.iter().map(String::as_str);
    MANIFEST_COLUMNS.into_iter().chain(places).chain(further).collect()
}

/// How many rows of a batch are read at once, from a row on: `most` of them and `most_seconds` together, but at least one.
pub(crate) fn read_together(
    batch: &RecordBatch,
    from: usize,
    most: usize,
    most_seconds: f64,
) -> Result<usize, StageError> {
    let durations = columns::number(batch, "duration")?;
    let most = most.min(batch.num_rows() - from);
    let mut seconds = 0.0;
    let fit = (from..from + most).take_while(|row| {
        seconds += durations.value(*row);
        seconds <= most_seconds
    });
    Ok(fit.count().max(1))
}

/// Why a row cannot be written.
pub(crate) enum Unusable {
    /// Its recording cannot be read.
    Audio(AudioError),
    /// A reason and its detail.
    Row(&'static str, String),
    /// What ends the run.
    Run(StageError),
}

impl Unusable {
    /// The same error for several rows of a recording.
    pub fn of_rows<T>(error: AudioError, rows: usize) -> Vec<Result<T, Unusable>> {
        match refusal(error) {
            Ok((reason, detail)) => (0..rows).map(|_| Err(Unusable::Row(reason, detail.clone()))).collect(),
            // It ends the run.
            Err(error) => vec![Err(Unusable::Audio(error))],
        }
    }
}

impl From<AudioError> for Unusable {
    fn from(error: AudioError) -> Unusable {
        Unusable::Audio(error)
    }
}

/// Rows of one partition, which are read together.
pub(crate) struct RowsOfPartition<'r> {
    pub batch: &'r RecordBatch,
    pub partition: &'r Partition,
    /// The folder before `tar_path`.
    pub shards: &'r str,
}

impl RowsOfPartition<'_> {
    /// The rows that can be written, and what `read` gives of each. `read` gets rows of one recording with their durations in
    /// seconds, and is called on all cores. Rows of which it gives none are refused.
    ///
    /// # Errors
    /// If a value is null, a row does not say where its recording is, or a recording cannot be read because of this process.
    pub fn with_recordings<T: Send>(
        &self,
        set: &mut ExportSet,
        refused: &mut Refused<'_>,
        read: impl Fn(&[RowPlace], &[f64]) -> Vec<Result<T, Unusable>> + Sync,
    ) -> Result<(RecordBatch, Vec<T>), StageError> {
        let RowsOfPartition {
            batch,
            partition,
            shards,
        } = *self;
        for name in COLUMNS {
            let nulls = batch.column_by_name(name).map_or(0, |column| column.null_count());
            if nulls > 0 {
                return Err(StageError::failed(format!(
                    "`{name}` is null in rows of {partition}; a manifest has no nulls"
                )));
            }
        }
        let places = RecordingPlaces::of(batch, shards)?;
        let (ids, durations) = (columns::text(batch, "segment_id")?, columns::number(batch, "duration")?);
        let named = |row: usize, why: String| {
            StageError::failed(format!("{partition}: the recording of {:?}: {why}", ids.value(row)))
        };
        let places: Vec<RowPlace> = (0..batch.num_rows())
            .map(|row| places.of_row(row).map_err(|why| named(row, why)))
            .collect::<Result<_, StageError>>()?;
        // Rows of one recording follow each other.
        let mut next = 0;
        let groups = places.chunk_by(RowPlace::is_of_same_recording).map(|group| {
            next += group.len();
            (next - group.len(), group)
        });
        let groups: Vec<(usize, &[RowPlace])> = groups.collect();
        let read = |(first, group): (usize, &[RowPlace])| read(group, &durations.values()[first..first + group.len()]);
        let recordings: Vec<Vec<Result<T, Unusable>>> = groups.into_par_iter().map(read).collect();
        let (mut kept, mut audio) = (Vec::new(), Vec::new());
        for (row, recording) in recordings.into_iter().flatten().enumerate() {
            let (reason, detail) = match recording {
                Ok(recording) => {
                    kept.push(u32::try_from(row).map_err(StageError::failed)?);
                    audio.push(recording);
                    continue;
                }
                Err(Unusable::Row(reason, detail)) => (reason, detail),
                Err(Unusable::Run(error)) => return Err(error),
                Err(Unusable::Audio(error)) => refusal(error).map_err(|error| named(row, error.to_string()))?,
            };
            refused.add(batch, row, partition, (reason, &detail), set)?;
        }
        let batch = match kept.len() == batch.num_rows() {
            true => batch.clone(),
            false => take_record_batch(batch, &UInt32Array::from(kept))?,
        };
        Ok((batch, audio))
    }
}
