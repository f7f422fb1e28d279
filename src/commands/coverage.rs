//! How much of the speech of recordings has words, as the last run of `flow transcribe` measured it.

use std::io::{self, Write};

use flow_base::escape::escape_line;
use flow_inspect::past_run::PastRun;
use flow_inspect::table::plural;
use flow_transcription::coverage::Hole;
use serde_json::Value;

use flow_cli::failure::Failure;

/// Holes of a recording that are named, at most.
const MOST_NAMED: usize = 5;

/// What was measured in a recording.
#[derive(Debug, PartialEq)]
pub struct Measured {
    pub name: String,
    /// Share of the speech that has words.
    pub share: f64,
    /// Seconds of speech.
    pub speech: f64,
    pub holes: Vec<Hole>,
    pub recovered: u64,
    /// How many passages are suspect.
    pub suspects: usize,
}

/// What a stage of a run measured in recordings, in the order of their names; nothing where it did not measure.
pub fn measured_in(run: &PastRun, stage: &str) -> Result<Vec<Measured>, Failure> {
    let snapshots = run.snapshots()?;
    let Some(snapshot) = snapshots.of(stage) else {
        return Ok(Vec::new());
    };
    let mut measured = Vec::new();
    for record in run.records_of(snapshot)? {
        let rows = run.store.first_rows(&snapshot.recipe, &record, "recordings", 1);
        for row in rows.map_err(Failure::unreadable)? {
            measured.extend(of_row(record.partition.to_string(), &row));
        }
    }
    measured.sort_by(|a: &Measured, b| a.name.cmp(&b.name));
    Ok(measured)
}

/// What the values of a row say, if it has those of coverage.
fn of_row(name: String, row: &[(String, String)]) -> Option<Measured> {
    let value = |column: &str| row.iter().find(|(of, _)| of == column).map(|(_, value)| value.as_str());
    let number = |column: &str| value(column)?.parse::<f64>().ok();
    let suspects: Value = serde_json::from_str(value("suspects")?).ok()?;
    Some(Measured {
        name,
        share: number("coverage")?,
        speech: number("speech")?,
        holes: serde_json::from_str(value("holes")?).ok()?,
        recovered: value("recovered")?.parse().ok()?,
        suspects: suspects.as_array().map_or(0, Vec::len),
    })
}

/// The line about all recordings.
pub fn summary(measured: &[Measured]) -> String {
    let speech: f64 = measured.iter().map(|one| one.speech).sum();
    let missing: f64 = measured.iter().map(|one| one.speech * (1.0 - one.share)).sum();
    let share = if speech > 0.0 { 1.0 - missing / speech } else { 1.0 };
    let holes: usize = measured.iter().map(|one| one.holes.len()).sum();
    let mut line = format!("{} % of the speech has words", percent(share));
    if holes > 0 {
        line += &format!("; {}, together {missing:.1} s", plural(holes as u64, "hole"));
    }
    let recovered: u64 = measured.iter().map(|one| one.recovered).sum();
    if recovered > 0 {
        line += &format!("; {} found by decoding again", plural(recovered, "word"));
    }
    let suspects: usize = measured.iter().map(|one| one.suspects).sum();
    if suspects > 0 {
        line += &format!(
            "; {} (see `suspects` in the JSON)",
            plural(suspects as u64, "suspect passage")
        );
    }
    line
}

/// Names the recordings whose share of speech with words is below `least`, and whether there are any.
pub fn tell_short(measured: &[Measured], least: f64, file_of: &dyn Fn(&str) -> String) -> io::Result<bool> {
    let mut any = false;
    for one in measured.iter().filter(|one| one.share < least) {
        any = true;
        let places = one.holes.iter().take(MOST_NAMED);
        let places: Vec<String> = places
            .map(|hole| format!("{:.2}-{:.2} s", hole.start, hole.end))
            .collect();
        let more = if one.holes.len() > MOST_NAMED { ", ..." } else { "" };
        writeln!(
            io::stderr(),
            "error: {}: {} % of its speech has words, {} % are required; none at {}{more}",
            escape_line(&file_of(&one.name)),
            percent(one.share),
            percent(least),
            places.join(", ")
        )?;
    }
    Ok(any)
}

/// A share in percent with one decimal, rounded down: what is not all is not 100.
fn percent(share: f64) -> String {
    format!("{:.1}", (share * 1000.0 + 1e-6).floor() / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(values: &[(&str, &str)]) -> Vec<(String, String)> {
        values
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn rows_are_read_and_summed() {
        let values = [
            ("recording", "a.wav"),
            ("coverage", "0.75"),
            ("speech", "10.0"),
            ("holes", r#"[{"start":1.5,"end":4.0}]"#),
            ("recovered", "3"),
            (
                "suspects",
                r#"[{"start":5.0,"end":6.0,"text":"way way","reason":"repetition"}]"#,
            ),
        ];
        let first = of_row("a".to_owned(), &row(&values)).unwrap();
        assert_eq!((first.holes[0].end, first.suspects), (4.0, 1));
        assert!(of_row("a".to_owned(), &row(&values[..1])).is_none());
        let second = Measured {
            name: "b".to_owned(),
            share: 1.0,
            speech: 90.0,
            holes: Vec::new(),
            recovered: 0,
            suspects: 0,
        };
        assert_eq!(
            summary(&[first, second]),
            "97.5 % of the speech has words; 1 hole, together 2.5 s; 3 words found by decoding again; 1 suspect passage (see \
             `suspects` in the JSON)"
        );
        assert_eq!(summary(&[]), "100.0 % of the speech has words");
        assert_eq!(percent(0.99999), "99.9");
    }
}
