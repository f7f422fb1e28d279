//! Which rows are for validation: whole groups of equal words, chosen by hash per language, so that no sentence is on
//! both sides and the choice does not depend on the order of rows.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow::array::{Array, FixedSizeBinaryArray, FixedSizeBinaryBuilder, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_runtime::{Partition, ROW};
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::columns;
use crate::error::ManifestError;
use crate::keys::{ByKey, Key, halves, key_at, keys, partition_order};

/// What must not be divided between training and validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SplitBy {
    /// Rows with the same words.
    Text,
    /// Rows with the same words, and rows of the same recording; rows that are connected by a chain of the two stay
    /// together. A row without a recording is connected by its words only.
    Recording,
}

/// How many rows of each language go to validation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quota {
    pub per_language: u64,
    /// At most this share of a language's rows, in percent.
    pub percent: f64,
}

impl Quota {
    /// Rows for validation of a language that has so many rows.
    pub fn target(self, rows: u64) -> u64 {
        // Exact for any count of rows below 2^53 / 100: the product is, and a quotient that is no whole
        // number is not rounded up to one.
        let share = (rows as f64 * self.percent / 100.0).floor();
        self.per_language.min(share as u64)
    }
}

/// Schema of key rows. By text: the words as a 128-bit key ([`group_key`]), whose first half is their place in the order
/// of choice. By recording: the words themselves, which name a group, and the recording as a key; `with_segment` also the
/// segment as one.
pub fn key_schema(by: SplitBy, with_segment: bool) -> SchemaRef {
    let mut fields = vec![
        Field::new(ROW, DataType::UInt32, false),
        // Null only in rows about which nothing is decided.
        Field::new("lang", DataType::Utf8, true),
    ];
    match by {
        SplitBy::Text => {
            fields.push(Field::new("words", DataType::FixedSizeBinary(16), false));
        }
        SplitBy::Recording => {
            fields.push(Field::new("norm", DataType::Utf8, false));
            fields.push(Field::new("recording", DataType::FixedSizeBinary(16), true));
            if with_segment {
                fields.push(Field::new("segment", DataType::FixedSizeBinary(16), true));
            }
        }
    }
    Arc::new(Schema::new(fields))
}

/// Schema of decisions: the rows for validation.
pub fn decision_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new(ROW, DataType::UInt32, false)]))
}

/// The first 16 bytes of SHA-256 over `"{seed}\n{words}"`.
pub fn group_key(seed: i64, words: &str) -> Key {
    let digest = Sha256::new()
        .chain_update(seed.to_string())
        .chain_update("\n")
        .chain_update(words)
        .finalize();
    let mut key = [0; 16];
    key.copy_from_slice(&digest[..16]);
    key
}

/// The place of a group in the order of choice: the first 8 bytes, big-endian, of SHA-256 over
/// `"{seed}\n{words}"`.
pub fn group_order(seed: i64, words: &str) -> u64 {
    halves(group_key(seed, words))[0]
}

/// The keys of a column of words.
pub(crate) fn group_keys(seed: i64, texts: &StringArray) -> FixedSizeBinaryArray {
    let mut keys = FixedSizeBinaryBuilder::with_capacity(texts.len(), 16);
    for words in words(texts) {
        // A key has the width that the builder was made for.
        keys.append_value(group_key(seed, words)).expect("16 bytes");
    }
    keys.finish()
}

/// A group of rows that stay together.
struct Group {
    order: u64,
    rows: u64,
    /// The smallest language of its rows, by number.
    home: u32,
    chosen: bool,
}

/// Languages by number, in the order in which they first came.
#[derive(Default)]
struct LanguageNumbers {
    numbers: HashMap<String, u32>,
    names: Vec<String>,
    rows: Vec<u64>,
    /// That of the row before.
    last: Option<u32>,
}

impl LanguageNumbers {
    /// Counts so many rows of a language, and gives its number.
    fn count(&mut self, lang: &str, rows: u64) -> Result<u32, ManifestError> {
        // Rows of a language mostly stand together.
        if let Some(last) = self.last.filter(|last| self.names[*last as usize] == lang) {
            self.rows[last as usize] += rows;
            return Ok(last);
        }
        let number = match self.numbers.get(lang) {
            Some(&number) => number,
            None => {
                let number = small(self.names.len())?;
                self.numbers.insert(lang.to_owned(), number);
                self.names.push(lang.to_owned());
                self.rows.push(0);
                number
            }
        };
        self.rows[number as usize] += rows;
        self.last = Some(number);
        Ok(number)
    }

