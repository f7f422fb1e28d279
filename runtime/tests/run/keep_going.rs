//! Runs that go on after failures.

use std::collections::BTreeSet;

use super::*;

/// The pipeline with other settings of `clean`.
fn with(settings: &str) -> String {
    PIPELINE.replace(
        "clean: {uses: toy.double, from: scan, with: {",
        &format!("clean: {{uses: toy.double, from: scan, with: {{{settings}, "),
    )
}

/// Stages and partitions.
type Failed = BTreeSet<(String, String)>;
/// By stage, the partitions that were left out; none for all.
type LeftOut = BTreeMap<String, Vec<String>>;

/// What failed, and what was left out.
fn several(error: RunError) -> (Failed, LeftOut) {
    assert_eq!(error.exit_code(), 1);
    let RunError::Several { failures, left_out } = error else {
        panic!("{error:?}")
    };
    let failures: Vec<(String, String)> = failures
        .iter()
        .map(|failure| match failure {
            RunError::Stage { stage, partition, .. } => {
                let partition = partition.as_ref().map_or(String::new(), |one| one.to_string());
                (stage.clone(), partition)
            }
            other => panic!("{other:?}"),
        })
        .collect();
    let count = failures.len();
    let failures: BTreeSet<(String, String)> = failures.into_iter().collect();
    assert_eq!(failures.len(), count, "a failure was listed twice");
    let left_out = left_out.into_iter().map(|one| {
        let partitions = one.partitions.iter().map(ToString::to_string).collect();
        (one.stage, partitions)
    });
    (failures, left_out.collect())
}

fn pairs(of: &[(&str, &str)]) -> BTreeSet<(String, String)> {
    of.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect()
}

#[test]
fn other_partitions_go_on_and_what_needs_all_is_left_out() {
    for (workers, settings) in [(1, "fail_at: 777"), (3, "fail_at: 777"), (2, "panic_at: 777")] {
        let mut place = Place::new();
        place.options.workers = Some(workers);
        place.options.keep_going = true;
        place.shard("s02", "777");
        place.shard("s07", "4\n6\n777\n8");
        place.pipeline(&with(settings));
        let events = Events::default();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let listener = Arc::clone(&seen);
        events.listen(move |event| listener.lock().unwrap().push(event.clone()));
        let error = run(&place.checked(&[]), &place.options, &events).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("2 failures:\n  stage `clean`, partition s0"), "{text}");
        assert!(text.contains("`both`, partitions s02, s07"), "{text}");
        let (failures, left_out) = several(error);
        assert_eq!(failures, pairs(&[("clean", "s02"), ("clean", "s07")]));
        let both = vec!["s02".to_string(), "s07".to_string()];
        let whole = Vec::new();
        let expected_left_out = [
            ("both", &both),
            ("dedup:keys", &both),
            ("dedup:decide", &whole),
            ("dedup:apply", &whole),
            ("out", &whole),
        ];
        let expected_left_out: BTreeMap<String, Vec<String>> = expected_left_out
            .into_iter()
            .map(|(stage, partitions)| (stage.to_string(), partitions.clone()))
            .collect();
        assert_eq!(left_out, expected_left_out);
        let seen = seen.lock().unwrap();
        let failed = seen.iter().filter(|event| matches!(event, Event::RunFailed { .. }));
        assert_eq!(failed.count(), 2);
        // A stage that begins again does not count as reused what it made.
        for event in seen.iter() {
            if let Event::StageStarted { stage, reused, .. } = event {
                assert_eq!(*reused, 0, "{stage}");
            }
        }
        let outcome = seen.iter().find_map(|event| match event {
            Event::RunFinished { outcome, .. } => Some(outcome.as_str()),
            _ => None,
        });
        assert_eq!(outcome, Some("failed"));
        // The last word on each stage.
        let mut ended = BTreeMap::new();
        for event in seen.iter() {
            if let Event::StageFinished {
                stage,
                outcome,
                failures,
                ..
            } = event
            {
                let failed: BTreeSet<_> = failures.iter().map(|one| one.partition.clone().unwrap()).collect();
                assert!(failures.iter().all(|one| one.message.contains("777")), "{failures:?}");
                ended.insert(stage.clone(), (*outcome, failed.into_iter().collect::<Vec<_>>()));
            }
        }
        assert_eq!(ended["clean"], (StageOutcome::Failed, both.clone()));
        assert_eq!(ended["both"], (StageOutcome::Incomplete, Vec::new()));
        assert_eq!(ended["scan"], (StageOutcome::Done, Vec::new()));
        assert!(!ended.contains_key("out"));
        let worked = place.worked();
        assert!(!worked.contains_key("apply") && !place.path("out").exists());
        assert_eq!(worked["keys"].len(), 9);
        assert!(!worked["keys"].contains(&"s02".to_string()));
        let probed: BTreeSet<&String> = worked["probe"].iter().collect();
        assert_eq!(probed.len(), 11);
        // Mended, the rest alone runs.
        place.shard("s02", "6");
        place.shard("s07", "4\n6\n8");
        place.options.keep_going = false;
        place.run(&[]);
        assert_eq!(place.worked()["clean"], ["s02", "s07"]);
        assert_eq!(place.worked()["keys"], ["s02", "s07"]);
        assert_eq!(
            fs::read_to_string(place.path("out/rows.txt")).unwrap(),
            expected(&place, 3)
        );
    }
}

