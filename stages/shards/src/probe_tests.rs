use std::collections::{BTreeMap, BTreeSet, HashMap};

use arrow::array::AsArray;
use arrow::datatypes::{Int32Type, Int64Type};
use flow_runtime::harness::{Harness, Output};
use flow_storage::Storage;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::*;
use crate::test_data::{corpus, parity_corpus, parity_golden};
use flow_audio::member_name::{is_unsafe, strip_dot_slash};

fn probe(shards: PathBuf, audio_from: AudioFrom) -> Output {
    Harness::<Probe>::new(ProbeSettings {
        shards,
        audio_from,
        formats: only_flac(),
    })
    .threads(2)
    .run()
    .unwrap()
}

/// (partition, name) -> row of `members`.
struct Members {
    batches: HashMap<String, RecordBatch>,
    rows: HashMap<(String, String), usize>,
}

impl Members {
    fn of(output: &Output) -> Self {
        let mut members = Members {
            batches: HashMap::new(),
            rows: HashMap::new(),
        };
        for partition in &output.partitions {
            let batch = output.rows("members", partition.as_str());
            let names = batch["name"].as_string::<i32>();
            for row in 0..batch.num_rows() {
                let before = members
                    .rows
                    .insert((partition.to_string(), names.value(row).to_owned()), row);
                assert_eq!(before, None, "{partition} {} is there twice", names.value(row));
            }
            members.batches.insert(partition.to_string(), batch);
        }
        members
    }

    fn find(&self, partition: &str, name: &str) -> Option<(&RecordBatch, usize)> {
        let row = *self.rows.get(&(partition.to_owned(), name.to_owned()))?;
        Some((&self.batches[partition], row))
    }

    fn status(&self, partition: &str, name: &str) -> Option<&str> {
        self.find(partition, name)
            .map(|(batch, row)| batch["status"].as_string::<i32>().value(row))
    }
}

#[derive(serde::Deserialize)]
struct Extracted {
    path: String,
    bytes: i64,
    sample_rate: i32,
    channels: i32,
    bits: i32,
    frames: i64,
    audio_hash: String,
}

/// Good recordings: every figure that the reference noted.
fn compare_good(name: &str, members: &Members) {
    // Packed here, plain in a folder that the environment names.
    let text = match std::fs::read(parity_golden(name).join("extracted.jsonl.zst")) {
        Ok(packed) => String::from_utf8(zstd::decode_all(packed.as_slice()).unwrap()).unwrap(),
        Err(_) => std::fs::read_to_string(parity_golden(name).join("extracted.jsonl")).unwrap(),
    };
    let mut compared = 0;
    for line in text.lines() {
        let expected: Extracted = serde_json::from_str(line).unwrap();
        let mut parts = expected.path.splitn(4, '/').skip(1);
        let partition = format!("{}/{}", parts.next().unwrap(), parts.next().unwrap());
        let (batch, row) = members
            .find(&partition, parts.next().unwrap())
            .unwrap_or_else(|| panic!("{line}"));
        let int = |column: &str| batch[column].as_primitive::<Int32Type>().value(row);
        let long = |column: &str| batch[column].as_primitive::<Int64Type>().value(row);
        assert_eq!(batch["status"].as_string::<i32>().value(row), "ok", "{line}");
        assert_eq!(
            (long("size"), long("frames")),
            (expected.bytes, expected.frames),
            "{line}"
        );
        assert_eq!(
            (int("sample_rate"), int("channels"), int("bits")),
            (expected.sample_rate, expected.channels, expected.bits),
            "{line}"
        );
        assert_eq!(
            batch["audio_hash"].as_string::<i32>().value(row),
            expected.audio_hash,
            "{line}"
        );
        compared += 1;
    }
    assert!(compared > 0, "no good recording in {name}");
}

