//! `flow test --record`: rows of the latest run as a test, to be pasted into a pipeline file.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;

use flow_inspect::past_run::PastRun;
use flow_inspect::progress::stage_of;
use flow_kind::Partition;
use flow_spec::did_you_mean;
use flow_storage::Storage;
use flow_store::{Record, RowValues, RunSnapshots, StageSnapshot};

use super::past_run;
use crate::arguments::{LookArguments, StateArguments, TestArguments};
use flow_cli::failure::{Exit, Failure};

/// Most rows of a partition that are printed, to keep tests short.
const ROWS: usize = 5;

/// By port, by partition.
type Recorded = BTreeMap<String, BTreeMap<Partition, Vec<RowValues>>>;

pub fn record(storage: &Storage, arguments: &TestArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let run = past_run::find(
        storage,
        &LookArguments {
            pipeline: Some(arguments.pipeline.pipeline.clone()),
            config: arguments.pipeline.config.clone(),
            set: arguments.pipeline.set.clone(),
            run: "latest".into(),
            state: StateArguments {
                state: arguments.state.clone(),
            },
        },
    )?;
    let snapshots = run.snapshots()?;
    let mut recorded = Recorded::new();
    for wanted in &arguments.record {
        let Some((port, partition)) = wanted.split_once('=') else {
            return Err(Failure::usage(
                format!("--record {wanted}: expected STAGE=PARTITION"),
                "such as --record scan=hi/hi_0000",
            ));
        };
        of_stage(&run, &snapshots, port, &Partition::new(partition), &mut recorded)?;
    }
    write!(out, "{}", text(&recorded))?;
    Ok(Exit::Done)
}

fn of_stage(
    run: &PastRun,
    snapshots: &RunSnapshots,
    named: &str,
    partition: &Partition,
    recorded: &mut Recorded,
) -> Result<(), Failure> {
    let (stage, port) = match named.split_once('.') {
        Some((stage, port)) => (stage, Some(port)),
        None => (named, None),
    };
    let snapshot = snapshots
        .of(stage)
        .or_else(|| snapshots.of(&format!("{stage}:apply")))
        .ok_or_else(|| {
            let mut names: Vec<&str> = snapshots.stages.iter().map(|other| stage_of(&other.stage)).collect();
            names.dedup();
            Failure::usage(
                format!("run {} has no stage `{stage}`", run.id),
                did_you_mean(stage, names, "stages"),
            )
        })?;
    let records = run.records_of(snapshot)?;
    let record = records.iter().find(|record| record.partition == *partition);
    let record = record.ok_or_else(|| {
        let names = records.iter().map(|record| record.partition.as_str());
        Failure::usage(
            format!("stage `{stage}` had no partition `{partition}` in run {}", run.id),
            did_you_mean(partition.as_str(), names, "partitions"),
        )
    })?;
    let kept: Vec<&str> = record.ports.keys().collect();
    if kept.is_empty() {
        return Err(Failure::usage(
            format!(
                "stage `{stage}` kept no rows in run {}: they went on to the next stage at once",
                run.id
            ),
            keeping(run, snapshots)?,
        ));
    }
    let ports = match port {
        Some(port) if !kept.contains(&port) => {
            return Err(Failure::usage(
                format!("stage `{stage}` kept no rows of a port `{port}` in run {}", run.id),
                did_you_mean(port, kept, "ports that it kept"),
            ));
        }
        Some(port) => vec![port],
        None => kept,
    };
    for port in ports {
        let rows = rows_of(run, snapshot, record, port)?;
        let of_port = recorded.entry(format!("{stage}.{port}")).or_default();
        of_port.insert(partition.clone(), rows);
    }
    Ok(())
}

fn rows_of(
    run: &PastRun,
    snapshot: &StageSnapshot,
    record: &Arc<Record>,
    port: &str,
) -> Result<Vec<RowValues>, Failure> {
    let rows = run.store.first_rows(&snapshot.recipe, record, port, ROWS);
    rows.map_err(Failure::unreadable)
}

