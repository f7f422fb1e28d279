//! Datasets of Hugging Face.

use std::fs::{self, File};
use std::path::Path;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::Float64Type;
use flow_corpus::columns;
use flow_corpus::written_set::REJECTS;
use flow_kind::StageError;
use flow_manifest::write::Write;
use flow_runtime::harness::{Harness, Output};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};

use super::data::{layout, read, read_with, rows_of, write_as};

fn write(inputs: &[(&str, &Output)], out: &Path, more: &str) -> Result<(), StageError> {
    write_as("huggingface", inputs, out, more)
}

fn parquet(path: &Path) -> ParquetRecordBatchReaderBuilder<File> {
    ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap()
}

/// Whole recordings, a part of one, and recordings in a tar and in another dataset come back with their texts and samples; whole
/// recordings have the bytes that were read.
#[test]
fn what_is_written_is_read_again_with_every_sample() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (name, split)) in [("lhotse", ""), ("hub", "train"), ("shar", ""), ("saved", "")]
        .into_iter()
        .enumerate()
    {
        let rows = read(&layout(name), split);
        let out = folder.path().join(number.to_string());
        write(&[("master", &rows)], &out, "").unwrap();
        let again = read_with(&out, "", &["segment_id=segment_id"]);
        let (before, after) = (rows_of(&rows), rows_of(&again));
        assert!(before.len() >= 2 && before == after, "{name}");
        // A dataset of this dataset holds the same.
        let twice = folder.path().join(format!("{number}-twice"));
        write(&[("master", &again)], &twice, "").unwrap();
        let audio = |out: &Path| {
            let file = parquet(&out.join("data/train-00000-of-00001.parquet"));
            let rows: Vec<RecordBatch> = file.build().unwrap().map(Result::unwrap).collect();
            let audio = |batch: &RecordBatch| {
                let audio = batch.column(0).as_struct().column(0).clone();
                audio
                    .as_binary::<i32>()
                    .iter()
                    .map(|bytes| bytes.unwrap().to_vec())
                    .collect::<Vec<_>>()
            };
            rows.iter().flat_map(audio).collect::<Vec<_>>()
        };
        assert_eq!(audio(&out), audio(&twice), "{name}");
    }
    let stored = fs::read(layout("wav/b.flac")).unwrap();
    let dataset = fs::read(folder.path().join("0/data/train-00000-of-00001.parquet")).unwrap();
    assert!(
        dataset.windows(stored.len()).any(|bytes| bytes == stored),
        "b.flac was changed"
    );
}

