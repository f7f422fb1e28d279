//! Stages with the same recipe on different rows: each is reused with its own rows, whatever ran before.

use flow_storage::Storage;

use super::*;

/// `evens` and `odds` do the same work on two outputs of one stage.
const SPLIT: &str = r#"
flow: 1
params:
  shards: {required: true}
  noted: {required: true}
  out: {required: true}
  least: 0
stages:
  scan: {uses: toy.count, with: {folder: "${shards}", noted: "${noted}"}}
  clean: {uses: toy.double, from: scan, with: {by: 1, least: "${least}", dear: true}}
  evens: {uses: toy.double, from: clean.rows, with: {by: 1, dear: true}}
  odds: {uses: toy.double, from: clean.odd, with: {by: 1, dear: true}}
  even_data: {uses: toy.write, from: evens.rows, with: {folder: "${out}/even"}}
  odd_data: {uses: toy.write, from: odds.odd, with: {folder: "${out}/odd"}}
"#;

fn values(place: &Place, folder: &str) -> Vec<i64> {
    let text = fs::read_to_string(place.path("out").join(folder).join("rows.txt")).unwrap();
    let last = |line: &str| line.rsplit(' ').next().unwrap().parse().unwrap();
    text.lines().map(last).collect()
}

fn only(place: &mut Place, stage: &str, set: &[&str]) -> RunSummary {
    place.options.selection.only = vec![stage.into()];
    let summary = place.run(set);
    place.options.selection.only.clear();
    summary
}

fn until(place: &mut Place, stage: &str, set: &[&str]) {
    place.options.selection.until = Some(stage.into());
    place.run(set);
    place.options.selection.until = None;
}

#[test]
fn a_stage_is_taken_as_it_stands_with_its_own_rows() {
    let mut place = Place::new();
    place.pipeline(SPLIT);
    until(&mut place, "evens", &[]);
    until(&mut place, "odds", &[]);
    // The very recipe, and not one row in common.
    let plan = place.plan(&[]);
    assert_eq!(stage(&plan, "evens").recipe, stage(&plan, "odds").recipe);
    // Other settings leave newer records of that recipe; those of `odds` are the last.
    until(&mut place, "clean", &["least=9"]);
    until(&mut place, "evens", &["least=7"]);
    until(&mut place, "odds", &["least=9"]);

    // No record is as the plan would make it: what the stage last had.
    for set in [&["least=3"], &["least=11"]] {
        let _ = fs::remove_dir_all(place.path("out"));
        only(&mut place, "even_data", set);
        let even = values(&place, "even");
        assert!(
            even.iter().all(|value| value % 2 == 0) && even.iter().min() == Some(&8),
            "{even:?}"
        );
        only(&mut place, "odd_data", set);
        let odd = values(&place, "odd");
        assert!(
            odd.iter().all(|value| value % 2 != 0) && odd.iter().min() == Some(&9),
            "{odd:?}"
        );
    }
    // As the plan would make it, though there are later records.
    only(&mut place, "even_data", &[]);
    let even = values(&place, "even");
    assert!(
        even.iter().all(|value| value % 2 == 0) && even.iter().min() == Some(&0),
        "{even:?}"
    );

    // A whole run puts it right.
    place.run(&["least=3"]);
    assert_eq!(values(&place, "odd").iter().min(), Some(&3));
}

#[test]
fn what_a_run_that_was_cut_short_left_is_not_taken_for_the_whole() {
    let mut place = Place::new();
    place.pipeline(SPLIT);
    until(&mut place, "evens", &[]);
    let whole = {
        only(&mut place, "even_data", &[]);
        values(&place, "even")
    };
    // Fails at the last shard of another setting; what came before is committed.
    place.options.workers = Some(1);
    place.options.in_flight = Some(1);
    let failing = SPLIT.replace("rows, with: {by: 1,", "rows, with: {by: 3, fail_at: 998,");
    place.pipeline(&failing);
    place.shard("s10", "2\n998");
    assert_eq!(place.try_run(&[]).unwrap_err().exit_code(), 1);
    let snapshots = |place: &Place| {
        let store = Store::open(&Storage::default(), &place.options.state, Access::Read).unwrap();
        let last = store.runs().unwrap().pop().unwrap();
        store.run_snapshots(&last).unwrap().unwrap()
    };
    let evens = snapshots(&place).of("evens").cloned().unwrap();
    assert!(
        !evens.complete && !evens.keys.is_empty() && evens.keys.len() < 11,
        "{evens:?}"
    );

    place.pipeline(SPLIT);
    fs::remove_dir_all(place.path("out")).unwrap();
    only(&mut place, "even_data", &[]);
    assert_eq!(values(&place, "even"), whole);

    // Where no run came to the end of the stage, nothing is taken.
    let fresh = Place::new();
    fresh.pipeline(&failing);
    fresh.shard("s10", "2\n998");
    let mut fresh = fresh;
    fresh.options.workers = Some(1);
    fresh.options.in_flight = Some(1);
    assert_eq!(fresh.try_run(&[]).unwrap_err().exit_code(), 1);
    fresh.options.selection.only = vec!["even_data".into()];
    let error = fresh.try_run(&[]).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("never completed"), "{error}");
}

