//! Parts of relative-position attention beside its matrix products.
//!
//! Heads are the first dimension, (H, B, T, k), so that the products with the positional table, which all sequences
//! share, are one matrix product per head.

mod cuda;
#[cfg(test)]
mod device_tests;

use std::ops::Range;

use candle_core::Tensor;
use rayon::prelude::*;

use crate::error::Result;
use crate::lengths::Lengths;
use crate::noise::DropMask;
use crate::ops::elementwise::drop_scaled;
use crate::{
    Float, by_chunks, dispatch, modify, multiversion, on_gpu, rows_per_chunk, slice, sum_of, tensor, two_by_rows,
};

/// (rows, H * k) -> (H, rows, k), plus the head's bias (H, k) where given.
pub fn split_heads(x: &Tensor, heads: usize, bias: Option<&Tensor>) -> Result<Tensor> {
    on_gpu!(x, cuda::split_heads(x, heads, bias));
    let x = x.contiguous()?;
    let (rows, d) = x.dims2()?;
    let k = d / heads;
    dispatch!(x.dtype(), T => {
        let xs = slice::<T>(&x)?;
        let xs: &[T] = &xs;
        let bias = bias.map(slice::<T>).transpose()?;
        let bias: Option<&[T]> = bias.as_deref();
        let mut out = vec![0.0 as T; rows * d];
        out.par_chunks_mut(k).enumerate().with_min_len(64).for_each(|(index, out)| {
            let (head, row) = (index / rows, index % rows);
            out.copy_from_slice(&xs[row * d + head * k..][..k]);
            if let Some(bias) = bias {
                for (out, &bias) in out.iter_mut().zip(&bias[head * k..][..k]) {
                    *out += bias;
                }
            }
        });
        tensor(out, (heads, rows, k))
    })
}

/// (H, rows, k) -> (rows, H * k), of the sum of `x` and `other` where given.
pub fn merge_heads(x: &Tensor, other: Option<&Tensor>) -> Result<Tensor> {
    on_gpu!(x, cuda::merge_heads(x, other));
    let x = x.contiguous()?;
    let other = other.map(Tensor::contiguous).transpose()?;
    let (heads, rows, k) = x.dims3()?;
    dispatch!(x.dtype(), T => {
        let xs = slice::<T>(&x)?;
        let xs: &[T] = &xs;
        let other = other.as_ref().map(slice::<T>).transpose()?;
        let other: Option<&[T]> = other.as_deref();
        let mut out = vec![0.0 as T; heads * rows * k];
        out.par_chunks_mut(k).enumerate().with_min_len(64).for_each(|(index, out)| {
            let (row, head) = (index / heads, index % heads);
            let place = (head * rows + row) * k;
            out.copy_from_slice(&xs[place..][..k]);
            if let Some(other) = other {
                for (out, &other) in out.iter_mut().zip(&other[place..][..k]) {
                    *out += other;
                }
            }
        });
        tensor(out, (rows, heads * k))
    })
}

/// [`split_heads`] of query, with each of both biases, of key and of value.
pub fn split_projections(
    [query, key, value]: [&Tensor; 3],
    heads: usize,
    (bias_u, bias_v): (&Tensor, &Tensor),
) -> Result<[Tensor; 4]> {
    on_gpu!(
        query,
        cuda::split_projections([query, key, value], heads, (bias_u, bias_v))
    );
    Ok([
        split_heads(query, heads, Some(bias_u))?,
        split_heads(query, heads, Some(bias_v))?,
        split_heads(key, heads, None)?,
        split_heads(value, heads, None)?,
    ])
}

/// [`merge_heads`] of the gradients of what [`split_projections`] gave: of query, key and value.
pub fn merge_projections(parts: [&Tensor; 4]) -> Result<[Tensor; 3]> {
    let [query_u, query_v, keys, values] = parts;
    on_gpu!(query_u, cuda::merge_projections(parts));
    Ok([
        merge_heads(query_u, Some(query_v))?,
        merge_heads(keys, None)?,
        merge_heads(values, None)?,
    ])
}

/// Sums over rows per head of two tensors: (H, rows, k) -> (H, k), the gradients of both biases of a head.
pub fn head_sums(x: &Tensor, y: &Tensor) -> Result<(Tensor, Tensor)> {
    on_gpu!(x, cuda::head_sums(x, y));
    Ok((head_sum(x)?, head_sum(y)?))
}

