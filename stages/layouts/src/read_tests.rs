use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, AsArray, Float32Array, StringArray, StringDictionaryBuilder};
use arrow::datatypes::{DataType, Field, Float64Type, Int32Type, Int64Type, Schema};
use flow_corpus::Opened;
use flow_corpus::tables::TableManifest;
use flow_kind::{Artifact, StageError, Storage};
use flow_runtime::harness::{Harness, Output};
use parquet::arrow::ArrowWriter;

use super::*;

#[path = "bucket_tests.rs"]
mod bucket;
#[path = "folder_tests.rs"]
mod folders;
#[path = "forms_tests.rs"]
mod forms;
#[path = "layouts_tests.rs"]
mod layouts;
#[path = "rules_tests.rs"]
mod rules;
#[path = "times_tests.rs"]
mod times_of_rows;

fn repository(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

/// A recording of the corpus.
fn recording() -> Vec<u8> {
    let tar = repository("tests/data/corpus/micro/shards/hi/hi_0001/hi_0001.tar");
    let mut file = fs::File::open(&tar).unwrap();
    let length = file.metadata().unwrap().len();
    let listing = flow_audio::tar::list(&mut file, length).unwrap();
    let bytes = fs::read(&tar).unwrap();
    let member = listing
        .members
        .iter()
        .map(|member| &bytes[member.offset as usize..(member.offset + member.size) as usize])
        .find(|bytes| bytes.starts_with(b"fLaC"));
    member.unwrap().to_vec()
}

fn settings(manifest: &Path) -> ReadSettings {
    ReadSettings {
        manifest: manifest.to_str().unwrap().into(),
        ..ReadSettings::default()
    }
}

fn run(settings: ReadSettings) -> Output {
    let output = Harness::<Read>::new(settings.clone())
        .run()
        .unwrap_or_else(|e| panic!("{e:?}"));
    bucket::compare(&settings, &output);
    output
}

fn column(output: &Output, name: &str) -> Vec<String> {
    let rows = output.all_rows("rows");
    let column = rows.column_by_name(name).unwrap().as_string::<i32>().clone();
    column.iter().map(|text| text.unwrap().to_string()).collect()
}

fn reasons(output: &Output) -> Vec<&str> {
    output
        .rejects()
        .iter()
        .map(|(_, reject)| reject.reason.as_str())
        .collect()
}

#[track_caller]
fn failure(settings: ReadSettings) -> String {
    match Harness::<Read>::new(settings.clone()).run() {
        Err(StageError::Setting { message, .. }) => {
            bucket::compare_failure(&settings, &message);
            message
        }
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it ran"),
    }
}

/// Our own manifest: shards as partitions in the order of the file, and recordings in the tars.
#[test]
fn golden_manifests_keep_their_order_and_find_their_recordings() {
    let mut settings = settings(&repository("tests/data/golden/data/micro/train_manifest_v2.parquet"));
    settings.shards = repository("tests/data/corpus/micro");
    let output = run(settings.clone());
    assert_eq!(reasons(&output), Vec::<&str>::new());
    let golden = fs::read_to_string(repository("tests/data/golden/data/micro/train_manifest_v2.jsonl")).unwrap();
    let golden: Vec<serde_json::Value> = golden.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let order: Vec<&str> = golden.iter().map(|row| row["segment_id"].as_str().unwrap()).collect();
    // Partitions of the harness are in the order of their names, which is that of manifests here.
    assert_eq!(column(&output, "segment_id"), order);
    for partition in &output.partitions {
        let rows = output.rows("rows", partition.as_str());
        let tar = rows.column_by_name("tar_path").unwrap().as_string::<i32>().value(0);
        assert_eq!(
            tar.split('/').skip(1).take(2).collect::<Vec<_>>().join("/"),
            partition.as_str()
        );
    }
    let rows = output.all_rows("rows");
    let (offsets, sizes) = (
        rows.column_by_name("offset").unwrap(),
        rows.column_by_name("size").unwrap(),
    );
    for (row, path) in column(&output, "audio_path").iter().enumerate() {
        let (offset, size) = (offsets.as_primitive::<Int64Type>(), sizes.as_primitive::<Int64Type>());
        let bytes = flow_audio::decode::read_range(
            &Storage::default(),
            Path::new(path),
            offset.value(row) as u64,
            size.value(row) as u64,
        );
        assert!(
            flow_audio::decode::decode(&bytes.unwrap(), 60.0).is_ok(),
            "{path} row {row}"
        );
    }

    // Whoever changes what the kind gives has to raise its VERSION. Where recordings lie is left out: it differs from machine
    // to machine.
    let stable = rows.project(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12]).unwrap();
    let digest = Artifact::in_memory(stable.schema(), vec![(Partition::new("all"), vec![stable])])
        .unwrap()
        .digest();
    assert_eq!(
        (Read::VERSION, digest.short().to_string().as_str()),
        (17, "f8189b57cc65788c")
    );
    // The columns of a manifest of ours are all known.
    assert_eq!(rows.column_by_name("extra").unwrap().null_count(), rows.num_rows());
}

