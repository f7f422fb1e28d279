//! Which rows make which batch of an epoch, for every rank.
//!
//! The batches are those of the Python `DurationBucketBatchSampler` for the same seed, so that a team can move
//! over in mid-project: duration buckets, weighted order within a bucket, greedy packing, batches sorted by
//! cost and dealt over the ranks, cut to whole accumulations, shuffled. The order of all random draws is part
//! of that. The weights order rows within a bucket and so decide which clips share a batch; they do not change
//! how often a language comes, since every row is packed.

use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::SamplingError;
use crate::mt19937::Mt19937;

/// How rows are made into batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Packing {
    /// Ranks that the batches are dealt to.
    pub world_size: u32,
    /// Micro-batches that make one optimizer step on a rank.
    pub grad_accum: u32,
    /// Exponent of a language's number of rows in its weight; 0 gives every language the same weight.
    pub temperature: f64,
    /// Most seconds of audio in a batch. A longer clip is a batch of its own.
    pub max_batch_seconds: f64,
    /// Upper edges of the duration buckets, in seconds; a clip on an edge falls into the bucket above it.
    pub boundaries: Vec<f64>,
    pub seed: i64,
}

impl Default for Packing {
    fn default() -> Self {
        Packing {
            world_size: 1,
            grad_accum: 1,
            temperature: 0.3,
            max_batch_seconds: 90.0,
            boundaries: vec![3.0, 5.0, 8.0, 12.0, 16.0],
            seed: 42,
        }
    }
}

impl Packing {
    /// Says which setting is out of range: (name, why).
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        if self.world_size == 0 {
            return Err(("world_size", "at least 1 is needed".into()));
        }
        if self.grad_accum == 0 {
            return Err(("grad_accum", "at least 1 is needed".into()));
        }
        if !(self.temperature.is_finite() && self.temperature.abs() <= 10.0) {
            return Err(("temperature", format!("{} is outside -10 to 10", self.temperature)));
        }
        if !(self.max_batch_seconds.is_finite() && self.max_batch_seconds > 0.0) {
            return Err((
                "max_batch_seconds",
                format!("{} is no positive number of seconds", self.max_batch_seconds),
            ));
        }
        if !self.boundaries.iter().all(|edge| edge.is_finite()) || !self.boundaries.is_sorted() {
            return Err(("boundaries", "finite numbers in rising order are needed".into()));
        }
        Ok(())
    }
}

/// The languages of all rows: a code per row, codes in order of first appearance.
#[derive(Clone, Debug, Default)]
pub struct Languages {
    names: Vec<String>,
    codes: Vec<u16>,
    by_name: std::collections::HashMap<String, u16>,
}

impl Languages {
    /// Adds the next row.
    pub fn push(&mut self, name: &str) -> Result<(), SamplingError> {
        let code = match self.by_name.get(name) {
            Some(&code) => code,
            None => {
                let code = u16::try_from(self.names.len()).map_err(|_| SamplingError::TooManyLanguages)?;
                self.names.push(name.to_owned());
                self.by_name.insert(name.to_owned(), code);
                code
            }
        };
        self.codes.push(code);
        Ok(())
    }

    /// Names by code.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The language of a row.
    pub fn of_row(&self, row: usize) -> Option<&str> {
        self.names.get(usize::from(*self.codes.get(row)?)).map(String::as_str)
    }

    pub fn len(&self) -> usize {
        self.codes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.codes.is_empty()
    }

    fn counts(&self) -> Vec<u64> {
        let mut counts = vec![0; self.names.len()];
        for &code in &self.codes {
            counts[usize::from(code)] += 1;
        }
        counts
    }

    /// The weight of a row of each language (by code): the share that `count^temperature` gives it over its
    /// share of the rows. Summed in order of first appearance, as Python's dictionary does.
    pub fn weights(&self, temperature: f64) -> Vec<f64> {
        let counts = self.counts();
        let total = self.codes.len() as f64;
        let powers: Vec<f64> = if temperature <= 0.0 {
            vec![1.0; counts.len()]
        } else {
            counts.iter().map(|&count| (count as f64).powf(temperature)).collect()
        };
        let mut sum = 0.0;
        for power in &powers {
            sum += power;
        }
        powers
            .iter()
            .zip(&counts)
            .map(|(power, &count)| (power / sum) / (count as f64 / total))
            .collect()
    }
}

