//! The whole of training on the bundled corpus, without the runtime: a small model learns it. Takes minutes,
//! so it runs only when asked for (`cargo test --release -p flow-training --test learns_mini -- --ignored --nocapture`).
//!
//! `FLOW_TRAIN_MINI` may hold settings of `training.train` as JSON, to try others.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray, UInt32Array};
use flow_evaluation::decode::ValidationSet;
use flow_model::model::MicroBatch;
use flow_model::tokenizer::Tokenizer;
use flow_runtime::{Artifact, Partition};
use flow_sampling::dataset::Dataset;
use flow_sampling::plan::Packing;
use flow_sampling::steps::Steps;
use flow_training::session::Session;
use flow_training::settings::TrainSettings;
use flow_training::trainer::LoadedBatch;
use rayon::prelude::*;
use serde_json::{Value, json};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn corpus() -> PathBuf {
    std::env::var("FLOW_TEST_CORPUS")
        .map_or_else(|_| Path::new(ROOT).join("tests/data/corpus"), PathBuf::from)
        .join("mini/shards")
}

fn manifest(name: &str) -> Vec<Value> {
    let golden = std::env::var("FLOW_TEST_GOLDEN")
        .map_or_else(|_| Path::new(ROOT).join("tests/data/golden/data"), PathBuf::from);
    let text = std::fs::read_to_string(golden.join("mini").join(name)).expect("golden manifest");
    text.lines()
        .map(|line| serde_json::from_str(line).expect("a row"))
        .collect()
}

fn text(values: impl Iterator<Item = String>) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(values))
}

/// The rows of a manifest, by shard.
fn rows(name: &str) -> Artifact {
    let mut shards: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for row in manifest(name) {
        let path = row["tar_path"].as_str().expect("tar_path");
        let shard = path
            .trim_start_matches("shards/")
            .rsplit_once('/')
            .expect("a tar in a folder")
            .0
            .to_owned();
        shards.entry(shard).or_default().push(row);
    }
    let partitions: Vec<(Partition, Vec<RecordBatch>)> = shards
        .into_iter()
        .map(|(shard, rows)| {
            let column =
                |name: &'static str| text(rows.iter().map(move |row| row[name].as_str().expect("text").to_owned()));
            let batch = RecordBatch::try_from_iter([
                (
                    "_row",
                    Arc::new(UInt32Array::from_iter_values(0..rows.len() as u32)) as ArrayRef,
                ),
                ("segment_id", column("segment_id")),
                ("text", column("text")),
                (
                    "duration",
                    Arc::new(Float64Array::from_iter_values(
                        rows.iter().map(|row| row["duration"].as_f64().expect("seconds")),
                    )),
                ),
                ("lang", column("lang")),
                ("tar_member_name", column("tar_member_name")),
            ]);
            (Partition::from(shard), vec![batch.expect("rows")])
        })
        .collect();
    let schema = partitions[0].1[0].schema();
    Artifact::in_memory(schema, partitions).expect("rows")
}

/// The members of the tars, as `audio.probe` gives them.
fn members(shards: impl Iterator<Item = Partition>) -> Artifact {
    let partitions: Vec<(Partition, Vec<RecordBatch>)> = shards
        .map(|shard| {
            let name = shard.as_str().rsplit('/').next().unwrap_or_default().to_owned();
            let mut file = std::fs::File::open(corpus().join(shard.as_str()).join(format!("{name}.tar"))).expect("tar");
            let length = file.metadata().expect("tar").len();
            let listing = flow_audio::tar::list(&mut file, length).expect("tar");
            let members = listing.last_of_each_name();
            let number = |of: fn(&flow_audio::tar::Member) -> u64| {
                Arc::new(Int64Array::from_iter_values(members.iter().map(|m| of(m) as i64))) as ArrayRef
            };
            let batch = RecordBatch::try_from_iter([
                (
                    "_row",
                    Arc::new(UInt32Array::from_iter_values(0..members.len() as u32)) as ArrayRef,
                ),
                (
                    "name",
                    text(
                        members
                            .iter()
                            .map(|m| flow_audio::member_name::strip_dot_slash(&m.name).to_owned()),
                    ),
                ),
                ("offset", number(|m| m.offset)),
                ("size", number(|m| m.size)),
                ("stored", text(members.iter().map(|_| "tar".to_owned()))),
            ]);
            (shard, vec![batch.expect("members")])
        })
        .collect();
    let schema = partitions[0].1[0].schema();
    Artifact::in_memory(schema, partitions).expect("members")
}

