//! Reduces many vectors to fewer clusters before a centroid clustering, whose distance matrix would not fit into memory
//! otherwise.
//!
//! The vectors are cut into blocks of consecutive ones. In each block the nearest clusters are merged as the clustering of
//! the whole would, until the clusters of all blocks together are few enough; their centroids and sizes are then
//! clustered on exactly. Pairs within a voice, which a clustering of all vectors would merge first, are merged in the
//! blocks. The results can differ from those of all vectors where the last clusters merged in a block are no nearer
//! than those of different voices: with more than some hundred voices in a block, or voices that no threshold
//! separates.

use rayon::prelude::*;

use super::linkage::{MOST_VECTORS, centroid_linkage, cut};
use super::means;
use crate::error::Result;

/// Most vectors of a block. Its matrix of distances takes 25 MB.
const BLOCK: usize = 2_500;
/// Blocks that are processed at the same time, independent of the number of threads.
const TOGETHER: usize = 4;

/// Clusters of the vectors.
#[derive(Debug)]
pub struct Reduced {
    pub centroids: Vec<Vec<f64>>,
    /// Vectors of each cluster.
    pub sizes: Vec<usize>,
    /// Cluster of each vector.
    pub members: Vec<usize>,
}

/// `count` vectors as at most [`MOST_VECTORS`] clusters; if there are no more of them, each is one.
pub fn reduced(count: usize, vector: impl Fn(usize) -> Vec<f64> + Sync) -> Result<Reduced> {
    reduced_to(MOST_VECTORS, BLOCK, count, vector)
}

fn reduced_to(most: usize, block: usize, count: usize, vector: impl Fn(usize) -> Vec<f64> + Sync) -> Result<Reduced> {
    if count <= most {
        return Ok(Reduced {
            centroids: (0..count).map(vector).collect(),
            sizes: vec![1; count],
            members: (0..count).collect(),
        });
    }
    let blocks = count.div_ceil(block);
    let limit = (most / blocks).max(1);
    let mut all = Reduced {
        centroids: Vec::new(),
        sizes: Vec::new(),
        members: Vec::with_capacity(count),
    };
    let numbers: Vec<usize> = (0..blocks).collect();
    for together in numbers.chunks(TOGETHER) {
        let of_block = |&number: &usize| {
            // Of equal length, but for one.
            let (start, end) = (number * count / blocks, (number + 1) * count / blocks);
            merged((start..end).map(&vector).collect(), limit)
        };
        for (centroids, clusters) in together.par_iter().map(of_block).collect::<Result<Vec<_>>>()? {
            let first = all.centroids.len();
            all.centroids.extend(centroids);
            all.sizes.resize(all.centroids.len(), 0);
            for cluster in clusters {
                all.sizes[first + cluster] += 1;
                all.members.push(first + cluster);
            }
        }
    }
    Ok(all)
}