fn head_sum(x: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?;
    let (heads, rows, k) = x.dims3()?;
    dispatch!(x.dtype(), T => {
        let xs = slice::<T>(&x)?;
        let xs: &[T] = &xs;
        let mut out = vec![0.0 as T; heads * k];
        out.par_chunks_mut(k).zip(xs.par_chunks(rows * k)).for_each(|(out, x)| {
            for row in x.chunks_exact(k) {
                for (out, &x) in out.iter_mut().zip(row) {
                    *out += x;
                }
            }
        });
        tensor(out, (heads, k))
    })
}

/// The rows `range` of each sequence, of (N, B * T, k): (N, B * R, k).
pub fn rows_of(x: &Tensor, batch: usize, range: &Range<usize>) -> Result<Tensor> {
    let (n, rows, k) = x.dims3()?;
    let time = rows / batch.max(1);
    if *range == (0..time) {
        return Ok(x.clone());
    }
    let part = x.reshape((n, batch, time, k))?.narrow(2, range.start, range.len())?;
    Ok(part.contiguous()?.reshape((n, batch * range.len(), k))?)
}

/// `sum[:, b, first..first + R] += part[:, b]`, in place, for `sum` (N, B * T, k) and `part` (N, B * R, k).
pub fn add_rows_in_place(sum: &Tensor, part: &Tensor, batch: usize, first: usize) -> Result<()> {
    let part = part.contiguous()?;
    let (_, rows, k) = sum.dims3()?;
    let (time, length) = (rows / batch.max(1), part.dim(1)? / batch.max(1));
    if time == 0 || length == 0 || k == 0 {
        return Ok(());
    }
    on_gpu!(sum, cuda::add_rows_in_place(sum, &part, time, length, first));
    dispatch!(sum.dtype(), T => {
        let part = slice::<T>(&part)?;
        let part: &[T] = &part;
        modify::<T>(sum, |sum| {
            sum.par_chunks_mut(time * k).zip(part.par_chunks(length * k)).for_each(|(sum, part)| {
                for (sum, &part) in sum[first * k..].iter_mut().zip(part) {
                    *sum += part;
                }
            });
        })
    })
}

/// Which valid keys a query sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Context {
    #[default]
    All,
    /// Those at most this many frames away.
    Band(usize),
    /// Those at most this many frames before it, and all that follow.
    From(usize),
    /// Frames are in chunks of `size`: those of the query's own chunk, and of as many chunks before it as `left`.
    Chunks { size: usize, left: usize },
}

impl Context {
    /// Keys that query `i` sees, of `length`.
    #[inline(always)]
    pub fn seen(self, i: usize, length: usize) -> Range<usize> {
        match self {
            Context::All => 0..length,
            Context::Band(width) => i.saturating_sub(width)..length.min(i.saturating_add(width).saturating_add(1)),
            Context::From(left) => i.saturating_sub(left)..length,
            Context::Chunks { size, left } => {
                let chunk = i / size.max(1);
                chunk.saturating_sub(left) * size..length.min(chunk.saturating_add(1).saturating_mul(size))
            }
        }
    }

    /// How far the frames are at most that one of `time` queries sees, before or after it.
    pub fn reach(self, time: usize) -> usize {
        let all = time.saturating_sub(1);
        match self {
            Context::All | Context::From(_) => all,
            Context::Band(width) => width.min(all),
            Context::Chunks { size, left } => left.saturating_add(1).saturating_mul(size).saturating_sub(1).min(all),
        }
    }
}

/// Scores of some queries for some keys: which keys a query sees, and the scale.
#[derive(Clone, Debug)]
pub struct Scores<'a> {
    /// Valid frames per sequence.
    pub lengths: &'a Lengths,
    /// `1 / sqrt(k)`.
    pub scale: f64,
    pub context: Context,
    /// The frames of the queries, and of the keys, which include all keys that one of these queries sees.
    pub queries: Range<usize>,
    pub keys: Range<usize>,
    /// The first positional score of a query belongs to the key that is this many frames before it.
    pub reach: usize,
}

