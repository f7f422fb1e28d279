//! Parquet files of a set, run of partitions by run: copied from the file that stands, or encoded anew.

use std::io::Write;
use std::path::Path;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use flow_kind::{Digest, StageError};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::parquet_file::{Encoder, HEAD, MadeRun, ROW_GROUP, RunRows, write_parquet};
use crate::pieces::{Part, Piece, Standing, Taken, inputs_of, inputs_of_piece, runs};
use crate::statistics::{Durations, Figures, Languages};

/// A file, and what it is made from.
pub(crate) struct FileOfParts<'f> {
    /// What errors name.
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

/// What was written.
pub(crate) struct WrittenParts<W> {
    /// Of the rows, if they were asked for.
    pub figures: Option<Languages<Figures>>,
    /// Where the row groups lie.
    pub pieces: Vec<Piece>,
    /// What it was written to.
    pub to: W,
}

/// Writes the rows of all parts. `read` pushes those of the part at a place; it is called on all cores. `durations` are collected
/// where they are given.
///
/// # Errors
/// Those of `read`; when a part has not as many rows as it says; when the file cannot be written.
pub(crate) fn write_parts<W: Write + Send>(
    to: W,
    file: &FileOfParts<'_>,
    mut durations: Option<Durations>,
    read: impl Fn(usize, &mut Push<'_>) -> Result<(), StageError> + Sync,
) -> Result<WrittenParts<W>, StageError> {
    let runs = runs(file.parts);
    let with_durations = durations.is_some();
    let make = |at: usize, encoder: &Encoder| {
        let run = runs[at].clone();
        match take(file, &file.parts[run.clone()], with_durations)? {
            Some(taken) => Ok(taken),
            None => encode(file, run, encoder, with_durations, &read),
        }
    };
    let collect = |made: Durations| {
        if let Some(durations) = &mut durations {
            durations.append(made);
        }
        Ok(())
    };
    let (pieces, to) = write_parquet(to, file.path, file.schema.clone(), runs.len(), make, collect)?;
    Ok(WrittenParts {
        figures: durations.map(Durations::figures),
        pieces,
        to,
    })
}

/// The row groups of a run, if all of them are as they would be made, and the durations of its rows where they are wanted.
fn take(file: &FileOfParts<'_>, run: &[Part], with_durations: bool) -> Result<Option<MadeRun<Durations>>, StageError> {
    let inputs = inputs_of(&file.recipe, run);
    let rows: u64 = run.iter().map(|part| part.rows).sum();
    let groups = (0..rows.div_ceil(ROW_GROUP as u64)).map(|piece| inputs_of_piece(&inputs, piece));
    let groups: Option<Vec<Taken>> = groups.map(|inputs| file.standing.take(&HEAD, &inputs)).collect();
    let Some(groups) = groups else { return Ok(None) };
    let mut durations = Durations::default();
    if with_durations {
        for group in &groups {
            let reader = ParquetRecordBatchReaderBuilder::try_new(group.bytes.clone()).map_err(StageError::failed)?;
            let wanted = ProjectionMask::columns(reader.parquet_schema(), ["duration", "lang"]);
            let batches = reader.with_projection(wanted).with_batch_size(ROW_GROUP).build();
            for batch in batches.map_err(StageError::failed)? {
                durations.add(&batch?)?;
            }
        }
    }
    Ok(Some(MadeRun {
        groups,
        beside: durations,
    }))
}

fn encode(
    file: &FileOfParts<'_>,
    run: std::ops::Range<usize>,
    encoder: &Encoder,
    with_durations: bool,
    read: impl Fn(usize, &mut Push<'_>) -> Result<(), StageError>,
) -> Result<MadeRun<Durations>, StageError> {
    let mut rows = RunRows::new(encoder, inputs_of(&file.recipe, &file.parts[run.clone()]));
    let mut durations = Durations::default();
    for at in run {
        let mut pushed = 0;
        read(at, &mut |batch| {
            pushed += batch.num_rows() as u64;
            if with_durations {
                durations.add(&batch)?;
            }
            rows.push(batch)
        })?;
        check_rows(&file.parts[at], pushed)?;
    }
    Ok(MadeRun {
        groups: rows.finish()?,
        beside: durations,
    })
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
