use std::fs::{File, FileTimes};
use std::path::Path;
use std::time::{Duration, SystemTime};

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, Decimal128Array, Float64Array, Int64Array, RecordBatch, StringArray,
    UInt64Array,
};
use arrow::datatypes::Float64Type;
use flow_runtime::harness::{Harness, Output};
use flow_storage::Storage;

use super::*;
use crate::channels::ChannelUse;
use crate::long_audio::WindowMethod;
use crate::read_ahead::TAKEN;
use crate::rows::{read_metadata, read_segments};
use crate::test_data::{hindi, root, wav};
use crate::text_style::{FillerUse, NumberStyle};

fn model() -> PathBuf {
    root().join("configs/models/small.nemo")
}

fn settings(folder: &Path) -> TranscribeSettings {
    TranscribeSettings::new(vec![folder.to_string_lossy().into_owned()], model())
}

fn run(settings: TranscribeSettings) -> Output {
    Harness::<Transcribe>::new(settings).run().unwrap()
}

#[test]
fn a_note_is_told_once_of_each_recording() {
    let recording = |path: &str, file: &str| Recording {
        name: file.into(),
        file: file.into(),
        path: path.into(),
    };
    let first = told_as(&recording("x.tar", "a.wav"), "a DC offset of 50 % (`dcshift -0.50`)");
    // A row of the same recording has other figures.
    assert_eq!(
        first,
        told_as(&recording("x.tar", "a.wav"), "a DC offset of 49 % (`dcshift -0.49`)")
    );
    assert_ne!(
        first,
        told_as(&recording("x.tar", "b.wav"), "a DC offset of 50 % (`dcshift -0.50`)")
    );
    assert_ne!(
        first,
        told_as(&recording("x.tar", "a.wav"), "channels cancel each other out")
    );
}

#[test]
fn recordings_become_rows_and_what_is_no_recording_a_reject() {
    let place = tempfile::tempdir().unwrap();
    std::fs::create_dir(place.path().join("talks")).unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(place.path().join(name), bytes).unwrap();
    write("talks/a.flac", &hindi(&Storage::default(), "rec_hi_0001_000.flac"));
    write("silence.wav", &wav(16_000, &[0; 32_000]));
    write("empty.wav", b"");
    write("text.wav", b"this is not audio");
    let mut settings = settings(place.path());
    settings
        .input
        .push(place.path().join("gone.wav").to_string_lossy().into_owned());
    let output = run(settings);

    let names: Vec<&str> = output.partitions.iter().map(Partition::as_str).collect();
    assert_eq!(names, ["empty", "gone", "silence", "talks/a", "text"]);
    for (name, reason) in [
        ("empty", "empty_file"),
        ("gone", "missing_file"),
        ("text", "unsupported_format"),
    ] {
        assert_eq!(output.reasons(name), [(None, reason)], "{name}");
    }
    assert_eq!(output.rejects().len(), 3);
    assert_eq!(output.rows("segments", "silence").num_rows(), 0);
    for (name, file, seconds) in [("silence", "silence.wav", 2.0), ("talks/a", "talks/a.flac", 3.648)] {
        let recording = output.rows("recordings", name);
        let text = |column: &str| {
            recording
                .column_by_name(column)
                .unwrap()
                .as_string::<i32>()
                .value(0)
                .to_owned()
        };
        assert_eq!(
            (text("recording"), text("model")),
            (file.to_owned(), "small.nemo".to_owned())
        );
        let bytes = std::fs::read(model()).unwrap();
        assert_eq!(text("model_digest"), blake3::hash(&bytes).to_hex().to_string());
        let duration = recording
            .column_by_name("duration")
            .unwrap()
            .as_primitive::<Float64Type>()
            .value(0);
        assert!((duration - seconds).abs() < 0.01, "{name}: {duration}");
        assert_eq!(output.rows("timings", name).num_rows(), 1);
    }
    let segments = read_segments(&output.rows("segments", "talks/a")).unwrap();
    assert!(!segments.is_empty());
    assert!(
        segments
            .iter()
            .all(|segment| !segment.words.is_empty() && segment.end <= 3.65)
    );
}

