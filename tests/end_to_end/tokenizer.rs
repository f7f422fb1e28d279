//! A tokenizer from shards, and a model that is trained with it in the same pipeline.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Output;

use flow_model::checkpoint::OpenModel;
use flow_model::tokenizer::Tokenizer;

use crate::binary::{Workplace, expect_code, read_manifest, stderr};

fn texts(place: &Workplace) -> Vec<String> {
    let rows = read_manifest(&place.out().join("train_manifest_v2.parquet"));
    rows.into_iter().map(|row| row.text).collect()
}

/// Runs `pipelines/train_tokenizer.yaml` with these settings.
fn train_tokenizer<S: AsRef<str>>(place: &Workplace, settings: impl IntoIterator<Item = S>) -> Output {
    let mut flow = crate::binary::program();
    flow.args([
        "run",
        "pipelines/train_tokenizer.yaml",
        "--progress",
        "plain",
        "--state",
    ]);
    flow.arg(place.path("state"));
    for setting in settings {
        flow.args(["--set", setting.as_ref()]);
    }
    flow.output().unwrap()
}

#[test]
fn a_tokenizer_is_trained_from_shards_and_from_their_manifest_alike() {
    for kind in ["bpe", "unigram"] {
        let place = Workplace::new("micro");
        let run = |settings: &[&str]| {
            let all = [
                format!("shards={}", place.shards.display()),
                format!("manifests={}", place.out().display()),
                format!("type={kind}"),
                "vocab_size=380".into(),
                "special=[<pad>]".into(),
            ];
            train_tokenizer(&place, all.iter().map(String::as_str).chain(settings.iter().copied()))
        };
        let model = |out: &Path| std::fs::read(out.join("tokenizer.model")).unwrap();
        let (first, second) = (place.path("first"), place.path("second"));
        let output = run(&[&format!("out={}", first.display())]);
        expect_code(&output, 0);
        let tokenizer = Tokenizer::from_bytes(&model(&first)).unwrap();
        assert_eq!((tokenizer.vocabulary_size(), tokenizer.id("<pad>")), (380, Some(1)));
        let texts = texts(&place);
        assert!(texts.len() > 50);
        for text in &texts {
            let tag = &text[..text.find("|>").unwrap() + 2];
            let ids = tokenizer.encode(text);
            assert!(ids.contains(&tokenizer.id(tag).unwrap()), "{tag} is not a piece");
            assert!(!ids.contains(&tokenizer.unknown_id()), "{text}");
        }
        assert!(first.join("tokenizer.vocab").exists() && first.join("tokenizer.flow.json").exists());
        // NeMo takes no folder of a tokenizer without it.
        let lines = std::fs::read_to_string(first.join("vocab.txt")).unwrap();
        assert_eq!(lines.lines().count(), tokenizer.vocabulary_size());

        let again = run(&[&format!("out={}", first.display())]);
        expect_code(&again, 0);
        assert!(stderr(&again).contains("nothing to do"), "{}", stderr(&again));

        let manifest = place.out().join("train_manifest_v2.parquet");
        let output = run(&[
            &format!("out={}", second.display()),
            &format!("manifest={}", manifest.display()),
        ]);
        expect_code(&output, 0);
        assert!(
            model(&first) == model(&second),
            "{kind}: the manifest gives another tokenizer than its shards"
        );

        let output = run(&[&format!("out={}", second.display()), "vocab_size=20"]);
        expect_code(&output, 1);
        assert!(stderr(&output).contains("too small"), "{}", stderr(&output));
    }
}

