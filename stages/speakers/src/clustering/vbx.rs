//! The clustering of pyannote's speaker-diarization-community-1: variational Bayes over PLDA features (VBx), begun from an
//! agglomerative clustering. After Landini, Profant, Diez, Burget: Bayesian HMM clustering of x-vector sequences (VBx) in
//! speaker diarization, 2022, without its hidden Markov model; numbers in comments are of its equations.

use super::assign::{Assignment, assign, scores};
use super::k_means::k_means;
use super::linkage::{MOST_VECTORS, centroid_linkage, cut};
use super::plda::Plda;
use super::{Clustering, Clusters, Embeddings, dot, means, normalised, one_cluster};
use crate::chunks::Segmentations;
use crate::error::{Error, Result};

/// Most iterations, and the least gain of the bound for another one.
const ITERATIONS: usize = 20;
const LEAST_GAIN: f64 = 1e-4;
/// Initial log-odds of an embedding's first cluster against each other one, in nats.
const SURENESS: f64 = 7.0;
/// Speakers that are less likely are dropped.
const LEAST_PRIOR: f64 = 1e-7;

/// The settings of the clustering.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Vbx {
    /// The agglomerative clustering merges up to this distance of centroids; embeddings have length 1.
    pub threshold: f64,
    /// Weight of the features against the prior.
    pub fa: f64,
    /// Weight of the speakers' prior: the greater, the fewer speakers.
    pub fb: f64,
}

impl Vbx {
    /// The values of speaker-diarization-community-1.
    pub const COMMUNITY_1: Self = Self {
        threshold: 0.6,
        fa: 0.07,
        fb: 0.8,
    };

    /// Clusters of all embeddings, made of those at the places `training` ([`super::training_places`]). If VBx finds fewer
    /// or more than wanted, k-means makes as many as are wanted, and speakers of a chunk may then share one.
    ///
    /// Of more than [`MOST_VECTORS`] places, an evenly spread subset of that size is used.
    pub fn cluster(
        &self,
        embeddings: &Embeddings,
        segmentations: &Segmentations,
        training: &[usize],
        plda: &Plda,
        wanted: &Clusters,
    ) -> Result<Clustering> {
        let (least, most) = wanted.bounds()?;
        let active = segmentations.active_frames();
        if active.len() != embeddings.count() {
            return Err(Error::Input("segmentations do not fit the embeddings".into()));
        }
        let taken = training.len().min(MOST_VECTORS);
        let spread = (0..taken).map(|number| training[number * training.len() / taken]);
        let vectors: Vec<Vec<f64>> = spread.filter_map(|place| embeddings.get(place)).collect();
        if vectors.len() < 2 {
            return Ok(one_cluster(embeddings, training));
        }
        let unit: Vec<Vec<f64>> = vectors.iter().map(|vector| normalised(vector)).collect();
        let merges = centroid_linkage(&unit)?;
        let heights: Vec<f64> = merges.iter().map(|merge| merge.distance).collect();
        let first = cut(&merges, &heights, self.threshold);
        let features = vectors
            .iter()
            .map(|vector| plda.features(vector))
            .collect::<Result<Vec<_>>>()?;
        let found = self.infer(&features, plda.phi(), &first)?;
        let mut centroids = found.centroids(&vectors);
        let mut assignment = Assignment::Constrained;
        let number = centroids.len().clamp(least, most);
        if number != centroids.len() {
            let clusters = k_means(&unit, number);
            centroids = means(&vectors, &clusters, number.min(unit.len()));
            assignment = Assignment::Nearest;
        }
        let mut scores = scores(embeddings, &centroids);
        if assignment == Assignment::Constrained {
            // Speakers who are silent in a chunk take no cluster from the others.
            let least = scores
                .iter()
                .copied()
                .filter(|score| !score.is_nan())
                .fold(f64::INFINITY, f64::min);
            for (scores, active) in scores.chunks_exact_mut(centroids.len()).zip(&active) {
                if active.0 == 0 {
                    scores.fill(least - 1.0);
                }
            }
        }
        Ok(Clustering {
            clusters: assign(&scores, embeddings.speakers(), centroids.len(), assignment)?,
            centroids,
        })
    }

