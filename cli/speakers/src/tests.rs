use std::fs;
use std::path::PathBuf;

use clap::Parser;
use flow_cli::failure::{Exit, Failure};
use serde_json::{Value, json};

use crate::{VoicesArguments, voices};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    arguments: VoicesArguments,
}

/// A folder with diarizations and a store.
struct Place(tempfile::TempDir);

impl Place {
    /// Ann (x) in `a` and `talks/b`, another one (y) in both, a third one (z) in `talks/b`.
    fn new() -> Self {
        let place = Place(tempfile::tempdir().unwrap());
        place.write(
            "in/a.json",
            &[
                ("SPEAKER_00", 40.0, [1.0, 0.1, 0.0]),
                ("SPEAKER_01", 5.0, [0.0, 1.0, 0.0]),
            ],
        );
        place.write(
            "in/talks/b.json",
            &[
                ("SPEAKER_00", 7.0, [0.1, 1.0, 0.0]),
                ("SPEAKER_01", 9.0, [1.0, 0.0, 0.1]),
                ("SPEAKER_02", 3.0, [0.0, 0.0, 2.0]),
            ],
        );
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    fn write(&self, name: &str, speakers: &[(&str, f64, [f32; 3])]) {
        let mut at = 0.0;
        let turns: Vec<Value> = speakers
            .iter()
            .map(|(label, seconds, _)| {
                at += seconds;
                json!({"start": at - seconds, "end": at, "speaker": label})
            })
            .collect();
        let speaker = |(label, seconds, embedding): &(&str, f64, [f32; 3])| json!({"speaker": label, "seconds": seconds, "embedding": embedding});
        let speakers: Value = speakers.iter().map(speaker).collect();
        self.text(
            name,
            &json!({"diarization": turns, "exclusive_diarization": turns, "speakers": speakers}).to_string(),
        );
    }

    fn text(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Runs a command; words that begin with `./` are below the folder.
    fn run(&self, line: &[&str]) -> Result<(Exit, String), Failure> {
        let word = |word: &&str| match word.strip_prefix("./") {
            Some(name) => self.path(name).into_os_string(),
            None => word.into(),
        };
        let words = [
            "speakers".into(),
            "--store".into(),
            self.path("voices").into_os_string(),
        ];
        let line = Line::parse_from(words.into_iter().chain(line.iter().map(word)));
        let mut out = Vec::new();
        let exit = voices(&line.arguments, &mut out)?;
        Ok((exit, String::from_utf8(out).unwrap()))
    }

    fn done(&self, line: &[&str]) -> String {
        let (exit, text) = self.run(line).unwrap();
        assert_eq!(exit, Exit::Done, "{text}");
        text
    }

    fn refused(&self, line: &[&str]) -> String {
        let failure = self.run(line).unwrap_err();
        failure.render(flow_spec::Style::Plain)
    }

    /// The voice of each speaker.
    fn voices(&self) -> Vec<(String, String)> {
        let list: Value = serde_json::from_str(&self.done(&["list", "--json"])).unwrap();
        let mut found = Vec::new();
        for voice in list["voices"].as_array().unwrap() {
            let id = voice["voice"].as_str().unwrap();
            let shown: Value = serde_json::from_str(&self.done(&["show", id, "--json"])).unwrap();
            for speaker in shown["speakers"].as_array().unwrap() {
                let key = format!(
                    "{}/{}",
                    speaker["recording"].as_str().unwrap(),
                    speaker["speaker"].as_str().unwrap()
                );
                found.push((key, voice["name"].as_str().unwrap_or(id).to_owned()));
            }
        }
        found.sort();
        found
    }
}

fn found(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs
        .iter()
        .map(|(key, voice)| ((*key).to_owned(), (*voice).to_owned()))
        .collect()
}

/// A composed letter and a letter with a combining mark are one name, which is stored composed.
#[test]
fn names_are_the_same_in_both_unicode_forms() {
    let place = Place::new();
    let (composed, apart) = ("Ren\u{e9}", "Rene\u{301}");
    place.write(
        "in/c.json",
        &[(apart, 8.0, [1.0, 0.0, 0.0]), ("Zoe\u{308}", 4.0, [0.0, 0.0, 1.0])],
    );
    place.write("in/d.json", &[(composed, 8.0, [1.0, 0.0, 0.0])]);
    place.done(&["add", "./in/c.json", "./in/d.json"]);
    let voices = found(&[
        ("c/Rene\u{301}", composed),
        ("c/Zoe\u{308}", "Zo\u{eb}"),
        ("d/Ren\u{e9}", composed),
    ]);
    assert_eq!(place.voices(), voices);
    assert_eq!(
        place.done(&["name", apart, "A\u{30a}sa"]),
        "change 2: V1 is \u{c5}sa, 2 speakers\n"
    );
    let refused = place.refused(&["name", "Zo\u{eb}", "A\u{30a}sa"]);
    assert!(refused.contains("has this name already"), "{refused}");
    for name in ["\u{c5}sa", "A\u{30a}sa"] {
        assert!(place.done(&["show", name]).starts_with("V1 "), "{name}");
    }
    // A later recording comes to it, too.
    place.write("in/e.json", &[("A\u{30a}sa", 8.0, [0.0, 1.0, 0.0])]);
    place.done(&["add", "./in/e.json"]);
    assert!(
        place
            .voices()
            .contains(&("e/A\u{30a}sa".to_owned(), "\u{c5}sa".to_owned()))
    );
}

#[test]
fn voices_are_found_named_corrected_and_written() {
    let place = Place::new();
    let said = place.done(&["add", "./in"]);
    assert_eq!(
        said.lines().next().unwrap(),
        "change 1: 2 recordings added, 0 replaced, 0 unchanged; 5 speakers"
    );
    assert!(said.contains("3 voices in"), "{said}");
    let before = found(&[
        ("a/SPEAKER_00", "V1"),
        ("a/SPEAKER_01", "V2"),
        ("talks/b/SPEAKER_00", "V2"),
        ("talks/b/SPEAKER_01", "V1"),
        ("talks/b/SPEAKER_02", "V3"),
    ]);
    assert_eq!(place.voices(), before);
    assert_eq!(
        place.done(&["add", "./in", "./in/a.json"]),
        "nothing to add: 2 recordings unchanged\n"
    );

    assert_eq!(
        place.done(&["name", "V1", "Ann Lee"]),
        "change 2: V1 is Ann Lee, 2 speakers\n"
    );
    let shown = place.done(&["show", "Ann Lee"]);
    assert!(
        shown.contains("a/SPEAKER_00") && shown.contains("0:00.0-0:40.0") && shown.contains("0:07.0-0:16.0"),
        "{shown}"
    );
    let list = place.done(&["list"]);
    let first: Vec<&str> = list.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(first, ["V1", "Ann", "Lee", "2", "49.0", "s", "a", "0:00.0-0:40.0"]);
    assert_eq!(place.done(&["review"]), "nothing to review\n");

    place.done(&["apply", "./in", "--out", "./named", "--format", "rttm,json"]);
    assert_eq!(
        place.read("named/talks/b.rttm"),
        "SPEAKER b 1 0.000 7.000 <NA> <NA> V2 <NA> <NA>\nSPEAKER b 1 7.000 9.000 <NA> <NA> Ann_Lee <NA> <NA>\n\
         SPEAKER b 1 16.000 3.000 <NA> <NA> V3 <NA> <NA>\n"
    );
    let json: Value = serde_json::from_str(&place.read("named/a.json")).unwrap();
    assert_eq!(
        (&json["speakers"][0]["speaker"], &json["diarization"][1]["speaker"]),
        (&json!("Ann Lee"), &json!("V2"))
    );
    place.done(&["export", "./known.json"]);
    let known: Value = serde_json::from_str(&place.read("known.json")).unwrap();
    let ann: Vec<f64> = known["Ann Lee"]
        .as_array()
        .unwrap()
        .iter()
        .map(|value| value.as_f64().unwrap())
        .collect();
    assert_eq!(known.as_object().unwrap().len(), 1);
    assert!(
        (ann.iter().map(|value| value * value).sum::<f64>() - 1.0).abs() < 1e-6 && ann[0] > 0.99,
        "{ann:?}"
    );

    assert_eq!(
        place.done(&["move", "talks/b/SPEAKER_00", "new"]),
        "change 3: talks/b/SPEAKER_00 is in V4, not in V2\n"
    );
    assert_eq!(
        place.done(&["merge", "V4", "V2"]),
        "change 4: V2 is now V4, 2 speakers\n"
    );
    assert!(
        place
            .done(&["forget", "V3"])
            .starts_with("change 5: V3 is forgotten, 1 speaker")
    );
    assert_eq!(
        place.voices(),
        found(&[
            ("a/SPEAKER_00", "Ann Lee"),
            ("a/SPEAKER_01", "V4"),
            ("talks/b/SPEAKER_00", "V4"),
            ("talks/b/SPEAKER_01", "Ann Lee"),
        ])
    );
    for (number, of) in [(6, 5), (7, 4), (8, 3), (9, 2)] {
        let said = place.done(&["undo"]);
        assert!(
            said.starts_with(&format!("change {number}: change {of} is undone (")),
            "{said}"
        );
    }
    assert_eq!(place.voices(), before);
    assert_eq!(place.done(&["undo", "9"]), "change 10: change 9 is undone (undo 2)\n");
    assert_eq!(place.voices()[0], ("a/SPEAKER_00".to_owned(), "Ann Lee".to_owned()));
    let history = place.done(&["history", "--limit", "2"]);
    assert_eq!(history.lines().count(), 3);
    assert!(
        history.lines().nth(2).unwrap().contains("undone") && history.contains("undo 9"),
        "{history}"
    );
}

#[test]
fn files_that_cannot_be_used_are_named_and_others_are_added() {
    let place = Place::new();
    place.text("in/bad.json", "{");
    place.text("in/transcript.json", r#"{"segments": []}"#);
    place.text(
        "in/other.json",
        r#"{"diarization": [], "speakers": [{"speaker": "SPEAKER_00", "seconds": 1, "embedding": [1, 2]}]}"#,
    );
    place.text("in/.hidden.json", "{");
    let (exit, said) = place.run(&["add", "./in"]).unwrap();
    assert!(
        exit == Exit::Noted && said.contains("2 recordings added"),
        "{exit:?}: {said}"
    );
    assert_eq!(
        place.run(&["add", "./in/bad.json", "./gone.json"]).unwrap().0,
        Exit::Failed
    );

    // Another file with the name of a recording is not taken for it, unless that has gone.
    place.write("more/a.json", &[("SPEAKER_00", 1.0, [0.0, 1.0, 0.2])]);
    assert_eq!(place.run(&["add", "./more"]).unwrap().0, Exit::Failed);
    assert_eq!(place.run(&["add", "./more", "./in/a.json"]).unwrap().0, Exit::Noted);
    fs::remove_file(place.path("in/a.json")).unwrap();
    let said = place.done(&["add", "./more"]);
    assert!(said.contains("0 recordings added, 1 replaced"), "{said}");
    // What changed is read again before it is applied.
    place.write("more/a.json", &[("SPEAKER_00", 2.0, [0.0, 1.0, 0.2])]);
    assert_eq!(
        place.run(&["apply", "./more", "--out", "./named"]).unwrap().0,
        Exit::Failed
    );
    assert!(!place.path("named/a.rttm").exists());
    place.done(&["add", "./more/a.json"]);
    place.done(&["apply", "./more", "--out", "./named"]);
}

#[test]
fn files_of_others_are_not_replaced() {
    let place = Place::new();
    place.done(&["add", "./in"]);
    place.done(&["name", "V1", "Ann"]);
    let before = place.read("in/a.json");
    place.text("named/a.rttm", "mine");
    let apply = ["apply", "./in/a.json", "--out", "./named"];
    assert_eq!(place.run(&apply).unwrap().0, Exit::Failed);
    assert_eq!(place.read("named/a.rttm"), "mine");
    place.done(&[&apply[..], &["--overwrite"]].concat());
    assert!(place.read("named/a.rttm").contains("Ann"));
    // The same content is no conflict; an input is never replaced.
    place.done(&apply);
    let onto = ["apply", "./in", "--out", "./in", "--format", "json", "--overwrite"];
    assert_eq!(place.run(&onto).unwrap().0, Exit::Failed);
    assert_eq!(place.read("in/a.json"), before);
    place.text("known.json", "mine");
    assert!(
        place
            .refused(&["export", "./known.json"])
            .contains("--overwrite replaces it")
    );
    place.done(&["export", "./known.json", "--overwrite"]);
    let log = place.read("voices/changes.jsonl");
    for name in [
        "./voices/changes.jsonl",
        "./voices/lock",
        "./in/../voices/changes.jsonl",
    ] {
        let refused = place.refused(&["export", name, "--overwrite"]);
        assert!(refused.contains("a file of the store"), "{refused}");
    }
    assert_eq!(place.read("voices/changes.jsonl"), log);
}

#[test]
fn labels_of_a_recording_stay_distinct() {
    let place = Place(tempfile::tempdir().unwrap());
    let silent = [0.0; 3];
    let speakers = [
        ("SPEAKER_00", 9.0, [1.0, 0.0, 0.0]),
        ("SPEAKER_01", 8.0, [0.0, 1.0, 0.0]),
        ("V1", 0.1, silent),
        ("V2", 0.1, silent),
        ("UNKNOWN", 0.1, silent),
    ];
    place.write("in/a.json", &speakers);
    place.done(&["add", "./in"]);
    place.done(&["apply", "./in", "--out", "./named", "--format", "json"]);
    let json: Value = serde_json::from_str(&place.read("named/a.json")).unwrap();
    let labels: Vec<&str> = json["speakers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|found| found["speaker"].as_str().unwrap())
        .collect();
    assert_eq!(labels, ["V1", "V2", "UNKNOWN_2", "UNKNOWN_3", "UNKNOWN"]);
}

#[test]
fn mistakes_are_told_by_name() {
    let place = Place::new();
    for command in [
        &["list"][..],
        &["name", "V1", "Ann"],
        &["undo"],
        &["export", "./known.json"],
    ] {
        assert!(place.refused(command).contains("has no voices"), "{command:?}");
    }
    assert!(!place.path("voices").exists());
    place.done(&["add", "./in"]);
    for (command, said) in [
        (&["show", "V9"][..], "there is no voice `V9`"),
        (&["name", "V1", "SPEAKER_07"], "a name that unknown speakers have"),
        (&["name", "V1", "new"], "reserved for a new voice"),
        (&["name", "V1", "a\nb"], "`a\\nb` cannot"),
        (&["name", "V1", "v12"], "like the number of a voice"),
        (&["name", "V1", "\u{1b}[2J"], "control characters"),
        (
            &["merge", "V1", "V2"],
            "a/SPEAKER_00 and a/SPEAKER_01 are two speakers of one recording",
        ),
        (&["merge", "V1", "V1"], "V1 is one voice"),
        (&["move", "a/SPEAKER_00", "V2"], "two speakers of one recording"),
        (&["move", "a/SPEAKER_07", "V2"], "did you mean `a/SPEAKER_0"),
        (&["undo", "7"], "there is no change 7"),
        (&["export", "./known.json"], "no voice in"),
    ] {
        let refused = place.refused(command);
        assert!(refused.contains(said) && !refused.contains('\u{1b}'), "{refused}");
    }
    place.done(&["name", "V1", "Ann"]);
    assert!(
        place
            .refused(&["name", "V2", "Ann"])
            .contains("flow speakers merge V1 V2")
    );
    place.done(&["undo"]);
    place.done(&["undo"]);
    assert!(place.refused(&["undo"]).contains("no change to undo"));
    // A damaged log is named.
    let log = place.path("voices/changes.jsonl");
    let text = fs::read_to_string(&log).unwrap();
    fs::write(&log, text.replace("Ann", "Bob")).unwrap();
    assert!(place.refused(&["list"]).contains("changes.jsonl: line 2 is damaged"));
}

#[test]
fn review_prints_commands_that_work() {
    let place = Place(tempfile::tempdir().unwrap());
    place.write("in/a.json", &[("SPEAKER_00", 5.0, [1.0, 0.0, 0.0])]);
    place.write("in/it's b.json", &[("SPEAKER_00", 20.0, [0.7, 0.714, 0.0])]);
    place.write("in/c.json", &[("SPEAKER_00", 5.0, [0.1, 1.0, 0.0])]);
    place.done(&["add", "./in"]);
    let store = place.path("voices");
    let said = place.done(&["review"]);
    let commands: Vec<&str> = said
        .match_indices("flow speakers ")
        .map(|(at, _)| said[at..].lines().next().unwrap())
        .collect();
    assert!(commands[0].contains("merge V1 V2"), "{said}");
    assert!(said.contains("move 'it'\\''s b/SPEAKER_00' V1"), "{said}");
    assert!(said.contains(&format!("--store {}", store.display())), "{said}");
    place.done(&["move", "it's b/SPEAKER_00", "V2"]);
    assert!(!place.done(&["review"]).contains("move"));
    place.done(&["merge", "V1", "V2"]);
    assert_eq!(place.done(&["review"]), "nothing to review\n");
}
