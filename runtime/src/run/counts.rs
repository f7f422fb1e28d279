//! How many partitions ran and were reused.

use std::collections::BTreeMap;

/// How many partitions ran and were reused.
#[derive(Default)]
pub(super) struct RunCounts {
    pub ran: u64,
    pub reused: u64,
    by_node: BTreeMap<usize, (u64, u64)>,
}

impl RunCounts {
    pub fn add(&mut self, node: usize, ran: u64, reused: u64) {
        self.ran += ran;
        self.reused += reused;
        let entry = self.by_node.entry(node).or_default();
        *entry = (entry.0 + ran, entry.1 + reused);
    }

    /// Sets how many partitions of a node are reused, where `standing` are committed now: those that this run has made
    /// do not count.
    pub fn set_reused(&mut self, node: usize, standing: u64) {
        let entry = self.by_node.entry(node).or_default();
        let reused = standing.saturating_sub(entry.0);
        self.reused = self.reused - entry.1 + reused;
        entry.1 = reused;
    }

    /// Whether the node was begun.
    pub fn knows(&self, node: usize) -> bool {
        self.by_node.contains_key(&node)
    }

    pub fn of(&self, node: usize) -> (u64, u64) {
        self.by_node.get(&node).copied().unwrap_or_default()
    }
}
