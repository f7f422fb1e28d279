//! Both formats of Lhotse: they have the same rows.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::sync::Arc;

use arrow::array::{RecordBatch, UInt32Array};
use arrow::compute::concat_batches;
use flow_audio::flac::{Samples, StreamInfo};
use flow_audio::flac_encode::{encode, encode_signal};
use flow_corpus::written_set::REJECTS;
use flow_kind::ROW;
use flow_runtime::harness::Output;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};

use super::*;
use crate::columns;
use crate::dataset_test_data::{layout, read, read_with, rows_of, with_texts, write_as, write_batch};

/// The files below a folder, without the description of the set.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
            match path.is_dir() {
                true => folders.push(path),
                false if name == "flow.json" || name == ".flow-lock" => {}
                false => assert!(found.insert(name, fs::read(&path).unwrap()).is_none()),
            }
        }
    }
    found
}

fn items(packed: &[u8]) -> Vec<Value> {
    let mut text = String::new();
    flate2::read::GzDecoder::new(packed).read_to_string(&mut text).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// `extra` of each row.
fn extras(output: &Output) -> Vec<Value> {
    let rows = output.all_rows("rows");
    let extras = columns::text(&rows, "extra").unwrap().iter();
    extras
        .map(|extra| serde_json::from_str(extra.unwrap_or("null")).unwrap())
        .collect()
}

#[test]
fn shar_is_read_again_with_every_sample() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (name, split)) in [("lhotse", ""), ("hub", "train"), ("shar", ""), ("saved", "")]
        .into_iter()
        .enumerate()
    {
        let rows = read(&layout(name), split);
        let out = folder.path().join(number.to_string());
        write_as("shar", &[("train", &rows), ("val", &rows)], &out, ", shard_rows: 1").unwrap();
        let count = rows.all_rows("rows").num_rows();
        let written = files(&out);
        assert_eq!(written.len(), 4 * count, "{name}: {:?}", written.keys());
        for split in ["train", "validation"] {
            let again = read(&out.join(split), "");
            assert!(count >= 2 && rows_of(&rows) == rows_of(&again), "{name}");
        }
        // The same rows give the same bytes, which are there once the set is written again.
        let twice = folder.path().join(format!("{number}-twice"));
        write_as("shar", &[("train", &rows), ("val", &rows)], &twice, ", shard_rows: 1").unwrap();
        assert!(files(&twice) == written, "{name}");
    }
    let written = files(&folder.path().join("0"));
    let stored = fs::read(layout("wav/b.flac")).unwrap();
    let tar = &written["train/recording.000001.tar"];
    assert!(
        tar.windows(stored.len()).any(|bytes| bytes == stored),
        "b.flac was changed"
    );
    let cut = &items(&written["train/cuts.000000.jsonl.gz"])[0];
    let recording = json!({
        "id": "u1", "sources": [{"type": "shar", "channels": [0], "source": ""}], "sampling_rate": 16000, "num_samples": 4800,
        "duration": 0.3, "channel_ids": [0],
    });
    let supervision = json!({
        "id": "u1", "recording_id": "u1", "start": 0.0, "duration": 0.3, "channel": 0, "text": "ek", "language": "hi",
        "speaker": "s1", "custom": {"k": 1, "shard_id": "x_supervisions_train.jsonl", "source": "manifest"},
    });
    let expected = json!({
        "id": "u1", "start": 0.0, "duration": 0.3, "channel": 0, "supervisions": [supervision], "recording": recording,
        "type": "MonoCut",
    });
    assert_eq!(*cut, expected);
    // Fewer shards: those of the last set are gone.
    let rows = read(&layout("lhotse"), "");
    let out = folder.path().join("0");
    write_as("shar", &[("train", &rows)], &out, "").unwrap();
    let names: Vec<String> = files(&out).into_keys().collect();
    assert_eq!(names, ["train/cuts.000000.jsonl.gz", "train/recording.000000.tar"]);
    assert_eq!(extras(&read(&out.join("train"), "")), extras(&rows));
}

