//! The value of a secret parameter reaches its service, and is found nowhere else.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use crate::binary::{Workplace, expect_code, program, stderr};
use crate::training::finetune;

const TOKEN: &str = "hf_0123456789abcdef";

const PIPELINE: &str = r#"
flow: 1
params:
  token: {default: "${env:SITE_TOKEN}", secret: true, help: of the hub}
  lines: {required: true}
stages:
  rows: {uses: manifest.read, with: {manifest: "${lines}", check_audio: false}}
  decode: {uses: evaluation.decode, from: {rows: rows}, with: {model: "hf://nobody/nothing", hub_token: "${token}"}}
"#;

/// A hub that refuses all requests, which are appended to the text.
fn hub(asked: &Arc<Mutex<String>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::clone(asked);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let mut request = Vec::new();
            let mut byte = [0];
            while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read == 1) {
                request.push(byte[0]);
            }
            asked.lock().unwrap().push_str(&String::from_utf8_lossy(&request));
            let _ = stream.write_all(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        }
    });
    address
}

/// The files below a folder that hold a text, or have it in their names.
fn files_with(folder: &Path, text: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let in_name = path.file_name().unwrap().to_string_lossy().contains(text);
        if path.is_dir() {
            found.extend(in_name.then(|| path.clone()));
            found.extend(files_with(&path, text));
        } else if in_name
            || fs::read(&path)
                .unwrap()
                .windows(text.len())
                .any(|part| part == text.as_bytes())
        {
            found.push(path);
        }
    }
    found
}

#[test]
fn a_token_is_sent_to_the_hub_and_found_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let asked = Arc::default();
    let endpoint = hub(&asked);
    fs::write(path("pipeline.yaml"), PIPELINE).unwrap();
    let line = r#"{"audio_filepath": "a.flac", "duration": 1.0, "text": "ek do", "lang": "hi"}"#;
    fs::write(path("lines.jsonl"), line).unwrap();
    let command = |command: &str, more: &[&str]| -> Command {
        let mut flow = program();
        flow.args([command, path("pipeline.yaml").to_str().unwrap()]).args(more);
        flow.arg("--set")
            .arg(format!("lines={}", path("lines.jsonl").display()));
        flow.env("SITE_TOKEN", TOKEN)
            .env("HF_ENDPOINT", &endpoint)
            .env("HF_HOME", path("hf"))
            .env("NO_PROXY", "127.0.0.1")
            .env_remove("HF_HUB_OFFLINE")
            .env_remove("HF_HUB_CACHE");
        flow
    };
    let state = path("state");
    let state = ["--state", state.to_str().unwrap()];
    let mut outputs: Vec<Output> = Vec::new();
    let checked = command("check", &[]).output().unwrap();
    expect_code(&checked, 0);
    let planned = command("plan", &[&state[..], &["--json"]].concat()).output().unwrap();
    expect_code(&planned, 0);
    let hook = format!("cat > {}", path("hook.json").display());
    let events = path("events.jsonl");
    let more = [
        "--progress",
        "json",
        "--on-failure",
        &hook,
        "--events",
        events.to_str().unwrap(),
    ];
    let ran = command("run", &[&state[..], &more[..]].concat()).output().unwrap();
    expect_code(&ran, 1);
    assert!(stderr(&ran).contains("parameter `token`"), "{}", stderr(&ran));
    // It is what the hub was asked with.
    let asked = asked.lock().unwrap().to_ascii_lowercase();
    assert!(asked.contains(&format!("authorization: bearer {TOKEN}")), "{asked}");
    // In a text, where it would be shown.
    fs::write(
        path("pipeline.yaml"),
        PIPELINE.replace("hf://nobody/nothing", "hf://nobody/${token}"),
    )
    .unwrap();
    let refused = command("run", &state).output().unwrap();
    expect_code(&refused, 2);
    assert!(stderr(&refused).contains("is a secret"), "{}", stderr(&refused));
    fs::write(
        path("pipeline.yaml"),
        PIPELINE.replace("model: \"hf://nobody/nothing\"", "model: \"${token}\""),
    )
    .unwrap();
    let shown = command("check", &["--set", &format!("token={TOKEN}")])
        .output()
        .unwrap();
    expect_code(&shown, 2);
    assert!(
        stderr(&shown).contains("this setting may be shown"),
        "{}",
        stderr(&shown)
    );
    outputs.extend([checked, planned, ran, refused, shown]);
    for output in &outputs {
        for text in [&output.stdout, &output.stderr] {
            let text = String::from_utf8_lossy(text);
            assert!(!text.contains(TOKEN), "{text}");
        }
    }
    assert!(path("hook.json").exists() && events.exists());
    assert_eq!(files_with(folder.path(), TOKEN), Vec::<PathBuf>::new());
    // The search finds the name, which is in its place.
    assert!(!files_with(&path("state"), "${token}").is_empty() || !files_with(&path("state"), "$secret").is_empty());
}

/// The token that is given is that of the request, of training and of the stage that reads the tokenizer of `init`.
#[test]
fn a_token_for_the_model_that_training_begins_with_is_sent_to_the_hub() {
    // With a tokenizer of its own, it is training that asks.
    for tokenizer in ["", "configs/tokenizers/mini.model"] {
        let place = Workplace::bundled("micro");
        let asked = Arc::default();
        let endpoint = hub(&asked);
        let tokenizer = format!("tokenizer={tokenizer}");
        let mut command = finetune(
            &place,
            &[
                "init=hf://nobody/nothing",
                &tokenizer,
                "hub_token=${env:SITE_TOKEN}",
                "train.max_steps=2",
            ],
        );
        let ran = command
            .env("SITE_TOKEN", TOKEN)
            .env("HF_ENDPOINT", &endpoint)
            .env("HF_HOME", place.path("hf"))
            .env("NO_PROXY", "127.0.0.1")
            .env_remove("HF_TOKEN")
            .env_remove("HF_HUB_OFFLINE")
            .env_remove("HF_HUB_CACHE")
            .output()
            .unwrap();
        expect_code(&ran, 1);
        let told = stderr(&ran);
        assert!(
            told.contains("parameter `hub_token`") && !told.contains(TOKEN),
            "{told}"
        );
        let asked = asked.lock().unwrap().to_ascii_lowercase();
        assert!(asked.contains(&format!("authorization: bearer {TOKEN}")), "{asked}");
        assert_eq!(files_with(place.folder.path(), TOKEN), Vec::<PathBuf>::new());
    }
}
