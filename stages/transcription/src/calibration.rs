//! Confidences as probabilities: what share of words with a confidence is right, by isotonic regression on words whose reference is
//! known.

use std::io::Read;
use std::path::{Path, PathBuf};

use flow_kind::open_regular_file;
use flow_model::checkpoint::CALIBRATION_FILE;
use serde::{Deserialize, Serialize};

use crate::recognizer::digest;
use crate::{Result, TranscriptionError, Word};

/// Largest file.
const LARGEST: u64 = 16 << 20;

/// A non-decreasing function from confidences to probabilities: straight lines between points, constant outside.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    version: u32,
    /// BLAKE3 of the model's files, in hexadecimal digits.
    pub model_digest: String,
    /// Words that it was fitted to.
    pub words: usize,
    /// Confidence and probability, both from 0 to 1 and in order.
    points: Vec<(f64, f64)>,
}

impl Calibration {
    const VERSION: u32 = 1;

    /// The isotonic regression (pool adjacent violators) of whether words are right on their confidences, in any order. A point is
    /// the mean confidence and the share of right words of a pool.
    ///
    /// # Errors
    /// If there are no words, or a confidence is not from 0 to 1.
    pub fn fit(words: &[(f64, bool)], model_digest: &str) -> Result<Self> {
        if let Some((confidence, _)) = words.iter().find(|(confidence, _)| !(0.0..=1.0).contains(confidence)) {
            return Err(TranscriptionError::Input(format!(
                "{confidence} is not a confidence from 0 to 1"
            )));
        }
        let mut sorted = words.to_vec();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        // Sums of confidences, of right words, and of all words.
        let mut pools: Vec<(f64, f64, f64)> = Vec::new();
        let mut last = None;
        for (confidence, is_right) in sorted {
            let right = f64::from(u8::from(is_right));
            match pools.last_mut().filter(|_| last == Some(confidence)) {
                // Equal confidences have one probability.
                Some(pool) => *pool = (pool.0 + confidence, pool.1 + right, pool.2 + 1.0),
                None => pools.push((confidence, right, 1.0)),
            }
            last = Some(confidence);
        }
        let mut pooled: Vec<(f64, f64, f64)> = Vec::with_capacity(pools.len());
        for pool in pools {
            pooled.push(pool);
            while let [.., before, after] = pooled[..]
                && before.1 / before.2 >= after.1 / after.2
            {
                pooled.truncate(pooled.len() - 2);
                pooled.push((before.0 + after.0, before.1 + after.1, before.2 + after.2));
            }
        }
        if pooled.is_empty() {
            return Err(TranscriptionError::Input(
                "there are no words to calibrate with".to_owned(),
            ));
        }
        Ok(Calibration {
            version: Self::VERSION,
            model_digest: model_digest.to_owned(),
            words: words.len(),
            points: pooled
                .into_iter()
                .map(|(confidences, right, count)| (confidences / count, right / count))
                .collect(),
        })
    }

    /// The probability of a word with this confidence; what is not a number stays so.
    pub fn probability(&self, confidence: f64) -> f64 {
        let next = self.points.partition_point(|(at, _)| *at <= confidence);
        match (
            next.checked_sub(1).map(|before| self.points[before]),
            self.points.get(next),
        ) {
            _ if confidence.is_nan() => confidence,
            (None, Some(first)) => first.1,
            (Some(last), None) => last.1,
            (Some(before), Some(after)) => {
                let share = (confidence - before.0) / (after.0 - before.0);
                before.1 + share * (after.1 - before.1)
            }
            (None, None) => confidence,
        }
    }

    /// Replaces the confidences of words.
    pub fn apply(&self, words: &mut [Word]) {
        for word in words {
            word.confidence = word.confidence.map(|confidence| self.probability(confidence));
        }
    }

    /// Where that of a model is: in its folder, or beside its archive with the archive's name before it.
    pub fn path_of(model: &Path) -> PathBuf {
        if model.is_dir() {
            return model.join(CALIBRATION_FILE);
        }
        let name = model.file_stem().unwrap_or_default().to_string_lossy();
        model.with_file_name(format!("{name}.{CALIBRATION_FILE}"))
    }

