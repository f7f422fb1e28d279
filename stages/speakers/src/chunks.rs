//! Recordings in overlapping chunks: the positions of chunks and frames, and the number of speakers at each frame of
//! the recording. As pyannote.audio 4 does it (`SpeakerDiarizationMixin.speaker_count`).

use crate::error::{Error, Result};

/// The geometry of chunks and their frames. All times in seconds; the first chunk and its first frame begin at 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Geometry {
    /// Length of a chunk, and from the start of one to the start of the next.
    pub chunk_duration: f64,
    pub chunk_step: f64,
    /// Receptive field of a frame, and from the start of one to the start of the next.
    pub frame_duration: f64,
    pub frame_step: f64,
}

impl Geometry {
    /// pyannote's segmentation-3.0: chunks of 10 s each second, frames of 991 samples each 270 samples of 16 kHz.
    pub const SEGMENTATION: Self = Self {
        chunk_duration: 10.0,
        chunk_step: 1.0,
        frame_duration: 0.061_937_5,
        frame_step: 0.016_875,
    };

    /// Frame that is nearest to the start of a chunk; of two the even one.
    pub fn start_frame(&self, chunk: usize) -> usize {
        self.nearest_frame(chunk as f64 * self.chunk_step)
    }

    /// Chunks of a recording: those that fit in whole, and one more if something is left, or if none fits. An empty
    /// recording has none.
    pub fn chunks(&self, duration: f64) -> usize {
        let whole = ((duration - self.chunk_duration) / self.chunk_step).ceil();
        if duration > 0.0 { 1 + whole.max(0.0) as usize } else { 0 }
    }

    /// Frames of the whole recording.
    pub fn total_frames(&self, chunks: usize) -> usize {
        if chunks == 0 {
            return 0;
        }
        self.nearest_frame(self.chunk_duration + (chunks - 1) as f64 * self.chunk_step) + 1
    }

    /// The middle of a frame, at which turns begin and end.
    pub fn middle(&self, frame: usize) -> f64 {
        let start = frame as f64 * self.frame_step;
        0.5 * (start + (start + self.frame_duration))
    }

    /// The frame whose start is nearest, computed over its middle as pyannote does: of numbers that end in a half, the
    /// last bit decides.
    pub(crate) fn nearest_frame(&self, time: f64) -> usize {
        let half = 0.5 * self.frame_duration;
        ((time + half - half) / self.frame_step).round_ties_even() as usize
    }

    /// All durations are positive.
    pub(crate) fn check(&self) -> Result<()> {
        let all = [
            self.chunk_duration,
            self.chunk_step,
            self.frame_duration,
            self.frame_step,
        ];
        if all.iter().all(|value| value.is_finite() && *value > 0.0) {
            return Ok(());
        }
        Err(Error::Input(format!(
            "chunks and frames need durations above 0: {self:?}"
        )))
    }
}

/// Who is active in each frame of each chunk: (chunks, frames, speakers), 0 or 1.
#[derive(Debug, Clone, Copy)]
pub struct Segmentations<'a> {
    values: &'a [u8],
    frames: usize,
    speakers: usize,
}

impl<'a> Segmentations<'a> {
    /// Values other than 0 and 1, or a number of them that makes no whole chunks, are an error.
    pub fn new(values: &'a [u8], frames: usize, speakers: usize) -> Result<Self> {
        whole_chunks(values.len(), frames, speakers)?;
        if let Some(value) = values.iter().find(|value| **value > 1) {
            return Err(Error::Input(format!("a segmentation is 0 or 1, not {value}")));
        }
        Ok(Self {
            values,
            frames,
            speakers,
        })
    }

    pub fn chunks(&self) -> usize {
        self.values.len() / (self.frames * self.speakers)
    }

    pub fn frames(&self) -> usize {
        self.frames
    }

    pub fn speakers(&self) -> usize {
        self.speakers
    }