    /// The number of a language that was counted. `last`: that of the row before.
    fn number(&self, lang: &str, last: &mut Option<u32>) -> u32 {
        match *last {
            Some(number) if self.names[number as usize] == lang => number,
            _ => *last.insert(self.numbers[lang]),
        }
    }

    fn smaller(&self, a: u32, b: u32) -> u32 {
        if self.names[b as usize] < self.names[a as usize] {
            b
        } else {
            a
        }
    }
}

pub(crate) fn small(count: usize) -> Result<u32, ManifestError> {
    u32::try_from(count).map_err(|_| ManifestError::Rows {
        message: "more groups than fit in 32 bits".into(),
        row: None,
    })
}

/// What was decided.
pub struct Split {
    /// Rows for validation ([`decision_schema`]), per partition.
    pub validation: Vec<(Partition, RecordBatch)>,
    /// Rows in all and rows for validation, per language.
    pub languages: BTreeMap<String, (u64, u64)>,
}

/// Decides over all key rows ([`key_schema`]), independent of their order.
///
/// For each language in byte order: the target is `min(per_language, percent of its rows, rounded down)`; groups that
/// belong to the language are visited by (order, words) until the target is met; one that is larger than the number
/// still missing is skipped.
///
/// # Errors
/// When the key rows have other columns, or there are more groups than fit in 32 bits.
pub fn decide_split(
    all: &[(Partition, Vec<RecordBatch>)],
    by: SplitBy,
    quota: Quota,
    seed: i64,
) -> Result<Split, ManifestError> {
    match by {
        SplitBy::Text => by_text(all, quota),
        SplitBy::Recording => by_recording(all, quota, seed),
    }
}

/// A row with the sort key of its group: the order of choice is equal for equal words, and nearly always different for
/// others.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    order: u64,
    /// Counted over all batches.
    row: u32,
    lang: u32,
}

/// The rows of a batch, for a choice by text.
struct TextRows {
    /// Number of the first one, counted over all batches.
    first: u32,
    words: FixedSizeBinaryArray,
    langs: StringArray,
}

impl TextRows {
    /// Numbers and places in the order of choice.
    fn orders(&self) -> impl Iterator<Item = (usize, u32, u64)> {
        (0..self.words.len())
            .zip(self.first..)
            .map(|(place, row)| (place, row, halves(key_at(&self.words, place))[0]))
    }
}

/// Rows that may be chosen by text, of some groups of equal words with all of their rows.
pub(crate) struct TextCandidates {
    languages: LanguageNumbers,
    /// In the order of choice: see [`TextCandidates::sort`].
    candidates: Vec<Candidate>,
    batches: Vec<TextRows>,
}

