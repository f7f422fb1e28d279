//! How far the confidences of words are from the share of words that are right.

use std::ops::Range;

use crate::alignment::aligned;
use crate::normalize::Normalizer;
use crate::wer::words;

/// Bins of equal width (Guo et al., "On Calibration of Modern Neural Networks", 2017).
const BINS: usize = 15;

/// Words with confidences in one range.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bin {
    pub words: u64,
    /// How many of them are right.
    pub right: u64,
    /// The sum of their confidences.
    confidences: f64,
}

impl Bin {
    pub fn mean_confidence(&self) -> f64 {
        self.confidences / self.words as f64
    }

    /// The share of words that are right.
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.words as f64
    }
}

/// Words by their confidences.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reliability {
    bins: [Bin; BINS],
}

impl Reliability {
    /// Adds a word with a confidence from 0 to 1; others count as the nearest one.
    pub fn add(&mut self, confidence: f64, is_right: bool) {
        // What is not a number becomes 0.
        let bin = &mut self.bins[((confidence * BINS as f64) as usize).min(BINS - 1)];
        bin.words += 1;
        bin.right += u64::from(is_right);
        bin.confidences += if confidence.is_nan() {
            0.0
        } else {
            confidence.clamp(0.0, 1.0)
        };
    }

    /// All words as one bin.
    pub fn all(&self) -> Bin {
        let mut all = Bin::default();
        for bin in &self.bins {
            all.words += bin.words;
            all.right += bin.right;
            all.confidences += bin.confidences;
        }
        all
    }

    /// The bins that have words, each with its range of confidences.
    pub fn bins(&self) -> impl Iterator<Item = (Range<f64>, &Bin)> {
        let edge = |bin: usize| bin as f64 / BINS as f64;
        let bins = self.bins.iter().enumerate().filter(|(_, bin)| bin.words > 0);
        bins.map(move |(at, bin)| (edge(at)..edge(at + 1), bin))
    }

    /// The mean over the bins, weighted by their words, of the distance between the mean confidence and the share of right words. 0 where
    /// there are no words.
    pub fn expected_calibration_error(&self) -> f64 {
        let distances = self.bins.iter().map(|bin| (bin.confidences - bin.right as f64).abs());
        distances.sum::<f64>() / self.all().words.max(1) as f64
    }
}

impl FromIterator<(f64, bool)> for Reliability {
    fn from_iter<I: IntoIterator<Item = (f64, bool)>>(words: I) -> Self {
        let mut all = Reliability::default();
        words
            .into_iter()
            .for_each(|(confidence, is_right)| all.add(confidence, is_right));
        all
    }
}

/// The confidences of words that were heard, with whether these are right: in the place of the same word on a shortest way from what was
/// said, both normalised. Words without a confidence, and those of which nothing is left, are left out.
pub fn scored<'h>(
    said: &str,
    heard: impl Iterator<Item = (&'h str, Option<f64>)>,
    normalizer: &Normalizer,
    language: &str,
) -> Vec<(f64, bool)> {
    let said = normalizer.apply(said, language);
    let said: Vec<String> = words(&said).into_iter().map(str::to_owned).collect();
    let (mut texts, mut confidences) = (Vec::new(), Vec::new());
    for (word, confidence) in heard {
        let text = words(&normalizer.apply(word.trim(), language)).concat();
        if let Some(confidence) = confidence.filter(|_| !text.is_empty()) {
            texts.push(text);
            confidences.push(confidence);
        }
    }
    let mut is_right = vec![false; texts.len()];
    for (row, column) in aligned(&said, &texts) {
        is_right[column] = said[row] == texts[column];
    }
    confidences.into_iter().zip(is_right).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_that_of_its_bins() {
        assert_eq!(Reliability::default().expected_calibration_error(), 0.0);
        let words = [(1.0, true), (1.0, false), (0.0, false), (0.0, false)];
        let found: Reliability = words.into_iter().collect();
        assert_eq!(found.expected_calibration_error(), 0.25);
        let bins: Vec<(u64, f64, f64)> = found
            .bins()
            .map(|(_, bin)| (bin.words, bin.mean_confidence(), bin.accuracy()))
            .collect();
        assert_eq!(bins, [(2, 0.0, 0.0), (2, 1.0, 0.5)]);
        // Numbers of damaged weights.
        let odd: Reliability = [(f64::NAN, true), (-1.0, true), (7.0, true)].into_iter().collect();
        assert_eq!((odd.all().words, odd.all().mean_confidence()), (3, 1.0 / 3.0));
    }

    #[test]
    fn words_are_right_in_the_place_of_the_same_word() {
        let heard = [
            ("one", Some(0.9)),
            ("tree", Some(0.5)),
            ("four", None),
            ("two", Some(0.7)),
        ];
        let found = scored("one two three", heard.into_iter(), &Normalizer::default(), "en");
        assert_eq!(found.iter().filter(|(_, right)| *right).count(), 2);
        assert_eq!(found.len(), 3);
    }
}
