//! Diarizations as rows: the ports of `speakers.diarize`.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Float32Array, Float64Array, Int64Array, ListArray, RecordBatch};
use arrow::array::{StringArray, UInt32Array};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Float32Type, Float64Type, Schema, SchemaRef};
use flow_kind::{ColumnType, ROW, StageError};

use crate::diarizer::Speaker;
use crate::turns::Turn;

fn schema(fields: Vec<Field>) -> SchemaRef {
    let row = Field::new(ROW, DataType::UInt32, false);
    Arc::new(Schema::new([vec![row], fields].concat()))
}

fn rows(count: usize) -> Result<ArrayRef, StageError> {
    let count = u32::try_from(count).map_err(|_| StageError::failed("more than 2^32 turns"))?;
    Ok(Arc::new(UInt32Array::from_iter_values(0..count)))
}

fn embedding_item() -> Arc<Field> {
    Arc::new(Field::new("item", DataType::Float32, false))
}

/// What a stage that reads turns needs of them.
pub const TURN_COLUMNS: &[(&str, ColumnType)] = &[
    ("start", ColumnType::Float64),
    ("end", ColumnType::Float64),
    ("speaker", ColumnType::Text),
];

/// One row for each turn; times are seconds from the beginning of the recording.
pub fn turns_schema() -> SchemaRef {
    schema(vec![
        Field::new("start", DataType::Float64, false),
        Field::new("end", DataType::Float64, false),
        Field::new("speaker", DataType::Utf8, false),
    ])
}

/// One row for each speaker.
pub fn speakers_schema() -> SchemaRef {
    schema(vec![
        Field::new("name", DataType::Utf8, false),
        Field::new("seconds", DataType::Float64, false),
        Field::new("embedding", DataType::List(embedding_item()), false),
    ])
}

/// One row for each recording.
pub fn recordings_schema() -> SchemaRef {
    schema(vec![
        Field::new("recording", DataType::Utf8, false),
        Field::new("duration", DataType::Float64, false),
        Field::new("num_speakers", DataType::Int64, false),
        Field::new("damaged_at", DataType::Float64, true),
    ])
}

/// Processing times of a recording: one row.
pub fn timings_schema() -> SchemaRef {
    schema(vec![
        Field::new("diarization_s", DataType::Float64, false),
        Field::new("total_s", DataType::Float64, false),
    ])
}

/// The rows of turns.
pub fn turns_batch(turns: &[Turn]) -> Result<RecordBatch, StageError> {
    let columns: Vec<ArrayRef> = vec![
        rows(turns.len())?,
        Arc::new(Float64Array::from_iter_values(turns.iter().map(|turn| turn.start))),
        Arc::new(Float64Array::from_iter_values(turns.iter().map(|turn| turn.end))),
        Arc::new(StringArray::from_iter_values(turns.iter().map(|turn| &turn.speaker))),
    ];
    Ok(RecordBatch::try_new(turns_schema(), columns)?)
}

/// The rows of speakers.
pub fn speakers_batch(speakers: &[Speaker]) -> Result<RecordBatch, StageError> {
    // Arrow asks how many there are before it takes the first.
    let values: Vec<f32> = speakers
        .iter()
        .flat_map(|speaker| &speaker.embedding)
        .copied()
        .collect();
    let embeddings = ListArray::try_new(
        embedding_item(),
        OffsetBuffer::from_lengths(speakers.iter().map(|speaker| speaker.embedding.len())),
        Arc::new(Float32Array::from(values)),
        None,
    )?;
    let columns: Vec<ArrayRef> = vec![
        rows(speakers.len())?,
        Arc::new(StringArray::from_iter_values(
            speakers.iter().map(|speaker| &speaker.name),
        )),
        Arc::new(Float64Array::from_iter_values(
            speakers.iter().map(|speaker| speaker.seconds),
        )),
        Arc::new(embeddings),
    ];
    Ok(RecordBatch::try_new(speakers_schema(), columns)?)
}

/// The row of a recording, named by its path with its ending; its length, and the place behind which it is damaged, are in
/// seconds.
pub fn recordings_batch(
    recording: &str,
    duration: f64,
    speakers: usize,
    damaged_at: Option<f64>,
) -> Result<RecordBatch, StageError> {
    let columns: Vec<ArrayRef> = vec![
        rows(1)?,
        Arc::new(StringArray::from(vec![recording])),
        Arc::new(Float64Array::from(vec![duration])),
        Arc::new(Int64Array::from(vec![i64::try_from(speakers).unwrap_or(i64::MAX)])),
        Arc::new(Float64Array::from(vec![damaged_at])),
    ];
    Ok(RecordBatch::try_new(recordings_schema(), columns)?)
}

