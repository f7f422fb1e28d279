//! `flow transcribe`: recordings to transcripts.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use arrow::array::AsArray;
use serde_json::Value;

use crate::binary::{self, expect_code, program, read_parquet, stderr, wav, with_failpoints};

/// A Hindi recording of the bundled corpus: FLAC, 16 kHz, mono.
pub fn recording(name: &str) -> Vec<u8> {
    let shard = "tests/data/corpus/mini/shards/hi/hi_0000/hi_0000.tar";
    let tar = std::fs::File::open(Path::new(env!("CARGO_MANIFEST_DIR")).join(shard)).unwrap();
    let mut archive = tar::Archive::new(tar);
    let mut entries = archive.entries().unwrap().map(Result::unwrap);
    let mut entry = entries.find(|entry| entry.path().unwrap().ends_with(name)).unwrap();
    let mut bytes = Vec::new();
    entry.read_to_end(&mut bytes).unwrap();
    bytes
}

/// A mono WAV file of 16 kHz and 16 bits, of silence.
fn silence(seconds: u32) -> Vec<u8> {
    wav(&vec![0; seconds as usize * 16_000])
}

/// A recording of the tests of `flow-audio`: one second of a rising tone.
fn rising_tone(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("stages/audio/tests/data");
    std::fs::read(folder.join(name)).unwrap()
}

struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Place {
            folder: tempfile::tempdir().unwrap(),
        };
        std::fs::create_dir_all(place.path("in/talks")).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn copy(&self, from: &str, to: &str) {
        self.write(to, &recording(from));
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.path("in").join(name), bytes).unwrap();
    }

    fn transcribe(&self, arguments: &[&str]) -> Output {
        let mut flow = self.command();
        flow.arg("in").args(["--out", "out"]).args(arguments);
        flow.output().unwrap()
    }

    fn command(&self) -> Command {
        let mut flow = program();
        flow.current_dir(self.folder.path())
            .arg("transcribe")
            .args(["--progress", "plain"]);
        flow
    }

    fn out(&self, name: &str) -> String {
        let path = self.path("out").join(name);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// When each file of the output folder was written.
    fn times(&self, names: &[&str]) -> BTreeMap<String, SystemTime> {
        let time = |name: &&str| {
            let metadata = self.path("out").join(name).metadata().unwrap();
            ((*name).to_owned(), metadata.modified().unwrap())
        };
        names.iter().map(time).collect()
    }
}

/// What the last run did: partitions that ran of each stage.
fn ran(place: &Place) -> BTreeMap<String, u64> {
    let ran = binary::ran(&place.path("out/.flow"));
    assert!(ran.contains_key("transcribe") && ran.contains_key("write"), "{ran:?}");
    ran
}

fn expected(transcribe: u64, write: u64) -> BTreeMap<String, u64> {
    BTreeMap::from([("transcribe".to_owned(), transcribe), ("write".to_owned(), write)])
}

#[test]
fn transcripts_are_written_once_and_another_format_decodes_nothing() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "a.flac");
    place.copy("rec_hi_0008_001.flac", "talks/b.flac");
    let first = place.transcribe(&["--format", "txt,json,srt"]);
    expect_code(&first, 0);
    assert!(stderr(&first).contains("bundled small model"), "{}", stderr(&first));
    assert!(stderr(&first).contains("hi"), "{}", stderr(&first));
    for name in ["a", "talks/b"] {
        let json: Value = serde_json::from_str(&place.out(&format!("{name}.json"))).unwrap();
        assert_eq!(json["metadata"]["source_file"], format!("{name}.flac"));
        assert_eq!(json["metadata"]["model"], "small.nemo");
        let duration = json["metadata"]["duration_s"].as_f64().unwrap();
        let segments = json["segments"].as_array().unwrap();
        assert!(!segments.is_empty(), "{json}");
        let mut last = 0.0;
        for word in segments.iter().flat_map(|segment| segment["words"].as_array().unwrap()) {
            let (start, end) = (word["start"].as_f64().unwrap(), word["end"].as_f64().unwrap());
            assert!(last <= start && start <= end && end <= duration + 1e-3, "{word}");
            assert!(word["confidence"].is_number(), "{word}");
            last = start;
        }
        let texts: Vec<&str> = segments
            .iter()
            .map(|segment| segment["text"].as_str().unwrap())
            .collect();
        assert_eq!(json["text"], texts.join(" "));
        assert_eq!(place.out(&format!("{name}.txt")), texts.join("\n") + "\n");
        assert!(place.out(&format!("{name}.srt")).contains(" --> "));
    }
    assert_eq!(ran(&place), expected(2, 2));

    // Nothing is left to do.
    let files = ["a.txt", "a.json", "talks/b.srt"];
    let before = place.times(&files);
    expect_code(&place.transcribe(&["--format", "txt,json,srt"]), 0);
    assert_eq!((ran(&place), place.times(&files)), (expected(0, 0), before));

    // Another format is written from what was decoded; a file that is gone, too.
    expect_code(&place.transcribe(&["--format", "vtt"]), 0);
    assert_eq!(ran(&place), expected(0, 2));
    assert!(place.out("a.vtt").starts_with("WEBVTT"));
    std::fs::remove_file(place.path("out/a.vtt")).unwrap();
    expect_code(&place.transcribe(&["--format", "vtt"]), 0);
    assert_eq!(ran(&place), expected(0, 1));
    assert!(place.out("a.vtt").starts_with("WEBVTT") && !place.out("a.txt").is_empty());

    // A new recording is transcribed alone.
    place.copy("rec_hi_0004_003.flac", "c.flac");
    expect_code(&place.transcribe(&["--format", "vtt"]), 0);
    assert_eq!(ran(&place), expected(1, 1));
}