/// The same rows as JSON lines, plus broken ones.
#[test]
fn lines_are_read_around_broken_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.jsonl");
    fs::write(folder.path().join("a.flac"), recording()).unwrap();
    let good = r#"{"audio_filepath": "a.flac", "duration": 1.1, "text": "नमस्ते", "lang": "hi"}"#;
    let mut bytes = b"\xef\xbb\xbf".to_vec();
    for line in [
        good.as_bytes(),
        b"{broken",
        b"",
        b"{\"audio_filepath\": \"a.flac\", \"duration\": -1, \"text\": \"x\", \"lang\": \"hi\"}",
        b"{\"audio_filepath\": \"a.flac\", \"duration\": 1e999, \"text\": \"x\", \"lang\": \"hi\"}",
        b"{\"audio_filepath\": \"none.flac\", \"duration\": 1, \"text\": \"x\", \"lang\": \"hi\"}",
        b"{\"audio_filepath\": \"a.flac\", \"duration\": 1, \"text\": \"x\"}",
        b"\xff\xfe",
        good.as_bytes(),
    ] {
        bytes.extend_from_slice(line);
        bytes.push(b'\n');
    }
    bytes.extend(std::iter::repeat_n(b'x', (1 << 20) + 5));
    bytes.push(b'\n');
    bytes.extend_from_slice(good.as_bytes());
    fs::write(&path, &bytes).unwrap();

    let output = run(settings(&path));
    assert_eq!(column(&output, "text"), ["नमस्ते", "नमस्ते", "नमस्ते"]);
    let found: Vec<(Option<u32>, &str)> = output
        .rejects()
        .iter()
        .map(|(_, reject)| (reject.row, reject.reason.as_str()))
        .collect();
    assert_eq!(
        found,
        [
            (Some(1), "bad_json"),
            (Some(2), "duration_invalid"),
            (Some(3), "bad_json"),
            (Some(4), "missing_audio"),
            (Some(5), "missing_field"),
            (Some(6), "not_utf8"),
            (Some(8), "line_too_long"),
        ]
    );
    assert!(output.rejects()[0].1.values.contains("{broken"));

    let mut unseen = settings(&path);
    unseen.check_audio = false;
    assert!(!reasons(&run(unseen)).contains(&"missing_audio"));
}

#[test]
fn many_lines_are_many_partitions_and_none_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let lines = |count: usize| {
        let line = |n: usize| {
            format!("{{\"audio_filepath\": \"{n}.wav\", \"duration\": 1, \"text\": \"x\", \"lang\": \"en\"}}\n")
        };
        (0..count).map(line).collect::<String>()
    };
    fs::write(folder.path().join("m_0.json"), lines(20_000)).unwrap();
    fs::write(folder.path().join("m_1.json"), lines(3).trim_end()).unwrap();
    fs::write(folder.path().join("m_2.json"), "").unwrap();
    let mut settings = settings(&folder.path().join("m__OP_0..2_CL_.json"));
    settings.check_audio = false;
    let output = run(settings);
    let names: Vec<&str> = output.partitions.iter().map(Partition::as_str).collect();
    assert_eq!(
        names,
        [
            "00000-m_0/000000",
            "00000-m_0/000001",
            "00000-m_0/000002",
            "00001-m_1/000000"
        ]
    );
    let ids = column(&output, "segment_id");
    let expected: Vec<String> = (0..20_000).chain(0..3).map(|n| n.to_string()).collect();
    assert_eq!(ids, expected);
}

