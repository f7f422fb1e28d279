use super::*;
use crate::testing::golden;
use candle_core::{DType, Device};
use flow_cuda_emulator::DeviceUnderTest;
use flow_kernels::testing::{check_gradient, max_difference, normal, values};
use flow_kernels::{Noise, is_gpu, tdt};
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
    let shape = Shape {
        batch,
        frames: padded_frames,
        states: padded_states,
    };
    let cells = list_cells(shape, frames, targets);
    let rows: Vec<usize> = cells
        .iter()
        .map(|cell| cell.frame * padded_states + cell.state % padded_states)
        .collect();
    let flat = logits.flatten_to(2).unwrap();
    let picked: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
    let picked = flat
        .index_select(&Tensor::new(picked, logits.device()).unwrap(), 0)
        .unwrap();
    let of_bias = if logits.dtype() == DType::BF16 {
        DType::F32
    } else {
        logits.dtype()
    };
    let bias = Tensor::zeros(outputs, of_bias, logits.device()).unwrap();
    let (losses, found) = if is_gpu(logits.device()) {
        of_logits_on_device(settings, (&picked, &bias), shape, frames, targets)
    } else {
        let mut lattices = Lattices::new(cells.len(), settings.durations.len());
        lattices.set(0, &picked, &bias, &cells).unwrap();
        let extents: Vec<_> = frames
            .iter()
            .zip(targets)
            .map(|(&t, target)| (t, target.len() + 1))
            .collect();
        let losses = lattices.align(settings, &extents).unwrap();
        let gradients = lattices.gradients(settings, &vec![1.0; batch]);
        let found = gradients.of(&picked, None, &bias, &cells).unwrap();
        // As the first rows of all logits.
        let kept = gradients.of(&picked, Some(0), &bias, &cells).unwrap();
        assert_eq!(values(&kept), values(&found));
        (losses, found)
    };
    let mut all = vec![0.0; batch * padded_frames * padded_states * outputs];
    for (row, found) in rows.iter().zip(values(&found).chunks_exact(outputs)) {
        all[row * outputs..][..outputs].copy_from_slice(found);
    }
    (losses, Tensor::from_vec(all, logits.shape(), &Device::Cpu).unwrap())
}

