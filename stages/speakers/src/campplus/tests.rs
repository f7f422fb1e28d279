use flow_kernels::threads::pool;
use half::f16;
use safetensors::SafeTensors;

use super::*;
use crate::fbank::{Fbank, subtract_mean};
use crate::layers::pooling::nearest;
use crate::{formula, golden};

fn network() -> CamPlusPlus {
    CamPlusPlus::bundled().unwrap()
}

fn features(samples: &[f32]) -> Vec<f32> {
    let mut features = Fbank::three_d_speaker().compute(samples).unwrap();
    subtract_mean(&mut features);
    features
}

/// (frames, channels) of what the golden data has as (channels, frames).
fn frames_first(values: &[f32], channels: usize) -> Vec<f32> {
    let frames = values.len() / channels;
    (0..values.len())
        .map(|at| values[at % channels * frames + at / channels])
        .collect()
}

/// Largest difference over the largest value.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = |values: &mut dyn Iterator<Item = f32>| {
        values.fold(0.0f32, |largest, value| {
            if value.is_nan() {
                f32::INFINITY
            } else {
                largest.max(value.abs())
            }
        })
    };
    largest(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / largest(&mut expected.iter().copied())
}

/// Stages, relative to the largest value. Rounded weights move them by up to 3e-3.
const STAGES: f32 = 6e-3;
/// Embeddings, of which the largest value is 1.5. The golden ones were made with weights in f32, of which the bundled ones
/// are rounded to 11 bits: what that moves, `rounding_to_f16_moves_embeddings_as_far_as_the_golden_ones_lie` measures. Of 33 golden ones the farthest lies
/// 0.0112 and a cosine of 0.999985 away.
const ROUNDED: f32 = 0.02;
const COSINE: f64 = 0.99998;

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn assert_embedding(found: &[f32], expected: &[f32], what: &str) {
    let (largest, cosine) = (largest_difference(found, expected), cosine(found, expected));
    assert!(
        cosine > COSINE && largest < ROUNDED,
        "{what}: cosine {cosine}, difference {largest}"
    );
}

/// Stages differ by the rounding of the weights.
#[test]
fn stages_are_those_of_the_original() {
    let tensors = golden::Tensors::load("campplus_real.safetensors");
    let network = network();
    let (_, features) = tensors.floats("speech.fbank_centred");
    let close = |found: &[f32], name: &str| {
        if let Some((shape, expected)) = tensors.find(name) {
            let expected = if shape.len() == 2 {
                frames_first(&expected, shape[0])
            } else {
                expected
            };
            let difference = difference(found, &expected);
            assert!(difference < STAGES, "{name}: {difference}");
        }
    };
    let spare = &mut Spare::default();
    let head = network.head(&features, spare).unwrap();
    let channels_first: Vec<f32> = head
        .values
        .chunks_exact(HEAD)
        .flat_map(|frame| (0..HEAD).map(|at| frame[at % HEAD_BANDS * CHANNELS + at / HEAD_BANDS]))
        .collect();
    close(&channels_first, "head");
    let mut x = network.tdnn(&head, spare).unwrap();
    close(&x, "tdnn");
    let part = |x: &[f32], width: usize, from: usize| -> Vec<f32> {
        x.chunks_exact(width)
            .flat_map(|frame| frame[from..from + 32].iter().copied())
            .collect()
    };
    for (number, block) in network.blocks.iter().enumerate() {
        let width = block.width();
        let dense = block.dense(&x, spare).unwrap();
        if number == 0 {
            close(&part(&dense, width, TDNN), "block1.tdnnd1");
        }
        close(&part(&dense, width, width - 32), &format!("block{}_last32", number + 1));
        x = block.transit(&dense, spare).unwrap();
        // The last one is folded with the norm behind it.
        close(
            &x,
            &if number == 2 {
                "out_nonlinear".into()
            } else {
                format!("transit{}", number + 1)
            },
        );
    }
    close(&statistics(&x, 512), "stats");
    let (_, expected) = tensors.floats("embedding");
    assert_embedding(&network.embedding(&features).unwrap(), &expected, "embedding");
}

