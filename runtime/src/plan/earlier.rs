//! What earlier runs left: their plans, and artifacts that are taken as they stand.

use std::sync::Arc;

use super::StagePlan;
use super::ledger::Ledger;
use crate::kind::Role;
use crate::run::RunError;
use crate::store::Record;

/// How many runs back older plans are looked at.
pub(super) const LOOK_BACK: usize = 10;

impl Ledger {
    /// What an earlier plan said of a node: the latest (0), or one before it.
    pub fn before(&mut self, node: usize, back: usize) -> Option<&StagePlan> {
        while self.previous.len() <= back {
            let run = self.unread.pop()?;
            // Only reasons and the choice of an older artifact hang on it, so a plan that cannot be read is
            // passed over.
            let folder = self.store.run_folder(&run).ok();
            let text = folder.and_then(|folder| std::fs::read(folder.join("plan.json")).ok());
            self.previous
                .extend(text.and_then(|text| serde_json::from_slice(&text).ok()));
        }
        let name = &self.graph.nodes[node].name;
        self.previous[back].stages.iter().find(|stage| stage.stage == *name)
    }

    /// Takes a node that is not selected as it stands: what its recipe has for the present inputs, else the
    /// latest that there is.
    pub fn settle_as_it_stands(&mut self, node: usize) -> Result<(), RunError> {
        if self.nodes[node].all_settled {
            return Ok(());
        }
        let mut records = self.records(node)?;
        let mut recipe = self.graph.nodes[node].recipe;
        for back in 0..LOOK_BACK {
            if !records.is_empty() {
                break;
            }
            if let Some(before) = self.before(node, back).map(|stage| stage.recipe) {
                recipe = before;
                records = Arc::new(self.store.records(&recipe)?);
            }
        }
        let space = self.space(node).ok().flatten();
        for partition in records.partitions() {
            let wanted = space
                .as_ref()
                .is_none_or(|space| space.binary_search(partition).is_ok())
                || self.graph.nodes[node].role == Role::Log;
            if !wanted || self.nodes[node].settled.contains_key(partition) {
                continue;
            }
            let described = &self.graph.nodes[node];
            let kept = |record: &Record| {
                described
                    .outputs
                    .iter()
                    .zip(&described.kept)
                    .all(|(port, kept)| !kept || record.ports.contains_key(&port.name))
            };
            if let Some(record) = records.of(partition).iter().rev().find(|record| kept(record)) {
                self.nodes[node].stale += 1;
                self.nodes[node].settle(partition, Arc::clone(record));
            }
        }
        let state = &mut self.nodes[node];
        state.settled_recipe = Some(recipe);
        state.all_settled = true;
        Ok(())
    }
}
