//! Shards and manifests in object storage: a server of S3's protocol on this machine, with faults.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

use flow_storage_testing::{Fault, FaultRule, TestServer};

use crate::binary::{
    ManifestRow, RejectRow, Workplace, copy_folder, expect_code, program, read_manifest, read_rejects, stderr,
};
use crate::watch::{Running, wait_for_runs};

/// A corpus in a bucket, and a place that reads it from there.
struct Bucket {
    place: Workplace,
    server: TestServer,
    /// The folder that the server serves.
    root: tempfile::TempDir,
}

impl Bucket {
    fn with(corpus: &str) -> Bucket {
        let root = tempfile::tempdir().unwrap();
        let mut place = Workplace::new(corpus);
        copy_folder(&place.shards, &root.path().join("corpora/shards"));
        age(root.path());
        place.shards = PathBuf::from("s3://corpora/shards");
        Bucket {
            place,
            server: TestServer::start(root.path()).unwrap(),
            root,
        }
    }

    fn run(&self, mut command: Command) -> Output {
        command.envs(self.server.environment()).output().unwrap()
    }

    fn build(&self, settings: &[&str]) -> Output {
        let output = self.run(self.place.manifest_command("run", settings));
        expect_code(&output, 0);
        output
    }

    fn file(&self, name: &str) -> PathBuf {
        self.root.path().join("corpora/shards").join(name)
    }
}

/// Files that were changed long ago: the test server's listings have no ETags, and the time counts.
pub fn age(folder: &Path) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => age(&path),
            false => set_age(&path, 1_000),
        }
    }
}

fn set_age(path: &Path, seconds: u64) {
    let then = SystemTime::now() - Duration::from_secs(seconds);
    File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_modified(then)
        .unwrap();
}

/// The rows of the manifests, with the folder of shards taken from the paths.
fn rows(place: &Workplace) -> Vec<Vec<ManifestRow>> {
    let shards = format!("{}/", place.shards.display());
    let names = ["master_manifest", "train_manifest_v2", "val_manifest_v2"];
    let read = |name: &str| {
        let mut rows = read_manifest(&place.out().join(format!("{name}.parquet")));
        for row in &mut rows {
            row.tar_path = row.tar_path.strip_prefix(&shards).unwrap().to_owned();
        }
        rows
    };
    names.into_iter().map(read).collect()
}

/// The rejects, without details, in which paths stand.
fn rejects(place: &Workplace) -> Vec<(String, Option<String>, String, String, String)> {
    let without_detail = |reject: RejectRow| {
        (
            reject.partition,
            reject.segment_id,
            reject.reason,
            reject.class,
            reject.values,
        )
    };
    let rejects = read_rejects(&place.out().join("rejects.parquet"));
    rejects.into_iter().map(without_detail).collect()
}

#[test]
fn manifests_of_a_bucket_are_those_of_the_disk_whatever_fails_meanwhile() {
    let disk = Workplace::new("micro");
    disk.build_manifests(&[]);
    let bucket = Bucket::with("micro");
    for rule in [
        FaultRule::first(2, Fault::Status(503), "list-type"),
        FaultRule::first(3, Fault::Drop, "metadata.parquet"),
        FaultRule::first(3, Fault::Truncate, ".tar"),
        FaultRule::first(2, Fault::Status(429), "audio_index.parquet"),
        FaultRule::first(2, Fault::Delay(Duration::from_millis(500)), ".tar"),
    ] {
        bucket.server.fault(rule);
    }
    bucket.build(&[]);
    assert!(rows(&bucket.place) == rows(&disk));
    assert_eq!(rejects(&bucket.place), rejects(&disk));

    // Nothing changed: the bucket is listed, and no object is read or looked at.
    bucket.server.clear();
    let again = bucket.build(&[]);
    assert!(stderr(&again).contains("nothing to do"), "{}", stderr(&again));
    assert!(bucket.server.requests("list-type") > 0);
    assert_eq!(bucket.server.requests("/corpora/shards"), 0);

    // One shard changes: it alone is read.
    let metadata = bucket.file("hi/hi_0000/metadata.parquet");
    fs::copy(bucket.file("hi/hi_0001/metadata.parquet"), &metadata).unwrap();
    set_age(&metadata, 500);
    bucket.server.clear();
    bucket.build(&["max_faults=100%", "max_shrink=1"]);
    assert!(
        bucket
            .server
            .requests("GET /corpora/shards/hi/hi_0000/metadata.parquet")
            > 0
    );
    assert_eq!(bucket.server.requests("/corpora/shards/ta/"), 0);
    assert_eq!(bucket.server.requests(".tar"), 0);
    let changed = Workplace::with_copy("micro");
    let from = changed.shards.join("hi/hi_0001/metadata.parquet");
    fs::copy(from, changed.shards.join("hi/hi_0000/metadata.parquet")).unwrap();
    changed.build_manifests(&["max_faults=100%", "max_shrink=1"]);
    assert!(rows(&bucket.place) == rows(&changed));
}

