//! Several processes that have nothing in common but object storage, killed and gone on with in other numbers: the bytes of one
//! process on a disk.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use flow_storage_testing::{Fault, FaultRule, TestServer, free_port};

use crate::binary::{Workplace, copy_folder, expect_code, folder_bytes, program};
use crate::machines::{Started, wait_until};
use crate::storage::age;
use crate::training::{finetune, last_checkpoint};

const STATE: &str = "s3://bucket/state";

/// Buckets with a corpus, and room for all that is made of it.
struct Place {
    place: Workplace,
    server: TestServer,
}

impl Place {
    fn new() -> Place {
        let mut place = Workplace::new("micro");
        let root = place.path("served");
        copy_folder(&place.shards, &root.join("corpora/shards"));
        age(&root);
        fs::create_dir(root.join("bucket")).unwrap();
        place.shards = PathBuf::from("s3://corpora/shards");
        Place {
            server: TestServer::start(&root).unwrap(),
            place,
        }
    }

    /// The command of a process on a machine that has a folder of its own for what it keeps; `state` in place of its own.
    fn on(&self, machine: usize, command: &Command, state: &str) -> Command {
        let mut flow = program();
        let mut arguments = command.get_args();
        while let Some(argument) = arguments.next() {
            flow.arg(argument);
            if argument == "--state" {
                arguments.next();
                flow.arg(state);
            }
        }
        flow.envs(self.server.environment());
        flow.env("FLOW_STORAGE_CACHE", self.place.path(&format!("machine{machine}")));
        flow
    }

    /// The processes of a run, each on a machine of its own; some of a run before them are among these.
    fn start(&self, command: &Command, processes: usize) -> Vec<Started> {
        let hosts = self.place.path("hosts.txt");
        let lines = format!("localhost:{}\n{}", free_port(), "localhost\n".repeat(processes - 1));
        fs::write(&hosts, lines).unwrap();
        let start = |process: usize| {
            let mut flow = self.on(process, command, STATE);
            if processes > 1 {
                flow.arg("--hosts")
                    .arg(&hosts)
                    .args(["--process", &process.to_string()]);
            }
            Started::new(flow)
        };
        (0..processes).map(start).collect()
    }

    /// Kills a process of a run once so many requests came that have `what` in them: all others end.
    fn killed(&self, command: &Command, processes: usize, kill: usize, what: &str, requests: u64) {
        let before = self.server.requests(what);
        let is_time = || self.server.requests(what) >= before + requests;
        self.killed_when(command, processes, kill, what, is_time);
    }

    /// Kills a process of a run once it is time: all others end.
    fn killed_when(&self, command: &Command, processes: usize, kill: usize, what: &str, is_time: impl Fn() -> bool) {
        let mut all = self.start(command, processes);
        wait_until(what, is_time);
        all[kill].signal(libc::SIGKILL);
        let (code, told) = all.remove(kill).end();
        assert_eq!(code, None, "it ended before {what}:\n{told}");
        for (code, told) in all.into_iter().map(Started::end) {
            assert_eq!(code, Some(1), "{told}");
            assert!(told.contains(&format!("process {kill} (")), "{told}");
        }
    }

    fn done(&self, command: &Command, processes: usize) {
        for (code, told) in self.start(command, processes).into_iter().map(Started::end) {
            assert_eq!(code, Some(0), "{told}");
        }
    }

    fn served(&self, folder: &str) -> PathBuf {
        self.server.root().join("bucket").join(folder)
    }
}

/// The files of the set that is below a prefix.
fn set_at(prefix: &Path) -> BTreeMap<String, Vec<u8>> {
    let sets = fs::read_dir(prefix).unwrap().map(|entry| entry.unwrap().path());
    let sets: Vec<PathBuf> = sets.filter(|path| path.is_dir()).collect();
    assert_eq!(sets.len(), 1, "{sets:?}");
    folder_bytes(&sets[0])
}

#[test]
fn manifests_in_buckets_are_those_of_the_disk_whoever_is_killed() {
    let place = Place::new();
    let on_disk = place.place.manifest_command("run", &[]);
    let state = place.place.path("state").display().to_string();
    expect_code(&place.on(9, &on_disk, &state).output().unwrap(), 0);
    let expected = place.place.out_bytes();

    let command = place.place.manifest_command("run", &["out=s3://bucket/out"]);
    place.killed(&command, 2, 1, "GET /corpora/shards", 12);
    place.killed(&command, 4, 0, "PUT /bucket/state/artifacts", 20);
    place.killed(&command, 3, 2, "PUT /bucket/state/artifacts", 4);
    assert!(!place.served("out/flow.json").exists());
    place.done(&command, 4);
    assert!(set_at(&place.served("out")) == expected, "other bytes than on a disk");
    // Nothing is left to do, on no machine.
    place.server.clear();
    place.done(&command, 2);
    assert_eq!(place.server.requests("PUT /bucket/state/artifacts"), 0);
    assert!(set_at(&place.served("out")) == expected);
}

#[test]
fn a_training_in_buckets_gives_the_bits_of_the_disk_whoever_is_killed() {
    let settings = [
        "train.ranks=2",
        "train.schedule=constant",
        "train.max_steps=8",
        "store=tar",
    ];
    let place = Place::new();
    let on_disk = finetune(&place.place, &settings);
    let state = place.place.path("state").display().to_string();
    expect_code(&place.on(9, &on_disk, &state).output().unwrap(), 0);
    let expected = last_checkpoint(&place.place, 8);

    let in_buckets = [
        "checkpoints=s3://bucket/run",
        "out=s3://bucket/out",
        "report=s3://bucket/report",
        "model_out=s3://bucket/model",
    ];
    let all: Vec<&str> = settings.iter().chain(&in_buckets).copied().collect();
    let command = finetune(&place.place, &all);
    // Not when it is sent: what ends with the others may not arrive, and the checkpoint is none then.
    let whole = place.served("run/step-000000004/training.json");
    // The last checkpoint takes long to write, so the run does not end before the process is killed.
    let slow = Fault::Delay(Duration::from_secs(20));
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::always(slow, "/bucket/run/step-000000008")
    });
    place.killed_when(&command, 2, 1, "a whole checkpoint", || whole.exists());
    // Another machine goes on, from the checkpoint in the bucket.
    place.server.clear();
    let mut alone = place.on(5, &command, STATE);
    expect_code(&alone.output().unwrap(), 0);
    let fetched = "GET /bucket/run/step-000000004/model.safetensors";
    assert!(place.server.requests(fetched) > 0, "it started over");
    let step = place.served("run/step-000000008");
    for (name, bytes) in expected {
        assert!(fs::read(step.join(&name)).unwrap() == bytes, "{name} has other bits");
    }
    place.done(&command, 2);
}