/// The same of the logits of all cells on a device: those that count in two chunks, whose sums are those of the rows.
fn of_logits_on_device(
    settings: &TdtLoss,
    (logits, bias): (&Tensor, &Tensor),
    shape: Shape,
    frames: &[usize],
    targets: &[Vec<u32>],
) -> (Vec<f64>, Tensor) {
    let extents = tdt::Extents {
        padded: (shape.frames, shape.states),
        frames,
        targets,
        durations: &settings.durations,
    };
    let lattices = tdt::Lattices::new(&extents, logits.device()).unwrap();
    let (cells, outputs) = logits.dims2().unwrap();
    // Columns that do not count.
    let behind = Tensor::new(f32::NAN, logits.device())
        .unwrap()
        .to_dtype(logits.dtype())
        .unwrap();
    let behind = behind.broadcast_as((cells, 3)).unwrap();
    // Joined along an axis behind the first one they may be a view of what is transposed.
    let logits = &Tensor::cat(&[logits, &behind], 1).unwrap().contiguous().unwrap();
    lattices.set_terms(0, logits, bias).unwrap();
    let aligned = lattices
        .align(&tdt::Rules {
            sigma: settings.sigma,
            label_factor: settings.label_factor(),
            negligible: negligible(DType::F32),
            rnnt: settings.rnnt,
        })
        .unwrap();
    let factors = tdt::doubles(vec![1.0; shape.batch], logits.device()).unwrap();
    let options = |dtype: DType| tdt::LogitGradient {
        dtype,
        factors: &factors,
        clamp: settings.clamp,
    };
    let gradient = |logits: &Tensor, cells: &tdt::CellList, dtype: DType, sums: Option<&mut tdt::BiasSums>| {
        // The gradient may take the place of what it is of.
        let found = lattices.logit_gradient(&aligned, (logits.copy().unwrap(), bias), cells, &options(dtype), sums);
        let found = found.unwrap();
        let behind = found.narrow(1, outputs, 3).unwrap();
        assert!(values(&behind).iter().all(|value| *value == 0.0));
        found.narrow(1, 0, outputs).unwrap()
    };
    let whole = gradient(logits, lattices.cells(), DType::F32, None);
    let narrow = gradient(logits, lattices.cells(), DType::BF16, None);
    assert_eq!(values(&narrow), values(&whole.to_dtype(DType::BF16).unwrap()));
    // Those that count are all but some whose gradient is none.
    let active = lattices.active_cells(&aligned).unwrap();
    assert!(active.len() == aligned.active && active.len() <= cells);
    let chunk = active.len().div_ceil(2).max(1);
    let mut sums = tdt::BiasSums::new(chunk, outputs, logits.device()).unwrap();
    let host = list_cells(shape, frames, targets);
    let numbers: Vec<u32> = active.to_vec().unwrap();
    let mut all = vec![0.0; cells * outputs];
    for first in (0..active.len()).step_by(chunk) {
        let part = active.part(first..active.len().min(first + chunk)).unwrap();
        let places: Vec<u32> = numbers[4 * first..][..4 * part.len()]
            .iter()
            .skip(3)
            .step_by(4)
            .copied()
            .collect();
        for (place, numbers) in places.iter().zip(numbers[4 * first..].chunks_exact(4)) {
            let Cell {
                frame,
                state,
                label,
                index,
            } = host[*place as usize];
            let label = label.map_or(u32::MAX, |label| label as u32);
            assert_eq!(numbers, [frame as u32, state as u32, label, index as u32]);
        }
        let rows = logits
            .index_select(&Tensor::new(places.as_slice(), logits.device()).unwrap(), 0)
            .unwrap();
        let found = gradient(&rows, &part, DType::F32, Some(&mut sums));
        for (place, found) in places.iter().zip(values(&found).chunks_exact(outputs)) {
            all[*place as usize * outputs..][..outputs].copy_from_slice(found);
        }
    }
    let all = Tensor::from_vec(all, (cells, outputs), &Device::Cpu).unwrap();
    assert!(max_difference(&all, &whole.to_device(&Device::Cpu).unwrap()) < 1e-15);
    if !active.is_empty() {
        let found = values(&sums.sums().total().unwrap());
        let expected = values(&all.sum(0).unwrap());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-5 * expected.abs().max(1.0));
        }
    }
    (aligned.losses.clone(), whole)
}