impl TextCandidates {
    /// Of batches of key rows.
    pub fn new<'a>(batches: impl Iterator<Item = &'a RecordBatch>) -> Result<Self, ManifestError> {
        let mut rows = 0;
        let of_batch = |batch: &RecordBatch| {
            let first = small(rows)?;
            rows += batch.num_rows();
            small(rows)?;
            Ok(TextRows {
                first,
                words: keys(batch, "words")?.clone(),
                langs: columns::text(batch, "lang")?.clone(),
            })
        };
        let batches = batches.map(of_batch).collect::<Result<Vec<_>, ManifestError>>()?;
        let count = |rows: &TextRows| {
            let mut languages = LanguageNumbers::default();
            for lang in &rows.langs {
                languages.count(lang.unwrap_or(""), 1)?;
            }
            Ok(languages)
        };
        let counted = batches
            .par_iter()
            .map(count)
            .collect::<Result<Vec<_>, ManifestError>>()?;
        let mut languages = LanguageNumbers::default();
        for LanguageNumbers { names, rows, .. } in counted {
            for (lang, rows) in names.iter().zip(rows) {
                languages.count(lang, rows)?;
            }
        }
        Ok(TextCandidates {
            languages,
            candidates: Vec::new(),
            batches,
        })
    }

    /// Takes the rows up to a place in the order of choice, in that order.
    pub fn sort(&mut self, last: u64) {
        let wanted = |rows: &TextRows| rows.orders().filter(|(.., order)| *order <= last).count();
        let counts: Vec<usize> = self.batches.par_iter().map(wanted).collect();
        self.candidates = vec![Candidate::default(); counts.iter().sum()];
        let mut rest = self.candidates.as_mut_slice();
        let mut parts = Vec::with_capacity(counts.len());
        for (rows, count) in self.batches.iter().zip(counts) {
            let (part, after) = rest.split_at_mut(count);
            parts.push((rows, part));
            rest = after;
        }
        let languages = &self.languages;
        parts.into_par_iter().for_each(|(rows, part)| {
            let mut lang = None;
            let wanted = rows.orders().filter(|(.., order)| *order <= last);
            for ((place, row, order), candidate) in wanted.zip(part) {
                let name = if rows.langs.is_valid(place) {
                    rows.langs.value(place)
                } else {
                    ""
                };
                let number = languages.number(name, &mut lang);
                *candidate = Candidate {
                    order,
                    row,
                    lang: number,
                };
            }
        });
        self.candidates.par_sort_unstable();
    }

    /// The languages of the rows, by number.
    pub fn languages(&self) -> &[String] {
        &self.languages.names
    }

    /// Of the sorted candidates those that are chosen, each with the number of its language. `missing`: by number of the
    /// language, how many rows it still takes; `left`: of all languages, those without rows here, too.
    pub fn choose(&self, missing: &mut [u64], left: &mut u64) -> Vec<(u32, u32)> {
        let mut chosen = Vec::new();
        for alike in self.candidates.chunk_by(|a, b| a.order == b.order) {
            if *left == 0 {
                break;
            }
            let mut choose = |group: &[Candidate]| {
                let home = group
                    .iter()
                    .map(|row| row.lang)
                    .reduce(|a, b| self.languages.smaller(a, b));
                let rows = group.len() as u64;
                if let Some(missing) = home
                    .and_then(|home| missing.get_mut(home as usize))
                    .filter(|m| rows <= **m)
                {
                    *missing -= rows;
                    *left -= rows;
                    chosen.extend(group.iter().map(|row| (row.row, row.lang)));
                }
            };
            match alike {
                [_] => choose(alike),
                _ => {
                    let mut alike: Vec<(Key, Candidate)> =
                        alike.iter().map(|row| (self.words_of(row.row), *row)).collect();
                    alike.sort_unstable();
                    for group in alike.chunk_by(|a, b| a.0 == b.0) {
                        choose(&group.iter().map(|(_, row)| *row).collect::<Vec<_>>());
                    }
                }
            }
        }
        chosen
    }

    fn words_of(&self, row: u32) -> Key {
        let batch = self.batches.partition_point(|rows| rows.first <= row) - 1; // The first batch begins at 0.
        let rows = &self.batches[batch];
        key_at(&rows.words, (row - rows.first) as usize)
    }
}

fn by_text(all: &[(Partition, Vec<RecordBatch>)], quota: Quota) -> Result<Split, ManifestError> {
    let mut candidates = TextCandidates::new(all.iter().flat_map(|(_, batches)| batches))?;
    let rows = &candidates.languages.rows;
    let targets: Vec<u64> = rows.iter().map(|&rows| quota.target(rows)).collect();
    let mut last = likely_last(rows, &targets);
    let chosen = loop {
        candidates.sort(last);
        let (mut missing, mut left) = (targets.clone(), targets.iter().sum());
        let chosen = candidates.choose(&mut missing, &mut left);
        // Rows behind the one that met the last target are not chosen.
        if left == 0 || last == u64::MAX {
            break chosen;
        }
        last = u64::MAX;
    };
    let mut chosen: Vec<u32> = chosen.into_iter().map(|(row, _)| row).collect();
    chosen.sort_unstable();
    finish(all, &candidates.languages, &chosen)
}

