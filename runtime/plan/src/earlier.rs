//! Plans of earlier runs of the pipeline, for reasons.

use serde::Deserialize;

use flow_base::digest::Digest;

/// What is read of the plan of an earlier run. Its partitions are not: they may be millions.
#[derive(Deserialize)]
pub struct EarlierPlan {
    pub pipeline: String,
    stages: Vec<EarlierStage>,
}

/// A stage of an earlier plan: see [`super::StagePlan`].
#[derive(Deserialize)]
pub struct EarlierStage {
    stage: String,
    pub kind: String,
    pub kind_version: u32,
    pub recipe: Digest,
    pub identity: serde_json::Value,
}

/// Plans of the last runs of the pipeline, the latest first.
#[derive(Clone, Copy)]
pub struct EarlierPlans<'a> {
    pub read: &'a [EarlierPlan],
    /// Whether there are no others.
    pub are_all: bool,
}

/// Another earlier plan is needed than those that were read.
#[derive(Debug, PartialEq, Eq)]
pub struct NeedsAnother;

impl EarlierPlans<'_> {
    /// The entry of a node in the latest plan (0), or in one before it; none where that does not exist.
    pub fn before(&self, node: &str, back: usize) -> Result<Option<&EarlierStage>, NeedsAnother> {
        match self.read.get(back) {
            Some(plan) => Ok(plan.stages.iter().find(|stage| stage.stage == node)),
            None if self.are_all => Ok(None),
            None => Err(NeedsAnother),
        }
    }
}
