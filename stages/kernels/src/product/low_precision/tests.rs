use std::mem::MaybeUninit;

use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;

use super::bf16::{Bf16Kernel, Bf16Matrix};
use super::int8::{Int8Kernel, Int8Matrix, MOST_DEPTH};
use super::quantise::{Codes, bf16_bits, from_bf16};
use super::*;
use crate::noise::Noise;
use crate::testing::normal;

fn random(rows: usize, columns: usize, seed: u64) -> Vec<f32> {
    let x = normal(&[rows, columns], &mut Noise::new(seed)).to_dtype(DType::F32);
    x.unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn written(count: usize, fill: impl FnOnce(&mut [MaybeUninit<f32>])) -> Vec<f32> {
    // What is not written stays a number that no product gives.
    let mut out = vec![MaybeUninit::new(f32::MAX); count];
    fill(&mut out);
    // SAFETY: all were written above.
    out.into_iter().map(|x| unsafe { x.assume_init() }).collect()
}

fn int8(kernel: Int8Kernel, a: &[f32], weight: &[f32], [rows, depth, columns]: [usize; 3]) -> Vec<f32> {
    let b = Int8Matrix::new(kernel, weight, columns, depth);
    written(rows * columns, |out| b.multiply(a, rows, out))
}

fn bf16(kernel: Bf16Kernel, a: &[f32], weight: &[f32], [rows, depth, columns]: [usize; 3]) -> Vec<f32> {
    let b = Bf16Matrix::new(kernel, weight, columns, depth);
    written(rows * columns, |out| b.multiply(a, rows, out))
}

/// What `f` gives for each row of `a` and each row of `weight`, row-major.
fn each<T>(a: &[f32], weight: &[f32], [rows, depth, columns]: [usize; 3], f: impl Fn(&[f32], &[f32]) -> T) -> Vec<T> {
    let place = |i: usize| {
        f(
            &a[i / columns * depth..][..depth],
            &weight[i % columns * depth..][..depth],
        )
    };
    (0..rows * columns).map(place).collect()
}

/// The sum over the products of two rows, in f64, and that of what `size` gives for each pair of values.
fn exact(a: &[f32], w: &[f32], size: impl Fn(f64, f64) -> f64) -> (f64, f64) {
    let pairs = || a.iter().zip(w).map(|(a, w)| (f64::from(*a), f64::from(*w)));
    (
        pairs().map(|(a, w)| a * w).sum(),
        pairs().map(|(a, w)| size(a, w)).sum(),
    )
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// To the bit the loop of whole numbers, with every kernel that the processor has; and no further from the product in f64 than
    /// half a code of each factor makes it.
    #[test]
    fn int8_is_the_sum_of_codes(
        rows in 0usize..40, depth in 0usize..300, columns in 0usize..150, seed in any::<u64>(),
    ) {
        let sizes = [rows, depth, columns];
        let (a, weight) = (random(rows, depth, seed), random(columns, depth, !seed));
        let expected = each(&a, &weight, sizes, |a, w| {
            let (of_a, of_w) = (Codes::of_row(a), Codes::of_weights(w));
            let code = |a: &f32| i64::from(of_a.row(*a)) - i64::from(of_a.zero);
            let sum: i64 = a.iter().zip(w).map(|(a, w)| code(a) * i64::from(of_w.weight(*w))).sum();
            sum as f32 * of_w.scale * of_a.scale
        });
        for kernel in Int8Kernel::available() {
            prop_assert_eq!(bits(&int8(kernel, &a, &weight, sizes)), bits(&expected), "{:?}", kernel);
        }
        let near = each(&a, &weight, sizes, |a, w| {
            let (of_a, of_w) = (f64::from(Codes::of_row(a).scale), f64::from(Codes::of_weights(w).scale));
            exact(a, w, |a, w| (a.abs() * of_w + w.abs() * of_a) / 2.0 + of_a * of_w / 4.0)
        });
        for (found, (near, bound)) in expected.iter().zip(near) {
            // Half a code is more than half by the roundings in f32.
            prop_assert!((f64::from(*found) - near).abs() <= bound * 1.001, "{found} {near} {bound}");
        }
    }

    /// To the bit the chain of fused additions, odd step before even step, with every kernel that the processor has; and near the
    /// product in f64: 2^-7 of each product by the rounding of its two factors, and one of 2^-24 for each addition.
    #[test]
    fn bf16_is_the_chain_of_rounded_factors(
        rows in 0usize..40, depth in 0usize..300, columns in 0usize..150, seed in any::<u64>(),
    ) {
        let sizes = [rows, depth, columns];
        let (a, weight) = (random(rows, depth, seed), random(columns, depth, !seed));
        let rounded = |x: f32| from_bf16(bf16_bits(x));
        let expected = each(&a, &weight, sizes, |a, w| {
            let mut sum = 0f32;
            for (a, w) in a.chunks(2).zip(w.chunks(2)) {
                if let ([_, a], [_, w]) = (a, w) {
                    sum = rounded(*a).mul_add(rounded(*w), sum);
                }
                sum = rounded(a[0]).mul_add(rounded(w[0]), sum);
            }
            sum
        });
        for kernel in Bf16Kernel::available() {
            prop_assert_eq!(bits(&bf16(kernel, &a, &weight, sizes)), bits(&expected), "{:?}", kernel);
        }
        let near = each(&a, &weight, sizes, |a, w| exact(a, w, |a, w| (a * w).abs() * (0.0079 + depth as f64 * 6e-8)));
        for (found, (near, bound)) in expected.iter().zip(near) {
            prop_assert!((f64::from(*found) - near).abs() <= bound, "{found} {near} {bound}");
        }
    }
}

/// Depths as long as those of models, more than one panel and one chunk of rows, on one thread and several, and rows alone.
#[test]
fn a_row_is_the_same_alone_and_for_any_number_of_threads() {
    let sizes @ [rows, depth, columns] = [331, 1101, 205];
    let (a, weight) = (random(rows, depth, 1), random(columns, depth, 2));
    let tensor = |x: &[f32], rows: usize| Tensor::from_slice(x, (rows, depth), &Device::Cpu).unwrap();
    for precision in [LowPrecision::Bf16, LowPrecision::Int8] {
        let packed = LowPrecisionRhs::from_weight(precision, &tensor(&weight, columns)).unwrap();
        assert_eq!(packed.shape(), [depth, columns]);
        let product = |a: &[f32], rows: usize| -> Vec<u32> {
            let out = packed.product(&tensor(a, rows)).unwrap();
            bits(&out.flatten_all().unwrap().to_vec1().unwrap())
        };
        let whole = product(&a, rows);
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(
                pool.install(|| product(&a, rows)),
                whole,
                "{precision:?}, {threads} threads"
            );
        }
        for row in [0, 17, 330] {
            let alone = product(&a[row * depth..][..depth], 1);
            assert_eq!(alone, whole[row * columns..][..columns], "{precision:?}, row {row}");
        }
        // A row of other size beside it does not change one.
        let mut other = a.clone();
        other[..depth].fill(1e20);
        assert_eq!(product(&other, rows)[columns..], whole[columns..], "{precision:?}");
    }
    let best = int8(Int8Kernel::best(), &a, &weight, sizes);
    for kernel in Int8Kernel::available() {
        assert_eq!(bits(&int8(kernel, &a, &weight, sizes)), bits(&best), "{kernel:?}");
    }
    let best = bf16(Bf16Kernel::best(), &a, &weight, sizes);
    for kernel in Bf16Kernel::available() {
        assert_eq!(bits(&bf16(kernel, &a, &weight, sizes)), bits(&best), "{kernel:?}");
    }
}

