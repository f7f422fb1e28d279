use std::fs;
use std::path::Path;

use arrow::array::{Float64Array, Int64Array, StringArray, UInt32Array};
use flow_corpus::ReadSettings;
use flow_layouts::read::Read;
use flow_runtime::harness::{Harness, Output};
use serde_json::{Value, json};

use super::*;
use crate::sql::Sql;

fn read(manifest: &Path) -> Output {
    let settings = ReadSettings {
        manifest: manifest.to_str().unwrap().into(),
        ..ReadSettings::default()
    };
    let output = Harness::<Read>::new(settings).run().unwrap_or_else(|e| panic!("{e:?}"));
    assert!(output.rejects().is_empty(), "{:?}", output.rejects());
    output
}

/// All rows of a port go into `train` of a set in `out`.
fn write(rows: &Output, out: &Path) -> Result<(), StageError> {
    write_with(rows, out, "").map(|_| ())
}

/// The same, with more settings.
fn write_with(rows: &Output, out: &Path, more: &str) -> Result<Output, StageError> {
    let schema = rows.shape.outputs[0].schema.clone();
    let settings = format!("{{out: {:?}, jsonl: true{more}}}", out.to_str().unwrap());
    let mut harness = Harness::<Write>::from_yaml(&settings)?.input("train", schema);
    for partition in &rows.partitions {
        harness = harness.feed("train", partition.as_str(), rows.rows("rows", partition.as_str()));
    }
    harness.run()
}

fn query(rows: &Output, settings: &str) -> Output {
    let schema = rows.shape.outputs[0].schema.clone();
    let mut harness = Harness::<Sql>::from_yaml(settings).unwrap().input("rows", schema);
    for partition in &rows.partitions {
        harness = harness.feed("rows", partition.as_str(), rows.rows("rows", partition.as_str()));
    }
    harness.run().unwrap_or_else(|e| panic!("{e:?}"))
}

