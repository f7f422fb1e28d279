//! Failing stages, and limits to rejects.

use super::*;

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
            ("twice: 777", "row 2: port `odd`: two rows have the number 2 in `_row`"),
        ] {
            let (error, took, place) = failing(settings, workers, as_bytes);
            assert!(took < Duration::from_secs(5), "{took:?}");
            assert_eq!(error.exit_code(), 1);
            let RunError::Stage { stage, partition, .. } = &error else {
                panic!("{error:?}")
            };
            assert_eq!((stage.as_str(), partition.as_ref().unwrap().as_str()), ("clean", "s07"));
            assert!(error.to_string().contains(said), "{error}");
            // The lock is free again, and complete partitions are not computed again.
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
        // What was wrong with the first of each reason.
        assert!(
            error.to_string().contains("; the first: s01, row 1: not_a_number"),
            "{error}"
        );
        assert!(error.to_string().contains("; s02: unreadable"), "{error}");
    }
    limit("max_rejects: 2, max_rejects_action: warn");
    assert_eq!(place.run(&[]).past_reject_limit, ["scan"]);
    let fresh = Place::new();
    fresh.shard("s01", "x\ny\nz");
    fresh.pipeline(&PIPELINE.replace("scan: {uses: toy.count,", "scan: {uses: toy.count, max_rejects: 2,"));
    let error = fresh.try_run(&[]).unwrap_err();
    assert!(error.to_string().contains("max_rejects is 2"), "{error}");
    assert!(
        error.to_string().contains("; the first: s01, row 0: not_a_number"),
        "{error}"
    );
}

/// Of a source, whose files are known, and of a stage that reads files of its own.
#[test]
fn what_cannot_be_read_is_refused_and_made_again_once_it_can() {
    let place = Place::new();
    let needed = place.path("needed");
    place.pipeline(&PIPELINE.replace(
        "probe: {uses: toy.double, from: scan, with: {",
        &format!(
            "probe: {{uses: toy.double, from: scan, with: {{needs: {}, ",
            needed.display()
        ),
    ));
    fs::write(&needed, "").unwrap();
    place.run(&[]);
    let rejects = |stage: &str| {
        let summary = place.run(&[]);
        let of = summary.stages.iter().find(|one| one.stage == stage).unwrap();
        (
            of.ran,
            of.rejects
                .iter()
                .filter(|one| one.reason == "unreadable_file")
                .map(|one| one.rows)
                .sum::<u64>(),
        )
    };
    let (path, aside) = (place.path("shards/s04.txt"), place.path("aside"));
    fs::rename(&path, &aside).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(rejects("scan"), (1, 1));
    assert!(place.plan(&[]).is_empty(), "{:?}", counts(&place.plan(&[])));
    assert_eq!(rejects("scan"), (0, 1));
    fs::remove_dir(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    assert_eq!(rejects("scan"), (0, 0));
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        expected(&place, 3)
    );

    // The stage's own file is in no key: its rejects are not taken for what would be made.
    fs::remove_file(&needed).unwrap();
    fs::create_dir(&needed).unwrap();
    place.shard("s04", "2\n4");
    assert_eq!(rejects("probe"), (1, 2));
    assert_eq!(rejects("probe"), (1, 2));
    let plan = place.plan(&[]);
    let probe = stage(&plan, "probe");
    assert_eq!((probe.run, probe.reuse), (1, 10));
    let one = probe
        .partitions
        .iter()
        .find(|one| one.partition.as_str() == "s04")
        .unwrap();
    assert_eq!(&*one.reason, "a file could not be read");
    fs::remove_dir(&needed).unwrap();
    fs::write(&needed, "").unwrap();
    assert_eq!(rejects("probe"), (1, 0));
    assert!(place.plan(&[]).is_empty(), "{:?}", counts(&place.plan(&[])));
}
