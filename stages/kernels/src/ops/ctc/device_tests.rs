//! Against the loss on the CPU, in the emulator or on a device.

use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;

use super::cuda::{LABELS_IN_BLOCK, STATES_IN_BLOCK};
use super::loss_and_gradient;
use crate::counts::{Copies, counted};
use crate::noise::Noise;
use crate::testing::on_device::{BOUND, close, on_device, random};
use crate::testing::values;

/// A padded batch.
struct Batch {
    logits: Tensor,
    time: usize,
    lengths: Vec<usize>,
    targets: Vec<Vec<u32>>,
    factors: Vec<f64>,
}

impl Batch {
    /// Random logits, times `scale`.
    fn new(time: usize, outputs: usize, scale: f64, each: &[(usize, Vec<u32>)], noise: &mut Noise) -> Self {
        Batch {
            logits: (random(&[each.len() * time, outputs], noise) * scale).unwrap(),
            time,
            lengths: each.iter().map(|(length, _)| *length).collect(),
            targets: each.iter().map(|(_, target)| target.clone()).collect(),
            factors: (0..each.len()).map(|number| 0.5 / (number + 1) as f64).collect(),
        }
    }

    /// The same with one logit changed.
    fn with(&self, row: usize, column: usize, logit: f32) -> Self {
        let (rows, outputs) = self.logits.dims2().unwrap();
        let mut numbers: Vec<f32> = self.logits.flatten_all().unwrap().to_vec1().unwrap();
        numbers[row * outputs + column] = logit;
        Batch {
            logits: Tensor::from_vec(numbers, (rows, outputs), &Device::Cpu).unwrap(),
            lengths: self.lengths.clone(),
            targets: self.targets.clone(),
            factors: self.factors.clone(),
            ..*self
        }
    }

    fn run(&self, logits: &Tensor) -> (Vec<f64>, Vec<f64>) {
        let (losses, gradient) =
            loss_and_gradient(logits, self.time, &self.lengths, &self.targets, &self.factors).unwrap();
        assert_eq!((gradient.dims(), gradient.dtype()), (logits.dims(), DType::F32));
        (losses, values(&gradient))
    }

