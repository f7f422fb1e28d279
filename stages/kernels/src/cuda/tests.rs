//! Every kernel for devices, run by the emulator or on a device ([`DeviceUnderTest`]), against the kernel of the same name
//! for the CPU.
//!
//! Both are in f32, in other orders of summation and with other exponentials: they may differ by some units in the last
//! place of the largest value for each sum of a few hundred terms. The bound is 2e-5 of it; a wrong index or a lost
//! element shows as a difference of order one.

use candle_core::{DType, Device, Tensor};

use super::emulator;
use super::signature::{self, Kernel, Parameter};
use super::tdt::{BiasSums, CellList, Extents, Lattices, LogitGradient, Rules, doubles};
use crate::adamw::{self, DeviceTables, Moment, Numbers, ParameterUpdate, Update, eight_bit};
use crate::attention::{self, Context, Scores};
use crate::batch_norm::{self, Normaliser, Statistics};
use crate::counts::counted;
use crate::error::Result;
use crate::joint::{self, Cell, CellTerms};
use crate::lengths::Lengths;
use crate::lstm::{self, LstmWeights};
use crate::noise::{DropMask, Noise};
use crate::subsample::halved;
use crate::testing::{DeviceUnderTest, normal, values};
use crate::{bias, depthwise, elementwise, glu, layer_norm, subsample};

pub(super) const BOUND: f64 = 2e-5;

pub(super) fn random(shape: &[usize], noise: &mut Noise) -> Tensor {
    normal(shape, noise).to_dtype(DType::F32).unwrap()
}

/// Brings a tensor to where a function is to compute.
pub(super) type Place<'a> = &'a dyn Fn(&Tensor) -> Tensor;

/// Runs the same function on the CPU and on the device under test, and compares what it gives.
pub(super) fn same(what: &str, bound: f64, run: impl Fn(Place) -> Result<Vec<Tensor>>) {
    let expected = run(&Tensor::clone).unwrap();
    let (found, counts) = counted(|| on_device(&run).unwrap());
    assert!(counts.launches() > 0, "{what}: no kernel was launched");
    assert_eq!(expected.len(), found.len());
    for (number, (expected, found)) in expected.iter().zip(&found).enumerate() {
        assert_eq!(expected.dims(), found.dims(), "{what}: result {number}");
        let (expected, found) = (values(expected), values(found));
        let largest = expected.iter().fold(1e-6f64, |largest, value| largest.max(value.abs()));
        for (at, (expected, found)) in expected.iter().zip(&found).enumerate() {
            assert!(
                (expected - found).abs() <= bound * largest || expected == found,
                "{what}: result {number}, element {at}: {expected} on the CPU, {found} on the device, largest {largest}"
            );
        }
    }
}

pub(super) fn on_device<R>(run: impl Fn(Place) -> R) -> R {
    DeviceUnderTest::get().run(|device| run(&|tensor: &Tensor| tensor.to_device(device).unwrap()))
}

#[test]
fn every_kernel_file_is_read() {
    let kernels = signature::all().unwrap();
    let sources = super::sources::sources().unwrap();
    let written = |file: &super::sources::File| file.source.matches("KERNEL(").count();
    let written: usize = sources.files.iter().map(written).sum();
    assert_eq!(kernels.len(), written);
}

#[test]
fn kernel_files_of_a_folder_come_before_those_of_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    std::fs::write(
        place.join("sums.cu"),
        "\nKERNEL(only, (const float* x, float* y, int n)) {}\n",
    )
    .unwrap();
    let sources = super::sources::read(Some(place), "TILE=64 FAST").unwrap();
    assert_eq!(sources.defines, ["TILE=64", "FAST"]);
    let kernels = signature::of(&sources).unwrap();
    assert!(kernels.contains_key("only") && kernels.contains_key("adamw_f32") && !kernels.contains_key("column_sum"));
    let own = |folder, defines| {
        super::sources::read(folder, defines)
            .unwrap()
            .files
            .iter()
            .filter(|file| file.own)
            .count()
    };
    let all = super::sources::read(None, "").unwrap().files.len();
    assert_eq!([own(None, ""), own(None, "A"), own(Some(place), "")], [all, 0, all - 1]);
    std::fs::write(place.join("prelude.cuh"), "").unwrap();
    assert_eq!(own(Some(place), ""), 0);
    let refused = |folder: &std::path::Path, defines| super::sources::read(Some(folder), defines).err().unwrap();
    assert!(refused(place, "-o=x").contains("`-o=x` is not NAME=VALUE"));
    std::fs::write(place.join("sum.cu"), "").unwrap();
    assert!(refused(place, "").contains("sum.cu is not a kernel file"));
    assert!(refused(&place.join("none"), "").starts_with("FLOW_KERNELS: "));
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    use super::Argument::{Int, Long, Read, Write};
    let x = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap();
    let double = x.to_dtype(DType::F64).unwrap();
    let launch = |arguments: &[super::Argument]| {
        emulator::with(true, || {
            super::launch("add_in_place", super::Grid::elements(4), arguments)
        })
    };
    assert!(launch(&[Write(&x), Read(&x.copy().unwrap()), Long(4)]).is_ok());
    for wrong in [
        &[Write(&x), Read(&x)][..],
        &[Read(&x), Read(&x), Long(4)],
        &[Write(&x), Read(&double), Long(4)],
        &[Write(&x), Read(&x), Int(4)],
        &[Write(&x), Write(&x), Long(4)],
    ] {
        assert!(launch(wrong).is_err());
    }
    let unknown = super::launch("nothing", super::Grid::rows(1), &[]).unwrap_err();
    assert!(unknown.to_string().contains("not on CUDA yet: nothing"), "{unknown}");
}