#[test]
fn each_precision_is_transcribed_once() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "a.flac");
    for (precision, runs) in [("int8", 1), ("bf16", 1), ("f32", 1), ("int8", 0)] {
        expect_code(&place.transcribe(&["--precision", precision]), 0);
        assert_eq!(ran(&place)["transcribe"], runs, "{precision}");
        assert!(!place.out("a.txt").trim().is_empty(), "{precision}");
    }
    // By default it is f32.
    expect_code(&place.transcribe(&[]), 0);
    assert_eq!(ran(&place)["transcribe"], 0);
}

#[test]
fn what_cannot_be_read_is_named_and_silence_is_no_error() {
    let place = Place::new();
    place.copy("rec_hi_0004_003.flac", "good.flac");
    place.write("silence.wav", &silence(2));
    expect_code(&place.transcribe(&["--format", "txt,json"]), 0);
    assert_eq!(place.out("silence.txt"), "");
    let json: Value = serde_json::from_str(&place.out("silence.json")).unwrap();
    assert_eq!(
        (&json["text"], json["segments"].as_array().unwrap().len()),
        (&Value::from(""), 0)
    );
    assert_eq!(json["metadata"]["duration_s"], 2.0);

    place.write("empty.wav", b"");
    place.write("talks/text.wav", b"this is not audio");
    let mut flow = place.command();
    flow.args(["in", "gone.flac", "--out", "out"]);
    let output = flow.output().unwrap();
    expect_code(&output, 4);
    let told = stderr(&output);
    for (name, why) in [
        ("empty.wav", "empty_file"),
        ("talks/text.wav", "unsupported_format"),
        ("gone.flac", "missing_file"),
    ] {
        let named = told
            .lines()
            .any(|line| line.contains(&format!("{name} was not transcribed")) && line.contains(why));
        assert!(named, "{name}: {told}");
    }
    assert!(!place.path("out/empty.txt").exists() && place.path("out/good.txt").exists());

    let mut none = place.command();
    none.args(["in/empty.wav", "--out", "out"]);
    expect_code(&none.output().unwrap(), 1);
}

