//! Transcripts as rows: the ports of `transcription.transcribe` and `transcription.assign_speakers`.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, Float64Array, Int64Array, ListArray, RecordBatch, StringArray, StructArray,
    UInt32Array,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Fields, Float64Type, Int64Type, Schema, SchemaRef};
use flow_kind::{ColumnType, ROW, StageError};
use serde_json::{Map, Value};

use crate::boosted::Boosted;
use crate::coverage::{Coverage, Hole};
use crate::suspects::{Reason, Suspect};
use crate::{Metadata, Performance, Segment, Word};

/// Whether rows of segments have speakers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speakers {
    /// Not diarized: there are no columns for speakers.
    Unasked,
    /// Segments and words have a column `speaker`, which may be null.
    Named,
}

/// The column of a segment's or word's speaker, if there is one.
fn speaker_field(speakers: Speakers) -> Option<Field> {
    (speakers == Speakers::Named).then(|| Field::new("speaker", DataType::Utf8, true))
}

/// Columns of a word.
fn word_fields(speakers: Speakers) -> Fields {
    let fields = [
        Field::new("word", DataType::Utf8, false),
        Field::new("start", DataType::Float64, false),
        Field::new("end", DataType::Float64, false),
        Field::new("confidence", DataType::Float64, true),
    ];
    fields.into_iter().chain(speaker_field(speakers)).collect()
}

fn item(data_type: DataType) -> Arc<Field> {
    Arc::new(Field::new("item", data_type, false))
}

/// What a stage that reads segments needs of them.
pub(crate) const SEGMENT_COLUMNS: &[(&str, ColumnType)] = &[
    ("start", ColumnType::Float64),
    ("end", ColumnType::Float64),
    ("text", ColumnType::Text),
    ("confidence", ColumnType::Float64),
    ("words", ColumnType::Any),
];

/// One row for each segment.
pub fn segments_schema(speakers: Speakers) -> SchemaRef {
    let words = DataType::List(item(DataType::Struct(word_fields(speakers))));
    let fields = [
        Field::new(ROW, DataType::UInt32, false),
        Field::new("start", DataType::Float64, false),
        Field::new("end", DataType::Float64, false),
        Field::new("text", DataType::Utf8, false),
        Field::new("confidence", DataType::Float64, true),
        Field::new("words", words, false),
    ];
    Arc::new(Schema::new(
        fields.into_iter().chain(speaker_field(speakers)).collect::<Fields>(),
    ))
}

/// Fields of a hole, and of suspect words.
fn hole_fields() -> Fields {
    let fields = ["start", "end"].map(|name| Field::new(name, DataType::Float64, false));
    fields.into_iter().collect()
}

fn suspect_fields() -> Fields {
    let texts = ["text", "reason"].map(|name| Field::new(name, DataType::Utf8, false));
    let dropped = Field::new("dropped", DataType::Boolean, false);
    let more = texts.into_iter().chain([dropped]).map(Arc::new);
    hole_fields().iter().cloned().chain(more).collect()
}

/// Columns of coverage.
fn coverage_fields() -> Vec<Field> {
    vec![
        Field::new("coverage", DataType::Float64, false),
        Field::new("speech", DataType::Float64, false),
        Field::new("holes", DataType::List(item(DataType::Struct(hole_fields()))), false),
        Field::new("recovered", DataType::Int64, false),
        Field::new(
            "suspects",
            DataType::List(item(DataType::Struct(suspect_fields()))),
            false,
        ),
    ]
}

/// One row for each recording, with columns of coverage where that is asked for, and with one of what boosted phrases did ([`Boosted`] in
/// JSON) where there are any.
pub fn recordings_schema(with_coverage: bool, with_boosted: bool) -> SchemaRef {
    let mut fields = vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("recording", DataType::Utf8, false),
        Field::new("channel", DataType::Int64, true),
        Field::new("row", DataType::Utf8, true),
        Field::new("duration", DataType::Float64, false),
        Field::new("decoded", DataType::Float64, false),
        Field::new("windows", DataType::Int64, false),
        Field::new("languages", DataType::List(item(DataType::Utf8)), false),
        Field::new("model", DataType::Utf8, false),
        Field::new("model_digest", DataType::Utf8, false),
        Field::new("damaged_at", DataType::Float64, true),
    ];
    if with_coverage {
        fields.extend(coverage_fields());
    }
    if with_boosted {
        fields.push(Field::new("boosted", DataType::Utf8, false));
    }
    Arc::new(Schema::new(fields))
}

