//! How many passes a round takes, and which rows of a pass go to which process.

use super::GroupedDecision;
use crate::available_memory::available_memory;
use crate::processes::Processes;

/// The most passes of a round: each reads the key rows anew.
const MOST: u64 = 1 << 16;

/// Bytes that the reducers of one process may hold at a time; none: no limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget(pub Option<u64>);

impl Budget {
    /// `given`, or half of the memory that is available, shared with the other processes of the run on this machine.
    pub fn new(given: Option<u64>, processes: Option<&Processes>) -> Budget {
        let here = processes.map_or(1, |processes| {
            let peers = processes.peers();
            let own = peers.get(processes.process()).map(|peer| &peer.host);
            peers.iter().filter(|peer| Some(&peer.host) == own).count().max(1)
        });
        Budget(given.or_else(|| Some(available_memory()? / 2 / here as u64)))
    }

    /// Passes of a round whose reducers hold so many bytes, in as many processes.
    pub fn passes(self, bytes: u64, processes: usize) -> u64 {
        let of_process = bytes.div_ceil(processes.max(1) as u64);
        self.0
            .map_or(1, |budget| of_process.div_ceil(budget.max(1)).clamp(1, MOST))
    }
}

/// Whether one process can decide about so many key rows at once.
pub(crate) fn fits_in_one_pass(grouped: &dyn GroupedDecision, key_rows: u64, budget: Budget) -> bool {
    (0..grouped.rounds()).all(|round| budget.passes(grouped.bytes(round, key_rows, 0), 1) == 1)
}

/// One of the passes of a round. All reducers of a round divide the hashes into ranges of one size; a pass has consecutive
/// ones, one for each process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pass {
    pub number: u64,
    pub passes: u64,
}

impl Pass {
    /// The process whose reducer in this pass has the hash; none where it is one of another pass.
    pub fn process_of(self, hash: u64, processes: usize) -> Option<usize> {
        let (processes, reducers) = (processes as u64, self.passes.saturating_mul(processes as u64));
        let reducer = (u128::from(hash) * u128::from(reducers)) >> 64;
        let reducer = u64::try_from(reducer).ok()?;
        (reducer / processes == self.number).then_some((reducer % processes) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_hash_has_one_reducer_and_reducers_are_in_the_order_of_hashes() {
        for (passes, processes) in [(1, 1), (1, 3), (4, 1), (3, 5)] {
            let mut last = (0, 0);
            for step in 0..=100u64 {
                let hash = (u64::MAX / 100).saturating_mul(step);
                let owners: Vec<(u64, usize)> = (0..passes)
                    .filter_map(|number| Some((number, Pass { number, passes }.process_of(hash, processes)?)))
                    .collect();
                let [owner] = owners[..] else {
                    panic!("{hash}: {owners:?}")
                };
                assert!(owner >= last, "{hash}: {owner:?} after {last:?}");
                last = owner;
            }
            assert_eq!(last, (passes - 1, processes - 1));
        }
    }

    #[test]
    fn passes_follow_from_the_budget() {
        assert_eq!(Budget(None).passes(u64::MAX, 1), 1);
        assert_eq!(Budget(Some(100)).passes(0, 2), 1);
        assert_eq!(Budget(Some(100)).passes(200, 2), 1);
        assert_eq!(Budget(Some(100)).passes(201, 2), 2);
        assert_eq!(Budget(Some(0)).passes(u64::MAX, 1), MOST);
    }
}