/// Whatever is in a stranger's folder: each file has a transcript or is named with its reason.
#[test]
fn a_folder_of_all_sorts_is_transcribed_as_far_as_it_can_be() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "talks/good.flac");
    // Videos and voice messages of a phone.
    place.write("phone.mov", &rising_tone("tone.mov"));
    place.write("voice.m4a", &rising_tone("tone.m4a"));
    // A song without words, a pause, a file that is larger than what was spoken into it.
    let dial: Vec<i16> = (0..48_000)
        .map(|i| (8_000.0 * (std::f64::consts::TAU * 425.0 * f64::from(i) / 16_000.0).sin()) as i16)
        .collect();
    place.write("dial.wav", &wav(&dial));
    place.write("silence.wav", &silence(2));
    // Downloads that broke off: late, and soon.
    let long = recording("rec_hi_0002_000.flac");
    place.write("late.flac", &long[..long.len() * 4 / 5]);
    place.write("soon.flac", &long[..4_000]);
    let mp3 = rising_tone("tone.mp3");
    place.write("soon.mp3", &mp3[..mp3.len() / 2]);
    // No recordings at all.
    place.write("empty.mp3", b"");
    place.write("letter.wav", b"Dear all,\nthis is a letter that was named wrongly.\n");
    place.write("notes.txt", b"not looked at");
    place.write("sound.ac3", b"nor this");
    place.write(".hidden.wav", b"nor this");
    // Links: to a recording, to a folder, back to where they lie, and to nothing.
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, place.path("in").join(name)).unwrap();
    std::fs::create_dir(place.path("elsewhere")).unwrap();
    std::fs::write(place.path("elsewhere/far.flac"), recording("rec_hi_0001_000.flac")).unwrap();
    link("talks/good.flac", "link.flac");
    link("../elsewhere", "linked");
    link("..", "talks/back");
    link("nowhere.flac", "dangling.flac");

    let output = place.transcribe(&["--format", "txt,json"]);
    expect_code(&output, 4);
    let told = stderr(&output);
    for (name, why) in [
        ("soon.flac", "decode_error"),
        ("soon.mp3", "decode_error"),
        ("empty.mp3", "empty_file"),
        ("letter.wav", "unsupported_format"),
        ("dangling.flac", "missing_file"),
    ] {
        let named = told
            .lines()
            .any(|line| line.contains(&format!("{name} was not transcribed")) && line.contains(why));
        assert!(named, "{name}: {told}");
    }
    assert_eq!(told.matches("was not transcribed").count(), 5, "{told}");
    let json = |name: &str| -> Value { serde_json::from_str(&place.out(&format!("{name}.json"))).unwrap() };
    for name in ["phone", "voice"] {
        let seconds = json(name)["metadata"]["duration_s"].as_f64().unwrap();
        assert!((0.9..=1.2).contains(&seconds), "{name}: {seconds} s");
    }
    for name in ["dial", "silence"] {
        assert_eq!(place.out(&format!("{name}.txt")), "", "{name}");
    }
    let damaged = json("late")["metadata"]["damaged_at"].as_f64().unwrap();
    assert!(damaged >= 1.0, "{damaged}");
    assert!(told.contains("late") && told.contains("is damaged at"), "{told}");
    let left_out = "1 file left out, without the ending of a recording: 1 .ac3;";
    assert!(told.contains(left_out), "{told}");
    // The same recording, wherever a link to it lies.
    let good = place.out("talks/good.txt");
    assert!(!good.trim().is_empty());
    for link in ["link.txt", "linked/far.txt"] {
        assert_eq!(place.out(link), good, "{link}");
    }
    assert!(!place.path("out/notes.txt").exists() && !place.path("out/talks/back").exists());

    // What was refused is recognised by the next run too, until it is there.
    std::fs::write(place.path("in/nowhere.flac"), recording("rec_hi_0001_000.flac")).unwrap();
    let again = place.transcribe(&["--format", "txt,json"]);
    expect_code(&again, 4);
    assert_eq!(stderr(&again).matches("was not transcribed").count(), 4);
    assert_eq!(
        (place.out("dangling.txt"), place.out("talks/good.txt")),
        (good.clone(), good)
    );
}