/// A language that the model has no letters for: one command, from rows that name no language.
#[test]
fn a_tokenizer_is_extended_for_a_new_language() {
    let place = Workplace::new("micro");
    let texts = [
        "το νερό είναι κρύο",
        "το σπίτι είναι μεγάλο",
        "το παιδί διαβάζει ένα βιβλίο",
    ];
    let line = |text: &&str| format!("{{\"audio_filepath\": \"none.wav\", \"duration\": 1.0, \"text\": \"{text}\"}}\n");
    std::fs::write(place.path("el.jsonl"), texts.iter().map(line).collect::<String>()).unwrap();
    let init = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/models/small.nemo");
    let held = OpenModel::open(&init).unwrap().tokenizer.unwrap();
    let old = Tokenizer::from_bytes(&held).unwrap();
    let letters: BTreeSet<char> = texts
        .iter()
        .flat_map(|text| text.chars())
        .filter(|c| *c != ' ')
        .collect();
    let pieces = old.vocabulary_size() + letters.len() + 3;
    let settings = [
        ("manifest", place.path("el.jsonl").display().to_string()),
        ("out", place.path("out").display().to_string()),
        ("extend", init.display().to_string()),
        ("lang", "el".into()),
        ("vocab_size", pieces.to_string()),
    ];
    let settings = settings.map(|(name, value)| format!("{name}={value}"));
    expect_code(&train_tokenizer(&place, settings), 0);
    let new = Tokenizer::load(&place.path("out/tokenizer.model")).unwrap();
    assert_eq!(new.vocabulary_size(), pieces);
    for text in texts {
        assert!(old.encode(text).contains(&old.unknown_id()), "{text}");
        assert!(!new.encode(text).contains(&new.unknown_id()), "{text}");
    }
    let known = "<|hi|> नमस्ते दुनिया";
    assert_eq!(new.encode(known), old.encode(known));
}

const PIPELINE: &str = r#"
flow: 1
params: {shards: {default: ""}, out: {default: ""}, checkpoints: {default: ""}}
include:
  manifest: {pipeline: ROOT/pipelines/build_manifest_v2.yaml, params: {shards: "${shards}", out: "${out}"}}
stages:
  tokenizer: {uses: tokenizer.train, from: manifest/split.train, with: {vocab_size: 520}}
  load:
    uses: sampling.load
    from: {rows: manifest/split.train, members: manifest/probe.members}
    with: {shards: "${shards}", steps: 2, max_batch_seconds: 8}
  train:
    uses: training.train
    from: {batches: load, validation: manifest/split.val, train: manifest/split.train, members: manifest/probe.members, tokenizer: tokenizer}
    with:
      shards: "${shards}"
      checkpoints: "${checkpoints}"
      model: {d_model: 32, layers: 1, heads: 2, conv_channels: 8, pred_hidden: 24, joint_hidden: 32}
      max_steps: 2
      max_tokens: 9
      eval_every: 0
      unfreeze_step: 0
"#;

#[test]
fn a_model_is_trained_with_the_tokenizer_of_its_own_pipeline() {
    let place = Workplace::new("micro");
    let pipeline = place.path("pipeline.yaml");
    std::fs::write(&pipeline, PIPELINE.replace("ROOT", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let checkpoints = format!("checkpoints={}", place.path("checkpoints").display());
    let run = |settings: &[&str]| {
        let mut all = vec![checkpoints.as_str()];
        all.extend(settings);
        let pipeline = pipeline.to_str().unwrap();
        place.command("run", pipeline, &all).output().unwrap()
    };
    let output = run(&[]);
    expect_code(&output, 0);
    let text = stderr(&output);
    assert!(text.contains("transcripts have more than 9 tokens"), "{text}");
    let checkpoint = place.path("checkpoints").join("step-000000002");
    let metrics = std::fs::read_to_string(place.path("checkpoints").join("metrics.jsonl")).unwrap();
    assert!(metrics.contains("\"kind\":\"long_texts\""), "{metrics}");
    assert!(checkpoint.is_dir());
    let kept: Vec<_> = std::fs::read_dir(&checkpoint)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let tokenizer = kept
        .iter()
        .find(|path| path.extension().is_some_and(|end| end == "model"));
    assert_eq!(
        Tokenizer::load(tokenizer.expect("a .model")).unwrap().vocabulary_size(),
        520
    );
    let again = run(&[]);
    expect_code(&again, 0);
    assert!(stderr(&again).contains("nothing to do"), "{}", stderr(&again));
}
