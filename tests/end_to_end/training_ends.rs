//! Trainings that end before their last step, languages that are kept, and runs that are compared.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::binary::{Workplace, expect_code, program, stderr};
use crate::training::{find, finetune, main_job};

fn record(place: &Workplace, step: u64) -> Value {
    let folder = find(&place.path("checkpoints"), &format!("step-{step:09}"));
    serde_json::from_slice(&fs::read(folder.join("training.json")).unwrap()).unwrap()
}

/// No evaluation after the first is an improvement by all words. What follows training runs, and a second run does nothing.
#[test]
fn a_training_that_gets_no_better_ends_and_its_model_is_written() {
    let place = Workplace::new("micro");
    let settings = [
        "train.max_steps=400",
        "train.eval_every=2",
        "train.early_stopping={patience: 2, min_delta: 1.0}",
    ];
    let run = |name: &str, more: &[&str]| {
        let all: Vec<&str> = settings.iter().chain(more).copied().collect();
        let mut flow = finetune(&place, &all);
        flow.args(["--name", name, "--note", "what is tried\u{1b}[2J"]);
        let output = flow.output().unwrap();
        expect_code(&output, 0);
        stderr(&output)
    };
    let said = run("short", &[]);
    assert!(
        said.contains("training ends early") && said.contains("of step 2"),
        "{said}"
    );
    assert_eq!(record(&place, 6)["improvement"]["evaluations"], 2);
    assert!(place.path("model_out/model.nemo").is_file());
    let again = run("again", &[]);
    assert!(again.contains("nothing to do"), "{again}");
    // With more patience it goes on.
    run("longer", &["train.early_stopping={patience: 3, min_delta: 1.0}"]);
    assert_eq!(record(&place, 8)["step"], 8);

    let mut flow = program();
    flow.args(["compare", "short", "longer", "--state"])
        .arg(place.path("state"));
    let output = flow.output().unwrap();
    expect_code(&output, 0);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = |start: &str| {
        let found = table.lines().find(|line| line.starts_with(start));
        found.unwrap_or_else(|| panic!("{start}: {table}")).to_owned()
    };
    assert!(line("note").matches("what is tried").count() == 2);
    let mut status = program();
    status.arg("status").arg("--state").arg(place.path("state"));
    let status = status.output().unwrap();
    expect_code(&status, 0);
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(
        status.contains("(longer)") && status.contains("note: what is tried"),
        "{status}"
    );
    // A terminal obeys neither.
    assert!(!status.contains('\u{1b}') && !table.contains('\u{1b}'), "{status}");
    let patience = line("train.early_stopping");
    assert!(patience.contains(":2") && patience.contains(":3"), "{patience}");
    assert!(line("train: validation_wer").matches('.').count() >= 1);
    assert!(!table.contains("unfreeze_step"), "{table}");
    let mut flow = program();
    flow.args(["compare", "short", "longest", "--state"])
        .arg(place.path("state"));
    let output = flow.output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("no run `longest`"), "{}", stderr(&output));
}

/// The recordings below a folder.
fn recordings(folder: PathBuf) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => found.push(path),
            }
        }
    }
    found.sort();
    found
}

/// A manifest of recordings of one language.
fn manifest(place: &Workplace, name: &str, recordings: &[PathBuf]) -> String {
    let path = place.path(name);
    let line = |path: &PathBuf| json!({ "audio_filepath": path, "text": "one two", "lang": "en" }).to_string();
    fs::write(&path, recordings.iter().map(line).collect::<Vec<_>>().join("\n")).unwrap();
    path.display().to_string()
}

