//! `pipelines/indic.yaml` on a miniature of the layouts of IndicVoices, Shrutilipi and Kathbath: Parquet files with recordings and
//! Hugging Face's description of their columns, a folder for each language, and a split in the name of a file.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, BinaryArray, Float64Array, RecordBatch, StringArray, StructArray};
use arrow::datatypes::{DataType, Field};
use parquet::arrow::ArrowWriter;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use serde_json::{Value, json};

use crate::binary::{Workplace, expect_code, golden_model, program, read_rejects, stderr};
use crate::hub_ranges::serve;
use crate::training::find;

const TEXTS: [&str; 10] = [
    "नमस्ते दुनिया",
    "आज मौसम अच्छा है",
    "हम कल दिल्ली जाएँगे",
    "चार और पाँच नौ होते हैं",
    "यह किताब नई है",
    "पानी साफ़ है",
    "वह घर जाता है",
    "रवि और मीना गाते हैं",
    "नदी के पास खेत है",
    "सुबह की चाय",
];

/// The recordings of the rows, and their seconds.
fn recordings() -> Vec<(Vec<u8>, f64)> {
    let mut paths: Vec<PathBuf> = fs::read_dir(golden_model("audio"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "wav"))
        .collect();
    paths.sort();
    let read = |path: PathBuf| {
        let bytes = fs::read(path).unwrap();
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        // The rate of bytes, and the size of the samples after a header of 44 bytes.
        let seconds = (bytes.len() - 44) as f64 / f64::from(number(28));
        (bytes, seconds)
    };
    paths.into_iter().map(read).collect()
}

/// Writes rows of a split as the hub has them.
fn write(folder: &Path, split: &str, rows: std::ops::Range<usize>, is_indicvoices: bool) {
    fs::create_dir_all(folder).unwrap();
    let recordings = recordings();
    let of = |row: usize| &recordings[row % recordings.len()];
    let texts = || Arc::new(StringArray::from_iter_values(rows.clone().map(|row| TEXTS[row]))) as ArrayRef;
    let audio = StructArray::from(vec![
        (
            Arc::new(Field::new("bytes", DataType::Binary, true)),
            Arc::new(BinaryArray::from_iter_values(rows.clone().map(|row| &of(row).0))) as ArrayRef,
        ),
        (
            Arc::new(Field::new("path", DataType::Utf8, true)),
            Arc::new(StringArray::from_iter_values(
                rows.clone().map(|row| format!("{row}.wav")),
            )),
        ),
    ]);
    let mut columns: Vec<(&str, ArrayRef)> = vec![
        ("audio_filepath", Arc::new(audio)),
        ("text", texts()),
        (
            "lang",
            Arc::new(StringArray::from_iter_values(rows.clone().map(|_| "hi"))),
        ),
        (
            "duration",
            Arc::new(Float64Array::from_iter_values(rows.clone().map(|row| of(row).1))),
        ),
    ];
    if is_indicvoices {
        columns.push(("normalized", texts()));
        columns.push((
            "verbatim",
            Arc::new(StringArray::from_iter_values(rows.clone().map(|_| "[hm]"))),
        ));
    }
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let features: serde_json::Map<String, Value> = (batch.schema().fields().iter())
        .map(|field| {
            let kind = match field.data_type() {
                DataType::Struct(_) => json!({ "_type": "Audio" }),
                DataType::Float64 => json!({ "_type": "Value", "dtype": "float64" }),
                _ => json!({ "_type": "Value", "dtype": "string" }),
            };
            (field.name().clone(), kind)
        })
        .collect();
    let info = json!({ "info": { "features": features } }).to_string();
    let properties = WriterProperties::builder()
        .set_key_value_metadata(Some(vec![KeyValue::new("huggingface".into(), info)]))
        .build();
    let file = File::create(folder.join(format!("{split}-00000-of-00001.parquet"))).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// A hub whose model `o/n` is the bundled one, for those who have the token.
fn hub() -> String {
    let model = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/models/small.nemo")).unwrap();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    serve(move |request| {
        if !request.contains("authorization: Bearer hf_of_indic\n") {
            return (401, String::new(), Vec::new());
        }
        let path = request.split(' ').nth(1).unwrap();
        if path.starts_with("/api/models/o/n/revision/") {
            let listing = json!({ "sha": commit, "siblings": [{ "rfilename": "small.nemo" }] });
            return (200, String::new(), listing.to_string().into_bytes());
        }
        assert_eq!(path, format!("/o/n/resolve/{commit}/small.nemo"));
        (200, "etag: \"small\"\r\n".into(), model.clone())
    })
}

