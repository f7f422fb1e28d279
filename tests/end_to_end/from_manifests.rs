//! Training from existing manifests, without the tars and the rest of the corpus.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;

use crate::binary::{Workplace, expect_code, read_manifest, read_rejects, stderr, wav};
use crate::training::{finetune, last_checkpoint};

/// A place that has no corpus, only what `from` made.
fn without_corpus() -> Workplace {
    let folder = tempfile::tempdir().unwrap();
    let shards = folder.path().join("no/such/corpus");
    Workplace { folder, shards }
}

fn setting(name: &str, path: &Path) -> String {
    format!("{name}={}", path.display())
}

fn train_from(place: &Workplace, train: &Path, val: &Path, audio: &Path) -> std::process::Output {
    let settings = [
        "train.max_steps=2".to_string(),
        setting("train_manifest", train),
        setting("val_manifest", val),
        setting("audio", audio),
    ];
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    finetune(place, &settings).output().unwrap()
}

/// Manifests and recordings made once from shards, then the shards deleted. The same rows in the same order are the
/// same training: the checkpoints are equal to the bit.
#[test]
fn manifests_and_recordings_alone_give_the_same_model() {
    let first = Workplace::with_copy("micro");
    expect_code(&finetune(&first, &["train.max_steps=2"]).output().unwrap(), 0);
    let audio = first.path("audio");
    // Made from what is committed; the recordings are where training had them.
    first.build_manifests(&["jsonl=true", &setting("audio", &audio)]);
    fs::remove_dir_all(&first.shards).unwrap();
    fs::remove_dir_all(first.path("state")).unwrap();

    let file = |name: &str| first.out().join(name);
    for (train, val) in [
        ("train_manifest_v2.parquet", "val_manifest_v2.parquet"),
        ("train_manifest_v2.jsonl", "val_manifest_v2.jsonl"),
    ] {
        let before = fs::read(file("flow.json")).unwrap();
        let place = without_corpus();
        let output = train_from(&place, &file(train), &file(val), &audio);
        expect_code(&output, 0);
        assert!(
            last_checkpoint(&place, 2) == last_checkpoint(&first, 2),
            "{train} gave another model"
        );
        assert!(!place.out().exists(), "manifests were written though they were given");
        assert_eq!(fs::read(file("flow.json")).unwrap(), before);

        let again = train_from(&place, &file(train), &file(val), &audio);
        expect_code(&again, 0);
        assert!(stderr(&again).contains("nothing to do"), "{}", stderr(&again));
    }

    // One recording less, and one line that is broken: two rows less, and the run goes on.
    let rows = read_manifest(&file("train_manifest_v2.parquet"));
    let lost = &rows[3];
    let lang = lost.tar_path.rsplit('/').nth(2).unwrap();
    fs::remove_file(audio.join(lang).join(&lost.shard_id).join(&lost.tar_member_name)).unwrap();
    let lines = fs::read_to_string(file("train_manifest_v2.jsonl")).unwrap();
    let broken = first.path("broken.jsonl");
    fs::write(&broken, lines.replacen("{\"audio_filepath\"", "\"audio_filepath\"", 1)).unwrap();
    let place = without_corpus();
    expect_code(&train_from(&place, &broken, &file("val_manifest_v2.jsonl"), &audio), 0);
    let mut flow = crate::binary::program();
    flow.args(["rejects", "pipelines/finetune.yaml", "--state"])
        .arg(place.path("state"));
    let rejects = flow
        .arg("--export")
        .arg(place.path("rejects.parquet"))
        .output()
        .unwrap();
    expect_code(&rejects, 0);
    let mut reasons: Vec<String> = read_rejects(&place.path("rejects.parquet"))
        .into_iter()
        .map(|reject| reject.reason)
        .collect();
    reasons.sort();
    // The corpus has one text of hundreds of words over a second of audio.
    assert_eq!(reasons, ["bad_json", "missing_audio", "too_many_tokens"]);
}

