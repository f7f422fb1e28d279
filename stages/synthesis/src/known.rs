//! What is known before the first shard is made.

use std::collections::BTreeMap;

use super::sentences::{Language, Side};
use super::words::Excluded;

/// What is read once, before the first shard.
pub struct Known {
    pub shards: BTreeMap<String, PlannedShard>,
    pub languages: BTreeMap<String, Language>,
    pub excluded: Excluded,
}

/// A planned shard.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedShard {
    pub lang: String,
    pub shard_id: String,
    pub side: Side,
    /// Seconds of speech to reach.
    pub seconds: f64,
}

impl PlannedShard {
    pub fn name(&self) -> String {
        format!("{}/{}", self.lang, self.shard_id)
    }
}
