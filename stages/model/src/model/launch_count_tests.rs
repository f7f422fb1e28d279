//! How many kernels a training step launches, and how often it copies between host and device, part by part. The numbers
//! are those of docs/gpu.md; they may only fall.

use std::collections::BTreeMap;
use std::fmt::Write;

use candle_core::{DType, Device};
use flow_cuda_emulator::DeviceUnderTest;
use flow_cuda_emulator::cublaslt::{self as stand_in, Counted};
use flow_kernels::counts::{Counts, counted, so_far};
use flow_kernels::testing::values;

use super::{MicroBatch, TdtModel, TrainOptions};
use crate::pass_parts::{PartObserver, PassPart};
use crate::testing::golden;
use flow_nn::parameters::Gradients;

/// The most launches, copies to the device and copies to the host of one run of each part, for two utterances of three
/// tokens each, a model of two layers of encoder and of LSTM, and dropout everywhere.
const MOST: [(PassPart, [usize; 3]); 8] = [
    // Samples with a table of them, and four tables that are copied once.
    (PassPart::Features, [3, 5, 0]),
    // Lengths of all stages; and the table of positions, which is copied once.
    (PassPart::SubsamplingForward, [7, 2, 0]),
    // The norm that ends a layer is in one launch with the one that begins the next, and counts there.
    (PassPart::LayerForward, [10, 0, 0]),
    // For each layer one for all steps, and one.
    (PassPart::PredictionForward, [4, 1, 0]),
    // With one chunk of cells: 1 for each chunk forward, and 1 backward; for some chunks 1 forward and 2 backward; 9 beside. Tables
    // of lattices, and factors of the losses; losses, with how many cells count.
    (PassPart::JointAndLoss, [14, 2, 1]),
    (PassPart::PredictionBackward, [8, 0, 0]),
    (PassPart::LayerBackward, [11, 0, 0]),
    (PassPart::SubsamplingBackward, [11, 0, 0]),
];

/// What each part of a training step launches and copies, for each time that it runs.
fn parts_of_a_step(
    model: &mut TdtModel,
    batch: &MicroBatch,
    gradients: &mut Gradients,
) -> BTreeMap<PassPart, Vec<Counts>> {
    let mut parts: BTreeMap<PassPart, Vec<Counts>> = BTreeMap::new();
    let (loss, _) = counted(|| {
        let mut before = Counts::default();
        let mut observer = PartObserver::new(|part| {
            let now = so_far();
            parts.entry(part).or_default().push(now.since(&before));
            before = now;
        });
        let options = TrainOptions::default();
        let output = model.train_micro_batch_observed(batch, &options, gradients, &mut observer);
        output.unwrap().loss
    });
    assert!(loss.is_finite());
    parts
}

#[test]
fn a_step_launches_no_more_than_it_did() {
    let mut config = golden::model().0;
    // The network that the numbers are of, whatever the golden one is.
    config.encoder.n_layers = 2;
    config.encoder.use_bias = false;
    config.encoder.xscaling = false;
    config.transducer.as_mut().unwrap().prediction.pred_rnn_layers = 2;
    config.encoder.dropout = 0.1;
    config.encoder.dropout_pre_encoder = 0.1;
    config.encoder.dropout_att = 0.1;
    config.transducer.as_mut().unwrap().prediction.dropout = 0.2;
    config.transducer.as_mut().unwrap().joint.dropout = 0.2;
    let batch = MicroBatch {
        signals: vec![golden::wave("train", 0)[..8_000].to_vec(); 2],
        tokens: vec![vec![3, 5, 7]; 2],
        prompts: Vec::new(),
    };
    let step = |device: &Device| {
        let mut model = TdtModel::new(config.clone(), None, 3, DType::F32, device).unwrap();
        let mut gradients = Gradients::new(&model.parameters);
        parts_of_a_step(&mut model, &batch, &mut gradients)
    };
    let parts = DeviceUnderTest::get().run(step);
    let (mut table, mut too_many) = (String::new(), false);
    for (part, most) in MOST {
        let runs = &parts[&part];
        assert_eq!(
            runs.len(),
            if matches!(part, PassPart::LayerForward | PassPart::LayerBackward) {
                2
            } else {
                1
            }
        );
        for run in runs {
            let found = [run.launches(), run.to_device.count, run.to_host.count];
            too_many |= found.iter().zip(most).any(|(found, most)| *found > most);
            let _ = writeln!(table, "{part}: {found:?}, at most {most:?}; {:?}", run.kernels);
        }
    }
    // Of two layers: one norm that is not shared forward, and one backward.
    for (part, most) in [
        (PassPart::LayerForward, 2 * 9 + 1),
        (PassPart::LayerBackward, 2 * 10 + 1),
    ] {
        too_many |= parts[&part].iter().map(Counts::launches).sum::<usize>() > most;
    }
    assert!(
        !too_many,
        "launches, copies to the device, copies to the host:\n{table}"
    );
    // Every kernel is seen here, or nothing is.
    assert!(parts[&PassPart::LayerBackward][0].launches() > 8, "{table}");
}

