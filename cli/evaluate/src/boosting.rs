//! `flow evaluate boosting`: the weight of boosted phrases with which a model makes the fewest errors on recordings whose texts are known.

use std::io::Write;
use std::path::{Path, PathBuf};

use flow_base::escape::escape_line;
use flow_cli::arguments::DecodingArguments;
use flow_evaluation::wer::EditCounts;
use flow_evaluation::word_groups::{NameFigures, WordMeasure, WordTally};
use flow_inspect::table::{count, lines};
use flow_kind::Storage;
use flow_text::language_tag::usual_language;
use flow_transcription::Transcript;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::arguments::EvaluateBoostingArguments;
use crate::files::{TRANSCRIBE, read};
use crate::normalizer::normalizer;
use crate::texts::rate;
use flow_cli::failure::{Exit, Failure};
use flow_cli::files::files_below;

/// A transcription of a manifest with boosted phrases, as JSON.
pub struct BoostedTranscription<'a> {
    pub manifest: &'a str,
    /// The file of phrases.
    pub boost: &'a Path,
    /// Parameters of the pipeline, `NAME=VALUE`.
    pub set: Vec<String>,
    pub decoding: &'a DecodingArguments,
    /// The folder of the transcripts.
    pub out: PathBuf,
    /// The state directory.
    pub state: PathBuf,
}

/// The errors with a weight.
struct Weighed {
    weight: f64,
    recordings: usize,
    figures: NameFigures,
}

impl Weighed {
    fn words(&self) -> EditCounts {
        let mut words = self.figures.words;
        words.add(&self.figures.others);
        words
    }

    fn figures(&self) -> Value {
        let (words, phrases) = (self.words(), self.figures.words);
        json!({
            "weight": self.weight,
            "words": words.units,
            "errors": words.errors(),
            "word_error_rate": words.rate(),
            "phrases": self.figures.occurrences,
            "phrases_right": self.figures.correct,
            "words_of_phrases": phrases.units,
            "words_of_phrases_inserted": phrases.insertions,
            "errors_of_other_words": self.figures.others.errors(),
        })
    }

    fn cells(&self) -> Vec<String> {
        let figures = &self.figures;
        vec![
            self.weight.to_string(),
            rate(&self.words()),
            count(figures.correct),
            count(figures.occurrences),
            rate(&figures.words),
            count(figures.words.insertions),
            rate(&figures.others),
        ]
    }
}