/// The lines of a manifest come back with transcripts, in their order, as `manifest.read` takes them.
#[test]
fn a_manifest_is_transcribed_row_by_row() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "talks/a.flac");
    place.copy("rec_hi_0008_001.flac", "b.flac");
    let lines = [
        r#"{"audio_filepath": "talks/a.flac", "offset": 0.5, "duration": 2.5, "segment_id": "z", "text": "x", "lang": "hi"}"#,
        r#"{"audio_filepath": "gone.flac", "duration": 1, "text": "x", "lang": "hi"}"#,
        r#"{"audio_filepath": "b.flac", "offset": -1, "duration": 1, "text": "x", "lang": "hi"}"#,
        r#"{"audio_filepath": "b.flac", "duration": 1.5, "segment_id": "b/1", "text": "y", "lang": "hi", "speaker": "s"}"#,
    ];
    place.write("rows.jsonl", lines.join("\n").as_bytes());
    let run = |format: &str, more: &[&str]| {
        let mut flow = place.command();
        flow.args(["in/rows.jsonl", "--out", "out", "--format", format])
            .args(more);
        flow.output().unwrap()
    };
    let output = run("jsonl", &["--stdout"]);
    expect_code(&output, 4);
    let told = stderr(&output);
    for (name, why) in [
        ("gone.flac (row gone)", "missing_file"),
        ("in/rows.jsonl, line 3", "offset_invalid"),
    ] {
        let named = |line: &str| line.contains(&format!("{name} was not transcribed")) && line.contains(why);
        assert!(told.lines().any(named), "{name}: {told}");
    }
    let printed = String::from_utf8(output.stdout).unwrap();
    let found: Vec<Value> = printed
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let ids: Vec<&str> = found.iter().map(|line| line["segment_id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["z", "b/1"]);
    assert_eq!((&found[0]["offset"], &found[1]["speaker"]), (&0.5.into(), &"s".into()));
    assert!(!found[0]["pred_text"].as_str().unwrap().is_empty());
    let last = found[0]["word"].as_array().unwrap().last().unwrap();
    assert!(
        last["end"].as_f64().unwrap() <= 2.5,
        "times are those of the part: {last}"
    );

    // Another format decodes nothing.
    expect_code(&run("srt", &[]), 4);
    assert_eq!(ran(&place), expected(0, 4));
    assert!(place.path("out/rows/b/1.srt").is_file());

    std::fs::write(place.path("labelled.jsonl"), printed).unwrap();
    let pipeline = "flow: 1\nstages:\n  rows: {uses: manifest.read, with: {manifest: labelled.jsonl}}\n  write:\n    uses: \
                    manifest.write\n    from: {train: rows}\n    with: {out: again, jsonl: true}\n";
    std::fs::write(place.path("again.yaml"), pipeline).unwrap();
    let mut flow = program();
    flow.current_dir(place.folder.path()).args(["run", "again.yaml"]);
    expect_code(&flow.output().unwrap(), 0);
    let again = std::fs::read_to_string(place.path("again/train_manifest_v2.jsonl")).unwrap();
    assert_eq!(again.lines().count(), 2);
    assert!(again.contains("pred_text") && again.contains("\"b/1\""), "{again}");

    let refused = run("txt", &["--diarize"]);
    expect_code(&refused, 2);
    assert!(stderr(&refused).contains("is a manifest"), "{}", stderr(&refused));
}

/// A recorder that is still writing: the others are transcribed, and the next run takes its file.
#[test]
fn a_recording_that_grows_is_left_for_the_next_run() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "a.flac");
    let mut growing = silence(60);
    // As programs write it that do not know the length yet.
    growing[4..8].fill(0xff);
    growing[40..44].fill(0xff);
    place.write("growing.wav", &growing);
    let is_done = AtomicBool::new(false);
    let output = std::thread::scope(|scope| {
        scope.spawn(|| {
            let path = place.path("in/growing.wav");
            let mut file = std::fs::File::options().append(true).open(path).unwrap();
            while !is_done.load(Ordering::Relaxed) {
                file.write_all(&[0; 2]).unwrap();
                std::thread::sleep(Duration::from_millis(15));
            }
        });
        let output = place.transcribe(&[]);
        is_done.store(true, Ordering::Relaxed);
        output
    });
    expect_code(&output, 4);
    let told = stderr(&output);
    let named = |line: &str| line.contains("growing.wav was not transcribed") && line.contains("while it");
    assert!(told.lines().any(named), "{told}");
    assert!(!place.out("a.txt").is_empty() && !place.path("out/growing.txt").exists());
    expect_code(&place.transcribe(&[]), 0);
    assert_eq!(place.out("growing.txt"), "");
    assert_eq!(ran(&place), expected(1, 1));
}

/// Names that a terminal would obey or that are no text, and what is not a file: nothing of it stops the others, or is waited for.
#[test]
fn strange_names_are_shown_and_what_is_no_file_is_named() {
    use std::os::unix::ffi::OsStrExt;

    let place = Place::new();
    place.write("talks/a\n\u{1b}[31m.wav", &silence(1));
    for byte in [0xfe, 0xff] {
        let name = [b"b", &[byte][..], b".wav"].concat();
        let path = place.path("in").join(std::ffi::OsStr::from_bytes(&name));
        std::fs::write(path, silence(1)).unwrap();
    }
    // A call of two channels.
    let mut call = silence(1);
    call[22] = 2;
    call[28..32].copy_from_slice(&64_000u32.to_le_bytes());
    call[32] = 4;
    place.write("call.wav", &call);
    let made = Command::new("mkfifo").arg(place.path("in/pipe.wav")).status().unwrap();
    assert!(made.success());
    for (to, name) in [("loop.wav", "loop.wav"), ("/dev/zero", "zero.wav")] {
        std::os::unix::fs::symlink(to, place.path("in").join(name)).unwrap();
    }
    let output = place.transcribe(&["--channels", "split", "--stdout", "--format", "json"]);
    expect_code(&output, 4);
    let told = stderr(&output);
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(
        !told.contains('\u{1b}') && !printed.contains('\u{1b}'),
        "{told} {printed}"
    );
    for name in ["pipe.wav", "loop.wav", "zero.wav"] {
        assert!(told.contains(&format!("{name} was not transcribed")), "{name}: {told}");
    }
    let headers: Vec<&str> = printed.lines().filter(|line| line.starts_with("==> ")).collect();
    assert_eq!(
        headers,
        [
            "==> b%FE.wav <==",
            "==> b%FF.wav <==",
            "==> call.wav (channel 1) <==",
            "==> call.wav (channel 2) <==",
            "==> talks/a\\n\\u{1b}[31m.wav <==",
        ]
    );
    for name in ["b%FE.json", "call.ch2.json", "talks/a\n\u{1b}[31m.json"] {
        assert!(place.out(name).contains("\"segments\":[]"), "{name}");
    }

    // Standard input that has no end is not a recording.
    let mut flow = place.command();
    flow.args(["-", "--stdout"]);
    flow.stdin(Stdio::from(std::fs::File::open("/dev/zero").unwrap()));
    let output = flow.output().unwrap();
    expect_code(&output, 1);
    assert!(stderr(&output).contains("unsupported_format"), "{}", stderr(&output));
}