/// Which stages kept rows.
fn keeping(run: &PastRun, snapshots: &RunSnapshots) -> Result<String, Failure> {
    let mut names = Vec::new();
    for snapshot in &snapshots.stages {
        // The keys and decisions of global stages are internal.
        if snapshot.stage.ends_with(":keys") || snapshot.stage.ends_with(":decide") {
            continue;
        }
        if run.records_of(snapshot)?.iter().any(|record| !record.ports.is_empty()) {
            names.push(format!("`{}`", stage_of(&snapshot.stage)));
        }
    }
    Ok(format!("stages that kept rows: {}", names.join(", ")))
}

/// The rows as a test.
fn text(recorded: &Recorded) -> String {
    let mut text = String::from("tests:\n  recorded:\n    rows:\n");
    for (port, partitions) in recorded {
        text.push_str(&format!("      {}:\n", key(port)));
        for (partition, rows) in partitions {
            text.push_str(&format!("        {}:", key(partition.as_str())));
            if rows.is_empty() {
                text.push_str(" []");
            }
            text.push('\n');
            for row in rows {
                let values = row
                    .iter()
                    .map(|(name, value)| format!("{}: {}", key(name), printable(value)));
                text.push_str(&format!("          - {{{}}}\n", values.collect::<Vec<_>>().join(", ")));
            }
        }
    }
    text.push_str("    expect: # what stages make of them, such as\n      # STAGE: {rows: 5}\n");
    text
}

/// A key of a YAML map: unquoted where it is certain to be parsed as the same text.
fn key(name: &str) -> String {
    let is_plain = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c))
        && !["null", "true", "false", "yes", "no", "on", "off", "y", "n"].contains(&name.to_lowercase().as_str());
    match is_plain {
        true => name.to_string(),
        // Serialising a text cannot fail.
        false => printable(&serde_json::to_string(name).unwrap_or_default()),
    }
}

/// JSON with escapes for all characters that YAML refuses or treats as a line end, or that a terminal interprets.
fn printable(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        let is_escaped = c.is_control()
            || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
            || matches!(c, '\u{feff}' | '\u{fffe}' | '\u{ffff}');
        match is_escaped {
            true => text.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use flow_spec::yaml::{Steps, parse_text};

    use super::*;

    #[test]
    fn what_is_printed_is_read_as_the_same_rows() {
        let hostile = "a: \"b\" # {c}\n\u{1b}[2J\u{85}\u{2028}\u{202e}\u{7f}\u{feff}ü";
        let row = vec![
            ("_row".to_string(), "0".to_string()),
            ("null".to_string(), "1.5".to_string()),
            ("a b".to_string(), serde_json::to_string(hostile).unwrap()),
            ("list".to_string(), "[1,null]".to_string()),
        ];
        let partitions = BTreeMap::from([
            (Partition::new("hi/hi_0000"), vec![row]),
            (Partition::new("0: x"), Vec::new()),
        ]);
        let text = text(&BTreeMap::from([("scan.rows".to_string(), partitions)]));
        assert!(!text.contains(['\u{1b}', '\u{202e}']), "{text}");
        let read = parse_text(&text).unwrap();
        let at = |steps: &[&str]| {
            let steps = steps.iter().fold(Steps::default(), |steps, key| steps.key(key));
            steps.of(&read).cloned().unwrap_or_else(|| panic!("{steps}: {text}"))
        };
        let partition = |name| at(&["tests", "recorded", "rows", "scan.rows", name]);
        assert_eq!(partition("0: x").as_sequence().map(Vec::len), Some(0));
        let rows = partition("hi/hi_0000");
        let row = &rows.as_sequence().unwrap()[0];
        assert_eq!((row["_row"].as_u64(), row["null"].as_f64()), (Some(0), Some(1.5)));
        assert_eq!(row["a b"].as_str(), Some(hostile));
        assert_eq!(row["list"].as_sequence().map(Vec::len), Some(2));
    }
}
