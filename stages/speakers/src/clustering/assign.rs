//! Assigns every embedding to a cluster, by the distances to their centroids.

use super::{Embeddings, cosine_distance, first_least};
use crate::assignment::least_cost;
use crate::error::Result;

/// Whether speakers of a chunk may share a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Assignment {
    /// Each speaker of a chunk is given the nearest cluster, also if another one has it.
    Nearest,
    /// Speakers of one chunk are given different clusters, so that the scores have the greatest sum; where there are fewer
    /// clusters than speakers, some are given none.
    Constrained,
}

/// Score of each (chunk, speaker) and centroid: 2 - cosine distance; NaN where there is no embedding.
pub fn scores(embeddings: &Embeddings, centroids: &[Vec<f64>]) -> Vec<f64> {
    let mut scores = Vec::with_capacity(embeddings.count() * centroids.len());
    for place in 0..embeddings.count() {
        let embedding = embeddings.get(place);
        scores.extend(centroids.iter().map(|centroid| match &embedding {
            Some(embedding) => 2.0 - cosine_distance(embedding, centroid),
            None => f64::NAN,
        }));
    }
    scores
}

/// Cluster of each (chunk, speaker) from scores (chunks, `speakers`, `clusters`). Of equal ones the first; where all are
/// NaN the first too, or in a constrained assignment as if they had the least of all scores.
pub fn assign(scores: &[f64], speakers: usize, clusters: usize, how: Assignment) -> Result<Vec<Option<usize>>> {
    if clusters == 0 || speakers == 0 {
        return Ok(Vec::new());
    }
    let number = |score: f64, otherwise: f64| if score.is_nan() { otherwise } else { score };
    match how {
        Assignment::Nearest => {
            let nearest = |scores: &[f64]| first_least(scores.iter().map(|&score| -number(score, f64::NEG_INFINITY)));
            Ok(scores.chunks_exact(clusters).map(nearest).collect())
        }
        Assignment::Constrained => {
            let least = scores
                .iter()
                .copied()
                .filter(|score| !score.is_nan())
                .fold(f64::INFINITY, f64::min);
            let least = if least.is_finite() { least } else { 0.0 };
            let mut assigned = Vec::with_capacity(scores.len() / clusters);
            for chunk in scores.chunks_exact(speakers * clusters) {
                let costs: Vec<f64> = chunk.iter().map(|&score| -number(score, least)).collect();
                assigned.extend(least_cost(&costs, clusters)?);
            }
            Ok(assigned)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    #[test]
    fn constrained_assignments_are_those_of_the_original() {
        let tensors = golden::Tensors::load("f_ahc.safetensors");
        let mut compared = 0;
        for name in tensors.names() {
            let Some(case) = name.strip_suffix(".in") else { continue };
            let (shape, scores) = tensors.doubles(&name);
            let (_, expected) = tensors.integers(&format!("{case}.out"));
            let found = assign(&scores, shape[1], shape[2], Assignment::Constrained).unwrap();
            let found: Vec<i64> = found
                .iter()
                .map(|cluster| cluster.map_or(-2, |cluster| cluster as i64))
                .collect();
            assert_eq!(found, expected, "{case}");
            compared += 1;
        }
        assert!(compared > 0);
    }

    #[test]
    fn what_has_no_score_is_given_what_is_left() {
        let scores = [1.0, 2.0, f64::NAN, f64::NAN, 1.5, 1.6];
        let nearest = assign(&scores, 3, 2, Assignment::Nearest).unwrap();
        assert_eq!(nearest, [Some(1), Some(0), Some(1)]);
        let constrained = assign(&scores, 3, 2, Assignment::Constrained).unwrap();
        assert_eq!(constrained, [Some(1), None, Some(0)]);
    }
}
