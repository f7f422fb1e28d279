//! The joint network and its loss never hold all logits of a batch.

use std::alloc::System;

use candle_core::{DType, Device, Tensor};
use flow_kernels::Noise;
use flow_model::allocation::{Count, Counted};
use flow_model::joint::{Joint, JointSizes};
use flow_model::loss::TdtLoss;
use flow_model::{Gradients, Mode, ParameterBuilder};

#[global_allocator]
static ALLOCATOR: Counted<System> = Counted(System);

#[test]
fn loss_and_gradients_need_a_small_part_of_the_logits_memory() {
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
