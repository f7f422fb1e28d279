//! `kill -9` anywhere loses at most what was in flight: the next run ends with the same bytes.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use flow_random::SplitMix64;

use crate::binary::{Workplace, expect_code, stderr, with_failpoints};
use crate::pseudo_labels;
use crate::training::finetune;
use crate::transcription::recording;

/// The named points of the commit protocol: `runtime/base/src/failpoints.rs`.
const KILL_POINTS: [&str; 7] = [
    "data-written",
    "data-renamed",
    "record-written",
    "record-linked",
    "index-written",
    "export-renaming",
    "export-done",
];

#[test]
fn killed_at_every_point_of_the_commit_protocol() {
    let whole = Workplace::new("micro");
    whole.build_manifests(&[]);
    let expected = whole.out_bytes();
    for point in KILL_POINTS {
        let place = Workplace::new("micro");
        for pass in [1, 3] {
            let output = with_failpoints(&place.manifest_command("run", &[]))
                .env("FLOW_KILL_AT", format!("{point}:{pass}"))
                .output()
                .unwrap();
            // A later pass may not come, when what is left to do is less: then the run simply ends well.
            let killed = output.status.signal() == Some(9);
            assert!(killed || output.status.success(), "{point}:{pass}\n{}", stderr(&output));
            if pass == 1 {
                assert!(killed, "the run never came to {point}");
            }
        }
        place.build_manifests(&[]);
        assert!(place.out_bytes() == expected, "other bytes after a kill at {point}");
    }
}

#[test]
fn the_program_itself_has_no_failpoints() {
    let place = Workplace::new("micro");
    let mut run = place.manifest_command("run", &[]);
    expect_code(&run.env("FLOW_KILL_AT", "data-written:1").output().unwrap(), 0);
}

#[test]
fn killed_at_random_times() {
    let whole = Workplace::new("micro");
    whole.build_manifests(&[]);
    let expected = whole.out_bytes();
    let place = Workplace::new("micro");
    // Spread over the length of a run; what is committed shortens the next.
    for milliseconds in [30, 90, 170, 260, 110, 400, 60, 700] {
        let mut child = place
            .manifest_command("run", &[])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    place.build_manifests(&[]);
    assert!(place.out_bytes() == expected, "other bytes after random kills");
}

#[test]
fn a_second_run_on_one_state_directory_is_refused() {
    let place = Workplace::new("micro");
    place.build_manifests(&[]);
    let lock = std::fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(place.path("state").join("lock"))
        .unwrap();
    lock.lock().unwrap();
    let output = place.manifest_command("run", &["min_quality=0.6"]).output().unwrap();
    expect_code(&output, 3);
    drop(lock);
    place.build_manifests(&["min_quality=0.6"]);
}

#[test]
fn interrupt_ends_with_130_and_keeps_what_was_done() {
    let place = Workplace::new("mini");
    let mut child = place
        .manifest_command("run", &[])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    // SAFETY: kill(2) with a process id of our own child; no memory is involved.
    let sent = unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    assert_eq!(sent, 0);
    let code = child.wait().unwrap().code();
    assert!(matches!(code, Some(130 | 0)), "{code:?}");
    place.build_manifests(&[]);
    let whole = Workplace::new("mini");
    whole.build_manifests(&[]);
    assert!(place.out_bytes() == whole.out_bytes());
}

/// An engine that evaluates a join of billions of rows does not look up: the stage leaves it to itself.
#[test]
fn sql_without_end_is_ended_by_the_first_signal() {
    let place = Workplace::new("micro");
    let pipeline = place.path("endless.yaml");
    let joins: String = (0..12).map(|n| format!(", scan AS t{n}")).collect();
    let text = format!(
        "flow: 1\nparams: {{shards: {{required: true}}, out: ''}}\nstages:\n  scan: {{uses: manifest.scan, with: {{shards: '${{shards}}'}}}}\n  \
         all:\n    uses: sql\n    from: scan\n    with:\n      rows: new\n      \
         query: SELECT count(*) AS n FROM scan AS a{joins} WHERE a.duration_s + t0.duration_s * t11.duration_s < 0\n"
    );
    std::fs::write(&pipeline, text).unwrap();
    for (signal, code) in [(libc::SIGTERM, 143), (libc::SIGINT, 130)] {
        let mut child = place
            .command("run", pipeline.to_str().unwrap(), &[])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        assert!(said.any(|line| line.starts_with("all (sql)")));
        // SAFETY: kill(2) with a process id of our own child; no memory is involved.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        let rest: Vec<String> = said.collect();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{rest:?}");
    }
}

/// Every file below a folder, with its bytes where `is_compared`.
fn tree(folder: &Path, is_compared: &dyn Fn(&str) -> bool) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(at) = folders.pop() {
        for entry in std::fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                // A folder of its own, so that an empty one that is left shows.
                files.insert(format!("{name}/"), Vec::new());
                folders.push(path);
            } else {
                let bytes = if is_compared(&name) {
                    std::fs::read(&path).unwrap()
                } else {
                    Vec::new()
                };
                files.insert(name, bytes);
            }
        }
    }
    files
}