/// Where instructions that saturate would: all codes are the largest, at the largest depth.
#[test]
fn the_largest_sums_fit() {
    let depth = MOST_DEPTH;
    let mut a = vec![1.0; depth];
    let weight: Vec<f32> = [vec![1.0f32; depth], vec![-1.0; depth]].concat();
    for kernel in Int8Kernel::available() {
        let found = int8(kernel, &a, &weight, [1, depth, 2]);
        let scales = [Codes::of_weights(&[1.0]).scale, Codes::of_row(&[1.0]).scale];
        let expected = (255 * 127 * depth as i32) as f32 * scales[0] * scales[1];
        assert_eq!(found, [expected, -expected], "{kernel:?}");
        a.fill(-1.0);
        let found = int8(kernel, &a, &weight, [1, depth, 2]);
        assert_eq!(found, [-expected, expected], "{kernel:?}");
        a.fill(1.0);
    }
    let too_deep = Tensor::zeros((1, depth + 1), DType::F32, &Device::Cpu).unwrap();
    assert!(LowPrecisionRhs::from_weight(LowPrecision::Int8, &too_deep).is_err());
}

#[test]
fn values_that_are_not_finite_spoil_their_row_alone() {
    let sizes @ [rows, depth, columns] = [5, 70, 33];
    let weight = random(columns, depth, 3);
    let clean = random(rows, depth, 4);
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut a = clean.clone();
        a[2 * depth + 69] = wrong;
        let mut all = Vec::new();
        for kernel in Int8Kernel::available() {
            let found = int8(kernel, &a, &weight, sizes);
            assert!(found[2 * columns..3 * columns].iter().all(|x| x.is_nan()), "{kernel:?}");
            all.push((found, int8(kernel, &clean, &weight, sizes)));
        }
        for kernel in Bf16Kernel::available() {
            let found = bf16(kernel, &a, &weight, sizes);
            assert!(
                found[2 * columns..3 * columns].iter().all(|x| !x.is_finite()),
                "{kernel:?}"
            );
            all.push((found, bf16(kernel, &clean, &weight, sizes)));
        }
        for (found, expected) in all {
            assert_eq!(found[..2 * columns], expected[..2 * columns]);
            assert_eq!(found[3 * columns..], expected[3 * columns..]);
        }
    }
}

