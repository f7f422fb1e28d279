//! Pieces of a set's files. Each follows from a few partitions alone, so that the next set takes over, as they are, those whose
//! partitions have not changed.
//!
//! Notes in the stage's scratch folder say what each piece was made from, where it lies, and the digest of its bytes. A piece
//! is copied only if the bytes that are there have this digest: whatever became of the file, or of the notes, a set is the
//! one that would be written from nothing.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bytes::Bytes;
use flow_corpus::partitions::with_rows;
use flow_kind::store::{StoreError, read_note, write_note};
use flow_kind::{Artifact, Digest, Partition, open_regular_file};
use flow_storage::is_url;
use serde::{Deserialize, Serialize};

use crate::keys::mark_of;
use crate::parquet_file::ROW_GROUP;

/// The file of notes.
const NOTES: &str = "pieces.json";
const VERSION: u32 = 1;

/// A run of parts has at least this many rows, but the last, and one before a part that would make it longer than a row group.
const SHORTEST: u64 = ROW_GROUP as u64 / 2;
/// Rows that come after these, on average, until the run ends.
const MORE: u64 = ROW_GROUP as u64 / 4;

/// Rows of one partition, as a part of a file.
pub(crate) struct Part {
    /// No two parts of a file have the same.
    pub name: String,
    /// At least one.
    pub rows: u64,
    /// Digest of the rows.
    pub digest: Digest,
}

/// The partitions of an artifact that have rows, in the order of manifests, and as parts of a file.
pub(crate) fn parts_of(artifact: &Artifact) -> (Vec<&Partition>, Vec<Part>) {
    let rows = |partition: &Partition| artifact.rows_of(partition).unwrap_or_default();
    let partitions = with_rows(artifact);
    let part = |partition: &&Partition| Part {
        name: partition.to_string(),
        rows: rows(partition),
        digest: artifact.digest_of(partition).unwrap_or_else(|| Digest::of(b"")),
    };
    let parts = partitions.iter().map(part).collect();
    (partitions, parts)
}

/// Cuts parts into runs. Where runs end follows from the names and rows of the parts near the end, so that a part that comes
/// or goes moves few other ends. A run is at most one row group long, unless it is a single part.
pub(crate) fn runs(parts: &[Part]) -> Vec<Range<usize>> {
    let mut runs = Vec::new();
    let (mut first, mut rows) = (0, 0u64);
    for (at, part) in parts.iter().enumerate() {
        if at > first && rows + part.rows > ROW_GROUP as u64 {
            runs.push(first..at);
            (first, rows) = (at, 0);
        }
        rows += part.rows;
        // With the probability of its rows in MORE.
        let by_chance = u128::from(mark_of(&part.name)) * u128::from(MORE) < u128::from(part.rows) << 64;
        if rows >= ROW_GROUP as u64 || (rows >= SHORTEST && by_chance) {
            runs.push(first..at + 1);
            (first, rows) = (at + 1, 0);
        }
    }
    if first < parts.len() {
        runs.push(first..parts.len());
    }
    runs
}

/// Digest of what a run of parts is made from. `recipe` represents everything but their rows.
pub(crate) fn inputs_of(recipe: &Digest, run: &[Part]) -> Digest {
    let parts = run
        .iter()
        .flat_map(|part| [part.name.as_bytes(), part.digest.as_bytes()]);
    Digest::of_parts(std::iter::once(recipe.as_bytes().as_slice()).chain(parts.map(|part| part as &[u8])))
}

/// Digest of what one of several pieces of a run is made from.
pub(crate) fn inputs_of_piece(run: &Digest, piece: u64) -> Digest {
    Digest::of_parts([run.as_bytes().as_slice(), &piece.to_le_bytes()])
}

/// What is noted of a piece.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Piece {
    /// Digest of all that it was made from.
    pub inputs: Digest,
    /// Where it is in the file.
    pub start: u64,
    pub bytes: u64,
    /// What comes after these bytes in a file of this piece alone, in hexadecimal digits.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tail: String,
    /// Digest of the piece as a file of its own.
    pub content: Digest,
}

/// Notes of all files of a set, by their names.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Notes {
    version: u32,
    files: BTreeMap<String, Vec<Piece>>,
}

impl Notes {
    /// Those in a scratch folder; none where there are none, or they cannot be read.
    pub fn read(scratch: &Path) -> Notes {
        let notes: Notes = read_note(&scratch.join(NOTES)).unwrap_or_default();
        if notes.version == VERSION {
            notes
        } else {
            Notes::default()
        }
    }

    pub fn of(files: BTreeMap<String, Vec<Piece>>) -> Notes {
        Notes {
            version: VERSION,
            files,
        }
    }

    /// Writes them, if there is such a folder.
    pub fn write(&self, scratch: &Path) -> Result<(), StoreError> {
        match scratch.is_dir() {
            true => write_note(&scratch.join(NOTES), self),
            false => Ok(()),
        }
    }

    /// The file `name` of the set that is in `folder`, with what is noted of it.
    pub fn standing(&self, folder: &Path, name: &str) -> Standing {
        match self.files.get(name) {
            Some(pieces) if !is_url(folder) => Standing::open(&folder.join(name), pieces),
            _ => Standing::default(),
        }
    }
}

/// A file that stands, perhaps, and the pieces that it is said to have.
#[derive(Default)]
pub(crate) struct Standing {
    file: Option<File>,
    bytes: u64,
    pieces: HashMap<Digest, Piece>,
}

/// A piece that is taken over: a file of its own.
pub(crate) struct Taken {
    pub inputs: Digest,
    pub content: Digest,
    pub bytes: Bytes,
}

impl Standing {
    fn open(path: &Path, pieces: &[Piece]) -> Standing {
        let file = open_regular_file(path).ok();
        let bytes = file
            .as_ref()
            .and_then(|file| file.metadata().ok())
            .map_or(0, |found| found.len());
        Standing {
            file,
            bytes,
            pieces: pieces.iter().map(|piece| (piece.inputs, piece.clone())).collect(),
        }
    }

    /// The piece that was made from these inputs, and the file that has it, if it is said to be within it.
    fn piece(&self, inputs: &Digest) -> Option<(&File, &Piece)> {
        let (file, piece) = (self.file.as_ref()?, self.pieces.get(inputs)?);
        let end = piece.start.checked_add(piece.bytes)?;
        (end <= self.bytes).then_some((file, piece))
    }

    /// The piece with `head` before it and its tail after it; none if it is not as it was written.
    pub fn take(&self, head: &[u8], inputs: &Digest) -> Option<Taken> {
        let (file, piece) = self.piece(inputs)?;
        let tail = hex::decode(&piece.tail).ok()?;
        let end = head.len().checked_add(usize::try_from(piece.bytes).ok()?)?;
        let mut bytes = Vec::with_capacity(end.checked_add(tail.len())?);
        bytes.extend_from_slice(head);
        bytes.resize(end, 0);
        file.read_exact_at(&mut bytes[head.len()..], piece.start).ok()?;
        bytes.extend_from_slice(&tail);
        (Digest::of(&bytes) == piece.content).then(|| Taken {
            inputs: *inputs,
            content: piece.content,
            bytes: bytes.into(),
        })
    }
}

#[cfg(test)]
#[path = "pieces_tests.rs"]
mod tests;