/// NeMo's tarred manifests: each manifest with a tar of its own, or one manifest whose lines name the tar.
#[test]
fn members_of_tars_are_found_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let audio = recording();
    for number in 0..2 {
        let mut tar = tar_of(&[(&format!("r{number}.flac"), &audio), ("both.flac", &audio)]);
        if number == 1 {
            // Bytes before the member move it.
            tar = tar_of(&[("other.flac", &audio), ("r1.flac", &audio), ("both.flac", &audio)]);
        }
        fs::write(folder.path().join(format!("audio_{number}.tar")), tar).unwrap();
        let line = |name: &str| {
            format!("{{\"audio_filepath\": \"{name}\", \"duration\": 1, \"text\": \"x\", \"shard_id\": {number}}}\n")
        };
        let lines = line(&format!("r{number}.flac")) + &line("deep/both.flac") + &line("none.flac");
        fs::write(folder.path().join(format!("manifest_{number}.json")), lines).unwrap();
    }
    let both = [0, 1].map(|n| fs::read_to_string(folder.path().join(format!("manifest_{n}.json"))).unwrap());
    fs::write(folder.path().join("all.json"), both.concat()).unwrap();
    let mut tarred = settings(&folder.path().join("manifest__OP_0..1_CL_.json"));
    tarred.tars = folder.path().join("audio__OP_0..1_CL_.tar").to_str().unwrap().into();
    tarred.lang = "en".into();
    let mut single = tarred.clone();
    single.manifest = folder.path().join("all.json").to_str().unwrap().into();
    for settings in [tarred, single] {
        let output = run(settings);
        assert_eq!(reasons(&output), ["missing_audio", "missing_audio"]);
        let rows = output.all_rows("rows");
        assert_eq!(rows.num_rows(), 4);
        for (row, path) in column(&output, "audio_path").iter().enumerate() {
            let number = |name: &str| {
                rows.column_by_name(name)
                    .unwrap()
                    .as_primitive::<Int64Type>()
                    .value(row) as u64
            };
            let bytes =
                flow_audio::decode::read_range(&Storage::default(), Path::new(path), number("offset"), number("size"))
                    .unwrap();
            assert!(bytes == audio, "{path} row {row}");
        }
    }
}

/// A row never gets the recording of another one, because that is called alike in another folder or another tar.
#[test]
fn members_called_alike_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let audio = recording();
    let members = ["spk1/a.flac", "spk3/b.flac", "spk4/b.flac", "c.flac", "x/deep/d.flac"];
    let tar = tar_of(&members.map(|name| (name, &audio)));
    fs::write(at("audio_0.tar"), tar).unwrap();
    let line = |name: &str, shard: usize| {
        serde_json::json!({"audio_filepath": name, "duration": 0.5, "text": name, "shard_id": shard, "lang": "hi"})
            .to_string()
    };
    let names = [
        "spk1/a.flac",
        "/data/spk1/a.flac",
        "spk9/c.flac",
        "deep/d.flac",
        "d.flac",
        "spk2/a.flac",
        "b.flac",
        "eep/d.flac",
    ];
    let mut lines = names.map(|name| line(name, 0)).to_vec();
    lines.push(line("c.flac", 1));
    fs::write(at("m.json"), lines.join("\n")).unwrap();
    let settings = ReadSettings {
        tars: at("audio_0.tar").to_str().unwrap().into(),
        ..settings(&at("m.json"))
    };
    let output = run(settings.clone());
    assert_eq!(column(&output, "text"), names[..5]);
    let details: Vec<&str> = output
        .rejects()
        .iter()
        .map(|(_, reject)| reject.detail.as_str())
        .collect();
    for (detail, part) in details.iter().zip([
        "which has \"spk1/a.flac\" in another folder",
        "where \"spk3/b.flac\" and \"spk4/b.flac\" are called so",
        "which has \"x/deep/d.flac\" in another folder",
        "no tar has the number of shard \"1\"",
    ]) {
        assert!(detail.contains(part), "{details:?}");
    }
    assert_eq!(reasons(&output), ["missing_audio"; 4]);

    // Two tars of the same number, as NeMo's buckets have them.
    for bucket in ["bucket1", "bucket2"] {
        fs::create_dir(at(bucket)).unwrap();
        fs::copy(at("audio_0.tar"), at(bucket).join("audio_0.tar")).unwrap();
    }
    let message = failure(ReadSettings {
        tars: at("bucket{1..2}/audio_0.tar").to_str().unwrap().into(),
        ..settings
    });
    assert!(message.contains("has the same number"), "{message}");
}