#[test]
fn norms() {
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

#[test]
fn elements() {
    let mut noise = Noise::new(2);
    for (rows, width) in [(1, 1), (7, 13), (50, 33)] {
        let (x, y) = (random(&[rows, width], &mut noise), random(&[rows, width], &mut noise));
        let offset = random(&[width], &mut noise);
        let long = random(&[9001], &mut noise);
        let [narrow, narrow_long] = [&x, &long].map(|x| x.to_dtype(DType::BF16).unwrap());
        let in_place = |on: Place, change: &dyn Fn(&Tensor) -> Result<()>| {
            let sum = on(&x).copy()?;
            change(&sum)?;
            Ok(vec![sum])
        };
        same("sum", 0.0, |on| {
            in_place(on, &|sum| elementwise::add_in_place(sum, &on(&y)))
        });
        same("product", 0.0, |on| {
            in_place(on, &|x| elementwise::scale_in_place(x, 0.3))
        });
        same("blend", 0.0, |on| {
            in_place(on, &|sum| elementwise::blend_in_place(sum, &on(&y), 0.3))
        });
        // Tensors of both types, one of several blocks; one begins where four numbers are not read at once.
        same("blend of many", 0.0, |on| {
            let sums = [&x, &y, &long, &long, &long].map(|sum| on(sum).copy());
            let sums = sums.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
            let short = on(&long).narrow(0, 1, long.elem_count() - 2)?;
            let others = [on(&y), on(&narrow), on(&long), on(&narrow_long), short];
            let mut pairs: Vec<_> = sums.iter().zip(&others).collect();
            let within = sums[4].narrow(0, 1, long.elem_count() - 2)?;
            pairs[4].0 = &within;
            elementwise::blend_all_in_place(&pairs, 0.3)?;
            Ok(sums)
        });
        same("bias", 0.0, |on| in_place(on, &|y| bias::add_bias(y, &on(&offset))));
        same("column sum", BOUND, |on| Ok(vec![bias::column_sum(&on(&x))?]));
        for mask in [None, DropMask::draw(0.3, &mut noise), DropMask::draw(1.0, &mut noise)] {
            // The same elements are dropped, to the last one.
            same("residual", 0.0, |on| {
                Ok(vec![elementwise::residual(&on(&x), &on(&y), 0.5, mask)?])
            });
            same("drop", 0.0, |on| {
                Ok(vec![elementwise::drop_scaled(&on(&x), 0.5, mask)?])
            });
            same("silu", BOUND, |on| Ok(vec![elementwise::silu(&on(&x), mask)?]));
            same("silu, backward", BOUND, |on| {
                Ok(vec![elementwise::silu_backward(
                    DType::F32,
                    &on(&x),
                    on(&y).copy()?,
                    mask,
                )?])
            });
        }
    }
    // Sums over many rows, a view in the middle of a storage, and another order of dimensions.
    let x = random(&[900, 70], &mut noise);
    same("column sum of a part", BOUND, |on| {
        Ok(vec![bias::column_sum(&on(&x).narrow(0, 100, 700)?)?])
    });
    same("silu of a view", BOUND, |on| {
        Ok(vec![elementwise::silu(&on(&x).t()?, None)?])
    });
    // Quick exponentials saturate on the CPU and reach zero and infinity here: the results are the same.
    let extreme = Tensor::new(&[-1e30f32, -200.0, -90.0, 90.0, 200.0, 1e30], &Device::Cpu).unwrap();
    same("silu of large values", BOUND, |on| {
        Ok(vec![elementwise::silu(&on(&extreme), None)?])
    });
}

#[test]
fn gates_and_convolutions() {
    let mut noise = Noise::new(3);
    for (time, d, taps) in [(1, 1, 5), (7, 3, 3), (4, 37, 9), (300, 6, 9)] {
        let h = random(&[2, time, 2 * d], &mut noise);
        let dy = random(&[2, time, d], &mut noise);
        let lengths = Lengths::new([time, time / 2]);
        same("glu", BOUND, |on| Ok(vec![glu::glu(&on(&h), &lengths)?]));
        same("glu, backward", BOUND, |on| {
            Ok(vec![glu::glu_backward(&on(&h), &on(&dy), &lengths)?])
        });
        let x = random(&[2, time, d], &mut noise);
        let (kernel, offset) = (random(&[d, 1, taps], &mut noise), random(&[d], &mut noise));
        for offset in [None, Some(&offset)] {
            same("depthwise", BOUND, |on| {
                Ok(vec![depthwise::depthwise(
                    &on(&x),
                    &on(&kernel),
                    offset.map(on).as_ref(),
                )?])
            });
        }
        same("depthwise, backward", BOUND, |on| {
            Ok(vec![
                depthwise::depthwise_backward(&on(&dy), &on(&kernel))?,
                depthwise::depthwise_backward_weight(&on(&x), &on(&dy), taps)?,
            ])
        });
    }
}

#[test]
fn subsampling() {
    let mut noise = Noise::new(4);
    for (time, bands, channels) in [(1, 1, 1), (5, 4, 3), (8, 7, 40), (130, 5, 2), (9, 70, 33)] {
        let x = random(&[2, bands, time], &mut noise);
        let (kernel, offset) = (
            random(&[channels, 1, 3, 3], &mut noise),
            random(&[channels], &mut noise),
        );
        let halve = |lengths: &[usize]| Lengths::new(lengths.iter().map(|&n| halved(n)).collect::<Vec<_>>());
        let input_lengths = Lengths::new([time, time / 3]);
        let lengths = halve(&input_lengths);
        same("first convolution", BOUND, |on| {
            let (x, kernel, offset) = (on(&x), on(&kernel), on(&offset));
            Ok(vec![subsample::first(&x, &kernel, &offset, &input_lengths, &lengths)?])
        });
        let y = subsample::first(&x, &kernel, &offset, &input_lengths, &lengths).unwrap();
        let dz = random(y.dims(), &mut noise);
        same("relu, backward", 0.0, |on| {
            Ok(vec![subsample::relu_backward(&on(&y), &on(&dz))?])
        });
        same("first convolution, backward", BOUND, |on| {
            Ok(vec![
                subsample::first_backward(&on(&x), &on(&dz), &input_lengths)?.total()?,
            ])
        });
        let lengths = halve(&lengths);
        same("strided convolution", BOUND, |on| {
            let (y, kernel, offset) = (on(&y), on(&kernel), on(&offset));
            Ok(vec![subsample::depthwise(&y, &kernel, &offset, &lengths)?])
        });
        let z = subsample::depthwise(&y, &kernel, &offset, &lengths).unwrap();
        let dz = random(z.dims(), &mut noise);
        same("strided convolution, backward", BOUND, |on| {
            let (y, kernel, dz) = (on(&y), on(&kernel), on(&dz));
            let sums = subsample::depthwise_backward_weight(&y, &dz)?;
            Ok(vec![subsample::depthwise_backward(&y, &kernel, &dz)?, sums.total()?])
        });
        same("bias and relu", BOUND, |on| {
            let z = on(&z).copy()?;
            subsample::bias_relu(&z, &on(&offset), &lengths)?;
            Ok(vec![z])
        });
    }
}

#[test]
fn attention_parts() {
    let mut noise = Noise::new(5);
    for (rows, heads, k) in [(1, 1, 1), (13, 4, 5), (400, 2, 17)] {
        let x = random(&[rows, heads * k], &mut noise);
        let offset = random(&[heads, k], &mut noise);
        let split = attention::split_heads(&x, heads, None).unwrap();
        for offset in [None, Some(&offset)] {
            same("heads, split", 0.0, |on| {
                Ok(vec![attention::split_heads(&on(&x), heads, offset.map(on).as_ref())?])
            });
        }
        for other in [None, Some(&split)] {
            same("heads, merged", 0.0, |on| {
                Ok(vec![attention::merge_heads(&on(&split), other.map(on).as_ref())?])
            });
        }
        let others = [(); 3].map(|()| random(&[heads, rows, k], &mut noise));
        same("heads, summed", BOUND, |on| {
            let (first, second) = attention::head_sums(&on(&split), &on(&others[0]))?;
            Ok(vec![first, second])
        });
        let [key, value] = [(); 2].map(|()| random(&[rows, heads * k], &mut noise));
        let other_offset = random(&[heads, k], &mut noise);
        same("projections, split", 0.0, |on| {
            let biases = (&on(&offset), &on(&other_offset));
            Ok(attention::split_projections([&on(&x), &on(&key), &on(&value)], heads, biases)?.into())
        });
        same("projections, merged", 0.0, |on| {
            let [a, b, c] = others.each_ref().map(on);
            Ok(attention::merge_projections([&on(&split), &a, &b, &c])?.into())
        });
    }
    let (sum, part) = (random(&[2, 3 * 9, 4], &mut noise), random(&[2, 3 * 5, 4], &mut noise));
    same("rows added", 0.0, |on| {
        let sum = on(&sum).copy()?;
        attention::add_rows_in_place(&sum, &on(&part), 3, 2)?;
        Ok(vec![sum])
    });
    // All frames; a band of all widths; and a block of queries with the keys that they see.
    let cases = [
        (1, Context::All, 0..1, 0..1),
        (5, Context::All, 0..5, 0..5),
        (300, Context::All, 0..300, 0..300),
        (9, Context::Band(0), 0..9, 0..9),
        (9, Context::Band(2), 0..9, 0..9),
        (9, Context::Band(usize::MAX), 0..9, 0..9),
        (20, Context::Band(3), 8..12, 5..15),
        (20, Context::Band(3), 16..20, 13..20),
        (9, Context::Chunks { size: 1, left: 3 }, 0..9, 0..9),
        (20, Context::Chunks { size: 3, left: 2 }, 0..20, 0..20),
        (20, Context::Chunks { size: 3, left: 2 }, 9..15, 3..15),
        (
            20,
            Context::Chunks {
                size: usize::MAX,
                left: 1,
            },
            0..20,
            0..20,
        ),
    ];
    for (time, context, queries, keys) in cases {
        let (heads, batch) = (2, 3);
        let reach = context.reach(time);
        let lengths = Lengths::new([time, time / 2, time.min(1)]);
        let scores = Scores {
            lengths: &lengths,
            scale: 0.3,
            context,
            queries: queries.clone(),
            keys: keys.clone(),
            reach,
        };
        let square = [heads, batch, queries.len(), keys.len()];
        let content = random(&square, &mut noise);
        let position = random(&[heads, batch, queries.len(), 2 * reach + 1], &mut noise);
        let dp = random(&square, &mut noise);
        same("attention weights", BOUND, |on| {
            Ok(vec![attention::weights(&on(&content), &on(&position), &scores)?])
        });
        let p = attention::weights(&content, &position, &scores).unwrap();
        same("attention weights, backward", BOUND, |on| {
            let (content, position) = attention::weights_backward(&on(&p), &on(&dp), &scores)?;
            Ok(vec![content, position])
        });
        let mask = DropMask::draw(0.3, &mut noise);
        same("attention weights, dropped", BOUND, |on| {
            let (weights, dropped) = attention::weights_dropped(&on(&content), &on(&position), &scores, mask)?;
            let ((content, position), again) = attention::weights_dropped_backward(&on(&p), &on(&dp), &scores, mask)?;
            Ok(vec![weights, dropped, content, position, again])
        });
    }
}

#[test]
fn lstm_layer() {
    let mut noise = Noise::new(6);
    // With a width of 45 a block has the same units in all steps; with 150 there are more units than blocks that run at once.
    for (steps, batch, inputs, width) in [(1, 1, 1, 1), (4, 3, 5, 2), (5, 6, 4, 45), (6, 2, 3, 150)] {
        let x = random(&[steps, batch, inputs], &mut noise);
        // As large as those of networks: with larger ones what is rounded grows from step to step.
        let [input, hidden] = [inputs, width].map(|of| {
            let weights = random(&[4 * width, of], &mut noise);
            weights.affine(1.0 / (of as f64).sqrt(), 0.0).unwrap()
        });
        let [a, b] = [(); 2].map(|()| random(&[4 * width], &mut noise));
        let dy = random(&[steps, batch, width], &mut noise);
        let parts = [&input, &hidden, &a, &b];
        fn weights(parts: &[Tensor; 4]) -> LstmWeights<'_> {
            let [input, hidden, input_bias, hidden_bias] = parts;
            LstmWeights {
                input,
                hidden,
                input_bias,
                hidden_bias,
            }
        }
        same("LSTM", BOUND, |on| {
            let parts = parts.map(on);
            let (y, saved) = lstm::lstm(&on(&x), weights(&parts))?;
            let d = lstm::lstm_backward(&on(&dy), &saved, weights(&parts))?;
            let of_weights = [d.input_weight()?, d.hidden_weight()?, d.bias()?.total()?];
            Ok([vec![y, d.input], of_weights.to_vec()].concat())
        });
        let (state, cell) = (random(&[batch, width], &mut noise), random(&[batch, width], &mut noise));
        let take: Vec<bool> = (0..batch).map(|b| b % 2 == 0).collect();
        same("LSTM step", BOUND, |on| {
            let (parts, state) = (parts.map(on), on(&state));
            let (hidden, cell) = lstm::lstm_step(&on(&x).get(0)?, &state, &on(&cell), weights(&parts))?;
            let replaced = lstm::replace_rows(&state, &hidden, &take)?;
            Ok(vec![hidden, cell, replaced])
        });
    }
}

