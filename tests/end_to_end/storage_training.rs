//! Training with shards, the first weights and the checkpoints in a bucket; models in a bucket.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use flow_storage_testing::{Fault, FaultRule, TestServer};

use crate::binary::{Workplace, copy_folder, expect_code, golden_model as model, program, ran, stderr};
use crate::storage::age;
use crate::training::{finetune, last_checkpoint};

struct Place {
    place: Workplace,
    server: TestServer,
}

impl Place {
    /// Buckets with the corpus, the model, and room for trainings.
    fn new() -> Place {
        let mut place = Workplace::new("micro");
        let root = place.path("served");
        copy_folder(&place.shards, &root.join("corpora/shards"));
        for folder in ["models", "runs"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        fs::copy(model("model.nemo"), root.join("models/model.nemo")).unwrap();
        copy_folder(&model("hf"), &root.join("models/hf"));
        age(&root);
        place.shards = PathBuf::from("s3://corpora/shards");
        Place {
            server: TestServer::start(&root).unwrap(),
            place,
        }
    }

    /// A training of which everything is in a bucket.
    fn train(&self, settings: &[&str]) -> Command {
        let all: Vec<&str> = ["checkpoints=s3://runs/first"]
            .iter()
            .chain(settings)
            .copied()
            .collect();
        let mut command = finetune(&self.place, &all);
        command.envs(self.server.environment());
        command
    }

    fn checkpoint(&self, step: u64) -> PathBuf {
        self.server.root().join(format!("runs/first/step-{step:09}"))
    }

    /// The weights and the state of the optimizer of a checkpoint in the bucket.
    fn bits(&self, step: u64) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(self.checkpoint(step)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                files.insert(name, fs::read(&path).unwrap());
            }
        }
        assert!(self.checkpoint(step).join("training.json").exists());
        files
    }

    fn flow(&self, words: &[&str]) -> Command {
        let mut command = program();
        command.args(words).envs(self.server.environment());
        command
    }
}

fn tars(folder: &Path) -> u64 {
    let mut count = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        count += match path.is_dir() {
            true => tars(&path),
            false => u64::from(path.extension().is_some_and(|extension| extension == "tar")),
        };
    }
    count
}

const FROM_BUCKET: [&str; 4] = [
    "init=s3://models/model.nemo",
    "tokenizer=configs/tokenizers/mini.model",
    "store=tar",
    "train.max_steps=8",
];

#[test]
fn training_in_buckets_gives_the_bits_of_the_disk_and_goes_on_elsewhere() {
    let disk = Workplace::new("micro");
    let init = format!("init={}", model("model.nemo").display());
    let on_disk: Vec<&str> = [init.as_str()]
        .into_iter()
        .chain(FROM_BUCKET[1..].iter().copied())
        .collect();
    expect_code(&finetune(&disk, &on_disk).output().unwrap(), 0);
    let expected = last_checkpoint(&disk, 8);

    let place = Place::new();
    for (fault, path) in [
        (Fault::Truncate, ".tar"),
        (Fault::Status(503), "model.nemo"),
        (Fault::Drop, "optimizer.safetensors"),
    ] {
        place.server.fault(FaultRule::first(2, fault, path));
    }
    expect_code(&place.train(&FROM_BUCKET).output().unwrap(), 0);
    assert!(place.bits(8) == expected, "other bits than on the disk");
    assert!(place.checkpoint(4).join("training.json").exists());
    assert!(place.server.root().join("runs/first/metrics.jsonl").exists());
    // A tar is copied once to be looked through, and its recordings come from blocks.
    let tars = tars(&place.server.root().join("corpora"));
    let asked = place.server.requests(".tar");
    assert!(asked <= 2 * tars + 2, "{asked} requests for {tars} tars");

    place.server.clear();
    let again = place.train(&FROM_BUCKET).output().unwrap();
    expect_code(&again, 0);
    assert!(stderr(&again).contains("nothing to do"), "{}", stderr(&again));
    assert_eq!(place.server.requests("PUT "), 0);

    // Another machine, after one that was killed while it copied the last checkpoint.
    fs::remove_file(place.checkpoint(8).join("training.json")).unwrap();
    fs::remove_file(place.checkpoint(8).join("model.safetensors")).unwrap();
    fs::remove_dir_all(place.server.cache().join("flow")).unwrap();
    fs::remove_dir_all(place.place.path("state")).unwrap();
    expect_code(&place.train(&FROM_BUCKET).output().unwrap(), 0);
    assert!(place.bits(8) == expected, "other bits after another machine went on");
    let fetched = place
        .server
        .requests("GET /runs/first/step-000000004/model.safetensors");
    assert!(fetched > 0, "it started over");
    let metrics = fs::read_to_string(place.server.root().join("runs/first/metrics.jsonl")).unwrap();
    assert!(
        metrics.contains("\"step\":0") && metrics.contains("\"step\":8"),
        "{metrics}"
    );
}

