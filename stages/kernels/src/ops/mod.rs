//! The operations, one folder each.

pub mod adamw;
pub mod attention;
pub mod batch_norm;
pub mod ctc;
pub mod depthwise;
pub mod elementwise;
pub mod gated_convolution;
pub mod greedy;
pub mod joint;
pub mod layer_norm;
pub mod linear;
pub mod log_mel;
pub mod lstm;
pub mod relative_attention;
pub mod subsample;
pub mod sums;
pub mod tanh;
pub mod tdt;

#[cfg(test)]
mod not_a_number_tests;
