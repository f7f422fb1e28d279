//! README.md of a dataset.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Field, SchemaRef};
use flow_audio::decode::SAMPLE_RATE;
use flow_corpus::columns;
use flow_kind::StageError;
use flow_text::language_tag::UNDETERMINED;
use serde::Serialize;
use serde_json::{Value, json};

use crate::settings::{AudioOfRows, DatasetSettings};

/// What was written of a split.
pub(super) struct WrittenSplit {
    pub name: &'static str,
    pub schema: SchemaRef,
    pub rows: u64,
    /// Of values, and of files.
    pub bytes: u64,
    pub file_bytes: u64,
    /// Rows and seconds of each language.
    pub languages: BTreeMap<String, (u64, f64)>,
}

impl WrittenSplit {
    /// Counts the rows of a batch with the columns `duration` and `lang`.
    pub fn add(&mut self, batch: &RecordBatch) -> Result<(), StageError> {
        let (seconds, languages) = (columns::number(batch, "duration")?, columns::text(batch, "lang")?);
        self.rows += batch.num_rows() as u64;
        for row in 0..batch.num_rows() {
            let (language, seconds) = (languages.value(row), seconds.value(row));
            let counted = match self.languages.get_mut(language) {
                Some(counted) => counted,
                None => self.languages.entry(language.to_owned()).or_default(),
            };
            *counted = (counted.0 + 1, counted.1 + seconds);
        }
        Ok(())
    }
}

/// What `datasets` calls a type; none for those that it has not.
pub(super) fn dtype_of(data_type: &DataType) -> Option<&'static str> {
    Some(match data_type {
        DataType::Utf8 => "string",
        DataType::LargeUtf8 => "large_string",
        DataType::Boolean => "bool",
        DataType::Int8 => "int8",
        DataType::Int16 => "int16",
        DataType::Int32 => "int32",
        DataType::Int64 => "int64",
        DataType::UInt8 => "uint8",
        DataType::UInt16 => "uint16",
        DataType::UInt32 => "uint32",
        DataType::UInt64 => "uint64",
        DataType::Float32 => "float32",
        DataType::Float64 => "float64",
        _ => return None,
    })
}

/// What the hub and `datasets` read of it, and a table for people.
pub(super) fn dataset_card(settings: &DatasetSettings, splits: &[WrittenSplit]) -> Result<String, StageError> {
    let languages: BTreeSet<&String> = splits.iter().flat_map(|split| split.languages.keys()).collect();
    let known: Vec<&&String> = languages.iter().filter(|language| **language != UNDETERMINED).collect();
    // JSON is YAML, and with its quotes `no` is a language to every reader.
    let language = match known.is_empty() {
        true => String::new(),
        false => format!("language: {}\n", json!(known)),
    };
    let feature = |field: &Arc<Field>| Feature {
        name: field.name().clone(),
        dtype: match dtype_of(field.data_type()) {
            Some(dtype) => json!(dtype),
            None => json!({ "audio": { "sampling_rate": SAMPLE_RATE } }),
        },
    };
    let features = splits
        .first()
        .map_or(Vec::new(), |split| split.schema.fields().iter().map(feature).collect());
    let with_rows = || splits.iter().filter(|split| split.rows > 0);
    let header = Header {
        license: Some(settings.license.clone()).filter(|license| !license.is_empty()),
        task_categories: ["automatic-speech-recognition"],
        configs: [Config {
            config_name: "default",
            // `datasets` refuses a split without rows.
            data_files: with_rows()
                .map(|split| DataFiles {
                    split: split.name,
                    path: format!("data/{}-*", split.name),
                })
                .collect(),
        }],
        dataset_info: Info {
            features,
            splits: with_rows()
                .map(|split| SplitInfo {
                    name: split.name,
                    num_bytes: split.bytes,
                    num_examples: split.rows,
                })
                .collect(),
            download_size: splits.iter().map(|split| split.file_bytes).sum(),
            dataset_size: splits.iter().map(|split| split.bytes).sum(),
        },
    };
    let header = serde_yaml::to_string(&header).map_err(StageError::failed)?;
    let mut card = format!("---\n{language}{header}---\n\n| split | language | rows | hours |\n|---|---|---|---|\n");
    for split in splits {
        for (language, (rows, seconds)) in &split.languages {
            let language = language.replace('|', "\\|");
            card += &format!("| {} | {language} | {} | {:.2} |\n", split.name, rows, seconds / 3600.0);
        }
    }
    card += match settings.audio_of_rows {
        AudioOfRows::Embed => "\n`audio` holds each recording as it was stored",
        AudioOfRows::Path => {
            "\n`audio` has the path of each recording on the machine that wrote the dataset, and holds what is within a larger file"
        }
    };
    card += "; a part of a longer recording is FLAC of 16 kHz. `duration` is in seconds.\n";
    Ok(card)
}

#[derive(Serialize)]
struct Header {
    #[serde(skip_serializing_if = "Option::is_none")]
    license: Option<String>,
    task_categories: [&'static str; 1],
    configs: [Config; 1],
    dataset_info: Info,
}

#[derive(Serialize)]
struct Config {
    config_name: &'static str,
    data_files: Vec<DataFiles>,
}

#[derive(Serialize)]
struct DataFiles {
    split: &'static str,
    path: String,
}

#[derive(Serialize)]
struct Info {
    features: Vec<Feature>,
    splits: Vec<SplitInfo>,
    download_size: u64,
    dataset_size: u64,
}

#[derive(Serialize)]
struct Feature {
    name: String,
    dtype: Value,
}

#[derive(Serialize)]
struct SplitInfo {
    name: &'static str,
    num_bytes: u64,
    num_examples: u64,
}
