//! The state directory in object storage: the same bytes as on a disk, reused by other machines, whatever happens to a run.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use flow_storage_testing::{Fault, FaultRule, TestServer};

use crate::binary::{Workplace, expect_code, program, stderr, with_failpoints};

const STATE: &str = "s3://bucket/state";

/// A bucket called `bucket`, and folders for what several machines keep.
struct Place {
    place: Workplace,
    server: TestServer,
}

impl Place {
    fn new() -> Place {
        let place = Workplace::new("micro");
        let root = place.path("served");
        fs::create_dir_all(root.join("bucket")).unwrap();
        Place {
            server: TestServer::start(&root).unwrap(),
            place,
        }
    }

    /// A command on a machine with its own folder for copies.
    fn on(&self, machine: &str, words: &[&str]) -> Command {
        let mut flow = program();
        flow.args(words).args(["--state", STATE]);
        flow.envs(self.server.environment());
        flow.env("FLOW_STORAGE_CACHE", self.place.path(machine));
        flow
    }

    fn run_on(&self, machine: &str, out: &Path) -> Command {
        let mut run = self.on(
            machine,
            &["run", "pipelines/build_manifest_v2.yaml", "--progress", "plain"],
        );
        run.args(["--set", &format!("shards={}", self.place.shards.display())]);
        run.args(["--set", &format!("out={}", out.display())]);
        run
    }

    /// Data files in the bucket.
    fn data_files(&self) -> usize {
        let recipes = fs::read_dir(self.server.root().join("bucket/state/artifacts")).unwrap();
        let data = recipes.filter_map(|recipe| fs::read_dir(recipe.unwrap().path().join("data")).ok());
        data.map(Iterator::count).sum()
    }
}

#[track_caller]
fn done(mut command: Command) -> Output {
    let output = command.output().unwrap();
    expect_code(&output, 0);
    output
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &stderr(output)
}

#[test]
fn another_machine_has_nothing_left_to_do() {
    let local = Workplace::new("micro");
    local.build_manifests(&[]);
    let place = Place::new();
    let out = place.place.out();
    // A service that is throttled, answers that are lost and cut.
    for fault in [Fault::Status(503), Fault::Drop, Fault::LoseAnswer, Fault::Truncate] {
        place.server.fault(FaultRule {
            after: 3,
            ..FaultRule::first(2, fault, "/bucket/state/artifacts")
        });
    }
    done(place.run_on("a", &out));
    assert!(place.place.out_bytes() == local.out_bytes(), "other bytes than on disk");

    place.server.clear();
    let again = text(&done(place.run_on("b", &out)));
    assert!(again.contains("nothing to do"), "{again}");
    let read = place.server.requests("/data/");
    assert!(read < 20, "{read} requests for data");
    assert!(place.place.out_bytes() == local.out_bytes());
    // Another folder is filled from what stands.
    let other = place.place.path("other");
    done(place.run_on("c", &other));
    for (name, bytes) in local.out_bytes() {
        assert!(fs::read(other.join(&name)).unwrap() == bytes, "{name}");
    }
    // Others look at it, too, and name it.
    for words in [&["status"][..], &["rejects"], &["log"], &["gc", "--dry-run"]] {
        let said = text(&done(place.on("d", words)));
        assert!(
            !said.contains("flow/state/") && !said.contains("not a state directory"),
            "{said}"
        );
    }
    let mut plan = place.on("d", &["plan", "pipelines/build_manifest_v2.yaml", "--exit-code"]);
    plan.args(["--set", &format!("shards={}", place.place.shards.display())]);
    plan.args(["--set", &format!("out={}", out.display())]);
    done(plan);
    assert!(!place.place.path("s3:").exists() && !Path::new("s3:").exists());
}

#[test]
fn killed_anywhere_another_machine_goes_on() {
    let local = Workplace::new("micro");
    local.build_manifests(&[]);
    for point in [
        "data-written",
        "data-uploaded",
        "data-renamed",
        "record-written",
        "record-created",
        "record-linked",
        "index-written",
    ] {
        let place = Place::new();
        let out = place.place.out();
        let output = with_failpoints(&place.run_on("a", &out))
            .env("FLOW_KILL_AT", format!("{point}:2"))
            .output()
            .unwrap();
        let killed = output.status.signal() == Some(9);
        assert!(killed || output.status.success(), "{point}\n{}", text(&output));
        done(place.run_on("b", &out));
        assert!(
            place.place.out_bytes() == local.out_bytes(),
            "other bytes after a kill at {point}"
        );
        // What was uploaded for nothing goes with the garbage.
        done(place.on("c", &["gc"]));
        let whole = place.data_files();
        done(place.run_on("c", &out));
        assert_eq!(place.data_files(), whole, "{point}");
    }
}

#[test]
fn what_is_in_the_way_is_told_with_its_url() {
    let place = Place::new();
    let out = place.place.out();
    let missing = place.on("a", &["rejects"]).output().unwrap();
    expect_code(&missing, 2);
    assert!(
        stderr(&missing).contains("s3://bucket/state is not a state directory"),
        "{}",
        stderr(&missing)
    );
    // Rights that are missing.
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::always(Fault::Status(403), "/records/")
    });
    let refused = place.run_on("a", &out).output().unwrap();
    expect_code(&refused, 1);
    let said = stderr(&refused);
    assert!(
        said.contains("s3://bucket/state/artifacts/") && said.contains("permission denied"),
        "{said}"
    );
    place.server.clear();
    // Storage that does not heed conditions.
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::always(Fault::Overwrite, "/state/lock")
    });
    let refused = place.run_on("a", &out).output().unwrap();
    expect_code(&refused, 1);
    assert!(
        stderr(&refused).contains("s3://bucket/state cannot hold a state directory"),
        "{}",
        stderr(&refused)
    );
    place.server.clear();
    done(place.run_on("a", &out));
}
