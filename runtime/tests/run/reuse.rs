//! What runs again, what does not, and why.

use super::*;

#[test]
fn the_same_bytes_for_any_number_of_workers_and_any_channel() {
    let first = Place::new();
    first.run(&[]);
    assert_eq!(
        fs::read_to_string(first.path("out/rows.txt")).unwrap(),
        expected(&first, 3)
    );
    let bytes = first.bytes();
    assert!(bytes.len() > 40, "{}", bytes.len());
    for (workers, as_bytes, in_flight) in [
        (1, false, 1),
        (3, false, 2),
        (7, false, 100),
        (3, true, 4),
        (2, true, 1),
    ] {
        let mut place = Place::new();
        place.options.workers = Some(workers);
        place.options.as_bytes = as_bytes;
        place.options.in_flight = Some(in_flight);
        place.run(&[]);
        assert_eq!(place.bytes(), bytes, "{workers} workers, as bytes: {as_bytes}");
    }
}

#[test]
fn nothing_changed_runs_nothing() {
    let place = Place::new();
    assert!(place.plan(&[]).stages.iter().any(|stage| stage.run > 0));
    let summary = place.run(&[]);
    assert_eq!(summary.reused, 0);
    let plan = place.plan(&[]);
    assert!(plan.is_empty(), "{:?}", counts(&plan));
    let events = Events::default();
    let notes = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&notes);
    events.listen(move |event| {
        if let Event::Note { message } = event {
            heard.lock().unwrap().push(message.clone());
        }
    });
    fs::remove_file(place.path("work.log")).unwrap();
    let summary = run(&place.checked(&[]), &place.options, &events).unwrap();
    assert_eq!(summary.ran, 0);
    assert_eq!(place.worked(), BTreeMap::new());
    // Where its results are is told again.
    let out = format!("out: its files are unchanged in {}", place.path("out").display());
    assert_eq!(*notes.lock().unwrap(), [out]);
    // Rows and rejects of reused partitions still count.
    let clean = summary.stages.iter().find(|stage| stage.stage == "clean").unwrap();
    assert_eq!((clean.rows_in, clean.reused), (220, 11));
    assert!(clean.rejects[0].rows > 0);
}

#[test]
fn a_new_a_changed_and_a_removed_shard() {
    let place = Place::new();
    place.run(&[]);
    let text = fs::read_to_string(place.path("shards/s05.txt")).unwrap();
    // New rows that nothing else has: no decision on other shards changes.
    place.shard("s05", &format!("{text}\n1000"));
    place.shard("s11", "2000\n2002");
    let plan = place.plan(&[]);
    let scan = stage(&plan, "scan");
    assert_eq!((scan.run, scan.if_changed, scan.reuse), (2, 0, 10));
    let reason = |partition: &str| {
        scan.partitions
            .iter()
            .find(|one| one.partition.as_str() == partition)
            .unwrap()
            .reason
            .to_string()
    };
    assert_eq!(reason("s05"), "its source files changed");
    assert_eq!(reason("s11"), "new partition");
    let apply = stage(&plan, "dedup:apply");
    assert_eq!((apply.run, apply.if_changed, apply.reuse), (1, 11, 0));
    place.run(&[]);
    let worked = place.worked();
    assert_eq!(worked["scan"], ["s05", "s11"]);
    assert_eq!(worked["clean"], ["s05", "s11"]);
    assert_eq!(worked["probe"], ["s05", "s11"]);
    assert_eq!(worked["apply"], ["s05", "s11"]);
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        expected(&place, 3)
    );

    fs::remove_file(place.path("shards/s11.txt")).unwrap();
    let plan = place.plan(&[]);
    assert_eq!(stage(&plan, "scan").removed.len(), 1);
    assert_eq!(stage(&plan, "scan").run, 0);
    place.run(&[]);
    // The other decisions are the same, so no rows are written again.
    assert!(!place.worked().contains_key("apply"), "{:?}", place.worked());
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        expected(&place, 3)
    );
    // As a run that never knew of it.
    let fresh = Place::new();
    fresh.shard("s05", &format!("{text}\n1000"));
    fresh.run(&[]);
    let known = place.bytes();
    for (name, bytes) in fresh.bytes() {
        assert_eq!(known.get(&name), Some(&bytes), "{name}");
    }
}

#[test]
fn a_file_that_is_only_touched_changes_nothing() {
    let place = Place::new();
    place.run(&[]);
    let text = fs::read_to_string(place.path("shards/s05.txt")).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    place.shard("s05", &text);
    assert!(place.plan(&[]).is_empty());
}

