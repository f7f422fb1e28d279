//! The traits of the networks of diarization, and their implementations.

use super::{CHUNK, CHUNK_STEP};
use crate::campplus::CamPlusPlus;
use crate::error::Result;
use crate::fbank::{BANDS, Fbank};
use crate::powerset::Powerset;
use crate::pyannet::PyanNet;
use crate::wespeaker::WeSpeakerResNet34;

/// An iterator over chunks: the activity (frames, speakers), 0 or 1.
pub type Activities<'a> = Box<dyn Iterator<Item = Result<Vec<u8>>> + 'a>;

/// Computes the activity of a few speakers in each frame of a chunk of [`CHUNK`] samples.
pub trait SegmentationNetwork: Send + Sync {
    /// Frames of a chunk, placed as [`GEOMETRY`](super::GEOMETRY) says.
    fn frames(&self) -> usize;

    /// Speakers of a chunk.
    fn speakers(&self) -> usize;

    /// The activity in the chunks of a recording: one each [`CHUNK_STEP`] samples, as many as
    /// [`Geometry::chunks`](crate::chunks::Geometry::chunks) says, the last one filled up with zeros. A sample that is
    /// not finite is an error.
    fn recording<'a>(&'a self, samples: &'a [f32]) -> Result<Activities<'a>>;

    /// The activity in one chunk of at most [`CHUNK`] samples, which is filled up with zeros. It may differ from that of the
    /// same samples as a recording by rounding. Of no samples, there is none.
    fn chunk(&self, samples: &[f32]) -> Result<Vec<u8>> {
        Ok(self.recording(samples)?.next().transpose()?.unwrap_or_default())
    }
}

/// Makes embeddings of the voices in a chunk.
pub trait EmbeddingNetwork: Send + Sync {
    /// Values of an embedding.
    fn dimension(&self) -> usize;

    /// The feature extractor.
    fn fbank(&self) -> Fbank;

    /// For a speaker that is active alone in more frames of the segmentation than this, only these frames are used.
    fn min_clean_frames(&self) -> usize;

    /// An embedding for each mask, or none if it has too few frames, from the features (frames, [`BANDS`]) of a whole
    /// chunk less their mean. A mask has one value for each frame of the segmentation.
    fn embeddings(&self, features: &[f32], masks: &[Vec<bool>]) -> Result<Vec<Option<Vec<f32>>>>;
}

/// Speakers of a chunk, and most of them in one frame, of a network whose classes are sets of speakers.
const SPEAKERS: usize = 3;
const LARGEST_SET: usize = 2;

impl SegmentationNetwork for PyanNet {
    fn frames(&self) -> usize {
        PyanNet::frames(self, CHUNK)
    }

    fn speakers(&self) -> usize {
        SPEAKERS
    }

    fn recording<'a>(&'a self, samples: &'a [f32]) -> Result<Activities<'a>> {
        let powerset = Powerset::new(SPEAKERS, LARGEST_SET)?;
        let chunks = PyanNet::recording(self, samples, CHUNK, CHUNK_STEP)?;
        Ok(Box::new(chunks.map(move |chunk| powerset.decode(&chunk?))))
    }

    /// Takes less time than a recording of one chunk, whose filters are prepared for chunks that overlap.
    fn chunk(&self, samples: &[f32]) -> Result<Vec<u8>> {
        if samples.is_empty() {
            return Ok(Vec::new());
        }
        let mut chunk = samples.to_vec();
        chunk.resize(CHUNK, 0.0);
        let found = self.log_probabilities(&[&chunk])?;
        Powerset::new(SPEAKERS, LARGEST_SET)?.decode(&found.concat())
    }
}

/// Least frames of features, of 10 ms: an embedding of fewer is unreliable.
const CAMPPLUS_MIN_FRAMES: usize = 30;

impl EmbeddingNetwork for CamPlusPlus {
    fn dimension(&self) -> usize {
        crate::campplus::DIMENSION
    }

    fn fbank(&self) -> Fbank {
        Fbank::three_d_speaker()
    }

    fn min_clean_frames(&self) -> usize {
        15
    }

    /// Of the frames in a mask, one after the other, as if the others were cut out.
    fn embeddings(&self, features: &[f32], masks: &[Vec<bool>]) -> Result<Vec<Option<Vec<f32>>>> {
        let of_mask = |mask: &Vec<bool>| {
            let selected = selected(features, mask);
            match selected.len() >= CAMPPLUS_MIN_FRAMES * BANDS {
                true => self.embedding(&selected).map(Some),
                false => Ok(None),
            }
        };
        masks.iter().map(of_mask).collect()
    }
}

/// The frames of `features` whose nearest frame of the mask is true.
fn selected(features: &[f32], mask: &[bool]) -> Vec<f32> {
    let frames = features.len() / BANDS;
    let nearest = |frame: usize| mask.get(frame * mask.len() / frames).copied().unwrap_or(false);
    let rows = features.chunks_exact(BANDS).enumerate();
    rows.filter(|(frame, _)| nearest(*frame))
        .flat_map(|(_, row)| row)
        .copied()
        .collect()
}

impl EmbeddingNetwork for WeSpeakerResNet34 {
    fn dimension(&self) -> usize {
        crate::wespeaker::DIMENSION
    }

    fn fbank(&self) -> Fbank {
        Fbank::wespeaker()
    }

    fn min_clean_frames(&self) -> usize {
        2
    }

    fn embeddings(&self, features: &[f32], masks: &[Vec<bool>]) -> Result<Vec<Option<Vec<f32>>>> {
        let weights: Vec<Vec<f32>> = masks
            .iter()
            .map(|mask| mask.iter().map(|&active| f32::from(u8::from(active))).collect())
            .collect();
        let weights: Vec<&[f32]> = weights.iter().map(Vec::as_slice).collect();
        let found = WeSpeakerResNet34::embeddings(self, features, &weights)?;
        Ok(found.into_iter().map(Some).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ways give the same speakers: rounding changes the most likely set of a frame where two are as likely alone.
    #[test]
    fn a_chunk_is_that_of_a_recording() {
        let network = PyanNet::bundled().unwrap();
        let (_, samples) = crate::golden::recordings().swap_remove(0);
        for count in [CHUNK, CHUNK / 2 + 1] {
            let samples = &samples[..count];
            let expected = SegmentationNetwork::recording(&network, samples).unwrap().next();
            let expected = expected.unwrap().unwrap();
            let found = network.chunk(samples).unwrap();
            assert_eq!(found.len(), expected.len());
            let differ = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
            assert!(differ <= 2, "{differ} of {}", found.len());
            assert!(found.contains(&1));
        }
        assert!(network.chunk(&[]).unwrap().is_empty());
        assert!(network.chunk(&[f32::NAN; 400]).is_err());
    }

    #[test]
    fn frames_are_selected_by_the_nearest_of_the_mask() {
        let features: Vec<f32> = (0..5).flat_map(|frame| [frame as f32; BANDS]).collect();
        let found = |mask: &[bool]| -> Vec<f32> {
            let rows = selected(&features, mask);
            rows.chunks_exact(BANDS).map(|row| row[0]).collect()
        };
        // Of two, frames 0 to 2 are nearest to the first.
        assert_eq!(found(&[true, false]), [0.0, 1.0, 2.0]);
        assert_eq!(found(&[false, true]), [3.0, 4.0]);
        assert!(found(&[false; 3]).is_empty());
        assert!(found(&[]).is_empty());
    }
}
