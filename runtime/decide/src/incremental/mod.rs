//! Decides by what changed, in a process that stays alive over many runs: key rows are in the arrangements of a differential
//! dataflow, whose time is the generation, and a change of some partitions costs what it touches. Each stage has a dataflow and
//! a thread of its own, in [`StandingDecisions`]. The only module that names differential dataflow.
//!
//! Nothing is kept over the end of the process: the first run decides in another way, and its key rows are loaded meanwhile.

mod choice;
mod groups;
mod held;
mod partition_versions;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use self::held::Held;
use super::{Decided, Decision};
use flow_base::available_memory::available_memory;
use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_store::Artifact;

/// Bytes that a dataflow holds for each key row, while it merges what it holds.
const ROW_BYTES: u64 = 120;

/// Whether the memory suffices for a dataflow that holds so many key rows.
pub fn has_room_for(rows: u64) -> bool {
    available_memory().is_some_and(|available| rows.saturating_mul(ROW_BYTES) <= available / 2)
}

/// Of each generation of key rows, one after the other in one dataflow: the decisions, and rows in all and chosen rows of the
/// classes of a choice. For tests of kinds.
///
/// # Errors
/// As those of the decision.
pub fn decide_generations(decision: &Decision, generations: &[Artifact]) -> Result<Vec<Decided>, StageError> {
    let Some((first, rest)) = generations.split_first() else {
        return Ok(Vec::new());
    };
    let mut held = Held::load(decision, first).ok_or_else(|| StageError::failed("there is no thread to decide"))?;
    let mut decided: Vec<Decided> = held.loaded()?.into_iter().collect();
    for keys in rest {
        decided.extend(held.decide(decision, keys)?);
    }
    Ok(decided)
}

/// The dataflows of a process, by the recipe of the node that decides.
#[derive(Default)]
pub struct StandingDecisions {
    held: Mutex<HashMap<Digest, Held>>,
}

impl StandingDecisions {
    fn lock(&self) -> MutexGuard<'_, HashMap<Digest, Held>> {
        // Each change is one insertion or removal.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides by what changed since the last time. None where no dataflow holds the key rows yet.
    ///
    /// # Errors
    /// When the dataflow cannot say (a file of the last generation is gone, for one): then it is dropped.
    pub fn decide(&self, recipe: &Digest, decision: &Decision, keys: &Artifact) -> Result<Option<Decided>, StageError> {
        // Taken out meanwhile: the lock is not held while it decides.
        let Some(mut held) = self.lock().remove(recipe) else {
            return Ok(None);
        };
        let decided = held.decide(decision, keys)?;
        self.lock().insert(*recipe, held);
        Ok(decided)
    }

    /// Begins to load key rows, unless they are held (or being loaded), or too many for the memory.
    pub fn load(&self, recipe: &Digest, decision: &Decision, keys: &Artifact) {
        if !has_room_for(keys.rows()) {
            return;
        }
        let mut all = self.lock();
        if !all.contains_key(recipe)
            && let Some(held) = Held::load(decision, keys)
        {
            all.insert(*recipe, held);
        }
    }

    /// Whether key rows are held, or being loaded.
    pub fn holds(&self, recipe: &Digest) -> bool {
        self.lock().contains_key(recipe)
    }

    /// Drops all dataflows but those of these recipes: the pipeline may have changed.
    pub fn retain(&self, recipes: &[Digest]) {
        self.lock().retain(|recipe, _| recipes.contains(recipe));
    }
}

impl std::fmt::Debug for StandingDecisions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let held = self.lock();
        f.debug_list().entries(held.keys().map(Digest::short)).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, RecordBatch, UInt32Array};

    use super::*;
    use crate::{GroupDecision, GroupRows};
    use flow_base::partition::Partition;
    use flow_base::row_number::ROW;
    use flow_kind::context::Context;

    /// Cannot read key rows.
    struct Unreadable;

    impl GroupDecision for Unreadable {
        fn rows(&self, _: &Partition, _: &Artifact) -> Result<GroupRows, StageError> {
            Err(StageError::failed("a file is gone"))
        }

        fn whole(&self, _: &Partition, _: &Artifact, _: &[u32]) -> Result<RecordBatch, StageError> {
            Err(StageError::failed("no row is in a group"))
        }

        fn decide(&self, _: &[(Partition, Vec<RecordBatch>)]) -> Result<Vec<(Partition, RecordBatch)>, StageError> {
            Ok(Vec::new())
        }

        fn complete(&self, _: &Context, _: &[(Partition, RecordBatch)]) -> Result<(), StageError> {
            Ok(())
        }
    }

    #[test]
    fn a_dataflow_that_fails_says_why_and_is_dropped() {
        let numbers: ArrayRef = Arc::new(UInt32Array::from(vec![0, 1]));
        let rows = RecordBatch::try_from_iter([(ROW, numbers)]).unwrap();
        let keys = Artifact::in_memory(rows.schema(), vec![(Partition::from("a"), vec![rows])]).unwrap();
        let decision = Decision::Groups(Arc::new(Unreadable));
        let (standing, recipe) = (StandingDecisions::default(), Digest::of(b"recipe"));
        assert!(standing.decide(&recipe, &decision, &keys).unwrap().is_none());
        standing.lock().insert(recipe, Held::load(&decision, &keys).unwrap());
        let error = loop {
            match standing.decide(&recipe, &decision, &keys) {
                // It is loading.
                Ok(None) => std::thread::yield_now(),
                Ok(Some(_)) => panic!("it decided without key rows"),
                Err(error) => break error,
            }
        };
        assert!(error.to_string().contains("a file is gone"), "{error}");
        assert!(!standing.holds(&recipe));
    }
}
