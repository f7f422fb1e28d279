//! `flow evaluate diarization`: error rates of turns against a reference.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use flow_runtime::escape::escape_line;
use flow_speakers::error_rate::{Errors, Scoring, errors};
use flow_speakers::rttm::{read_rttm, read_uem};
use flow_speakers::turns::Turn;
use serde_json::{Value, json};

use crate::arguments::{EvaluateCommand, EvaluateDiarizationArguments};
use crate::failure::{Exit, Failure};
use crate::table::{lines, plural};

/// Turns of recordings, by their names.
type Recordings = BTreeMap<String, Vec<Turn>>;

pub fn evaluate(command: &EvaluateCommand, out: &mut dyn Write) -> Result<Exit, Failure> {
    match command {
        EvaluateCommand::Diarization(arguments) => diarization(arguments, out),
    }
}

fn diarization(arguments: &EvaluateDiarizationArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    if !(arguments.collar >= 0.0 && arguments.collar.is_finite()) {
        let message = format!("--collar is {}", arguments.collar);
        return Err(Failure::usage(message, "give a number of seconds, 0 or more"));
    }
    let reference = read(&arguments.reference, read_rttm)?;
    let hypothesis = read(&arguments.hypothesis, read_rttm)?;
    let uem = arguments.uem.as_deref().map(|path| read(path, read_uem)).transpose()?;
    let scoring = Scoring {
        collar: arguments.collar,
        skip_overlap: arguments.skip_overlap,
        uem: None,
    };
    let (scores, left_out) = scores(&reference, &hypothesis, uem.as_ref(), &scoring)?;
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
    let mut all = Errors::default();
    for (_, found) in &scores {
        all += *found;
    }
    if arguments.json {
        let mut document = figures(&all);
        let recordings = scores.iter().map(|(name, found)| ((*name).to_owned(), figures(found)));
        document["recordings"] = Value::Object(recordings.collect());
        writeln!(out, "{document}")?;
        return Ok(Exit::Done);
    }
    let head = [
        "recording",
        "DER",
        "missed",
        "false alarm",
        "confusion",
        "JER",
        "speech s",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(scores.iter().map(|(name, found)| row(name, found)));
    if scores.len() > 1 {
        rows.push(row(&plural(scores.len() as u64, "recording"), &all));
    }
    for line in lines(&rows) {
        writeln!(out, "{line}")?;
    }
    Ok(Exit::Done)
}

/// Reads a file. What is wrong in it is said with its name.
fn read<T>(path: &Path, parse: fn(&str) -> flow_speakers::Result<T>) -> Result<T, Failure> {
    let wrong = |error: &dyn std::fmt::Display| {
        Failure::usage(
            format!("{}: {error}", path.display()),
            "see docs/speakers.md for the forms of files",
        )
    };
    let bytes = fs::read(path).map_err(|error| wrong(&error))?;
    let text = String::from_utf8(bytes).map_err(|error| wrong(&error))?;
    parse(&text).map_err(|error| wrong(&error))
}

/// Errors of each recording by its name, and the recordings that are not scored.
type Scores<'a> = (Vec<(&'a str, Errors)>, Vec<&'a str>);

/// The recordings that the UEM names are scored, or without it those of the reference. A recording without turns in one of both
/// has none there.
fn scores<'a>(
    reference: &'a Recordings,
    hypothesis: &'a Recordings,
    uem: Option<&'a BTreeMap<String, Vec<(f64, f64)>>>,
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
        let (errors, _) = errors(of(reference, name), of(hypothesis, name), &scoring)
            .map_err(|error| Failure::usage(format!("{name}: {error}"), "see docs/speakers.md"))?;
        found.push((name, errors));
    }
    let mut left_out: Vec<&str> = reference.keys().chain(hypothesis.keys()).map(String::as_str).collect();
    left_out.sort_unstable();
    left_out.dedup();
    left_out.retain(|name| !scored.contains(name));
    Ok((found, left_out))
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

fn row(name: &str, errors: &Errors) -> Vec<String> {
    let percent = |share: f64| format!("{:.2} %", share * 100.0);
    let of_speech = |seconds: f64| match errors.total > 0.0 {
        true => percent(seconds / errors.total),
        false => "-".to_owned(),
    };
    vec![
        name.to_owned(),
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
        // Of `b` nothing was found.
        let ders: Vec<(&str, f64)> = found.iter().map(|(name, errors)| (*name, errors.der())).collect();
        assert_eq!(ders, [("a", 0.2), ("b", 1.0)]);
        assert_eq!(left_out, ["c"]);
        let figures = figures(&found[0].1);
        assert_eq!((&figures["missed"], &figures["total"]), (&json!(2.0), &json!(10.0)));

        let uem = BTreeMap::from([("a".to_owned(), vec![(0.0, 8.0)]), ("c".to_owned(), vec![(0.0, 2.0)])]);
        let (found, left_out) = scores(&reference, &hypothesis, Some(&uem), &plain).unwrap();
        let ders: Vec<(&str, f64)> = found.iter().map(|(name, errors)| (*name, errors.der())).collect();
        assert_eq!(ders, [("a", 0.0), ("c", 1.0)]);
        assert_eq!(left_out, ["b"]);
    }

    #[test]
    fn what_cannot_be_scored_is_told() {
        let (some, none) = (recordings(&[("a", 0.0, 1.0, "x")]), Recordings::new());
        let other = recordings(&[("b", 0.0, 1.0, "x")]);
        let plain = Scoring::default();
        assert!(scores(&none, &some, None, &plain).is_err());
        let error = scores(&some, &other, None, &plain).unwrap_err().to_string();
        assert!(error.contains("(b)") && error.contains("(a)"), "{error}");
        // Nothing was found: all of it is missed.
        assert_eq!(scores(&some, &none, None, &plain).unwrap().0[0].1.der(), 1.0);
    }
}