/// Recordings that are not FLAC of one channel become that: at their own rate if they have one channel.
#[test]
fn recordings_of_shar_have_one_channel() {
    let folder = tempfile::tempdir().unwrap();
    let signal = |channels: u32, bits: u32| Samples {
        info: StreamInfo {
            sample_rate: 44_100,
            channels,
            bits,
            total_frames: 44_100,
            md5: [0; 16],
        },
        interleaved: (0..44_100 * channels as i32).map(|at| (at % 800 - 400) << 20).collect(),
    };
    fs::write(folder.path().join("two.flac"), encode(&signal(2, 16)).unwrap()).unwrap();
    // Of WAV with the samples of the FLAC.
    let mono = signal(1, 16);
    let mut wav = Vec::new();
    let data: Vec<u8> = mono
        .interleaved
        .iter()
        .flat_map(|sample| ((sample >> 16) as i16).to_le_bytes())
        .collect();
    for part in [
        &b"RIFF"[..],
        &(36 + data.len() as u32).to_le_bytes(),
        b"WAVEfmt ",
        &16u32.to_le_bytes(),
        &[1, 0, 1, 0],
        &44_100u32.to_le_bytes(),
        &88_200u32.to_le_bytes(),
        &[2, 0, 16, 0],
        b"data",
        &(data.len() as u32).to_le_bytes(),
        &data,
    ] {
        wav.extend_from_slice(part);
    }
    fs::write(folder.path().join("one.wav"), wav).unwrap();
    let manifest = folder.path().join("all.jsonl");
    let line = |file: &str| {
        json!({"audio_filepath": file, "text": "x", "lang": "hi", "duration": 1.0, "segment_id": file}).to_string()
    };
    fs::write(&manifest, [line("one.wav"), line("two.flac")].join("\n")).unwrap();
    let rows = read(&manifest, "");
    let out = folder.path().join("out");
    write_as("shar", &[("master", &rows)], &out, "").unwrap();
    let (before, after) = (rows_of(&rows), rows_of(&read(&out.join("train"), "")));
    assert!(before[0] == after[0]);
    // Half a step of 16 bits.
    let apart = before[1]
        .3
        .iter()
        .zip(&after[1].3)
        .map(|(x, y)| (x - y).abs())
        .fold(0.0, f32::max);
    assert!(
        before[1].3.len() == after[1].3.len() && apart <= 0.5 / 32_768.0,
        "{apart}"
    );
    let cuts = items(&files(&out)["train/cuts.000000.jsonl.gz"]);
    let rates: Vec<&Value> = cuts.iter().map(|cut| &cut["recording"]["sampling_rate"]).collect();
    assert_eq!(rates, [44_100, 16_000]);
    // Lhotse's manifests name the recordings as they are, so several channels are refused.
    let out = folder.path().join("manifests");
    write_as("lhotse", &[("master", &rows)], &out, "").unwrap();
    assert_eq!(reasons(&out), ["several_channels"]);
    assert_eq!(rows_of(&read(&out.join("cuts_train.jsonl.gz"), "")).len(), 1);
}

/// A corpus may be the input: what is there is not replaced, nor by a second attempt, and nothing is added to it.
#[test]
fn files_of_others_are_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let rows = read(&layout("lhotse"), "");
    for (format, name) in [("lhotse", "cuts_train.jsonl.gz"), ("shar", "train/notes.000000.txt")] {
        let out = folder.path().join(format);
        fs::create_dir_all(out.join(name).parent().unwrap()).unwrap();
        fs::write(out.join(name), "mine").unwrap();
        for _ in 0..2 {
            let error = write_as(format, &[("train", &rows)], &out, "").unwrap_err();
            let shown = format!("{error:?}");
            assert!(shown.contains(name.split('/').next().unwrap()), "{shown}");
            assert_eq!(files(&out), BTreeMap::from([(name.to_owned(), b"mine".to_vec())]));
        }
        fs::remove_file(out.join(name)).unwrap();
        write_as(format, &[("train", &rows)], &out, "").unwrap();
        write_as(format, &[("train", &rows)], &out, "").unwrap();
    }
}

