//! Runs of several processes, which share the partitions: the same bytes as one process, whoever is lost.

use std::os::unix::process::ExitStatusExt;
use std::thread;

use flow_kind::Digest;
use flow_processes::{Address, End, Join, Processes, join};
use flow_runtime::run::follow;
use flow_storage::Storage;
use flow_storage_testing::{Fault, FaultRule, TestServer, free_port};

use super::*;

fn join_as(process: usize, processes: usize, port: u16) -> Arc<Processes> {
    let member = Join {
        process,
        processes,
        leader: Address {
            host: "localhost".into(),
            port,
        },
        port: None,
        hosts: Vec::new(),
        secret: None,
        digest: Digest::of(b"this run"),
        settings: Vec::new(),
        timeout: Duration::from_secs(20),
    };
    join(&member, &|_| {}).unwrap()
}

/// Where a process other than 0 notes what it works on.
fn notes_of(place: &Place, process: usize) -> PathBuf {
    let folder = place.path(&format!("process{process}"));
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Runs the pipeline on `count` processes, which are threads of this one. `options_of` gives those of a process.
fn run_on(
    place: &Place,
    count: usize,
    events: &Events,
    options_of: impl Fn(usize) -> Options,
) -> Result<RunSummary, RunError> {
    let port = free_port();
    thread::scope(|scope| {
        for process in 1..count {
            let mut options = options_of(process);
            let set = format!("noted={}", notes_of(place, process).display());
            let checked = checked_for(place, &set);
            scope.spawn(move || {
                let processes = join_as(process, count, port);
                options.processes = Some(Arc::clone(&processes));
                follow(&processes, &checked, &options, || None).unwrap();
            });
        }
        let processes = join_as(0, count, port);
        let mut options = options_of(0);
        options.processes = Some(Arc::clone(&processes));
        let checked = place.checked(&[]);
        let outcome = run(&checked, &options, events);
        let code = outcome.as_ref().map_or_else(RunError::exit_code, |_| 0);
        processes.end(&End {
            code,
            message: String::new(),
        });
        outcome
    })
}

/// What a child does that is one of `count` processes: its exit code.
pub(super) fn be_process(process: usize, count: usize, port: u16, checked: &Arc<Checked>, mut options: Options) -> u8 {
    let processes = join_as(process, count, port);
    if process > 0 {
        return match follow(&processes, checked, &options, || None) {
            Ok(end) => end.code,
            Err(error) => error.exit_code(),
        };
    }
    options.processes = Some(Arc::clone(&processes));
    let outcome = run(checked, &options, &Events::default());
    let code = outcome.as_ref().map_or_else(RunError::exit_code, |_| 0);
    processes.end(&End {
        code,
        message: String::new(),
    });
    code
}

/// The pipeline as another process sees it: its kinds note their work elsewhere, which is no part of a recipe.
fn checked_for(place: &Place, set: &str) -> Arc<Checked> {
    let registry = Registry::new(toys::kinds()).unwrap();
    let mut given = vec![set.to_owned()];
    for name in ["shards", "out"] {
        given.push(format!("{name}={}", place.path(name).display()));
    }
    let overrides = Overrides {
        set: given,
        ..Overrides::default()
    };
    let pipeline = load(&place.path("pipeline.yaml"), &overrides, &registry);
    let checked = check(pipeline.unwrap_or_else(|found| panic!("{found:?}")), &registry);
    Arc::new(checked.unwrap_or_else(|found| panic!("{found:?}")))
}

fn options_of(place: &Place, workers: usize) -> Options {
    let mut options = place.options.clone();
    options.workers = Some(workers);
    options
}

/// What the processes other than 0 worked on, by stage.
fn worked_elsewhere(place: &Place, count: usize) -> Vec<BTreeMap<String, Vec<String>>> {
    let log = |process| notes_of(place, process).join("work.log");
    (1..count).map(|process| worked_in(&log(process))).collect()
}

#[test]
fn several_processes_give_the_bytes_of_one_and_each_does_its_share() {
    let one = Place::new();
    one.run(&[]);
    let bytes = one.bytes();
    for (count, workers) in [(2, 1), (2, 3), (4, 1), (4, 3)] {
        let place = Place::new();
        let events = Events::default();
        let done = Arc::new(Mutex::new(BTreeMap::new()));
        let into = Arc::clone(&done);
        events.listen(move |event| {
            if let Event::Committed { stage, done, total, .. } = event {
                into.lock().unwrap().insert(stage.clone(), (*done, *total));
            }
        });
        run_on(&place, count, &events, |_| options_of(&place, workers)).unwrap();
        assert_eq!(place.bytes(), bytes, "{count} processes of {workers} workers");
        let elsewhere = worked_elsewhere(&place, count);
        for worked in &elsewhere {
            // `clean` streams from `scan`, `dedup` reads what is stored.
            for stage in ["scan", "clean", "probe"] {
                assert!(worked.contains_key(stage), "{count} {workers}: {elsewhere:?}");
            }
        }
        // No partition twice, and none forgotten.
        let here = place.worked();
        let mut scanned: Vec<&String> = here["scan"].iter().collect();
        scanned.extend(elsewhere.iter().flat_map(|worked| &worked["scan"]));
        scanned.sort_unstable();
        assert_eq!(scanned.len(), 11, "{scanned:?}");
        scanned.dedup();
        assert_eq!(scanned.len(), 11, "{scanned:?}");
        assert_eq!(done.lock().unwrap()["scan"], (11, 11));
        // One process finds all of it, and so do several.
        assert!(place.plan(&[]).is_empty(), "{:?}", counts(&place.plan(&[])));
        let again = run_on(&place, count, &Events::default(), |_| options_of(&place, workers)).unwrap();
        assert_eq!(again.ran, 0);
    }
}

/// The second global stage decides about rows that came through the first, in much memory or little.
#[test]
fn several_processes_decide_one_stage_behind_another() {
    let one = Place::new();
    one.pipeline(globals::CHAIN);
    one.run(&[]);
    let bytes = one.bytes();
    for (count, decide_bytes) in [(2, None), (4, None), (2, Some(200)), (3, Some(50))] {
        let place = Place::new();
        place.pipeline(globals::CHAIN);
        let options = |_| {
            let mut options = options_of(&place, 2);
            options.decide_bytes = decide_bytes;
            options
        };
        run_on(&place, count, &Events::default(), options).unwrap();
        assert_eq!(place.bytes(), bytes, "{count} {decide_bytes:?}");
        assert!(place.plan(&[]).is_empty(), "{:?}", counts(&place.plan(&[])));
    }
}

/// Whichever process has the partition, and others wait for it.
#[test]
fn a_decision_that_fails_in_any_process_ends_the_run_as_in_one() {
    for shard in ["s03", "s04", "s05"] {
        let place = Place::new();
        place.pipeline(&globals::CHAIN.replace(
            "{noted: \"${noted}\"}}\n  last",
            "{noted: \"${noted}\", refuse: 888}}\n  last",
        ));
        place.shard(shard, "4\n6\n444\n8");
        let in_one = place.try_run(&[]).unwrap_err().to_string();
        assert!(in_one.contains("row 2 has 888, which is refused"), "{in_one}");
        let error = run_on(&place, 3, &Events::default(), |_| options_of(&place, 1)).unwrap_err();
        let RunError::Stage { stage, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!((stage.as_str(), error.to_string()), ("first", in_one));
        place.shard(shard, "4\n6\n8");
        run_on(&place, 2, &Events::default(), |_| options_of(&place, 2)).unwrap();
        assert!(place.plan(&[]).is_empty(), "{:?}", counts(&place.plan(&[])));
    }
}

/// What others noted of source files is kept, and a change is computed by whom it falls to.
#[test]
fn several_processes_go_on_from_what_one_or_several_have_done() {
    let place = Place::new();
    let shards: Vec<PathBuf> = fs::read_dir(place.path("shards"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    for shard in &shards {
        let file = fs::File::options().write(true).open(shard).unwrap();
        file.set_modified(std::time::SystemTime::now() - Duration::from_secs(100))
            .unwrap();
    }
    run_on(&place, 3, &Events::default(), |_| options_of(&place, 1)).unwrap();
    let store = Store::open(&Storage::default(), &place.options.state, Access::Read).unwrap();
    for shard in &shards {
        assert!(store.sources().known(shard).unwrap().is_some(), "{}", shard.display());
    }
    place.shard("s03", "1\n2\n3\n4");
    place.shard("s12", "8\n9");
    let _ = fs::remove_file(place.path("work.log"));
    for process in [1, 2] {
        let _ = fs::remove_file(notes_of(&place, process).join("work.log"));
    }
    let summary = run_on(&place, 3, &Events::default(), |_| options_of(&place, 2)).unwrap();
    assert!(summary.ran > 0);
    let mut scanned: Vec<String> = place.worked().remove("scan").unwrap_or_default();
    for mut worked in worked_elsewhere(&place, 3) {
        scanned.extend(worked.remove("scan").unwrap_or_default());
    }
    scanned.sort();
    assert_eq!(scanned, ["s03", "s12"]);
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        expected(&place, 3)
    );
    // Another setting of a stage in the middle, by one process.
    let mut one = place;
    one.options.workers = Some(3);
    one.run(&["least=5"]);
    assert_eq!(fs::read_to_string(one.path("out/rows.txt")).unwrap(), expected(&one, 5));
    run_on(&one, 2, &Events::default(), |_| options_of(&one, 1)).unwrap();
    assert_eq!(fs::read_to_string(one.path("out/rows.txt")).unwrap(), expected(&one, 3));
}

#[test]
fn a_failure_in_any_process_ends_the_run_as_in_one() {
    // Of process 0 and of process 1.
    for shard in ["s03", "s04"] {
        for (settings, said) in [
            ("fail_at: 777", "777 is not allowed"),
            ("panic_at: 777", "panicked: planted at 777"),
            ("lose: 777", "4 in, but 3 out + 0 rejected + 0 merged = 3"),
        ] {
            let place = Place::new();
            place.shard(shard, "4\n6\n777\n8");
            place.pipeline(&PIPELINE.replace(
                "clean: {uses: toy.double, from: scan, with: {",
                &format!("clean: {{uses: toy.double, from: scan, with: {{{settings}, "),
            ));
            let error = run_on(&place, 3, &Events::default(), |_| options_of(&place, 1)).unwrap_err();
            let RunError::Stage { stage, partition, .. } = &error else {
                panic!("{error:?}")
            };
            assert_eq!((stage.as_str(), partition.as_ref().unwrap().as_str()), ("clean", shard));
            assert!(error.to_string().contains(said), "{error}");
            assert_eq!(error.to_string().contains("process 1 ("), shard == "s04", "{error}");
            place.shard(shard, "4\n6\n8");
            run_on(&place, 2, &Events::default(), |_| options_of(&place, 2)).unwrap();
            assert_eq!(
                fs::read_to_string(place.path("out/rows.txt")).unwrap(),
                expected(&place, 3)
            );
        }
    }
}

/// A log of 40 steps, of which each process takes all.
fn spread_log(place: &Place, steps: &str) -> PathBuf {
    let log = place.path("train.log");
    place.pipeline(&format!(
        r#"
flow: 1
params:
  shards: {{required: true}}
  noted: {{required: true}}
  out: none
stages:
  scan: {{uses: toy.count, with: {{folder: "${{shards}}"}}}}
  steps: {{uses: toy.steps, from: scan, with: {{steps: 40, noted: "${{noted}}"{steps}}}}}
  train: {{uses: toy.train, from: steps, with: {{log: "{}", steps: 40, rate: 1, spread: true}}}}
  after: {{uses: toy.double, from: train}}
"#,
        log.display()
    ));
    log
}

#[test]
fn each_process_feeds_its_own_part_of_a_log() {
    for (count, workers) in [(2, 1), (3, 3)] {
        let place = Place::new();
        let log = spread_log(&place, "");
        fs::write(&log, "7 1000 1").unwrap();
        run_on(&place, count, &Events::default(), |_| options_of(&place, workers)).unwrap();
        let sum = 1000 + (7..40).map(|step| step + 220).sum::<i64>();
        assert_eq!(fs::read_to_string(&log).unwrap(), format!("40 {sum} 1"));
        let here = &place.worked()["steps"];
        assert_eq!(here.len(), 33);
        for mut worked in worked_elsewhere(&place, count) {
            let mut steps = worked.remove("steps").unwrap();
            steps.sort();
            assert_eq!(&steps, here);
        }
        assert!(place.plan(&[]).is_empty(), "{:?}", counts(&place.plan(&[])));
    }
}

#[test]
fn a_process_that_cannot_feed_its_part_of_a_log_ends_the_run_as_one_would() {
    for process in [0, 1, 2] {
        let place = Place::new();
        let log = spread_log(&place, &format!(", fail_at: [{process}, 11]"));
        let error = run_on(&place, 3, &Events::default(), |_| options_of(&place, 2)).unwrap_err();
        let RunError::Stage { stage, partition, .. } = &error else {
            panic!("{error:?}")
        };
        let partition = partition.as_ref().unwrap().as_str();
        assert_eq!((stage.as_str(), partition), ("steps", "step-00000011"));
        assert!(error.to_string().contains("step 11 cannot be read"), "{error}");
        spread_log(&place, "");
        run_on(&place, 2, &Events::default(), |_| options_of(&place, 1)).unwrap();
        assert!(fs::read_to_string(&log).unwrap().starts_with("40 "));
    }
}

/// A failing partition of another process is left out, and the rest goes on.
#[test]
fn several_processes_keep_going() {
    let place = Place::new();
    for shard in ["s03", "s04"] {
        place.shard(shard, "4\n6\n777\n8");
    }
    place.pipeline(&PIPELINE.replace(
        "clean: {uses: toy.double, from: scan, with: {",
        "clean: {uses: toy.double, from: scan, with: {fail_at: 777, ",
    ));
    let error = run_on(&place, 3, &Events::default(), |_| {
        let mut options = options_of(&place, 1);
        options.keep_going = true;
        options
    })
    .unwrap_err();
    let RunError::Several { failures, .. } = &error else {
        panic!("{error:?}")
    };
    let mut partitions: Vec<String> = failures
        .iter()
        .filter_map(|failure| match failure {
            RunError::Stage { partition, .. } => partition.as_ref().map(ToString::to_string),
            _ => None,
        })
        .collect();
    partitions.sort();
    assert_eq!(partitions, ["s03", "s04"]);
    for shard in ["s03", "s04"] {
        place.shard(shard, "4\n6\n8");
    }
    // All others are done.
    place.run(&[]);
    assert_eq!(place.worked()["clean"], ["s03", "s04"]);
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        expected(&place, 3)
    );
}

/// Rejects of all processes count.
#[test]
fn the_limit_of_rejects_counts_those_of_all_processes() {
    let place = Place::new();
    for shard in 0..6 {
        place.shard(&format!("s{shard:02}"), "1\nx\n3\ny");
    }
    place.pipeline(&PIPELINE.replace(
        "scan: {uses: toy.count, with: {folder: \"${shards}\", noted: \"${noted}\"}}",
        "scan: {uses: toy.count, max_rejects: 11, with: {folder: \"${shards}\", noted: \"${noted}\"}}",
    ));
    let error = run_on(&place, 3, &Events::default(), |_| options_of(&place, 1)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("12 rejects of class fault, and max_rejects is 11"),
        "{error}"
    );
}

/// A mount may be missing in one process: its rows are not refused for it.
#[test]
fn a_file_that_one_process_alone_cannot_read_ends_the_run_and_refuses_no_row() {
    let place = Place::new();
    fs::write(place.path("needed"), "").unwrap();
    let needs = format!(
        "needs: {}, blind: \"${{noted}}/blind\", ",
        place.path("needed").display()
    );
    place.pipeline(&PIPELINE.replace(
        "clean: {uses: toy.double, from: scan, with: {",
        &format!("clean: {{uses: toy.double, from: scan, with: {{{needs}"),
    ));
    let blind = notes_of(&place, 1).join("blind");
    fs::write(&blind, "").unwrap();
    let error = run_on(&place, 2, &Events::default(), |_| options_of(&place, 1)).unwrap_err();
    assert_eq!(error.exit_code(), 1);
    let error = error.to_string();
    assert!(
        error.contains("process 1 (") && error.contains("needed, which process 0 can"),
        "{error}"
    );
    fs::remove_file(blind).unwrap();
    run_on(&place, 2, &Events::default(), |_| options_of(&place, 1)).unwrap();
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        expected(&place, 3)
    );
    // What no process can read is refused, and asked for again.
    fs::remove_file(place.path("needed")).unwrap();
    place.shard("s04", "777\n778");
    run_on(&place, 2, &Events::default(), |_| options_of(&place, 1)).unwrap();
    let without = fs::read_to_string(place.path("out/rows.txt")).unwrap();
    assert_ne!(without, expected(&place, 3));
    fs::write(place.path("needed"), "").unwrap();
    run_on(&place, 2, &Events::default(), |_| options_of(&place, 1)).unwrap();
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        expected(&place, 3)
    );
}

