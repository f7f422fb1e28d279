//! A manifest that is opened.

use std::path::Path;

use flow_kind::{Partition, SourcePartition, StageError};

use crate::files::{Format, format_of};
use crate::folder::AudioFolder;
use crate::lines::LineManifest;
use crate::rows::Rows;
use crate::tables::TableManifest;
use crate::text_tables::TextTables;
use crate::{Corpus, LaidOut, ManifestError, ReadSettings};

/// A manifest whose parts are known.
pub enum Manifest {
    Tables(TableManifest),
    /// JSON lines, or tables as text.
    Lines(LaidOut),
    Folder(AudioFolder),
    LaidOut(LaidOut),
}

impl Manifest {
    /// The names of the partitions, without a look at their recordings.
    pub fn names(&self) -> Vec<Partition> {
        match self {
            Manifest::Tables(tables) => tables.names(),
            Manifest::Folder(folder) => folder.names(),
            Manifest::Lines(corpus) | Manifest::LaidOut(corpus) => corpus.names(),
        }
    }

    pub fn partitions(&self) -> Result<Vec<SourcePartition>, ManifestError> {
        Ok(match self {
            Manifest::Tables(tables) => tables.partitions(),
            Manifest::Folder(folder) => folder.partitions()?,
            Manifest::Lines(corpus) | Manifest::LaidOut(corpus) => corpus.partitions()?,
        })
    }

    /// The decisions about the names of folders and the unit of times as text for the log; none where they do not count.
    pub fn decision(&self) -> Option<String> {
        match self {
            Manifest::Tables(tables) => tables.decision(),
            Manifest::Folder(folder) => folder.decision(),
            Manifest::Lines(corpus) | Manifest::LaidOut(corpus) => corpus.decision(),
        }
    }

    pub fn read(&self, partition: &Partition, rows: &mut Rows<'_>) -> Result<(), StageError> {
        match self {
            Manifest::Tables(tables) => tables.read(partition, rows),
            Manifest::Folder(folder) => folder.read(partition, rows),
            Manifest::Lines(corpus) | Manifest::LaidOut(corpus) => corpus.read(partition, rows),
        }
    }

    /// Lines, or a table as text.
    pub fn of_lines(corpus: impl Corpus + 'static, settings: &ReadSettings) -> Manifest {
        Manifest::Lines(LaidOut::in_parts(corpus, settings))
    }

    /// A table of the recordings of a folder.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn of_table(
        table: &Path,
        root: &Path,
        settings: &ReadSettings,
        scratch: &Path,
    ) -> Result<Manifest, ManifestError> {
        let files = vec![table.to_path_buf()];
        Ok(match format_of(table) {
            Some(Format::Nemo) => Manifest::of_lines(LineManifest::open(files, Vec::new(), settings)?, settings),
            Some(Format::Parquet) => Manifest::Tables(TableManifest::open(files, settings, scratch)?),
            _ => Manifest::of_lines(TextTables::open(files, Some(root), settings)?, settings),
        })
    }
}
