//! Which rows are for validation: whole groups of equal words, chosen by hash per language, so that no
//! sentence stands on both sides and the choice does not depend on the order of rows.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow::array::{Array, RecordBatch, StringArray, UInt32Array, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_runtime::{Partition, ROW};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::columns;
use crate::error::ManifestError;
use crate::keys::{ByKey, Key, key_at, keys, partition_order};

/// What must not be divided between training and validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SplitBy {
    /// Rows with the same words.
    Text,
    /// Rows with the same words, and rows of the same recording; what is tied by a chain of the two stays
    /// together. A row without a recording is tied by its words alone.
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
    fn target(self, rows: u64) -> u64 {
        // Exact for any count of rows below 2^53 / 100: the product is, and a quotient that is no whole
        // number is not rounded up to one.
        let share = (rows as f64 * self.percent / 100.0).floor();
        self.per_language.min(share as u64)
    }
}

/// Schema of key rows. By text: the words as a 128-bit key, and their place in the order of choice
/// ([`group_order`]). By recording: the words themselves, which name a group, and the recording as a key.
pub fn key_schema(by: SplitBy) -> SchemaRef {
    let mut fields = vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("lang", DataType::Utf8, false),
    ];
    match by {
        SplitBy::Text => {
            fields.push(Field::new("words", DataType::FixedSizeBinary(16), false));
            fields.push(Field::new("order", DataType::UInt64, false));
        }
        SplitBy::Recording => {
            fields.push(Field::new("norm", DataType::Utf8, false));
            fields.push(Field::new("recording", DataType::FixedSizeBinary(16), true));
        }
    }
    Arc::new(Schema::new(fields))
}

/// Schema of decisions: the rows for validation.
pub fn decision_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new(ROW, DataType::UInt32, false)]))
}

