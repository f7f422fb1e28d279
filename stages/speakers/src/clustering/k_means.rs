//! Clusters of a given number, by k-means (Lloyd's algorithm).

use super::{first_least, means, squared_distance};

/// Most rounds of a start, and starts.
const ROUNDS: usize = 300;
const STARTS: usize = 20;

/// Cluster of each of `vectors`, `count` of them or as many as there are vectors: of several starts the one with the least
/// sum of squared distances. Each start is k-means++ (a centre is drawn by its squared distance from those there are) with
/// numbers of its own, so the result follows from the vectors alone.
pub fn k_means(vectors: &[Vec<f64>], count: usize) -> Vec<usize> {
    let count = count.min(vectors.len());
    if count < 2 {
        return vec![0; vectors.len()];
    }
    let starts = (1..=STARTS as u64).map(|seed| refined(vectors, plus_plus(vectors, count, seed)));
    let best = starts.min_by(|a, b| a.1.total_cmp(&b.1));
    best.map(|(clusters, _)| clusters).unwrap_or_default()
}

fn plus_plus(vectors: &[Vec<f64>], count: usize, seed: u64) -> Vec<Vec<f64>> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut uniform = || {
        // SplitMix64.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    let first = ((uniform() * vectors.len() as f64) as usize).min(vectors.len() - 1);
    let mut centres = vec![vectors[first].clone()];
    let mut distances: Vec<f64> = vectors
        .iter()
        .map(|vector| squared_distance(vector, &centres[0]))
        .collect();
    while centres.len() < count {
        let mut left = uniform() * distances.iter().sum::<f64>();
        // The last one, if rounding leaves a remainder.
        let drawn = distances.iter().position(|distance| {
            left -= distance;
            left < 0.0
        });
        let centre = vectors[drawn.unwrap_or(vectors.len() - 1)].clone();
        for (distance, vector) in distances.iter_mut().zip(vectors) {
            *distance = distance.min(squared_distance(vector, &centre));
        }
        centres.push(centre);
    }
    centres
}

/// The clusters of the centres, and their sum of squared distances.
fn refined(vectors: &[Vec<f64>], mut centres: Vec<Vec<f64>>) -> (Vec<usize>, f64) {
    let mut clusters: Vec<usize> = Vec::new();
    for _ in 0..ROUNDS {
        let nearest = |vector: &Vec<f64>| {
            first_least(centres.iter().map(|centre| squared_distance(vector, centre))).expect("there are centres")
        };
        let now: Vec<usize> = vectors.iter().map(nearest).collect();
        if now == clusters {
            break;
        }
        clusters = now;
        let mut moved = means(vectors, &clusters, centres.len());
        // A centre without vectors goes to the vector that is farthest from its own.
        for empty in (0..moved.len()).filter(|cluster| !clusters.contains(cluster)) {
            let farthest = first_least(
                vectors
                    .iter()
                    .zip(&clusters)
                    .map(|(vector, &cluster)| -squared_distance(vector, &centres[cluster])),
            );
            moved[empty] = vectors[farthest.expect("there are vectors")].clone();
        }
        centres = moved;
    }
    let distance = |(vector, &cluster): (&Vec<f64>, &usize)| squared_distance(vector, &centres[cluster]);
    let sum = vectors.iter().zip(&clusters).map(distance).sum();
    (clusters, sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_apart_are_clusters_of_their_own() {
        let mut vectors = Vec::new();
        for index in 0..30 {
            let centre = [[0.0, 0.0], [5.0, 0.0], [0.0, 5.0]][index % 3];
            let angle = index as f64;
            vectors.push(vec![centre[0] + 0.3 * angle.cos(), centre[1] + 0.3 * angle.sin()]);
        }
        let clusters = k_means(&vectors, 3);
        for (index, cluster) in clusters.iter().enumerate() {
            assert_eq!(*cluster, clusters[index % 3]);
        }
        assert!(clusters[0] != clusters[1] && clusters[1] != clusters[2] && clusters[2] != clusters[0]);
        assert_eq!(k_means(&vectors, 1), [0; 30]);
        assert_eq!(k_means(&[], 3), Vec::<usize>::new());
        // No more clusters than vectors, and no harm in equal ones.
        let mut alone = k_means(&vectors[..2], 5);
        alone.sort_unstable();
        assert_eq!(alone, [0, 1]);
        assert_eq!(k_means(&vec![vec![1.0]; 4], 3).len(), 4);
    }
}