/// A place in the order of choice, which is that of hashes, before which all targets are probably met: each language has four times
/// as many rows there as it needs, and some. `rows` and `targets` are those of the languages.
fn likely_last(rows: &[u64], targets: &[u64]) -> u64 {
    const SOME: f64 = 16.0;
    let shares = rows.iter().zip(targets).filter(|(_, target)| **target > 0);
    let shares = shares.map(|(rows, target)| (4.0 * *target as f64 + SOME) / *rows as f64);
    // A number that is too large becomes the largest one.
    (shares.fold(0.0, f64::max) * 2f64.powi(64)) as u64
}

fn by_recording(all: &[(Partition, Vec<RecordBatch>)], quota: Quota, seed: i64) -> Result<Split, ManifestError> {
    let mut languages = LanguageNumbers::default();
    let mut ties = Ties::default();
    let mut texts: HashMap<&str, u32> = HashMap::new();
    let mut recordings: ByKey<u32> = ByKey::default();
    let mut segments: ByKey<u32> = ByKey::default();
    let mut rows: Vec<(u32, u32)> = Vec::new(); // text, language
    for batch in all.iter().flat_map(|(_, batches)| batches) {
        let recording = keys(batch, "recording")?;
        let segment = match batch.column_by_name("segment") {
            Some(_) => Some(keys(batch, "segment")?),
            None => None,
        };
        let norms = columns::text(batch, "norm")?;
        for (place, lang) in columns::text(batch, "lang")?.iter().enumerate() {
            let lang = languages.count(lang.unwrap_or(""), 1)?;
            let norm = if norms.is_valid(place) { norms.value(place) } else { "" };
            let text = match texts.get(norm) {
                Some(&text) => text,
                None => *texts.entry(norm).or_insert(ties.add()?),
            };
            for (keys, known) in [(Some(recording), &mut recordings), (segment, &mut segments)] {
                let Some(keys) = keys.filter(|keys| keys.is_valid(place)) else {
                    continue;
                };
                let key = key_at(keys, place);
                let number = match known.get(&key) {
                    Some(&number) => number,
                    None => *known.entry(key).or_insert(ties.add()?),
                };
                ties.tie(text, number);
            }
            rows.push((text, lang));
        }
    }
    // A component is named by the smallest of its texts.
    let mut names: Vec<(&str, u32)> = texts.into_iter().collect();
    names.sort_unstable();
    let mut numbers: HashMap<u32, u32> = HashMap::new();
    let mut words: Vec<&str> = Vec::new();
    for (name, text) in names {
        if let std::collections::hash_map::Entry::Vacant(entry) = numbers.entry(ties.root(text)) {
            entry.insert(small(words.len())?);
            words.push(name);
        }
    }
    let mut groups: Vec<Group> = words
        .iter()
        .map(|name| Group {
            order: group_order(seed, name),
            rows: 0,
            home: 0,
            chosen: false,
        })
        .collect();
    let mut row_groups = Vec::with_capacity(rows.len());
    for (text, lang) in rows {
        let number = numbers[&ties.root(text)]; // Every text's root was numbered above.
        let group = &mut groups[number as usize];
        if group.rows == 0 {
            group.home = lang;
        }
        join_group(group, lang, &languages);
        row_groups.push(number);
    }
    choose(&mut groups, &languages, quota, |group| words[group as usize].as_bytes());
    let chosen = (0u32..).zip(&row_groups);
    let chosen = chosen.filter(|(_, group)| groups[**group as usize].chosen);
    finish(all, &languages, &chosen.map(|(row, _)| row).collect::<Vec<_>>())
}

fn join_group(group: &mut Group, lang: u32, languages: &LanguageNumbers) {
    group.rows += 1;
    group.home = languages.smaller(group.home, lang);
}