/// The place of a group in the order of choice: the first 8 bytes, big-endian, of SHA-256 over
/// `"{seed}\n{words}"`.
pub fn group_order(seed: i64, words: &str) -> u64 {
    let digest = Sha256::new()
        .chain_update(seed.to_string())
        .chain_update("\n")
        .chain_update(words)
        .finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    u64::from_be_bytes(first)
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
    fn count(&mut self, lang: &str) -> Result<u32, ManifestError> {
        // Rows of a language mostly stand together.
        if let Some(last) = self.last.filter(|last| self.names[*last as usize] == lang) {
            self.rows[last as usize] += 1;
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
        self.rows[number as usize] += 1;
        self.last = Some(number);
        Ok(number)
    }

    fn smaller(&self, a: u32, b: u32) -> u32 {
        if self.names[b as usize] < self.names[a as usize] {
            b
        } else {
            a
        }
    }
}

fn small(count: usize) -> Result<u32, ManifestError> {
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

/// Decides over all key rows ([`key_schema`]), whatever the order in which they come.
///
/// For each language in byte order: the target is `min(per_language, percent of its rows, rounded down)`;
/// groups at home in the language are gone through by (order, words) until the target is met; one that is
/// larger than what is missing is passed over.
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

fn by_text(all: &[(Partition, Vec<RecordBatch>)], quota: Quota) -> Result<Split, ManifestError> {
    let mut languages = LanguageNumbers::default();
    let mut numbers: ByKey<u32> = ByKey::default();
    let mut words: Vec<Key> = Vec::new();
    let mut groups: Vec<Group> = Vec::new();
    let mut row_groups = Vec::new();
    for batch in all.iter().flat_map(|(_, batches)| batches) {
        let keys = keys(batch, "words")?;
        let order = batch
            .column_by_name("order")
            .and_then(|column| column.as_any().downcast_ref::<UInt64Array>());
        let order = order.ok_or_else(|| ManifestError::Rows {
            message: "key rows lack `order`".into(),
            row: None,
        })?;
        for (place, lang) in columns::text(batch, "lang")?.iter().enumerate() {
            let lang = languages.count(lang.unwrap_or(""))?;
            let key = key_at(keys, place);
            let number = match numbers.get(&key) {
                Some(&number) => number,
                None => {
                    let number = small(groups.len())?;
                    numbers.insert(key, number);
                    words.push(key);
                    groups.push(Group {
                        order: order.value(place),
                        rows: 0,
                        home: lang,
                        chosen: false,
                    });
                    number
                }
            };
            join_group(&mut groups[number as usize], lang, &languages);
            row_groups.push(number);
        }
    }
    choose(&mut groups, &languages, quota, |group| &words[group as usize]);
    finish(all, &groups, &row_groups, &languages)
}

fn by_recording(all: &[(Partition, Vec<RecordBatch>)], quota: Quota, seed: i64) -> Result<Split, ManifestError> {
    let mut languages = LanguageNumbers::default();
    let mut ties = Ties::default();
    let mut texts: HashMap<&str, u32> = HashMap::new();
    let mut recordings: ByKey<u32> = ByKey::default();
    let mut rows: Vec<(u32, u32)> = Vec::new(); // text, language
    for batch in all.iter().flat_map(|(_, batches)| batches) {
        let recording = keys(batch, "recording")?;
        let norms = columns::text(batch, "norm")?;
        for (place, lang) in columns::text(batch, "lang")?.iter().enumerate() {
            let lang = languages.count(lang.unwrap_or(""))?;
            let norm = if norms.is_valid(place) { norms.value(place) } else { "" };
            let text = match texts.get(norm) {
                Some(&text) => text,
                None => *texts.entry(norm).or_insert(ties.add()?),
            };
            if recording.is_valid(place) {
                let key = key_at(recording, place);
                let recording = match recordings.get(&key) {
                    Some(&recording) => recording,
                    None => *recordings.entry(key).or_insert(ties.add()?),
                };
                ties.tie(text, recording);
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
    finish(all, &groups, &row_groups, &languages)
}

fn join_group(group: &mut Group, lang: u32, languages: &LanguageNumbers) {
    group.rows += 1;
    group.home = languages.smaller(group.home, lang);
}

/// `tie_break` orders groups whose hashes are equal.
fn choose<'a, B: AsRef<[u8]> + ?Sized + 'a>(
    groups: &mut [Group],
    languages: &LanguageNumbers,
    quota: Quota,
    tie_break: impl Fn(u32) -> &'a B,
) {
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
            order.then_with(|| tie_break(*a).as_ref().cmp(tie_break(*b).as_ref()))
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

fn finish(
    all: &[(Partition, Vec<RecordBatch>)],
    groups: &[Group],
    row_groups: &[u32],
    languages: &LanguageNumbers,
) -> Result<Split, ManifestError> {
    let mut counts: BTreeMap<String, (u64, u64)> = languages
        .names
        .iter()
        .cloned()
        .zip(languages.rows.iter().map(|&rows| (rows, 0)))
        .collect();
    let mut validation = Vec::with_capacity(all.len());
    let mut row_groups = row_groups.iter();
    for (partition, batches) in all {
        let mut chosen = Vec::new();
        for batch in batches {
            let lang = columns::text(batch, "lang")?;
            for (place, (row, group)) in columns::rows(batch)?
                .values()
                .iter()
                .zip(row_groups.by_ref())
                .enumerate()
            {
                if groups[*group as usize].chosen {
                    chosen.push(*row);
                    if let Some(count) = counts.get_mut(if lang.is_valid(place) { lang.value(place) } else { "" }) {
                        count.1 += 1;
                    }
                }
            }
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

/// Which texts and recordings hang together (union-find).
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
        // The smaller number above: the outcome does not hang on it, only the length of chains.
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
                let order = UInt64Array::from_iter_values(words(&norm).map(|w| group_order(SEED, w)));
                let columns: Vec<Arc<dyn Array>> = match by {
                    SplitBy::Text => vec![
                        Arc::new(numbers),
                        Arc::new(lang),
                        Arc::new(keys_of(&norm)),
                        Arc::new(order),
                    ],
                    SplitBy::Recording => vec![
                        Arc::new(numbers),
                        Arc::new(lang),
                        Arc::new(norm),
                        Arc::new(keys_of(&recording)),
                    ],
                };
                let name = Partition::from(format!("x/{partition}"));
                (name, vec![RecordBatch::try_new(key_schema(by), columns).unwrap()])
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
