//! `flow evaluate diarization`: error rates of turns, and of words with speakers, against a reference.

use std::collections::BTreeMap;
use std::io::{self, Write};

use flow_base::escape::escape_line;
use flow_inspect::table::{count, lines, plural};
use flow_kind::Storage;
use flow_speakers::error_rate::{Errors, Scoring, errors};
use flow_speakers::rttm::read_uem;
use serde_json::{Value, json};

use crate::arguments::{EvaluateDiarizationArguments, Normalize};
use crate::files::{Recordings, Side, check_page, read};
use crate::normalizer::normalizer;
use crate::page::{PageData, write_page};
use crate::texts::percent;
use crate::words::WordErrors;
use flow_cli::failure::{Exit, Failure};

/// The parts of recordings that are scored, by their names.
pub type Uem = BTreeMap<String, Vec<(f64, f64)>>;

pub fn diarization(
    storage: &Storage,
    arguments: &EvaluateDiarizationArguments,
    out: &mut dyn Write,
) -> Result<Exit, Failure> {
    if !(arguments.collar >= 0.0 && arguments.collar.is_finite()) {
        let message = format!("--collar is {}", arguments.collar);
        return Err(Failure::usage(message, "give a number of seconds, 0 or more"));
    }
    let normalization = &arguments.normalization;
    if normalization.normalize == Normalize::ByLanguage || !normalization.normalize_language.is_empty() {
        let message = "utterances of a diarization have no language to normalise by";
        return Err(Failure::usage(message, "name one normaliser with --normalize"));
    }
    let normalizer = normalizer(normalization)?;
    if let Some(page) = &arguments.page {
        let inputs = arguments.reference.iter().chain(&arguments.hypothesis);
        check_page(page, inputs.chain(&arguments.uem))?;
    }
    let reference = Side::read(storage, &arguments.reference)?;
    let hypothesis = Side::read(storage, &arguments.hypothesis)?;
    let uem = arguments
        .uem
        .as_deref()
        .map(|path| read(storage, path, read_uem))
        .transpose()?;
    let scoring = Scoring {
        collar: arguments.collar,
        skip_overlap: arguments.skip_overlap,
        uem: None,
    };
    let (mut recordings, left_out) = scores(&reference.turns, &hypothesis.turns, uem.as_ref(), &scoring)?;
    if !left_out.is_empty() {
        writeln!(
            io::stderr(),
            "warning: {} not scored, as {} does not name {}: {}",
            if left_out.len() == 1 {
                "a recording is"
            } else {
                "recordings are"
            },
            if uem.is_some() { "the UEM" } else { "the reference" },
            if left_out.len() == 1 { "it" } else { "them" },
            escape_line(&left_out.join(", "))
        )?;
    }
    let missing = missing(&recordings, &reference.turns, &hypothesis.turns);
    if !missing.is_empty() {
        writeln!(
            io::stderr(),
            "warning: the hypothesis has no {}; all of it counts as missed",
            escape_line(&missing.join(", "))
        )?;
    }
    let mut all = Score::default();
    for (name, score) in &mut recordings {
        if let (Some(said), Some(heard)) = (reference.words(name), hypothesis.words(name)) {
            let parts = uem.as_ref().and_then(|uem| uem.get(*name)).map(Vec::as_slice);
            score.words = Some(crate::words::score(name, [said, heard], parts, &normalizer)?);
        }
        all.add(score);
    }
    let wordless = wordless(&recordings);
    if all.words.is_some() && !wordless.is_empty() {
        writeln!(
            io::stderr(),
            "warning: words of {} are not scored: not both sides have them",
            escape_line(&wordless.join(", "))
        )?;
    }
    if let Some(path) = &arguments.page {
        let data = PageData {
            all: &all,
            recordings: &recordings,
            sides: [&reference, &hypothesis],
            uem: uem.as_ref(),
            scoring: &scoring,
        };
        write_page(storage, path, arguments.audio.as_deref(), &data)?;
    }
    if arguments.json {
        let mut document = all.figures();
        let recordings = recordings
            .iter()
            .map(|(name, found)| ((*name).to_owned(), found.figures()));
        document["recordings"] = Value::Object(recordings.collect());
        writeln!(out, "{document}")?;
        return Ok(Exit::Done);
    }
    let mut head = HEAD.to_vec();
    if all.words.is_some() {
        head.extend(HEAD_OF_WORDS);
    }
    let mut rows = vec![head.into_iter().map(str::to_owned).collect()];
    let row = |name: &str, score: &Score| [vec![name.to_owned()], score.cells(all.words.is_some())].concat();
    rows.extend(recordings.iter().map(|(name, score)| row(name, score)));
    if recordings.len() > 1 {
        rows.push(row(&plural(recordings.len() as u64, "recording"), &all));
    }
    for line in lines(&rows) {
        writeln!(out, "{line}")?;
    }
    Ok(Exit::Done)
}

