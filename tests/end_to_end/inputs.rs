//! Inputs may change, be removed or not fit: a run detects and reports it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::binary::{Workplace, copy_folder, expect_code, program, read_manifest, stderr, with_failpoints};
use crate::training::finetune;

/// Manifests of the corpus, and the recordings of validation as files below `audio`.
fn with_recordings() -> Workplace {
    let place = Workplace::with_copy("micro");
    expect_code(
        &finetune(&place, &[]).args(["--until", "val_audio"]).output().unwrap(),
        0,
    );
    place.build_manifests(&[&format!("audio={}", place.path("audio").display()), "jsonl=true"]);
    place
}

/// Evaluates a manifest. Gives what ran, by stage, and what was heard, by segment.
fn evaluate(place: &Workplace, manifest: &Path) -> (BTreeMap<String, u64>, BTreeMap<String, String>) {
    let events = place.path("events.jsonl");
    let mut flow = program();
    flow.args(["run", "pipelines/evaluate.yaml", "--progress", "none", "--state"]);
    flow.arg(place.path("state")).arg("--events").arg(&events);
    for (name, path) in [
        ("manifest", manifest.to_path_buf()),
        ("audio", place.path("audio")),
        ("report", place.path("evaluation")),
        ("manifests", place.path("none")),
    ] {
        flow.args(["--set", &format!("{name}={}", path.display())]);
    }
    expect_code(&flow.output().unwrap(), 0);
    let ran = fs::read_to_string(events).unwrap();
    let ran = ran.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let ran = ran.filter(|event| event["event"] == "stage_started");
    let ran = ran.map(|event| {
        (
            event["stage"].as_str().unwrap().to_string(),
            event["run"].as_u64().unwrap(),
        )
    });
    let heard = fs::read_to_string(place.path("evaluation/transcripts.jsonl")).unwrap();
    let heard = heard.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let text = |line: &Value, name: &str| line[name].as_str().unwrap().to_string();
    let heard = heard.map(|line| (text(&line, "segment_id"), text(&line, "pred_text")));
    (ran.collect(), heard.collect())
}

fn recording(place: &Workplace, row: usize) -> (String, PathBuf) {
    let rows = read_manifest(&place.out().join("val_manifest_v2.parquet"));
    let row = &rows[row];
    let lang = row.tar_path.rsplit('/').nth(2).unwrap();
    let member = row.tar_member_name.trim_start_matches("./");
    let path = place.path("audio").join(lang).join(&row.shard_id).join(member);
    assert!(path.is_file(), "{}", path.display());
    (row.segment_id.clone(), path)
}

/// The validation rows as JSON lines that name nothing but files.
fn plain_lines(place: &Workplace) -> PathBuf {
    let ours = fs::read_to_string(place.out().join("val_manifest_v2.jsonl")).unwrap();
    let path = place.path("plain.jsonl");
    let mut plain = String::new();
    for line in ours.lines() {
        let mut line: Value = serde_json::from_str(line).unwrap();
        let file = place.out().join(line["audio_filepath"].as_str().unwrap());
        line["audio_filepath"] = file.display().to_string().into();
        for column in ["tar_path", "tar_member_name", "shard_id", "source"] {
            line.as_object_mut().unwrap().remove(column);
        }
        plain.push_str(&format!("{line}\n"));
    }
    fs::write(&path, plain).unwrap();
    path
}

fn move_time(path: &Path, seconds: u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(seconds))
        .unwrap();
}