#[test]
fn joint_hidden_values() {
    let mut noise = Noise::new(7);
    for (count, width, tokens) in [(1, 1, 1), (30, 19, 5), (40, 33, 700)] {
        let (f, g) = (random(&[7, width], &mut noise), random(&[4, width], &mut noise));
        let pick = |noise: &mut Noise, below: usize| (noise.bits() % below as u64) as usize;
        let mut places: Vec<(usize, usize)> = (0..count).map(|_| (pick(&mut noise, 7), pick(&mut noise, 4))).collect();
        places.sort_unstable();
        let cells: Vec<Cell> = places
            .into_iter()
            .enumerate()
            .map(|(index, (frame, state))| Cell {
                frame,
                state,
                label: (index % 3 > 0 && tokens > 1).then(|| pick(&mut noise, tokens - 1)),
                index,
            })
            .collect();
        for mask in [None, DropMask::draw(0.2, &mut noise)] {
            same("hidden", 0.0, |on| {
                Ok(vec![joint::hidden(&on(&f), &on(&g), &cells, mask)?])
            });
            let hidden = joint::hidden(&f, &g, &cells, mask).unwrap();
            let d = random(hidden.dims(), &mut noise);
            same("hidden, backward", BOUND, |on| {
                let (d_f, d_g) = (on(&f).copy()?, on(&g).copy()?);
                joint::add_hidden_gradient(&on(&d), &on(&hidden), &cells, 1.25, &d_f, &d_g)?;
                Ok(vec![d_f, d_g])
            });
            // Of one list in parts; with biases, and from and to bf16, whose values say where the ReLU passes.
            let [of_f, of_g] = [(); 2].map(|()| random(&[width], &mut noise));
            let (shifted_f, shifted_g) = (f.broadcast_add(&of_f).unwrap(), g.broadcast_add(&of_g).unwrap());
            let shifted = joint::hidden(&shifted_f, &shifted_g, &cells, mask).unwrap();
            let (d_f, d_g) = (f.copy().unwrap(), g.copy().unwrap());
            joint::add_hidden_gradient(&d, &shifted, &cells, 1.25, &d_f, &d_g).unwrap();
            for dtype in [DType::F32, DType::BF16] {
                let found = on_device(|on| -> Result<_> {
                    let (d, d_f, d_g) = (on(&d), on(&f).copy()?, on(&g).copy()?);
                    let list = CellList::copied(&cells, d.device())?;
                    let (of_f, of_g) = (on(&of_f), on(&of_g));
                    let biases = [Some(&of_f), Some(&of_g)];
                    let hidden = list.hidden(dtype, (&on(&f), &on(&g)), biases, mask)?;
                    for first in (0..count).step_by(11) {
                        let size = 11.min(count - first);
                        let rows = |x: &Tensor| x.narrow(0, first, size)?.contiguous();
                        let part = list.part(first..first + size)?;
                        part.add_hidden_gradient(&rows(&d)?, &rows(&hidden)?, 1.25, (&d_f, &d_g))?;
                    }
                    assert!(
                        list.part(0..count + 1).is_err()
                            && list.hidden(dtype, (&d.narrow(0, 0, 0)?, &d), biases, None).is_err()
                    );
                    Ok([hidden, d_f, d_g])
                });
                let expected = [shifted.to_dtype(dtype).unwrap(), d_f.clone(), d_g.clone()];
                for (found, expected) in found.unwrap().iter().zip(expected) {
                    assert_eq!(found.dtype(), expected.dtype());
                    assert_eq!(values(found), values(&expected));
                }
            }
        }
    }
}

