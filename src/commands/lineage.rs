//! `flow lineage`: what became of a segment, stage by stage.

use std::io::Write;
use std::path::{Path, PathBuf};

use flow_runtime::escape::escape_line;
use flow_runtime::store::{Record, StageSnapshot};
use flow_runtime::{Partition, Reject};

use super::past_run::PastRun;
use super::rejects::stage_of;
use crate::arguments::LineageArguments;
use crate::failure::{Exit, Failure};

pub fn lineage(arguments: &LineageArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let mut arguments = arguments.clone();
    // Written with the pipeline first, as for the other commands.
    if let Some(segment) = &arguments.look.pipeline
        && Path::new(&arguments.segment)
            .extension()
            .is_some_and(|ending| ending == "yaml" || ending == "yml")
    {
        let pipeline = PathBuf::from(&arguments.segment);
        arguments.segment = segment.to_string_lossy().into_owned();
        arguments.look.pipeline = Some(pipeline);
    }
    let run = PastRun::find_planned(&arguments.look)?;
    for step in steps(&run, &arguments.segment)? {
        writeln!(out, "{}", step.text())?;
        for (name, value) in &step.values {
            writeln!(out, "    {}: {}", escape_line(name), escape_line(value))?;
        }
    }
    Ok(Exit::Done)
}

/// What became of the segment in the run, stage by stage; at least one step.
pub fn steps(run: &PastRun, segment: &str) -> Result<Vec<Step>, Failure> {
    let plan = run.plan()?;
    let wanted = Wanted::parse(segment)?;
    let snapshots = run.snapshots()?;
    let mut found = Vec::new();
    let mut knows_partition = false;
    for stage in &plan.stages {
        // The keys and decisions of a global stage are its own affair; what the run did not use is another run's.
        if stage.stage.ends_with(":keys") || stage.stage.ends_with(":decide") || !stage.used {
            continue;
        }
        let Some(stage) = snapshots.of(&stage.stage) else {
            continue;
        };
        for record in run.records_of(stage)? {
            if wanted
                .partition
                .as_ref()
                .is_some_and(|partition| *partition != record.partition)
            {
                continue;
            }
            knows_partition = true;
            found.extend(of_record(run, stage, &record, &wanted)?);
        }
    }
    if found.is_empty() {
        let help = if knows_partition || wanted.partition.is_none() {
            "its id may be spelt otherwise, or no stored stage has it: a segment that only streamed stages saw leaves no trace"
        } else {
            "name it as LANG/SHARD/SEGMENT, or SEGMENT alone to look in all partitions"
        };
        return Err(Failure::usage(
            format!("run {} knows no segment `{segment}`", run.id),
            help,
        ));
    }
    Ok(found)
}

struct Wanted {
    partition: Option<Partition>,
    segment: String,
}

impl Wanted {
    /// `LANG/SHARD/SEGMENT`, or `SEGMENT`. A segment's id may have slashes itself.
    fn parse(text: &str) -> Result<Wanted, Failure> {
        let parts: Vec<&str> = text.splitn(3, '/').collect();
        match parts.as_slice() {
            [lang, shard, segment] if ![lang, shard, segment].iter().any(|part| part.is_empty()) => Ok(Wanted {
                partition: Some(Partition::new(format!("{lang}/{shard}"))),
                segment: (*segment).to_string(),
            }),
            [segment] if !segment.is_empty() => Ok(Wanted {
                partition: None,
                segment: (*segment).to_string(),
            }),
            _ => Err(Failure::usage(
                format!("`{text}` names no segment"),
                "name it as LANG/SHARD/SEGMENT, or SEGMENT alone to look in all partitions",
            )),
        }
    }
}

/// A segment at one stage.
pub struct Step {
    stage: String,
    partition: Partition,
    row: Option<u32>,
    /// The port it left by, or why it was refused.
    fate: String,
    pub values: Vec<(String, String)>,
}

impl Step {
    /// The step without its values, on one line.
    pub fn text(&self) -> String {
        let row = self.row.map_or(String::new(), |row| format!(", row {row}"));
        format!(
            "{}: {}{row}: {}",
            self.stage,
            escape_line(self.partition.as_str()),
            self.fate
        )
    }
}

/// What a stage's record says of the segment: rows on its stored ports, and rejects.
fn of_record(run: &PastRun, stage: &StageSnapshot, record: &Record, wanted: &Wanted) -> Result<Vec<Step>, Failure> {
    let name = stage_of(&stage.stage).to_string();
    let mut steps = Vec::new();
    let step = |row, fate, values| Step {
        stage: name.clone(),
        partition: record.partition.clone(),
        row,
        fate,
        values,
    };
    for port in record.ports.keys() {
        let rows = run.store.find_segment(&stage.recipe, record, port, &wanted.segment);
        for row in rows.map_err(Failure::unreadable)? {
            steps.push(step(row.row, format!("goes on ({port})"), values_of(&row.values)));
        }
    }
    if record.rejects.rows > 0 {
        let set = run
            .store
            .reject_set(&[(name.clone(), stage.recipe, vec![record.clone().into()])]);
        for reject in set.iter() {
            let (_, _, reject) = reject.map_err(Failure::unreadable)?;
            let whole = reject.row.is_none();
            if reject.segment_id.as_deref() == Some(&wanted.segment) || (whole && wanted.partition.is_some()) {
                let fate = refused(&reject);
                steps.push(step(reject.row, fate, values_of(&reject.values)));
            }
        }
    }
    Ok(steps)
}

fn refused(reject: &Reject) -> String {
    let what = if reject.row.is_none() {
        "its whole partition is refused"
    } else {
        "refused"
    };
    let detail = if reject.detail.is_empty() {
        String::new()
    } else {
        format!(": {}", escape_line(&reject.detail))
    };
    format!("{what}, {} ({}){detail}", reject.reason, reject.class.as_str())
}

/// The values of a row, given as a JSON object.
fn values_of(values: &str) -> Vec<(String, String)> {
    match serde_json::from_str(values) {
        Ok(serde_json::Value::Object(values)) => values
            .into_iter()
            .map(|(name, value)| (name, value.as_str().map_or_else(|| value.to_string(), str::to_string)))
            .collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_named_with_or_without_its_shard() {
        let with = Wanted::parse("hi/hi_0001/rec/7").unwrap();
        assert_eq!(
            (with.partition, with.segment.as_str()),
            (Some(Partition::new("hi/hi_0001")), "rec/7")
        );
        let without = Wanted::parse("rec_7").unwrap();
        assert_eq!((without.partition, without.segment.as_str()), (None, "rec_7"));
        for wrong in ["", "hi/hi_0001", "hi//x", "hi/hi_0001/"] {
            assert!(Wanted::parse(wrong).is_err(), "{wrong}");
        }
    }
}