fn lines(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Three rows of one recording, one of another; what is not a recording is not opened for its length.
fn manifest(folder: &Path) -> std::path::PathBuf {
    fs::create_dir_all(folder.join("clips")).unwrap();
    for name in ["clips/a.wav", "clips/b.wav"] {
        fs::write(folder.join(name), b"not looked into").unwrap();
    }
    let path = folder.join("all.jsonl");
    let lines = [
        r#"{"audio_filepath": "clips/a.wav", "duration": 1.734, "text": "one", "lang": "en", "offset": 0, "speaker": "s1", "snr": 20.5}"#,
        r#"{"audio_filepath": "clips/a.wav", "duration": 2.5, "text": "two", "lang": "en", "offset": 1.734, "speaker": "s2", "snr": 3}"#,
        r#"{"audio_filepath": "clips/b.wav", "duration": 1.25, "text": "three", "lang": "hi", "speaker": "s1", "pnc": {"case": [true]}}"#,
        r#"{"audio_filepath": "clips/b.wav", "duration": 3, "text": "four", "lang": "hi"}"#,
    ];
    fs::write(&path, lines.join("\n")).unwrap();
    path
}

/// A manifest that exists is filtered by a column and by a key of its own: paths, offsets, durations and all other keys come
/// through, and what was written is read again as the same rows.
#[test]
fn a_filtered_manifest_keeps_its_audio_and_its_keys() {
    let folder = tempfile::tempdir().unwrap();
    let rows = read(&manifest(folder.path()));
    let filtered = query(
        &rows,
        "query: SELECT * FROM rows\nrejects: [{reason: noisy, when: \"CAST(json_text(extra, 'snr') AS DOUBLE) < 10\"}]",
    );
    assert_eq!(filtered.rejects().len(), 1);
    let out = folder.path().join("out");
    write(&filtered, &out).unwrap();
    let path = |name: &str| folder.path().join("clips").join(name).to_str().unwrap().to_string();
    let mut wanted = vec![
        json!({"audio_filepath": path("a.wav"), "duration": 1.734, "text": "one", "lang": "en", "segment_id": "a", "speaker": "s1", "snr": 20.5}),
        json!({"audio_filepath": path("b.wav"), "duration": 1.25, "text": "three", "lang": "hi", "segment_id": "b", "speaker": "s1", "pnc": {"case": [true]}}),
        json!({"audio_filepath": path("b.wav"), "duration": 3.0, "text": "four", "lang": "hi", "segment_id": "b"}),
    ];
    for line in &mut wanted {
        for (key, text) in [
            ("shard_id", "all"),
            ("tar_member_name", ""),
            ("tar_path", ""),
            ("source", "manifest"),
        ] {
            line[key] = text.into();
        }
    }
    assert_eq!(lines(&out.join("train_manifest_v2.jsonl")), wanted);

    // Offsets that are not 0 are written.
    let all = folder.path().join("unfiltered");
    write(&rows, &all).unwrap();
    let offsets: Vec<Value> = lines(&all.join("train_manifest_v2.jsonl"))
        .iter()
        .map(|line| line["offset"].clone())
        .collect();
    assert_eq!(offsets, [Value::Null, json!(1.734), Value::Null, Value::Null]);

    for name in ["train_manifest_v2.jsonl", "train_manifest_v2.parquet"] {
        let again = read(&all.join(name)).all_rows("rows");
        let before = rows.all_rows("rows");
        for column in [
            "segment_id",
            "text",
            "duration",
            "lang",
            "audio_path",
            "start",
            "offset",
            "size",
            "extra",
        ] {
            assert_eq!(
                again.column_by_name(column).unwrap(),
                before.column_by_name(column).unwrap(),
                "{column} of {name}"
            );
        }
    }
}

/// Columns that SQL has added are written where they are named, and the log says which are not.
#[test]
fn further_columns_are_written_where_they_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let rows = read(&manifest(folder.path()));
    let added = "SELECT *, json_text(extra, 'speaker') AS speaker, duration > 2 AS long, duration / 0 AS rate, \
                 duration * 2 AS twice, [1, 2] AS list FROM rows";
    let rows = query(&rows, &format!("query: \"{added}\""));
    let out = folder.path().join("out");
    let written = write_with(&rows, &out, ", extra_columns: [speaker, long, twice]").unwrap();
    let all = lines(&out.join("train_manifest_v2.jsonl"));
    let of = |name: &str| all.iter().map(|line| line[name].clone()).collect::<Vec<Value>>();
    assert_eq!(of("speaker"), [json!("s1"), json!("s2"), json!("s1"), Value::Null]);
    assert_eq!(of("long"), [json!(false), json!(true), json!(false), json!(true)]);
    assert_eq!(of("twice"), [json!(3.468), json!(5.0), json!(2.5), json!(6.0)]);
    assert_eq!(of("snr")[0], json!(20.5), "keys of `extra` stay");
    assert!(all.iter().all(|line| line.get("list").is_none()));
    let file = fs::File::open(out.join("train_manifest_v2.parquet")).unwrap();
    let batches = parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
    let batch = batches.build().unwrap().next().unwrap().unwrap();
    let names: Vec<String> = batch
        .schema()
        .fields()
        .iter()
        .map(|field| field.name().clone())
        .collect();
    assert_eq!(names[names.len() - 4..], ["extra", "speaker", "long", "twice"]);
    assert_eq!(
        batch.column_by_name("twice").unwrap().as_ref(),
        &Float64Array::from(vec![3.468, 5.0, 2.5, 6.0])
    );
    let notes: Vec<&Event> = written
        .events
        .iter()
        .filter(|event| matches!(event, Event::Note { .. }))
        .collect();
    assert!(
        matches!(notes[..], [Event::Note { message }] if message.contains("written: list, rate;")),
        "{notes:?}"
    );
    for (columns, said) in [
        ("[none]", "no column `none`"),
        ("[speaker, speaker]", "twice"),
        ("[list]", "cast it"),
        ("[text]", "anyway"),
        ("[start]", "anyway"),
        ("[rate]", "is not a number that JSON has"),
    ] {
        let error = write_with(&rows, &out, &format!(", extra_columns: {columns}"))
            .map(|_| ())
            .unwrap_err();
        assert!(error.to_string().contains(said), "{columns}: {error}");
    }
}

