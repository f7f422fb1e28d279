//! Kernels that do the work of several functions, against these on the CPU; and results in bf16.

use candle_core::{DType, Device, Tensor};

use super::device_tests::{on_device, random, same};
use crate::batch_norm::Gather;
use crate::column_sums::{ColumnSums, add_together, totals};
use crate::counts::counted;
use crate::error::Result;
use crate::gated_convolution::{self, Origin, Statistics, Wanted, Weights};
use crate::lengths::Lengths;
use crate::noise::{DropMask, Noise};
use crate::ops::relative_attention::backward_of;
use crate::product::{add_product_in, product_in};
use crate::relative_attention::{self, Attention, Positions, Projections};
use crate::testing::values;
use crate::{batch_norm, elementwise, layer_norm};

/// Half a unit in the last place of bf16, as a share of a number; and what two roundings in f32 add to it.
const BF16: f64 = 1.0 / 256.0 + 1e-6;

#[test]
fn the_convolution_module() {
    let mut noise = Noise::new(20);
    for (time, d, taps) in [
        (1, 1, 5),
        (7, 3, 3),
        (40, 37, 9),
        (300, 6, 9),
        (70, 33, 65),
        (35, 2, 67),
    ] {
        let h = random(&[3, time, 2 * d], &mut noise);
        let dy = random(&[3 * time, d], &mut noise);
        let lengths = Lengths::new([time, time / 2, 0]);
        let kernel = random(&[d, 1, taps], &mut noise);
        let vectors = [(); 4].map(|()| random(&[d], &mut noise));
        let variance = random(&[d], &mut noise).abs().unwrap();
        // The moments and sums of another part, and of one without rows.
        let other = batch_norm::column_moments(&random(&[17, d], &mut noise), d).unwrap();
        let empty = other.zeros_like().unwrap();
        for (biased, origin) in [
            (true, Origin::Own),
            (false, Origin::Own),
            (true, Origin::Running),
            (true, Origin::Joined),
            (false, Origin::Joined),
        ] {
            // A single row has the variance 0, which makes a large factor of rounding.
            let bound = if time == 1 { 2e-3 } else { 3e-5 };
            same("convolution module", bound, |on| {
                let [bias, norm_weight, norm_bias, running] = vectors.each_ref().map(on);
                let (h, kernel, variance) = (on(&h), on(&kernel), on(&variance));
                let by = Weights {
                    weight: &kernel,
                    bias: biased.then_some(&bias),
                    norm_weight: &norm_weight,
                    norm_bias: &norm_bias,
                    running: (&running, &variance),
                };
                let mut gathered = 0;
                let mut gather = |own: &Tensor| {
                    gathered += 1;
                    Ok(Tensor::stack(&[on(&other), own.clone(), on(&empty)], 0)?)
                };
                let statistics = match origin {
                    Origin::Running => Statistics::Running,
                    Origin::Own => Statistics::Own,
                    Origin::Joined => Statistics::Joined(&mut gather),
                };
                let output = gated_convolution::forward(DType::F32, &h, &lengths, by, statistics)?;
                let dy = on(&dy);
                let mut backward = |wanted: Wanted| {
                    let given = (&dy, &mut gather as Gather);
                    gated_convolution::backward(DType::F32, &output.saved, &lengths, by, given, wanted)
                };
                let d = backward(Wanted {
                    weight: true,
                    bias: true,
                })?;
                // What is not wanted is not computed; the rest is the same.
                let frozen = backward(Wanted {
                    weight: false,
                    bias: false,
                })?;
                assert!(frozen.weight.is_none() && frozen.bias.is_none());
                assert_eq!(values(&frozen.doubled), values(&d.doubled));
                assert_eq!(output.moved.is_some(), origin != Origin::Running);
                assert_eq!(gathered, if origin == Origin::Joined { 3 } else { 0 });
                if origin == Origin::Joined {
                    // Of a layer that is computed again; and with results for products in bf16.
                    let (mean, inverse) = output.saved.statistics();
                    let known = Statistics::Known { mean, inverse };
                    let again = gated_convolution::forward(DType::BF16, &h, &lengths, by, known)?;
                    assert!(again.moved.is_none() && again.saved.origin == Origin::Joined);
                    assert_eq!(values(&again.y), values(&output.y.to_dtype(DType::BF16)?));
                }
                let mut found = vec![output.y, d.doubled, d.weight.unwrap().total()?, d.norm.total()?];
                found.extend(output.moved.into_iter().flatten());
                // With the statistics of the batch the bias changes nothing: its gradient is rounding.
                if biased && origin != Origin::Own {
                    found.push(d.bias.unwrap().total()?);
                }
                Ok(found)
            });
        }
    }
}