/// A WAV of two channels.
fn stereo(left: &[i16], right: &[i16]) -> Vec<u8> {
    let samples: Vec<i16> = left
        .iter()
        .zip(right)
        .flat_map(|(left, right)| [*left, *right])
        .collect();
    let mut bytes = wav(16_000, &samples);
    bytes[22] = 2;
    bytes[32] = 4;
    bytes
}

#[test]
fn each_channel_gets_what_it_gets_alone() {
    let place = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(place.path().join(name), bytes).unwrap();
    let speech = |name: &str| -> Vec<i16> {
        let samples = flow_audio::decode::decode(&hindi(&Storage::default(), name), 100.0).unwrap();
        samples
            .iter()
            .map(|sample| (sample * 32_767.0) as i16)
            .take(48_000)
            .collect()
    };
    let (left, right) = (speech("rec_hi_0001_000.flac"), speech("rec_hi_0008_001.flac"));
    let length = left.len().min(right.len());
    let (left, right) = (&left[..length], &right[..length]);
    write("call.wav", &stereo(left, right));
    write("left.wav", &wav(16_000, left));
    write("right.wav", &wav(16_000, right));
    let split = TranscribeSettings {
        channels: ChannelUse::Split,
        ..settings(place.path())
    };
    let output = run(split);
    let names: Vec<&str> = output.partitions.iter().map(Partition::as_str).collect();
    assert_eq!(names, ["call.ch1", "call.ch2", "left", "right"]);
    let segments = |name: &str| read_segments(&output.rows("segments", name)).unwrap();
    assert!(!segments("left").is_empty());
    assert_eq!(segments("call.ch1"), segments("left"));
    assert_eq!(segments("call.ch2"), segments("right"));
    let channel = |name: &str| read_metadata(&output.rows("recordings", name)).unwrap().channel;
    assert_eq!(["call.ch1", "call.ch2", "left"].map(channel), [Some(1), Some(2), None]);
    let names = run(settings(place.path())).partitions;
    assert_eq!(names.len(), 3, "{names:?}");
}

