//! The memory of the joint network and of decoding, as the allocator counts it.

use std::alloc::System;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use flow_kernels::Noise;
use flow_model::allocation::{Count, Counted};
use flow_model::checkpoint::OpenModel;
use flow_model::decoding_memory::{batch_bytes, weight_bytes};
use flow_model::joint::{Joint, JointSizes};
use flow_model::loss::TdtLoss;
use flow_model::model::TdtModel;
use flow_model::{Gradients, Mode, ParameterBuilder, Precision, Weights};

#[global_allocator]
static ALLOCATOR: Counted<System> = Counted(System);

/// What all threads allocate is counted.
static COUNTED: Mutex<()> = Mutex::new(());

/// The joint network and its loss never hold all logits of a batch.
#[test]
fn loss_and_gradients_need_a_small_part_of_the_logits_memory() {
    let _alone = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    let (batch, frames, tokens, vocabulary, width) = (4, 60, 100, 4096, 32);
    let mut builder = ParameterBuilder::random(DType::F32, Device::Cpu, 1);
    let sizes = JointSizes {
        encoder: width,
        prediction: width,
        hidden: width,
        vocabulary,
        durations: 5,
        dropout: 0.1,
    };
    let joint = Joint::new(&sizes, "joint", &mut builder).unwrap();
    let (parameters, _) = builder.finish();
    let encoded = Tensor::ones((batch, frames, width), DType::F32, &Device::Cpu).unwrap();
    let predicted = Tensor::ones((batch, tokens + 1, width), DType::F32, &Device::Cpu).unwrap();
    let targets: Vec<Vec<u32>> = vec![(0..tokens as u32).collect(); batch];
    let settings = TdtLoss {
        durations: vec![0, 1, 2, 3, 4],
        sigma: 0.02,
        fastemit: 0.0,
        clamp: -1.0,
        rnnt: false,
    };
    let mut gradients = Gradients::new(&parameters);
    let count = Count::begin().expect("nobody else counts");
    assert!(Count::begin().is_none(), "one at a time");
    let loss = joint
        .loss(
            &parameters,
            &settings,
            (&encoded, &[frames; 4]),
            (&predicted, &targets),
            Mode::Train(&mut Noise::new(1)),
        )
        .unwrap();
    joint
        .backward(&parameters, &settings, &loss, &[0.25; 4], false, &mut gradients)
        .unwrap();
    let most = count.most() as usize;
    // 397 MB of logits. What is kept of them has a fixed limit of 32 MiB; the rest are some chunks of 512 cells (8 MB
    // each) and some hundred bytes per cell.
    let logits = batch * frames * (tokens + 1) * (vocabulary + 6) * 4;
    assert!(most > 1 << 20, "nothing was counted");
    assert!(most * 5 < logits, "{most} bytes beside {logits} of logits");
}

#[test]
fn the_memory_of_decoding_is_that_of_the_whole_model() {
    let _alone = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/small.nemo");
    for (weights, precision) in [
        (Weights::F32, Precision::F32),
        (Weights::Bf16, Precision::F32),
        (Weights::F32, Precision::Int8),
    ] {
        let open = || OpenModel::open(&path).unwrap();
        let counted = Count::begin().expect("nobody else counts");
        let model = TdtModel::load_for_decoding(&path, weights.into(), precision, &Device::Cpu).unwrap();
        let held = counted.held() as f64;
        drop(counted);
        // Beside its tensors a model has a tokenizer and tables, whatever its size.
        let predicted = weight_bytes(&open(), weights, precision) as f64;
        assert!(
            (0.0..4e6).contains(&(held - predicted)),
            "{predicted} predicted, {held} held"
        );
        // The longest windows need most in one case, the shortest ones in the other.
        for (window, batch) in [(20.0, 60.0), (2.0, 90.0)] {
            let predicted = batch_bytes(open(), weights, precision, window, batch).unwrap().unwrap();
            let of = |seconds: f64| {
                let signal = vec![0.1; (16_000.0 * seconds) as usize];
                let signals = vec![&signal[..]; (batch / seconds) as usize];
                let counted = Count::begin().expect("nobody else counts");
                model.transcribe(&signals).unwrap();
                counted.most()
            };
            let (needed, predicted) = (of(1.0).max(of(window)) as f64, predicted as f64);
            assert!(
                (0.95..1.1).contains(&(predicted / needed)),
                "{weights:?}, {precision:?}, {window} s: {predicted} predicted, {needed} needed"
            );
        }
    }
}