impl Scores<'_> {
    /// Keys that query `i` of sequence `b` sees.
    #[inline(always)]
    fn seen(&self, b: usize, i: usize) -> Range<usize> {
        let length = self.lengths[b];
        if i >= length {
            return 0..0;
        }
        self.context.seen(i, length)
    }

    /// For a row of scores, its columns that are seen, and the first column of its positional scores that belongs to
    /// them; none for a query that sees nothing.
    #[inline(always)]
    fn columns(&self, row: usize, batch: usize) -> Option<(Range<usize>, usize)> {
        let queries = self.queries.len();
        let i = self.queries.start + row % queries;
        let seen = self.seen(row / queries % batch, i);
        (!seen.is_empty()).then(|| {
            let columns = seen.start - self.keys.start..seen.end - self.keys.start;
            (columns, seen.start + self.reach - i)
        })
    }
}

/// [`weights`], and these after dropout.
pub fn weights_dropped(
    content: &Tensor,
    position: &Tensor,
    scores: &Scores,
    mask: Option<DropMask>,
) -> Result<(Tensor, Tensor)> {
    if crate::is_gpu(content.device()) {
        let (weights, dropped) = cuda::weights(content, position, scores, mask)?;
        let dropped = dropped.unwrap_or_else(|| weights.clone());
        return Ok((weights, dropped));
    }
    let weights = weights(content, position, scores)?;
    let dropped = drop_scaled(&weights, 1.0, mask)?;
    Ok((weights, dropped))
}

/// Gradients of content and positional scores of [`weights_dropped`], given its weights `p` and the gradient `dp` of the
/// dropped ones; and the dropped ones.
pub fn weights_dropped_backward(
    p: &Tensor,
    dp: &Tensor,
    scores: &Scores,
    mask: Option<DropMask>,
) -> Result<((Tensor, Tensor), Tensor)> {
    if crate::is_gpu(p.device()) {
        let (gradients, dropped) = cuda::weights_backward(p, dp, scores, mask)?;
        return Ok((gradients, dropped.unwrap_or_else(|| p.clone())));
    }
    let gradients = weights_backward(p, &drop_scaled(dp, 1.0, mask)?, scores)?;
    Ok((gradients, drop_scaled(p, 1.0, mask)?))
}

/// Attention weights (H, B, Q, K) from content scores (H, B, Q, K) and positional scores (H, B, Q, S), whose column
/// `j - i + reach` belongs to key `j` of query `i`; the backward pass takes as many behind a query as before it. Keys that a query does not see have weight 0; so have all
/// keys of padded queries.
///
/// NeMo gives masked keys the score -10000 and sets their weights to 0 after the softmax: the same, as long as some
/// valid score is far above -10000.
pub fn weights(content: &Tensor, position: &Tensor, scores: &Scores) -> Result<Tensor> {
    if crate::is_gpu(content.device()) {
        return Ok(cuda::weights(content, position, scores, None)?.0);
    }
    let (content, position) = (content.contiguous()?, position.contiguous()?);
    let (heads, batch, queries, width) = content.dims4()?;
    let span = position.dim(3)?;
    dispatch!(content.dtype(), T => {
        let (ac, bd) = (slice::<T>(&content)?, slice::<T>(&position)?);
        let (ac, bd): (&[T], &[T]) = (&ac, &bd);
        let scale = T::of(scores.scale);
        let rows = rows_per_chunk(width);
        let one = |row: usize, out: &mut [T]| {
            let Some((columns, first)) = scores.columns(row, batch) else {
                return;
            };
            let out = &mut out[columns.clone()];
            let bd = &bd[row * span + first..][..columns.len()];
            let ac = &ac[row * width..][columns];
            let mut largest = T::NEG_INFINITY;
            for ((out, &ac), &bd) in out.iter_mut().zip(ac).zip(bd) {
                *out = (ac + bd) * scale;
                largest = if *out > largest { *out } else { largest };
            }
            for out in out.iter_mut() {
                *out = (*out - largest).exp_quick();
            }
            let factor = sum_of([out], |[weight]| weight).recip();
            for out in out.iter_mut() {
                *out *= factor;
            }
        };
        let out = by_chunks(heads * batch * queries * width, rows * width, |number, out: &mut [T]| multiversion!({
            for (offset, out) in out.chunks_exact_mut(width).enumerate() {
                one(number * rows + offset, out);
            }
        }));
        tensor(out, (heads, batch, queries, width))
    })
}

