//! Self-attention with relative positions as one kernel, for devices: no matrix of scores is in memory. On the CPU the same is
//! composed of the functions of [`attention`](crate::attention).

#[cfg(test)]
mod device_tests;

use candle_core::{DType, Tensor};

use crate::device::is_gpu;
use crate::device::launch::Argument::{Float, Int, Long, Longs, Read, ReadIf, Signed, Write};
use crate::device::launch::{Argument, Grid, fresh, fresh_in, in_either, launch};
use crate::error::{Error, Result};
use crate::lengths::Lengths;
use crate::noise::DropMask;
use crate::ops::sums::column_sums::ColumnSums;

/// The widest head that [`forward`] takes.
pub const MOST_HEAD: usize = 128;

/// Sums of gradients of positions over some sequences each, at most, unless those of one group are more: 16 MB. Sums depend on it, so it
/// is the same on all devices.
const SUMS_OF_POSITIONS: usize = 4 << 20;

/// Queries, keys and values, (B T, H k) each in f32; or in bf16, where all other factors of products are.
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
    /// Projected positions, (2 reach + 1, H k), of the type of queries, keys and values.
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

/// Queries or keys of a block, as in `relative_attention.cu`.
fn tile(factors: DType, backward: bool) -> usize {
    if factors == DType::BF16 && !backward { 32 } else { 16 }
}

