//! Runs about some partitions alone.

use super::*;

fn partial(place: &mut Place, partitions: &[&str]) {
    place.options.selection.partitions = partitions.iter().map(|one| one.to_string()).collect();
}

#[test]
fn what_follows_from_some_partitions_runs_and_the_rest_is_left_out() {
    let mut place = Place::new();
    partial(&mut place, &["s03", "s1*"]);
    let plan = place.plan(&[]);
    assert_eq!((stage(&plan, "scan").run, stage(&plan, "clean").run), (2, 2));
    let left_out = |name: &str| stage(&plan, name).left_out.clone().unwrap();
    assert_eq!(left_out("dedup:decide"), "it decides over all partitions");
    assert_eq!(left_out("dedup:apply"), "`dedup:decide` decides over all partitions");
    assert_eq!(left_out("out"), "it writes one set of all partitions");
    assert!(stage(&plan, "dedup:keys").selected && !stage(&plan, "out").selected);
    let summary = place.run(&[]);
    assert_eq!(summary.reused, 0);
    let worked = place.worked();
    for name in ["scan", "clean", "probe", "keys"] {
        assert_eq!(worked[name], ["s03", "s10"], "{name}");
    }
    assert!(!worked.contains_key("apply") && !place.path("out").exists());
    // Done, and used by the run of all.
    assert!(place.plan(&[]).is_empty(), "{:?}", counts(&place.plan(&[])));
    partial(&mut place, &[]);
    place.run(&[]);
    assert_eq!(place.worked()["scan"].len(), 9);
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        expected(&place, 3)
    );
}

#[test]
fn some_partitions_never_take_the_place_of_all() {
    let mut place = Place::new();
    place.run(&[]);
    let rows = fs::read(place.path("out/rows.txt")).unwrap();
    // Another even number, which `dedup` lets through: what `out` reads of `clean` itself stays.
    let text = fs::read_to_string(place.path("shards/s03.txt")).unwrap();
    place.shard("s03", &format!("{text}\n1000"));
    partial(&mut place, &["s03"]);
    let plan = place.plan(&[]);
    assert!(stage(&plan, "scan").removed.is_empty());
    assert_eq!(stage(&plan, "scan").run, 1);
    place.run(&[]);
    assert_eq!(place.worked()["clean"], ["s03"]);
    assert_eq!(fs::read(place.path("out/rows.txt")).unwrap(), rows);
    // What stands is what the last run of all partitions had.
    partial(&mut place, &[]);
    place.options.selection.only = vec!["out".into()];
    place.options.selection.force = vec!["out".into()];
    fs::remove_dir_all(place.path("out")).unwrap();
    place.run(&[]);
    assert_eq!(fs::read(place.path("out/rows.txt")).unwrap(), rows);
    place.options.selection.only = Vec::new();
    place.options.selection.force = Vec::new();
    place.run(&[]);
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        expected(&place, 3)
    );
    assert!(place.worked().get("clean").is_none_or(Vec::is_empty));
}

#[test]
fn names_that_no_source_has_and_options_that_do_not_fit() {
    let mut place = Place::new();
    for (wanted, said, help) in [
        ("s99", "has a partition `s99`", "`s09`"),
        ("t*", "that fits `t*`", "`s00`"),
        ("s01/*", "that fits `s01/*`", ""),
    ] {
        partial(&mut place, &["s01", wanted]);
        for error in [
            plan(&place.checked(&[]), &place.options).unwrap_err(),
            place.try_run(&[]).unwrap_err(),
        ] {
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(said), "{error}");
            assert!(error.help().unwrap().contains(help), "{error:?}");
        }
    }
    partial(&mut place, &["s01"]);
    place.options.selection.from = Some("clean".into());
    let error = place.try_run(&[]).unwrap_err();
    assert!(
        error.exit_code() == 2 && error.to_string().contains("--from"),
        "{error}"
    );
    // Stages up to one can be asked for.
    place.options.selection.from = None;
    place.options.selection.until = Some("clean".into());
    place.run(&[]);
    assert_eq!(place.worked()["clean"], ["s01"]);
    assert!(!place.worked().contains_key("probe"));
}