/// The row of processing times in seconds: of diarization alone, and in total.
pub fn timings_batch(diarization: f64, total: f64) -> Result<RecordBatch, StageError> {
    let columns: Vec<ArrayRef> = vec![
        rows(1)?,
        Arc::new(Float64Array::from(vec![diarization])),
        Arc::new(Float64Array::from(vec![total])),
    ];
    Ok(RecordBatch::try_new(timings_schema(), columns)?)
}

fn other(name: &str) -> StageError {
    StageError::failed(format!("the column `{name}` is not that of speakers.diarize"))
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, StageError> {
    batch.column_by_name(name).ok_or_else(|| other(name))
}

fn numbers<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a Float64Array, StageError> {
    column(batch, name)?
        .as_primitive_opt::<Float64Type>()
        .ok_or_else(|| other(name))
}

fn texts<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a StringArray, StageError> {
    column(batch, name)?.as_string_opt::<i32>().ok_or_else(|| other(name))
}

/// Reads what [`turns_batch`] made.
pub fn read_turns(batch: &RecordBatch) -> Result<Vec<Turn>, StageError> {
    let (starts, ends) = (numbers(batch, "start")?, numbers(batch, "end")?);
    let speakers = texts(batch, "speaker")?;
    let turn = |row: usize| Turn {
        start: starts.value(row),
        end: ends.value(row),
        speaker: speakers.value(row).to_owned(),
    };
    Ok((0..batch.num_rows()).map(turn).collect())
}

/// Reads what [`speakers_batch`] made.
pub fn read_speakers(batch: &RecordBatch) -> Result<Vec<Speaker>, StageError> {
    let (names, seconds) = (texts(batch, "name")?, numbers(batch, "seconds")?);
    let embeddings = column(batch, "embedding")?
        .as_list_opt::<i32>()
        .ok_or_else(|| other("embedding"))?;
    let speaker = |row: usize| {
        let embedding = embeddings.value(row);
        let embedding = embedding
            .as_primitive_opt::<Float32Type>()
            .ok_or_else(|| other("embedding"))?;
        Ok(Speaker {
            name: names.value(row).to_owned(),
            embedding: embedding.values().to_vec(),
            seconds: seconds.value(row),
        })
    };
    (0..batch.num_rows()).map(speaker).collect()
}

/// The columns of a recording that result files have.
#[derive(Clone, Debug, PartialEq)]
pub struct WrittenRecording {
    /// Its path with its ending.
    pub file: String,
    /// Where it is damaged, in seconds.
    pub damaged_at: Option<f64>,
}

/// The recording that [`recordings_batch`] was given; none where it was refused.
pub fn read_recording(batch: &RecordBatch) -> Result<Option<WrittenRecording>, StageError> {
    let (names, damaged) = (texts(batch, "recording")?, numbers(batch, "damaged_at")?);
    let first = names.iter().zip(damaged).next();
    Ok(first.and_then(|(file, damaged_at)| {
        let file = file?.to_owned();
        Some(WrittenRecording { file, damaged_at })
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_what_was_written() {
        let turn = |start: f64, speaker: &str| Turn {
            start,
            end: start + 1.5,
            speaker: speaker.to_owned(),
        };
        let turns = [turn(0.25, "SPEAKER_00"), turn(1.0, "Ann Lee")];
        let batch = turns_batch(&turns).unwrap();
        assert_eq!(read_turns(&batch).unwrap(), turns);
        assert_eq!(read_turns(&batch.slice(1, 1)).unwrap(), turns[1..]);
        assert!(read_turns(&turns_batch(&[]).unwrap()).unwrap().is_empty());

        let speaker = |name: &str, embedding: &[f32]| Speaker {
            name: name.to_owned(),
            embedding: embedding.to_vec(),
            seconds: 2.5,
        };
        let speakers = [
            speaker("a", &[0.5, -1.0]),
            speaker("b", &[]),
            speaker("c", &[0.25, 3.0]),
        ];
        let batch = speakers_batch(&speakers).unwrap();
        assert_eq!(read_speakers(&batch).unwrap(), speakers);
        assert_eq!(read_speakers(&batch.slice(2, 1)).unwrap(), speakers[2..]);

        let recording = recordings_batch("a/b.wav", 3.0, 2, Some(3.0)).unwrap();
        let read = read_recording(&recording).unwrap().unwrap();
        assert_eq!((read.file.as_str(), read.damaged_at), ("a/b.wav", Some(3.0)));
        let whole = recordings_batch("a/b.wav", 3.0, 2, None).unwrap();
        assert_eq!(read_recording(&whole).unwrap().unwrap().damaged_at, None);
        assert_eq!(read_recording(&recording.slice(0, 0)).unwrap(), None);
        assert!(read_turns(&recording).is_err() && read_speakers(&recording).is_err());
        assert_eq!(timings_batch(0.5, 1.0).unwrap().num_rows(), 1);
    }
}
