//! Clusters the speakers of chunks by their embeddings, as pyannote.audio 4 does (`clustering.py`). Computed in f64.

pub mod agglomerative;
pub mod assign;
mod blocks;
pub mod k_means;
pub mod linkage;
pub mod plda;
pub mod vbx;

use crate::chunks::Segmentations;
use crate::error::{Error, Result};

/// Embeddings of the speakers of each chunk: (chunks, speakers, dimension). One with a value that is not finite counts as
/// none.
#[derive(Debug, Clone, Copy)]
pub struct Embeddings<'a> {
    values: &'a [f32],
    speakers: usize,
    dimension: usize,
}

impl<'a> Embeddings<'a> {
    /// A number of values that makes no whole chunks is an error.
    pub fn new(values: &'a [f32], speakers: usize, dimension: usize) -> Result<Self> {
        match speakers.checked_mul(dimension) {
            Some(size) if size > 0 && values.len().is_multiple_of(size) => Ok(Self {
                values,
                speakers,
                dimension,
            }),
            _ => Err(Error::Input(format!(
                "{} values do not divide into chunks of {speakers} embeddings of {dimension}",
                values.len()
            ))),
        }
    }

    pub fn speakers(&self) -> usize {
        self.speakers
    }

    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// Number of chunks times speakers.
    pub fn count(&self) -> usize {
        self.values.len() / self.dimension
    }

    /// An embedding by its place, chunk * speakers + speaker, if there is one.
    pub fn get(&self, place: usize) -> Option<Vec<f64>> {
        let values = &self.values[place * self.dimension..(place + 1) * self.dimension];
        let finite = values.iter().all(|value| value.is_finite());
        finite.then(|| values.iter().copied().map(f64::from).collect())
    }
}

/// Least part of a chunk's frames in which a speaker is active alone, for clusters to be made of it.
pub const LEAST_ACTIVE: f64 = 0.2;

/// Places of the embeddings that clusters are made of: those of speakers who are active alone for long enough.
pub fn training_places(embeddings: &Embeddings, segmentations: &Segmentations) -> Result<Vec<usize>> {
    let active = segmentations.active_frames();
    if active.len() != embeddings.count() || segmentations.speakers() != embeddings.speakers {
        return Err(Error::Input(format!(
            "{} embeddings do not fit segmentations of {} chunks of {} speakers",
            embeddings.count(),
            segmentations.chunks(),
            segmentations.speakers()
        )));
    }
    let least = LEAST_ACTIVE * segmentations.frames() as f64;
    let long = |&place: &usize| active[place].1 as f64 >= least && embeddings.get(place).is_some();
    Ok((0..active.len()).filter(long).collect())
}

/// The wanted number of clusters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Clusters {
    /// The exact number; takes precedence over the others.
    pub number: Option<usize>,
    pub least: Option<usize>,
    pub most: Option<usize>,
}

impl Clusters {
    /// Least and most. A number of 0, and a least above the most, are errors.
    pub(crate) fn bounds(&self) -> Result<(usize, usize)> {
        let least = self.number.or(self.least).unwrap_or(1);
        let most = self.number.or(self.most).unwrap_or(usize::MAX);
        if least == 0 || most == 0 || least > most {
            return Err(Error::Input(format!(
                "at least {least} and at most {most} clusters are asked for"
            )));
        }
        Ok((least, most))
    }
}

/// The result of a clustering.
#[derive(Debug, Clone, PartialEq)]
pub struct Clustering {
    /// Cluster of each (chunk, speaker), or none.
    pub clusters: Vec<Option<usize>>,
    /// (clusters, dimension)
    pub centroids: Vec<Vec<f64>>,
}

impl Clustering {
    /// Removes the cluster of speakers who are silent in their chunk, which is meaningless.
    pub fn without_silent(mut self, segmentations: &Segmentations) -> Self {
        for (cluster, active) in self.clusters.iter_mut().zip(segmentations.active_frames()) {
            if active.0 == 0 {
                *cluster = None;
            }
        }
        self
    }
}

