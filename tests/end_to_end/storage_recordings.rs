//! `flow transcribe` and `flow diarize` with recordings and results in a bucket.

use std::fs;
use std::path::Path;
use std::process::Output;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use flow_storage_testing::{Fault, FaultRule, TestServer};
use parquet::arrow::ArrowWriter;

use crate::binary::{expect_code, program, stderr};
use crate::storage::age;
use crate::transcription::recording;

fn flow(server: &TestServer, words: &[&str]) -> Output {
    let mut command = program();
    command.args(words).args(["--progress", "plain"]);
    command.envs(server.environment()).output().unwrap()
}

#[track_caller]
fn done(output: Output) -> Output {
    expect_code(&output, 0);
    output
}

#[test]
fn recordings_in_a_bucket_give_the_results_of_those_on_disk() {
    let place = tempfile::tempdir().unwrap();
    let served = place.path().join("served");
    fs::create_dir_all(served.join("bucket/talks/later")).unwrap();
    for (from, to) in [
        ("rec_hi_0001_000.flac", "one.flac"),
        ("rec_hi_0004_003.flac", "later/two#2?.flac"),
    ] {
        fs::write(served.join("bucket/talks").join(to), recording(from)).unwrap();
    }
    fs::write(served.join("bucket/talks/notes.txt"), "no recording").unwrap();
    age(&served);
    let server = TestServer::start(&served).unwrap();
    let local = place.path().join("local");
    let talks = served.join("bucket/talks");
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    done(flow(&server, &["transcribe", &text(&talks), "--out", &text(&local)]));
    server.fault(FaultRule::first(2, Fault::Status(503), ".flac"));
    server.fault(FaultRule::first(2, Fault::Drop, "/bucket/out"));
    done(flow(
        &server,
        &["transcribe", "s3://bucket/talks", "--out", "s3://bucket/out"],
    ));
    let files = ["one.txt", "later/two#2?.txt"];
    for file in files {
        let there = fs::read(served.join("bucket/out").join(file)).unwrap();
        assert!(
            there == fs::read(local.join(file)).unwrap() && !there.is_empty(),
            "{file}"
        );
    }
    // Nothing is done again.
    server.clear();
    done(flow(
        &server,
        &["transcribe", "s3://bucket/talks", "--out", "s3://bucket/out"],
    ));
    assert_eq!(server.requests("PUT "), 0);
    assert_eq!(server.requests("GET /bucket/talks"), 0);

    // One object, a pattern, and turns of speakers.
    let printed = done(flow(&server, &["transcribe", "s3://bucket/talks/one.flac", "--stdout"]));
    assert!(printed.stdout == fs::read(local.join("one.txt")).unwrap());
    done(flow(
        &server,
        &["diarize", "s3://bucket/talks/later/*", "--out", "s3://bucket/turns"],
    ));
    done(flow(
        &server,
        &[
            "diarize",
            &text(&talks.join("later")),
            "--out",
            &text(&place.path().join("turns")),
        ],
    ));
    let turns = fs::read(served.join("bucket/turns/two#2?.rttm")).unwrap();
    assert!(turns == fs::read(place.path().join("turns/two#2?.rttm")).unwrap() && !turns.is_empty());

    // Rows of a manifest, whose paths are relative to it.
    let paths: ArrayRef = Arc::new(StringArray::from(vec!["one.flac", "later/two#2?.flac"]));
    let rows = RecordBatch::try_from_iter([("audio_filepath", paths)]).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), rows.schema(), None).unwrap();
    writer.write(&rows).unwrap();
    fs::write(served.join("bucket/talks/rows.parquet"), writer.into_inner().unwrap()).unwrap();
    let printed = done(flow(
        &server,
        &["transcribe", "s3://bucket/talks/rows.parquet", "--stdout"],
    ));
    let each = files.map(|file| fs::read_to_string(local.join(file)).unwrap());
    let printed = String::from_utf8(printed.stdout).unwrap();
    assert!(each.iter().all(|text| printed.contains(text.trim_end())), "{printed}");

    // Files of others are left alone, and what is not there is said.
    fs::create_dir_all(served.join("bucket/other")).unwrap();
    fs::write(served.join("bucket/other/one.txt"), "by hand").unwrap();
    for (input, out, said) in [
        (
            "s3://bucket/talks/one.flac",
            "s3://bucket/other",
            "one.txt is there already",
        ),
        (
            "s3://bucket/none",
            "s3://bucket/new",
            "s3://bucket/none: there is no such object",
        ),
        ("s3://bucket/talks/*.wav", "s3://bucket/new", "nothing fits"),
        (
            "s3://bucket/talks",
            "s3://user:hush@bucket/new",
            "must not contain a user or password",
        ),
    ] {
        let output = flow(&server, &["transcribe", input, "--out", out]);
        expect_code(&output, 2);
        let errors = stderr(&output);
        assert!(errors.contains(said) && !errors.contains("hush"), "{input}: {errors}");
    }
    assert_eq!(fs::read(served.join("bucket/other/one.txt")).unwrap(), b"by hand");
}
