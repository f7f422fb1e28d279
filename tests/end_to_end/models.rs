//! `flow model`, and training that begins from a model with another vocabulary.

use std::path::Path;
use std::process::Output;

use crate::binary::{Workplace, expect_code, golden_model as golden, program, stderr};
use crate::training::finetune;

fn model(arguments: &[&str]) -> Output {
    program().arg("model").args(arguments).output().unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_model_goes_through_all_forms_and_stays_the_same() {
    let place = Workplace::new("micro");
    let original = golden("hf");
    let (nemo, folder, back) = (place.path("model.nemo"), place.path("model"), place.path("hf"));
    expect_code(&model(&["convert", text(&original), text(&nemo)]), 0);
    expect_code(&model(&["convert", text(&nemo), text(&folder)]), 0);
    expect_code(&model(&["convert", text(&folder), text(&back), "--format", "hf"]), 0);
    let same = model(&["diff", text(&original), text(&back)]);
    expect_code(&same, 0);
    assert!(stdout(&same).starts_with("the same: "), "{}", stdout(&same));
    let bytes = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(bytes(&original) == bytes(&back));

    // What stands is left alone until `--force` says otherwise.
    let refused = model(&["convert", text(&folder), text(&nemo), "--dtype", "bf16"]);
    expect_code(&refused, 2);
    assert!(stderr(&refused).contains("--force"), "{}", stderr(&refused));
    expect_code(&model(&["diff", text(&folder), text(&nemo)]), 0);
    expect_code(
        &model(&["convert", text(&folder), text(&nemo), "--dtype", "bf16", "--force"]),
        0,
    );
    let differs = model(&["diff", text(&folder), text(&nemo)]);
    expect_code(&differs, 1);
    let table = stdout(&differs);
    assert!(
        table.contains("joint.enc.weight") && table.contains("f32 -> bf16"),
        "{table}"
    );
    assert!(
        !table.contains("configuration:") && !table.contains("running_mean"),
        "{table}"
    );

    let info = model(&["info", text(&nemo), "--tensors"]);
    expect_code(&info, 0);
    for part in [
        "bf16 (",
        "encoder.layers.0.norm_out.weight",
        "model_weights.ckpt",
        "trainable",
    ] {
        assert!(stdout(&info).contains(part), "{part}: {}", stdout(&info));
    }
    // Nothing is left behind, and what is not a model is named.
    assert_eq!(std::fs::read_dir(place.folder.path()).unwrap().count(), 3);
    std::fs::write(place.path("x.nemo"), b"not an archive").unwrap();
    for arguments in [["info", "x.nemo", ""], ["diff", "x.nemo", "model"]] {
        let paths: Vec<String> = arguments[1..]
            .iter()
            .filter(|name| !name.is_empty())
            .map(|name| place.path(name).display().to_string())
            .collect();
        let output = program().args(["model", arguments[0]]).args(&paths).output().unwrap();
        expect_code(&output, if arguments[0] == "info" { 1 } else { 2 });
        assert!(stderr(&output).contains("x.nemo"), "{}", stderr(&output));
    }
    // Opening a pipe waits until somebody writes to it.
    let pipe = place.path("pipe.nemo");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let output = program().args(["model", "info"]).arg(&pipe).output().unwrap();
    expect_code(&output, 1);
    assert!(
        stderr(&output).contains("pipe.nemo: is not a regular file"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_calibration_goes_with_the_model_where_scores_stay() {
    let place = Workplace::new("micro");
    let [nemo, folder, rounded] = ["a.nemo", "folder", "rounded.nemo"].map(|name| place.path(name));
    expect_code(&model(&["convert", text(&golden("hf")), text(&nemo)]), 0);
    let digest = blake3::hash(&std::fs::read(&nemo).unwrap()).to_hex();
    let points = r#""words":2,"points":[[0.1,0.2],[0.9,0.8]]"#;
    let calibration = format!(r#"{{"version":1,"model_digest":"{digest}",{points}}}"#);
    std::fs::write(place.path("a.confidence_calibration.json"), calibration).unwrap();

    expect_code(&model(&["convert", text(&nemo), text(&folder)]), 0);
    let copied = std::fs::read_to_string(folder.join("confidence_calibration.json")).unwrap();
    assert!(copied.contains(points) && !copied.contains(digest.as_str()), "{copied}");
    expect_code(&model(&["convert", text(&nemo), text(&folder), "--force"]), 0);
    // It belongs to the copy: another conversion reads it.
    expect_code(&model(&["convert", text(&folder), text(&place.path("b.nemo"))]), 0);
    assert!(place.path("b.confidence_calibration.json").exists());

    let left_out = model(&["convert", text(&folder), text(&rounded), "--dtype", "bf16"]);
    expect_code(&left_out, 0);
    assert!(
        stdout(&left_out).contains("calibration of confidences is left out"),
        "{}",
        stdout(&left_out)
    );
    assert!(!place.path("rounded.confidence_calibration.json").exists());

    // That of another model is not replaced unasked, and does not stay beside a new one.
    std::fs::write(place.path("c.confidence_calibration.json"), "{}").unwrap();
    let target = place.path("c.nemo");
    let refused = model(&["convert", text(&golden("hf")), text(&target)]);
    expect_code(&refused, 2);
    assert!(
        stderr(&refused).contains("c.confidence_calibration.json"),
        "{}",
        stderr(&refused)
    );
    expect_code(&model(&["convert", text(&golden("hf")), text(&target), "--force"]), 0);
    assert!(!place.path("c.confidence_calibration.json").exists());

    // A folder with the name of an archive leaves the archive's.
    expect_code(
        &model(&["convert", text(&nemo), text(&place.path("a")), "--format", "flow"]),
        0,
    );
    assert!(place.path("a.confidence_calibration.json").exists());
}

/// `MODEL+ADAPTER` is the merged model, for `flow model`, transcription and as the model that training begins with.
#[test]
fn an_adapter_is_added_wherever_a_model_is_named() {
    let place = Workplace::new("micro");
    let adapter = |case: &str| format!("tests/data/golden/adapters/lora_{case}");
    let original = place.path("base.nemo");
    expect_code(&model(&["convert", text(&golden("hf")), text(&original)]), 0);
    let both = format!("{}+{}", text(&original), adapter("qkvo"));
    let merged = place.path("merged.nemo");
    let converted = model(&["convert", &both, text(&merged)]);
    expect_code(&converted, 0);
    let note = "8 matrices are added to, 0 tensors replaced";
    assert!(stdout(&converted).contains(note), "{}", stdout(&converted));
    expect_code(&model(&["diff", &both, text(&merged)]), 0);
    expect_code(&model(&["diff", text(&original), text(&merged)]), 1);

    let hear = |model: &str, out: &str| {
        let recording = golden("audio").read_dir().unwrap().map(|entry| entry.unwrap().path());
        let recording = recording
            .filter(|path| path.to_string_lossy().contains("eval0"))
            .min()
            .unwrap();
        let output = program()
            .args(["transcribe", "--model", model, "--format", "json", "--out", out])
            .arg(recording)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        expect_code(&output, 0);
        let files = std::fs::read_dir(out).unwrap().map(|entry| entry.unwrap().path());
        let file = files
            .filter(|path| path.extension().is_some_and(|end| end == "json"))
            .min()
            .unwrap();
        let value: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        value["text"].as_str().unwrap().to_string()
    };
    let out = |name: &str| text(&place.path(name)).to_string();
    let (of_both, of_merged) = (hear(&both, &out("both")), hear(text(&merged), &out("merged")));
    assert_eq!(of_both, of_merged);
    assert_ne!(of_both, hear(text(&original), &out("original")));

    let alone = model(&["info", &adapter("qkvo")]);
    assert_ne!(alone.status.code(), Some(0));
    assert!(
        stderr(&alone).contains("is an adapter without a model"),
        "{}",
        stderr(&alone)
    );
    let missing = model(&["info", &format!("{}+{}", text(&original), "tests/data/golden/none")]);
    assert_ne!(missing.status.code(), Some(0));
}

/// An adapter is trained by the pipeline, resumed, written as a merged model, and its folder is an adapter of the first model.
#[test]
fn an_adapter_is_trained_by_the_pipeline() {
    let place = Workplace::new("micro");
    let init = format!("init={}", golden("model.nemo").display());
    let run = |steps: &str| {
        let settings = [
            init.as_str(),
            "train.lora={rank: 2, alpha: 4, targets: [linear_q, linear1]}",
        ];
        let more = [
            "train.unfreeze_step=0",
            "train.batch_norm=frozen",
            "train.phase2_warmup=0",
            steps,
        ];
        finetune(&place, &[&settings[..], &more].concat()).output().unwrap()
    };
    expect_code(&run("train.max_steps=2"), 0);
    expect_code(&run("train.max_steps=4"), 0);
    let checkpoint = place.path("checkpoints").join("step-000000004");
    let written = place.path("model_out").join("model.nemo");
    expect_code(&model(&["diff", text(&checkpoint), text(&written)]), 0);
    let both = format!("{}+{}", golden("model.nemo").display(), text(&checkpoint));
    expect_code(&model(&["diff", &both, text(&written)]), 0);
    expect_code(&model(&["diff", text(&golden("model.nemo")), text(&written)]), 1);
    let refused = finetune(&place, &[init.as_str(), "train.lora={rank: 2}", "train.max_steps=5"]);
    let refused = { refused }.output().unwrap();
    assert!(stderr(&refused).contains("batch_norm"), "{}", stderr(&refused));
    let wrong = finetune(&place, &[init.as_str(), "train.lora={rank: two}"])
        .output()
        .unwrap();
    assert!(stderr(&wrong).contains("rank"), "{}", stderr(&wrong));
}

#[test]
fn training_begins_with_another_vocabulary() {
    let place = Workplace::new("micro");
    let init = format!("init={}", golden("model.nemo").display());
    let settings =
        |steps: &'static str| [init.as_str(), "tokenizer=configs/tokenizers/mini.model", steps].map(String::from);
    let run = |settings: &[String]| {
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        finetune(&place, &settings).output().unwrap()
    };
    let output = run(&settings("train.max_steps=2"));
    expect_code(&output, 0);
    let said = stderr(&output);
    assert!(said.contains("vocabulary changed from"), "{said}");
    let table = std::fs::read_to_string(place.path("checkpoints").join("vocabulary.tsv")).unwrap();
    for fate in ["\tkept\t", "\tmean\t"] {
        assert!(table.contains(fate), "{table}");
    }
    let report = std::fs::read_to_string(place.path("report").join("report.html")).unwrap();
    assert!(report.contains("The vocabulary was changed from"));
    let checkpoint = place.path("checkpoints").join("step-000000002");
    let info = model(&["info", text(&checkpoint)]);
    expect_code(&info, 0);
    assert_eq!(
        stdout(&info)
            .matches(&format!("{} pieces", thousands(table.lines().count() - 1)))
            .count(),
        2
    );
    // It goes on from the checkpoint, without a word of the vocabulary.
    let output = run(&settings("train.max_steps=3"));
    expect_code(&output, 0);
    assert!(!stderr(&output).contains("vocabulary changed"), "{}", stderr(&output));
    // Another way to begin is another run.
    let mut other = settings("train.max_steps=4").to_vec();
    other.push("new_pieces=random".into());
    let output = run(&other);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("new_pieces"), "{}", stderr(&output));

    // The checkpoint as an archive that NeMo could restore, and the same change made by hand.
    let archive = place.path("trained.nemo");
    expect_code(&model(&["convert", text(&checkpoint), text(&archive)]), 0);
    expect_code(&model(&["diff", text(&checkpoint), text(&archive)]), 0);
    let converted = place.path("converted");
    let init = golden("model.nemo");
    let arguments = [
        "convert",
        text(&init),
        text(&converted),
        "--tokenizer",
        "configs/tokenizers/mini.model",
    ];
    let output = model(&arguments);
    expect_code(&output, 0);
    assert!(stdout(&output).starts_with(&table), "{}", stdout(&output));
}

fn thousands(number: usize) -> String {
    match number / 1000 {
        0 => number.to_string(),
        high => format!("{high},{:03}", number % 1000),
    }
}

/// Its prediction network and its joint network are as wide as each other, as transformers has them.
#[test]
fn the_bundled_model_becomes_a_folder_of_transformers() {
    let place = Workplace::new("micro");
    let (folder, nemo) = (place.path("hf"), place.path("back.nemo"));
    let bundled = "configs/models/small.nemo";
    // What a process that was killed left: nobody holds its file.
    let left = [".flow-tmp-0123456789abcdef", ".flow-tmp-0123456789abcdef.writing"].map(|name| place.path(name));
    std::fs::create_dir_all(&left[1]).unwrap();
    std::fs::write(&left[0], "").unwrap();
    std::fs::write(left[1].join("config.json"), "").unwrap();
    let output = model(&["convert", bundled, text(&folder), "--format", "hf"]);
    expect_code(&output, 0);
    assert!(left.iter().all(|left| !left.exists()));
    let said = stdout(&output) + &stderr(&output);
    assert!(!said.contains("are zero"), "{said}");
    let config = std::fs::read(folder.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(config["decoder_hidden_size"], 128);
    // It is the model again.
    expect_code(&model(&["convert", text(&folder), text(&nemo)]), 0);
    let info = model(&["info", text(&nemo)]);
    expect_code(&info, 0);
    assert_eq!(stdout(&info).matches("width 128").count(), 2, "{}", stdout(&info));
}
