//! Agglomerative clustering by centroids: repeatedly merges the two clusters with the nearest centroids. As scipy's
//! `linkage(method="centroid")` and `fcluster(criterion="distance")`.

use rayon::prelude::*;

use super::squared_distance;
use crate::error::{Error, Result};

/// Most vectors. The matrix of their distances takes 8 bytes for each pair: 100 MB.
pub const MOST_VECTORS: usize = 5_000;

/// A step of the clustering.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Merge {
    /// Clusters that become one, the lower number first. The vectors are clusters 0 to n-1; the result of step i is n+i.
    pub left: usize,
    pub right: usize,
    /// Euclidean distance of their centroids. It may be less than that of an earlier step (an inversion).
    pub distance: f64,
    /// Vectors of the result.
    pub size: usize,
}

/// Upper triangle of a symmetric matrix without its diagonal.
struct Distances {
    count: usize,
    values: Vec<f64>,
}

impl Distances {
    fn between(vectors: &[Vec<f64>]) -> Self {
        let count = vectors.len();
        let mut values = vec![0.0; count * count.saturating_sub(1) / 2];
        let mut rows = Vec::with_capacity(count);
        let mut rest = &mut values[..];
        for index in 0..count {
            let (row, after) = rest.split_at_mut(count - index - 1);
            rows.push(row);
            rest = after;
        }
        rows.into_par_iter().enumerate().for_each(|(index, row)| {
            let (fours, rest) = row.as_chunks_mut();
            let (others, last) = vectors[index + 1..].as_chunks();
            for (distances, others) in fours.iter_mut().zip(others) {
                *distances = squared_distances(&vectors[index], others).map(f64::sqrt);
            }
            for (distance, other) in rest.iter_mut().zip(last) {
                *distance = squared_distance(&vectors[index], other).sqrt();
            }
        });
        Self { count, values }
    }

    fn place(&self, a: usize, b: usize) -> usize {
        let (low, high) = if a < b { (a, b) } else { (b, a) };
        low * (2 * self.count - low - 1) / 2 + high - low - 1
    }

    fn get(&self, a: usize, b: usize) -> f64 {
        self.values[self.place(a, b)]
    }
}

/// Four at a time: the sums, each in order, are independent chains of additions.
fn squared_distances(a: &[f64], others: &[Vec<f64>; 4]) -> [f64; 4] {
    let others = others.each_ref().map(|other| &other[..a.len()]);
    let mut sums = [0.0; 4];
    for (at, a) in a.iter().enumerate() {
        for (sum, other) in sums.iter_mut().zip(others) {
            *sum += (a - other[at]) * (a - other[at]);
        }
    }
    sums
}

/// The n-1 merges of n vectors, in order. Each step takes the nearest pair, the lower numbers of equal ones: O(n²) steps
/// where few rows have a neighbour that was merged, O(n³) at worst. (The chain of nearest neighbours, which is always
/// O(n²), is not valid here: a merge can bring clusters nearer to each other.)
///
/// More than [`MOST_VECTORS`] are an error: reduce them first (see `blocks`).
pub fn centroid_linkage(vectors: &[Vec<f64>]) -> Result<Vec<Merge>> {
    weighted_centroid_linkage(vectors, &vec![1; vectors.len()])
}

