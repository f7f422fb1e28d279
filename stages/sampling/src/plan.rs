//! Which rows make which batch of an epoch, for every rank.
//!
//! The batches are those of the Python `DurationBucketBatchSampler` for the same seed, so that a project can switch at
//! any time: duration buckets, weighted order within a bucket, greedy packing, batches sorted by cost and dealt over
//! the ranks, cut to whole accumulations, shuffled. The order of all random draws is part of that. The weights order
//! rows within a bucket and so decide which clips share a batch; they do not change how often a language comes, since
//! every row is packed. [`Balance::Quota`] does change it.

use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::SamplingError;
use crate::falling_order::falling_order;
use crate::manifest_rows::ManifestRows;
use crate::mt19937::Mt19937;
use crate::quota;

/// The effect of the temperature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Balance {
    /// Every row comes once in an epoch. The temperature decides which clips share a batch, and not how often a language
    /// comes. The batches are those of the Python `DurationBucketBatchSampler`.
    #[default]
    Order,
    /// Every language gets a share of the epoch's time proportional to (its seconds)^temperature. An epoch is as long as
    /// the manifest: rare languages are repeated, common ones are left out in part, and what is left out in one epoch
    /// comes first in the next.
    Quota,
}

impl Balance {
    pub fn name(self) -> &'static str {
        match self {
            Balance::Order => "order",
            Balance::Quota => "quota",
        }
    }
}

/// How rows are packed into batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Packing {
    /// Ranks that the batches are dealt to.
    pub world_size: u32,
    /// Micro-batches that make one optimizer step on a rank.
    pub grad_accum: u32,
    pub balance: Balance,
    /// With [`Balance::Order`] the exponent of a language's number of rows in its weight, with [`Balance::Quota`] that
    /// of its seconds in its share of time. 0 or less makes all languages equal.
    pub temperature: f64,
    /// Most seconds of audio in a batch. A longer clip is a batch of its own.
    pub max_batch_seconds: f64,
    /// Upper edges of the duration buckets, in seconds; a clip on an edge falls into the bucket above it.
    pub boundaries: Vec<f64>,
    /// Upper edges by which each duration bucket is split, in characters of the text.
    pub token_boundaries: Vec<u32>,
    /// Clips in a batch of each bucket, in place of `max_batch_seconds`: of each duration bucket those of its text buckets, one
    /// after the other. Empty: `max_batch_seconds` counts.
    // Left out where it is empty, as keys and notes are older than it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bucket_batch_size: Vec<u32>,
    pub seed: i64,
}

impl Default for Packing {
    fn default() -> Self {
        Packing {
            world_size: 1,
            grad_accum: 1,
            balance: Balance::Order,
            temperature: 0.3,
            max_batch_seconds: 90.0,
            boundaries: vec![3.0, 5.0, 8.0, 12.0, 16.0],
            token_boundaries: Vec::new(),
            bucket_batch_size: Vec::new(),
            seed: 42,
        }
    }
}