#[test]
fn a_state_directory_that_is_not_shared_is_named() {
    let place = Place::new();
    let elsewhere = place.path("elsewhere");
    let error = run_on(&place, 3, &Events::default(), |process| {
        let mut options = options_of(&place, 1);
        if process == 2 {
            options.state = elsewhere.clone();
        }
        options
    })
    .unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let error = error.to_string();
    assert!(
        error.contains("not all processes see what process 0 sees") && error.contains("process 2 ("),
        "{error}"
    );
    assert!(!error.contains("process 1 ("), "{error}");
}

/// A process that is killed at any point is named by the others, and the next run gives the same bytes.
#[test]
fn a_process_that_is_killed_is_named_and_the_next_run_goes_on() {
    let whole = Place::new();
    whole.run(&[]);
    let bytes = whole.bytes();
    let mut kills = 0;
    let store = ["data-written", "data-renamed"];
    let store = store.into_iter().flat_map(|point| [(point, 1), (point, 3), (point, 6)]);
    for (point, pass) in store {
        let place = Place::new();
        let port = free_port();
        let mut child = killed::child_process(&place, 1, 2, port, Some(&format!("{point}:{pass}")));
        let processes = join_as(0, 2, port);
        let mut options = options_of(&place, 2);
        options.processes = Some(Arc::clone(&processes));
        let started = Instant::now();
        let outcome = run(&place.checked(&[]), &options, &Events::default());
        if let Err(error) = &outcome {
            kills += 1;
            assert_eq!(error.exit_code(), 1, "{error}");
            let named = format!("pid {}) ended without a message", child.id());
            assert!(error.to_string().contains(&named), "{error}");
            assert!(started.elapsed() < Duration::from_secs(20));
        } else {
            processes.end(&End {
                code: 0,
                message: String::new(),
            });
        }
        child.wait().unwrap();
        drop(processes);
        run_on(&place, 3, &Events::default(), |_| options_of(&place, 1)).unwrap();
        assert_eq!(place.bytes(), bytes, "{point}:{pass}");
        assert!(place.plan(&[]).is_empty(), "{point}:{pass}");
    }
    assert!(kills >= 5, "only {kills} of 6 runs lost their process");
}

