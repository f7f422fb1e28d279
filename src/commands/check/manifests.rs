//! `flow check --deep`: some rows of each manifest, with their recordings.

use std::io::Write;
use std::time::Duration;

use flow_base::escape::escape_line;
use flow_corpus::ReadSettings;
use flow_inspect::table::{count, plural};
use flow_layouts::sample::ManifestSample;
use flow_spec::Checked;
use flow_storage::Storage;

use flow_cli::failure::Failure;

/// Texts with their languages.
pub type Texts = Vec<(String, String)>;

/// Rows of each manifest whose recordings are decoded.
const ROWS: usize = 48;
/// Time limit for each manifest. A row that was begun is finished.
const LIMIT: Duration = Duration::from_secs(20);
/// Places that a line names.
const PLACES: usize = 5;

/// Checks some rows of each manifest that a stage reads, and prints their statistics and which would be rejected.
/// Returns the names of the stages whose manifests have no usable row among them, and the languages and texts of usable rows.
pub fn look_at_manifests(
    storage: &Storage,
    checked: &Checked,
    out: &mut dyn Write,
) -> Result<(Vec<String>, Texts), Failure> {
    let (mut without, mut texts) = (Vec::new(), Texts::new());
    for (index, stage) in checked.stages.iter().enumerate() {
        if stage.kind.name() != "manifest.read" {
            continue;
        }
        let settings: ReadSettings = serde_json::from_value(stage.settings.all()).map_err(Failure::unreadable)?;
        if settings.manifest.is_empty() {
            continue;
        }
        let scratch = tempfile::tempdir().map_err(Failure::unreadable)?;
        let sample = ManifestSample::of(storage, &settings, scratch.path(), ROWS, LIMIT)
            .map_err(|error| Failure::unreadable(checked.diagnose(index, &error)))?;
        for line in lines(&stage.name, &settings.manifest, &sample) {
            writeln!(out, "{}", escape_line(&line))?;
        }
        if has_no_row(&sample) {
            without.push(stage.name.clone());
        }
        texts.extend(sample.texts);
    }
    Ok((without, texts))
}

/// Whether every checked row would be rejected.
fn has_no_row(sample: &ManifestSample) -> bool {
    sample.refused.rows() > 0 && sample.layouts.is_empty() && !sample.is_cut
}

fn lines(stage: &str, manifest: &str, sample: &ManifestSample) -> Vec<String> {
    let parts = match sample.partitions_read == sample.partitions {
        true => String::new(),
        false => format!(" in {} of {} parts of it", sample.partitions_read, sample.partitions),
    };
    let cut = if sample.is_cut { " before time ran out" } else { "" };
    let mut lines = vec![format!(
        "{stage}: {manifest}: looked at {} of {}{parts}{cut}, {:.1} s of audio",
        count(sample.rows),
        plural(sample.rows_read, "row"),
        sample.seconds
    )];
    let mut say = |what: &str, all: Vec<String>| {
        if !all.is_empty() {
            lines.push(format!("  {what}: {}", all.join(", ")));
        }
    };
    let layouts = sample.layouts.iter().map(|((rate, channels), rows)| {
        let channels = plural(u64::from(*channels), "channel");
        format!("{} Hz with {channels} {}", count(u64::from(*rate)), count(*rows))
    });
    say("recordings", layouts.collect());
    let languages = sample.languages.iter();
    say(
        "languages",
        languages
            .map(|(lang, rows)| format!("{lang} {}", count(*rows)))
            .collect(),
    );
    let figures = [
        (sample.tagged, "texts with a language tag"),
        (sample.parts, "rows that are parts of longer recordings"),
    ];
    for (rows, what) in figures {
        say(what, if rows > 0 { vec![count(rows)] } else { Vec::new() });
    }
    say("texts without a word", named(&sample.without_text));
    say(
        "texts whose tag is not the language of their row",
        named(&sample.other_tag),
    );
    say(
        "texts beside others on the same part of the same recording",
        named(&sample.told_twice),
    );
    let all_refused = sample.refused.rows();
    if all_refused > 0 {
        let all = if has_no_row(sample) {
            ", and none that was looked at can be used"
        } else {
            ""
        };
        lines.push(format!("  rows that would be refused: {}{all}", count(all_refused)));
    }
    for (reason, (rows, first)) in &sample.refused.by_reason {
        lines.extend(
            first
                .iter()
                .map(|row| format!("    {reason}  {}: {}", row.place, row.detail)),
        );
        let more = rows.saturating_sub(first.len() as u64);
        if more > 0 {
            lines.push(format!("    {reason}  and {} more", plural(more, "row")));
        }
    }
    lines
}

/// Their number, and the places of the first.
fn named(places: &[String]) -> Vec<String> {
    if places.is_empty() {
        return Vec::new();
    }
    let shown = places.iter().take(PLACES).cloned().collect::<Vec<_>>().join("; ");
    let more = if places.len() > PLACES { "; ..." } else { "" };
    vec![format!("{} ({shown}{more})", places.len())]
}

#[cfg(test)]
mod tests {
    use flow_corpus::kept_rows::{Refused, RefusedRow};

    use super::*;

    #[test]
    fn what_was_seen_is_told_in_lines() {
        let refused = RefusedRow {
            place: "m.jsonl, line 4".into(),
            detail: "missing: gone.wav".into(),
        };
        let sample = ManifestSample {
            partitions: 600,
            partitions_read: 8,
            rows_read: 65_536,
            rows: 48,
            seconds: 100.25,
            layouts: [((16_000, 1), 40), ((44_100, 2), 7)].into(),
            languages: [("de".to_string(), 47)].into(),
            texts: vec![("de".into(), "eins".into())],
            without_text: (1..=6).map(|line| format!("m.jsonl, line {line}")).collect(),
            tagged: 3,
            told_twice: vec!["m.jsonl, line 3".into()],
            refused: Refused {
                by_reason: [("missing_audio", (2, vec![refused]))].into(),
            },
            ..ManifestSample::default()
        };
        let said = lines("rows", "m.jsonl", &sample).join("\n");
        assert_eq!(
            said,
            "rows: m.jsonl: looked at 48 of 65,536 rows in 8 of 600 parts of it, 100.2 s of audio
  recordings: 16,000 Hz with 1 channel 40, 44,100 Hz with 2 channels 7
  languages: de 47
  texts with a language tag: 3
  texts without a word: 6 (m.jsonl, line 1; m.jsonl, line 2; m.jsonl, line 3; m.jsonl, line 4; m.jsonl, line 5; ...)
  texts beside others on the same part of the same recording: 1 (m.jsonl, line 3)
  rows that would be refused: 2
    missing_audio  m.jsonl, line 4: missing: gone.wav
    missing_audio  and 1 row more"
        );
        assert!(!has_no_row(&sample));
        let sample = ManifestSample {
            layouts: [].into(),
            ..sample
        };
        assert!(has_no_row(&sample));
        let said = lines("rows", "m.jsonl", &sample).join("\n");
        assert!(
            said.contains("rows that would be refused: 2, and none that was looked at can be used"),
            "{said}"
        );
    }
}