pub fn boosting(
    storage: &Storage,
    arguments: &EvaluateBoostingArguments,
    transcribe: &dyn Fn(&BoostedTranscription<'_>) -> Result<Exit, Failure>,
    out: &mut dyn Write,
) -> Result<Exit, Failure> {
    let is_weight = |set: &String| set.split('=').next().is_some_and(|name| name.trim() == "boost_weight");
    if arguments.set.iter().any(is_weight) {
        return Err(Failure::usage(
            "--set boost_weight: it is what this command chooses",
            "give the weights to try with --weights",
        ));
    }
    let normalizer = normalizer(&arguments.normalization)?;
    let measure = WordMeasure {
        names: read(storage, &arguments.boost, phrases)?,
        ..WordMeasure::default()
    };
    let folder = TempDir::new()?;
    let mut all: Vec<Weighed> = Vec::new();
    for &weight in &arguments.weights {
        if all.iter().any(|known| known.weight == weight) {
            continue;
        }
        let transcripts = folder.path().join(all.len().to_string());
        let of_weight = BoostedTranscription {
            manifest: &arguments.manifest,
            boost: &arguments.boost,
            set: [format!("boost_weight={weight}")]
                .into_iter()
                .chain(arguments.set.iter().cloned())
                .collect(),
            decoding: &arguments.decoding,
            out: transcripts.clone(),
            state: folder.path().join("state"),
        };
        match transcribe(&of_weight)? {
            Exit::Done | Exit::Noted => {}
            failed => return Ok(failed),
        }
        let mut tally = WordTally::new(&measure, &normalizer);
        let files = files_below(&[transcripts], &["json"], TRANSCRIBE)?;
        for file in &files {
            add(storage, &mut tally, file)?;
        }
        all.push(Weighed {
            weight,
            recordings: files.len(),
            figures: tally.figures().names.unwrap_or_default(),
        });
    }
    let Some(best) = best(&all) else {
        return Err(Failure::usage("no weight is given", "such as --weights 0,0.5,1"));
    };
    if best.figures.occurrences == 0 {
        return Err(Failure::usage(
            format!("the texts of {} have none of the phrases", arguments.manifest),
            "take recordings in which some of them are said",
        ));
    }
    if arguments.json {
        let weights: Vec<Value> = all.iter().map(Weighed::figures).collect();
        writeln!(
            out,
            "{}",
            json!({"best": best.weight, "recordings": best.recordings, "weights": weights})
        )?;
        return Ok(Exit::Done);
    }
    let head = [
        "weight",
        "WER",
        "phrases right",
        "of",
        "WER of phrases",
        "inserted",
        "WER of others",
    ];
    let head = head.map(str::to_owned).to_vec();
    let rows: Vec<Vec<String>> = [head].into_iter().chain(all.iter().map(Weighed::cells)).collect();
    for line in lines(&rows) {
        writeln!(out, "{line}")?;
    }
    writeln!(out, "the fewest errors in words: --set boost_weight={}", best.weight)?;
    Ok(Exit::Done)
}

/// The weight with the fewest errors; of equal ones that with the most phrases, and then the smallest.
fn best(all: &[Weighed]) -> Option<&Weighed> {
    let rank = |one: &Weighed| (one.words().errors(), std::cmp::Reverse(one.figures.correct));
    all.iter()
        .min_by(|a, b| rank(a).cmp(&rank(b)).then(a.weight.total_cmp(&b.weight)))
}

/// The phrases of a file, without their own scores.
fn phrases(text: &str) -> Result<Vec<String>, &'static str> {
    let phrases = text
        .lines()
        .map(|line| line.split('\t').next().unwrap_or_default().trim());
    let phrases: Vec<String> = phrases.filter(|phrase| !phrase.is_empty()).map(str::to_owned).collect();
    match phrases.is_empty() {
        true => Err("there is no phrase"),
        false => Ok(phrases),
    }
}

/// Adds the errors of a transcript of a row.
fn add(storage: &Storage, tally: &mut WordTally<'_>, path: &Path) -> Result<(), Failure> {
    let transcript = read(storage, path, Transcript::from_json)?;
    let row = transcript.metadata.row.as_ref();
    let of_row = |key: &str| row.and_then(|row| row.get(key)).and_then(|value| value.as_str());
    let Some(said) = of_row("text") else {
        let file = escape_line(&transcript.metadata.source_file).into_owned();
        return Err(Failure::usage(
            format!("the manifest has no text of {file}"),
            "each row needs a `text`",
        ));
    };
    let language = usual_language(of_row("lang").unwrap_or_default());
    tally.add(said, &transcript.text, &language);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weighed(weight: f64, errors: u64, correct: u64) -> Weighed {
        let figures = NameFigures {
            others: EditCounts {
                units: 10,
                substitutions: errors,
                ..EditCounts::default()
            },
            occurrences: 4,
            correct,
            ..NameFigures::default()
        };
        Weighed {
            weight,
            recordings: 1,
            figures,
        }
    }

    #[test]
    fn the_fewest_errors_are_best_then_the_most_phrases_then_the_smallest_weight() {
        let all = [
            weighed(2.0, 3, 4),
            weighed(1.0, 2, 2),
            weighed(0.5, 2, 3),
            weighed(0.25, 2, 3),
        ];
        assert_eq!(best(&all).unwrap().weight, 0.25);
        assert!(best(&[]).is_none());
    }

    #[test]
    fn scores_are_no_part_of_phrases() {
        assert_eq!(
            phrases("Anna\t2\n\n New York \n"),
            Ok(vec!["Anna".to_owned(), "New York".to_owned()])
        );
        assert!(phrases("\t3\n").is_err());
    }
}
