//! Sorts records in bounded memory: what does not fit goes to an unlinked temporary file as sorted runs, which are merged.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use flow_base::error::StageError;
use flow_base::unlinked_file::unlinked_file;

/// Most bytes of a run that are read at a time while runs are merged.
const READ_BYTES: usize = 256 << 10;

/// What is sorted. A record has as many bytes on disk as any other.
pub(super) trait Record: Copy + Ord + Send {
    const BYTES: usize;

    /// Appends exactly `BYTES` bytes.
    fn write(&self, bytes: &mut Vec<u8>);

    /// `bytes` are those that [`Record::write`] appended.
    fn read(bytes: &[u8]) -> Self;
}

/// The number at a place in the bytes of a record.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

/// Takes records in any order.
pub(super) struct Sorter<R> {
    held: Vec<R>,
    /// Most records in memory.
    most: usize,
    scratch: PathBuf,
    spilled: Option<Spilled>,
}

struct Spilled {
    file: File,
    end: u64,
    /// Bytes of the file.
    runs: Vec<Range<u64>>,
}

impl<R: Record> Sorter<R> {
    /// Holds `memory` bytes of records at most. `records`: how many there may be. `scratch`: the folder for the file.
    pub fn new(memory: u64, records: u64, scratch: &Path) -> Self {
        let most = usize::try_from(memory / size_of::<R>() as u64)
            .unwrap_or(usize::MAX)
            .max(1);
        let records = usize::try_from(records).unwrap_or(usize::MAX);
        Sorter {
            held: Vec::with_capacity(records.min(most)),
            most,
            scratch: scratch.to_path_buf(),
            spilled: None,
        }
    }

    /// # Errors
    /// When the file cannot be written.
    pub fn extend(&mut self, records: impl IntoIterator<Item = R>) -> Result<(), StageError> {
        for record in records {
            if self.held.len() >= self.most {
                self.spill()?;
            }
            self.held.push(record);
        }
        Ok(())
    }

    fn spill(&mut self) -> Result<(), StageError> {
        self.held.par_sort_unstable();
        let spilled = match &mut self.spilled {
            Some(spilled) => spilled,
            none => {
                let file =
                    unlinked_file(&self.scratch).map_err(|error| failed("create a file in", &self.scratch, &error))?;
                none.insert(Spilled {
                    file,
                    end: 0,
                    runs: Vec::new(),
                })
            }
        };
        let begin = spilled.end;
        let mut bytes = Vec::new();
        let some = READ_BYTES.min(self.most.saturating_mul(R::BYTES)) / R::BYTES;
        for records in self.held.chunks(some.max(1)) {
            bytes.clear();
            for record in records {
                record.write(&mut bytes);
            }
            let written = spilled.file.write_all_at(&bytes, spilled.end);
            written.map_err(|error| failed("write to a file in", &self.scratch, &error))?;
            spilled.end += bytes.len() as u64;
        }
        spilled.runs.push(begin..spilled.end);
        self.held.clear();
        Ok(())
    }

    /// The records in their order.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn finish(mut self) -> Result<Sorted<R>, StageError> {
        if self.spilled.is_some() && !self.held.is_empty() {
            self.spill()?;
        }
        let Some(Spilled { file, runs, .. }) = self.spilled else {
            self.held.par_sort_unstable();
            return Ok(Sorted::Held(self.held.into_iter()));
        };
        drop(self.held);
        let mut merge = Merge {
            file,
            scratch: self.scratch,
            // As many of each run as all fit into the memory, together with the bytes that they are made of.
            at_a_time: (self.most / 2 / runs.len().max(1)).clamp(1, (READ_BYTES / R::BYTES).max(1)),
            runs: runs.into_iter().map(Run::new).collect(),
            next: BinaryHeap::new(),
        };
        for run in 0..merge.runs.len() {
            merge.take_from(run)?;
        }
        Ok(Sorted::Merged(Box::new(merge)))
    }
}

/// Records in ascending order. After an error there are no more.
pub(super) enum Sorted<R> {
    Held(std::vec::IntoIter<R>),
    Merged(Box<Merge<R>>),
}

