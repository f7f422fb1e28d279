//! Shallow fusion: n-gram language models and boosted phrases, whose scores are added to those of tokens while a
//! model is decoded (NeMo's NGPU-LM, arXiv 2505.22857, and GPU-PB, arXiv 2508.07014).

mod acceptor;
mod arpa;
mod boosting;
mod estimate;

pub use acceptor::BackoffAcceptor;
pub use arpa::{parse_arpa, read_arpa};
pub use boosting::{BoostingRules, Phrase, Phrases, boosting_tree, parse_phrases, read_phrases};
pub use estimate::{Corpus, MAX_ORDER, write_witten_bell};

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use crate::{Error, Result};

/// Token `i` is written in an ARPA file as the character of this code plus `i`, as in NeMo.
pub const TOKEN_OFFSET: u32 = 100;

/// Opening a pipe blocks until another process writes to it, and a device may have no end.
fn open_regular_file(path: &Path) -> std::io::Result<File> {
    if std::fs::metadata(path)?.is_file() {
        return File::open(path);
    }
    Err(std::io::Error::other("it is not a regular file"))
}

/// Models whose scores are added to those of tokens, each with its weight.
#[derive(Debug, Clone, Default)]
pub struct Fusion {
    models: Vec<Weighted>,
    /// Added to the scores of tokens wherever they come; empty for none.
    prior: Vec<f32>,
}

#[derive(Debug, Clone)]
struct Weighted {
    model: Arc<BackoffAcceptor>,
    weight: f32,
    /// Whether it is a tree of phrases, which need speech.
    is_phrases: bool,
}

impl Weighted {
    /// Whether it scores on a frame with speech, or without.
    fn scores_in(&self, speech: bool) -> bool {
        speech || !self.is_phrases
    }
}

/// The state of a hypothesis in each model of a [`Fusion`].
pub type FusionState = Vec<u32>;

impl Fusion {
    /// Adds a model. One of weight 0 changes nothing and is left out.
    ///
    /// # Errors
    /// If the weight is not a number.
    pub fn add(&mut self, model: Arc<BackoffAcceptor>, weight: f64) -> Result<()> {
        self.add_weighted(model, weight, false)
    }

    /// Adds a tree of phrases, which scores nothing where there is no speech: a phrase that has begun breaks off there and loses its
    /// scores, and none begins. One of weight 0 is left out.
    ///
    /// # Errors
    /// As those of [`Fusion::add`].
    pub fn add_phrases(&mut self, tree: Arc<BackoffAcceptor>, weight: f64) -> Result<()> {
        self.add_weighted(tree, weight, true)
    }

    fn add_weighted(&mut self, model: Arc<BackoffAcceptor>, weight: f64, is_phrases: bool) -> Result<()> {
        if !weight.is_finite() {
            return Err(Error::Input(format!("{weight} is not a weight of a language model")));
        }
        if weight != 0.0 {
            self.models.push(Weighted {
                model,
                weight: weight as f32,
                is_phrases,
            });
        }
        Ok(())
    }

    /// Sets what is added to the score of each token, wherever it comes: a natural logarithm, negative infinity for a token that is
    /// never chosen. Empty for nothing. Blank is chosen, or not, without it.
    ///
    /// # Errors
    /// If a value is neither a finite number nor negative infinity, or all are negative infinity.
    pub fn set_prior(&mut self, prior: Vec<f32>) -> Result<()> {
        if prior.iter().any(|score| score.is_nan() || *score == f32::INFINITY) {
            return Err(Error::Input("a score of a token is not a number".into()));
        }
        if !prior.is_empty() && prior.iter().all(|score| *score == f32::NEG_INFINITY) {
            return Err(Error::Input("no token may be chosen".into()));
        }
        self.prior = prior;
        Ok(())
    }

    /// What is added to the score of each token, wherever it comes; empty for nothing.
    pub fn prior(&self) -> &[f32] {
        &self.prior
    }

    pub fn is_empty(&self) -> bool {
        self.models.is_empty() && self.prior.is_empty()
    }

    /// Whether there are language models or boosted phrases, whose scores depend on the tokens before.
    pub fn has_models(&self) -> bool {
        !self.models.is_empty()
    }

    /// Whether there are boosted phrases.
    pub fn has_phrases(&self) -> bool {
        self.models.iter().any(|model| model.is_phrases)
    }

    /// The sum of the weights of the models that score on a frame with speech, or without.
    pub fn weight(&self, speech: bool) -> f32 {
        let models = self.models.iter().filter(|model| model.scores_in(speech));
        models.map(|model| model.weight).sum()
    }

    /// An error if a model is of another vocabulary than of so many tokens, without blank.
    pub fn check(&self, vocabulary: usize) -> Result<()> {
        let sizes = self.models.iter().map(|model| model.model.vocabulary());
        let prior = Some(self.prior.len()).filter(|size| *size > 0);
        match sizes.chain(prior).find(|size| *size != vocabulary) {
            Some(size) => Err(Error::Input(format!(
                "a language model of {size} tokens does not fit a vocabulary of {vocabulary}"
            ))),
            None => Ok(()),
        }
    }

    /// The state before the first token.
    pub fn start(&self) -> FusionState {
        self.models.iter().map(|model| model.model.initial()).collect()
    }

    /// The state after a token on a frame with speech, or without.
    pub fn step(&self, state: &[u32], token: u32, speech: bool) -> FusionState {
        let models = self.models.iter().zip(state);
        models
            .map(|(weighted, &state)| match weighted.scores_in(speech) {
                true => weighted.model.step(state, token).1,
                false => weighted.model.start(),
            })
            .collect()
    }

    /// The weighted scores of the end of the text in a state, summed over the models that know ends: not boosted phrases.
    pub fn end(&self, state: &[u32]) -> f32 {
        let models = self.models.iter().zip(state);
        let ends = models.map(|(weighted, &state)| weighted.model.end(state) * weighted.weight);
        ends.filter(|score| score.is_finite()).sum()
    }

    /// The weighted scores of all tokens in a state on a frame with speech, or without, summed over the models; `scores` is
    /// overwritten.
    pub fn scores(&self, state: &[u32], speech: bool, scores: &mut Vec<f32>) {
        scores.clear();
        scores.extend_from_slice(&self.prior);
        let mut of_model = Vec::new();
        for (weighted, &state) in self.models.iter().zip(state) {
            let (model, weight) = (&weighted.model, weighted.weight);
            if weighted.scores_in(speech) {
                model.scores(state, &mut of_model);
            } else {
                of_model.clear();
                of_model.resize(model.vocabulary(), model.to_start(state));
            }
            scores.resize(of_model.len(), 0.0);
            for (sum, score) in scores.iter_mut().zip(&of_model) {
                *sum += score * weight;
            }
        }
    }
}

#[cfg(test)]
mod tests;