#[test]
fn a_stage_that_does_not_depend_on_a_failure_ends() {
    let mut place = Place::new();
    place.options.keep_going = true;
    place.shard("s07", "777");
    place.pipeline(
        r#"
flow: 1
params:
  shards: {required: true}
  out: {required: true}
stages:
  scan: {uses: toy.count, with: {folder: "${shards}"}}
  bad: {uses: toy.double, from: scan, with: {fail_at: 777}}
  good: {uses: toy.double, from: scan, with: {by: 3}}
  after_bad: {uses: toy.write, from: bad, with: {folder: "${out}/bad"}}
  after_good: {uses: toy.write, from: good, with: {folder: "${out}/good"}}
"#,
    );
    let (failures, left_out) = several(place.try_run(&[]).unwrap_err());
    assert_eq!(failures, pairs(&[("bad", "s07")]));
    assert_eq!(left_out.keys().collect::<Vec<_>>(), ["after_bad"]);
    assert!(place.path("out/good/rows.txt").exists() && !place.path("out/bad").exists());
    // Without the option the first failure is the end.
    place.options.keep_going = false;
    assert!(matches!(place.try_run(&[]).unwrap_err(), RunError::Stage { .. }));
}

#[test]
fn a_stage_that_fails_as_a_whole_is_left_out_as_a_whole() {
    let mut place = Place::new();
    place.options.keep_going = true;
    place.shard("s01", "x\ny\nz");
    // In the middle of the stage (a count), and when it is done (a share).
    for limit in ["max_rejects: 2", "max_rejects: 0.1%"] {
        place.pipeline(&PIPELINE.replace("scan: {uses: toy.count,", &format!("scan: {{uses: toy.count, {limit},")));
        let (failures, left_out) = several(place.try_run(&[]).unwrap_err());
        assert_eq!(failures, pairs(&[("scan", "")]));
        for name in ["both", "dedup:decide", "out"] {
            assert!(left_out.contains_key(name), "{limit}: {left_out:?}");
        }
        assert!(!place.path("out").exists());
    }
    place.pipeline(PIPELINE);
    place.run(&[]);
}

/// An error of the state directory is not a stage's failure: the run ends with this error, whatever failed before.
#[test]
fn a_state_directory_that_cannot_be_written_ends_the_run() {
    let breaking = "with: {breaks: \"${state}\"}";
    for (stages, before) in [
        (
            "bad: {uses: toy.double, from: scan, BREAKING}
  out: {uses: toy.write, from: bad, with: {folder: \"${out}/bad\"}}",
            false,
        ),
        (
            "failing: {uses: toy.double, from: scan, with: {fail_at: 777}}
  dedup: {uses: toy.dedup, from: scan}
  bad: {uses: toy.double, from: dedup, BREAKING}
  out: {uses: toy.write, from: bad, with: {folder: \"${out}/bad\"}}
  other: {uses: toy.write, from: failing, with: {folder: \"${out}/other\"}}",
            true,
        ),
    ] {
        let mut place = Place::new();
        place.options.keep_going = true;
        place.options.workers = Some(1);
        place.shard("s07", "777\n4");
        place.pipeline(&format!(
            "
flow: 1
params:
  shards: {{required: true}}
  out: {{required: true}}
  state: {{required: true}}
stages:
  scan: {{uses: toy.count, with: {{folder: \"${{shards}}\"}}}}
  {}
",
            stages.replace("BREAKING", breaking)
        ));
        let events = Events::default();
        let warned = Arc::new(Mutex::new(Vec::new()));
        let listener = Arc::clone(&warned);
        events.listen(move |event| {
            if let Event::Warning { stage, .. } = event {
                listener.lock().unwrap().push(stage.clone());
            }
        });
        let state = format!("state={}", place.path("state").display());
        let error = run(&place.checked(&[&state]), &place.options, &events).unwrap_err();
        assert!(matches!(&error, RunError::Store(_)), "{error:?}");
        assert!(error.to_string().contains("/data"), "{error}");
        let warned = warned.lock().unwrap();
        let noted = warned.iter().any(|stage| stage.as_deref() == Some("failing"));
        assert_eq!(noted, before, "{warned:?}");
        // It was never taken for a failure of the stage.
        assert!(
            !warned.iter().any(|stage| stage.as_deref() == Some("bad")),
            "{warned:?}"
        );
    }
}