#[test]
fn the_card_and_the_metadata_are_those_of_the_hub() {
    let folder = tempfile::tempdir().unwrap();
    let rows = read(&layout("lhotse"), "");
    write(
        &[("master", &rows), ("train", &rows), ("val", &rows)],
        folder.path(),
        ", license: cc-by-4.0",
    )
    .unwrap();
    let size = |split: &str| {
        let path = folder.path().join(format!("data/{split}-00000-of-00001.parquet"));
        path.metadata().unwrap().len()
    };
    let card = fs::read_to_string(folder.path().join("README.md")).unwrap();
    let bytes = card.split("num_bytes: ").nth(1).unwrap().split('\n').next().unwrap();
    let both = 2 * bytes.parse::<u64>().unwrap();
    let expected = format!(
        "---
language: [\"hi\"]
license: cc-by-4.0
task_categories:
- automatic-speech-recognition
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: validation
    path: data/validation-*
dataset_info:
  features:
  - name: audio
    dtype:
      audio:
        sampling_rate: 16000
  - name: text
    dtype: string
  - name: duration
    dtype: float64
  - name: lang
    dtype: string
  - name: segment_id
    dtype: string
  - name: shard_id
    dtype: string
  - name: source
    dtype: string
  splits:
  - name: train
    num_bytes: {bytes}
    num_examples: 2
  - name: validation
    num_bytes: {bytes}
    num_examples: 2
  download_size: {}
  dataset_size: {both}
---

| split | language | rows | hours |
|---|---|---|---|
| train | hi | 2 | 0.00 |
| validation | hi | 2 | 0.00 |

`audio` holds each recording as it was stored; a part of a longer recording is FLAC of 16 kHz. `duration` is in seconds.
",
        size("train") + size("validation")
    );
    assert_eq!(card, expected);
    let file = parquet(&folder.path().join("data/train-00000-of-00001.parquet"));
    let metadata = file.schema().metadata()["huggingface"].clone();
    let value = |dtype: &str| json!({ "dtype": dtype, "_type": "Value" });
    let features = json!({
        "audio": { "sampling_rate": 16000, "_type": "Audio" }, "text": value("string"), "duration": value("float64"),
        "lang": value("string"), "segment_id": value("string"), "shard_id": value("string"), "source": value("string"),
    });
    assert_eq!(
        serde_json::from_str::<Value>(&metadata).unwrap(),
        json!({ "info": { "features": features } })
    );
    let names: Vec<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(
        names
            .iter()
            .filter(|name| !name.starts_with("."))
            .all(|name| ["README.md", "data", "flow.json"].contains(&name.as_str())),
        "{names:?}"
    );
}

#[test]
fn what_cannot_be_published_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let rows = read(&layout("lhotse"), "");
    let failure = |inputs: &[(&str, &Output)], more: &str| {
        let error = write(inputs, &out, more).unwrap_err();
        format!("{error:?}")
    };
    for (more, expected) in [
        (", license: \"a\\nb: c\"", "identifier of the hub"),
        (", extra_columns: [text]", "manifests have anyway"),
        (", extra_columns: [nothing]", "has no column `nothing`"),
    ] {
        let found = failure(&[("train", &rows)], more);
        assert!(found.contains(expected), "{more}: {found}");
    }
    // Everything gone: a mistake.
    let recording = folder.path().join("a.flac");
    fs::copy(layout("wav/a.flac"), &recording).unwrap();
    let manifest = folder.path().join("all.jsonl");
    fs::write(
        &manifest,
        json!({ "audio_filepath": recording, "text": "x", "lang": "hi", "segment_id": "the row" }).to_string(),
    )
    .unwrap();
    let rows = read(&manifest, "");
    fs::remove_file(&recording).unwrap();
    let found = failure(&[("train", &rows)], "");
    assert!(found.contains("1 of 1 rows cannot be read: 1 missing_audio"), "{found}");
    let found = failure(&[("train", &rows)], ", max_unreadable: 1.0");
    assert!(found.contains("1 missing_audio"), "{found}");
    fs::write(&recording, b"no sound").unwrap();
    let found = failure(&[("train", &rows)], "");
    assert!(found.contains("1 decode_error"), "{found}");
    assert!(!out.join("README.md").exists());
    write(&[("train", &rows)], &out, ", max_unreadable: 1.0, allow_empty: true").unwrap();
    assert!(out.join("README.md").exists());
}

/// Rows whose recordings are gone or damaged after they were read, first, last and beside others of their batch, are left out
/// and listed; the others have their own recordings.
#[test]
fn rows_without_a_readable_recording_are_rejects() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = folder.path().join("all.jsonl");
    let file = |number: usize| folder.path().join(format!("r{number}.flac"));
    let line = |number: usize| {
        fs::copy(layout(["wav/a.flac", "wav/b.flac"][number % 2]), file(number)).unwrap();
        json!({ "audio_filepath": file(number), "text": format!("words {number}"), "lang": "hi", "segment_id": format!("r{number}") }).to_string()
    };
    fs::write(&manifest, (0..9).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let rows = read(&manifest, "");
    let all = rows_of(&rows);
    fs::remove_file(file(0)).unwrap();
    fs::write(file(5), b"no sound").unwrap();
    fs::write(file(8), b"").unwrap();
    let out = folder.path().join("out");
    write(&[("master", &rows)], &out, "").unwrap();
    let mut expected = all;
    for at in [8, 5, 0] {
        expected.remove(at);
    }
    assert_eq!(rows_of(&read_with(&out, "", &["segment_id=segment_id"])), expected);
    let card = fs::read_to_string(out.join("README.md")).unwrap();
    assert!(
        card.contains("num_examples: 6") && card.contains("| train | hi | 6 |"),
        "{card}"
    );
    let rejects: Vec<RecordBatch> = parquet(&out.join(REJECTS))
        .build()
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let found: Vec<[String; 4]> = rejects
        .iter()
        .flat_map(|batch| {
            (0..batch.num_rows()).map(|row| {
                ["segment_id", "stage", "reason", "class"]
                    .map(|name| columns::text(batch, name).unwrap().value(row).to_owned())
            })
        })
        .collect();
    let reject = |id: &str, reason: &str| [id, "harness", reason, "fault"].map(str::to_owned);
    assert_eq!(
        found,
        [
            reject("r0", "missing_audio"),
            reject("r5", "decode_error"),
            reject("r8", "decode_error")
        ]
    );
    // The next set has no such rows, and so no such file.
    let good = folder.path().join("good.jsonl");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&good, text.lines().nth(1).unwrap()).unwrap();
    write(&[("master", &read(&good, ""))], &out, "").unwrap();
    assert!(!out.join(REJECTS).exists());
}

