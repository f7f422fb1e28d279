use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;

use super::*;
use crate::noise::Noise;
use crate::testing::{max_difference, normal};

/// A random (.., rows, columns) in f32, lying transposed in memory if asked, and within a larger tensor.
fn random(stack: &[usize], rows: usize, columns: usize, transposed: bool, seed: u64) -> Tensor {
    let mut shape = stack.to_vec();
    shape.extend(if transposed {
        [columns, rows + 3]
    } else {
        [rows + 3, columns]
    });
    let x = normal(&shape, &mut Noise::new(seed)).to_dtype(DType::F32).unwrap();
    let x = if transposed { x.t().unwrap() } else { x };
    x.narrow(stack.len(), 2, rows).unwrap()
}

fn exact(x: &Tensor) -> Tensor {
    x.contiguous().unwrap().to_dtype(DType::F64).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Against candle's product in f64. Partial sums of `depth` products of normal values are of size `sqrt(depth)`,
    /// with as many rounding errors of 2e-8 to 1e-7 of them that add up like a random walk: about 1e-7 `depth` in all.
    /// A product too few or twice would be of size one.
    #[test]
    fn products_of_any_layout_equal_those_in_f64(
        rows in 0usize..120, depth in 0usize..1100, columns in 0usize..120,
        layouts in prop::array::uniform2(any::<bool>()), stacked in 0usize..3,
    ) {
        let stack = &[2, 3][..stacked];
        let a = random(stack, rows, depth, layouts[0], 1);
        let b = random(stack, depth, columns, layouts[1], 2);
        let found = product(&a, &b).unwrap();
        // Candle refuses empty products.
        if rows * columns * depth > 0 {
            let expected = exact(&a).matmul(&exact(&b)).unwrap();
            let worst = max_difference(&exact(&found), &expected);
            prop_assert!(worst < 5e-7 * (1.0 + depth as f64), "{worst}");
        } else {
            prop_assert_eq!(found.dims()[stacked..].to_vec(), vec![rows, columns]);
            prop_assert!(found.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|x| *x == 0.0));
        }
        if stacked == 0 {
            let packed = PackedRhs::new(&b).unwrap().product(&a).unwrap();
            prop_assert_eq!(bits(&packed), bits(&found));
        }
    }
}

/// Rows that overlap, and a weight of a linear layer, against the product of the same rows one after the other.
#[test]
fn rows_may_overlap() {
    let weight = normal(&[5, 7], &mut Noise::new(1)).to_dtype(DType::F32).unwrap();
    let values: Vec<f32> = (0..40).map(|i| (i as f32).sin()).collect();
    let flat: Vec<f32> = weight.flatten_all().unwrap().to_vec1().unwrap();
    let packed = PackedRhs::from_weight(&flat, 5).unwrap();
    let found = packed.product_of_rows(&values, 12, 3).unwrap();
    let rows: Vec<f32> = (0..12).flat_map(|row| values[3 * row..3 * row + 7].to_vec()).collect();
    let rows = Tensor::from_vec(rows, (12, 7), &Device::Cpu).unwrap();
    let expected = product(&rows, &weight.t().unwrap()).unwrap();
    assert_eq!(found.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), bits(&expected));
    let mut into = vec![f32::NAN; found.len()];
    packed.product_of_rows_into(&values, 12, 3, &mut into).unwrap();
    assert_eq!(into, found);
    for size in [0, found.len() - 1, found.len() + 1] {
        assert!(
            packed
                .product_of_rows_into(&values, 12, 3, &mut vec![0.0; size])
                .is_err()
        );
    }
    assert!(packed.product_of_rows(&values, 13, 3).is_err());
    assert!(packed.product_of_rows(&[], 0, 3).unwrap().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Rows that are put together from taps, in any order and overlapping,
    /// against the product of the same rows one after the other. Parts are shorter and longer than a block of depth.
    #[test]
    fn taps_are_read_where_they_lie(
        rows in 0usize..70, part in prop_oneof![1usize..40, 300usize..700], columns in 1usize..100,
        row_step in 0usize..50, taps in prop::collection::vec(0usize..200, 1..5),
    ) {
        let depth = part * taps.len();
        let weight = normal(&[columns, depth], &mut Noise::new(5)).to_dtype(DType::F32).unwrap();
        let packed = PackedRhs::new(&weight.t().unwrap()).unwrap();
        let length = rows * row_step + taps.iter().max().unwrap() + part;
        let values: Vec<f32> = (0..length).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut gathered = Vec::new();
        for row in 0..rows {
            for tap in &taps {
                gathered.extend_from_slice(&values[row * row_step + tap..][..part]);
            }
        }
        let expected = packed.product_of_rows(&gathered, rows, depth).unwrap();
        let mut found = vec![f32::NAN; expected.len()];
        packed.product_of_taps_into(&values, rows, row_step, &taps, &mut found).unwrap();
        prop_assert_eq!(&found, &expected);
        if rows > 0 {
            let short = &values[..(rows - 1) * row_step + taps.iter().max().unwrap() + part - 1];
            prop_assert!(packed.product_of_taps_into(short, rows, row_step, &taps, &mut found).is_err());
            prop_assert!(packed.product_of_taps_into(&values, rows, row_step, &[], &mut found).is_err());
            found.pop();
            prop_assert!(packed.product_of_taps_into(&values, rows, row_step, &taps, &mut found).is_err());
        }
    }
}