/// Time and duration of the processing of a recording: one row.
pub fn timings_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("processed_at", DataType::Utf8, false),
        Field::new("transcription_s", DataType::Float64, false),
        Field::new("total_s", DataType::Float64, false),
    ]))
}

/// The rows of segments.
pub fn segments_batch(segments: &[Segment], speakers: Speakers) -> Result<RecordBatch, StageError> {
    let count = u32::try_from(segments.len()).map_err(|_| StageError::failed("more than 2^32 segments"))?;
    // Arrow asks how many there are before it takes the first.
    let words: Vec<&Word> = segments.iter().flat_map(|segment| &segment.words).collect();
    let mut word_columns: Vec<ArrayRef> = vec![
        Arc::new(StringArray::from_iter_values(words.iter().map(|word| &word.word))),
        Arc::new(Float64Array::from_iter_values(words.iter().map(|word| word.start))),
        Arc::new(Float64Array::from_iter_values(words.iter().map(|word| word.end))),
        Arc::new(words.iter().map(|word| word.confidence).collect::<Float64Array>()),
    ];
    if speakers == Speakers::Named {
        let names = words.iter().map(|word| word.speaker.as_deref());
        word_columns.push(Arc::new(names.collect::<StringArray>()));
    }
    let words = ListArray::try_new(
        item(DataType::Struct(word_fields(speakers))),
        OffsetBuffer::from_lengths(segments.iter().map(|segment| segment.words.len())),
        Arc::new(StructArray::try_new(word_fields(speakers), word_columns, None)?),
        None,
    )?;
    let texts = segments.iter().map(|segment| &segment.text);
    let mut columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(0..count)),
        Arc::new(Float64Array::from_iter_values(
            segments.iter().map(|segment| segment.start),
        )),
        Arc::new(Float64Array::from_iter_values(
            segments.iter().map(|segment| segment.end),
        )),
        Arc::new(StringArray::from_iter_values(texts)),
        Arc::new(
            segments
                .iter()
                .map(|segment| segment.confidence)
                .collect::<Float64Array>(),
        ),
        Arc::new(words),
    ];
    if speakers == Speakers::Named {
        let names = segments.iter().map(|segment| segment.speaker.as_deref());
        columns.push(Arc::new(names.collect::<StringArray>()));
    }
    Ok(RecordBatch::try_new(segments_schema(speakers), columns)?)
}

/// The row of a recording. The model processed `decoded` seconds in `windows`.
pub fn recordings_batch(metadata: &Metadata, decoded: f64, windows: usize) -> Result<RecordBatch, StageError> {
    let languages = ListArray::try_new(
        item(DataType::Utf8),
        OffsetBuffer::from_lengths([metadata.languages.len()]),
        Arc::new(StringArray::from_iter_values(&metadata.languages)),
        None,
    )?;
    let row = metadata.row.as_ref().map(serde_json::to_string).transpose();
    let row = row.map_err(StageError::failed)?;
    let mut columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from(vec![0])),
        Arc::new(StringArray::from(vec![metadata.source_file.as_str()])),
        Arc::new(Int64Array::from(vec![metadata.channel.map(i64::from)])),
        Arc::new(StringArray::from(vec![row])),
        Arc::new(Float64Array::from(vec![metadata.duration_s])),
        Arc::new(Float64Array::from(vec![decoded])),
        Arc::new(Int64Array::from(vec![i64::try_from(windows).unwrap_or(i64::MAX)])),
        Arc::new(languages),
        Arc::new(StringArray::from(vec![metadata.model.as_str()])),
        Arc::new(StringArray::from(vec![metadata.model_digest.as_str()])),
        Arc::new(Float64Array::from(vec![metadata.damaged_at])),
    ];
    if let Some(coverage) = &metadata.coverage {
        columns.extend(coverage_columns(coverage)?);
    }
    if let Some(boosted) = &metadata.boosted {
        let json = serde_json::to_string(boosted).map_err(|error| StageError::failed(error.to_string()))?;
        columns.push(Arc::new(StringArray::from(vec![json])));
    }
    let schema = recordings_schema(metadata.coverage.is_some(), metadata.boosted.is_some());
    Ok(RecordBatch::try_new(schema, columns)?)
}