#[test]
fn rows_of_zeros_and_of_tiny_and_huge_values_have_codes() {
    for (row, scale) in [
        ([0.0, -0.0], 0.0),
        ([1e-40, 0.0], 0.0),
        ([1e-31, -1e-32], 0.0),
        ([f32::MAX, -f32::MAX], f32::MAX / 127.5),
        ([-1.0, 0.5], 1.5 / 255.0),
        ([0.25, 0.5], 0.5 / 255.0),
        ([-0.25, -0.5], 0.5 / 255.0),
    ] {
        let codes = Codes::of_row(&row);
        assert_eq!(codes.scale, scale, "{row:?}");
        for value in row {
            // Ends of a row are within half a code, and zero is exact.
            let found = f64::from(i32::from(codes.row(value)) - codes.zero) * f64::from(scale);
            let value = if scale > 0.0 { f64::from(value) } else { 0.0 };
            assert!((found - value).abs() <= 0.501 * f64::from(scale), "{row:?}: {found}");
        }
        assert_eq!(i32::from(codes.row(0.0)), codes.zero);
        assert!((0..=255).contains(&codes.zero));
    }
    let codes = Codes::of_row(&[255.0, 0.5, 1.5, 2.5]);
    assert_eq!([0.0, 0.5, 1.5, 2.5, 255.0].map(|x| codes.row(x)), [0, 0, 2, 2, 255]);
    // Both ends at half a code.
    let codes = Codes::of_row(&[-1.5, 253.5]);
    assert_eq!((codes.zero, codes.row(-1.5), codes.row(253.5)), (2, 0, 255));
    let codes = Codes::of_weights(&[127.0, 0.5, 1.5, -2.5]);
    assert_eq!([0.5, 1.5, -2.5, -127.0].map(|x| codes.weight(x)), [0, 2, -2, -127]);
}

#[test]
fn bf16_is_the_nearest_one() {
    for value in random(40, 50, 5)
        .into_iter()
        .chain([0.0, -0.0, 1.0, 3.3961776e38, f32::MAX, f32::INFINITY])
    {
        assert_eq!(bf16_bits(value), half::bf16::from_f32(value).to_bits(), "{value}");
    }
    assert_eq!([1e-40, -1e-40].map(bf16_bits), [0, 0x8000]);
    for nan in [0x7f80_0001, 0xffff_ffff, 0x7fc0_0000] {
        assert!(from_bf16(bf16_bits(f32::from_bits(nan))).is_nan());
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    for precision in [LowPrecision::Bf16, LowPrecision::Int8] {
        let packed = LowPrecisionRhs::from_weight(precision, &zeros(&[4, 3], DType::F32)).unwrap();
        assert!(packed.product(&zeros(&[2, 4], DType::F32)).is_err());
        assert!(packed.product(&zeros(&[2, 3], DType::F64)).is_err());
        assert!(packed.product(&zeros(&[3], DType::F32)).is_err());
        assert_eq!(packed.product(&zeros(&[0, 3], DType::F32)).unwrap().dims(), [0, 4]);
        assert!(LowPrecisionRhs::from_weight(precision, &zeros(&[4, 3], DType::F64)).is_err());
        assert!(LowPrecisionRhs::from_weight(precision, &zeros(&[4], DType::F32)).is_err());
    }
}