#[test]
fn embeddings_of_utterances_are_those_of_the_original() {
    let tensors = golden::Tensors::load("campplus_real.safetensors");
    let network = network();
    let mut compared = 0;
    for (name, samples) in golden::recordings() {
        let Some((shape, expected)) = tensors.find(&format!("{name}.utterance_embeddings")) else {
            continue;
        };
        let (_, utterances) = tensors.integers(&format!("{name}.utterance_samples"));
        let utterances: Vec<Vec<f32>> = utterances
            .chunks_exact(2)
            .map(|bounds| features(&samples[bounds[0] as usize..bounds[1] as usize]))
            .collect();
        for (number, (found, expected)) in network
            .embeddings(&utterances)
            .into_iter()
            .zip(expected.chunks_exact(shape[1]))
            .enumerate()
        {
            assert_embedding(&found.unwrap(), expected, &format!("{name} {number}"));
            compared += 1;
        }
    }
    assert!(compared > 0);
}

/// Frames of the first ten seconds of a recording that a mask chooses, after their mean is subtracted.
#[test]
fn embeddings_of_chosen_frames_are_those_of_the_original() {
    let tensors = golden::Tensors::load("campplus_real.safetensors");
    let Some((shape, masks)) = golden::Tensors::load("wespeaker_stages.safetensors").find("masks") else {
        golden::not_compared("embeddings of chosen frames", "the golden data have no masks");
        return;
    };
    let network = network();
    // Embeddings by the numbers of their masks, with how many frames these chose.
    let expected: Vec<(usize, i64, Vec<f32>)> = (0..shape[0])
        .filter_map(|number| {
            let (_, embedding) = tensors.find(&format!("frames_mask{number}_embedding"))?;
            let (_, count) = tensors.integers(&format!("frames_mask{number}_count"));
            Some((number, count[0], embedding))
        })
        .collect();
    let of_part = |samples: &[f32]| -> Vec<(i64, Vec<f32>)> {
        let features = features(samples);
        let of_mask = |&(number, ..): &(usize, i64, Vec<f32>)| {
            let mask = &masks[number * shape[1]..][..shape[1]];
            let chosen: Vec<f32> = features
                .chunks_exact(BANDS)
                .zip(nearest(mask, features.len() / BANDS))
                .filter(|(_, weight)| *weight > 0.5)
                .flat_map(|(frame, _)| frame.iter().copied())
                .collect();
            let frames = chosen.len() / BANDS;
            (frames as i64, network.embedding(&chosen).unwrap())
        };
        expected.iter().map(of_mask).collect()
    };
    let is_of = |found: &Vec<(i64, Vec<f32>)>| {
        let mut pairs = found.iter().zip(&expected);
        pairs.any(|((_, found), (.., expected))| cosine(found, expected) > 0.99)
    };
    let parts = golden::parts(160_000, usize::MAX).map(|samples| of_part(&samples));
    let Some(found) = parts.into_iter().find(is_of) else {
        golden::not_compared("embeddings of chosen frames", "no recording of the folder has them");
        return;
    };
    for ((frames, found), (number, count, expected)) in found.iter().zip(&expected) {
        assert_eq!(frames, count, "mask {number}");
        assert_embedding(found, expected, &format!("mask {number}"));
    }
}

/// The bundled weights in f32, each moved within what f16 rounds to it: weights that could have been rounded to them.
fn unrounded(seed: u64) -> CamPlusPlus {
    let bytes = unpack(BUNDLED, 2).unwrap();
    let mut state = seed;
    let mut moved = |value: f16| -> f32 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let part = (state >> 40) as f32 / (1 << 24) as f32 - 0.5;
        let next = f16::from_bits(value.to_bits() + 1).to_f32();
        value.to_f32() + part * (next - value.to_f32())
    };
    let tensors: formula::Tensors = SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|(name, tensor)| {
            let values = tensor
                .data()
                .as_chunks()
                .0
                .iter()
                .map(|&value| moved(f16::from_le_bytes(value)));
            (name, (tensor.shape().to_vec(), values.collect()))
        })
        .collect();
    CamPlusPlus::from_safetensors(&formula::file(&tensors)).unwrap()
}