/// The loss of a CTC head is computed where the logits are: what comes back to the host are the losses of both utterances.
#[test]
fn a_step_with_a_ctc_head_launches_no_more_than_it_did() {
    let batch = MicroBatch {
        signals: vec![golden::wave("train", 0)[..8_000].to_vec(); 2],
        tokens: vec![vec![3, 5, 7]; 2],
        prompts: Vec::new(),
    };
    let parts = DeviceUnderTest::get().run(|device| {
        let path = golden::file_of("ctc", "model.nemo");
        let mut model = TdtModel::load(&path, DType::F32, device).unwrap();
        let mut gradients = Gradients::new(&model.parameters);
        parts_of_a_step(&mut model, &batch, &mut gradients)
    });
    let [head] = &parts[&PassPart::JointAndLoss][..] else {
        panic!("one head")
    };
    // Bias; the loss; two for the sums of the bias's gradient. Tables of targets, and factors of the losses.
    let found = [head.launches(), head.to_device.count, head.to_host.count];
    assert!(
        found.iter().zip([6, 2, 1]).all(|(found, most)| *found <= most),
        "{head:?}"
    );
    assert_eq!(head.to_host.bytes, 2 * 8);
}

/// Gradients that nothing asks for are not computed, and the others are what they are otherwise, to the bit: of a frozen
/// prediction network, and of convolution modules whose convolutions are frozen.
#[test]
fn what_is_frozen_is_not_computed() {
    let batch = MicroBatch {
        signals: vec![golden::wave("train", 0)[..8_000].to_vec(); 2],
        tokens: vec![vec![3, 5, 7]; 2],
        prompts: Vec::new(),
    };
    let is_frozen =
        |name: &str| name.starts_with("decoder.") || name.contains("depthwise_conv") || name.contains("pointwise_conv");
    let step = |device: &Device, freeze: bool| {
        let mut model = TdtModel::load(&golden::file("model.nemo"), DType::F32, device).unwrap();
        let mut gradients = Gradients::new(&model.parameters);
        let named: Vec<_> = model.parameters.iter().map(|(id, of)| (id, of.name.clone())).collect();
        let frozen = named.iter().filter(|(_, name)| freeze && is_frozen(name));
        frozen.for_each(|&(id, _)| gradients.freeze(id));
        let parts = parts_of_a_step(&mut model, &batch, &mut gradients);
        let found: BTreeMap<String, Vec<f64>> = named
            .into_iter()
            .filter(|(_, name)| !is_frozen(name))
            .filter_map(|(id, name)| Some((name, values(gradients.get(id)?))))
            .collect();
        let count = gradients.iter().count();
        (parts, found, count)
    };
    let products =
        |parts: &BTreeMap<PassPart, Vec<Counts>>, part| parts[&part].iter().map(|of| of.products).sum::<usize>();
    let on_device = |freeze: bool| DeviceUnderTest::get().run(|device| step(device, freeze));
    for (whole, frozen, of_device) in [
        (on_device(false), on_device(true), true),
        (step(&Device::Cpu, false), step(&Device::Cpu, true), false),
    ] {
        assert!(frozen.1.len() > 20 && frozen.1 == whole.1 && frozen.2 < whole.2);
        let prediction = PassPart::PredictionBackward;
        assert_eq!(
            (products(&frozen.0, prediction), frozen.0[&prediction][0].launches()),
            (0, 0)
        );
        // Two products of each layer.
        let layers = PassPart::LayerBackward;
        let fewer = 2 * frozen.0[&layers].len();
        assert_eq!(products(&frozen.0, layers), products(&whole.0, layers) - fewer);
        assert!(!of_device || whole.0[&prediction][0].launches() > 0);
    }
}

/// Launches beside these kernels, of a layer whose matrices are in bf16: products, forward and backward, and changes of a
/// factor's number type before them. The second micro-batch adds to the gradients of the first.
#[test]
fn products_of_a_layer_take_their_factors_as_they_are() {
    let step = |device: &Device| {
        let path = golden::file("model.nemo");
        let mut model = TdtModel::load_storing(&path, DType::F32, DType::BF16, device).unwrap();
        let batch = MicroBatch {
            signals: vec![golden::wave("train", 0)[..8_000].to_vec(); 2],
            tokens: vec![vec![3, 5, 7]; 2],
            prompts: Vec::new(),
        };
        let mut gradients = Gradients::new(&model.parameters);
        [(); 2].map(|()| parts_of_a_step(&mut model, &batch, &mut gradients))
    };
    let [first, second] = DeviceUnderTest::get().run(step);
    for parts in [&first, &second] {
        // Of feed-forward modules 2 and 2, of the convolution 2, of attention 3. Backward twice as many, but for the positions,
        // whose gradient is not asked for.
        for (part, products, conversions) in [(PassPart::LayerForward, 9, 0), (PassPart::LayerBackward, 17, 1)] {
            for run in &parts[&part] {
                assert_eq!((run.products, run.conversions), (products, conversions), "{part}");
            }
        }
    }
    // Gradients are added by the products, and by the kernel that adds up sums over rows.
    let launches = |parts: &BTreeMap<PassPart, Vec<Counts>>| {
        parts[&PassPart::LayerBackward]
            .iter()
            .map(Counts::launches)
            .collect::<Vec<_>>()
    };
    assert_eq!(launches(&first), launches(&second));
    // The gradient of the joint network's last weight is added by a kernel, as rows of zeros are taken off it.
    let joint = |parts: &BTreeMap<PassPart, Vec<Counts>>| parts[&PassPart::JointAndLoss][0].launches();
    assert_eq!(joint(&first) + 1, joint(&second));
}

