use flow_kernels::threads::pool;

use super::*;
use crate::fbank::{Fbank, subtract_mean};
use crate::formula::{file, tensors};
use crate::golden;

const FORMULA: &str = "wespeaker_formula.json";

/// Stages relative to the largest value: f32 against f64 moved nothing by more than 1e-6 of it, and the transforms of the
/// convolutions cost some five times that.
const STAGES: f32 = 1e-4;
/// Embeddings, of which the largest value is 39.
const EMBEDDINGS: f32 = 2e-3;

fn network() -> WeSpeakerResNet34 {
    WeSpeakerResNet34::from_safetensors(&file(&tensors(FORMULA))).unwrap()
}

fn features(samples: &[f32]) -> Vec<f32> {
    let mut features = Fbank::wespeaker().compute(samples).unwrap();
    subtract_mean(&mut features);
    features
}

fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |largest, value| {
        if value.is_nan() {
            f32::INFINITY
        } else {
            largest.max(value.abs())
        }
    })
}

fn assert_close(found: &[f32], expected: &[f32], bound: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let difference = largest(found.iter().zip(expected).map(|(a, b)| a - b));
    assert!(difference < bound, "{what}: {difference}");
}

/// The first channels of a map as the golden data has it, (channels, bands, frames).
fn channels_first(x: &FeatureMap, channels: usize) -> Vec<f32> {
    let mut values = Vec::new();
    for channel in 0..channels {
        for band in 0..x.bands {
            values.extend((0..x.frames).map(|frame| x.at(frame, band)[channel]));
        }
    }
    values
}

#[test]
fn stages_are_those_of_the_original() {
    let tensors = golden::Tensors::load("wespeaker_stages.safetensors");
    let network = network();
    let (_, embedding) = tensors.floats("stage.embedding");
    // Of the seven tenths of a second that these stages are of.
    let features = golden::parts(11_200, 5_000)
        .map(|samples| features(&samples))
        .find(|features| {
            let found = network.embedding(features).unwrap();
            golden::alike(&found, &embedding, EMBEDDINGS)
        });
    let Some(features) = features else {
        golden::lacks("stages of WeSpeaker", "no recording of the folder has this embedding");
        return;
    };
    // A name may end with the first and the last channel: `layer2_channels_0_15`.
    let stages: Vec<(String, String)> = tensors
        .names()
        .into_iter()
        .filter_map(|full| {
            let name = full.strip_prefix("stage.")?;
            Some((name.split("_channels_").next()?.to_owned(), full.clone()))
        })
        .collect();
    let close = |x: &FeatureMap, name: &str| {
        if let Some((_, full)) = stages.iter().find(|(stage, _)| stage == name) {
            let (shape, expected) = tensors.floats(full);
            assert_eq!((x.bands, x.frames), (shape[1], shape[2]), "{name}");
            let bound = STAGES * largest(expected.iter().copied());
            assert_close(&channels_first(x, shape[0]), &expected, bound, name);
        }
    };
    let mut spare = Spare::default();
    let mut x = network.stem(&features, &mut spare).unwrap();
    close(&x, "stem");
    let mut blocks = network.blocks.iter();
    for (layer, count) in (1..).zip(BLOCKS) {
        for (number, block) in blocks.by_ref().take(count).enumerate() {
            let next = block.apply(&x, &mut spare).unwrap();
            spare.give(std::mem::replace(&mut x, next));
            if (layer, number) == (1, 0) {
                close(&x, "layer1_0");
            }
        }
        close(&x, &format!("layer{layer}"));
    }
    if let Some((_, expected)) = tensors.find("stage.stats") {
        let found = statistics(&x.values, FRAME);
        let found: Vec<f32> = found
            .chunks_exact(FRAME)
            .flat_map(|part| (0..FRAME).map(|at| part[at % LAST_BANDS * CHANNELS[3] + at / LAST_BANDS]))
            .collect();
        assert_close(&found, &expected, STAGES * largest(expected.iter().copied()), "stats");
    }
    assert_close(
        &network.embedding(&features).unwrap(),
        &embedding,
        EMBEDDINGS,
        "embedding",
    );
}