fn coverage_columns(coverage: &Coverage) -> Result<Vec<ArrayRef>, StageError> {
    let numbers = |values: Vec<f64>| -> ArrayRef { Arc::new(Float64Array::from(values)) };
    let list = |fields: Fields, columns: Vec<ArrayRef>, length: usize| -> Result<ArrayRef, StageError> {
        let values = StructArray::try_new(fields.clone(), columns, None)?;
        let offsets = OffsetBuffer::from_lengths([length]);
        let list = ListArray::try_new(item(DataType::Struct(fields)), offsets, Arc::new(values), None)?;
        Ok(Arc::new(list))
    };
    let (holes, suspects) = (&coverage.holes, &coverage.suspects);
    let of_holes = vec![
        numbers(holes.iter().map(|hole| hole.start).collect()),
        numbers(holes.iter().map(|hole| hole.end).collect()),
    ];
    let texts = suspects.iter().map(|suspect| suspect.text.as_str());
    let reasons = suspects.iter().map(|suspect| suspect.reason.name());
    let of_suspects: Vec<ArrayRef> = vec![
        numbers(suspects.iter().map(|suspect| suspect.start).collect()),
        numbers(suspects.iter().map(|suspect| suspect.end).collect()),
        Arc::new(StringArray::from_iter_values(texts)),
        Arc::new(StringArray::from_iter_values(reasons)),
        Arc::new(
            suspects
                .iter()
                .map(|suspect| Some(suspect.dropped))
                .collect::<BooleanArray>(),
        ),
    ];
    Ok(vec![
        numbers(vec![coverage.share]),
        numbers(vec![coverage.speech_s]),
        list(hole_fields(), of_holes, holes.len())?,
        Arc::new(Int64Array::from(vec![
            i64::try_from(coverage.recovered).unwrap_or(i64::MAX),
        ])),
        list(suspect_fields(), of_suspects, suspects.len())?,
    ])
}

/// The coverage of a recording, where it has these columns.
fn read_coverage(recording: &RecordBatch) -> Result<Option<Coverage>, StageError> {
    if recording.column_by_name("coverage").is_none() {
        return Ok(None);
    }
    let columns = Columns(recording);
    let number = |name: &str| Ok::<_, StageError>(columns.numbers(name)?.value(0));
    let list = |name: &str| -> Result<StructArray, StageError> {
        let values = columns.list(name)?.value(0);
        values.as_struct_opt().cloned().ok_or_else(|| other(name))
    };
    let (holes, suspects) = (list("holes")?, list("suspects")?);
    let time = |of: &StructArray, name: &str, row: usize| {
        let column = of.column_by_name(name).ok_or_else(|| other(name))?;
        Ok::<_, StageError>(numbers(column, name)?.value(row))
    };
    let text = |name: &str, row: usize| {
        let column = suspects
            .column_by_name(name)
            .and_then(|column| column.as_string_opt::<i32>());
        Ok::<_, StageError>(column.ok_or_else(|| other(name))?.value(row).to_owned())
    };
    let dropped = suspects
        .column_by_name("dropped")
        .and_then(|column| column.as_boolean_opt())
        .ok_or_else(|| other("dropped"))?;
    let hole = |row: usize| {
        let (start, end) = (time(&holes, "start", row)?, time(&holes, "end", row)?);
        Ok::<_, StageError>(Hole { start, end })
    };
    let suspect = |row: usize| {
        Ok::<_, StageError>(Suspect {
            start: time(&suspects, "start", row)?,
            end: time(&suspects, "end", row)?,
            text: text("text", row)?,
            reason: Reason::named(&text("reason", row)?).ok_or_else(|| other("suspects"))?,
            dropped: dropped.value(row),
        })
    };
    let recovered = columns.column("recovered")?.as_primitive_opt::<Int64Type>();
    let recovered = recovered.ok_or_else(|| other("recovered"))?.value(0);
    Ok(Some(Coverage {
        share: number("coverage")?,
        speech_s: number("speech")?,
        holes: (0..holes.len()).map(hole).collect::<Result<_, _>>()?,
        recovered: u64::try_from(recovered).unwrap_or(0),
        suspects: (0..suspects.len()).map(suspect).collect::<Result<_, _>>()?,
    }))
}