/// Rows that say in no way where their recording is are an error that names what is missing.
#[test]
fn rows_without_a_recording_are_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let rows = read(&manifest(folder.path()));
    let columns = "_row, segment_id, shard_id, text, duration, lang, tar_member_name, tar_path, source";
    for (select, missing) in [
        (columns.to_string(), "`audio_path`, `start`, `offset`, `size`"),
        (format!("{columns}, audio_path"), "columns `start`, `offset`, `size`"),
        ("* EXCEPT (audio_path), '' AS audio_path".to_string(), "are empty"),
    ] {
        let chosen = query(&rows, &format!("query: \"SELECT {select} FROM rows\""));
        let out = folder.path().join("out");
        let error = write(&chosen, &out).unwrap_err().to_string();
        assert!(
            error.contains(missing) && error.contains("cannot be found"),
            "{select}: {error}"
        );
        assert!(!out.join("train_manifest_v2.parquet").exists());
    }
}

/// A row in a tar names the tar and the member, by which it is found again.
#[test]
fn rows_in_tars_name_their_tar() {
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("_row", Arc::new(UInt32Array::from(vec![0]))),
        ("tar_path", Arc::new(StringArray::from(vec!["hi/hi_1/hi_1.tar"]))),
        ("tar_member_name", Arc::new(StringArray::from(vec!["a.flac"]))),
        (
            "audio_path",
            Arc::new(StringArray::from(vec!["/data/hi/hi_1/hi_1.tar"])),
        ),
        ("start", Arc::new(Float64Array::from(vec![Some(2.0)]))),
        ("offset", Arc::new(Int64Array::from(vec![Some(512)]))),
        ("size", Arc::new(Int64Array::from(vec![Some(100)]))),
        ("segment_id", Arc::new(StringArray::from(vec!["a"]))),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let places = Places::of(&batch).unwrap();
    let (audio, out) = (Path::new(""), Path::new("out"));
    let extracted = Extracted::new(audio, out);
    let partition = Partition::new("hi/hi_1");
    let place = |shards: &str| places.of_row(0, shards, &extracted, &partition).unwrap();
    assert_eq!(&*place("").tar_path, "/data/hi/hi_1/hi_1.tar");
    assert_eq!(&*place("/other").tar_path, "/other/hi/hi_1/hi_1.tar");
    assert_eq!(&*place("").tar_path, "/data/hi/hi_1/hi_1.tar");
    assert_eq!((place("").file, place("").offset), (None, Some(2.0)));
}

/// Paths of tars that follow each other, equal or not, each get the folder of shards.
#[test]
fn each_tar_gets_the_folder_of_shards() {
    let tars = ["hi/a/a.tar", "hi/a/a.tar", "hi/b/b.tar", "", "hi/a/a.tar"];
    let texts = |values: Vec<&str>| -> ArrayRef { Arc::new(StringArray::from(values)) };
    let batch = RecordBatch::try_from_iter(vec![
        ("tar_path", texts(tars.to_vec())),
        ("tar_member_name", texts(vec!["a.flac"; tars.len()])),
        ("audio_path", texts(vec!["x.flac"; tars.len()])),
        (
            "start",
            Arc::new(Float64Array::from(vec![None; tars.len()])) as ArrayRef,
        ),
        ("offset", Arc::new(Int64Array::from(vec![None; tars.len()]))),
        ("size", Arc::new(Int64Array::from(vec![None; tars.len()]))),
    ])
    .unwrap();
    let places = Places::of(&batch).unwrap();
    let extracted = Extracted::new(Path::new(""), Path::new("out"));
    let partition = Partition::new("hi/a");
    for shards in ["/s", "s/", "", "/"] {
        let paths: Vec<String> = (0..tars.len())
            .map(|row| places.of_row(row, shards, &extracted, &partition).unwrap())
            .map(|place| place.tar_path.to_string())
            .collect();
        let before = match shards {
            "" => "",
            "/" => "/",
            "s/" => "s/",
            _ => "/s/",
        };
        let wanted = tars.map(|tar| match tar {
            "" => String::new(),
            tar => format!("{before}{tar}"),
        });
        assert_eq!(paths, wanted, "{shards}");
    }
}

