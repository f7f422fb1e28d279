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
    /// are not finite, are an error.
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
