//! What is written to object storage: sets of files, extracted recordings and transcripts, and what is refused.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use flow_storage_testing::{Fault, FaultRule, SECRET_ACCESS_KEY, TestServer};
use serde_json::Value;

use crate::binary::{Workplace, expect_code, files, program, ran, read_parquet, stderr, wav, with_failpoints};

/// A folder for one test, and a bucket called `bucket`.
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

    fn bucket(&self) -> PathBuf {
        self.server.root().join("bucket")
    }

    fn with_environment(&self, mut command: Command) -> Command {
        command.envs(self.server.environment());
        command
    }

    fn command(&self, command: &str, pipeline: &str, settings: &[&str]) -> Command {
        self.with_environment(self.place.command(command, pipeline, settings))
    }

    fn manifests(&self, settings: &[&str]) -> Command {
        let settings: Vec<&str> = ["out=s3://bucket/set"].iter().chain(settings).copied().collect();
        self.command("run", "pipelines/build_manifest_v2.yaml", &settings)
    }

    /// Partitions that each stage ran.
    fn ran(&self) -> BTreeMap<String, u64> {
        ran(&self.place.path("state"))
    }

    /// The files of the set that stands, by their names.
    fn set(&self) -> BTreeMap<String, Vec<u8>> {
        let folder = self.bucket().join("set");
        let list: Value = serde_json::from_slice(&fs::read(folder.join("flow.json")).unwrap()).unwrap();
        let below = folder.join(list["prefix"].as_str().unwrap());
        let files = list["files"].as_object().unwrap();
        let file = |(name, entry): (&String, &Value)| {
            let bytes = fs::read(below.join(name)).unwrap();
            assert_eq!(entry["digest"], blake3::hash(&bytes).to_hex().as_str(), "{name}");
            (name.clone(), bytes)
        };
        files.iter().map(file).collect()
    }

    /// Prefixes of sets in the bucket.
    fn sets(&self) -> usize {
        let entries = fs::read_dir(self.bucket().join("set")).unwrap();
        let mut folders = entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
        // The server keeps folders that are empty.
        folders.retain(|path| path.is_dir() && fs::read_dir(path).unwrap().next().is_some());
        folders.len()
    }
}

#[track_caller]
fn done(mut command: Command) -> Output {
    let output = command.output().unwrap();
    expect_code(&output, 0);
    output
}

/// A pipeline that reads a manifest and writes it as it is.
fn copy_pipeline(place: &Place, manifest: &str) -> String {
    let text = format!(
        "flow: 1\nparams: {{shards: '', out: ''}}\nstages:\n  read: {{uses: manifest.read, with: {{manifest: '{manifest}'}}}}\n  \
         write: {{uses: manifest.write, from: {{train: read}}, with: {{out: \"${{out}}\"}}}}\n"
    );
    let path = place.place.path("copy.yaml");
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn manifests_go_to_a_bucket_through_faults_and_come_back() {
    let place = Place::new();
    let local = Workplace::new("micro");
    local.build_manifests(&[]);
    // A service that is throttled, and connections that are cut.
    place
        .server
        .fault(FaultRule::first(3, Fault::Status(503), "/bucket/set"));
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::first(2, Fault::Drop, "/bucket/set")
    });
    done(place.manifests(&[]));
    let set = place.set();
    for (name, bytes) in local.out_bytes() {
        assert!(set[&name] == bytes, "{name} has other bytes than on disk");
    }
    assert!(set.contains_key("statistics.json"));
    // Nothing is left to do, as long as nobody touches it.
    done(place.manifests(&[]));
    assert!(
        place.ran().values().all(|partitions| *partitions == 0),
        "{:?}",
        place.ran()
    );
    let before = place.set();
    let list = fs::read_to_string(place.bucket().join("set/flow.json")).unwrap();
    let list: Value = serde_json::from_str(&list).unwrap();
    let below = place.bucket().join("set").join(list["prefix"].as_str().unwrap());
    fs::remove_file(below.join("train_manifest_v2.parquet")).unwrap();
    done(place.manifests(&[]));
    assert_eq!(place.ran()["write"], 1);
    assert!(place.set() == before);
    assert_eq!(place.sets(), 1);
    // Read by the name that it would have in a folder.
    let pipeline = copy_pipeline(&place, "s3://bucket/set/train_manifest_v2.parquet");
    let out = format!("out={}", place.place.path("copy").display());
    done(place.command("run", &pipeline, &[&out]));
    let copied = place.place.path("copy/train_manifest_v2.parquet");
    let rows = |path: &Path| read_parquet(path).iter().map(|batch| batch.num_rows()).sum::<usize>();
    let expected = rows(&local.out().join("train_manifest_v2.parquet"));
    assert!(expected > 0);
    assert_eq!(rows(&copied), expected);
    // No folder was made for the URL.
    assert!(!Path::new(env!("CARGO_MANIFEST_DIR")).join("s3:").exists());
}