#[test]
fn a_setting_changed_is_named_and_stops_where_the_bytes_are_the_same() {
    let place = Place::new();
    place.run(&[]);
    let plan = place.plan(&["least=4"]);
    let clean = stage(&plan, "clean");
    assert_eq!(clean.run, 11);
    assert_eq!(
        clean.reasons,
        [(Action::Run, "setting `least` changed 3 -> 4".to_string(), 11)]
    );
    assert_eq!(stage(&plan, "scan").run, 0);
    assert_eq!(stage(&plan, "probe").run, 0);
    place.run(&["least=4"]);
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        expected(&place, 4)
    );
    let worked = place.worked();
    // The source runs again to feed it; what is dear does not.
    assert_eq!(worked["scan"].len(), 11);
    assert!(!worked.contains_key("probe"));
    // Values of 3 went away, and they were odd: the even rows are the same bytes, so dedup had nothing to do.
    assert!(!worked.contains_key("apply"), "{worked:?}");
    // Back again: everything is still there, only the export is made again.
    let plan = place.plan(&[]);
    let running: Vec<&str> = plan
        .stages
        .iter()
        .filter(|stage| stage.run + stage.if_changed > 0)
        .map(|stage| stage.stage.as_str())
        .collect();
    assert_eq!(running, ["out"]);
}

#[test]
fn what_runs_lies_between_run_and_if_changed() {
    let place = Place::new();
    place.run(&[]);
    place.shard("s03", "1\n2\n3");
    let plan = place.plan(&[]);
    place.run(&[]);
    let mut worked = place.worked();
    // Groups of a decision that were read, which is not a stage.
    worked.remove("whole");
    for (stage, partitions) in worked {
        let planned = plan
            .stages
            .iter()
            .find(|planned| {
                planned.stage
                    == if stage == "apply" {
                        "dedup:apply".into()
                    } else {
                        stage.clone()
                    }
            })
            .unwrap();
        for one in &planned.partitions {
            let ran = partitions.iter().any(|partition| partition == one.partition.as_str());
            match one.action {
                Action::Run => assert!(ran, "{stage} {}", one.partition),
                Action::Reuse => assert!(!ran, "{stage} {}", one.partition),
                Action::IfChanged => {}
            }
        }
    }
}

#[test]
fn stage_names_and_groups_do_not_enter_keys() {
    let place = Place::new();
    place.run(&[]);
    place.pipeline(&PIPELINE.replace("scan", "read").replace("clean", "tidy"));
    // Names of stages are in the file of rejects, so that alone is made again.
    let plan = place.plan(&[]);
    let running: Vec<&str> = plan
        .stages
        .iter()
        .filter(|stage| stage.run > 0)
        .map(|stage| stage.stage.as_str())
        .collect();
    assert_eq!(running, ["out"]);
    fs::write(place.path("inner.yaml"), PIPELINE).unwrap();
    place.pipeline(&format!(
        "flow: 1\nparams:\n  shards: {{required: true}}\n  noted: {{required: true}}\n  out: {{required: true}}\ninclude:\n  all: {{pipeline: {}, params: {{shards: \"${{shards}}\", noted: \"${{noted}}\", out: \"${{out}}\"}}}}\nstages: {{}}\n",
        place.path("inner.yaml").display()
    ));
    let plan = place.plan(&[]);
    assert_eq!(stage(&plan, "all/clean").reuse, 11);
    assert_eq!(stage(&plan, "all/dedup:apply").reuse, 11);
}

#[test]
fn swapped_inputs_are_another_recipe() {
    let place = Place::new();
    place.run(&[]);
    place.pipeline(&PIPELINE.replace("{left: clean, right: probe.rows}", "{right: clean, left: probe.rows}"));
    let plan = place.plan(&[]);
    assert_eq!(stage(&plan, "both").run, 11);
    assert_eq!(stage(&plan, "clean").run, 0);
}

#[test]
fn an_export_that_was_touched_is_made_again() {
    let place = Place::new();
    place.run(&[]);
    let whole = fs::read(place.path("out/rows.txt")).unwrap();
    fs::write(place.path("out/rows.txt"), "somebody was here").unwrap();
    let plan = place.plan(&[]);
    assert_eq!(stage(&plan, "out").run, 1);
    assert_eq!(place.run(&[]).ran, 1);
    assert_eq!(fs::read(place.path("out/rows.txt")).unwrap(), whole);
}