/// Where cuBLASLt is there, it computes all products of a step, and adds the biases of linear layers. A second micro-batch adds to
/// the gradients of the first.
#[test]
fn products_are_those_of_cublaslt() {
    let device = DeviceUnderTest::get();
    if !device.is_emulated() {
        return;
    }
    let mut config = golden::model().0;
    config.encoder.use_bias = true;
    let batch = MicroBatch {
        signals: vec![golden::wave("train", 0)[..8_000].to_vec(); 2],
        tokens: vec![vec![3, 5, 7]; 2],
        prompts: Vec::new(),
    };
    let mut in_f32: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let furthest = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0f64, f64::max);
    for stored in [DType::F32, DType::BF16] {
        let steps = |device: &Device| {
            let model = TdtModel::new(config.clone(), None, 3, DType::F32, device).unwrap();
            let mut model = model.stored_as(stored).unwrap();
            let mut gradients = Gradients::new(&model.parameters);
            let run = || {
                [(); 2].map(|()| {
                    let options = TrainOptions::default();
                    model.train_micro_batch(&batch, &options, &mut gradients).unwrap().loss
                })
            };
            let (losses, counts) = counted(run);
            let name = |id| {
                model
                    .parameters
                    .iter()
                    .find(|(of, _)| *of == id)
                    .unwrap()
                    .1
                    .name
                    .clone()
            };
            let gradients: BTreeMap<_, _> = gradients.iter().map(|(id, of)| (name(id), values(of))).collect();
            (losses, gradients, counts)
        };
        let (losses, gradients, counts) = device.run(steps);
        let before = stand_in::count(Counted::Products);
        let (by_library, found, of_library) = stand_in::with(|| device.run(steps));
        let products = stand_in::count(Counted::Products) - before;
        assert_eq!(
            (of_library.products, products),
            (counts.products, counts.products as u64),
            "{stored:?}"
        );
        // Tensor cores are fed by 16 bytes.
        assert!(stand_in::count(Counted::Aligned) >= 16);
        let added = |counts: &Counts| counts.kernels.get("add_bias").copied().unwrap_or(0);
        assert!(added(&counts) > 20 && added(&of_library) == 0);
        assert_eq!(of_library.launches(), counts.launches() - added(&counts));
        for (a, b) in losses.iter().zip(by_library) {
            assert!((a - b).abs() <= 1e-5 * a.abs(), "{stored:?}: {a}, {b}");
        }
        assert!(gradients.len() > 20);
        // Whatever the parameters are, these gradients are zero: what a bias adds to all frames batch normalisation takes off again,
        // and what one adds to all keys the softmax. Sums in 32 bits leave their rounding. The gradients of a query's scores have the
        // sum 0, but rounded to bf16 for the product with the queries, as autocast rounds them too, up to 2^-9 of each is left.
        let vanishes = |name: &str| {
            let of_keys = name.ends_with("linear_k.bias");
            let bound = if of_keys && stored == DType::BF16 {
                16.0 / 512.0
            } else {
                1e-4
            };
            (of_keys || name.ends_with("depthwise_conv.bias")).then_some(bound)
        };
        let norm = |of: &[f64]| of.iter().map(|value| value * value).sum::<f64>().sqrt();
        let mut vanishing = 0;
        for ((name, expected), (of, found_values)) in gradients.iter().zip(&found) {
            assert_eq!((name, expected.len()), (of, found_values.len()));
            if let Some(bound) = vanishes(name) {
                let weight = name.replace(".bias", ".weight");
                for all in [&gradients, &found] {
                    let (own, scale) = (norm(&all[name]), norm(&all[&weight]));
                    assert!(
                        own <= bound * scale,
                        "{stored:?}: {name}: {own}, and {scale} of the weight"
                    );
                }
                vanishing += 1;
                continue;
            }
            let largest = expected.iter().fold(1e-3f64, |most, value| most.max(value.abs()));
            // The stand-in adds up in 64 bits, the other side in 32, so factors and logits halfway between two numbers of bf16 may
            // be rounded to either. Those are few: what they change is a part of what all roundings change, which is the difference
            // from 32 bits. Where gradients are small differences of large numbers, as before the softmax, it is most of them.
            let bound = match in_f32.get(name) {
                None => 2e-5 * largest,
                Some(exact) => f64::max(2e-2 * largest, furthest(expected, exact) / 4.0),
            };
            let far = furthest(expected, found_values);
            assert!(far <= bound, "{stored:?}: {name}: {far} of {largest}, {bound}");
        }
        if stored == DType::F32 {
            in_f32 = gradients;
        }
        assert_eq!(vanishing, 2 * config.encoder.n_layers);
    }
}