/// A row of a recording whose header does not say how long it is has its own seconds; damaged FLAC is not copied.
#[test]
fn recordings_of_shar_are_as_long_as_their_rows_and_whole() {
    let folder = tempfile::tempdir().unwrap();
    let signal: Vec<f32> = (0..48_000).map(|at| (at % 97) as f32 / 200.0).collect();
    let whole = encode_signal(&signal, 16_000).unwrap();
    // As a program writes it into a pipe: the last 36 bits of these 8 bytes are the number of samples.
    let mut piped = whole.clone();
    piped[21] &= 0xf0;
    piped[22..26].fill(0);
    let mut zeroed = whole.clone();
    let middle = zeroed.len() / 2;
    zeroed[middle..middle + 200].fill(0);
    let truncated = &whole[..middle];
    let manifest = folder.path().join("all.jsonl");
    let mut lines = Vec::new();
    for (name, bytes, seconds) in [
        ("part", &piped[..], 1.0),
        ("all", &piped, 3.0),
        ("zeroed", &zeroed, 3.0),
        ("truncated", truncated, 3.0),
    ] {
        let path = folder.path().join(format!("{name}.flac"));
        fs::write(&path, bytes).unwrap();
        lines.push(
            json!({"audio_filepath": path, "text": "x", "lang": "hi", "duration": seconds, "segment_id": name})
                .to_string(),
        );
    }
    fs::write(&manifest, lines.join("\n")).unwrap();
    let rows = read(&manifest, "");
    assert_eq!(rows.all_rows("rows").num_rows(), 4);
    let out = folder.path().join("out");
    write_as("shar", &[("master", &rows)], &out, ", max_unreadable: 0.9").unwrap();
    assert_eq!(reasons(&out), ["decode_error"; 2]);
    let cuts = items(&files(&out)["train/cuts.000000.jsonl.gz"]);
    let lengths: Vec<(&Value, &Value)> = cuts
        .iter()
        .map(|cut| (&cut["id"], &cut["recording"]["num_samples"]))
        .collect();
    assert_eq!(
        lengths,
        [(&json!("part"), &json!(16_000)), (&json!("all"), &json!(48_000))]
    );
}

fn reasons(out: &Path) -> Vec<String> {
    let rejects = ParquetRecordBatchReaderBuilder::try_new(fs::File::open(out.join(REJECTS)).unwrap()).unwrap();
    let rejects: Vec<RecordBatch> = rejects.build().unwrap().map(Result::unwrap).collect();
    let reasons = |batch: &RecordBatch| -> Vec<String> {
        let reasons = columns::text(batch, "reason").unwrap();
        reasons.iter().map(|reason| reason.unwrap().to_owned()).collect()
    };
    rejects.iter().flat_map(reasons).collect()
}

#[test]
fn manifests_of_lhotse_name_each_recording_once() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = folder.path().join("all.jsonl");
    let line = |file: &str, offset: f64, duration: f64, id: &str| {
        json!({"audio_filepath": layout(file), "offset": offset, "duration": duration, "text": format!("words of {id}"), "lang": "hi",
               "segment_id": id, "gender": "F", "tags": {"width": 3}})
        .to_string()
    };
    // b.flac has 0.75 s: the second row ends a little after it, and the last one is all of it, whose duration was rounded.
    let lines = [
        line("wav/b.flac", 0.1, 0.2, "one"),
        line("wav/a.flac", 0.25, 0.25, "two"),
        line("wav/b.flac", 0.5, 0.3, "three"),
        line("wav/b.flac", 0.0, 0.7, "four"),
    ];
    fs::write(&manifest, lines.join("\n")).unwrap();
    let rows = read(&manifest, "");
    let out = folder.path().join("out");
    write_as("lhotse", &[("master", &rows)], &out, "").unwrap();
    let written = files(&out);
    let recordings = items(&written["recordings_train.jsonl.gz"]);
    let recording = |name: &str, samples: u32| {
        let source = fs::canonicalize(layout(&format!("wav/{name}.flac"))).unwrap();
        let found = recordings.iter().find(|item| item["id"] == name).unwrap();
        assert_eq!(
            fs::canonicalize(found["sources"][0]["source"].as_str().unwrap()).unwrap(),
            source
        );
        assert_eq!(found["num_samples"], samples);
        assert_eq!(found["duration"], f64::from(samples) / 16_000.0);
    };
    recording("a", 8_000);
    recording("b", 12_000);
    assert_eq!(recordings.len(), 2);
    let supervisions = items(&written["supervisions_train.jsonl.gz"]);
    assert_eq!(
        (&supervisions[2]["start"], &supervisions[2]["duration"]),
        (&json!(0.5), &json!(0.25))
    );
    assert_eq!(
        (&supervisions[3]["start"], &supervisions[3]["duration"]),
        (&json!(0.0), &json!(0.75))
    );
    assert_eq!(supervisions[0]["gender"], "F");
    // Lhotse would take this for an image.
    assert_eq!(supervisions[0]["custom"]["tags"], r#"{"width":3}"#);
    for file in ["cuts_train.jsonl.gz", "supervisions_train.jsonl.gz"] {
        let again = read(&out.join(file), "");
        assert!(rows_of(&again) == rows_of(&rows), "{file}");
    }
    // Recordings in a tar are an error that says what to do.
    let error = write_as("lhotse", &[("master", &read(&layout("shar"), ""))], &out, "").unwrap_err();
    let error = format!("{error:?}");
    assert!(
        error.contains("recording.000000.tar") && error.contains("format: shar"),
        "{error}"
    );
}

