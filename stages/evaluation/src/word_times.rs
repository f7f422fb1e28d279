//! How far times of words are from known ones.

use serde_json::{Value, json};

use crate::alignment::aligned;

/// A word, with its beginning and its end in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TimedWord {
    pub text: String,
    pub times: [f64; 2],
    /// False where an alignment says that it was not said: it has no time of its own.
    pub said: bool,
}

/// Differences of the times of words that are in both.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TimeDifferences {
    /// Words of the reference.
    pub words: usize,
    /// Pairs with a word that was not said.
    pub not_said: usize,
    /// Of beginnings and of ends, in seconds; above 0 where the hypothesis is late.
    pub seconds: [Vec<f64>; 2],
}

impl TimeDifferences {
    /// Adds the words of a recording.
    pub fn add(&mut self, reference: &[TimedWord], hypothesis: &[TimedWord]) {
        self.words += reference.len();
        let texts = |words: &[TimedWord]| -> Vec<String> { words.iter().map(|word| word.text.clone()).collect() };
        for (row, column) in aligned(&texts(reference), &texts(hypothesis)) {
            let (known, found) = (&reference[row], &hypothesis[column]);
            if !known.said || !found.said {
                self.not_said += 1;
            } else if known.text == found.text {
                for (all, (found, known)) in self.seconds.iter_mut().zip(found.times.iter().zip(known.times)) {
                    all.push(found - known);
                }
            }
        }
    }

    /// Adds those of other recordings.
    pub fn extend(&mut self, others: TimeDifferences) {
        self.words += others.words;
        self.not_said += others.not_said;
        for (all, other) in self.seconds.iter_mut().zip(others.seconds) {
            all.extend(other);
        }
    }

    /// Words that are in both, with times.
    pub fn compared(&self) -> usize {
        self.seconds[0].len()
    }

    /// Of beginnings and of ends; none where no word is in both.
    pub fn spreads(&self) -> Option<[Spread; 2]> {
        (self.compared() > 0).then(|| self.seconds.each_ref().map(|differences| Spread::of(differences)))
    }
}

/// Differences of times, in seconds.
pub struct Spread {
    /// Of their absolute values.
    pub median: f64,
    /// The 95th percentile of the absolute values.
    pub most: f64,
    /// Above 0 where the hypothesis is late.
    pub signed: f64,
}

impl Spread {
    /// Of at least one difference.
    pub fn of(differences: &[f64]) -> Self {
        let sizes: Vec<f64> = differences.iter().map(|difference| difference.abs()).collect();
        Self {
            median: percentile(sizes.clone(), 0.5),
            most: percentile(sizes, 0.95),
            signed: percentile(differences.to_vec(), 0.5),
        }
    }

    pub fn figures(&self) -> Value {
        json!({"median": self.median, "percentile_95": self.most, "signed_median": self.signed})
    }

    /// In seconds: median, 95th percentile, signed median.
    pub fn texts(&self) -> [String; 3] {
        let Spread { median, most, signed } = self;
        [format!("{median:.3}"), format!("{most:.3}"), format!("{signed:+.3}")]
    }
}

/// The value below which a share of the values is, the nearest one there is. At least one value.
fn percentile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(share * (values.len() - 1) as f64).round() as usize]
}
