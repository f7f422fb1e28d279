//! The clustering of pyannote's speaker-diarization-3.1: agglomerative, by centroids, with a least size of clusters.

use super::assign::{Assignment, assign, scores};
use super::blocks::{Reduced, reduced};
use super::linkage::{Merge, cut, weighted_centroid_linkage};
use super::{
    Clustering, Clusters, Embeddings, cosine_distance, first_least, means, normalised, one_cluster, weighted_means,
};
use crate::error::{Error, Result};

/// When clusters are merged, and how small they may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Agglomerative {
    /// Clusters are merged up to this distance of their centroids; embeddings have length 1.
    pub threshold: f64,
    /// Smaller clusters are merged into the nearest larger one. If there are less than 10 times as many embeddings, the
    /// limit is a tenth of their number.
    pub min_cluster_size: usize,
    pub assignment: Assignment,
}

impl Agglomerative {
    /// The values of speaker-diarization-3.1.
    pub const SPEAKER_DIARIZATION_3_1: Self = Self {
        threshold: 0.704_565_496_394_579_9,
        min_cluster_size: 12,
        assignment: Assignment::Nearest,
    };

    /// Clusters of all embeddings, made of those at the places `training` ([`super::training_places`]).
    pub fn cluster(&self, embeddings: &Embeddings, training: &[usize], wanted: &Clusters) -> Result<Clustering> {
        let training: Vec<usize> = training
            .iter()
            .copied()
            .filter(|&place| embeddings.get(place).is_some())
            .collect();
        let (least, most) = wanted.bounds()?;
        let limit = |clusters: usize| clusters.clamp(1, training.len().max(1));
        let (least, most) = (limit(least), limit(most));
        if most < 2 {
            return Ok(one_cluster(embeddings, &training));
        }
        let vector = |number: usize| embeddings.get(training[number]).unwrap_or_default();
        let clusters = self.train(training.len(), vector, least, most)?;
        let count = clusters.iter().max().map_or(0, |last| last + 1);
        let centroids = means((0..training.len()).map(vector), &clusters, count);
        let scores = scores(embeddings, &centroids);
        Ok(Clustering {
            clusters: assign(&scores, embeddings.speakers(), count, self.assignment)?,
            centroids,
        })
    }

    /// Cluster of each of `count` vectors, `least` to `most` of them where that can be. More vectors than
    /// [`MOST_VECTORS`](super::linkage::MOST_VECTORS) are merged in blocks first. Not finite vectors are an
    /// error.
    pub fn train(
        &self,
        count: usize,
        vector: impl Fn(usize) -> Vec<f64> + Sync,
        least: usize,
        most: usize,
    ) -> Result<Vec<usize>> {
        if !self.threshold.is_finite() {
            return Err(Error::Input(format!(
                "the threshold of clustering is {}",
                self.threshold
            )));
        }
        if count < 2 {
            return Ok(vec![0; count]);
        }
        let tenth = (0.1 * count as f64).round_ties_even() as usize;
        let min_size = self.min_cluster_size.min(tenth.max(1));
        let reduced = reduced(count, |number| normalised(&vector(number)))?;
        let merges = weighted_centroid_linkage(&reduced.centroids, &reduced.sizes)?;
        let heights: Vec<f64> = merges.iter().map(|merge| merge.distance).collect();
        let mut clusters = cut(&merges, &heights, self.threshold);
        let large = large_clusters(&clusters, &reduced.sizes, min_size);
        let wanted = large.len().clamp(least, most);
        if wanted != large.len() {
            clusters = self.nearest_number(&merges, &reduced.sizes, wanted, min_size);
        }
        let clusters = absorbed(&reduced, clusters, min_size);
        Ok(reduced.members.iter().map(|&member| clusters[member]).collect())
    }

