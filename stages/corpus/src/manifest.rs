//! A manifest or a corpus that is opened.

use flow_kind::{Partition, SourcePartition, StageError, Storage};

use crate::ManifestError;
use crate::rows::Rows;

/// A manifest or a corpus whose parts are known.
pub trait Opened: Send + Sync {
    /// The names of the partitions, without a look at their recordings.
    fn names(&self) -> Vec<Partition>;

    /// The partitions, with what their rows are decided by.
    ///
    /// # Errors
    /// When a file cannot be read, or storage does not say whether an object is there.
    fn partitions(&self, storage: &Storage) -> Result<Vec<SourcePartition>, ManifestError>;

    /// The decisions about the names of folders and the unit of times as text for the log; none where they do not count.
    fn decision(&self) -> Option<String>;

    /// Reads the rows of a partition, in order.
    ///
    /// # Errors
    /// When a file cannot be read, or is another than the one that was opened; and those of `rows`.
    fn read(&self, storage: &Storage, partition: &Partition, rows: &mut Rows<'_>) -> Result<(), StageError>;

    /// Whether each row is of lines of a file: of JSON lines, or of a table as text.
    fn has_lines(&self) -> bool {
        false
    }
}

/// A manifest or a corpus of any form.
pub type Manifest = Box<dyn Opened>;
