//! `flow diarize`, `flow transcribe --diarize` and `flow evaluate diarization`, on the bundled conversation of two voices.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use crate::binary::{self, expect_code, program, stderr, wav};

fn bundled(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/golden/speakers")
        .join(name)
}

/// A folder with the conversation as `in/talks/conv2.flac`.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("in/talks")).unwrap();
        std::fs::copy(bundled("conv2.flac"), folder.path().join("in/talks/conv2.flac")).unwrap();
        Place { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `flow COMMAND in --out out ...`.
    fn flow(&self, command: &str, arguments: &[&str]) -> Output {
        let mut flow = program();
        flow.current_dir(self.folder.path());
        flow.args([command, "in", "--out", "out", "--progress", "plain"])
            .args(arguments);
        flow.output().unwrap()
    }

    fn out(&self, name: &str) -> String {
        let path = self.path("out").join(name);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_str(&self.out(name)).unwrap()
    }

    /// What the last run did: partitions that ran of each stage.
    fn ran(&self) -> BTreeMap<String, u64> {
        binary::ran(&self.path("out/.flow"))
    }
}

/// `flow evaluate diarization` of a file against the reference of the conversation.
fn evaluate(hypothesis: &Path, arguments: &[&str]) -> Output {
    let mut flow = program();
    flow.args(["evaluate", "diarization", "--reference"])
        .arg(bundled("conv2.rttm"));
    flow.arg("--hypothesis").arg(hypothesis).args(arguments);
    flow.output().unwrap()
}

fn scores(hypothesis: &Path, arguments: &[&str]) -> Value {
    let output = evaluate(hypothesis, &[&["--json"], arguments].concat());
    expect_code(&output, 0);
    serde_json::from_slice(&output.stdout).unwrap()
}

fn speakers_of(rttm: &str) -> BTreeSet<&str> {
    let speakers = rttm.lines().filter_map(|line| line.split_whitespace().nth(7));
    speakers.collect()
}

fn only(stages: &[(&str, u64)]) -> BTreeMap<String, u64> {
    stages.iter().map(|(stage, ran)| ((*stage).to_owned(), *ran)).collect()
}

/// Of a recording of five minutes, not of a shorter one.
#[test]
fn how_far_a_long_recording_is_diarized_is_told() {
    let place = Place::new();
    std::fs::write(place.path("in/long.wav"), wav(&vec![0; 300 * 16_000])).unwrap();
    let output = place.flow("diarize", &[]);
    expect_code(&output, 0);
    let said = stderr(&output);
    let told: Vec<&str> = said.lines().filter(|line| line.ends_with(" of 5.0 minutes")).collect();
    assert!(!told.is_empty(), "{said}");
    assert!(
        told.iter().all(|line| line.starts_with("diarize: long.wav: ")),
        "{said}"
    );
    assert_eq!(said.matches(" minutes").count(), told.len(), "{said}");
}

