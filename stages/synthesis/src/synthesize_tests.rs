use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{Float64Type, Int64Type, UInt32Type};
use flow_runtime::harness::{Harness, Output};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::*;
use crate::test_data::wav;

/// A program that answers as espeak-ng does, with one recording for all sentences, and with faults for some words. It
/// is written before any test starts a process: a file that is still open for writing cannot be started.
static PRETENDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let speech: Vec<i16> = (0..33_075)
        .map(|n| (9_000.0 * (n as f32 * 0.05).sin()) as i16)
        .collect();
    std::fs::write(folder.path().join("speech.wav"), wav(22_050, 1, &speech)).unwrap();
    std::fs::write(folder.path().join("silence.wav"), wav(22_050, 1, &[3; 22_050])).unwrap();
    let script = r#"#!/bin/sh
here=$(dirname "$0")
case "$1" in
    --version) echo "eSpeak NG text-to-speech: 9.99  Data at: /$here"; exit;;
    --voices) printf 'Pty Language Age/Gender VoiceName File Other\n 5  xx  --/M  Name  inc/xx-XX\n'; exit;;
    --voices=variant) printf 'Pty\n 5 variant --/M male1 !v/m1\n 5 variant --/F female1 !v/f1\n 5 variant --/M x !v/Mr x\n'; exit;;
esac
case "$(cat)" in
    *hang*) exec sleep 600;;
    *kill*) kill -9 $$;;
    *fail*) echo "no such phoneme" >&2; exit 3;;
    *silence*) exec cat "$here/silence.wav";;
    *empty*) exit;;
    *noise*) echo "this is not a recording"; exit;;
    *) exec cat "$here/speech.wav";;
esac
"#;
    let path = folder.path().join("espeak");
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    folder
});

struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    /// With one language, whose sentences are of these words.
    fn new(words: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let place = Place { folder };
        let file =
            format!("voice: xx\nwords: {{word: [{words}]}}\nsequences: [{{of: [word], length: [2, 6], share: 1}}]\n");
        std::fs::create_dir(place.path("texts")).unwrap();
        std::fs::write(place.path("texts").join("aa.yaml"), file).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn settings(&self, more: serde_json::Value) -> SynthesizeSettings {
        let mut all = serde_json::json!({
            "out": self.path("out"), "texts": self.path("texts"), "hours": 0.05, "clips_per_shard": 20,
            "variants": ["m1", "f1"], "program": PRETENDER.path().join("espeak"),
        });
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(all).unwrap()
    }

    fn run(&self, more: serde_json::Value, threads: usize) -> Result<Output, StageError> {
        Harness::<Synthesize>::new(self.settings(more)).threads(threads).run()
    }
}

const PLAIN: &str = "one, two, three, four, five, six";

/// Every file below a folder, with its bytes.
fn files(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let (mut found, mut folders) = (BTreeMap::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(
                    path.strip_prefix(root).unwrap().to_owned(),
                    std::fs::read(&path).unwrap(),
                );
            }
        }
    }
    found
}

fn digest(files: &BTreeMap<PathBuf, Vec<u8>>) -> String {
    use sha2::{Digest as _, Sha256};
    let mut hash = Sha256::new();
    for (path, bytes) in files {
        // Parquet files name the version of their writer.
        if path.extension().is_some_and(|extension| extension == "tar") {
            hash.update(path.to_str().unwrap());
            hash.update(bytes);
        }
    }
    hex::encode(hash.finalize())
}

fn table(path: &Path) -> RecordBatch {
    let file = std::fs::File::open(path).unwrap();
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
    let batches: Vec<RecordBatch> = reader.map(Result::unwrap).collect();
    arrow::compute::concat_batches(&batches[0].schema(), &batches).unwrap()
}

fn texts<'a>(batch: &'a RecordBatch, name: &str) -> Vec<&'a str> {
    batch[name].as_string::<i32>().iter().map(Option::unwrap).collect()
}

