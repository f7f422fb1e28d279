//! NeMo itself restores the archives that are written here, and its calls work on them as its users write them.

use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::{DType, Device};
use flow_model::ModelConfig;
use flow_model::checkpoint::{Format, OpenModel};
use flow_model::model::TdtModel;
use flow_model::tokenizer::Tokenizer;
use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The recordings of the golden model data, 16 kHz mono in 16 bits.
fn recordings() -> Vec<PathBuf> {
    let folder = std::env::var_os("FLOW_TEST_GOLDEN_MODEL")
        .map_or_else(|| Path::new(ROOT).join("tests/data/golden/model"), PathBuf::from);
    let entries = std::fs::read_dir(folder.join("audio")).expect("recordings");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths
}

fn samples(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).expect("a recording");
    let data = bytes.windows(4).position(|w| w == b"data").expect("data") + 8;
    let pairs = bytes[data..].chunks_exact(2);
    pairs
        .map(|pair| f32::from(i16::from_le_bytes([pair[0], pair[1]])) / 32768.0)
        .collect()
}

/// What `nemo_calls.py` says of an archive.
fn called(archive: &Path, folder: &Path, recordings: &[PathBuf]) -> Value {
    let python = std::env::var("FLOW_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    std::fs::create_dir_all(folder).expect("a folder");
    let output = Command::new(python)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nemo_calls.py"))
        .args([archive, folder])
        .args(recordings)
        .output()
        .expect("python");
    let (said, wrong) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{wrong}");
    let line = said.lines().find_map(|line| line.strip_prefix("RESULT "));
    serde_json::from_str(line.unwrap_or_else(|| panic!("{said}\n{wrong}"))).expect("JSON")
}

fn texts(value: &Value) -> Vec<String> {
    serde_json::from_value(value.clone()).expect("texts")
}

/// Needs a Python that has NeMo 3.0.0 (`pip install "nemo_toolkit[asr]==3.0.0"`, 6 GB); `FLOW_TEST_PYTHON` names it.
#[test]
#[ignore = "needs a Python with NeMo"]
fn nemos_calls_work_as_its_users_write_them() {
    let place = tempfile::tempdir().expect("a folder");
    let recordings = recordings();
    let archive = place.path().join("small.nemo");
    let bundled = OpenModel::open(&Path::new(ROOT).join("configs/models/small.nemo")).expect("the bundled model");
    bundled
        .write(&archive, Format::Nemo, Some(DType::F32), false)
        .expect("an archive");
    let found = called(&archive, &place.path().join("small"), &recordings);
    assert_eq!(found["class"], "EncDecRNNTBPEModel");
    assert_eq!(found["optimizer"], "AdamW");
    // Decoded by this program: the same words, alone, in a batch, and after NeMo has written the model itself.
    let model = TdtModel::load(&archive, DType::F32, &Device::Cpu).expect("the archive");
    let ours: Vec<String> = recordings
        .iter()
        .map(|path| {
            let decoded = model.transcribe(&[samples(path).as_slice()]).expect("a text").remove(0);
            decoded.text
        })
        .collect();
    assert!(ours.iter().any(|text| !text.is_empty()));
    for name in ["texts", "one_by_one", "saved_texts"] {
        assert_eq!(texts(&found[name]), ours, "{name}");
    }
    let words: Vec<Vec<Value>> = serde_json::from_value(found["timestamps"].clone()).expect("words");
    assert_eq!(words.len(), ours.len());
    assert!(
        words
            .iter()
            .zip(&ours)
            .all(|(words, text)| words.is_empty() == text.trim().is_empty())
    );
    let pieces = model.config.vocab_size;
    assert_eq!(found["changed_vocabulary"], pieces);
    let batches: Vec<u64> = serde_json::from_value(found["batches"].clone()).expect("numbers");
    assert!(batches.len() == 2 && batches.iter().all(|&batches| batches > 0));

    // One with an auxiliary CTC head is of another class of NeMo's.
    let tokenizer = Tokenizer::from_bytes(bundled.tokenizer.as_deref().expect("a tokenizer")).expect("a tokenizer");
    let mut config = ModelConfig::from_nemo_yaml(&bundled.config_yaml).expect("a configuration");
    config.ctc = Some(flow_model::config::CtcConfig {
        weight: 0.3,
        reduction: flow_model::config::Reduction::MeanBatch,
    });
    let hybrid = TdtModel::new(config, Some(tokenizer), 1, DType::F32, &Device::Cpu).expect("a model");
    let (folder, archive) = (place.path().join("folder"), place.path().join("hybrid.nemo"));
    hybrid.save(&folder).expect("a model folder");
    let opened = OpenModel::open(&folder).expect("the model folder");
    opened.write(&archive, Format::Nemo, None, false).expect("an archive");
    let found = called(&archive, &place.path().join("hybrid"), &recordings);
    assert_eq!(found["class"], "EncDecHybridRNNTCTCBPEModel");
    assert_eq!(found["changed_vocabulary"], pieces);
}
