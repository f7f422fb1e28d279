//! `flow plan`: what would run, and why.

use std::io::Write;

use flow_base::escape::escape_line;
use flow_inspect::table::{self, plural};
use flow_kind::registry::Registry;
use flow_plan::{Action, Plan, StagePlan};
use flow_spec::SwitchedOff;

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
    for line in switched_off(&plan.switched_off) {
        writeln!(out, "{line}")?;
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

/// A line for each reason: the stages that it switches off itself, and those that cannot do without one of them.
fn switched_off(all: &[SwitchedOff]) -> Vec<String> {
    let cause = |stage: &SwitchedOff| {
        let mut cause = stage.clone();
        while let Some(before) = all.iter().find(|off| cause.since.as_ref() == Some(&off.stage)) {
            cause = before.clone();
        }
        cause.reason
    };
    let mut reasons: Vec<(String, Vec<&str>, Vec<&str>)> = Vec::new();
    for stage in all {
        let reason = cause(stage);
        let at = reasons
            .iter()
            .position(|(known, ..)| *known == reason)
            .unwrap_or_else(|| {
                reasons.push((reason, Vec::new(), Vec::new()));
                reasons.len() - 1
            });
        let (_, own, others) = &mut reasons[at];
        if stage.since.is_none() { own } else { others }.push(&stage.stage);
    }
    let line = |(reason, own, others): (String, Vec<&str>, Vec<&str>)| {
        let others = if others.is_empty() {
            String::new()
        } else {
            format!("; and {}, which read from there", others.join(", "))
        };
        format!("switched off: {}: {}{others}", own.join(", "), escape_line(&reason))
    };
    reasons.into_iter().map(line).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_named_with_what_switches_them_off() {
        let off = |stage: &str, reason: &str, since: Option<&str>| SwitchedOff {
            stage: stage.into(),
            uses: "sql".into(),
            reason: reason.into(),
            since: since.map(str::to_owned),
            position: 0,
            from: Vec::new(),
        };
        let all = [
            off("g/scan", "the group `g` is off", None),
            off("g/write", "the group `g` is off", None),
            off(
                "audio",
                "its input comes from `g/scan`, which is switched off",
                Some("g/scan"),
            ),
            off("tars", "`when: ${x}` does not hold", None),
            off(
                "texts",
                "its input comes from `audio`, which is switched off",
                Some("audio"),
            ),
        ];
        assert_eq!(
            switched_off(&all),
            [
                "switched off: g/scan, g/write: the group `g` is off; and audio, texts, which read from there",
                "switched off: tars: `when: ${x}` does not hold",
            ]
        );
    }
}
