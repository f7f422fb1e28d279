//! The losses of single rows over a training, kept in its checkpoints as `row_losses.parquet`.
//!
//! A row of the file is a segment: how often it was trained on, and its first, last and summed loss, in nats per token of its
//! text (per text where that has none). Rows are in the order of `segment_id`, so that what came since the last checkpoint is merged while
//! both are read, and memory depends on the steps between checkpoints and not on the corpus.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Float64Array, RecordBatch, StringArray, UInt64Array};
use arrow::datatypes::{DataType, Field, Float64Type, Schema, SchemaRef, UInt64Type};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use crate::error::TrainingError;

/// Name of the file within a checkpoint.
pub const ROW_LOSSES: &str = "row_losses.parquet";

/// Rows that are read or written at a time.
const BATCH: usize = 8192;

/// The loss of a segment in one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowLoss {
    pub segment: String,
    /// In nats per token.
    pub loss: f64,
}

/// What is known of a segment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossCourse {
    /// How often it was trained on.
    pub times: u64,
    /// In nats per token, as all that follow.
    pub first: f64,
    pub last: f64,
    pub sum: f64,
}

impl LossCourse {
    pub fn mean(&self) -> f64 {
        self.sum / self.times as f64
    }

    fn once(loss: f64) -> LossCourse {
        LossCourse {
            times: 1,
            first: loss,
            last: loss,
            sum: loss,
        }
    }

    /// This, and what came after it.
    fn and(self, later: LossCourse) -> LossCourse {
        LossCourse {
            times: self.times.saturating_add(later.times),
            first: self.first,
            last: later.last,
            sum: self.sum + later.sum,
        }
    }
}

/// The losses since the last checkpoint, and where those before are.
#[derive(Clone, Debug, Default)]
pub struct RowLosses {
    /// `row_losses.parquet` of the last checkpoint.
    before: Option<PathBuf>,
    since: BTreeMap<String, LossCourse>,
}

impl RowLosses {
    /// Goes on after the checkpoint in a folder, if there is one.
    pub fn after(checkpoint: Option<&Path>) -> RowLosses {
        RowLosses {
            before: checkpoint.map(|folder| folder.join(ROW_LOSSES)),
            since: BTreeMap::new(),
        }
    }

    /// Adds the losses of a step. Those that are not finite do not count.
    pub fn add(&mut self, rows: Vec<RowLoss>) {
        for RowLoss { segment, loss } in rows.into_iter().filter(|row| row.loss.is_finite()) {
            let now = LossCourse::once(loss);
            let known = self.since.entry(segment);
            known.and_modify(|known| *known = known.and(now)).or_insert(now);
        }
    }

    /// Hands on what a checkpoint is to have, and starts over after the checkpoint of that folder.
    pub fn hand_over(&mut self, checkpoint: &Path) -> RowLosses {
        std::mem::replace(self, RowLosses::after(Some(checkpoint)))
    }

    /// Writes all losses into the folder of a checkpoint.
    ///
    /// # Errors
    /// Where the file cannot be written, or that of the checkpoint before is damaged.
    pub fn write(&self, folder: &Path) -> Result<(), TrainingError> {
        let path = folder.join(ROW_LOSSES);
        let failed = |error: &dyn std::fmt::Display| TrainingError::data(format!("{}: {error}", path.display()));
        let file = File::create(&path).map_err(TrainingError::file(&path))?;
        let zstd = ZstdLevel::try_new(1).map_err(|error| failed(&error))?;
        let properties = WriterProperties::builder()
            .set_created_by("flow".into())
            .set_compression(Compression::ZSTD(zstd))
            .build();
        let writer = ArrowWriter::try_new(file, schema(), Some(properties)).map_err(|error| failed(&error))?;
        let mut sink = Sink {
            writer,
            rows: Vec::new(),
        };
        let mut since = self.since.iter().peekable();
        if let Some(before) = self.before.as_ref().filter(|before| before.exists()) {
            for row in read_row_losses(before)? {
                let (segment, course) = row?;
                while let Some((name, own)) = since.next_if(|(name, _)| **name < segment) {
                    sink.push(name.clone(), *own).map_err(|error| failed(&error))?;
                }
                let again = since.next_if(|(name, _)| **name == segment);
                let course = again.map_or(course, |(_, own)| course.and(*own));
                sink.push(segment, course).map_err(|error| failed(&error))?;
            }
        }
        for (name, own) in since {
            sink.push(name.clone(), *own).map_err(|error| failed(&error))?;
        }
        sink.close().map_err(|error| failed(&error))
    }
}

