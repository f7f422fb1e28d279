//! Parts of relative-position attention beside its matrix products.
//!
//! Heads come first, (H, B, T, k): then the products with the positional table, which all utterances share, are one
//! matrix product per head.

use candle_core::Tensor;
use rayon::prelude::*;

use super::{Float, by_pieces, dispatch, rows_per_piece, slice, sum_of, tensor, two_by_rows, widest};
use crate::error::Result;

/// (rows, H * k) -> (H, rows, k), plus the head's bias (H, k) where given.
pub fn split_heads(x: &Tensor, heads: usize, bias: Option<&Tensor>) -> Result<Tensor> {
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

/// Sum over rows per head: (H, rows, k) -> (H, k), the gradient of a head's bias.
pub fn head_sum(x: &Tensor) -> Result<Tensor> {
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

/// Which keys a query sees, and the scale of the scores.
#[derive(Clone, Copy, Debug)]
pub struct Scores<'a> {
    /// Valid frames per utterance.
    pub lengths: &'a [usize],
    /// `1 / sqrt(k)`.
    pub scale: f64,
    /// Keys at most this many frames away, if limited.
    pub band: Option<usize>,
}

impl Scores<'_> {
    /// Keys that query `i` of utterance `b` sees.
    #[inline(always)]
    fn keys(&self, b: usize, i: usize) -> std::ops::Range<usize> {
        let length = self.lengths[b];
        if i >= length {
            return 0..0;
        }
        match self.band {
            None => 0..length,
            Some(width) => i.saturating_sub(width)..length.min(i.saturating_add(width).saturating_add(1)),
        }
    }
}

/// Attention weights (H, B, T, T) from content scores (H, B, T, T) and positional scores (H, B, T, 2T - 1), whose
/// column `j - i + T - 1` belongs to key `j` of query `i`. Keys that a query does not see have weight 0; so have all
/// keys of padded queries.
///
/// NeMo gives masked keys the score -10000 and sets their weights to 0 after the softmax: the same, as long as some
/// valid score is far above -10000.
pub fn weights(content: &Tensor, position: &Tensor, scores: &Scores) -> Result<Tensor> {
    let (content, position) = (content.contiguous()?, position.contiguous()?);
    let (heads, batch, time, _) = content.dims4()?;
    let span = 2 * time - 1;
    dispatch!(content.dtype(), T => {
        let (ac, bd) = (slice::<T>(&content)?, slice::<T>(&position)?);
        let (ac, bd): (&[T], &[T]) = (&ac, &bd);
        let scale = T::of(scores.scale);
        let rows = rows_per_piece(time);
        let one = |row: usize, out: &mut [T]| {
            let i = row % time;
            let keys = scores.keys(row / time % batch, i);
            if keys.is_empty() {
                return;
            }
            let out = &mut out[keys.clone()];
            let ac = &ac[row * time..][keys.clone()];
            let first = row * span + time - 1 - i + keys.start;
            let bd = &bd[first..][..keys.len()];
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
        let out = by_pieces(heads * batch * time * time, rows * time, |number, out: &mut [T]| widest!({
            for (offset, out) in out.chunks_exact_mut(time).enumerate() {
                one(number * rows + offset, out);
            }
        }));
        tensor(out, (heads, batch, time, time))
    })
}

/// Gradients with respect to content and positional scores, given the weights (before dropout) and their gradient.
pub fn weights_backward(p: &Tensor, dp: &Tensor, scores: &Scores) -> Result<(Tensor, Tensor)> {
    let (p, dp) = (p.contiguous()?, dp.contiguous()?);
    let (heads, batch, time, _) = p.dims4()?;
    let span = 2 * time - 1;
    dispatch!(p.dtype(), T => {
        let (ps, dps) = (slice::<T>(&p)?, slice::<T>(&dp)?);
        let (ps, dps): (&[T], &[T]) = (&ps, &dps);
        let scale = T::of(scores.scale);
        let rows = heads * batch * time;
        let (content, position) = two_by_rows(rows, [time, span], |first, content: &mut [T], position: &mut [T]| widest!({
            let pairs = content.chunks_exact_mut(time).zip(position.chunks_exact_mut(span));
            for (row, (content, position)) in (first..).zip(pairs) {
                let i = row % time;
                let keys = scores.keys(row / time % batch, i);
                let p = &ps[row * time..][keys.clone()];
                let dp = &dps[row * time..][keys.clone()];
                let along = sum_of([p, dp], |[p, dp]| p * dp);
                let content = &mut content[keys.clone()];
                let position = &mut position[time - 1 - i + keys.start..][..keys.len()];
                for ((content, position), (&p, &dp)) in content.iter_mut().zip(position).zip(p.iter().zip(dp)) {
                    let ds = p * (dp - along) * scale;
                    *content = ds;
                    *position = ds;
                }
            }
        }));
        Ok((
            tensor(content, (heads, batch, time, time))?,
            tensor(position, (heads, batch, time, span))?,
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{check_gradient, max_difference, normal, values};
    use crate::noise::Noise;

    #[test]
    fn weights_sum_to_one_over_valid_keys_and_their_gradient_agrees_with_finite_differences() {
        let mut noise = Noise::new(31);
        for band in [None, Some(1), Some(100)] {
            let (heads, batch, time) = (2, 2, 5);
            let content = normal(&[heads, batch, time, time], &mut noise);
            let position = normal(&[heads, batch, time, 2 * time - 1], &mut noise);
            let weight = normal(&[heads, batch, time, time], &mut noise);
            let scores = Scores {
                lengths: &[5, 3],
                scale: 0.7,
                band,
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
