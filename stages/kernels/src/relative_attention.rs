//! Self-attention with relative positions as one kernel, for devices: no matrix of scores is in memory. On the CPU the same is
//! composed of the functions of [`attention`](crate::attention).

use candle_core::{DType, Tensor};

use crate::column_sums::ColumnSums;
use crate::cuda;
use crate::error::Result;
use crate::is_gpu;
use crate::lengths::Lengths;
use crate::noise::DropMask;

/// The widest head that [`forward`] takes.
pub const MOST_HEAD: usize = 128;

/// Queries, keys and values, (B T, H k) each in f32.
#[derive(Clone, Debug)]
pub enum Projections {
    /// (B T, 3 H k): those of a row behind each other.
    Together(Tensor),
    Apart([Tensor; 3]),
}

/// What queries see, and how they are scored.
#[derive(Clone, Debug)]
pub struct Attention<'a> {
    /// Valid frames per sequence.
    pub lengths: &'a Lengths,
    /// Frames per sequence, padding included.
    pub time: usize,
    pub heads: usize,
    /// `1 / sqrt(k)`.
    pub scale: f64,
    /// Keys at most this many frames away, if limited.
    pub band: Option<usize>,
    /// Positions are for keys from this many frames before a query to as many after it.
    pub reach: usize,
    /// Dropout masks, one for each `block` queries with all keys that one of these sees; a mask's places are those of (H, B,
    /// queries, keys). They differ in their keys alone.
    pub masks: &'a [Option<DropMask>],
    pub block: usize,
    /// What factors of products are rounded to: f32, or bf16, for which there are tensor cores.
    pub factors: DType,
}

/// Parameters' part in the scores.
#[derive(Clone, Copy, Debug)]
pub struct Positions<'a> {
    /// Projected positions, (2 reach + 1, H k).
    pub projected: &'a Tensor,
    /// Biases u and v of queries, (H, k) each.
    pub biases: (&'a Tensor, &'a Tensor),
}

/// Gradients of [`forward`].
#[derive(Debug)]
pub struct AttentionGradients {
    /// Of queries, keys and values, (B T, 3 H k).
    pub projections: Tensor,
    /// Of both biases, 2 H k sums.
    pub biases: ColumnSums,
    /// Of the projected positions, (2 reach + 1) H k sums.
    pub positions: ColumnSums,
}

/// Whether [`forward`] is for a tensor with heads of this width.
pub fn is_for(tensor: &Tensor, head: usize) -> bool {
    is_gpu(tensor.device()) && head <= MOST_HEAD && tensor.dtype() == DType::F32
}

/// The context (B T, H k), of type `dtype`, f32 or bf16; and the logarithm of the sum of each query's weights, (H, B T).
/// Queries that see no key have the context 0.
///
/// # Errors
/// Where the tensors are not on a device, or do not fit.
pub fn forward(
    dtype: DType,
    projections: &Projections,
    positions: Positions,
    attention: &Attention,
) -> Result<(Tensor, Tensor)> {
    cuda::relative_attention::forward(dtype, projections, positions, attention)
}

/// The gradients, given `context` and `logs` as [`forward`] gave them and the gradient of the context, (B T, H k) in f32.
/// That of the projections is of type `dtype`.
///
/// # Errors
/// As there.
pub fn backward(
    dtype: DType,
    projections: &Projections,
    positions: Positions,
    attention: &Attention,
    (context, logs): (&Tensor, &Tensor),
    d_context: &Tensor,
) -> Result<AttentionGradients> {
    cuda::relative_attention::backward(dtype, projections, positions, attention, (context, logs), d_context)
}
