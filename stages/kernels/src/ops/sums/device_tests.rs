//! Against the kernels for the CPU, in the emulator or on a device.

use crate::counts::counted;
use crate::noise::Noise;
use crate::ops::sums::column_sums::{ColumnSums, add_together, totals};
use crate::testing::on_device::{on_device, random};
use crate::testing::values;

#[test]
fn sums_of_squares_and_of_rows() {
    let mut noise = Noise::new(8);
    let tensors = [
        random(&[150_001], &mut noise),
        random(&[0], &mut noise),
        random(&[3, 7], &mut noise),
    ];
    let expected: f64 = tensors.iter().flat_map(values).map(|value| value * value).sum();
    let found = on_device(|on| super::cuda::squares(&tensors.each_ref().map(on))).unwrap();
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
        super::cuda::add_to_rows(&sum, &on(&x), &rows).unwrap();
        sum
    });
    for (found, expected) in values(&sum).iter().zip(expected) {
        assert!((found - expected).abs() < 1e-5);
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
