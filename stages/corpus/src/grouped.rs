//! Rows of a file grouped by shard, in one pass over it and in bounded memory.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use arrow::array::{RecordBatch, UInt64Array};
use arrow::compute::{concat_batches, take_record_batch};
use arrow::ipc::reader::StreamReader;
use arrow::ipc::writer::StreamWriter;
use flow_kind::unlinked_file;

use crate::ManifestError;

/// Bytes of rows in memory before they are sorted and spilled to disk.
const HELD_BYTES: usize = 64 << 20;

/// Takes the rows of a file in their order.
pub struct Grouping {
    held: Vec<RecordBatch>,
    /// Of each held row.
    shards: Vec<u32>,
    bytes: usize,
    most: usize,
    done: Grouped,
}

/// Rows by shard, each shard's in the order of the file.
pub struct Grouped {
    /// The folder of the file.
    scratch: PathBuf,
    /// Rows that did not fit in memory.
    file: Option<File>,
    length: u64,
    /// By shard.
    pieces: Vec<Vec<Piece>>,
}

enum Piece {
    Held(RecordBatch),
    /// In the file: where, and how many bytes.
    Put(u64, usize),
}

impl Grouping {
    /// `scratch` is a folder for temporary files; it is created when needed.
    pub fn new(scratch: &Path, shards: usize) -> Self {
        Grouping::with(scratch, shards, HELD_BYTES)
    }

    fn with(scratch: &Path, shards: usize, most: usize) -> Self {
        Grouping {
            held: Vec::new(),
            shards: Vec::new(),
            bytes: 0,
            most,
            done: Grouped {
                scratch: scratch.to_path_buf(),
                file: None,
                length: 0,
                pieces: (0..shards).map(|_| Vec::new()).collect(),
            },
        }
    }

    /// `shards` has the shard of each row.
    ///
    /// # Errors
    /// When rows cannot be spilled.
    pub fn add(&mut self, batch: RecordBatch, shards: &[u32]) -> Result<(), ManifestError> {
        let bytes = batch.get_array_memory_size();
        // Spilled early: the texts of one array have 2 GiB at most.
        if self.bytes > 0 && self.bytes + bytes > self.most {
            self.sort(false)?;
        }
        self.bytes += bytes;
        self.held.push(batch);
        self.shards.extend_from_slice(shards);
        Ok(())
    }

    /// # Errors
    /// As [`Grouping::add`].
    pub fn finish(mut self) -> Result<Grouped, ManifestError> {
        self.sort(true)?;
        Ok(self.done)
    }

    fn sort(&mut self, last: bool) -> Result<(), ManifestError> {
        let Some(first) = self.held.first() else { return Ok(()) };
        let rows = concat_batches(&first.schema(), &self.held)?;
        self.held.clear();
        self.bytes = 0;
        let shards = std::mem::take(&mut self.shards);
        let mut order: Vec<u64> = (0..shards.len() as u64).collect();
        order.sort_by_key(|row| shards[*row as usize]);
        for own in order.chunk_by(|a, b| shards[*a as usize] == shards[*b as usize]) {
            let shard = shards[own[0] as usize] as usize;
            let piece = take_record_batch(&rows, &UInt64Array::from(own.to_vec()))?;
            let piece = match last {
                true => Piece::Held(piece),
                false => self.put(&piece)?,
            };
            self.done.pieces[shard].push(piece);
        }
        Ok(())
    }

    fn put(&mut self, piece: &RecordBatch) -> Result<Piece, ManifestError> {
        let mut writer = StreamWriter::try_new(Vec::new(), piece.schema_ref())?;
        writer.write(piece)?;
        let bytes = writer.into_inner()?;
        let path = &self.done.scratch;
        let file = match &mut self.done.file {
            Some(file) => file,
            none => none.insert(unlinked_file(path).map_err(|e| ManifestError::io(path, e))?),
        };
        let at = self.done.length;
        file.write_all_at(&bytes, at).map_err(|e| ManifestError::io(path, e))?;
        self.done.length += bytes.len() as u64;
        Ok(Piece::Put(at, bytes.len()))
    }
}

impl Grouped {
    /// The rows of a shard.
    ///
    /// # Errors
    /// When they cannot be read back.
    pub fn read(&self, shard: usize) -> Result<Vec<RecordBatch>, ManifestError> {
        let mut batches = Vec::new();
        for piece in self.pieces.get(shard).into_iter().flatten() {
            match (piece, &self.file) {
                (Piece::Held(batch), _) => batches.push(batch.clone()),
                (Piece::Put(at, length), Some(file)) => {
                    let mut bytes = vec![0; *length];
                    file.read_exact_at(&mut bytes, *at)
                        .map_err(|e| ManifestError::io(&self.scratch, e))?;
                    for batch in StreamReader::try_new(bytes.as_slice(), None)? {
                        batches.push(batch?);
                    }
                }
                (Piece::Put(..), None) => {}
            }
        }
        Ok(batches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use arrow::array::{Array, AsArray, StringArray};
    use arrow::datatypes::{DataType, Field, Schema};
    use proptest::prelude::*;

    proptest! {
        /// Every row is returned once, under its shard, in the order of the file, whether it was in memory or spilled.
        #[test]
        fn rows_come_back_by_shard_in_their_order(
            shards in prop::collection::vec(0..7u32, 0..200), batch in 1..20usize, most in 1..4_000usize,
        ) {
            let scratch = tempfile::tempdir().unwrap();
            let schema = Arc::new(Schema::new(vec![Field::new("text", DataType::Utf8, true)]));
            let mut grouping = Grouping::with(scratch.path(), 7, most);
            for (number, own) in shards.chunks(batch).enumerate() {
                let texts = (0..own.len()).map(|at| (at % 5 != 4).then(|| (number * batch + at).to_string()));
                let texts = StringArray::from_iter(texts);
                grouping.add(RecordBatch::try_new(schema.clone(), vec![Arc::new(texts)]).unwrap(), own).unwrap();
            }
            let grouped = grouping.finish().unwrap();
            for shard in 0..7 {
                let mut found = Vec::new();
                for batch in grouped.read(shard as usize).unwrap() {
                    let texts = batch.column(0).as_string::<i32>().clone();
                    found.extend((0..texts.len()).map(|row| texts.is_valid(row).then(|| texts.value(row).to_string())));
                }
                let wanted: Vec<Option<String>> = (0..shards.len())
                    .filter(|row| shards[*row] == shard)
                    .map(|row| (row % batch % 5 != 4).then(|| row.to_string()))
                    .collect();
                prop_assert_eq!(found, wanted);
            }
            prop_assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0, "nothing is left behind");
        }
    }
}
