//! Confidence intervals of error rates, and tests of their differences, by the bootstrap (Bisani and Ney, "Bootstrap estimates
//! for confidence intervals in ASR performance evaluation", 2004).
//!
//! Utterances of one recording are no independent samples: recordings (or speakers) are drawn as a whole, as many as there are,
//! with replacement, and the rate of a resample is the sum of their errors over the sum of their reference units. Draw `k` of
//! resample `r` of `n` clusters is `nth(seed, r * n + k + 1) % n` of SplitMix64, so that results depend neither on threads nor,
//! as clusters are sorted by name, on the order of rows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use flow_kernels::threads::install;
use flow_random::nth;
use rayon::prelude::*;

use crate::wer::{EditCounts, UtteranceScore};

/// Errors and reference units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ratio {
    pub errors: u64,
    pub units: u64,
}

impl Ratio {
    fn add(&mut self, other: &Ratio) {
        self.errors += other.errors;
        self.units += other.units;
    }

    /// Errors per unit; NaN without units.
    pub fn rate(&self) -> f64 {
        match self.units {
            0 => f64::NAN,
            units => self.errors as f64 / units as f64,
        }
    }
}

impl From<&EditCounts> for Ratio {
    fn from(edits: &EditCounts) -> Self {
        Ratio {
            errors: edits.errors(),
            units: edits.units,
        }
    }
}

/// Rates of utterances: of words, of characters, and of both after normalisation (without units where there is none).
pub const RATES: usize = 4;

/// The four rates of an utterance.
pub fn ratios(utterance: &UtteranceScore) -> [Ratio; RATES] {
    let normalized = utterance.normalized.as_deref().copied().unwrap_or_default();
    [&utterance.words, &utterance.characters, &normalized.0, &normalized.1].map(Ratio::from)
}

/// How often is drawn, and from which seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resampling {
    pub resamples: usize,
    pub seed: u64,
}

/// The 95 % confidence intervals of the rates of a group of utterances.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Intervals {
    /// What was drawn from: recordings or speakers.
    pub clusters: usize,
    /// Of each rate; none where it is not defined in each resample, or there are fewer than two clusters.
    pub rates: [Option<(f64, f64)>; RATES],
}

/// The difference of the rates of two systems.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// The second system's rate less the first one's.
    pub difference: f64,
    /// Its 95 % confidence interval, and the p-value; none as in [`Intervals`].
    pub test: Option<Test>,
}

/// A paired bootstrap test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Test {
    pub interval: (f64, f64),
    /// Two-sided: twice the share of resamples in which the difference has the other sign or is 0, by (count + 1) / (resamples +
    /// 1), at most 1.
    pub p: f64,
}

impl Resampling {
    /// The rates of each resample, in order of the draws. Clusters have the same ratios, each of which gives a rate.
    pub fn rates<const N: usize>(&self, clusters: &[[Ratio; N]]) -> Vec<[f64; N]> {
        let count = clusters.len() as u64;
        let resample = |number: u64| {
            let mut sums = [Ratio::default(); N];
            for draw in 0..count {
                // Wraps around as the generator's own state does.
                let place = number.wrapping_mul(count).wrapping_add(draw).wrapping_add(1);
                let drawn = &clusters[(nth(self.seed, place) % count) as usize];
                sums.iter_mut().zip(drawn).for_each(|(sum, ratio)| sum.add(ratio));
            }
            sums.map(|sum| sum.rate())
        };
        install(|| (0..self.resamples as u64).into_par_iter().map(resample).collect())
    }

    /// The intervals of the rates of a group, by its clusters in the order of their names.
    pub fn intervals(&self, clusters: &[[Ratio; RATES]]) -> Intervals {
        let rates = match clusters.len() {
            0 | 1 => [None; RATES],
            _ => {
                let resampled = self.rates(clusters);
                std::array::from_fn(|rate| interval(resampled.iter().map(|rates| rates[rate]).collect()))
            }
        };
        Intervals {
            clusters: clusters.len(),
            rates,
        }
    }

