//! Reads results of earlier runs of the pipeline: their plans, and artifacts that are reused although they may be out of
//! date.

use std::sync::Arc;

use super::state::PlanState;
use flow_base::event::Event;
use flow_kind::kind::Role;
use flow_plan::earlier::{EarlierPlan, EarlierPlans, NeedsAnother};
use flow_plan::run_error::RunError;
use flow_plan::snapshot::Snapshot;
use flow_store::{StageSnapshot, StoreError};

/// How many runs back older plans are looked at. Runs that had all of no stage, such as those about some partitions, are not
/// counted.
const LOOK_BACK: usize = 10;

impl PlanState {
    /// What follows from what is known and from plans of earlier runs, of which as many are read as it takes: they may be large.
    pub(super) fn with_earlier_plans<T>(
        &mut self,
        find: impl Fn(&Snapshot<'_>, EarlierPlans<'_>) -> Result<T, NeedsAnother>,
    ) -> T {
        loop {
            let earlier = EarlierPlans {
                read: &self.previous,
                are_all: self.unread.is_empty(),
            };
            match find(&self.snapshot(), earlier) {
                Ok(found) => return found,
                Err(NeedsAnother) => self.read_earlier_plan(),
            }
        }
    }

    /// Reads the plan of the run before those that were read.
    fn read_earlier_plan(&mut self) {
        let Some(run) = self.unread.pop() else { return };
        if let Ok(Some((_, true))) = self.store.run_pipeline(&run) {
            self.complete_read += 1;
            if self.complete_read == LOOK_BACK {
                self.unread.clear();
            }
        }
        // Only reasons depend on it, so an unreadable plan is skipped.
        let folder = self.store.run_folder(&run).ok();
        let text = folder.and_then(|folder| std::fs::read(folder.join("plan.json")).ok());
        let plan = text.and_then(|text| serde_json::from_slice::<EarlierPlan>(&text).ok());
        self.previous
            .extend(plan.filter(|plan| plan.pipeline == self.checked.pipeline.name));
    }

    /// The last complete snapshot of a node's stage in a run of this pipeline.
    pub(super) fn last_snapshot(&mut self, node: usize) -> Result<Option<StageSnapshot>, RunError> {
        let kind = self.stage(node).kind.name();
        let name = &self.graph.nodes[node].name;
        let mut skipped = |error: &StoreError| {
            self.events.send(Event::warning(
                Some(name.clone()),
                format!("the notes of an earlier run are not used: {error}"),
            ));
        };
        let pipeline = &self.checked.pipeline.path;
        Ok(self.store.last_complete_snapshot(pipeline, name, kind, &mut skipped)?)
    }

    /// Settles an unselected node by existing records: those of the present inputs if all of them exist, otherwise the
    /// last complete snapshot of the stage in a run of this pipeline.
    ///
    /// Not simply the latest records of its recipe: another stage may have the same recipe, and other settings of the
    /// stages before it leave records under it too.
    pub fn settle_as_it_stands(&mut self, node: usize) -> Result<(), RunError> {
        if self.nodes[node].all_settled {
            return Ok(());
        }
        if let Some(snapshot) = self.last_snapshot(node)? {
            // A log has one output partition, whatever its steps.
            let is_log = self.graph.nodes[node].role == Role::Log;
            let wanted = self.space(node).ok().flatten().filter(|_| !is_log);
            let records = match snapshot.recipe == self.graph.nodes[node].recipe {
                true => self.records(node)?,
                false => Arc::new(self.store.records(&snapshot.recipe)?),
            };
            let described = &self.graph.nodes[node];
            let mut found = snapshot.among(&records);
            found.retain(|record| described.unkept(record).is_none());
            let state = &mut self.nodes[node];
            state.settle_as_noted(found, snapshot.keys.len());
            let left_out = wanted.iter().flat_map(|wanted| wanted.iter());
            let left_out = left_out.filter(|partition| !snapshot.keys.contains_key(*partition));
            state.stale += left_out.count() as u64;
            state.settled_recipe = Some(snapshot.recipe);
        } else {
            self.nodes[node].never_complete = true;
        }
        self.nodes[node].all_settled = true;
        Ok(())
    }
}