/// What other programs read as a table, one file for each recording.
#[test]
fn transcripts_are_written_as_parquet() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "a.flac");
    place.write("b.wav", &silence(1));
    expect_code(&place.transcribe(&["--format", "parquet,json"]), 0);
    let tables = ["a", "b"].map(|name| read_parquet(&place.path(&format!("out/{name}.parquet"))));
    assert_eq!(tables[0][0].schema(), tables[1][0].schema());
    let json: Value = serde_json::from_str(&place.out("a.json")).unwrap();
    let text = tables[0][0].column_by_name("pred_text").unwrap();
    assert_eq!(json["text"], text.as_string::<i32>().value(0));
    let printed = place.transcribe(&["--format", "parquet", "--stdout"]);
    expect_code(&printed, 2);
    assert!(
        stderr(&printed).contains("`parquet` is not text"),
        "{}",
        stderr(&printed)
    );
}

/// The first track is silent, the second one is flagged as default.
#[test]
fn of_several_tracks_the_default_one_is_transcribed_and_named() {
    let place = Place::new();
    let bytes = std::fs::read("stages/audio/tests/data/two_tracks.mkv").unwrap();
    place.write("two.mkv", &bytes);
    let output = place.transcribe(&[]);
    expect_code(&output, 0);
    let said = stderr(&output);
    assert!(
        said.contains("two.mkv: it has 2 audio tracks; number 2 is decoded"),
        "{said}"
    );
    assert!(!place.out("two.txt").trim().is_empty());
}

#[test]
fn transcripts_are_printed_without_files() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "a.flac");
    expect_code(&place.transcribe(&[]), 0);
    let mut flow = place.command();
    flow.args(["in/a.flac", "--stdout"]);
    let output = flow.output().unwrap();
    expect_code(&output, 0);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), place.out("a.txt"));
    assert!(!place.path(".flow").exists() && !place.path("a.txt").exists());

    // From standard input.
    let mut flow = place.command();
    flow.args(["-", "--stdout", "--format", "json"]);
    flow.stdin(Stdio::from(std::fs::File::open(place.path("in/a.flac")).unwrap()));
    let output = flow.output().unwrap();
    expect_code(&output, 0);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["metadata"]["source_file"], "stdin");
    let text: Vec<String> = place.out("a.txt").lines().map(str::to_owned).collect();
    assert_eq!(json["text"], text.join(" "));
}

#[test]
fn files_of_others_are_left_alone_and_settings_may_go_back_and_forth() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "a.flac");
    std::fs::create_dir(place.path("out")).unwrap();
    std::fs::write(place.path("out/a.txt"), "what was really said").unwrap();
    let output = place.transcribe(&[]);
    expect_code(&output, 2);
    assert!(
        stderr(&output).contains("a.txt is there already"),
        "{}",
        stderr(&output)
    );
    assert_eq!(place.out("a.txt"), "what was really said");
    std::fs::remove_file(place.path("out/a.txt")).unwrap();

    // With one set of settings, with another, and with the first again: always what these settings give, also where a line
    // break in place of a blank leaves the file as long as it was.
    let write = |setting: &str| {
        expect_code(&place.transcribe(&["--format", "srt,txt", "--set", setting]), 0);
        (place.out("a.srt"), place.out("a.txt"))
    };
    let (first, second) = (write("max_line_width=0"), write("max_line_width=12"));
    assert!(first.0 != second.0);
    assert!(write("max_line_width=0") == first && write("max_line_width=12") == second);
    for setting in ["out=elsewhere", "formats=[json]", "input=[]"] {
        let output = place.transcribe(&["--set", setting]);
        expect_code(&output, 2);
        assert!(stderr(&output).contains("option of its own"), "{}", stderr(&output));
    }
}