/// The same for centroids of clusters that are there already, of `sizes` vectors each. The sizes of merges count these.
pub fn weighted_centroid_linkage(vectors: &[Vec<f64>], sizes: &[usize]) -> Result<Vec<Merge>> {
    let count = vectors.len();
    if sizes.len() != count || sizes.contains(&0) {
        return Err(Error::Input(format!(
            "{count} centroids need as many sizes above 0, not {} sizes",
            sizes.len()
        )));
    }
    if count > MOST_VECTORS {
        return Err(Error::Input(format!(
            "{count} embeddings are to be clustered, and at most {MOST_VECTORS} can be"
        )));
    }
    if vectors.windows(2).any(|pair| pair[0].len() != pair[1].len()) {
        return Err(Error::Input("vectors to be clustered are of different lengths".into()));
    }
    if vectors.iter().flatten().any(|value| !value.is_finite()) {
        return Err(Error::Input("a vector to be clustered is not finite".into()));
    }
    let mut distances = Distances::between(vectors);
    // Squares of what follows from them are numbers too.
    if distances.values.iter().any(|distance| *distance > 1e100) {
        return Err(Error::Input("vectors to be clustered are too far apart".into()));
    }
    // Of each slot: size (0 is none), number of the cluster in it, and the nearest of the slots after it.
    let mut sizes = sizes.to_vec();
    let mut numbers: Vec<usize> = (0..count).collect();
    let mut nearest: Vec<Nearest> = (0..count).map(|slot| Nearest::find(&distances, &sizes, slot)).collect();
    let mut merges = Vec::with_capacity(count.saturating_sub(1));
    for step in 0..count.saturating_sub(1) {
        let (gone, kept, distance) = loop {
            let mut best = 0;
            for (slot, near) in nearest.iter().enumerate() {
                if near.distance < nearest[best].distance {
                    best = slot;
                }
            }
            match nearest[best].slot {
                Some(kept) => break (best, kept, nearest[best].distance),
                None => nearest[best] = Nearest::find(&distances, &sizes, best),
            }
        };
        let (first, second) = (sizes[gone] as f64, sizes[kept] as f64);
        let (left, right) = (numbers[gone].min(numbers[kept]), numbers[gone].max(numbers[kept]));
        let size = sizes[gone] + sizes[kept];
        merges.push(Merge {
            left,
            right,
            distance,
            size,
        });

        // The result is in the later slot.
        sizes[gone] = 0;
        nearest[gone] = Nearest::NONE;
        for slot in (0..count).filter(|&slot| slot != kept) {
            if sizes[slot] > 0 {
                // Of Lance and Williams, for distances that are not squared.
                let (a, b) = (distances.get(slot, gone), distances.get(slot, kept));
                let total = first + second;
                let squared = (first * a * a + second * b * b - first * second * distance * distance / total) / total;
                let place = distances.place(slot, kept);
                distances.values[place] = squared.max(0.0).sqrt();
            }
        }
        sizes[kept] = size;
        numbers[kept] = count + step;
        for slot in (0..kept).filter(|&slot| sizes[slot] > 0) {
            let new = distances.get(slot, kept);
            let near = &mut nearest[slot];
            if new < near.distance {
                *near = Nearest {
                    distance: new,
                    slot: Some(kept),
                };
            } else if near.slot == Some(gone) || near.slot == Some(kept) {
                near.slot = None;
            }
        }
        nearest[kept] = Nearest::find(&distances, &sizes, kept);
    }
    Ok(merges)
}

/// The nearest of the slots after a slot.
#[derive(Clone, Copy)]
struct Nearest {
    /// Lower bound of the distance. Infinite if there is no other slot.
    distance: f64,
    /// Unknown after the nearest slot has changed: it is searched for again only when no other slot has a nearer one,
    /// as in scipy, since many slots share the same nearest cluster and would all search after each merge.
    slot: Option<usize>,
}

impl Nearest {
    const NONE: Self = Self {
        distance: f64::INFINITY,
        slot: None,
    };

    fn find(distances: &Distances, sizes: &[usize], slot: usize) -> Self {
        let mut nearest = Self::NONE;
        let first = slot + 1;
        // The distances to the slots after this one are one after the other.
        let after = match first < sizes.len() {
            true => &distances.values[distances.place(slot, first)..][..sizes.len() - first],
            false => &[],
        };
        for (other, (&distance, &size)) in after.iter().zip(&sizes[first..]).enumerate() {
            if size > 0 && distance < nearest.distance {
                nearest = Self {
                    distance,
                    slot: Some(first + other),
                };
            }
        }
        nearest
    }
}

