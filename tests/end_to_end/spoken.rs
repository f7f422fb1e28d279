//! `flow transcribe --stream`: words as they are heard.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use serde_json::Value;

use crate::binary::{expect_code, golden_streaming, program, stderr};

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn flow(arguments: &[&str], input: Option<&[u8]>) -> Output {
    let mut flow = program();
    flow.args(["transcribe", "--stream"]).args(arguments);
    flow.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = flow.spawn().unwrap();
    let mut to = child.stdin.take().unwrap();
    let input = input.unwrap_or_default().to_vec();
    let writer = std::thread::spawn(move || {
        // In pieces, which end within samples. Who refuses the input does not read it.
        for piece in input.chunks(997) {
            if to.write_all(piece).is_err() {
                break;
            }
        }
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

#[test]
fn words_of_a_file_and_of_standard_input_are_those_of_the_model() {
    let model = golden_streaming("model.nemo");
    let model = model.to_str().unwrap();
    let audio = fs::read_dir(golden_streaming("audio")).unwrap();
    let mut audio = audio.map(|entry| entry.unwrap().path());
    let path = audio.find(|path| path.file_name().unwrap().to_string_lossy().starts_with("eval0_"));
    let path = path.unwrap();
    let path = path.to_str().unwrap();
    let facts: Value = serde_json::from_slice(&fs::read(golden_streaming("streaming.json")).unwrap()).unwrap();
    for context in facts["contexts"].as_array().unwrap() {
        let [left, right] = [0, 1].map(|at| context[at].as_u64().unwrap());
        let expected = facts["per_context"][format!("{left}_{right}")]["offline_text"][0]
            .as_str()
            .unwrap();
        let latency = (80 * (right + 1)).to_string();
        let found = flow(&["--model", model, "--latency", &latency, path], None);
        expect_code(&found, 0);
        assert_eq!(
            stdout(&found).split_whitespace().collect::<Vec<_>>().join(" "),
            expected
        );
        let told = stderr(&found);
        assert!(told.contains(&format!("a latency of {latency} ms")), "{told}");
    }
    // The same from standard input, with a header, without one, and with one that knows no size.
    let whole = stdout(&flow(&["--model", model, path], None));
    let bytes = fs::read(path).unwrap();
    let data = bytes.windows(4).position(|four| four == b"data").unwrap();
    let mut endless = bytes.clone();
    endless[data + 4..data + 8].fill(0xff);
    for input in [&bytes[..], &endless, &bytes[data + 8..]] {
        let found = flow(&["--model", model, "-"], Some(input));
        expect_code(&found, 0);
        assert_eq!(stdout(&found), whole);
    }
    // Events.
    let events = flow(
        &["--model", model, "--format", "json", "--latency", "80", "-"],
        Some(&bytes),
    );
    expect_code(&events, 0);
    let (mut words, mut partials, mut last) = (Vec::new(), 0, 0.0);
    for line in stdout(&events).lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        if event["type"] == "partial" {
            partials += 1;
            continue;
        }
        assert_eq!(event["type"], "word");
        let [start, end] = ["start", "end"].map(|key| event[key].as_f64().unwrap());
        assert!(last <= start && start <= end && end < 100.0, "{event}");
        last = start;
        words.push(event["word"].as_str().unwrap().to_owned());
    }
    assert_eq!(words.join(" "), whole.split_whitespace().collect::<Vec<_>>().join(" "));
    assert!(partials > 0);
    // All times are earlier by a delay.
    let delayed = [
        "--model",
        model,
        "--format",
        "json",
        "--latency",
        "80",
        "--set",
        "delay=0.1",
        "-",
    ];
    let delayed = flow(&delayed, Some(&bytes));
    expect_code(&delayed, 0);
    let starts = |output: &Output| -> Vec<f64> {
        let events = stdout(output);
        let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        events.filter_map(|event| event["start"].as_f64()).collect()
    };
    let earlier: Vec<f64> = starts(&events).iter().map(|start| (start - 0.1).max(0.0)).collect();
    let delayed = starts(&delayed);
    assert_eq!(delayed.len(), earlier.len());
    let is_same = |(found, expected): (&f64, &f64)| (found - expected).abs() < 1e-9;
    assert!(delayed.iter().zip(&earlier).all(is_same), "{delayed:?} {earlier:?}");
    // Nothing is heard in nothing.
    let nothing = flow(&["--model", model, "-"], Some(&[]));
    expect_code(&nothing, 0);
    assert_eq!(stdout(&nothing), "");
}

/// A model with contexts without limits: what is said of it, and how it is heard.
#[test]
fn contexts_without_limits_are_told_and_heard() {
    let place = tempfile::tempdir().unwrap();
    let flow_of = |arguments: &[&str]| program().args(arguments).output().unwrap();
    let with = |name: &str, contexts: &str| {
        let folder = place.path().join(name);
        let (model, out) = (golden_streaming("model.nemo"), folder.to_str().unwrap());
        expect_code(&flow_of(&["model", "convert", model.to_str().unwrap(), out]), 0);
        let config = folder.join("model_config.yaml");
        let yaml = fs::read_to_string(&config).unwrap();
        let begin = yaml.find("  att_context_size:").unwrap();
        let end = yaml.find("  att_context_style:").unwrap();
        let yaml = format!("{}  att_context_size: {contexts}\n{}", &yaml[..begin], &yaml[end..]);
        fs::write(config, yaml).unwrap();
        out.to_owned()
    };
    let mixed = with("mixed", "[[-1, -1], [70, 1], [-1, 0], [-1, 6], [6, -1]]");
    let info = stdout(&flow_of(&["model", "info", &mixed]));
    for part in [
        "[-1, -1], [70, 1], [-1, 0], [-1, 6], [6, -1]",
        "cache-aware in [70, 1], [-1, 0], [-1, 6]",
    ] {
        assert!(info.contains(part), "{part}: {info}");
    }
    let memory = stdout(&flow_of(&["memory", &mixed]));
    // 2 layers of width 40: 2 * 10,257 rows of keys and values and 9 of the convolution, in f32.
    assert!(memory.contains("a stream in [-1, 0]  7 MB"), "{memory}");
    assert!(!memory.contains("[6, -1]"), "{memory}");
    let audio = golden_streaming("audio").join("eval0_en-gb.wav");
    let audio = audio.to_str().unwrap();
    for (latency, context) in [(None, "[70, 1]"), (Some("80"), "[-1, 0]"), (Some("2000"), "[-1, 6]")] {
        let latency = latency.map_or(Vec::new(), |latency| vec!["--latency", latency]);
        let heard = flow(&[&["--model", &mixed, audio][..], &latency].concat(), None);
        expect_code(&heard, 0);
        assert!(
            stderr(&heard).contains(&format!("attention context {context}:")),
            "{}",
            stderr(&heard)
        );
        assert!(!stdout(&heard).trim().is_empty());
    }
    let whole = with("whole", "[[-1, -1], [6, -1]]");
    let refused = flow(&["--model", &whole, audio], None);
    assert_ne!(refused.status.code(), Some(0));
    assert!(stderr(&refused).contains("in its contexts, [-1, -1], [6, -1], a frame sees all that follow"));
    let out = place.path().join("out");
    let transcribed = flow_of(&["transcribe", "--model", &whole, "--out", out.to_str().unwrap(), audio]);
    expect_code(&transcribed, 0);
}

#[test]
fn what_a_stream_does_not_give_is_refused() {
    let model = golden_streaming("model.nemo");
    let model = model.to_str().unwrap();
    let refused = |arguments: &[&str], input: Option<&[u8]>, expected: &str| {
        let output = flow(arguments, input);
        assert_ne!(output.status.code(), Some(0));
        let told = stderr(&output);
        assert!(told.contains(expected), "{arguments:?}: {told}");
    };
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/models/small.nemo");
    refused(&["--model", small.to_str().unwrap(), "-"], None, "cache-aware");
    refused(&["-"], None, "--model");
    refused(&["--model", model, "--diarize", "-"], None, "--diarize");
    refused(&["--model", model, "--format", "srt", "-"], None, "txt or json");
    refused(&["--model", model, "a.wav", "b.wav"], None, "one recording");
    refused(&["--model", model, "--beam", "4", "-"], None, "greedy");
    refused(&["--model", model, "--set", "max_window=3", "-"], None, "max_window");
    refused(&["--model", model, "none.wav"], None, "none.wav");
    let mut stereo = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x02\0".to_vec();
    stereo.extend([0x80, 0x3e, 0, 0, 0, 0xfa, 0, 0, 4, 0, 16, 0]);
    stereo.extend(b"data\0\0\0\0");
    refused(&["--model", model, "-"], Some(&stereo), "2 channels");
    let (wrong, _) = stereo.split_at(30);
    refused(&["--model", model, "-"], Some(wrong), "ends in its header");
}
