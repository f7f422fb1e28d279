//! Files of rejects, and the rejects of all stages upstream of an export.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, UInt32Type};

use super::atomic::Files;
use super::parquet_file;
use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_base::reject::packed::PackedRejects;
use flow_base::reject::{ID_COLUMN, ReasonCount, Reject, RejectClass};

/// Columns of a file of rejects whose rows are named by `id_column`.
pub fn schema(id_column: &str) -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("row", DataType::UInt32, true),
        Field::new(id_column, DataType::Utf8, true),
        Field::new("reason", DataType::Utf8, false),
        Field::new("class", DataType::Utf8, false),
        Field::new("detail", DataType::Utf8, false),
        Field::new("values", DataType::Utf8, false),
    ]))
}

/// How many rejects there are for each reason.
pub fn count(rejects: &[Reject]) -> Vec<ReasonCount> {
    let mut counts: BTreeMap<(&str, RejectClass), u64> = BTreeMap::new();
    for reject in rejects {
        *counts.entry((&reject.reason, reject.class)).or_default() += 1;
    }
    counts
        .into_iter()
        .map(|((reason, class), rows)| ReasonCount {
            reason: reason.to_string(),
            class,
            rows,
        })
        .collect()
}

/// Rejects in their order, as batches with the columns of a [`schema`].
pub fn in_order(rejects: PackedRejects, schema: &SchemaRef) -> impl Iterator<Item = Result<RecordBatch, StageError>> {
    let mut rejects = rejects.sorted();
    std::iter::from_fn(move || {
        let some: Result<Vec<Reject>, StageError> = rejects.by_ref().take(BATCH).collect();
        match some {
            Ok(some) if some.is_empty() => None,
            some => Some(some.and_then(|some| Ok(to_batch(&some, schema)?))),
        }
    })
}

/// Rejects of a batch, few enough for any text to fit.
const BATCH: usize = 4_096;

fn to_batch(rejects: &[Reject], schema: &SchemaRef) -> Result<RecordBatch, arrow::error::ArrowError> {
    let text =
        |of: fn(&Reject) -> &str| -> ArrayRef { Arc::new(StringArray::from_iter_values(rejects.iter().map(of))) };
    let ids: StringArray = rejects.iter().map(|r| r.id.as_deref()).collect();
    RecordBatch::try_new(
        Arc::clone(schema),
        vec![
            Arc::new(rejects.iter().map(|r| r.row).collect::<UInt32Array>()),
            Arc::new(ids),
            text(|r| &r.reason),
            text(|r| r.class.as_str()),
            text(|r| &r.detail),
            text(|r| &r.values),
        ],
    )
}

/// Checks the column `class` of a batch with the columns of a [`schema`].
fn known_classes(batch: &RecordBatch) -> Result<(), StageError> {
    let known = |class: &str| class == RejectClass::Rule.as_str() || class == RejectClass::Fault.as_str();
    let classes = batch.column(3).as_string::<i32>(); // Read under a schema of rejects.
    match classes.iter().flatten().find(|class| !known(class)) {
        Some(other) => Err(StageError::failed(format!("`{other}` is not a class of a reject"))),
        None => Ok(()),
    }
}

/// The rejects in a batch with the columns of a [`schema`].
fn from_batch(batch: &RecordBatch) -> Result<Vec<Reject>, StageError> {
    let [rows, ids, reasons, classes, details, values] = batch.columns() else {
        return Err(StageError::failed("a file of rejects has other columns"));
    };
    let rows = rows.as_primitive::<UInt32Type>();
    let text = |column: &ArrayRef, at: usize| column.as_string::<i32>().value(at).to_string();
    (0..batch.num_rows())
        .map(|at| {
            let class = match classes.as_string::<i32>().value(at) {
                "rule" => RejectClass::Rule,
                "fault" => RejectClass::Fault,
                other => return Err(StageError::failed(format!("`{other}` is not a class of a reject"))),
            };
            Ok(Reject {
                row: rows.is_valid(at).then(|| rows.value(at)),
                id: ids.is_valid(at).then(|| text(ids, at)),
                reason: text(reasons, at),
                class,
                detail: text(details, at),
                values: text(values, at),
            })
        })
        .collect()
}

/// The rejects of several stages: in the order in which the stages were given, then of partitions, then of
/// rows. Cheap to clone; files are read while iterating.
#[derive(Clone, Default)]
pub struct RejectSet {
    stages: Arc<Vec<StageRejects>>,
}

pub(crate) struct StageRejects {
    pub stage: Arc<str>,
    /// Sorted by partition; only partitions with rejects.
    pub parts: Vec<RejectPart>,
}

