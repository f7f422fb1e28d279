//! `flow rejects`: the rows that stages refused.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

use flow_base::escape::escape_line;
use flow_base::event::Event;
use flow_inspect::past_run::PastRun;
use flow_inspect::progress::stage_of;
use flow_inspect::table;
use flow_kind::RejectSet;
use flow_plan::Plan;
use flow_storage::Storage;
use flow_store::write_atomically_with;

use super::past_run;
use crate::arguments::RejectsArguments;
use flow_cli::failure::{Exit, Failure};

pub fn rejects(storage: &Storage, arguments: &RejectsArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let run = past_run::find_planned(storage, &arguments.look)?;
    let plan = run.plan()?;
    let stages: Vec<&str> = stage_names(&plan);
    if let Some(stage) = &arguments.stage
        && !stages.contains(&stage.as_str())
    {
        let help = flow_spec::did_you_mean(stage, stages.iter().copied(), "stages");
        return Err(Failure::usage(format!("run {} has no stage `{stage}`", run.id), help));
    }
    let set = of_run(&run, &plan, arguments.stage.as_deref())?;
    past_run::announce(&run);
    if let Some(reason) = &arguments.reason {
        let counted = set.by_reason();
        let known: BTreeSet<&str> = counted
            .iter()
            .flat_map(|(_, reasons)| reasons)
            .map(|known| known.reason.as_str())
            .collect();
        if !known.contains(reason.as_str()) {
            let of = arguments
                .stage
                .as_ref()
                .map_or(String::new(), |stage| format!(" of stage `{stage}`"));
            return Err(Failure::usage(
                format!("run {} has no rejects{of} with the reason `{reason}`", run.id),
                flow_spec::did_you_mean(reason, known, "reasons"),
            ));
        }
    }
    if let Some(path) = &arguments.export {
        export(&set, arguments.reason.as_deref(), path)?;
    } else if arguments.stage.is_some() || arguments.reason.is_some() {
        list(&set, arguments.reason.as_deref(), out)?;
    } else {
        count(&set, out)?;
        examples(&set, out)?;
        left_out(&run, out)?;
    }
    Ok(Exit::Done)
}

