//! From speakers of chunks and their clusters to the activity at each frame of the recording, as pyannote.audio's
//! `SpeakerDiarization.reconstruct` and `to_diarization`.

use crate::chunks::{Geometry, Segmentations};
use crate::error::{Error, Result};
use crate::turns::{Thresholds, Turn, sort, turns};

/// Frames that are worked on at a time.
const BLOCK: usize = 4_096;

/// The activity at each frame: (frames, speakers), 0 or 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diarization {
    pub speakers: usize,
    pub active: Vec<u8>,
}

impl Diarization {
    /// The [`turns`] of all speakers.
    pub fn turns(&self, geometry: &Geometry, thresholds: &Thresholds) -> Result<Vec<Turn<usize>>> {
        let mut all = Vec::new();
        for speaker in 0..self.speakers {
            let active = self.active.iter().skip(speaker).step_by(self.speakers);
            let scores: Vec<f32> = active.map(|&active| f32::from(active)).collect();
            let found = turns(&scores, 1, geometry, thresholds)?;
            all.extend(found.into_iter().map(|turn| Turn { speaker, ..turn }));
        }
        sort(&mut all);
        Ok(all)
    }
}

/// Which clusters may be active at a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Candidates {
    /// All, as in pyannote: where `count` is larger than the number of clusters, additional speakers appear that are in
    /// no chunk, and where it is larger than the number of active clusters, others become active.
    All,
    /// Those that are active in at least one chunk.
    Voted,
}

/// At each frame the `count` clusters with activity in most chunks are active; of equal ones the lower. `clusters` has
/// one for each (chunk, speaker), or none; a cluster is active in a chunk where one of its speakers is.
///
/// `count` is [`crate::chunks::speaker_count`], or that clipped: to the most speakers there may be, or to 1 for a
/// diarization without overlaps.
pub fn reconstruct(
    segmentations: &Segmentations,
    clusters: &[Option<usize>],
    count: &[u8],
    geometry: &Geometry,
    candidates: Candidates,
) -> Result<Diarization> {
    geometry.check()?;
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
    let speakers = match candidates {
        Candidates::All => known.max(count.iter().copied().max().unwrap_or(0).into()),
        Candidates::Voted => known,
    };
    let mut active = vec![0; count.len() * speakers];
    if speakers == 0 {
        return Ok(Diarization { speakers, active });
    }
    // For each frame of a block, the number of chunks in which each cluster is active.
    let mut votes = vec![0u32; BLOCK * speakers];
    let mut of_chunk = vec![0u8; speakers];
    let mut order: Vec<usize> = Vec::with_capacity(speakers);
    let mut first_chunk = 0;
    for (block, active) in active.chunks_mut(BLOCK * speakers).enumerate() {
        let start = block * BLOCK;
        let end = start + active.len() / speakers;
        votes.fill(0);
        while first_chunk < chunks && geometry.start_frame(first_chunk) + frames <= start {
            first_chunk += 1;
        }
        for chunk in (first_chunk..chunks).take_while(|&chunk| geometry.start_frame(chunk) < end) {
            let clusters = &clusters[chunk * locals..(chunk + 1) * locals];
            let begin = geometry.start_frame(chunk);
            let rows = segmentations.chunk(chunk).chunks_exact(locals).enumerate();
            for (frame, row) in rows.map(|(at, row)| (begin + at, row)) {
                if !(start..end).contains(&frame) {
                    continue;
                }
                // A cluster that several speakers of the chunk have counts once.
                of_chunk.fill(0);
                for (cluster, &active) in clusters.iter().zip(row) {
                    if let Some(cluster) = *cluster {
                        of_chunk[cluster] |= active;
                    }
                }
                let votes = &mut votes[(frame - start) * speakers..][..speakers];
                for (votes, &active) in votes.iter_mut().zip(&of_chunk) {
                    *votes += u32::from(active);
                }
            }
        }
        let rows = active.chunks_exact_mut(speakers).zip(votes.chunks_exact(speakers));
        for ((active, votes), &count) in rows.zip(&count[start..end]) {
            order.clear();
            order.extend((0..speakers).filter(|&cluster| candidates == Candidates::All || votes[cluster] > 0));
            order.sort_by_key(|&cluster| std::cmp::Reverse(votes[cluster]));
            for &speaker in order.iter().take(count.into()) {
                active[speaker] = 1;
            }
        }
    }
    Ok(Diarization { speakers, active })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;
    use crate::turns::tests::assert_turns;

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
            let found = reconstruct(&segmentations, &clusters, &count, &geometry, Candidates::All).unwrap();
            let (shape, expected) = tensor("discrete");
            assert_eq!((found.speakers, &found.active), (shape[1], &expected), "{key}");
            let off = |min_duration_off: f64| Thresholds {
                min_duration_off,
                ..Thresholds::default()
            };
            let of = |seconds: f64| found.turns(&geometry, &off(seconds)).unwrap();
            assert_turns(&of(0.0), &case["turns"], key);
            assert_turns(&of(0.5), &case["turns_min_duration_off_0_5"], key);

            let clipped: Vec<u8> = count.iter().map(|&count| count.min(1)).collect();
            let found = reconstruct(&segmentations, &clusters, &clipped, &geometry, Candidates::All).unwrap();
            let (shape, expected) = tensor("exclusive");
            assert_eq!((found.speakers, &found.active), (shape[1], &expected), "{key}");
            let found = found.turns(&geometry, &off(0.0)).unwrap();
            assert_turns(&found, &case["exclusive_turns"], key);
        }
    }

    #[test]
    fn silence_has_no_speakers_and_what_does_not_fit_is_refused() {
        let values = [0u8; 2 * 589 * 3];
        let segmentations = Segmentations::new(&values, 589, 3).unwrap();
        let geometry = Geometry::SEGMENTATION;
        let count = vec![0; geometry.total_frames(2)];
        let of = |clusters: &[Option<usize>], count: &[u8]| {
            reconstruct(&segmentations, clusters, count, &geometry, Candidates::All)
        };
        let found = of(&[None; 6], &count).unwrap();
        assert_eq!((found.speakers, found.active.len()), (0, 0));
        assert!(of(&[None; 5], &count).is_err());
        assert!(of(&[None; 6], &count[1..]).is_err());
        assert!(of(&[Some(usize::MAX); 6], &count).is_err());
    }

    #[test]
    fn clusters_without_votes_and_phantoms_are_left_out_if_asked() {
        // One speaker throughout, whose two chunks are in different clusters, and a count of two.
        let values: Vec<u8> = (0..2 * 589).flat_map(|_| [1, 0, 0]).collect();
        let segmentations = Segmentations::new(&values, 589, 3).unwrap();
        let geometry = Geometry::SEGMENTATION;
        let count = vec![3; geometry.total_frames(2)];
        let clusters = [Some(0), None, None, Some(1), None, None];
        let of = |candidates| reconstruct(&segmentations, &clusters, &count, &geometry, candidates).unwrap();
        let all = of(Candidates::All);
        assert_eq!((all.speakers, all.active.iter().all(|active| *active == 1)), (3, true));
        let voted = of(Candidates::Voted);
        assert_eq!(voted.speakers, 2);
        let start = geometry.start_frame(1);
        for (frame, active) in voted.active.chunks_exact(2).enumerate() {
            let expected = [u8::from(frame < 589), u8::from((start..start + 589).contains(&frame))];
            assert_eq!(active, expected, "{frame}");
        }
    }
}
