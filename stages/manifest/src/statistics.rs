//! What a manifest holds, language by language.

use std::collections::BTreeMap;
use std::path::Path;

use arrow::array::Array;
use flow_runtime::{Artifact, StageError};
use serde::Serialize;

use crate::columns;
use crate::error::ManifestError;
use crate::keys::partition_order;

/// The file: by set, that is `master`, `train` and `val`.
#[derive(Debug, Serialize)]
struct Statistics {
    version: u32,
    sets: BTreeMap<String, Languages<Figures>>,
    /// Share of the rows of train and val that are in val.
    #[serde(skip_serializing_if = "Option::is_none")]
    val_share: Option<Languages<f64>>,
}

/// Something of all rows together, and of those of each language.
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
        durations.sort_unstable_by(f64::total_cmp);
        Figures {
            rows,
            hours: seconds / 3600.0,
            mean: seconds / rows as f64,
            median: (durations[(rows - 1) / 2] + durations[rows / 2]) / 2.0,
            p95: durations[(rows * 95).div_ceil(100) - 1],
        }
    }
}

/// Figures of a set of rows, by language and for all.
///
/// # Errors
/// When rows cannot be read.
pub fn figures(rows: &Artifact) -> Result<Languages<Figures>, StageError> {
    let mut durations: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut partitions: Vec<_> = rows.partitions().collect();
    partitions.sort_by(|a, b| partition_order(a, b));
    for partition in partitions {
        for batch in rows.read(partition, Some(&["duration", "lang"]))? {
            let batch = batch?;
            let (seconds, langs) = (columns::number(&batch, "duration")?, columns::text(&batch, "lang")?);
            for row in (0..batch.num_rows()).filter(|&row| seconds.is_valid(row) && langs.is_valid(row)) {
                match durations.get_mut(langs.value(row)) {
                    Some(of) => of.push(seconds.value(row)),
                    None => {
                        durations.insert(langs.value(row).to_string(), vec![seconds.value(row)]);
                    }
                }
            }
        }
    }
    let all = durations.values().flatten().copied().collect();
    let of_language = |(lang, durations)| (lang, Figures::of(durations));
    Ok(Languages {
        all: Figures::of(all),
        languages: durations.into_iter().map(of_language).collect(),
    })
}

/// Writes the figures of named sets of rows.
///
/// # Errors
/// When rows cannot be read or the file cannot be written.
pub fn write_statistics(sets: &[(&str, &Artifact)], path: &Path) -> Result<(), StageError> {
    let mut statistics = Statistics {
        version: 1,
        sets: BTreeMap::new(),
        val_share: None,
    };
    for (name, rows) in sets {
        statistics.sets.insert((*name).to_string(), figures(rows)?);
    }
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