#[test]
fn a_training_that_is_killed_while_it_copies_copies_again() {
    let place = Place::new();
    let settings = ["init=none", "train.max_steps=4"];
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::always(
            Fault::Delay(Duration::from_secs(60)),
            "step-000000004/optimizer.safetensors",
        )
    });
    let mut command = place.train(&settings);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let copies = || {
        place
            .server
            .requests("PUT /runs/first/step-000000004/optimizer.safetensors")
    };
    for _ in 0..1_200 {
        if copies() > 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(copies() > 0, "it never came to the copy");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!place.checkpoint(4).join("training.json").exists());
    place.server.clear();
    // All steps are done: what is left is to copy.
    expect_code(&place.train(&settings).output().unwrap(), 0);
    assert!(place.bits(4).len() >= 2);
    let again = place.train(&settings).output().unwrap();
    expect_code(&again, 0);
    assert!(stderr(&again).contains("nothing to do"), "{}", stderr(&again));
}

#[test]
fn a_bucket_that_takes_no_checkpoint_fails_the_run_by_name() {
    let place = Place::new();
    let settings = ["init=none", "train.max_steps=4"];
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::always(Fault::Status(403), "/runs/first/step-000000004/")
    });
    let output = place.train(&settings).output().unwrap();
    expect_code(&output, 1);
    let said = stderr(&output);
    assert!(said.contains("s3://runs/first/step-000000004/"), "{said}");
    assert!(said.contains("permission denied") && said.contains("warning"), "{said}");
    place.server.clear();
    expect_code(&place.train(&settings).output().unwrap(), 0);
    assert!(place.bits(4).len() >= 2);
}

#[test]
fn models_in_a_bucket_are_those_of_the_disk() {
    let place = Place::new();
    let local = model("model.nemo");
    let same = place
        .flow(&["model", "diff", local.to_str().unwrap(), "s3://models/model.nemo"])
        .output()
        .unwrap();
    expect_code(&same, 0);
    let folder = model("hf");
    let same = place
        .flow(&["model", "diff", folder.to_str().unwrap(), "s3://models/hf/"])
        .output()
        .unwrap();
    expect_code(&same, 0);
    for name in ["s3://models/none.nemo", "s3://none/model.nemo"] {
        let output = place.flow(&["model", "info", name]).output().unwrap();
        expect_code(&output, 1);
        assert!(
            stderr(&output).contains(&format!("{name}: there is no such")),
            "{}",
            stderr(&output)
        );
    }

    // The key has the bytes of the model, wherever they lie.
    let shards = format!("shards={}", Workplace::new("micro").shards.display());
    let evaluate = |model: &str| {
        let model = format!("model={model}");
        let mut command = place.flow(&["run", "pipelines/evaluate.yaml", "--progress", "plain", "--state"]);
        command.arg(place.place.path("state"));
        for setting in [&model, &shards] {
            command.args(["--set", setting]);
        }
        for name in ["report", "manifests"] {
            command.args(["--set", &format!("{name}={}", place.place.path(name).display())]);
        }
        expect_code(&command.output().unwrap(), 0);
        ran(&place.place.path("state"))
            .get("decode")
            .copied()
            .unwrap_or_default()
    };
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/models/small.nemo");
    fs::copy(&small, place.server.root().join("models/small.nemo")).unwrap();
    assert_eq!(evaluate(small.to_str().unwrap()), 1);
    assert_eq!(evaluate("s3://models/small.nemo"), 0);
}