#[test]
fn three_corpora_and_a_model_of_the_hub_become_a_model_with_their_script() {
    let place = Workplace::new("micro");
    let folder = |name: &str| place.path(name).join("hindi");
    write(&folder("indicvoices"), "train", 0..3, true);
    write(&folder("indicvoices"), "valid", 7..8, true);
    write(&folder("shrutilipi"), "train", 3..5, false);
    write(&folder("kathbath"), "train", 5..7, false);
    write(&folder("kathbath"), "valid", 8..9, false);

    // What the model knows is trained on, too.
    let known = ["eval0_en-us", "eval1_de"].map(|name| {
        let path = golden_model("audio").join(format!("{name}.wav"));
        json!({"audio_filepath": path, "text": "one two", "lang": &name[6..8]}).to_string()
    });
    fs::write(place.path("known.jsonl"), known.join("\n")).unwrap();
    let replay = format!("replay_manifest={}", place.path("known.jsonl").display());

    let mut flow = program();
    flow.args(["run", "pipelines/indic.yaml", "--progress", "plain", "--state"])
        .arg(place.path("state"));
    flow.env("HF_ENDPOINT", hub()).env("HF_HOME", place.path("hub"));
    flow.env("SITE_TOKEN", "hf_of_indic").env_remove("HF_TOKEN");
    for name in ["indicvoices", "shrutilipi", "kathbath"] {
        flow.args(["--set", &format!("{name}={}", place.path(name).display())]);
    }
    for name in ["checkpoints", "model_out", "report", "tokenizer_out"] {
        flow.args(["--set", &format!("{name}={}", place.path(name).display())]);
    }
    for setting in [
        &replay,
        "replay_share=0.9",
        "init=hf://o/n",
        "hub_token=${env:SITE_TOKEN}",
        "train.row_losses=2",
        "align_with=hf://o/n",
        "vocab_size=1030",
        "min_duration=0.1",
        "min_characters_per_second=0.1",
        "max_characters_per_second=16",
        "train.device=cpu",
        "train.ranks=1",
        "train.precision=f32",
        "train.max_batch_seconds=20",
        "train.unfreeze_step=1",
        "train.max_steps=3",
        "train.eval_every=1",
    ] {
        flow.args(["--set", setting]);
    }
    let output = flow.output().unwrap();
    expect_code(&output, 0);
    let said = stderr(&output);
    assert!(said.contains("texts of `normalized`"), "{said}");
    assert!(place.path("model_out/parakeet_indic.nemo").is_file());
    let mean = find(&place.path("checkpoints"), "average-000000003");
    let record: Value = serde_json::from_slice(&fs::read(mean.join("average.json")).unwrap()).unwrap();
    assert_eq!(record["of"].as_array().unwrap().len(), 3);
    let mut log = program();
    log.args(["log", "--json", "--state"]).arg(place.path("state"));
    let events = String::from_utf8(log.output().unwrap().stdout).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let finished: Vec<Value> = events.filter(|event| event["event"] == "stage_finished").collect();
    let rows = |stage: &str| {
        let of_stage = finished.iter().find(|event| event["stage"] == stage);
        of_stage.and_then(|event| event["rows_out"].as_u64())
    };
    assert_eq!(rows("mixed"), rows("train_rows").map(|rows| rows + 2));
    assert_eq!(rows("fitting"), rows("mixed"));
    // Six more pieces, and the others as they were.
    let vocabulary = fs::read_to_string(place.path("checkpoints/vocabulary.tsv")).unwrap();
    assert_eq!(vocabulary.lines().count(), 1 + 1030, "{vocabulary:.300}");
    // 13 characters in 0.8 s, and 17 in 0.9 s.
    let mut rejects = program();
    rejects.args(["rejects", "--state"]).arg(place.path("state"));
    rejects.arg("--export").arg(place.path("rejects.parquet"));
    expect_code(&rejects.output().unwrap(), 0);
    let reasons: Vec<String> = read_rejects(&place.path("rejects.parquet"))
        .into_iter()
        .map(|reject| reject.reason)
        .collect();
    assert!(
        reasons.iter().all(|reason| reason == "too_many_characters"),
        "{reasons:?}"
    );
}
