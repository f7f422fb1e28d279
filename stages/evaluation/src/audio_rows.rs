//! Manifest rows chosen for transcription, with the place of their audio.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use arrow::array::{Array, AsArray, StringArray};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use flow_audio::AudioError;
use flow_audio::embedded::file_of;
use flow_kernels::subnormals::kept;
use flow_kind::{Artifact, FileRange, StageError, Storage};
use flow_sampling::dataset::{AudioColumns, Dataset, Place, signals_of_one_recording};
use flow_sampling::manifest_rows::manifest_order;
use rayon::prelude::*;

use crate::transcribe::{Utterance, sample};

/// The column with JSON objects of what has no column of its own, as `manifest.read` gives it.
pub(crate) const EXTRA: &str = "extra";

/// Chosen rows, in manifest order.
pub struct AudioRows {
    pub utterances: Vec<Utterance>,
    data: Dataset,
    /// Row numbers of the utterances, rising.
    rows: Vec<u32>,
    /// Folder that is put before the paths of tars; none where the rows have complete paths.
    shards: Option<PathBuf>,
}

/// The source of an utterance, for error rates by source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The column `dataset`, or else `source`; empty where there is neither.
    pub source: String,
    /// The partition where the row is of that shard (two languages may have shards of one name), else the column `shard_id`.
    pub shard: String,
}

/// The place of an utterance's audio, as in a manifest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AudioPlace {
    /// A file, from the current directory.
    pub file: Option<String>,
    /// A tar, from the folder `shards`.
    pub tar: Option<String>,
    /// Where in the file or tar, in bytes: offset and size.
    pub range: Option<(u64, u64)>,
    /// Where in the recording the utterance begins, in seconds.
    pub start: Option<f64>,
}

impl AudioRows {
    /// Reads rows and chooses `per_language` of each language (0: all), always the same ones. `shards` is put before
    /// every `tar_path`.
    pub fn read(
        rows: &Artifact,
        members: Option<&Artifact>,
        shards: &str,
        per_language: usize,
    ) -> Result<Self, StageError> {
        let data = Dataset::read(rows, members, Path::new(shards), None)?;
        let count = u32::try_from(data.len()).map_err(|_| StageError::failed("more than 2^32 rows"))?;
        let all: Vec<_> = (0..count).filter_map(|row| Some((row, data.utterance(row)?))).collect();
        let chosen = sample(all.iter().map(|(_, u)| (u.lang, u.segment_id, u.text)), per_language);
        let (mut utterances, mut numbers) = (Vec::with_capacity(chosen.len()), Vec::with_capacity(chosen.len()));
        for (row, u) in chosen.into_iter().filter_map(|index| all.get(index)) {
            numbers.push(*row);
            utterances.push(Utterance {
                segment_id: u.segment_id.into(),
                lang: u.lang.into(),
                text: u.text.into(),
                duration: u.duration,
            });
        }
        drop(all);
        let below = matches!(
            AudioColumns::of(rows.schema(), members.is_some()),
            Some(AudioColumns::TarRange | AudioColumns::MemberName)
        );
        Ok(AudioRows {
            utterances,
            data,
            rows: numbers,
            shards: below.then(|| PathBuf::from(shards)),
        })
    }