/// Process 0, which alone commits, is killed at any point of that: the other one names it, and the next run gives the same
/// bytes.
#[test]
fn process_0_is_killed_while_it_commits_and_the_next_run_goes_on() {
    let whole = Place::new();
    whole.run(&[]);
    let bytes = whole.bytes();
    let mut kills = 0;
    for point in ["record-written", "record-linked", "index-written", "export-renaming"] {
        for pass in [1, 3] {
            let place = Place::new();
            let port = free_port();
            let mut child = killed::child_process(&place, 0, 2, port, Some(&format!("{point}:{pass}")));
            let processes = join_as(1, 2, port);
            let checked = checked_for(&place, &format!("noted={}", notes_of(&place, 1).display()));
            match follow(&processes, &checked, &options_of(&place, 2), || None) {
                Ok(end) => assert_eq!(end.code, 0),
                Err(error) => {
                    kills += 1;
                    let named = format!("pid {}) ended without a message", child.id());
                    assert!(error.to_string().contains(&named), "{error}");
                }
            }
            child.wait().unwrap();
            drop(processes);
            run_on(&place, 2, &Events::default(), |_| options_of(&place, 1)).unwrap();
            assert_eq!(place.bytes(), bytes, "{point}:{pass}");
            assert!(place.plan(&[]).is_empty(), "{point}:{pass}");
        }
    }
    assert!(kills >= 6, "only {kills} of 8 runs lost process 0");
}

