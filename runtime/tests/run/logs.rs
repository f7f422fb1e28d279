//! Stages with a log of their own, and the regions that they make.

use super::*;

pub(crate) const TRAINING: &str = r#"
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

pub(crate) fn training(place: &Place) -> String {
    place.pipeline(TRAINING);
    format!("log={}", place.path("train.log").display())
}

pub(crate) fn log_of(path: &Path) -> String {
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
        // A plan tells of it, and shows the other stages.
        let (plan, refusal) = plan_despite_refusal(&place.checked(&[&log, "rate=2"]), &place.options).unwrap();
        assert_eq!(refusal.unwrap().to_string(), "stage `train`: the rate changed");
        let train = plan.stages.iter().find(|stage| stage.stage == "train").unwrap();
        assert_eq!(train.run, 1);
        assert_eq!(train.reasons[0].1, "would be refused: the rate changed");
        assert!(plan.stages.iter().any(|stage| stage.reuse > 0));
        let error = place.try_run(&[&log, "rate=2"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert_eq!(error.to_string(), "stage `train`: the rate changed");
    }
}

#[test]
fn a_log_that_has_enough_ends_its_region_and_not_the_run() {
    for workers in [1, 3] {
        let mut place = Place::new();
        place.options.workers = Some(workers);
        place.options.in_flight_bytes = Some(1);
        let log = training(&place);
        let enough = |steps: u64| {
            place.pipeline(&TRAINING.replace("steps: 40, rate", &format!("steps: 40, enough: {steps}, rate")));
        };
        enough(12);
        let summary = place.run(&[&log]);
        let sum = |steps: std::ops::Range<i64>| steps.map(|step| step + 220).sum::<i64>();
        assert_eq!(log_of(&place.path("train.log")), format!("12 {} 1", sum(0..12)));
        let loaded = place.worked()["steps"].len();
        assert!((12..=14).contains(&loaded), "{loaded} steps");
        // What follows has its result, and nothing is left to do.
        let after = summary.stages.iter().find(|stage| stage.stage == "after").unwrap();
        assert_eq!(after.rows_in, 2);
        assert!(place.plan(&[&log]).is_empty());
        // Later it wants more.
        enough(30);
        place.run(&[&log]);
        assert_eq!(log_of(&place.path("train.log")), format!("30 {} 1", sum(0..30)));
    }
}

#[test]
fn an_export_behind_a_finished_log_is_planned_as_it_runs() {
    let place = Place::new();
    let log = training(&place);
    let exported = TRAINING.replace("  slow: 0\n", "  slow: 0\n  out: {required: true}\n  title: null\n");
    place.pipeline(&format!(
        "{exported}  out: {{uses: toy.write, from: after, with: {{folder: \"${{out}}\", title: \"${{title}}\"}}}}\n"
    ));
    place.run(&[&log]);
    let plan = place.plan(&[&log]);
    assert!(plan.is_empty(), "{:?}", stage(&plan, "out").reasons);
    let renamed = |log: &str| {
        let plan = place.plan(&[log, "title=b"]);
        let others = plan.stages.iter().filter(|stage| stage.stage != "out");
        let others: u64 = others.map(|stage| stage.run).sum();
        (others, stage(&plan, "out").reasons.clone())
    };
    let changed = [(Action::Run, "setting `title` changed (none) -> b".to_string(), 1)];
    assert_eq!(renamed(&log), (0, changed.to_vec()));
    // Where the stages before it run, too.
    let (others, reasons) = renamed(&format!("log={}", place.path("other.log").display()));
    assert!(others > 0);
    assert_eq!(reasons, changed);
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
fn no_more_steps_are_loaded_ahead_than_there_is_room_for() {
    for workers in [1, 3] {
        let mut place = Place::new();
        place.options.workers = Some(workers);
        place.options.in_flight_bytes = Some(1);
        let log = training(&place);
        assert!(place.try_run(&[&log, "fail_at=11"]).is_err());
        // Those before, the one that failed, and the next, which is never held back.
        let loaded = place.worked()["steps"].len();
        assert!((12..=13).contains(&loaded), "{loaded} steps");
        place.run(&[&log]);
        assert!(log_of(&place.path("train.log")).starts_with("40 "));
    }
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
        "late: {uses: toy.dedup, from: scan}\n  train: {uses: toy.train, from: {steps: steps, late: late},",
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
