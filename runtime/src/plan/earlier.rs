//! Results of earlier runs of the pipeline: their plans, and artifacts that are reused although they may be out of
//! date.

use std::sync::Arc;

use serde::Deserialize;

use super::state::{LOOK_BACK, PlanState};
use crate::digest::Digest;
use crate::event::Event;
use crate::kind::Role;
use crate::partition::Partition;
use crate::run_error::RunError;
use crate::store::{StageSnapshot, StoreError};

/// What is read of the plan of an earlier run. Its partitions are not: they may be millions.
#[derive(Deserialize)]
pub(crate) struct EarlierPlan {
    pipeline: String,
    stages: Vec<EarlierStage>,
}

/// A stage of an earlier plan: see [`super::StagePlan`].
#[derive(Deserialize)]
pub(crate) struct EarlierStage {
    stage: String,
    pub kind: String,
    pub kind_version: u32,
    pub recipe: Digest,
    pub identity: serde_json::Value,
}

impl PlanState {
    /// The entry of a node in an earlier plan of the pipeline: the latest (0), or one before it.
    pub fn before(&mut self, node: usize, back: usize) -> Option<&EarlierStage> {
        while self.previous.len() <= back {
            let run = self.unread.pop()?;
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
        let name = &self.graph.nodes[node].name;
        self.previous[back].stages.iter().find(|stage| stage.stage == *name)
    }

    /// The last complete snapshot of a node's stage in a run of this pipeline.
    pub fn last_snapshot(&mut self, node: usize) -> Result<Option<StageSnapshot>, RunError> {
        let kind = self.stage(node).kind.name();
        let name = &self.graph.nodes[node].name;
        let mut skipped = |error: &StoreError| {
            self.events.send(Event::Warning {
                stage: Some(name.clone()),
                message: format!("the notes of an earlier run are not used: {error}"),
            });
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
            let wanted = self.space(node).ok().flatten();
            let records = match snapshot.recipe == self.graph.nodes[node].recipe {
                true => self.records(node)?,
                false => Arc::new(self.store.records(&snapshot.recipe)?),
            };
            let described = &self.graph.nodes[node];
            let standing: Vec<_> = snapshot
                .among(&records)
                .into_iter()
                .filter(|record| {
                    let mut kept = described.outputs.iter().zip(&described.stored);
                    kept.all(|(port, kept)| !kept || record.ports.contains_key(&port.name))
                })
                .collect();
            let state = &mut self.nodes[node];
            let as_planned = std::mem::take(&mut state.settled);
            state.missing = (snapshot.keys.len() - standing.len()) as u64;
            for record in standing {
                let planned = as_planned.get(&record.partition);
                state.stale += u64::from(planned.is_none_or(|planned| planned.key != record.key));
                let partition: Partition = record.partition.clone();
                state.settle(&partition, record);
            }
            // A log has one output partition, whatever its steps.
            let wanted = wanted.filter(|_| described.role != Role::Log);
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
