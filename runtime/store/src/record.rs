//! The record of a committed partition of a stage.

use std::sync::{Arc, LazyLock};

use serde::{Deserialize, Serialize};

use super::port_records::PortRecords;
use flow_base::digest::Digest;
use flow_base::partition::Partition;
use flow_base::reject::ReasonCount;

/// Version of the record files.
pub(crate) const RECORD_VERSION: u32 = 2;

/// One partition of one stage, committed.
///
/// A record is found by (partition, key). The key alone does not name a partition: it is made of the recipe
/// and of input digests, and two shards with the same bytes have the same key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    pub partition: Partition,
    /// Digest of recipe and inputs.
    pub key: Digest,
    /// Digest of each input, in the order of the plan: shows which input changed.
    #[serde(deserialize_with = "without_spare_room")]
    pub inputs: Vec<Digest>,
    /// The stored ports. A port that was only streamed is not there.
    pub ports: PortRecords,
    /// Rows of input 0.
    pub rows_in: u64,
    /// Rows over all ports, stored or streamed.
    pub rows_out: u64,
    /// Rows that a source reported as read.
    pub read: u64,
    /// Rows intentionally merged into others.
    pub merged: u64,
    /// Shared by all records without rejects.
    #[serde(with = "shared_rejects")]
    pub rejects: Arc<RejectRecord>,
}

/// The committed data of one port of one partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortRecord {
    /// BLAKE3 of the file's bytes; of a selection, of the digest of what it selects from and the rows.
    pub digest: Digest,
    pub rows: u64,
    /// Size of the file; 0 for a selection, which has none.
    pub bytes: u64,
    /// The rows of another artifact's partition to which this port refers, where they were not copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selection: Option<Arc<Selection>>,
}

/// A range of rows: the first row, and the number of rows.
pub type RowRange = (u32, u32);

/// Rows of a data file that another recipe wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Selection {
    /// The data file, relative to the state directory.
    pub file: String,
    /// Size and rows of the data file.
    pub file_bytes: u64,
    pub file_rows: u64,
    /// BLAKE3 of the data file.
    pub file_digest: Digest,
    /// Ranges of rows by their place in the file: the first, and how many. Ascending, with gaps between them.
    pub ranges: Vec<RowRange>,
}

impl Selection {
    pub fn rows(&self) -> u64 {
        self.ranges.iter().map(|(_, length)| u64::from(*length)).sum()
    }

    pub fn digest(&self) -> Digest {
        let numbers = self.ranges.iter().flat_map(|(start, length)| [*start, *length]);
        let numbers: Vec<u8> = numbers.flat_map(u32::to_le_bytes).collect();
        Digest::of_parts([b"selection".as_slice(), self.file_digest.as_bytes(), &numbers])
    }

    /// Whether the ranges are valid: ascending, with gaps, within the file; and the file is a data file of the state directory.
    pub fn is_valid(&self) -> bool {
        let mut parts = self.file.split('/');
        let is_name = |part: Option<&str>| part.is_some_and(|part| !["", ".", ".."].contains(&part));
        let is_data_file = parts.next() == Some("artifacts")
            && is_name(parts.next())
            && parts.next() == Some("data")
            && is_name(parts.next())
            && parts.next().is_none();
        if !is_data_file {
            return false;
        }
        let mut end = 0u64;
        let mut first = true;
        self.ranges.iter().all(|&(start, length)| {
            let apart = first || u64::from(start) > end;
            first = false;
            end = u64::from(start) + u64::from(length);
            apart && length > 0 && end <= self.file_rows
        })
    }

    /// A selection of this selection: `rows` are ascending positions among the selected rows.
    pub(crate) fn narrowed(&self, ranges: &[RowRange]) -> Vec<RowRange> {
        let mut narrowed = Ranges::default();
        let mut own = self.ranges.iter().copied();
        let (mut current, mut before) = (own.next(), 0u32);
        for &(start, length) in ranges {
            let (mut start, mut left) = (start, length);
            while left > 0
                && let Some((own_start, own_length)) = current
            {
                if start >= before + own_length {
                    before += own_length;
                    current = own.next();
                    continue;
                }
                let offset = start - before;
                let taken = left.min(own_length - offset);
                narrowed.push(own_start + offset, taken);
                (start, left) = (start + taken, left - taken);
            }
        }
        narrowed.0
    }
}