/// Rows came in, and none of them came through.
#[test]
fn an_empty_set_is_written_only_where_it_is_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let rows = read(&manifest(folder.path()));
    let schema = rows.shape.outputs[0].schema.clone();
    let reject = |reason: &str| flow_kind::Reject {
        row: Some(0),
        id: None,
        reason: reason.into(),
        class: flow_kind::RejectClass::Rule,
        detail: String::new(),
        values: "{}".into(),
    };
    let write = |allowed: &str, rejects: &[&str]| {
        let out = folder.path().join("out");
        let settings = format!("{{out: {:?}{allowed}}}", out.to_str().unwrap());
        let mut harness = Harness::<Write>::from_yaml(&settings)
            .unwrap()
            .input("train", schema.clone());
        harness = harness.empty_partition("train", "en/a");
        for reason in rejects {
            harness = harness.rejected("clean", "en/a", reject(reason));
        }
        let written = harness.run().map(|_| ());
        (written, out.join("train_manifest_v2.parquet").is_file())
    };
    let (refused, is_there) = write("", &["too_short", "noisy", "noisy"]);
    let message = refused.unwrap_err().to_string();
    assert_eq!(
        message,
        "all 3 rows were refused: 2 noisy of stage clean, 1 too_short of stage clean"
    );
    assert!(!is_there, "written all the same");
    assert!(matches!(write(", allow_empty: true", &["noisy"]), (Ok(()), true)));
    // Where nothing was refused there was nothing to write.
    assert!(matches!(write("", &[]), (Ok(()), true)));
}

/// Rows of `audio.webdataset`: the member in its tar, as NeMo's tarred manifests have it, which is read again as the same row.
#[test]
fn rows_in_tars_are_written_as_nemo_reads_tars() {
    let folder = tempfile::tempdir().unwrap();
    let tar_path = folder.path().join("wds/part/audio_3.tar");
    fs::create_dir_all(tar_path.parent().unwrap()).unwrap();
    let recording = b"fLaC not looked into";
    let mut builder = tar::Builder::new(fs::File::create(&tar_path).unwrap());
    let mut header = tar::Header::new_ustar();
    header.set_size(recording.len() as u64);
    header.set_mode(0o644);
    builder.append_data(&mut header, "x/0001.flac", &recording[..]).unwrap();
    builder.finish().unwrap();
    // A file of the same name beside the manifest is another one.
    let out = folder.path().join("out");
    fs::create_dir_all(out.join("x")).unwrap();
    fs::write(out.join("x/0001.flac"), b"another").unwrap();
    let text = |value: &str| -> ArrayRef { Arc::new(StringArray::from(vec![value])) };
    let batch = RecordBatch::try_from_iter(vec![
        ("_row", Arc::new(UInt32Array::from(vec![0])) as ArrayRef),
        ("segment_id", text("x/0001")),
        ("shard_id", text("audio_3")),
        ("text", text("one")),
        ("duration", Arc::new(Float64Array::from(vec![1.5]))),
        ("lang", text("en")),
        ("tar_member_name", text("./x/0001.flac")),
        ("tar_path", text("part/audio_3.tar")),
        ("source", text("webdataset")),
        ("offset", Arc::new(Int64Array::from(vec![512]))),
        ("size", Arc::new(Int64Array::from(vec![recording.len() as i64]))),
    ])
    .unwrap();
    let write = |shards: &str| {
        let settings = format!("{{out: {:?}, jsonl: true, shards: {shards:?}}}", out.to_str().unwrap());
        let harness = Harness::<Write>::from_yaml(&settings)?.input("train", batch.schema());
        harness.feed("train", "part/audio_3", batch.clone()).run()
    };
    let error = write("").map(drop).unwrap_err().to_string();
    assert!(error.contains("part/audio_3.tar does not exist"), "{error}");
    write(folder.path().join("wds").to_str().unwrap()).unwrap();
    let line = &lines(&out.join("train_manifest_v2.jsonl"))[0];
    assert_eq!(
        (&line["audio_filepath"], &line["shard_id"]),
        (&json!("x/0001.flac"), &json!(3))
    );
    for name in ["train_manifest_v2.jsonl", "train_manifest_v2.parquet"] {
        let again = read(&out.join(name)).all_rows("rows");
        let text = |column: &str| columns::text(&again, column).unwrap().value(0).to_string();
        assert_eq!(text("audio_path"), tar_path.to_str().unwrap(), "{name}");
        assert_eq!(
            (text("shard_id"), text("segment_id")),
            ("audio_3".into(), "x/0001".into()),
            "{name}"
        );
        assert_eq!(columns::whole(&again, "offset").unwrap().value(0), 512, "{name}");
    }
    // And by NeMo's own settings for tars, without ours.
    let plain = folder.path().join("nemo.jsonl");
    fs::write(
        &plain,
        r#"{"audio_filepath": "x/0001.flac", "duration": 1.5, "text": "one", "lang": "en", "shard_id": 3}"#,
    )
    .unwrap();
    let settings = ReadSettings {
        manifest: plain.to_str().unwrap().into(),
        tars: folder
            .path()
            .join("wds/part/audio__OP_3..3_CL_.tar")
            .to_str()
            .unwrap()
            .into(),
        ..ReadSettings::default()
    };
    let rows = Harness::<Read>::new(settings).run().unwrap().all_rows("rows");
    assert_eq!(columns::whole(&rows, "offset").unwrap().value(0), 512);
}

