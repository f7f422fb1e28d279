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
            let mut shapes: Vec<BatchShape> = clips
                .map(|(clip, size)| BatchShape {
                    utterances: *size as usize,
                    ..clip
                })
                .collect();
            shapes.dedup();
            return shapes;
        }
        let longest = self.longest.min(settings.max_batch_seconds()).max(0.1);
        let shortest = Packing::default()
            .boundaries
            .first()
            .copied()
            .unwrap_or(longest)
            .min(longest);
        let mut shapes: Vec<BatchShape> = [shortest, longest]
            .into_iter()
            .map(|seconds| BatchShape {
                utterances: ((settings.max_batch_seconds() / seconds).floor() as usize).max(1),
                seconds,
                tokens: ((seconds * self.tokens_per_second).ceil() as usize).clamp(1, settings.max_tokens),
            })
            .collect();
        shapes.dedup();
        shapes
    }
}