/// NeMo's cases of the plain transducer, which has no durations, in f64 and f32 and in f32 on the device under test.
#[test]
fn golden_cases_of_rnnt() {
    let text = flow_nn::tensor_files::read_packed(&golden::file_of("rnnt", "loss_cases.json"), 1).unwrap();
    let cases: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let tensors = golden::tensors_of(&golden::file_of("rnnt", "loss_cases.safetensors"));
    let cases = cases.as_object().unwrap();
    assert!(cases.len() > 8);
    for (name, case) in cases {
        let get = |part: &str| tensors.get(&format!("{name}.{part}"));
        let number = |key: &str| case[key].as_f64().unwrap();
        let settings = TdtLoss {
            fastemit: number("fastemit"),
            clamp: number("clamp"),
            rnnt: true,
            ..settings(vec![])
        };
        let frames = golden::lengths(get("t_len").unwrap());
        let labels = get("labels").unwrap();
        let lengths = golden::lengths(get("u_len").unwrap()).into_iter().enumerate();
        let targets: Vec<Vec<u32>> = lengths
            .map(|(b, length)| {
                let row = golden::lengths(&labels.get(b).unwrap());
                row[..length].iter().map(|&label| label as u32).collect()
            })
            .collect();
        for (dtype, on_device) in [(DType::F64, false), (DType::F32, false), (DType::F32, true)] {
            let logits = get("logits").unwrap().to_dtype(dtype).unwrap();
            let sums =
                |device: &Device| loss_of_logits(&settings, &logits.to_device(device).unwrap(), &frames, &targets);
            let (losses, gradient) = if on_device {
                DeviceUnderTest::get().run(sums)
            } else {
                sums(&Device::Cpu)
            };
            let exact = case["loss_f64_plain"].as_array().unwrap();
            for (found, exact) in losses.iter().zip(exact) {
                let exact = exact.as_f64().unwrap() * settings.label_factor();
                let bound = if dtype == DType::F64 { 1e-9 } else { 1e-6 };
                assert!(
                    (found - exact).abs() <= bound * exact.max(1.0),
                    "{name} {dtype:?}: {found} {exact}"
                );
            }
            // With FastEmit or a bound on gradients that of NeMo's CUDA kernel, which is of 32 bits: it lies 4e-6 from NeMo's own on the
            // CPU, and 4e-5 with logits in the hundreds.
            let plain = settings.fastemit == 0.0 && settings.clamp <= 0.0;
            let (expected, bound) = match plain {
                true => (get("grad_f64"), if dtype == DType::F64 { 1e-6 } else { 2e-5 }),
                false => (get("grad_nemo_cuda_kernel"), 2e-5),
            };
            let expected = expected.unwrap().to_dtype(DType::F64).unwrap();
            let difference = max_difference(&gradient.to_dtype(DType::F64).unwrap(), &expected);
            assert!(
                difference <= bound,
                "{name} {dtype:?}: gradient differs by {difference}"
            );
        }
    }
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

/// Lattices with more arcs than a thread keeps weights of, with diagonals that shared memory does not hold, and with log
/// probabilities below those whose exponential 64 bits can hold.
#[test]
fn unusual_lattices_on_a_device() {
    for (durations, states, scale, rnnt) in [
        (vec![0, 1, 2, 3, 4], 40, 1.0, false),
        (vec![4, 0, 1, 2, 3, 9, 5], 40, 1.0, false),
        (vec![0, 15, 1], 230, 1.0, false),
        (vec![0, 1, 1000], 40, 900.0, false),
        (vec![0, 1], 40, 1.0, true),
        // A model of RNN-T.
        (vec![], 40, 1.0, true),
    ] {
        let (frames, tokens) = (20, 4);
        let settings = TdtLoss {
            sigma: 0.05,
            rnnt,
            ..settings(durations.clone())
        };
        let mut noise = Noise::new(5);
        let targets: Vec<Vec<u32>> = [states - 1, 7]
            .iter()
            .map(|len| (0..*len).map(|_| (noise.bits() % (tokens - 1)) as u32).collect())
            .collect();
        let shape = [2, frames, states, tokens as usize + durations.len()];
        let logits = (normal(&shape, &mut noise) * scale)
            .unwrap()
            .to_dtype(DType::F32)
            .unwrap();
        let lengths = [frames, frames - 1];
        let (found, gradient) = DeviceUnderTest::get()
            .run(|device| loss_of_logits(&settings, &logits.to_device(device).unwrap(), &lengths, &targets));
        let exact = logits.to_dtype(DType::F64).unwrap();
        let (expected, expected_gradient) = loss_of_logits(&settings, &exact, &lengths, &targets);
        for (found, expected) in found.iter().zip(&expected) {
            assert!(expected.is_finite());
            assert!(
                (found - expected).abs() <= 1e-7 * expected,
                "{durations:?}: {found} {expected}"
            );
        }
        // Posteriors are of 64 bits, shares of tokens in them of 32: a few of their last places. With logits in the thousands the
        // exponent of a share is the difference of two numbers of 2e-4 in the last place each, but few shares are not 0 or 1 then.
        let bound = if scale > 1.0 { 1e-5 } else { 5e-7 };
        let difference = max_difference(&gradient, &expected_gradient);
        assert!(difference <= bound, "{durations:?}: gradient differs by {difference}");
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
    let (f, g) = (rows(&saved.rows.f), rows(&saved.rows.g));
    let CellSums::Host(host) = &saved.cells else {
        panic!("computed on a device")
    };
    let sums = host
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
    check_fused(
        &[(5, 2), (3, 3)],
        &TdtLoss {
            rnnt: true,
            ..settings(vec![])
        },
        0.2,
        5,
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
        let CellSums::Host(host) = &mut saved.cells else {
            panic!("computed on a device")
        };
        assert!(host.kept.len() == 1 && host.cells.len() > 2 * CHUNK);
        host.kept.truncate(kept);
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

/// On a device, however many cells are computed at once: in f32 as on the CPU. Utterances of different lengths, one without frames
/// and one that cannot be aligned, with dropout.
#[test]
fn chunks_on_a_device_agree_with_the_cpu() {
    let sizes = JointSizes {
        encoder: 8,
        prediction: 8,
        hidden: 16,
        vocabulary: 300,
        durations: 3,
        dropout: 0.1,
    };
    let mut noise = Noise::new(2);
    let single = |shape: &[usize], noise: &mut Noise| normal(shape, noise).to_dtype(DType::F32).unwrap();
    let (encoded, predicted) = (single(&[4, 40, 8], &mut noise), single(&[4, 9, 8], &mut noise));
    let targets = vec![vec![3; 8], vec![299, 0, 7], vec![1, 2], vec![5; 4]];
    let settings = settings(vec![1, 2, 4]);
    let run = |chunk: Option<usize>, device: &Device| {
        let mut builder = ParameterBuilder::random(DType::F32, device.clone(), 1);
        let mut joint = Joint::new(&sizes, "joint", &mut builder).unwrap();
        let (parameters, _) = builder.finish();
        if let Some(chunk) = chunk {
            joint.sizes_on_device = on_device::Sizes {
                chunk,
                chunks_of_hidden: 2,
            };
        }
        let on = |x: &Tensor| x.to_device(device).unwrap();
        let saved = joint
            .loss(
                &parameters,
                &settings,
                (&on(&encoded), &[40, 33, 0, 2]),
                (&on(&predicted), &targets),
                Mode::Train(&mut Noise::new(9)),
            )
            .unwrap();
        let mut gradients = Gradients::new(&parameters);
        let factors = [1.0, 0.5, 1.0, 2.0];
        let d = joint
            .backward(&parameters, &settings, &saved, &factors, false, &mut gradients)
            .unwrap();
        let mut all = vec![d.0.unwrap(), d.1];
        all.extend(gradients.iter().map(|(_, gradient)| gradient.clone()));
        let all: Vec<Vec<f64>> = all.iter().map(values).collect();
        // Cells that do not count, by the operations that a device leaves out.
        let left_out = match &saved.cells {
            CellSums::Host(host) => {
                let active = host
                    .lattices
                    .gradients(&settings, &factors)
                    .active(negligible(DType::F32));
                (host.cells.len() - active.len()) as f64
            }
            CellSums::Device(_) => joint.flops_left_out(&saved) / f64::from(4 * 16 * (301 + 3)),
        };
        (saved.losses, all, left_out)
    };
    let (losses, expected, left_out) = run(None, &Device::Cpu);
    // Those of the utterance that cannot be aligned at least.
    assert!(left_out >= 10.0);
    assert!(losses[0].is_finite() && losses[2] == 0.0 && losses[3] == f64::INFINITY);
    for chunk in [None, Some(64), Some(200)] {
        let (found_losses, found, found_left_out) = DeviceUnderTest::get().run(|device| run(chunk, device));
        assert_eq!(found_left_out, left_out);
        for (found, expected) in found_losses.iter().zip(&losses) {
            assert!(found == expected || (found - expected).abs() <= 1e-6 * expected);
        }
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            let largest = expected.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
            assert!(largest > 0.0 && found.len() == expected.len());
            for (found, expected) in found.iter().zip(expected) {
                assert!(
                    (found - expected).abs() <= 2e-5 * largest,
                    "{chunk:?}: {found}, {expected}"
                );
            }
        }
    }
}

/// Logits in bf16, as NeMo's autocast has them, beside the same in f32: NeMo's cases on the device under test.
///
/// Rounding moves a logit x by 2^-9 |x| at most, so that the log probability of a token or a duration moves by twice that of the
/// largest logit, and an alignment's, which has no more than frames + tokens of each, by that many times four times as much. The
/// loss is a logarithm of a sum over alignments: it moves by no more than the one that moves most. To first order it moves by the
/// sum of gradients times roundings, which mostly cancel each other. Posteriors, of which gradients are made, move by e to the power
/// of such sums, in which roundings mostly cancel each other too: the gradient by so large a share as a rounding is on the whole,
/// their root mean square, or by some of these.
#[test]
fn logits_in_bf16_move_the_loss_by_their_rounding() {
    let cases: serde_json::Value =
        serde_json::from_slice(&std::fs::read(golden::file("tdt_cases.json")).unwrap()).unwrap();
    let tensors = golden::tensors("tdt_cases.safetensors");
    let mut compared = 0;
    for (name, case) in cases.as_object().unwrap() {
        let get = |part: &str| tensors.get(&format!("{name}.{part}")).unwrap();
        let number = |key: &str| case[key].as_f64().unwrap();
        let durations = case["durations"].as_array().unwrap();
        let settings = TdtLoss {
            durations: durations.iter().map(|d| d.as_u64().unwrap() as usize).collect(),
            sigma: number("sigma"),
            fastemit: 0.0,
            clamp: 0.0,
            rnnt: number("omega") == 1.0,
        };
        let (frames, lengths) = (golden::lengths(get("t_len")), golden::lengths(get("u_len")));
        let labels = golden::lengths(&get("labels").flatten_all().unwrap());
        let most = labels.len() / lengths.len();
        let targets: Vec<Vec<u32>> = lengths
            .iter()
            .enumerate()
            .map(|(b, &length)| labels[b * most..][..length].iter().map(|&label| label as u32).collect())
            .collect();
        let logits = get("logits").to_dtype(DType::F32).unwrap();
        let of = |dtype: DType| {
            DeviceUnderTest::get().run(|device| {
                let logits = logits.to_dtype(dtype).unwrap().to_device(device).unwrap();
                loss_of_logits(&settings, &logits, &frames, &targets)
            })
        };
        let (exact, rounded) = (of(DType::F32), of(DType::BF16));
        let numbers = values(&logits);
        let largest = numbers.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
        for (b, (exact, rounded)) in exact.0.iter().zip(&rounded.0).enumerate() {
            let bound = 4.0 * largest / 512.0 * (frames[b] + lengths[b]) as f64;
            assert!(
                exact == rounded || (exact - rounded).abs() <= bound,
                "{name}: {exact} {rounded}, {bound}"
            );
        }
        let (exact_loss, rounded_loss): (f64, f64) = (exact.0.iter().sum(), rounded.0.iter().sum());
        if !exact_loss.is_finite() {
            continue;
        }
        let (exact, rounded) = (values(&exact.1), values(&rounded.1));
        let norm = |of: &dyn Fn(usize) -> f64| (0..exact.len()).map(|i| of(i).powi(2)).sum::<f64>().sqrt();
        let first_order: f64 = exact.iter().zip(&numbers).map(|(g, x)| (g * x).abs() / 512.0).sum();
        let (moved, whole) = (norm(&|i| exact[i] - rounded[i]), norm(&|i| exact[i]));
        let of_logits = values(&logits.to_dtype(DType::BF16).unwrap());
        let squares: f64 = of_logits.iter().zip(&numbers).map(|(a, b)| (a - b).powi(2)).sum();
        let rounding = (squares / numbers.len() as f64).sqrt();
        assert!(
            (rounded_loss - exact_loss).abs() <= 1.1 * first_order + 1e-4 * exact_loss.abs(),
            "{name}"
        );
        assert!(
            moved <= 4.0 * rounding * whole,
            "{name}: {moved} of {whole}, {rounding}"
        );
        compared += 1;
    }
    assert!(compared > 0);
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