/// Rows as they should not be: names that are no names of files, that come twice, or are long; texts of control characters.
fn hostile() -> (RecordBatch, Vec<&'static str>, Vec<&'static str>) {
    let rows = read(&layout("lhotse"), "").all_rows("rows");
    let rows = concat_batches(&rows.schema(), std::iter::repeat_n(&rows, 5)).unwrap();
    let long: &'static str = Box::leak("ह".repeat(300).into_boxed_str());
    let ids = vec![
        "same",
        "same",
        "",
        "../../etc/x",
        "a//./b",
        "/root\0\\\n",
        long,
        "same-2",
        "dot.",
        "🎤 x.tar.gz",
    ];
    let texts = vec![
        "two\nlines\r\n",
        "NUL \0 within",
        "\u{2028}\u{85}\u{feff}",
        "\"quotes\" \\ and / {}",
        "नमस्ते 🎤",
        "\u{1b}[31m",
        "\u{202e}x",
        "tab\t",
        "'",
        "\u{fffd}",
    ];
    let rows = with_texts(&with_texts(&rows, "segment_id", &ids), "text", &texts);
    let mut arrays = rows.columns().to_vec();
    arrays[rows.schema().index_of(ROW).unwrap()] = Arc::new(UInt32Array::from_iter_values(0..10));
    (RecordBatch::try_new(rows.schema(), arrays).unwrap(), ids, texts)
}

#[test]
fn hostile_names_and_texts_survive() {
    let folder = tempfile::tempdir().unwrap();
    let (rows, ids, texts) = hostile();
    let texts_of = |read: &Output| -> Vec<String> { rows_of(read).into_iter().map(|(text, ..)| text).collect() };
    for (format, manifest, names) in [
        (
            "shar",
            "train",
            ["same", "same-2", "_", "_/_/etc/x", "a/_/_/b", "_/root___"],
        ),
        (
            "lhotse",
            "cuts_train.jsonl.gz",
            ["same", "same-2", "", "../../etc/x", "a//./b", "/root\0\\\n"],
        ),
    ] {
        let out = folder.path().join(format);
        write_batch(format, rows.clone(), &out, "").unwrap();
        let cuts = match format {
            "shar" => "train/cuts.000000.jsonl.gz",
            _ => manifest,
        };
        let cuts = items(&files(&out)[cuts]);
        assert_eq!(cuts.len(), texts.len(), "{format}: {:?}", reasons(&out));
        for (at, name) in names.iter().enumerate() {
            assert_eq!(cuts[at]["id"], *name, "{format}");
        }
        assert_eq!(cuts[7]["id"], "same-2-2");
        for (at, cut) in cuts.iter().enumerate() {
            let supervision = &cut["supervisions"][0];
            assert_eq!(supervision["text"], texts[at], "{format}");
            let id = match cut["id"] == ids[at] {
                true => &cut["id"],
                false => &supervision["custom"]["segment_id"],
            };
            assert!(id == ids[at] || ids[at].is_empty(), "{format}: {cut}");
        }
        let again = read_with(&out.join(manifest), "", &[]);
        let trimmed: Vec<&str> = texts
            .iter()
            .map(|text| text.trim())
            .filter(|text| !text.is_empty())
            .collect();
        assert_eq!(texts_of(&again), trimmed, "{format}");
    }
}