/// Training hears the same whether recordings of shards stay in their tars or are extracted, also beside rows to replay.
#[test]
fn rows_in_tars_and_rows_to_replay_are_mixed() {
    let place = Workplace::new("micro");
    expect_code(&finetune(&place, &["train.max_steps=1"]).output().unwrap(), 0);
    let audio = recordings(place.path("audio"));
    let replay = format!("replay_manifest={}", manifest(&place, "replay.jsonl", &audio[2..]));
    let weights = |store: &str| {
        let checkpoints = format!("checkpoints={}", place.path(store).display());
        let store_setting = format!("store={store}");
        let settings = [
            &replay,
            &store_setting,
            "replay_share=0.5",
            // The recordings are those of training and validation.
            "allow_overlap=true",
            "train.max_steps=3",
            &checkpoints,
        ];
        let output = finetune(&place, &settings).output().unwrap();
        expect_code(&output, 0);
        let said = stderr(&output);
        assert!(said.contains("mixed") && !said.contains("cannot be decoded"), "{said}");
        let folder = find(&place.path(store), "step-000000003");
        let files = recordings(folder)
            .into_iter()
            .filter(|path| path.extension().is_some_and(|e| e == "safetensors"));
        files.map(|path| fs::read(path).unwrap()).collect::<Vec<_>>()
    };
    let (tarred, extracted) = (weights("tar"), weights("as_is"));
    assert!(tarred.len() >= 2 && tarred == extracted);
}

#[test]
fn a_language_is_protected_and_replayed() {
    let place = Workplace::new("micro");
    expect_code(&finetune(&place, &["train.max_steps=1"]).output().unwrap(), 0);
    let audio = recordings(place.path("audio"));
    assert!(audio.len() >= 4, "{audio:?}");
    let (protect, replay) = (
        manifest(&place, "protect.jsonl", &audio[..2]),
        manifest(&place, "replay.jsonl", &audio[2..]),
    );
    let [protect, replay] = [
        format!("protect_manifest={protect}"),
        format!("replay_manifest={replay}"),
    ];
    let run = |folder: &str, more: &[&str]| {
        let checkpoints = format!("checkpoints={}", place.path(folder).display());
        let settings = [
            protect.as_str(),
            replay.as_str(),
            &checkpoints,
            "train.max_steps=4",
            "train.unfreeze_step=0",
            "train.eval_every=2",
            "train.checkpoint_every=2",
            "train.eval_samples_per_language=1",
            "train.speeds=[1.0]",
            "train.average_decay=0",
        ];
        let all: Vec<&str> = settings.iter().chain(more).copied().collect();
        main_job(&place, &all).output().unwrap()
    };
    // The recordings are those of training.
    let output = run("refused", &["replay_manifest="]);
    expect_code(&output, 2);
    let said = stderr(&output);
    assert!(
        said.contains("2 of 2 rows of protect_manifest are also in training"),
        "{said}"
    );
    let output = run("refused", &["protect_manifest="]);
    expect_code(&output, 2);
    let said = stderr(&output);
    assert!(said.contains("rows of validation are also in training"), "{said}");
    let output = run("refused", &["replay_share=1.5"]);
    expect_code(&output, 2);
    let said = stderr(&output);
    assert!(
        said.contains("`replay_share`: expected a number from 0 to 1, found 1.5"),
        "{said}"
    );
    let run = |folder: &str, more: &[&str]| run(folder, &[&["allow_overlap=true"], more].concat());
    let output = run("kept", &["replay_share=0.9", "train.protect.max_rise=10"]);
    expect_code(&output, 0);
    let metrics = fs::read_to_string(place.path("kept/metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let protected: Vec<Value> = lines.filter(|line| line["kind"] == "protected").collect();
    let steps: Vec<&Value> = protected.iter().map(|line| &line["step"]).collect();
    assert_eq!(steps, [&json!(0), &json!(2), &json!(4)]);
    let english = &protected[0]["languages"]["en"];
    assert!(
        english["wer"].is_number() && english["wer"] == english["wer_before"],
        "{english}"
    );
    // All of the rows to replay are trained on, and with a small share fewer.
    let rows = |stage: &str| {
        let mut flow = program();
        flow.args(["log", "--json", "--state"]).arg(place.path("state"));
        let output = flow.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let finished = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let mut of_stage = finished.filter(|event| event["event"] == "stage_finished" && event["stage"] == stage);
        of_stage.next_back().unwrap_or_else(|| panic!("{stage}"))["rows_out"]
            .as_u64()
            .unwrap()
    };
    let all = rows("replayed");
    assert_eq!(all, audio.len() as u64 - 2);
    assert_eq!(rows("mixed"), rows("train_texts") + all);

    expect_code(&run("less", &["replay_share=0.05", "train.protect.max_rise=10"]), 0);
    let few = rows("replayed");
    assert!(few < all, "{few} of {all}");
}