#[test]
fn what_cannot_be_undone_takes_nothing_as_it_stands() {
    let mut place = Place::new();
    let careful = "  careful: {uses: toy.double, from: odds.odd, with: {needs_current: true}}\n";
    place.pipeline(&format!("{SPLIT}{careful}"));
    place.run(&[]);
    only(&mut place, "careful", &[]);
    let refused = |place: &mut Place, set: &[&str]| {
        place.options.selection.only = vec!["careful".into()];
        let error = place.try_run(set).unwrap_err();
        place.options.selection.only.clear();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("needs up-to-date input"), "{error}");
    };
    // Other settings, a changed shard, a new one.
    refused(&mut place, &["least=9"]);
    let before = fs::read_to_string(place.path("shards/s03.txt")).unwrap();
    place.shard("s03", "1\n3");
    refused(&mut place, &[]);
    place.shard("s03", &before);
    place.shard("s11", "1\n3");
    refused(&mut place, &[]);
    place.run(&[]);
    only(&mut place, "careful", &[]);
}

#[test]
fn what_is_left_out_of_a_region_needs_nothing() {
    let mut place = Place::new();
    // `a` and `both` are one region; `both` reads what another source has yet to make.
    place.pipeline(
        r#"
flow: 1
params:
  shards: {required: true}
  noted: {required: true}
  out: {required: true}
stages:
  scan: {uses: toy.count, with: {folder: "${shards}", noted: "${noted}"}}
  near: {uses: toy.double, from: scan, with: {dear: true}}
  other: {uses: toy.count, with: {folder: "${shards}", slow: 1}}
  far: {uses: toy.double, from: other, with: {by: 7, dear: true}}
  a: {uses: toy.double, from: near.rows, with: {by: 3}}
  both: {uses: toy.join, from: {left: a, right: far.rows}}
  out: {uses: toy.write, from: both, with: {folder: "${out}"}}
"#,
    );
    let plan = place.plan(&[]);
    assert_eq!(stage(&plan, "a").region, stage(&plan, "both").region);
    until(&mut place, "a", &[]);
    place.options.selection.only = vec!["both".into()];
    let error = place.try_run(&[]).unwrap_err();
    assert!(
        error.to_string().contains("`far`, which has no artifact yet"),
        "{error}"
    );
    place.options.selection.only.clear();
    place.run(&[]);
}

#[test]
fn another_pipeline_with_stages_of_the_same_names_is_another_one() {
    let mut place = Place::new();
    place.pipeline(SPLIT);
    place.run(&[]);
    // The same name, in another folder.
    let other = Place::new();
    other.pipeline(&SPLIT.replace("by: 1, least", "by: 5, least"));
    let options = Options {
        state: place.options.state.clone(),
        ..other.options.clone()
    };
    run(&other.checked(&[]), &options, &Events::default()).unwrap();
    fs::remove_dir_all(place.path("out")).unwrap();
    only(&mut place, "even_data", &["least=2"]);
    assert!(
        values(&place, "even").iter().any(|value| value % 5 != 0),
        "{:?}",
        values(&place, "even")
    );
}

#[test]
fn collecting_drops_partitions_that_no_run_had() {
    let place = Place::new();
    place.pipeline(SPLIT);
    for change in 0..4 {
        place.shard("s05", &format!("{change}\n{}", change + 40));
        place.run(&[]);
    }
    let files = |place: &Place| place.bytes().len();
    let before = files(&place);
    let collect = |keep| {
        let store = Store::open(
            &Storage::default(),
            &place.options.state,
            Access::Run { run_id: "gc".into() },
        )
        .unwrap();
        store.collect_garbage(keep, false).unwrap()
    };
    assert_eq!(collect(4).partitions, 0);
    assert_eq!(files(&place), before);
    let collected = collect(1);
    assert_eq!(collected.artifacts, 0);
    assert!(collected.partitions > 0 && collected.bytes > 0, "{collected:?}");
    let fresh = Place::new();
    fresh.pipeline(SPLIT);
    fresh.shard("s05", "3\n43");
    fresh.run(&[]);
    assert_eq!(place.bytes(), fresh.bytes());
    assert!(place.plan(&[]).is_empty(), "{:?}", counts(&place.plan(&[])));
    assert_eq!(
        collect(1),
        flow_store::GarbageSummary {
            kept: collected.kept,
            ..Default::default()
        }
    );
}