    /// The intervals of two systems on the same utterances, and the difference of each rate: ratios of the first system, then
    /// of the second.
    pub fn compared(&self, clusters: &[[Ratio; 2 * RATES]]) -> ((Intervals, Intervals), [Difference; RATES]) {
        let mut sums = [Ratio::default(); 2 * RATES];
        for cluster in clusters {
            sums.iter_mut().zip(cluster).for_each(|(sum, ratio)| sum.add(ratio));
        }
        let resampled = match clusters.len() {
            0 | 1 => Vec::new(),
            _ => self.rates(clusters),
        };
        let intervals = |first: usize| Intervals {
            clusters: clusters.len(),
            rates: std::array::from_fn(|rate| interval(resampled.iter().map(|rates| rates[first + rate]).collect())),
        };
        let difference = |rate: usize| {
            let differences: Vec<f64> = resampled
                .iter()
                .map(|rates| rates[RATES + rate] - rates[rate])
                .collect();
            let below = differences.iter().filter(|difference| **difference <= 0.0).count();
            let above = differences.iter().filter(|difference| **difference >= 0.0).count();
            let p = 2.0 * (below.min(above) + 1) as f64 / (differences.len() + 1) as f64;
            Difference {
                difference: sums[RATES + rate].rate() - sums[rate].rate(),
                test: interval(differences).map(|interval| Test {
                    interval,
                    p: p.min(1.0),
                }),
            }
        };
        ((intervals(0), intervals(RATES)), std::array::from_fn(difference))
    }
}

/// The middle 95 % of values. None where there is none, or one is not a number.
fn interval(mut values: Vec<f64>) -> Option<(f64, f64)> {
    if values.is_empty() || values.iter().any(|value| !value.is_finite()) {
        return None;
    }
    values.sort_by(f64::total_cmp);
    Some((quantile(&values, 0.025), quantile(&values, 0.975)))
}

/// A quantile of sorted values, linear between two of them (R's type 7, as numpy's).
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = share * (sorted.len() - 1) as f64;
    let below = place.floor() as usize;
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

type ByCluster<const N: usize> = BTreeMap<Arc<str>, [Ratio; N]>;

/// Sums by cluster, of groups that are named by a grouping (such as `language`) and a name in it.
#[derive(Clone, Debug, Default)]
pub struct Clusters<const N: usize> {
    names: BTreeSet<Arc<str>>,
    groups: BTreeMap<String, BTreeMap<String, ByCluster<N>>>,
}

