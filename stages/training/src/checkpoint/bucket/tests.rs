//! Against a server of S3's protocol on this machine. The checkpoints have files of any bytes in place of weights.

use std::fs;
use std::path::{Path, PathBuf};

use flow_storage::{Location, ObjectUrl};
use flow_storage_testing::{Fault, FaultRule, TestServer};
use serde_json::json;

use super::fetch::{Wanted, fetch};
use super::{Mirror, RemoteFolder, Uploader};
use crate::checkpoint::listing::{list, name_of, newest_sound};
use crate::checkpoint::ranking::{Monitor, Ranking};
use crate::checkpoint::record::{CheckpointRecord, FileDigest, RECORD};
use crate::error::TrainingError;

const RANKING: Ranking = Ranking {
    monitor: Monitor::ValWer,
    keep: 1,
};

struct Place {
    folder: tempfile::TempDir,
    server: TestServer,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("served/bucket")).unwrap();
        let server = TestServer::start(&folder.path().join("served")).unwrap();
        Place { folder, server }
    }

    fn local(&self, name: &str) -> PathBuf {
        let folder = self.folder.path().join(name);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn bucket(&self, name: &str) -> PathBuf {
        self.folder.path().join("served/bucket").join(name)
    }

    fn mirror(&self, local: &Path, keep: usize) -> Mirror {
        Mirror::new(&self.server.storage(), run(), local, keep, RANKING)
    }

    fn fetch(&self, local: &Path, wanted: Wanted) -> Result<Vec<String>, TrainingError> {
        fetch(&self.server.storage(), &run(), local, wanted)
    }

    /// Steps of whole checkpoints in the bucket.
    fn there(&self) -> Vec<u64> {
        RemoteFolder::list(&self.server.storage(), &run())
            .unwrap()
            .whole()
            .collect()
    }
}

fn run() -> ObjectUrl {
    match Location::parse("s3://bucket/run").unwrap() {
        Location::Object(url) => url,
        Location::Local(path) => panic!("{} is a path", path.display()),
    }
}

/// Writes a checkpoint of a training with this seed.
fn checkpoint(folder: &Path, step: u64, rate: Option<f64>, seed: u64) -> PathBuf {
    let path = folder.join(name_of(step));
    fs::create_dir_all(&path).unwrap();
    let mut record: CheckpointRecord = serde_json::from_value(json!({
        "version": 2, "step": step, "micro_batches": 0, "samples": 0, "audio_samples": 0, "tokens": 0, "skipped_steps": 0,
        "epoch": 0, "identity": {"model": null, "tokenizer": null, "init": "none", "seed": seed}, "settings": {},
        "data": null, "random": "", "validation_wer": rate, "plans": [], "files": {},
    }))
    .unwrap();
    for (name, length) in [
        ("model.safetensors", 18_000_000),
        ("optimizer.safetensors", 1_000),
        ("empty", 0),
    ] {
        let bytes: Vec<u8> = (0..length)
            .map(|at: usize| (at * at / 7 + at + step as usize) as u8)
            .collect();
        fs::write(path.join(name), &bytes).unwrap();
        let blake3 = blake3::hash(&bytes).to_hex().to_string();
        let digest = FileDigest {
            bytes: bytes.len() as u64,
            blake3,
        };
        record.files.insert(name.into(), digest);
    }
    fs::write(path.join(RECORD), serde_json::to_string_pretty(&record).unwrap()).unwrap();
    path
}

fn steps(folder: &Path) -> Vec<u64> {
    list(folder).unwrap().into_iter().map(|found| found.step).collect()
}