fn schema() -> SchemaRef {
    let field = |name: &str, data_type| Field::new(name, data_type, false);
    Arc::new(Schema::new(vec![
        field("segment_id", DataType::Utf8),
        field("times", DataType::UInt64),
        field("first_loss", DataType::Float64),
        field("last_loss", DataType::Float64),
        field("total_loss", DataType::Float64),
    ]))
}

/// Rows on their way into the file.
struct Sink {
    writer: ArrowWriter<File>,
    rows: Vec<(String, LossCourse)>,
}

impl Sink {
    fn push(&mut self, segment: String, course: LossCourse) -> Result<(), parquet::errors::ParquetError> {
        self.rows.push((segment, course));
        match self.rows.len() < BATCH {
            true => Ok(()),
            false => self.flush(),
        }
    }

    fn flush(&mut self) -> Result<(), parquet::errors::ParquetError> {
        let rows = std::mem::take(&mut self.rows);
        let numbers = |of: fn(&LossCourse) -> f64| -> ArrayRef {
            Arc::new(Float64Array::from_iter_values(
                rows.iter().map(|(_, course)| of(course)),
            ))
        };
        let columns: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from_iter_values(rows.iter().map(|(segment, _)| segment))),
            Arc::new(UInt64Array::from_iter_values(
                rows.iter().map(|(_, course)| course.times),
            )),
            numbers(|course| course.first),
            numbers(|course| course.last),
            numbers(|course| course.sum),
        ];
        self.writer.write(&RecordBatch::try_new(schema(), columns)?)
    }

    fn close(mut self) -> Result<(), parquet::errors::ParquetError> {
        self.flush()?;
        self.writer.close().map(drop)
    }
}

/// The rows of a file of losses, in the order of their segments.
///
/// # Errors
/// Where it cannot be read, or is none.
pub fn read_row_losses(path: &Path) -> Result<RowLossReader, TrainingError> {
    let failed = |error: &dyn std::fmt::Display| TrainingError::data(format!("{}: {error}", path.display()));
    let file = flow_kind::open_regular_file(path).map_err(TrainingError::file(path))?;
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| failed(&error))?;
    let is_ours = builder
        .schema()
        .fields()
        .iter()
        .map(|field| (field.name(), field.data_type()));
    if !is_ours.eq(schema().fields().iter().map(|field| (field.name(), field.data_type()))) {
        return Err(failed(&"it is not a file of losses"));
    }
    let batches = builder.with_batch_size(BATCH).build().map_err(|error| failed(&error))?;
    Ok(RowLossReader {
        path: path.to_owned(),
        batches,
        batch: None,
        row: 0,
    })
}

/// See [`read_row_losses`].
pub struct RowLossReader {
    path: PathBuf,
    batches: ParquetRecordBatchReader,
    batch: Option<RecordBatch>,
    row: usize,
}

