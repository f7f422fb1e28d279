//! What a stage committed on a port, to be read as a whole.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use arrow::datatypes::SchemaRef;

use super::StoreError;
use super::atomic::Files;
use super::parquet_file::{self, Rows, WrittenFile};
use super::record::{self, Record, RowRange, Selection};
use flow_base::digest::{Digest, DigestOfParts};
use flow_base::error::StageError;
use flow_base::partition::Partition;

/// The partitions that a stage committed on one port. Immutable; cheap to clone.
///
/// Rows of a partition are sorted by `_row`; partitions are sorted by name.
#[derive(Clone)]
pub struct Artifact {
    inner: Arc<Inner>,
}

struct Inner {
    schema: SchemaRef,
    parts: BTreeMap<Partition, ArtifactPart>,
}

/// One partition of an artifact.
pub(crate) struct ArtifactPart {
    pub written: WrittenFile,
    pub data: Data,
}

/// Where a data file lies. Its path is made when it is opened: an artifact may have hundreds of thousands.
#[derive(Clone)]
pub enum Place {
    /// In the folder of a recipe, named after the file's digest, key and port: see [`record::data_file`].
    Own {
        folder: Arc<PlaceFolder>,
        key: Digest,
        port: Arc<str>,
        digest: Digest,
    },
    /// Where the selection says, below the state directory.
    Selected { dir: Arc<PlaceFolder> },
}

/// A folder with data files, directly or (the state directory) below others.
pub(crate) struct PlaceFolder {
    pub path: PathBuf,
    pub files: Files,
}

impl Place {
    fn path(&self, selection: Option<&Arc<Selection>>) -> PathBuf {
        match self {
            Place::Own {
                folder,
                key,
                port,
                digest,
            } => folder.path.join(record::data_file(key, port, digest)),
            Place::Selected { dir } => dir.path.join(selection.map_or("", |selection| &selection.file)),
        }
    }

    /// The path of the file, of `bytes` bytes if all its rows are meant, once it is there.
    fn at_hand(&self, selection: Option<&Arc<Selection>>, bytes: u64) -> Result<PathBuf, StoreError> {
        let (Place::Own { folder, .. } | Place::Selected { dir: folder }) = self;
        let bytes = selection.map_or(bytes, |selection| selection.file_bytes);
        folder.files.at_hand(self.path(selection), bytes)
    }
}

/// The digest of the artifact that `records`, sorted by partition, make up on `port`.
///
/// # Errors
/// [`StoreError::NotCommitted`] if one of the records did not store the port.
pub fn artifact_digest<'a>(
    port: &str,
    records: impl IntoIterator<Item = &'a Arc<Record>>,
) -> Result<Digest, StoreError> {
    let mut parts = DigestOfParts::default();
    for record in records {
        let Some(stored) = record.ports.get(port) else {
            return Err(StoreError::NotCommitted {
                partition: record.partition.to_string(),
            });
        };
        parts.add(record.partition.as_str().as_bytes());
        parts.add(stored.digest.as_bytes());
    }
    Ok(parts.finish())
}

pub(crate) enum Data {
    File {
        place: Place,
        /// The ranges of rows of the file that belong to the partition; none: all rows.
        selection: Option<Arc<Selection>>,
    },
    Memory(Vec<RecordBatch>),
}

impl Artifact {
    pub(crate) fn new(schema: SchemaRef, parts: BTreeMap<Partition, ArtifactPart>) -> Self {
        Artifact {
            inner: Arc::new(Inner { schema, parts }),
        }
    }

    /// An artifact without partitions.
    pub fn empty(schema: SchemaRef) -> Self {
        Artifact::new(schema, BTreeMap::new())
    }

    /// An artifact that is in memory, for tests of stages that read whole inputs. Its digests are those that
    /// the same rows would have on disk.
    ///
    /// # Errors
    /// If a batch does not have the columns of `schema`, or a partition is given twice.
    pub fn in_memory(schema: SchemaRef, partitions: Vec<(Partition, Vec<RecordBatch>)>) -> Result<Self, StageError> {
        let mut parts = BTreeMap::new();
        for (partition, batches) in partitions {
            let batches = parquet_file::conform(&schema, batches)?;
            let written =
                parquet_file::encode(std::io::sink(), &schema, batches.clone()).map_err(StageError::failed)?;
            let part = ArtifactPart {
                written,
                data: Data::Memory(batches),
            };
            if parts.insert(partition.clone(), part).is_some() {
                return Err(StageError::failed(format!("partition `{partition}` is given twice")));
            }
        }
        Ok(Artifact::new(schema, parts))
    }

