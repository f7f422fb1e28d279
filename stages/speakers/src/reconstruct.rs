//! From speakers of chunks and their clusters to who is active at each frame of the recording, as pyannote.audio's
//! `SpeakerDiarization.reconstruct` and `to_diarization`.

use crate::chunks::{Aggregation, Geometry, Segmentations, aggregate};
use crate::error::{Error, Result};

/// Who is active at each frame: (frames, speakers), 0 or 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diarization {
    pub speakers: usize,
    pub active: Vec<u8>,
}

impl Diarization {
    /// As scores, for [`crate::turns::turns`].
    pub fn scores(&self) -> Vec<f32> {
        self.active.iter().map(|&active| f32::from(active)).collect()
    }
}

/// At each frame the `count` clusters are active that most chunks say are; of equal ones the lower. `clusters` has one
/// for each (chunk, speaker), or none; a cluster is active in a chunk where one of its speakers is.
///
/// `count` is [`crate::chunks::speaker_count`], or that clipped: to the most speakers there may be, or to 1 for a
/// diarization without overlaps. Where it is larger than the number of clusters, speakers come up that no chunk knows, as
/// they do in pyannote.
pub fn reconstruct(
    segmentations: &Segmentations,
    clusters: &[Option<usize>],
    count: &[u8],
    geometry: &Geometry,
) -> Result<Diarization> {
    let (chunks, frames, locals) = (segmentations.chunks(), segmentations.frames(), segmentations.speakers());
    if clusters.len() != chunks * locals || count.len() != geometry.total_frames(chunks) {
        return Err(Error::Input(format!(
            "{} clusters and {} counts do not fit {chunks} chunks of {locals} speakers",
            clusters.len(),
            count.len()
        )));
    }
    if let Some(cluster) = clusters.iter().flatten().find(|cluster| **cluster >= chunks * locals) {
        return Err(Error::Input(format!(
            "cluster {cluster} is more than there are speakers of chunks"
        )));
    }
    let known = clusters.iter().flatten().max().map_or(0, |last| last + 1);
    let speakers = known.max(count.iter().copied().max().unwrap_or(0).into());
    let mut active = vec![0; count.len() * speakers];
    if speakers == 0 {
        return Ok(Diarization { speakers, active });
    }
    let mut scores = vec![f32::NAN; chunks * frames * speakers];
    for (chunk, scores) in scores.chunks_exact_mut(frames * speakers).enumerate() {
        let clusters = &clusters[chunk * locals..(chunk + 1) * locals];
        let frames = segmentations.chunk(chunk).chunks_exact(locals);
        for (scores, frame) in scores.chunks_exact_mut(speakers).zip(frames) {
            for (cluster, &active) in clusters.iter().zip(frame) {
                if let Some(cluster) = *cluster {
                    // The larger of both, and not NaN.
                    scores[cluster] = scores[cluster].max(f32::from(active));
                }
            }
        }
    }
    let how = Aggregation {
        sum: true,
        ..Aggregation::default()
    };
    let sums = aggregate(&scores, frames, speakers, geometry, &how)?;
    let mut order: Vec<usize> = Vec::with_capacity(speakers);
    let rows = active.chunks_exact_mut(speakers).zip(sums.chunks_exact(speakers));
    for ((active, sums), &count) in rows.zip(count) {
        order.clear();
        order.extend(0..speakers);
        order.sort_by(|&a, &b| sums[b].total_cmp(&sums[a]));
        for &speaker in order.iter().take(count.into()) {
            active[speaker] = 1;
        }
    }
    Ok(Diarization { speakers, active })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;
    use crate::turns::tests::assert_turns;
    use crate::turns::{Thresholds, turns};

    #[test]
    fn diarizations_and_turns_are_those_of_the_original() {
        let tensors = golden::Tensors::load("f_reconstruct.safetensors");
        let geometry = Geometry::SEGMENTATION;
        for case in golden::json("f_reconstruct.json").as_array().unwrap() {
            let key = case["key"].as_str().unwrap();
            let tensor = |name: &str| tensors.bytes(&format!("{key}.{name}"));
            let (shape, values) = tensor("segmentations");
            let segmentations = Segmentations::new(&values, shape[1], shape[2]).unwrap();
            let (_, hard) = tensors.integers(&format!("{key}.hard"));
            let clusters: Vec<Option<usize>> = hard.iter().map(|&cluster| usize::try_from(cluster).ok()).collect();
            let (_, count) = tensor("count");
            let found = reconstruct(&segmentations, &clusters, &count, &geometry).unwrap();
            let (shape, expected) = tensor("discrete");
            assert_eq!((found.speakers, &found.active), (shape[1], &expected), "{key}");
            let off = |min_duration_off: f64| Thresholds {
                min_duration_off,
                ..Thresholds::default()
            };
            let scores = found.scores();
            let of = |seconds: f64| turns(&scores, found.speakers, &geometry, &off(seconds)).unwrap();
            assert_turns(&of(0.0), &case["turns"], key);
            assert_turns(&of(0.5), &case["turns_min_duration_off_0_5"], key);

            let clipped: Vec<u8> = count.iter().map(|&count| count.min(1)).collect();
            let found = reconstruct(&segmentations, &clusters, &clipped, &geometry).unwrap();
            let (shape, expected) = tensor("exclusive");
            assert_eq!((found.speakers, &found.active), (shape[1], &expected), "{key}");
            let found = turns(&found.scores(), found.speakers, &geometry, &off(0.0)).unwrap();
            assert_turns(&found, &case["exclusive_turns"], key);
        }
    }

    #[test]
    fn silence_has_no_speakers_and_what_does_not_fit_is_refused() {
        let values = [0u8; 2 * 589 * 3];
        let segmentations = Segmentations::new(&values, 589, 3).unwrap();
        let geometry = Geometry::SEGMENTATION;
        let count = vec![0; geometry.total_frames(2)];
        let found = reconstruct(&segmentations, &[None; 6], &count, &geometry).unwrap();
        assert_eq!((found.speakers, found.active.len()), (0, 0));
        assert!(reconstruct(&segmentations, &[None; 5], &count, &geometry).is_err());
        assert!(reconstruct(&segmentations, &[None; 6], &count[1..], &geometry).is_err());
        assert!(reconstruct(&segmentations, &[Some(usize::MAX); 6], &count, &geometry).is_err());
    }
}
