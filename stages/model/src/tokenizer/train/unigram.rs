//! Unigram training: expectation maximisation over all segmentations of the words, then the pieces whose loss reduces
//! the likelihood least are removed, until the vocabulary has its size.

use std::collections::HashMap;

use rayon::prelude::*;

use super::Tell;
use super::alphabet::Alphabet;
use super::lattice::{Lattice, NO_PIECE, Scored};
use super::seeds::seeds;
use super::words::Count;
use crate::Result;

/// Share of the pieces that a pruning keeps.
const KEPT: f64 = 0.75;
/// Rounds of expectation and maximisation between two prunings.
const ROUNDS: usize = 2;
/// A piece that is expected less often is dropped.
const LEAST_EXPECTED: f64 = 0.5;
/// Parts of the words that are summed separately, then in this order whatever the number of threads.
const PARTS: usize = 8;
/// How much further each character that was not learned is above the worst piece.
const CHARACTER_STEP: f32 = 1e-4;

/// The learned pieces with their scores, the best first.
pub(super) fn train(alphabet: &Alphabet, room: usize, size: usize, tell: Tell<'_>) -> Result<Vec<(String, f32)>> {
    let mut model = Scored::new(seeds(alphabet));
    tell(format!("{} pieces to begin with", model.pieces.len()))?;
    // A tenth more than wanted, for the final selection by score.
    let enough = (size as f64 * 1.1) as usize;
    loop {
        for _ in 0..ROUNDS {
            let expected = expectation(&model, &alphabet.words);
            model = maximisation(&model, &expected);
            tell(format!("{} pieces, {enough} wanted", model.pieces.len()))?;
        }
        if model.pieces.len() <= enough {
            break;
        }
        let kept = prune(&model, &alphabet.words, enough);
        if kept.len() == model.pieces.len() {
            break;
        }
        model = Scored::new(kept);
    }
    Ok(finish(&model, alphabet, room))
}

/// Parts of the words of about the same number.
fn parts(words: &[(String, Count)]) -> Vec<&[(String, Count)]> {
    words.chunks(words.len().div_ceil(PARTS).max(1)).collect()
}

fn expectation(model: &Scored, words: &[(String, Count)]) -> Vec<f64> {
    let sums: Vec<Vec<f64>> = parts(words)
        .into_par_iter()
        .map(|words| {
            let mut expected = vec![0.0; model.pieces.len()];
            let mut lattice = Lattice::default();
            for (word, count) in words {
                lattice.set(word, model);
                lattice.add_expected(count.all as f64, &mut expected);
            }
            expected
        })
        .collect();
    let mut all = vec![0.0; model.pieces.len()];
    for sum in sums {
        for (all, sum) in all.iter_mut().zip(sum) {
            *all += sum;
        }
    }
    all
}

/// Scores by Bayesian estimation with a sparse prior, as SentencePiece has it.
fn maximisation(model: &Scored, expected: &[f64]) -> Scored {
    let often = || {
        let pieces = model.pieces.iter().zip(expected);
        pieces.filter(|(_, expected)| **expected >= LEAST_EXPECTED)
    };
    let total = digamma(often().map(|(_, expected)| expected).sum());
    let score = |((text, _), expected): (&(String, f64), &f64)| (text.clone(), digamma(*expected) - total);
    Scored::new(often().map(score).collect())
}

