//! Progressive training: one run on growing subsets of the data, stage after stage.
//!
//! A stage of n rows takes, of each language, those rows whose names hash lowest, and as many of each as makes the languages
//! have their shares of the whole: the n rows with the smallest (rank within the language) / (rows of the language), ranks
//! from 0, ties to the language whose name comes first. So a stage holds all rows of a smaller one, no language with rows is missing where n is at least
//! the number of languages, and a language is off its share by one row, or by as many as there are languages times its share.
//!
//! A stage has epochs of its own, numbered from 0, with the seed of the run plus 2^32 times the number of the stage.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use flow_kind::Digest;
use flow_kind::store::write_atomically;
use schemars::JsonSchema;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::json;

use crate::error::SamplingError;
use crate::manifest_rows::ManifestRows;
use crate::plan::Packing;
use crate::planned::Planned;
use crate::steps::{Step, Steps};

/// How many rows a stage trains on: `100k`, `1M`, `500000` or `all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StageSize {
    Rows(u64),
    All,
}

impl StageSize {
    fn of(self, rows: usize) -> usize {
        match self {
            StageSize::All => rows,
            StageSize::Rows(count) => usize::try_from(count).unwrap_or(usize::MAX).min(rows),
        }
    }
}

impl fmt::Display for StageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            StageSize::All => f.write_str("all"),
            StageSize::Rows(count) if count % 1_000_000 == 0 => write!(f, "{}M", count / 1_000_000),
            StageSize::Rows(count) if count % 1_000 == 0 => write!(f, "{}k", count / 1_000),
            StageSize::Rows(count) => write!(f, "{count}"),
        }
    }
}

impl FromStr for StageSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let wrong = || format!("`{text}` is not a number of rows; write 100k, 1M, 500000 or all");
        if text == "all" {
            return Ok(StageSize::All);
        }
        let (digits, unit) = match text.strip_suffix(['k', 'K']) {
            Some(digits) => (digits, 1_000u64),
            None => match text.strip_suffix('M') {
                Some(digits) => (digits, 1_000_000),
                None => (text, 1),
            },
        };
        let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
        let number = |digits: &str| digits.bytes().all(|b| b.is_ascii_digit()) && digits.len() <= 18;
        if whole.is_empty() || !number(whole) || !number(part) || digits.ends_with('.') {
            return Err(wrong());
        }
        let scale = 10u64.pow(part.len() as u32);
        let parse = |digits: &str| digits.parse::<u128>().unwrap_or(0);
        let count = (parse(whole) * u128::from(scale) + parse(part)) * u128::from(unit);
        match u64::try_from(count / u128::from(scale)) {
            Ok(rows) if rows > 0 && count.is_multiple_of(u128::from(scale)) => Ok(StageSize::Rows(rows)),
            _ => Err(wrong()),
        }
    }
}

impl Serialize for StageSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for StageSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Size;
        impl Visitor<'_> for Size {
            type Value = StageSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of rows such as 100k, 1M or 500000, or all")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<StageSize, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: de::Error>(self, rows: u64) -> Result<StageSize, E> {
                self.visit_str(&rows.to_string())
            }

            fn visit_i64<E: de::Error>(self, rows: i64) -> Result<StageSize, E> {
                self.visit_str(&rows.to_string())
            }
        }
        deserializer.deserialize_any(Size)
    }
}

impl JsonSchema for StageSize {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "StageSize".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "How many rows a stage trains on: `100k`, `1M`, `500000` or `all`.",
            "type": ["integer", "string"],
        })
    }
}

/// Validates a curriculum; the error is (name of the setting, why). `stage_steps` may be empty; `steps` are those of
/// all stages together.
pub fn check(sizes: &[StageSize], stage_steps: &[u64], steps: u64) -> Result<(), (&'static str, String)> {
    if !sizes.is_sorted_by(|a, b| a < b) {
        return Err((
            "curriculum",
            "each stage needs more rows than the one before it, and `all` comes last".into(),
        ));
    }
    if (sizes.len() as u64) > steps {
        return Err((
            "curriculum",
            format!("{} stages need more than {steps} steps", sizes.len()),
        ));
    }
    if stage_steps.is_empty() {
        return Ok(());
    }
    if stage_steps.len() + 1 != sizes.len() {
        return Err((
            "curriculum_steps",
            format!(
                "{} numbers for {} stages; give the steps of each stage but the last, which has the rest",
                stage_steps.len(),
                sizes.len()
            ),
        ));
    }
    let sum = stage_steps.iter().fold(0u64, |sum, steps| sum.saturating_add(*steps));
    if stage_steps.contains(&0) || sum >= steps {
        return Err((
            "curriculum_steps",
            format!("every stage needs a step, and of {steps} the last one has those that the others leave"),
        ));
    }
    Ok(())
}