    /// The frames of a chunk: (frames, speakers).
    pub fn chunk(&self, chunk: usize) -> &'a [u8] {
        let size = self.frames * self.speakers;
        &self.values[chunk * size..(chunk + 1) * size]
    }

    /// Number of frames in which a speaker is active, and in which no other one is too, by (chunk, speaker).
    pub fn active_frames(&self) -> Vec<(usize, usize)> {
        let mut counts = vec![(0, 0); self.chunks() * self.speakers];
        for (chunk, counts) in counts.chunks_exact_mut(self.speakers).enumerate() {
            for frame in self.chunk(chunk).chunks_exact(self.speakers) {
                let alone = frame.iter().filter(|active| **active == 1).count() == 1;
                for (count, _) in counts.iter_mut().zip(frame).filter(|(_, active)| **active == 1) {
                    count.0 += 1;
                    count.1 += usize::from(alone);
                }
            }
        }
        counts
    }
}

fn whole_chunks(values: usize, frames: usize, classes: usize) -> Result<usize> {
    match frames.checked_mul(classes) {
        Some(size) if size > 0 && values.is_multiple_of(size) => Ok(values / size),
        _ => Err(Error::Input(format!(
            "{values} values do not divide into chunks of {frames} frames of {classes}"
        ))),
    }
}

/// Number of speakers at each frame of the recording: the average over chunks, rounded, of two the even one.
pub fn speaker_count(segmentations: &Segmentations, geometry: &Geometry) -> Result<Vec<u8>> {
    geometry.check()?;
    let total = geometry.total_frames(segmentations.chunks());
    // Active speakers over all chunks, and chunks.
    let mut sums = vec![(0u32, 0u32); total];
    for chunk in 0..segmentations.chunks() {
        let frames = segmentations.chunk(chunk).chunks_exact(segmentations.speakers);
        let start = geometry.start_frame(chunk).min(total);
        for (sum, frame) in sums[start..].iter_mut().zip(frames) {
            sum.0 += frame.iter().map(|&active| u32::from(active)).sum::<u32>();
            sum.1 += 1;
        }
    }
    let average = |&(active, chunks): &(u32, u32)| (f64::from(active) / f64::from(chunks.max(1))) as f32;
    Ok(sums.iter().map(|sum| average(sum).round_ties_even() as u8).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    #[test]
    fn start_frames_are_those_of_the_original() {
        let tensors = golden::Tensors::load("f_aggregate.safetensors");
        let mut compared = 0;
        for name in tensors.names() {
            // A name reads `start_frame_step0_5`.
            let Some(step) = name.strip_prefix("start_frame_step") else {
                continue;
            };
            let geometry = Geometry {
                chunk_step: step.replace('_', ".").parse().unwrap(),
                ..Geometry::SEGMENTATION
            };
            let (_, expected) = tensors.integers(&name);
            for (chunk, expected) in expected.iter().enumerate() {
                assert_eq!(geometry.start_frame(chunk) as i64, *expected, "{name} {chunk}");
            }
            compared += expected.len();
        }
        assert!(compared > 0);
    }

    #[test]
    fn counts_are_those_of_the_original() {
        let tensors = golden::Tensors::load("f_aggregate.safetensors");
        let mut compared = 0;
        for name in tensors.names() {
            let Some(case) = name.strip_suffix(".in").filter(|case| case.starts_with("count")) else {
                continue;
            };
            let (shape, values) = tensors.bytes(&name);
            let segmentations = Segmentations::new(&values, shape[1], shape[2]).unwrap();
            let found = speaker_count(&segmentations, &Geometry::SEGMENTATION).unwrap();
            assert_eq!(found, tensors.bytes(&format!("{case}.out")).1, "{case}");
            compared += 1;
        }
        assert!(compared > 0);
    }

    #[test]
    fn the_last_chunk_takes_what_is_left() {
        let cases = [
            (0.0, 0),
            (0.1, 1),
            (10.0, 1),
            (10.5, 2),
            (11.0, 2),
            (12.999, 4),
            (45.0, 36),
        ];
        for (duration, chunks) in cases {
            assert_eq!(Geometry::SEGMENTATION.chunks(duration), chunks, "{duration}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(Segmentations::new(&[0, 1, 2], 1, 3).is_err());
        assert!(Segmentations::new(&[0, 1], 1, 3).is_err());
        assert!(Segmentations::new(&[], 0, 3).is_err());
        let none = Geometry {
            frame_step: 0.0,
            ..Geometry::SEGMENTATION
        };
        let empty = Segmentations::new(&[], 2, 3).unwrap();
        assert!(speaker_count(&empty, &none).is_err());
        assert_eq!(speaker_count(&empty, &Geometry::SEGMENTATION), Ok(Vec::new()));
    }
}