/// Keeps the pieces whose removal would reduce the likelihood of the texts most, where a removed piece is replaced by
/// the second best segmentation of it.
fn prune(model: &Scored, words: &[(String, Count)], enough: usize) -> Vec<(String, f64)> {
    let count = model.pieces.len();
    let numbers: Vec<usize> = (0..count).collect();
    // None: the piece is not in its own best segmentation, and not needed.
    let instead: Vec<Option<Vec<u32>>> = numbers
        .par_chunks(count.div_ceil(64).max(1))
        .flat_map_iter(|numbers| {
            let mut lattice = Lattice::default();
            let alternatives = move |&number: &usize| {
                lattice.set(&model.pieces[number].0, model);
                let mut ways = lattice.two_best();
                match ways.as_slice() {
                    [best, _] if best.len() > 1 => None,
                    [_, _] => ways.pop(),
                    _ => Some(Vec::new()),
                }
            };
            numbers.iter().map(alternatives).collect::<Vec<_>>()
        })
        .collect();
    // How often each piece is in the best ways.
    let sums: Vec<Vec<f64>> = parts(words)
        .into_par_iter()
        .map(|words| {
            let mut uses = vec![0.0; count];
            let mut lattice = Lattice::default();
            let mut found = Vec::new();
            for (word, times) in words {
                lattice.set(word, model);
                lattice.best(&mut found);
                for &id in found.iter().filter(|id| **id != NO_PIECE) {
                    uses[id as usize] += times.all as f64;
                }
            }
            uses
        })
        .collect();
    let mut uses = vec![0.0; count];
    for part in sums {
        for (uses, part) in uses.iter_mut().zip(part) {
            *uses += part;
        }
    }
    let all_words: f64 = words.iter().map(|(_, times)| times.all as f64).sum();
    let all: f64 = uses.iter().sum();
    let mut kept = Vec::new();
    let mut candidates: Vec<(usize, f64)> = Vec::new();
    for id in 0..count {
        let Some(instead) = &instead[id] else { continue };
        if uses[id] == 0.0 {
            continue;
        }
        if instead.is_empty() {
            kept.push(model.pieces[id].clone());
            continue;
        }
        let with = uses[id].ln() - all.ln();
        let others = (all + uses[id] * (instead.len() as f64 - 1.0)).ln();
        let without: f64 = instead
            .iter()
            .map(|&other| {
                let before = uses.get(other as usize).copied().unwrap_or(0.0);
                (before + uses[id]).ln() - others
            })
            .sum();
        candidates.push((id, uses[id] / all_words * (with - without)));
    }
    candidates.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
    let size = enough.max((KEPT * count as f64) as usize);
    let more = size.saturating_sub(kept.len());
    kept.extend(
        candidates
            .into_iter()
            .take(more)
            .map(|(id, _)| model.pieces[id].clone()),
    );
    kept
}

/// All characters, then the best pieces.
fn finish(model: &Scored, alphabet: &Alphabet, room: usize) -> Vec<(String, f32)> {
    let scores: HashMap<&str, f64> = model
        .pieces
        .iter()
        .map(|(text, score)| (text.as_str(), *score))
        .collect();
    let mut missing = 0;
    let mut learned: Vec<(String, f32)> = Vec::with_capacity(room);
    for (character, _) in &alphabet.characters {
        let text = character.to_string();
        let score = match scores.get(text.as_str()) {
            Some(score) => *score as f32,
            None => {
                missing += 1;
                model.least_score() as f32 + (missing - 1) as f32 * CHARACTER_STEP
            }
        };
        learned.push((text, score));
    }
    let order = |(a, x): &(String, f32), (b, y): &(String, f32)| y.total_cmp(x).then_with(|| a.cmp(b));
    let pieces = model.pieces.iter().filter(|(text, _)| text.chars().count() > 1);
    let mut pieces: Vec<(String, f32)> = pieces.map(|(text, score)| (text.clone(), *score as f32)).collect();
    pieces.sort_by(order);
    pieces.truncate(room - learned.len());
    learned.extend(pieces);
    learned.sort_by(order);
    learned
}

/// The derivative of the logarithm of the gamma function.
fn digamma(mut x: f64) -> f64 {
    let mut result = 0.0;
    while x < 7.0 {
        result -= 1.0 / x;
        x += 1.0;
    }
    let x = x - 0.5;
    let square = 1.0 / (x * x);
    let fourth = square * square;
    result + x.ln() + square / 24.0 - 7.0 / 960.0 * fourth + 31.0 / 8064.0 * fourth * square
        - 127.0 / 30720.0 * fourth * fourth
}