#[test]
fn shards_are_whole_and_the_same_bytes_on_any_number_of_threads() {
    let (one, three) = (Place::new(PLAIN), Place::new(PLAIN));
    let more = serde_json::json!({"held_out": {"voices": ["f1"], "sentences": 20.0, "hours": 20.0}});
    let output = one.run(more.clone(), 1).unwrap();
    three.run(more, 3).unwrap();
    let made = files(&one.path("out"));
    assert_eq!(made, files(&three.path("out")));
    // 144 s in shards of 60 s, and 36 s for validation.
    let names: Vec<&str> = output.partitions.iter().map(Partition::as_str).collect();
    assert_eq!(
        names,
        [
            "aa/aa_train_0000",
            "aa/aa_train_0001",
            "aa/aa_train_0002",
            "aa/aa_val_0000"
        ]
    );
    assert_eq!(made.len(), 12);
    let mut sentences: [BTreeSet<String>; 2] = Default::default();
    let mut seconds = 0.0;
    for name in names {
        let (lang, shard_id) = name.split_once('/').unwrap();
        let side = usize::from(shard_id.contains("val"));
        let rows = output.rows(["train", "val"][side], name);
        assert_eq!(output.rows(["val", "train"][side], name).num_rows(), 0);
        let folder = one.path("out").join(name);
        let (metadata, index) = (
            table(&folder.join("metadata.parquet")),
            table(&folder.join("audio_index.parquet")),
        );
        assert_eq!(texts(&metadata, "transcription_native"), texts(&rows, "text"));
        assert_eq!(texts(&metadata, "segment_id"), texts(&rows, "segment_id"));
        assert_eq!(texts(&index, "tar_member_name"), texts(&rows, "tar_member_name"));
        assert!(texts(&metadata, "segment_language").iter().all(|tag| *tag == lang));
        let voices: BTreeSet<&str> = texts(&rows, "voice").into_iter().collect();
        assert_eq!(voices, BTreeSet::from([["xx+m1", "xx+f1"][side]]));
        // Each recording lies where the row says, with the sound that it says.
        let tar = std::fs::read(folder.join(format!("{shard_id}.tar"))).unwrap();
        let number = |name: &str, row| rows[name].as_primitive::<Int64Type>().value(row) as usize;
        for row in 0..rows.num_rows() {
            let flac = &tar[number("offset", row)..][..number("size", row)];
            let verdict = flow_audio::flac::probe(flac).unwrap();
            assert_eq!(verdict.audio_hash, texts(&rows, "audio_hash")[row]);
            let duration = rows["duration"].as_primitive::<Float64Type>().value(row);
            assert_eq!(verdict.frames as f64 / 16_000.0, duration);
            assert_eq!(
                metadata["duration_s"].as_primitive::<Float64Type>().value(row),
                duration
            );
            assert_eq!(
                (verdict.info.sample_rate, verdict.info.channels, verdict.info.bits),
                (16_000, 1, 16)
            );
            assert_eq!(
                index["byte_size"].as_primitive::<Int64Type>().value(row) as usize,
                flac.len()
            );
            seconds += duration;
        }
        sentences[side].extend(texts(&rows, "text").into_iter().map(str::to_owned));
        let listed = output.rows("files", name);
        for (path, bytes) in texts(&listed, "path")
            .iter()
            .zip(listed["bytes"].as_primitive::<Int64Type>().values())
        {
            assert_eq!(made[Path::new(path)].len() as i64, *bytes);
        }
    }
    assert!((180.0..200.0).contains(&seconds), "{seconds} s");
    assert!(sentences[0].is_disjoint(&sentences[1]) && !sentences[1].is_empty());
    // Raise VERSION when this moves: shards that were made before would be taken for these.
    assert_eq!(
        (Synthesize::VERSION, digest(&made).as_str()),
        (3, "cbb91c1a1484611d656cda2744d9d4b201cb4eec383920de7e127c30c7005f8f")
    );
}

#[test]
fn more_hours_leave_whole_shards_as_they_are_and_another_seed_none() {
    let place = Place::new(PLAIN);
    let plain = |hours: f64, seed: u64| serde_json::json!({"hours": hours, "seed": seed, "held_out": {"hours": 0.0}, "out": place.path(&format!("out-{hours}-{seed}"))});
    for (hours, seed) in [(0.05, 1), (0.07, 1), (0.05, 2)] {
        place.run(plain(hours, seed), 2).unwrap();
    }
    let (less, more, other) = (
        files(&place.path("out-0.05-1")),
        files(&place.path("out-0.07-1")),
        files(&place.path("out-0.05-2")),
    );
    assert_eq!((less.len(), more.len()), (9, 15));
    assert!(less.iter().all(|(path, bytes)| &more[path] == bytes));
    let tar = Path::new("aa/aa_train_0000/aa_train_0000.tar");
    assert_ne!(less[tar], other[tar]);
}