/// Changes of recordings are detected, although a manifest only names them.
#[test]
fn recordings_that_change_are_evaluated_again() {
    let place = with_recordings();
    let of_ours = place.out().join("val_manifest_v2.parquet");
    for manifest in [of_ours.clone(), plain_lines(&place)] {
        // Of nearly the same length: a row that ended long after its recording would be refused.
        let ((first, first_file), (second, second_file)) = (recording(&place, 1), recording(&place, 7));
        let kept = fs::read(&first_file).unwrap();
        move_time(&first_file, 100);
        move_time(&second_file, 100);
        let (_, before) = evaluate(&place, &manifest);
        let (ran, again) = evaluate(&place, &manifest);
        assert_eq!((ran["rows"], ran["decode"]), (0, 0), "nothing to do: {ran:?}");
        assert_eq!(again, before);

        // Moved in time alone: looked at again, and nothing else.
        move_time(&first_file, 50);
        let (ran, again) = evaluate(&place, &manifest);
        assert!(ran["rows"] > 0 && ran["decode"] == 0, "{ran:?}");
        assert_eq!(again, before);

        // Swapped for another one.
        fs::copy(&second_file, &first_file).unwrap();
        let (ran, swapped) = evaluate(&place, &manifest);
        assert!(ran["rows"] > 0 && ran["decode"] == 1, "{ran:?}");
        assert_ne!(swapped[&first], before[&first]);
        assert_eq!(swapped[&first], swapped[&second]);

        // Damaged, then deleted: refused, first where it is decoded and then where it is looked for. A manifest of ours
        // says in which tar the recording is, too, and there it still stands.
        fs::write(&first_file, &kept[..kept.len() / 2]).unwrap();
        let (_, damaged) = evaluate(&place, &manifest);
        assert_eq!(damaged.len() + 1, before.len());
        fs::remove_file(&first_file).unwrap();
        let (ran, deleted) = evaluate(&place, &manifest);
        assert!(ran["rows"] > 0, "{ran:?}");
        let in_tar = manifest == of_ours;
        assert_eq!(deleted, if in_tar { before.clone() } else { damaged });
        // A regular file whose reading fails: one row's reject, without effect on the others.
        std::os::unix::fs::symlink("/proc/self/mem", &first_file).unwrap();
        let (_, unreadable) = evaluate(&place, &manifest);
        assert_eq!(unreadable.len() + 1, before.len());
        assert!(!unreadable.contains_key(&first));
        fs::remove_file(&first_file).unwrap();
        fs::write(&first_file, &kept).unwrap();
        assert_eq!(evaluate(&place, &manifest).1, before);
    }
}

/// The same where the recordings are still in the tars: only the bytes of those that are evaluated count.
#[test]
fn recordings_in_tars_that_change_are_evaluated_again() {
    let place = Workplace::with_copy("micro");
    place.build_manifests(&[]);
    let manifest = place.out().join("val_manifest_v2.parquet");
    let tar = PathBuf::from(&read_manifest(&manifest)[0].tar_path);
    move_time(&tar, 100);
    let (_, before) = evaluate(&place, &manifest);
    let (ran, _) = evaluate(&place, &manifest);
    assert_eq!((ran["rows"], ran["decode"]), (0, 0), "{ran:?}");
    // At the end of a tar there is nothing but zeros.
    let file = fs::File::options().append(true).open(&tar).unwrap();
    file.set_len(file.metadata().unwrap().len() + 512).unwrap();
    move_time(&tar, 50);
    let (ran, again) = evaluate(&place, &manifest);
    assert!(ran["rows"] == 1 && ran["decode"] == 0, "{ran:?}");
    assert_eq!(again, before);
    fs::remove_file(&tar).unwrap();
    let (ran, less) = evaluate(&place, &manifest);
    assert!(ran["rows"] == 1 && ran["decode"] == 1, "{ran:?}");
    assert!(less.len() < before.len());
}

fn delete_tars(shards: &Path) {
    for lang in fs::read_dir(shards).unwrap() {
        let lang = lang.unwrap().path();
        // Some of what is there are files.
        for shard in fs::read_dir(lang).into_iter().flatten() {
            for file in fs::read_dir(shard.unwrap().path()).into_iter().flatten() {
                let path = file.unwrap().path();
                if path.extension().is_some_and(|extension| extension == "tar") {
                    fs::remove_file(path).unwrap();
                }
            }
        }
    }
}