/// With a state directory in object storage, of which each process has a copy of its own or both have one: the bytes of one
/// process on a disk, also where storage is throttled, cuts connections and loses answers, and whichever process is killed at
/// any point of a commit.
#[test]
fn processes_share_a_state_directory_in_object_storage() {
    let whole = Place::new();
    whole.run(&[]);
    let bytes = whole.bytes();
    let mut kills = 0;
    let points = [
        None,
        Some((1, "data-written:1")),
        Some((1, "data-uploaded:1")),
        Some((1, "data-renamed:3")),
        Some((0, "decided:1")),
        Some((0, "data-uploaded:2")),
        Some((0, "record-written:2")),
        Some((0, "record-created:2")),
        Some((0, "record-linked:3")),
        Some((0, "index-written:1")),
    ];
    for killed in points {
        let place = Place::new();
        let served = place.path("served");
        fs::create_dir_all(served.join("bucket")).unwrap();
        // The objects are the files of a folder.
        std::os::unix::fs::symlink(served.join("bucket/state"), place.path("state")).unwrap();
        let server = TestServer::start(&served).unwrap();
        let run_on = |machines: [&str; 2], killed: Option<(usize, &str)>| {
            let port = free_port();
            let children = [0, 1].map(|process| {
                let kill_at = killed.and_then(|(killed, point)| (killed == process).then_some(point));
                killed::child_process_in_storage(&place, (process, 2, port), &server, machines[process], kill_at)
            });
            children.map(|mut child| child.wait().unwrap())
        };
        for fault in [Fault::Status(503), Fault::Drop, Fault::LoseAnswer] {
            server.fault(FaultRule {
                after: 5,
                ..FaultRule::first(2, fault, "/bucket/state/")
            });
        }
        let ended = run_on(["a", "b"], killed);
        match killed {
            Some((process, _)) if ended[process].signal() == Some(9) => {
                kills += 1;
                assert_eq!(ended[1 - process].code(), Some(1), "{killed:?}");
            }
            _ => assert!(ended.iter().all(|status| status.success()), "{killed:?} {ended:?}"),
        }
        server.clear();
        if killed.is_some() {
            let ended = run_on(["c", "c"], None);
            assert!(ended.iter().all(|status| status.success()), "{killed:?} {ended:?}");
        }
        assert_eq!(place.bytes(), bytes, "{killed:?}");
        assert!(place.plan(&[]).is_empty(), "{killed:?}");
        // Another pair has nothing left to do.
        server.clear();
        let ended = run_on(["d", "a"], None);
        assert!(ended.iter().all(|status| status.success()), "{killed:?} {ended:?}");
        assert_eq!(server.requests("PUT /bucket/state/artifacts/"), 0, "{killed:?}");
    }
    assert!(kills >= 7, "only {kills} of 9 runs lost a process");
}