#[test]
fn partial_sums_of_many_kernels_are_added_up_together() {
    let mut noise = Noise::new(21);
    // More than one launch takes, of none and of many columns.
    let sizes = [
        (1, 1),
        (5, 33),
        (9, 32),
        (300, 64),
        (2, 100),
        (17, 31),
        (8, 8),
        (3, 257),
        (40, 5),
        (1, 70),
        (2, 2),
        (9, 64),
    ];
    let partial = sizes.map(|(rows, width)| random(&[rows, width], &mut noise));
    let (found, counts) = counted(|| {
        on_device(|on| {
            let sums = partial.iter().map(|partial| ColumnSums::partial(on(partial))).collect();
            let found = totals(sums).unwrap();
            found.iter().map(values).collect::<Vec<_>>()
        })
    });
    assert_eq!((counts.launches(), found.len()), (2, sizes.len()));
    for (partial, found) in partial.iter().zip(found) {
        let expected = values(&partial.sum(0).unwrap());
        assert_eq!(expected.len(), found.len());
        for (expected, found) in expected.iter().zip(found) {
            assert!((expected - found).abs() < 1e-4, "{expected} {found}");
        }
    }
    // Twice into the same tensor, and one of them apart.
    let added = on_device(|on| {
        let of = |range: std::ops::Range<usize>| -> Vec<_> {
            partial[range]
                .iter()
                .map(|partial| ColumnSums::partial(on(partial)))
                .collect()
        };
        let first = add_together(&of(0..3), &of(3..5), None).unwrap().unwrap();
        let second = add_together(&of(0..3), &of(3..5), Some(&first.sums)).unwrap().unwrap();
        [vec![second.sums], second.apart]
            .concat()
            .iter()
            .map(values)
            .collect::<Vec<_>>()
    });
    let sum = |at: usize| values(&partial[at].sum(0).unwrap());
    let twice: Vec<f64> = (0..3).flat_map(|at| sum(at).into_iter().map(|sum| 2.0 * sum)).collect();
    for (expected, found) in [twice, sum(3), sum(4)].iter().zip(&added) {
        let close = expected
            .iter()
            .zip(found)
            .all(|(expected, found)| (expected - found).abs() < 1e-4);
        assert!(close && expected.len() == found.len());
    }
}

