//! The kind `transcription.utterances`: transcripts to rows of a manifest.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::compute::concat_batches;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_audio::listing::{Recording, shared_recordings};
use flow_kind::{
    Body, ColumnType, Conservation, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Port,
    Progress, ROW, Shape, StageError, WithShared,
};
use flow_storage::Storage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::rows::{SEGMENT_COLUMNS, read_metadata, read_segments};
use crate::{Metadata, Segment};

/// Makes rows of a manifest from transcripts, so that a model can be trained on them (pseudo-labels).
///
/// # What it does
///
/// Each segment that has a text becomes a row with the columns of `manifest.read`: the recording's file is `audio_path`, where
/// the segment begins in it `start`, in seconds, and its length `duration`; `lang` is the language that the model tagged the
/// recording with if it is one, or else the setting `lang`. `segment_id` is the recording and the segment's place in
/// milliseconds, `source` is `pseudo_label`. Additional columns for rules in SQL: `confidence` (the minimum over its
/// words: 1 is certain), `mean_confidence` (the segment's), `words` (their number), and in `extra` the confidence and
/// the digest of the model, so that the manifest records the origin of a row.
///
/// Rows whose recording has several languages, or none, where `lang` gives none are rejects (class `rule`, `no_language`), and so
/// are those of a recording whose path is not UTF-8 (class `fault`, `bad_path`).
///
/// # Example
///
/// ```yaml
/// utterances:
///   uses: transcription.utterances
///   from: {segments: transcribe.segments, recordings: transcribe.recordings}
///   with: {input: [talks]}
/// sure:
///   uses: sql
///   from: utterances
///   with: {query: "SELECT * FROM input WHERE confidence > 0.5 AND duration BETWEEN 1 AND 20"}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct UtterancesSettings {
    /// The recordings, as `transcription.transcribe` was given them.
    pub input: Vec<String>,
    /// Language of recordings to which the model gave none, or several.
    #[serde(default)]
    pub lang: String,
    /// Seconds of the recording before and after a segment that belong to its row, as far as it goes and no further than
    /// half of the way to the next segment.
    #[serde(default = "padding")]
    pub padding: f64,
}

fn padding() -> f64 {
    0.1
}

impl UtterancesSettings {
    /// The recordings by their names, with absolute paths, which the rows have.
    fn paths(&self, storage: &Storage) -> Result<BTreeMap<String, PathBuf>, StageError> {
        let recordings = shared_recordings(storage, &self.input)?;
        let named = |recording: &Recording| Ok((recording.name.clone(), absolute(recording)?));
        recordings.iter().map(named).collect()
    }
}

/// Where a recording is, wherever the process runs.
fn absolute(recording: &Recording) -> Result<PathBuf, StageError> {
    std::path::absolute(&recording.path).map_err(|error| StageError::setting("input", error))
}

/// The kind `transcription.utterances`.
pub struct Utterances;

impl Kind for Utterances {
    const NAME: &'static str = "transcription.utterances";
    const VERSION: u32 = 2;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("segments", "the port `segments` of a transcription.transcribe").columns(SEGMENT_COLUMNS),
        InputPort::streamed("recordings", "the port `recordings` of the same stage").columns(&[
            ("recording", ColumnType::Text),
            ("duration", ColumnType::Float64),
            ("damaged_at", ColumnType::Float64),
            ("languages", ColumnType::Any),
            ("model", ColumnType::Text),
            ("model_digest", ColumnType::Text),
        ]),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new(
        "utterances",
        "one row for each segment that has a text",
    )];
    type Settings = WithShared<UtterancesSettings, Storage>;

    fn shape(settings: &Self::Settings, _: &Inputs) -> Result<Shape, StageError> {
        if settings.input.is_empty() {
            return Err(StageError::setting("input", "`input` names no recording"));
        }
        if !(0.0..=10.0).contains(&settings.padding) {
            let why = format!("`padding` is {}; it must be from 0 to 10 seconds", settings.padding);
            return Err(StageError::setting("padding", why));
        }
        let utterances = Port::new("utterances", utterances_schema());
        Ok(Shape {
            conservation: Conservation::NewRows,
            ..Shape::local(vec![utterances])
        })
    }

    fn set_storage(settings: &mut Self::Settings, storage: &Storage) {
        settings.shared = storage.clone();
    }

    fn open(settings: &Self::Settings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(Maker {
            settings: settings.settings.clone(),
            recordings: shared_recordings(&context.storage, &settings.input)?,
            waiting: HashMap::new(),
        })))
    }

    /// Includes the names and paths of all recordings, since rows have paths and all partitions share this identity. So
    /// all rows are made again, which is cheap, when a recording is moved, added or removed.
    fn identity(settings: &Self::Settings) -> Value {
        json!({
            "input": settings.paths(&settings.shared).unwrap_or_default(),
            "lang": settings.lang,
            "padding": settings.padding,
        })
    }
}