/// Rows of it are put aside for validation, by the parameters that shards have.
#[test]
fn one_manifest_alone_is_divided() {
    let first = Workplace::with_copy("micro");
    first.build_manifests(&[]);
    let manifest = first.out().join("train_manifest_v2.parquet");
    let rows = read_manifest(&manifest).len();
    let place = without_corpus();
    let run = |settings: &[&str]| {
        let manifest = setting("train_manifest", &manifest);
        let mut all = vec!["train.max_steps=2", manifest.as_str()];
        all.extend(settings);
        finetune(&place, &all).output().unwrap()
    };
    // Too few rows of each language for one in a hundred.
    let output = run(&["val_percent=1"]);
    expect_code(&output, 2);
    let said = stderr(&output);
    assert!(said.contains("rows are for validation, at least 1 must be"), "{said}");
    assert!(said.contains("val_percent"), "{said}");

    let output = run(&["val_percent=20"]);
    expect_code(&output, 0);
    let transcripts = fs::read_to_string(place.path("report").join("transcripts.jsonl")).unwrap();
    let of = |set: &str| {
        let lines = transcripts.lines().map(|line| serde_json::from_str(line).unwrap());
        let of_set = lines.filter(|line: &serde_json::Value| line["set"] == set);
        of_set
            .map(|line| format!("{}/{}", line["lang"], line["segment_id"]))
            .collect::<BTreeSet<String>>()
    };
    let (validation, training) = (of("validation"), of("train sample"));
    assert!(
        !validation.is_empty() && validation.is_disjoint(&training),
        "{transcripts}"
    );
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let table = format!("Split: {} of {rows} rows for validation", validation.len());
    assert!(said.contains(&table), "{said}");
    assert!(!place.out().exists(), "no manifest is written");

    let again = run(&["val_percent=20"]);
    expect_code(&again, 0);
    assert!(stderr(&again).contains("nothing to do"), "{}", stderr(&again));
}

#[test]
fn validation_alone_and_missing_manifests_are_refused() {
    let place = without_corpus();
    let output = finetune(&place, &["val_manifest=some.parquet"]).output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("train_manifest"), "{}", stderr(&output));
    let output = train_from(
        &place,
        Path::new("none/a.jsonl"),
        Path::new("none/b.jsonl"),
        Path::new(""),
    );
    expect_code(&output, 2);
    assert!(stderr(&output).contains("none/a.jsonl"), "{}", stderr(&output));
}