#[test]
fn killed_between_objects_the_old_set_stands_and_the_next_run_finishes() {
    let place = Place::new();
    done(place.manifests(&[]));
    let old = place.set();
    let whole = Workplace::new("micro");
    whole.build_manifests(&["split_by=recording"]);
    for kill in ["export-renaming:1", "export-renaming:4", "export-done:1"] {
        let killed = with_failpoints(&place.manifests(&["split_by=recording"]))
            .env("FLOW_KILL_AT", kill)
            .output()
            .unwrap();
        assert_eq!(killed.status.signal(), Some(9), "{kill}\n{}", stderr(&killed));
        if kill.starts_with("export-renaming") {
            assert!(place.set() == old, "{kill}: the old set was touched");
            assert_eq!(place.sets(), 2, "{kill}");
        }
    }
    done(place.manifests(&["split_by=recording"]));
    for (name, bytes) in whole.out_bytes() {
        assert!(place.set()[&name] == bytes, "{name}");
    }
    // What the killed runs left goes with the next export.
    done(place.manifests(&[]));
    assert!(place.set() == old);
    assert_eq!(place.sets(), 1);
}

#[test]
fn without_permission_or_bucket_a_run_fails_by_name_and_shows_no_secret() {
    let place = Place::new();
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::always(Fault::Status(403), "")
    });
    let mut nowhere = place.manifests(&["out=s3://nowhere/set"]);
    for (mut command, name) in [(place.manifests(&[]), "s3://bucket/set"), {
        nowhere.env("FLOW_STORAGE_RETRIES", "1");
        (nowhere, "s3://nowhere/set")
    }] {
        let output = command.output().unwrap();
        expect_code(&output, 1);
        let said = stderr(&output);
        assert!(said.contains(name), "{said}");
        assert!(!said.contains(SECRET_ACCESS_KEY), "{said}");
    }
    assert!(!place.bucket().join("set/flow.json").exists());
}

#[test]
fn a_set_does_not_shrink_unseen_nor_replace_another() {
    let place = Place::new();
    done(place.manifests(&[]));
    let before = place.set();
    let refused = place.manifests(&["min_quality=2.0"]).output().unwrap();
    expect_code(&refused, 2);
    let said = stderr(&refused);
    assert!(
        said.contains("would shrink") || said.contains("would be empty"),
        "{said}"
    );
    assert!(place.set() == before);
    // A list of somebody else's.
    fs::write(place.bucket().join("set/flow.json"), "{\"mine\":1}").unwrap();
    let refused = place.manifests(&[]).output().unwrap();
    expect_code(&refused, 1);
    assert!(
        stderr(&refused).contains("files of something else"),
        "{}",
        stderr(&refused)
    );
}

#[test]
fn recordings_are_extracted_into_a_bucket_and_kept_watch_over() {
    const EXTRACT: &str = r#"
flow: 1
params: {shards: "", out: ""}
include:
  manifest:
    pipeline: ROOT/pipelines/build_manifest_v2.yaml
    params: {shards: "${shards}", out: "${out}"}
stages:
  train_audio:
    uses: audio.extract
    from: {rows: manifest/split.train, members: manifest/probe.members}
    with: {shards: "${shards}", audio: "AUDIO"}
"#;
    let place = Place::new();
    let extract = |audio: &str| {
        let pipeline = place.place.path("extract.yaml");
        let text = EXTRACT.replace("ROOT", env!("CARGO_MANIFEST_DIR"));
        fs::write(&pipeline, text.replace("AUDIO", audio)).unwrap();
        done(place.command("run", &pipeline.display().to_string(), &[]))
    };
    let folder = place.place.path("audio");
    extract(&folder.display().to_string());
    extract("s3://bucket/audio");
    let (local, objects) = (files(&folder), files(&place.bucket().join("audio")));
    assert!(
        local.len() > 50 && local == objects,
        "{} and {}",
        local.len(),
        objects.len()
    );
    extract("s3://bucket/audio");
    assert_eq!(place.ran()["train_audio"], 0);
    // One goes, one of another shard changes its size.
    let names: Vec<&PathBuf> = objects.keys().collect();
    let (first, last) = (names[0], names[names.len() - 1]);
    assert_ne!(first.parent(), last.parent());
    fs::remove_file(place.bucket().join("audio").join(first)).unwrap();
    fs::write(place.bucket().join("audio").join(last), "short").unwrap();
    place.server.clear();
    extract("s3://bucket/audio");
    assert_eq!(place.ran()["train_audio"], 2);
    assert!(files(&place.bucket().join("audio")) == local);
    // Whether they are there was asked by listings, not one by one.
    assert_eq!(place.server.requests("HEAD /bucket/audio"), 0);
}