#[test]
fn checkpoints_go_to_the_bucket_through_faults_and_come_back() {
    let place = Place::new();
    let local = place.local("first");
    checkpoint(&local, 10, Some(0.5), 1);
    checkpoint(&local, 20, Some(0.2), 1);
    fs::write(local.join("metrics.jsonl"), "{\"step\": 20}\n").unwrap();
    fs::write(local.join("other"), "not the training's").unwrap();
    for rule in [
        FaultRule::first(2, Fault::Status(503), "model.safetensors"),
        FaultRule::first(2, Fault::Drop, "optimizer.safetensors"),
        FaultRule::first(1, Fault::Status(500), "step-000000010/training.json"),
        FaultRule::first(1, Fault::Drop, "step-000000020/training.json"),
    ] {
        place.server.fault(FaultRule {
            method: Some("PUT"),
            ..rule
        });
    }
    let mut mirror = place.mirror(&local, 2);
    mirror.copy_all().unwrap();
    assert_eq!(place.there(), [10, 20]);
    assert!(!place.bucket("run/other").exists());

    // What stands is not copied again; a newer one is, and the oldest goes, but not the best.
    place.server.clear();
    checkpoint(&local, 30, Some(0.3), 1);
    fs::remove_dir_all(local.join(name_of(10))).unwrap();
    fs::write(local.join("metrics.jsonl"), "{\"step\": 20}\n{\"step\": 30}\n").unwrap();
    mirror.copy_all().unwrap();
    checkpoint(&local, 40, None, 1);
    fs::remove_dir_all(local.join(name_of(20))).unwrap();
    mirror.copy_all().unwrap();
    assert_eq!(place.there(), [20, 30, 40]);
    assert_eq!(place.server.requests("PUT /bucket/run/step-000000020"), 0);
    assert_eq!(place.server.requests("POST /bucket/run/step-000000020"), 0);

    // Another machine fetches the newest, through faults.
    place.server.fault(FaultRule {
        method: Some("GET"),
        ..FaultRule::first(2, Fault::Truncate, "model.safetensors")
    });
    let fresh = place.local("second");
    assert_eq!(place.fetch(&fresh, Wanted::NEWEST).unwrap(), Vec::<String>::new());
    assert_eq!(steps(&fresh), [40]);
    for name in [RECORD, "model.safetensors", "optimizer.safetensors", "empty"] {
        let of = |folder: &Path| fs::read(folder.join(name_of(40)).join(name)).unwrap();
        assert!(of(&fresh) == of(&local), "{name}");
    }
    let metrics = fs::read_to_string(fresh.join("metrics.jsonl")).unwrap();
    assert_eq!(metrics, "{\"step\": 20}\n{\"step\": 30}\n");
    assert_eq!(newest_sound(&fresh).unwrap().unwrap().0.step, 40);
    // The others where they are needed, each once; and nothing where this machine is ahead.
    place
        .fetch(
            &fresh,
            Wanted {
                best: Some(RANKING),
                last: 2,
            },
        )
        .unwrap();
    assert_eq!(steps(&fresh), [20, 30, 40]);
    checkpoint(&fresh, 50, None, 1);
    fs::remove_dir_all(fresh.join(name_of(40))).unwrap();
    place.server.clear();
    place.fetch(&fresh, Wanted::NEWEST).unwrap();
    assert_eq!(
        (steps(&fresh), place.server.requests("GET /bucket/run/")),
        (vec![20, 30, 50], 0)
    );
}