/// Damage is found in recordings whose rows say how long they are, so that nothing has read them before: cut and garbled ones of
/// each kind of format are rejects, and all others are written. `path` names recordings without reading them to their ends.
#[test]
fn damaged_recordings_whose_rows_have_durations_are_rejects() {
    let folder = tempfile::tempdir().unwrap();
    let tone = |ending: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../audio/tests/data/tone.{ending}"));
    let flac = fs::read(layout("wav/b.flac")).unwrap();
    let mut wav =
        b"RIFF\x24\x7d\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data\0\x7d\0\0".to_vec();
    wav.extend((0..32_000).map(|at| (at % 251) as u8));
    let read_tone = |ending: &str| fs::read(tone(ending)).unwrap();
    let cut = |bytes: &[u8]| bytes[..bytes.len() * 6 / 10].to_vec();
    let garbled = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        let middle = bytes.len() / 2;
        bytes[middle..middle + 40].fill(0x55);
        bytes
    };
    let (ogg, opus, mp3, m4a) = (read_tone("ogg"), read_tone("opus"), read_tone("mp3"), read_tone("m4a"));
    let mut lines = Vec::new();
    let mut add = |id: &str, bytes: &[u8], seconds: f64| {
        let file = folder.path().join(id);
        fs::write(&file, bytes).unwrap();
        let row = json!({ "audio_filepath": file, "text": "x", "lang": "hi", "duration": seconds, "segment_id": id });
        lines.push(row.to_string());
    };
    add("good.flac", &flac, 0.75);
    add("cut.flac", &cut(&flac), 0.75);
    add("garbled.flac", &garbled(&flac), 0.75);
    add("good.wav", &wav, 1.0);
    add("cut.wav", &cut(&wav), 1.0);
    add("good.ogg", &ogg, 1.0);
    add("cut.ogg", &cut(&ogg), 1.0);
    add("garbled.ogg", &garbled(&ogg), 1.0);
    add("good.opus", &opus, 1.0);
    add("cut.opus", &cut(&opus), 1.0);
    add("good.mp3", &mp3, 1.0);
    add("cut.mp3", &cut(&mp3), 1.0);
    add("good.m4a", &m4a, 1.0);
    add("cut.m4a", &cut(&m4a), 1.0);
    add("not_audio.flac", b"no sound", 0.75);
    let all = folder.path().join("all.jsonl");
    fs::write(&all, lines.join("\n")).unwrap();
    let rows = read(&all, "");
    let ids = |rows: &RecordBatch| {
        let ids = columns::text(rows, "segment_id").unwrap();
        ids.iter().map(|id| id.unwrap().to_owned()).collect::<Vec<_>>()
    };
    let named = ids(&rows.all_rows("rows"));
    assert_eq!(named.len(), lines.len());
    let (good, bad): (Vec<_>, Vec<_>) = named.into_iter().partition(|id| id.starts_with("good"));
    for (format, of_split) in [("huggingface", ""), ("shar", "train")] {
        let out = folder.path().join(format);
        write_as(format, &[("master", &rows)], &out, ", max_unreadable: 1.0").unwrap();
        let columns: &[&str] = if of_split.is_empty() {
            &["segment_id=segment_id"]
        } else {
            &[]
        };
        let written = read_with(&out.join(of_split), "", columns);
        assert_eq!(ids(&written.all_rows("rows")), good, "{format}");
        let rejects = parquet(&out.join(REJECTS)).build().unwrap().map(Result::unwrap);
        assert_eq!(
            rejects.flat_map(|batch| ids(&batch)).collect::<Vec<_>>(),
            bad,
            "{format}"
        );
    }
    let out = folder.path().join("paths");
    write(&[("master", &rows)], &out, ", audio_of_rows: path").unwrap();
    let rejects = parquet(&out.join(REJECTS)).build().unwrap().map(Result::unwrap);
    let rejected: Vec<String> = rejects.flat_map(|batch| ids(&batch)).collect();
    assert!(
        rejected.contains(&"not_audio.flac".to_owned()) && !rejected.iter().any(|id| good.contains(id)),
        "{rejected:?}"
    );
}