#[test]
fn faults_of_espeak_are_rejects_with_a_reason_and_other_clips_take_their_places() {
    let place = Place::new("one, two, three, four, fail, silence, empty, noise, kill, hang");
    let more = serde_json::json!({"hours": 0.03, "held_out": {"hours": 0.0}, "time_limit": 0.3});
    let Err(StageError::Failed { message, help, .. }) = place.run(more.clone(), 4) else {
        panic!("more faults than clips were no error");
    };
    assert!(message.contains("were refused") && help.is_some(), "{message}");
    assert!(!place.path("out").exists());

    let many = (1..60).map(|n| format!("word{n}")).collect::<Vec<_>>().join(", ");
    let place = Place::new(&format!("{many}, fail, silence, empty, noise, kill, hang"));
    let output = place.run(more, 4).unwrap();
    let rejects = output.rejects();
    let reasons: BTreeSet<&str> = rejects.iter().map(|(_, reject)| reject.reason.as_str()).collect();
    assert_eq!(reasons, BTreeSet::from(["espeak_failed", "espeak_timeout", "no_audio"]));
    let details = |word: &str| -> String {
        let found = rejects.iter().find(|(_, reject)| reject.values.contains(word));
        found
            .unwrap_or_else(|| panic!("no reject with {word}"))
            .1
            .detail
            .clone()
    };
    assert!(
        rejects
            .iter()
            .any(|(_, reject)| reject.detail.contains("no such phoneme"))
    );
    assert!(!details("hang").is_empty() && !details("kill").is_empty());
    // Each number that was drawn is a row or a reject, and none is both.
    let mut numbers: Vec<u32> = rejects.iter().map(|(_, reject)| reject.row.unwrap()).collect();
    for partition in &output.partitions {
        let rows = output.rows("train", partition.as_str());
        let of_rows: BTreeSet<u32> = rows[flow_kind::ROW]
            .as_primitive::<UInt32Type>()
            .values()
            .iter()
            .copied()
            .collect();
        let refused: BTreeSet<u32> = rejects
            .iter()
            .filter(|(of, _)| of == partition)
            .map(|(_, reject)| reject.row.unwrap())
            .collect();
        assert!(of_rows.is_disjoint(&refused));
        let last = of_rows.iter().chain(&refused).max().unwrap();
        assert_eq!(of_rows.len() + refused.len(), *last as usize + 1, "{partition}");
        numbers.extend(of_rows);
    }
    assert!(!numbers.is_empty());

    // Too long is a rule of the settings, no fault.
    let place = Place::new(PLAIN);
    let more =
        serde_json::json!({"hours": 0.01, "held_out": {"hours": 0.0}, "silence": [0.0, 2.0], "max_duration": 3.5});
    let output = place.run(more, 2).unwrap();
    let rejects = output.rejects();
    assert!(!rejects.is_empty());
    assert!(
        rejects
            .iter()
            .all(|(_, reject)| reject.reason == "duration_too_long" && reject.class == RejectClass::Rule)
    );
}

