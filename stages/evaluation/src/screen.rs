//! The short tables of a report, for the screen.

use serde_json::{Value, json};

use crate::figures::{Confusion, SetFigures, confusion};
use crate::normalize::Normalizer;
use crate::page::{Evaluated, ModelFigures, PageData, chosen, percent, when};
use crate::wer::{EditCounts, Score};

/// Larger tables are shown in the page only.
const SHORT: usize = 16;

/// The error rates as tables for the screen.
pub fn tables(data: &PageData) -> Vec<Value> {
    let mut tables = Vec::new();
    for set in &data.sets {
        let all = [("all", &set.scores.overall)];
        let languages = set.scores.languages.iter().map(|(name, score)| (name.as_str(), score));
        tables.push(rates(
            "Error rates",
            "language",
            &set.name,
            languages.chain(all),
            &data.normalizer,
        ));
        if set.durations.len() > 1 {
            let durations = set.durations.iter().map(|(name, score)| (name.as_str(), score));
            tables.push(rates("By duration", "duration", &set.name, durations, &data.normalizer));
        }
        if (2..=SHORT).contains(&set.sources.len()) {
            let sources = set.sources.iter().map(|(name, score)| (name.as_str(), score));
            let title = format!("By {}", set.source_kind);
            tables.push(rates(&title, set.source_kind, &set.name, sources, &data.normalizer));
        }
        for (name, scores) in set.columns.iter().filter(|(_, scores)| scores.len() <= SHORT) {
            let scores = scores
                .iter()
                .map(|(value, score)| (if value.is_empty() { "none" } else { value }, score));
            tables.push(rates(&format!("By {name}"), name, &set.name, scores, &data.normalizer));
        }
        tables.extend(word_groups(set));
        tables.extend(tags(set));
    }
    tables.extend(course(&data.curves.evaluations));
    tables.extend(data.model.as_ref().and_then(scored));
    tables
}

/// Which checkpoint was scored.
fn scored(model: &ModelFigures) -> Option<Value> {
    let row = json!([model.step, model.which, model.path]);
    (!model.which.is_empty())
        .then(|| json!({ "table": { "title": "Model", "columns": ["step", "which", "path"], "rows": [row] } }))
}

fn rates<'a>(
    title: &str,
    head: &str,
    set: &str,
    scores: impl Iterator<Item = (&'a str, &'a Score)>,
    normalizer: &Normalizer,
) -> Value {
    let normalized = normalizer.is_given();
    let scores: Vec<(&str, &Score)> = scores.collect();
    let resampled = scores.iter().any(|(_, score)| score.intervals.is_some());
    let mut columns = vec![head, "utterances", "words", "WER", "CER"];
    if normalized {
        columns.extend(["normalised WER", "normalised CER"]);
    }
    if resampled {
        columns.extend(["WER 95 %", "CER 95 %"]);
    }
    columns.extend(["insertions", "deletions", "substitutions", "wrong tag"]);
    let row = |(name, score): (&str, &Score)| {
        let mut row = vec![
            json!(name),
            json!(score.utterances),
            json!(score.words.units),
            json!(percent(score.words.rate())),
            json!(percent(score.characters.rate())),
        ];
        if normalized {
            row.push(json!(percent(score.normalized_words.rate())));
            row.push(json!(percent(score.normalized_characters.rate())));
        }
        if resampled {
            let rates = score
                .intervals
                .map_or([None; 2], |intervals| [intervals.rates[0], intervals.rates[1]]);
            row.extend(rates.map(|interval| json!(interval.map_or("-".to_owned(), range))));
        }
        let words = &score.words;
        row.extend([words.insertions, words.deletions, words.substitutions, score.wrong_tags].map(Value::from));
        row
    };
    let rows: Vec<Vec<Value>> = scores.into_iter().map(row).collect();
    json!({ "table": { "title": format!("{title}: {set}"), "columns": columns, "rows": rows } })
}

/// An interval as percentages.
fn range((low, high): (f64, f64)) -> String {
    format!("{:.1}–{:.1}", 100.0 * low, 100.0 * high)
}

/// Error rates of groups of words, in one table.
fn word_groups(set: &SetFigures) -> Option<Value> {
    let row = |(group, counts): (String, &EditCounts)| {
        json!([
            group,
            counts.units,
            percent(counts.rate()),
            counts.insertions,
            counts.deletions,
            counts.substitutions
        ])
    };
    let rows: Vec<Value> = set.words.rows().into_iter().map(row).collect();
    let columns = [
        "group",
        "words",
        "errors per word",
        "insertions",
        "deletions",
        "substitutions",
    ];
    let title = format!("Groups of words: {}", set.name);
    (!rows.is_empty()).then(|| json!({ "table": { "title": title, "columns": columns, "rows": rows } }))
}

/// The confusion of tags, where some were wrong and the table is short.
fn tags(set: &SetFigures) -> Option<Value> {
    let Confusion { heard, rows } = confusion(&set.scores)?;
    if heard.len() > SHORT {
        return None;
    }
    let named = |tag: &&str| {
        if tag.is_empty() {
            "none".to_owned()
        } else {
            (*tag).to_owned()
        }
    };
    let columns: Vec<String> = ["tag, heard as".to_owned()]
        .into_iter()
        .chain(heard.iter().map(named))
        .collect();
    let row = |(reference, counts): &(&str, Vec<u64>)| -> Vec<Value> {
        let counts = counts.iter().map(|n| if *n == 0 { json!("") } else { json!(n) });
        [json!(reference)].into_iter().chain(counts).collect()
    };
    let rows: Vec<Vec<Value>> = rows.iter().map(row).collect();
    Some(json!({ "table": { "title": format!("Language tags: {}", set.name), "columns": columns, "rows": rows } }))
}

/// The word error rate of each language over time, where training began from a model.
pub fn course(evaluations: &[Evaluated]) -> Option<Value> {
    let columns = chosen(evaluations);
    let first = columns.first().filter(|first| first.step == 0)?;
    let head: Vec<String> = ["language".to_owned()]
        .into_iter()
        .chain(columns.iter().map(|e| when(e)))
        .collect();
    let row = |name: &str, rate: &dyn Fn(&Evaluated) -> f64| {
        let rates = columns.iter().map(|e| percent(rate(e)).into());
        Value::Array([Value::from(name)].into_iter().chain(rates).collect())
    };
    let of = |lang: &str| {
        let lang = lang.to_owned();
        move |e: &Evaluated| e.languages.get(&lang).copied().unwrap_or(f64::NAN)
    };
    let mut rows: Vec<Value> = first.languages.keys().map(|lang| row(lang, &of(lang))).collect();
    rows.push(row("all", &|e| e.overall));
    Some(json!({ "table": { "title": "Word error rate while training", "columns": head, "rows": rows } }))
}