fn tar_of(members: &[(&str, &Vec<u8>)]) -> Vec<u8> {
    let mut tar = Vec::new();
    for (name, bytes) in members {
        let mut header = [0u8; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[100..107].copy_from_slice(b"0000644");
        header[124..135].copy_from_slice(format!("{:011o}", bytes.len()).as_bytes());
        header[156] = b'0';
        header[257..263].copy_from_slice(b"ustar\0");
        header[263..265].copy_from_slice(b"00");
        header[148..156].copy_from_slice(b"        ");
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        tar.extend_from_slice(&header);
        tar.extend_from_slice(bytes);
        tar.resize(tar.len().next_multiple_of(512), 0);
    }
    tar.resize(tar.len() + 1024, 0);
    tar
}

#[test]
fn a_folder_with_transcripts_is_a_manifest() {
    let folder = tempfile::tempdir().unwrap();
    let audio = recording();
    for (name, text) in [("hi/x/b", "दो\nशब्द \n"), ("hi/x/a", "एक"), ("en/c", "one")] {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path.with_extension("flac"), &audio).unwrap();
        fs::write(path.with_extension("txt"), text).unwrap();
    }
    fs::write(folder.path().join("en/no_text.flac"), &audio).unwrap();
    fs::write(folder.path().join("en/broken.wav"), b"RIFFxxxx").unwrap();
    fs::write(folder.path().join("en/broken.txt"), b"text").unwrap();
    let output = run(settings(folder.path()));
    assert_eq!(column(&output, "segment_id"), ["en/c", "hi/x/a", "hi/x/b"]);
    assert_eq!(column(&output, "text"), ["one", "एक", "दो शब्द"]);
    assert_eq!(column(&output, "lang"), ["en", "hi", "hi"]);
    assert_eq!(reasons(&output), ["decode_error", "missing_text"]);
    let measured = flow_audio::decode::decode(&audio, 60.0).unwrap().len() as f64 / 16_000.0;
    let durations = output
        .all_rows("rows")
        .column_by_name("duration")
        .unwrap()
        .as_primitive::<Float64Type>()
        .clone();
    assert!(durations.values().iter().all(|&seconds| seconds == measured));

    let table = "file_name,sentence,duration\nen/c.flac,\"one, two\",1.1\nen/none.flac,x,1\nen/c.flac,short\nen/c.flac,x,long\n";
    fs::write(folder.path().join("metadata.csv"), table).unwrap();
    let output = run(settings(folder.path()));
    assert_eq!(column(&output, "text"), ["one, two"]);
    assert_eq!(reasons(&output), ["missing_audio", "bad_line", "bad_type"]);
    fs::write(folder.path().join("metadata.csv"), "a,b\n1,2\n").unwrap();
    assert!(failure(settings(folder.path())).contains("names no column for the recording's file"));
}

