//! Against the kernels for the CPU, in the emulator or on a device.

use candle_core::Tensor;

use crate::noise::Noise;
use crate::ops::batch_norm;
use crate::ops::batch_norm::{Normaliser, Statistics};
use crate::testing::on_device::{BOUND, Place, random, same};

#[test]
fn batch_norms() {
    let mut noise = Noise::new(1);
    for (rows, d) in [(1, 1), (3, 5), (300, 37), (600, 16), (2, 700)] {
        let (x, dy) = (random(&[rows, d], &mut noise), random(&[rows, d], &mut noise));
        let (weight, offset) = (random(&[d], &mut noise), random(&[d], &mut noise));
        same("batch statistics", BOUND, |on| {
            let running = (&on(&offset), &on(&weight.abs()?));
            let (mean, inverse, [moved_mean, moved_variance]) = batch_norm::batch_statistics(&on(&x), running)?;
            let of_running = batch_norm::inverse_deviation(running.1)?;
            Ok(vec![mean, inverse, moved_mean, moved_variance, of_running])
        });
        let (mean, inverse) = (random(&[d], &mut noise), random(&[d], &mut noise).abs().unwrap());
        let parts = [&mean, &inverse, &weight, &offset];
        fn by(parts: &[Tensor; 4]) -> Normaliser<'_> {
            let [mean, inverse, weight, bias] = parts;
            Normaliser {
                mean,
                inverse,
                weight,
                bias,
            }
        }
        same("batch norm", BOUND, |on| {
            Ok(vec![batch_norm::normalise_silu(&on(&x), &by(&parts.map(on)))?])
        });
        // The sums of another part, and of one without rows.
        let other = batch_norm::column_moments(&random(&[17, d], &mut noise), d).unwrap();
        let empty = other.zeros_like().unwrap();
        let joined = |own: &Tensor, on: Place| Ok(Tensor::stack(&[on(&other), own.clone(), on(&empty)], 0)?);
        same("joined batch statistics", BOUND, |on| {
            let moments = batch_norm::column_moments(&on(&x), d)?;
            let running = (&on(&offset), &on(&weight.abs()?));
            let (mean, inverse, [moved_mean, moved_variance]) =
                batch_norm::joined_statistics(&joined(&moments, on)?, running)?;
            Ok(vec![moments, mean, inverse, moved_mean, moved_variance])
        });
        for kind in 0..3 {
            same("batch norm, backward", BOUND, |on| {
                let mut gather = |own: &Tensor| joined(own, on);
                let statistics = match kind {
                    0 => Statistics::Constant,
                    1 => Statistics::Own,
                    _ => Statistics::Joined(&mut gather),
                };
                let (dx, dw, db) =
                    batch_norm::normalise_silu_backward(&on(&x), &by(&parts.map(on)), &on(&dy), statistics)?;
                Ok(vec![dx, dw, db])
            });
        }
    }
}
