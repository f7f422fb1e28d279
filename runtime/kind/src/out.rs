//! What a body gives back: batches per port, rejects, counts.

use arrow::array::RecordBatch;

use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_base::reject::packed::PackedRejects;
use flow_base::reject::{ID_COLUMN, Reject, RejectClass};
use flow_store::{DigestedFile, RowRange};

/// Receives the output of a body for the current partition.
///
/// The runtime sets the partition before each call; an operator that works beside the workers names it
/// itself with [`Out::of`].
pub struct Out {
    pub partition: Partition,
    id_column: &'static str,
    pub batches: Vec<(Partition, usize, RecordBatch)>,
    pub rejects: Vec<(Partition, PackedRejects)>,
    pub read: Vec<(Partition, u64)>,
    pub merged: Vec<(Partition, u64)>,
    /// Port, and ranges of rows of the streamed input's partition.
    pub selected: Vec<(Partition, usize, Vec<RowRange>)>,
    pub digested: Vec<DigestedFile>,
}

impl Out {
    pub fn new(partition: Partition) -> Self {
        Out {
            partition,
            id_column: ID_COLUMN,
            batches: Vec::new(),
            rejects: Vec::new(),
            read: Vec::new(),
            merged: Vec::new(),
            selected: Vec::new(),
            digested: Vec::new(),
        }
    }

    /// Rows that are refused are named by this column.
    pub fn named_by(mut self, id_column: &'static str) -> Self {
        self.id_column = id_column;
        self
    }

    /// An empty one for the same partition: for work on another thread, which may be given up.
    pub fn beside(&self) -> Out {
        Out::new(self.partition.clone()).named_by(self.id_column)
    }

    /// Takes over what another one received.
    pub fn take_over(&mut self, other: Out) {
        self.batches.extend(other.batches);
        self.rejects.extend(other.rejects);
        self.read.extend(other.read);
        self.merged.extend(other.merged);
        self.selected.extend(other.selected);
        self.digested.extend(other.digested);
    }

    /// What follows belongs to `partition`.
    pub fn of(&mut self, partition: &Partition) -> &mut Self {
        self.partition = partition.clone();
        self
    }

    pub fn send(&mut self, port: usize, batch: RecordBatch) {
        self.batches.push((self.partition.clone(), port, batch));
    }

    /// Gives rows of the stage's input as they are, by their places in its partition.
    pub fn select(&mut self, port: usize, ranges: Vec<RowRange>) {
        self.selected.push((self.partition.clone(), port, ranges));
    }

    pub fn reject(&mut self, reject: Reject) {
        match self.rejects.last_mut() {
            Some((partition, rejects)) if *partition == self.partition => rejects.push(reject),
            _ => {
                let mut rejects = PackedRejects::default();
                rejects.push(reject);
                self.rejects.push((self.partition.clone(), rejects));
            }
        }
    }

    /// Refuses rows of `batch` (by position), with what names them, and all their other columns as JSON.
    pub fn reject_rows(
        &mut self,
        batch: &RecordBatch,
        positions: &[usize],
        reason: &str,
        class: RejectClass,
        detail: &str,
    ) -> Result<(), StageError> {
        let id_column = self.id_column;
        flow_base::row_json::rejects(batch, id_column, positions, reason, class, detail, |reject| {
            self.reject(reject)
        })
    }

    /// Refuses the whole partition with one reject.
    pub fn reject_partition(&mut self, reason: &str, class: RejectClass, detail: impl Into<String>) {
        self.reject(Reject {
            row: None,
            id: None,
            reason: reason.into(),
            class,
            detail: detail.into(),
            values: String::new(),
        });
    }

    /// For a source: adds to the number of rows read, with which the runtime checks that none was lost.
    pub fn read(&mut self, rows: u64) {
        self.read.push((self.partition.clone(), rows));
    }

    /// For a source that [digests](crate::Source::digests) its files itself: one of them, read as far as the source
    /// needed. The runtime reads the rest of the file and does not read it a second time.
    pub fn digested(&mut self, file: DigestedFile) {
        self.digested.push(file);
    }

    /// Rows that were intentionally merged into others; they do not violate conservation.
    pub fn merged(&mut self, rows: u64) {
        self.merged.push((self.partition.clone(), rows));
    }
}