impl<const N: usize> Clusters<N> {
    /// Adds an utterance of a cluster to groups.
    pub fn add<'g>(
        &mut self,
        cluster: &str,
        groups: impl IntoIterator<Item = (&'g str, &'g str)>,
        ratios: &[Ratio; N],
    ) {
        let cluster = match self.names.get(cluster) {
            Some(known) => known.clone(),
            None => {
                let new: Arc<str> = cluster.into();
                self.names.insert(new.clone());
                new
            }
        };
        for (grouping, name) in groups {
            if !self.groups.contains_key(grouping) {
                self.groups.insert(grouping.to_owned(), BTreeMap::new());
            }
            let Some(groups) = self.groups.get_mut(grouping) else {
                continue;
            };
            if !groups.contains_key(name) {
                groups.insert(name.to_owned(), BTreeMap::new());
            }
            let Some(sums) = groups.get_mut(name) else { continue };
            let sums = sums.entry(cluster.clone()).or_insert([Ratio::default(); N]);
            sums.iter_mut().zip(ratios).for_each(|(sum, ratio)| sum.add(ratio));
        }
    }

    /// The sums of a group's clusters, in the order of their names.
    pub fn of(&self, grouping: &str, name: &str) -> Vec<[Ratio; N]> {
        let sums = self.groups.get(grouping).and_then(|groups| groups.get(name));
        sums.map_or(Vec::new(), |sums| sums.values().copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    /// `bootstrap.json` has clusters, and what a program in numpy makes of them with the same draws (`bootstrap.py` beside it).
    /// Sums are integers in both; rates and quantiles are rounded in another order.
    #[test]
    fn intervals_and_tests_are_those_of_numpy() {
        let golden: Value = serde_json::from_str(include_str!("../../../tests/data/golden/bootstrap.json")).unwrap();
        let near = |ours: f64, theirs: &Value| {
            let theirs = theirs.as_f64().unwrap();
            assert!((ours - theirs).abs() < 1e-12, "{ours} {theirs}");
        };
        let cases = golden.as_array().unwrap();
        assert!(cases.len() >= 3);
        for case in cases {
            let clusters: Vec<[u64; 3]> = serde_json::from_value(case["clusters"].clone()).unwrap();
            let resampling = Resampling {
                resamples: case["resamples"].as_u64().unwrap() as usize,
                seed: case["seed"].as_u64().unwrap(),
            };
            // Units, errors of one system and of the other.
            let ratio = |errors, units| Ratio { errors, units };
            let none = Ratio::default();
            let one: Vec<[Ratio; RATES]> = clusters
                .iter()
                .map(|[units, errors, _]| [ratio(*errors, *units), none, none, none])
                .collect();
            let intervals = resampling.intervals(&one);
            let (low, high) = intervals.rates[0].unwrap();
            assert_eq!((intervals.rates[1], intervals.clusters), (None, clusters.len()));
            near(low, &case["interval"][0]);
            near(high, &case["interval"][1]);
            let both: Vec<[Ratio; 2 * RATES]> = clusters
                .iter()
                .map(|[units, a, b]| {
                    let (a, b) = (ratio(*a, *units), ratio(*b, *units));
                    [a, none, none, none, b, none, none, none]
                })
                .collect();
            let ((of_one, of_other), [of_words, of_characters, ..]) = resampling.compared(&both);
            assert_eq!((of_one, of_other.clusters), (intervals, clusters.len()));
            assert_eq!(of_characters.test, None);
            near(of_words.difference, &case["difference"]);
            let test = of_words.test.unwrap();
            near(test.interval.0, &case["difference_interval"][0]);
            near(test.interval.1, &case["difference_interval"][1]);
            near(test.p, &case["p"]);
        }
    }

    #[test]
    fn one_cluster_has_no_interval() {
        let resampling = Resampling { resamples: 10, seed: 0 };
        let ratio = Ratio { errors: 1, units: 2 };
        assert_eq!(resampling.intervals(&[[ratio; RATES]]).rates, [None; RATES]);
        assert_eq!(resampling.intervals(&[]).rates, [None; RATES]);
        let (_, [difference, ..]) = resampling.compared(&[[ratio; 2 * RATES]]);
        assert_eq!(
            difference,
            Difference {
                difference: 0.0,
                test: None
            }
        );
    }

    proptest! {
        #[test]
        fn identical_systems_do_not_differ(
            rows in prop::collection::vec((0u64..9, 1u64..9, 0u8..6), 12..40),
            seed in any::<u64>(),
        ) {
            let resampling = Resampling { resamples: 200, seed };
            let collected = |rows: &[(u64, u64, u8)]| {
                let mut clusters = Clusters::<{ 2 * RATES }>::default();
                for (errors, units, cluster) in rows {
                    let ratio = Ratio { errors: *errors, units: *units };
                    clusters.add(&cluster.to_string(), [("all", "")], &[ratio; 2 * RATES]);
                }
                clusters.of("all", "")
            };
            let clusters = collected(&rows);
            prop_assume!(clusters.len() > 1);
            for difference in resampling.compared(&clusters).1 {
                prop_assert_eq!(difference.difference, 0.0);
                let test = difference.test.unwrap();
                prop_assert_eq!((test.interval, test.p), ((0.0, 0.0), 1.0));
            }
            // The order of rows has no influence.
            let mut reversed = rows.clone();
            reversed.reverse();
            prop_assert_eq!(&collected(&reversed), &clusters);
            prop_assert_eq!(resampling.rates(&collected(&reversed)), resampling.rates(&clusters));
        }
    }
}