#[test]
fn files_about_recordings_are_objects_that_are_missed_when_they_change() {
    let place = Place::new();
    let recordings = place.place.path("recordings");
    fs::create_dir(&recordings).unwrap();
    let tone: Vec<i16> = (0..16_000)
        .map(|at| ((f64::from(at) * 0.2).sin() * 3000.0) as i16)
        .collect();
    fs::write(recordings.join("one.wav"), wav(&tone)).unwrap();
    let input = format!("input=['{}']", recordings.display());
    let run = || {
        let mut flow = program();
        flow.args(["run", "pipelines/diarize.yaml", "--progress", "plain", "--state"]);
        flow.arg(place.place.path("state"));
        flow.args(["--set", &input, "--set", "out=s3://bucket/turns"]);
        done(place.with_environment(flow));
    };
    run();
    let object = place.bucket().join("turns/one.rttm");
    let text = fs::read(&object).unwrap();
    run();
    assert!(
        place.ran().values().all(|partitions| *partitions == 0),
        "{:?}",
        place.ran()
    );
    fs::write(&object, "other text").unwrap();
    run();
    assert_eq!(place.ran()["write_turns"], 1);
    assert!(fs::read(&object).unwrap() == text);
    fs::remove_file(&object).unwrap();
    run();
    assert!(fs::read(&object).unwrap() == text);
}

#[test]
fn what_cannot_be_in_a_bucket_is_refused_by_name() {
    let place = Workplace::new("micro");
    let refused = |mut command: Command, name: &str| {
        let output = command.current_dir(place.folder.path()).output().unwrap();
        expect_code(&output, 2);
        let said = stderr(&output);
        assert!(said.contains(name) && said.contains("takes no URL"), "{said}");
        assert!(!place.path("s3:").exists(), "a folder was made");
    };
    let flow = |words: &[&str]| {
        let mut flow = program();
        flow.args(words);
        flow
    };
    let pipelines = Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines");
    let pipeline = |name: &str| pipelines.join(name).display().to_string();
    let finetune = pipeline("finetune.yaml");
    let evaluate = pipeline("evaluate.yaml");
    refused(flow(&["run", &evaluate, "--set", "lm=s3://bucket/lm.arpa"]), "lm");
    refused(flow(&["plan", &evaluate, "--set", "lm=s3://bucket/lm.arpa"]), "lm");
    refused(flow(&["run", &finetune, "--state", "https://host/state"]), "--state");
    let synthesize = pipeline("synthesize.yaml");
    refused(flow(&["run", &synthesize, "--set", "out=s3://bucket/shards"]), "out");
    refused(flow(&["transcribe", "a.wav", "--state", "s3://bucket/out"]), "--state");
    refused(flow(&["model", "convert", "a.nemo", "s3://bucket/b.nemo"]), "<TO>");
    // A password is not repeated.
    let mut secret = flow(&[
        "run",
        &finetune,
        "--set",
        "checkpoints=https://me:hush@host/checkpoints",
    ]);
    let output = secret.current_dir(place.folder.path()).output().unwrap();
    expect_code(&output, 2);
    assert!(!stderr(&output).contains("hush"), "{}", stderr(&output));
    // A URL that cannot be used, where one may stand.
    let mut web = flow(&[
        "run",
        &pipeline("build_manifest_v2.yaml"),
        "--set",
        "out=https://host/set",
    ]);
    let output = web.current_dir(place.folder.path()).output().unwrap();
    expect_code(&output, 2);
    assert!(
        stderr(&output).contains("nothing can be written to a web server"),
        "{}",
        stderr(&output)
    );
}