/// Cells of utterances in order, as the host lists them.
fn listed(padded: (usize, usize), frames: &[usize], targets: &[Vec<u32>]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (b, (&frames, target)) in frames.iter().zip(targets).enumerate() {
        for (t, u) in (0..frames).flat_map(|t| (0..=target.len()).map(move |u| (t, u))) {
            cells.push(Cell {
                frame: b * padded.0 + t,
                state: b * padded.1 + u,
                label: target.get(u).map(|&token| token as usize),
                index: cells.len(),
            });
        }
    }
    cells
}

/// Lattices of several utterances, one without frames and one without tokens: their cells, of which there are more than a block
/// has threads, and the terms of these.
#[test]
fn cells_and_terms() {
    let mut noise = Noise::new(17);
    for (tokens, durations) in [(8, 1), (9, 3), (700, 5)] {
        let (padded, frames) = ((41, 9), [41, 3, 0, 17]);
        let targets = [vec![1, 6, 0, 2, 3, 4, 5, 1], vec![], vec![2, 2], vec![4, 6, 5]];
        let cells = listed(padded, &frames, &targets);
        let count = cells.len();
        let advances: Vec<usize> = (1..=durations).collect();
        let extents = Extents {
            padded,
            frames: &frames,
            targets: &targets,
            durations: &advances,
        };
        let numbers = |cell: &Cell| {
            let label = cell.label.map_or(u32::MAX, |label| label as u32);
            [cell.frame as u32, cell.state as u32, label, cell.index as u32]
        };
        let (found, copies) = counted(|| {
            DeviceUnderTest::get().run(|device| Lattices::new(&extents, device).unwrap().cells().to_vec().unwrap())
        });
        assert_eq!(found, cells.iter().flat_map(numbers).collect::<Vec<_>>());
        assert_eq!((copies.to_device.count, copies.to_host.count), (1, 1));
        let outputs = tokens + durations;
        let logits = (random(&[count, outputs], &mut noise) * 5.0).unwrap();
        let offset = random(&[outputs], &mut noise);
        let mut terms = vec![CellTerms::default(); count];
        let mut logs = vec![0.0; count * durations];
        joint::cell_terms(&logits, &offset, &cells, &mut terms, &mut logs).unwrap();
        let of_terms = |terms: &[CellTerms], logs: &[f64]| {
            let each = terms.iter().zip(logs.chunks_exact(durations));
            let rows =
                each.flat_map(|(t, logs)| [t.normaliser, t.blank, t.label].into_iter().chain(logs.iter().copied()));
            Tensor::from_iter(rows, &Device::Cpu)
                .unwrap()
                .reshape((count, 3 + durations))
                .unwrap()
        };
        let expected = of_terms(&terms, &logs);
        let found = on_device(|on| {
            let (logits, offset) = (on(&logits), on(&offset));
            let lattices = Lattices::new(&extents, logits.device()).unwrap();
            // In two chunks.
            let size = count.div_ceil(2);
            for first in [0, size] {
                let logits = logits.narrow(0, first, size.min(count - first)).unwrap();
                lattices.set_terms(first, &logits, &offset).unwrap();
            }
            assert!(lattices.set_terms(1, &logits, &offset).is_err());
            values(lattices.terms())
        });
        close("terms", BOUND, &values(&expected), &found);
    }
    let refused = |padded: (usize, usize), frames: &[usize], targets: &[Vec<u32>]| {
        let extents = Extents {
            padded,
            frames,
            targets,
            durations: &[1],
        };
        DeviceUnderTest::get().run(|device| Lattices::new(&extents, device).is_err())
    };
    assert!(refused((4, 2), &[5], &[vec![1]]) && refused((4, 2), &[4], &[vec![1, 1]]));
    assert!(refused((4, 2), &[4, 4], &[vec![1]]) && !refused((4, 2), &[4], &[vec![1]]));
}