/// Heads of the table, and those of the columns about words.
pub const HEAD: [&str; 7] = [
    "recording",
    "DER",
    "missed",
    "false alarm",
    "confusion",
    "JER",
    "speech s",
];
pub const HEAD_OF_WORDS: [&str; 3] = ["cpWER", "WDER", "words"];

/// Errors of a recording, or of all: of turns, and where both sides have words, of these.
#[derive(Clone, Debug, Default)]
pub struct Score {
    pub turns: Errors,
    /// The speaker of the reference that each of the hypothesis is mapped to. Empty for all recordings.
    pub mapping: BTreeMap<String, String>,
    pub words: Option<WordErrors>,
}

impl Score {
    fn add(&mut self, other: &Score) {
        self.turns += other.turns;
        if let Some(words) = other.words {
            *self.words.get_or_insert_default() += words;
        }
    }

    pub fn figures(&self) -> Value {
        let mut figures = figures(&self.turns);
        if let (Some(words), Value::Object(figures)) = (&self.words, &mut figures) {
            figures.extend(words.figures());
        }
        figures
    }

    /// The columns of the table after the name.
    pub fn cells(&self, with_words: bool) -> Vec<String> {
        let mut cells = cells(&self.turns);
        if with_words {
            let of_words = |words: &WordErrors| {
                let rates = [words.cpwer(), words.wder()];
                let [cpwer, wder] = rates.map(|rate| rate.map_or("-".to_owned(), percent));
                [cpwer, wder, count(words.cp.words.units)]
            };
            cells.extend(self.words.as_ref().map_or(["-"; 3].map(str::to_owned), of_words));
        }
        cells
    }
}

/// The score of each recording by its name, still without words, and the recordings that are not scored.
type Scores<'a> = (Vec<(&'a str, Score)>, Vec<&'a str>);

/// The recordings that the UEM names are scored, or without it those of the reference. A recording without turns in one of both
/// has none there.
fn scores<'a>(
    reference: &'a Recordings,
    hypothesis: &'a Recordings,
    uem: Option<&'a Uem>,
    scoring: &Scoring,
) -> Result<Scores<'a>, Failure> {
    let scored: Vec<&str> = match uem {
        Some(uem) => uem.keys().map(String::as_str).collect(),
        None => reference.keys().map(String::as_str).collect(),
    };
    if scored.is_empty() {
        return Err(Failure::usage(
            "there is nothing to score: no recording is named",
            "give a reference with turns, or a UEM",
        ));
    }
    if !hypothesis.is_empty() && !hypothesis.keys().any(|name| scored.contains(&name.as_str())) {
        let theirs: Vec<&str> = hypothesis.keys().map(String::as_str).take(3).collect();
        return Err(Failure::usage(
            format!(
                "no recording of the hypothesis ({}) is one of those that are scored ({})",
                theirs.join(", "),
                scored[..scored.len().min(3)].join(", ")
            ),
            "the names in the second field of both files must be the same",
        ));
    }
    let of = |recordings: &'a Recordings, name: &str| recordings.get(name).map_or(&[][..], Vec::as_slice);
    let mut found = Vec::new();
    for &name in &scored {
        let scoring = Scoring {
            uem: uem.and_then(|uem| uem.get(name)).cloned(),
            ..scoring.clone()
        };
        let (turns, mapping) = errors(of(reference, name), of(hypothesis, name), &scoring)
            .map_err(|error| cannot_be_scored(name, &error))?;
        let score = Score {
            turns,
            mapping,
            words: None,
        };
        found.push((name, score));
    }
    let mut left_out: Vec<&str> = reference.keys().chain(hypothesis.keys()).map(String::as_str).collect();
    left_out.sort_unstable();
    left_out.dedup();
    left_out.retain(|name| !scored.contains(name));
    Ok((found, left_out))
}