#[test]
fn a_conversation_is_diarized_once_and_scored() {
    let place = Place::new();
    let output = place.flow("diarize", &[]);
    expect_code(&output, 0);
    assert!(stderr(&output).contains("1 diarization in out"), "{}", stderr(&output));
    let rttm = place.out("talks/conv2.rttm");
    assert_eq!(speakers_of(&rttm), BTreeSet::from(["SPEAKER_00", "SPEAKER_01"]));
    assert!(rttm.lines().all(|line| line.starts_with("SPEAKER conv2 1 ")), "{rttm}");
    assert_eq!(place.ran(), only(&[("diarize", 1), ("write_turns", 1)]));

    let found = scores(&place.path("out/talks/conv2.rttm"), &[]);
    assert!(found["der"].as_f64().unwrap() < 0.05, "{found}");
    assert_eq!(found["recordings"]["conv2"]["der"], found["der"]);
    let sum: f64 = ["missed", "false_alarm", "confusion"]
        .iter()
        .map(|name| found[*name].as_f64().unwrap())
        .sum();
    let total = found["total"].as_f64().unwrap();
    assert!(
        total > 30.0 && (sum / total - found["der"].as_f64().unwrap()).abs() < 1e-9,
        "{found}"
    );

    // Run again, nothing is left to do; another format diarizes nothing.
    let time = || {
        place
            .path("out/talks/conv2.rttm")
            .metadata()
            .unwrap()
            .modified()
            .unwrap()
    };
    let before = time();
    expect_code(&place.flow("diarize", &[]), 0);
    assert_eq!(
        (place.ran(), time()),
        (only(&[("diarize", 0), ("write_turns", 0)]), before)
    );
    expect_code(&place.flow("diarize", &["--format", "json,rttm"]), 0);
    assert_eq!(place.ran(), only(&[("diarize", 0), ("write_turns", 1)]));
    assert_eq!(place.out("talks/conv2.rttm"), rttm);
    let json = place.json("talks/conv2.json");
    let turns = json["diarization"].as_array().unwrap();
    assert_eq!(turns.len(), rttm.lines().count());
    assert!(!json["exclusive_diarization"].as_array().unwrap().is_empty());
    let speakers = json["speakers"].as_array().unwrap();
    assert_eq!(speakers.len(), 2);

    // Somebody whose voice is known keeps the name.
    let known = serde_json::json!({"Ann": speakers[1]["embedding"]}).to_string();
    std::fs::write(place.path("known.json"), known).unwrap();
    expect_code(&place.flow("diarize", &["--known-speakers", "known.json"]), 0);
    let named = place.out("talks/conv2.rttm");
    assert_eq!(speakers_of(&named), BTreeSet::from(["Ann", "SPEAKER_00"]));
    let again = scores(&place.path("out/talks/conv2.rttm"), &[]);
    assert_eq!(again["der"], found["der"]);

    // One speaker is asked for: the other's speech is confused.
    expect_code(&place.flow("diarize", &["--num-speakers", "1"]), 0);
    assert_eq!(
        speakers_of(&place.out("talks/conv2.rttm")),
        BTreeSet::from(["SPEAKER_00"])
    );
    let one = scores(&place.path("out/talks/conv2.rttm"), &[]);
    assert!(one["confusion"].as_f64().unwrap() > 5.0, "{one}");
}

#[test]
fn words_have_speakers() {
    let place = Place::new();
    let formats = ["--format", "json,txt,rttm"];
    expect_code(&place.flow("transcribe", &[&formats[..], &["--diarize"]].concat()), 0);
    let rttm = place.out("talks/conv2.rttm");
    assert!(
        scores(&place.path("out/talks/conv2.rttm"), &[])["der"]
            .as_f64()
            .unwrap()
            < 0.05
    );
    let json = place.json("talks/conv2.json");
    assert_eq!(json["metadata"]["num_speakers"], 2);
    assert!(json["performance"]["diarization_s"].as_f64().unwrap() > 0.0, "{json}");
    let segments = json["segments"].as_array().unwrap();
    assert!(!segments.is_empty(), "{json}");
    let known = BTreeSet::from(["SPEAKER_00", "SPEAKER_01", "UNKNOWN"]);
    for segment in segments {
        let speaker = segment["speaker"].as_str().unwrap();
        assert!(known.contains(speaker), "{segment}");
        let words = segment["words"].as_array().unwrap();
        assert!(
            !words.is_empty() && words.iter().all(|word| word["speaker"] == speaker),
            "{segment}"
        );
    }
    let lines: Vec<String> = segments
        .iter()
        .map(|segment| {
            format!(
                "[{}]: {}",
                segment["speaker"].as_str().unwrap(),
                segment["text"].as_str().unwrap()
            )
        })
        .collect();
    assert_eq!(place.out("talks/conv2.txt"), lines.join("\n") + "\n");
    let stages = ["assign", "diarize", "transcribe", "write", "write_turns"];
    assert_eq!(place.ran(), only(&stages.map(|stage| (stage, 1))));

    // Run again: nothing. Without speakers: nothing is decoded again, and nobody is named.
    expect_code(&place.flow("transcribe", &[&formats[..], &["--diarize"]].concat()), 0);
    assert!(place.ran().values().all(|&ran| ran == 0), "{:?}", place.ran());
    expect_code(&place.flow("transcribe", &["--format", "json"]), 0);
    assert_eq!(place.ran(), only(&[("transcribe", 0), ("write", 1)]));
    let plain = place.json("talks/conv2.json");
    assert_eq!(plain["text"], json["text"]);
    assert_eq!(plain["metadata"]["num_speakers"], Value::Null);
    assert!(
        plain["segments"]
            .as_array()
            .unwrap()
            .iter()
            .all(|segment| segment.get("speaker").is_none())
    );

    // `flow diarize` gives the same turns; the transcript that is here is none of its files.
    expect_code(&place.flow("diarize", &[]), 0);
    assert_eq!(place.out("talks/conv2.rttm"), rttm);
    let output = place.flow("diarize", &["--format", "json"]);
    expect_code(&output, 2);
    assert!(
        stderr(&output).contains("conv2.json is there already"),
        "{}",
        stderr(&output)
    );
    assert_eq!(place.json("talks/conv2.json"), plain);
}

