//! Blocks of queries, on the CPU.

use super::*;
use crate::config::CausalConfig;
use flow_kernels::testing::{max_difference, normal};
use flow_kernels::{Lengths, Noise};

fn attention() -> (Attention, Parameters) {
    let config = EncoderConfig {
        feat_in: 8,
        n_layers: 1,
        d_model: 8,
        use_bias: true,
        subsampling_conv_channels: 4,
        ff_expansion_factor: 2,
        n_heads: 2,
        attention_context: AttentionContext::Full,
        xscaling: false,
        conv_kernel_size: 3,
        causal: CausalConfig::default(),
        dropout: 0.0,
        dropout_pre_encoder: 0.0,
        dropout_emb: 0.0,
        dropout_att: 0.0,
    };
    let mut builder = ParameterBuilder::random(DType::F64, Device::Cpu, 3);
    let attention = Attention::new("attention", &config, &mut builder).unwrap();
    (attention, builder.finish().0)
}

/// Output, gradient of the input and of each parameter.
fn run(attention: &Attention, parameters: &Parameters, context: Context, time: usize) -> (Vec<Tensor>, Saved) {
    let frames = Frames {
        batch: 3,
        time,
        lengths: Lengths::new([time, time / 2, 1]),
        context,
    };
    let mut noise = Noise::new(11);
    let x = normal(&[3 * time, 8], &mut noise);
    let dy = normal(&[3 * time, 8], &mut noise);
    let positions = PositionTable::new(8).rows(time, DType::F64, &Device::Cpu).unwrap();
    let mode = &mut Mode::Evaluate;
    let (y, saved) = attention.forward(parameters, &x, &positions, &frames, mode).unwrap();
    let mut gradients = Gradients::new(parameters);
    let mut sums = PendingSums::default();
    let dx = attention
        .backward(parameters, &saved, &frames, &dy, &mut gradients, &mut sums)
        .unwrap();
    let kept = sums.complete(parameters, &mut gradients).unwrap();
    attention
        .backward_positions(parameters, &saved, &kept, &mut gradients)
        .unwrap();
    let mut all = vec![y, dx];
    all.extend(parameters.iter().filter_map(|(id, _)| gradients.get(id).cloned()));
    (all, saved)
}

fn blocks(saved: &Saved) -> &[SavedBlock] {
    match &saved.way {
        Way::Blocks { blocks, .. } => blocks,
        Way::Fused { .. } => panic!("the CPU has no kernel for it"),
    }
}

#[test]
fn blocks_of_queries_give_what_all_queries_at_once_give() {
    let bands = [(1, 40), (5, 64), (7, 33), (8, 25), (16, 49), (3, 16), (0, 20)];
    let bands = bands.map(|(width, time)| (Context::Band(width), width, time));
    let chunks = [(1, 3, 40), (4, 2, 45), (7, 0, 33), (3, 9, 100), (50, 1, 20)];
    let chunks = chunks.map(|(size, left, time)| (Context::Chunks { size, left }, size * left, time));
    let (mut attention, parameters) = attention();
    for (context, beside, time) in bands.into_iter().chain(chunks) {
        attention.whole = false;
        let (found, saved) = run(&attention, &parameters, context, time);
        assert_eq!(
            blocks(&saved).len() > 1,
            queries_together(context) + beside < time,
            "{context:?} {time}"
        );
        attention.whole = true;
        let (expected, saved) = run(&attention, &parameters, context, time);
        assert_eq!((blocks(&saved).len(), found.len()), (1, expected.len()));
        for (found, expected) in found.iter().zip(&expected) {
            let worst = max_difference(found, expected);
            assert!(worst < 1e-12, "{context:?} {time}: {worst}");
        }
    }
}

#[test]
fn limited_context_keeps_memory_that_grows_with_the_frames() {
    let (attention, parameters) = attention();
    let kept = |time: usize| {
        let (_, saved) = run(&attention, &parameters, Context::Band(4), time);
        let weights: usize = blocks(&saved).iter().map(|block| block.weights.elem_count()).sum();
        weights + saved.projected.elem_count() + saved.positions.elem_count()
    };
    let (short, long) = (kept(160), kept(1600));
    assert!(long < 11 * short, "{short} {long}");
}