/// All in one cluster, whose centroid is the mean of the embeddings at `training`.
fn one_cluster(embeddings: &Embeddings, training: &[usize]) -> Clustering {
    let vectors = training.iter().filter_map(|&place| embeddings.get(place));
    let mut centroids = means(vectors, &vec![0; training.len()], 1);
    // Of no embedding there is no mean.
    centroids.retain(|centroid| !centroid.is_empty());
    Clustering {
        clusters: vec![Some(0); embeddings.count()],
        centroids,
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn squared_distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum()
}

fn norm(a: &[f64]) -> f64 {
    dot(a, a).sqrt()
}

/// Divided by its length; zero stays zero.
fn normalised(a: &[f64]) -> Vec<f64> {
    let norm = norm(a);
    let norm = if norm > 0.0 { norm } else { 1.0 };
    a.iter().map(|value| value / norm).collect()
}

/// 1 - cosine. A vector of zeros has distance 1 from all.
fn cosine_distance(a: &[f64], b: &[f64]) -> f64 {
    let norms = norm(a) * norm(b);
    1.0 - if norms > 0.0 { dot(a, b) / norms } else { 0.0 }
}

/// Mean of each cluster; of none, zeros.
fn means<V: AsRef<[f64]>>(vectors: impl IntoIterator<Item = V>, clusters: &[usize], count: usize) -> Vec<Vec<f64>> {
    weighted_means(vectors.into_iter().map(|vector| (vector, 1)), clusters, count)
}

/// The same with a weight for each vector.
fn weighted_means<V: AsRef<[f64]>>(
    vectors: impl IntoIterator<Item = (V, usize)>,
    clusters: &[usize],
    count: usize,
) -> Vec<Vec<f64>> {
    let mut sums: Vec<(Vec<f64>, usize)> = vec![(Vec::new(), 0); count];
    let mut dimension = 0;
    for ((vector, size), &cluster) in vectors.into_iter().zip(clusters) {
        let vector = vector.as_ref();
        dimension = vector.len();
        let (sum, members) = &mut sums[cluster];
        sum.resize(dimension, 0.0);
        sum.iter_mut()
            .zip(vector)
            .for_each(|(sum, value)| *sum += value * size as f64);
        *members += size;
    }
    let mean = |(mut sum, members): (Vec<f64>, usize)| {
        sum.resize(dimension, 0.0);
        sum.iter_mut().for_each(|sum| *sum /= members.max(1) as f64);
        sum
    };
    sums.into_iter().map(mean).collect()
}

/// Place of the first least value.
fn first_least(values: impl Iterator<Item = f64>) -> Option<usize> {
    let mut least: Option<(usize, f64)> = None;
    for (place, value) in values.enumerate() {
        if least.is_none_or(|(_, best)| value < best) {
            least = Some((place, value));
        }
    }
    least.map(|(place, _)| place)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Whether two lists name the same clusters, by whatever numbers; -2 is none in both.
    pub fn same_partition(found: &[Option<usize>], expected: &[i64]) -> bool {
        let pairs = || found.iter().zip(expected);
        let none = pairs().all(|(found, expected)| found.is_none() == (*expected < 0));
        let mut names: Vec<(usize, i64)> = pairs()
            .filter_map(|(found, &expected)| Some(((*found)?, expected)))
            .collect();
        names.sort_unstable();
        names.dedup();
        let once = |names: &mut Vec<i64>| {
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            names.len() == count
        };
        none && found.len() == expected.len()
            && once(&mut names.iter().map(|name| name.0 as i64).collect())
            && once(&mut names.iter().map(|name| name.1).collect())
    }

    /// A number of clusters of golden JSON, where infinity is a word.
    pub fn clusters(arguments: &serde_json::Value) -> Clusters {
        let number = |name: &str| arguments[name].as_u64().map(|number| number as usize);
        Clusters {
            number: number("num_clusters"),
            least: number("min_clusters"),
            most: number("max_clusters"),
        }
    }

    #[test]
    fn partitions_are_compared_up_to_names() {
        assert!(same_partition(&[Some(1), Some(0), None], &[5, 7, -2]));
        assert!(!same_partition(&[Some(1), Some(0)], &[5, 5]));
        assert!(!same_partition(&[Some(1), Some(1)], &[5, 6]));
        assert!(!same_partition(&[Some(1), None], &[5, 6]));
    }

    #[test]
    fn bounds_that_no_number_meets_are_refused() {
        let of = |number, least, most| Clusters { number, least, most }.bounds();
        assert_eq!(of(None, None, None), Ok((1, usize::MAX)));
        assert_eq!(of(Some(2), Some(5), Some(1)), Ok((2, 2)));
        assert!(of(None, Some(3), Some(2)).is_err());
        assert!(of(Some(0), None, None).is_err());
        assert!(Embeddings::new(&[0.0; 5], 1, 2).is_err());
    }
}