impl Iterator for RowLossReader {
    type Item = Result<(String, LossCourse), TrainingError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.batch.as_ref().is_none_or(|batch| self.row >= batch.num_rows()) {
            match self.batches.next()? {
                Ok(batch) => (self.batch, self.row) = (Some(batch), 0),
                Err(error) => {
                    let path = self.path.display();
                    return Some(Err(TrainingError::data(format!("{path}: {error}"))));
                }
            }
        }
        let (batch, row) = (self.batch.as_ref()?, self.row);
        self.row += 1;
        let number = |column: usize| batch.column(column).as_primitive::<Float64Type>().value(row);
        let course = LossCourse {
            times: batch.column(1).as_primitive::<UInt64Type>().value(row).max(1),
            first: number(2),
            last: number(3),
            sum: number(4),
        };
        Some(Ok((batch.column(0).as_string::<i32>().value(row).to_owned(), course)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(path: &Path) -> Vec<(String, LossCourse)> {
        read_row_losses(path).unwrap().map(Result::unwrap).collect()
    }

    fn write(losses: &RowLosses, folder: &Path) -> PathBuf {
        std::fs::create_dir_all(folder).unwrap();
        losses.write(folder).unwrap();
        folder.join(ROW_LOSSES)
    }

    proptest! {
        /// However often checkpoints are written, and where training is interrupted, the last one has the same.
        #[test]
        fn checkpoints_change_nothing(
            steps in prop::collection::vec(prop::collection::vec((0u8..12, 1..64i32), 0..5), 1..20),
            written in prop::collection::vec(any::<bool>(), 20),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let rows = |step: &[(u8, i32)]| step.iter().map(|(row, loss)| RowLoss {
                segment: format!("s{row}"),
                // Sums of these are exact in any grouping.
                loss: f64::from(*loss) / 8.0,
            }).collect::<Vec<_>>();
            let mut losses = RowLosses::after(None);
            let mut expected: BTreeMap<String, Vec<f64>> = BTreeMap::new();
            for (at, step) in steps.iter().enumerate() {
                losses.add(rows(step));
                for row in rows(step) {
                    expected.entry(row.segment).or_default().push(row.loss);
                }
                if written[at] {
                    let checkpoint = folder.path().join(at.to_string());
                    write(&losses.hand_over(&checkpoint), &checkpoint);
                    // What follows is lost, and done again.
                    losses.add(rows(step));
                    losses = RowLosses::after(Some(&checkpoint));
                }
            }
            let found = all(&write(&losses, &folder.path().join("last")));
            let expected: Vec<_> = expected.into_iter().map(|(segment, losses)| {
                let course = LossCourse {
                    times: losses.len() as u64,
                    first: losses[0],
                    last: losses[losses.len() - 1],
                    sum: losses.iter().sum(),
                };
                (segment, course)
            }).collect();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn more_rows_than_a_batch_are_merged_and_damage_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let mut losses = RowLosses::after(None);
        let row = |at: usize, loss| RowLoss {
            segment: format!("{at:06}"),
            loss,
        };
        losses.add((0..2 * BATCH + 5).map(|at| row(at, 1.0)).collect());
        losses.add(vec![row(3, f64::NAN), row(4, f64::INFINITY)]);
        let first = folder.path().join("first");
        let path = write(&losses.hand_over(&first), &first);
        losses.add((BATCH..3 * BATCH).map(|at| row(at, 3.0)).collect());
        let found = all(&write(&losses, &folder.path().join("second")));
        assert_eq!(found.len(), 3 * BATCH);
        assert!(found.is_sorted_by(|one, other| one.0 < other.0));
        let of = |at: usize| (found[at].1.times, found[at].1.mean(), found[at].1.last);
        assert_eq!(
            (of(3), of(BATCH), of(3 * BATCH - 1)),
            ((1, 1.0, 1.0), (2, 2.0, 3.0), (1, 3.0, 3.0))
        );
        let bytes = std::fs::read(&path).unwrap();
        for damaged in [&bytes[..bytes.len() / 2], b"", b"PAR1"] {
            std::fs::write(&path, damaged).unwrap();
            let error = losses.write(&folder.path().join("second")).unwrap_err().to_string();
            assert!(error.contains(ROW_LOSSES), "{error}");
        }
    }
}