    /// Where each utterance comes from. `rows` are those that were read.
    pub fn origins(&self, rows: &Artifact) -> Result<Vec<Origin>, StageError> {
        let has = |name: &&str| rows.schema().column_with_name(name).is_some();
        let source = ["dataset", "source"].into_iter().find(|name| has(name));
        let shard = Some("shard_id").filter(has);
        let mut origins = Vec::with_capacity(self.rows.len());
        let (mut first, mut wanted) = (0u64, self.rows.iter().peekable());
        for partition in manifest_order(rows) {
            let end = first + rows.rows_of(partition).unwrap_or(0);
            let before = origins.len();
            while wanted.next_if(|row| u64::from(**row) < end).is_some() {
                origins.push(Origin {
                    source: String::new(),
                    shard: partition.to_string(),
                });
            }
            let here = &mut origins[before..];
            let numbers = &self.rows[before..before + here.len()];
            if !here.is_empty() && (source.is_some() || shard.is_some()) {
                let columns: Vec<&str> = source.iter().chain(&shard).copied().collect();
                let batch = rows.read_whole(partition, Some(&columns))?;
                let text = |name: Option<&str>| -> Result<Option<StringArray>, StageError> {
                    let Some(column) = name.and_then(|name| batch.column_by_name(name)) else {
                        return Ok(None);
                    };
                    Ok(Some(cast(column, &DataType::Utf8)?.as_string::<i32>().clone()))
                };
                let (sources, shards) = (text(source)?, text(shard)?);
                for (origin, row) in here.iter_mut().zip(numbers) {
                    let at = (u64::from(*row) - first) as usize;
                    if let Some(sources) = sources.as_ref().filter(|column| column.is_valid(at)) {
                        origin.source = sources.value(at).to_owned();
                    }
                    if let Some(shards) = shards.as_ref().filter(|column| column.is_valid(at)) {
                        let shard = shards.value(at);
                        if partition.as_str().rsplit('/').next() != Some(shard) {
                            origin.shard = shard.to_owned();
                        }
                    }
                }
            }
            first = end;
        }
        Ok(origins)
    }

    /// Texts of each utterance: of the columns of these names, or else of the keys of the JSON objects in the column `extra`;
    /// null where there is none. `rows` are those that were read.
    ///
    /// # Errors
    /// If rows cannot be read, or a column has no texts or numbers.
    pub fn texts_of(&self, rows: &Artifact, names: &[&str]) -> Result<Vec<StringArray>, StageError> {
        let has = |name: &&str| rows.schema().column_with_name(name).is_some();
        let columns: BTreeSet<&str> = names.iter().map(|name| if has(name) { name } else { EXTRA }).collect();
        let columns: Vec<&str> = columns.into_iter().filter(|name| has(name)).collect();
        let mut texts: Vec<Vec<Option<String>>> = vec![Vec::new(); names.len()];
        let (mut first, mut wanted) = (0u64, self.rows.iter().peekable());
        for partition in manifest_order(rows) {
            let end = first + rows.rows_of(partition).unwrap_or(0);
            let mut here = Vec::new();
            while let Some(row) = wanted.next_if(|row| u64::from(**row) < end) {
                here.push((u64::from(*row) - first) as usize);
            }
            first = end;
            if here.is_empty() || columns.is_empty() {
                continue;
            }
            let batch = rows.read_whole(partition, Some(&columns))?;
            let column = |name: &str| -> Result<Option<StringArray>, StageError> {
                let Some(column) = batch.column_by_name(name) else {
                    return Ok(None);
                };
                Ok(Some(cast(column, &DataType::Utf8)?.as_string::<i32>().clone()))
            };
            let extra = column(EXTRA)?;
            for (name, texts) in names.iter().zip(&mut texts) {
                let column = column(name)?;
                let at = |texts: &Option<StringArray>, row: usize| -> Option<String> {
                    let texts = texts.as_ref().filter(|texts| texts.is_valid(row))?;
                    Some(texts.value(row).to_owned())
                };
                texts.extend(here.iter().map(|&row| match has(name) {
                    true => at(&column, row),
                    false => key_of(&at(&extra, row)?, name),
                }));
            }
        }
        Ok(texts.into_iter().map(StringArray::from).collect())
    }

    /// Where the audio of the utterance at `index` is.
    pub fn place(&self, index: usize) -> AudioPlace {
        let Some(utterance) = self.row(index) else {
            return AudioPlace::default();
        };
        let mut place = AudioPlace {
            start: utterance.start,
            ..AudioPlace::default()
        };
        let text = |path: &Path| Some(path.to_string_lossy().into_owned());
        match &utterance.place {
            Some(Place::File(path)) => place.file = text(path),
            Some(Place::Range { file, offset, size }) => {
                place.range = Some((*offset, *size));
                match self.shards.as_ref().and_then(|shards| file.strip_prefix(shards).ok()) {
                    Some(tar) => place.tar = text(tar),
                    None => place.file = text(file),
                }
            }
            None => {}
        }
        place
    }

