//! Runs in a child process that is killed or stopped by a signal.

use flow_storage::Storage;

use super::logs::{log_of, training};
use super::*;

/// The body of the child process: runs the pipeline in the folder that the environment names.
#[test]
#[ignore = "the child of other tests"]
#[allow(clippy::exit, reason = "the process is the run")]
fn child() {
    let Ok(folder) = std::env::var("FLOW_TEST_CHILD") else {
        return;
    };
    if let Ok(at) = std::env::var("FLOW_TEST_CHILD_KILL_AT") {
        use flow_base::failpoints::{DECIDED, REMOTE, STORE};
        let kill = failpoints::kill_at(&at, &[&STORE[..], &REMOTE, &[DECIDED]].concat());
        flow_base::failpoints::set(move |point, _| kill(point));
    }
    let folder = PathBuf::from(folder);
    let set = std::env::var("FLOW_TEST_CHILD_SET").unwrap_or_default();
    let overrides = Overrides {
        set: set.split_whitespace().map(str::to_string).collect(),
        ..Overrides::default()
    };
    let registry = Registry::new(toys::kinds()).unwrap();
    let pipeline =
        load(&folder.join("pipeline.yaml"), &overrides, &registry).unwrap_or_else(|found| panic!("{found:?}"));
    let checked = Arc::new(check(pipeline, &registry).unwrap_or_else(|found| panic!("{found:?}")));
    let state = std::env::var_os("FLOW_TEST_CHILD_STATE").map(PathBuf::from);
    let mut options = Options::new(
        &Storage::of_environment(),
        state.unwrap_or_else(|| folder.join("state")),
    );
    options.workers = Some(2);
    options.signals = true;
    if let Ok(number) = std::env::var("FLOW_TEST_CHILD_PROCESS") {
        let numbers: Vec<usize> = number.split(' ').map(|number| number.parse().unwrap()).collect();
        let [process, count, port] = numbers[..] else {
            panic!("{number}")
        };
        std::process::exit(spread::be_process(process, count, port as u16, &checked, options).into());
    }
    let code = match run(&checked, &options, &Events::default()) {
        Ok(_) => 0,
        Err(error) => {
            eprintln!("{error}");
            error.exit_code()
        }
    };
    std::process::exit(code.into());
}

/// A child that is one of `count` processes of a run.
pub(super) fn child_process(
    place: &Place,
    process: usize,
    count: usize,
    port: u16,
    kill_at: Option<&str>,
) -> std::process::Child {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.env("FLOW_TEST_CHILD_PROCESS", format!("{process} {count} {port}"));
    child_by(command, place, &[], kill_at)
}

/// The same, with a state directory in object storage of which the folder `machine` receives a copy.
pub(super) fn child_process_in_storage(
    place: &Place,
    (process, count, port): (usize, usize, u16),
    server: &flow_storage_testing::TestServer,
    machine: &str,
    kill_at: Option<&str>,
) -> std::process::Child {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.env("FLOW_TEST_CHILD_PROCESS", format!("{process} {count} {port}"));
    command.env("FLOW_TEST_CHILD_STATE", "s3://bucket/state");
    command.envs(server.environment());
    command.env("FLOW_STORAGE_CACHE", place.path(machine));
    child_by(command, place, &[], kill_at)
}

fn child_of(place: &Place, set: &[&str], kill_at: Option<&str>) -> std::process::Child {
    use std::os::unix::process::CommandExt;
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let listen_to_hangups = || {
        // SAFETY: `signal` may be called between fork and exec, and the default action has no handler.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) };
        Ok(())
    };
    // A suite that was started by `nohup` hands on that hangups are ignored.
    // SAFETY: the closure makes one system call and nothing else.
    unsafe { command.pre_exec(listen_to_hangups) };
    child_by(command, place, set, kill_at)
}

fn child_by(
    mut command: std::process::Command,
    place: &Place,
    set: &[&str],
    kill_at: Option<&str>,
) -> std::process::Child {
    command.args(["killed::child", "--exact", "--ignored", "--nocapture"]);
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
        Some(point) => command.env("FLOW_TEST_CHILD_KILL_AT", point),
        None => command.env_remove("FLOW_TEST_CHILD_KILL_AT"),
    };
    command
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null());
    command.spawn().unwrap()
}