#[test]
fn other_widths_of_text_and_numbers_are_cast_and_nulls_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.parquet");
    let mut langs = StringDictionaryBuilder::<Int32Type>::new();
    ["hi", "hi", "hi"].iter().for_each(|lang| langs.append_value(lang));
    let columns: Vec<(&str, arrow::array::ArrayRef)> = vec![
        (
            "segment_id",
            Arc::new(StringArray::from(vec![Some("a"), Some("b"), None])),
        ),
        (
            "text",
            Arc::new(arrow::array::LargeStringArray::from(vec!["x", "y", "z"])),
        ),
        ("duration", Arc::new(Float32Array::from(vec![1.5, f32::NAN, 1.0]))),
        ("lang", Arc::new(langs.finish())),
        (
            "audio_filepath",
            Arc::new(StringArray::from(vec!["m.parquet", "m.parquet", "m.parquet"])),
        ),
    ];
    let fields: Vec<Field> = columns
        .iter()
        .map(|(name, column)| Field::new(*name, column.data_type().clone(), true))
        .collect();
    let schema = Arc::new(Schema::new(fields));
    let write = |schema: Arc<Schema>, columns: Vec<arrow::array::ArrayRef>| {
        let mut writer = ArrowWriter::try_new(fs::File::create(&path).unwrap(), schema.clone(), None).unwrap();
        writer.write(&RecordBatch::try_new(schema, columns).unwrap()).unwrap();
        writer.close().unwrap();
    };
    write(
        schema.clone(),
        columns.iter().map(|(_, column)| column.clone()).collect(),
    );
    let output = run(settings(&path));
    assert_eq!(column(&output, "segment_id"), ["a"]);
    assert_eq!(reasons(&output), ["duration_invalid", "missing_field"]);
    assert!(
        output.rejects()[0].1.values.contains("\"duration\":\"NaN\""),
        "{:?}",
        output.rejects()
    );

    let number = Arc::new(Schema::new(vec![
        Field::new("segment_id", DataType::Utf8, true),
        Field::new("text", DataType::Float32, true),
        Field::new("duration", DataType::Float32, true),
    ]));
    write(
        number,
        vec![columns[0].1.clone(), columns[2].1.clone(), columns[2].1.clone()],
    );
    assert!(failure(settings(&path)).contains("column `text` is Float32, not text"));
    fs::write(&path, b"PAR1 but no more").unwrap();
    assert!(failure(settings(&path)).contains("m.parquet"));
}

#[test]
fn what_cannot_be_started_from_is_said_clearly() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| settings(&folder.path().join(name));
    assert!(failure(at("none.json")).contains("does not exist"));
    fs::write(folder.path().join("a.txt"), b"").unwrap();
    assert!(failure(at("a.txt")).contains("does not tell its format"));
    for (name, said) in [("a.tar", "`audio.webdataset` reads"), ("a.xlsx", "save it as CSV")] {
        fs::write(folder.path().join(name), b"").unwrap();
        assert!(failure(at(name)).contains(said), "{name}");
    }
    fs::write(folder.path().join("a.json"), b"").unwrap();
    assert!(failure(at("a.{json,txt}")).contains("does not tell its format"));
    fs::create_dir(folder.path().join("empty")).unwrap();
    assert!(failure(at("empty")).contains("no recording"));
    assert!(failure(ReadSettings::default()).contains("is empty"));
    let mut tars = at("a.json");
    tars.tars = folder.path().join("t_{0..3}.tar").to_str().unwrap().into();
    assert!(failure(tars).contains("the tar does not exist"));
}

#[test]
fn without_a_manifest_the_input_goes_on() {
    let schema = read_schema();
    let batch = RecordBatch::new_empty(schema.clone());
    let output = Harness::<Read>::new(ReadSettings::default())
        .input("rows", schema.clone())
        .feed("rows", "hi/a", batch)
        .run()
        .unwrap();
    assert_eq!(output.shape.outputs[0].schema, schema);
    assert_eq!(output.partitions.len(), 1);
}

fn opened(settings: &ReadSettings) -> Manifest {
    let scratch = std::env::temp_dir();
    open(&Storage::default(), settings, &scratch, &mut |_| true).unwrap_or_else(|e| panic!("{e}"))
}

fn table_of(settings: &ReadSettings) -> TableManifest {
    let files = vec![PathBuf::from(&settings.manifest)];
    TableManifest::open(&Storage::default(), files, settings, &std::env::temp_dir()).unwrap()
}

/// What belongs to the key of each partition beside the bytes of its files.
fn extras(settings: &ReadSettings) -> Vec<String> {
    let partitions = opened(settings).partitions(&Storage::default()).unwrap();
    partitions.into_iter().map(|partition| partition.extra).collect()
}