    /// Speakers of `features` with the variances `phi` between speakers, from the clusters `first`, one for each row of
    /// features. Values so large that the bound is not finite are an error.
    pub fn infer(&self, features: &[Vec<f64>], phi: &[f64], first: &[usize]) -> Result<Inference> {
        let (fa, fb) = (self.fa, self.fb);
        if !(fa > 0.0 && fa.is_finite() && fb > 0.0 && fb.is_finite()) {
            return Err(Error::Input(format!(
                "the weights of VBx are {fa} and {fb}; they must be above 0"
            )));
        }
        if first.len() != features.len() || features.iter().any(|row| row.len() != phi.len()) {
            return Err(Error::Input(
                "features, variances and first clusters do not fit each other".into(),
            ));
        }
        let speakers = first.iter().max().map_or(0, |last| last + 1);
        // Responsibilities, (rows, speakers): a softmax of SURENESS for the first cluster.
        let sure = SURENESS.exp();
        let total = sure + speakers.saturating_sub(1) as f64;
        let mut gamma: Vec<Vec<f64>> = first
            .iter()
            .map(|&cluster| {
                (0..speakers)
                    .map(|speaker| if speaker == cluster { sure } else { 1.0 } / total)
                    .collect()
            })
            .collect();
        let mut pi = vec![1.0 / speakers.max(1) as f64; speakers];
        let rho: Vec<Vec<f64>> = features
            .iter()
            .map(|row| row.iter().zip(phi).map(|(value, phi)| value * phi.sqrt()).collect())
            .collect(); // (18)
        let constant = phi.len() as f64 * (2.0 * std::f64::consts::PI).ln();
        let constants: Vec<f64> = features.iter().map(|row| -0.5 * (dot(row, row) + constant)).collect();
        let mut bounds: Vec<f64> = Vec::new();
        for _ in 0..ITERATIONS {
            let mut bound = 0.0;
            // Of each speaker: its mean, and what is subtracted for it from each score.
            let mut models: Vec<(Vec<f64>, f64)> = Vec::with_capacity(speakers);
            for speaker in 0..speakers {
                let weight: f64 = gamma.iter().map(|row| row[speaker]).sum();
                let mut sum = vec![0.0; phi.len()];
                for (gamma, rho) in gamma.iter().zip(&rho) {
                    sum.iter_mut()
                        .zip(rho)
                        .for_each(|(sum, rho)| *sum += gamma[speaker] * rho);
                }
                let mut less = 0.0;
                for (alpha, phi) in sum.iter_mut().zip(phi) {
                    let variance = 1.0 / (1.0 + fa / fb * weight * phi); // (17)
                    *alpha *= fa / fb * variance; // (16)
                    less += 0.5 * (variance + *alpha * *alpha) * phi;
                    bound += fb * 0.5 * (variance.ln() - variance - *alpha * *alpha + 1.0);
                }
                models.push((sum, less));
            }
            let mut sums = vec![0.0; speakers];
            for ((gamma, rho), constant) in gamma.iter_mut().zip(&rho).zip(&constants) {
                for ((gamma, (alpha, less)), pi) in gamma.iter_mut().zip(&models).zip(&pi) {
                    *gamma = fa * (dot(rho, alpha) - less + constant) + (pi + 1e-8).ln(); // (23)
                }
                let largest = gamma.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total = largest + gamma.iter().map(|value| (value - largest).exp()).sum::<f64>().ln();
                bound += total;
                for (gamma, sum) in gamma.iter_mut().zip(&mut sums) {
                    *gamma = (*gamma - total).exp();
                    *sum += *gamma;
                }
            }
            if !bound.is_finite() {
                return Err(Error::Weights("the PLDA gives values that are not finite".into()));
            }
            let all: f64 = sums.iter().sum();
            pi = sums.iter().map(|sum| sum / all).collect();
            let gained = bounds.last().is_none_or(|before| bound - before >= LEAST_GAIN);
            bounds.push(bound); // (25)
            if !gained {
                break;
            }
        }
        Ok(Inference { gamma, pi, bounds })
    }
}

/// The result of VBx.
#[derive(Debug, Clone, PartialEq)]
pub struct Inference {
    /// Probability of each speaker for each row of features: (rows, speakers).
    pub gamma: Vec<Vec<f64>>,
    /// Probability of each speaker.
    pub pi: Vec<f64>,
    /// Evidence lower bound after each iteration.
    pub bounds: Vec<f64>,
}