/// `flow check --deep` reports the expected rejects of a manifest, without an error.
#[test]
fn some_recordings_of_a_manifest_are_looked_at() {
    let place = without_corpus();
    let at = |name: &str| place.path(name);
    fs::write(at("a.wav"), wav(&[0; 32_000])).unwrap();
    fs::write(
        at("m.jsonl"),
        "{\"audio_filepath\": \"a.wav\", \"duration\": 2.0, \"text\": \"eins\"}\n\
         {\"audio_filepath\": \"b.wav\", \"duration\": 2.0, \"text\": \"zwei\"}\n",
    )
    .unwrap();
    let check = |name: &str| {
        let mut flow = crate::binary::program();
        flow.args([
            "check",
            "pipelines/finetune.yaml",
            "--deep",
            "--set",
            "lang=de",
            "--set",
        ])
        .arg(setting("train_manifest", &at(name)))
        .arg("--state")
        .arg(at("state"));
        flow.output().unwrap()
    };
    let output = check("m.jsonl");
    expect_code(&output, 0);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in [
        "looked at 2 of 2 rows",
        "16,000 Hz with 1 channel 1",
        "languages: de 1",
        "rows that would be refused: 1",
        "missing_audio  m.jsonl, line 2: ",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // No row would be left: an error, and of equal reasons the first few.
    let line = "{\"id\": \"c\", \"duration\": 2.0, \"supervisions\": [{\"text\": \"eins\"}], \"recording\": {}}\n";
    fs::write(at("cuts.jsonl"), line.repeat(25)).unwrap();
    let output = check("cuts.jsonl");
    expect_code(&output, 1);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(said.matches("this is a line of Lhotse's").count(), 3, "{said}");
    for part in ["missing_field  and 22 rows more", "train_rows would have no row"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("nothing wrong"), "{said}");
}

/// Corrections that people made count for rows of manifests; a set of which nothing is taken is an error.
#[test]
fn corrections_count_for_manifests() {
    let place = without_corpus();
    let at = |name: &str| place.path(name);
    fs::write(at("a.wav"), wav(&[0; 32_000])).unwrap();
    fs::write(
        at("m.jsonl"),
        "{\"audio_filepath\": \"a.wav\", \"duration\": 2.0, \"text\": \"eins\"}\n",
    )
    .unwrap();
    let corrections = |name: &str, segment: &str| {
        let texts = |value: &str| -> ArrayRef { Arc::new(StringArray::from(vec![value])) };
        let columns = [
            ("what", texts("text")),
            ("segment_id", texts(segment)),
            ("new_text", texts("zwei")),
            ("bad", Arc::new(BooleanArray::from(vec![false])) as ArrayRef),
        ];
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let mut writer = ArrowWriter::try_new(fs::File::create(at(name)).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
    };
    corrections("right.parquet", "a");
    corrections("other.parquet", "b");
    let evaluate = |name: &str| {
        let report = at(name).with_extension("report");
        let settings = [
            setting("manifest", &at("m.jsonl")),
            setting("corrections", &at(name)),
            setting("report", &report),
        ];
        let mut flow = crate::binary::program();
        flow.args(["run", "pipelines/evaluate.yaml", "--progress", "plain", "--state"])
            .arg(at("state"));
        for setting in settings {
            flow.args(["--set", &setting]);
        }
        (flow.output().unwrap(), report)
    };
    let (output, report) = evaluate("right.parquet");
    expect_code(&output, 0);
    let line = fs::read_to_string(report.join("transcripts.jsonl")).unwrap();
    let line: serde_json::Value = serde_json::from_str(line.trim()).unwrap();
    assert_eq!(line["text"], "zwei");
    let (output, report) = evaluate("other.parquet");
    expect_code(&output, 1);
    assert!(stderr(&output).contains("no_such_segment"), "{}", stderr(&output));
    assert!(!report.exists());
}

#[test]
fn json_lines_and_statistics_say_what_the_tables_say() {
    let place = Workplace::new("micro");
    place.build_manifests(&["jsonl=true"]);
    let statistics: serde_json::Value =
        serde_json::from_slice(&fs::read(place.out().join("statistics.json")).unwrap()).unwrap();
    for (set, name) in [
        ("master", "master_manifest"),
        ("train", "train_manifest_v2"),
        ("val", "val_manifest_v2"),
    ] {
        let rows = read_manifest(&place.out().join(format!("{name}.parquet")));
        let lines = fs::read_to_string(place.out().join(format!("{name}.jsonl"))).unwrap();
        assert_eq!(lines.lines().count(), rows.len());
        for (line, row) in lines.lines().zip(&rows) {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(line["text"], row.text.as_str());
            assert_eq!(line["lang"], row.lang.as_str());
            assert_eq!(line["segment_id"], row.segment_id.as_str());
            assert!((line["duration"].as_f64().unwrap() - row.duration).abs() < 1e-12);
            let beside = Path::new(&row.tar_path).parent().unwrap();
            let member = row.tar_member_name.trim_start_matches("./");
            assert_eq!(line["audio_filepath"], beside.join(member).to_str().unwrap());
        }
        let hindi: Vec<f64> = rows
            .iter()
            .filter(|row| row.lang == "hi")
            .map(|row| row.duration)
            .collect();
        let figures = &statistics["sets"][set]["languages"]["hi"];
        assert_eq!(figures["rows"], hindi.len());
        assert!((figures["hours"].as_f64().unwrap() - hindi.iter().sum::<f64>() / 3600.0).abs() < 1e-12);
        assert_eq!(statistics["sets"][set]["all"]["rows"], rows.len());
    }
    let rows = |name: &str| read_manifest(&place.out().join(format!("{name}_manifest_v2.parquet"))).len() as f64;
    let share = statistics["val_share"]["all"].as_f64().unwrap();
    assert!(
        (share - rows("val") / (rows("val") + rows("train"))).abs() < 1e-12,
        "{share}"
    );
}

/// Another Unicode form changes texts, but not which rows are kept.
#[test]
fn texts_are_composed_and_stripped_when_asked() {
    let texts = |settings: &[&str]| {
        let place = Workplace::new("micro");
        place.build_manifests(settings);
        let rows = read_manifest(&place.out().join("train_manifest_v2.parquet"));
        rows.into_iter()
            .map(|row| (row.segment_id, row.text))
            .collect::<Vec<_>>()
    };
    let invisible = |text: &str| text.contains(['\u{200b}', '\u{200c}', '\u{200d}', '\u{feff}']);
    let (plain, other) = (texts(&[]), texts(&["nfc=true", "strip_zero_width=true"]));
    assert!(plain.iter().any(|(_, text)| invisible(text)));
    assert!(!other.iter().any(|(_, text)| invisible(text)));
    let ids = |rows: &[(String, String)]| rows.iter().map(|(id, _)| id.clone()).collect::<Vec<_>>();
    assert_eq!(ids(&plain), ids(&other));
    assert!(plain != other);
    assert!(
        texts(&["nfc=true"]) != plain,
        "the corpus holds texts that are not composed"
    );
}