    /// That of a model, where there is one.
    ///
    /// # Errors
    /// If the file cannot be read, is none, or is of another model.
    pub fn of_model(model: &Path, digest: &str) -> Result<Option<Self>> {
        let path = Self::path_of(model);
        if !path.exists() {
            return Ok(None);
        }
        let wrong = |why: String| TranscriptionError::setting("model", format!("{}: {why}", path.display()));
        let file = open_regular_file(&path).map_err(|error| wrong(error.to_string()))?;
        let mut bytes = Vec::new();
        let read = file.take(LARGEST).read_to_end(&mut bytes);
        read.map_err(|error| wrong(error.to_string()))?;
        let found: Self = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        let is_share = |x: f64| (0.0..=1.0).contains(&x);
        let is_valid = found
            .points
            .iter()
            .all(|(at, probability)| is_share(*at) && is_share(*probability));
        let is_sorted = found.points.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1);
        if found.version != Self::VERSION || found.points.is_empty() || !is_valid || !is_sorted {
            return Err(wrong("it is not a calibration of this version".to_owned()));
        }
        if found.model_digest != digest {
            let why = "it is of other weights than the model's: delete it, or calibrate anew";
            return Err(wrong(why.to_owned()));
        }
        Ok(Some(found))
    }

    /// That of a copy of the model in another format, which has the same scores.
    ///
    /// # Errors
    /// If the copy cannot be read.
    pub fn of_copy(mut self, copy: &Path) -> Result<Self> {
        self.model_digest = digest(copy)?;
        Ok(self)
    }

    /// # Errors
    /// If it cannot be serialised.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        let bytes = serde_json::to_vec(self).map_err(|error| TranscriptionError::Input(error.to_string()))?;
        Ok([&bytes[..], b"\n"].concat())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pools_are_those_of_isotonic_regression() {
        let words = [
            (0.1, false),
            (0.2, true),
            (0.3, false),
            (0.6, true),
            (0.6, false),
            (0.9, true),
        ];
        let fitted = Calibration::fit(&words, "x").unwrap();
        assert_eq!(fitted.points.len(), 3);
        for (confidence, expected) in [(0.0, 0.0), (0.1, 0.0), (0.425, 0.5), (0.9, 1.0), (1.0, 1.0)] {
            let found = fitted.probability(confidence);
            assert!((found - expected).abs() < 1e-12, "{confidence}: {found}");
        }
        assert!(fitted.probability(f64::NAN).is_nan());
        assert!(Calibration::fit(&[], "x").is_err());
        assert!(Calibration::fit(&[(f64::NAN, true)], "x").is_err());
    }

    proptest! {
        #[test]
        fn probabilities_never_fall(
            words in proptest::collection::vec((0u8..=20, any::<bool>()), 1..200)
        ) {
            let words: Vec<(f64, bool)> = words.into_iter().map(|(tick, right)| (f64::from(tick) / 20.0, right)).collect();
            let fitted = Calibration::fit(&words, "x").unwrap();
            let all: Vec<f64> = (0..=1000).map(|at| fitted.probability(f64::from(at) / 1000.0)).collect();
            prop_assert!(all.is_sorted() && all.iter().all(|at| (0.0..=1.0).contains(at)));
            // In a pool as many words are right as its point says.
            let right = words.iter().filter(|(_, right)| *right).count() as f64 / words.len() as f64;
            let (least, most) = (all[0], all[1000]);
            prop_assert!(least <= right + 1e-9 && right <= most + 1e-9);
        }
    }

    #[test]
    fn files_are_read_back_and_checked() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Calibration::of_model(folder.path(), "x").unwrap(), None);
        let path = Calibration::path_of(folder.path());
        assert_eq!(path, folder.path().join(CALIBRATION_FILE));
        let archive = Calibration::path_of(&folder.path().join("a.nemo"));
        assert_eq!(archive, folder.path().join("a.confidence_calibration.json"));
        let fitted = Calibration::fit(&[(0.25, false), (0.5, true)], "x").unwrap();
        let good = String::from_utf8(fitted.to_json().unwrap()).unwrap();
        std::fs::write(&path, &good).unwrap();
        assert_eq!(Calibration::of_model(folder.path(), "x").unwrap(), Some(fitted));
        assert!(Calibration::of_model(folder.path(), "y").is_err());
        for wrong in [
            String::new(),
            good.replace("\"version\":1", "\"version\":2"),
            good.replace("0.25", "0.75"),
            good.replace("0.25", "-0.25"),
            good.replace("[[0.25,0.0],[0.5,1.0]]", "[]"),
            good.replace("0.25", "null"),
        ] {
            std::fs::write(&path, &wrong).unwrap();
            let error = Calibration::of_model(folder.path(), "x").unwrap_err().to_string();
            assert!(error.contains(CALIBRATION_FILE), "{wrong}: {error}");
        }
    }
}
