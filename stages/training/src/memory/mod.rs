//! Prediction of the memory that training needs, before it begins.
//!
//! Activations are measured, not computed by formulas, which would have to follow every change of a kernel.
//! Micro-batches of the shapes of the training are computed, forward and backward, in models of the same widths with
//! one and with two encoder layers, while the allocator counts. The difference is what a layer keeps for the backward
//! pass and needs as workspace, which gives the memory of a model of any depth. A batch of evaluation is measured in
//! the same way. Parameters, gradients and optimizer state are counted from their shapes.

mod assumptions;
mod buckets;
mod check;
mod needs;
mod prediction;
mod profile;
mod units;

pub use assumptions::{BatchShape, DataAssumptions, TOKENS_PER_SECOND};
pub use buckets::{bucket_batch_sizes, step_fits};
pub use check::{MemoryCheck, check, check_device};
pub use needs::{HostMemoryNeeds, MemoryNeeds};
pub use prediction::{MeasuredMemory, largest_batch};
pub use units::gigabytes;