/// Where each stage ends: the number of steps that are done then. Stages get steps in proportion to `weights` (the steps
/// of an epoch of each), so that all have the same number of epochs: stage k ends at the nearest whole number to
/// total * (weights to k) / (all weights), half up, but has one step at least and leaves one for each after it.
fn ends(weights: &[u64], total: u64) -> Vec<u64> {
    let all: u128 = weights.iter().map(|&weight| u128::from(weight)).sum::<u128>().max(1);
    let mut ends = Vec::with_capacity(weights.len());
    let (mut sum, mut last) = (0u128, 0u64);
    for (stage, weight) in weights.iter().enumerate() {
        sum += u128::from(*weight);
        let nearest = ((2 * u128::from(total) * sum + all) / (2 * all)) as u64;
        let after = (weights.len() - 1 - stage) as u64;
        last = nearest.min(total.saturating_sub(after)).max(last + 1);
        ends.push(last);
    }
    ends
}

/// How many rows of each language a stage of `wanted` rows has, for `counts` rows of each. `names` break ties.
fn shares(counts: &[u64], names: &[String], wanted: u64) -> Vec<u64> {
    let all: u64 = counts.iter().sum();
    if wanted >= all {
        return counts.to_vec();
    }
    let languages = counts.len() as u64;
    // No language ends with fewer than these; what is missing is given out one by one.
    let sure =
        |count: &u64| (u128::from(wanted.saturating_sub(languages)) * u128::from(*count) / u128::from(all)) as u64;
    let mut shares: Vec<u64> = counts.iter().map(sure).collect();
    for _ in shares.iter().sum::<u64>()..wanted {
        let next = (0..shares.len()).filter(|&l| shares[l] < counts[l]).min_by(|&a, &b| {
            let (left, right) = (
                u128::from(shares[a]) * u128::from(counts[b]),
                u128::from(shares[b]) * u128::from(counts[a]),
            );
            left.cmp(&right).then_with(|| names[a].cmp(&names[b]))
        });
        if let Some(next) = next {
            shares[next] += 1;
        }
    }
    shares
}

/// Row numbers of a stage of `wanted` rows, in rising order. `hashes` are those of the rows' names.
fn chosen(rows: &ManifestRows, hashes: &[u64], wanted: u64) -> Vec<u32> {
    let languages = &rows.languages;
    let shares = shares(&languages.counts(), languages.names(), wanted);
    let mut by_language: Vec<Vec<(u64, u32)>> = vec![Vec::new(); shares.len()];
    for (row, (&code, &hash)) in languages.codes().iter().zip(hashes).enumerate() {
        by_language[usize::from(code)].push((hash, row as u32));
    }
    let mut numbers = Vec::new();
    for (mut list, share) in by_language.into_iter().zip(shares) {
        let share = share as usize;
        if share < list.len() {
            list.select_nth_unstable(share);
        }
        numbers.extend(list.into_iter().take(share).map(|(_, row)| row));
    }
    numbers.sort_unstable();
    numbers
}

/// One stage.
pub struct Stage {
    /// As written in the setting; `all` where there is no curriculum.
    pub size: StageSize,
    /// Steps that are done when it ends.
    pub end: u64,
    /// Steps that are done when it begins.
    pub first: u64,
    packing: Packing,
    /// Its rows, and their numbers among all rows; none where it has all.
    part: Option<(ManifestRows, Vec<u32>)>,
    steps: Steps,
}

impl Stage {
    fn rows<'r>(&'r self, all: &'r ManifestRows) -> &'r ManifestRows {
        self.part.as_ref().map_or(all, |(rows, _)| rows)
    }

    fn named(&self, error: SamplingError) -> SamplingError {
        match self.part {
            None => error,
            Some(_) => SamplingError::Stage {
                stage: self.size.to_string(),
                error: Box::new(error),
            },
        }
    }

    /// Seed of its first epoch.
    pub fn seed(&self) -> i64 {
        self.packing.seed
    }

    /// The step of that number, counted from the first step of the run; row numbers are those of [`Stage::row`].
    pub fn step(&self, all: &ManifestRows, number: u64) -> Result<Step, SamplingError> {
        self.steps
            .step(self.rows(all), number - self.first)
            .map_err(|error| self.named(error))
    }

    /// The number among all rows of a row of a step.
    pub fn row(&self, row: u32) -> u32 {
        match &self.part {
            None => row,
            Some((_, numbers)) => numbers[row as usize],
        }
    }
}

/// The stages of a run; one of all rows where no curriculum is asked for.
pub struct Curriculum {
    stages: Vec<Stage>,
}

/// The parameters of a curriculum.
pub struct Wanted<'a> {
    pub sizes: &'a [StageSize],
    /// Steps of each stage but the last; empty: all have the same number of epochs.
    pub stage_steps: &'a [u64],
    /// Steps of all together.
    pub steps: u64,
    pub packing: &'a Packing,
    /// The packings with which the run was planned so far; empty: `packing` from the beginning.
    pub plans: &'a [Planned],
    /// A digest of the rows.
    pub data: &'a str,
    /// Where notes are kept; losing them costs time only.
    pub notes: Option<&'a Path>,
}