/// What is killed: a command on a workplace, which files of the workplace have the same bytes in every run, and which belong to
/// the user.
struct Job {
    name: &'static str,
    command: fn(&Workplace) -> Command,
    /// Endings of files that hold no times.
    compared: &'static [&'static str],
}

fn with_recordings(place: &Workplace) {
    let folder = place.path("recordings");
    if folder.exists() {
        return;
    }
    std::fs::create_dir(&folder).unwrap();
    for name in [
        "rec_hi_0001_000.flac",
        "rec_hi_0002_000.flac",
        "rec_hi_0004_003.flac",
        "rec_hi_0008_001.flac",
    ] {
        std::fs::write(folder.join(name), recording(name)).unwrap();
    }
}

const JOBS: [Job; 4] = [
    Job {
        name: "manifests",
        command: |place| {
            place.manifest_command(
                "run",
                &["jsonl=true", &format!("audio={}", place.path("audio").display())],
            )
        },
        compared: &[".parquet", ".jsonl", ".flac"],
    },
    Job {
        name: "transcribe",
        command: |place| {
            with_recordings(place);
            place.transcribe_command("txt,srt")
        },
        compared: &[".txt", ".srt"],
    },
    Job {
        name: "pseudo-labels",
        command: |place| {
            with_recordings(place);
            pseudo_labels::label_command(place, &[])
        },
        compared: &[".jsonl", ".parquet"],
    },
    Job {
        name: "training",
        command: |place| finetune(place, &["train.max_steps=8", "train.checkpoint_every=2"]),
        compared: &[".safetensors", ".jsonl"],
    },
];

/// Runs a job to its end in a workplace, and gives the user's files: all but the state directory.
fn whole(job: &Job, place: &Workplace) -> BTreeMap<String, Vec<u8>> {
    let output = (job.command)(place).output().unwrap();
    assert!(output.status.success(), "{}: {}", job.name, stderr(&output));
    let is_compared =
        |name: &str| job.compared.iter().any(|ending| name.ends_with(ending)) && !name.contains("metrics");
    let mut files = tree(place.folder.path(), &is_compared);
    files.retain(|name, _| !name.starts_with("state/"));
    files
}

/// `FLOW_TEST_KILLS` is another number of kills for each job, `FLOW_TEST_JOB` one of the jobs.
#[test]
#[ignore = "minutes: 75 kills of each of four jobs"]
fn kills_at_random_times_change_nothing_and_leave_nothing() {
    let kills: usize = std::env::var("FLOW_TEST_KILLS").map_or(75, |kills| kills.parse().unwrap());
    let only = std::env::var("FLOW_TEST_JOB").unwrap_or_default();
    let mut random = SplitMix64::new(11);
    // All in one path, which some files hold.
    let parent = tempfile::tempdir().unwrap();
    let workplace = || Workplace {
        folder: (tempfile::Builder::new().prefix("place").rand_bytes(0))
            .tempdir_in(&parent)
            .unwrap(),
        ..Workplace::new("micro")
    };
    for job in JOBS.iter().filter(|job| only.is_empty() || only == job.name) {
        let began = Instant::now();
        let expected = whole(job, &workplace());
        let length = began.elapsed();
        let (mut killed, mut differences, mut rounds) = (0, Vec::new(), 0);
        while killed < kills {
            let place = workplace();
            // Up to three kills before the run that ends.
            for _ in 0..=random.below(3) {
                let mut child = (job.command)(&place)
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .unwrap();
                std::thread::sleep(length.mul_f64(random.below(1000) as f64 / 1000.0));
                child.kill().unwrap();
                killed += usize::from(child.wait().unwrap().signal() == Some(9));
            }
            rounds += 1;
            let found = whole(job, &place);
            let names: Vec<&String> = (expected.keys().chain(found.keys()))
                .filter(|name| expected.get(*name) != found.get(*name))
                .collect();
            if !names.is_empty() {
                differences.push(format!("{names:?}"));
            }
        }
        println!(
            "{}: {killed} kills, {rounds} runs to the end, {} differences",
            job.name,
            differences.len()
        );
        assert!(differences.is_empty(), "{}: {}", job.name, differences.join("\n"));
    }
}