/// The batches of one epoch.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchPlan {
    /// All rows, batch after batch in the order in which they were packed.
    rows: Vec<u32>,
    /// Where each batch begins in `rows`; one more than there are batches.
    starts: Vec<u32>,
    /// Batches by falling cost.
    by_cost: Vec<u32>,
    /// Place in a rank's list -> number in its list before shuffling. The same for all ranks.
    shuffled: Vec<u32>,
    world_size: u32,
}

impl BatchPlan {
    /// Plans `epoch` for rows of these durations (seconds) and languages. Uses the threads of the current
    /// rayon pool; the result does not depend on them.
    pub fn new(
        durations: &[f64],
        languages: &Languages,
        packing: &Packing,
        epoch: u64,
    ) -> Result<BatchPlan, SamplingError> {
        packing
            .check()
            .map_err(|(name, why)| SamplingError::Setting { name, why })?;
        if durations.len() != languages.len() || u32::try_from(durations.len()).is_err() {
            return Err(SamplingError::Rows {
                durations: durations.len(),
                languages: languages.len(),
            });
        }
        if let Some(row) = durations
            .iter()
            .position(|&seconds| !(seconds.is_finite() && seconds > 0.0))
        {
            return Err(SamplingError::Duration {
                row,
                seconds: durations[row],
            });
        }
        let mut rng = Mt19937::new(i128::from(packing.seed) + i128::from(epoch));
        let exponents: Vec<f64> = languages
            .weights(packing.temperature)
            .iter()
            .map(|weight| 1.0 / weight.max(1e-12))
            .collect();
        let mut packer = Packer {
            max_seconds: packing.max_batch_seconds,
            rows: Vec::new(),
            batches: Vec::new(),
        };
        packer.rows.reserve_exact(durations.len());
        for bucket in buckets(durations, &packing.boundaries) {
            let mut keyed: Vec<(f64, u32)> = bucket.iter().map(|&row| (rng.random(), row)).collect();
            // 0 <= U < 1 and a positive exponent: keys are never NaN, and never -0.0.
            keyed.par_iter_mut().with_min_len(4096).for_each(|(key, row)| {
                let exponent = exponents[usize::from(languages.codes[*row as usize])];
                *key = key.powf(exponent);
            });
            keyed.par_sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
            packer.pack(&keyed, durations);
        }
        let Packer { rows, batches, .. } = packer;
        let mut by_cost: Vec<u32> = (0..batches.len() as u32).collect();
        // Stable: equal costs stay in the order of packing.
        let cost = |batch: &u32| batches[*batch as usize].cost();
        by_cost.sort_by(|a, b| cost(b).total_cmp(&cost(a)));
        let mut per_rank = batches.len() as u32 / packing.world_size;
        if packing.grad_accum > 1 {
            per_rank -= per_rank % packing.grad_accum;
        }
        let mut shuffled: Vec<u32> = (0..per_rank).collect();
        rng.shuffle(&mut shuffled);
        let mut starts: Vec<u32> = Vec::with_capacity(batches.len() + 1);
        starts.push(0);
        for batch in &batches {
            starts.push(starts[starts.len() - 1] + batch.rows);
        }
        Ok(BatchPlan {
            rows,
            starts,
            by_cost,
            shuffled,
            world_size: packing.world_size,
        })
    }

    /// Micro-batches that every rank has in this epoch; a multiple of `grad_accum`.
    pub fn batches_per_rank(&self) -> usize {
        self.shuffled.len()
    }

    /// Batches that were packed, also those that no rank gets.
    pub fn batches(&self) -> usize {
        self.by_cost.len()
    }

    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Row numbers of the batch at `place` in the list of `rank`; none past the end.
    pub fn batch(&self, rank: u32, place: usize) -> Option<&[u32]> {
        if rank >= self.world_size {
            return None;
        }
        let unshuffled = *self.shuffled.get(place)? as usize;
        let batch = *self
            .by_cost
            .get(rank as usize + self.world_size as usize * unshuffled)? as usize;
        self.rows
            .get(self.starts[batch] as usize..self.starts[batch + 1] as usize)
    }

    /// All batches of a rank in the order in which it takes them.
    pub fn rank(&self, rank: u32) -> impl Iterator<Item = &[u32]> {
        (0..self.batches_per_rank()).filter_map(move |place| self.batch(rank, place))
    }