#[test]
fn shards_of_a_bucket_are_watched() {
    let bucket = Bucket::with("micro");
    let events = bucket.place.path("events.jsonl");
    let mut command = bucket
        .place
        .manifest_command("run", &["max_faults=100%", "max_shrink=1"]);
    command
        .args(["--watch", "--settle", "0.4", "--events"])
        .arg(&events)
        .envs(bucket.server.environment());
    let running = Running::start(&mut command);
    wait_for_runs(&events, 1);
    let before = rows(&bucket.place);
    let metadata = bucket.file("hi/hi_0000/metadata.parquet");
    fs::copy(bucket.file("hi/hi_0001/metadata.parquet"), &metadata).unwrap();
    set_age(&metadata, 500);
    wait_for_runs(&events, 2);
    expect_code(&running.terminate(), 0);
    assert!(rows(&bucket.place) != before);
    let changed = Workplace::with_copy("micro");
    let from = changed.shards.join("hi/hi_0001/metadata.parquet");
    fs::copy(from, changed.shards.join("hi/hi_0000/metadata.parquet")).unwrap();
    changed.build_manifests(&["max_faults=100%", "max_shrink=1"]);
    assert!(rows(&bucket.place) == rows(&changed));
}

#[test]
fn each_file_of_a_shard_is_asked_for_a_few_times_at_most() {
    let bucket = Bucket::with("micro");
    bucket.build(&[]);
    for (file, most) in [("metadata.parquet", 2), ("audio_index.parquet", 2), ("hi_0000.tar", 1)] {
        let asked = bucket.server.requests(&format!("/corpora/shards/hi/hi_0000/{file}"));
        assert!((1..=most).contains(&asked), "{file}: {asked} times");
    }
    assert_eq!(bucket.server.requests("HEAD "), 0);
}

#[test]
fn what_stays_wrong_is_said_as_on_disk() {
    let bucket = Bucket::with("micro");
    let refused = |shards: &str| {
        let shards = format!("shards={shards}");
        let output = bucket.run(bucket.place.manifest_command("run", &[&shards]));
        (output.status.code(), stderr(&output))
    };
    for (shards, said) in [
        ("s3://missing/shards", "s3://missing/shards: there is no such bucket"),
        ("s3://corpora/none", "s3://corpora/none holds no shard"),
        ("s3://corpora/../shards", "no part of a key may be"),
        (
            "https://user:hush@host/shards",
            "a URL must not contain a user or password",
        ),
        ("https://host/shards", "cannot be listed"),
    ] {
        let (code, errors) = refused(shards);
        assert!(code == Some(2) && errors.contains(said), "{shards}: {code:?} {errors}");
    }
    let mut wrong = bucket.place.manifest_command("run", &[]);
    wrong.envs(bucket.server.environment());
    let output = wrong.env("AWS_SECRET_ACCESS_KEY", "another-hush").output().unwrap();
    expect_code(&output, 2);
    let errors = stderr(&output);
    assert!(errors.contains("credentials") && !errors.contains("hush"), "{errors}");

    // Objects that may not be read are rejects, until they may.
    let tar = "hi/hi_0000/hi_0000.tar";
    bucket.server.fault(FaultRule::always(Fault::Status(403), tar));
    bucket
        .server
        .fault(FaultRule::always(Fault::Status(403), "ta_0000/metadata.parquet"));
    const SETTINGS: &[&str] = &["max_faults=100%", "max_shrink=1"];
    bucket.build(SETTINGS);
    let unreadable: Vec<RejectRow> = read_rejects(&bucket.place.out().join("rejects.parquet"))
        .into_iter()
        .filter(|reject| reject.reason == "unreadable_file")
        .collect();
    let mut partitions: Vec<&str> = unreadable.iter().map(|reject| reject.partition.as_str()).collect();
    partitions.sort_unstable();
    assert_eq!(partitions, ["hi/hi_0000", "ta/ta_0000"]);
    for reject in &unreadable {
        assert!(reject.detail.contains("permission denied"), "{}", reject.detail);
        assert!(reject.detail.contains("s3://corpora/shards/"), "{}", reject.detail);
    }
    bucket.server.clear();
    bucket.build(SETTINGS);
    let disk = Workplace::new("micro");
    disk.build_manifests(&[]);
    assert!(rows(&bucket.place) == rows(&disk));

    // A tar that is not there.
    fs::remove_file(bucket.file(tar)).unwrap();
    bucket.build(SETTINGS);
    let missing = rejects(&bucket.place);
    assert!(
        missing
            .iter()
            .any(|reject| reject.0 == "hi/hi_0000" && reject.2 == "missing_tar")
    );
}

