//! Against what the SentencePiece library makes of the same texts with the same models.

use std::path::PathBuf;

use serde::Deserialize;

use super::*;
use flow_nn::tensor_files::read_packed;

/// A file of the golden tokenizer data.
pub(super) fn file(name: &str) -> PathBuf {
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/golden/tokenizer");
    let root = std::env::var_os("FLOW_TEST_GOLDEN_TOKENIZER").map_or_else(|| PathBuf::from(bundled), PathBuf::from);
    root.join(name)
}

pub(super) fn bundled(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(name)
}

#[derive(Deserialize)]
struct Golden {
    models: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    name: String,
    nmt_nfkc: bool,
    cases: Vec<(String, Vec<u32>, String)>,
    decodes: Vec<(Vec<u32>, String)>,
}

impl Model {
    fn load(&self) -> Tokenizer {
        let mut bytes = std::fs::read(file(&format!("{}.model", self.name))).unwrap();
        if self.nmt_nfkc {
            let mini = std::fs::read(bundled("configs/tokenizers/mini.model")).unwrap();
            let map = read_model_file(&mini).unwrap().character_map;
            // A message that comes again in a protocol buffer adds its fields to the first.
            let mut normaliser = vec![2 << 3 | 2];
            push_number(&mut normaliser, map.len());
            normaliser.extend(map);
            bytes.push(3 << 3 | 2);
            push_number(&mut bytes, normaliser.len());
            bytes.extend(normaliser);
        }
        Tokenizer::from_bytes(&bytes).unwrap()
    }
}

fn push_number(bytes: &mut Vec<u8>, mut value: usize) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

#[test]
fn all_models_encode_and_decode_as_sentencepiece() {
    let golden: Golden = serde_json::from_slice(&read_packed(&file("cases.json"), 1).unwrap()).unwrap();
    assert_eq!(golden.models.len(), 7);
    let mut wrong = Vec::new();
    for model in &golden.models {
        let tokenizer = model.load();
        assert!(model.cases.len() >= 100 && model.decodes.len() >= 20);
        for (text, ids, back) in &model.cases {
            let ours = tokenizer.encode(text);
            if ours != *ids {
                wrong.push(format!("{}: {text:?} gives {ours:?}, not {ids:?}", model.name));
            }
            let ours = tokenizer.decode(ids).unwrap();
            if ours != *back {
                wrong.push(format!("{}: {ids:?} give back {ours:?}, not {back:?}", model.name));
            }
        }
        for (ids, text) in &model.decodes {
            let ours = tokenizer.decode(ids).unwrap();
            if ours != *text {
                wrong.push(format!("{}: {ids:?} decode to {ours:?}, not {text:?}", model.name));
            }
        }
    }
    let cases: usize = golden.models.iter().map(|m| 2 * m.cases.len() + m.decodes.len()).sum();
    assert!(
        wrong.is_empty(),
        "{} of {cases} differ:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(40)].join("\n")
    );
}