impl Curriculum {
    /// `hashes` gives those of the rows' names, and is asked only if they are needed. Plans an epoch of each stage unless it is known how many steps they have; uses the threads of the current rayon pool.
    pub fn new<E: From<SamplingError>>(
        rows: &ManifestRows,
        hashes: impl FnOnce() -> Result<Vec<u64>, E>,
        wanted: &Wanted<'_>,
    ) -> Result<Self, E> {
        let setting = |(name, why)| SamplingError::Setting { name, why };
        check(wanted.sizes, wanted.stage_steps, wanted.steps).map_err(setting)?;
        let count = rows.durations.len();
        let sizes = if wanted.sizes.is_empty() {
            &[StageSize::All]
        } else {
            wanted.sizes
        };
        let parts = sizes.iter().any(|size| size.of(count) < count);
        let hashes = if parts { hashes()? } else { Vec::new() };
        let mut stages = Vec::with_capacity(sizes.len());
        for (number, &size) in sizes.iter().enumerate() {
            let packing = Packing {
                seed: wanted.packing.seed.wrapping_add((number as i64) << 32),
                ..wanted.packing.clone()
            };
            // Placeholders: the ends are known once all stages are.
            let part = if size.of(count) < count {
                let numbers = chosen(rows, &hashes, size.of(count) as u64);
                Some((rows.part(&numbers)?, numbers))
            } else {
                None
            };
            let steps = Steps::new(packing.clone(), &[], 0, "", None);
            stages.push(Stage {
                size,
                first: 0,
                end: wanted.steps,
                packing,
                part,
                steps,
            });
        }
        let mut curriculum = Curriculum { stages };
        let ends = match wanted.stage_steps {
            _ if sizes.len() == 1 => vec![wanted.steps],
            [] => ends(&curriculum.epoch_steps(rows, wanted)?, wanted.steps),
            given => {
                let sums = given.iter().scan(0u64, |sum, steps| {
                    *sum += steps;
                    Some(*sum)
                });
                sums.chain([wanted.steps]).collect()
            }
        };
        let mut first = 0;
        for (stage, end) in curriculum.stages.iter_mut().zip(ends) {
            (stage.first, stage.end) = (first, end);
            let data = match &stage.part {
                Some(_) => format!("{} {}", wanted.data, stage.size),
                None => wanted.data.to_owned(),
            };
            let notes = wanted.notes.map(Path::to_owned);
            stage.steps = Steps::new(stage.packing.clone(), wanted.plans, first, &data, notes);
            first = end;
        }
        Ok(curriculum)
    }

    /// Steps of the first epoch of each stage. Unlike the notes of [`Steps`], which planning corrects, these decide
    /// where stages end, so their note has a digest. They are those of the ranks that the run began with, so that
    /// stages end where they did with other ranks too.
    fn epoch_steps(&self, rows: &ManifestRows, wanted: &Wanted<'_>) -> Result<Vec<u64>, SamplingError> {
        let first = |packing: &Packing| Planned::packing(wanted.plans, packing, 0);
        let about = json!({
            "version": 1, "data": wanted.data, "packing": first(wanted.packing), "curriculum": wanted.sizes,
        });
        let key = Digest::of_parts([about.to_string().as_bytes()]);
        let path = wanted
            .notes
            .map(|folder| folder.join(format!("curriculum-{}.json", key.short())));
        let sum_of =
            |steps: &[u64]| Digest::of_parts([key.to_hex(), format!("{steps:?}")].map(String::into_bytes)).to_hex();
        let noted = path
            .as_ref()
            .and_then(|path| serde_json::from_slice::<(Vec<u64>, String)>(&std::fs::read(path).ok()?).ok())
            .filter(|(steps, sum)| steps.len() == self.stages.len() && *sum == sum_of(steps));
        if let Some((steps, _)) = noted {
            return Ok(steps);
        }
        let planned = |stage: &Stage| {
            let packing = first(&stage.packing);
            let steps = Steps::new(packing, &[], 0, "", None);
            steps.first_epoch(stage.rows(rows)).map_err(|error| stage.named(error))
        };
        let steps = self
            .stages
            .iter()
            .map(planned)
            .collect::<Result<Vec<u64>, SamplingError>>()?;
        // A failure to write the note only costs time after the next restart.
        if let Some(path) = &path
            && let Some(folder) = path.parent()
            && let Ok(text) = serde_json::to_vec(&(&steps, sum_of(&steps)))
            && std::fs::create_dir_all(folder).is_ok()
        {
            let _ = write_atomically(path, &text);
        }
        Ok(steps)
    }

    /// Checks that every rank gets batches in every stage.
    pub fn check(&self, rows: &ManifestRows) -> Result<(), SamplingError> {
        self.stages
            .iter()
            .try_for_each(|stage| stage.steps.check(stage.rows(rows)).map_err(|error| stage.named(error)))
    }

    /// The stage that a step belongs to, counted from the first step of the run; the last one past the end.
    pub fn stage(&self, number: u64) -> Option<&Stage> {
        let place = self.stages.partition_point(|stage| stage.end <= number);
        self.stages.get(place).or(self.stages.last())
    }

    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }
}

#[cfg(test)]
#[path = "curriculum_tests.rs"]
mod tests;