/// Terms and gradients of logits in bf16 are those of the same numbers in f32. Rows of several turns of a block, ones that do not
/// begin at multiples of 16 bytes, and outputs that are ruled out; with columns behind the outputs that do not count.
#[test]
fn logits_in_bf16_are_read_as_they_are() {
    let mut noise = Noise::new(19);
    for (tokens, durations, behind) in [(8193, 5, 58), (16401, 2, 5), (2061, 1, 3), (7, 1, 8)] {
        let (padded, frames, targets) = ((3, 3), [3, 2], [vec![1, 6], vec![5]]);
        let advances: Vec<usize> = (1..=durations).collect();
        let extents = Extents {
            padded,
            frames: &frames,
            targets: &targets,
            durations: &advances,
        };
        let (rows, outputs) = (3 * 3 + 2 * 2, tokens + durations);
        let logits = (random(&[rows, outputs], &mut noise) * 5.0).unwrap();
        let mut numbers: Vec<f32> = values(&logits).iter().map(|&value| value as f32).collect();
        // Whole groups of columns of a row, and all those that some threads have.
        numbers[16.min(tokens - 2)..tokens.min(4000) - 1].fill(f32::NEG_INFINITY);
        let logits = Tensor::from_vec(numbers, (rows, outputs), &Device::Cpu).unwrap();
        let nothing = Tensor::full(f32::NAN, (rows, behind), &Device::Cpu).unwrap();
        let logits = Tensor::cat(&[&logits, &nothing], 1).unwrap().contiguous().unwrap();
        let logits = logits.to_dtype(DType::BF16).unwrap();
        let offset = random(&[outputs], &mut noise);
        let run = |dtype: DType| {
            on_device(|on| {
                let (logits, offset) = (on(&logits.to_dtype(dtype).unwrap()), on(&offset));
                let lattices = Lattices::new(&extents, logits.device()).unwrap();
                lattices.set_terms(0, &logits, &offset).unwrap();
                let terms = values(lattices.terms());
                // Of the same terms.
                lattices
                    .set_terms(0, &on(&logits.to_dtype(DType::F32).unwrap()), &offset)
                    .unwrap();
                let aligned = lattices
                    .align(&Rules {
                        sigma: 0.0,
                        label_factor: 1.0,
                        negligible: 0.0,
                        rnnt: false,
                    })
                    .unwrap();
                let options = LogitGradient {
                    dtype: DType::BF16,
                    factors: &doubles(vec![1.0, 0.5], logits.device()).unwrap(),
                    clamp: 0.0,
                };
                let mut sums = BiasSums::new(rows, outputs, logits.device()).unwrap();
                let (all, place) = (lattices.cells(), (logits, &offset));
                let gradient = lattices.logit_gradient(&aligned, place, all, &options, Some(&mut sums));
                (terms, values(&gradient.unwrap()), values(&sums.sums().total().unwrap()))
            })
        };
        let (expected, found) = (run(DType::F32), run(DType::BF16));
        close(&format!("terms of {tokens} tokens"), 1e-6, &expected.0, &found.0);
        assert!(found.1.iter().any(|value| *value != 0.0));
        assert_eq!((found.1, found.2), (expected.1, expected.2), "{tokens} tokens");
    }
}