/// `tie_break` orders groups whose hashes are equal.
fn choose<'a>(groups: &mut [Group], languages: &LanguageNumbers, quota: Quota, tie_break: impl Fn(u32) -> &'a [u8]) {
    let mut at_home: Vec<Vec<u32>> = vec![Vec::new(); languages.names.len()];
    for (number, group) in (0u32..).zip(groups.iter()) {
        at_home[group.home as usize].push(number);
    }
    for (lang, candidates) in at_home.iter_mut().enumerate() {
        let target = quota.target(languages.rows[lang]);
        if target == 0 {
            continue;
        }
        let compare = |a: &u32, b: &u32| {
            let order = groups[*a as usize].order.cmp(&groups[*b as usize].order);
            order.then_with(|| tie_break(*a).cmp(tie_break(*b)))
        };
        // The target is a small part of most languages: the first candidates are sorted, and more only if they
        // do not suffice.
        let mut missing = target;
        let mut chosen = Vec::new();
        let mut rest = candidates.as_mut_slice();
        let mut some = usize::try_from(target).unwrap_or(usize::MAX).max(64);
        while missing > 0 && !rest.is_empty() {
            if some < rest.len() {
                rest.select_nth_unstable_by(some, compare);
            }
            let (first, later) = rest.split_at_mut(some.min(rest.len()));
            first.sort_unstable_by(compare);
            for &number in first.iter() {
                let rows = groups[number as usize].rows;
                if rows <= missing {
                    chosen.push(number);
                    missing -= rows;
                    if missing == 0 {
                        break;
                    }
                }
            }
            rest = later;
            some = some.saturating_mul(4);
        }
        for number in chosen {
            groups[number as usize].chosen = true;
        }
    }
}

/// `chosen_rows`: counted over all batches, in order.
fn finish(
    all: &[(Partition, Vec<RecordBatch>)],
    languages: &LanguageNumbers,
    mut chosen_rows: &[u32],
) -> Result<Split, ManifestError> {
    let mut counts: BTreeMap<String, (u64, u64)> = languages
        .names
        .iter()
        .cloned()
        .zip(languages.rows.iter().map(|&rows| (rows, 0)))
        .collect();
    let mut validation = Vec::with_capacity(all.len());
    let mut first = 0u32;
    for (partition, batches) in all {
        let mut chosen = Vec::new();
        for batch in batches {
            let (lang, numbers) = (columns::text(batch, "lang")?, columns::rows(batch)?);
            let after = first.saturating_add(small(batch.num_rows())?);
            let of_batch = chosen_rows.partition_point(|row| *row < after);
            let (here, later) = chosen_rows.split_at(of_batch);
            for row in here {
                let place = (row - first) as usize;
                chosen.push(numbers.value(place));
                if let Some(count) = counts.get_mut(if lang.is_valid(place) { lang.value(place) } else { "" }) {
                    count.1 += 1;
                }
            }
            (first, chosen_rows) = (after, later);
        }
        chosen.sort_unstable();
        validation.push((
            partition.clone(),
            RecordBatch::try_new(decision_schema(), vec![Arc::new(UInt32Array::from(chosen))])?,
        ));
    }
    validation.sort_by(|a, b| partition_order(&a.0, &b.0));
    Ok(Split {
        validation,
        languages: counts,
    })
}

/// Connected components of texts and recordings (union-find).
#[derive(Default)]
struct Ties {
    parents: Vec<u32>,
}

impl Ties {
    fn add(&mut self) -> Result<u32, ManifestError> {
        let number = small(self.parents.len())?;
        self.parents.push(number);
        Ok(number)
    }

    fn root(&mut self, of: u32) -> u32 {
        let mut at = of;
        while self.parents[at as usize] != at {
            let above = self.parents[self.parents[at as usize] as usize];
            self.parents[at as usize] = above;
            at = above;
        }
        at
    }

    fn tie(&mut self, a: u32, b: u32) {
        let (a, b) = (self.root(a), self.root(b));
        // The smaller number becomes the root: this affects only the length of chains, not the result.
        self.parents[a.max(b) as usize] = a.min(b);
    }
}

