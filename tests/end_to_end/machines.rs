//! Runs of several processes on this machine: the same bits as one process; processes that die, hang or do not belong
//! to the run are named by all.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use flow_storage_testing::free_port;

use crate::binary::{Workplace, expect_code, read_manifest, stderr, with_failpoints};
use crate::training::{find, finetune, has_checkpoint, last_checkpoint};

/// Longer than anything here takes on a busy machine; a test that would wait for ever fails instead.
const LONG: Duration = Duration::from_secs(180);

/// Two ranks whose steps do not depend on how many are to come.
const TWO: [&str; 2] = ["train.ranks=2", "train.schedule=constant"];

/// A started process, killed at the end of the test.
pub struct Started {
    child: Child,
    told: Option<std::thread::JoinHandle<String>>,
}

impl Started {
    pub fn new(mut command: Command) -> Started {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut from = child.stderr.take().unwrap();
        let told = std::thread::spawn(move || {
            let mut text = String::new();
            // What is cut off by a kill may end in the middle.
            let _ = from.read_to_string(&mut text);
            text
        });
        Started {
            child,
            told: Some(told),
        }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: kill(2) with a process id of our own child; no memory is involved.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Exit code (none where a signal ended it) and what it said.
    #[track_caller]
    pub fn end(mut self) -> (Option<i32>, String) {
        let until = Instant::now() + LONG;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break Some(status);
            }
            if Instant::now() > until {
                break None;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        if status.is_none() {
            self.child.kill().unwrap();
        }
        let told = self.told.take().unwrap().join().unwrap();
        let status = status.unwrap_or_else(|| panic!("it did not end:\n{told}"));
        (status.code(), told)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // Ended already, in a test that went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The commands of process 0 and 1, which meet by a file of hosts.
fn two(place: &Workplace, settings: &[&str]) -> [Command; 2] {
    let hosts = place.path("hosts.txt");
    std::fs::write(&hosts, format!("# one machine\nlocalhost:{}\nlocalhost\n", free_port())).unwrap();
    [0, 1].map(|process| {
        let all: Vec<&str> = TWO.iter().chain(settings).copied().collect();
        let mut command = finetune(place, &all);
        command
            .arg("--hosts")
            .arg(&hosts)
            .args(["--process", &process.to_string()]);
        command
    })
}

fn started(commands: [Command; 2]) -> [Started; 2] {
    commands.map(Started::new)
}

#[track_caller]
pub fn wait_until(what: &str, is: impl Fn() -> bool) {
    let until = Instant::now() + LONG;
    while !is() {
        assert!(Instant::now() < until, "waited without success: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Rank 1 hangs where checkpoints stand already, so that what follows does not depend on who is faster.
const HANG: (&str, &str) = ("FLOW_HANG_AT", "1:6");

/// If a process is killed, the other one names it and ends; after a restart with another launcher, the result is equal
/// to the bit to that of one uninterrupted process.
#[test]
fn a_killed_process_is_named_and_two_processes_give_the_bits_of_one() {
    let steps = ["train.max_steps=8", "train.checkpoint_every=4"];
    let one = Workplace::new("micro");
    let all: Vec<&str> = TWO.iter().chain(&steps).copied().collect();
    expect_code(&finetune(&one, &all).output().unwrap(), 0);
    for killed in [1, 0] {
        let place = Workplace::new("micro");
        let mut commands = two(&place, &steps).map(|command| with_failpoints(&command));
        commands[1].env(HANG.0, HANG.1);
        let [first, second] = started(commands);
        wait_until("a checkpoint", || has_checkpoint(&place.path("checkpoints")));
        let (victim, other) = if killed == 0 { (first, second) } else { (second, first) };
        let pid = victim.child.id();
        victim.signal(libc::SIGKILL);
        assert_eq!(victim.end().0, None);
        let (code, told) = other.end();
        assert_eq!(code, Some(1), "{told}");
        let named = format!("process {killed} (");
        assert!(
            told.contains(&named) && told.contains(&format!("pid {pid}) ended without a message")),
            "{told}"
        );
        assert!(!has_step(&place, 8));

        let again = launched(&place, &all, killed == 0);
        let by = if killed == 0 {
            "Slurm's variables"
        } else {
            "torchrun's variables"
        };
        for (process, (code, told)) in started(again).map(Started::end).into_iter().enumerate() {
            assert_eq!(code, Some(0), "{told}");
            assert!(told.contains(&format!("process {process} of 2 (by {by})")), "{told}");
            assert_eq!(process == 1, told.contains("rank 1 of 2 ready"), "{told}");
        }
        assert!(
            last_checkpoint(&one, 8) == last_checkpoint(&place, 8),
            "two processes gave other bits than one"
        );
    }
}

/// The same where the ranks exchange by NCCL's functions, those of a stand-in that works over memory which both processes
/// have in common: the bits of one process without it, also after a rank hung or its process was killed, which the other
/// one names.
#[test]
fn two_processes_that_exchange_by_nccl_give_the_bits_of_one() {
    let steps = ["train.max_steps=8", "train.checkpoint_every=4", "train.rank_timeout=5"];
    let one = Workplace::new("micro");
    let all: Vec<&str> = TWO.iter().chain(&steps).copied().collect();
    expect_code(&finetune(&one, &all).output().unwrap(), 0);
    for killed in [false, true] {
        let place = Workplace::new("micro");
        let by_nccl = || {
            two(&place, &steps).map(|command| {
                let mut command = with_failpoints(&command);
                command.env("FLOW_STAND_IN_NCCL", "1");
                command
            })
        };
        let mut commands = by_nccl();
        commands[1].env(HANG.0, HANG.1);
        let [first, second] = started(commands);
        wait_until("a checkpoint", || has_checkpoint(&place.path("checkpoints")));
        let named = if killed {
            second.signal(libc::SIGKILL);
            "ended without a message"
        } else {
            "rank 1 of training failed: it did not come to"
        };
        let (code, told) = first.end();
        assert_eq!(code, Some(1), "{told}");
        assert!(told.contains(named), "{told}");
        second.end();
        assert!(!has_step(&place, 8));

        let [first, second] = started(by_nccl()).map(Started::end);
        assert_eq!(first.0, Some(0), "{}", first.1);
        assert_eq!(second.0, Some(0), "{}", second.1);
        assert!(
            second.1.contains("rank 1 of 2 ready") && second.1.contains("go by NCCL"),
            "{}",
            second.1
        );
        assert!(
            last_checkpoint(&one, 8) == last_checkpoint(&place, 8),
            "two processes that exchange by NCCL gave other bits than one"
        );
    }
}

/// What training noted in its metrics, without times and memory.
fn figures(place: &Workplace) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(place.path("checkpoints/metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    lines
        .map(|mut line: serde_json::Value| {
            let fields = line.as_object_mut().unwrap();
            for name in [
                "seconds",
                "time",
                "waited_for_data",
                "rank_waits",
                "memory_mib",
                "audio_seconds_per_second",
            ] {
                fields.remove(name);
            }
            line
        })
        .filter(|line| line["kind"] != "evaluation")
        .collect()
}

/// Each process loads the micro-batches of its own ranks, of which some recordings cannot be decoded: figures, what is left
/// out and weights are those of one process that loads all. So they are where process 0 sends the micro-batches, because
/// the processes do not share the state directory.
#[test]
fn each_process_loads_the_micro_batches_of_its_ranks() {
    let made = Workplace::new("micro");
    let setting = |name: &str, path: std::path::PathBuf| format!("{name}={}", path.display());
    expect_code(&finetune(&made, &["train.max_steps=1"]).output().unwrap(), 0);
    let audio = made.path("audio");
    made.build_manifests(&[&setting("audio", audio.clone())]);
    let manifest = made.out().join("train_manifest_v2.parquet");
    for row in read_manifest(&manifest).iter().step_by(3) {
        let lang = row.tar_path.rsplit('/').nth(2).unwrap();
        let recording = audio.join(lang).join(&row.shard_id).join(&row.tar_member_name);
        let bytes = std::fs::read(&recording).unwrap();
        std::fs::write(&recording, &bytes[..bytes.len() / 2]).unwrap();
    }
    let given = [
        "train.max_steps=8".to_owned(),
        setting("train_manifest", manifest),
        setting("val_manifest", made.out().join("val_manifest_v2.parquet")),
        setting("audio", audio),
    ];
    let given: Vec<&str> = given.iter().map(String::as_str).collect();

    let one = Workplace::new("micro");
    let all: Vec<&str> = TWO.iter().chain(&given).copied().collect();
    expect_code(&finetune(&one, &all).output().unwrap(), 0);
    let expected = figures(&one);
    assert!(expected.iter().any(|line| line["kind"] == "left_out"), "{expected:?}");

    for shared in [true, false] {
        let (place, elsewhere) = (Workplace::new("micro"), Workplace::new("micro"));
        let mut commands = two(&place, &given);
        if !shared {
            let folders = ["checkpoints", "report", "model_out", "out"].map(|name| setting(name, place.path(name)));
            let all: Vec<&str> = (all.iter().copied())
                .chain(folders.iter().map(String::as_str))
                .collect();
            commands[1] = finetune(&elsewhere, &all);
            commands[1].arg("--hosts").arg(place.path("hosts.txt"));
            commands[1].args(["--process", "1"]);
        }
        for (process, (code, told)) in started(commands).map(Started::end).into_iter().enumerate() {
            assert_eq!(code, Some(0), "{told}");
            let loaded = told.contains("its ranks took the micro-batches of 8 steps, loaded here");
            assert_eq!(loaded, shared && process == 1, "{told}");
            assert_eq!(
                told.contains("the others train only"),
                !shared && process == 0,
                "{told}"
            );
        }
        assert_eq!(figures(&place), expected, "shared: {shared}");
        assert!(
            last_checkpoint(&one, 8) == last_checkpoint(&place, 8),
            "two processes gave other bits than one, shared: {shared}"
        );
    }
}

/// Training ends by `early_stopping` at process 0; both end well, and what follows runs.
#[test]
fn processes_end_together_where_training_ends_early() {
    let place = Workplace::new("micro");
    let settings = [
        "train.max_steps=200",
        "train.eval_every=2",
        "train.early_stopping={patience: 1, min_delta: 1.0}",
    ];
    for process in started(two(&place, &settings)) {
        let (code, told) = process.end();
        assert_eq!(code, Some(0), "{told}");
    }
    assert!(has_step(&place, 4) && !has_step(&place, 6));
    assert!(place.path("model_out/model.nemo").is_file());
}

/// The commands of both processes, with the environment variables of Slurm or torchrun.
fn launched(place: &Workplace, settings: &[&str], slurm: bool) -> [Command; 2] {
    let port = free_port();
    [0, 1].map(|process: u32| {
        let mut command = finetune(place, settings);
        let process = process.to_string();
        if slurm {
            command.args(["--launch", "auto", "--port", &port.to_string()]);
            command.env("SLURM_PROCID", process).env("SLURM_STEP_NUM_TASKS", "2");
            command.env("SLURM_STEP_NODELIST", "localhost");
        } else {
            command.args(["--launch", "torchrun"]);
            command.env("RANK", process).env("WORLD_SIZE", "2");
            command
                .env("MASTER_ADDR", "localhost")
                .env("MASTER_PORT", (port - 1).to_string());
        }
        command
    })
}

fn has_step(place: &Workplace, step: u64) -> bool {
    place.path("checkpoints").join(format!("step-{step:09}")).is_dir()
}

/// A rank that hangs is named by the other process within its patience; both end, though the hanging rank never does, and
/// the checkpoint is whole.
#[test]
fn a_rank_that_hangs_is_named_within_the_timeout() {
    let place = Workplace::new("micro");
    let settings = ["train.max_steps=8", "train.checkpoint_every=4", "train.rank_timeout=3"];
    let mut commands = two(&place, &settings).map(|command| with_failpoints(&command));
    commands[1].env(HANG.0, HANG.1);
    let [first, second] = started(commands);
    wait_until("a checkpoint", || has_checkpoint(&place.path("checkpoints")));
    for (process, (code, told)) in [first, second].map(Started::end).into_iter().enumerate() {
        assert_eq!(code, Some(1), "process {process}: {told}");
        assert!(
            told.contains("rank 1 of training failed: it did not come to"),
            "{process}: {told}"
        );
        assert!(told.contains("within 3 s"), "{told}");
        // It was not ended for a hanging rank at last: neither by itself nor because process 0 did not end the run.
        assert!(!told.contains("did not end"), "{told}");
    }
    for (code, told) in started(two(&place, &settings)).map(Started::end) {
        assert_eq!(code, Some(0), "{told}");
    }
    assert!(has_step(&place, 8));
}

/// SIGUSR1 and SIGTERM to either process apply to the whole run.
#[test]
fn signals_to_any_process_are_for_all() {
    let endless = [
        "train.max_steps=1000000",
        "train.checkpoint_every=1000000",
        "train.eval_every=0",
    ];
    for to in [1, 0] {
        let place = Workplace::new("micro");
        let both = started(two(&place, &endless));
        let checkpoints = place.path("checkpoints");
        wait_until("training", || checkpoints.join("metrics.jsonl").is_file());
        // Ctrl-Z and `fg`: what was stopped for a moment goes on.
        both[to].signal(libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(300));
        both[to].signal(libc::SIGCONT);
        both[to].signal(libc::SIGUSR1);
        wait_until("a checkpoint", || has_checkpoint(&checkpoints));
        both[to].signal(libc::SIGTERM);
        for (code, told) in both.map(Started::end) {
            assert_eq!(code, Some(143), "{told}");
        }
        // The last checkpoint is that of one process which does as many steps.
        let steps = std::fs::read_dir(&checkpoints).unwrap().filter_map(|entry| {
            let name = entry.unwrap().file_name().to_string_lossy().into_owned();
            name.strip_prefix("step-")?.parse::<u64>().ok()
        });
        let last = steps.max().unwrap();
        if to == 0 {
            continue;
        }
        let one = Workplace::new("micro");
        let steps = format!("train.max_steps={last}");
        let all: Vec<&str> = TWO
            .iter()
            .copied()
            .chain([steps.as_str(), "train.eval_every=0"])
            .collect();
        expect_code(&finetune(&one, &all).output().unwrap(), 0);
        assert!(
            last_checkpoint(&one, last) == last_checkpoint(&place, last),
            "after {last} steps"
        );
        find(&checkpoints, &format!("step-{last:09}"));
    }
}

/// Processes that share a secret train together; one with another secret, or with none, is refused by words on both
/// sides, and hears nothing of the settings.
#[test]
fn only_who_knows_the_secret_can_join() {
    let place = Workplace::new("micro");
    let secret = |name: &str, text: &str, mode: u32| {
        let path = place.path(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    let right = secret("right", "a secret of this run\n", 0o600);
    let same = secret("same", "a secret of this run", 0o644);
    let wrong = secret("wrong", "a secret of another run", 0o600);
    let [mut first, mut second] = two(&place, &["train.max_steps=4"]);
    first.arg("--secret-file").arg(&right);
    second.arg("--secret-file").arg(&same);
    let first = Started::new(first);
    for (file, said) in [
        (Some(&wrong), "it does not know the secret of process 0"),
        (None, "it has no secret, and process 0 has one"),
    ] {
        let mut stranger = finetune(&place, &[TWO[0], TWO[1], "train.max_steps=5"]);
        stranger
            .arg("--hosts")
            .arg(place.path("hosts.txt"))
            .args(["--process", "1"]);
        if let Some(file) = file {
            stranger.arg("--secret-file").arg(file);
        }
        let (code, told) = Started::new(stranger).end();
        assert_eq!(code, Some(2), "{told}");
        assert!(told.contains("refuses process 1") && told.contains(said), "{told}");
        assert!(!told.contains("max_steps"), "{told}");
    }
    let (code, told) = Started::new(second).end();
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("(mode 644)") && told.contains("chmod 600"), "{told}");
    let (code, told) = first.end();
    assert_eq!(code, Some(0), "{told}");
    for said in [
        "it does not know the secret of process 0",
        "it has no secret, and process 0 has one",
    ] {
        assert!(told.contains(said), "{told}");
    }
    let refused: Vec<&str> = told.lines().filter(|line| line.contains("refused: ")).collect();
    assert!(refused.len() == 2 && !refused.concat().contains("max_steps"), "{told}");
    // It listens at a loopback address, and the owner alone can read its file.
    assert!(!told.contains("without a secret") && !told.contains("chmod"), "{told}");
    assert!(has_step(&place, 4));

    let mut short = finetune(&place, &TWO);
    short
        .args(["--launch", "slurm", "--secret-file"])
        .arg(secret("short", "hush", 0o600));
    short.env("SLURM_PROCID", "0").env("SLURM_STEP_NUM_TASKS", "2");
    short.env("SLURM_STEP_NODELIST", "localhost");
    let output = short.output().unwrap();
    expect_code(&output, 2);
    let told = stderr(&output);
    assert!(told.contains("fewer than 16") && !told.contains("hush"), "{told}");
    let output = finetune(&place, &TWO)
        .arg("--secret-file")
        .arg(&right)
        .output()
        .unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("--hosts"), "{}", stderr(&output));
}

#[test]
fn processes_that_do_not_fit_together_are_refused_with_their_reason() {
    let place = Workplace::new("micro");
    // Other settings: refused, both say which, and process 0 does not wait its time out.
    let [mut first, _] = two(&place, &["train.max_steps=4"]);
    first.args(["--join-timeout", "600"]);
    let first = Started::new(first);
    let began = std::time::Instant::now();
    let hosts = place.path("hosts.txt");
    let mut other = finetune(
        &place,
        &["train.ranks=2", "train.schedule=constant", "train.max_steps=5"],
    );
    other.arg("--hosts").arg(&hosts).args(["--process", "1"]);
    let (code, told) = Started::new(other).end();
    assert_eq!(code, Some(2), "{told}");
    assert!(
        told.contains("its pipeline, settings or program differ from those of process 0"),
        "{told}"
    );
    assert!(told.contains("`train.max_steps` is 5 instead of 4"), "{told}");
    let (code, told) = first.end();
    assert_eq!(code, Some(2), "{told}");
    assert!(
        told.contains("error: process 1 (") && told.contains("`train.max_steps` is 5 instead of 4"),
        "{told}"
    );
    assert!(began.elapsed().as_secs() < 300);
    assert!(!place.path("checkpoints").exists());

    // Another selection of stages.
    let [mut first, mut other] = two(&place, &["train.max_steps=4"]);
    other.args(["--until", "train"]);
    first.args(["--join-timeout", "600"]);
    for (code, told) in started([first, other]).map(Started::end) {
        assert_eq!(code, Some(2), "{told}");
        assert!(told.contains("`--until` is train instead of none"), "{told}");
    }

    // Nobody to meet, and ranks that cannot be dealt out.
    let refused = |mut command: Command, code: i32, said: &str| {
        command.args(["--join-timeout", "1"]);
        let output = command.output().unwrap();
        expect_code(&output, code);
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    };
    let [_, second] = two(&place, &["train.max_steps=4"]);
    refused(second, 1, "cannot be reached");
    let [odd, _] = two(&place, &["train.max_steps=4", "train.ranks=3"]);
    refused(odd, 2, "3 cannot be shared out evenly over 2 processes");
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    std::fs::write(
        &hosts,
        format!("localhost:{}\nlocalhost\n", taken.local_addr().unwrap().port()),
    )
    .unwrap();
    let mut leader = finetune(&place, &["train.ranks=2"]);
    leader.arg("--hosts").arg(&hosts).args(["--process", "0"]);
    refused(leader, 1, "is taken");
}

/// The commands of `count` processes of `workers` workers each, which build manifests.
fn manifests_by(place: &Workplace, count: usize, workers: usize) -> Vec<Command> {
    let hosts = place.path("hosts.txt");
    let others = "localhost\n".repeat(count - 1);
    std::fs::write(&hosts, format!("localhost:{}\n{others}", free_port())).unwrap();
    let command = |process: usize| {
        let mut command = place.manifest_command("run", &[]);
        command.args(["--workers", &workers.to_string(), "--hosts"]).arg(&hosts);
        command.args(["--process", &process.to_string()]);
        command
    };
    (0..count).map(command).collect()
}

/// Every data file of the artifacts, by recipe and name. Recipes that select rows of others have none.
fn artifacts(place: &Workplace) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for recipe in std::fs::read_dir(place.path("state/artifacts")).unwrap() {
        let recipe = recipe.unwrap();
        for file in std::fs::read_dir(recipe.path().join("data")).unwrap() {
            let file = file.unwrap();
            let name = format!("{}/{}", recipe.file_name().display(), file.file_name().display());
            all.insert(name, std::fs::read(file.path()).unwrap());
        }
    }
    all
}

/// Data files that are missing, that are there in addition, or have other bytes.
fn differences(expected: &BTreeMap<String, Vec<u8>>, found: &BTreeMap<String, Vec<u8>>) -> Vec<String> {
    let names: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
    let described = names
        .into_iter()
        .filter_map(|name| match (expected.get(name), found.get(name)) {
            (Some(expected), Some(found)) if expected == found => None,
            (Some(_), Some(_)) => Some(format!("{name} has other bytes")),
            (Some(_), None) => Some(format!("{name} is missing")),
            (None, _) => Some(format!("{name} is new")),
        });
    described.collect()
}

/// Manifests of the bundled corpus by several processes with several workers: every artifact and every exported file has the
/// bytes that one process gives. One that is killed is named, and other numbers of processes go on from what was committed.
#[test]
fn manifests_of_several_processes_are_those_of_one() {
    let one = Workplace::new("mini");
    one.build_manifests(&[]);
    let (out, data) = (one.out_bytes(), artifacts(&one));
    assert!(out.len() >= 4 && data.len() > 20, "{:?}", out.keys());
    for (count, workers) in [(2, 1), (2, 3), (4, 1), (4, 3)] {
        let place = Workplace::new("mini");
        for (process, started) in manifests_by(&place, count, workers)
            .into_iter()
            .map(Started::new)
            .collect::<Vec<_>>()
            .into_iter()
            .enumerate()
        {
            let (code, told) = started.end();
            assert_eq!(code, Some(0), "process {process}: {told}");
        }
        assert!(
            place.out_bytes() == out,
            "{count} processes of {workers} workers: other exports"
        );
        assert!(
            artifacts(&place) == data,
            "{count} processes of {workers} workers: other artifacts"
        );
        let again = place.manifest_command("plan", &[]).arg("--exit-code").output().unwrap();
        expect_code(&again, 0);
    }
    for (killed, point) in [
        (1, "data-written:7"),
        // Process 0 alone writes records.
        (0, "record-written:2"),
        (0, "record-linked:2"),
        // Duplicates, then the split.
        (0, "decided:1"),
        (0, "decided:2"),
    ] {
        let place = Workplace::new("mini");
        let mut commands: Vec<Command> = manifests_by(&place, 3, 2).iter().map(with_failpoints).collect();
        commands[killed].env("FLOW_KILL_AT", point);
        let all: Vec<Started> = commands.into_iter().map(Started::new).collect();
        let named = format!("pid {}) ended without a message", all[killed].child.id());
        for (process, started) in all.into_iter().enumerate() {
            let (code, told) = started.end();
            if process == killed {
                assert_eq!(code, None, "{point}: {told}");
            } else {
                assert_eq!(code, Some(1), "{point}: {told}");
                assert!(told.contains(&named), "{point}: {told}");
            }
        }
        for started in manifests_by(&place, 2, 1)
            .into_iter()
            .map(Started::new)
            .collect::<Vec<_>>()
        {
            let (code, told) = started.end();
            assert_eq!(code, Some(0), "{told}");
        }
        assert!(place.out_bytes() == out, "after {point}: other exports");
        let others = differences(&data, &artifacts(&place));
        assert!(others.is_empty(), "after {point}: other artifacts: {others:?}");
    }
}

/// Processes without a common state directory cannot share the partitions.
#[test]
fn a_state_directory_that_is_not_shared_is_told() {
    let place = Workplace::new("micro");
    let mut commands = manifests_by(&place, 2, 1);
    let elsewhere = Workplace::new("micro");
    let out = format!("out={}", place.out().display());
    commands[1] = elsewhere.manifest_command("run", &[&out]);
    commands[1].arg("--hosts").arg(place.path("hosts.txt"));
    commands[1].args(["--process", "1"]);
    for started in commands.into_iter().map(Started::new).collect::<Vec<_>>() {
        let (code, told) = started.end();
        assert_eq!(code, Some(2), "{told}");
        assert!(told.contains("not all processes see what process 0 sees"), "{told}");
    }
}

/// A corpus that another process sees in part: the run is refused where a sample shows it, and ends where it meets a file
/// that only process 0 can read. No row is rejected for it.
#[test]
fn a_corpus_that_is_not_the_same_for_all_is_told() {
    let place = Workplace::with_copy("mini");
    let elsewhere = Workplace::with_copy("mini");
    let mut shards: Vec<_> = std::fs::read_dir(elsewhere.path("shards"))
        .unwrap()
        .map(|language| language.unwrap().path())
        .filter(|language| language.is_dir())
        .flat_map(|language| std::fs::read_dir(language).unwrap())
        .map(|shard| shard.unwrap().path())
        .filter(|shard| shard.join("metadata.parquet").is_file())
        .collect();
    shards.sort();
    let run = |code: i32, said: &str| {
        let hosts = place.path("hosts.txt");
        std::fs::write(&hosts, format!("localhost:{}\nlocalhost\n", free_port())).unwrap();
        let command = |process: usize| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_flow"));
            let pipeline = concat!(env!("CARGO_MANIFEST_DIR"), "/pipelines/build_manifest_v2.yaml");
            // The same names in two folders.
            command.current_dir([&place, &elsewhere][process].folder.path());
            command
                .args(["run", pipeline, "--progress", "plain", "--workers", "1", "--hosts"])
                .arg(&hosts);
            command.args([
                "--process",
                &process.to_string(),
                "--set",
                "shards=shards",
                "--set",
                "out=out",
            ]);
            command.arg("--state").arg(place.path("state"));
            command
        };
        for started in [0, 1].map(|process| Started::new(command(process))) {
            let (found, told) = started.end();
            assert_eq!(found, Some(code), "{told}");
            assert!(told.contains(said) && told.contains("process 1 ("), "{told}");
        }
        assert!(!place.path("out").exists());
    };
    // One that falls to process 1, between the 16 that are looked at.
    assert!(shards.len() > 2 * 16, "{}", shards.len());
    std::fs::remove_file(shards[1].join("metadata.parquet")).unwrap();
    run(
        1,
        "metadata.parquet, which process 0 can: all processes read the same files",
    );
    std::fs::remove_dir_all(elsewhere.path("shards")).unwrap();
    run(2, "cannot be seen here");
}
