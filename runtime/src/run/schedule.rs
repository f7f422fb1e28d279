//! Which nodes of a region work on which partitions.

use flow_base::partition::Partition;
use flow_plan::Action;
use flow_plan::verdict::PartitionVerdict;

/// What a node does with a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    /// It does not have the partition.
    Absent,
    /// What is stored of the partition is reused.
    Reuse,
    Run,
}

/// What each node of a region does with each partition of the region. A node is named by its place in the region, a partition
/// by its ordinal.
pub(super) struct Schedule {
    /// Sorted.
    partitions: Vec<Partition>,
    /// By node, then partition.
    tasks: Vec<Vec<Task>>,
}

impl Schedule {
    /// As the nodes were decided, one list of verdicts for each.
    pub fn new(verdicts: &[Vec<PartitionVerdict>]) -> Self {
        let mut partitions: Vec<Partition> = Vec::new();
        for own in verdicts {
            let names = own.iter().map(|verdict| &verdict.partition);
            if !names.clone().eq(&partitions) {
                partitions.extend(names.cloned());
                partitions.sort_unstable();
                partitions.dedup();
            }
        }
        let mut tasks = vec![vec![Task::Absent; partitions.len()]; verdicts.len()];
        for (tasks, own) in tasks.iter_mut().zip(verdicts) {
            let mut next = 0;
            for verdict in own {
                // Nodes mostly have the same partitions, in the same order.
                let found = match partitions.get(next) {
                    Some(partition) if *partition == verdict.partition => Ok(next),
                    _ => partitions.binary_search(&verdict.partition),
                };
                if let Ok(at) = found {
                    next = at + 1;
                    tasks[at] = match verdict.action {
                        Action::Reuse => Task::Reuse,
                        Action::Run | Action::IfChanged => Task::Run,
                    };
                }
            }
        }
        Schedule { partitions, tasks }
    }

    /// Has `producer` run the partitions that `reader` runs, except those whose rows are stored.
    pub fn feed(&mut self, reader: usize, producer: usize, is_stored: impl Fn(&Partition) -> bool) {
        for (at, partition) in self.partitions.iter().enumerate() {
            if self.tasks[reader][at] == Task::Run && self.tasks[producer][at] == Task::Reuse && !is_stored(partition) {
                self.tasks[producer][at] = Task::Run;
            }
        }
    }

    /// Leaves out the partitions that no node runs, which gives the others new ordinals.
    pub fn only_run(mut self) -> Self {
        let runs: Vec<bool> = (0..self.partitions.len())
            .map(|at| self.tasks.iter().any(|tasks| tasks[at] == Task::Run))
            .collect();
        let mut is_run = runs.iter();
        self.partitions.retain(|_| is_run.next() == Some(&true));
        for tasks in &mut self.tasks {
            let mut is_run = runs.iter();
            tasks.retain(|_| is_run.next() == Some(&true));
        }
        self
    }

    pub fn partitions(&self) -> &[Partition] {
        &self.partitions
    }

    pub fn is_run(&self, node: usize, ordinal: usize) -> bool {
        self.tasks[node][ordinal] == Task::Run
    }

    /// By ordinal, whether a node runs the partition.
    pub fn run_by(&self, node: usize) -> Vec<bool> {
        self.tasks[node].iter().map(|task| *task == Task::Run).collect()
    }

    /// By ordinal, whether `reader` reads the stored rows of the partition because `producer` does not run it.
    pub fn read_stored(&self, reader: usize, producer: usize) -> Vec<bool> {
        let pairs = self.tasks[reader].iter().zip(&self.tasks[producer]);
        pairs.map(|pair| pair == (&Task::Run, &Task::Reuse)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(of: &[(&str, Action)]) -> Vec<PartitionVerdict> {
        let verdict = |(name, action): &(&str, Action)| PartitionVerdict {
            partition: Partition::new(name),
            action: *action,
            reason: "".into(),
            key: None,
            inputs: Vec::new(),
        };
        of.iter().map(verdict).collect()
    }

    #[test]
    fn what_runs_is_fed_where_its_rows_are_not_stored() {
        use Action::{IfChanged, Reuse, Run};
        let source = verdicts(&[("a", Reuse), ("b", Reuse), ("c", Reuse), ("d", Run)]);
        let reader = verdicts(&[("a", Run), ("b", IfChanged), ("c", Reuse), ("e", Run)]);
        let mut schedule = Schedule::new(&[source, reader]);
        assert_eq!(schedule.partitions().len(), 5);
        schedule.feed(1, 0, |partition| partition.as_str() == "a");
        let schedule = schedule.only_run();
        let names: Vec<&str> = schedule.partitions().iter().map(Partition::as_str).collect();
        // No node runs c; the source does not have e.
        assert_eq!(names, ["a", "b", "d", "e"]);
        assert_eq!(schedule.run_by(0), [false, true, true, false]);
        assert_eq!(schedule.run_by(1), [true, true, false, true]);
        assert_eq!(schedule.read_stored(1, 0), [true, false, false, false]);
        assert!(schedule.is_run(0, 1) && !schedule.is_run(0, 0));
    }
}
