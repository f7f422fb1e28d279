//! The split by text decided group by group, for [`decide_split`] over more key rows than one process holds, and over those of a
//! process that stays alive, of which few change.
//!
//! Round 1 counts the rows of each language. In round 2 the groups of equal words go to the reducers by the order of choice:
//! each has a range of it, chooses from its own groups, and leaves to the next one how many rows each language still takes.
//!
//! [`decide_split`]: crate::validation::decide_split

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow::array::{Array, RecordBatch, StringArray, UInt32Array, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_runtime::{
    Artifact, ChoiceRows, Context, GroupChoice, GroupedDecision, MappedRows, Partition, ROW, Reducer, ShuffledRows,
    StageError,
};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::columns;
use crate::error::ManifestError;
use crate::keys::{halves, key_at, keys};
use crate::split::{SplitSettings, figures};
use crate::validation::{Quota, TextCandidates, decision_schema};

/// Bytes for each row of the second round: number, language, words, partition, and what is sorted.
const ROW_BYTES: u64 = 50;

/// The decisions of `manifest.split` by text.
pub(crate) struct SplitByGroup {
    settings: SplitSettings,
}

/// What is known of a language: carried from reducer to reducer.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Language {
    rows: u64,
    /// Rows that validation still takes from groups that belong to the language.
    missing: u64,
    /// Rows for validation so far.
    val: u64,
}

type Languages = BTreeMap<String, Language>;

fn read(carried: &Value) -> Result<Languages, StageError> {
    match carried {
        Value::Null => Ok(Languages::new()),
        carried => {
            Languages::deserialize(carried).map_err(|error| StageError::failed(format!("counts of languages: {error}")))
        }
    }
}

fn write(languages: &Languages) -> Result<Value, StageError> {
    serde_json::to_value(languages).map_err(|error| StageError::failed(format!("counts of languages: {error}")))
}

/// Rows in all and rows for validation, by language.
pub(crate) fn counts(carried: &Value) -> Result<BTreeMap<String, (u64, u64)>, StageError> {
    let languages = read(carried)?.into_iter();
    Ok(languages
        .map(|(lang, counts)| (lang, (counts.rows, counts.val)))
        .collect())
}

fn count_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("lang", DataType::Utf8, false),
        Field::new("rows", DataType::UInt64, false),
    ]))
}

impl SplitByGroup {
    pub fn new(settings: &SplitSettings) -> Self {
        SplitByGroup {
            settings: settings.clone(),
        }
    }

    fn check_and_report(&self, context: &Context, languages: &BTreeMap<String, (u64, u64)>) -> Result<(), StageError> {
        self.settings
            .check_rows(languages, self.settings.quota(), &context.rejects)?;
        context.report(figures(languages, self.settings.min_val_rows > 0));
        Ok(())
    }

    fn map_counts(&self, partition: &Partition, keys_artifact: &Artifact) -> Result<MappedRows, StageError> {
        let batch = keys_artifact.read_whole(partition, Some(&[ROW, "lang"]))?;
        self.settings.check_languages(partition, &batch)?;
        let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
        for lang in columns::text(&batch, "lang")?.iter().flatten() {
            *counts.entry(lang).or_default() += 1;
        }
        let columns: Vec<Arc<dyn Array>> = vec![
            Arc::new(StringArray::from_iter_values(counts.keys())),
            Arc::new(UInt64Array::from_iter_values(counts.values().copied())),
        ];
        Ok(MappedRows {
            rows: RecordBatch::try_new(count_schema(), columns)?,
            // One reducer counts.
            hashes: vec![0; counts.len()],
            decisions: None,
        })
    }
}

impl GroupedDecision for SplitByGroup {
    fn rounds(&self) -> usize {
        2
    }

    fn bytes(&self, round: usize, key_rows: u64, _replied: u64) -> u64 {
        match round {
            0 => 0,
            _ => key_rows.saturating_mul(ROW_BYTES),
        }
    }

    fn map(
        &self,
        round: usize,
        partition: &Partition,
        keys_artifact: &Artifact,
        _replies: &[RecordBatch],
    ) -> Result<MappedRows, StageError> {
        if round == 0 {
            return self.map_counts(partition, keys_artifact);
        }
        let rows = keys_artifact.read_whole(partition, Some(&[ROW, "lang", "words"]))?;
        let words = keys(&rows, "words")?;
        let hashes = (0..words.len()).map(|place| halves(key_at(words, place))[0]).collect();
        Ok(MappedRows {
            rows,
            hashes,
            decisions: None,
        })
    }

    fn reducer(&self, round: usize, _partitions: &Arc<[Partition]>) -> Box<dyn Reducer> {
        match round {
            0 => Box::new(Counts {
                quota: self.settings.quota(),
                rows: BTreeMap::new(),
            }),
            _ => Box::new(Choice {
                given: Vec::new(),
                candidates: None,
            }),
        }
    }

    fn is_done(&self, round: usize, carried: &Value) -> bool {
        // What cannot be read is an error of the next reducer.
        round == 1 && read(carried).is_ok_and(|languages| languages.values().all(|language| language.missing == 0))
    }

    fn complete(
        &self,
        context: &Context,
        carried: &Value,
        _decisions: &[(Partition, RecordBatch)],
    ) -> Result<(), StageError> {
        self.check_and_report(context, &counts(carried)?)
    }
}