#[test]
fn factors_of_products_are_rounded_to_bf16() {
    let mut noise = Noise::new(22);
    let (x, y) = (random(&[30, 37], &mut noise), random(&[30, 37], &mut noise));
    let (weight, offset) = (random(&[37], &mut noise), random(&[37], &mut noise));
    let mask = DropMask::draw(0.3, &mut noise);
    let results = |dtype: DType| {
        on_device(|on| -> Result<Vec<Tensor>> {
            let (x, y, weight, offset) = (on(&x), on(&y), on(&weight), on(&offset));
            let (normal, statistics) = layer_norm::layer_norm_in(dtype, &x, &weight, &offset)?;
            let (_, of_sum, _) = layer_norm::add_and_norm(dtype, &x, &y, (0.5, mask), &weight, &offset)?;
            let d = |factor: f64, mask| {
                layer_norm::layer_norm_backward_dropped(dtype, &x, &statistics, &weight, &y, None, (factor, mask))
            };
            Ok(vec![
                normal,
                of_sum,
                d(0.5, mask)?.1,
                d(1.0, None)?.1,
                elementwise::silu_in(dtype, &x, mask)?,
                elementwise::silu_backward(dtype, &x, y.copy()?, mask)?,
            ])
        })
        .unwrap()
    };
    for (wide, narrow) in results(DType::F32).iter().zip(results(DType::BF16)) {
        assert_eq!((wide.dtype(), narrow.dtype()), (DType::F32, DType::BF16));
        // To the nearest, of two the even one: candle's rounding.
        let expected = wide.to_device(&Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        assert_eq!(values(&expected), values(&narrow));
    }
}

#[test]
fn products_of_bf16_are_sums_in_f32() {
    let mut noise = Noise::new(23);
    let (a, b) = (random(&[9, 33], &mut noise), random(&[7, 33], &mut noise));
    let start = random(&[9, 7], &mut noise);
    let rounded = |x: &Tensor| x.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
    let expected = rounded(&a).matmul(&rounded(&b).t().unwrap()).unwrap();
    let (found, sum) = on_device(|on| {
        let (a, b, sum) = (on(&a), on(&b), on(&start).copy().unwrap());
        let found = product_in(DType::BF16, &a, &b.t().unwrap()).unwrap();
        // Of a factor that is transposed and one that is in bf16 already.
        let transposed = on(&a.t().unwrap().contiguous().unwrap()).to_dtype(DType::BF16).unwrap();
        add_product_in(DType::BF16, &sum, &transposed.t().unwrap(), &b.t().unwrap()).unwrap();
        (found, sum)
    });
    for (found, expected) in [(&found, &expected), (&sum, &(&expected + &start).unwrap())] {
        let close = values(found).into_iter().zip(values(expected));
        assert!(
            close
                .into_iter()
                .all(|(found, expected)| (found - expected).abs() < 1e-5)
        );
    }
}

/// The kernel that the tensor cores are for, against the one in f32, which the tests of the attention module hold against the CPU.
/// All that is rounded within it are weights and their gradients, once each, as the factors are numbers in bf16.
#[test]
fn attention_in_bf16_is_that_in_f32() {
    let mut noise = Noise::new(24);
    let exact = |shape: &[usize], noise: &mut Noise| {
        let rounded = random(shape, noise).to_dtype(DType::BF16).unwrap();
        rounded.to_dtype(DType::F32).unwrap()
    };
    for (time, heads, k, band) in [
        (1, 1, 1, None),
        (33, 2, 17, None),
        (70, 1, 128, None),
        (50, 2, 16, Some(3)),
    ] {
        let (batch, d) = (2, heads * k);
        let lengths = Lengths::new([time, time / 2]);
        let reach = band.map_or(time - 1, |band: usize| band.min(time - 1));
        let together = exact(&[batch * time, 3 * d], &mut noise);
        let projected = exact(&[2 * reach + 1, d], &mut noise);
        let zeros = Tensor::zeros((heads, k), DType::F32, &Device::Cpu).unwrap();
        let d_context = exact(&[batch * time, d], &mut noise);
        let masks = [DropMask::draw(0.2, &mut noise)];
        // Gradients of positions are those of each sequence, or of both of them.
        let run = |factors: DType, sequences: usize| {
            on_device(|on| -> Result<Vec<Tensor>> {
                let projections = Projections::Together(on(&together));
                let (projected, zeros) = (on(&projected), on(&zeros));
                let positions = Positions {
                    projected: &projected,
                    biases: (&zeros, &zeros),
                };
                let attention = Attention {
                    lengths: &lengths,
                    time,
                    heads,
                    scale: 1.0 / (k as f64).sqrt(),
                    band,
                    reach,
                    masks: &masks,
                    block: time,
                    factors,
                };
                let (context, logs) = relative_attention::forward(factors, &projections, positions, &attention)?;
                let found = backward_of(
                    factors,
                    &projections,
                    positions,
                    &attention,
                    (&context, &logs),
                    &on(&d_context),
                    sequences,
                )?;
                Ok(vec![
                    context,
                    found.projections,
                    found.biases.total()?,
                    found.positions.total()?,
                ])
            })
            .unwrap()
        };
        for (number, (wide, narrow)) in run(DType::F32, 1).iter().zip(run(DType::BF16, 2)).enumerate() {
            let (wide, narrow) = (values(wide), values(&narrow));
            let largest = wide.iter().fold(1e-6f64, |largest, value| largest.max(value.abs()));
            for (wide, narrow) in wide.iter().zip(&narrow) {
                // Three roundings one after another: of a weight, of the context that the gradients are of, of a result.
                assert!(
                    (wide - narrow).abs() <= 3.0 * BF16 * largest,
                    "time {time}, result {number}: {wide} in f32, {narrow} in bf16, largest {largest}"
                );
            }
        }
    }
}

#[test]
fn attention_that_does_not_fit_is_refused() {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let (projected, bias) = (zeros(&[3, 8]), zeros(&[2, 4]));
    let lengths = Lengths::new([2]);
    let positions = Positions {
        projected: &projected,
        biases: (&bias, &bias),
    };
    let masks = [None];
    let sound = Attention {
        lengths: &lengths,
        time: 2,
        heads: 2,
        scale: 1.0,
        band: None,
        reach: 1,
        masks: &masks,
        block: 2,
        factors: DType::F32,
    };
    let run = |rows: usize, attention: &Attention| {
        on_device(|on| {
            let projections = Projections::Together(on(&zeros(&[rows, 24])));
            relative_attention::forward(DType::F32, &projections, positions, attention).is_ok()
        })
    };
    if crate::testing::DeviceUnderTest::get().is_emulated() {
        assert!(run(2, &sound));
        assert!(!run(3, &sound));
        for change in [
            |attention: &mut Attention| attention.reach = 0,
            |attention: &mut Attention| attention.heads = 3,
            |attention: &mut Attention| attention.block = 1,
            |attention: &mut Attention| attention.factors = DType::F16,
        ] {
            let mut attention = sound.clone();
            change(&mut attention);
            assert!(!run(2, &attention), "{attention:?}");
        }
    }
}
