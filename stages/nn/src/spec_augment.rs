//! SpecAugment as NeMo 3.0 draws it: random bands of frames and of mel bands set to 0 in training.

use std::ops::Range;

use flow_kernels::Noise;

use crate::config::{SpecAugmentConfig, TimeWidth};
use crate::features::Features;

/// Uniform draws in [0, 1) for one batch: one list per utterance, one number per mask.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draws {
    pub time_width: Vec<Vec<f32>>,
    pub time_start: Vec<Vec<f32>>,
    pub freq_width: Vec<Vec<f32>>,
    pub freq_start: Vec<Vec<f32>>,
}

impl Draws {
    /// Draws in NeMo's order: time widths, time starts, frequency widths, frequency starts.
    pub fn new(config: &SpecAugmentConfig, batch: usize, noise: &mut Noise) -> Self {
        let mut draw = |masks: usize| -> Vec<Vec<f32>> {
            (0..batch)
                .map(|_| (0..masks).map(|_| noise.uniform_f32()).collect())
                .collect()
        };
        Self {
            time_width: draw(config.time_masks),
            time_start: draw(config.time_masks),
            freq_width: draw(config.freq_masks),
            freq_start: draw(config.freq_masks),
        }
    }
}

/// Frames and bands to set to 0 for one utterance; ranges may overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Masks {
    pub frames: Vec<Range<usize>>,
    pub bands: Vec<Range<usize>>,
}

/// `start..start + width`, cut to `0..size`; `start` may be negative.
fn clip(start: i64, width: i64, size: usize) -> Range<usize> {
    let cut = |at: i64| usize::try_from(at.max(0)).unwrap_or(size).min(size);
    let (first, end) = (cut(start), cut(start.saturating_add(width)));
    first..end.max(first)
}

/// The masks that NeMo makes of these draws. All products are in f32 and are cut towards zero.
pub fn masks(config: &SpecAugmentConfig, bands: usize, frames: usize, lengths: &[usize], draws: &Draws) -> Vec<Masks> {
    lengths
        .iter()
        .enumerate()
        .map(|(b, &length)| {
            let widest = match config.time_width {
                TimeWidth::Frames(frames) => frames as f32,
                TimeWidth::Share(share) => (share as f32 * length as f32).min(frames as f32),
            };
            let time = draws.time_width[b].iter().zip(&draws.time_start[b]);
            let freq = draws.freq_width[b].iter().zip(&draws.freq_start[b]);
            Masks {
                frames: time
                    .map(|(width, start)| {
                        let width = (width * widest) as i64;
                        let start = (start * (length as i64 - width) as f32) as i64;
                        clip(start, width, frames)
                    })
                    .collect(),
                bands: freq
                    .map(|(width, start)| {
                        let width = (width * config.freq_width as f32) as i64;
                        let start = (start * (bands as i64 - width) as f32) as i64;
                        clip(start, width, bands)
                    })
                    .collect(),
            }
        })
        .collect()
}

/// Draws masks and sets what they cover to 0: time masks over all bands, frequency masks over all frames.
pub fn apply(config: &SpecAugmentConfig, features: &mut Features, noise: &mut Noise) {
    let draws = Draws::new(config, features.batch, noise);
    let (bands, frames) = (features.bands, features.frames);
    let masks = masks(config, bands, frames, &features.lengths, &draws);
    for (values, masks) in features.values.chunks_exact_mut(bands * frames).zip(masks) {
        for row in values.chunks_exact_mut(frames) {
            for range in &masks.frames {
                row[range.clone()].fill(0.0);
            }
        }
        for range in masks.bands {
            values[range.start * frames..range.end * frames].fill(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::testing::golden;

    fn draws(case: &Value, key: &str) -> Vec<Vec<f32>> {
        serde_json::from_value(case["draws"][key].clone()).unwrap()
    }

    /// Union of ranges as maximal runs.
    fn runs(ranges: &[Range<usize>], size: usize) -> Vec<[usize; 2]> {
        let mut covered = vec![false; size];
        for range in ranges {
            covered[range.clone()].fill(true);
        }
        let mut runs: Vec<[usize; 2]> = Vec::new();
        for i in (0..size).filter(|&i| covered[i]) {
            match runs.last_mut() {
                Some(run) if run[1] == i => run[1] = i + 1,
                _ => runs.push([i, i + 1]),
            }
        }
        runs
    }

    #[test]
    fn draws_give_the_masks_of_nemo() {
        let text = std::fs::read_to_string(golden::file("specaug_cases.json")).unwrap();
        let golden: Value = serde_json::from_str(&text).unwrap();
        let cases = golden["cases"].as_array().unwrap();
        assert!(!cases.is_empty());
        for case in cases {
            let size = |key: &str| usize::try_from(case[key].as_u64().unwrap()).unwrap();
            let config = SpecAugmentConfig {
                freq_masks: size("freq_masks"),
                time_masks: size("time_masks"),
                freq_width: size("freq_width"),
                time_width: if case["time_width_is_float"].as_bool().unwrap() {
                    TimeWidth::Share(case["time_width"].as_f64().unwrap())
                } else {
                    TimeWidth::Frames(size("time_width"))
                },
            };
            let lengths: Vec<usize> = serde_json::from_value(case["lengths"].clone()).unwrap();
            let draws = Draws {
                time_width: draws(case, "time_width"),
                time_start: draws(case, "time_start"),
                freq_width: draws(case, "freq_width"),
                freq_start: draws(case, "freq_start"),
            };
            let found = masks(&config, size("F"), size("T"), &lengths, &draws);
            let frames: Vec<Vec<[usize; 2]>> = serde_json::from_value(case["masked_frames"].clone()).unwrap();
            let mels: Vec<Vec<[usize; 2]>> = serde_json::from_value(case["masked_mels"].clone()).unwrap();
            for (b, masks) in found.iter().enumerate() {
                assert_eq!(runs(&masks.frames, size("T")), frames[b], "{} frames {b}", case["name"]);
                assert_eq!(runs(&masks.bands, size("F")), mels[b], "{} mels {b}", case["name"]);
            }
        }
    }

    #[test]
    fn masks_are_applied_and_depend_on_the_seed() {
        let config = SpecAugmentConfig {
            freq_masks: 2,
            time_masks: 2,
            freq_width: 5,
            time_width: TimeWidth::Frames(9),
        };
        let ones = Features {
            values: vec![1.0; 2 * 16 * 40],
            batch: 2,
            bands: 16,
            frames: 40,
            lengths: vec![40, 20],
        };
        let with = |seed| {
            let mut features = ones.clone();
            apply(&config, &mut features, &mut Noise::new(seed));
            features
        };
        assert_eq!(with(3), with(3));
        let zeros: Vec<usize> = (0..20)
            .map(|s| with(s).values.iter().filter(|v| **v == 0.0).count())
            .collect();
        assert!(zeros.iter().any(|&n| n > 0));
        assert!(zeros.iter().any(|&n| n != zeros[0]));
        // At most two masks of 4 bands and two of 8 frames.
        assert!(zeros.iter().all(|&n| n <= 2 * (8 * 40 + 16 * 16)));
    }
}