impl Packing {
    /// Validates the settings; the error is (name, why).
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
                format!("{} is not a positive number of seconds", self.max_batch_seconds),
            ));
        }
        if !self.boundaries.iter().all(|edge| edge.is_finite()) || !self.boundaries.is_sorted() {
            return Err(("boundaries", "finite numbers in rising order are needed".into()));
        }
        if !self.token_boundaries.is_sorted() {
            return Err(("token_boundaries", "numbers in rising order are needed".into()));
        }
        let (sizes, buckets) = (&self.bucket_batch_size, self.buckets());
        if !sizes.is_empty() && (sizes.len() != buckets || sizes.contains(&0)) {
            return Err((
                "bucket_batch_size",
                format!(
                    "{} numbers; one of at least 1 is needed for each of the {buckets} buckets ({} of durations, each divided in \
                     {} by texts)",
                    sizes.len(),
                    self.boundaries.len() + 1,
                    self.token_boundaries.len() + 1
                ),
            ));
        }
        Ok(())
    }

    /// Number of buckets.
    pub fn buckets(&self) -> usize {
        (self.boundaries.len() + 1) * (self.token_boundaries.len() + 1)
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
    /// Plans `epoch`. Uses the threads of the current rayon pool; the result does not depend on them.
    pub fn new(rows: &ManifestRows, packing: &Packing, epoch: u64) -> Result<BatchPlan, SamplingError> {
        packing
            .check()
            .map_err(|(name, why)| SamplingError::Setting { name, why })?;
        rows.check()?;
        if !packing.token_boundaries.is_empty() && rows.text_lengths.len() != rows.durations.len() {
            return Err(SamplingError::Setting {
                name: "token_boundaries",
                why: "the rows have no column `text` to measure".into(),
            });
        }
        let times = match packing.balance {
            Balance::Order => None,
            Balance::Quota => Some(quota::times(rows, packing, epoch)?),
        };
        let weighted = packing.balance == Balance::Order;
        let (durations, languages) = (&rows.durations, &rows.languages);
        let mut rng = Mt19937::new(i128::from(packing.seed) + i128::from(epoch));
        let exponents: Vec<f64> = languages
            .weights(packing.temperature)
            .iter()
            .map(|weight| 1.0 / weight.max(1e-12))
            .collect();
        let buckets = buckets(rows, packing, times.as_deref());
        let drawn: Vec<(usize, Vec<u32>, Vec<f64>)> = buckets
            .into_iter()
            .map(|(number, bucket)| {
                let draws = bucket.iter().map(|_| rng.random()).collect();
                (number, bucket, draws)
            })
            .collect();
        let packed: Vec<PackedBucket> = drawn
            .into_par_iter()
            .map(|(number, bucket, mut keys)| {
                let raise = |(key, row): (&mut f64, &u32)| {
                    // 0 <= U < 1 and a positive exponent: keys are from 0 to 1.
                    *key = key.powf(exponents[usize::from(languages.codes()[*row as usize])]);
                };
                // Under quotas the languages of a bucket are mixed evenly.
                if weighted {
                    keys.par_iter_mut().zip(&bucket).with_min_len(1 << 14).for_each(raise);
                }
                let mut order = falling_order(&keys);
                drop(keys);
                order.iter_mut().for_each(|place| *place = bucket[*place as usize]);
                let most = packing.bucket_batch_size.get(number).copied();
                PackedBucket::new(order, durations, packing.max_batch_seconds, most)
            })
            .collect();
        Ok(BatchPlan::dealt(packed, packing, &mut rng))
    }

    /// Sorts the batches by cost, deals them to the ranks, and shuffles.
    fn dealt(packed: Vec<PackedBucket>, packing: &Packing, rng: &mut Mt19937) -> BatchPlan {
        let batches: usize = packed.iter().map(|bucket| bucket.batches.len()).sum();
        let mut starts: Vec<u32> = Vec::with_capacity(batches + 1);
        let mut by_cost: Vec<(f64, u32)> = Vec::with_capacity(batches);
        let mut end = 0;
        starts.push(end);
        for batch in packed.iter().flat_map(|bucket| &bucket.batches) {
            by_cost.push((batch.cost(), by_cost.len() as u32));
            end += batch.rows;
            starts.push(end);
        }
        // Equal costs stay in the order of packing.
        by_cost.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut per_rank = batches as u32 / packing.world_size;
        if packing.grad_accum > 1 {
            per_rank -= per_rank % packing.grad_accum;
        }
        let mut shuffled: Vec<u32> = (0..per_rank).collect();
        rng.shuffle(&mut shuffled);
        let rows: Vec<Vec<u32>> = packed.into_iter().map(|bucket| bucket.rows).collect();
        BatchPlan {
            rows: rows.concat(),
            starts,
            by_cost: by_cost.into_iter().map(|(_, batch)| batch).collect(),
            shuffled,
            world_size: packing.world_size,
        }
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
}

/// Number and row numbers of each bucket, rows in rising order, buckets in order of first appearance. A row comes `times`
/// times, or once.
fn buckets(rows: &ManifestRows, packing: &Packing, times: Option<&[u32]>) -> Vec<(usize, Vec<u32>)> {
    let text_edges = &packing.token_boundaries;
    let mut buckets: Vec<Vec<u32>> = vec![Vec::new(); packing.buckets()];
    let mut appeared: Vec<usize> = Vec::new();
    for (row, &seconds) in rows.durations.iter().enumerate() {
        let mut number = bucket_of(&packing.boundaries, seconds);
        if !text_edges.is_empty() {
            number = number * (text_edges.len() + 1) + bucket_of(text_edges, rows.text_lengths[row]);
        }
        let times = times.map_or(1, |times| times[row]);
        let bucket = &mut buckets[number];
        if bucket.is_empty() && times > 0 {
            appeared.push(number);
        }
        (0..times).for_each(|_| bucket.push(row as u32));
    }
    appeared
        .into_iter()
        .map(|number| (number, std::mem::take(&mut buckets[number])))
        .collect()
}

/// How many edges a length has reached.
fn bucket_of<T: PartialOrd + Copy>(edges: &[T], length: T) -> usize {
    // Branch-free comparisons with all edges are faster than a binary search, whose branches are unpredictable.
    if edges.len() <= 32 {
        edges.iter().map(|&edge| usize::from(edge <= length)).sum()
    } else {
        edges.partition_point(|&edge| edge <= length)
    }
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

struct PackedBucket {
    rows: Vec<u32>,
    /// The next free index in `rows`.
    batches: Vec<Packed>,
}

impl PackedBucket {
    /// Packs the rows of one bucket in their order, `most` to a batch or as many as have `max_seconds`; what is left at its end
    /// is a batch.
    fn new(rows: Vec<u32>, durations: &[f64], max_seconds: f64, most: Option<u32>) -> Self {
        let empty = || Packed { rows: 0, longest: 0.0 };
        let mut batches = Vec::new();
        let mut open = empty();
        let mut seconds = 0.0;
        for &row in &rows {
            let duration = durations[row as usize];
            let full = match most {
                Some(most) => open.rows >= most,
                None => seconds + duration > max_seconds && open.rows > 0,
            };
            if full {
                batches.push(std::mem::replace(&mut open, empty()));
                seconds = 0.0;
            }
            open.rows += 1;
            open.longest = open.longest.max(duration);
            seconds += duration;
        }
        if open.rows > 0 {
            batches.push(open);
        }
        PackedBucket { rows, batches }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
