//! Blocks of queries, on the CPU.

use super::step::{AttentionCache, ChunkPositions};
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

/// NeMo's `_create_masks` for `chunked_limited`, word by word: whether a query sees a key.
fn nemos_mask(time: usize, left: i64, right: i64) -> Vec<Vec<bool>> {
    let mut mask = vec![vec![true; time]; time];
    for (i, row) in (0i64..).zip(&mut mask) {
        for (j, sees) in (0i64..).zip(row) {
            if right == -1 {
                if left >= 0 {
                    *sees = j - i >= -left;
                }
            } else {
                let chunk_size = right + 1;
                let left_chunks = if left >= 0 { left / chunk_size } else { 10_000 };
                let difference = i / chunk_size - j / chunk_size;
                *sees = difference <= left_chunks && difference >= 0;
            }
        }
    }
    mask
}

fn chunks(left: i64, right: i64) -> ChunkContext {
    let [left, right] = [left, right].map(|limit| usize::try_from(limit).ok());
    ChunkContext { left, right }
}

#[test]
fn chunks_see_what_nemos_mask_lets_them_see() {
    let rights = [-1, 0, 1, 2, 3, 6, 13, 40];
    for time in [1, 2, 5, 16, 33, 70] {
        for right in rights {
            let lefts = [-1, 0, 1, 2, 3, 5, 8, 20, 69].map(|left| left * (right + 1).max(1));
            for left in lefts.map(|left| left.max(-1)) {
                let context = Context::from(AttentionContext::Chunks(chunks(left, right)));
                let mask = nemos_mask(time, left, right);
                for (i, row) in mask.iter().enumerate() {
                    let seen = context.seen(i, time);
                    let found: Vec<bool> = (0..time).map(|j| seen.contains(&j)).collect();
                    assert_eq!(found, *row, "{time} [{left}, {right}] {i}");
                    assert!(seen.clone().all(|j| i.abs_diff(j) <= context.reach(time)));
                }
                for (queries, keys) in query_blocks(context, time) {
                    for i in queries {
                        let seen = context.seen(i, time);
                        assert!(keys.start <= seen.start && seen.end <= keys.end);
                    }
                }
            }
        }
    }
    // No limit to the left is one of 10,000 chunks.
    let context = Context::from(AttentionContext::Chunks(chunks(-1, 1)));
    assert_eq!(context.seen(20_003, 30_000), 2..20_004);
}

/// Steps, each with what the one before keeps of a recording, against the whole recording; two recordings beside each other.
#[test]
fn steps_give_what_the_whole_gives() {
    let (attention, parameters) = attention();
    let table = PositionTable::new(8);
    for (left, right, times) in [
        (0, 0, [9, 4]),
        (8, 3, [700, 50]),
        (40, 0, [330, 70]),
        (-1, 0, [300, 299]),
        (-1, 3, [701, 4]),
        (-1, 40, [41, 3]),
    ] {
        let context = chunks(left, right);
        let chunk = context.chunk().unwrap();
        let mut noise = Noise::new(11);
        let x = times.map(|time| normal(&[time, 8], &mut noise));
        let most = context.rows_kept();
        let before = most.min(times[0]) + chunk - 1;
        let projected = attention
            .chunk_positions(&parameters, &table, before, chunk - 1)
            .unwrap();
        let positions = ChunkPositions {
            projected: &projected,
            before,
            most,
        };
        let mut caches = [AttentionCache::default(), AttentionCache::default()];
        let mut found = [Vec::new(), Vec::new()];
        for first in (0..times[0]).step_by(chunk) {
            let counts = times.map(|time| time.saturating_sub(first).min(chunk));
            let mut parts = Vec::new();
            let mut of = Vec::new();
            for (x, count) in x.iter().zip(counts).filter(|(_, count)| *count > 0) {
                parts.push(x.narrow(0, first, count).unwrap());
                of.push(count);
            }
            let mut there: Vec<_> = caches.iter_mut().take(of.len()).collect();
            let together = Tensor::cat(&parts, 0).unwrap();
            let y = attention
                .step(&parameters, &together, &of, &mut there, positions)
                .unwrap();
            let mut row = 0;
            for (found, count) in found.iter_mut().zip(of) {
                found.push(y.narrow(0, row, count).unwrap());
                row += count;
            }
        }
        for ((x, time), found) in x.iter().zip(times).zip(found) {
            let frames = Frames {
                batch: 1,
                time,
                lengths: Lengths::new([time]),
                context: AttentionContext::Chunks(context).into(),
            };
            let rows = table.rows(time, DType::F64, &Device::Cpu).unwrap();
            let mode = &mut Mode::Evaluate;
            let (whole, _) = attention.forward(&parameters, x, &rows, &frames, mode).unwrap();
            let worst = max_difference(&Tensor::cat(&found, 0).unwrap(), &whole);
            assert!(worst < 1e-12, "{context} {time}: {worst}");
        }
        for (cache, time) in caches.iter().zip(times) {
            let kept = cache.keys(most).unwrap().map_or(0, |keys| keys.dim(1).unwrap());
            assert_eq!(kept, most.min(time), "{context}");
        }
    }
}
