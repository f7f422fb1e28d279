//! How a long recording is processed by the model: in windows between pauses, in NeMo's chunks, or as a whole.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Result, TranscriptionError};

/// The part of a recording that the model processes at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WindowMethod {
    /// The best choice for most models: `vad`.
    #[default]
    Auto,
    /// Windows between pauses, each independently.
    Vad,
    /// Chunks of a fixed length with some context, the decoder's state carried from one to the next, as NeMo's streaming
    /// inference does it.
    Chunked,
    /// The whole recording in one pass.
    Full,
}

/// How a recording is divided and decoded, with the settings of each mode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LongAudio {
    /// Windows between pauses.
    Vad,
    Chunked(ChunkSettings),
    Full(FullSettings),
}

/// Lengths of chunks, in seconds; whole frames of the encoder are taken of each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkSettings {
    pub left: f64,
    pub chunk: f64,
    pub right: f64,
}

/// One pass over a recording.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FullSettings {
    /// Longer recordings are decoded with limited attention, in seconds.
    pub full_attention: f64,
    /// Frames that a frame then sees to either side.
    pub attention_context: usize,
}

/// Lengths of chunks in frames of the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkFrames {
    pub left: u64,
    pub chunk: u64,
    pub right: u64,
}

impl ChunkSettings {
    /// In whole frames of this many seconds.
    ///
    /// # Errors
    /// If a chunk is shorter than a frame.
    pub(crate) fn frames(&self, frame_seconds: f64) -> Result<ChunkFrames> {
        // A length such as 0.24 s is three frames of 0.08 s, although the quotient is a little less.
        let frames = |seconds: f64| (seconds / frame_seconds + 1e-6) as u64;
        let found = ChunkFrames {
            left: frames(self.left),
            chunk: frames(self.chunk),
            right: frames(self.right),
        };
        if found.chunk == 0 {
            let why = format!("{} s is less than a frame of the model, {frame_seconds} s", self.chunk);
            return Err(TranscriptionError::setting("chunk", why));
        }
        Ok(found)
    }
}

/// A chunk and the context that the encoder hears it in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChunkWindow {
    /// Chunk and context.
    pub samples: Range<u64>,
    /// Frames of the left context, which are not decoded.
    pub left: usize,
    /// Frames of the chunk; none for all that follow, in the last window.
    pub frames: Option<usize>,
}

/// The windows of NeMo's chunked inference over this many samples, of which `frame` are one of the encoder's frames: each
/// chunk with its left and right context as far as these exist. The last window, which begins where its right context
/// would reach the end, decodes all remaining frames; it is as long as the others, so that its left context is longer.
///
/// NeMo uses the last left+chunk+right samples for it, whatever the number of remaining frames, so that its frames are
/// not aligned with those of the recording. Here it begins up to a frame later, aligned with a frame.
pub(crate) fn chunk_windows(samples: u64, frame: u64, lengths: ChunkFrames) -> Vec<ChunkWindow> {
    let ChunkFrames { left, chunk, right } = lengths;
    let mut windows = Vec::new();
    let mut begin = 0;
    while begin < samples {
        let end = begin + (chunk + right) * frame;
        let last = end >= samples;
        let before = match last {
            true => ((left + chunk + right) * frame - (samples - begin)) / frame * frame,
            false => left * frame,
        };
        let start = begin.saturating_sub(before);
        windows.push(ChunkWindow {
            samples: start..end.min(samples),
            left: ((begin - start) / frame) as usize,
            frames: (!last).then_some(chunk as usize),
        });
        if last {
            break;
        }
        begin += chunk * frame;
    }
    windows
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seconds(left: f64, chunk: f64, right: f64) -> ChunkSettings {
        ChunkSettings { left, chunk, right }
    }

    #[test]
    fn lengths_are_whole_frames() {
        let frames = |left, chunk, right| {
            let found = seconds(left, chunk, right).frames(0.08).unwrap();
            [found.left, found.chunk, found.right]
        };
        assert_eq!(frames(10.0, 10.0, 5.0), [125, 125, 62]);
        assert_eq!(frames(5.0, 2.0, 0.24), [62, 25, 3]);
        assert_eq!(frames(0.0, 0.08, 0.0), [0, 1, 0]);
        let error = seconds(1.0, 0.07, 1.0).frames(0.08).unwrap_err().to_string();
        assert!(error.contains("`chunk`") && error.contains("0.07"), "{error}");
    }

    #[test]
    fn windows_are_nemos_but_for_the_beginning_of_the_last() {
        // long_4.flac of the golden data, 10/10/5: NeMo's last window begins at 343182.
        let lengths = seconds(10.0, 10.0, 5.0).frames(0.08).unwrap();
        let found = chunk_windows(742_542, 1280, lengths);
        let windows: Vec<(u64, u64, usize, Option<usize>)> = found
            .into_iter()
            .map(|window| (window.samples.start, window.samples.end, window.left, window.frames))
            .collect();
        assert_eq!(
            windows,
            [
                (0, 239_360, 0, Some(125)),
                (0, 399_360, 125, Some(125)),
                (160_000, 559_360, 125, Some(125)),
                (320_000, 719_360, 125, Some(125)),
                (344_320, 742_542, 231, None),
            ]
        );
        assert_eq!(chunk_windows(0, 1280, lengths), []);
        let short = chunk_windows(5, 1280, lengths);
        assert_eq!(
            (short.len(), &short[0].samples, short[0].left, short[0].frames),
            (1, &(0..5), 0, None)
        );
    }

    proptest! {
        #[test]
        fn every_frame_is_decoded_once(
            samples in 0u64..50_000, left in 0u64..20, chunk in 1u64..20, right in 0u64..20,
        ) {
            let frame = 100;
            let windows = chunk_windows(samples, frame, ChunkFrames { left, chunk, right });
            let mut at = 0;
            for (index, window) in windows.iter().enumerate() {
                let begin = window.samples.start + window.left as u64 * frame;
                prop_assert_eq!(begin, at);
                prop_assert!(window.samples.end - window.samples.start <= (left + chunk + right) * frame);
                prop_assert_eq!(window.frames.is_none(), index + 1 == windows.len());
                at = window.frames.map_or(samples, |frames| begin + frames as u64 * frame);
                prop_assert!(at <= window.samples.end);
            }
            prop_assert_eq!(at, samples);
            let in_order = |pair: &[ChunkWindow]| pair[0].samples.start <= pair[1].samples.start;
            prop_assert!(windows.windows(2).all(in_order));
        }
    }
}