fn stage_names(plan: &Plan) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for stage in &plan.stages {
        let name = stage_of(&stage.stage);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// The rejects of the stages that a run used.
pub(super) fn of_run(run: &PastRun, plan: &Plan, stage: Option<&str>) -> Result<RejectSet, Failure> {
    let snapshots = run.snapshots()?;
    let mut stages = Vec::new();
    for planned in plan
        .stages
        .iter()
        .filter(|planned| planned.used && stage.is_none_or(|stage| stage_of(&planned.stage) == stage))
    {
        if let Some(snapshot) = snapshots.of(&planned.stage) {
            let records = run.records_of(snapshot)?;
            stages.push((stage_of(&planned.stage).to_string(), snapshot.recipe, records));
        }
    }
    Ok(run.store.reject_set(&stages))
}

fn count(set: &RejectSet, out: &mut dyn Write) -> Result<(), Failure> {
    let mut rows = vec![["stage", "reason", "rows", "class"].map(String::from).to_vec()];
    for (stage, reasons) in set.by_reason() {
        for reason in reasons {
            rows.push(vec![
                stage.to_string(),
                reason.reason,
                table::count(reason.rows),
                reason.class.as_str().to_string(),
            ]);
        }
    }
    if rows.len() == 1 {
        writeln!(out, "no rejects")?;
        return Ok(());
    }
    for line in table::lines(&rows) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// The details of the first rejects of each reason, where they have one.
fn examples(set: &RejectSet, out: &mut dyn Write) -> Result<(), Failure> {
    const EACH: u64 = 2;
    const LONGEST: usize = 300;
    let mut heading = "\nThe first of each reason:\n";
    for (stage, partition, reject) in set.first_of_each(EACH).map_err(Failure::unreadable)? {
        if reject.detail.is_empty() {
            continue;
        }
        let (place, detail) = (reject.place(&partition), reject.short_detail(LONGEST));
        writeln!(
            out,
            "{heading}{}",
            escape_line(&format!("{stage}: {}: {place}: {detail}", reject.reason))
        )?;
        heading = "";
    }
    Ok(())
}

/// Recordings that could not be loaded during training, which are no rejects, as their rows had passed before.
fn left_out(run: &PastRun, out: &mut dyn Write) -> Result<(), Failure> {
    const SHOWN: usize = 3;
    // Each process of a run counts its own.
    let mut stages: BTreeMap<String, (BTreeMap<u64, u64>, Vec<String>)> = BTreeMap::new();
    for (_, logged) in run.events()? {
        let Event::StageFigures { stage, figures } = logged.event else {
            continue;
        };
        let Some(count) = figures["recordings_left_out"].as_u64() else {
            continue;
        };
        let (counts, shown) = stages.entry(stage).or_default();
        let so_far = counts.entry(figures["process"].as_u64().unwrap_or(0)).or_default();
        *so_far = (*so_far).max(count);
        if let Some(message) = figures["left_out"]["warning"].as_str()
            && shown.len() < SHOWN
        {
            shown.push(message.to_string());
        }
    }
    for (stage, (counts, messages)) in stages {
        let count = counts.values().sum();
        if count == 0 {
            continue;
        }
        let recordings = table::plural(count, "recording");
        writeln!(
            out,
            "\nLeft out while loading, beside the rejects: {recordings} of {}",
            escape_line(&stage)
        )?;
        for message in messages {
            writeln!(out, "{}", escape_line(&format!("{stage}: {message}")))?;
        }
    }
    Ok(())
}

/// One line per reject, columns separated by tabs.
fn list(set: &RejectSet, reason: Option<&str>, out: &mut dyn Write) -> Result<(), Failure> {
    writeln!(out, "partition\trow\tsegment_id\tstage\treason\tclass\tdetail")?;
    for reject in set.iter() {
        let (stage, partition, reject) = reject.map_err(Failure::unreadable)?;
        if reason.is_some_and(|reason| reason != reject.reason) {
            continue;
        }
        let row = reject.row.map_or(String::new(), |row| row.to_string());
        let segment = reject.id.unwrap_or_default();
        writeln!(
            out,
            "{}\t{row}\t{}\t{stage}\t{}\t{}\t{}",
            escape_line(partition.as_str()),
            escape_line(&segment),
            escape_line(&reject.reason),
            reject.class.as_str(),
            escape_line(&reject.detail)
        )?;
    }
    Ok(())
}

fn export(set: &RejectSet, reason: Option<&str>, path: &Path) -> Result<(), Failure> {
    let chosen = match reason {
        None => set.clone(),
        Some(reason) => {
            let mut chosen = Vec::new();
            for reject in set.iter() {
                let (stage, partition, reject) = reject.map_err(Failure::unreadable)?;
                if reject.reason == reason {
                    chosen.push((stage.to_string(), partition, reject));
                }
            }
            RejectSet::in_memory(chosen)
        }
    };
    write_atomically_with(path, |file| {
        flow_manifest::write_rejects::write_rejects(&chosen, path, file)
    })
    .map_err(Failure::unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flow_kind::{Partition, Reject, RejectClass};

    #[test]
    fn hostile_texts_stay_on_their_line() {
        let reject = Reject {
            row: Some(3),
            id: Some("a\tb\n\u{1b}[2J".into()),
            reason: "too_short".into(),
            class: RejectClass::Rule,
            detail: "ü".into(),
            values: "{}".into(),
        };
        let other = Reject {
            reason: "other".into(),
            ..reject.clone()
        };
        let set = RejectSet::in_memory(vec![
            ("clean".into(), Partition::from("hi/1"), reject),
            ("clean".into(), Partition::from("hi/1"), other),
        ]);
        let mut out = Vec::new();
        list(&set, Some("too_short"), &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text,
            "partition\trow\tsegment_id\tstage\treason\tclass\tdetail\nhi/1\t3\ta\\tb\\n\\u{1b}[2J\tclean\ttoo_short\trule\tü\n"
        );
        let mut out = Vec::new();
        count(&set, &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "stage  reason     rows  class\nclean  other         1  rule\nclean  too_short     1  rule\n"
        );
        let mut out = Vec::new();
        examples(&set, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(lines[..2], ["", "The first of each reason:"]);
        assert!(
            lines.contains(&"clean: too_short: hi/1, row 3 (a\\tb\\n\\u{1b}[2J): ü"),
            "{text}"
        );
    }
}
