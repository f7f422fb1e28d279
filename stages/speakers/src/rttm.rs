//! RTTM (Rich Transcription Time Marked), the format of diarizations, and UEM, that of the parts of recordings that are
//! scored; both by NIST.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::error::{Error, Result};
use crate::turns::Turn;

/// The types of RTTM's lines that are not `SPEAKER`.
const OTHER_TYPES: [&str; 13] = [
    "SEGMENT",
    "NOSCORE",
    "NO_RT_METADATA",
    "LEXEME",
    "NON-LEX",
    "NON-SPEECH",
    "FILLER",
    "EDIT",
    "IP",
    "SU",
    "CB",
    "A/P",
    "SPKR-INFO",
];

/// The turns of each recording, by its name, in the order of the file. Only `SPEAKER` lines are read: field 2 is the
/// recording, 4 and 5 start and duration in seconds, 8 the speaker. Empty lines and comments (`;;`) are passed over; a
/// line with fewer fields, or without numbers in their places, is an error that names it. A text without a `SPEAKER` line
/// is an error, too, where it has lines of a type that RTTM does not know: it is of another format.
pub fn read_rttm(text: &str) -> Result<BTreeMap<String, Vec<Turn>>> {
    let mut recordings: BTreeMap<String, Vec<Turn>> = BTreeMap::new();
    let mut is_rttm = true;
    for (line, fields) in lines(text) {
        if fields[0] != "SPEAKER" {
            is_rttm &= OTHER_TYPES.contains(&fields[0]);
            continue;
        }
        let [_, recording, _, start, duration, _, _, speaker, ..] = fields[..] else {
            let why = format!("a SPEAKER line has at least 8 fields, not {}", fields.len());
            return Err(Error::Line { line, why });
        };
        let start = seconds(start, "start", line)?;
        let end = start + seconds(duration, "duration", line)?;
        let turn = Turn {
            start,
            end,
            speaker: speaker.to_owned(),
        };
        recordings.entry(recording.to_owned()).or_default().push(turn);
    }
    if recordings.is_empty() && !is_rttm {
        return Err(Error::Input(
            "no SPEAKER line of RTTM; STM is recognised by the extension .stm".to_owned(),
        ));
    }
    Ok(recordings)
}

/// The lines of a recording's turns, in their order, times rounded to milliseconds. An empty name, or one with a space, is
/// an error, and so is a time that is not finite or a turn that ends before it starts.
pub fn write_rttm(recording: &str, turns: &[Turn]) -> Result<String> {
    let mut text = String::new();
    let named = |what: &str, name: &str| {
        if !name.is_empty() && !name.contains(char::is_whitespace) {
            return Ok(());
        }
        Err(Error::Input(format!(
            "{what} {name:?} cannot be written to RTTM, whose fields are separated by spaces"
        )))
    };
    named("recording", recording)?;
    for turn in turns {
        named("speaker", &turn.speaker)?;
        let (start, duration) = (turn.start, turn.duration());
        if !start.is_finite() || !duration.is_finite() || duration < 0.0 {
            return Err(Error::Input(format!(
                "a turn of {recording} from {start} to {} s",
                turn.end
            )));
        }
        let speaker = &turn.speaker;
        writeln!(
            text,
            "SPEAKER {recording} 1 {start:.3} {duration:.3} <NA> <NA> {speaker} <NA> <NA>"
        )
        .expect("a string takes what is written");
    }
    Ok(text)
}

/// The parts of each recording that are scored, from UEM: recording, channel, start and end in seconds.
pub fn read_uem(text: &str) -> Result<BTreeMap<String, Vec<(f64, f64)>>> {
    let mut recordings: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for (line, fields) in lines(text) {
        let [recording, _, start, end, ..] = fields[..] else {
            let why = format!("a line of UEM has 4 fields, not {}", fields.len());
            return Err(Error::Line { line, why });
        };
        let (start, end) = (seconds(start, "start", line)?, seconds(end, "end", line)?);
        if end < start {
            let why = format!("ends at {end} s, before its start at {start} s");
            return Err(Error::Line { line, why });
        }
        recordings.entry(recording.to_owned()).or_default().push((start, end));
    }
    Ok(recordings)
}

/// Lines with fields, by number from 1, without comments.
fn lines(text: &str) -> impl Iterator<Item = (usize, Vec<&str>)> {
    text.lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line.split_whitespace().collect::<Vec<&str>>()))
        .filter(|(_, fields)| fields.first().is_some_and(|first| !first.starts_with(";;")))
}

