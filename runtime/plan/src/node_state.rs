//! What is known of every node: partitions, records, digests. Read before it is decided about them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::keys::ListedPartition;
use flow_base::digest::Digest;
use flow_base::partition::Partition;
use flow_store::{Record, Records};

/// What is known of a node.
#[derive(Default)]
pub struct NodeState {
    /// The records of the node's recipe; read on first use.
    pub records: Option<Arc<Records>>,
    /// The partitions on which the node works; none while they are not known.
    pub space: Option<Arc<Vec<Partition>>>,
    pub sources: Arc<BTreeMap<Partition, ListedPartition>>,
    /// Digests of the partitions of a source, as far as they were needed.
    pub source_digests: BTreeMap<Partition, Digest>,
    /// Records that later nodes may read, by partition.
    pub settled: BTreeMap<Partition, Arc<Record>>,
    /// No more records will be settled.
    pub all_settled: bool,
    /// The recipe of the settled records: differs from the node's where an older artifact is reused.
    pub settled_recipe: Option<Digest>,
    /// Number of settled records that are out of date.
    pub stale: u64,
    /// Number of partitions of a reused artifact that are lost.
    pub missing: u64,
    /// To be reused, although no run ever completed it.
    pub never_complete: bool,
    /// Follows the selected nodes, and its settled records are not of their present output: they are no result of this run.
    pub beyond: bool,
    /// By port, the digest of all settled partitions, where it was asked for.
    pub whole: BTreeMap<usize, Digest>,
    /// Of a settled `decide`, the digests of what it decided of each partition, where they were asked for.
    pub decided: Option<Arc<BTreeMap<Partition, Digest>>>,
}

impl NodeState {
    /// Settles a partition, and drops values derived from the settled records.
    pub fn settle(&mut self, partition: &Partition, record: Arc<Record>) {
        self.whole.clear();
        self.decided = None;
        self.settled.insert(partition.clone(), record);
    }

    /// Settles partitions in place of all that were.
    pub fn settle_all(&mut self, records: Vec<(Partition, Arc<Record>)>) {
        self.whole.clear();
        self.decided = None;
        self.settled = records.into_iter().collect();
    }

    /// Drops all settled records.
    pub fn unsettle_all(&mut self) {
        self.whole.clear();
        self.decided = None;
        self.settled.clear();
        self.all_settled = false;
        self.settled_recipe = None;
        (self.stale, self.missing, self.never_complete) = (0, 0, false);
    }

    /// Whether it is known that the node does not have a partition.
    pub fn lacks(&self, partition: &Partition) -> bool {
        let space = self.space.as_ref();
        space.is_some_and(|space| space.binary_search(partition).is_err())
    }

    /// Unsettles a partition, which is computed again.
    pub fn unsettle(&mut self, partition: &Partition) {
        self.whole.clear();
        self.decided = None;
        self.settled.remove(partition);
    }

    /// Settles by the records of an earlier run in place of those of the plan. `found`: those of them that are there, of the
    /// `noted` partitions of that run.
    pub fn settle_as_noted(&mut self, found: Vec<Arc<Record>>, noted: usize) {
        let as_planned = std::mem::take(&mut self.settled);
        self.missing = noted.saturating_sub(found.len()) as u64;
        for record in found {
            let planned = as_planned.get(&record.partition);
            self.stale += u64::from(planned.is_none_or(|planned| planned.key != record.key));
            let partition: Partition = record.partition.clone();
            self.settle(&partition, record);
        }
    }
}