fn utterances_schema() -> SchemaRef {
    let text = |name: &str| Field::new(name, DataType::Utf8, false);
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        text("segment_id"),
        text("shard_id"),
        text("text"),
        Field::new("duration", DataType::Float64, false),
        text("lang"),
        text("tar_member_name"),
        text("tar_path"),
        text("source"),
        text("audio_path"),
        Field::new("start", DataType::Float64, true),
        Field::new("offset", DataType::Int64, true),
        Field::new("size", DataType::Int64, true),
        Field::new("extra", DataType::Utf8, true),
        Field::new("confidence", DataType::Float64, true),
        Field::new("mean_confidence", DataType::Float64, true),
        Field::new("words", DataType::Int64, false),
    ]))
}

/// Batches of a partition.
#[derive(Default)]
struct Waiting {
    segments: Vec<RecordBatch>,
    recordings: Vec<RecordBatch>,
}

struct Maker {
    settings: UtterancesSettings,
    /// Sorted by name, which is that of the partition. All workers hold one list.
    recordings: Arc<Vec<Recording>>,
    waiting: HashMap<Partition, Waiting>,
}

impl Operator for Maker {
    fn batch(&mut self, input: &str, partition: &Partition, batch: RecordBatch, _: &mut Out) -> Result<(), StageError> {
        let waiting = self.waiting.entry(partition.clone()).or_default();
        match input {
            "segments" => waiting.segments.push(batch),
            _ => waiting.recordings.push(batch),
        }
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, out: &mut Out) -> Result<Progress, StageError> {
        let waiting = self.waiting.remove(partition).unwrap_or_default();
        // A recording that was refused has no row.
        let Some(first) = waiting.recordings.first() else {
            return Ok(Progress::Done);
        };
        let recording = concat_batches(&first.schema(), &waiting.recordings)?;
        if recording.num_rows() == 0 {
            return Ok(Progress::Done);
        }
        let metadata = read_metadata(&recording)?;
        let mut segments = Vec::new();
        for batch in &waiting.segments {
            segments.extend(read_segments(batch)?);
        }
        let name = partition.to_string();
        let place = self.recordings.binary_search_by(|recording| recording.name.cmp(&name));
        let place = place.map_err(|_| {
            StageError::setting(
                "input",
                format!("`input` has no recording `{name}`, but there are segments of it"),
            )
            .with_help("give it the recordings that were transcribed; channels by themselves (`channels: split`) can be no rows")
        })?;
        let path = absolute(&self.recordings[place])?;
        // Rows are text, so nothing could be read by another path.
        let Some(path) = path.to_str() else {
            let why = format!("{} is not UTF-8: rename it", path.display());
            out.reject_partition("bad_path", flow_kind::RejectClass::Fault, why);
            return Ok(Progress::Done);
        };
        let lang = match &metadata.languages[..] {
            [language] => language,
            _ => &self.settings.lang,
        };
        if lang.is_empty() {
            let found = metadata.languages.join(", ");
            out.reject_partition(
                "no_language",
                flow_kind::RejectClass::Rule,
                format!(
                    "the model tagged the recording with {}",
                    if found.is_empty() { "no language" } else { &found }
                ),
            );
            return Ok(Progress::Done);
        }
        out.send(
            0,
            utterances_batch(&name, path, lang, &metadata, &segments, self.settings.padding)?,
        );
        Ok(Progress::Done)
    }
}

