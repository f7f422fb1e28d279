//! What a plan says in each situation of a pipeline: actions and reasons, as `flow plan` shows them.

use std::fmt::Write;

use super::*;

/// By stage: whether it takes part, counts of run, perhaps and reuse, and each reason with its count.
fn shown(plan: &Plan) -> String {
    let mut text = String::new();
    for stage in &plan.stages {
        let part = match (stage.selected, stage.used) {
            (true, _) => "",
            (false, true) => ", not selected",
            (false, false) => ", not used",
        };
        writeln!(
            text,
            "{} (region {}{part}): run {}, perhaps {}, reuse {}{}",
            stage.stage,
            stage.region,
            stage.run,
            stage.if_changed,
            stage.reuse,
            if stage.unknown_partitions {
                ", partitions unknown"
            } else {
                ""
            }
        )
        .unwrap();
        for (action, reason, count) in &stage.reasons {
            writeln!(text, "  {action:?}: {reason} ({count})").unwrap();
        }
        if !stage.removed.is_empty() {
            writeln!(
                text,
                "  gone: {}",
                stage
                    .removed
                    .iter()
                    .map(|one| one.as_str())
                    .collect::<Vec<_>>()
                    .join(", ")
            )
            .unwrap();
        }
    }
    for off in &plan.switched_off {
        writeln!(text, "{} is off: {}", off.stage, off.reason).unwrap();
    }
    text
}

/// The plan, with the folder of the test left out.
fn plan_of(place: &Place, set: &[&str]) -> String {
    shown(&place.plan(set)).replace(&place.dir.path().display().to_string(), "DIR")
}

/// Checks one situation.
fn situation(name: &str, place: &Place, set: &[&str]) {
    insta::assert_snapshot!(name, plan_of(place, set));
}

#[test]
fn a_plan_says_what_runs_and_why() {
    let place = Place::new();
    situation("nothing_is_there", &place, &[]);
    place.run(&[]);
    situation("everything_is_there", &place, &[]);
    situation("another_setting", &place, &["least=5"]);

    place.shard("s03", "1\n2\n3");
    situation("a_changed_shard", &place, &[]);
    place.shard("s11", "4\n5");
    situation("a_changed_and_a_new_shard", &place, &[]);
    place.run(&[]);
    fs::remove_file(place.path("shards/s11.txt")).unwrap();
    situation("a_shard_that_is_gone", &place, &[]);
    place.run(&[]);

    fs::remove_dir_all(place.path("out")).unwrap();
    situation("an_export_that_is_gone", &place, &[]);
    place.run(&[]);
}

#[test]
fn a_plan_says_what_a_selection_leaves_out() {
    let mut place = Place::new();
    place.options.selection.until = Some("both".into());
    situation("until_a_stage", &place, &[]);
    place.run(&[]);
    place.options.selection.until = None;
    place.options.selection.only = vec!["dedup".into()];
    situation("only_a_stage", &place, &[]);
    place.options.selection.only = Vec::new();
    place.options.selection.from = Some("both".into());
    situation("from_a_stage", &place, &[]);
    place.options.selection.from = None;
    place.options.selection.force = vec!["clean".into()];
    situation("a_forced_stage", &place, &[]);
    place.options.selection.force = Vec::new();
    place.options.selection.partitions = vec!["s1?".into()];
    situation("some_partitions", &place, &[]);
}

#[test]
fn a_plan_says_why_other_wiring_runs_anew() {
    let place = Place::new();
    place.run(&[]);
    place.pipeline(&PIPELINE.replace("from: [dedup, clean.odd]", "from: [both, clean.odd]"));
    situation("another_input", &place, &[]);
    place.pipeline(&PIPELINE.replace("by: 10", "by: 20"));
    situation("a_setting_of_a_stage_before", &place, &[]);
    place.pipeline(
        &PIPELINE
            .replace("  probe:", "  tested:")
            .replace("probe.rows", "tested.rows"),
    );
    situation("a_renamed_stage", &place, &[]);
}