pub(super) struct Merge<R> {
    file: File,
    scratch: PathBuf,
    /// Most records of a run that are read at a time.
    at_a_time: usize,
    runs: Vec<Run<R>>,
    /// The next record of each run that has one.
    next: BinaryHeap<Reverse<(R, usize)>>,
}

/// A sorted run in the file.
struct Run<R> {
    left: Range<u64>,
    /// Those that were read, the next one last.
    read: Vec<R>,
}

impl<R> Run<R> {
    fn new(left: Range<u64>) -> Self {
        Run { left, read: Vec::new() }
    }
}

impl<R: Record> Merge<R> {
    /// Puts the next record of a run among those that may come next.
    fn take_from(&mut self, number: usize) -> Result<(), StageError> {
        let run = &mut self.runs[number];
        if run.read.is_empty() && !run.left.is_empty() {
            let left = usize::try_from(run.left.end - run.left.start).unwrap_or(usize::MAX);
            let mut bytes = vec![0; (left / R::BYTES).min(self.at_a_time) * R::BYTES];
            let read = self.file.read_exact_at(&mut bytes, run.left.start);
            read.map_err(|error| failed("read a file in", &self.scratch, &error))?;
            run.left.start += bytes.len() as u64;
            run.read.extend(bytes.chunks_exact(R::BYTES).rev().map(R::read));
        }
        if let Some(record) = run.read.pop() {
            self.next.push(Reverse((record, number)));
        }
        Ok(())
    }
}

impl<R: Record> Iterator for Sorted<R> {
    type Item = Result<R, StageError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Sorted::Held(records) => records.next().map(Ok),
            Sorted::Merged(merge) => {
                let Reverse((record, run)) = merge.next.pop()?;
                match merge.take_from(run) {
                    Ok(()) => Some(Ok(record)),
                    Err(error) => {
                        merge.next.clear();
                        Some(Err(error))
                    }
                }
            }
        }
    }
}

fn failed(what: &str, folder: &Path, error: &std::io::Error) -> StageError {
    StageError::failed(format!("cannot {what} {}: {error}", folder.display()))
        .with_help("rows that do not fit into memory are sorted there: make room on that disk")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl Record for (u64, u32) {
        const BYTES: usize = 12;

        fn write(&self, bytes: &mut Vec<u8>) {
            bytes.extend(self.0.to_le_bytes());
            bytes.extend(self.1.to_le_bytes());
        }

        fn read(bytes: &[u8]) -> Self {
            (u64_at(bytes, 0), u32_at(bytes, 8))
        }
    }

    proptest! {
        #[test]
        fn records_come_sorted_in_whatever_memory(records in prop::collection::vec((0..50u64, any::<u32>()), 0..300), memory in 0..2_000u64) {
            let scratch = tempfile::tempdir().unwrap();
            let mut sorter = Sorter::new(memory, records.len() as u64, scratch.path());
            sorter.extend(records.iter().copied()).unwrap();
            let found: Vec<(u64, u32)> = sorter.finish().unwrap().collect::<Result<_, _>>().unwrap();
            let mut sorted = records;
            sorted.sort_unstable();
            prop_assert_eq!(found, sorted);
            prop_assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0, "nothing is left behind");
        }
    }

    #[test]
    fn merged_runs_are_read_in_the_memory_that_is_given() {
        let scratch = tempfile::tempdir().unwrap();
        let mut sorter: Sorter<(u64, u32)> = Sorter::new(16_000, 10_000, scratch.path());
        let most = sorter.most;
        sorter
            .extend((0..10_000u32).map(|number| (u64::from(number) * 7919 % 10_007, number)))
            .unwrap();
        let Sorted::Merged(mut merge) = sorter.finish().unwrap() else {
            panic!("1000 records of 10000 fit");
        };
        let mut records = 0;
        // Of each run one record waits in the heap, and is not counted: it is what any merge holds.
        while let Some(Reverse((_, run))) = merge.next.pop() {
            merge.take_from(run).unwrap();
            assert!(merge.runs.iter().map(|run| run.read.len()).sum::<usize>() <= most);
            records += 1;
        }
        assert_eq!(records, 10_000);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let mut sorter = Sorter::new(24, 10, &file);
        let error = sorter.extend((0..10).map(|number| (number, 0))).unwrap_err();
        assert!(error.to_string().contains(file.to_str().unwrap()), "{error}");
    }
}