/// Recordings that are files stay where they are; a part of one and a member of a tar are in the dataset.
#[test]
fn paths_take_the_place_of_recordings_that_are_files() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (name, split, files)) in [("lhotse", "", 1), ("shar", "", 0)].into_iter().enumerate() {
        let rows = read(&layout(name), split);
        let out = folder.path().join(number.to_string());
        write(&[("master", &rows)], &out, ", audio_of_rows: path").unwrap();
        let dataset = parquet(&out.join("data/train-00000-of-00001.parquet"));
        let written: Vec<RecordBatch> = dataset.build().unwrap().map(Result::unwrap).collect();
        let mut without = 0;
        for batch in &written {
            let audio = batch.column(0).as_struct();
            for row in 0..batch.num_rows() {
                if audio.column(0).is_null(row) {
                    let path = Path::new(audio.column(1).as_string::<i32>().value(row));
                    assert!(path.is_absolute() && path.is_file(), "{}", path.display());
                    without += 1;
                }
            }
        }
        assert_eq!(without, files, "{name}");
        let again = rows_of(&read_with(&out, "", &["segment_id=segment_id"]));
        assert!(rows_of(&rows) == again, "{name}");
    }
    let error = Harness::<Write>::from_yaml("{out: x, audio_of_rows: path}")
        .and_then(|harness| {
            let rows = read(&layout("lhotse"), "");
            harness.input("master", rows.shape.outputs[0].schema.clone()).shape()
        })
        .unwrap_err();
    assert!(format!("{error:?}").contains("audio_of_rows"), "{error:?}");
}

/// Needs a Python that has `datasets` and `torchcodec`; `FLOW_TEST_PYTHON` names it.
#[test]
#[ignore = "needs a Python with datasets and torchcodec"]
fn datasets_itself_loads_what_is_written() {
    const LOAD: &str = "import datasets, hashlib, json, sys
data = datasets.load_dataset(sys.argv[1], cache_dir=sys.argv[2])
rate = data['train'].features['audio'].sampling_rate
samples = [r['audio'].get_all_samples().data.shape[-1] for r in data['train']]
data = data.cast_column('audio', datasets.Audio(decode=False))
rows = {s: [[r['text'], r['lang'], r['segment_id'], hashlib.sha256(r['audio']['bytes']).hexdigest()] for r in d] for s, d in data.items()}
print(json.dumps([rate, rows, samples]))";
    let folder = tempfile::tempdir().unwrap();
    let rows = read(&layout("lhotse"), "");
    let out = folder.path().join("out");
    write(&[("train", &rows), ("val", &rows)], &out, "").unwrap();
    let python = std::env::var("FLOW_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let mut load = std::process::Command::new(&python);
    let output = load
        .args(["-c", LOAD])
        .args([&out, &folder.path().join("cache")])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{python}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let digest = hex::encode(<sha2::Sha256 as sha2::Digest>::digest(
        fs::read(layout("wav/b.flac")).unwrap(),
    ));
    for split in ["train", "validation"] {
        let rows = &found[1][split];
        assert_eq!(rows[1], json!(["do", "hi", "u2", digest]));
        assert_eq!(
            rows[0].as_array().unwrap()[..3],
            [json!("ek"), json!("hi"), json!("u1")]
        );
    }
    assert_eq!(found[0], 16_000);
    // Cut out of a recording or as it was: decoded to the end.
    let rows = rows.all_rows("rows");
    let seconds = rows.column_by_name("duration").unwrap().as_primitive::<Float64Type>();
    let samples = seconds
        .values()
        .iter()
        .map(|seconds| json!((seconds * 16e3).round() as u64));
    assert_eq!(found[2], Value::Array(samples.collect()));
}
