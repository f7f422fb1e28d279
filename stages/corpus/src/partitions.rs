//! The order of partitions in manifests and datasets.

use std::cmp::Ordering;

use flow_kind::{Artifact, Partition};

/// The order of partitions in manifests: language, then shard id, each as bytes. (Not the order of the joined names:
/// `a-b/x` comes before `a/x` there.)
pub fn partition_order(a: &Partition, b: &Partition) -> Ordering {
    a.as_str().split('/').cmp(b.as_str().split('/'))
}

/// The partitions of an artifact that have rows, in this order.
pub fn with_rows(artifact: &Artifact) -> Vec<&Partition> {
    let has_rows = |partition: &&Partition| artifact.rows_of(partition).is_some_and(|rows| rows > 0);
    let mut partitions: Vec<_> = artifact.partitions().filter(has_rows).collect();
    partitions.sort_by(|a, b| partition_order(a, b));
    partitions
}
