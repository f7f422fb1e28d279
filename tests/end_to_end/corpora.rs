//! `pipelines/manifest.yaml` makes manifests of corpora in their own layouts; their recordings are read where they are.

use std::fs;
use std::path::Path;

use flow_audio::flac_encode::encode_signal;
use flow_storage_testing::TestServer;
use serde_json::Value;

use crate::binary::{Workplace, copy_folder, expect_code, files, program, read_rejects, stderr};
use crate::storage::age;

fn layouts() -> String {
    format!("{}/stages/layouts/tests/data/layouts", env!("CARGO_MANIFEST_DIR"))
}

fn lines(place: &Workplace) -> Vec<Value> {
    let text = fs::read_to_string(place.out().join("master_manifest.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_corpus_becomes_a_manifest_that_is_a_corpus_itself() {
    for (name, layout, reasons) in [
        (
            "saved",
            "Arrow files of Hugging Face",
            vec!["missing_audio", "missing_text"],
        ),
        (
            "hub",
            "Parquet files of Hugging Face",
            vec!["missing_audio", "missing_text"],
        ),
        (
            "lhotse",
            "recordings and supervisions of Lhotse",
            vec!["missing_recording"],
        ),
        ("shar", "Lhotse Shar", vec![]),
    ] {
        let place = Workplace::bundled("micro");
        let input = format!("input={}/{name}", layouts());
        let output = place
            .command("run", "pipelines/manifest.yaml", &[&input])
            .output()
            .unwrap();
        expect_code(&output, 0);
        assert!(stderr(&output).contains(layout), "{name}: {}", stderr(&output));
        let first = lines(&place);
        let texts: Vec<&str> = first.iter().map(|line| line["text"].as_str().unwrap()).collect();
        assert_eq!(texts[..2], ["ek", "do"], "{name}");
        let rejects = read_rejects(&place.out().join("rejects.parquet"));
        let found: Vec<&str> = rejects.iter().map(|reject| reject.reason.as_str()).collect();
        assert_eq!(found, reasons, "{name}");

        // The manifest is read as the corpus was.
        let again = Workplace::bundled("micro");
        let input = format!("input={}", place.out().join("master_manifest.jsonl").display());
        let output = again
            .command("run", "pipelines/manifest.yaml", &[&input])
            .output()
            .unwrap();
        expect_code(&output, 0);
        let second = lines(&again);
        assert_eq!(second.len(), first.len(), "{name}");
        for (first, second) in first.iter().zip(&second) {
            for key in ["segment_id", "text", "duration", "lang"] {
                assert_eq!(first[key], second[key], "{name}: {key}");
            }
        }
    }
}

/// Folders of a bucket are corpora, too; what has not changed there is not read again.
#[test]
fn a_corpus_in_a_bucket_gives_the_manifest_that_it_gives_on_disk() {
    let root = tempfile::tempdir().unwrap();
    let names = ["hub", "saved", "shar", "webdataset"];
    for name in names {
        copy_folder(
            &Path::new(&layouts()).join(name),
            &root.path().join("corpora").join(name),
        );
    }
    age(root.path());
    let server = TestServer::start(root.path()).unwrap();
    for name in names {
        let run = |place: &Workplace, command: &str, input: &str| {
            let input = format!("input={input}");
            let mut flow = place.command(command, "pipelines/manifest.yaml", &[&input, "lang=hi"]);
            let output = flow.envs(server.environment()).output().unwrap();
            expect_code(&output, 0);
        };
        let (disk, bucket) = (Workplace::bundled("micro"), Workplace::bundled("micro"));
        let url = format!("s3://corpora/{name}");
        run(&disk, "run", &format!("{}/{name}", layouts()));
        run(&bucket, "run", &url);
        let (expected, found) = (lines(&disk), lines(&bucket));
        assert!(!expected.is_empty() && found.len() == expected.len(), "{name}");
        for (expected, found) in expected.iter().zip(&found) {
            for key in ["segment_id", "text", "duration", "lang", "extra"] {
                assert_eq!(found[key], expected[key], "{name}: {key}");
            }
            let mut places = ["tar_path", "audio_filepath"].into_iter();
            let is_in_bucket = |key| found[key].as_str().is_some_and(|place| place.starts_with(&url));
            assert!(places.any(is_in_bucket), "{found}");
        }
        server.clear();
        run(&bucket, "run", &url);
        assert_eq!(server.requests(".tar"), 0, "{name}");
    }
}

/// A deep check decodes recordings within other files as training does.
#[test]
fn recordings_within_files_are_decoded_by_a_check() {
    let output = program()
        .args(["check", "pipelines/manifest.yaml", "--deep", "--set"])
        .arg(format!("input={}/hub", layouts()))
        .arg("--state")
        .arg(Path::new(&Workplace::bundled("micro").path("state")))
        .output()
        .unwrap();
    expect_code(&output, 0);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in [
        "looked at 2 of 4 rows",
        "16,000 Hz with 1 channel 2",
        "missing_audio",
        "missing_text",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn a_part_of_the_rows_becomes_a_validation_manifest() {
    let place = Workplace::bundled("micro");
    let output = place
        .command("run", "pipelines/manifest.yaml", &["val_percent=10", "jsonl=true"])
        .output()
        .unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("jsonl"), "{}", stderr(&output));
    let output = place.command("run", "pipelines/manifest.yaml", &["val_percent=20"]);
    let mut output = output;
    output.args([
        "--set",
        &format!("shards={}/tests/data/corpus/mini", env!("CARGO_MANIFEST_DIR")),
    ]);
    expect_code(&output.output().unwrap(), 0);
    let count = |name: &str| fs::read_to_string(place.out().join(name)).unwrap().lines().count();
    let (all, train, val) = (
        count("master_manifest.jsonl"),
        count("train_manifest_v2.jsonl"),
        count("val_manifest_v2.jsonl"),
    );
    assert!(val > 0 && train + val == all, "{all}: {train} and {val}");
}

/// Of two runs the second keeps the rows whose measures in the first meet the limit, and rejects the others by name.
#[test]
fn rows_are_selected_by_their_measures() {
    let place = Workplace::bundled("micro");
    let shards = format!("shards={}/tests/data/corpus/mini", env!("CARGO_MANIFEST_DIR"));
    let run = |limits: &[&str]| {
        let mut flow = place.command("run", "pipelines/quality.yaml", limits);
        expect_code(&flow.args(["--set", &shards]).output().unwrap(), 0);
        let measure = |line: &Value| {
            (
                line["segment_id"].as_str().unwrap().to_owned(),
                line["snr_db"].as_f64().unwrap(),
            )
        };
        lines(&place).iter().map(measure).collect::<Vec<_>>()
    };
    let all = run(&[]);
    let first = &lines(&place)[0];
    for name in ["bandwidth_hz", "speech_share", "characters_per_second"] {
        assert!(first[name].as_f64().unwrap() > 0.0, "{first}");
    }
    assert!(first["bandwidth_hz"].as_f64().unwrap() <= 8000.0, "{first}");
    let mut sorted: Vec<f64> = all.iter().map(|(_, snr)| *snr).collect();
    sorted.sort_by(f64::total_cmp);
    let limit = sorted[sorted.len() / 4];
    assert!(limit > sorted[0], "{sorted:?}");
    let distributions = || {
        let figures = fs::read(place.out().join("quality.json")).unwrap();
        serde_json::from_slice::<Value>(&figures).unwrap()
    };
    assert_eq!(
        (&distributions()["rows"], &distributions()["kept"]),
        (&all.len().into(), &all.len().into())
    );
    let kept = run(&[&format!("min_snr_db={limit}")]);
    // The page of the run has the histograms, with the limit, of all rows and of those that are kept.
    let figures = distributions();
    assert_eq!(
        (&figures["rows"], &figures["kept"]),
        (&all.len().into(), &kept.len().into())
    );
    let snr = &figures["columns"][0];
    assert_eq!(
        (&snr["column"], &snr["beyond_limits"]),
        (&"snr_db".into(), &(all.len() - kept.len()).into())
    );
    let reports: Vec<String> = fs::read_dir(place.path("state/runs"))
        .unwrap()
        .map(|run| fs::read_to_string(run.unwrap().path().join("report.html")).unwrap())
        .collect();
    let with_limit = reports.iter().filter(|page| page.contains("class=\"limit\"")).count();
    assert!(with_limit == 1 && reports.iter().all(|page| page.contains("Signal-to-noise ratio in dB")));
    let expected: Vec<(String, f64)> = all.iter().filter(|(_, snr)| *snr >= limit).cloned().collect();
    assert_eq!(kept, expected);
    let rejects = read_rejects(&place.out().join("rejects.parquet"));
    assert_eq!(rejects.len(), all.len() - kept.len());
    assert!(rejects.iter().all(|reject| reject.reason == "noisy"));
}

/// A corpus becomes a dataset of Hugging Face with the same rows, and a push shows what it would send before it needs the hub.
#[test]
fn a_dataset_has_the_rows_of_the_corpus_and_is_pushed_by_name() {
    let shards = format!("shards={}/tests/data/corpus/mini", env!("CARGO_MANIFEST_DIR"));
    let run = |settings: &[&str]| {
        let place = Workplace::bundled("micro");
        let mut flow = place.command("run", "pipelines/manifest.yaml", settings);
        expect_code(&flow.args(["--set", &shards]).output().unwrap(), 0);
        place
    };
    let rows = |place: &Workplace| {
        let row = |line: &Value| [line["text"].clone(), line["lang"].clone(), line["duration"].clone()];
        lines(place).iter().map(row).collect::<Vec<_>>()
    };
    let manifest = run(&[]);
    let dataset = run(&["format=huggingface", "license=cc-by-4.0"]);
    let names = ["README.md", "data/train-00000-of-00001.parquet", "flow.json"];
    assert!(names.iter().all(|name| dataset.out().join(name).is_file()));
    let again = run(&[&format!("input={}", dataset.out().display())]);
    assert_eq!(rows(&again), rows(&manifest));

    let push = |more: &[&str]| {
        let mut flow = program();
        flow.arg("push")
            .arg(dataset.out())
            .args(["hf://datasets/o/n"])
            .args(more);
        flow.env_remove("HUGGING_FACE_HUB_TOKEN")
            .env("HF_HOME", dataset.path("hub"));
        flow
    };
    // Files of others stay here, by name.
    for (name, text) in [
        ("data/of-others.parquet", "mine"),
        ("notes.txt", "mine"),
        ("README.md", "edited"),
    ] {
        fs::write(dataset.out().join(name), text).unwrap();
    }
    let output = push(&["--dry-run"]).env_remove("HF_TOKEN").output().unwrap();
    expect_code(&output, 0);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        said.contains("data/train-00000-of-00001.parquet") && said.contains("2 files"),
        "{said}"
    );
    let left_out: Vec<&str> = said.lines().filter(|line| line.starts_with("left out")).collect();
    let named =
        ["data/of-others.parquet", "notes.txt"].map(|name| format!("left out, as flow.json does not name it: {name}"));
    assert_eq!(left_out, named);
    assert!(
        said.contains("README.md") && !said.lines().any(|line| line.starts_with("flow.json")),
        "{said}"
    );
    for (token, endpoint, expected) in [
        ("", "http://127.0.0.1:1", "needs a token"),
        ("secret", "http://127.0.0.1:1", "refuses the connection"),
    ] {
        let output = push(&[])
            .env("HF_TOKEN", token)
            .env("HF_ENDPOINT", endpoint)
            .output()
            .unwrap();
        expect_code(&output, 1);
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
    expect_code(&push(&["--revision", "a b"]).output().unwrap(), 2);
}

/// Sets that hold recordings, or what their headers say, are written again when a recording is replaced by another of the same name and
/// the rows stay as they are; and not when nothing has changed.
#[test]
fn a_set_has_the_recordings_as_they_are() {
    let place = Workplace::bundled("micro");
    let samples = |seed: u64| -> Vec<f32> {
        let value = |at: u64| ((at * (seed + 3)) % 97) as f32 / 200.0;
        (0..16_000).map(value).collect()
    };
    let recording = place.path("one.flac");
    let record = |seed: u64| fs::write(&recording, encode_signal(&samples(seed), 16_000).unwrap()).unwrap();
    record(1);
    fs::copy(&recording, place.path("other.flac")).unwrap();
    let line = |name: &str| {
        format!("{{\"audio_filepath\": \"{name}\", \"duration\": 1.0, \"text\": \"a\", \"lang\": \"hi\"}}\n")
    };
    fs::write(place.path("rows.jsonl"), line("one.flac") + &line("other.flac")).unwrap();
    let formats = ["parquet", "huggingface", "lhotse", "shar"];
    let mut text = format!(
        "flow: 1\nstages:\n  rows: {{uses: manifest.read, with: {{manifest: {:?}}}}}\n",
        place.path("rows.jsonl")
    );
    for format in formats {
        let out = place.path(format);
        text += &format!(
            "  {format}: {{uses: manifest.write, from: {{train: rows}}, with: {{out: {out:?}, format: {format}}}}}\n"
        );
    }
    let pipeline = place.path("sets.yaml");
    fs::write(&pipeline, text).unwrap();
    let run = || {
        let mut flow = program();
        flow.arg("run").arg(&pipeline).arg("--state").arg(place.path("state"));
        let output = flow.output().unwrap();
        expect_code(&output, 0);
        let said = stderr(&output);
        formats.map(|format| !said.contains(&format!("{format}: its files are unchanged")))
    };
    let holds = |format: &str, seed: u64| {
        let flac = encode_signal(&samples(seed), 16_000).unwrap();
        let written = files(&place.path(format));
        written
            .values()
            .any(|bytes| bytes.windows(flac.len()).any(|part| part == flac))
    };
    assert_eq!(run(), [true; 4]);
    assert_eq!(run(), [false; 4]);
    record(2);
    assert!(!holds("huggingface", 2) && !holds("shar", 2));
    assert_eq!(run(), [false, true, true, true]);
    assert!(holds("huggingface", 2) && holds("shar", 2));
    assert_eq!(run(), [false; 4]);
}