/// What somebody corrected is kept and told, until it may be replaced.
#[test]
fn an_edited_transcript_is_kept_until_it_may_be_replaced() {
    const EDITED: &str = "as it was said";
    let place = Place::new();
    for name in ["a", "b"] {
        place.copy("rec_hi_0001_000.flac", &format!("{name}.flac"));
    }
    let transcribe = |more: &[&str]| {
        let output = place.transcribe(&[&["--format", "srt,txt"], more].concat());
        expect_code(&output, 0);
        stderr(&output)
    };
    let told = "a.srt changed since an earlier run wrote it, and is left as it is";
    assert!(!transcribe(&[]).contains(told));
    let wide = place.out("a.srt");
    std::fs::write(place.path("out/a.srt"), EDITED).unwrap();
    // Subtitles of another width are written again, but for those.
    let narrow = ["--set", "max_line_width=12"];
    for _ in 0..2 {
        let said = transcribe(&narrow);
        assert!(said.contains(told), "{said}");
        assert_eq!(place.out("a.srt"), EDITED);
        assert_ne!(place.out("b.srt"), wide);
    }
    let said = transcribe(&["--overwrite", narrow[0], narrow[1]]);
    assert!(!said.contains(told), "{said}");
    assert_eq!(place.out("a.srt"), place.out("b.srt"));
    assert_ne!(place.out("a.srt"), wide);
}

#[test]
fn a_run_that_was_killed_while_it_wrote_is_gone_on_with() {
    let mut left = 0;
    // Which data file is that of the writing stage is not said.
    for pass in 1..=6 {
        let place = Place::new();
        place.copy("rec_hi_0004_003.flac", "a.flac");
        let mut flow = place.command();
        flow.arg("in").args(["--out", "out", "--format", "txt,json"]);
        let mut killed = with_failpoints(&flow);
        killed.current_dir(place.folder.path());
        killed.env("FLOW_KILL_AT", format!("data-written:{pass}"));
        if killed.output().unwrap().status.success() {
            continue;
        }
        if !place.path("out/a.txt").exists() {
            expect_code(&flow.output().unwrap(), 0);
            continue;
        }
        left += 1;
        // As if it had been killed between the two.
        std::fs::remove_file(place.path("out/a.json")).unwrap();
        let text = place.out("a.txt");
        // Files of others are told from it.
        std::fs::write(place.path("out/a.txt"), "what was really said").unwrap();
        let refused = flow.output().unwrap();
        expect_code(&refused, 2);
        assert!(
            stderr(&refused).contains("a.txt is there already"),
            "{}",
            stderr(&refused)
        );
        std::fs::write(place.path("out/a.txt"), &text).unwrap();
        expect_code(&flow.output().unwrap(), 0);
        assert_eq!(place.out("a.txt"), text);
        assert!(place.out("a.json").starts_with('{'));
    }
    assert!(left > 0, "no run was killed between its files and their record");
}

#[test]
fn a_folder_is_the_same_however_it_is_spelled() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "a.flac");
    expect_code(&place.transcribe(&[]), 0);
    let absolute = place.path("out");
    for out in ["./out", "in/../out", absolute.to_str().unwrap()] {
        let mut flow = place.command();
        expect_code(&flow.arg("in").args(["--out", out]).output().unwrap(), 0);
        assert_eq!(ran(&place), expected(0, 0), "{out}");
    }
}

#[test]
fn recordings_are_decoded_in_chunks_or_as_a_whole() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "a.flac");
    // The last one is limited attention.
    for how in [
        &["--window", "chunked"][..],
        &["--window", "full"],
        &["--window", "full", "--set", "full_attention=1"],
    ] {
        expect_code(&place.transcribe(how), 0);
        assert_eq!(ran(&place)["transcribe"], 1, "{how:?}");
        assert!(!place.out("a.txt").trim().is_empty(), "{how:?}");
    }
    // What the command did before is kept under its key.
    expect_code(&place.transcribe(&["--window", "chunked"]), 0);
    assert_eq!(ran(&place)["transcribe"], 0);
}

#[test]
fn mistakes_on_the_command_line_are_told() {
    let place = Place::new();
    place.copy("rec_hi_0004_003.flac", "a.flac");
    for (arguments, said) in [
        (&["--format", "docx"][..], "`docx` is not a format"),
        (&["--model", "gone.nemo"], "help: given by --model"),
        (&["--set", "max_window=0"], "max_window"),
        (&["--set", "vad=loud"], "vad"),
        (&["--window", "full", "--beam", "4"], "beam"),
        (&["--window", "chunked", "--set", "chunk=0"], "chunk"),
        (&["--set", "window=full"], "option of its own"),
        (&["--device", "tpu"], "help: given by --device"),
        (&["--lm", "gone.arpa"], "help: given by --lm"),
        (&["--language", "klingon"], "`klingon` is not a code of a language"),
        (&["--language-prior", "gone.json"], "--language"),
        (
            &["--language", "hi", "--language-prior", "gone.json"],
            "help: given by --language-prior",
        ),
        (&["--precision", "int4"], "int4"),
        (&["--precision", "int8", "--device", "cuda"], "is for the CPU"),
        (
            &["--precision", "bf16", "--set", "weights=f16"],
            "leave out one of the two",
        ),
    ] {
        let output = place.transcribe(arguments);
        expect_code(&output, 2);
        assert!(stderr(&output).contains(said), "{arguments:?}: {}", stderr(&output));
        // The pipeline that the program carries is not the user's.
        assert!(
            !stderr(&output).contains("transcribe.yaml:"),
            "{arguments:?}: {}",
            stderr(&output)
        );
    }
    let mut flow = place.command();
    flow.arg("nothing/*.wav");
    let output = flow.output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("nothing fits"), "{}", stderr(&output));
}

