//! `pipelines/pseudo_label.yaml`: recordings to a manifest that training takes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use arrow::array::AsArray;
use arrow::datatypes::Float64Type;
use serde_json::Value;

use crate::binary::{Workplace, expect_code, program, read_parquet, read_rejects};
use crate::training::finetune;
use crate::transcription::recording;

/// `flow run pipelines/pseudo_label.yaml` on the recordings of a place, with rules that the small model can meet.
fn label(place: &Workplace, settings: &[&str]) -> Output {
    label_command(place, settings).output().unwrap()
}

pub fn label_command(place: &Workplace, settings: &[&str]) -> Command {
    let mut flow = program();
    flow.args(["run", "pipelines/pseudo_label.yaml", "--progress", "plain", "--state"])
        .arg(place.path("state"));
    let input = format!("input=[\"{}\"]", place.path("recordings").display());
    let out = format!("out={}", labels(place).display());
    let rules = [
        "lang=hi",
        "min_confidence=0",
        "min_mean_confidence=0",
        "min_words=1",
        "max_words_per_second=100",
    ];
    for setting in [input.as_str(), out.as_str()].iter().chain(&rules).chain(settings) {
        flow.args(["--set", setting]);
    }
    flow
}

fn labels(place: &Workplace) -> PathBuf {
    place.path("labels")
}

/// The lines of the manifest.
fn lines(place: &Workplace) -> Vec<Value> {
    let text = fs::read_to_string(labels(place).join("train_manifest_v2.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What refused recordings and rows, and how often.
fn refused(place: &Workplace) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = read_rejects(&labels(place).join("rejects.parquet"))
        .into_iter()
        .map(|reject| (reject.reason, reject.class))
        .collect();
    found.sort();
    found
}

/// What training is given in place of shards.
fn manifests(place: &Workplace, train: &Path) -> Vec<String> {
    vec![
        format!("train_manifest={}", train.display()),
        format!("val_manifest={}", place.out().join("val_manifest_v2.jsonl").display()),
        format!("audio={}", place.path("audio").display()),
        // The two corpora may share a sentence.
        "allow_overlap=true".to_owned(),
        "train.max_steps=2".to_owned(),
    ]
}

/// The way of docs/transcription.md: training on one half, labels of the other, training on both; the bundled model labels,
/// as two steps of training make none that hears words.
#[test]
fn what_a_model_heard_is_trained_on_with_what_somebody_wrote() {
    let place = Workplace::bundled("micro");
    expect_code(&finetune(&place, &["train.max_steps=2"]).output().unwrap(), 0);
    place.build_manifests(&["jsonl=true", &format!("audio={}", place.path("audio").display())]);

    fs::create_dir(place.path("recordings")).unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(place.path("recordings").join(name), bytes).unwrap();
    for name in [
        "rec_hi_0001_000.flac",
        "rec_hi_0002_000.flac",
        "rec_hi_0004_003.flac",
        "rec_hi_0007_003.flac",
        "rec_hi_0008_001.flac",
        "rec_hi_0008_002.flac",
    ] {
        write(name, &recording(name));
    }
    // A file that is cut cannot be trained on; neither can one that is none.
    let whole = recording("rec_hi_0003_000.flac");
    write("cut.flac", &whole[..whole.len() * 3 / 4]);
    write("letter.wav", b"a letter that was named wrongly");
    expect_code(&label(&place, &[]), 0);
    let rows = lines(&place);
    assert!(rows.len() >= 3, "{rows:?}");
    for row in &rows {
        assert!(row["text"].as_str().unwrap().starts_with("<|hi|> "), "{row}");
        assert!(row["duration"].as_f64().unwrap() >= 1.0, "{row}");
        assert!(Path::new(row["audio_filepath"].as_str().unwrap()).is_file(), "{row}");
    }
    let before = refused(&place);
    let faults: Vec<&str> = before
        .iter()
        .filter_map(|(reason, class)| (class == "fault").then_some(reason.as_str()))
        .collect();
    assert_eq!(faults, ["decode_error", "unsupported_format"]);

    // A stricter rule refuses the shortest rows, with its reason.
    let mut durations: Vec<f64> = read_parquet(&labels(&place).join("train_manifest_v2.parquet"))
        .iter()
        .flat_map(|batch| {
            let column = batch.column_by_name("duration").unwrap();
            column.as_primitive::<Float64Type>().values().to_vec()
        })
        .collect();
    durations.sort_by(f64::total_cmp);
    let longer = *durations.iter().find(|duration| **duration > durations[0]).unwrap();
    let shortest = durations.iter().filter(|duration| **duration < longer).count();
    expect_code(&label(&place, &[&format!("min_duration={longer}")]), 0);
    assert_eq!(lines(&place).len(), rows.len() - shortest);
    let too_short = |refused: &[(String, String)]| {
        let reasons = refused.iter().filter(|(reason, _)| reason == "duration_too_short");
        reasons.count()
    };
    let stricter = refused(&place);
    assert_eq!(stricter.len(), before.len() + shortest);
    assert!(too_short(&stricter) >= too_short(&before) + shortest, "{stricter:?}");
    expect_code(&label(&place, &[]), 0);
    assert_eq!(lines(&place), rows);

    // The manifest is taken as it is, alone and with the other half.
    let both = place.path("both.jsonl");
    let halves = [
        place.out().join("train_manifest_v2.jsonl"),
        labels(&place).join("train_manifest_v2.jsonl"),
    ];
    fs::write(&both, halves.map(|path| fs::read_to_string(path).unwrap()).concat()).unwrap();
    for train in [&labels(&place).join("train_manifest_v2.parquet"), &both] {
        for command in ["check", "plan"] {
            let settings = manifests(&place, train);
            let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
            let mut flow = program();
            flow.args([command, "pipelines/finetune.yaml"]);
            if command == "plan" {
                flow.arg("--state").arg(place.path("other_state"));
            }
            for setting in settings {
                flow.args(["--set", setting]);
            }
            expect_code(&flow.output().unwrap(), 0);
        }
    }
    let second = Workplace::bundled("micro");
    let settings = manifests(&place, &both);
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    expect_code(&finetune(&second, &settings).output().unwrap(), 0);
    let mut flow = program();
    flow.args(["rejects", "pipelines/finetune.yaml", "--state"])
        .arg(second.path("state"))
        .arg("--export")
        .arg(second.path("rejects.parquet"));
    expect_code(&flow.output().unwrap(), 0);
    let reasons: Vec<String> = read_rejects(&second.path("rejects.parquet"))
        .into_iter()
        .map(|reject| reject.reason)
        .collect();
    // Of the written half, whose corpus has one text of hundreds of words over a second of audio.
    assert_eq!(reasons, ["too_many_tokens"]);
}
