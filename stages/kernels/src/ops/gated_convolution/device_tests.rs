//! Against the kernels for the CPU, in the emulator or on a device.

use candle_core::{DType, Device, Tensor};

use crate::lengths::Lengths;
use crate::noise::Noise;
use crate::ops::batch_norm;
use crate::ops::batch_norm::Gather;
use crate::ops::elementwise::glu::glu;
use crate::ops::gated_convolution::{self, Origin, Saved, Statistics, Wanted, Weights};
use crate::testing::on_device::{close, exact, narrow, on_device, random, same};
use crate::testing::values;

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

/// Inputs and gradients in bf16. The convolution's result is that of the CPU, rounded; and all that follows is what the CPU makes of
/// the rounded numbers.
#[test]
fn the_convolution_module_in_bf16() {
    let mut noise = Noise::new(21);
    for (time, d, taps) in [(7, 3, 3), (40, 37, 9), (70, 33, 65), (35, 2, 67)] {
        let (h, dy) = (exact(&[3, time, 2 * d], &mut noise), exact(&[3 * time, d], &mut noise));
        let lengths = Lengths::new([time, time / 2, 0]);
        let kernel = random(&[d, 1, taps], &mut noise);
        let vectors = [(); 4].map(|()| random(&[d], &mut noise));
        let variance = random(&[d], &mut noise).abs().unwrap();
        let wanted = Wanted {
            weight: true,
            bias: false,
        };
        for origin in [Origin::Own, Origin::Running] {
            let of_batch = origin == Origin::Own;
            let work = |on: &dyn Fn(&Tensor) -> Tensor, convolved: Option<&Tensor>| {
                let [bias, norm_weight, norm_bias, running] = vectors.each_ref().map(on);
                let (kernel, variance) = (on(&kernel), on(&variance));
                let by = Weights {
                    weight: &kernel,
                    bias: Some(&bias),
                    norm_weight: &norm_weight,
                    norm_bias: &norm_bias,
                    running: (&running, &variance),
                };
                let (h, dy) = (narrow(&on(&h)), narrow(&on(&dy)));
                let statistics = if of_batch { Statistics::Own } else { Statistics::Running };
                let output = gated_convolution::forward(DType::F32, &h, &lengths, by, statistics).unwrap();
                let (mut y, mut saved) = (output.y, output.saved);
                if let Some(convolved) = convolved {
                    let (mean, inverse) = match of_batch {
                        true => {
                            let (mean, inverse, _) = batch_norm::batch_statistics(convolved, by.running).unwrap();
                            (mean, inverse)
                        }
                        false => saved.statistics(),
                    };
                    let by = batch_norm::Normaliser {
                        mean: &mean,
                        inverse: &inverse,
                        weight: &norm_weight,
                        bias: &norm_bias,
                    };
                    y = batch_norm::normalise_silu(convolved, &by).unwrap();
                    saved = Saved {
                        gated: Some(glu(&h, &lengths).unwrap()),
                        convolved: convolved.clone(),
                        mean,
                        inverse,
                        ..saved
                    };
                }
                let mut none = |_: &Tensor| panic!("statistics of several parts");
                let d =
                    gated_convolution::backward(DType::F32, &saved, &lengths, by, (&dy, &mut none), wanted).unwrap();
                let found = [
                    y,
                    d.doubled,
                    d.weight.unwrap().total().unwrap(),
                    d.norm.total().unwrap(),
                ];
                let found = found.map(|tensor| tensor.to_device(&Device::Cpu).unwrap());
                (found, saved.convolved.to_device(&Device::Cpu).unwrap())
            };
            let (found, rounded) = on_device(|on| work(on, None));
            assert_eq!(rounded.dtype(), DType::BF16);
            let rounded = rounded.to_dtype(DType::F32).unwrap();
            let (_, whole) = work(&Tensor::clone, None);
            let largest = values(&whole).iter().fold(0.0f64, |most, value| most.max(value.abs()));
            for (rounded, whole) in values(&rounded).iter().zip(values(&whole)) {
                let bound = whole.abs() / 256.0 + 3e-5 * largest;
                assert!((rounded - whole).abs() <= bound, "{rounded} for {whole}");
            }
            let (expected, _) = work(&Tensor::clone, Some(&rounded));
            for (number, (expected, found)) in expected.iter().zip(&found).enumerate() {
                let what = format!("{origin:?}, {time} x {d}, {taps} taps, result {number}");
                close(&what, 3e-5, &values(expected), &values(found));
            }
        }
    }
}