/// Every row that reached the audio stage: the reason with which the reference refused it, or none.
fn compare_reasons(name: &str, output: &Output, members: &Members) -> BTreeSet<String> {
    let by_id: HashMap<&str, &str> = output
        .partitions
        .iter()
        .map(|p| (p.as_str().split_once('/').unwrap().1, p.as_str()))
        .collect();
    let mut seen = BTreeSet::new();
    let file = std::fs::File::open(parity_golden(name).join("decisions.parquet")).unwrap();
    for batch in ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap() {
        let batch = batch.unwrap();
        let text = |column: &str, row: usize| batch[column].as_string::<i32>().value(row).to_owned();
        for row in (0..batch.num_rows()).filter(|&row| text("stage", row) != "v1") {
            let reason = text("reason", row);
            let partition = by_id[text("shard_id", row).as_str()];
            let member = text("tar_member_name", row);
            let tar = output.rows("tars", partition);
            let expected = match (text("stage", row).as_str(), reason.as_str()) {
                ("audio", "actual_duration_out_of_range") | ("dedup" | "", _) => "ok",
                ("audio", reason) => reason,
                other => panic!("{other:?}"),
            };
            let got = match tar["status"].as_string::<i32>().value(0) {
                "missing_tar" => "missing_tar",
                _ if is_unsafe(&member) => "unsafe_name",
                _ => members
                    .status(partition, strip_dot_slash(&member))
                    .unwrap_or("missing_member"),
            };
            assert_eq!(got, expected, "{partition} {member}");
            seen.insert(expected.to_owned());
        }
    }
    seen
}

fn compare_tars(name: &str, output: &Output) {
    #[derive(serde::Deserialize)]
    struct Report {
        tars: Vec<Tar>,
    }
    #[derive(serde::Deserialize)]
    struct Tar {
        shard_id: String,
        status: String,
        members: Option<i64>,
    }
    let report: Report =
        serde_json::from_slice(&std::fs::read(parity_golden(name).join("report.json")).unwrap()).unwrap();
    let tars: BTreeMap<&str, RecordBatch> = output
        .partitions
        .iter()
        .map(|p| (p.as_str().split_once('/').unwrap().1, output.rows("tars", p.as_str())))
        .collect();
    assert!(!report.tars.is_empty());
    for tar in report.tars {
        let got = &tars[tar.shard_id.as_str()];
        assert_eq!(
            got["status"].as_string::<i32>().value(0),
            tar.status,
            "{}",
            tar.shard_id
        );
        if let Some(members) = tar.members {
            assert_eq!(
                got["members"].as_primitive::<Int64Type>().value(0),
                members,
                "{}",
                tar.shard_id
            );
        }
    }
}

#[test]
fn equals_the_reference_on_the_corpora() {
    let mut seen = BTreeSet::new();
    for name in ["micro", "mini"] {
        let output = probe(parity_corpus(name).join("shards"), AudioFrom::Tar);
        let members = Members::of(&output);
        compare_good(name, &members);
        compare_tars(name, &output);
        seen.extend(compare_reasons(name, &output, &members));
        assert!(output.partitions.is_sorted());
    }
    // Every verdict occurs in the corpora.
    for reason in [
        "ok",
        "missing_tar",
        "unsafe_name",
        "missing_member",
        "not_regular_file",
        "tar_truncated",
        "empty_file",
        "not_flac",
        "decode_error",
        "no_audio",
    ] {
        assert!(seen.contains(reason), "no {reason} in {seen:?}");
    }
}

#[test]
fn files_give_the_same_verdicts_as_the_tar() {
    let temp = tempfile::tempdir().unwrap();
    let tar = corpus("micro").join("shards/as/as_0000/as_0000.tar");
    let folder = temp.path().join("as/as_0000");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("metadata.parquet"), b"not audio").unwrap();
    std::fs::create_dir_all(folder.join("deep")).unwrap();
    let (from_tar, _) = examine::tar_of(
        &tar,
        |path| DigestedFile::open(&Storage::default(), path),
        &only_flac(),
        &rayon::ThreadPoolBuilder::new().build().unwrap(),
        &|| false,
    )
    .unwrap()
    .unwrap();
    for found in &from_tar.recordings {
        let bytes = flow_audio::decode::read_range(&Storage::default(), &tar, found.offset, found.size).unwrap();
        std::fs::write(folder.join("deep").join(&found.name), bytes).unwrap();
    }
    let settings = || temp.path().to_path_buf();
    for audio_from in [AudioFrom::Files, AudioFrom::Auto] {
        let members = Members::of(&probe(settings(), audio_from));
        assert_eq!(members.rows.len(), from_tar.recordings.len());
        for found in &from_tar.recordings {
            let (batch, row) = members.find("as/as_0000", &format!("deep/{}", found.name)).unwrap();
            let hash = found.verdict.as_ref().map(|(_, verdict)| verdict.audio_hash.as_str());
            assert_eq!(batch["audio_hash"].as_string::<i32>().value(row), hash.unwrap());
            assert_eq!(batch["stored"].as_string::<i32>().value(row), "file");
        }
    }
    // With a tar beside them, `auto` takes the tar.
    std::fs::copy(&tar, folder.join("as_0000.tar")).unwrap();
    let members = Members::of(&probe(settings(), AudioFrom::Auto));
    assert!(members.status("as/as_0000", &from_tar.recordings[0].name).is_some());
    assert_eq!(members.rows.len(), from_tar.recordings.len());
}