/// Of the first ten seconds of a recording.
#[test]
fn masked_embeddings_are_those_of_the_original() {
    let tensors = golden::Tensors::load("wespeaker_stages.safetensors");
    let (Some((_, whole)), Some((_, masked)), Some((shape, masks))) = (
        tensors.find("tenseconds.no_mask"),
        tensors.find("tenseconds.masked"),
        tensors.find("masks"),
    ) else {
        golden::not_compared("masked embeddings", "the golden data have none");
        return;
    };
    let network = network();
    let parts = golden::parts(160_000, usize::MAX).map(|samples| features(&samples));
    let found = parts
        .map(|features| (network.embedding(&features).unwrap(), features))
        .find(|(found, _)| golden::alike(found, &whole, EMBEDDINGS));
    let Some((found, features)) = found else {
        golden::not_compared("masked embeddings", "no recording of the folder has this embedding");
        return;
    };
    assert_close(&found, &whole, EMBEDDINGS, "no mask");
    let zero = vec![0.0; shape[1]];
    let masks: Vec<&[f32]> = masks.chunks_exact(shape[1]).chain([&zero[..]]).collect();
    let found = network.embeddings(&features, &masks).unwrap();
    for (number, (found, expected)) in found.iter().zip(masked.chunks_exact(DIMENSION)).enumerate() {
        assert_close(found, expected, EMBEDDINGS, &format!("mask {number}"));
    }
    if let Some((_, expected)) = tensors.find("tenseconds.zero_mask") {
        assert_close(&found[shape[0]], &expected, EMBEDDINGS, "zero mask");
    }
}

#[test]
fn embeddings_have_the_same_bits_in_any_company_and_on_any_threads() {
    let network = network();
    let features: Vec<f32> = (0..150 * BANDS)
        .map(|at| (at * 7919 % 2003) as f32 / 200.0 - 5.0)
        .collect();
    let masks: [&[f32]; 3] = [&[1.0, 0.0, 0.5], &[0.0], &[1.0; 40]];
    let on = |threads: usize| {
        pool("test", threads).unwrap().install(|| {
            let together = network.embeddings(&features, &masks).unwrap();
            for (mask, together) in masks.iter().zip(&together) {
                assert_eq!(network.embeddings(&features, &[mask]).unwrap()[0], *together);
            }
            (together, network.embedding(&features).unwrap())
        })
    };
    let one = on(1);
    assert_eq!(one, on(2));
    assert_eq!(one, on(5));
    // Weights that are all one leave the mean as it is, but not the deviation, whose divisor is computed otherwise.
    assert_close(&one.0[2], &one.1, EMBEDDINGS, "a mask of ones");
}

#[test]
fn both_forms_of_names_are_read() {
    let tensors = tensors(FORMULA);
    let mut bare: crate::formula::Tensors = tensors
        .iter()
        .map(|(name, tensor)| (name.trim_start_matches("resnet.").to_owned(), tensor.clone()))
        .collect();
    bare.insert("projection.weight".into(), (vec![1, DIMENSION], vec![0.0; DIMENSION]));
    let features = vec![0.5; BANDS * MIN_FRAMES];
    let of = |tensors| {
        WeSpeakerResNet34::from_safetensors(&file(tensors))
            .unwrap()
            .embedding(&features)
            .unwrap()
    };
    assert_eq!(of(&tensors), of(&bare));
    let lost = bare
        .keys()
        .find(|name| name.contains("shortcut.1.running_var"))
        .unwrap()
        .clone();
    bare.remove(&lost);
    let error = WeSpeakerResNet34::from_safetensors(&file(&bare)).err().unwrap();
    assert!(error.to_string().contains(&lost), "{error}");
}

#[test]
fn input_that_cannot_be_is_refused() {
    let network = network();
    for features in [
        vec![],
        vec![0.0; BANDS * (MIN_FRAMES - 1)],
        vec![0.0; BANDS * 40 + 1],
        vec![f32::NAN; BANDS * 40],
    ] {
        assert!(matches!(network.embedding(&features), Err(Error::Input(_))));
    }
    let features = vec![0.0; BANDS * MIN_FRAMES];
    let masks: [&[f32]; 4] = [&[], &[-1.0], &[f32::NAN, 1.0], &[1.5]];
    for mask in masks {
        assert!(
            network
                .embeddings(&features, &[&[1.0], mask])
                .unwrap_err()
                .to_string()
                .contains("mask 1")
        );
    }
    assert!(network.embeddings(&features, &[]).unwrap().is_empty());
    let found = network.embeddings(&features, &[&[0.0, 1e-38]]).unwrap();
    assert_eq!(found[0].len(), DIMENSION);
}