/// Gradients with respect to content and positional scores, given the weights (before dropout) and their gradient.
pub fn weights_backward(p: &Tensor, dp: &Tensor, scores: &Scores) -> Result<(Tensor, Tensor)> {
    if crate::is_gpu(p.device()) {
        return Ok(cuda::weights_backward(p, dp, scores, None)?.0);
    }
    let (p, dp) = (p.contiguous()?, dp.contiguous()?);
    let (heads, batch, queries, width) = p.dims4()?;
    let span = 2 * scores.reach + 1;
    dispatch!(p.dtype(), T => {
        let (ps, dps) = (slice::<T>(&p)?, slice::<T>(&dp)?);
        let (ps, dps): (&[T], &[T]) = (&ps, &dps);
        let scale = T::of(scores.scale);
        let rows = heads * batch * queries;
        let (content, position) = two_by_rows(rows, [width, span], |first, content: &mut [T], position: &mut [T]| multiversion!({
            let pairs = content.chunks_exact_mut(width).zip(position.chunks_exact_mut(span));
            for (row, (content, position)) in (first..).zip(pairs) {
                let Some((columns, first)) = scores.columns(row, batch) else {
                    continue;
                };
                let position = &mut position[first..][..columns.len()];
                let p = &ps[row * width..][columns.clone()];
                let dp = &dps[row * width..][columns.clone()];
                let along = sum_of([p, dp], |[p, dp]| p * dp);
                let content = &mut content[columns];
                for ((content, position), (&p, &dp)) in content.iter_mut().zip(position).zip(p.iter().zip(dp)) {
                    let ds = p * (dp - along) * scale;
                    *content = ds;
                    *position = ds;
                }
            }
        }));
        Ok((
            tensor(content, (heads, batch, queries, width))?,
            tensor(position, (heads, batch, queries, span))?,
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::Noise;
    use crate::testing::{check_gradient, max_difference, normal, values};

    #[test]
    fn weights_sum_to_one_over_valid_keys_and_their_gradient_agrees_with_finite_differences() {
        let mut noise = Noise::new(31);
        let chunks = |size, left| Context::Chunks { size, left };
        for context in [
            Context::All,
            Context::Band(1),
            Context::Band(100),
            Context::From(0),
            Context::From(2),
            chunks(2, 1),
            chunks(1, 0),
            chunks(3, usize::MAX),
        ] {
            let (heads, batch, time) = (2, 2, 5);
            let content = normal(&[heads, batch, time, time], &mut noise);
            let position = normal(&[heads, batch, time, 2 * time - 1], &mut noise);
            let weight = normal(&[heads, batch, time, time], &mut noise);
            let scores = Scores {
                lengths: &Lengths::new([5, 3]),
                scale: 0.7,
                context,
                queries: 0..time,
                keys: 0..time,
                reach: time - 1,
            };
            let p = weights(&content, &position, &scores).unwrap();
            let sums = values(&p.sum(3).unwrap());
            for (row, sum) in sums.iter().enumerate() {
                let (b, i) = (row / time % batch, row % time);
                let expected = if i < scores.lengths[b] { 1.0 } else { 0.0 };
                assert!((sum - expected).abs() < 1e-12);
            }
            let (dc, dp) = weights_backward(&p, &weight, &scores).unwrap();
            check_gradient("content", &content, &weight, &dc, |c| weights(c, &position, &scores));
            check_gradient("position", &position, &weight, &dp, |x| weights(&content, x, &scores));
        }
    }

    #[test]
    fn heads_split_and_merge_back() {
        let mut noise = Noise::new(32);
        let x = normal(&[6, 8], &mut noise);
        let split = split_heads(&x, 2, None).unwrap();
        assert_eq!(split.dims(), [2, 6, 4]);
        assert_eq!(max_difference(&merge_heads(&split, None).unwrap(), &x), 0.0);
        let bias = normal(&[2, 4], &mut noise);
        let moved = merge_heads(&split_heads(&x, 2, Some(&bias)).unwrap(), None).unwrap();
        let expected = x.broadcast_add(&bias.reshape(8).unwrap()).unwrap();
        assert!(max_difference(&moved, &expected) < 1e-15);
    }
}
