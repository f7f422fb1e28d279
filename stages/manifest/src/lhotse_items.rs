//! Items of Lhotse's manifests: recordings, supervisions and cuts, as lines of JSON.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hasher;
use std::io::Write;
use std::path::PathBuf;

use arrow::array::{Array, RecordBatch, StringArray};
use flate2::write::GzEncoder;
use flate2::{Compression, GzBuilder};
use flow_corpus::extra::{self, EXTRA};
use flow_kind::{ExportFile, ExportSet, Partition, StageError};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use twox_hash::XxHash64;

use crate::columns;
use crate::dataset_rows::failed_to_write;
use crate::place_columns::with_extra;
use crate::write_lines::as_json;

/// A recording of one channel.
#[derive(Clone, Serialize)]
pub(crate) struct RecordingItem<'a> {
    pub id: &'a str,
    pub sources: [SourceItem<'a>; 1],
    pub sampling_rate: u32,
    pub num_samples: u64,
    /// In seconds.
    pub duration: f64,
    channel_ids: [u32; 1],
}

#[derive(Clone, Serialize)]
pub(crate) struct SourceItem<'a> {
    /// `file`, `url`, or `shar` (the recording is in the tar beside the cuts).
    #[serde(rename = "type")]
    kind: &'static str,
    channels: [u32; 1],
    source: &'a str,
}

impl<'a> RecordingItem<'a> {
    pub fn of(id: &'a str, (kind, source): (&'static str, &'a str), rate: u32, samples: u64) -> RecordingItem<'a> {
        RecordingItem {
            id,
            sources: [SourceItem {
                kind,
                channels: [0],
                source,
            }],
            sampling_rate: rate,
            num_samples: samples,
            duration: samples as f64 / f64::from(rate),
            channel_ids: [0],
        }
    }
}

/// `start` is that in the recording, or of a supervision within a cut that in the cut, in seconds.
#[derive(Serialize)]
pub(crate) struct SupervisionItem<'a> {
    pub id: &'a str,
    pub recording_id: &'a str,
    pub start: f64,
    pub duration: f64,
    channel: u32,
    text: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    language: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    speaker: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gender: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    custom: Option<Box<RawValue>>,
}

/// A `MonoCut` with one supervision, which is as long as the cut.
#[derive(Serialize)]
pub(crate) struct CutItem<'a> {
    id: &'a str,
    start: f64,
    duration: f64,
    channel: u32,
    supervisions: [SupervisionItem<'a>; 1],
    recording: RecordingItem<'a>,
    #[serde(rename = "type")]
    kind: &'static str,
}

impl<'a> CutItem<'a> {
    /// A part of `recording`, from `start` on, in seconds.
    pub fn of(start: f64, supervision: SupervisionItem<'a>, recording: RecordingItem<'a>) -> CutItem<'a> {
        CutItem {
            id: supervision.id,
            start,
            duration: supervision.duration,
            channel: 0,
            supervisions: [SupervisionItem {
                start: 0.0,
                ..supervision
            }],
            recording,
            kind: "MonoCut",
        }
    }
}

/// What supervisions have of the rows of a batch.
pub(crate) struct SupervisionRows<'b> {
    ids: &'b StringArray,
    texts: &'b StringArray,
    langs: &'b StringArray,
    /// Columns that are kept in `custom`.
    kept: [(&'static str, &'b StringArray); 2],
    extras: Option<&'b StringArray>,
    further: Vec<(&'b String, StringArray)>,
}

impl<'b> SupervisionRows<'b> {
    /// # Errors
    /// If a column is missing, or a number of the columns `further` is not one that JSON has.
    pub fn of(batch: &'b RecordBatch, further: &'b [String]) -> Result<Self, StageError> {
        let text = |name| columns::text(batch, name);
        let further = further.iter().map(|name| Ok((name, as_json(batch, name)?)));
        Ok(SupervisionRows {
            ids: text("segment_id")?,
            texts: text("text")?,
            langs: text("lang")?,
            kept: [("shard_id", text("shard_id")?), ("source", text("source")?)],
            extras: with_extra(batch.schema_ref()).then(|| text(EXTRA)).transpose()?,
            further: further.collect::<Result<_, StageError>>()?,
        })
    }

