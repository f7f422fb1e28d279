//! Parquet files of a set, run of partitions by run: copied from the file that stands, or encoded anew.

use std::path::Path;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use flow_runtime::{Digest, StageError};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use rayon::prelude::*;

use crate::parquet_file::{HEAD, ROW_GROUP, Rows, write_parquet};
use crate::pieces::{Part, Piece, Standing, Taken, inputs_of, inputs_of_piece, runs};
use crate::statistics::{Durations, Figures, Languages};

/// A file, and what it is made from.
pub(crate) struct FileOfParts<'f> {
    pub path: &'f Path,
    pub schema: SchemaRef,
    /// Digest of all that the file's bytes follow from, but the rows of its parts.
    pub recipe: Digest,
    pub parts: &'f [Part],
    /// The file of the set that stands.
    pub standing: &'f Standing,
}

/// Takes a batch of rows.
pub(crate) type Push<'p> = dyn FnMut(RecordBatch) -> Result<(), StageError> + 'p;

/// A run that is taken over: its row groups, and the durations of its rows where they are wanted.
struct TakenRun {
    groups: Vec<Taken>,
    durations: Vec<RecordBatch>,
}

/// Writes the rows of all parts. `read` pushes those of the part at a place. Gives where the row groups lie, and the figures
/// of the rows, if `durations` are to be collected.
///
/// # Errors
/// Those of `read`; when a part has not as many rows as it says; when the file cannot be written.
pub(crate) fn write_parts(
    file: &FileOfParts<'_>,
    durations: Option<Durations>,
    read: impl Fn(usize, &mut Push<'_>) -> Result<(), StageError> + Send,
) -> Result<(Option<Languages<Figures>>, Vec<Piece>), StageError> {
    let runs = runs(file.parts);
    write_parquet(file.path, file.schema.clone(), move |rows| {
        let mut durations = durations;
        let with_durations = durations.is_some();
        for some in runs.chunks(rayon::current_num_threads()) {
            let taken: Result<Vec<Option<TakenRun>>, StageError> = some
                .par_iter()
                .map(|run| take(file, &file.parts[run.clone()], with_durations))
                .collect();
            for (run, taken) in some.iter().zip(taken?) {
                match (taken, &mut durations) {
                    (Some(taken), durations) => {
                        for group in taken.groups {
                            rows.push_encoded(group)?;
                        }
                        if let Some(durations) = durations {
                            taken.durations.iter().try_for_each(|batch| durations.add(batch))?;
                        }
                    }
                    (None, durations) => encode(file, run.clone(), rows, durations, &read)?,
                }
            }
        }
        // While the last rows are still encoded.
        rows.finish()?;
        Ok(durations.map(Durations::figures))
    })
}

/// The row groups of a run, if all of them stand as they would be made.
fn take(file: &FileOfParts<'_>, run: &[Part], with_durations: bool) -> Result<Option<TakenRun>, StageError> {
    let inputs = inputs_of(&file.recipe, run);
    let rows: u64 = run.iter().map(|part| part.rows).sum();
    let groups = (0..rows.div_ceil(ROW_GROUP as u64)).map(|piece| inputs_of_piece(&inputs, piece));
    let groups: Option<Vec<Taken>> = groups.map(|inputs| file.standing.take(&HEAD, &inputs)).collect();
    let Some(groups) = groups else { return Ok(None) };
    let mut durations = Vec::new();
    if with_durations {
        for group in &groups {
            let reader = ParquetRecordBatchReaderBuilder::try_new(group.bytes.clone()).map_err(StageError::failed)?;
            let wanted = ProjectionMask::columns(reader.parquet_schema(), ["duration", "lang"]);
            let batches = reader.with_projection(wanted).with_batch_size(ROW_GROUP).build();
            for batch in batches.map_err(StageError::failed)? {
                durations.push(batch?);
            }
        }
    }
    Ok(Some(TakenRun { groups, durations }))
}

fn encode(
    file: &FileOfParts<'_>,
    run: std::ops::Range<usize>,
    rows: &mut Rows,
    durations: &mut Option<Durations>,
    read: impl Fn(usize, &mut Push<'_>) -> Result<(), StageError>,
) -> Result<(), StageError> {
    rows.begin(inputs_of(&file.recipe, &file.parts[run.clone()]))?;
    for at in run {
        let mut pushed = 0;
        read(at, &mut |batch| {
            pushed += batch.num_rows() as u64;
            if let Some(durations) = durations {
                durations.add(&batch)?;
            }
            rows.push(batch)
        })?;
        check_rows(&file.parts[at], pushed)?;
    }
    rows.finish()
}

/// Checks that a part gave the rows that it says: what is taken over is counted by them.
///
/// # Errors
/// When it did not.
pub(crate) fn check_rows(part: &Part, pushed: u64) -> Result<(), StageError> {
    if part.rows == pushed {
        return Ok(());
    }
    Err(StageError::failed(format!(
        "{}: {pushed} rows were read, and {} were written",
        part.name, part.rows
    )))
}
