//! `flow evaluate texts`: error rates of texts that any system wrote.

pub mod forms;
mod measures;
pub mod pairs;

use std::io::{self, Write};

use flow_base::escape::escape_line;
use flow_evaluation::wer::{EditCounts, Score, Scores, UtteranceScore, score_with};
use flow_inspect::table::{count, lines};
use flow_kind::Storage;
use flow_text::language_tag::tag_of;
use flow_text::language_tag::usual_language;
use serde_json::{Value, json};

use self::forms::Form;
use self::measures::Measures;
use self::pairs::{Pair, paired};
use crate::arguments::{DrawArguments, EvaluateTextsArguments};
use crate::normalizer::normalizer;
use flow_cli::failure::{Exit, Failure};

/// Names that a line lists.
const NAMED: usize = 5;

pub fn texts(storage: &Storage, arguments: &EvaluateTextsArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    if arguments.draw.cluster.is_some() && arguments.resamples == 0 {
        let help = "add --resamples 10000, or leave it out";
        return Err(Failure::usage("--cluster needs --resamples", help));
    }
    let normalizer = normalizer(&arguments.normalization)?;
    let columns = columns(&arguments.by, &arguments.draw);
    let form = |path| Form::read(storage, path, arguments.ids, &columns);
    let reference = form(&arguments.reference)?;
    let hypothesis = arguments.hypothesis.as_deref().map(form).transpose()?;
    let paired = paired(reference, hypothesis)?;
    warn(
        "the hypothesis has nothing of",
        "which counts as an empty text",
        &paired.missing,
    )?;
    warn("the reference does not name", "which is not scored", &paired.left_out)?;
    check_columns(&columns, &paired.pairs)?;
    let measure = measures::word_measure(storage, arguments, &normalizer)?;
    let mut measures = Measures::new(&arguments.by, &measure, &normalizer);
    let mut scores = Scores::default();
    let mut scored: Vec<(&Pair, UtteranceScore)> = Vec::with_capacity(paired.pairs.len());
    for pair in &paired.pairs {
        let lang = language(pair);
        let score = score_with(&pair.reference, &pair.hypothesis, &lang, &normalizer);
        scores.add(&lang, &score, pair.seconds);
        measures.add(pair, &lang, &score, arguments);
        scored.push((pair, score));
    }
    let measured = measures.finish(&mut scores, arguments);
    scored.sort_by_key(|(_, other)| std::cmp::Reverse(other.words.errors()));
    let worst = &scored[..scored.len().min(arguments.worst)];
    let is_normalized = normalizer.is_given();
    if arguments.json {
        let mut document = document(&scores, worst, is_normalized);
        measured.add_to(&mut document, is_normalized);
        writeln!(out, "{document}")?;
        return Ok(Exit::Done);
    }
    let is_resampled = arguments.resamples > 0;
    let mut head = HEAD.to_vec();
    if is_normalized {
        head.extend(HEAD_OF_NORMALIZED);
    }
    if is_resampled {
        head.extend(HEAD_OF_INTERVALS);
    }
    let cells = |name: &str, score: &Score| {
        let mut cells = cells(name, score, is_normalized);
        if is_resampled {
            cells.extend(intervals(score));
        }
        cells
    };
    let mut rows: Vec<Vec<String>> = vec![head.into_iter().map(str::to_owned).collect()];
    if scores.languages.keys().any(|lang| !lang.is_empty()) && scores.languages.len() > 1 {
        let languages = scores.languages.iter();
        rows.extend(languages.map(|(lang, score)| cells(if lang.is_empty() { "none" } else { lang }, score)));
    }
    rows.push(cells("all", &scores.overall));
    for line in lines(&rows) {
        writeln!(out, "{line}")?;
    }
    for (column, scores) in &measured.columns {
        let mut head = rows[0].clone();
        head[0].clone_from(column);
        let mut rows = vec![head];
        let left_out = scores.len().saturating_sub(SHOWN);
        let mut scores: Vec<(&String, &Score)> = scores.iter().collect();
        scores.sort_by(|a, b| b.1.words.units.cmp(&a.1.words.units).then_with(|| a.0.cmp(b.0)));
        let shown = scores.into_iter().take(SHOWN);
        rows.extend(shown.map(|(value, score)| cells(if value.is_empty() { "none" } else { value }, score)));
        writeln!(out)?;
        for line in lines(&rows) {
            writeln!(out, "{line}")?;
        }
        if left_out > 0 {
            writeln!(
                out,
                "{} more, with fewer words, are in the output of --json",
                count(left_out as u64)
            )?;
        }
    }
    measured.write_words(out)?;
    for (pair, score) in worst {
        writeln!(
            out,
            "{}: {} errors in {} words",
            escape_line(&pair.name),
            score.words.errors(),
            score.words.units
        )?;
        writeln!(out, "  reference:  {}", escape_line(&pair.reference))?;
        writeln!(out, "  hypothesis: {}", escape_line(&pair.hypothesis))?;
    }
    Ok(Exit::Done)
}

/// The columns that are read of a manifest.
pub fn columns<'a>(by: &'a [String], draw: &'a DrawArguments) -> Vec<&'a str> {
    by.iter().chain(&draw.cluster).map(String::as_str).collect()
}