/// A chunk of cells of more frames than a block has threads, of two utterances, with some left out.
#[test]
fn gradients_of_many_frames_are_summed_in_order() {
    let mut noise = Noise::new(27);
    let (frames, states, width) = (300, 3, 5);
    let all = (0..2 * frames).flat_map(|frame| (0..states).map(move |state| (frame, frame / frames * states + state)));
    let kept = all
        .enumerate()
        .filter(|(index, _)| index % 7 != 3 && !(200..300).contains(index));
    let cells: Vec<Cell> = kept
        .map(|(index, (frame, state))| Cell {
            frame,
            state,
            label: None,
            index,
        })
        .collect();
    let (d, hidden) = (
        random(&[cells.len(), width], &mut noise),
        random(&[cells.len(), width], &mut noise),
    );
    let sums = |rows: usize| Tensor::zeros((rows, width), DType::F32, &Device::Cpu).unwrap();
    // To the bit: each sum is taken in the order of the cells.
    same("hidden, backward over many frames", 0.0, |on| {
        let (d_f, d_g) = (on(&sums(2 * frames)).copy()?, on(&sums(2 * states)).copy()?);
        joint::add_hidden_gradient(&on(&d), &on(&hidden), &cells, 1.0, &d_f, &d_g)?;
        Ok(vec![d_f, d_g])
    });
    // A list that knows its utterances gives the same.
    let listed = |cells: &[Cell], rows: usize, d: &Tensor, hidden: &Tensor| {
        on_device(|on| -> Result<_> {
            let d = on(d);
            let list = super::numbers(
                cells.iter().flat_map(|cell| [cell.frame, cell.state, 0, cell.index]),
                d.device(),
            )?;
            let list = CellList::in_order(list, cells.len(), 2, [rows, states]);
            let (d_f, d_g) = (on(&sums(2 * rows)).copy()?, on(&sums(2 * states)).copy()?);
            list.add_hidden_gradient(&d, &on(hidden), 1.0, (&d_f, &d_g))?;
            Ok([values(&d_f), values(&d_g)])
        })
        .unwrap()
    };
    let (d_f, d_g) = (sums(2 * frames), sums(2 * states));
    joint::add_hidden_gradient(&d, &hidden, &cells, 1.0, &d_f, &d_g).unwrap();
    assert_eq!(listed(&cells, frames, &d, &hidden), [values(&d_f), values(&d_g)]);
    // A state looks at the frames of its own utterance and no others, so that a batch of twice the utterances is twice the work:
    // a cell that joins it with a frame of the other one, as no lattice has, is not found.
    let own = Cell {
        frame: 1,
        state: 2,
        label: None,
        index: 0,
    };
    let strange = Cell { frame: 5, ..own };
    let ones = Tensor::ones((2, width), DType::F32, &Device::Cpu).unwrap();
    let [d_f, d_g] = listed(&[own, strange], 4, &ones, &ones);
    assert_eq!(d_f[5 * width], 1.0);
    assert_eq!(d_g[2 * width], 1.0);
    let mut turned = cells.clone();
    turned.reverse();
    let refused = on_device(|on| joint::add_hidden_gradient(&on(&d), &on(&hidden), &turned, 1.0, &d, &d));
    assert!(refused.unwrap_err().to_string().contains("out of order"));
}

