//! What rows of every form are held against.

use flow_kind::RejectClass;

use super::forms::{details, extra_of, lay_out, numbers, with_lang};
use super::*;

/// Too long and too short are rules, in whatever form rows come; rows of exactly the limit stay.
#[test]
fn durations_have_limits() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let seconds = [0.5, 0.499, 1.0, 1.001, 9.0];
    let lines = seconds.map(|duration| {
        format!("{{\"audio_filepath\": \"a.flac\", \"duration\": {duration}, \"text\": \"x\", \"lang\": \"hi\"}}\n")
    });
    let table: String = seconds
        .iter()
        .map(|duration| format!("a.flac,x,hi,{duration}\n"))
        .collect();
    lay_out(
        folder.path(),
        &[
            ("a.flac", ""),
            ("m.jsonl", &lines.concat()),
            ("m.csv", &format!("path,text,lang,duration\n{table}")),
            ("flat/b.flac", ""),
            ("flat/b.txt", "x"),
        ],
    );
    let limited = |manifest: &str, least, most| ReadSettings {
        min_duration: least,
        max_duration: most,
        ..with_lang(&at(manifest), "hi")
    };
    for manifest in ["m.jsonl", "m.csv"] {
        let output = run(limited(manifest, Some(0.5), Some(1.0)));
        assert_eq!(numbers(&output, "duration"), [Some(0.5), Some(1.0)]);
        let found: Vec<(&str, RejectClass)> = output
            .rejects()
            .iter()
            .map(|(_, reject)| (reject.reason.as_str(), reject.class))
            .collect();
        assert_eq!(
            found,
            [
                ("duration_too_short", RejectClass::Rule),
                ("duration_too_long", RejectClass::Rule),
                ("duration_past_end", RejectClass::Fault)
            ]
        );
        assert_eq!(run(limited(manifest, None, None)).all_rows("rows").num_rows(), 4);
    }
    // What is measured is held against them, too.
    assert_eq!(reasons(&run(limited("flat", None, Some(1.0)))), ["duration_too_long"]);
    assert_eq!(reasons(&run(limited("flat", Some(1.2), None))), ["duration_too_short"]);
    assert_eq!(reasons(&run(limited("flat", Some(1.0), Some(1.2)))), Vec::<&str>::new());

    for (least, most, path) in [
        (Some(-1.0), None, "min_duration"),
        (None, Some(f64::NAN), "max_duration"),
        (Some(2.0), Some(1.0), "max_duration"),
    ] {
        match Harness::<Read>::new(limited("m.jsonl", least, most)).run() {
            Err(StageError::Setting { path: named, .. }) => assert_eq!(named, path),
            other => panic!("{:?}", other.map(|_| ())),
        }
    }
}

/// The number is that of the line in the file, in whatever block it is.
#[test]
fn broken_lines_are_named_by_their_number() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.jsonl");
    let mut lines = String::new();
    for number in 1..=8_300 {
        lines.push_str(match number {
            3 | 8_192 | 8_193 | 8_299 => "{\"text\": oh}\n",
            4 => "\n",
            5 => "[1]\n",
            _ => "{\"audio_filepath\": \"a\", \"duration\": 1, \"text\": \"x\", \"lang\": \"en\"}\n",
        });
    }
    fs::write(&path, lines).unwrap();
    let unseen = ReadSettings {
        check_audio: false,
        ..settings(&path)
    };
    let output = run(unseen);
    assert_eq!(reasons(&output), ["bad_json"; 5]);
    let details = details(&output);
    assert_eq!(details[1], "line 5 is not a JSON object");
    for (detail, number) in [(0, 3), (2, 8_192), (3, 8_193), (4, 8_299)] {
        let place = format!(" at line {number} column ");
        assert!(details[detail].contains(&place), "{}: {place}", details[detail]);
    }
}

/// Offsets before the beginning are refused in every form.
#[test]
fn negative_offsets_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let line = r#"{"audio_filepath": "a.flac", "duration": 0.5, "text": "x", "lang": "hi", "offset": -0.5}"#;
    let table = "path,text,lang,duration,offset\na.flac,x,hi,0.5,-0.5\n";
    lay_out(folder.path(), &[("a.flac", ""), ("m.jsonl", line), ("m.csv", table)]);
    let text = |value: &str| -> arrow::array::ArrayRef { Arc::new(StringArray::from(vec![value])) };
    let number = |value: f64| -> arrow::array::ArrayRef { Arc::new(arrow::array::Float64Array::from(vec![value])) };
    let batch = RecordBatch::try_from_iter(vec![
        ("segment_id", text("a")),
        ("text", text("x")),
        ("lang", text("hi")),
        ("audio_filepath", text("a.flac")),
        ("duration", number(0.5)),
        ("offset", number(-0.5)),
    ])
    .unwrap();
    let file = fs::File::create(folder.path().join("m.parquet")).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    for name in ["m.jsonl", "m.csv", "m.parquet"] {
        assert_eq!(
            reasons(&run(settings(&folder.path().join(name)))),
            ["offset_invalid"],
            "{name}"
        );
    }
}

/// A column `extra` of somebody else's, which is not a JSON object, is not lost.
#[test]
fn a_foreign_column_extra_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.parquet");
    let texts = |values: [&str; 3]| -> arrow::array::ArrayRef { Arc::new(StringArray::from(values.to_vec())) };
    let batch = RecordBatch::try_from_iter(vec![
        ("segment_id", texts(["a", "b", "c"])),
        ("text", texts(["x"; 3])),
        ("lang", texts(["hi-IN", "hi", "hi"])),
        ("audio_path", texts(["a.flac"; 3])),
        ("extra", texts(["noisy", r#"{"snr": 3.0}"#, ""])),
        ("duration", Arc::new(Float32Array::from(vec![1.0; 3]))),
    ])
    .unwrap();
    let mut writer = ArrowWriter::try_new(fs::File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let unseen = ReadSettings {
        check_audio: false,
        ..settings(&path)
    };
    let output = run(unseen);
    assert_eq!(
        extra_of(&output),
        [
            Some(r#"{"extra":"noisy"}"#.to_string()),
            Some(r#"{"snr": 3.0}"#.to_string()),
            None
        ]
    );
    assert_eq!(column(&output, "lang"), ["hi"; 3]);
}

#[test]
fn old_lines_of_nemo_name_the_recording_by_another_key() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.flac"), recording()).unwrap();
    fs::write(folder.path().join("b.flac"), recording()).unwrap();
    let manifest = folder.path().join("m.json");
    let lines = r#"{"audio_filename": "a.flac", "duration": 0.5, "text": "x", "lang": "hi"}
{"audio_filename": "a.flac", "audio_filepath": "b.flac", "duration": 0.5, "text": "y", "lang": "hi"}
{"audio_filename": "a.flac", "path": "b.flac", "duration": 0.5, "text": "z", "lang": "hi"}
"#;
    fs::write(&manifest, lines).unwrap();
    let output = run(settings(&manifest));
    assert_eq!(reasons(&output), Vec::<&str>::new());
    assert_eq!(column(&output, "segment_id"), ["a", "b", "b"]);
    let extra = extra_of(&output);
    assert_eq!((&extra[0], extra[1].is_some()), (&None, true));
}
