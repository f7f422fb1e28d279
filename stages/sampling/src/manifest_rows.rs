//! Durations and languages of a manifest, from a file or from an artifact.

use std::path::Path;

use arrow::array::{Array, AsArray, BooleanArray, RecordBatch};
use arrow::compute::{cast, filter_record_batch};
use arrow::datatypes::{DataType, Float64Type};
use flow_kind::{Artifact, Partition, StageError};
use flow_parquet::ForeignParquet;
use flow_storage::Storage;
use parquet::arrow::ProjectionMask;

use crate::dataset::lowest_hashes;
use crate::error::SamplingError;
use crate::languages::Languages;

/// The columns of a manifest that a plan needs, in row order.
#[derive(Clone, Debug, Default)]
pub struct ManifestRows {
    /// In seconds.
    pub durations: Vec<f64>,
    pub languages: Languages,
    /// Characters (Unicode code points) of each text, its language tag included. Empty where the texts were not
    /// read.
    pub text_lengths: Vec<u32>,
}

impl ManifestRows {
    /// Checks for rows that cannot be packed.
    pub fn check(&self) -> Result<(), SamplingError> {
        let rows = self.durations.len();
        if rows != self.languages.len() || u32::try_from(rows).is_err() {
            return Err(SamplingError::Rows {
                durations: rows,
                languages: self.languages.len(),
            });
        }
        let wrong = |seconds: &f64| !(seconds.is_finite() && *seconds > 0.0);
        match self.durations.iter().position(wrong) {
            None => Ok(()),
            Some(row) => Err(SamplingError::Duration {
                row,
                seconds: self.durations[row],
            }),
        }
    }

    /// Adds the rows of a batch with the columns `duration` and `lang`, and the length of `text` where there is one.
    pub fn push(&mut self, batch: &RecordBatch) -> Result<(), SamplingError> {
        let durations = column(batch, "duration", &DataType::Float64)?;
        let languages = column(batch, "lang", &DataType::Utf8)?;
        self.durations
            .extend_from_slice(durations.as_primitive::<Float64Type>().values());
        for language in languages.as_string::<i32>().iter().flatten() {
            self.languages.push(language)?;
        }
        if let Some(texts) = batch.column_by_name("text").filter(|texts| is_text(texts.data_type())) {
            let texts = cast(texts, &DataType::Utf8).map_err(|error| SamplingError::Column {
                column: "text".into(),
                why: format!("cannot be read: {error}"),
            })?;
            let length = |text: Option<&str>| text.map_or(0, |text| text.chars().count() as u32);
            self.text_lengths.extend(texts.as_string::<i32>().iter().map(length));
        }
        Ok(())
    }

    /// Those of the rows that `numbers` name, in that order.
    pub fn part(&self, numbers: &[u32]) -> Result<Self, SamplingError> {
        let mut part = ManifestRows {
            durations: numbers.iter().map(|&row| self.durations[row as usize]).collect(),
            ..ManifestRows::default()
        };
        for &row in numbers {
            part.languages
                .push(self.languages.of_row(row as usize).unwrap_or_default())?;
        }
        if !self.text_lengths.is_empty() {
            part.text_lengths = numbers.iter().map(|&row| self.text_lengths[row as usize]).collect();
        }
        Ok(part)
    }

    /// Reads a manifest file. Dictionaries, large strings and other widths of numbers are taken too.
    pub fn from_file(storage: &Storage, path: &Path) -> Result<Self, SamplingError> {
        let failed = |error: &dyn std::fmt::Display| SamplingError::Manifest {
            path: path.to_owned(),
            why: error.to_string(),
        };
        let file = ForeignParquet::open(storage, path).map_err(|error| failed(&error))?;
        let metadata = file.metadata().map_err(|error| failed(&error))?;
        let wanted = ProjectionMask::columns(metadata.parquet_schema(), ["duration", "lang", "text"]);
        let mut rows = ManifestRows::default();
        let batches = file.rows(&metadata, wanted, 65_536, None);
        for batch in batches.map_err(|error| failed(&error))? {
            let batch = batch.map_err(|error| failed(&error))?;
            rows.push(&batch).map_err(|error| failed(&error))?;
        }
        Ok(rows)
    }

    /// Reads the rows of an artifact in [`manifest_order`]: all, or `max_samples` of them, as [`crate::dataset`] does.
    pub fn from_artifact(rows: &Artifact, max_samples: Option<u64>) -> Result<Self, StageError> {
        let chosen = max_samples.map(|count| lowest_hashes(rows, count)).transpose()?;
        let has_text = rows.schema().column_with_name("text").is_some();
        let columns = ["duration", "lang", "text"];
        let mut all = ManifestRows::default();
        let mut row = 0;
        for partition in manifest_order(rows) {
            for batch in rows.read(partition, Some(&columns[..2 + usize::from(has_text)]))? {
                let mut batch = batch?;
                let count = batch.num_rows();
                if let Some(chosen) = &chosen {
                    let keep = BooleanArray::from(chosen[row..row + count].to_vec());
                    batch = filter_record_batch(&batch, &keep)?;
                }
                row += count;
                all.push(&batch).map_err(StageError::failed)?;
            }
        }
        Ok(all)
    }
}

/// The partitions of an artifact in the row order of manifests: by language, then by shard. This is not the
/// order of their joined names, since `/` sorts after `-` and `.`.
pub fn manifest_order(rows: &Artifact) -> Vec<&Partition> {
    let mut partitions: Vec<&Partition> = rows.partitions().collect();
    partitions.sort_by(|a, b| a.as_str().split('/').cmp(b.as_str().split('/')));
    partitions
}

/// A column without nulls, cast to the type that is needed.
pub(crate) fn column(batch: &RecordBatch, name: &str, to: &DataType) -> Result<arrow::array::ArrayRef, SamplingError> {
    let wrong = |why: String| SamplingError::Column {
        column: name.into(),
        why,
    };
    let found = batch.column_by_name(name).ok_or_else(|| wrong("is missing".into()))?;
    if found.null_count() > 0 || *found.data_type() == DataType::Null && !found.is_empty() {
        return Err(wrong("has nulls".into()));
    }
    if to.is_numeric() && !found.data_type().is_numeric() {
        return Err(wrong(format!("is {}, not a number", found.data_type())));
    }
    cast(found, to).map_err(|error| wrong(format!("cannot be read as {to}: {error}")))
}

fn is_text(data_type: &DataType) -> bool {
    match data_type {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, values) => is_text(values),
        _ => false,
    }
}