/// Builds ranges: a range that follows directly on the last one is merged into it.
#[derive(Default)]
pub struct Ranges(pub Vec<RowRange>);

impl Ranges {
    pub fn push(&mut self, start: u32, length: u32) {
        match self.0.last_mut() {
            Some((last, count)) if *last + *count == start => *count += length,
            _ => self.0.push((start, length)),
        }
    }
}

/// The rejects of one partition. Without rejects there is no file, and the digest is that of no bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RejectRecord {
    pub digest: Digest,
    pub rows: u64,
    pub bytes: u64,
    /// Sorted by reason, then class.
    #[serde(deserialize_with = "without_spare_room")]
    pub by_reason: Vec<ReasonCount>,
}

impl RejectRecord {
    pub fn none() -> Arc<Self> {
        static NONE: LazyLock<Arc<RejectRecord>> = LazyLock::new(|| {
            Arc::new(RejectRecord {
                digest: Digest::of(b""),
                rows: 0,
                bytes: 0,
                by_reason: Vec::new(),
            })
        });
        Arc::clone(&NONE)
    }
}

mod shared_rejects {
    use super::{Arc, Deserialize, RejectRecord};

    pub(super) fn serialize<S: serde::Serializer>(
        rejects: &Arc<RejectRecord>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serde::Serialize::serialize(rejects.as_ref(), serializer)
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<RejectRecord>, D::Error> {
        let (rejects, none) = (RejectRecord::deserialize(deserializer)?, RejectRecord::none());
        Ok(if rejects == *none { none } else { Arc::new(rejects) })
    }
}

/// A parser does not know how long a list will be, and leaves room for more.
fn without_spare_room<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let mut list = Vec::<T>::deserialize(deserializer)?;
    list.shrink_to_fit();
    Ok(list)
}

/// The row counts of one partition of one stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rows of input 0.
    pub rows_in: u64,
    /// Rows over all ports, stored or streamed.
    pub rows_out: u64,
    /// Rows that a source reported as read.
    pub read: u64,
    pub merged: u64,
}

impl Record {
    /// Names of the data files that must exist for this record to be valid, with their sizes in bytes.
    pub fn files(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        let ports = self
            .ports
            .iter()
            .filter(|(_, port)| port.selection.is_none())
            .map(|(name, port)| (data_file(&self.key, name, &port.digest), port.bytes));
        let rejects =
            (self.rejects.rows > 0).then(|| (data_file(&self.key, REJECTS, &self.rejects.digest), self.rejects.bytes));
        ports.chain(rejects)
    }
}

/// Stands for the port in the name of a file of rejects.
pub(crate) const REJECTS: &str = "rejects";

/// Name of a data file. It contains the digest of the content, so that a file of that name never changes, and two
/// partitions with the same key and different rows have different files.
pub(crate) fn data_file(key: &Digest, port: &str, digest: &Digest) -> String {
    let mut key = key.to_hex();
    key.truncate(32);
    format!("{key}.{port}.{}.parquet", digest.short())
}

/// A group of partitions, committed together: one file `records/<generation>-<number>.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    pub version: u32,
    pub recipe: Digest,
    #[serde(with = "shared_records")]
    pub records: Vec<Arc<Record>>,
}

/// All records of a recipe: `index.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    pub version: u32,
    pub recipe: Digest,
    /// Groups up to this generation are included.
    pub generation: u64,
    #[serde(with = "shared_records")]
    pub records: Vec<Arc<Record>>,
}

/// Records are shared in memory and plain in files.
mod shared_records {
    use std::fmt;

    use serde::de::{SeqAccess, Visitor};

    use super::{Arc, Record};

    pub(super) fn serialize<S: serde::Serializer>(records: &[Arc<Record>], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(records.iter().map(Arc::as_ref))
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<Arc<Record>>, D::Error> {
        deserializer.deserialize_seq(Shared)
    }

    /// Shares each record as it is read.
    struct Shared;

    impl<'de> Visitor<'de> for Shared {
        type Value = Vec<Arc<Record>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of records")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Arc<Record>>, A::Error> {
            let mut records = Vec::new();
            while let Some(record) = list.next_element::<Record>()? {
                records.push(Arc::new(record));
            }
            Ok(records)
        }
    }
}