fn seconds(field: &str, what: &str, line: usize) -> Result<f64> {
    match field.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err(Error::Line {
            line,
            why: format!("{what} is {field:?}; it must be a number of seconds, 0 or more"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    #[test]
    fn what_is_read_is_written_the_same() {
        let mut compared = 0;
        for entry in std::fs::read_dir(golden::file("")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "rttm") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let recordings = read_rttm(&text).unwrap();
            assert!(!recordings.is_empty());
            let written: String = recordings
                .iter()
                .map(|(name, turns)| write_rttm(name, turns).unwrap())
                .collect();
            let lines = |text: &str| text.lines().map(str::trim_end).map(String::from).collect::<Vec<_>>();
            assert_eq!(lines(&written), lines(&text), "{}", path.display());
            compared += 1;
        }
        assert!(compared > 0);
    }

    #[test]
    fn fields_are_read_by_their_places() {
        let text = ";; a comment\n\nSPKR-INFO a 1 <NA> <NA> <NA> unknown x <NA>\nSPEAKER b 1 1.5 2 <NA> <NA> x <NA>\r\n\
                    SPEAKER a 1 0 0.25 <NA> <NA> y <NA> <NA>\nSPEAKER b 1 0.5 1e-1 <NA> <NA> y";
        let found = read_rttm(text).unwrap();
        let of = |name: &str| -> Vec<(f64, f64, &str)> {
            found[name]
                .iter()
                .map(|turn| (turn.start, turn.end, turn.speaker.as_str()))
                .collect()
        };
        assert_eq!(found.len(), 2);
        assert_eq!(of("a"), [(0.0, 0.25, "y")]);
        assert_eq!(of("b"), [(1.5, 3.5, "x"), (0.5, 0.6, "y")]);

        let uem = read_uem("b 1 0 10.5\n;; c\nb 1 20 30\na NA 1 2\n").unwrap();
        assert_eq!(uem["b"], [(0.0, 10.5), (20.0, 30.0)]);
        assert_eq!(uem["a"], [(1.0, 2.0)]);
    }

    #[test]
    fn a_text_of_another_format_is_refused() {
        for text in [
            "a 1 x 0 1 one two",
            "SPKR-INFO a 1 <NA> <NA> <NA> unknown x <NA>\nspeaker a 1 0 1",
        ] {
            let error = read_rttm(text).unwrap_err().to_string();
            assert!(error.contains("no SPEAKER line of RTTM"), "{error}");
        }
        for text in [
            "",
            "\n;; nothing was found\n",
            "SPKR-INFO a 1 <NA> <NA> <NA> unknown x <NA>\nLEXEME a 1 0 1 one lex x <NA>",
        ] {
            assert!(read_rttm(text).unwrap().is_empty(), "{text}");
        }
        assert_eq!(read_rttm("one\nSPEAKER a 1 0 1 <NA> <NA> x").unwrap().len(), 1);
    }

    #[test]
    fn a_bad_line_is_named() {
        let error = |text: &str| read_rttm(text).unwrap_err().to_string();
        assert_eq!(
            error("\nSPEAKER a 1 0 1"),
            "line 2: a SPEAKER line has at least 8 fields, not 5"
        );
        for bad in ["x", "NaN", "-1", "inf"] {
            let text = format!("SPEAKER a 1 {bad} 1 <NA> <NA> x <NA>");
            assert!(error(&text).starts_with("line 1: start is"), "{bad}");
            let text = format!("SPEAKER a 1 1 {bad} <NA> <NA> x <NA>");
            assert!(error(&text).starts_with("line 1: duration is"), "{bad}");
        }
        assert!(read_uem("a 1 0").is_err() && read_uem("a 1 2 1").is_err());
        let turn = |speaker: &str, end: f64| Turn {
            start: 1.0,
            end,
            speaker: speaker.to_owned(),
        };
        assert!(write_rttm("a b", &[]).is_err());
        assert!(write_rttm("a", &[turn("x y", 2.0)]).is_err());
        assert!(write_rttm("a", &[turn("x", 0.5)]).is_err());
        assert!(write_rttm("a", &[turn("x", f64::NAN)]).is_err());
        assert_eq!(
            write_rttm("a", &[turn("x", 2.0)]).unwrap(),
            "SPEAKER a 1 1.000 1.000 <NA> <NA> x <NA> <NA>\n"
        );
    }
}
