//! `flow transcribe --coverage`: how much of the speech has words.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use flow_model::model::TdtModel;
use serde_json::Value;

use crate::binary::{expect_code, program, stderr};
use crate::transcription::recording;

/// The bundled model with another bias of blank, as a folder.
fn model(folder: &Path, bias: f32) {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/models/small.nemo");
    let mut model = TdtModel::load(&bundled, DType::F32, &Device::Cpu).unwrap();
    let names = ["joint.joint_net.2.bias", "joint.joint_net.1.bias"];
    let id = names.iter().find_map(|name| model.parameters.id(name)).unwrap();
    let mut values: Vec<f32> = model.parameters.get(id).to_vec1().unwrap();
    values[model.config.vocab_size] += bias;
    let length = values.len();
    let values = Tensor::from_vec(values, length, &Device::Cpu).unwrap();
    model.parameters.set(id, values).unwrap();
    model.save(folder).unwrap();
}

#[test]
fn speech_without_words_is_told_and_may_be_an_error() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    std::fs::create_dir(path("in")).unwrap();
    std::fs::write(path("in/a.flac"), recording("rec_hi_0001_000.flac")).unwrap();
    model(&path("mute"), 1e4);
    let transcribe = |out: &str, arguments: &[&str]| {
        let mut flow = program();
        flow.current_dir(place.path())
            .args(["transcribe", "in", "--progress", "plain"]);
        flow.args(["--format", "json", "--out", out])
            .args(arguments)
            .output()
            .unwrap()
    };
    let json = |out: &str| -> Value {
        let text = std::fs::read_to_string(path(out).join("a.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    // Without the option there is none of it.
    expect_code(&transcribe("plain", &[]), 0);
    assert!(json("plain")["metadata"].get("coverage").is_none());

    let covered = transcribe("good", &["--require-coverage", "0.5"]);
    expect_code(&covered, 0);
    assert!(
        stderr(&covered).contains("of the speech has words"),
        "{}",
        stderr(&covered)
    );
    let coverage = json("good")["metadata"]["coverage"].clone();
    assert!(
        coverage["share"].as_f64().unwrap() >= 0.5 && coverage["speech_s"].as_f64().unwrap() > 1.0,
        "{coverage}"
    );

    let mute = transcribe("mute-out", &["--model", "mute", "--require-coverage", "0.98"]);
    expect_code(&mute, 5);
    let told = stderr(&mute);
    assert!(
        told.contains("a.flac: ") && told.contains("% of its speech has words, 98.0 % are required"),
        "{told}"
    );
    let coverage = json("mute-out")["metadata"]["coverage"].clone();
    // Stretches of less than 0.25 s are no holes.
    assert!(coverage["share"].as_f64().unwrap() < 0.3, "{coverage}");
    assert!(!coverage["holes"].as_array().unwrap().is_empty());
    // What was measured before is told again, and measuring alone is not an error.
    expect_code(
        &transcribe("mute-out", &["--model", "mute", "--require-coverage", "0.98"]),
        5,
    );
    let measured = transcribe("mute-out", &["--model", "mute", "--coverage=measure"]);
    expect_code(&measured, 0);
    assert!(
        stderr(&measured).contains("% of the speech has words; "),
        "{}",
        stderr(&measured)
    );
}

#[test]
fn wrong_uses_of_coverage_and_decoder_are_told() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("a.flac"), recording("rec_hi_0001_000.flac")).unwrap();
    for (arguments, said) in [
        (&["--require-coverage", "98"][..], "from 0 to 1"),
        (&["--coverage", "--window", "full"], "window: vad"),
        (&["--coverage", "--set", "vad=off"], "without voice activity"),
        (&["--set", "coverage=recover"], "--coverage"),
        (&["--set", "suspects=drop"], "coverage"),
        // The bundled model has one head, which is known before a recording is read.
        (&["--decoder", "ctc"], "no such head: it is of TDT"),
        (&["--coverage", "measure"], "--coverage=measure"),
    ] {
        let mut flow = program();
        let output = flow
            .current_dir(place.path())
            .args(["transcribe", "a.flac"])
            .args(arguments)
            .output();
        let output = output.unwrap();
        expect_code(&output, 2);
        assert!(stderr(&output).contains(said), "{arguments:?}: {}", stderr(&output));
    }
}
