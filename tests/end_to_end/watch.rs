//! `flow run --watch`: outputs follow the sources while they change.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::binary::{Workplace, copy_folder, corpus, expect_code, folder_bytes, stderr};

/// Ends the program if a test fails before it does so itself.
pub struct Running(Option<Child>);

impl Running {
    pub fn start(command: &mut Command) -> Running {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Running(Some(child))
    }

    pub fn terminate(mut self) -> std::process::Output {
        let child = self.0.take().unwrap();
        let killed = Command::new("kill").arg(child.id().to_string()).status().unwrap();
        assert!(killed.success());
        child.wait_with_output().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Outcomes of the runs that ended, by the file of events.
fn outcomes(events: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(events).unwrap_or_default();
    text.lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|event| event["event"] == "run_finished")
        .map(|event| event["outcome"].as_str().unwrap().to_owned())
        .collect()
}

pub fn wait_for_runs(events: &Path, count: usize) -> Vec<String> {
    let began = Instant::now();
    loop {
        let ended = outcomes(events);
        if ended.len() >= count {
            return ended;
        }
        assert!(
            began.elapsed() < Duration::from_secs(120),
            "{} runs ended, {count} were to",
            ended.len()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The bytes that a run from nothing makes of the same shards.
fn from_nothing(place: &Workplace) -> std::collections::BTreeMap<String, Vec<u8>> {
    let fresh = Workplace {
        shards: place.shards.clone(),
        ..Workplace::new("micro")
    };
    fresh.build_manifests(&[]);
    fresh.out_bytes()
}

#[test]
fn outputs_follow_the_shards_until_a_signal_comes() {
    outputs_follow_the_shards(&[], "the file system tells of them");
}

#[test]
fn outputs_follow_the_shards_where_the_file_system_tells_nothing() {
    outputs_follow_the_shards(&["--poll", "--keep", "1"], "they are looked for every 0.8 s");
}

fn outputs_follow_the_shards(options: &[&str], how: &str) {
    let place = Workplace::with_copy("micro");
    let events = place.path("events.jsonl");
    let mut command = place.manifest_command("run", &[]);
    command
        .args(["--watch", "--settle", "1.6", "--allow-shrink", "--events"])
        .arg(&events)
        .args(options);
    let running = Running::start(&mut command);

    wait_for_runs(&events, 1);
    let first = folder_bytes(&place.out());
    assert!(first == from_nothing(&place));

    // A shard that comes while it is written, slowly: its files one after another.
    let added = place.shards.join("hi/hi_0005");
    let from = corpus("mini").join("shards/hi/hi_0005");
    std::fs::create_dir_all(&added).unwrap();
    for entry in std::fs::read_dir(&from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), added.join(entry.file_name())).unwrap();
        std::thread::sleep(Duration::from_millis(150));
    }
    wait_for_runs(&events, 2);
    let more = folder_bytes(&place.out());
    assert!(more != first && more == from_nothing(&place));

    // Sources that cannot be listed end nothing, and their coming back is no change.
    let away = place.path("away");
    std::fs::rename(&place.shards, &away).unwrap();
    std::thread::sleep(Duration::from_millis(3_000));
    std::fs::rename(&away, &place.shards).unwrap();

    std::fs::remove_dir_all(&added).unwrap();
    wait_for_runs(&events, 3);
    assert!(folder_bytes(&place.out()) == first);

    let output = running.terminate();
    expect_code(&output, 0);
    let waiting = format!("waiting for changes of the sources; {how}");
    assert!(stderr(&output).contains(&waiting), "{}", stderr(&output));
    // The first run loads what the others decide by.
    let told = std::fs::read_to_string(&events).unwrap();
    for stage in ["unique", "split"] {
        assert!(told.contains(&format!("{stage} decided by changes")), "{told}");
    }
    let outcomes = outcomes(&events);
    assert_eq!(outcomes.len(), 3, "{outcomes:?}\n{}", stderr(&output));
    assert!(outcomes.iter().all(|outcome| outcome == "done"), "{outcomes:?}");
    // The signal may come before the last run's turn.
    let runs = std::fs::read_dir(place.path("state").join("runs")).unwrap().count();
    match options.contains(&"--keep") {
        true => assert!(
            runs <= 2 && stderr(&output).contains("removed"),
            "{runs} {}",
            stderr(&output)
        ),
        false => assert_eq!(runs, 3),
    }
}

/// Where the file system tells of changes, sources are listed only every 30 seconds otherwise.
#[test]
fn a_shard_is_taken_up_long_before_sources_are_listed_anyway() {
    let place = Workplace::with_copy("micro");
    let events = place.path("events.jsonl");
    let mut command = place.manifest_command("run", &[]);
    command.args(["--watch", "--settle", "0.4", "--events"]).arg(&events);
    let running = Running::start(&mut command);
    wait_for_runs(&events, 1);
    let added = place.path("added");
    copy_folder(&corpus("mini").join("shards/hi/hi_0005"), &added);
    let began = Instant::now();
    std::fs::rename(&added, place.shards.join("hi/hi_0005")).unwrap();
    wait_for_runs(&events, 2);
    let waited = began.elapsed();
    assert!(folder_bytes(&place.out()) == from_nothing(&place));
    expect_code(&running.terminate(), 0);
    assert!(waited < Duration::from_secs(25), "{waited:?}");
}

#[test]
fn what_cannot_be_watched_is_refused() {
    let place = Workplace::with_copy("micro");
    let mut train = place.command("run", "pipelines/finetune.yaml", &[]);
    let output = train.args(["--watch"]).output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("--until"), "{}", stderr(&output));
    let mut train = place.command("run", "pipelines/finetune.yaml", &[]);
    let output = train.args(["--watch", "--until", "train"]).output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("trains"), "{}", stderr(&output));

    // A first run that fails ends it, as it would without --watch.
    copy_folder(&place.shards, &place.path("kept"));
    std::fs::remove_dir_all(&place.shards).unwrap();
    let mut missing = place.manifest_command("run", &[]);
    let output = missing.args(["--watch", "--settle", "0.2"]).output().unwrap();
    assert!(matches!(output.status.code(), Some(1 | 2)), "{}", stderr(&output));
    assert!(!stderr(&output).contains("waiting"), "{}", stderr(&output));
}