/// Sums of several blocks of depth that are added where the result lies, by each form of the micro-kernel.
#[cfg(target_arch = "x86_64")]
#[test]
fn packed_products_are_the_same_for_any_processor() {
    use std::mem::MaybeUninit;

    use super::matrix::Matrix;
    use super::micro_kernel::Processor;
    use super::packing::PackedMatrix;

    let Some(best) = Processor::detect() else {
        return;
    };
    let value = |at: usize| (at * 7919 % 2003) as f32 / 1001.5 - 1.0;
    for (rows, part, columns) in [(61, 500, 96), (9, 700, 41), (32, 32, 32), (1, 384, 128)] {
        let taps = [part, 0, 3];
        let weight: Vec<f32> = (0..taps.len() * part * columns).map(value).collect();
        let values: Vec<f32> = (0..rows * 7 + 2 * part).map(|at| value(at + 5)).collect();
        let found = [Processor::Avx2, best].map(|processor| {
            let b = Matrix::new(&weight, 0, [taps.len() * part, columns], [1, taps.len() * part]).unwrap();
            let a = Matrix::new(&values, 0, [rows, part], [7, 1]).unwrap();
            let mut out = vec![MaybeUninit::new(f32::NAN); rows * columns];
            PackedMatrix::new(processor, b).multiply(a, &taps, &mut out);
            // SAFETY: there was a value in each from the beginning.
            out.iter()
                .map(|x| unsafe { x.assume_init() }.to_bits())
                .collect::<Vec<u32>>()
        });
        assert_eq!(found[0], found[1], "{rows} {part} {columns}");
        // One sum, by its formula.
        let (row, column) = (rows - 1, columns / 2);
        let depth = taps.iter().flat_map(|tap| (0..part).map(move |at| row * 7 + tap + at));
        let products = depth.zip(&weight[column * taps.len() * part..]);
        let exact: f64 = products
            .map(|(at, weight)| f64::from(values[at]) * f64::from(*weight))
            .sum();
        let sum = f64::from(f32::from_bits(found[0][row * columns + column]));
        assert!((sum - exact).abs() < 1e-3, "{sum} {exact}");
    }
}

fn bits(x: &Tensor) -> Vec<u32> {
    let values: Vec<f32> = x.flatten_all().unwrap().to_vec1().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_row_is_the_same_alone_and_for_any_processor_and_number_of_threads() {
    let Some(best) = super::micro_kernel::Processor::detect() else {
        return;
    };
    for depth in [1100, 1024] {
        a_row_is_the_same(best, depth);
    }
}

#[cfg(target_arch = "x86_64")]
fn a_row_is_the_same(best: super::micro_kernel::Processor, depth: usize) {
    use std::mem::MaybeUninit;

    use super::gemm::multiply;
    use super::matrix::Matrix;
    use super::micro_kernel::Processor;

    let (rows, columns) = (133, 1203);
    let a = random(&[], rows, depth, false, 3).contiguous().unwrap();
    let b = random(&[], columns, depth, false, 4).contiguous().unwrap();
    let whole = bits(&product(&a, &b.t().unwrap()).unwrap());
    for row in [0, 50, 132] {
        let alone = product(&a.narrow(0, row, 1).unwrap(), &b.t().unwrap()).unwrap();
        assert_eq!(bits(&alone), whole[row * columns..][..columns], "row {row}");
    }
    // The other way round, so that rows and columns change sides.
    let turned = product(&b, &a.t().unwrap()).unwrap().t().unwrap().contiguous().unwrap();
    assert_eq!(bits(&turned), whole);
    let (a, b): (Vec<f32>, Vec<f32>) = (
        a.flatten_all().unwrap().to_vec1().unwrap(),
        b.flatten_all().unwrap().to_vec1().unwrap(),
    );
    for processor in [Processor::Avx2, best] {
        for threads in [1, 2, 5] {
            let mut out = vec![MaybeUninit::new(f32::NAN); rows * columns];
            let a = Matrix::new(&a, 0, [rows, depth], [depth, 1]).unwrap();
            let b = Matrix::new(&b, 0, [depth, columns], [1, depth]).unwrap();
            let pool = crate::threads::pool("test", threads).unwrap();
            pool.install(|| multiply(processor, a, b, &mut out));
            // SAFETY: there was a value in each from the beginning.
            let found: Vec<u32> = out.iter().map(|x| unsafe { x.assume_init() }.to_bits()).collect();
            assert_eq!(found, whole, "{processor:?}, {threads} threads");
        }
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    assert!(product(&zeros(&[2, 3]), &zeros(&[4, 2])).is_err());
    assert!(product(&zeros(&[2, 2, 3]), &zeros(&[3, 3, 2])).is_err());
    assert!(product(&zeros(&[3]), &zeros(&[3, 2])).is_err());
    assert!(
        PackedRhs::new(&zeros(&[4, 2]))
            .unwrap()
            .product(&zeros(&[2, 3]))
            .is_err()
    );
}
