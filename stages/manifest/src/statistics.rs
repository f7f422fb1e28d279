//! Statistics of a manifest by language.

use std::collections::BTreeMap;
use std::path::Path;

use arrow::array::{Array, RecordBatch};
use flow_corpus::ManifestError;
use flow_corpus::columns;
use flow_kind::StageError;
use rayon::prelude::*;
use serde::Serialize;

/// The file: by set, that is `master`, `train` and `val`.
#[derive(Debug, Serialize)]
struct Statistics {
    version: u32,
    sets: BTreeMap<String, Languages<Figures>>,
    /// Share of the rows of train and val that are in val.
    #[serde(skip_serializing_if = "Option::is_none")]
    val_share: Option<Languages<f64>>,
}

/// A value for all rows, and one for each language.
#[derive(Debug, Serialize)]
pub struct Languages<T> {
    pub all: T,
    pub languages: BTreeMap<String, T>,
}

/// All zero where there are no rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    pub rows: usize,
    pub hours: f64,
    /// Durations in seconds.
    pub mean: f64,
    pub median: f64,
    /// 95 of 100 rows are as long or shorter.
    pub p95: f64,
}

impl Figures {
    fn of(mut durations: Vec<f64>) -> Figures {
        let rows = durations.len();
        if rows == 0 {
            return Figures::default();
        }
        let seconds: f64 = durations.iter().sum();
        let mut at = |place: usize| *durations.select_nth_unstable_by(place, f64::total_cmp).1;
        Figures {
            rows,
            hours: seconds / 3600.0,
            mean: seconds / rows as f64,
            median: (at((rows - 1) / 2) + at(rows / 2)) / 2.0,
            p95: at((rows * 95).div_ceil(100) - 1),
        }
    }
}

/// A part of the durations of some rows has at least so many, but the last.
const PART: usize = 8_192;

/// Durations of rows by language, in parts, in the order in which the rows came.
#[derive(Default)]
pub(crate) struct Durations {
    languages: BTreeMap<String, Vec<Vec<f64>>>,
}

impl Durations {
    /// Adds the rows of a batch with the columns `duration` and `lang`.
    pub fn add(&mut self, batch: &RecordBatch) -> Result<(), StageError> {
        let (seconds, langs) = (columns::number(batch, "duration")?, columns::text(batch, "lang")?);
        let mut row = 0;
        while row < batch.num_rows() {
            // Rows of a language are mostly adjacent.
            let lang = langs.value(row);
            let end = (row..langs.len())
                .find(|&other| langs.value(other) != lang)
                .unwrap_or(langs.len());
            if !self.languages.contains_key(lang) {
                self.languages.insert(lang.to_owned(), Vec::new());
            }
            if let Some(parts) = self.languages.get_mut(lang) {
                let durations = &seconds.values()[row..end];
                match parts.last_mut().filter(|part| part.len() < PART) {
                    Some(part) => part.extend_from_slice(durations),
                    None => parts.push(durations.to_vec()),
                }
            }
            row = end;
        }
        Ok(())
    }

    /// Adds rows that come after all others.
    pub fn append(&mut self, later: Durations) {
        for (lang, durations) in later.languages {
            self.languages.entry(lang).or_default().extend(durations);
        }
    }

    pub fn figures(self) -> Languages<Figures> {
        let of_language = |(lang, parts): (&String, &Vec<Vec<f64>>)| (lang.clone(), Figures::of(parts.concat()));
        let (all, languages) = rayon::join(
            || {
                let parts = || self.languages.values().flatten();
                let mut all = Vec::with_capacity(parts().map(Vec::len).sum());
                parts().for_each(|part| all.extend_from_slice(part));
                Figures::of(all)
            },
            || self.languages.par_iter().map(of_language).collect(),
        );
        Languages { all, languages }
    }
}

/// Writes the figures of named sets of rows.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write_statistics(sets: Vec<(&str, Languages<Figures>)>, path: &Path) -> Result<(), StageError> {
    let mut statistics = Statistics {
        version: 1,
        sets: sets
            .into_iter()
            .map(|(name, figures)| (name.to_string(), figures))
            .collect(),
        val_share: None,
    };
    if let (Some(train), Some(val)) = (statistics.sets.get("train"), statistics.sets.get("val")) {
        let share = |train: usize, val: usize| val as f64 / (train + val).max(1) as f64;
        let rows = |set: &Languages<Figures>, lang: &str| set.languages.get(lang).map_or(0, |figures| figures.rows);
        let langs = train.languages.keys().chain(val.languages.keys());
        statistics.val_share = Some(Languages {
            all: share(train.all.rows, val.all.rows),
            languages: langs
                .map(|lang| (lang.clone(), share(rows(train, lang), rows(val, lang))))
                .collect(),
        });
    }
    let mut json = serde_json::to_vec_pretty(&statistics).map_err(StageError::failed)?;
    json.push(b'\n');
    std::fs::write(path, json).map_err(|e| ManifestError::io(path, e))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_durations() {
        assert_eq!(Figures::of(Vec::new()), Figures::default());
        let hundred = (1..=100).rev().map(f64::from).collect();
        let figures = Figures::of(hundred);
        assert_eq!(
            (figures.rows, figures.mean, figures.median, figures.p95),
            (100, 50.5, 50.5, 95.0)
        );
        assert_eq!(figures.hours, 5050.0 / 3600.0);
        let one = Figures::of(vec![2.0]);
        assert_eq!((one.median, one.p95), (2.0, 2.0));
        assert_eq!(Figures::of(vec![3.0, 1.0, 8.0]).median, 3.0);
    }
}