pub(crate) struct RejectPart {
    pub partition: Partition,
    pub digest: Digest,
    pub by_reason: Vec<ReasonCount>,
    pub data: RejectData,
}

pub(crate) enum RejectData {
    File { path: PathBuf, bytes: u64, files: Files },
    Memory(Vec<Reject>),
}

/// The rejects of one stage and partition, in the order of their rows.
#[derive(Clone, Copy)]
pub struct PartOfRejects<'r> {
    stage: &'r StageRejects,
    part: &'r RejectPart,
}

impl<'r> PartOfRejects<'r> {
    pub fn stage(&self) -> &'r str {
        &self.stage.stage
    }

    pub fn partition(&self) -> &'r Partition {
        &self.part.partition
    }

    /// How many there are.
    pub fn rows(&self) -> u64 {
        self.part.by_reason.iter().map(|count| count.rows).sum()
    }

    /// Digest of them, without the names of stage and partition.
    pub fn digest(&self) -> Digest {
        self.part.digest
    }

    /// The rejects as they are stored: see [`RejectSet::batches`].
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn batches(&self) -> Result<impl Iterator<Item = Result<RecordBatch, StageError>> + use<>, StageError> {
        self.part.batches()
    }
}

impl RejectSet {
    pub(crate) fn new(stages: Vec<StageRejects>) -> Self {
        RejectSet {
            stages: Arc::new(stages),
        }
    }

    /// A set in memory, for tests of exports. Stages keep the order in which they first appear.
    pub fn in_memory(rejects: Vec<(String, Partition, Reject)>) -> Self {
        let mut stages: Vec<(String, BTreeMap<Partition, Vec<Reject>>)> = Vec::new();
        for (stage, partition, reject) in rejects {
            let at = stages.iter().position(|(name, _)| *name == stage).unwrap_or_else(|| {
                stages.push((stage, BTreeMap::new()));
                stages.len() - 1
            });
            stages[at].1.entry(partition).or_default().push(reject);
        }
        let part = |(partition, mut rejects): (Partition, Vec<Reject>)| {
            rejects.sort_by(Reject::compare);
            let texts = rejects.iter().map(|reject| format!("{reject:?}"));
            let digest = Digest::of_parts(texts);
            RejectPart {
                partition,
                digest,
                by_reason: count(&rejects),
                data: RejectData::Memory(rejects),
            }
        };
        RejectSet::new(
            stages
                .into_iter()
                .map(|(stage, parts)| StageRejects {
                    stage: stage.into(),
                    parts: parts.into_iter().map(part).collect(),
                })
                .collect(),
        )
    }