#[test]
fn what_cannot_be_read_is_named_and_turns_are_printed() {
    let place = Place::new();
    std::fs::write(place.path("in/text.wav"), b"this is not audio").unwrap();
    let output = place.flow("diarize", &["--stdout"]);
    expect_code(&output, 4);
    let told = stderr(&output);
    let named = told
        .lines()
        .any(|line| line.contains("text.wav was not diarized") && line.contains("unsupported_format"));
    assert!(named, "{told}");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        printed,
        format!("==> talks/conv2.flac <==\n{}", place.out("talks/conv2.rttm"))
    );
    assert!(!place.path("out/text.rttm").exists());

    // Both stages refuse it: that is told once.
    let output = place.flow("transcribe", &["--diarize"]);
    expect_code(&output, 4);
    let told = stderr(&output);
    let lines: Vec<&str> = told
        .lines()
        .filter(|line| line.starts_with("warning: text.wav was not"))
        .collect();
    assert!(lines.len() == 1 && lines[0].contains("was not transcribed"), "{told}");

    let mut none = program();
    none.current_dir(place.folder.path());
    none.args(["diarize", "in/text.wav", "--out", "none", "--progress", "plain"]);
    expect_code(&none.output().unwrap(), 1);
}

#[test]
fn files_of_others_are_left_alone_and_mistakes_are_told() {
    let place = Place::new();
    std::fs::create_dir_all(place.path("out/talks")).unwrap();
    std::fs::write(place.path("out/talks/conv2.rttm"), "what a person heard").unwrap();
    for arguments in [&["diarize"][..], &["transcribe", "--diarize", "--format", "rttm"]] {
        let output = place.flow(arguments[0], &arguments[1..]);
        expect_code(&output, 2);
        assert!(
            stderr(&output).contains("conv2.rttm is there already"),
            "{}",
            stderr(&output)
        );
    }
    assert_eq!(place.out("talks/conv2.rttm"), "what a person heard");
    std::fs::remove_dir_all(place.path("out")).unwrap();

    for (arguments, said) in [
        (&["diarize", "--format", "txt"][..], "`txt` is not a format"),
        (&["diarize", "--set", "formats=[json]"], "option of its own"),
        (&["diarize", "--set", "clustering_threshold=3"], "clustering_threshold"),
        (
            &["diarize", "--min-speakers", "3", "--max-speakers", "2"],
            "`min_speakers` is 3",
        ),
        (&["diarize", "--known-speakers", "gone.json"], "gone.json"),
        (
            &["diarize", "--diarization-model", "gone"],
            "config.yaml does not exist",
        ),
        (&["diarize", "--set", "diarization_model=gone"], "option of its own"),
        (&["transcribe", "--diarization-model", "gone"], "--diarize"),
        (&["diarize", "--num-speakers", "0"], "num-speakers"),
        (&["transcribe", "--num-speakers", "2"], "--diarize"),
        (&["transcribe", "--format", "rttm"], "--diarize"),
    ] {
        let output = place.flow(arguments[0], &arguments[1..]);
        expect_code(&output, 2);
        assert!(stderr(&output).contains(said), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn turns_are_scored_against_a_reference() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let turn = |recording: &str, start: f64, duration: f64, speaker: &str| {
        format!("SPEAKER {recording} 1 {start:.3} {duration:.3} <NA> <NA> {speaker} <NA> <NA>\n")
    };
    // The reference is right about itself.
    let perfect = scores(&bundled("conv2.rttm"), &[]);
    assert_eq!(
        (&perfect["der"], &perfect["missed"]),
        (&Value::from(0.0), &Value::from(0.0))
    );

    let reference = write(
        "r.rttm",
        &(turn("a", 0.0, 8.0, "x") + &turn("a", 6.0, 4.0, "y") + &turn("b", 0.0, 4.0, "x")),
    );
    let hypothesis = write(
        "h.rttm",
        &(turn("a", 0.0, 8.0, "1") + &turn("b", 0.0, 5.0, "2") + &turn("c", 0.0, 1.0, "2")),
    );
    let evaluate = |arguments: &[&str]| {
        let mut flow = program();
        flow.args(["evaluate", "diarization", "--reference"]).arg(&reference);
        flow.arg("--hypothesis").arg(&hypothesis).args(arguments);
        flow.output().unwrap()
    };
    let json = |arguments: &[&str]| -> Value {
        let output = evaluate(&[&["--json"], arguments].concat());
        expect_code(&output, 0);
        assert!(
            stderr(&output).contains("a recording is not scored"),
            "{}",
            stderr(&output)
        );
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let found = json(&[]);
    assert_eq!(found["recordings"]["a"]["missed"], 4.0);
    assert_eq!(found["recordings"]["b"]["false_alarm"], 1.0);
    assert_eq!(
        (&found["total"], &found["confusion"]),
        (&Value::from(16.0), &Value::from(0.0))
    );
    assert_eq!(found["der"], 5.0 / 16.0);
    assert!(found["recordings"].get("c").is_none());
    // Without what overlaps, two of the four seconds were not missed.
    assert_eq!(json(&["--skip-overlap"])["recordings"]["a"]["missed"], 2.0);
    // Half a second at either side of each end is left out.
    assert_eq!(json(&["--collar", "1"])["recordings"]["b"]["false_alarm"], 0.5);
    let uem = write("u.uem", "a 1 0 6\n");
    let output = evaluate(&["--json", "--uem", uem.to_str().unwrap()]);
    expect_code(&output, 0);
    let scored: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&scored["der"], &scored["total"]),
        (&Value::from(0.0), &Value::from(6.0))
    );

    let output = evaluate(&[]);
    expect_code(&output, 0);
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("31.25 %") && table.contains("2 recordings"), "{table}");

    let broken = write("broken.rttm", "SPEAKER a 1 x 1 <NA> <NA> y <NA> <NA>\n");
    for (hypothesis, said) in [
        (broken, "broken.rttm: line 1: start is"),
        (
            write("other.rttm", &turn("other", 0.0, 1.0, "x")),
            "no recording of the hypothesis (other)",
        ),
        (folder.path().join("gone.rttm"), "gone.rttm"),
    ] {
        let output = self::evaluate(&hypothesis, &[]);
        expect_code(&output, 2);
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    }
    expect_code(&evaluate(&["--collar", "-1"]), 2);
}

