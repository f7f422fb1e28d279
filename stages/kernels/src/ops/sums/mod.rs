//! Sums over rows, and what is added to rows.

pub mod bias;
pub mod column_sums;
pub(crate) mod cuda;
#[cfg(test)]
mod device_tests;
pub mod embedding;
pub mod squares;

pub(crate) use cuda::Partial;