/// Where rows begin and end, in seconds: with the padding, half of the pause to the next segment at most.
fn padded(segments: &[&Segment], duration: f64, padding: f64) -> Vec<(f64, f64)> {
    let span = |index: usize| {
        let segment = segments[index];
        let before = index
            .checked_sub(1)
            .map_or(0.0, |before| 0.5 * (segments[before].end + segment.start));
        let after = segments
            .get(index + 1)
            .map_or(duration, |next| 0.5 * (segment.end + next.start));
        let start = (segment.start - padding).max(before.min(segment.start)).max(0.0);
        let end = (segment.end + padding).min(after.max(segment.end)).min(duration);
        // To milliseconds, within the recording.
        ((start * 1000.0).ceil() / 1000.0, (end * 1000.0).floor() / 1000.0)
    };
    (0..segments.len()).map(span).collect()
}

fn utterances_batch(
    name: &str,
    path: &str,
    lang: &str,
    metadata: &Metadata,
    segments: &[Segment],
    padding: f64,
) -> Result<RecordBatch, StageError> {
    let said: Vec<&Segment> = segments
        .iter()
        .filter(|segment| !segment.text.trim().is_empty())
        .collect();
    let spans = padded(&said, metadata.duration_s, padding);
    let rows: Vec<(&Segment, (f64, f64))> = said
        .into_iter()
        .zip(spans)
        .filter(|(_, (start, end))| end > start)
        .collect();
    let count = u32::try_from(rows.len()).map_err(|_| StageError::failed("more than 2^32 segments"))?;
    let same = |text: &str| -> ArrayRef { Arc::new(StringArray::from_iter_values(rows.iter().map(|_| text))) };
    let numbers = |value: &dyn Fn(&Segment, f64, f64) -> Option<f64>| -> ArrayRef {
        let values = rows.iter().map(|(segment, (start, end))| value(segment, *start, *end));
        Arc::new(values.collect::<Float64Array>())
    };
    let nothing: ArrayRef = Arc::new(Int64Array::new_null(rows.len()));
    let ids = rows.iter().map(|(_, (start, end))| {
        let milliseconds = |time: f64| (time * 1000.0).round() as u64;
        format!("{name}_{:08}_{:08}", milliseconds(*start), milliseconds(*end))
    });
    let extras = rows.iter().map(|(segment, _)| {
        json!({"confidence": least_confidence(segment), "model_digest": metadata.model_digest}).to_string()
    });
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(0..count)),
        Arc::new(StringArray::from_iter_values(ids)),
        same(name),
        Arc::new(StringArray::from_iter_values(
            rows.iter().map(|(segment, _)| segment.text.trim()),
        )),
        numbers(&|_, start, end| Some(((end - start) * 1000.0).round() / 1000.0)),
        same(lang),
        same(""),
        same(""),
        same("pseudo_label"),
        same(path),
        numbers(&|_, start, _| Some(start)),
        Arc::clone(&nothing),
        nothing,
        Arc::new(StringArray::from_iter_values(extras)),
        numbers(&|segment, _, _| least_confidence(segment)),
        numbers(&|segment, _, _| segment.confidence),
        Arc::new(Int64Array::from_iter_values(
            rows.iter().map(|(segment, _)| segment.words.len() as i64),
        )),
    ];
    Ok(RecordBatch::try_new(utterances_schema(), columns)?)
}