/// The error of a recording.
pub fn cannot_be_scored(name: &str, error: &flow_speakers::Error) -> Failure {
    Failure::usage(format!("{name}: {error}"), "see docs/speakers.md")
}

/// The scored recordings of the reference that the hypothesis does not have.
fn missing<'a>(scores: &[(&'a str, Score)], reference: &Recordings, hypothesis: &Recordings) -> Vec<&'a str> {
    let names = scores.iter().map(|(name, _)| *name);
    names
        .filter(|name| reference.contains_key(*name) && !hypothesis.contains_key(*name))
        .collect()
}

/// The recordings whose words are not scored.
fn wordless<'a>(recordings: &[(&'a str, Score)]) -> Vec<&'a str> {
    let without = recordings.iter().filter(|(_, score)| score.words.is_none());
    without.map(|(name, _)| *name).collect()
}

/// Rates as shares, times in seconds of speech of each speaker.
fn figures(errors: &Errors) -> Value {
    json!({
        "der": errors.der(),
        "missed": errors.missed,
        "false_alarm": errors.false_alarm,
        "confusion": errors.confusion,
        "total": errors.total,
        "jer": errors.jer(),
    })
}

/// The columns of the table about turns.
fn cells(errors: &Errors) -> Vec<String> {
    let of_speech = |seconds: f64| match errors.total > 0.0 {
        true => percent(seconds / errors.total),
        false => "-".to_owned(),
    };
    vec![
        percent(errors.der()),
        of_speech(errors.missed),
        of_speech(errors.false_alarm),
        of_speech(errors.confusion),
        percent(errors.jer()),
        format!("{:.2}", errors.total),
    ]
}

#[cfg(test)]
mod tests {
    use flow_speakers::turns::Turn;

    use super::*;

    fn recordings(turns: &[(&str, f64, f64, &str)]) -> Recordings {
        let mut recordings = Recordings::new();
        for &(recording, start, end, speaker) in turns {
            recordings.entry(recording.to_owned()).or_default().push(Turn {
                start,
                end,
                speaker: speaker.to_owned(),
            });
        }
        recordings
    }

    #[test]
    fn the_reference_or_the_uem_says_what_is_scored() {
        let reference = recordings(&[("a", 0.0, 10.0, "x"), ("b", 0.0, 5.0, "y")]);
        let hypothesis = recordings(&[("a", 0.0, 8.0, "1"), ("c", 0.0, 1.0, "1")]);
        let plain = Scoring::default();
        let (found, left_out) = scores(&reference, &hypothesis, None, &plain).unwrap();
        // `b` has no turns in the hypothesis.
        fn ders<'a>(found: &[(&'a str, Score)]) -> Vec<(&'a str, f64)> {
            found.iter().map(|(name, score)| (*name, score.turns.der())).collect()
        }
        assert_eq!(ders(&found), [("a", 0.2), ("b", 1.0)]);
        assert_eq!(left_out, ["c"]);
        assert_eq!(missing(&found, &reference, &hypothesis), ["b"]);
        assert_eq!(found[0].1.mapping, BTreeMap::from([("1".to_owned(), "x".to_owned())]));
        let figures = figures(&found[0].1.turns);
        assert_eq!((&figures["missed"], &figures["total"]), (&json!(2.0), &json!(10.0)));

        let uem = BTreeMap::from([("a".to_owned(), vec![(0.0, 8.0)]), ("c".to_owned(), vec![(0.0, 2.0)])]);
        let (found, left_out) = scores(&reference, &hypothesis, Some(&uem), &plain).unwrap();
        assert_eq!(ders(&found), [("a", 0.0), ("c", 1.0)]);
        assert_eq!(left_out, ["b"]);
        assert!(missing(&found, &reference, &hypothesis).is_empty());
    }

    #[test]
    fn what_cannot_be_scored_is_told() {
        let (some, none) = (recordings(&[("a", 0.0, 1.0, "x")]), Recordings::new());
        let other = recordings(&[("b", 0.0, 1.0, "x")]);
        let plain = Scoring::default();
        assert!(scores(&none, &some, None, &plain).is_err());
        let error = scores(&some, &other, None, &plain).unwrap_err().to_string();
        assert!(error.contains("(b)") && error.contains("(a)"), "{error}");
        // No turns in the hypothesis: everything is missed.
        assert_eq!(scores(&some, &none, None, &plain).unwrap().0[0].1.turns.der(), 1.0);
    }
}
