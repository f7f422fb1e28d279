//! Whole runs of toy pipelines: results, reuse, failure, logs.

mod toys;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use flow_runtime::event::{Event, Events};
use flow_runtime::plan::{Action, Options, Plan};
use flow_runtime::registry::Registry;
use flow_runtime::run::{RunError, RunSummary, plan, run};
use flow_runtime::spec::{Checked, Overrides, check, load};
use flow_runtime::store::{Access, Store};

/// A folder with shards, a pipeline and a state directory.
struct Place {
    dir: tempfile::TempDir,
    options: Options,
}

const PIPELINE: &str = r#"
flow: 1
params:
  shards: {required: true}
  noted: {required: true}
  out: {required: true}
  least: 3
stages:
  scan: {uses: toy.count, with: {folder: "${shards}", noted: "${noted}"}}
  probe: {uses: toy.double, from: scan, with: {by: 10, dear: true, aside: true, noted: "${noted}"}}
  clean: {uses: toy.double, from: scan, with: {least: "${least}", noted: "${noted}"}}
  both: {uses: toy.join, from: {left: clean, right: probe.rows}}
  dedup: {uses: toy.dedup, from: both, with: {noted: "${noted}"}}
  out: {uses: toy.write, from: [dedup, clean.odd], with: {folder: "${out}"}}
"#;

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("shards")).unwrap();
        let mut options = Options::new(dir.path().join("state"));
        options.workers = Some(2);
        let place = Place { dir, options };
        place.pipeline(PIPELINE);
        for shard in 0..11 {
            let lines: Vec<String> = (0..20).map(|row| ((row * 7 + shard * 3) % 40).to_string()).collect();
            place.shard(&format!("s{shard:02}"), &lines.join("\n"));
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn pipeline(&self, text: &str) {
        fs::write(self.path("pipeline.yaml"), text).unwrap();
    }

    fn shard(&self, name: &str, text: &str) {
        fs::write(self.path("shards").join(format!("{name}.txt")), text).unwrap();
    }

    fn checked(&self, set: &[&str]) -> Arc<Checked> {
        let mut given: Vec<String> = set.iter().map(|one| one.to_string()).collect();
        for name in ["shards", "out", "noted"] {
            if fs::read_to_string(self.path("pipeline.yaml"))
                .unwrap()
                .contains(&format!("  {name}: "))
            {
                let path = if name == "noted" {
                    self.dir.path().to_path_buf()
                } else {
                    self.path(name)
                };
                given.push(format!("{name}={}", path.display()));
            }
        }
        let overrides = Overrides {
            set: given,
            ..Overrides::default()
        };
        let pipeline = load(&self.path("pipeline.yaml"), &overrides).unwrap_or_else(|found| panic!("{found:?}"));
        let checked = check(pipeline, &Registry::new(toys::kinds()).unwrap());
        Arc::new(checked.unwrap_or_else(|found| panic!("{found:?}")))
    }

    fn plan(&self, set: &[&str]) -> Plan {
        plan(&self.checked(set), &self.options).unwrap()
    }

    fn try_run(&self, set: &[&str]) -> Result<RunSummary, RunError> {
        run(&self.checked(set), &self.options, &Events::default())
    }

    fn run(&self, set: &[&str]) -> RunSummary {
        let _ = fs::remove_file(self.path("work.log"));
        self.try_run(set).unwrap_or_else(|error| panic!("{error} {error:?}"))
    }

    /// What was worked on in the last run, by stage.
    fn worked(&self) -> BTreeMap<String, Vec<String>> {
        let text = fs::read_to_string(self.path("work.log")).unwrap_or_default();
        let mut worked: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for line in text.lines() {
            let (stage, partition) = line.split_once(' ').unwrap();
            worked.entry(stage.into()).or_default().push(partition.into());
        }
        worked.values_mut().for_each(|partitions| partitions.sort());
        worked
    }

    /// Every data file of the store, and every file that was exported, with its bytes.
    fn bytes(&self) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        for recipe in fs::read_dir(self.path("state/artifacts")).unwrap() {
            let recipe = recipe.unwrap().path();
            for file in fs::read_dir(recipe.join("data")).unwrap() {
                let file = file.unwrap().path();
                let name = file.strip_prefix(self.path("state")).unwrap().display().to_string();
                found.insert(name, fs::read(&file).unwrap());
            }
        }
        for name in ["rows.txt", "rejects.txt"] {
            if let Ok(bytes) = fs::read(self.path("out").join(name)) {
                found.insert(name.into(), bytes);
            }
        }
        found
    }
}