    /// All rejects with their stage and partition.
    pub fn iter(&self) -> impl Iterator<Item = Result<(Arc<str>, Partition, Reject), StageError>> + '_ {
        self.batches().flat_map(|batch| {
            let rejects = batch.and_then(|(stage, partition, batch)| Ok((stage, partition, from_batch(&batch)?)));
            let (named, failed) = match rejects {
                Ok((stage, partition, rejects)) => {
                    let name = move |reject| Ok((stage.clone(), partition.clone(), reject));
                    (Some(rejects.into_iter().map(name)), None)
                }
                Err(error) => (None, Some(Err(error))),
            };
            failed.into_iter().chain(named.into_iter().flatten())
        })
    }

    /// The rejects of each stage and partition, in the order of [`RejectSet::iter`].
    pub fn parts(&self) -> impl Iterator<Item = PartOfRejects<'_>> {
        let of_stage = |stage| move |part| PartOfRejects { stage, part };
        self.stages
            .iter()
            .flat_map(move |stage| stage.parts.iter().map(of_stage(stage)))
    }

    /// All rejects as they are stored, in the order of [`RejectSet::iter`], with their stage and partition: columns
    /// `row` (null where a whole partition was refused), the one that names the row, `reason`, `class`, `detail`, `values`.
    pub fn batches(&self) -> impl Iterator<Item = Result<(Arc<str>, Partition, RecordBatch), StageError>> + '_ {
        self.stages.iter().flat_map(|stage| {
            stage.parts.iter().flat_map(move |part| {
                let (batches, failed) = match part.batches() {
                    Ok(batches) => (Some(batches), None),
                    Err(error) => (None, Some(Err(error))),
                };
                let named = move |batch| Ok((stage.stage.clone(), part.partition.clone(), batch?));
                failed.into_iter().chain(batches.into_iter().flatten().map(named))
            })
        })
    }

    /// The first rejects of each reason of each stage, at most `each` of a reason, in the order of [`RejectSet::iter`]. Of
    /// the files only those are read that hold some of them.
    ///
    /// # Errors
    /// Where a file cannot be read.
    pub fn first_of_each(&self, each: u64) -> Result<Vec<(Arc<str>, Partition, Reject)>, StageError> {
        let mut found = Vec::new();
        for stage in self.stages.iter() {
            let mut taken: BTreeMap<(String, RejectClass), u64> = BTreeMap::new();
            for part in &stage.parts {
                let wanted = |count: &ReasonCount| {
                    let taken = taken.get(&(count.reason.clone(), count.class));
                    each.saturating_sub(taken.copied().unwrap_or_default()).min(count.rows)
                };
                let mut wanted: u64 = part.by_reason.iter().map(wanted).sum();
                if wanted == 0 {
                    continue;
                }
                for batch in part.batches()? {
                    for reject in from_batch(&batch?)? {
                        let taken = taken.entry((reject.reason.clone(), reject.class)).or_default();
                        if *taken < each {
                            *taken += 1;
                            wanted = wanted.saturating_sub(1);
                            found.push((Arc::clone(&stage.stage), part.partition.clone(), reject));
                        }
                    }
                    if wanted == 0 {
                        break;
                    }
                }
            }
        }
        Ok(found)
    }

    /// How many rejects there are.
    pub fn rows(&self) -> u64 {
        self.parts().map(|part| part.rows()).sum()
    }

    /// How many rejects there are for each reason of each stage, in the order of the stages, by reason.
    /// Reads no file.
    pub fn by_reason(&self) -> Vec<(Arc<str>, Vec<ReasonCount>)> {
        self.stages
            .iter()
            .map(|stage| {
                (
                    stage.stage.clone(),
                    add_up(stage.parts.iter().flat_map(|part| &part.by_reason)),
                )
            })
            .collect()
    }

    /// The most frequent reason, with the stage that rejected for it; of several the first.
    pub fn commonest(&self) -> Option<(Arc<str>, ReasonCount)> {
        let mut commonest: Option<(Arc<str>, ReasonCount)> = None;
        for (stage, counts) in self.by_reason() {
            for count in counts {
                if commonest.as_ref().is_none_or(|(_, most)| count.rows > most.rows) {
                    commonest = Some((stage.clone(), count));
                }
            }
        }
        commonest
    }

    /// How many rows were rejected, and the most frequent reason, as text for a message.
    pub fn in_words(&self) -> String {
        match self.commonest() {
            Some((stage, most)) => format!(
                "{} were refused before; the commonest reason is `{}` of stage {stage}, {} times",
                self.rows(),
                most.reason,
                most.rows
            ),
            None => "none was refused before".to_owned(),
        }
    }

    /// Digest of all rejects, with the names of stages and partitions (which are part of what is exported).
    pub fn digest(&self) -> Digest {
        Digest::of_parts(self.stages.iter().flat_map(|stage| {
            let head = [b"stage".to_vec(), stage.stage.as_bytes().to_vec()];
            let parts = stage.parts.iter().flat_map(|part| {
                [
                    part.partition.as_str().as_bytes().to_vec(),
                    part.digest.as_bytes().to_vec(),
                ]
            });
            head.into_iter().chain(parts).collect::<Vec<_>>()
        }))
    }
}

/// Adds up counts of the same reason and class.
pub fn add_up<'a>(counts: impl IntoIterator<Item = &'a ReasonCount>) -> Vec<ReasonCount> {
    let mut sums: BTreeMap<(&str, RejectClass), u64> = BTreeMap::new();
    for count in counts {
        *sums.entry((&count.reason, count.class)).or_default() += count.rows;
    }
    sums.into_iter()
        .map(|((reason, class), rows)| ReasonCount {
            reason: reason.to_string(),
            class,
            rows,
        })
        .collect()
}

impl RejectPart {
    fn batches(&self) -> Result<Box<dyn Iterator<Item = Result<RecordBatch, StageError>>>, StageError> {
        match &self.data {
            RejectData::Memory(rejects) => {
                let schema = schema(ID_COLUMN);
                let batches: Vec<_> = rejects.chunks(BATCH).map(|some| Ok(to_batch(some, &schema)?)).collect();
                Ok(Box::new(batches.into_iter()))
            }
            RejectData::File { path, bytes, files } => {
                let path = &files.at_hand(path.clone(), *bytes)?;
                // The file itself says which column names its rows.
                // What is wrong with a file, `open` finds out.
                let stored = parquet_file::schema_of(path).unwrap_or_else(|_| schema(ID_COLUMN));
                let id_column = stored.fields().get(1).map_or(ID_COLUMN, |field| field.name());
                let batches = parquet_file::open(path, *bytes, &schema(id_column), None, None)?;
                Ok(Box::new(batches.map(|batch| {
                    let batch = batch?;
                    known_classes(&batch).map(|()| batch)
                })))
            }
        }
    }
}