/// As of a broken download: what is before the damage has words with speakers.
#[test]
fn what_is_before_the_damage_is_told_with_speakers() {
    let place = Place::new();
    let whole = std::fs::read(bundled("conv2.flac")).unwrap();
    std::fs::write(place.path("in/talks/conv2.flac"), &whole[..whole.len() / 2]).unwrap();
    let output = place.flow("transcribe", &["--diarize", "--format", "json,rttm"]);
    expect_code(&output, 0);
    let told = stderr(&output);
    assert_eq!(told.matches("is damaged at").count(), 1, "{told}");
    let transcript = place.json("talks/conv2.json");
    let at = transcript["metadata"]["damaged_at"].as_f64().unwrap();
    assert!((5.0..40.0).contains(&at), "{at}");
    let segments = transcript["segments"].as_array().unwrap();
    let words = segments.iter().flat_map(|segment| segment["words"].as_array().unwrap());
    let speakers: Vec<&str> = words.filter_map(|word| word["speaker"].as_str()).collect();
    assert!(
        speakers.iter().any(|speaker| speaker.starts_with("SPEAKER_")),
        "{speakers:?}"
    );
    assert!(!place.out("talks/conv2.rttm").is_empty());
    let refused = place.flow("transcribe", &["--diarize", "--set", "on_damage=refuse"]);
    expect_code(&refused, 1);
    // The turns alone.
    let output = place.flow("diarize", &[]);
    expect_code(&output, 0);
    assert!(stderr(&output).contains("is damaged at"), "{}", stderr(&output));
}
