//! A manifest, with what it was taken for.

use flow_corpus::rows::Rows;
use flow_corpus::{Manifest, ManifestError, Opened};
use flow_kind::{Partition, SourcePartition, StageError};
use flow_storage::Storage;

pub struct Told {
    manifest: Manifest,
    told: String,
}

impl Told {
    /// `told` comes after what the manifest says itself.
    pub fn of(manifest: Manifest, told: String) -> Manifest {
        let told = match manifest.decision() {
            None => told,
            Some(first) => format!("{first}; {told}"),
        };
        Box::new(Told { manifest, told })
    }

    /// `told` comes before what the manifest says itself.
    pub fn first(told: String, manifest: Manifest) -> Manifest {
        let told = match manifest.decision() {
            None => told,
            Some(more) => format!("{told}; {more}"),
        };
        Box::new(Told { manifest, told })
    }
}

impl Opened for Told {
    fn names(&self) -> Vec<Partition> {
        self.manifest.names()
    }

    fn partitions(&self, storage: &Storage) -> Result<Vec<SourcePartition>, ManifestError> {
        self.manifest.partitions(storage)
    }

    fn decision(&self) -> Option<String> {
        Some(self.told.clone())
    }

    fn read(&self, storage: &Storage, partition: &Partition, rows: &mut Rows<'_>) -> Result<(), StageError> {
        self.manifest.read(storage, partition, rows)
    }

    fn has_lines(&self) -> bool {
        self.manifest.has_lines()
    }
}