#[test]
fn only_from_until_and_force() {
    let mut place = Place::new();
    place.options.selection.until = Some("clean".into());
    place.run(&[]);
    assert!(!place.worked().contains_key("apply") && !place.path("out").exists());
    place.options.selection.until = None;
    place.options.selection.only = vec!["dedup".into()];
    let error = place.try_run(&[]).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("has no artifact yet"), "{error}");
    place.options.selection.only = Vec::new();
    place.run(&[]);
    // A stale artifact is taken as it is.
    place.shard("s04", "4");
    place.options.selection.only = vec!["dedup".into()];
    let events = Events::default();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let listener = Arc::clone(&seen);
    events.listen(move |event| listener.lock().unwrap().push(event.clone()));
    let summary = run(&place.checked(&[]), &place.options, &events).unwrap();
    assert_eq!(summary.ran, 0);
    let warned = seen
        .lock()
        .unwrap()
        .iter()
        .any(|event| matches!(event, Event::Warning { message, .. } if message.contains("stored output is stale")));
    assert!(warned);
    place.options.selection.only = Vec::new();
    place.options.selection.from = Some("clean".into());
    place.run(&[]);
    assert_eq!(place.worked()["clean"], ["s04"]);
    assert_eq!(place.worked()["scan"], ["s04"]);
    place.options.selection.from = None;
    place.run(&[]);
    assert_eq!(place.worked()["probe"], ["s04"]);
    place.options.selection.force = vec!["probe".into()];
    let before = place.bytes();
    place.run(&[]);
    assert_eq!(place.worked()["probe"].len(), 11);
    assert_eq!(place.bytes().len(), before.len());
    place.options.selection.force = Vec::new();
    (place.options.selection.from, place.options.selection.until) = (Some("dedup".into()), Some("clean".into()));
    let error = place.try_run(&[]).unwrap_err();
    assert_eq!(
        (error.exit_code(), error.to_string().as_str()),
        (2, "no stage is selected: `clean` does not need `dedup`")
    );
    (place.options.selection.from, place.options.selection.until) = (None, None);
    place.options.selection.force = vec!["prob".into()];
    let error = plan(&place.checked(&[]), &place.options).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.help().unwrap().contains("probe"), "{error:?}");
}

/// A run does not list results of another run's settings as its own.
#[test]
fn stages_after_the_last_selected_one_are_listed_only_where_they_are_current() {
    let mut place = Place::new();
    place.run(&[]);
    let decided = |place: &Place| {
        let store = Store::open(&Storage::default(), &place.options.state, Access::Read).unwrap();
        let last = store.runs().unwrap().pop().unwrap();
        store
            .run_snapshots(&last)
            .unwrap()
            .unwrap()
            .of("dedup:decide")
            .is_some()
    };
    place.options.selection.until = Some("clean".into());
    place.run(&[]);
    assert!(decided(&place));
    let events = Events::default();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let listener = Arc::clone(&seen);
    events.listen(move |event| listener.lock().unwrap().push(event.clone()));
    run(&place.checked(&["least=9"]), &place.options, &events).unwrap();
    assert!(!decided(&place));
    let warnings = seen
        .lock()
        .unwrap()
        .iter()
        .filter(|event| matches!(event, Event::Warning { .. }))
        .count();
    assert_eq!(warnings, 0);
    // What the first run stored is reused.
    place.options.selection.until = None;
    assert_eq!(place.run(&[]).ran, 0);
}

#[test]
fn reasons_look_back_past_runs_about_some_partitions() {
    let mut place = Place::new();
    place.run(&[]);
    place.pipeline(&PIPELINE.replace("dedup, from: both, with: {", "dedup, from: both, with: {modulo: 7, "));
    // They plan with the setting, and do not decide.
    place.options.selection.partitions = vec!["s01".into()];
    for _ in 0..12 {
        place.run(&[]);
    }
    place.options.selection.partitions = Vec::new();
    let plan = place.plan(&[]);
    assert_eq!(
        stage(&plan, "dedup:decide").reasons,
        [(Action::Run, "setting `modulo` changed 0 -> 7".to_string(), 1)]
    );
}

#[test]
fn only_needs_no_source_and_looks_back_past_failed_runs() {
    let mut place = Place::new();
    place.run(&[]);
    let rows = fs::read(place.path("out/rows.txt")).unwrap();
    // A run that fails leaves a plan of a recipe that has no records.
    let failing = PIPELINE.replace("with: {least: ", "with: {by: 3, fail_at: 21, least: ");
    place.pipeline(&failing);
    place.options.workers = Some(1);
    place.options.in_flight = Some(1);
    assert_eq!(place.try_run(&[]).unwrap_err().exit_code(), 1);
    place.pipeline(&PIPELINE.replace("with: {least: ", "with: {by: 4, least: "));
    assert!(
        stage(&place.plan(&[]), "clean").reasons[0]
            .1
            .starts_with("setting `by` changed"),
        "{:?}",
        stage(&place.plan(&[]), "clean").reasons
    );
    fs::rename(place.path("shards"), place.path("gone")).unwrap();
    fs::remove_dir_all(place.path("out")).unwrap();
    place.pipeline(PIPELINE);
    place.options.selection.only = vec!["out".into()];
    place.run(&[]);
    assert_eq!(fs::read(place.path("out/rows.txt")).unwrap(), rows);
}