/// The row of times. `processed_at` is RFC 3339.
pub fn timings_batch(processed_at: &str, performance: &Performance) -> Result<RecordBatch, StageError> {
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from(vec![0])),
        Arc::new(StringArray::from(vec![processed_at])),
        Arc::new(Float64Array::from(vec![performance.transcription_s])),
        Arc::new(Float64Array::from(vec![performance.total_s])),
    ];
    Ok(RecordBatch::try_new(timings_schema(), columns)?)
}

/// The columns of a batch, by name.
struct Columns<'a>(&'a RecordBatch);

impl<'a> Columns<'a> {
    fn column(&self, name: &str) -> Result<&'a ArrayRef, StageError> {
        self.0.column_by_name(name).ok_or_else(|| other(name))
    }

    fn texts(&self, name: &str) -> Result<&'a StringArray, StageError> {
        self.column(name)?.as_string_opt::<i32>().ok_or_else(|| other(name))
    }

    fn numbers(&self, name: &str) -> Result<&'a Float64Array, StageError> {
        numbers(self.column(name)?, name)
    }

    fn list(&self, name: &str) -> Result<&'a ListArray, StageError> {
        self.column(name)?.as_list_opt::<i32>().ok_or_else(|| other(name))
    }
}

fn other(name: &str) -> StageError {
    StageError::failed(format!("the column `{name}` is not that of a transcript"))
}

fn numbers<'a>(column: &'a ArrayRef, name: &str) -> Result<&'a Float64Array, StageError> {
    column.as_primitive_opt::<Float64Type>().ok_or_else(|| other(name))
}

fn optional(column: &Float64Array, row: usize) -> Option<f64> {
    column.is_valid(row).then(|| column.value(row))
}

/// The name in a column of speakers, if there is such a column and a name.
fn speaker(column: Option<&ArrayRef>, row: usize) -> Result<Option<String>, StageError> {
    let Some(column) = column else { return Ok(None) };
    let names = column.as_string_opt::<i32>().ok_or_else(|| other("speaker"))?;
    Ok(names.is_valid(row).then(|| names.value(row).to_owned()))
}

/// Reads what [`segments_batch`] made, with and without speakers.
pub fn read_segments(batch: &RecordBatch) -> Result<Vec<Segment>, StageError> {
    let columns = Columns(batch);
    let (starts, ends) = (columns.numbers("start")?, columns.numbers("end")?);
    let (texts, confidences) = (columns.texts("text")?, columns.numbers("confidence")?);
    let words = columns.list("words")?;
    let segment = |row: usize| {
        Ok(Segment {
            start: starts.value(row),
            end: ends.value(row),
            text: texts.value(row).to_owned(),
            confidence: optional(confidences, row),
            speaker: speaker(batch.column_by_name("speaker"), row)?,
            words: read_words(&words.value(row))?,
        })
    };
    (0..batch.num_rows()).map(segment).collect()
}

fn read_words(words: &ArrayRef) -> Result<Vec<Word>, StageError> {
    let words = words.as_struct_opt().ok_or_else(|| other("words"))?;
    let column = |name: &str| words.column_by_name(name).ok_or_else(|| other(name));
    let texts = column("word")?.as_string_opt::<i32>().ok_or_else(|| other("word"))?;
    let (starts, ends) = (numbers(column("start")?, "start")?, numbers(column("end")?, "end")?);
    let confidences = numbers(column("confidence")?, "confidence")?;
    let word = |row: usize| {
        Ok(Word {
            word: texts.value(row).to_owned(),
            start: starts.value(row),
            end: ends.value(row),
            confidence: optional(confidences, row),
            speaker: speaker(words.column_by_name("speaker"), row)?,
        })
    };
    (0..words.len()).map(word).collect()
}