/// Process 0 is killed: the other one ends with its name.
#[test]
fn the_loss_of_process_0_ends_the_others() {
    let place = Place::new();
    place.pipeline(&PIPELINE.replace(
        "scan: {uses: toy.count, with: {",
        "scan: {uses: toy.count, with: {slow: 2000, ",
    ));
    let port = free_port();
    let mut child = killed::child_process(&place, 0, 2, port, None);
    let processes = join_as(1, 2, port);
    let options = options_of(&place, 1);
    let checked = checked_for(&place, &format!("noted={}", notes_of(&place, 1).display()));
    let pid = child.id();
    // Both are at work: process 0 has begun a partition, and so has this process.
    let logs = [place.path("work.log"), notes_of(&place, 1).join("work.log")];
    let killing = thread::spawn(move || {
        killed::wait_until(|| logs.iter().all(|log| log.exists()));
        child.kill().unwrap();
        child.wait().unwrap();
    });
    let error = follow(&processes, &checked, &options, || None).unwrap_err();
    assert!(
        error
            .to_string()
            .contains(&format!("pid {pid}) ended without a message")),
        "{error}"
    );
    killing.join().unwrap();
    drop(processes);
    place.pipeline(PIPELINE);
    place.run(&[]);
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        expected(&place, 3)
    );
}

/// A signal to another process ends the run for all after the commit of what is in work.
#[test]
fn a_signal_at_any_process_commits_what_is_in_hand() {
    let place = Place::new();
    place.pipeline(&PIPELINE.replace(
        "scan: {uses: toy.count, with: {",
        // Well within the time that what is in hand has to end.
        "scan: {uses: toy.count, with: {slow: 100, ",
    ));
    let port = free_port();
    let mut first = killed::child_process(&place, 0, 2, port, None);
    let mut second = killed::child_process(&place, 1, 2, port, None);
    killed::wait_until(|| {
        let worked = place.worked();
        worked.get("scan").is_some_and(|partitions| partitions.len() >= 4)
    });
    killed::signal(&second, "TERM");
    assert_eq!(first.wait().unwrap().code(), Some(143));
    assert_eq!(second.wait().unwrap().code(), Some(143));
    killed::the_rest_is_done_by_the_next_run(&place);
}
