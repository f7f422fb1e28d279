//! Sampling: which utterances make which batch, and loading them.

pub mod augment;
pub mod curriculum;
pub mod dataset;
pub mod dealing;
pub mod error;
mod falling_order;
pub mod figures;
pub mod languages;
pub mod load;
mod loaded_batch;
pub mod manifest_rows;
pub mod mt19937;
pub mod plan;
pub mod plan_batches;
mod plan_tables;
pub mod planned;
pub mod quota;
pub mod sampling_record;
pub mod steps;
#[cfg(test)]
mod test_data;
pub mod write_plan;

pub use error::SamplingError;
pub use load::Load;
pub use plan_batches::Plan;
pub use sampling_record::SamplingRecord;
pub use write_plan::WritePlan;
