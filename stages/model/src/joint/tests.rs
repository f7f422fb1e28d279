use super::*;
use crate::layers::golden;
use candle_core::{DType, Device};
use flow_kernels::Noise;
use flow_kernels::testing::{DeviceUnderTest, check_gradient, max_difference, normal, values};
use proptest::prelude::*;

fn settings(durations: Vec<usize>) -> TdtLoss {
    TdtLoss {
        durations,
        sigma: 0.0,
        fastemit: 0.0,
        clamp: 0.0,
        rnnt: false,
    }
}

/// Loss per utterance, and gradient of their sum, from given logits (batch, frames, states, outputs), computed where these
/// lie.
fn loss_of_logits(settings: &TdtLoss, logits: &Tensor, frames: &[usize], targets: &[Vec<u32>]) -> (Vec<f64>, Tensor) {
    let (batch, padded_frames, padded_states, outputs) = logits.dims4().unwrap();
    let (mut cells, mut rows, mut extents) = (Vec::new(), Vec::new(), Vec::new());
    for b in 0..batch {
        for t in 0..frames[b] {
            for u in 0..=targets[b].len() {
                rows.push((b * padded_frames + t) * padded_states + u);
                cells.push(Cell {
                    frame: b * padded_frames + t,
                    state: b * padded_states + u,
                    label: targets[b].get(u).map(|&token| token as usize),
                    index: cells.len(),
                });
            }
        }
        extents.push((frames[b], targets[b].len() + 1));
    }
    let flat = logits.flatten_to(2).unwrap();
    let picked: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
    let picked = flat
        .index_select(&Tensor::new(picked, logits.device()).unwrap(), 0)
        .unwrap();
    let bias = Tensor::zeros(outputs, logits.dtype(), logits.device()).unwrap();
    let mut lattices = Lattices::new(cells.len(), settings.durations.len(), logits).unwrap();
    lattices.set(0, &picked, &bias, Cells::from(&cells)).unwrap();
    let losses = lattices.align(settings, &extents).unwrap();
    let gradients = lattices.gradients(settings, &vec![1.0; batch], padded_frames).unwrap();
    let cells = Cells::from(&cells);
    let found = gradients.of(&picked, None, &bias, &cells).unwrap();
    // As the first rows of all logits.
    let kept = gradients.of(&picked, Some(0), &bias, &cells).unwrap();
    assert_eq!(values(&kept), values(&found));
    let mut all = vec![0.0; batch * padded_frames * padded_states * outputs];
    for (row, found) in rows.iter().zip(values(&found).chunks_exact(outputs)) {
        all[row * outputs..][..outputs].copy_from_slice(found);
    }
    (losses, Tensor::from_vec(all, logits.shape(), &Device::Cpu).unwrap())
}

/// All of NeMo's cases, in f64 against f64 and in f32 against NeMo's own results; in f32 on the device under test too.
#[test]
fn golden_cases() {
    let cases: serde_json::Value =
        serde_json::from_slice(&std::fs::read(golden::file("tdt_cases.json")).unwrap()).unwrap();
    let tensors = golden::tensors("tdt_cases.safetensors");
    let cases = cases.as_object().unwrap();
    assert!(!cases.is_empty());
    for (name, case) in cases {
        let get = |part: &str| tensors.get(&format!("{name}.{part}"));
        let number = |key: &str| case[key].as_f64().unwrap();
        let durations: Vec<usize> = case["durations"]
            .as_array()
            .unwrap()
            .iter()
            .map(|d| d.as_u64().unwrap() as usize)
            .collect();
        let settings = TdtLoss {
            durations,
            sigma: number("sigma"),
            fastemit: number("fastemit"),
            clamp: number("clamp"),
            rnnt: number("omega") == 1.0,
        };
        let frames = golden::lengths(get("t_len").unwrap());
        let lengths = golden::lengths(get("u_len").unwrap());
        let labels = get("labels").unwrap();
        let targets: Vec<Vec<u32>> = lengths
            .iter()
            .enumerate()
            .map(|(b, &length)| {
                golden::lengths(&labels.get(b).unwrap())[..length]
                    .iter()
                    .map(|&l| l as u32)
                    .collect()
            })
            .collect();
        let logits = get("logits").unwrap();
        for (dtype, on_device) in [(DType::F64, false), (DType::F32, false), (DType::F32, true)] {
            let logits = logits.to_dtype(dtype).unwrap();
            let sums = |device: &Device| {
                let logits = logits.to_device(device).unwrap();
                loss_of_logits(&settings, &logits, &frames, &targets)
            };
            let (losses, gradient) = if on_device {
                DeviceUnderTest::get().run(sums)
            } else {
                sums(&Device::Cpu)
            };
            // NeMo's float32 results are within 1.2e-5 of exact ones; the stored gradients are rounded to float32.
            let bound = if dtype == DType::F64 { 1e-6 } else { 2e-5 };
            let check_losses = |expected: &Tensor, bound: f64| {
                for (found, expected) in losses.iter().zip(values(expected)) {
                    let allowed = bound * expected.abs().max(1.0);
                    assert!(
                        (found - expected).abs() <= allowed,
                        "{name} {dtype:?}: {found} {expected}"
                    );
                }
            };
            let check_gradient = |expected: &Tensor, bound: f64| {
                let difference = max_difference(&gradient, &expected.to_dtype(DType::F64).unwrap());
                assert!(
                    difference <= bound,
                    "{name} {dtype:?}: gradient differs by {difference}"
                );
            };
            if let Some(expected) = get("loss_f64") {
                check_losses(expected, if dtype == DType::F64 { 1e-9 } else { 1e-6 });
            }
            if let Some(expected) = get("grad_f64") {
                check_gradient(expected, bound);
            }
            if let (Some(index), Some(expected)) = (get("grad_f64#idx"), get("grad_f64#val")) {
                let found = values(&gradient);
                for (index, expected) in golden::lengths(index).into_iter().zip(values(expected)) {
                    assert!((found[index] - expected).abs() <= bound, "{name}: element {index}");
                }
                let squares: f64 = found.iter().map(|x| x * x).sum();
                let expected = values(get("grad_f64#sumsq").unwrap())[0];
                assert!(
                    (squares - expected).abs() <= bound * expected,
                    "{name}: {squares} {expected}"
                );
            }
            if let Some(expected) = get("loss_nemo_numba") {
                check_losses(expected, 2e-5);
            }
            if let Some(expected) = get("grad_nemo_numba") {
                check_gradient(expected, 2e-5);
            }
        }
    }
}

