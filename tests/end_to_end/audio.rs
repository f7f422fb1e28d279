//! Recordings: extraction, checks of extracted files, reading from tars, deletion of tars, and WebDataset tars.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use arrow::array::AsArray;
use serde_json::Value;

use crate::binary::{Workplace, expect_code, files, program, read_manifest, read_parquet, stderr};

/// The smallest pipeline that extracts.
const EXTRACT: &str = r#"
flow: 1
params: {shards: "", out: "", audio: "", delete: false, min_quality: 0.5}
include:
  manifest:
    pipeline: ROOT/pipelines/build_manifest_v2.yaml
    params: {shards: "${shards}", out: "${out}", min_quality: "${min_quality}"}
stages:
  train_audio:
    uses: audio.extract
    from: {rows: manifest/split.train, members: manifest/probe.members}
    with: {shards: "${shards}", audio: "${audio}"}
  val_audio:
    uses: audio.extract
    from: {rows: manifest/split.val, members: manifest/probe.members}
    with: {shards: "${shards}", audio: "${audio}"}
  tars:
    when: ${delete}
    uses: audio.delete_tars
    from: {members: manifest/probe.members, train: train_audio, val: val_audio}
    with: {shards: "${shards}", out: "${out}"}
"#;

fn command(place: &Workplace, command: &str, settings: &[&str]) -> Command {
    let pipeline = place.path("extract.yaml");
    fs::write(&pipeline, EXTRACT.replace("ROOT", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let audio = format!("audio={}", place.path("audio").display());
    let settings: Vec<&str> = settings.iter().copied().chain([audio.as_str()]).collect();
    place.command(command, &pipeline.display().to_string(), &settings)
}

/// Runs the pipeline; gives the partitions that each stage ran and reused.
fn run(place: &Workplace, settings: &[&str]) -> BTreeMap<String, (u64, u64)> {
    let events = place.path("events.jsonl");
    let _ = fs::remove_file(&events);
    let output = command(place, "run", settings)
        .arg("--events")
        .arg(&events)
        .output()
        .unwrap();
    expect_code(&output, 0);
    let text = fs::read_to_string(&events).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let started = events.filter(|event| event["event"] == "stage_started");
    let figures = |event: Value| {
        let number = |name: &str| event[name].as_u64().unwrap();
        (
            event["stage"].as_str().unwrap().to_owned(),
            (number("run"), number("reused")),
        )
    };
    started.map(figures).collect()
}

#[test]
fn extracted_files_that_go_or_change_are_placed_again() {
    let place = Workplace::new("micro");
    run(&place, &[]);
    let audio = place.path("audio");
    let before = files(&audio);
    assert!(before.len() > 100, "{}", before.len());
    let ran = run(&place, &[]);
    assert!(ran.values().all(|(run, _)| *run == 0), "{ran:?}");

    // One file goes, one of another shard changes its size.
    let names: Vec<&PathBuf> = before.keys().collect();
    let (first, last) = (names[0], names[names.len() - 1]);
    assert_ne!(first.parent(), last.parent());
    fs::remove_file(audio.join(first)).unwrap();
    fs::write(audio.join(last), b"short").unwrap();
    let plan = command(&place, "plan", &[]).arg("--exit-code").output().unwrap();
    expect_code(&plan, 4);
    let said = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert!(said.contains("is gone") || said.contains("instead of"), "{said}");
    let ran = run(&place, &[]);
    assert_eq!(ran["train_audio"].0 + ran["val_audio"].0, 2, "{ran:?}");
    assert_eq!(ran["manifest/probe"].0, 0, "{ran:?}");
    assert_eq!(files(&audio), before);
    let ran = run(&place, &[]);
    assert!(ran.values().all(|(run, _)| *run == 0), "{ran:?}");
}

#[test]
fn deleted_tars_count_as_unchanged() {
    let place = Workplace::with_copy("micro");
    run(&place, &[]);
    let (manifests, audio) = (place.out_bytes(), files(&place.path("audio")));
    run(&place, &["delete=true"]);
    let list = fs::read_to_string(place.out().join("tars.jsonl")).unwrap();
    let lines: Vec<Value> = list.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut deleted = 0;
    for line in &lines {
        let (lang, shard) = line["partition"].as_str().unwrap().split_once('/').unwrap();
        let tar = place.shards.join(lang).join(shard).join(format!("{shard}.tar"));
        let extracted = audio.keys().any(|name| name.starts_with(Path::new(lang).join(shard)));
        assert_eq!(line["status"] == "deleted", extracted, "{line}");
        assert_eq!(
            !tar.exists() && tar.with_extension("tar.flow-removed").exists(),
            extracted,
            "{line}"
        );
        deleted += u64::from(extracted);
    }
    assert!(deleted > 10, "{list}");

    // Nothing is left to do, and another filter decodes nothing again.
    let ran = run(&place, &["delete=true"]);
    assert!(ran.values().all(|(run, _)| *run == 0), "{ran:?}");
    let ran = run(&place, &["delete=true", "min_quality=0.8"]);
    assert_eq!(ran["manifest/probe"].0, 0, "{ran:?}");
    assert!(ran["manifest/v1"].0 > 0, "{ran:?}");
    let fewer = read_manifest(&place.out().join("train_manifest_v2.parquet")).len();
    run(&place, &["delete=true"]);
    assert_eq!(place.out_bytes(), manifests);
    assert_eq!(files(&place.path("audio")), audio);
    assert!(fewer > 0 && fewer < read_manifest(&place.out().join("train_manifest_v2.parquet")).len());

    // A file that goes now cannot come back: its row is refused, with the reason.
    let name = audio.keys().next().unwrap();
    fs::remove_file(place.path("audio").join(name)).unwrap();
    run(&place, &["delete=true"]);
    let mut rejects = program();
    rejects
        .arg("rejects")
        .arg(place.path("extract.yaml"))
        .arg("--state")
        .arg(place.path("state"));
    let rejects = rejects.output().unwrap();
    expect_code(&rejects, 0);
    let said = String::from_utf8_lossy(&rejects.stdout).into_owned();
    assert!(said.contains("missing_tar"), "{said}");

    // Without the state directory the tars would have to be decoded again, which is an error.
    fs::remove_dir_all(place.path("state")).unwrap();
    let output = command(&place, "run", &["delete=true"]).output().unwrap();
    expect_code(&output, 1);
    assert!(
        stderr(&output).contains("was deleted after its recordings were extracted"),
        "{}",
        stderr(&output)
    );
}

/// A ustar of these members.
fn tar(members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, data) in members {
        let mut header = [0u8; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[100..108].copy_from_slice(b"0000644\0");
        header[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
        header[148..156].fill(b' ');
        header[156] = b'0';
        header[257..265].copy_from_slice(b"ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        bytes.extend(header);
        bytes.extend(data);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

const WEBDATASET: &str = r#"
flow: 1
params: {shards: "", out: ""}
stages:
  samples: {uses: audio.webdataset, with: {shards: "${shards}", lang: hi}}
  tagged:
    uses: sql
    from: samples
    with:
      query: SELECT * EXCEPT (text), tagged_text(clean_text(text), lang) AS text FROM samples
  write:
    uses: manifest.write
    from: {train: tagged}
    with: {out: "${out}", shards: "${shards}"}
"#;

#[test]
fn webdataset_tars_become_a_manifest() {
    let place = Workplace::new("micro");
    run(&place, &[]);
    let recordings: Vec<(PathBuf, Vec<u8>)> = files(&place.path("audio")).into_iter().take(3).collect();
    let mut members = Vec::new();
    for (number, (_, bytes)) in recordings.iter().enumerate() {
        members.push((format!("{number:04}.flac"), bytes.clone()));
        members.push((format!("{number:04}.txt"), format!("words, {number}!\n").into_bytes()));
    }
    members.push(("0001.json".into(), br#"{"lang": "mr"}"#.to_vec()));
    members.push(("lonely.txt".into(), b"no recording".to_vec()));
    let mut place = Workplace::new("micro");
    place.shards = place.path("webdataset");
    fs::create_dir_all(place.shards.join("part")).unwrap();
    fs::write(place.shards.join("part/train-000.tar"), tar(&members)).unwrap();
    let pipeline = place.path("webdataset.yaml");
    fs::write(&pipeline, WEBDATASET).unwrap();
    let pipeline = pipeline.display().to_string();
    expect_code(&place.command("run", &pipeline, &[]).output().unwrap(), 0);
    let rows = read_manifest(&place.out().join("train_manifest_v2.parquet"));
    let found: Vec<(&str, &str, &str, &str)> = rows
        .iter()
        .map(|row| {
            (
                row.segment_id.as_str(),
                row.text.as_str(),
                row.lang.as_str(),
                row.source.as_str(),
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            ("0000", "<|hi|> words 0", "hi", "webdataset"),
            ("0001", "<|mr|> words 1", "mr", "webdataset"),
            ("0002", "<|hi|> words 2", "hi", "webdataset"),
        ]
    );
    for row in &rows {
        assert_eq!(
            row.tar_path,
            place.shards.join("part/train-000.tar").display().to_string()
        );
        assert!(row.duration > 0.5 && row.duration < 20.0);
    }
    let rejects = read_parquet(&place.out().join("rejects.parquet"));
    let reasons: Vec<String> = rejects
        .iter()
        .flat_map(|batch| {
            batch["reason"]
                .as_string::<i32>()
                .iter()
                .flatten()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(reasons, ["missing_audio"]);
    let again = place.command("run", &pipeline, &[]).output().unwrap();
    assert!(stderr(&again).contains("nothing to do"), "{}", stderr(&again));
}