#[test]
#[ignore = "trains for minutes"]
fn a_small_model_learns_the_bundled_corpus() {
    let folder = tempfile::tempdir().expect("folder");
    let mut fields = json!({
        "checkpoints": folder.path().to_string_lossy(),
        "tokenizer": format!("{ROOT}/configs/tokenizers/mini.model"),
        "max_steps": 2000, "phase2_lr": 2e-3, "unfreeze_step": 0, "phase2_warmup": 200, "clip": 1.0,
        "max_batch_seconds": 20.0, "spec_augment": false, "model": { "conv_channels": 128, "dropout": 0.1, "decoder_dropout": 0.1 }, "eval_every": 500, "eval_samples_per_language": 0, "checkpoint_every": 1000, "log_every": 20,
    });
    if let Ok(text) = std::env::var("FLOW_TRAIN_MINI") {
        let overrides: Value = serde_json::from_str(&text).expect("FLOW_TRAIN_MINI is JSON");
        fields
            .as_object_mut()
            .expect("an object")
            .extend(overrides.as_object().expect("an object").clone());
    }
    let settings: TrainSettings = serde_json::from_value(fields).expect("settings");

    let (train, validation) = (rows("train_manifest_v2.jsonl"), rows("val_manifest_v2.jsonl"));
    let shards: std::collections::BTreeSet<Partition> =
        train.partitions().chain(validation.partitions()).cloned().collect();
    let members = members(shards.into_iter());
    let shards = corpus().to_string_lossy().into_owned();
    let data = Dataset::read(&train, Some(&members), Path::new(&shards), None).expect("train rows");
    let tokenizer = Tokenizer::from_bytes(&std::fs::read(&settings.tokenizer).expect("tokenizer")).expect("tokenizer");
    let signals: Vec<Vec<f32>> = (0..data.len() as u32)
        .into_par_iter()
        .map(|row| data.utterance(row).expect("row").signal().expect("audio"))
        .collect();
    let packing = Packing {
        max_batch_seconds: settings.max_batch_seconds,
        grad_accum: settings.grad_accum,
        ..Packing::default()
    };
    let steps = Steps::new(packing, "mini", None);

    let set = ValidationSet::read(&validation, Some(&members), &shards, settings.eval_samples_per_language)
        .expect("validation");
    let heard = ValidationSet::read(&train, Some(&members), &shards, 5).expect("sample of the train rows");
    let evaluate = Box::new(move |model: &flow_model::model::TdtModel| Ok(set.scores(model, &|| false)?));
    let began = Instant::now();
    let report = Box::new(move |figures: Value| {
        if figures["step"].as_u64().is_some_and(|step| step.is_multiple_of(20)) || figures["validation_wer"].is_number()
        {
            println!("{:7.1} s {figures}", began.elapsed().as_secs_f64());
        }
    });
    let mut session =
        Session::begin(&settings, Some(&train.digest().to_hex()), Some(evaluate), report).expect("a session");
    println!(
        "{} parameters, {} rows",
        session.model().parameters.count_trainable(),
        data.len()
    );
    for number in 0..settings.max_steps {
        let step = steps.step(&data.rows, number).expect("a step");
        let micro_batches: Vec<LoadedBatch> = (0..settings.grad_accum)
            .map(|micro| {
                let rows = step.micro_batch(0, micro).expect("a micro-batch");
                let utterances = || rows.iter().map(|&row| data.utterance(row).expect("row"));
                LoadedBatch {
                    epoch: step.epoch,
                    rank: 0,
                    micro,
                    segments: utterances().map(|u| u.segment_id.to_owned()).collect(),
                    batch: MicroBatch {
                        signals: rows.iter().map(|&row| signals[row as usize].clone()).collect(),
                        tokens: utterances()
                            .map(|u| {
                                let mut tokens = tokenizer.encode(u.text);
                                tokens.truncate(settings.max_tokens);
                                tokens
                            })
                            .collect(),
                    },
                }
            })
            .collect();
        session.step(&micro_batches).expect("a step");
    }
    let seconds = began.elapsed().as_secs_f64();
    let train_wer = heard
        .scores(session.model(), &|| false)
        .expect("decoded")
        .overall
        .words
        .rate();
    let metrics = std::fs::read_to_string(Path::new(&settings.checkpoints).join("metrics.jsonl")).unwrap_or_default();
    let wers: Vec<f64> = metrics
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("a line"))
        .filter(|line| line["kind"] == "evaluation")
        .map(|line| line["wer"].as_f64().expect("wer"))
        .collect();
    println!(
        "{seconds:.0} s, {:.3} s per step; train WER {train_wer:.4}; validation WER {wers:?}",
        seconds / settings.max_steps as f64
    );
    assert!(train_wer < 0.2, "WER {train_wer} on the train rows");
    let last = *wers.last().expect("an evaluation");
    assert!(last < 0.9 && last < wers[0], "validation WER {wers:?}");
}