/// An error where no utterance has one of the columns.
pub fn check_columns(columns: &[&str], pairs: &[Pair]) -> Result<(), Failure> {
    let has = |column: &str| pairs.iter().any(|pair| pair.columns.contains_key(column));
    match columns.iter().find(|column| !has(column)) {
        None => Ok(()),
        Some(column) => Err(Failure::usage(
            format!("no utterance of the reference has `{column}`"),
            "columns are keys of the lines of a manifest; of an STM that is compared with CTM, `speaker`",
        )),
    }
}

/// The language of an utterance: that of its row, else of the tag in its text. Empty where neither is known.
pub fn language(pair: &Pair) -> String {
    let lang = pair.lang.as_deref().or_else(|| tag_of(&pair.reference));
    lang.map(usual_language).unwrap_or_default()
}

/// What is drawn as a whole with an utterance.
pub fn cluster(pair: &Pair, draw: &DrawArguments) -> String {
    match &draw.cluster {
        None => pair.source.clone(),
        Some(column) => match pair.columns.get(column).filter(|value| !value.is_empty()) {
            Some(value) => format!("{value} "),
            // Stands alone.
            None => pair.name.clone(),
        },
    }
}

/// A warning about utterances that one side alone has.
fn warn(what: &str, so: &str, names: &[String]) -> io::Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    writeln!(io::stderr(), "warning: {what} {}, {so}", escape_line(&named(names)))
}

/// The first names of a list.
pub fn named(names: &[String]) -> String {
    let first = names[..names.len().min(NAMED)].join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => first,
        more => format!("{first} and {} more", count(more as u64)),
    }
}

const HEAD: [&str; 9] = [
    "language",
    "WER",
    "CER",
    "words",
    "substituted",
    "inserted",
    "deleted",
    "utterances",
    "wrong tags",
];
const HEAD_OF_NORMALIZED: [&str; 2] = ["normalised WER", "normalised CER"];
const HEAD_OF_INTERVALS: [&str; 3] = ["WER 95 %", "CER 95 %", "drawn from"];
/// Values of a column that the screen shows.
const SHOWN: usize = 40;

/// The intervals of a score, and how many recordings or speakers were drawn from.
fn intervals(score: &Score) -> [String; 3] {
    let range = |rate: usize| {
        let interval = score.intervals.and_then(|intervals| intervals.rates[rate]);
        interval.map_or("-".to_owned(), |(low, high)| {
            format!("{:.2}–{:.2}", 100.0 * low, 100.0 * high)
        })
    };
    let clusters = score.intervals.map_or(0, |intervals| intervals.clusters);
    [range(0), range(1), count(clusters as u64)]
}

/// A share as a percentage with two digits.
pub fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

/// A rate, where there is a reference.
pub fn rate(edits: &EditCounts) -> String {
    match edits.units {
        0 => "-".into(),
        _ => percent(edits.rate()),
    }
}

fn cells(name: &str, score: &Score, is_normalized: bool) -> Vec<String> {
    let words = &score.words;
    let mut cells = vec![name.to_owned(), rate(words), rate(&score.characters)];
    let counts = [
        words.units,
        words.substitutions,
        words.insertions,
        words.deletions,
        score.utterances,
    ];
    cells.extend(counts.map(count));
    cells.push(match score.tagged {
        0 => "-".into(),
        _ => count(score.wrong_tags),
    });
    if is_normalized {
        cells.extend([rate(&score.normalized_words), rate(&score.normalized_characters)]);
    }
    cells
}

/// A rate and what it is made of, as JSON.
pub fn edits(edits: &EditCounts) -> Value {
    json!({
        "rate": Some(edits.rate()).filter(|rate| rate.is_finite()),
        "total": edits.units,
        "substitutions": edits.substitutions,
        "insertions": edits.insertions,
        "deletions": edits.deletions,
    })
}

pub fn figures(score: &Score, is_normalized: bool) -> Value {
    let mut figures = json!({
        "wer": edits(&score.words),
        "cer": edits(&score.characters),
        "utterances": score.utterances,
    });
    if score.tagged > 0 {
        figures["wrong_tags"] = score.wrong_tags.into();
    }
    if is_normalized {
        figures["normalized_wer"] = edits(&score.normalized_words);
        figures["normalized_cer"] = edits(&score.normalized_characters);
    }
    if let Some(intervals) = &score.intervals {
        for (rate, name) in ["wer", "cer", "normalized_wer", "normalized_cer"]
            .into_iter()
            .enumerate()
        {
            if figures.get(name).is_some() {
                figures[name]["interval"] = json!(intervals.rates[rate]);
            }
        }
        figures["clusters"] = json!(intervals.clusters);
    }
    figures
}

fn document(scores: &Scores, worst: &[(&Pair, UtteranceScore)], is_normalized: bool) -> Value {
    let mut document = figures(&scores.overall, is_normalized);
    let languages = scores.languages.iter().filter(|(lang, _)| !lang.is_empty());
    let languages = languages.map(|(lang, score)| (lang.clone(), figures(score, is_normalized)));
    document["languages"] = Value::Object(languages.collect());
    let worst = worst.iter().map(|(pair, score)| {
        json!({
            "name": pair.name,
            "reference": pair.reference,
            "hypothesis": pair.hypothesis,
            "errors": score.words.errors(),
            "words": score.words.units,
        })
    });
    document["worst"] = worst.collect();
    document
}