/// Centroids and members of what is left when the nearest of `vectors` are merged to `limit` clusters.
fn merged(vectors: Vec<Vec<f64>>, limit: usize) -> Result<(Vec<Vec<f64>>, Vec<usize>)> {
    let merges = centroid_linkage(&vectors)?;
    let Some(last) = vectors.len().checked_sub(limit + 1) else {
        let alone = (0..vectors.len()).collect();
        return Ok((vectors, alone));
    };
    let numbers: Vec<f64> = (0..merges.len()).map(|number| number as f64).collect();
    let clusters = cut(&merges, &numbers, last as f64);
    Ok((means(&vectors, &clusters, limit), clusters))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::agglomerative::Agglomerative;
    use super::super::linkage::weighted_centroid_linkage;
    use super::super::{normalised, squared_distance};
    use super::*;

    /// Vectors of length 1 around the directions of `voices`, each vector with its voice, from numbers of its own.
    fn voices(seed: u64, voices: usize, count: usize, dimension: usize, noise: f64) -> Vec<(usize, Vec<f64>)> {
        let mut state = seed;
        let mut value = || {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        };
        let directions: Vec<Vec<f64>> = (0..voices)
            .map(|_| normalised(&(0..dimension).map(|_| value()).collect::<Vec<_>>()))
            .collect();
        // A uniform number in [-1, 1] has variance 1/3.
        let size = noise * (3.0 / dimension as f64).sqrt();
        (0..count)
            .map(|_| {
                let voice = ((value() + 1.0) * 0.5 * voices as f64) as usize % voices;
                let vector: Vec<f64> = directions[voice].iter().map(|x| x + size * value()).collect();
                (voice, normalised(&vector))
            })
            .collect()
    }

    fn clustered(reduced: &Reduced, threshold: f64) -> Vec<usize> {
        let merges = weighted_centroid_linkage(&reduced.centroids, &reduced.sizes).unwrap();
        let heights: Vec<f64> = merges.iter().map(|merge| merge.distance).collect();
        let clusters = cut(&merges, &heights, threshold);
        reduced.members.iter().map(|&member| clusters[member]).collect()
    }

    /// Whether both are the same partition.
    fn same(a: &[usize], b: &[usize]) -> bool {
        let mut pairs: Vec<(usize, usize)> = a.iter().copied().zip(b.iter().copied()).collect();
        pairs.sort_unstable();
        pairs.dedup();
        let mut first: Vec<usize> = pairs.iter().map(|pair| pair.0).collect();
        let mut second: Vec<usize> = pairs.iter().map(|pair| pair.1).collect();
        first.dedup();
        second.sort_unstable();
        second.dedup();
        a.len() == b.len() && first.len() == pairs.len() && second.len() == pairs.len()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn voices_that_lie_apart_are_the_clusters_of_the_whole(
            seed in any::<u64>(), speakers in 1usize..6, count in 130usize..400, block in 20usize..60,
        ) {
            let vectors = voices(seed, speakers, count, 64, 0.3);
            let spoken: Vec<usize> = vectors.iter().map(|(voice, _)| *voice).collect();
            let vector = |number: usize| vectors[number].1.clone();
            let whole = clustered(&reduced_to(count, block, count, vector).unwrap(), 0.7);
            let blocks = reduced_to(120, block, count, vector).unwrap();
            prop_assert!(blocks.centroids.len() <= 120);
            prop_assert_eq!(blocks.sizes.iter().sum::<usize>(), count);
            let found = clustered(&blocks, 0.7);
            prop_assert!(same(&found, &whole));
            prop_assert!(same(&found, &spoken));
        }
    }

    #[test]
    fn partitions_are_compared_up_to_names() {
        assert!(same(&[0, 0, 1], &[5, 5, 2]));
        assert!(!same(&[0, 0, 1], &[5, 2, 2]));
        assert!(!same(&[0, 0], &[1, 2]));
        assert!(!same(&[1, 2], &[0, 0]));
    }

    /// Three hours of speech and more: the voices are found, also one of few embeddings, and a number of clusters that is
    /// asked for.
    #[test]
    fn ten_thousand_embeddings_are_clustered_as_few() {
        let count = 10_100;
        let mut vectors = voices(1, 3, count - 20, 192, 0.4);
        let rare = normalised(&(0..192).map(|at| (at as f64 * 0.7).sin()).collect::<Vec<_>>());
        for number in 0..20 {
            let noise = &voices(50 + number, 1, 1, 192, 0.0)[0].1;
            let vector: Vec<f64> = rare.iter().zip(noise).map(|(x, noise)| x + 0.4 * noise).collect();
            vectors.insert(3_000 + number as usize, (3, normalised(&vector)));
        }
        let spoken: Vec<usize> = vectors.iter().map(|(voice, _)| *voice).collect();
        let settings = Agglomerative::SPEAKER_DIARIZATION_3_1;
        let vector = |number: usize| vectors[number].1.clone();
        let found = settings.train(count, vector, 1, usize::MAX).unwrap();
        assert!(same(&found, &spoken));
        let asked = settings.train(count, vector, 3, 3).unwrap();
        assert_eq!(asked.iter().max(), Some(&2));

        let reduced = reduced(count, vector).unwrap();
        assert!(reduced.centroids.len() <= MOST_VECTORS);
        for (number, &member) in reduced.members.iter().enumerate() {
            // A vector lies nearer to its centroid than voices to each other, which are at right angles but for chance.
            assert!(squared_distance(&vectors[number].1, &reduced.centroids[member]) < 1.0);
        }
    }
}