fn counts(plan: &Plan) -> Vec<(&str, u64, u64, u64)> {
    plan.stages
        .iter()
        .map(|stage| (stage.stage.as_str(), stage.run, stage.if_changed, stage.reuse))
        .collect()
}

fn stage<'a>(plan: &'a Plan, name: &str) -> &'a flow_runtime::plan::StagePlan {
    plan.stages.iter().find(|stage| stage.stage == name).unwrap()
}

/// What the pipeline should give, computed without the runtime.
fn expected(place: &Place, least: i64) -> String {
    let mut shards: Vec<(String, Vec<i64>)> = Vec::new();
    for file in fs::read_dir(place.path("shards")).unwrap() {
        let path = file.unwrap().path();
        let values = fs::read_to_string(&path)
            .unwrap()
            .lines()
            .map(|line| line.parse().unwrap())
            .collect();
        shards.push((path.file_stem().unwrap().to_string_lossy().into_owned(), values));
    }
    shards.sort();
    let mut seen = std::collections::BTreeSet::new();
    let (mut text, mut odd) = (String::new(), String::new());
    for (shard, values) in &shards {
        for (row, value) in values.iter().enumerate().filter(|(_, value)| **value >= least) {
            if value % 2 == 0 {
                if seen.insert(value) {
                    text.push_str(&format!("{shard} {row} {}\n", value * 12));
                }
            } else {
                odd.push_str(&format!("{shard} {row} {}\n", value * 2));
            }
        }
    }
    text + &odd
}

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
    assert!(place.plan(&[]).would_run());
    let summary = place.run(&[]);
    assert_eq!(summary.reused, 0);
    let plan = place.plan(&[]);
    assert!(plan.is_empty(), "{:?}", counts(&plan));
    let summary = place.run(&[]);
    assert_eq!(summary.ran, 0);
    assert_eq!(place.worked(), BTreeMap::new());
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
            .clone()
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
    for (stage, partitions) in place.worked() {
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
    // Names of stages stand in the file of rejects, so that alone is made again.
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
fn regions_and_what_is_kept() {
    let place = Place::new();
    let shown = |plan: &Plan| -> Vec<String> {
        plan.stages
            .iter()
            .map(|stage| format!("{} {} {:?}", stage.region, stage.stage, stage.stored))
            .collect()
    };
    insta::assert_debug_snapshot!(shown(&place.plan(&[])), @r#"
    [
        "0 scan []",
        "0 probe [\"rows\", \"odd\"]",
        "0 clean [\"rows\", \"odd\"]",
        "1 both [\"rows\"]",
        "1 dedup:keys [\"keys\"]",
        "2 dedup:decide [\"decisions\", \"digests\"]",
        "3 dedup:apply [\"rows\"]",
        "4 out []",
    ]
    "#);
    let log = training(&place);
    insta::assert_debug_snapshot!(shown(&place.plan(&[&log])), @r#"
    [
        "0 scan [\"rows\"]",
        "1 steps []",
        "1 train [\"result\"]",
        "2 after [\"rows\", \"odd\"]",
    ]
    "#);
    // A log that waits for more than its feed does: the feed waits with it, and nothing of it is stored.
    place.pipeline(&TRAINING.replace(
        "train: {uses: toy.train, from: steps,",
        "late: {uses: toy.dedup, from: scan}\n  train: {uses: toy.train, from: [steps, late],",
    ));
    insta::assert_debug_snapshot!(shown(&place.plan(&[&log])), @r#"
    [
        "0 scan [\"rows\"]",
        "3 steps []",
        "0 late:keys [\"keys\"]",
        "1 late:decide [\"decisions\", \"digests\"]",
        "2 late:apply [\"rows\"]",
        "3 train [\"result\"]",
        "4 after [\"rows\", \"odd\"]",
    ]
    "#);
    // Nothing else may hang on the stream of a log.
    place.pipeline(&TRAINING.replace(
        "after: {uses: toy.double, from: train}",
        "after: {uses: toy.double, from: steps}",
    ));
    let error = plan(&place.checked(&[&log]), &place.options).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(
        error
            .to_string()
            .contains("`after` hangs on the stream that feeds `train`"),
        "{error}"
    );
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

fn failing(settings: &str, workers: usize, as_bytes: bool) -> (RunError, Duration, Place) {
    let mut place = Place::new();
    place.options.workers = Some(workers);
    place.options.as_bytes = as_bytes;
    place.shard("s07", "4\n6\n777\n8");
    place.pipeline(&PIPELINE.replace(
        "clean: {uses: toy.double, from: scan, with: {",
        &format!("clean: {{uses: toy.double, from: scan, with: {{{settings}, "),
    ));
    let started = Instant::now();
    let error = place.try_run(&[]).unwrap_err();
    (error, started.elapsed(), place)
}

#[test]
fn a_failure_ends_the_run_with_names_and_hangs_nothing() {
    for (workers, as_bytes) in [(1, false), (3, false), (3, true)] {
        for (settings, said) in [
            ("fail_at: 777", "777 is not allowed"),
            ("panic_at: 777", "panicked: planted at 777"),
            ("lose: 777", "4 in, but 3 out + 0 rejected + 0 merged = 3"),
        ] {
            let (error, took, place) = failing(settings, workers, as_bytes);
            assert!(took < Duration::from_secs(5), "{took:?}");
            assert_eq!(error.exit_code(), 1);
            let RunError::Stage { stage, partition, .. } = &error else {
                panic!("{error:?}")
            };
            assert_eq!((stage.as_str(), partition.as_ref().unwrap().as_str()), ("clean", "s07"));
            assert!(error.to_string().contains(said), "{error}");
            // The lock is free again, and what was whole is not done again.
            place.shard("s07", "4\n6\n8");
            let summary = place.run(&[]);
            assert_eq!(
                fs::read_to_string(place.path("out/rows.txt")).unwrap(),
                expected(&place, 3)
            );
            assert!(summary.ran > 0);
        }
    }
}

#[test]
fn a_failure_names_the_row() {
    let (error, _, _) = failing("fail_at: 777", 2, false);
    assert_eq!(
        error.to_string(),
        "stage `clean`, partition s07, row 2: 777 is not allowed"
    );
}

#[test]
fn reject_limits_look_at_faults_alone() {
    let place = Place::new();
    place.shard("s01", "1\nx\n3\ny");
    place.shard("s02", "broken");
    place.run(&[]);
    let limit = |limit: &str| {
        place.pipeline(&PIPELINE.replace("scan: {uses: toy.count,", &format!("scan: {{uses: toy.count, {limit},")))
    };
    limit("max_rejects: 3");
    place.run(&[]);
    for text in ["max_rejects: 2", "max_rejects: 1%"] {
        limit(text);
        let error = place.try_run(&[]).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert!(error.to_string().contains("3 rejects of class fault"), "{error}");
        assert!(error.to_string().contains("2 not_a_number, 1 unreadable"), "{error}");
    }
    limit("max_rejects: 2, max_rejects_action: warn");
    assert_eq!(place.run(&[]).past_reject_limit, ["scan"]);
    let fresh = Place::new();
    fresh.shard("s01", "x\ny\nz");
    fresh.pipeline(&PIPELINE.replace("scan: {uses: toy.count,", "scan: {uses: toy.count, max_rejects: 2,"));
    let error = fresh.try_run(&[]).unwrap_err();
    assert!(error.to_string().contains("max_rejects is 2"), "{error}");
}

#[test]
fn only_from_until_and_force() {
    let mut place = Place::new();
    place.options.until = Some("clean".into());
    place.run(&[]);
    assert!(!place.worked().contains_key("apply") && !place.path("out").exists());
    place.options.until = None;
    place.options.only = vec!["dedup".into()];
    let error = place.try_run(&[]).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("has no artifact yet"), "{error}");
    place.options.only = Vec::new();
    place.run(&[]);
    // A stale artifact is taken as it stands.
    place.shard("s04", "4");
    place.options.only = vec!["dedup".into()];
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
        .any(|event| matches!(event, Event::Warning { message, .. } if message.contains("as they stand")));
    assert!(warned);
    place.options.only = Vec::new();
    place.options.from = Some("clean".into());
    place.run(&[]);
    assert_eq!(place.worked()["clean"], ["s04"]);
    assert_eq!(place.worked()["scan"], ["s04"]);
    place.options.from = None;
    place.run(&[]);
    assert_eq!(place.worked()["probe"], ["s04"]);
    place.options.force = vec!["probe".into()];
    let before = place.bytes();
    place.run(&[]);
    assert_eq!(place.worked()["probe"].len(), 11);
    assert_eq!(place.bytes().len(), before.len());
    place.options.force = vec!["prob".into()];
    let error = plan(&place.checked(&[]), &place.options).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.help().unwrap().contains("probe"), "{error:?}");
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
    place.options.only = vec!["out".into()];
    place.run(&[]);
    assert_eq!(fs::read(place.path("out/rows.txt")).unwrap(), rows);
}

#[test]
fn in_flight_is_bounded() {
    for in_flight in [1, 3] {
        let mut place = Place::new();
        place.options.workers = Some(3);
        place.options.in_flight = Some(in_flight);
        place.run(&[]);
        let text = fs::read_to_string(place.path("work.log")).unwrap();
        // In the region of the source: what was read and is not yet complete in `clean`.
        let (mut ahead, mut most) = (0usize, 0);
        for line in text.lines() {
            match line.split_once(' ').unwrap().0 {
                "scan" => ahead += 1,
                "clean" => ahead -= 1,
                _ => {}
            }
            most = most.max(ahead);
        }
        assert!(most <= in_flight, "{most} in flight, {in_flight} allowed");
    }
}

#[test]
fn twins_and_inputs_of_other_partitions() {
    let place = Place::new();
    fs::create_dir(place.path("other")).unwrap();
    fs::write(place.path("other/s03.txt"), "100\n200").unwrap();
    fs::write(place.path("other/z.txt"), "1").unwrap();
    let pipeline = |slow: u64| {
        format!(
            r#"
flow: 1
params:
  shards: {{required: true}}
  noted: {{required: true}}
  out: {{required: true}}
stages:
  scan: {{uses: toy.count, with: {{folder: "${{shards}}", noted: "${{noted}}"}}}}
  other: {{uses: toy.count, with: {{folder: {}, slow: {slow}}}}}
  a: {{uses: toy.double, from: scan}}
  b: {{uses: toy.double, from: scan}}
  twins: {{uses: toy.join, from: {{left: a, right: b}}}}
  both: {{uses: toy.join, from: {{left: twins, right: other}}}}
  alone: {{uses: toy.double, from: twins}}
  out: {{uses: toy.write, from: {{a: both, b: alone, c: alone.odd}}, with: {{folder: "${{out}}"}}}}
"#,
            place.path("other").display()
        )
    };
    place.pipeline(&pipeline(0));
    place.run(&[]);
    let text = fs::read_to_string(place.path("out/rows.txt")).unwrap();
    let values: Vec<i64> = fs::read_to_string(place.path("shards/s03.txt"))
        .unwrap()
        .lines()
        .map(|line| line.parse().unwrap())
        .collect();
    for (row, value) in values.iter().enumerate().filter(|(_, value)| *value % 2 == 0) {
        let other = [100, 200].get(row).unwrap_or(&0);
        assert!(
            text.contains(&format!("s03 {row} {}\n", value * 4 + other)),
            "{row} {value}"
        );
        assert!(text.contains(&format!("s03 {row} {}\n", value * 8)), "{row} {value}");
    }
    // A source that lags behind does not make the partitions of others look left out.
    fs::remove_dir_all(place.path("state")).unwrap();
    fs::remove_dir_all(place.path("out")).unwrap();
    place.pipeline(&pipeline(50));
    place.run(&[]);
    assert_eq!(fs::read_to_string(place.path("out/rows.txt")).unwrap(), text);
    assert!(place.plan(&[]).is_empty(), "{:?}", counts(&place.plan(&[])));
}

#[test]
fn a_second_run_on_one_state_directory_is_refused() {
    let place = Place::new();
    let held = Store::open(&place.options.state, Access::Run { run_id: "other".into() }).unwrap();
    let error = place.try_run(&[]).unwrap_err();
    assert_eq!(error.exit_code(), 3);
    assert!(error.to_string().contains("run other"), "{error}");
    drop(held);
    place.run(&[]);
}

const TRAINING: &str = r#"
flow: 1
params:
  shards: {required: true}
  noted: {required: true}
  log: {required: true}
  rate: 1
  fail_at: null
  slow: 0
stages:
  scan: {uses: toy.count, with: {folder: "${shards}"}}
  steps: {uses: toy.steps, from: scan, with: {steps: 40, noted: "${noted}"}}
  train: {uses: toy.train, from: steps, with: {log: "${log}", steps: 40, rate: "${rate}", fail_at: "${fail_at}", slow: "${slow}"}}
  after: {uses: toy.double, from: train}
"#;

fn training(place: &Place) -> String {
    place.pipeline(TRAINING);
    format!("log={}", place.path("train.log").display())
}

fn log_of(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

#[test]
fn a_log_goes_on_where_it_stood() {
    for workers in [1, 3] {
        let mut place = Place::new();
        place.options.workers = Some(workers);
        place.options.as_bytes = workers == 3;
        let log = training(&place);
        fs::write(place.path("train.log"), "7 1000 1").unwrap();
        let summary = place.run(&[&log]);
        // Steps 7 to 39 gave their number and the 220 rows of the input.
        assert_eq!(
            log_of(&place.path("train.log")),
            format!("40 {} 1", 1000 + (7..40).map(|step| step + 220).sum::<i64>())
        );
        assert_eq!(place.worked()["steps"].len(), 33);
        assert_eq!(
            summary
                .stages
                .iter()
                .find(|stage| stage.stage == "after")
                .unwrap()
                .rows_in,
            2
        );
        assert!(place.plan(&[&log]).is_empty(), "{:?}", counts(&place.plan(&[&log])));
        assert_eq!(place.run(&[&log]).ran, 0);
        let error = place.try_run(&[&log, "rate=2"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert_eq!(error.to_string(), "stage `train`: the rate changed");
    }
}

#[test]
fn a_log_that_fails_ends_the_run() {
    for workers in [1, 3] {
        let mut place = Place::new();
        place.options.workers = Some(workers);
        let log = training(&place);
        let started = Instant::now();
        let error = place.try_run(&[&log, "fail_at=11"]).unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(5));
        assert!(error.to_string().contains("step 11 exploded"), "{error}");
        // Loading ran ahead, but not far.
        assert!(place.worked()["steps"].len() < 40);
    }
}

#[test]
fn many_partitions_plan_fast() {
    let place = Place::new();
    for shard in 11..2000 {
        place.shard(&format!("s{shard:04}"), "1\n2");
    }
    place.run(&[]);
    let started = Instant::now();
    assert!(place.plan(&[]).is_empty());
    let took = started.elapsed();
    eprintln!("planned 2,000 partitions in {took:?}");
    assert!(took < Duration::from_secs(2), "{took:?}");
}

// --- runs that are killed or told to stop, in a process of their own -----------------------------------------

/// The body of the child process: runs the pipeline in the folder that the environment names.
#[test]
#[ignore = "the child of other tests"]
fn child() {
    let Ok(folder) = std::env::var("FLOW_TEST_CHILD") else {
        return;
    };
    let folder = PathBuf::from(folder);
    let set = std::env::var("FLOW_TEST_CHILD_SET").unwrap_or_default();
    let overrides = Overrides {
        set: set.split_whitespace().map(str::to_string).collect(),
        ..Overrides::default()
    };
    let pipeline = load(&folder.join("pipeline.yaml"), &overrides).unwrap_or_else(|found| panic!("{found:?}"));
    let checked =
        Arc::new(check(pipeline, &Registry::new(toys::kinds()).unwrap()).unwrap_or_else(|found| panic!("{found:?}")));
    let mut options = Options::new(folder.join("state"));
    options.workers = Some(2);
    options.signals = true;
    let code = match run(&checked, &options, &Events::default()) {
        Ok(_) => 0,
        Err(error) => {
            eprintln!("{error}");
            error.exit_code()
        }
    };
    std::process::exit(code.into());
}

fn child_of(place: &Place, set: &[&str], kill_at: Option<&str>) -> std::process::Child {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["child", "--exact", "--ignored", "--nocapture"]);
    command.env("FLOW_TEST_CHILD", place.dir.path());
    let mut given: Vec<String> = set.iter().map(|one| one.to_string()).collect();
    let text = fs::read_to_string(place.path("pipeline.yaml")).unwrap();
    for (name, path) in [
        ("shards", place.path("shards")),
        ("out", place.path("out")),
        ("noted", place.dir.path().to_path_buf()),
    ] {
        if text.contains(&format!("  {name}: ")) {
            given.push(format!("{name}={}", path.display()));
        }
    }
    command.env("FLOW_TEST_CHILD_SET", given.join(" "));
    match kill_at {
        Some(point) => command.env("FLOW_KILL_AT", point),
        None => command.env_remove("FLOW_KILL_AT"),
    };
    command
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null());
    command.spawn().unwrap()
}

#[test]
fn killed_anywhere_the_next_run_ends_with_the_same_bytes() {
    use std::os::unix::process::ExitStatusExt;
    let whole = Place::new();
    whole.run(&[]);
    let bytes = whole.bytes();
    let mut kills = 0;
    for point in [
        "data-written",
        "data-renamed",
        "record-written",
        "record-linked",
        "index-written",
        "export-renaming",
        "export-done",
    ] {
        for pass in [1, 2, 30] {
            let place = Place::new();
            let status = child_of(&place, &[], Some(&format!("{point}:{pass}"))).wait().unwrap();
            match status.signal() {
                Some(9) => kills += 1,
                _ => assert_eq!(status.code(), Some(0), "{point}:{pass}"),
            }
            place.run(&[]);
            assert_eq!(place.bytes(), bytes, "{point}:{pass}");
            assert!(place.plan(&[]).is_empty(), "{point}:{pass}");
        }
    }
    assert!(kills >= 14, "only {kills} of 21 runs came to their kill point");
}

fn signal(child: &std::process::Child, name: &str) {
    let status = std::process::Command::new("kill")
        .args(["-s", name, &child.id().to_string()])
        .status()
        .unwrap();
    assert!(status.success());
}

fn wait_until(what: impl Fn() -> bool) {
    let started = Instant::now();
    while !what() {
        assert!(started.elapsed() < Duration::from_secs(20), "waited too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn sigterm_commits_what_is_in_hand() {
    let place = Place::new();
    place.pipeline(&PIPELINE.replace(
        "scan: {uses: toy.count, with: {",
        "scan: {uses: toy.count, with: {slow: 60, ",
    ));
    let mut child = child_of(&place, &[], None);
    wait_until(|| {
        place
            .worked()
            .get("scan")
            .is_some_and(|partitions| partitions.len() >= 3)
    });
    signal(&child, "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
    let begun = place.worked()["scan"].clone();
    assert!(begun.len() < 11, "{begun:?}");
    place.run(&[]);
    let again = &place.worked()["scan"];
    assert!(
        again.len() < 11 && again.len() + begun.len() >= 11,
        "{begun:?} {again:?}"
    );
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        expected(&place, 3)
    );
}

#[test]
fn signals_reach_a_log() {
    let place = Place::new();
    let log = training(&place);
    let path = place.path("train.log");
    let next = || -> u64 {
        let text = fs::read_to_string(&path).unwrap_or_default();
        text.split_whitespace()
            .next()
            .and_then(|word| word.parse().ok())
            .unwrap_or(0)
    };
    let mut child = child_of(&place, &[&log, "slow=30"], None);
    wait_until(|| place.worked().get("steps").is_some_and(|steps| steps.len() >= 5));
    signal(&child, "USR1");
    wait_until(|| next() > 0);
    let checkpoint = next();
    signal(&child, "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(next() >= checkpoint && next() < 40, "{} {checkpoint}", next());
    place.run(&[&log]);
    assert_eq!(
        log_of(&path),
        format!("40 {} 1", (0..40).map(|step| step + 220).sum::<i64>())
    );
}
