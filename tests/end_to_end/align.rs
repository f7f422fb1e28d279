//! `flow align`: times of a text that is known.

use std::fs;
use std::process::Output;

use serde_json::Value;

use crate::binary::{expect_code, program, stderr};
use crate::transcription::recording;

fn stdout_of(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn a_text_and_subtitles_get_times_and_what_does_not_fit_is_reported() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    fs::write(path("a.flac"), recording("rec_hi_0001_000.flac")).unwrap();
    let flow = |arguments: &[&str]| -> Output {
        let mut flow = program();
        flow.current_dir(place.path()).args(arguments).output().unwrap()
    };
    // What the model hears is aligned with the recording.
    let heard = flow(&["transcribe", "a.flac", "--format", "json", "--out", "out"]);
    expect_code(&heard, 0);
    let heard: Value = serde_json::from_slice(&fs::read(path("out/a.json")).unwrap()).unwrap();
    let text = heard["text"].as_str().unwrap().trim().to_owned();
    let words: Vec<&str> = text.split_whitespace().collect();
    assert!(words.len() > 2, "{text}");
    fs::write(path("a.txt"), &text).unwrap();
    let aligned = flow(&["align", "a.flac", "a.txt"]);
    expect_code(&aligned, 0);
    let result: Value = serde_json::from_str(&stdout_of(&aligned)).unwrap();
    assert_eq!(result["alignment"]["words_said"], words.len());
    assert_eq!(result["alignment"]["not_said"].as_array().unwrap().len(), 0);
    assert!(result["alignment"]["score"].as_f64().unwrap() > -1.5, "{result}");

    // A text of a pipe, and one of standard input, are read as a file is.
    let shell = |command: &str| -> Output {
        let mut shell = std::process::Command::new("bash");
        let shell = shell.current_dir(place.path()).arg("-c").arg(command);
        shell.env("FLOW", program().get_program()).output().unwrap()
    };
    for command in [
        "$FLOW align a.flac <(cat a.txt)",
        "cat a.txt | $FLOW align a.flac -",
        "$FLOW align a.flac - < a.txt",
    ] {
        let piped = shell(command);
        expect_code(&piped, 0);
        assert_eq!(stdout_of(&piped), stdout_of(&aligned), "{command}");
    }
    for command in [
        "$FLOW align a.flac <(head -c 67108865 /dev/zero)",
        "head -c 67108865 /dev/zero | $FLOW align a.flac -",
    ] {
        let large = shell(command);
        assert!(!large.status.success());
        assert!(
            stderr(&large).contains("a text of more than 64 MiB"),
            "{}",
            stderr(&large)
        );
    }

    // Cues with wrong times get new ones, within the recording; the last one was not said.
    let (first, second) = words.split_at(words.len() / 2);
    let cues = format!(
        "1\n00:10:00,000 --> 00:10:01,000\n{}\n\n2\n00:10:01,000 --> 00:10:02,000\n{}\n",
        first.join(" "),
        second.join(" ")
    );
    fs::write(path("late.srt"), &cues).unwrap();
    let retimed = flow(&["align", "a.flac", "late.srt", "--output", "right.srt"]);
    expect_code(&retimed, 0);
    let right = fs::read_to_string(path("right.srt")).unwrap();
    assert_eq!(right.matches(" --> ").count(), 2, "{right}");
    let piped = shell("$FLOW align a.flac - --format srt < late.srt");
    expect_code(&piped, 0);
    assert_eq!(stdout_of(&piped), right);
    assert!(right.contains(&first.join(" ")) && !right.contains("00:10:"), "{right}");

    let more = format!("{text}\nयह वाक्य किसी ने नहीं कहा\n");
    fs::write(path("more.txt"), &more).unwrap();
    let unsaid = flow(&["align", "a.flac", "more.txt"]);
    expect_code(&unsaid, 0);
    assert!(stderr(&unsaid).contains("not said, at"), "{}", stderr(&unsaid));
    let worse: Value = serde_json::from_str(&stdout_of(&unsaid)).unwrap();
    let score = |of: &Value| of["alignment"]["score"].as_f64().unwrap();
    assert!(score(&worse) < score(&result));
}

#[test]
fn wrong_arguments_of_align_are_named() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    fs::write(path("a.flac"), recording("rec_hi_0001_000.flac")).unwrap();
    fs::write(path("empty.txt"), "\n \n").unwrap();
    fs::write(path("latin1.txt"), b"caf\xe9").unwrap();
    fs::write(path("a.txt"), "नमस्ते").unwrap();
    fs::write(path("long.txt"), "नमस्ते ".repeat(2_000)).unwrap();
    fs::write(path("noise.flac"), b"not a recording").unwrap();
    for (arguments, expected) in [
        (&["a.flac", "empty.txt"][..], "empty.txt: the text is empty"),
        (&["a.flac", "latin1.txt"], "latin1.txt: it is not UTF-8"),
        (&["a.flac", "missing.txt"], "missing.txt"),
        (&["missing.flac", "a.txt"], "missing.flac"),
        (&["noise.flac", "a.txt"], "noise.flac"),
        (&["a.flac", "long.txt"], "long.txt"),
        (
            &["a.flac", "a.txt", "--format", "docx"],
            "`docx` is not a format of alignments",
        ),
        (
            &["a.flac", "a.txt", "--format", "parquet"],
            "`parquet` is not a format of alignments",
        ),
        (
            &["a.flac", "a.txt", "--output", "a.flac"],
            "a.flac is the recording itself",
        ),
        (&["a.flac", "a.txt", "--output", "./a.txt"], "a.txt is the text itself"),
        (&["a.flac", "a.txt", "--delay", "nan"], "--delay"),
    ] {
        let mut flow = program();
        let output = flow
            .current_dir(place.path())
            .arg("align")
            .args(arguments)
            .output()
            .unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        let said = stderr(&output);
        assert!(said.contains(expected), "{arguments:?}: {said}");
        assert!(!said.contains("panicked"), "{said}");
        assert_eq!(fs::read(path("a.flac")).unwrap(), recording("rec_hi_0001_000.flac"));
    }
}
