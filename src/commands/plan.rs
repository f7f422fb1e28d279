//! `flow plan`: what would run, and why.

use std::io::Write;

use flow_base::escape::escape_line;
use flow_inspect::table::{self, plural};
use flow_kind::registry::Registry;
use flow_plan::{Action, Plan, StagePlan};

use super::{checked, options};
use crate::arguments::PlanArguments;
use flow_cli::failure::{Exit, Failure};

pub fn plan(arguments: &PlanArguments, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    let checked = checked(&arguments.pipeline, registry)?;
    let (plan, refusal) =
        flow_runtime::run::plan_despite_refusal(&checked, &options(registry.storage(), &arguments.selection))
            .map_err(|error| Failure::run(error, &checked))?;
    if arguments.json {
        serde_json::to_writer(&mut *out, &plan).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        show(&plan, arguments.partitions, out)?;
    }
    if let Some(refusal) = refusal {
        return Err(Failure::run(refusal, &checked));
    }
    Ok(if arguments.exit_code && !plan.is_empty() {
        Exit::Noted
    } else {
        Exit::Done
    })
}

fn show(plan: &Plan, partitions: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let mut rows = vec![
        ["stage", "run", "if changed", "reuse", "why"]
            .map(String::from)
            .to_vec(),
    ];
    for stage in &plan.stages {
        let number = |count: u64| {
            if count == 0 {
                "-".to_string()
            } else {
                table::count(count)
            }
        };
        let if_changed = if stage.unknown_partitions {
            "?".to_string()
        } else {
            number(stage.if_changed)
        };
        rows.push(vec![
            stage.stage.clone(),
            number(stage.run),
            if_changed,
            number(stage.reuse),
            reasons(stage),
        ]);
    }
    for line in table::lines(&rows) {
        writeln!(out, "{line}")?;
    }
    // Stages that share a reason, as those of a group do, on one line.
    let mut off: Vec<(&str, Vec<&str>)> = Vec::new();
    for stage in &plan.switched_off {
        match off.iter_mut().find(|(reason, _)| *reason == stage.reason) {
            Some((_, stages)) => stages.push(&stage.stage),
            None => off.push((&stage.reason, vec![&stage.stage])),
        }
    }
    for (reason, stages) in off {
        writeln!(out, "switched off: {}: {}", stages.join(", "), escape_line(reason))?;
    }
    for stage in plan.stages.iter().filter(|stage| !stage.removed.is_empty()) {
        writeln!(
            out,
            "{}: {} no longer there",
            stage.stage,
            plural(stage.removed.len() as u64, "partition")
        )?;
    }
    if partitions {
        for stage in &plan.stages {
            for one in stage
                .partitions
                .iter()
                .filter(|one| one.action != Action::Reuse && stage.selected)
            {
                writeln!(
                    out,
                    "{} {}: {}: {}",
                    stage.stage,
                    escape_line(one.partition.as_str()),
                    word(one.action),
                    escape_line(&one.reason)
                )?;
            }
        }
    }
    if plan.is_empty() {
        writeln!(out, "nothing would run")?;
    }
    Ok(())
}

/// The reasons to run, commonest first, with how often each was given.
fn reasons(stage: &StagePlan) -> String {
    // Limited to keep the table readable; `--partitions` lists all.
    const SHOWN: usize = 3;
    if let Some(reason) = &stage.left_out {
        return format!("left out: {reason}");
    }
    if !stage.selected {
        return "not asked for".to_string();
    }
    let given: Vec<&(Action, String, u64)> = stage
        .reasons
        .iter()
        .filter(|(action, _, _)| *action != Action::Reuse)
        .collect();
    let mut text: Vec<String> = given
        .iter()
        .take(SHOWN)
        .map(|(_, reason, count)| {
            if *count == 1 {
                reason.clone()
            } else {
                format!("{reason} ({})", table::count(*count))
            }
        })
        .collect();
    if given.len() > SHOWN {
        text.push(plural((given.len() - SHOWN) as u64, "other reason"));
    }
    text.join("; ")
}

fn word(action: Action) -> &'static str {
    match action {
        Action::Run => "run",
        Action::IfChanged => "if changed",
        Action::Reuse => "reuse",
    }
}
