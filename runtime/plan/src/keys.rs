//! Computes keys of partitions.

use arrow::array::RecordBatch;
use arrow::ipc::writer::StreamWriter;
use serde::{Deserialize, Serialize};

use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_kind::kind::SourcePartition;
use flow_store::FileRange;

/// A partition of a source, as its body lists it.
#[derive(Clone, Serialize, Deserialize)]
pub struct ListedPartition {
    pub partition: SourcePartition,
    pub ranges: Vec<FileRange>,
}

/// Key of a partition, from the recipe of its node and the digests of its inputs.
pub fn key_of(recipe: &Digest, inputs: &[Digest]) -> Digest {
    Digest::of_parts(std::iter::once(recipe).chain(inputs))
}

/// Key of the result of a log stage: its log decides it, not its inputs.
pub fn result_key(recipe: &Digest, rows: &RecordBatch) -> Result<Digest, StageError> {
    let mut writer = StreamWriter::try_new(Vec::new(), rows.schema_ref())?;
    writer.write(rows)?;
    Ok(Digest::of_parts([recipe.as_bytes().as_slice(), &writer.into_inner()?]))
}

/// Digest of a source's partition from the digests of its files and ranges.
pub fn source_digest(partition: &SourcePartition, files: &[Digest], ranges: &[Digest]) -> Digest {
    let bytes = |digest: &Digest| digest.as_bytes().to_vec();
    let mut parts = vec![b"source".to_vec(), partition.extra.as_bytes().to_vec()];
    parts.extend(files.iter().map(bytes));
    if !ranges.is_empty() {
        parts.push(b"ranges".to_vec());
        parts.extend(ranges.iter().map(bytes));
    }
    Digest::of_parts(parts)
}

/// The digest in place of a partition that an input does not have.
pub fn absent() -> Digest {
    Digest::of(b"no such partition")
}

/// The digest in place of the decisions about a partition of which nothing was decided.
pub fn no_decisions() -> Digest {
    Digest::of(b"no decisions")
}
