//! Probabilistic linear discriminant analysis: from embeddings to features in which speakers have unit covariance within,
//! and a diagonal one between them. As `vbx_setup` of pyannote.audio, whose names the parts have.

use super::{dot, normalised};
use crate::error::{Error, Result};

/// The parts of a PLDA, D being the dimension of embeddings and L that of the discriminant analysis. Row-major.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PldaParts {
    /// (D)
    pub mean1: Vec<f64>,
    /// (D, L)
    pub lda: Vec<f64>,
    /// (L)
    pub mean2: Vec<f64>,
    /// (L)
    pub mu: Vec<f64>,
    /// (L, L), invertible: makes the covariance within speakers the identity.
    pub tr: Vec<f64>,
    /// (L), positive: the covariance between speakers after `tr`.
    pub psi: Vec<f64>,
}

/// A transform of embeddings to features.
#[derive(Debug, Clone)]
pub struct Plda {
    mean1: Vec<f64>,
    /// (L, D)
    lda: Vec<f64>,
    mean2: Vec<f64>,
    mu: Vec<f64>,
    /// (features, L)
    transform: Vec<f64>,
    phi: Vec<f64>,
}

impl Plda {
    /// The first `features` of L, those of the greatest covariance between speakers. Parts that do not fit each other, or
    /// are not finite, are an error, and so is a `tr` without inverse.
    ///
    /// The original solves the generalised eigenproblem of B = (trᵀ diag(1/psi) tr)⁻¹ and W = (trᵀ tr)⁻¹. Since
    /// B trᵀ = tr⁻¹ diag(psi) = W trᵀ diag(psi), its values are psi and its vectors, of length 1 under W, the rows of tr;
    /// of each the sign is free.
    pub fn new(parts: &PldaParts, features: usize) -> Result<Self> {
        let (embedding, reduced) = (parts.mean1.len(), parts.mean2.len());
        let fit = [
            ("lda", parts.lda.len(), embedding * reduced),
            ("mu", parts.mu.len(), reduced),
            ("tr", parts.tr.len(), reduced * reduced),
            ("psi", parts.psi.len(), reduced),
        ];
        for (name, found, needed) in fit {
            if found != needed {
                return Err(Error::Weights(format!(
                    "{name} has {found} values; {needed} are needed"
                )));
            }
        }
        let all = [&parts.mean1, &parts.lda, &parts.mean2, &parts.mu, &parts.tr, &parts.psi];
        if all.iter().any(|part| part.iter().any(|value| !value.is_finite())) {
            return Err(Error::Weights("a value of the PLDA is not finite".into()));
        }
        if embedding == 0 || features == 0 || features > reduced || parts.psi.iter().any(|value| *value <= 0.0) {
            return Err(Error::Weights(format!(
                "a PLDA from {embedding} to {reduced} values, {features} features, needs some of each, no more features \
                 than values, and psi above 0"
            )));
        }
        if singular(&parts.tr, reduced) {
            return Err(Error::Weights("tr is singular; it must have an inverse".into()));
        }
        let mut order: Vec<usize> = (0..reduced).collect();
        order.sort_by(|&a, &b| parts.psi[b].total_cmp(&parts.psi[a]));
        order.truncate(features);
        let row = |&row: &usize| &parts.tr[row * reduced..(row + 1) * reduced];
        Ok(Self {
            mean1: parts.mean1.clone(),
            lda: (0..reduced * embedding)
                .map(|at| parts.lda[at % embedding * reduced + at / embedding])
                .collect(),
            mean2: parts.mean2.clone(),
            mu: parts.mu.clone(),
            transform: order.iter().flat_map(row).copied().collect(),
            phi: order.iter().map(|&at| parts.psi[at]).collect(),
        })
    }

    /// Covariance between speakers of each feature, in falling order.
    pub fn phi(&self) -> &[f64] {
        &self.phi
    }

    /// Features of an embedding; of another dimension than the PLDA's it is an error.
    pub fn features(&self, embedding: &[f64]) -> Result<Vec<f64>> {
        if embedding.len() != self.mean1.len() {
            return Err(Error::Input(format!(
                "an embedding of {} values; the PLDA is for {}",
                embedding.len(),
                self.mean1.len()
            )));
        }
        let scaled = |vector: &[f64]| -> Vec<f64> {
            let length = (vector.len() as f64).sqrt();
            normalised(vector).iter().map(|value| value * length).collect()
        };
        let less = |a: &[f64], b: &[f64]| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a - b).collect() };
        let product = |rows: &[f64], vector: &[f64]| -> Vec<f64> {
            rows.chunks_exact(vector.len()).map(|row| dot(row, vector)).collect()
        };
        let centred = scaled(&less(embedding, &self.mean1));
        let reduced = scaled(&less(&product(&self.lda, &centred), &self.mean2));
        Ok(product(&self.transform, &less(&reduced, &self.mu)))
    }
}

/// Whether Gaussian elimination with partial pivoting finds a square matrix, (`size`, `size`) and finite, to be singular: after
/// each row is divided by its largest value, a pivot is not above the rounding error of zero.
fn singular(matrix: &[f64], size: usize) -> bool {
    let scaled = |row: &[f64]| -> Vec<f64> {
        let largest = row.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
        // Zeros stay zeros.
        let largest = if largest > 0.0 { largest } else { 1.0 };
        row.iter().map(|value| value / largest).collect()
    };
    let mut rows: Vec<Vec<f64>> = matrix.chunks_exact(size).map(scaled).collect();
    for column in 0..size {
        let largest = (column..size).max_by(|&a, &b| rows[a][column].abs().total_cmp(&rows[b][column].abs()));
        rows.swap(column, largest.unwrap_or(column));
        let (above, below) = rows.split_at_mut(column + 1);
        let pivot = &above[column][column..];
        if pivot[0].abs() <= size as f64 * f64::EPSILON {
            return true;
        }
        for row in below {
            let factor = row[column] / pivot[0];
            let pairs = row[column..].iter_mut().zip(pivot);
            pairs.for_each(|(value, pivot)| *value -= factor * pivot);
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn singular_matrices_are_told_from_invertible_ones() {
        let cases: [(&[f64], bool); 9] = [
            (&[0.0, 0.0, 0.0, 0.0], true),
            (&[1.0, 2.0, 0.0, 0.0], true),
            (&[1.0, 2.0, 2.0, 4.0], true),
            // Of rank 2: elimination leaves a rounding error instead of zero.
            (&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], true),
            (&[0.1, 0.2, 0.3, 0.7, 0.5, 0.3, 0.8, 0.7, 0.6], true),
            (&[0.0, 1.0, 1.0, 0.0], false),
            (&[1.0, 1.0, 1.0, 1.001], false),
            // Rows of any size.
            (&[1e-200, 0.0, 0.0, 1e200], false),
            (&[1e300, -1e300, 1e300, 1e300], false),
        ];
        for (matrix, expected) in cases {
            let size = matrix.len().isqrt();
            assert_eq!(singular(matrix, size), expected, "{matrix:?}");
        }
    }
}