    /// The cut whose number of large clusters is nearest to `wanted`, of several the one nearest to the threshold.
    fn nearest_number(&self, merges: &[Merge], sizes: &[usize], wanted: usize, min_size: usize) -> Vec<usize> {
        let numbers: Vec<f64> = (0..merges.len()).map(|number| number as f64).collect();
        let mut order: Vec<usize> = (0..merges.len()).collect();
        let distance = |merge: usize| (merges[merge].distance - self.threshold).abs();
        order.sort_by(|&a, &b| distance(a).total_cmp(&distance(b)));
        // All in one, to begin with.
        let mut best = (vec![0; merges.len() + 1], 1usize);
        // A merge to fewer than the least size changes nothing.
        for merge in order.into_iter().filter(|&merge| merges[merge].size >= min_size) {
            let clusters = cut(merges, &numbers, merge as f64);
            let large = large_clusters(&clusters, sizes, min_size).len();
            if large.abs_diff(wanted) < best.1.abs_diff(wanted) {
                best = (clusters, large);
            }
            if large == wanted {
                break;
            }
        }
        best.0
    }
}

/// Numbers of the clusters with at least so many members, in order. `sizes` says how many each one in `clusters` is.
fn large_clusters(clusters: &[usize], sizes: &[usize], min_size: usize) -> Vec<usize> {
    let mut members = vec![0usize; clusters.iter().max().map_or(0, |last| last + 1)];
    for (&cluster, size) in clusters.iter().zip(sizes) {
        members[cluster] += size;
    }
    (0..members.len())
        .filter(|&cluster| members[cluster] >= min_size)
        .collect()
}

