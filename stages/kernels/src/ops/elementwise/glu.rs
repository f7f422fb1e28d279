//! Gated linear unit of the convolution module, with padded frames set to zero.

use candle_core::Tensor;

use crate::error::Result;
use crate::lengths::Lengths;
use crate::{Float, by_chunks, dispatch, multiversion, on_gpu, rows_per_chunk, slice, tensor};

/// `h` (B, T, 2d) -> (B, T, d): first half times sigmoid of the second; frames at or past a sequence's length are 0.
pub fn glu(h: &Tensor, lengths: &Lengths) -> Result<Tensor> {
    on_gpu!(h, super::cuda::glu(h, lengths));
    let h = h.contiguous()?;
    let (batch, time, double) = h.dims3()?;
    let d = double / 2;
    dispatch!(h.dtype(), T => {
        let hs = slice::<T>(&h)?;
        let hs: &[T] = &hs;
        let rows = rows_per_chunk(d);
        let out = by_chunks(batch * time * d, rows * d, |number, out| multiversion!({
            for (offset, out) in out.chunks_exact_mut(d.max(1)).enumerate() {
                let row = number * rows + offset;
                if row % time >= lengths[row / time] {
                    continue;
                }
                let (value, gate) = hs[row * 2 * d..][..2 * d].split_at(d);
                for ((out, &value), &gate) in out.iter_mut().zip(value).zip(gate) {
                    *out = value * gate.sigmoid();
                }
            }
        }));
        tensor(out, (batch, time, d))
    })
}

/// Gradient of [`glu`] with respect to `h`.
pub fn glu_backward(h: &Tensor, dy: &Tensor, lengths: &Lengths) -> Result<Tensor> {
    on_gpu!(h, super::cuda::glu_backward(h, dy, lengths));
    let (h, dy) = (h.contiguous()?, dy.contiguous()?);
    let (batch, time, double) = h.dims3()?;
    let d = double / 2;
    dispatch!(h.dtype(), T => {
        let (hs, dys) = (slice::<T>(&h)?, slice::<T>(&dy)?);
        let (hs, dys): (&[T], &[T]) = (&hs, &dys);
        let rows = rows_per_chunk(2 * d);
        let out = by_chunks(batch * time * 2 * d, rows * 2 * d, |number, out| multiversion!({
            for (offset, out) in out.chunks_exact_mut((2 * d).max(1)).enumerate() {
                let row = number * rows + offset;
                if row % time >= lengths[row / time] {
                    continue;
                }
                let (value, gate) = hs[row * 2 * d..][..2 * d].split_at(d);
                let dy = &dys[row * d..][..d];
                let (d_value, d_gate) = out.split_at_mut(d);
                let inputs = dy.iter().zip(value).zip(gate);
                for ((d_value, d_gate), ((&dy, &value), &gate)) in d_value.iter_mut().zip(d_gate).zip(inputs) {
                    let s = gate.sigmoid();
                    *d_value = dy * s;
                    *d_gate = dy * value * s * (1.0 - s);
                }
            }
        }));
        tensor(out, (batch, time, 2 * d))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::Noise;
    use crate::testing::{check_gradient, normal};

    #[test]
    fn gradient_agrees_with_finite_differences_and_is_zero_in_padding() {
        let mut noise = Noise::new(11);
        let h = normal(&[2, 5, 12], &mut noise);
        let weight = normal(&[2, 5, 6], &mut noise);
        let lengths = Lengths::new([5, 3]);
        let gradient = glu_backward(&h, &weight, &lengths).unwrap();
        check_gradient("glu", &h, &weight, &gradient, |h| glu(h, &lengths));
    }
}