/// The position of a group in the order of commits. A generation lasts from the opening of a writer (or its last index)
/// to its next index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct GroupName {
    pub generation: u64,
    pub number: u64,
}

impl GroupName {
    pub fn file(self) -> String {
        format!("{:08}-{:06}.json", self.generation, self.number)
    }

    pub fn parse(file: &str) -> Option<Self> {
        let (generation, number) = file.strip_suffix(".json")?.split_once('-')?;
        let name = GroupName {
            generation: generation.parse().ok()?,
            number: number.parse().ok()?,
        };
        (name.file() == file).then_some(name)
    }
}

/// The records of one recipe whose data is all there.
#[derive(Clone, Debug)]
pub struct Records {
    recipe: Digest,
    /// Sorted by partition; those of one partition in the order of their commits.
    records: Vec<Arc<Record>>,
    /// Sorted by partition.
    lost: Vec<LostRecord>,
}

/// A record that is ignored because a data file that it names is missing or has another size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostRecord {
    pub partition: Partition,
    pub key: Digest,
    /// Name of the data file.
    pub file: String,
    /// Its size; none if it is missing.
    pub found: Option<u64>,
}

impl Records {
    /// `standing` are in the order of their commits.
    pub fn new(recipe: Digest, mut standing: Vec<Arc<Record>>, mut lost: Vec<LostRecord>) -> Self {
        standing.sort_by(|a, b| a.partition.cmp(&b.partition));
        lost.sort_by(|a, b| a.partition.cmp(&b.partition));
        Records {
            recipe,
            records: standing,
            lost,
        }
    }

    /// Has the partitions named by the allocations of `names`, which are sorted, as far as these have them: the records of
    /// all stages name the same partitions. Records that somebody else holds stay as they are.
    pub(crate) fn share_names(&mut self, names: &[Partition]) {
        let mut names = names.iter().peekable();
        for record in self.records.iter_mut().filter_map(Arc::get_mut) {
            while names.next_if(|name| **name < record.partition).is_some() {}
            if let Some(name) = names.peek().filter(|name| ***name == record.partition) {
                record.partition = Partition::clone(name);
            }
        }
    }

    pub fn recipe(&self) -> &Digest {
        &self.recipe
    }

    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The record of `partition` under `key`.
    pub fn get(&self, partition: &Partition, key: &Digest) -> Option<&Arc<Record>> {
        self.of(partition).iter().find(|record| record.key == *key)
    }

    /// All records of `partition`, the latest last.
    pub fn of(&self, partition: &Partition) -> &[Arc<Record>] {
        let begin = self.records.partition_point(|record| record.partition < *partition);
        let from = &self.records[begin..];
        let others = from.iter().position(|record| record.partition != *partition);
        &from[..others.unwrap_or(from.len())]
    }

    /// The latest record of `partition`, whatever its key. A plan compares with it to report which input changed. It
    /// may be that of another stage with the same recipe, so no data is read by it.
    pub fn latest(&self, partition: &Partition) -> Option<&Arc<Record>> {
        self.of(partition).last()
    }

    /// The records of each partition that has some, the latest last; partitions sorted by name.
    pub fn by_partition(&self) -> impl Iterator<Item = (&Partition, &[Arc<Record>])> {
        let runs = self.records.chunk_by(|a, b| a.partition == b.partition);
        runs.filter_map(|run| Some((&run.first()?.partition, run)))
    }

    /// The partitions that have a record, sorted by name.
    pub fn partitions(&self) -> impl Iterator<Item = &Partition> {
        self.by_partition().map(|(partition, _)| partition)
    }

    /// Records that are ignored because their data is missing; their partitions run again. Sorted by partition.
    pub fn lost(&self) -> &[LostRecord] {
        &self.lost
    }

    /// The first such record of a partition.
    pub fn lost_of(&self, partition: &Partition) -> Option<&LostRecord> {
        let first = self.lost.partition_point(|lost| lost.partition < *partition);
        self.lost.get(first).filter(|lost| lost.partition == *partition)
    }
}
