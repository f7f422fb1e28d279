use std::path::Path;

use flow_kind::output_files::missing;
use flow_runtime::harness::{Harness, Output};
use flow_storage::Storage;

use super::*;
use crate::rows::{
    Speakers, recordings_batch, recordings_schema, segments_batch, segments_schema, timings_batch, timings_schema,
};
use crate::{Metadata, Performance, Segment, Word};

fn run(out: &Path, formats: &[Format], width: usize) -> Output {
    let segment = Segment {
        start: 0.5,
        end: 1.5,
        text: "hello there".to_owned(),
        confidence: Some(0.5),
        speaker: None,
        words: ["hello", "there"]
            .map(|text| Word {
                word: text.to_owned(),
                start: 0.5,
                end: 1.5,
                confidence: Some(0.5),
                speaker: None,
            })
            .to_vec(),
    };
    let metadata = Metadata {
        source_file: "talks/a.wav".to_owned(),
        duration_s: 2.0,
        model: "small.nemo".to_owned(),
        languages: vec!["en".to_owned()],
        ..Metadata::default()
    };
    let timing = timings_batch("2026-01-02T03:04:05Z", &Performance::new(2.0, 0.25, 0.0, 0.5)).unwrap();
    let recording = |metadata: &Metadata| recordings_batch(metadata, 1.0, 1).unwrap();
    let silent = Metadata {
        source_file: "b.wav".to_owned(),
        ..metadata.clone()
    };
    let settings = WriteSettings {
        out: out.to_owned(),
        formats: formats.to_vec(),
        max_line_width: width,
        max_line_count: 0,
        keep: BTreeSet::new(),
    };
    Harness::<Write>::new(settings)
        .input("segments", segments_schema(Speakers::Unasked))
        .input("recordings", recordings_schema(false, false))
        .input("timings", timings_schema())
        .feed(
            "segments",
            "talks/a",
            segments_batch(&[segment], Speakers::Unasked).unwrap(),
        )
        .feed("recordings", "talks/a", recording(&metadata))
        .feed("timings", "talks/a", timing.clone())
        .feed("recordings", "b", recording(&silent))
        .feed("timings", "b", timing)
        .empty_partition("segments", "refused")
        .run()
        .unwrap()
}

#[test]
fn each_recording_gets_a_file_of_each_format() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    let output = run(&out, &[Format::Json, Format::Txt, Format::Srt, Format::Txt], 0);
    let read = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    assert_eq!(read("talks/a.txt"), "hello there\n");
    assert_eq!(read("b.txt"), "");
    assert_eq!(read("b.srt"), "");
    assert!(read("talks/a.srt").contains("00:00:00,500 --> 00:00:01,500\nhello there"));
    let json = Transcript::from_json(&read("talks/a.json")).unwrap();
    assert_eq!(json.metadata.source_file, "talks/a.wav");
    assert_eq!(json.metadata.processed_at, "2026-01-02T03:04:05Z");
    assert_eq!(json.performance.realtime_factor, Some(4.0));
    assert_eq!((json.text.as_str(), json.segments[0].words.len()), ("hello there", 2));
    let silent = Transcript::from_json(&read("b.json")).unwrap();
    assert_eq!((silent.text.as_str(), silent.segments.len()), ("", 0));
    // What was refused has none.
    assert!(!out.join("refused.txt").exists());
    assert_eq!(output.rows("files", "talks/a").num_rows(), 3);

    run(&out, &[Format::Srt], 6);
    assert!(read("talks/a.srt").contains("hello\nthere"), "{}", read("talks/a.srt"));
    assert_eq!(read("talks/a.txt"), "hello there\n");
}

/// As another reader has it: the values are those of the JSON line.
#[test]
fn a_parquet_file_is_the_json_line_as_a_table() {
    use arrow::array::{Array, AsArray};
    use arrow::datatypes::Float64Type;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    let place = tempfile::tempdir().unwrap();
    run(place.path(), &[Format::Parquet, Format::Jsonl], 0);
    let read = |name: &str| {
        let file = std::fs::File::open(place.path().join(name)).unwrap();
        let mut batches = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
        let batch = batches.next().unwrap().unwrap();
        assert!(batches.next().is_none());
        batch
    };
    let (spoken, silent) = (read("talks/a.parquet"), read("b.parquet"));
    assert_eq!(spoken.schema(), silent.schema());
    let line: Value =
        serde_json::from_str(&std::fs::read_to_string(place.path().join("talks/a.jsonl")).unwrap()).unwrap();
    let column = |name: &str| spoken.column_by_name(name).unwrap();
    assert_eq!(spoken.num_rows(), 1);
    assert_eq!(
        line["audio_filepath"],
        column("audio_filepath").as_string::<i32>().value(0)
    );
    assert_eq!(line["pred_text"], column("pred_text").as_string::<i32>().value(0));
    assert_eq!(
        line["duration"],
        column("duration").as_primitive::<Float64Type>().value(0)
    );
    let languages = column("languages").as_list::<i32>().value(0);
    assert_eq!(
        languages.as_string::<i32>().iter().flatten().collect::<Vec<_>>(),
        ["en"]
    );
    for name in ["word", "segment"] {
        let rows = column(name).as_list::<i32>().value(0);
        let rows = rows.as_struct();
        let lines = line[name].as_array().unwrap();
        assert_eq!((rows.len(), lines.len()), if name == "word" { (2, 2) } else { (1, 1) });
        let numbers = |member: &str| rows.column_by_name(member).unwrap().as_primitive::<Float64Type>();
        let texts = rows.column_by_name(name).unwrap().as_string::<i32>();
        for (row, line) in lines.iter().enumerate() {
            assert_eq!(line[name], texts.value(row));
            assert_eq!(line["start"], numbers("start").value(row));
            assert_eq!(line["end"], numbers("end").value(row));
            assert_eq!(numbers("confidence").value(row), 0.5);
        }
        assert_eq!(rows.column_by_name("speaker").unwrap().null_count(), rows.len());
    }
    // Nothing was said.
    let words = silent.column_by_name("word").unwrap().as_list::<i32>().value(0);
    assert_eq!((silent.num_rows(), words.len()), (1, 0));
}