/// The number of speakers in the port `recordings` of a `speakers.diarize`; none where the recording was refused.
pub fn read_num_speakers(diarized: &RecordBatch) -> Result<Option<u64>, StageError> {
    let numbers = Columns(diarized).column("num_speakers")?;
    let numbers = numbers
        .as_primitive_opt::<Int64Type>()
        .ok_or_else(|| other("num_speakers"))?;
    Ok(numbers
        .iter()
        .flatten()
        .next()
        .and_then(|number| u64::try_from(number).ok()))
}

/// The processing times of a recording, including those of its diarization, `timings`.
pub fn with_diarization(
    performance: &Performance,
    duration: f64,
    timings: &RecordBatch,
) -> Result<Performance, StageError> {
    if timings.num_rows() == 0 {
        return Ok(*performance);
    }
    let timings = Columns(timings);
    let (diarization, total) = (timings.numbers("diarization_s")?, timings.numbers("total_s")?);
    Ok(Performance::new(
        duration,
        performance.transcription_s,
        diarization.value(0),
        performance.total_s + total.value(0),
    ))
}

/// Reads what [`recordings_batch`] and [`timings_batch`] made of one recording.
pub fn read_recording(recording: &RecordBatch, timing: &RecordBatch) -> Result<(Metadata, Performance), StageError> {
    if timing.num_rows() != 1 {
        return Err(StageError::failed(format!(
            "a recording has {} rows of times, instead of one",
            timing.num_rows()
        )));
    }
    let timing = Columns(timing);
    let metadata = Metadata {
        processed_at: timing.texts("processed_at")?.value(0).to_owned(),
        ..read_metadata(recording)?
    };
    let number = |name: &str| Ok::<_, StageError>(timing.numbers(name)?.value(0));
    let (transcription, total) = (number("transcription_s")?, number("total_s")?);
    let performance = Performance::new(metadata.duration_s, transcription, 0.0, total);
    Ok((metadata, performance))
}

/// The channel of a recording, if it was split into its channels.
fn channel(recording: &RecordBatch) -> Result<Option<u32>, StageError> {
    let Some(column) = recording.column_by_name("channel") else {
        return Ok(None);
    };
    let channels = column.as_primitive_opt::<Int64Type>().ok_or_else(|| other("channel"))?;
    Ok(channels
        .is_valid(0)
        .then(|| u32::try_from(channels.value(0)).unwrap_or(u32::MAX)))
}

/// The row of a manifest that named the recording, if one did.
fn manifest_row(recording: &RecordBatch) -> Result<Option<Map<String, Value>>, StageError> {
    let Some(column) = recording.column_by_name("row") else {
        return Ok(None);
    };
    let rows = column.as_string_opt::<i32>().ok_or_else(|| other("row"))?;
    let row = rows.is_valid(0).then(|| serde_json::from_str(rows.value(0)));
    row.transpose().map_err(|_| other("row"))
}

/// What boosted phrases did in a recording, where it has this column.
fn read_boosted(recording: &RecordBatch) -> Result<Option<Boosted>, StageError> {
    let Some(column) = recording.column_by_name("boosted") else {
        return Ok(None);
    };
    let texts = column.as_string_opt::<i32>().ok_or_else(|| other("boosted"))?;
    serde_json::from_str(texts.value(0)).map_err(|_| other("boosted"))
}

