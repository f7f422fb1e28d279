//! Prediction of the memory that training needs, before it begins.
//!
//! There are no formulas for activations, which would have to follow every change of a kernel. Micro-batches of the
//! shapes that training will have are computed, forward and backward, in a model of the same widths with one encoder
//! layer and in one with two, while the allocator counts. The difference gives what a layer keeps and what it needs as
//! workspace, and so the memory of a model of any depth. A batch of evaluation is measured in the same way. Parameters,
//! gradients and optimizer state are counted from their shapes.

mod assumptions;
mod check;
mod needs;
mod prediction;
mod profile;
mod units;

pub use assumptions::{BatchShape, DataAssumptions, TOKENS_PER_SECOND};
pub use check::{MemoryCheck, check};
pub use needs::{HostMemoryNeeds, MemoryNeeds};
pub use prediction::{MeasuredMemory, largest_batch};
pub use units::gigabytes;