/// Truncated, with a member in the way that is too large, links and repeated names: the digest is that of the whole file, and
/// of an examination that was given up there is none.
#[test]
fn a_tar_is_digested_by_the_reading_that_examines_it() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("a.tar");
    let recordings = crate::test_data::good_members("mini", "hi", "hi_0001");
    let (one, two) = (recordings[0].as_slice(), recordings[1].as_slice());
    let tar = crate::test_data::tar_of(&[("a.flac", one), ("b.txt", b"?"), ("a.flac", two), ("c.flac", one)]);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    for length in [tar.len(), tar.len() - 3_000, tar.len() / 2, 700, 0] {
        std::fs::write(&path, &tar[..length]).unwrap();
        let earlier = std::time::SystemTime::now() - std::time::Duration::from_secs(100);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(earlier).unwrap();
        let examined = examine::tar_of(
            &path,
            |path| DigestedFile::open(&Storage::default(), path),
            &only_flac(),
            &pool,
            &|| false,
        )
        .unwrap()
        .unwrap();
        let digests = flow_kind::store::SourceDigests::default();
        let (noted, digest) = digests.note_read(examined.1.unwrap()).unwrap();
        assert_eq!((noted, digest), (path.clone(), flow_kind::Digest::of(&tar[..length])));
        assert_eq!(digests.known(&path).unwrap(), Some(digest));
        if length == tar.len() {
            let names: Vec<&str> = examined.0.recordings.iter().map(|found| found.name.as_str()).collect();
            assert_eq!(names, ["b.txt", "a.flac", "c.flac"]);
            let statuses: Vec<&str> = examined.0.recordings.iter().map(|found| found.status).collect();
            assert_eq!(statuses, ["not_flac", "ok", "ok"]);
        }
    }
    assert!(
        examine::tar_of(
            &path,
            |path| DigestedFile::open(&Storage::default(), path),
            &only_flac(),
            &pool,
            &|| true
        )
        .unwrap()
        .is_none()
    );
}

#[test]
fn a_wrong_folder_is_a_wrong_setting() {
    let settings = ProbeSettings {
        shards: "/no/such/folder".into(),
        audio_from: AudioFrom::Tar,
        formats: only_flac(),
    };
    let error = Harness::<Probe>::new(settings).run().unwrap_err();
    assert!(
        matches!(&error, StageError::Setting { path, .. } if path == "shards"),
        "{error}"
    );
    assert!(error.to_string().contains("/no/such/folder"));
}

/// A change of these bytes asks for a higher [`Kind::VERSION`].
#[test]
fn version_guards_the_output() {
    let output = probe(corpus("micro").join("shards"), AudioFrom::Tar);
    let mut rows = String::new();
    for partition in &output.partitions {
        for port in ["members", "tars"] {
            let batch = output.rows(port, partition.as_str());
            for column in batch.columns().iter().zip(batch.schema().fields()) {
                // `detail` is for people, and may hold messages of the decoder.
                if column.1.name() != "detail" {
                    rows.push_str(&format!("{partition} {port} {}: {:?}\n", column.1.name(), column.0));
                }
            }
        }
    }
    use sha2::Digest as _;
    let digest = hex::encode(sha2::Sha256::digest(rows));
    assert_eq!(
        (Probe::VERSION, digest.as_str()),
        (3, "0aa7dcf72d879f3a31d0893741875a4d4b242856920ec05576b9f00a5a6e0b7d")
    );
}

/// Where FLAC alone is decoded, what was found once stays; where another format is read in another way than before, recordings
/// are decoded once more.
#[test]
fn another_way_to_read_a_format_moves_only_those_who_read_it() {
    let identity = |formats: &str| {
        let settings: ProbeSettings =
            serde_json::from_str(&format!("{{\"shards\": \"s\", \"formats\": {formats}}}")).unwrap();
        Probe::identity(&settings)["formats"].to_string()
    };
    assert_eq!(identity(r#"["opus", "flac"]"#), r#"["flac","opus 3"]"#);
    assert_eq!(identity(r#"["ogg", "flac"]"#), r#"["flac","ogg 5"]"#);
    assert_eq!(identity(r#"["mp3", "wav", "flac"]"#), r#"["flac","wav 6","mp3 4"]"#);
}