#[test]
fn what_is_not_whole_or_damaged_is_not_taken() {
    let place = Place::new();
    let local = place.local("first");
    checkpoint(&local, 10, None, 1);
    checkpoint(&local, 20, None, 1);
    place.mirror(&local, 3).copy_all().unwrap();
    // As a process that was killed while it copied leaves it.
    fs::remove_file(place.bucket("run/step-000000020/training.json")).unwrap();
    fs::remove_file(place.bucket("run/step-000000020/model.safetensors")).unwrap();
    let fresh = place.local("second");
    place.fetch(&fresh, Wanted::NEWEST).unwrap();
    assert_eq!(steps(&fresh), [10]);
    // The next process copies it again.
    place.mirror(&local, 3).copy_all().unwrap();
    assert_eq!(place.there(), [10, 20]);
    let sent = fs::read(place.bucket("run/step-000000020/model.safetensors")).unwrap();
    assert!(sent == fs::read(local.join("step-000000020/model.safetensors")).unwrap());

    // Another content: the one before is taken, and that is reported.
    let mut damaged = sent.clone();
    damaged[9_000_000] ^= 1;
    fs::write(place.bucket("run/step-000000020/model.safetensors"), &damaged).unwrap();
    let third = place.local("third");
    let warnings = place.fetch(&third, Wanted::NEWEST).unwrap();
    assert_eq!(steps(&third), [10]);
    assert!(
        warnings[0].contains("s3://bucket/run/step-000000020 is damaged") && warnings.len() == 1,
        "{warnings:?}"
    );
    assert_eq!(fs::read_dir(&third).unwrap().count(), 1, "nothing half fetched is left");
    fs::write(place.bucket("run/step-000000010/training.json"), "{").unwrap();
    let none = place.fetch(&place.local("fourth"), Wanted::NEWEST).unwrap_err();
    assert!(matches!(none, TrainingError::Damaged { .. }), "{none}");

    // A checkpoint that is damaged on this machine is not copied.
    let bad = place.local("fifth");
    let path = checkpoint(&bad, 60, None, 1);
    fs::write(path.join("optimizer.safetensors"), vec![0; 1_000]).unwrap();
    let refused = place.mirror(&bad, 3).copy_all().unwrap_err();
    assert!(matches!(refused, TrainingError::Damaged { .. }), "{refused}");
    assert!(!place.bucket("run/step-000000060/training.json").exists());
}

#[test]
fn checkpoints_of_another_training_stay() {
    let place = Place::new();
    let (ours, other) = (place.local("ours"), place.local("other"));
    checkpoint(&ours, 10, None, 1);
    place.mirror(&ours, 3).copy_all().unwrap();
    checkpoint(&other, 10, None, 2);
    let refused = place.mirror(&other, 3).copy_all().unwrap_err();
    assert!(
        refused.to_string().contains("s3://bucket/run/step-000000010"),
        "{refused}"
    );
    let record = |folder: &Path| fs::read(folder.join("step-000000010/training.json")).unwrap();
    assert!(record(&place.bucket("run")) == record(&ours));
    // The same training, which went another way.
    checkpoint(&ours, 10, Some(0.5), 1);
    place.mirror(&ours, 3).copy_all().unwrap();
    assert!(record(&place.bucket("run")) == record(&ours));
}

#[test]
fn a_bucket_that_takes_nothing_is_told_and_the_last_checkpoint_has_to_arrive() {
    let place = Place::new();
    let local = place.local("first");
    checkpoint(&local, 10, None, 1);
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::always(Fault::Status(403), "training.json")
    });
    let uploader = Uploader::start(place.mirror(&local, 1)).unwrap();
    let warnings = loop {
        match uploader.warnings() {
            none if none.is_empty() => std::thread::sleep(std::time::Duration::from_millis(5)),
            warnings => break warnings,
        }
    };
    assert!(
        warnings[0].contains("s3://bucket/run/step-000000010/training.json"),
        "{warnings:?}"
    );
    uploader.wake();
    let error = uploader.finish().unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("s3://bucket/run/step-000000010/training.json: permission denied"),
        "{error}"
    );
    assert!(place.there().is_empty());

    place.server.clear();
    let uploader = Uploader::start(place.mirror(&local, 1)).unwrap();
    checkpoint(&local, 20, None, 1);
    uploader.wake();
    uploader.finish().unwrap();
    assert!(place.there().contains(&20));

    // One that is given up waits for nothing.
    checkpoint(&local, 30, None, 1);
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::always(Fault::Status(403), "model.safetensors")
    });
    let uploader = Uploader::start(place.mirror(&local, 1)).unwrap();
    drop(uploader);
    assert!(!place.there().contains(&30));
}