/// The minimum over the words, or the segment's confidence where words have none.
fn least_confidence(segment: &Segment) -> Option<f64> {
    let words = segment.words.iter().filter_map(|word| word.confidence);
    words.reduce(f64::min).or(segment.confidence)
}

#[cfg(test)]
mod tests {
    use arrow::array::{Array, AsArray};
    use arrow::datatypes::Float64Type;
    use flow_runtime::harness::Harness;

    use super::*;
    use crate::Word;
    use crate::rows::{Speakers, recordings_batch, recordings_schema, segments_batch, segments_schema};

    fn segment(start: f64, end: f64, text: &str, confidences: &[f64]) -> Segment {
        let words = text.split(' ').zip(confidences).map(|(word, &confidence)| Word {
            word: word.to_owned(),
            start,
            end,
            confidence: Some(confidence),
            speaker: None,
        });
        Segment {
            start,
            end,
            text: text.to_owned(),
            words: words.collect(),
            confidence: Some(confidences.iter().sum::<f64>() / confidences.len().max(1) as f64),
            speaker: None,
        }
    }

    #[test]
    fn segments_become_rows_of_a_manifest() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("talks");
        std::fs::create_dir(&folder).unwrap();
        for name in ["a.wav", "b.wav"] {
            std::fs::write(folder.join(name), b"x").unwrap();
        }
        let settings = UtterancesSettings {
            input: vec![folder.to_string_lossy().into_owned()],
            lang: String::new(),
            padding: 0.1,
        };
        let metadata = Metadata {
            source_file: "a.wav".to_owned(),
            duration_s: 3.05,
            languages: vec!["hi".to_owned()],
            model_digest: "00ff".to_owned(),
            ..Metadata::default()
        };
        let mixed = Metadata {
            languages: vec!["hi".to_owned(), "en".to_owned()],
            ..metadata.clone()
        };
        let spoken = [
            segment(0.05, 1.0, "one two", &[0.75, 0.25]),
            segment(1.0625, 2.0, " ", &[]),
            segment(1.125, 3.0, "three", &[0.5]),
        ];
        let output = Harness::<Utterances>::new(settings)
            .input("segments", segments_schema(Speakers::Unasked))
            .input("recordings", recordings_schema(false, false))
            .feed("segments", "a", segments_batch(&spoken, Speakers::Unasked).unwrap())
            .feed("recordings", "a", recordings_batch(&metadata, 1.0, 1).unwrap())
            .feed(
                "segments",
                "b",
                segments_batch(&spoken[..1], Speakers::Unasked).unwrap(),
            )
            .feed("recordings", "b", recordings_batch(&mixed, 1.0, 1).unwrap())
            .run()
            .unwrap();
        let rows = output.rows("utterances", "a");
        let texts = |name: &str| {
            let column = rows.column_by_name(name).unwrap().as_string::<i32>();
            column
                .iter()
                .map(|text| text.unwrap_or_default().to_owned())
                .collect::<Vec<_>>()
        };
        let numbers = |name: &str| {
            rows.column_by_name(name)
                .unwrap()
                .as_primitive::<Float64Type>()
                .values()
                .to_vec()
        };
        assert_eq!(texts("text"), ["one two", "three"]);
        // Half of the pause of 0.125 s between them, the end of the recording after the second.
        assert_eq!(numbers("start"), [0.0, 1.063]);
        assert_eq!(numbers("duration"), [1.062, 1.987]);
        assert_eq!(texts("segment_id"), ["a_00000000_00001062", "a_00001063_00003050"]);
        assert_eq!(texts("lang"), ["hi", "hi"]);
        assert_eq!(numbers("confidence"), [0.25, 0.5]);
        assert_eq!(numbers("mean_confidence"), [0.5, 0.5]);
        assert!(texts("audio_path")[0].ends_with("talks/a.wav"));
        assert!(rows.column_by_name("offset").unwrap().is_null(0));
        assert_eq!(output.rejects().len(), 1, "two languages, and none is given");
    }
}