    /// What the plan comes to.
    pub fn figures(&self, durations: &[f64], languages: &Languages) -> PlanFigures {
        let mut seconds = 0.0;
        let mut padded = 0.0;
        let mut rows = 0u64;
        let mut per_language = vec![0u64; languages.names.len()];
        let mut longest_batch = 0.0f64;
        for batch in (0..self.world_size).flat_map(|rank| self.rank(rank)) {
            let sum: f64 = batch.iter().map(|&row| durations[row as usize]).sum();
            let longest = batch.iter().map(|&row| durations[row as usize]).fold(0.0, f64::max);
            seconds += sum;
            padded += longest * batch.len() as f64;
            rows += batch.len() as u64;
            longest_batch = longest_batch.max(sum);
            for &row in batch {
                per_language[usize::from(languages.codes[row as usize])] += 1;
            }
        }
        let batches = self.batches_per_rank() as u64 * u64::from(self.world_size);
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let counts = languages.counts();
        let mut shares: Vec<LanguageShare> = languages
            .names
            .iter()
            .enumerate()
            .map(|(code, name)| LanguageShare {
                language: name.clone(),
                rows: counts[code],
                rows_in_batches: per_language[code],
                share_of_rows: share(counts[code] as f64, languages.len() as f64),
                share_in_batches: share(per_language[code] as f64, rows as f64),
            })
            .collect();
        shares.sort_by(|a, b| a.language.cmp(&b.language));
        PlanFigures {
            rows: languages.len() as u64,
            rows_in_batches: rows,
            batches,
            batches_per_rank: self.batches_per_rank() as u64,
            seconds_per_batch: share(seconds, batches as f64),
            longest_batch_seconds: longest_batch,
            rows_per_batch: share(rows as f64, batches as f64),
            padding_waste: if padded > 0.0 { 1.0 - seconds / padded } else { 0.0 },
            languages: shares,
        }
    }
}

/// What a plan comes to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanFigures {
    pub rows: u64,
    /// Rows that some rank gets. The rest fell off when the batches were dealt and cut.
    pub rows_in_batches: u64,
    pub batches: u64,
    pub batches_per_rank: u64,
    /// Mean seconds of audio in a batch.
    pub seconds_per_batch: f64,
    pub longest_batch_seconds: f64,
    pub rows_per_batch: f64,
    /// Share of the padded batches that is padding, 0 to 1.
    pub padding_waste: f64,
    /// By language code.
    pub languages: Vec<LanguageShare>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LanguageShare {
    pub language: String,
    pub rows: u64,
    pub rows_in_batches: u64,
    pub share_of_rows: f64,
    pub share_in_batches: f64,
}

/// Row numbers of each bucket, buckets in order of first appearance.
fn buckets(durations: &[f64], boundaries: &[f64]) -> Vec<Vec<u32>> {
    let mut rows: Vec<Vec<u32>> = vec![Vec::new(); boundaries.len() + 1];
    let mut appeared: Vec<usize> = Vec::new();
    for (row, seconds) in durations.iter().enumerate() {
        let bucket = boundaries.partition_point(|edge| edge <= seconds);
        if rows[bucket].is_empty() {
            appeared.push(bucket);
        }
        rows[bucket].push(row as u32);
    }
    appeared
        .into_iter()
        .map(|bucket| std::mem::take(&mut rows[bucket]))
        .collect()
}

struct Packed {
    rows: u32,
    longest: f64,
}

impl Packed {
    fn cost(&self) -> f64 {
        f64::from(self.rows) * self.longest
    }
}

struct Packer {
    max_seconds: f64,
    rows: Vec<u32>,
    batches: Vec<Packed>,
}

impl Packer {
    /// Packs one bucket; what is left at its end is a batch.
    fn pack(&mut self, keyed: &[(f64, u32)], durations: &[f64]) {
        let mut open = Packed { rows: 0, longest: 0.0 };
        let mut seconds = 0.0;
        for &(_, row) in keyed {
            let duration = durations[row as usize];
            if seconds + duration > self.max_seconds && open.rows > 0 {
                self.batches
                    .push(std::mem::replace(&mut open, Packed { rows: 0, longest: 0.0 }));
                seconds = 0.0;
            }
            open.rows += 1;
            open.longest = open.longest.max(duration);
            seconds += duration;
            self.rows.push(row);
        }
        if open.rows > 0 {
            self.batches.push(open);
        }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
