//! Gated linear unit of the convolution module, with padded frames set to zero.

use candle_core::Tensor;
use rayon::prelude::*;

use super::{Float, dispatch, slice, tensor};
use crate::error::Result;

/// `h` (B, T, 2d) -> (B, T, d): first half times sigmoid of the second; frames at or past an utterance's length are 0.
pub fn glu(h: &Tensor, lengths: &[usize]) -> Result<Tensor> {
    let h = h.contiguous()?;
    let (batch, time, double) = h.dims3()?;
    let d = double / 2;
    dispatch!(h.dtype(), T => {
        let hs = slice::<T>(&h)?;
        let hs: &[T] = &hs;
        let mut out = vec![0.0 as T; batch * time * d];
        out.par_chunks_mut(d)
            .zip(hs.par_chunks(2 * d))
            .enumerate()
            .with_min_len(16)
            .for_each(|(row, (out, h))| {
                if row % time >= lengths[row / time] {
                    return;
                }
                let (value, gate) = h.split_at(d);
                for ((out, &value), &gate) in out.iter_mut().zip(value).zip(gate) {
                    *out = value * gate.sigmoid();
                }
            });
        tensor(out, (batch, time, d))
    })
}

/// Gradient of [`glu`] with respect to `h`.
pub fn glu_backward(h: &Tensor, dy: &Tensor, lengths: &[usize]) -> Result<Tensor> {
    let (h, dy) = (h.contiguous()?, dy.contiguous()?);
    let (batch, time, double) = h.dims3()?;
    let d = double / 2;
    dispatch!(h.dtype(), T => {
        let (hs, dys) = (slice::<T>(&h)?, slice::<T>(&dy)?);
        let (hs, dys): (&[T], &[T]) = (&hs, &dys);
        let mut out = vec![0.0 as T; batch * time * 2 * d];
        out.par_chunks_mut(2 * d)
            .zip(hs.par_chunks(2 * d))
            .zip(dys.par_chunks(d))
            .enumerate()
            .with_min_len(16)
            .for_each(|(row, ((out, h), dy))| {
                if row % time >= lengths[row / time] {
                    return;
                }
                let (value, gate) = h.split_at(d);
                let (d_value, d_gate) = out.split_at_mut(d);
                for i in 0..d {
                    let s = gate[i].sigmoid();
                    d_value[i] = dy[i] * s;
                    d_gate[i] = dy[i] * value[i] * s * (1.0 - s);
                }
            });
        tensor(out, (batch, time, 2 * d))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{check_gradient, normal};
    use crate::noise::Noise;

    #[test]
    fn gradient_agrees_with_finite_differences_and_is_zero_in_padding() {
        let mut noise = Noise::new(11);
        let h = normal(&[2, 5, 12], &mut noise);
        let weight = normal(&[2, 5, 6], &mut noise);
        let lengths = [5, 3];
        let gradient = glu_backward(&h, &weight, &lengths).unwrap();
        check_gradient("glu", &h, &weight, &gradient, |h| glu(h, &lengths));
    }
}