#[test]
fn rows_that_lhotse_could_not_load_are_rejects() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = folder.path().join("all.jsonl");
    let files = ["gone.flac", "noise.flac", "good.flac"].map(|name| folder.path().join(name));
    for file in &files {
        fs::copy(layout("wav/a.flac"), file).unwrap();
    }
    let line = |file: &PathBuf| {
        json!({"audio_filepath": file, "text": "x", "lang": "hi", "duration": 0.5, "segment_id": file.file_stem().unwrap().to_str()}).to_string()
    };
    fs::write(&manifest, files.each_ref().map(line).join("\n")).unwrap();
    let rows = read(&manifest, "");
    fs::remove_file(&files[0]).unwrap();
    fs::write(&files[1], b"no sound").unwrap();
    for format in ["lhotse", "shar"] {
        let out = folder.path().join(format);
        let error = write_as(format, &[("master", &rows)], &out, "").unwrap_err();
        assert!(format!("{error:?}").contains("2 of 3 rows cannot be read"), "{error:?}");
        write_as(format, &[("master", &rows)], &out, ", max_unreadable: 0.9").unwrap();
        assert_eq!(reasons(&out), ["missing_audio", "decode_error"], "{format}");
    }
    for (more, expected) in [
        (", shard_rows: 0", "shard_rows"),
        (", license: mit", "license"),
        (", audio_of_rows: path", "audio_of_rows"),
    ] {
        let error = write_as("shar", &[("master", &rows)], &folder.path().join("x"), more).unwrap_err();
        assert!(format!("{error:?}").contains(expected), "{error:?}");
    }
}

/// Needs a Python that has `lhotse` 1 or 2; `FLOW_TEST_PYTHON` names it.
#[test]
#[ignore = "needs a Python with lhotse"]
fn lhotse_itself_loads_what_is_written() {
    const LOAD: &str = "import sys, json
from lhotse import CutSet, RecordingSet, SupervisionSet, validate
from lhotse.qa import validate_recordings_and_supervisions
lhotse, shar = sys.argv[1:3]
recordings = RecordingSet.from_file(lhotse + '/recordings_train.jsonl.gz')
supervisions = SupervisionSet.from_file(lhotse + '/supervisions_train.jsonl.gz')
validate_recordings_and_supervisions(recordings, supervisions, read_data=True)
cuts = CutSet.from_file(lhotse + '/cuts_train.jsonl.gz')
both = CutSet.from_manifests(recordings=recordings, supervisions=supervisions).trim_to_supervisions(keep_overlapping=False)
sets = [cuts, both, CutSet.from_shar(in_dir=shar + '/train')]
def row(cut):
    validate(cut, read_data=True)
    [one] = cut.supervisions
    samples = cut.load_audio()
    assert samples.shape == (1, cut.num_samples), (samples.shape, cut)
    return [one.text, one.language, one.speaker, one.custom, [round(float(s) * 32768) for s in samples[0]]]
print(json.dumps([[row(cut) for cut in all] for all in sets]))";
    let folder = tempfile::tempdir().unwrap();
    let rows = read(&layout("lhotse"), "");
    let (hostile, ..) = hostile();
    let hostile_out = folder.path().join("hostile");
    for (format, name) in [("lhotse", "lhotse"), ("shar", "shar")] {
        write_as(
            format,
            &[("train", &rows)],
            &folder.path().join(name),
            ", shard_rows: 1",
        )
        .unwrap();
        write_batch(format, hostile.clone(), &hostile_out.join(name), ", shard_rows: 3").unwrap();
    }
    let python = std::env::var("FLOW_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let load = |folder: &Path| -> Value {
        let mut load = std::process::Command::new(&python);
        let output = load
            .args(["-c", LOAD])
            .args([folder.join("lhotse"), folder.join("shar")])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{python}: {said}");
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let expected: Vec<Value> = rows_of(&rows)
        .into_iter()
        .zip([json!({"k": 1}), json!({})])
        .zip(["s1", "s2"])
        .map(|(((text, lang, _, signal), mut custom), speaker)| {
            custom["shard_id"] = "x_supervisions_train.jsonl".into();
            custom["source"] = "manifest".into();
            let samples: Vec<i32> = signal.iter().map(|sample| (sample * 32_768.0).round() as i32).collect();
            json!([text, lang, speaker, custom, samples])
        })
        .collect();
    let found = load(folder.path());
    for set in 0..3 {
        assert!(found[set] == json!(expected), "{set}");
    }
    let found = load(&hostile_out);
    let texts = hostile_texts(&hostile);
    for set in 0..3 {
        let loaded: Vec<&str> = found[set]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| row[0].as_str().unwrap())
            .collect();
        let mut loaded = loaded;
        let mut texts = texts.clone();
        // Cuts that Lhotse makes of supervisions are sorted by their recordings.
        loaded.sort_unstable();
        texts.sort_unstable();
        assert_eq!(loaded, texts, "{set}");
    }
}

fn hostile_texts(rows: &RecordBatch) -> Vec<String> {
    columns::text(rows, "text")
        .unwrap()
        .iter()
        .map(|text| text.unwrap().to_owned())
        .collect()
}