/// Parts of recordings as NeMo's manifests name them, and what is wrong with others.
#[test]
fn rows_of_a_manifest_get_what_their_parts_get_alone() {
    let place = tempfile::tempdir().unwrap();
    std::fs::create_dir(place.path().join("talks")).unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(place.path().join(name), bytes).unwrap();
    let speech = flow_audio::decode::decode(&hindi(&Storage::default(), "rec_hi_0001_000.flac"), 100.0).unwrap();
    let speech: Vec<i16> = speech
        .iter()
        .map(|sample| (sample * 32_767.0) as i16)
        .take(56_000)
        .collect();
    let pause = [0; 8_000];
    write("alone.wav", &wav(16_000, &speech));
    write(
        "talks/long.wav",
        &wav(16_000, &[&pause[..], &speech, &pause, &speech].concat()),
    );
    let tar = root().join("tests/data/corpus/mini/shards/hi/hi_0000/hi_0000.tar");
    let tar = tar.display();
    let lines = format!(
        r#"{{"audio_filepath": "talks/long.wav", "offset": 0.5, "duration": 3.5, "segment_id": "a/1", "text": "x", "n": 7}}

{{"audio_filepath": "talks/long.wav", "offset": 4.5}}
{{"audio_filepath": "alone.wav", "duration": 3.5}}
{{"tar_path": "{tar}", "tar_member_name": "rec_hi_0001_000.flac", "id": 12}}
{{"audio_filepath": "alone.wav", "offset": -1.0, "duration": 1}}
{{"audio_filepath": "alone.wav", "offset": NaN, "duration": 1}}
{{"audio_filepath": "alone.wav", "offset": "1", "duration": 1}}
{{"audio_filepath": "alone.wav", "duration": 0, "segment_id": "z"}}
{{"audio_filepath": "gone.wav", "duration": 1}}
{{"audio_filepath": "alone.wav", "offset": 3, "duration": 1}}
{{"audio_filepath": "talks/long.wav", "offset": 0.5, "segment_id": "../up"}}
{{"audio_filepath": "talks/long.wav", "offset": 4.5}}
{{"tar_path": "{tar}", "tar_member_name": "../rec_hi_0001_000.flac", "id": 13}}
{{"tar_path": "{tar}", "tar_member_name": "none.flac", "id": 14}}
{{"text": "no recording"}}
[]
"#
    );
    write("train.json", lines.as_bytes());
    let manifest = |name: &str| TranscribeSettings::new(vec![place.path().join(name).display().to_string()], model());
    let output = run(manifest("train.json"));
    let segments = |output: &Output, name: &str| read_segments(&output.rows("segments", name)).unwrap();
    let alone = run(TranscribeSettings::new(
        vec![place.path().join("alone.wav").display().to_string()],
        model(),
    ));
    let expected = segments(&alone, "alone");
    assert!(!expected.is_empty());
    for name in ["a/1", "talks/long@4.5", "alone"] {
        let name = format!("train/{name}");
        assert_eq!(segments(&output, &name), expected, "{name}");
        let metadata = read_metadata(&output.rows("recordings", &name)).unwrap();
        assert_eq!(metadata.duration_s, 3.5, "{name}");
    }
    assert!(!segments(&output, "train/12").is_empty());
    let row = read_metadata(&output.rows("recordings", "train/a/1"))
        .unwrap()
        .row
        .unwrap();
    let path = std::path::absolute(place.path().join("talks/long.wav")).unwrap();
    assert_eq!(
        (&row["segment_id"], &row["n"], &row["text"]),
        (&"a/1".into(), &7.into(), &"x".into())
    );
    assert_eq!(row["audio_filepath"], path.to_str().unwrap());
    for (name, reason) in [
        ("line 6", "offset_invalid"),
        ("line 7", "offset_invalid"),
        ("line 8", "bad_type"),
        ("line 9", "duration_invalid"),
        ("gone", "missing_file"),
        ("alone@3", "duration_past_end"),
        ("line 12", "unsafe_name"),
        ("line 13", "duplicate_id"),
        ("line 14", "unsafe_name"),
        ("line 15", "missing_audio"),
        ("line 16", "missing_field"),
        ("line 17", "bad_json"),
    ] {
        assert_eq!(output.reasons(&format!("train/{name}")), [(None, reason)], "{name}");
    }
    assert_eq!(output.partitions.len(), 16);

    // Rows of a stage, as its parquet artifacts have them: places in tars are bytes, and floating-point numbers may be none.
    let batch = RecordBatch::try_from_iter([
        ("segment_id", Arc::new(StringArray::from(vec!["p", "q"])) as ArrayRef),
        ("audio_path", Arc::new(StringArray::from(vec!["talks/long.wav"; 2]))),
        ("duration", Arc::new(Float64Array::from(vec![3.5, f64::NAN]))),
        ("start", Arc::new(Float64Array::from(vec![Some(0.5), None]))),
        ("offset", Arc::new(Int64Array::from(vec![None::<i64>; 2]))),
        ("size", Arc::new(Int64Array::from(vec![None::<i64>; 2]))),
        (
            "extra",
            Arc::new(StringArray::from(vec![Some(r#"{"speaker": "s1"}"#), None])),
        ),
    ]);
    let batch = batch.unwrap();
    let write_rows = |name: &str, batch: &RecordBatch| {
        let file = File::create(place.path().join(name)).unwrap();
        let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), None).unwrap();
        writer.write(batch).unwrap();
        writer.close().unwrap();
    };
    // Known by its content.
    write_rows("rows.data", &batch);
    let output = run(manifest("rows.data"));
    assert_eq!(segments(&output, "rows/p"), expected);
    let row = read_metadata(&output.rows("recordings", "rows/p"))
        .unwrap()
        .row
        .unwrap();
    assert_eq!((&row["speaker"], &row["offset"]), (&"s1".into(), &0.5.into()));
    assert_eq!(output.reasons("rows/line 2"), [(None, "duration_invalid")]);
    // Numbers of any type are numbers; what is no place or no text is said.
    let decimals = Decimal128Array::from(vec![35; 2]).with_precision_and_scale(3, 1);
    let batch = RecordBatch::try_from_iter([
        ("id", Arc::new(UInt64Array::from(vec![u64::MAX, 2])) as ArrayRef),
        ("audio_path", Arc::new(StringArray::from(vec!["talks/long.wav"; 2]))),
        ("duration", Arc::new(decimals.unwrap())),
        ("start", Arc::new(Float64Array::from(vec![0.5; 2]))),
        ("offset", Arc::new(Int64Array::from(vec![None, Some(-5)]))),
        ("size", Arc::new(Int64Array::from(vec![None, Some(100)]))),
    ]);
    write_rows("typed.parquet", &batch.unwrap());
    let output = run(manifest("typed.parquet"));
    assert_eq!(segments(&output, "typed/18446744073709551615"), expected);
    assert_eq!(output.reasons("typed/line 2"), [(None, "offset_invalid")]);
    let paths: ArrayRef = Arc::new(BinaryArray::from_vec(vec![b"talks/long.wav"]));
    write_rows(
        "binary.parquet",
        &RecordBatch::try_from_iter([("audio_path", Arc::clone(&paths))]).unwrap(),
    );
    let output = run(manifest("binary.parquet"));
    assert_eq!(output.reasons("binary/line 1"), [(None, "bad_type")]);
    // An id of 16 bytes, as databases write UUIDs, is not a name.
    let file: ArrayRef = Arc::new(StringArray::from(vec!["talks/long.wav"]));
    let batch = RecordBatch::try_from_iter([("audio_path", file), ("id", paths)]);
    write_rows("uuid.parquet", &batch.unwrap());
    assert!(!segments(&run(manifest("uuid.parquet")), "uuid/talks/long").is_empty());

    // Other values make another partition; a manifest without rows is a mistake.
    write(
        "train.json",
        br#"{"audio_filepath": "alone.wav", "duration": 3.5, "n": 1}"#,
    );
    write("none.jsonl", b"\n");
    write("text.jsonl", b"no manifest\n");
    for (name, why) in [("none.jsonl", "it has no rows"), ("text.jsonl", "none of its lines")] {
        let error = Harness::<Transcribe>::new(manifest(name))
            .run()
            .unwrap_err()
            .to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn recordings_that_are_transcribed_together_give_what_they_give_alone() {
    let place = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(place.path().join(name), bytes).unwrap();
    let talks = ["rec_hi_0001_000.flac", "rec_hi_0004_003.flac", "rec_hi_0008_001.flac"];
    for (index, talk) in talks.iter().enumerate() {
        write(&format!("{index}.flac"), &hindi(&Storage::default(), talk));
    }
    let whole = wav(16_000, &[0; 80_000]);
    write("1_cut.wav", &whole[..44 + 64_000]);
    write("1_empty.wav", b"");
    write("1_text.wav", b"this is not audio");
    // Longer than what is decoded with others.
    write("3.wav", &wav(16_000, &vec![0; 61 * 16_000]));
    write("4.flac", &hindi(&Storage::default(), talks[0]));
    let rows = |output: &Output, name: &str| {
        let rejects = output.reasons(name);
        match rejects.is_empty() {
            true => Ok((output.rows("segments", name), output.rows("recordings", name))),
            false => Err(rejects
                .iter()
                .map(|(_, reason)| (*reason).to_owned())
                .collect::<Vec<_>>()),
        }
    };
    let changed_at = |time: SystemTime| {
        for entry in std::fs::read_dir(place.path()).unwrap() {
            let file = File::options().write(true).open(entry.unwrap().path()).unwrap();
            file.set_times(FileTimes::new().set_modified(time)).unwrap();
        }
    };
    // Files that may be about to change: none is read before it is asked for.
    changed_at(SystemTime::now() + Duration::from_secs(3_600));
    let taken = TAKEN.get();
    let alone = run(settings(place.path()));
    assert_eq!(TAKEN.get(), taken);
    changed_at(SystemTime::now() - Duration::from_secs(3_600));
    std::thread::sleep(Duration::from_millis(3_100));
    let together = run(settings(place.path()));
    // All that are short after the first, and none of those that cannot be read; the last one has nothing after it.
    assert_eq!(TAKEN.get() - taken, 3);
    assert_eq!(together.partitions, alone.partitions);
    assert_eq!(alone.partitions.len(), 8);
    for partition in &alone.partitions {
        let name = partition.as_str();
        assert_eq!(rows(&together, name), rows(&alone, name), "{name}");
    }
    assert!(alone.rows("segments", "4").num_rows() > 0);
    assert_eq!(rows(&alone, "1_empty").unwrap_err(), ["empty_file"]);
}

#[test]
fn what_is_before_the_damage_is_transcribed_or_refused() {
    let place = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(place.path().join(name), bytes).unwrap();
    let whole = wav(16_000, &[0; 80_000]);
    write("whole.wav", &whole);
    write("cut.wav", &whole[..44 + 64_000]);
    write("stump.wav", &whole[..44 + 20_000]);
    let damaged_at = |output: &Output, name: &str| {
        let recording = output.rows("recordings", name);
        let column = recording.column_by_name("damaged_at").unwrap().clone();
        let column = column.as_primitive::<Float64Type>();
        (column.null_count() == 0).then(|| column.value(0))
    };
    let kept = run(settings(place.path()));
    assert_eq!(damaged_at(&kept, "whole"), None);
    let at = damaged_at(&kept, "cut").unwrap();
    assert!((1.9..=2.0).contains(&at), "{at}");
    assert_eq!(kept.reasons("stump"), [(None, "decode_error")]);
    let refuse = TranscribeSettings {
        on_damage: OnDamage::Refuse,
        ..settings(place.path())
    };
    let refused = run(refuse);
    assert_eq!(damaged_at(&refused, "whole"), None);
    for name in ["cut", "stump"] {
        assert_eq!(refused.reasons(name), [(None, "decode_error")], "{name}");
    }
}

#[test]
fn settings_that_cannot_be_are_named() {
    let refused = |change: fn(&mut TranscribeSettings)| {
        let mut settings = TranscribeSettings::new(vec!["a.wav".into()], "model.nemo");
        change(&mut settings);
        Harness::<Transcribe>::new(settings).shape().unwrap_err().to_string()
    };
    assert!(refused(|s| s.max_window = 0.5).contains("`max_window` is 0.5"));
    assert!(refused(|s| s.max_window = f64::NAN).contains("max_window"));
    assert!(refused(|s| s.min_pause = 30.0).contains("min_pause"));
    assert!(refused(|s| s.batch_seconds = 0.0).contains("batch_seconds"));
    assert!(refused(|s| s.max_duration = 1e9).contains("max_duration"));
    assert!(refused(|s| s.max_gap = -1.0).contains("max_gap"));
    assert!(refused(|s| s.max_segment = f64::INFINITY).contains("max_segment"));
    assert!(refused(|s| s.beam = 65).contains("`beam` is 65"));
    assert!(refused(|s| s.chunk = 0.01).contains("`chunk` is 0.01"));
    assert!(refused(|s| s.chunk_left = -1.0).contains("`chunk_left`"));
    assert!(refused(|s| s.chunk = 301.0).contains("from 0.08 to 300 seconds"));
    assert!(refused(|s| s.chunk_left = 301.0).contains("`chunk_left` is 301"));
    assert!(refused(|s| s.chunk_right = f64::NAN).contains("`chunk_right`"));
    assert!(refused(|s| s.full_attention = -1.0).contains("`full_attention`"));
    assert!(refused(|s| s.attention_context = 0).contains("`attention_context` is 0"));
    for window in [WindowMethod::Chunked, WindowMethod::Full] {
        let mut settings = TranscribeSettings::new(vec!["a.wav".into()], "model.nemo");
        (settings.window, settings.beam) = (window, 2);
        let error = Harness::<Transcribe>::new(settings.clone()).shape().unwrap_err();
        assert!(error.to_string().contains("beam search"), "{error}");
        settings.beam = 1;
        assert!(Harness::<Transcribe>::new(settings).shape().is_ok());
    }
    assert!(refused(|s| s.lm_weight = -1.0).contains("lm_weight"));
    assert!(refused(|s| s.boost_weight = f64::NAN).contains("boost_weight"));
    assert!(refused(|s| s.device = "tpu".into()).contains("device"));
    assert!(refused(|s| (s.precision, s.device) = (Precision::Int8, "cuda".into())).contains("for the CPU"));
    assert!(refused(|s| (s.precision, s.weights) = (Precision::Bf16, Weights::F16)).contains("`weights`"));
    assert!(refused(|s| s.model = PathBuf::new()).contains("names no model"));
    assert!(refused(|s| s.model = "hf://a/b".into()).contains("hub"));
    assert!(refused(|s| s.input.clear()).contains("names no recording"));
    // What is to be listed is looked for when the plan is made.
    let gone = TranscribeSettings::new(vec!["no/such/*.wav".into()], model());
    let error = Harness::<Transcribe>::new(gone).run().unwrap_err().to_string();
    assert!(error.contains("nothing fits"), "{error}");
}

/// By a table in which the first word that is heard is a filler, and the second a number.
#[test]
fn numbers_and_fillers_are_in_the_style_that_is_asked_for() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(
        place.path().join("a.flac"),
        hindi(&Storage::default(), "rec_hi_0001_000.flac"),
    )
    .unwrap();
    let hindi = TranscribeSettings {
        languages: vec!["hi".to_owned()],
        ..settings(place.path())
    };
    let words = |settings: &TranscribeSettings| {
        let segments = read_segments(&run(settings.clone()).rows("segments", "a")).unwrap();
        let words = segments.into_iter().flat_map(|segment| segment.words);
        words.collect::<Vec<_>>()
    };
    let heard = words(&hindi);
    let core = |word: &str| word.trim_matches(['।', ',', '.', '?']).to_owned();
    let (filler, number) = (core(&heard[0].word), core(&heard[1].word));
    let table = place.path().join("table.yaml");
    let text = format!("language: hi\ncardinals: {{0: {number}}}\nfillers: [{filler}]\n");
    std::fs::write(&table, text).unwrap();
    let styled = TranscribeSettings {
        numbers: NumberStyle::Digits,
        fillers: FillerUse::Drop,
        text_table: table.clone(),
        ..hindi.clone()
    };
    let found = words(&styled);
    let mut expected: Vec<_> = heard.into_iter().filter(|word| core(&word.word) != filler).collect();
    for word in &mut expected {
        if core(&word.word) == number {
            word.word = word.word.replace(&number, "0");
        }
    }
    assert_eq!(found, expected);
    assert_ne!(Transcribe::identity(&hindi), Transcribe::identity(&styled));
    let unused = TranscribeSettings {
        text_table: table.clone(),
        ..hindi.clone()
    };
    assert_eq!(Transcribe::identity(&hindi), Transcribe::identity(&unused));
    std::fs::write(&table, "language: hi\n").unwrap();
    let error = Harness::<Transcribe>::new(styled.clone())
        .run()
        .unwrap_err()
        .to_string();
    assert!(error.contains("table.yaml") && error.contains("cardinals"), "{error}");
    let refused = |text: &str| {
        std::fs::write(&table, text).unwrap();
        let error = Harness::<Transcribe>::new(styled.clone()).run().unwrap_err();
        error.to_string()
    };
    let error = refused("language: en\ncardinals: {0: zero}\n");
    assert!(error.contains("is a table of `en`, not of `hi`"), "{error}");
    // What is not a table is not quoted whole.
    let error = refused(&"no table ".repeat(1000));
    assert!(error.contains("table.yaml") && error.len() < 500, "{error}");
    for languages in [&["fr"][..], &[], &["en", "de"]] {
        let wrong = TranscribeSettings {
            languages: languages.iter().map(|&code| code.to_owned()).collect(),
            text_table: PathBuf::new(),
            ..styled.clone()
        };
        let error = wrong.check().unwrap_err().to_string();
        assert!(error.contains("de, en, es, hi"), "{error}");
    }
}

#[test]
fn where_things_are_and_batches_are_no_part_of_the_key() {
    let one = TranscribeSettings::new(vec!["a".into()], "m.nemo");
    let other = TranscribeSettings {
        batch_seconds: 7.0,
        device: "cuda".into(),
        ..TranscribeSettings::new(vec!["b".into()], "n.nemo")
    };
    assert_eq!(Transcribe::identity(&one), Transcribe::identity(&other));
    let windows = TranscribeSettings {
        max_window: 10.0,
        ..one.clone()
    };
    assert_ne!(Transcribe::identity(&one), Transcribe::identity(&windows));
    let split = TranscribeSettings {
        channels: ChannelUse::Split,
        ..one.clone()
    };
    assert_ne!(Transcribe::identity(&one), Transcribe::identity(&split));
}

#[test]
fn the_way_of_long_audio_is_part_of_the_key_with_the_settings_that_it_has() {
    let vad = TranscribeSettings::new(vec!["a".into()], "m.nemo");
    let with = |change: fn(&mut TranscribeSettings)| {
        let mut settings = vad.clone();
        change(&mut settings);
        Transcribe::identity(&settings)
    };
    let identity = Transcribe::identity(&vad);
    assert_eq!(with(|s| s.window = WindowMethod::Vad), identity);
    assert_eq!(with(|s| (s.chunk, s.full_attention) = (3.0, 4.0)), identity);
    for name in [
        "channels",
        "on_damage",
        "vad",
        "max_window",
        "min_pause",
        "max_duration",
        "max_gap",
        "max_segment",
        "weights",
    ] {
        assert!(identity.get(name).is_some(), "{name}: keys of voice activity stay");
    }
    assert_eq!(identity.as_object().unwrap().len(), 9);
    let all = [
        identity,
        with(|s| s.window = WindowMethod::Chunked),
        with(|s| (s.window, s.chunk) = (WindowMethod::Chunked, 3.0)),
        with(|s| (s.window, s.chunk_left) = (WindowMethod::Chunked, 3.0)),
        with(|s| (s.window, s.chunk_right) = (WindowMethod::Chunked, 3.0)),
        with(|s| s.window = WindowMethod::Full),
        with(|s| (s.window, s.full_attention) = (WindowMethod::Full, 3.0)),
        with(|s| (s.window, s.attention_context) = (WindowMethod::Full, 3)),
    ];
    for (index, one) in all.iter().enumerate() {
        assert!(all[index + 1..].iter().all(|other| other != one), "{one}");
    }
    let chunked = with(|s| (s.window, s.max_window) = (WindowMethod::Chunked, 7.0));
    assert_eq!(chunked, all[1], "windows between pauses are not those of chunks");
}

#[test]
fn the_precision_is_part_of_the_key_where_it_is_not_f32() {
    let of = |precision| {
        let mut settings = TranscribeSettings::new(vec!["a".into()], "m.nemo");
        settings.precision = precision;
        Transcribe::identity(&settings)
    };
    let [plain, bf16, int8] = [Precision::F32, Precision::Bf16, Precision::Int8].map(of);
    assert!(plain.get("precision").is_none(), "keys of f32 stay");
    assert!(bf16["precision"] == "bf16" && int8["precision"] == "int8");
}

#[test]
fn beam_search_and_fusion_are_part_of_the_key_where_they_are_used() {
    let plain = TranscribeSettings::new(vec!["a".into()], "m.nemo");
    let identity = Transcribe::identity(&plain);
    assert!(identity.get("decoding").is_none(), "keys of greedy search stay");
    let unused = TranscribeSettings {
        beam: 1,
        lm_weight: 0.9,
        boost_weight: 0.9,
        ..plain.clone()
    };
    assert_eq!(Transcribe::identity(&unused), identity);
    let beam = TranscribeSettings {
        beam: 4,
        ..plain.clone()
    };
    let lm = TranscribeSettings {
        lm: "a.arpa".into(),
        ..plain.clone()
    };
    let boost = TranscribeSettings {
        boost: "a.txt".into(),
        ..plain.clone()
    };
    let heavier = TranscribeSettings {
        lm_weight: 0.9,
        ..lm.clone()
    };
    let identities = [&plain, &beam, &lm, &boost, &heavier].map(Transcribe::identity);
    for (index, one) in identities.iter().enumerate() {
        assert!(identities[index + 1..].iter().all(|other| other != one), "{one}");
    }
    // Where it lies is recognised by its bytes, which are digested as those of the model.
    let moved = TranscribeSettings {
        lm: "b.arpa".into(),
        ..plain
    };
    assert_eq!(Transcribe::identity(&moved), Transcribe::identity(&lm));
}

#[test]
fn recordings_are_decoded_with_phrases_and_a_language_model() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(
        place.path().join("a.flac"),
        hindi(&Storage::default(), "rec_hi_0001_000.flac"),
    )
    .unwrap();
    let (lm, phrases) = (place.path().join("lm.arpa"), place.path().join("phrases.txt"));
    std::fs::write(
        &lm,
        "\\data\\\nngram 1=4\n\n\\1-grams:\n-0.5\t<unk>\n-99\t<s>\n-1\t</s>\n-0.5\td\n\n\\end\\\n",
    )
    .unwrap();
    std::fs::write(&phrases, "want\n").unwrap();
    let with = |change: fn(&mut TranscribeSettings)| {
        let mut settings = settings(&place.path().join("a.flac"));
        (settings.beam, settings.lm, settings.boost) = (4, lm.clone(), phrases.clone());
        change(&mut settings);
        Harness::<Transcribe>::new(settings).run()
    };
    for beam in [
        |_: &mut TranscribeSettings| {},
        |settings: &mut TranscribeSettings| settings.beam = 0,
    ] {
        let output = with(beam).unwrap();
        let segments = read_segments(&output.rows("segments", "a")).unwrap();
        let words = segments.iter().flat_map(|segment| &segment.words);
        let confidences: Vec<f64> = words.map(|word| word.confidence.unwrap()).collect();
        assert!(!confidences.is_empty());
        assert!(
            confidences
                .iter()
                .all(|confidence| (-1e-6..=1.0 + 1e-6).contains(confidence))
        );
    }
    let error = with(|settings| settings.lm = "no/such.arpa".into())
        .unwrap_err()
        .to_string();
    assert!(error.contains("no/such.arpa"), "{error}");
    std::fs::write(&lm, "no language model\n").unwrap();
    let error = with(|settings| settings.beam = 2).unwrap_err().to_string();
    assert!(error.contains("lm.arpa: line 1: no ARPA file"), "{error}");
}

#[test]
fn coverage_is_in_the_row_and_in_the_key_where_it_is_asked_for() {
    use crate::coverage::{CoverageMode, SuspectUse};
    let place = tempfile::tempdir().unwrap();
    std::fs::write(
        place.path().join("a.flac"),
        hindi(&Storage::default(), "rec_hi_0001_000.flac"),
    )
    .unwrap();
    let off = settings(place.path());
    let with = |coverage: CoverageMode, suspects: SuspectUse| TranscribeSettings {
        coverage,
        suspects,
        ..off.clone()
    };
    let keep = SuspectUse::Keep;
    let all = [
        off.clone(),
        with(CoverageMode::Measure, keep),
        with(CoverageMode::Recover, keep),
        with(CoverageMode::Recover, SuspectUse::Drop),
    ];
    let identities = all.each_ref().map(Transcribe::identity);
    assert!(identities[0].get("coverage").is_none(), "keys without coverage stay");
    for (index, one) in identities.iter().enumerate() {
        assert!(identities[index + 1..].iter().all(|other| other != one), "{one}");
    }
    let refused = with(CoverageMode::Off, SuspectUse::Drop).check().unwrap_err();
    assert!(refused.to_string().contains("coverage"), "{refused}");
    let rows = |settings: &TranscribeSettings| {
        let output = run(settings.clone());
        let recording = output.rows("recordings", "a");
        (
            recording.num_columns(),
            read_metadata(&recording).unwrap().coverage,
            output.rows("segments", "a"),
        )
    };
    let (columns, none, segments) = rows(&all[0]);
    assert_eq!(none, None);
    let (with_coverage, coverage, same) = rows(&all[1]);
    let coverage = coverage.unwrap();
    assert_eq!((with_coverage, same), (columns + 5, segments));
    assert!(
        (0.5..=1.0).contains(&coverage.share) && coverage.speech_s > 1.0,
        "{coverage:?}"
    );
}