/// An unmounted disk looks like a corpus without shards, or without tars. Results are kept.
#[test]
fn what_is_missing_empties_no_manifest() {
    let mut place = Workplace::with_copy("micro");
    place.build_manifests(&[]);
    let whole = place.out_bytes();
    let refused = |place: &Workplace, settings: &[&str], code: i32, said: &[&str]| {
        let output = place.manifest_command("run", settings).output().unwrap();
        expect_code(&output, code);
        for said in said {
            assert!(stderr(&output).contains(said), "no {said:?} in {}", stderr(&output));
        }
        assert!(place.out_bytes() == whole, "the manifests are others: {said:?}");
    };
    let empty = place.path("empty");
    let shards = std::mem::replace(&mut place.shards, empty);
    fs::create_dir(&place.shards).unwrap();
    refused(&place, &[], 2, &["holds no shard", "mounted"]);
    place.shards = shards;

    // Half of the languages, and a third of what is left.
    let away = place.path("away");
    fs::create_dir(&away).unwrap();
    let mut langs: Vec<PathBuf> = fs::read_dir(&place.shards)
        .unwrap()
        .map(|lang| lang.unwrap().path())
        .collect();
    langs.sort();
    langs.retain(|lang| !["hi", "bn"].contains(&lang.file_name().unwrap().to_str().unwrap()));
    for lang in &langs {
        fs::rename(lang, away.join(lang.file_name().unwrap())).unwrap();
    }
    refused(&place, &[], 2, &["would shrink", "--allow-shrink"]);
    for lang in &langs {
        fs::rename(away.join(lang.file_name().unwrap()), lang).unwrap();
    }
    place.build_manifests(&[]);
    assert!(place.out_bytes() == whole);

    delete_tars(&place.shards);
    refused(&place, &[], 1, &["max_rejects", "missing_tar"]);
    refused(
        &place,
        &["max_faults=100%"],
        2,
        &["train and validation: 0 rows", "--allow-shrink"],
    );
    let mut meant = place.manifest_command("run", &["max_faults=100%"]);
    expect_code(&meant.arg("--allow-shrink").output().unwrap(), 0);
    assert_eq!(read_manifest(&place.out().join("train_manifest_v2.parquet")).len(), 0);
}

fn train_on(place: &Workplace, train: &Path, val: &Path, settings: &[&str]) -> Output {
    let train = format!("train_manifest={}", train.display());
    let val = format!("val_manifest={}", val.display());
    let mut all = vec!["train.max_steps=1", &train, &val];
    all.extend(settings);
    finetune(place, &all).output().unwrap()
}

/// Training rows that are also validation rows are an error, however they came together.
#[test]
fn manifests_of_two_splits_are_not_read_together() {
    let place = Workplace::new("micro");
    place.build_manifests(&[]);
    let first = place.path("first");
    copy_folder(&place.out(), &first);
    let killed = with_failpoints(&place.manifest_command("run", &["split_seed=9"]))
        .env("FLOW_KILL_AT", "export-renaming:3")
        .output()
        .unwrap();
    assert_eq!(killed.status.signal(), Some(9), "{}", stderr(&killed));
    let (train, val) = ("train_manifest_v2.parquet", "val_manifest_v2.parquet");

    // A set that was not written to its end.
    let output = train_on(&place, &place.out().join(train), &place.out().join(val), &[]);
    expect_code(&output, 2);
    assert!(
        stderr(&output).contains("no flow.json beside it"),
        "{}",
        stderr(&output)
    );

    // A set into which a file of another one was put.
    let mixed = place.path("mixed");
    copy_folder(&first, &mixed);
    place.build_manifests(&["split_seed=9"]);
    fs::copy(place.out().join(val), mixed.join(val)).unwrap();
    let output = train_on(&place, &mixed.join(train), &mixed.join(val), &[]);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("of another set"), "{}", stderr(&output));

    // Two sets that are whole, and files that say nothing of where they come from.
    fs::create_dir(place.path("bare")).unwrap();
    fs::copy(first.join(train), place.path("bare/a.parquet")).unwrap();
    fs::copy(place.out().join(val), place.path("bare/b.parquet")).unwrap();
    for (train, val) in [
        (first.join(train), place.out().join(val)),
        (place.path("bare/a.parquet"), place.path("bare/b.parquet")),
    ] {
        let output = train_on(&place, &train, &val, &[]);
        expect_code(&output, 2);
        for said in [
            "rows of validation are also in training",
            "by their segment",
            "allow_overlap",
        ] {
            assert!(stderr(&output).contains(said), "no {said:?} in {}", stderr(&output));
        }
        assert!(!place.path("checkpoints").exists());
    }
    let meant = train_on(
        &place,
        &first.join(train),
        &place.out().join(val),
        &["allow_overlap=true"],
    );
    expect_code(&meant, 0);
    assert!(stderr(&meant).contains("are also in training"), "{}", stderr(&meant));
}
