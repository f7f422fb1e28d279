//! Rows that are parts of longer recordings.

use arrow::array::{ArrayRef, Decimal128Array, Float64Array, Int64Array};
use flow_corpus::quoting::Quoting;
use flow_kind::event::Event;

use super::forms::{details, extra_of, numbers, with_lang};

use super::*;

/// A recording of silence.
fn wav(seconds: u32) -> Vec<u8> {
    let (rate, size) = (8_000u32, 16_000 * seconds);
    let words = |numbers: &[u32]| {
        numbers
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let mut bytes = [b"RIFF".to_vec(), words(&[36 + size]), b"WAVEfmt ".to_vec()].concat();
    bytes.extend(words(&[16, 0x0001_0001, rate, 2 * rate, 0x0010_0002]));
    bytes.extend([b"data".to_vec(), words(&[size])].concat());
    bytes.resize(bytes.len() + size as usize, 0);
    bytes
}

/// A folder with a recording of ten seconds, and a manifest of this name.
fn place(name: &str, text: &str) -> (tempfile::TempDir, ReadSettings) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("long.wav"), wav(10)).unwrap();
    fs::write(folder.path().join(name), text).unwrap();
    let settings = with_lang(&folder.path().join(name), "en");
    (folder, settings)
}

fn starts_and_durations(output: &Output) -> (Vec<Option<f64>>, Vec<Option<f64>>) {
    (numbers(output, "start"), numbers(output, "duration"))
}

#[test]
fn rows_begin_and_end_by_the_names_that_people_give_to_times() {
    let expected = (vec![None, Some(2.5), Some(7.0)], vec![Some(2.5), Some(4.5), Some(3.0)]);
    for (start, end) in [("start", "end"), ("start_time", "end_time"), ("Begin", "STOP")] {
        let table =
            format!("path,text,{start},{end}\nlong.wav,one,0,2.5\nlong.wav,two,2.5,7.0\nlong.wav,three,7.0,10\n");
        let (_folder, settings) = place("t.csv", &table);
        let output = run(settings);
        assert_eq!(starts_and_durations(&output), expected, "{start}");
        assert_eq!(column(&output, "segment_id"), ["long", "long@2.5", "long@7"]);
        assert_eq!(extra_of(&output), [None, None, None]);
    }
    for (start, end) in [("start", "end"), ("start_time", "end_time"), ("begin", "stop")] {
        let line = |text: &str, from: f64, to: f64, more: &str| {
            format!(
                "{{\"audio_filepath\": \"long.wav\", \"text\": \"{text}\", \"{start}\": {from}, \"{end}\": {to}{more}}}\n"
            )
        };
        let lines =
            line("one", 0.0, 2.5, "") + &line("two", 2.5, 7.0, ", \"duration\": 4.5") + &line("three", 7.0, 10.0, "");
        let (_folder, settings) = place("m.jsonl", &lines);
        let output = run(settings);
        assert_eq!(starts_and_durations(&output), expected, "{start}");
        assert_eq!(extra_of(&output), [None, None, None]);
    }
    let (_folder, settings) = place(
        "d.csv",
        "path,text,duration,start\nlong.wav,one,2.5,0\nlong.wav,two,4.5,2.5\nlong.wav,three,3,7\n",
    );
    assert_eq!(starts_and_durations(&run(settings)), expected);
}

