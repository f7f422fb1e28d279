//! A corpus of some layout: its parts, and their rows.

use std::path::{Path, PathBuf};

use flow_kind::{Partition, SourcePartition, StageError};
use flow_storage::Storage;
use rayon::prelude::*;

use crate::looks::{Chain, Eyes};
use crate::manifest::{Manifest, Opened};
use crate::manifest_row::{ManifestRow, Refusal, line_values};
use crate::rows::Rows;
use crate::{ManifestError, ReadSettings};

/// A part of a corpus, which becomes a partition.
#[derive(Clone, Debug)]
pub struct Part {
    pub name: Partition,
    /// What [`Corpus::each`] knows it by.
    pub number: usize,
    /// The files that its rows are read from.
    pub files: Vec<PathBuf>,
    /// How files look that are too large to be read for their digests.
    pub looks: String,
}

/// What is done with a row: the number of its line, the row or why there is none, and its values for a reject.
pub type Take<'t> =
    dyn FnMut(Option<u64>, Result<ManifestRow, Refusal>, &dyn Fn() -> String) -> Result<(), StageError> + 't;

/// A corpus of some layout.
pub trait Corpus: Send + Sync {
    /// What it was taken for, and what was decided, for the log; empty where there is nothing to say.
    fn told(&self) -> String;

    /// Its parts, by name.
    fn parts(&self) -> Vec<Part>;

    /// Whether the recordings of a part's rows are looked at one by one for changes. Where they are in few large files, their looks
    /// are in [`Part::looks`].
    fn has_files(&self, _part: &Part) -> bool {
        true
    }

    /// Gives each row of a part, in order, and what is not a row with its reason.
    ///
    /// # Errors
    /// When a file cannot be read, and those of `take`.
    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError>;
}

/// A corpus whose parts are known.
pub struct LaidOut {
    corpus: Box<dyn Corpus>,
    parts: Vec<Part>,
    look: bool,
    has_lines: bool,
}

impl LaidOut {
    /// # Errors
    /// Where there is no row.
    pub fn of(corpus: impl Corpus + 'static, root: &Path, settings: &ReadSettings) -> Result<Manifest, ManifestError> {
        let laid_out = LaidOut::in_parts(corpus, settings, false);
        if laid_out.parts.is_empty() {
            let told = laid_out.corpus.told();
            return Err(ManifestError::manifest(
                root,
                format!("there are no rows in it ({told})"),
            ));
        }
        Ok(Box::new(laid_out))
    }

    /// Lines, or a table as text.
    pub fn of_lines(corpus: impl Corpus + 'static, settings: &ReadSettings) -> Manifest {
        Box::new(LaidOut::in_parts(corpus, settings, true))
    }

    fn in_parts(corpus: impl Corpus + 'static, settings: &ReadSettings, has_lines: bool) -> LaidOut {
        LaidOut {
            parts: corpus.parts(),
            corpus: Box::new(corpus),
            look: settings.check_audio,
            has_lines,
        }
    }
}

impl Opened for LaidOut {
    fn names(&self) -> Vec<Partition> {
        self.parts.iter().map(|part| part.name.clone()).collect()
    }

    fn decision(&self) -> Option<String> {
        Some(self.corpus.told()).filter(|told| !told.is_empty())
    }

    fn partitions(&self, storage: &Storage) -> Result<Vec<SourcePartition>, ManifestError> {
        let partition = |part: &Part| -> Result<SourcePartition, ManifestError> {
            let (mut chain, mut eyes, mut failed) = (None::<Chain>, Eyes::default(), None);
            let read = match self.corpus.has_files(part) {
                false => Ok(()),
                true => self.corpus.each(storage, part, &mut |_, row, _| {
                    // Rows contain the offset of a recording in its tar and a measured duration, so these recordings are looked at in
                    // any case.
                    let looked = |row: &ManifestRow| self.look || row.wanted.files.is_empty() || row.duration.is_none();
                    if let Some(row) = row.ok().filter(looked) {
                        match eyes.look(storage, &row.wanted) {
                            Ok(look) => chain.get_or_insert_default().add(&look),
                            Err(error) => {
                                failed = Some(error);
                                return Err(StageError::failed("stopped"));
                            }
                        }
                    }
                    Ok(())
                }),
            };
            if let Some(error) = failed {
                return Err(error);
            }
            read.map_err(|error| ManifestError::rows(error.to_string(), None))?;
            Ok(SourcePartition::new(
                part.name.clone(),
                part.files.clone(),
                chain.map(Chain::to_hex).unwrap_or_default() + &part.looks,
            ))
        };
        self.parts.par_iter().map(partition).collect()
    }

    fn read(&self, storage: &Storage, partition: &Partition, rows: &mut Rows<'_>) -> Result<(), StageError> {
        let part = self.parts.iter().find(|part| part.name == *partition);
        let part = part.ok_or_else(|| StageError::failed(format!("the corpus has no part {partition}")))?;
        let mut file = part.files.first();
        self.corpus.each(storage, part, &mut |line, row, values| {
            if let Some(line) = line {
                if let Some(file) = file.take() {
                    rows.begin_file(file);
                }
                rows.at_line(line);
            }
            rows.push(row, values)
        })
    }

    fn has_lines(&self) -> bool {
        self.has_lines
    }
}

/// Hands on what a line gives.
///
/// # Errors
/// Those of `take`.
pub fn take_line(
    take: &mut Take<'_>,
    number: u64,
    text: Result<&str, (Refusal, String)>,
    row: impl FnOnce(&str) -> Result<ManifestRow, Refusal>,
) -> Result<(), StageError> {
    match text {
        Ok(line) => take(Some(number), row(line), &|| line_values(line)),
        Err((refusal, line)) => take(Some(number), Err(refusal), &|| line_values(&line)),
    }
}