/// A manifest in a bucket, whose recordings are named relative to it, as on the disk.
#[test]
fn a_manifest_in_a_bucket_names_recordings_in_it() {
    let disk = Workplace::new("micro");
    let extract = crate::training::finetune(&disk, &[])
        .args(["--until", "val_audio"])
        .output()
        .unwrap();
    expect_code(&extract, 0);
    let audio = disk.path("set/audio");
    copy_folder(&disk.path("audio"), &audio);
    let mut lines = String::new();
    let mut count = 0;
    for lang in fs::read_dir(&audio).unwrap() {
        let lang = lang.unwrap().path();
        for shard in fs::read_dir(&lang).unwrap() {
            for file in fs::read_dir(shard.unwrap().path()).unwrap() {
                let file = file.unwrap().path();
                let below = file.strip_prefix(disk.path("set")).unwrap().display();
                let lang = lang.file_name().unwrap().to_str().unwrap();
                lines += &format!(
                    "{{\"audio_filepath\": \"./{below}\", \"duration\": 0.5, \"text\": \"word\", \"lang\": \"{lang}\"}}\n"
                );
                count += 1;
            }
        }
    }
    assert!(count > 0);
    lines += "{\"audio_filepath\": \"audio/none.flac\", \"duration\": 0.5, \"text\": \"word\", \"lang\": \"hi\"}\n";
    fs::write(disk.path("set/manifest.jsonl"), lines).unwrap();
    let pipeline = disk.path("read.yaml");
    let text = "flow: 1\nparams: {manifest: {default: ''}}\nstages:\n  read: {uses: manifest.read, with: {manifest: '${manifest}'}}\n";
    fs::write(&pipeline, text).unwrap();

    let root = tempfile::tempdir().unwrap();
    copy_folder(&disk.path("set"), &root.path().join("sets/first"));
    age(root.path());
    let server = TestServer::start(root.path()).unwrap();
    let read = |manifest: &str, state: &str| {
        let mut flow = program();
        flow.arg("run").arg(&pipeline).args(["--progress", "plain", "--state"]);
        flow.arg(disk.path(state))
            .args(["--set", &format!("manifest={manifest}")]);
        flow.envs(server.environment()).output().unwrap()
    };
    let counts = |state: &str| {
        let mut flow = program();
        flow.args(["rejects", "--state"]).arg(disk.path(state));
        String::from_utf8(flow.output().unwrap().stdout).unwrap()
    };
    server.fault(FaultRule::first(2, Fault::Status(503), "manifest.jsonl"));
    server.fault(FaultRule::first(2, Fault::Drop, ".flac"));
    expect_code(
        &read(&disk.path("set/manifest.jsonl").display().to_string(), "of_disk"),
        0,
    );
    let output = read("s3://sets/first/manifest.jsonl", "of_bucket");
    expect_code(&output, 0);
    assert!(counts("of_bucket").contains("missing_audio"), "{}", counts("of_bucket"));
    assert_eq!(
        counts("of_bucket").matches("missing_audio").count(),
        counts("of_disk").matches("missing_audio").count()
    );
    assert!(
        server.requests("GET /sets/first/audio/") >= count,
        "lengths are read from the recordings"
    );

    // A server that does not say whether recordings are there: they are not taken for missing.
    server.fault(FaultRule {
        method: Some("HEAD"),
        ..FaultRule::always(Fault::Status(503), ".flac")
    });
    for command in ["plan", "run"] {
        let mut flow = program();
        flow.arg(command)
            .arg(&pipeline)
            .arg("--state")
            .arg(disk.path("of_silence"));
        flow.args(["--set", "manifest=s3://sets/first/manifest.jsonl"]);
        flow.envs(server.environment()).env("FLOW_STORAGE_RETRIES", "1");
        let output = flow.output().unwrap();
        expect_code(&output, 1);
        assert!(
            stderr(&output).contains("s3://sets/first/audio/"),
            "{command}: {}",
            stderr(&output)
        );
    }
    server.clear();

    for (manifest, said) in [
        ("s3://sets/first/none.jsonl", "there is no such object"),
        ("s3://none/manifest.jsonl", "there is no such bucket"),
        ("s3://sets/first/manifest", "there is no such object"),
    ] {
        let output = read(manifest, "of_none");
        let errors = stderr(&output);
        assert!(
            output.status.code() == Some(2) && errors.contains(said),
            "{manifest}: {errors}"
        );
    }
}