#[test]
fn times_of_parquet_are_read_by_the_same_names() {
    let (folder, _) = place("none", "");
    let path = folder.path().join("m.parquet");
    let write = |columns: Vec<(&str, ArrayRef)>| {
        let texts = ["one", "two"].map(|text| text.to_string());
        let texts: ArrayRef = Arc::new(StringArray::from(texts.to_vec()));
        let ids: ArrayRef = Arc::new(Int64Array::from(vec![17, 18]));
        let files: ArrayRef = Arc::new(StringArray::from(vec!["long.wav", "long.wav"]));
        let all = [
            vec![("segment_id", ids), ("text", texts), ("audio_filepath", files)],
            columns,
        ]
        .concat();
        let batch = RecordBatch::try_from_iter(all).unwrap();
        let mut writer = ArrowWriter::try_new(fs::File::create(&path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
    };
    let floats = |numbers: [f64; 2]| -> ArrayRef { Arc::new(Float64Array::from(numbers.to_vec())) };
    write(vec![("start", floats([0.0, 2.5])), ("end", floats([2.5, 7.0]))]);
    let output = run(with_lang(&path, "en"));
    assert_eq!(
        starts_and_durations(&output),
        (vec![None, Some(2.5)], vec![Some(2.5), Some(4.5)])
    );
    // A whole number where a text is wanted is its text.
    assert_eq!(column(&output, "segment_id"), ["17", "18"]);
    write(vec![
        ("begin", floats([0.0, 2500.0])),
        ("stop", floats([2500.0, 7000.0])),
    ]);
    assert_eq!(
        starts_and_durations(&run(with_lang(&path, "en"))),
        (vec![None, Some(2.5)], vec![Some(2.5), Some(4.5)])
    );
    let words: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
    write(vec![("duration", floats([1.0, 1.0])), ("start", words)]);
    assert!(failure(with_lang(&path, "en")).contains("column `start` is Utf8, not a number"));
    write(vec![("duration", floats([1.0, 1.0])), ("end", floats([1.0, 1.0]))]);
    assert!(failure(with_lang(&path, "en")).contains("column `end` says where rows end, but none where they begin"));
}

#[test]
fn milliseconds_are_told_by_the_length_of_recordings() {
    let (_folder, settings) = place(
        "t.tsv",
        "path\ttext\tstart\tend\nlong.wav\tone\t0\t2500\nlong.wav\ttwo\t2500\t7000\nlong.wav\tthree\t5\t9\n",
    );
    let output = run(settings);
    // Also of a row that would fit as seconds.
    assert_eq!(
        starts_and_durations(&output),
        (
            vec![None, Some(2.5), Some(0.005)],
            vec![Some(2.5), Some(4.5), Some(0.009 - 0.005)]
        )
    );
    // Seconds that end a little after the recording are still seconds.
    let (_folder, settings) = place("t.csv", "path,text,start,end\nlong.wav,one,0,2\nlong.wav,two,2,12\n");
    let output = run(settings);
    assert_eq!(
        (numbers(&output, "duration"), reasons(&output)),
        (vec![Some(2.0)], vec!["duration_past_end"])
    );
}

#[test]
fn times_that_cannot_be_used_are_named() {
    let (_folder, settings) = place("t.csv", "path,text,end\nlong.wav,one,2\n");
    assert!(failure(settings).contains("its column `end` says where rows end"));
    let (_folder, settings) = place(
        "u.csv",
        "path,text,start,end\nlong.wav,a,00:01,2\nlong.wav,b,2,1\nlong.wav,c,,2\nlong.wav,d,1,nan\n",
    );
    let output = run(settings);
    assert_eq!(
        reasons(&output),
        ["bad_type", "duration_invalid", "missing_field", "duration_invalid"]
    );
    assert!(
        details(&output)[0].contains("start \"00:01\""),
        "{:?}",
        details(&output)
    );
    // A column of such a name with another meaning, where another says where rows begin.
    let (_folder, mut settings) = place("v.csv", "path,text,start,from,secs\nlong.wav,a,2020-01-01,1.5,2\n");
    settings.columns = vec!["from=offset".into(), "secs=duration".into()];
    assert_eq!(starts_and_durations(&run(settings)), (vec![Some(1.5)], vec![Some(2.0)]));
}

#[test]
fn other_words_for_the_same_part_of_a_recording_are_told() {
    let warnings = |table: &str| {
        let (_folder, settings) = place("t.csv", table);
        let output = run(settings);
        let found = output.events.iter().filter_map(|event| match event {
            Event::Warning { message, .. } => Some(message.clone()),
            _ => None,
        });
        found.collect::<Vec<String>>()
    };
    let told = warnings("path,text\nlong.wav,one\nlong.wav,two\nlong.wav,one\nlong.wav,three\n");
    assert_eq!(told.len(), 1);
    assert!(
        told[0].contains("2 rows have another text") && told[0].contains("(t.csv, line 3)"),
        "{told:?}"
    );
    let none = warnings("path,text,offset,duration\nlong.wav,one,0,1\nlong.wav,two,1,1\nlong.wav,one,0,1\n");
    assert_eq!(none, Vec::<String>::new());
}

#[test]
fn times_under_names_that_are_not_read_are_an_error() {
    let table = "path,text,start_ms,End (ms)\nlong.wav,one,0,2500\nlong.wav,two,2500,7000\n";
    let (_folder, mut settings) = place("t.csv", table);
    let said = failure(settings.clone());
    assert!(
        said.contains("`start_ms` seems to say where a row begins or ends"),
        "{said}"
    );
    settings.columns = vec!["start_ms=start".into(), "End (ms)=end".into()];
    assert_eq!(
        starts_and_durations(&run(settings.clone())),
        (vec![None, Some(2.5)], vec![Some(2.5), Some(4.5)])
    );
    // Or they are kept beside the row, as `start` may be.
    settings.columns = vec!["start_ms=extra".into(), "End (ms)=extra".into()];
    let output = run(settings);
    assert_eq!(numbers(&output, "start"), [None, None]);
    assert!(
        extra_of(&output)[1]
            .as_deref()
            .unwrap()
            .contains(r#""start_ms":"2500""#)
    );
    let lines = r#"{"audio_filepath": "long.wav", "text": "one", "duration": 1.0, "segment_start": 2.5}
{"audio_filepath": "long.wav", "text": "two", "duration": 1.0, "word_start": [0.1], "from": "corpus", "end": null}
{"audio_filepath": "long.wav", "text": "three", "duration": 1.0, "utt_start": "00:00:01.5"}
{"audio_filepath": "long.wav", "text": "four", "from": 1.0, "to": 2.0}
{"audio_filepath": "long.wav", "text": "five", "Start": 1.0, "End": 2.0}
"#;
    let (_folder, settings) = place("m.jsonl", lines);
    let output = run(settings);
    assert_eq!(
        (column(&output, "text"), reasons(&output)),
        (vec!["two".to_string()], vec!["unread_time"; 4])
    );
    // Keys of lines are read or kept as columns are.
    let (_folder, mut settings) = place("m.jsonl", lines);
    settings.columns = [
        "segment_start=start",
        "utt_start=extra",
        "from=extra",
        "to=extra",
        "Start=extra",
        "End=extra",
    ]
    .map(String::from)
    .to_vec();
    let output = run(settings);
    assert_eq!(
        starts_and_durations(&output),
        (
            vec![Some(2.5), None, None, None, None],
            vec![Some(1.0), Some(1.0), Some(1.0), Some(10.0), Some(10.0)]
        )
    );
    let extra = extra_of(&output);
    assert_eq!(extra[0], None);
    assert_eq!(extra[2].as_deref(), Some(r#"{"utt_start":"00:00:01.5"}"#));
    assert_eq!(extra[3].as_deref(), Some(r#"{"from":1.0,"to":2.0}"#));
    // Where a row begins and how long it is counts, and no other key.
    let placed =
        r#"{"audio_filepath": "long.wav", "text": "one", "offset": 2, "duration": 1, "start_ms": 5, "start": "x"}"#;
    let (_folder, settings) = place("m.jsonl", placed);
    let output = run(settings);
    assert_eq!(starts_and_durations(&output), (vec![Some(2.0)], vec![Some(1.0)]));
    assert_eq!(extra_of(&output)[0].as_deref(), Some(r#"{"start":"x","start_ms":5}"#));
    // In Parquet as text, too.
    let (folder, _) = place("none", "");
    let texts = |values: [&str; 1]| -> ArrayRef { Arc::new(StringArray::from(values.to_vec())) };
    let columns = [
        ("audio_filepath", texts(["long.wav"])),
        ("text", texts(["one"])),
        ("segment_start", texts(["2.5"])),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let path = folder.path().join("m.parquet");
    let mut writer = ArrowWriter::try_new(fs::File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let mut settings = with_lang(&path, "en");
    let said = failure(settings.clone());
    assert!(said.contains("`segment_start` seems to say"), "{said}");
    // A pair for a column that this file has not is for another one.
    settings.columns = vec!["segment_start=extra".into(), "secs=duration".into()];
    assert_eq!(starts_and_durations(&run(settings)), (vec![None], vec![Some(10.0)]));
    let columns = [
        ("wav_file", texts(["long.wav"])),
        ("text", texts(["raw"])),
        ("words", texts(["one"])),
        ("segment_start", Arc::new(Float64Array::from(vec![2.5])) as ArrayRef),
        ("secs", Arc::new(Float64Array::from(vec![1.5])) as ArrayRef),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(fs::File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let mut settings = with_lang(&path, "en");
    settings.columns = [
        "wav_file=path",
        "words=sentence",
        "segment_start=offset",
        "secs=duration",
    ]
    .map(String::from)
    .to_vec();
    let output = run(settings);
    assert_eq!(starts_and_durations(&output), (vec![Some(2.5)], vec![Some(1.5)]));
    assert_eq!(column(&output, "text"), ["one"]);
}

#[test]
fn lines_without_a_duration_are_measured() {
    let lines = r#"{"audio_filepath": "long.wav", "text": "one"}
{"audio_filepath": "long.wav", "text": "two", "offset": 4}
{"audio_filepath": "long.wav", "text": "three", "duration": 2500}
{"audio_filepath": "long.wav", "text": "a little too long", "duration": 12.5}
{"id": "c", "start": 0, "duration": 1, "supervisions": [{"text": "four"}], "recording": {}}
"#;
    let (_folder, settings) = place("m.jsonl", lines);
    let output = run(settings);
    assert_eq!(
        starts_and_durations(&output),
        (vec![None, Some(4.0)], vec![Some(10.0), Some(6.0)])
    );
    let said = details(&output).join("\n");
    assert_eq!(said.matches("as milliseconds").count(), 1, "{said}");
    for expected in ["as milliseconds the row would fit", "this is a line of Lhotse's"] {
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn decimals_of_parquet_are_numbers_and_names() {
    let (folder, _) = place("none", "");
    let path = folder.path().join("m.parquet");
    let decimals = |values: [i128; 2], scale: i8| -> ArrayRef {
        let array = Decimal128Array::from(values.to_vec()).with_precision_and_scale(10, scale);
        Arc::new(array.unwrap())
    };
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["one", "two"]));
    let files: ArrayRef = Arc::new(StringArray::from(vec!["long.wav", "long.wav"]));
    let columns = [
        ("segment_id", decimals([17, 18], 0)),
        ("text", texts),
        ("audio_filepath", files),
        ("offset", decimals([0, 25], 1)),
        ("duration", decimals([250, 450], 2)),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(fs::File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let output = run(with_lang(&path, "en"));
    assert_eq!(
        starts_and_durations(&output),
        (vec![None, Some(2.5)], vec![Some(2.5), Some(4.5)])
    );
    assert_eq!(column(&output, "segment_id"), ["17", "18"]);
}

#[test]
fn quotes_of_tsv_are_taken_away_where_all_are_written_as_in_csv() {
    let table = "path\ttext\nlong.wav\t\"he said \"\"hi\"\"\"\nlong.wav\tplain\n";
    let (_folder, mut settings) = place("t.tsv", table);
    assert_eq!(column(&run(settings.clone()), "text"), ["he said \"hi\"", "plain"]);
    assert!(opened(&settings).decision().unwrap().contains("quoting: none"));
    settings.quoting = Quoting::None;
    assert_eq!(column(&run(settings), "text"), ["\"he said \"\"hi\"\"\"", "plain"]);
}

#[test]
fn numbers_beside_semicolons_may_have_a_comma() {
    let table = "path;text;start;end\nlong.wav;one;0,5;2,5\nlong.wav;two;1.000,5;2\n";
    let (_folder, settings) = place("t.csv", table);
    let output = run(settings);
    assert_eq!(starts_and_durations(&output), (vec![Some(0.5)], vec![Some(2.0)]));
    assert_eq!(reasons(&output), ["bad_type"]);
    // Elsewhere it may be between thousands.
    let (_folder, settings) = place("t.csv", "path,text,start,end\nlong.wav,one,0,\"1,500\"\n");
    assert_eq!(reasons(&run(settings)), ["bad_type"]);
}