/// Cluster of each vector where all merges with `heights` up to `most` are made: a cluster is a subtree in which no merge
/// is higher. (With inversions the height of its root is not enough.) `heights` has one for each merge: their distances,
/// or their numbers. Clusters are numbered as scipy does: from the root on, at each merge first the merges below it, left
/// then right, then the vectors.
pub fn cut(merges: &[Merge], heights: &[f64], most: f64) -> Vec<usize> {
    let count = merges.len() + 1;
    let mut highest: Vec<f64> = Vec::with_capacity(merges.len());
    for (merge, &height) in merges.iter().zip(heights) {
        let of = |cluster: usize| {
            if cluster < count {
                f64::NEG_INFINITY
            } else {
                highest[cluster - count]
            }
        };
        highest.push(height.max(of(merge.left)).max(of(merge.right)));
    }
    let mut clusters = vec![0; count];
    let mut next = 0;
    let mut number = || {
        next += 1;
        next - 1
    };
    enum Visit {
        Merge(usize, Option<usize>),
        Vector(usize, Option<usize>),
    }
    let root = merges.len().checked_sub(1);
    let mut stack = vec![root.map_or(Visit::Vector(0, None), |root| Visit::Merge(root, None))];
    while let Some(visit) = stack.pop() {
        match visit {
            Visit::Vector(vector, cluster) => clusters[vector] = cluster.unwrap_or_else(&mut number),
            Visit::Merge(merge, mut cluster) => {
                if cluster.is_none() && highest[merge] <= most {
                    cluster = Some(number());
                }
                let children = [merges[merge].left, merges[merge].right];
                // The last one pushed comes first.
                for &vector in children.iter().rev().filter(|child| **child < count) {
                    stack.push(Visit::Vector(vector, cluster));
                }
                for &below in children.iter().rev().filter(|child| **child >= count) {
                    stack.push(Visit::Merge(below - count, cluster));
                }
            }
        }
    }
    clusters
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference: searches all pairs of centroids in each step.
    fn by_definition(vectors: &[Vec<f64>]) -> Vec<f64> {
        let mut clusters: Vec<(Vec<f64>, f64)> = vectors.iter().map(|vector| (vector.clone(), 1.0)).collect();
        let mut distances = Vec::new();
        while clusters.len() > 1 {
            let mut best = (0, 0, f64::INFINITY);
            for a in 0..clusters.len() {
                for b in a + 1..clusters.len() {
                    let squares = clusters[a].0.iter().zip(&clusters[b].0).map(|(a, b)| (a - b) * (a - b));
                    let distance = squares.sum::<f64>().sqrt();
                    if distance < best.2 {
                        best = (a, b, distance);
                    }
                }
            }
            let (other, weight) = clusters.remove(best.1);
            let (centroid, size) = &mut clusters[best.0];
            for (value, other) in centroid.iter_mut().zip(&other) {
                *value = (*value * *size + other * weight) / (*size + weight);
            }
            *size += weight;
            distances.push(best.2);
        }
        distances
    }

    #[test]
    fn merges_are_those_of_the_definition() {
        let mut state = 3u64;
        for count in [1usize, 2, 3, 10, 60] {
            for dimension in [1, 2, 5] {
                let mut value = || {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    (state >> 11) as f64 / (1u64 << 53) as f64
                };
                let vectors: Vec<Vec<f64>> = (0..count).map(|_| (0..dimension).map(|_| value()).collect()).collect();
                let merges = centroid_linkage(&vectors).unwrap();
                let expected = by_definition(&vectors);
                assert_eq!(merges.len(), expected.len());
                for (merge, expected) in merges.iter().zip(&expected) {
                    // Distances of at most 3, through at most 60 updates.
                    assert!((merge.distance - expected).abs() < 1e-9, "{count} {dimension}");
                }
                assert!(merges.last().is_none_or(|last| last.size == count));
            }
        }
        assert_eq!(centroid_linkage(&[]), Ok(Vec::new()));
        assert!(centroid_linkage(&[vec![0.0], vec![f64::NAN]]).is_err());
        assert!(centroid_linkage(&vec![Vec::new(); MOST_VECTORS + 1]).is_err());
        assert!(centroid_linkage(&[vec![0.0], vec![1.0, 2.0]]).is_err());
        assert!(centroid_linkage(&[vec![1e200], vec![-1e200]]).is_err());
    }

    #[test]
    fn clusters_that_are_there_already_are_merged_on() {
        let mut state = 11u64;
        let mut value = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let vectors: Vec<Vec<f64>> = (0..60).map(|_| (0..5).map(|_| value()).collect()).collect();
        let whole = centroid_linkage(&vectors).unwrap();
        // What the first 40 merges leave.
        let numbers: Vec<f64> = (0..whole.len()).map(|number| number as f64).collect();
        let clusters = cut(&whole, &numbers, 39.0);
        let centroids = super::super::means(&vectors, &clusters, 20);
        let sizes: Vec<usize> = (0..20)
            .map(|cluster| clusters.iter().filter(|other| **other == cluster).count())
            .collect();
        let rest = weighted_centroid_linkage(&centroids, &sizes).unwrap();
        assert_eq!(rest.len(), 19);
        for (merge, expected) in rest.iter().zip(&whole[40..]) {
            // Distances of at most 3, once through 40 updates and once through means.
            assert!((merge.distance - expected.distance).abs() < 1e-9);
            assert_eq!(merge.size, expected.size);
        }
        assert!(weighted_centroid_linkage(&centroids, &sizes[1..]).is_err());
        assert!(weighted_centroid_linkage(&centroids[..2], &[1, 0]).is_err());
    }

    #[test]
    fn a_cut_looks_at_the_highest_merge_of_a_subtree() {
        // A triangle whose third corner is nearer to the middle of the others than they are to each other.
        let vectors = vec![vec![0.0, 0.0], vec![1.0, 0.0], vec![0.5, 0.9], vec![10.0, 0.0]];
        let merges = centroid_linkage(&vectors).unwrap();
        let heights: Vec<f64> = merges.iter().map(|merge| merge.distance).collect();
        assert!(heights[1] < heights[0], "{heights:?}");
        // Below the first merge, though above the second, all stand alone.
        let between = 0.5 * (heights[0] + heights[1]);
        let alone = cut(&merges, &heights, between);
        assert_eq!(alone.iter().max(), Some(&3));
        let together = cut(&merges, &heights, heights[0]);
        assert!(together[0] == together[1] && together[1] == together[2] && together[2] != together[3]);
        assert_eq!(cut(&[], &[], 1.0), [0]);
    }
}
