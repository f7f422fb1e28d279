use arrow::array::AsArray;
use arrow::datatypes::{Float64Type, Int64Type, UInt32Type};
use flow_runtime::harness::{Harness, Output};
use flow_storage::Storage;

use super::*;
use crate::test_data::{member, tar_of, tone};
use flow_audio::decode::read_range;
use flow_audio::flac;

fn settings(shards: &Path) -> WebDatasetSettings {
    WebDatasetSettings {
        shards: shards.to_owned(),
        formats: only_flac(),
        lang: String::new(),
        text_field: text(),
        lang_field: lang(),
        source: webdataset(),
    }
}

fn read(settings: WebDatasetSettings) -> Output {
    Harness::<WebDataset>::new(settings).threads(2).run().unwrap()
}

fn put(shards: &Path, name: &str, tar: &[u8]) {
    let path = shards.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, tar).unwrap();
}

fn good() -> Vec<u8> {
    member("as", "as_0000", "rec_as_0004_000.flac")
}

#[test]
fn names_of_recordings_may_have_dots() {
    let temp = tempfile::tempdir().unwrap();
    let (good, hi) = (good(), br#"{"text": "text", "lang": "hi"}"#);
    put(
        temp.path(),
        "x.tar",
        &tar_of(&[
            ("v1.0/talk-12.5-13.25.flac", &good),
            ("v1.0/talk-12.5-13.25.json", hi),
            ("a.flac", &good),
            ("a.json", hi),
            // Beside a recording under the name up to the first dot, further ones are not samples, as neither are texts alone.
            ("a.original.flac", &good),
            ("a.segments.json", b"[]"),
            ("b.words.json", b"[]"),
            ("talk-20.0.json", hi),
            ("talk-20.0.flac", &good),
        ]),
    );
    let output = read(settings(temp.path()));
    assert!(output.rejects().is_empty(), "{:?}", output.rejects());
    let rows = output.rows("rows", "x");
    let ids: Vec<&str> = rows["segment_id"].as_string::<i32>().iter().flatten().collect();
    assert_eq!(ids, ["v1.0/talk-12.5-13.25", "a", "talk-20.0"]);
}

#[test]
fn samples_become_rows_and_bad_ones_rejects() {
    let temp = tempfile::tempdir().unwrap();
    let good = good();
    let mut flipped = good.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    let hi = br#"{"text": " from json ", "lang": "hi"}"#;
    let big = vec![b'a'; (1 << 20) + 1];
    put(
        temp.path(),
        "deep/er/train-0001.tar",
        &tar_of(&[
            ("a.flac", &good),
            ("a.txt", "  नमस्ते\n".as_bytes()),
            ("a.json", br#"{"lang": "hi", "text": 5, "other": [1]}"#),
            // Text from the `.json`, members apart, a name with a folder and dots.
            ("dir.d/b.json", hi),
            ("other.cls", b"7"),
            ("dir.d/b.flac", &good),
            ("c.flac", &good),
            ("d.txt", b"text alone"),
            ("e.flac", &good),
            ("e.txt", b"\xff\xfe"),
            ("e.json", hi),
            ("f.flac", &good),
            ("f.json", b"[1]"),
            ("g.flac", &good),
            ("g.txt", b"no language"),
            ("h.flac", &flipped),
            ("h.json", hi),
            ("i.flac", b""),
            ("i.json", hi),
            ("j.flac", &tone("tone.mp3")),
            ("j.json", hi),
            ("k.flac", &good),
            ("k.wav", &good),
            ("k.json", hi),
            ("l.flac", &good),
            ("l.json", hi),
            ("l.txt", b" \n"),
            ("m.flac", &good),
            ("m.txt", &big),
            ("n.flac", &good),
            ("n.json", br#"{"text": 5, "lang": "hi"}"#),
            // A film beside its sound, and two films.
            ("o.mp4", b"film"),
            ("o.flac", &good),
            ("o.json", hi),
            ("p.mp4", b"film"),
            ("p.webm", b"film"),
            ("p.json", hi),
            // The later member of a name counts.
            ("a.flac", &good),
        ]),
    );
    let output = read(settings(temp.path()));
    let name = "deep/er/train-0001";
    assert_eq!(output.partitions, [Partition::from(name)]);
    let rejects: Vec<(u32, &str)> = output
        .rejects()
        .iter()
        .map(|(_, reject)| (reject.row.unwrap(), reject.reason.as_str()))
        .collect();
    assert_eq!(
        rejects,
        [
            (2, "missing_text"),
            (3, "missing_audio"),
            (4, "bad_text"),
            (5, "bad_json"),
            (6, "missing_lang"),
            (7, "decode_error"),
            (8, "empty_file"),
            (9, "not_flac"),
            (10, "several_recordings"),
            (11, "empty_text"),
            (12, "bad_text"),
            (13, "bad_json"),
            (15, "several_recordings"),
        ]
    );
    let rows = output.rows("rows", name);
    let text = |column: &str, row: usize| rows[column].as_string::<i32>().value(row).to_owned();
    let verdict = flac::probe(&good).unwrap();
    let expected = [
        ("a", "नमस्ते", "a.flac"),
        ("dir.d/b", "from json", "dir.d/b.flac"),
        ("o", "from json", "o.flac"),
    ];
    assert_eq!(rows.num_rows(), expected.len());
    for (row, (key, words, recording)) in expected.iter().enumerate() {
        assert_eq!(rows["_row"].as_primitive::<UInt32Type>().value(row), [0, 1, 14][row]);
        assert_eq!(
            [
                "segment_id",
                "text",
                "tar_member_name",
                "lang",
                "shard_id",
                "source",
                "tar_path",
                "audio_hash"
            ]
            .map(|column| text(column, row)),
            [
                key,
                words,
                recording,
                "hi",
                "train-0001",
                "webdataset",
                "deep/er/train-0001.tar",
                &verdict.audio_hash
            ]
        );
        let seconds = rows["duration"].as_primitive::<Float64Type>().value(row);
        assert_eq!(seconds, verdict.frames as f64 / f64::from(verdict.info.sample_rate));
        let number = |column: &str| rows[column].as_primitive::<Int64Type>().value(row) as u64;
        let path = temp.path().join(text("tar_path", row));
        assert_eq!(
            read_range(&Storage::default(), &path, number("offset"), number("size")).unwrap(),
            good
        );
    }
}

#[test]
fn a_language_has_one_name() {
    let temp = tempfile::tempdir().unwrap();
    let good = good();
    put(
        temp.path(),
        "a.tar",
        &tar_of(&[
            ("a.flac", &good),
            ("a.json", br#"{"text": "one", "lang": "EN"}"#),
            ("b.flac", &good),
            ("b.json", br#"{"text": "two", "lang": "en-US"}"#),
            ("c.flac", &good),
            ("c.json", br#"{"text": "three"}"#),
        ]),
    );
    let output = read(WebDatasetSettings {
        lang: "En".into(),
        ..settings(temp.path())
    });
    let rows = output.rows("rows", "a");
    let languages: Vec<_> = rows["lang"].as_string::<i32>().iter().flatten().collect();
    assert_eq!(languages, ["en"; 3]);
}

#[test]
fn settings_and_damaged_tars() {
    let temp = tempfile::tempdir().unwrap();
    let good = good();
    let whole = tar_of(&[
        ("a.flac", &good),
        ("a.txt", b"one"),
        ("b.txt", b"two"),
        ("b.flac", &tone("tone.ogg")),
    ]);
    put(temp.path(), "cut.tar", &whole[..whole.len() - 4096]);
    put(temp.path(), "none.tar", b"this is not a tar at all");
    put(temp.path(), ".hidden.tar", &whole);
    put(temp.path(), "lost+found/more.tar", &whole);
    put(temp.path(), "other.txt", b"");
    std::os::unix::fs::symlink(temp.path(), temp.path().join("loop")).unwrap();
    let output = read(WebDatasetSettings {
        lang: "mr".into(),
        source: "mine".into(),
        formats: vec![Format::Ogg, Format::Flac],
        ..settings(temp.path())
    });
    assert_eq!(output.partitions, ["cut", "none"].map(Partition::from));
    let rows = output.rows("rows", "cut");
    assert_eq!(rows.num_rows(), 1);
    assert_eq!(rows["lang"].as_string::<i32>().value(0), "mr");
    assert_eq!(rows["source"].as_string::<i32>().value(0), "mine");
    let rejects: Vec<(&str, Option<u32>, &str)> = output
        .rejects()
        .iter()
        .map(|(partition, reject)| (partition.as_str(), reject.row, reject.reason.as_str()))
        .collect();
    assert_eq!(
        rejects,
        [
            ("cut", None, "tar_truncated"),
            ("cut", Some(1), "tar_truncated"),
            ("none", None, "tar_truncated")
        ]
    );
    let missing = Harness::<WebDataset>::new(settings(Path::new("/no/such/folder"))).run();
    assert!(matches!(missing, Err(StageError::Setting { path, .. }) if path == "shards"));
}

/// A change of these rows asks for a higher [`Kind::VERSION`].
#[test]
fn version_guards_the_output() {
    let temp = tempfile::tempdir().unwrap();
    let good = good();
    put(
        temp.path(),
        "train-0001.tar",
        &tar_of(&[
            ("a.flac", &good),
            ("a.txt", b" text "),
            ("a.json", br#"{"lang": "as"}"#),
            ("b.flac", &good),
            ("b.json", br#"{"text": "x"}"#),
        ]),
    );
    let output = read(settings(temp.path()));
    let mut seen = Vec::new();
    for partition in &output.partitions {
        let rows = output.rows("rows", partition.as_str());
        for (field, column) in rows.schema().fields().iter().zip(rows.columns()) {
            seen.push(format!("{partition} {}: {column:?}", field.name()));
        }
    }
    seen.extend(
        output
            .rejects()
            .iter()
            .map(|(_, reject)| format!("{:?} {}", reject.row, reject.reason)),
    );
    let text = seen.join("\n").replace(temp.path().to_str().unwrap(), "TEMP");
    assert_eq!(
        (
            WebDataset::VERSION,
            flow_kind::Digest::of(text.as_bytes()).short().to_string()
        ),
        (5, "aca213eed018aba8".to_string())
    );
}

/// A recording is one by its name; whether its format is accepted, its content says.
#[test]
fn recordings_of_all_endings_are_seen() {
    let temp = tempfile::tempdir().unwrap();
    let good = good();
    put(
        temp.path(),
        "a.tar",
        &tar_of(&[
            ("a.opus", &good),
            ("a.txt", b"one"),
            ("b.webm", b"junk"),
            ("b.txt", b"two"),
        ]),
    );
    let output = read(WebDatasetSettings {
        lang: "en".into(),
        ..settings(temp.path())
    });
    let rows = output.all_rows("rows");
    let members = rows.column_by_name("tar_member_name").unwrap().as_string::<i32>();
    assert_eq!(members.iter().flatten().collect::<Vec<_>>(), ["a.opus"]);
    let reasons: Vec<&str> = output
        .rejects()
        .iter()
        .map(|(_, reject)| reject.reason.as_str())
        .collect();
    assert_eq!(reasons, ["not_flac"]);
}