/// A manifest of rows (segment, shard, path of the recording) in row groups of `group` rows.
fn write_table(path: &Path, rows: &[(String, String, String)], group: usize) {
    let text = |of: fn(&(String, String, String)) -> &String| -> arrow::array::ArrayRef {
        Arc::new(StringArray::from_iter_values(rows.iter().map(of)))
    };
    let same =
        |value: &str| -> arrow::array::ArrayRef { Arc::new(StringArray::from_iter_values(rows.iter().map(|_| value))) };
    let seconds = Float32Array::from_iter_values(rows.iter().map(|_| 1.0));
    let columns: Vec<(&str, arrow::array::ArrayRef)> = vec![
        ("segment_id", text(|row| &row.0)),
        ("shard_id", text(|row| &row.1)),
        ("audio_path", text(|row| &row.2)),
        ("text", text(|row| &row.0)),
        ("lang", same("hi")),
        ("duration", Arc::new(seconds)),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let properties = parquet::file::properties::WriterProperties::builder()
        .set_max_row_group_row_count(Some(group))
        .build();
    let mut writer = ArrowWriter::try_new(fs::File::create(path).unwrap(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

#[test]
fn each_form_of_a_manifest_sees_its_recordings_change() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("folder")).unwrap();
    for name in ["folder/a.flac", "b.flac"] {
        fs::write(at(name), recording()).unwrap();
    }
    fs::write(at("folder/a.txt"), "one").unwrap();
    fs::write(at("t.tar"), tar_of(&[("m.flac", &recording())])).unwrap();
    let line = |file: &str| {
        format!("{{\"audio_filepath\": \"{file}\", \"duration\": 1, \"text\": \"x\", \"lang\": \"hi\"}}\n")
    };
    fs::write(at("m.jsonl"), line("b.flac") + &line("none.flac")).unwrap();
    fs::write(at("tarred.jsonl"), line("m.flac")).unwrap();
    let row = |segment: &str, shard: &str, path: &str| (segment.to_string(), shard.to_string(), path.to_string());
    write_table(
        &at("m.parquet"),
        &[row("a", "s1", "b.flac"), row("b", "s2", "none.flac")],
        10,
    );
    let tarred = ReadSettings {
        tars: at("t.tar").to_str().unwrap().into(),
        ..settings(&at("tarred.jsonl"))
    };
    let all = [
        ("b.flac", settings(&at("m.jsonl"))),
        ("b.flac", settings(&at("m.parquet"))),
        ("folder/a.flac", settings(&at("folder"))),
        ("t.tar", tarred),
    ];
    for (file, settings) in all {
        let age = |seconds| {
            let file = fs::File::options().write(true).open(at(file)).unwrap();
            let then = std::time::SystemTime::now() - std::time::Duration::from_secs(seconds);
            file.set_modified(then).unwrap();
        };
        age(100);
        let before = extras(&settings);
        assert_eq!(extras(&settings), before);
        age(50);
        let touched = extras(&settings);
        fs::rename(at(file), at("away")).unwrap();
        let others = match file {
            // A folder without recordings is not a manifest, and one whose tar is gone cannot be read.
            "folder/a.flac" | "t.tar" => vec![before.clone(), touched],
            _ => {
                let gone = extras(&settings);
                let unseen = ReadSettings {
                    check_audio: false,
                    ..settings.clone()
                };
                assert_eq!(
                    extras(&unseen),
                    before.iter().map(|_| String::new()).collect::<Vec<_>>()
                );
                // The other shard of the table is as it was.
                assert_eq!(gone[1..], before[1..]);
                vec![before.clone(), touched, gone]
            }
        };
        fs::rename(at("away"), at(file)).unwrap();
        let first: std::collections::BTreeSet<&String> = others.iter().map(|extras| &extras[0]).collect();
        assert_eq!(first.len(), others.len(), "{file}: {others:?}");
    }
    // What was not there turns up.
    let (lines, table) = (extras(&settings(&at("m.jsonl"))), extras(&settings(&at("m.parquet"))));
    fs::write(at("none.flac"), b"").unwrap();
    assert_ne!(extras(&settings(&at("m.jsonl"))), lines);
    let now = extras(&settings(&at("m.parquet")));
    assert!(now[0] == table[0] && now[1] != table[1]);
}

/// However rows are strewn over the file, it is passed over a few times and not once for each shard.
#[test]
fn shuffled_shards_are_read_in_few_passes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.parquet");
    let (count, shards) = (20_000, 400);
    // Each row's shard is as far from the one before as can be.
    let rows: Vec<_> = (0..count)
        .map(|row| {
            (
                format!("r{row:06}"),
                format!("s{:03}", row * 7_919 % shards),
                "x.flac".to_string(),
            )
        })
        .collect();
    write_table(&path, &rows, 1_000);
    let mut settings = settings(&path);
    settings.check_audio = false;
    let output = run(settings.clone());
    assert_eq!(output.partitions.len(), shards);
    for (number, partition) in output.partitions.iter().enumerate() {
        let rows = output.rows("rows", partition.as_str());
        let ids = rows.column_by_name("segment_id").unwrap().as_string::<i32>();
        let wanted: Vec<String> = (0..count)
            .filter(|row| row * 7_919 % shards == number)
            .map(|row| format!("r{row:06}"))
            .collect();
        assert!(
            ids.iter().flatten().eq(wanted.iter().map(String::as_str)),
            "{partition}"
        );
    }

    let tables = table_of(&settings);
    for partition in tables.partitions(&Storage::default()).unwrap() {
        let (mut out, mut recordings) = (
            Out::new(partition.name.clone()),
            Recordings::new(&Storage::default(), false),
        );
        let mut rows = Rows::new(&mut out, &mut recordings);
        tables.read(&Storage::default(), &partition.name, &mut rows).unwrap();
    }
    assert_eq!(
        tables.rows_passed(),
        2 * count,
        "one shard out of the file, then all of them at once"
    );

    // Shards that stand together are read out of the row groups that they are in.
    let mut sorted = rows.clone();
    sorted.sort_by(|a, b| a.1.cmp(&b.1));
    write_table(&path, &sorted, 50);
    let tables = table_of(&settings);
    let partitions = tables.partitions(&Storage::default()).unwrap();
    for partition in &partitions {
        let (mut out, mut recordings) = (
            Out::new(partition.name.clone()),
            Recordings::new(&Storage::default(), false),
        );
        let mut rows = Rows::new(&mut out, &mut recordings);
        tables.read(&Storage::default(), &partition.name, &mut rows).unwrap();
    }
    assert_eq!(tables.rows_passed(), count);
}

/// Where the rows are was read when the run was planned. Another file in its place is not read by that.
#[test]
fn a_manifest_that_changes_after_the_plan_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let line = |text: &str| {
        format!("{{\"audio_filepath\": \"x\", \"duration\": 1, \"text\": \"{text}\", \"lang\": \"hi\"}}\n")
    };
    let rows = |count: usize| -> Vec<_> {
        (0..count)
            .map(|row| (row.to_string(), "s".to_string(), "x".to_string()))
            .collect()
    };
    fs::create_dir(at("folder")).unwrap();
    let write = |longer: bool| {
        fs::write(at("m.jsonl"), line(if longer { "one two" } else { "one" })).unwrap();
        write_table(&at("m.parquet"), &rows(if longer { 3 } else { 2 }), 10);
        let more = if longer { "b.flac,two\n" } else { "" };
        fs::write(at("folder/metadata.csv"), format!("file_name,text\na.flac,one\n{more}")).unwrap();
    };
    for name in ["m.jsonl", "m.parquet", "folder"] {
        write(false);
        let manifest = opened(&settings(&at(name)));
        let partition = manifest.partitions(&Storage::default()).unwrap().remove(0).name;
        let read = || {
            let (mut out, mut recordings) = (Out::new(partition.clone()), Recordings::new(&Storage::default(), true));
            let mut rows = Rows::new(&mut out, &mut recordings);
            manifest.read(&Storage::default(), &partition, &mut rows)
        };
        read().unwrap();
        write(true);
        let error = read().unwrap_err().to_string();
        assert!(error.contains("was changed while the run was going on"), "{error}");
        // Parquet is listed by its row groups, which are those of the file as it was opened.
        if name != "m.parquet" {
            let error = manifest.partitions(&Storage::default()).unwrap_err().to_string();
            assert!(error.contains("was changed"), "{error}");
        }
    }
}