fn small_joint(sizes: &JointSizes, seed: u64) -> (Joint, Parameters) {
    let mut builder = ParameterBuilder::random(DType::F64, Device::Cpu, seed);
    let joint = Joint::new(sizes, "joint", &mut builder).unwrap();
    (joint, builder.finish().0)
}

/// Smallest magnitude of the inputs of the ReLU.
fn nearest_to_kink(saved: &JointLoss) -> f64 {
    let rows = |x: &Tensor| -> Vec<Vec<f64>> { x.to_vec2().unwrap() };
    let (f, g) = (rows(&saved.f), rows(&saved.g));
    let sums = saved
        .cells
        .iter()
        .flat_map(|cell| f[cell.frame].iter().zip(&g[cell.state]).map(|(f, g)| (f + g).abs()));
    sums.fold(f64::INFINITY, f64::min)
}

/// Loss of the fused network, and all gradients, against finite differences.
fn check_fused(lengths: &[(usize, usize)], settings: &TdtLoss, dropout: f64, seed: u64) {
    let sizes = JointSizes {
        encoder: 5,
        prediction: 4,
        hidden: 6,
        vocabulary: 7,
        durations: settings.durations.len(),
        dropout,
    };
    let (joint, parameters) = small_joint(&sizes, seed);
    let mut noise = Noise::new(seed ^ 77);
    let frames: Vec<usize> = lengths.iter().map(|l| l.0).collect();
    let targets: Vec<Vec<u32>> = lengths
        .iter()
        .map(|l| (0..l.1).map(|_| (noise.bits() % 7) as u32).collect())
        .collect();
    let padded = frames.iter().max().unwrap() + 1;
    let states = targets.iter().map(Vec::len).max().unwrap() + 1;
    let encoded = normal(&[lengths.len(), padded, 5], &mut noise);
    let predicted = normal(&[lengths.len(), states, 4], &mut noise);
    let factors: Vec<f64> = (0..lengths.len()).map(|b| 0.5 + b as f64).collect();
    let drop = Noise::new(seed);
    let loss = |parameters: &Parameters, encoded: &Tensor, predicted: &Tensor| {
        let mode_noise = &mut drop.clone();
        joint.loss(
            parameters,
            settings,
            (encoded, &frames),
            (predicted, &targets),
            Mode::Train(mode_noise),
        )
    };
    let objective = |loss: crate::Result<JointLoss>| -> crate::Result<Tensor> {
        let total: f64 = loss?
            .losses
            .iter()
            .zip(&factors)
            .map(|(loss, factor)| loss * factor)
            .sum();
        Ok(Tensor::new(&[total], &Device::Cpu)?)
    };
    let saved = loss(&parameters, &encoded, &predicted).unwrap();
    if nearest_to_kink(&saved) < 1e-4 {
        // The steps of the differences could cross it.
        return check_fused(lengths, settings, dropout, seed + 1000);
    }
    let mut gradients = Gradients::new(&parameters);
    let (d_encoded, d_predicted) = joint
        .backward(&parameters, settings, &saved, &factors, false, &mut gradients)
        .unwrap();
    let one = Tensor::new(&[1.0f64], &Device::Cpu).unwrap();
    check_gradient("encoded", &encoded, &one, &d_encoded.unwrap(), |x| {
        objective(loss(&parameters, x, &predicted))
    });
    check_gradient("predicted", &predicted, &one, &d_predicted, |x| {
        objective(loss(&parameters, &encoded, x))
    });
    for (id, parameter) in parameters.iter() {
        let gradient = gradients
            .get(id)
            .unwrap_or_else(|| panic!("{} has no gradient", parameter.name));
        check_gradient(&parameter.name, &parameter.tensor, &one, gradient, |x| {
            let mut parameters = parameters.clone();
            parameters.set(id, x.clone())?;
            objective(loss(&parameters, &encoded, &predicted))
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]
    #[test]
    fn fused_gradients_agree_with_finite_differences(
        lengths in proptest::collection::vec((1usize..7, 0usize..4), 1..4),
        sigma in 0.0..0.1f64,
        seed in 0u64..1000,
    ) {
        check_fused(&lengths, &TdtLoss { sigma, ..settings(vec![0, 1, 2]) }, 0.0, seed);
    }
}

#[test]
fn fused_gradients_with_dropout_and_without_durations() {
    check_fused(&[(5, 2), (3, 3)], &settings(vec![0, 1, 2, 3, 4]), 0.4, 3);
    check_fused(
        &[(5, 2), (3, 3)],
        &TdtLoss {
            rnnt: true,
            ..settings(vec![0, 1, 2])
        },
        0.0,
        4,
    );
}

/// Logits that were kept and logits that are computed again give the same gradients.
#[test]
fn many_chunks_agree_with_few() {
    let sizes = JointSizes {
        encoder: 8,
        prediction: 8,
        hidden: 16,
        vocabulary: 9000,
        durations: 5,
        dropout: 0.1,
    };
    let mut builder = ParameterBuilder::random(DType::F32, Device::Cpu, 1);
    let joint = Joint::new(&sizes, "joint", &mut builder).unwrap();
    let (parameters, _) = builder.finish();
    let mut noise = Noise::new(2);
    let single = |shape: &[usize], noise: &mut Noise| normal(shape, noise).to_dtype(DType::F32).unwrap();
    let (encoded, predicted) = (single(&[2, 60, 8], &mut noise), single(&[2, 21, 8], &mut noise));
    let targets = vec![vec![3; 20], vec![8999; 5]];
    let settings = settings(vec![0, 1, 2, 3, 4]);
    let run = |kept: usize| {
        let mode_noise = &mut Noise::new(9);
        let mut saved = joint
            .loss(
                &parameters,
                &settings,
                (&encoded, &[60, 41]),
                (&predicted, &targets),
                Mode::Train(mode_noise),
            )
            .unwrap();
        assert!(saved.kept.len() == 1 && saved.cells.len() > 2 * CHUNK);
        saved.kept.truncate(kept);
        let mut gradients = Gradients::new(&parameters);
        let d = joint
            .backward(&parameters, &settings, &saved, &[1.0, 1.0], false, &mut gradients)
            .unwrap();
        let mut all = vec![d.0.unwrap(), d.1];
        all.extend(gradients.iter().map(|(_, gradient)| gradient.clone()));
        all
    };
    for (a, b) in run(1).iter().zip(run(0)) {
        // The cells are summed in other groups: rounding only.
        let largest = values(a).iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
        assert!(max_difference(a, &b) <= 1e-5 * largest);
    }
}

#[test]
fn odd_batches() {
    let sizes = JointSizes {
        encoder: 5,
        prediction: 4,
        hidden: 6,
        vocabulary: 7,
        durations: 2,
        dropout: 0.0,
    };
    let (joint, parameters) = small_joint(&sizes, 1);
    let mut noise = Noise::new(1);
    let (encoded, predicted) = (normal(&[3, 2, 5], &mut noise), normal(&[3, 4, 4], &mut noise));
    let settings = settings(vec![1, 2]);
    let targets = vec![vec![1, 2, 3], vec![], vec![1]];
    // Three labels in two frames cannot be aligned without duration 0; the second utterance has no frame.
    let saved = joint
        .loss(
            &parameters,
            &settings,
            (&encoded, &[2, 0, 2]),
            (&predicted, &targets),
            Mode::Evaluate,
        )
        .unwrap();
    assert_eq!(saved.losses[0], f64::INFINITY);
    assert_eq!(saved.losses[1], 0.0);
    assert!(saved.losses[2].is_finite());
    let mut gradients = Gradients::new(&parameters);
    let (d, _) = joint
        .backward(&parameters, &settings, &saved, &[1.0; 3], false, &mut gradients)
        .unwrap();
    let d = d.unwrap();
    assert!(values(&d).iter().all(|x| x.is_finite()));
    assert!(values(&d.narrow(0, 0, 2).unwrap()).iter().all(|&x| x == 0.0));
    assert!(values(&d.get(2).unwrap()).iter().any(|&x| x != 0.0));
    let bad = vec![vec![7], vec![], vec![]];
    assert!(
        joint
            .loss(
                &parameters,
                &settings,
                (&encoded, &[2, 0, 2]),
                (&predicted, &bad),
                Mode::Evaluate
            )
            .is_err()
    );
    assert!(
        joint
            .loss(
                &parameters,
                &settings,
                (&encoded, &[3, 0, 2]),
                (&predicted, &targets),
                Mode::Evaluate
            )
            .is_err()
    );
}