/// Merges small clusters into the large ones with the nearest centroids, and renumbers the large ones in order. Without
/// a large one all become one cluster.
fn absorbed(vectors: &Reduced, clusters: Vec<usize>, min_size: usize) -> Vec<usize> {
    let large = large_clusters(&clusters, &vectors.sizes, min_size);
    if large.is_empty() {
        return vec![0; clusters.len()];
    }
    let count = clusters.iter().max().map_or(0, |last| last + 1);
    let vectors = vectors.centroids.iter().zip(vectors.sizes.iter().copied());
    let centroids = weighted_means(vectors, &clusters, count);
    let number = |cluster: usize| {
        large.binary_search(&cluster).unwrap_or_else(|_| {
            let distances = large
                .iter()
                .map(|&large| cosine_distance(&centroids[large], &centroids[cluster]));
            first_least(distances).expect("there is a large cluster")
        })
    };
    let numbers: Vec<usize> = (0..count).map(number).collect();
    clusters.into_iter().map(|cluster| numbers[cluster]).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::linkage::centroid_linkage;
    use super::super::tests::{clusters, same_partition};
    use super::super::training_places;
    use super::*;
    use crate::chunks::Segmentations;
    use crate::golden;

    #[test]
    fn clusterings_are_those_of_the_original() {
        let tensors = golden::Tensors::load("f_ahc.safetensors");
        let mut compared = BTreeMap::new();
        for case in golden::json("f_ahc.json").as_array().unwrap() {
            let (input, key) = (case["input"].as_str().unwrap(), case["key"].as_str().unwrap());
            // Of few embeddings the golden data have neither a list of chunks nor merges.
            let mut find = |name: &str| {
                let full = format!("{key}.{name}");
                let found = tensors.has(&full).then(|| tensors.doubles(&full));
                assert!(found.is_some() || !golden::is_bundled(), "{full}");
                *compared.entry(name.to_owned()).or_insert(0) += usize::from(found.is_some());
                found
            };
            let (shape, values) = tensors.floats(&format!("{input}.embeddings"));
            let embeddings = Embeddings::new(&values, shape[1], shape[2]).unwrap();
            let (shape, values) = tensors.bytes(&format!("{input}.segmentations"));
            let segmentations = Segmentations::new(&values, shape[1], shape[2]).unwrap();
            let places = training_places(&embeddings, &segmentations).unwrap();
            if let (Some((_, chunks)), Some((_, speakers))) = (find("train_chunk"), find("train_speaker")) {
                let pairs = chunks.into_iter().zip(speakers);
                let expected: Vec<usize> = pairs
                    .map(|(chunk, speaker)| chunk as usize * shape[2] + speaker as usize)
                    .collect();
                assert_eq!(places, expected, "{key}");
            }

            let settings = Agglomerative {
                threshold: case["threshold"].as_f64().unwrap(),
                min_cluster_size: case["min_cluster_size"].as_u64().unwrap() as usize,
                assignment: Assignment::Nearest,
            };
            let vectors: Vec<Vec<f64>> = places
                .iter()
                .map(|&place| normalised(&embeddings.get(place).unwrap()))
                .collect();
            let merges = centroid_linkage(&vectors).unwrap();
            if let Some((_, dendrogram)) = find("dendrogram") {
                assert_eq!(merges.len() * 4, dendrogram.len(), "{key}");
                for (merge, expected) in merges.iter().zip(dendrogram.chunks_exact(4)) {
                    // Distances of at most 2, by sums of f64; the original normalises in f32.
                    assert!(
                        (merge.distance - expected[2]).abs() < 1e-6,
                        "{key}: {merge:?}, not {expected:?}"
                    );
                    assert_eq!(merge.size as f64, expected[3], "{key}");
                }
            }
            let heights: Vec<f64> = merges.iter().map(|merge| merge.distance).collect();
            let flat: Vec<Option<usize>> = cut(&merges, &heights, settings.threshold)
                .into_iter()
                .map(Some)
                .collect();
            let numbers = |values: Vec<f64>| -> Vec<i64> { values.into_iter().map(|value| value as i64).collect() };
            if let Some((_, expected)) = find("flat") {
                assert!(same_partition(&flat, &numbers(expected)), "{key}");
            }

            let found = settings
                .cluster(&embeddings, &places, &clusters(&case["arguments"]))
                .unwrap();
            let (_, hard) = find("hard").unwrap_or_else(|| panic!("{key} has no clusters"));
            assert!(same_partition(&found.clusters, &numbers(hard)), "{key}");
            let Some((shape, expected)) = find("centroids") else {
                continue;
            };
            assert_eq!(found.centroids.len(), shape[0], "{key}");
            for centroid in expected.chunks_exact(shape[1]) {
                // The numbers of clusters do not matter.
                let size = centroid.iter().fold(1.0f64, |size, value| size.max(value.abs()));
                let close = |found: &Vec<f64>| found.iter().zip(centroid).all(|(a, b)| (a - b).abs() < 1e-5 * size);
                assert!(found.centroids.iter().any(close), "{key}");
            }
        }
        assert!(!compared.is_empty());
        for (name, _) in compared.iter().filter(|(_, cases)| **cases == 0) {
            golden::not_compared(name, "no case has it");
        }
    }

    #[test]
    fn few_embeddings_are_clustered_too() {
        let settings = Agglomerative::SPEAKER_DIARIZATION_3_1;
        let values = [1.0, 0.0, 0.0, 1.0];
        let embeddings = Embeddings::new(&values, 1, 2).unwrap();
        let of = |training: &[usize], wanted: Clusters| settings.cluster(&embeddings, training, &wanted).unwrap();
        let none = of(&[], Clusters::default());
        assert_eq!((none.clusters, none.centroids.len()), (vec![Some(0); 2], 0));
        assert_eq!(of(&[1], Clusters::default()).centroids, [[0.0, 1.0]]);
        assert_ne!(
            of(&[0, 1], Clusters::default()).clusters[0],
            of(&[0, 1], Clusters::default()).clusters[1]
        );
        let one = Clusters {
            number: Some(1),
            ..Clusters::default()
        };
        assert_eq!(of(&[0, 1], one).clusters, [Some(0); 2]);
    }
}