/// Columns that were kept beside rows are none of the times of the rows that were written.
#[test]
fn times_of_others_come_through_a_written_manifest() {
    let folder = tempfile::tempdir().unwrap();
    manifest(folder.path());
    let table = folder.path().join("table.csv");
    let text = "path,text,lang,duration,start_ms,start\nclips/a.wav,one,en,1.5,250,2020-01-01\n";
    fs::write(&table, text).unwrap();
    let settings = ReadSettings {
        manifest: table.to_str().unwrap().into(),
        columns: vec!["start_ms=extra".into(), "start=extra".into()],
        ..ReadSettings::default()
    };
    let rows = Harness::<Read>::new(settings).run().unwrap();
    let out = folder.path().join("out");
    write(&rows, &out).unwrap();
    let before = rows.all_rows("rows");
    for name in ["train_manifest_v2.jsonl", "train_manifest_v2.parquet"] {
        let after = read(&out.join(name)).all_rows("rows");
        for column in ["start", "duration", "text", EXTRA] {
            assert_eq!(
                after.column_by_name(column),
                before.column_by_name(column),
                "{name}: {column}"
            );
        }
    }
}

/// Numbers under names of times that were kept beside rows say nothing of the rows' places when they are read again.
#[test]
fn numbers_beside_a_row_are_no_times_when_they_are_read_again() {
    let folder = tempfile::tempdir().unwrap();
    manifest(folder.path());
    let lines_of_others = folder.path().join("others.jsonl");
    let text = r#"{"audio_filepath": "clips/a.wav", "text": "one", "lang": "en", "duration": 1.5, "start": -7.25, "end_time": 9e3, "stop": [1]}"#;
    fs::write(&lines_of_others, text).unwrap();
    let settings = ReadSettings {
        manifest: lines_of_others.to_str().unwrap().into(),
        columns: ["start=extra", "end_time=extra", "stop=extra"]
            .map(String::from)
            .to_vec(),
        ..ReadSettings::default()
    };
    let rows = Harness::<Read>::new(settings).run().unwrap();
    assert!(rows.rejects().is_empty(), "{:?}", rows.rejects());
    let out = folder.path().join("out");
    write(&rows, &out).unwrap();
    let line = &lines(&out.join("train_manifest_v2.jsonl"))[0];
    assert_eq!(
        [&line["start"], &line["end_time"], &line["stop"], &line["offset"]],
        [&json!("-7.25"), &json!("9e3"), &json!([1]), &json!(0.0)]
    );
    let again = read(&out.join("train_manifest_v2.parquet")).all_rows("rows");
    let before = rows.all_rows("rows");
    for column in ["start", "duration", EXTRA] {
        assert_eq!(again.column_by_name(column), before.column_by_name(column), "{column}");
    }
}