/// Phrases are reported, and `flow evaluate boosting` finds that a heavy weight does harm.
#[test]
fn the_weight_of_phrases_is_chosen_on_rows_whose_texts_are_known() {
    let place = Place::new();
    let known = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/times");
    std::fs::copy(known.join("en.flac"), place.path("in/en.flac")).unwrap();
    let words: Value = serde_json::from_str(&std::fs::read_to_string(known.join("en.json")).unwrap()).unwrap();
    let words: Vec<&str> = words
        .as_array()
        .unwrap()
        .iter()
        .map(|word| word[0].as_str().unwrap())
        .collect();
    let row =
        serde_json::json!({"audio_filepath": "en.flac", "duration": 20.18, "text": words.join(" "), "lang": "en"});
    place.write("rows.jsonl", format!("{row}\n").as_bytes());
    std::fs::write(place.path("names.txt"), "teacher\ngarden\t2\nnorth\n").unwrap();
    let evaluate = |names: &str, more: &[&str]| {
        let mut flow = program();
        flow.current_dir(place.folder.path());
        flow.args(["evaluate", "boosting", "in/rows.jsonl", "--boost", names])
            .args(more);
        flow.output().unwrap()
    };
    let output = evaluate("names.txt", &["--weights", "0,8,0.25", "--json"]);
    expect_code(&output, 0);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let weights = found["weights"].as_array().unwrap();
    let of = |name: &str| -> Vec<f64> { weights.iter().map(|weight| weight[name].as_f64().unwrap()).collect() };
    assert_eq!(of("weight"), [0.0, 8.0, 0.25]);
    let errors = of("errors");
    assert!(errors[1] > errors[0] && errors[1] > errors[2], "{found}");
    let fewest = errors.iter().copied().fold(f64::INFINITY, f64::min);
    let best = of("weight").iter().position(|weight| found["best"] == *weight).unwrap();
    assert_eq!(errors[best], fewest, "{found}");
    assert!(
        of("phrases")
            .iter()
            .all(|phrases| *phrases == of("phrases")[0] && *phrases > 0.0),
        "{found}"
    );
    // Phrases that replace other words are errors of those.
    assert!(
        of("errors_of_other_words")[1] > of("errors_of_other_words")[0],
        "{found}"
    );

    let output = evaluate("names.txt", &["--weights", "0,8"]);
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(
        table.ends_with("the fewest errors in words: --set boost_weight=0\n"),
        "{table}"
    );
    std::fs::write(place.path("others.txt"), "xylophone\n").unwrap();
    let output = evaluate("others.txt", &["--weights", "0"]);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("none of the phrases"), "{}", stderr(&output));
    expect_code(&evaluate("names.txt", &["--weights", "-1"]), 2);

    let boost = ["--boost", "names.txt", "--set", "boost_weight=8", "--format", "json"];
    std::fs::remove_file(place.path("in/rows.jsonl")).unwrap();
    let output = place.transcribe(&boost);
    expect_code(&output, 0);
    assert!(
        stderr(&output).contains("boosted phrases were written "),
        "{}",
        stderr(&output)
    );
    let transcript: Value = serde_json::from_str(&place.out("en.json")).unwrap();
    let phrases = transcript["metadata"]["boosted"]["phrases"].as_array().unwrap();
    assert!(
        phrases.iter().any(|phrase| phrase["changed"].as_u64() > Some(0)),
        "{phrases:?}"
    );
}