/// Whether the distance of the golden embeddings is that of rounding, and of nothing else: networks whose weights round to
/// the bundled ones are as far from them.
#[test]
fn rounding_to_f16_moves_embeddings_as_far_as_the_golden_ones_lie() {
    let tensors = golden::Tensors::load("campplus_real.safetensors");
    let (_, features) = tensors.floats("speech.fbank_centred");
    let (_, golden) = tensors.floats("embedding");
    let found = network().embedding(&features).unwrap();
    let distance = |other: &[f32]| 1.0 - cosine(&found, other);
    let moved: Vec<f64> = (1..=3)
        .map(|seed| distance(&unrounded(seed).embedding(&features).unwrap()))
        .collect();
    let mean = moved.iter().sum::<f64>() / moved.len() as f64;
    let golden = distance(&golden);
    assert!(golden < 4.0 * mean && mean < 1.0 - COSINE, "{golden}, {moved:?}");
}

fn noise(frames: usize, seed: usize) -> Vec<f32> {
    (0..frames * BANDS)
        .map(|at| ((at * 7919 + seed * 104_729) % 2003) as f32 / 200.0 - 5.0)
        .collect()
}

#[test]
fn embeddings_have_the_same_bits_in_any_company_and_on_any_threads() {
    let network = network();
    let all: Vec<Vec<f32>> = [3, 4, 30, 97, 201, 203, 450].map(|frames| noise(frames, frames)).into();
    let alone: Vec<Vec<f32>> = all.iter().map(|one| network.embedding(one).unwrap()).collect();
    assert!(alone.iter().all(|one| one.len() == DIMENSION));
    for threads in [1, 2, 5] {
        let together = pool("test", threads).unwrap().install(|| network.embeddings(&all));
        for (together, alone) in together.into_iter().zip(&alone) {
            assert_eq!(&together.unwrap(), alone, "{threads} threads");
        }
    }
}

#[test]
fn features_that_cannot_be_are_refused() {
    let network = network();
    for features in [vec![], vec![0.0; BANDS * 2], vec![0.0; BANDS * 40 + 1]] {
        assert!(matches!(network.embedding(&features), Err(Error::Input(_))));
    }
    for value in [f32::NAN, f32::INFINITY, -2e3] {
        let mut features = noise(40, 1);
        features[777] = value;
        assert!(
            network
                .embedding(&features)
                .unwrap_err()
                .to_string()
                .contains("feature 777")
        );
    }
    // One that is refused does not hold up the others; what is silent has an embedding.
    let found = network.embeddings(&[vec![0.0; BANDS * 40], vec![f32::NAN; BANDS * 40], vec![1e3; BANDS * 3]]);
    assert_eq!(found.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true]);
}

#[test]
fn weights_that_cannot_be_are_refused() {
    assert!(matches!(
        CamPlusPlus::from_safetensors(b"{}").err(),
        Some(Error::Weights(_))
    ));
    let bytes = unpack(BUNDLED, 2).unwrap();
    assert!(CamPlusPlus::from_safetensors(&bytes[..bytes.len() - 2]).is_err());
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let missing = "xvector.block2.tdnnd7.cam_layer.linear1.bias";
    let kept = tensors.tensors().into_iter().filter(|(name, _)| name != missing);
    let without = safetensors::serialize(kept, None).unwrap();
    assert!(
        CamPlusPlus::from_safetensors(&without)
            .err()
            .unwrap()
            .to_string()
            .contains(missing)
    );
}