/// Numbers are as far apart as a share of the largest, at most.
fn close(what: &str, bound: f64, expected: &[f64], found: &[f64]) {
    assert_eq!(expected.len(), found.len(), "{what}");
    let largest = expected.iter().fold(1e-6f64, |largest, value| largest.max(value.abs()));
    for (at, (expected, found)) in expected.iter().zip(found).enumerate() {
        assert!(
            (expected - found).abs() <= bound * largest,
            "{what}: element {at}: {expected} on the CPU, {found} on the device"
        );
    }
}

#[test]
fn sums_of_squares_and_of_rows() {
    let mut noise = Noise::new(8);
    let tensors = [
        random(&[150_001], &mut noise),
        random(&[0], &mut noise),
        random(&[3, 7], &mut noise),
    ];
    let expected: f64 = tensors.iter().flat_map(values).map(|value| value * value).sum();
    let found = on_device(|on| super::sums::squares(&tensors.each_ref().map(on))).unwrap();
    assert!((found - expected).abs() <= 1e-12 * expected);
    let (sum, x) = (random(&[5, 300], &mut noise), random(&[9, 300], &mut noise));
    let rows = [
        Some(4),
        None,
        Some(0),
        Some(4),
        Some(2),
        Some(0),
        None,
        Some(4),
        Some(1),
    ];
    let mut expected = values(&sum);
    for (row, x) in rows.iter().zip(values(&x).chunks(300)) {
        if let Some(row) = row {
            expected[row * 300..][..300]
                .iter_mut()
                .zip(x)
                .for_each(|(sum, x)| *sum += x);
        }
    }
    let sum = on_device(|on| {
        let sum = on(&sum).copy().unwrap();
        super::sums::add_to_rows(&sum, &on(&x), &rows).unwrap();
        sum
    });
    for (found, expected) in values(&sum).iter().zip(expected) {
        assert!((found - expected).abs() < 1e-5);
    }
}