#[test]
fn a_language_model_is_built_and_used_with_a_beam_and_phrases() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "a.flac");
    let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifests = ["train_manifest_v2.parquet", "val_manifest_v2.jsonl"];
    let build = |order: &str| {
        let mut flow = program();
        flow.current_dir(place.folder.path()).args(["lm", "build"]);
        flow.args(manifests.map(|name| repository.join("tests/data/golden/data/mini").join(name)));
        flow.arg("--model").arg(repository.join("configs/models/small.nemo"));
        flow.args(["--order", order, "--out", "made/lm.arpa"]).output().unwrap()
    };
    let built = build("3");
    expect_code(&built, 0);
    let said = String::from_utf8(built.stdout).unwrap();
    assert!(
        said.starts_with("made/lm.arpa: ") && said.contains("3-grams: "),
        "{said}"
    );
    let model = std::fs::read(place.path("made/lm.arpa")).unwrap();
    expect_code(&build("3"), 0);
    assert_eq!(std::fs::read(place.path("made/lm.arpa")).unwrap(), model);
    expect_code(&build("99"), 2);

    std::fs::write(place.path("phrases.txt"), "want\ntrain\t2\n").unwrap();
    let with = |more: &[&str]| {
        let fusion = ["--beam", "4", "--lm", "made/lm.arpa", "--boost", "phrases.txt"];
        place.transcribe(&[&fusion[..], more].concat())
    };
    expect_code(&place.transcribe(&[]), 0);
    assert_eq!(ran(&place)["transcribe"], 1);
    expect_code(&with(&[]), 0);
    assert_eq!(ran(&place)["transcribe"], 1);
    assert!(!place.out("a.txt").trim().is_empty());
    expect_code(&with(&[]), 0);
    assert_eq!(ran(&place)["transcribe"], 0);
    // A weight and the bytes of a file decide what is heard.
    expect_code(&with(&["--set", "lm_weight=0.1"]), 0);
    assert_eq!(ran(&place)["transcribe"], 1);
    std::fs::write(place.path("phrases.txt"), "want\n").unwrap();
    expect_code(&with(&[]), 0);
    assert_eq!(ran(&place)["transcribe"], 1);

    let wrong = place.transcribe(&["--lm", "phrases.txt"]);
    assert!(!wrong.status.success());
    assert!(
        stderr(&wrong).contains("phrases.txt: line 1: no ARPA file"),
        "{}",
        stderr(&wrong)
    );
    expect_code(&with(&["--set", "beam=8"]), 2);
}

#[test]
fn tokens_are_counted_by_language_and_a_language_is_asked_for() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "a.flac");
    let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
    let build = |manifest: &Path| {
        let mut flow = program();
        flow.current_dir(place.folder.path())
            .args(["lm", "build", "--languages"]);
        flow.arg(manifest)
            .arg("--model")
            .arg(repository.join("configs/models/small.nemo"));
        flow.args(["--out", "made/counts.json"]).output().unwrap()
    };
    let texts = ["en", "EN", "en-US"].map(|lang| format!("{{\"text\": \"one\", \"lang\": \"{lang}\"}}\n"));
    std::fs::write(place.path("names.jsonl"), texts.concat()).unwrap();
    let named = String::from_utf8(build(&place.path("names.jsonl")).stdout).unwrap();
    assert_eq!(named.matches(" token").count(), 1, "{named}");
    let built = build(&repository.join("tests/data/golden/data/mini/train_manifest_v2.parquet"));
    expect_code(&built, 0);
    let said = String::from_utf8(built.stdout).unwrap();
    assert!(
        said.starts_with("made/counts.json: ") && said.contains("hi: "),
        "{said}"
    );
    std::fs::write(place.path("texts.jsonl"), "{\"text\": \"one two\"}\n").unwrap();
    let without = build(&place.path("texts.jsonl"));
    expect_code(&without, 2);
    assert!(
        stderr(&without).contains("no text of a language"),
        "{}",
        stderr(&without)
    );

    let letters = |first: char, last: char| {
        let text = place.out("a.txt");
        assert!(text.chars().any(char::is_alphabetic), "{text}");
        assert!(
            text.chars().all(|c| !c.is_alphabetic() || (first..=last).contains(&c)),
            "{text}"
        );
    };
    expect_code(&place.transcribe(&["--language", "ta"]), 0);
    letters('\u{b80}', '\u{bff}');
    expect_code(&place.transcribe(&["--language", "ta"]), 0);
    assert_eq!(ran(&place)["transcribe"], 0);
    // Languages, the counts and their weight decide what is heard.
    for how in [
        &["--language", "hi,mr"][..],
        &["--language", "hi", "--language-prior", "made/counts.json"],
        &[
            "--language",
            "hi",
            "--language-prior",
            "made/counts.json",
            "--set",
            "language_weight=2",
        ],
    ] {
        expect_code(&place.transcribe(how), 0);
        assert_eq!(ran(&place)["transcribe"], 1, "{how:?}");
        letters('\u{900}', '\u{97f}');
    }
    let greek = place.transcribe(&["--language", "el"]);
    expect_code(&greek, 0);
    assert!(stderr(&greek).contains("no letters of el"), "{}", stderr(&greek));
}

/// No parameter is meant.
#[test]
fn a_model_may_have_any_name() {
    let place = Place::new();
    place.copy("rec_hi_0001_000.flac", "a.flac");
    let absent = place.transcribe(&["--model", "no ${such}.nemo"]);
    expect_code(&absent, 2);
    assert!(stderr(&absent).contains("no ${such}.nemo"), "{}", stderr(&absent));
    assert!(!stderr(&absent).contains("unknown parameter"), "{}", stderr(&absent));
}