    /// Compares losses and gradients on the device with those on the CPU, and gives them.
    fn same(&self, what: &str) -> (Vec<f64>, Vec<f64>) {
        let expected = self.run(&self.logits);
        let found = on_device(|on| self.run(&on(&self.logits)));
        assert_eq!(expected.0.len(), found.0.len(), "{what}");
        for (expected, found) in expected.0.iter().zip(&found.0) {
            let near = (expected - found).abs() <= 1e-5 * expected.abs().max(1.0);
            assert!(
                near || expected == found || expected.is_nan() && found.is_nan(),
                "{what}: a loss of {expected} on the CPU, {found} on the device"
            );
        }
        close(what, BOUND, &expected.1, &found.1);
        // To the bit.
        assert_eq!(found.1, on_device(|on| self.run(&on(&self.logits))).1, "{what}");
        found
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    /// Targets of few labels, most of which come more than once, some of which do not fit.
    #[test]
    fn small_batches(
        time in 1usize..14,
        each in prop::collection::vec((0usize..16, prop::collection::vec(0u32..4, 0..7)), 1..5),
        more in 0usize..300,
        scale in 0.1f64..20.0,
        seed: u64,
    ) {
        Batch::new(time, 5 + more, scale, &each, &mut Noise::new(seed)).same("a small batch");
    }
}

/// Each thread has several states, and outputs; and labels are summed in several parts, of which the last has some.
#[test]
fn targets_longer_than_a_block() {
    let mut noise = Noise::new(5);
    let middling = vec![(330, (0..300).map(|n| n * 7 % 256).collect()), (330, vec![3; 150])];
    Batch::new(331, 1025, 3.0, &middling, &mut noise).same("targets of hundreds of labels");
    let labels = LABELS_IN_BLOCK + 6;
    assert!(2 * labels + 1 > STATES_IN_BLOCK);
    let long = vec![
        (0, vec![1]),
        (labels + 9, (0..labels as u32).map(|n| n % 4).collect()),
        (7, vec![2, 2]),
    ];
    let (losses, gradient) = Batch::new(labels + 9, 5, 2.0, &long, &mut noise).same("a target of many labels");
    assert!(losses[0] == f64::INFINITY && losses[1] > 1000.0 && losses[2].is_finite());
    let row = |row: usize| gradient[row * 5..][..5].iter().any(|value| *value != 0.0);
    assert!(!row(0) && row(labels + 9) && row(2 * (labels + 9)) && !row(2 * (labels + 9) + 7));
}

/// Log probabilities of a sum of many thousands, of which 32 bits would not leave enough.
#[test]
fn many_frames_of_unlikely_labels() {
    let each = vec![(400, (0..60).map(|n| n * 5 % 64).collect()), (399, vec![])];
    let (losses, _) = Batch::new(400, 65, 30.0, &each, &mut Noise::new(9)).same("many frames");
    assert!(losses.iter().all(|loss| *loss > 7000.0), "{losses:?}");
}

/// An utterance without frames, empty targets, ones that fit exactly, and ones that do not, also because of equal neighbours.
#[test]
fn targets_that_fit_and_that_do_not() {
    let each = [
        (0, vec![]),
        (0, vec![1]),
        (3, vec![]),
        (3, vec![0, 1, 0]),
        (3, vec![0, 1, 0, 1]),
        (3, vec![2, 2]),
        (2, vec![2, 2]),
        (1, vec![1]),
        // As many frames as there are.
        (9, vec![1, 2]),
    ];
    let (losses, _) = Batch::new(3, 4, 1.0, &each, &mut Noise::new(3)).same("targets");
    let infinite: Vec<bool> = losses.iter().map(|loss| *loss == f64::INFINITY).collect();
    assert_eq!(infinite, [false, true, false, false, true, false, true, false, false]);
    assert_eq!(losses[0], 0.0);
    // No frames at all, and no utterances.
    let none = Batch::new(0, 4, 1.0, &[(0, vec![]), (2, vec![1])], &mut Noise::new(3));
    assert_eq!(none.same("no frames").0, [0.0, f64::INFINITY]);
    Batch::new(3, 4, 1.0, &[], &mut Noise::new(3)).same("no utterances");
}

/// A loss that is not finite is that of the CPU, has no gradient, and leaves the other utterances as they are.
#[test]
fn logits_that_are_not_finite() {
    let each = [(4, vec![0, 1]), (4, vec![0, 0, 1]), (3, vec![2])];
    let batch = Batch::new(4, 5, 1.0, &each, &mut Noise::new(13));
    let (whole, gradient) = batch.same("all are finite");
    for (what, row, logit, expected) in [
        ("not a number", 0, f32::NAN, [true, false, false]),
        ("infinite", 2, f32::INFINITY, [true, false, false]),
        (
            "not a number in a target that fits exactly",
            7,
            f32::NAN,
            [false, true, false],
        ),
        ("not a number behind the end", 11, f32::NAN, [false; 3]),
        ("impossible", 1, f32::NEG_INFINITY, [false; 3]),
    ] {
        let (losses, found) = batch.with(row, 3, logit).same(what);
        for (number, spoilt) in expected.into_iter().enumerate() {
            assert_eq!(losses[number].is_nan(), spoilt, "{what}: {losses:?}");
            let part = |all: &[f64]| all[number * 4 * 5..][..4 * 5].to_vec();
            if spoilt {
                assert!(part(&found).iter().all(|value| *value == 0.0), "{what}");
            } else if row / 4 != number || row == 11 {
                assert_eq!(
                    (losses[number], part(&found)),
                    (whole[number], part(&gradient)),
                    "{what}"
                );
            }
        }
    }
    // The label of a target that has no other place.
    let (losses, found) = batch.with(4, 0, f32::NEG_INFINITY).same("a label that is impossible");
    assert_eq!(losses[1], f64::INFINITY);
    assert!(found[4 * 5..8 * 5].iter().all(|value| *value == 0.0));
    // A target that does not fit has an infinite loss though its first frame is not a number.
    let short = Batch::new(1, 3, 1.0, &[(1, vec![0, 1])], &mut Noise::new(1)).with(0, 0, f32::NAN);
    assert_eq!(short.same("too short").0, [f64::INFINITY]);
}

/// Logits stay where they are: what is copied are tables, factors and losses.
#[test]
fn three_launches_and_no_copy_of_logits() {
    let each = [(20, vec![0, 1, 5]), (13, vec![4, 4])];
    let batch = Batch::new(20, 700, 1.0, &each, &mut Noise::new(2));
    on_device(|on| {
        let logits = on(&batch.logits);
        let (_, counts) =
            counted(|| loss_and_gradient(&logits, 20, &batch.lengths, &batch.targets, &batch.factors).unwrap());
        assert_eq!((counts.launches(), counts.products), (3, 0));
        assert_eq!(counts.to_host, Copies { count: 1, bytes: 2 * 8 });
        // Four numbers for each utterance, labels and their links with one more of each; factors.
        assert_eq!(
            counts.to_device,
            Copies {
                count: 2,
                bytes: 4 * (2 * 4 + 2 * 6) + 2 * 8
            }
        );
    });
    let refused = on_device(|on| {
        let logits = on(&batch.logits.to_dtype(DType::F64).unwrap());
        loss_and_gradient(&logits, 20, &batch.lengths, &batch.targets, &batch.factors)
            .unwrap_err()
            .to_string()
    });
    assert!(refused.contains("f32"), "{refused}");
}