impl Inference {
    /// Means of `vectors`, one for each row of features, for the speakers that are left, weighted by their probabilities.
    pub fn centroids(&self, vectors: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let left = (0..self.pi.len()).filter(|&speaker| self.pi[speaker] > LEAST_PRIOR);
        left.map(|speaker| {
            let mut sum = vec![0.0; vectors.first().map_or(0, Vec::len)];
            let mut weight = 0.0;
            for (gamma, vector) in self.gamma.iter().zip(vectors) {
                sum.iter_mut()
                    .zip(vector)
                    .for_each(|(sum, value)| *sum += gamma[speaker] * value);
                weight += gamma[speaker];
            }
            sum.iter().map(|sum| sum / weight).collect()
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::plda::PldaParts;
    use super::super::tests::{clusters, same_partition};
    use super::super::{squared_distance, training_places};
    use super::*;
    use crate::golden;

    /// Of the size of what is compared.
    fn assert_close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
        assert_eq!(found.len(), expected.len(), "{what}");
        for (found, expected) in found.iter().zip(expected) {
            let size = expected.abs().max(1.0);
            assert!(
                (found - expected).abs() <= tolerance * size,
                "{what}: {found}, not {expected}"
            );
        }
    }

    #[test]
    fn clusterings_are_those_of_the_original() {
        let tensors = golden::Tensors::load("f_vbx.safetensors");
        let mut compared = BTreeMap::new();
        for case in golden::json("f_vbx.json").as_array().unwrap() {
            let key = case["key"].as_str().unwrap();
            // What the original had no use for, as where a single embedding is clustered, the golden data have not.
            let mut find = |name: &str| {
                let full = format!("{key}.{name}");
                let found = tensors.has(&full).then(|| tensors.doubles(&full));
                let is_known = name == "centroids" || tensors.has(&format!("{key}.gamma"));
                assert!(found.is_some() || !(is_known && golden::is_bundled()), "{full}");
                *compared.entry(name.to_owned()).or_insert(0) += usize::from(found.is_some());
                found
            };
            let doubles = |name: &str| tensors.doubles(&format!("{key}.{name}"));
            let (shape, values) = tensors.floats(&format!("{key}.embeddings"));
            let embeddings = Embeddings::new(&values, shape[1], shape[2]).unwrap();
            let (shape, values) = tensors.bytes(&format!("{key}.segmentations"));
            let segmentations = Segmentations::new(&values, shape[1], shape[2]).unwrap();
            let part = |name: &str| doubles(&format!("plda.{name}")).1;
            let parts = PldaParts {
                mean1: part("mean1"),
                lda: part("lda"),
                mean2: part("mean2"),
                mu: part("mu"),
                tr: part("tr"),
                psi: part("psi"),
            };
            let plda = Plda::new(&parts, case["lda_dimension"].as_u64().unwrap() as usize).unwrap();
            let hyper = |name: &str| case["hyper"][name].as_f64().unwrap();
            let vbx = Vbx {
                threshold: hyper("threshold"),
                fa: hyper("Fa"),
                fb: hyper("Fb"),
            };
            let places = training_places(&embeddings, &segmentations).unwrap();
            let vectors: Vec<Vec<f64>> = places.iter().map(|&place| embeddings.get(place).unwrap()).collect();
            let features: Vec<Vec<f64>> = vectors.iter().map(|vector| plda.features(vector).unwrap()).collect();
            if let Some((_, phi)) = find("phi") {
                assert_close(plda.phi(), &phi, 1e-7, key);
            }
            if let Some((shape, expected)) = find("features") {
                for column in 0..shape[1] {
                    let found: Vec<f64> = features.iter().map(|row| row[column]).collect();
                    let expected: Vec<f64> = expected.chunks_exact(shape[1]).map(|row| row[column]).collect();
                    // The sign of a column is free.
                    let sign = dot(&found, &expected).signum();
                    let found: Vec<f64> = found.iter().map(|value| value * sign).collect();
                    // The original solves an eigenproblem for them: 4e-7 was measured, which is its rounding.
                    assert_close(&found, &expected, 1e-5, &format!("{key} feature {column}"));
                }
            }
            if let Some((_, first)) = find("ahc") {
                let first: Vec<usize> = first.iter().map(|&cluster| cluster as usize).collect();
                let found = vbx.infer(&features, plda.phi(), &first).unwrap();
                // The recommended tolerances: iterations carry differences of the features on.
                for (name, found) in [
                    ("gamma", found.gamma.concat()),
                    ("pi", found.pi),
                    ("elbo", found.bounds),
                ] {
                    if let Some((_, expected)) = find(name) {
                        assert_close(&found, &expected, 1e-6, &format!("{key} {name}"));
                    }
                }
            }
            let wanted = clusters(&case["arguments"]);
            let found = vbx
                .cluster(&embeddings, &segmentations, &places, &plda, &wanted)
                .unwrap();
            let (_, hard) = tensors.integers(&format!("{key}.hard"));
            let number = found.centroids.len();
            if let Some((shape, _)) = find("centroids") {
                assert_eq!(number, shape[0], "{key}");
            }
            let mut same = true;
            if case["kmeans_used"].as_bool().unwrap() {
                // The original's random starts differ: where they end in a worse partition than ours, the partitions
                // are not compared.
                let unit: Vec<Vec<f64>> = places
                    .iter()
                    .map(|&place| normalised(&embeddings.get(place).unwrap()))
                    .collect();
                let theirs: Vec<usize> = places.iter().map(|&place| hard[place] as usize).collect();
                let spread = |clusters: &[usize]| -> f64 {
                    let centres = means(&unit, clusters, number);
                    let pairs = unit.iter().zip(clusters);
                    pairs
                        .map(|(vector, &cluster)| squared_distance(vector, &centres[cluster]))
                        .sum()
                };
                let (ours, theirs) = (spread(&k_means(&unit, number)), spread(&theirs));
                assert!(ours <= theirs * (1.0 + 1e-9), "{key}: {ours}, not {theirs}");
                same = ours > theirs * (1.0 - 1e-9);
            }
            assert!(!same || same_partition(&found.clusters, &hard), "{key}");
        }
        assert!(!compared.is_empty());
        for (name, _) in compared.iter().filter(|(_, cases)| **cases == 0) {
            golden::not_compared(name, "no case has it");
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_refused_by_name() {
        let parts = PldaParts {
            mean1: vec![0.0; 3],
            lda: vec![0.5; 6],
            mean2: vec![0.0; 2],
            mu: vec![0.0; 2],
            tr: vec![1.0, 0.0, 0.0, 1.0],
            psi: vec![1.0, 2.0],
        };
        let plda = Plda::new(&parts, 2).unwrap();
        assert_eq!(plda.phi(), [2.0, 1.0]);
        assert!(plda.features(&[1.0; 2]).is_err());
        assert!(plda.features(&[0.0; 3]).unwrap().iter().all(|value| value.is_finite()));
        assert!(Plda::new(&parts, 3).is_err());
        let mut zeros = parts.clone();
        zeros.tr.fill(0.0);
        let error = Plda::new(&zeros, 2).unwrap_err().to_string();
        assert!(error.contains("tr is singular"), "{error}");
        let mut short = parts.clone();
        short.tr.pop();
        assert!(
            Plda::new(&short, 2)
                .unwrap_err()
                .to_string()
                .contains("tr has 3 values")
        );
        let features = [vec![1.0, 0.0], vec![0.0, 1.0]];
        assert!(Vbx::COMMUNITY_1.infer(&features, plda.phi(), &[0]).is_err());
        let none = Vbx {
            fa: 0.0,
            ..Vbx::COMMUNITY_1
        };
        assert!(none.infer(&features, plda.phi(), &[0, 1]).is_err());
    }

    #[test]
    fn values_that_are_too_large_are_an_error() {
        let parts = |lda: f64, mu: f64| PldaParts {
            mean1: vec![0.0; 3],
            lda: vec![lda; 6],
            mean2: vec![0.0; 2],
            mu: vec![0.0, mu],
            tr: vec![1.0, 0.0, 0.0, 1.0],
            psi: vec![1.0; 2],
        };
        let vectors = [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]];
        let found = |parts: &PldaParts| {
            let plda = Plda::new(parts, 2).unwrap();
            let features: Vec<Vec<f64>> = vectors.iter().map(|vector| plda.features(vector).unwrap()).collect();
            Vbx::COMMUNITY_1.infer(&features, plda.phi(), &[0, 1])
        };
        assert!(found(&parts(0.5, 0.25)).is_ok());
        for parts in [parts(f64::MAX, 0.25), parts(0.5, 1e200)] {
            let error = found(&parts).unwrap_err().to_string();
            assert!(error.contains("the PLDA gives values that are not finite"), "{error}");
        }
    }
}
