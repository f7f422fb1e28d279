//! What is assumed about the data, and the shapes of micro-batches that follow.

use flow_sampling::plan::Packing;
use serde::{Deserialize, Serialize};

use crate::resolved_settings::ResolvedSettings;

/// Tokens per second of speech that are assumed where nothing else is known: fast speech in a vocabulary of small
/// pieces.
pub const TOKENS_PER_SECOND: f64 = 12.0;

/// The shape of a micro-batch whose utterances have the same length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchShape {
    pub utterances: usize,
    /// Of audio, for each utterance.
    pub seconds: f64,
    /// Target tokens of each utterance.
    pub tokens: usize,
}

/// Assumptions about the data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DataAssumptions {
    /// The longest clip, in seconds.
    pub longest: f64,
    /// Tokens per second of speech, at most; texts are not longer than `max_tokens` in any case.
    pub tokens_per_second: f64,
}

impl DataAssumptions {
    /// The shapes of full micro-batches of the shortest and of the longest clips that fill a duration bucket. All
    /// others are between them, in frames for attention as in tokens for the prediction network. With `bucket_batch_size` those
    /// of all buckets.
    pub fn shapes(&self, settings: &ResolvedSettings) -> Vec<BatchShape> {
        let sizes = settings
            .sampling
            .as_ref()
            .map(|sampling| &sampling.packing.bucket_batch_size);
        if let Some(sizes) = sizes.filter(|sizes| !sizes.is_empty()) {
            let clips = self.clips_of_buckets(settings).into_iter().zip(sizes);
            let shapes: Vec<BatchShape> = clips
                .map(|(clip, size)| BatchShape {
                    utterances: *size as usize,
                    ..clip
                })
                .collect();
            return joined_too(shapes, settings);
        }
        let longest = self.longest.min(settings.max_batch_seconds()).max(0.1);
        let shortest = Packing::default()
            .boundaries
            .first()
            .copied()
            .unwrap_or(longest)
            .min(longest);
        let shapes: Vec<BatchShape> = [shortest, longest]
            .into_iter()
            .map(|seconds| BatchShape {
                utterances: ((settings.max_batch_seconds() / seconds).floor() as usize).max(1),
                seconds,
                tokens: ((seconds * self.tokens_per_second).ceil() as usize).clamp(1, settings.max_tokens),
            })
            .collect();
        joined_too(shapes, settings)
    }
}

/// The shapes, and those of the same seconds of audio whose clips are joined as far as `concatenate` lets them.
fn joined_too(mut shapes: Vec<BatchShape>, settings: &ResolvedSettings) -> Vec<BatchShape> {
    if let Some(concatenate) = &settings.concatenate {
        let joined = shapes.iter().filter_map(|shape| {
            let all = shape.utterances as f64 * (shape.seconds + concatenate.gap_seconds);
            let seconds = concatenate.limit(shape.seconds).min(all);
            let tokens = (shape.tokens as f64 * seconds / shape.seconds).ceil() as usize;
            (seconds > shape.seconds).then(|| BatchShape {
                utterances: (all / seconds).ceil() as usize,
                seconds,
                tokens: tokens.min(settings.max_tokens),
            })
        });
        let joined: Vec<BatchShape> = joined.collect();
        shapes.extend(joined);
    }
    shapes.dedup();
    shapes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Concatenate, TrainSettings};

    #[test]
    fn joined_clips_are_counted() {
        let assumed = DataAssumptions {
            longest: 18.0,
            tokens_per_second: 10.0,
        };
        let shapes = |max_duration: Option<f64>, duration_factor: f64| -> Vec<(usize, f64, usize)> {
            let settings = TrainSettings {
                concatenate: Some(Concatenate {
                    gap_seconds: 0.0,
                    duration_factor,
                    max_duration,
                }),
                ..TrainSettings::default()
            };
            let shapes = assumed.shapes(&settings.into());
            shapes
                .iter()
                .map(|shape| (shape.utterances, shape.seconds, shape.tokens))
                .collect()
        };
        let plain: Vec<_> = [(30, 3.0, 30), (5, 18.0, 180)].into();
        // Of 90 s as before.
        assert_eq!(shapes(Some(1.0), 1.0), plain);
        assert_eq!(shapes(None, 1.0), plain);
        let joined = [(15, 6.0, 60), (3, 36.0, 360)];
        assert_eq!(shapes(None, 2.0), [plain.clone(), joined.into()].concat());
        assert_eq!(
            shapes(Some(45.0), 2.0),
            [plain.clone(), [(2, 45.0, 450); 1].into()].concat()
        );
        assert_eq!(shapes(Some(500.0), 1.0), [plain, [(1, 90.0, 512)].into()].concat());
    }
}