impl GroupChoice for SplitByGroup {
    fn rows(&self, partition: &Partition, keys_artifact: &Artifact) -> Result<ChoiceRows, StageError> {
        let batch = keys_artifact.read_whole(partition, Some(&[ROW, "lang", "words"]))?;
        self.settings.check_languages(partition, &batch)?;
        let words = keys(&batch, "words")?;
        let mut rows = ChoiceRows {
            keys: (0..words.len())
                .map(|place| halves(key_at(words, place)).into())
                .collect(),
            classes: Vec::with_capacity(words.len()),
            names: Vec::new(),
            numbers: columns::rows(&batch)?.values().to_vec(),
        };
        let mut numbers: HashMap<&str, u32> = HashMap::new();
        for lang in columns::text(&batch, "lang")?.iter().flatten() {
            let next = crate::validation::small(rows.names.len())?;
            let number = *numbers.entry(lang).or_insert(next);
            if number == next {
                rows.names.push(lang.to_owned());
            }
            rows.classes.push(number);
        }
        Ok(rows)
    }

    fn quota(&self, rows: u64) -> u64 {
        self.settings.quota().target(rows)
    }

    fn decisions(&self, chosen: Vec<u32>) -> Result<RecordBatch, StageError> {
        Ok(RecordBatch::try_new(
            decision_schema(),
            vec![Arc::new(UInt32Array::from(chosen))],
        )?)
    }

    fn complete(&self, context: &Context, languages: &BTreeMap<String, (u64, u64)>) -> Result<(), StageError> {
        self.check_and_report(context, languages)
    }
}

/// Counts the rows of each language.
struct Counts {
    quota: Quota,
    rows: BTreeMap<String, u64>,
}

impl Reducer for Counts {
    fn add(&mut self, rows: ShuffledRows) -> Result<(), StageError> {
        let counts = rows.rows.column_by_name("rows");
        let counts = counts.and_then(|column| column.as_any().downcast_ref::<UInt64Array>());
        let counts = counts.ok_or_else(|| StageError::failed("counts of languages lack the column `rows`"))?;
        for (lang, rows) in columns::text(&rows.rows, "lang")?.iter().zip(counts.values()) {
            *self.rows.entry(lang.unwrap_or_default().to_owned()).or_default() += rows;
        }
        Ok(())
    }

    fn reduce(self: Box<Self>, carried: &mut Value) -> Result<Vec<(u32, RecordBatch)>, StageError> {
        // All counts are with one reducer.
        if !self.rows.is_empty() {
            let languages: Languages = self
                .rows
                .into_iter()
                .map(|(lang, rows)| {
                    let missing = self.quota.target(rows);
                    (lang, Language { rows, missing, val: 0 })
                })
                .collect();
            *carried = write(&languages)?;
        }
        Ok(Vec::new())
    }
}

/// Chooses from a range of the groups.
struct Choice {
    given: Vec<ShuffledRows>,
    /// Once they are sorted.
    candidates: Option<TextCandidates>,
}

impl Reducer for Choice {
    fn add(&mut self, rows: ShuffledRows) -> Result<(), StageError> {
        self.given.push(rows);
        Ok(())
    }

    fn sort(&mut self) -> Result<(), StageError> {
        let mut candidates = TextCandidates::new(self.given.iter().map(|given| &given.rows))?;
        candidates.sort(u64::MAX);
        self.candidates = Some(candidates);
        Ok(())
    }

    fn reduce(self: Box<Self>, carried: &mut Value) -> Result<Vec<(u32, RecordBatch)>, StageError> {
        let Some(candidates) = &self.candidates else {
            return Ok(Vec::new());
        };
        let mut languages = read(carried)?;
        let mut missing = Vec::with_capacity(candidates.languages().len());
        for lang in candidates.languages() {
            let counts = languages.get(lang);
            let counts =
                counts.ok_or_else(|| StageError::failed(format!("rows of language {lang} were not counted")))?;
            missing.push(counts.missing);
        }
        let mut left = languages.values().map(|language| language.missing).sum();
        let mut chosen = candidates.choose(&mut missing, &mut left);
        for (lang, missing) in candidates.languages().iter().zip(missing) {
            languages.entry(lang.clone()).or_default().missing = missing;
        }
        for (_, lang) in &chosen {
            let lang = &candidates.languages()[*lang as usize];
            languages.entry(lang.clone()).or_default().val += 1;
        }
        *carried = write(&languages)?;
        chosen.par_sort_unstable();
        // Partition and number of each chosen row.
        let mut rows: Vec<(u32, u32)> = Vec::with_capacity(chosen.len());
        let (mut chosen, mut first) = (chosen.into_iter().map(|(row, _)| row).peekable(), 0);
        for given in &self.given {
            let (numbers, end) = (columns::rows(&given.rows)?, first + numbers_of(given)?);
            while let Some(row) = chosen.next_if(|row| *row < end) {
                let at = (row - first) as usize;
                rows.push((given.partitions.value(at), numbers.value(at)));
            }
            first = end;
        }
        rows.par_sort_unstable();
        let of_partition = |rows: &[(u32, u32)]| {
            let numbers = UInt32Array::from_iter_values(rows.iter().map(|(_, row)| *row));
            Ok((
                rows[0].0,
                RecordBatch::try_new(decision_schema(), vec![Arc::new(numbers)])?,
            ))
        };
        rows.chunk_by(|a, b| a.0 == b.0).map(of_partition).collect()
    }
}

fn numbers_of(given: &ShuffledRows) -> Result<u32, ManifestError> {
    crate::validation::small(given.rows.num_rows())
}