    /// The recordings of all utterances, each once: those that are files, and those that are parts of one.
    pub fn recordings(&self) -> (Vec<PathBuf>, Vec<FileRange>) {
        let (mut files, mut ranges) = (Vec::new(), Vec::new());
        let places = self.rows.iter().filter_map(|&row| self.data.utterance(row)?.place);
        for place in places {
            match place {
                // Utterances of one long recording are mostly adjacent.
                Place::File(path) => {
                    let file = file_of(&path);
                    if files.last().is_none_or(|last| last != file) {
                        files.push(file.to_owned());
                    }
                }
                Place::Range { file, offset, size } => ranges.push(FileRange {
                    path: file,
                    offset,
                    size,
                }),
            }
        }
        (files, ranges)
    }

    /// The signal of the utterance at `index`: 16 kHz mono.
    pub fn signal(&self, storage: &Storage, index: usize) -> Result<Vec<f32>, String> {
        let utterance = self.row(index).ok_or("there is no such row")?;
        finite(utterance.signal(storage))
    }

    /// The signals of some utterances, by the threads of the current pool. Those that are in one recording, of which parts
    /// cannot be decoded alone, are decoded together.
    pub fn signals(&self, storage: &Storage, indices: &[usize]) -> Vec<Result<Vec<f32>, String>> {
        let mut of_place: HashMap<Place, Vec<usize>> = HashMap::new();
        // Places among `indices`.
        let mut together: Vec<Vec<usize>> = Vec::new();
        for (at, &index) in indices.iter().enumerate() {
            match self.row(index).filter(|row| row.by_duration).and_then(|row| row.place) {
                Some(place) => of_place.entry(place).or_default().push(at),
                None => together.push(vec![at]),
            }
        }
        for (place, all) in of_place {
            if all.len() > 1 && place.is_decoded_from_the_beginning(storage) {
                together.push(all);
            } else {
                together.extend(all.into_iter().map(|at| vec![at]));
            }
        }
        let load = |all: Vec<usize>| -> Vec<(usize, Result<Vec<f32>, String>)> {
            // Samples are not the model's numbers, so subnormal ones are kept.
            kept(|| match &all[..] {
                [at] => vec![(*at, self.signal(storage, indices[*at]))],
                _ => {
                    let rows: Vec<_> = all.iter().filter_map(|at| self.row(indices[*at])).collect();
                    let signals = signals_of_one_recording(storage, &rows).into_iter().map(finite);
                    all.iter().copied().zip(signals).collect()
                }
            })
        };
        let mut loaded: Vec<(usize, Result<Vec<f32>, String>)> = together.into_par_iter().flat_map_iter(load).collect();
        loaded.sort_unstable_by_key(|(at, _)| *at);
        loaded.into_iter().map(|(_, signal)| signal).collect()
    }

    fn row(&self, index: usize) -> Option<flow_sampling::dataset::Utterance<'_>> {
        self.data.utterance(*self.rows.get(index)?)
    }
}

/// The value of a key of a JSON object as a text; none of what is null, missing or no object.
fn key_of(object: &str, key: &str) -> Option<String> {
    match serde_json::from_str::<serde_json::Value>(object)
        .ok()?
        .get_mut(key)?
        .take()
    {
        serde_json::Value::Null => None,
        serde_json::Value::String(text) => Some(text),
        other => Some(other.to_string()),
    }
}

/// The samples, if all are finite, or an error text.
fn finite(signal: Result<Vec<f32>, AudioError>) -> Result<Vec<f32>, String> {
    let signal = signal.map_err(|error| error.to_string())?;
    if signal.iter().any(|sample| !sample.is_finite()) {
        return Err("the audio holds samples that are not numbers".into());
    }
    Ok(signal)
}