#[test]
fn what_is_missing_is_said_with_what_to_do() {
    let place = Place::new(PLAIN);
    let wrong = |more: serde_json::Value| match place.run(more.clone(), 1) {
        Err(StageError::Setting {
            path, message, help, ..
        }) => (path, message, help.unwrap_or_default()),
        other => panic!("{more} gave {other:?}"),
    };
    let (path, message, help) = wrong(serde_json::json!({"program": place.path("none")}));
    assert!(path == "program" && message.contains("cannot be started") && help.contains("apt-get install espeak-ng"));
    let (path, message, _) = wrong(serde_json::json!({"variants": ["m1", "m2"]}));
    assert!(
        path == "variants" && message.contains("9.99 has no variant `m2`"),
        "{message}"
    );
    let (path, message, _) = wrong(serde_json::json!({"exclude": [place.path("none.parquet")]}));
    assert!(path == "exclude[0]" && message.contains("none.parquet"), "{message}");
    let (path, message, _) = wrong(serde_json::json!({"languages": ["zz"]}));
    assert!(path == "texts" && message.contains("zz.yaml"), "{message}");
    let silent = std::fs::read_to_string(place.path("texts/aa.yaml"))
        .unwrap()
        .replace("voice: xx", "voice: yy");
    std::fs::write(place.path("texts/bb.yaml"), silent).unwrap();
    let (path, message, _) = wrong(serde_json::json!({}));
    assert!(path == "texts" && message.contains("no voice `yy`"), "{message}");
    assert!(!place.path("out").exists());

    // Shards of other settings in the folder: nothing is written, and they are named.
    std::fs::create_dir_all(place.path("out/aa/aa_train_0009")).unwrap();
    match place.run(serde_json::json!({"languages": ["aa"]}), 1) {
        Err(StageError::Refused { message, .. }) => assert!(message.contains("aa/aa_train_0009"), "{message}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(files(&place.path("out")), BTreeMap::new());
}

#[test]
fn what_decides_a_shard_is_in_its_key_and_nothing_else() {
    let place = Place::new(PLAIN);
    let key = |more: serde_json::Value| {
        let settings = place.settings(more);
        let identity = Synthesize::identity(&settings.into()).to_string();
        assert!(!identity.contains(&*place.folder.path().to_string_lossy()));
        identity
    };
    let same = key(serde_json::json!({}));
    assert_eq!(
        same,
        key(serde_json::json!({"out": "elsewhere", "hours": 3.0, "variants": ["f1", "m1", "f1"]}))
    );
    for other in [
        serde_json::json!({"seed": 2}),
        serde_json::json!({"variants": ["m1"]}),
        serde_json::json!({"gain": [-20.0, -10.0]}),
        serde_json::json!({"noise": {"share": 0.0}}),
        serde_json::json!({"held_out": {"voices": ["f1"]}}),
    ] {
        assert_ne!(same, key(other));
    }
}

#[test]
fn clips_of_several_sentences_are_as_long_as_asked_and_leave_the_others_as_they_are() {
    let place = Place::new(PLAIN);
    let other = "voice: xx\nwords: {word: [uno, due, tre, sei]}\nsequences: [{of: [word], length: [2, 4], share: 1}]\n";
    std::fs::write(place.path("texts").join("bb.yaml"), other).unwrap();
    let run = |out: &str, share: f64, threads| {
        let more = serde_json::json!({
            "out": place.path(out), "hours": 0.2, "max_duration": 10.0, "held_out": {"hours": 0.0},
            "joined": {"share": share, "seconds": [6.0, 9.0]},
        });
        place.run(more, threads).unwrap()
    };
    let (plain, mixed) = (run("plain", 0.0, 2), run("mixed", 0.5, 1));
    run("again", 0.5, 3);
    assert_eq!(files(&place.path("mixed")), files(&place.path("again")));

    let by_segment = |output: &Output| -> BTreeMap<String, (String, String, f64, String)> {
        let mut found = BTreeMap::new();
        for partition in &output.partitions {
            let rows = output.rows("train", partition.as_str());
            for row in 0..rows.num_rows() {
                let of = |name: &str| texts(&rows, name)[row].to_owned();
                let duration = rows["duration"].as_primitive::<Float64Type>().value(row);
                found.insert(of("segment_id"), (of("text"), of("voice"), duration, of("audio_hash")));
            }
        }
        found
    };
    let (plain, mixed) = (by_segment(&plain), by_segment(&mixed));
    let (mut joined, mut alone) = (0, 0);
    let (mut languages, mut voices) = (0, 0);
    for (segment, row) in &mixed {
        let (text, voice, duration, _) = row;
        let Some(before) = plain.get(segment) else {
            continue;
        };
        if text == &before.0 {
            assert_eq!(row, before);
            alone += 1;
            continue;
        }
        joined += 1;
        assert!(
            text.starts_with(&format!("{} ", before.0)),
            "{text} and not {}",
            before.0
        );
        assert!((6.0..=10.0).contains(duration), "{duration}");
        let is_other = |word: &str| ["uno", "due", "tre", "sei"].contains(&word);
        languages += usize::from(text.split(' ').any(is_other) && !text.split(' ').all(is_other));
        let of_voices: Vec<&str> = voice.split(' ').collect();
        assert!(voice.starts_with(&before.1) && of_voices.len() <= 2, "{voice}");
        voices += usize::from(of_voices == ["xx+f1", "xx+m1"] || of_voices == ["xx+m1", "xx+f1"]);
    }
    assert!(joined > 5 && alone > 5, "{joined} joined, {alone} alone");
    assert!(
        languages > 0 && voices > 0,
        "{languages} of two languages, {voices} of two voices"
    );

    let more = serde_json::json!({"joined": {"share": 0.5, "seconds": [30.0, 40.0]}});
    let Err(StageError::Setting { path, .. }) = place.run(more, 1) else {
        panic!("longer than max_duration");
    };
    assert_eq!(path, "joined.seconds");
}
