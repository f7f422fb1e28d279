//! A transcript as a Parquet file of one row, for polars, pandas and DuckDB.

use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, ListArray, RecordBatch, StringArray, StructArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Fields, Schema};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use crate::transcript::{Transcript, rounded};
use crate::{Result, TranscriptionError};

/// A word or a segment, with its place in the recording.
struct Timed<'a> {
    text: &'a str,
    start: f64,
    end: f64,
    confidence: Option<f64>,
    speaker: Option<&'a str>,
}

/// One row for the recording, with the columns of the JSON lines (see [`crate::line_formats::jsonl`]): `audio_filepath`,
/// `duration` in seconds, `pred_text`, and the lists `word` and `segment` of structs of a text (`word`, `segment`), `start`
/// and `end` in seconds, `confidence` and `speaker`, which are null where they are not known; and `languages`, a list of
/// texts. For the row of a manifest there is `segment_id`, too. The files of several recordings have one schema, and so are a table together.
///
/// # Errors
/// If a time is not a number.
pub fn parquet(transcript: &Transcript) -> Result<Vec<u8>> {
    let words: Vec<Timed> = transcript
        .segments
        .iter()
        .flat_map(|segment| &segment.words)
        .map(|word| Timed {
            text: &word.word,
            start: rounded(word.start),
            end: rounded(word.end),
            confidence: word.confidence,
            speaker: word.speaker.as_deref(),
        })
        .collect();
    let segments: Vec<Timed> = transcript
        .segments
        .iter()
        .map(|segment| Timed {
            text: &segment.text,
            start: rounded(segment.start),
            end: rounded(segment.end),
            confidence: segment.confidence,
            speaker: segment.speaker.as_deref(),
        })
        .collect();
    let duration = rounded(transcript.metadata.duration_s);
    let times = words.iter().chain(&segments).flat_map(|one| [one.start, one.end]);
    if let Some(time) = times.chain([duration]).find(|time| !time.is_finite()) {
        return Err(TranscriptionError::transcript(
            "a time",
            format!("{time} is not a number"),
        ));
    }
    let languages: ArrayRef = Arc::new(StringArray::from_iter_values(&transcript.metadata.languages));
    let text = |value: &str| Arc::new(StringArray::from(vec![value])) as ArrayRef;
    let mut columns: Vec<(&str, ArrayRef)> = vec![
        ("audio_filepath", text(&transcript.metadata.source_file)),
        ("duration", Arc::new(Float64Array::from(vec![duration]))),
        ("pred_text", text(&transcript.text)),
        ("languages", list_of_one_row(languages)?),
        ("word", list_of_one_row(timed("word", &words)?)?),
        ("segment", list_of_one_row(timed("segment", &segments)?)?),
    ];
    if let Some(id) = transcript.metadata.row_id() {
        columns.push(("segment_id", text(id)));
    }
    let fields = columns
        .iter()
        .map(|(name, column)| Field::new(*name, column.data_type().clone(), false));
    let schema = Arc::new(Schema::new(fields.collect::<Fields>()));
    let columns = columns.into_iter().map(|(_, column)| column).collect();
    let batch = RecordBatch::try_new(Arc::clone(&schema), columns).map_err(not_written)?;
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .build();
    let mut writer = ArrowWriter::try_new(Vec::new(), schema, Some(properties)).map_err(not_written)?;
    writer.write(&batch).map_err(not_written)?;
    writer.into_inner().map_err(not_written)
}

/// The structs of words or segments; `name` is that of their text.
fn timed(name: &str, all: &[Timed]) -> Result<ArrayRef> {
    let fields = Fields::from(vec![
        Field::new(name, DataType::Utf8, false),
        Field::new("start", DataType::Float64, false),
        Field::new("end", DataType::Float64, false),
        Field::new("confidence", DataType::Float64, true),
        Field::new("speaker", DataType::Utf8, true),
    ]);
    let columns: Vec<ArrayRef> = vec![
        Arc::new(StringArray::from_iter_values(all.iter().map(|one| one.text))),
        Arc::new(Float64Array::from_iter_values(all.iter().map(|one| one.start))),
        Arc::new(Float64Array::from_iter_values(all.iter().map(|one| one.end))),
        Arc::new(all.iter().map(|one| one.confidence).collect::<Float64Array>()),
        Arc::new(all.iter().map(|one| one.speaker).collect::<StringArray>()),
    ];
    Ok(Arc::new(
        StructArray::try_new(fields, columns, None).map_err(not_written)?,
    ))
}

/// A column of one row, which holds all of `values`.
fn list_of_one_row(values: ArrayRef) -> Result<ArrayRef> {
    let item = Arc::new(Field::new("item", values.data_type().clone(), false));
    let offsets = OffsetBuffer::from_lengths([values.len()]);
    let list = ListArray::try_new(item, offsets, values, None).map_err(not_written)?;
    Ok(Arc::new(list))
}

fn not_written(error: impl std::fmt::Display) -> TranscriptionError {
    TranscriptionError::transcript("the Parquet file", error.to_string())
}
