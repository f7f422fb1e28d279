//! `flow evaluate texts`: error rates of texts that any system wrote.

mod forms;
mod pairs;

use std::io::{self, Write};

use flow_audio::language_tag::tag_of;
use flow_evaluation::wer::{EditCounts, Score, Scores, UtteranceScore, score_with};
use flow_manifest::read::usual_language;
use flow_runtime::escape::escape_line;
use serde_json::{Value, json};

use self::forms::Form;
use self::pairs::{Pair, paired};
use super::{normalizer, percent};
use crate::arguments::{EvaluateTextsArguments, Normalize};
use crate::failure::{Exit, Failure};
use crate::table::{count, lines};

/// Names that a warning lists.
const NAMED: usize = 5;

pub fn texts(arguments: &EvaluateTextsArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let normalizer = normalizer(&arguments.normalization)?;
    let form = |path| Form::read(path, arguments.ids);
    let reference = form(&arguments.reference)?;
    let hypothesis = arguments.hypothesis.as_deref().map(form).transpose()?;
    let paired = paired(reference, hypothesis)?;
    warn(
        "the hypothesis has nothing of",
        "which counts as an empty text",
        &paired.missing,
    )?;
    warn("the reference does not name", "which is not scored", &paired.left_out)?;
    let mut scores = Scores::default();
    let mut scored: Vec<(&Pair, UtteranceScore)> = Vec::with_capacity(paired.pairs.len());
    for pair in &paired.pairs {
        let score = score_with(&pair.reference, &pair.hypothesis, &normalizer);
        let lang = pair.lang.as_deref().or_else(|| tag_of(&pair.reference));
        let lang = lang.map(usual_language).unwrap_or_default();
        scores.add(&lang, &score, pair.seconds);
        scored.push((pair, score));
    }
    scored.sort_by_key(|(_, other)| std::cmp::Reverse(other.words.errors()));
    let worst = &scored[..scored.len().min(arguments.worst)];
    let is_normalized = arguments.normalization.normalize != Normalize::None;
    if arguments.json {
        writeln!(out, "{}", document(&scores, worst, is_normalized))?;
        return Ok(Exit::Done);
    }
    let mut head = HEAD.to_vec();
    if is_normalized {
        head.extend(HEAD_OF_NORMALIZED);
    }
    let mut rows: Vec<Vec<String>> = vec![head.into_iter().map(str::to_owned).collect()];
    if scores.languages.keys().any(|lang| !lang.is_empty()) && scores.languages.len() > 1 {
        let languages = scores.languages.iter();
        rows.extend(
            languages.map(|(lang, score)| cells(if lang.is_empty() { "none" } else { lang }, score, is_normalized)),
        );
    }
    rows.push(cells("all", &scores.overall, is_normalized));
    for line in lines(&rows) {
        writeln!(out, "{line}")?;
    }
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

/// A warning about utterances that one side alone has.
fn warn(what: &str, so: &str, names: &[String]) -> io::Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    let first = names[..names.len().min(NAMED)].join(", ");
    let more = match names.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {} more", count(more as u64)),
    };
    writeln!(io::stderr(), "warning: {what} {}{more}, {so}", escape_line(&first))
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

/// A rate, where there is a reference.
fn rate(edits: &EditCounts) -> String {
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

fn figures(score: &Score, is_normalized: bool) -> Value {
    let edits = |edits: &EditCounts| {
        json!({
            "rate": Some(edits.rate()).filter(|rate| rate.is_finite()),
            "total": edits.units,
            "substitutions": edits.substitutions,
            "insertions": edits.insertions,
            "deletions": edits.deletions,
        })
    };
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