/// Segments with speakers take the place of those without; what is known of the diarization is in the JSON.
#[test]
fn speakers_are_written_where_they_are_known() {
    use flow_speakers::stages::rows as diarization;

    let place = tempfile::tempdir().unwrap();
    let segment = |speaker: Option<&str>| Segment {
        end: 1.0,
        text: "hello".to_owned(),
        speaker: speaker.map(str::to_owned),
        ..Segment::default()
    };
    let metadata = Metadata {
        source_file: "a.wav".to_owned(),
        duration_s: 2.0,
        ..Metadata::default()
    };
    let timing = timings_batch("2026-01-02T03:04:05Z", &Performance::new(2.0, 0.25, 0.0, 0.5)).unwrap();
    let assigned = [segment(Some("Ann")), segment(Some("UNKNOWN"))];
    let harness = Harness::<Write>::new(WriteSettings {
        out: place.path().to_owned(),
        formats: vec![Format::Json, Format::Txt],
        max_line_width: 0,
        max_line_count: 0,
        keep: BTreeSet::new(),
    });
    let recording = recordings_batch(&metadata, 1.0, 1).unwrap();
    let output = harness
        .input("segments", segments_schema(Speakers::Unasked))
        .input("recordings", recordings_schema(false, false))
        .input("timings", timings_schema())
        .input("assigned", segments_schema(Speakers::Named))
        .input("diarized", diarization::recordings_schema())
        .input("diarization_timings", diarization::timings_schema())
        .feed(
            "segments",
            "a",
            segments_batch(&[segment(None)], Speakers::Unasked).unwrap(),
        )
        .feed("recordings", "a", recording.clone())
        .feed("timings", "a", timing.clone())
        .feed("assigned", "a", segments_batch(&assigned, Speakers::Named).unwrap())
        .feed(
            "diarized",
            "a",
            diarization::recordings_batch("a.wav", 2.0, 3, None).unwrap(),
        )
        .feed(
            "diarization_timings",
            "a",
            diarization::timings_batch(1.0, 1.5).unwrap(),
        )
        // Its diarization was refused.
        .feed("recordings", "b", recording)
        .feed("timings", "b", timing)
        .feed(
            "assigned",
            "b",
            segments_batch(&assigned[1..], Speakers::Named).unwrap(),
        )
        .run()
        .unwrap();
    assert_eq!(output.rows("files", "a").num_rows(), 2);
    let read = |name: &str| std::fs::read_to_string(place.path().join(name)).unwrap();
    assert_eq!(read("a.txt"), "[Ann]: hello\n[UNKNOWN]: hello\n");
    let json = Transcript::from_json(&read("a.json")).unwrap();
    assert_eq!(json.speakers, ["Ann"]);
    assert_eq!(json.metadata.num_speakers, Some(3));
    assert_eq!((json.performance.diarization_s, json.performance.total_s), (1.0, 2.0));
    assert_eq!(json.performance.realtime_factor, Some(1.0));
    let refused = Transcript::from_json(&read("b.json")).unwrap();
    assert_eq!(
        (refused.metadata.num_speakers, refused.performance.diarization_s),
        (None, 0.0)
    );
    assert_eq!(refused.segments[0].speaker.as_deref(), Some("UNKNOWN"));
}

#[test]
fn files_that_are_gone_or_were_changed_are_missed() {
    let place = tempfile::tempdir().unwrap();
    let output = run(place.path(), &[Format::Txt], 0);
    let files = output.rows("files", "talks/a");
    let committed = Artifact::in_memory(files.schema(), vec![(Partition::new("talks/a"), vec![files])]).unwrap();
    let look = || {
        missing(&Storage::default(), &BTreeSet::new(), &committed, place.path(), 1)
            .unwrap()
            .into_values()
            .next()
    };
    assert_eq!(look(), None);
    let path = place.path().join("talks/a.txt");
    // Of another size, and of the same.
    for other in ["other", "hello other\n"] {
        std::fs::write(&path, other).unwrap();
        assert!(
            look().unwrap().contains("is another than the one that was written"),
            "{other}"
        );
    }
    std::fs::remove_file(&path).unwrap();
    assert!(look().unwrap().contains("is gone"));
}

#[test]
fn nothing_to_write_is_refused() {
    let shape = |out: &str, formats: &[Format]| {
        let settings = WriteSettings {
            out: out.into(),
            formats: formats.to_vec(),
            max_line_width: 0,
            max_line_count: 0,
            keep: BTreeSet::new(),
        };
        Harness::<Write>::new(settings)
            .input("segments", segments_schema(Speakers::Unasked))
            .input("recordings", recordings_schema(false, false))
            .input("timings", timings_schema())
            .shape()
    };
    assert!(
        shape("out", &[])
            .unwrap_err()
            .to_string()
            .contains("`formats` is empty")
    );
    assert!(
        shape("", &[Format::Txt])
            .unwrap_err()
            .to_string()
            .contains("names no folder")
    );
    assert!(shape("out", &[Format::Txt]).is_ok());
}