/// Bit for bit: the arithmetic is written in the same order on both sides. Parameters of all kinds are updated together:
/// shorter than a block, of several chunks, in either type, with moments of either width, at different counts of steps.
#[test]
fn adamw_moves_weights_and_moments_as_on_the_cpu() {
    let mut noise = Noise::new(9);
    let kinds = [
        (1, false),
        (700, false),
        (9001, false),
        (eight_bit::LEAST, true),
        (eight_bit::LEAST + 300, true),
    ];
    let mut all: Vec<(Tensor, bool, Vec<Tensor>)> = Vec::new();
    for (n, eight_bit) in kinds {
        for dtype in [DType::F32, DType::BF16] {
            let start = random(&[n], &mut noise).to_dtype(dtype).unwrap();
            let mut gradients: Vec<Tensor> = (0..4).map(|_| random(&[n], &mut noise)).collect();
            // A block that nothing ever touched, and at last one that is no number.
            for (step, gradient) in gradients.iter_mut().enumerate() {
                let mut values: Vec<f32> = gradient.to_vec1().unwrap();
                values.iter_mut().take(256).skip(5).for_each(|value| *value = 0.0);
                values[n / 2] *= if step == 3 { f32::NAN } else { 1e-20 };
                *gradient = Tensor::from_vec(values, n, &Device::Cpu).unwrap();
            }
            all.push((start, eight_bit, gradients));
        }
    }
    same_to_the_bit(|on| {
        let parameters: Vec<Tensor> = all.iter().map(|(start, ..)| on(start).copy().unwrap()).collect();
        let zeros = |(start, eight_bit, _): &(Tensor, bool, Vec<Tensor>)| {
            let zeros = || Numbers::zeros(start.dtype(), start.elem_count(), *eight_bit).unwrap();
            (Moment::Host(zeros()), Moment::Host(zeros()))
        };
        let mut moments: Vec<(Moment, Moment)> = all.iter().map(zeros).collect();
        let mut tables = DeviceTables::default();
        for step in 0..4 {
            let gradients: Vec<Tensor> = all.iter().map(|(.., gradients)| on(&gradients[step])).collect();
            let tensors = parameters.iter().zip(&gradients).zip(&mut moments);
            let mut updates: Vec<ParameterUpdate> = (1 + step as u64..)
                .zip(tensors)
                .map(|(steps, ((parameter, gradient), (first, second)))| ParameterUpdate {
                    parameter,
                    gradient,
                    first,
                    second,
                    update: Update::new((0.9, 0.98), 1e-8, 1e-3, steps, 1e-2, 0.7),
                    noise: adamw::seed("w", steps),
                })
                .collect();
            let (done, counts) = counted(|| adamw::update_all(&mut updates, &mut tables));
            done?;
            assert!(counts.launches() <= 4 && counts.to_device.count <= 4, "{counts:?}");
        }
        let mut bytes = Vec::new();
        for (parameter, (first, second)) in parameters.iter().zip(moments) {
            for moment in [first, second] {
                let numbers = moment.on_host()?;
                match numbers.scales() {
                    Some(scales) => {
                        bytes.extend_from_slice(numbers.bytes());
                        bytes.extend(with_one_nan(scales.bytes()));
                    }
                    None => bytes.extend(with_one_nan(numbers.bytes())),
                }
            }
            let weights: Vec<f32> = parameter.to_dtype(DType::F32)?.to_vec1()?;
            let weights: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
            bytes.extend(with_one_nan(&weights));
        }
        Ok(bytes)
    });
}

/// Numbers in f32. A GPU gives those that are not numbers other bits than a processor: there all of them get the same.
fn with_one_nan(numbers: &[u8]) -> impl Iterator<Item = u8> {
    let any_nan = !DeviceUnderTest::get().is_emulated();
    numbers.chunks_exact(4).flat_map(move |number| {
        let number = f32::from_le_bytes([number[0], number[1], number[2], number[3]]);
        if any_nan && number.is_nan() { f32::NAN } else { number }.to_le_bytes()
    })
}

fn same_to_the_bit(run: impl Fn(Place) -> Result<Vec<u8>>) {
    let (expected, found) = (run(&Tensor::clone).unwrap(), on_device(&run).unwrap());
    assert_eq!(expected.len(), found.len());
    let differ = expected.iter().zip(&found).position(|(a, b)| a != b);
    assert_eq!(differ, None, "first byte that differs, of {}", expected.len());
}

/// The harness itself sees what it is there to see.
#[test]
fn faults_of_kernels_are_found() {
    let run = |name: &'static str, cooperative: bool| {
        let (x, out) = (
            Tensor::ones(600, DType::F32, &Device::Cpu).unwrap(),
            Tensor::zeros(600, DType::F32, &Device::Cpu).unwrap(),
        );
        let pointer = |written| Parameter::Pointer {
            dtype: DType::F32,
            written,
        };
        let kernel = Kernel {
            name,
            file: 0,
            parameters: vec![pointer(false), pointer(true)],
            cooperative,
        };
        // A kernel of `faults.cu`, on three blocks.
        emulator::launch(
            &kernel,
            [3, 1],
            &[super::Argument::Read(&x), super::Argument::Write(&out)],
        )
        .map(|()| values(&out))
    };
    let fault = |name: &'static str| run(name, false);
    let message = |name: &'static str| fault(name).unwrap_err().to_string();
    assert!(
        message("no_barrier").contains("order of threads"),
        "{}",
        message("no_barrier")
    );
    assert!(message("shared_place").contains("order of threads"));
    assert!(message("early_end").contains("while others wait"));
    assert!(message("two_barriers").contains("different barriers"));
    assert!(fault("unwritten_shared").unwrap().iter().all(|value| value.is_nan()));
    assert!(message("grid_barrier_sound").contains("without such barriers"));
    let waiting = run("grid_barrier_sound", true).unwrap();
    assert!(
        (0..600usize).all(|at| waiting[at] == if at < 256 { 2.0 } else { 1.0 }),
        "{waiting:?}"
    );
    assert!(
        run("no_grid_barrier", true)
            .unwrap_err()
            .to_string()
            .contains("order of threads")
    );
    let early = run("early_block", true).unwrap_err().to_string();
    assert!(early.contains("some blocks end"), "{early}");
    assert!(fault("sound").unwrap().iter().all(|value| *value == 256.0));
}