/// Reads what [`recordings_batch`] made of one recording; when it was transcribed is not known.
pub fn read_metadata(recording: &RecordBatch) -> Result<Metadata, StageError> {
    if recording.num_rows() != 1 {
        return Err(StageError::failed(format!(
            "a partition has {} recordings, instead of one",
            recording.num_rows()
        )));
    }
    let (channel, row) = (channel(recording)?, manifest_row(recording)?);
    let coverage = read_coverage(recording)?;
    let boosted = read_boosted(recording)?;
    let recording = Columns(recording);
    let text = |name: &str| Ok::<_, StageError>(recording.texts(name)?.value(0).to_owned());
    let languages = recording.list("languages")?.value(0);
    let languages = languages.as_string_opt::<i32>().ok_or_else(|| other("languages"))?;
    Ok(Metadata {
        source_file: text("recording")?,
        channel,
        row,
        duration_s: recording.numbers("duration")?.value(0),
        model: text("model")?,
        model_digest: text("model_digest")?,
        damaged_at: optional(recording.numbers("damaged_at")?, 0),
        languages: languages.iter().flatten().map(str::to_owned).collect(),
        num_speakers: None,
        coverage,
        boosted,
        processed_at: String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boosted::BoostedPhrase;

    fn suspect(reason: Reason) -> Suspect {
        Suspect {
            start: 0.25,
            end: 0.5,
            text: "way way".to_owned(),
            reason,
            dropped: reason == Reason::Repetition,
        }
    }

    #[test]
    fn what_is_read_is_what_was_written() {
        let word = |text: &str, confidence| Word {
            word: text.to_owned(),
            start: 0.5,
            end: 0.75,
            confidence,
            speaker: None,
        };
        let segments = vec![
            Segment {
                start: 0.5,
                end: 1.25,
                text: "ein \"Wort\"".to_owned(),
                confidence: Some(0.5),
                speaker: None,
                words: vec![word("ein", Some(0.25)), word("\"Wort\"", None)],
            },
            Segment::default(),
            Segment {
                words: vec![word("x", Some(1.0))],
                ..Segment::default()
            },
        ];
        let batch = segments_batch(&segments, Speakers::Unasked).unwrap();
        assert_eq!(read_segments(&batch).unwrap(), segments);
        assert_eq!(read_segments(&batch.slice(1, 2)).unwrap(), segments[1..]);
        assert!(
            read_segments(&segments_batch(&[], Speakers::Unasked).unwrap())
                .unwrap()
                .is_empty()
        );

        // With speakers, some of whom are not known.
        let mut named = segments.clone();
        named[0].speaker = Some("Ann".to_owned());
        named[0].words[1].speaker = Some("SPEAKER_00".to_owned());
        let batch = segments_batch(&named, Speakers::Named).unwrap();
        assert_eq!(read_segments(&batch).unwrap(), named);
        assert_eq!(read_segments(&batch.slice(1, 2)).unwrap(), named[1..]);
        let unasked = segments_batch(&named, Speakers::Unasked).unwrap();
        assert_eq!(read_segments(&unasked).unwrap(), segments);

        let metadata = Metadata {
            source_file: "a/b.wav".to_owned(),
            channel: Some(2),
            row: Some(Map::from_iter([("segment_id".to_owned(), Value::from("x/1"))])),
            duration_s: 2.5,
            model: "small.nemo".to_owned(),
            model_digest: "00ff".to_owned(),
            damaged_at: Some(2.5),
            languages: vec!["hi".to_owned(), "en".to_owned()],
            num_speakers: None,
            coverage: None,
            boosted: None,
            processed_at: "2026-01-02T03:04:05Z".to_owned(),
        };
        let performance = Performance::new(2.5, 0.25, 0.0, 0.5);
        let recording = recordings_batch(&metadata, 1.5, 2).unwrap();
        let timing = timings_batch(&metadata.processed_at, &performance).unwrap();
        assert_eq!(
            read_recording(&recording, &timing).unwrap(),
            (metadata.clone(), performance)
        );
        for suspects in [Vec::new(), vec![suspect(Reason::Repetition), suspect(Reason::NoSpeech)]] {
            let coverage = Coverage {
                share: 0.75,
                speech_s: 2.0,
                holes: vec![Hole { start: 0.5, end: 1.0 }; suspects.len()],
                recovered: 3,
                suspects,
            };
            let phrase = BoostedPhrase {
                phrase: "New York".to_owned(),
                count: 2,
                changed: 1,
                times: vec![0.5, 1.25],
            };
            let covered = Metadata {
                coverage: Some(coverage),
                boosted: Some(Boosted {
                    phrases: vec![phrase],
                    other_words: 1,
                    other_case: vec!["NORTH".to_owned()],
                }),
                ..metadata.clone()
            };
            let recording = recordings_batch(&covered, 1.5, 2).unwrap();
            assert_eq!(read_recording(&recording, &timing).unwrap(), (covered, performance));
        }
        assert!(read_recording(&recording, &timing.slice(0, 0)).is_err());
        assert!(read_recording(&timing, &timing).is_err());
    }
}
