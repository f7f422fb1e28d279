//! Loads the state with which a training continues.

use std::path::Path;

use flow_model::model::TdtModel;

use super::record::{CheckpointRecord, LIVE, OPTIMIZER};
use crate::average::MovingAverage;
use crate::error::TrainingError;
use crate::optimizer::{AdamW, AdamWConfig};

/// Reads the optimizer's state of a checkpoint.
pub fn read_optimizer(checkpoint: &Path, config: AdamWConfig) -> Result<AdamW, TrainingError> {
    AdamW::load(&checkpoint.join(OPTIMIZER), config)
}

/// Replaces the weights of `model`, loaded from a checkpoint, by those that training continues from. Returns their
/// moving average if `decay` is above 0.
pub fn read_average(
    checkpoint: &Path,
    record: &CheckpointRecord,
    decay: f64,
    model: &mut TdtModel,
) -> Result<Option<MovingAverage>, TrainingError> {
    let average = if record.files.contains_key(LIVE) {
        MovingAverage::resume(decay, model, &checkpoint.join(LIVE))?
    } else {
        MovingAverage::new(decay, &model.parameters)?
    };
    Ok((decay > 0.0).then_some(average))
}