#[test]
fn a_manifest_without_rows_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("m.jsonl"), "").unwrap();
    write_table(&at("m.parquet"), &[], 10);
    fs::create_dir(at("folder")).unwrap();
    fs::write(at("folder/metadata.tsv"), "file_name\ttext\n").unwrap();
    for name in ["m.jsonl", "m.parquet", "folder"] {
        let message = failure(settings(&at(name)));
        assert!(message.contains("there are no rows in it"), "{name}: {message}");
    }
}

/// The length of what `recording` gives, in seconds.
const LENGTH: f64 = 1.103;

/// A duration counts from the offset, which is 0 where there is none; rows that end after their recording are refused, in
/// whatever form they come.
#[test]
fn rows_end_with_their_recordings() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("folder")).unwrap();
    for name in ["a.flac", "folder/a.flac"] {
        fs::write(at(name), recording()).unwrap();
    }
    fs::write(at("t.tar"), tar_of(&[("a.flac", &recording())])).unwrap();
    // Offset, duration, and whether there is as much.
    let rows = [
        (None, 0.5, true),
        (Some(0.0), 0.5, true),
        (Some(-0.0), LENGTH + 0.09, true),
        (Some(0.001), 0.5, true),
        (None, LENGTH - 0.003, true),
        (None, LENGTH + 0.11, false),
        (Some(0.0), LENGTH + 0.11, false),
        (Some(1.0), 0.2, true),
        (Some(1.0), 0.21, false),
    ];
    let kept: Vec<_> = rows.iter().filter(|row| row.2).collect();
    let mut lines = String::new();
    for (offset, duration, _) in rows {
        let offset = offset
            .map(|offset| format!(", \"offset\": {offset:?}"))
            .unwrap_or_default();
        lines.push_str(&format!(
            "{{\"audio_filepath\": \"a.flac\", \"duration\": {duration}, \"text\": \"x\", \"lang\": \"hi\"{offset}}}\n"
        ));
    }
    fs::write(at("m.jsonl"), lines).unwrap();
    let same = |value: &str| -> arrow::array::ArrayRef { Arc::new(StringArray::from(vec![value; rows.len()])) };
    let offsets: arrow::array::ArrayRef =
        Arc::new(rows.iter().map(|row| row.0).collect::<arrow::array::Float64Array>());
    let durations = arrow::array::Float64Array::from_iter_values(rows.iter().map(|row| row.1));
    let table = RecordBatch::try_from_iter(vec![
        ("segment_id", same("s")),
        ("text", same("x")),
        ("lang", same("hi")),
        ("audio_filepath", same("a.flac")),
        ("offset", offsets),
        ("duration", Arc::new(durations) as arrow::array::ArrayRef),
    ])
    .unwrap();
    let mut writer = ArrowWriter::try_new(fs::File::create(at("m.parquet")).unwrap(), table.schema(), None).unwrap();
    writer.write(&table).unwrap();
    writer.close().unwrap();
    let tarred = ReadSettings {
        tars: at("t.tar").to_str().unwrap().into(),
        ..settings(&at("m.jsonl"))
    };
    for settings in [settings(&at("m.jsonl")), settings(&at("m.parquet")), tarred] {
        let output = run(settings.clone());
        assert_eq!(reasons(&output), ["duration_past_end"; 3], "{settings:?}");
        let read = output.all_rows("rows");
        let numbers = |name: &str| read.column_by_name(name).unwrap().as_primitive::<Float64Type>().clone();
        let found: Vec<_> = numbers("start")
            .iter()
            .zip(numbers("duration").iter().flatten())
            .collect();
        let wanted: Vec<_> = kept
            .iter()
            .map(|row| (row.0.filter(|&offset| offset != 0.0), row.1))
            .collect();
        assert_eq!(found, wanted);

        // Where recordings are not looked at, decoding has to tell.
        let unseen = ReadSettings {
            check_audio: false,
            ..settings
        };
        assert_eq!(reasons(&run(unseen)), Vec::<&str>::new());
    }
    let table = format!("file_name,text,duration\na.flac,x,0.5\na.flac,x,{}\n", LENGTH + 0.11);
    fs::write(at("folder/metadata.csv"), table).unwrap();
    let hindi = ReadSettings {
        lang: "hi".into(),
        ..settings(&at("folder"))
    };
    assert_eq!(reasons(&run(hindi)), ["duration_past_end"]);
}
