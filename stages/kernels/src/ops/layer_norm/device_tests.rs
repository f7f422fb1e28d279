//! Against the kernels for the CPU, in the emulator or on a device.

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::noise::{DropMask, Noise};
use crate::ops::layer_norm;
use crate::testing::on_device::{BOUND, exact, narrow, random, same};

#[test]
fn layer_norms() {
    let mut noise = Noise::new(1);
    for (rows, d) in [(1, 1), (3, 5), (300, 37), (600, 16), (2, 700)] {
        let (x, dy, round) = (
            random(&[rows, d], &mut noise),
            random(&[rows, d], &mut noise),
            random(&[rows, d], &mut noise),
        );
        let (weight, offset) = (random(&[d], &mut noise), random(&[d], &mut noise));
        let (_, statistics) = layer_norm::layer_norm(&x, &weight, &offset).unwrap();
        // A row of one element has no deviation: what is left of it is rounding times 316.
        let bound = if d == 1 { 1e-3 } else { BOUND };
        same("layer norm", bound, |on| {
            let (y, statistics) = layer_norm::layer_norm(&on(&x), &on(&weight), &on(&offset))?;
            Ok(vec![y, statistics])
        });
        for residual in [None, Some(&round)] {
            same("layer norm, backward", bound, |on| {
                let residual = residual.map(on);
                let (dx, sums) = layer_norm::layer_norm_backward(
                    &on(&x),
                    &on(&statistics),
                    &on(&weight),
                    &on(&dy),
                    residual.as_ref(),
                )?;
                let sums = sums.total()?;
                Ok(vec![dx, sums.narrow(0, 0, d)?, sums.narrow(0, d, d)?])
            });
        }
        for mask in [None, DropMask::draw(0.3, &mut noise)] {
            same("layer norm of a sum", bound, |on| {
                let (weight, offset) = (on(&weight), on(&offset));
                let (sum, y, statistics) =
                    layer_norm::add_and_norm(DType::F32, &on(&x), &on(&round), (0.5, mask), &weight, &offset)?;
                Ok(vec![sum, y, statistics])
            });
            same("layer norm of a sum, and of that", 10.0 * bound, |on| {
                let (weight, offset) = (on(&weight), on(&offset));
                let by = [(&weight, &offset), (&offset, &weight)];
                let found = layer_norm::add_and_norm_twice(DType::F32, &on(&x), &on(&round), (0.5, mask), by)?;
                let norm = |x, at: usize, weight| layer_norm::NormInput {
                    x,
                    statistics: &found.statistics[at],
                    weight,
                };
                let (first, second) = (norm(&found.sum, 0, &weight), norm(&found.out, 1, &offset));
                let gradients = (&on(&dy), &on(&round));
                let (sums, dx, dropped) =
                    layer_norm::layer_norm_backward_twice(DType::F32, second, gradients, first, (0.5, mask))?;
                let [of_second, of_first] = sums;
                let of_rows = if d == 1 {
                    vec![]
                } else {
                    vec![dx, dropped, of_second.total()?, of_first.total()?]
                };
                Ok([vec![found.sum.clone(), found.out.clone(), found.next.clone()], of_rows].concat())
            });
            same("layer norm, backward and dropped", bound, |on| {
                let (x, statistics, weight) = (on(&x), on(&statistics), on(&weight));
                let ((dx, sums), dropped) = layer_norm::layer_norm_backward_dropped(
                    DType::F32,
                    &x,
                    &statistics,
                    &weight,
                    &on(&dy),
                    Some(&on(&round)),
                    (0.5, mask),
                )?;
                let sums = sums.total()?;
                Ok(vec![dx, sums.narrow(0, 0, d)?, sums.narrow(0, d, d)?, dropped])
            });
        }
    }
}

/// What a product gave in bf16, a branch or a gradient: as the same numbers in f32.
#[test]
fn layer_norms_of_bf16() {
    let mut noise = Noise::new(4);
    for (rows, d) in [(3, 5), (300, 37), (2, 1100)] {
        let (x, residual) = (random(&[rows, d], &mut noise), random(&[rows, d], &mut noise));
        let (y, dy) = (exact(&[rows, d], &mut noise), exact(&[rows, d], &mut noise));
        let (weight, offset) = (random(&[d], &mut noise), random(&[d], &mut noise));
        let drop = (0.5, DropMask::draw(0.3, &mut noise));
        same(
            "layer norm of a sum, and back",
            10.0 * BOUND,
            |on| -> Result<Vec<Tensor>> {
                let (weight, offset) = (on(&weight), on(&offset));
                let (y, dy, residual) = (narrow(&on(&y)), narrow(&on(&dy)), on(&residual));
                let (sum, out, statistics) = layer_norm::add_and_norm(DType::F32, &on(&x), &y, drop, &weight, &offset)?;
                let ((dx, sums), dropped) = layer_norm::layer_norm_backward_dropped(
                    DType::F32,
                    &sum,
                    &statistics,
                    &weight,
                    &dy,
                    Some(&residual),
                    drop,
                )?;
                let by = [(&weight, &offset), (&offset, &weight)];
                let found = layer_norm::add_and_norm_twice(DType::F32, &on(&x), &y, drop, by)?;
                let norm = |x, at: usize, weight| layer_norm::NormInput {
                    x,
                    statistics: &found.statistics[at],
                    weight,
                };
                let (first, second) = (norm(&found.sum, 0, &weight), norm(&found.out, 1, &offset));
                let ([of_second, of_first], d_both, both_dropped) =
                    layer_norm::layer_norm_backward_twice(DType::F32, second, (&dy, &residual), first, drop)?;
                let sums = [sums.total()?, of_second.total()?, of_first.total()?];
                let rest = [out, dx, dropped, found.next.clone(), d_both, both_dropped, sum];
                Ok([&rest[..], &sums].concat())
            },
        );
    }
}