/// What all kernels take, checked.
struct Problem<'a> {
    inputs: [Argument<'a>; 6],
    /// Keys of the dropout masks, where there are several.
    keys: Vec<u64>,
    sizes: [Argument<'a>; 7],
    rest: [Argument<'a>; 4],
    like: &'a Tensor,
    batch: usize,
    d: usize,
}

impl<'a> Problem<'a> {
    fn new(projections: &'a Projections, positions: Positions<'a>, attention: &Attention) -> Result<Self> {
        let batch = attention.lengths.len();
        let (parts, like) = match projections {
            Projections::Together(all) => ([ReadIf(Some(all)), ReadIf(None), ReadIf(None)], all),
            Projections::Apart(apart) => (apart.each_ref().map(|tensor| ReadIf(Some(tensor))), &apart[0]),
        };
        let d = positions.projected.dims2()?.1;
        let (heads, rows) = (attention.heads.max(1), batch * attention.time);
        let fits = match projections {
            Projections::Together(all) => all.dims() == [rows, 3 * d],
            Projections::Apart(apart) => apart.iter().all(|tensor| tensor.dims() == [rows, d]),
        };
        let k = d / heads;
        let whole = positions.projected.dim(0)? == 2 * attention.reach + 1 && k * heads == d;
        let (u, v) = positions.biases;
        let near = attention.band.is_some_and(|band| band <= attention.reach) || attention.reach + 1 >= attention.time;
        let blocks = attention.time.div_ceil(attention.block.max(1));
        if !(fits && whole && near && u.elem_count() == d && v.elem_count() == d && k <= MOST_HEAD)
            || blocks != attention.masks.len()
        {
            return Err(Error::Input(format!(
                "attention over {batch} x {} frames with {heads} heads and {} positions does not fit tensors of shape {:?}",
                attention.time,
                positions.projected.dim(0)?,
                like.dims()
            )));
        }
        let drawn: Vec<_> = attention.masks.iter().flatten().collect();
        let first = drawn.first();
        if !drawn.is_empty()
            && (drawn.len() != blocks
                || drawn
                    .iter()
                    .any(|mask| Some(mask.keep_factor) != first.map(|m| m.keep_factor)))
        {
            return Err(Error::Input(
                "dropout masks of attention that differ in more than their keys".into(),
            ));
        }
        let (key, threshold) = first.map_or((0, 0), |mask| mask.key_and_threshold());
        // One key is an argument by itself; a table has to be copied.
        let keys = match drawn.len() {
            0 | 1 => Vec::new(),
            _ => drawn.iter().map(|mask| mask.key_and_threshold().0).collect(),
        };
        let band = attention
            .band
            .map_or(-1, |band| i32::try_from(band).unwrap_or(i32::MAX));
        Ok(Self {
            inputs: [
                parts[0],
                parts[1],
                parts[2],
                Read(positions.projected),
                Read(u),
                Read(v),
            ],
            keys,
            sizes: [
                Int(batch),
                Int(attention.time),
                Int(heads),
                Int(k),
                Signed(band),
                Int(attention.reach),
                Int(attention.block.min(attention.time)),
            ],
            rest: [
                Float(attention.scale),
                Float(first.map_or(1.0, |mask| mask.keep_factor)),
                Long(key),
                Long(threshold),
            ],
            like,
            batch,
            d,
        })
    }
}

/// The kernel for factors of a type, of numbers that are of another one.
fn name(backward: bool, factors: DType, of: DType) -> Result<&'static str> {
    match (backward, factors, of) {
        (false, DType::F32, DType::F32) => Ok("relative_attention_f32"),
        (false, DType::BF16, DType::F32) => Ok("relative_attention_bf16"),
        (false, DType::BF16, DType::BF16) => Ok("relative_attention_bf16_of_bf16"),
        (true, DType::F32, DType::F32) => Ok("relative_attention_backward_f32"),
        (true, DType::BF16, DType::F32) => Ok("relative_attention_backward_bf16"),
        (true, DType::BF16, DType::BF16) => Ok("relative_attention_backward_bf16_of_bf16"),
        _ => Err(Error::Input(format!(
            "attention in {} of tensors in {} on a device",
            factors.as_str(),
            of.as_str()
        ))),
    }
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
    let problem = Problem::new(projections, positions, attention)?;
    let (rows, device) = (problem.batch * attention.time, problem.like.device());
    let out = fresh_in(dtype, (rows, problem.d), device)?;
    let logs = fresh((attention.heads, rows), problem.like)?;
    let lengths = attention.lengths.on_device(problem.batch, device)?;
    let tables = [Read(&lengths), Longs(&problem.keys)];
    let tiles = attention.time.div_ceil(tile(attention.factors, false));
    launch(
        name(false, attention.factors, problem.like.dtype())?,
        Grid::of(tiles * attention.heads, problem.batch),
        &[
            &problem.inputs[..],
            &tables,
            &in_either(&out),
            &[Write(&logs)],
            &problem.sizes,
            &problem.rest,
        ]
        .concat(),
    )?;
    Ok((out, logs))
}

/// The gradients, given `context` and `logs` as [`forward`] gave them and the gradient of the context, (B T, H k) of the type of the
/// projections. That of the projections is of type `dtype`.
///
/// # Errors
/// As there.
pub fn backward(
    dtype: DType,
    projections: &Projections,
    positions: Positions,
    attention: &Attention,
    forward: (&Tensor, &Tensor),
    d_context: &Tensor,
) -> Result<AttentionGradients> {
    let sums = (SUMS_OF_POSITIONS / positions.projected.elem_count().max(1)).max(1);
    let together = attention.lengths.len().div_ceil(sums);
    backward_of(dtype, projections, positions, attention, forward, d_context, together)
}

/// The same with gradients of positions that are added up over so many sequences by one block.
pub(crate) fn backward_of(
    dtype: DType,
    projections: &Projections,
    positions: Positions,
    attention: &Attention,
    (context, logs): (&Tensor, &Tensor),
    d_context: &Tensor,
    together: usize,
) -> Result<AttentionGradients> {
    let problem = Problem::new(projections, positions, attention)?;
    let d_context = d_context.contiguous()?;
    let (batch, d, device) = (problem.batch, problem.d, problem.like.device());
    let rows = batch * attention.time;
    if context.dims() != [rows, d] || d_context.dims() != [rows, d] || logs.dims() != [attention.heads, rows] {
        return Err(Error::Input(format!(
            "gradients of attention: a context of shape {:?} and a gradient of shape {:?}",
            context.dims(),
            d_context.dims()
        )));
    }
    let span = 2 * attention.reach + 1;
    let size = tile(attention.factors, true);
    let tiles = attention.time.div_ceil(size);
    let d_projections = fresh_in(dtype, (rows, 3 * d), device)?;
    let d_biases = fresh((batch * tiles, 2 * d), problem.like)?;
    let together = together.clamp(1, batch.max(1));
    let d_positions = fresh((batch.div_ceil(together), span * d), problem.like)?;
    let lengths = attention.lengths.on_device(batch, device)?;
    let of = |dtype: DType| ReadIf(Some(context).filter(|context| context.dtype() == dtype));
    let inputs = [
        Read(&lengths),
        Longs(&problem.keys),
        of(DType::F32),
        of(DType::BF16),
        Read(logs),
        Read(&d_context),
    ];
    launch(
        name(true, attention.factors, problem.like.dtype())?,
        Grid::of((2 * tiles + span.div_ceil(size)) * attention.heads, batch),
        &[
            &problem.inputs[..],
            &inputs,
            &in_either(&d_projections),
            &[Write(&d_biases), Write(&d_positions), Int(together)],
            &problem.sizes,
            &problem.rest,
        ]
        .concat(),
    )?;
    Ok(AttentionGradients {
        projections: d_projections,
        biases: ColumnSums::partial(d_biases),
        positions: ColumnSums::partial(d_positions),
    })
}
