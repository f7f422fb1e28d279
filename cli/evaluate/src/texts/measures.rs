//! What is measured beside the error rates of languages: intervals, rates by columns, and rates of groups of words.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use flow_corpus::texts::read_texts;
use flow_evaluation::bootstrap::{Clusters, RATES, Resampling, ratios};
use flow_evaluation::normalize::Normalizer;
use flow_evaluation::wer::{EditCounts, Score, Scores, UtteranceScore};
use flow_evaluation::word_groups::{TrainingCounts, WordFigures, WordMeasure, WordTally};
use flow_inspect::table::{count, lines};
use flow_kind::Storage;
use flow_text::language_tag::tag_of;
use flow_text::language_tag::usual_language;
use serde_json::{Value, json};

use super::pairs::Pair;
use super::{cluster, edits, figures, rate};
use crate::arguments::EvaluateTextsArguments;
use crate::files::read;
use flow_cli::failure::Failure;

/// The groups of words that the arguments ask for.
pub fn word_measure(
    storage: &Storage,
    arguments: &EvaluateTextsArguments,
    normalizer: &Normalizer,
) -> Result<WordMeasure, Failure> {
    let counts = &arguments.training_counts;
    if counts.first() == Some(&0) || counts.windows(2).any(|pair| pair[0] >= pair[1]) {
        let message = "--training-counts are the first counts of ranges after that of 0";
        return Err(Failure::usage(
            message,
            "give rising numbers from 1 on, such as 1,10,100",
        ));
    }
    let mut rare = None;
    for manifest in &arguments.train {
        let counts = rare.get_or_insert_with(|| TrainingCounts::new(counts.clone()));
        let mut add = |text: &str, lang: &str| {
            let lang = Some(lang).filter(|lang| !lang.is_empty()).or_else(|| tag_of(text));
            counts.add(text, &lang.map(usual_language).unwrap_or_default(), normalizer);
        };
        read_texts(storage, manifest, &mut add).map_err(Failure::unreadable)?;
    }
    Ok(WordMeasure {
        rare,
        names: arguments
            .names
            .as_deref()
            .map(|path| names(storage, path))
            .transpose()?
            .unwrap_or_default(),
        switches: arguments.switches,
    })
}

fn names(storage: &Storage, path: &Path) -> Result<Vec<String>, Failure> {
    let parse = |text: &str| {
        let names: Vec<String> = text
            .lines()
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .collect();
        match names.is_empty() {
            true => Err("there is no name"),
            false => Ok(names),
        }
    };
    read(storage, path, parse)
}

/// Collects what is measured.
pub struct Measures<'m> {
    columns: Vec<(String, BTreeMap<String, Score>)>,
    clusters: Clusters<RATES>,
    words: WordTally<'m>,
}

/// What was measured.
pub struct Measured {
    pub columns: Vec<(String, BTreeMap<String, Score>)>,
    words: WordFigures,
}

/// Groupings of clusters; those of columns begin with `column `.
const ALL: &str = "all";
const LANGUAGE: &str = "language";

impl<'m> Measures<'m> {
    pub fn new(by: &[String], measure: &'m WordMeasure, normalizer: &'m Normalizer) -> Self {
        Measures {
            columns: by.iter().map(|column| (column.clone(), BTreeMap::new())).collect(),
            clusters: Clusters::default(),
            words: WordTally::new(measure, normalizer),
        }
    }

    pub fn add(&mut self, pair: &Pair, lang: &str, score: &UtteranceScore, arguments: &EvaluateTextsArguments) {
        let value = |column: &str| pair.columns.get(column).map_or("", String::as_str);
        for (column, scores) in &mut self.columns {
            scores
                .entry(value(column).to_owned())
                .or_default()
                .add(score, pair.seconds);
        }
        self.words.add(&pair.reference, &pair.hypothesis, lang);
        if arguments.resamples > 0 {
            let columns: Vec<String> = arguments.by.iter().map(|column| format!("column {column}")).collect();
            let by_column = columns.iter().zip(&arguments.by);
            let by_column = by_column.map(|(grouping, column)| (grouping.as_str(), value(column)));
            let groups = [(ALL, ""), (LANGUAGE, lang)].into_iter().chain(by_column);
            self.clusters
                .add(&cluster(pair, &arguments.draw), groups, &ratios(score));
        }
    }

    /// Computes the intervals of all scores.
    pub fn finish(mut self, scores: &mut Scores, arguments: &EvaluateTextsArguments) -> Measured {
        if arguments.resamples > 0 {
            let resampling = Resampling {
                resamples: arguments.resamples as usize,
                seed: arguments.draw.seed,
            };
            let of = |grouping: &str, name: &str| Some(resampling.intervals(&self.clusters.of(grouping, name)));
            scores.overall.intervals = of(ALL, "");
            for (lang, score) in &mut scores.languages {
                score.intervals = of(LANGUAGE, lang);
            }
            for (column, scores) in &mut self.columns {
                let grouping = format!("column {column}");
                for (value, score) in scores {
                    score.intervals = of(&grouping, value);
                }
            }
        }
        Measured {
            columns: self.columns,
            words: self.words.figures(),
        }
    }
}

impl Measured {
    pub fn add_to(&self, document: &mut Value, is_normalized: bool) {
        let values = |scores: &BTreeMap<String, Score>| -> Value {
            let values = scores
                .iter()
                .map(|(value, score)| (value.clone(), figures(score, is_normalized)));
            Value::Object(values.collect())
        };
        if !self.columns.is_empty() {
            let columns = self
                .columns
                .iter()
                .map(|(column, scores)| (column.clone(), values(scores)));
            document["columns"] = Value::Object(columns.collect());
        }
        let WordFigures { rare, names, switches } = &self.words;
        if !rare.is_empty() {
            let ranges = rare
                .iter()
                .map(|(label, counts)| json!({ "training_count": label, "wer": edits(counts) }));
            document["rare_words"] = ranges.collect();
        }
        if let Some(names) = names {
            document["names"] = json!({
                "wer": edits(&names.words),
                "others": edits(&names.others),
                "occurrences": names.occurrences,
                "correct": names.correct,
            });
        }
        if let Some(switches) = switches {
            document["switches"] =
                json!({ "points": edits(&switches.points), "elsewhere": edits(&switches.elsewhere) });
        }
    }

    /// The table of groups of words, if there are any.
    pub fn write_words(&self, out: &mut dyn Write) -> io::Result<()> {
        let row = |(name, edits): (String, &EditCounts)| {
            let counts = [edits.units, edits.substitutions, edits.insertions, edits.deletions];
            [vec![name, rate(edits)], counts.map(count).to_vec()].concat()
        };
        let mut rows: Vec<Vec<String>> = self.words.rows().into_iter().map(row).collect();
        if rows.is_empty() {
            return Ok(());
        }
        let head = ["group", "WER", "words", "substituted", "inserted", "deleted"];
        rows.insert(0, head.map(str::to_owned).to_vec());
        writeln!(out)?;
        for line in lines(&rows) {
            writeln!(out, "{line}")?;
        }
        if let Some(names) = &self.words.names {
            let (correct, all) = (count(names.correct), count(names.occurrences));
            writeln!(out, "{correct} of {all} names are right as a whole")?;
        }
        Ok(())
    }
}