    pub fn schema(&self) -> &SchemaRef {
        &self.inner.schema
    }

    /// The partitions, sorted by name.
    pub fn partitions(&self) -> impl ExactSizeIterator<Item = &Partition> + '_ {
        self.inner.parts.keys()
    }

    /// Rows over all partitions.
    pub fn rows(&self) -> u64 {
        self.inner.parts.values().map(|part| part.written.rows).sum()
    }

    /// Rows of one partition; none if the artifact does not have it.
    pub fn rows_of(&self, partition: &Partition) -> Option<u64> {
        self.inner.parts.get(partition).map(|part| part.written.rows)
    }

    /// Digest of one partition: BLAKE3 of its file's bytes; of a selection, of that and of the rows that it selects.
    pub fn digest_of(&self, partition: &Partition) -> Option<Digest> {
        self.inner.parts.get(partition).map(|part| part.written.digest)
    }

    /// Digest of the whole: of all partitions' names and digests.
    pub fn digest(&self) -> Digest {
        let mut parts = DigestOfParts::default();
        for (partition, part) in &self.inner.parts {
            parts.add(partition.as_str().as_bytes());
            parts.add(part.written.digest.as_bytes());
        }
        parts.finish()
    }

    /// Reads one partition, batch by batch. `columns` chooses columns and their order; all, if none are named.
    ///
    /// # Errors
    /// If the artifact has no such partition or column, or the file is not what its record says.
    pub fn read(&self, partition: &Partition, columns: Option<&[&str]>) -> Result<Batches, StageError> {
        let part = self
            .inner
            .parts
            .get(partition)
            .ok_or_else(|| StageError::failed(format!("the input has no partition `{partition}`")))?;
        let (schema, positions) = parquet_file::project(&self.inner.schema, columns).map_err(StageError::failed)?;
        let source = match &part.data {
            Data::File { place, selection } => Source::File(Box::new(parquet_file::open(
                &place.at_hand(selection.as_ref(), part.written.bytes)?,
                part.written.bytes,
                &self.inner.schema,
                columns,
                selection.as_deref(),
            )?)),
            Data::Memory(batches) => {
                let chosen: Result<Vec<_>, _> = batches.iter().map(|batch| batch.project(&positions)).collect();
                Source::Memory(chosen?.into_iter())
            }
        };
        Ok(Batches { schema, source })
    }

    /// The rows of one partition in these ranges (first row and count; ascending), as a selection that is stored
    /// without copying them; none where the partition is in memory or does not exist.
    pub fn select(&self, partition: &Partition, ranges: &[RowRange], state: &Path) -> Option<Selection> {
        let part = self.inner.parts.get(partition)?;
        let Data::File { place, selection } = &part.data else {
            return None;
        };
        Some(match selection {
            Some(selection) => Selection {
                ranges: selection.narrowed(ranges),
                ..(**selection).clone()
            },
            None => Selection {
                file: place.path(None).strip_prefix(state).ok()?.to_str()?.to_owned(),
                file_bytes: part.written.bytes,
                file_rows: part.written.rows,
                file_digest: part.written.digest,
                ranges: ranges.to_vec(),
            },
        })
    }

    /// For an artifact whose rows correspond one to one to those of another, in the same order: the rows that
    /// correspond to `chosen`, a selection of the other artifact.
    ///
    /// # Errors
    /// If a partition is not there, or does not have as many rows as what `chosen` selects from.
    pub fn semi_join(&self, chosen: &Artifact) -> Result<Artifact, StageError> {
        let mut parts = BTreeMap::new();
        for (partition, part) in &chosen.inner.parts {
            let own = self.inner.parts.get(partition);
            let (
                Some(own),
                Data::File {
                    selection: Some(selection),
                    ..
                },
            ) = (own, &part.data)
            else {
                return Err(StageError::failed(format!(
                    "there are not rows of {partition} to choose from"
                )));
            };
            let Data::File { place, selection: None } = &own.data else {
                return Err(StageError::failed(format!(
                    "the rows of {partition} are a choice already"
                )));
            };
            if own.written.rows != selection.file_rows {
                return Err(StageError::failed(format!(
                    "{partition} has {} rows, but {} are to choose from",
                    own.written.rows, selection.file_rows
                )));
            }
            let selection = Selection {
                file: String::new(), // The place is known.
                file_bytes: own.written.bytes,
                file_rows: own.written.rows,
                file_digest: own.written.digest,
                ranges: selection.ranges.clone(),
            };
            let written = WrittenFile {
                digest: selection.digest(),
                rows: selection.rows(),
                bytes: 0,
            };
            let data = Data::File {
                place: place.clone(),
                selection: Some(Arc::new(selection)),
            };
            parts.insert(partition.clone(), ArtifactPart { written, data });
        }
        Ok(Artifact::new(self.inner.schema.clone(), parts))
    }

    /// The rows of one partition at these places, batch by batch.
    pub fn read_rows(&self, partition: &Partition, ranges: &[RowRange]) -> Result<Batches, StageError> {
        let schema = self.inner.schema.clone();
        let whole = || -> Result<Batches, StageError> {
            let all = self.read_whole(partition, None)?;
            let slices: Vec<RecordBatch> = ranges
                .iter()
                .map(|&(start, length)| all.slice(start as usize, length as usize))
                .collect();
            let rows = concat_batches(&self.inner.schema, &slices)?;
            Ok(Batches {
                schema: self.inner.schema.clone(),
                source: Source::Memory(vec![rows].into_iter()),
            })
        };
        let Some(ArtifactPart {
            written,
            data: Data::File { place, selection: own },
        }) = self.inner.parts.get(partition)
        else {
            return whole();
        };
        let Some(selection) = self.select(partition, ranges, Path::new("")) else {
            return whole();
        };
        let rows = parquet_file::open(
            &place.at_hand(own.as_ref(), written.bytes)?,
            written.bytes,
            &schema,
            None,
            Some(&selection),
        )?;
        Ok(Batches {
            schema,
            source: Source::File(Box::new(rows)),
        })
    }

    /// Reads one partition as one batch.
    pub fn read_whole(&self, partition: &Partition, columns: Option<&[&str]>) -> Result<RecordBatch, StageError> {
        let batches = self.read(partition, columns)?;
        let schema = batches.schema.clone();
        let batches: Vec<RecordBatch> = batches.collect::<Result<_, _>>()?;
        match <[RecordBatch; 1]>::try_from(batches) {
            Ok([only]) => Ok(only),
            Err(batches) => Ok(concat_batches(&schema, &batches)?),
        }
    }

    /// Reads all partitions one after the other, in the order of their names; one file is open at a time.
    pub fn batches<'a>(
        &'a self,
        columns: Option<&'a [&'a str]>,
    ) -> impl Iterator<Item = Result<(Partition, RecordBatch), StageError>> + 'a {
        self.partitions().flat_map(move |partition| {
            let (batches, failed) = match self.read(partition, columns) {
                Ok(batches) => (Some(batches), None),
                Err(error) => (None, Some(Err(error))),
            };
            failed.into_iter().chain(
                batches
                    .into_iter()
                    .flatten()
                    .map(|batch| Ok((partition.clone(), batch?))),
            )
        })
    }
}

impl std::fmt::Debug for Artifact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Artifact")
            .field("partitions", &self.inner.parts.len())
            .field("rows", &self.rows())
            .finish()
    }
}

/// The batches of one partition.
pub struct Batches {
    schema: SchemaRef,
    source: Source,
}

enum Source {
    File(Box<Rows>),
    Memory(std::vec::IntoIter<RecordBatch>),
}

impl Batches {
    /// Schema of the chosen columns.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }
}

impl Iterator for Batches {
    type Item = Result<RecordBatch, StageError>;

    fn next(&mut self) -> Option<Self::Item> {
        match &mut self.source {
            Source::File(rows) => rows.next(),
            Source::Memory(batches) => batches.next().map(Ok),
        }
    }
}