/// The texts of a column, empty where null.
pub(crate) fn words(texts: &StringArray) -> impl Iterator<Item = &str> {
    texts.iter().map(|text| text.unwrap_or(""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{key_of, keys_of};
    use proptest::prelude::*;
    use std::collections::{BTreeSet, HashSet};

    type Row = (u8, u8, Option<u8>, u8); // partition, words, recording, language

    const SEED: i64 = 7;

    fn keys_for(rows: &[Row], by: SplitBy) -> Vec<(Partition, Vec<RecordBatch>)> {
        (0..3u8)
            .map(|partition| {
                let mine: Vec<(u32, &Row)> = (0u32..).zip(rows).filter(|(_, row)| row.0 == partition).collect();
                let numbers = UInt32Array::from_iter_values(mine.iter().map(|(number, _)| *number));
                let lang = StringArray::from_iter_values(mine.iter().map(|(_, row)| format!("l{}", row.3)));
                let norm = StringArray::from_iter_values(mine.iter().map(|(_, row)| format!("w{}", row.1)));
                let recording: StringArray = mine.iter().map(|(_, row)| row.2.map(|r| format!("r{r}"))).collect();
                let columns: Vec<Arc<dyn Array>> = match by {
                    SplitBy::Text => vec![Arc::new(numbers), Arc::new(lang), Arc::new(group_keys(SEED, &norm))],
                    SplitBy::Recording => vec![
                        Arc::new(numbers),
                        Arc::new(lang),
                        Arc::new(norm),
                        Arc::new(keys_of(&recording)),
                    ],
                };
                let name = Partition::from(format!("x/{partition}"));
                (
                    name,
                    vec![RecordBatch::try_new(key_schema(by, false), columns).unwrap()],
                )
            })
            .collect()
    }

    /// The rules word for word, on sets.
    fn slowly(rows: &[Row], by: SplitBy, quota: Quota) -> BTreeSet<u32> {
        let mut component: Vec<BTreeSet<usize>> = (0..rows.len()).map(|row| BTreeSet::from([row])).collect();
        loop {
            let before = component.clone();
            for (i, a) in rows.iter().enumerate() {
                for (j, b) in rows.iter().enumerate() {
                    if a.1 == b.1 || (by == SplitBy::Recording && a.2.is_some() && a.2 == b.2) {
                        let both: BTreeSet<usize> = component[i].union(&component[j]).copied().collect();
                        component[i] = both.clone();
                        component[j] = both;
                    }
                }
            }
            if before == component {
                break;
            }
        }
        let groups: BTreeSet<BTreeSet<usize>> = component.into_iter().collect();
        let mut validation = BTreeSet::new();
        for lang in rows.iter().map(|row| row.3).collect::<BTreeSet<_>>() {
            let of_lang = rows.iter().filter(|row| row.3 == lang).count() as u64;
            let target = quota.per_language.min(of_lang * quota.percent as u64 / 100);
            let mut home: Vec<(u64, String, &BTreeSet<usize>)> = groups
                .iter()
                .filter(|group| group.iter().map(|&row| rows[row].3).min() == Some(lang))
                .map(|group| {
                    let name = group.iter().map(|&row| format!("w{}", rows[row].1)).min().unwrap();
                    (group_order(SEED, &name), name, group)
                })
                .collect();
            home.sort();
            let mut got = 0;
            for (_, _, group) in home {
                if got < target && got + group.len() as u64 <= target {
                    got += group.len() as u64;
                    validation.extend(group.iter().map(|&row| row as u32));
                }
            }
        }
        validation
    }

    proptest! {
        #[test]
        fn splits_as_the_rules_say(
            rows in prop::collection::vec((0..3u8, 0..9u8, prop::option::of(0..7u8), 0..3u8), 0..40),
            per_language in 0..6u64, percent in 0..100u32, recording in any::<bool>(), turned in any::<bool>(),
        ) {
            let by = if recording { SplitBy::Recording } else { SplitBy::Text };
            let quota = Quota { per_language, percent: f64::from(percent) };
            let mut keys = keys_for(&rows, by);
            if turned {
                keys.reverse();
            }
            let split = decide_split(&keys, by, quota, SEED).unwrap();
            let mut chosen = BTreeSet::new();
            for (_, decisions) in &split.validation {
                chosen.extend(columns::rows(decisions).unwrap().values().iter().copied());
            }
            prop_assert_eq!(&chosen, &slowly(&rows, by, quota));
            let chosen = &chosen;
            let sides = |want: bool| (0u32..).zip(&rows).filter(move |(n, _)| chosen.contains(n) == want).map(|(_, row)| row.1).collect::<HashSet<_>>();
            let (train, val) = (sides(false), sides(true));
            prop_assert!(train.is_disjoint(&val), "words on both sides");
        }
    }

    #[test]
    fn the_order_is_that_of_sha_256() {
        // python: int.from_bytes(hashlib.sha256(b"1\nabc").digest()[:8], "big")
        assert_eq!(group_order(1, "abc"), 14271674943407019265);
        assert_ne!(key_of("a"), key_of("b"));
    }
}
