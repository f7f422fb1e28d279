//! Rejects as a file of Parquet.

use std::io;
use std::path::Path;

use arrow::array::RecordBatch;
use flow_corpus::columns::constant;
use flow_corpus::written_set::rejects_schema;
use flow_kind::{Digest, PartOfRejects, RejectSet, StageError};

use crate::pieces::{Part, Piece, Standing};
use crate::write_parts::{FileOfParts, write_parts};

/// Writes all rejects to `path`. `row` is null where a whole partition was refused.
///
/// # Errors
/// When rejects cannot be read, or the file cannot be written.
pub fn write_rejects(rejects: &RejectSet, path: &Path, to: impl io::Write + Send) -> Result<(), StageError> {
    write_rejects_of_set(rejects, Digest::of(b""), &Standing::default(), path, to).map(|_| ())
}

/// The same for a set, where one stands perhaps. Gives `to`, and where the row groups lie.
pub(crate) fn write_rejects_of_set<W: io::Write + Send>(
    rejects: &RejectSet,
    recipe: Digest,
    standing: &Standing,
    path: &Path,
    to: W,
) -> Result<(W, Vec<Piece>), StageError> {
    let of_stages: Vec<_> = rejects.parts().filter(|part| part.rows() > 0).collect();
    let part = |part: &PartOfRejects<'_>| Part {
        // A stage's name has no space.
        name: format!("{} {}", part.stage(), part.partition()),
        rows: part.rows(),
        digest: part.digest(),
    };
    let parts: Vec<Part> = of_stages.iter().map(part).collect();
    let file = FileOfParts {
        path,
        schema: rejects_schema(),
        recipe,
        parts: &parts,
        standing,
    };
    let written = write_parts(to, &file, None, |at, push| {
        let part = &of_stages[at];
        for batch in part.batches()? {
            let batch = batch?;
            let count = batch.num_rows();
            let mut columns = batch.columns().to_vec(); // row, segment_id, reason, class, detail, values
            columns.insert(0, constant(part.partition().as_str(), count)?);
            columns.insert(3, constant(part.stage(), count)?);
            push(RecordBatch::try_new(rejects_schema(), columns)?)?;
        }
        Ok(())
    })?;
    Ok((written.to, written.pieces))
}