    pub fn id(&self, row: usize) -> &'b str {
        self.ids.value(row)
    }

    /// The supervision of a row, called `id`; `recording` is the name of its recording and where in it the row is, in seconds.
    ///
    /// # Errors
    /// If the row's `extra` is not a JSON object.
    pub fn item<'a>(
        &'a self,
        row: usize,
        id: &'a str,
        (recording_id, start, duration): (&'a str, f64, f64),
        partition: &Partition,
    ) -> Result<SupervisionItem<'a>, StageError> {
        let given = self.extras.filter(|extras| extras.is_valid(row));
        let given = given.map(|extras| extras.value(row)).filter(|extra| !extra.is_empty());
        let mut custom = match given.map(extra::members).transpose() {
            Ok(members) => members.unwrap_or_default(),
            Err(error) => {
                let message = format!(
                    "{partition}: `{EXTRA}` of {} is not a JSON object: {error}",
                    self.id(row)
                );
                return Err(StageError::failed(message));
            }
        };
        let further = self.further.iter().filter(|(_, values)| values.is_valid(row));
        custom.extend(further.map(|(name, values)| ((*name).clone(), values.value(row))));
        let (speaker, gender) = (take_text(&mut custom, "speaker"), take_text(&mut custom, "gender"));
        let mut members: BTreeMap<String, String> =
            custom.into_iter().map(|(key, value)| (key, harmless(value))).collect();
        let mut keep = |name: &str, value: &str| {
            if !value.is_empty() {
                members.insert(name.to_owned(), Value::from(value).to_string());
            }
        };
        for (name, values) in &self.kept {
            keep(name, values.value(row));
        }
        if id != self.id(row) {
            keep("segment_id", self.id(row));
        }
        let members: BTreeMap<String, &str> = members
            .iter()
            .map(|(key, value)| (key.clone(), value.as_str()))
            .collect();
        let custom = (!members.is_empty()).then(|| RawValue::from_string(extra::object(&members)));
        Ok(SupervisionItem {
            id,
            recording_id,
            start,
            duration,
            channel: 0,
            text: self.texts.value(row),
            language: self.langs.value(row),
            speaker,
            gender,
            custom: custom.transpose().map_err(StageError::failed)?,
        })
    }
}

/// The text or number of a key, which is taken out; another value stays.
fn take_text(members: &mut BTreeMap<String, &str>, key: &str) -> Option<String> {
    let text = match serde_json::from_str(members.get(key)?).ok()? {
        Value::String(text) => text,
        number @ Value::Number(_) => number.to_string(),
        _ => return None,
    };
    members.remove(key);
    (!text.is_empty()).then_some(text)
}

/// A value of `custom` on one line. An object that Lhotse would take for an image or a recording, and fail to load as one, becomes a text.
fn harmless(value: &str) -> String {
    // Line breaks can only be between values.
    let line = value.replace(['\n', '\r'], " ");
    if !line.starts_with('{') {
        return line;
    }
    let is_item = match serde_json::from_str::<BTreeMap<String, &RawValue>>(&line) {
        Ok(object) => {
            let has = |key: &str| object.contains_key(key);
            has("width") || ["id", "sources", "sampling_rate"].into_iter().all(has)
        }
        Err(_) => true,
    };
    match is_item {
        true => Value::from(line).to_string(),
        false => line,
    }
}

/// Names that are given once: Lhotse finds items by them.
#[derive(Default)]
pub(crate) struct Names {
    /// The last number that was put behind a name, by its hash.
    given: HashMap<u64, u32>,
}

impl Names {
    /// `wanted`, or with a number behind it if that is given already.
    pub fn give(&mut self, wanted: &str) -> String {
        let mut name = wanted.to_owned();
        while let Entry::Occupied(_) = self.given.entry(hash(&name)) {
            let number = self.given.entry(hash(wanted)).or_insert(1);
            *number = number.saturating_add(1);
            name = format!("{wanted}-{number}");
        }
        self.given.insert(hash(&name), 1);
        name
    }
}

/// Equal hashes of other names cost a number and nothing else.
fn hash(name: &str) -> u64 {
    let mut hasher = XxHash64::default();
    hasher.write(name.as_bytes());
    hasher.finish()
}

/// A file of lines that is packed by gzip. Its header has no time, so that the same lines give the same bytes.
pub(crate) struct Lines {
    file: GzEncoder<ExportFile>,
    path: PathBuf,
}

impl Lines {
    pub fn create(set: &mut ExportSet, name: &str) -> Result<Lines, StageError> {
        let file = set.create(name)?;
        Ok(Lines {
            path: file.path().to_path_buf(),
            file: GzBuilder::new().mtime(0).write(file, Compression::new(6)),
        })
    }

    pub fn push(&mut self, item: &impl Serialize) -> Result<(), StageError> {
        let mut line = serde_json::to_vec(item).map_err(StageError::failed)?;
        line.push(b'\n');
        self.file
            .write_all(&line)
            .map_err(|error| failed_to_write(&self.path, &error))
    }

    pub fn close(self) -> Result<(), StageError> {
        let file = self.file.finish();
        file.map_err(|error| failed_to_write(&self.path, &error))?.close();
        Ok(())
    }
}