/// A misspelt failpoint is an error, as the test would kill nothing.
#[test]
fn points_are_read_strictly() {
    let read = |value: &str| {
        let value = value.to_string();
        std::panic::catch_unwind(move || drop(failpoints::kill_at(&value, &flow_base::failpoints::STORE)))
    };
    for right in ["data-renamed:3", "export-done"] {
        assert!(read(right).is_ok(), "{right}");
    }
    for wrong in [
        "",
        "data",
        "data-renamed:",
        "data-renamed:0",
        "data-renamed:-1",
        "data-renamed:x",
    ] {
        assert!(read(wrong).is_err(), "{wrong}");
    }
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

#[test]
fn a_killed_run_leaves_the_digests_of_what_it_read() {
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
    // All partitions of the first region are committed by then.
    child_of(&place, &[], Some("index-written:1")).wait().unwrap();
    let store = Store::open(&Storage::default(), &place.options.state, Access::Read).unwrap();
    for shard in &shards {
        assert!(store.sources().known(shard).unwrap().is_some(), "{}", shard.display());
    }
}

pub(super) fn signal(child: &std::process::Child, name: &str) {
    let status = std::process::Command::new("kill")
        .args(["-s", name, &child.id().to_string()])
        .status()
        .unwrap();
    assert!(status.success());
}

pub(super) fn wait_until(what: impl Fn() -> bool) {
    let started = Instant::now();
    while !what() {
        assert!(started.elapsed() < Duration::from_secs(20), "waited too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// After a run that a signal ended: some of its partitions are left to the next one.
#[track_caller]
pub(super) fn the_rest_is_done_by_the_next_run(place: &Place) {
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
        expected(place, 3)
    );
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
    the_rest_is_done_by_the_next_run(&place);
}

/// Of stages that work for long on one partition: SQL, long recordings.
#[test]
fn what_takes_long_is_left_to_the_next_run() {
    let place = Place::new();
    let endless = PIPELINE.replace(
        "scan: {uses: toy.count, with: {",
        "scan: {uses: toy.count, with: {slow: 86400000, ",
    );
    place.pipeline(&endless);
    let mut child = child_of(&place, &[], None);
    wait_until(|| place.path("work.log").exists());
    signal(&child, "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
    place.pipeline(PIPELINE);
    place.run(&[]);
    let rows = fs::read_to_string(place.path("out/rows.txt")).unwrap();
    assert_eq!(rows, expected(&place, 3));
}

/// Of a stage that gives up in a batch, and of one that does so when it is asked for what it works on beside the worker.
#[test]
fn a_batch_that_takes_long_is_left_to_the_next_run() {
    for aside in [false, true] {
        let place = Place::new();
        let endless = format!("dear: true, slow: 86400000, aside: {aside}");
        place.pipeline(&PIPELINE.replace("dear: true, aside: true", &endless));
        let mut child = child_of(&place, &[], None);
        wait_until(|| place.path("work.log").exists());
        std::thread::sleep(std::time::Duration::from_millis(200));
        signal(&child, "TERM");
        assert_eq!(child.wait().unwrap().code(), Some(143), "aside: {aside}");
        place.pipeline(PIPELINE);
        place.run(&[]);
        let rows = fs::read_to_string(place.path("out/rows.txt")).unwrap();
        assert_eq!(rows, expected(&place, 3), "aside: {aside}");
    }
}

#[test]
fn a_lost_terminal_ends_a_run_as_sigterm_does_and_nohup_keeps_it_going() {
    let slow = PIPELINE.replace(
        "scan: {uses: toy.count, with: {",
        "scan: {uses: toy.count, with: {slow: 60, ",
    );
    let has_begun = |place: &Place| {
        place
            .worked()
            .get("scan")
            .is_some_and(|partitions| partitions.len() >= 3)
    };
    let place = Place::new();
    place.pipeline(&slow);
    let mut child = child_of(&place, &[], None);
    wait_until(|| has_begun(&place));
    // The kernel and the shell each send one.
    signal(&child, "HUP");
    signal(&child, "HUP");
    assert_eq!(child.wait().unwrap().code(), Some(129));
    assert!(!place.path("state/lock").exists());
    let begun = place.worked()["scan"].clone();
    place.run(&[]);
    let again = &place.worked()["scan"];
    assert!(
        begun.len() < 11 && again.len() < 11 && again.len() + begun.len() >= 11,
        "{begun:?} {again:?}"
    );

    let place = Place::new();
    place.pipeline(&slow);
    let mut nohup = std::process::Command::new("sh");
    nohup
        .args(["-c", "trap '' HUP; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap());
    let mut child = child_by(nohup, &place, &[], None);
    wait_until(|| has_begun(&place));
    signal(&child, "HUP");
    assert_eq!(child.wait().unwrap().code(), Some(0));
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
