//! Unselected stages are reused with their last results: train rows stay train rows, whatever ran before.

use std::process::Command;

use crate::binary::{Workplace, expect_code, program, read_manifest, stderr};
use crate::training::finetune;

/// A run on results of another setting is reported as it was, including shards that were removed since.
#[test]
fn what_was_taken_as_it_stands_is_told() {
    let place = Workplace::with_copy("micro");
    place.build_manifests(&[]);
    std::fs::remove_dir_all(place.shards.join("en/en_0000")).unwrap();
    place.build_manifests(&["split_seed=9"]);
    let written = place.out_bytes();
    let mut only = place.manifest_command("run", &[]);
    expect_code(&only.args(["--only", "write"]).output().unwrap(), 0);
    assert!(place.out_bytes() == written, "the split that stands is the last one");
    let mut rejects = program();
    rejects.arg("rejects").arg("--state").arg(place.path("state"));
    let output = rejects.output().unwrap();
    expect_code(&output, 0);
    // The note which run it is, beside the output.
    let said = stderr(&output);
    let state = format!(", state {}", place.path("state").display());
    assert!(
        said.starts_with("run ") && said.contains(" of build_manifest_v2, started ") && said.contains(&state),
        "{said}"
    );
    let rows = read_manifest(&place.out().join("val_manifest_v2.parquet"));
    for row in &rows {
        let text = lineage(&place, &row.segment_id);
        assert!(text.contains("goes on (val)"), "{}:\n{text}", row.segment_id);
    }
    // The forms in which other files name a segment.
    let row = &rows[0];
    let member = format!("{}::{}", row.tar_path, row.tar_member_name);
    for form in [member, row.tar_member_name.clone()] {
        let text = lineage(&place, &form);
        assert!(text.contains("goes on (val)"), "{form}:\n{text}");
    }
    let mut misspelt = program();
    let wrong = format!("{}x", row.segment_id);
    misspelt.args(["lineage", &wrong, "--state"]).arg(place.path("state"));
    let output = misspelt.output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("did you mean `"), "{}", stderr(&output));
}

/// A line of a manifest is read with the settings of the stage that read it, and told whatever bytes it has.
#[test]
fn a_line_is_told_as_the_run_read_it() {
    let place = Workplace::new("micro");
    let (manifest, pipeline) = (place.path("t.csv"), place.path("lines.yaml"));
    std::fs::write(&manifest, b"rec,words,duration\na.wav,Ja,0.5\nb.wav,\xff,2.0\n").unwrap();
    let text = format!(
        "flow: 1\nstages:\n  rows:\n    uses: manifest.read\n    max_rejects: 100%\n    with: {{manifest: {:?}, columns: \
         [rec=audio_filepath, words=text], lang: de, check_audio: false}}\n  \
         kept: {{uses: sql, from: rows, with: {{query: SELECT * FROM rows, rejects: [{{reason: short, when: duration < 1}}]}}}}\n",
        manifest.display().to_string()
    );
    std::fs::write(&pipeline, text).unwrap();
    let mut run = program();
    run.arg("run").arg(&pipeline).arg("--state").arg(place.path("state"));
    expect_code(&run.output().unwrap(), 0);
    for (line, told) in [
        (2, "kept: 00000-t/000000, row 0: refused, short"),
        (3, "rows: 00000-t/000000, row 1: refused, not_utf8"),
    ] {
        let text = lineage(&place, &format!("{}:{line}", manifest.display()));
        assert!(text.contains(told), "{line}: {text}");
    }
}

/// `flow lineage`, of the latest run.
fn lineage(place: &Workplace, segment: &str) -> String {
    let mut flow = program();
    flow.args(["lineage", segment, "--state"]).arg(place.path("state"));
    String::from_utf8(flow.output().unwrap().stdout).unwrap()
}

#[test]
fn rows_of_training_and_validation_are_never_exchanged() {
    // What the split says.
    let known = Workplace::new("micro");
    known.build_manifests(&[]);
    let segments = |name: &str| -> Vec<String> {
        let rows = read_manifest(&known.out().join(name));
        rows.into_iter().map(|row| row.segment_id).collect()
    };
    let (train, val) = (
        segments("train_manifest_v2.parquet"),
        segments("val_manifest_v2.parquet"),
    );
    assert!(!train.is_empty() && !val.is_empty());

    // Stages that share a recipe (`train_audio` and `val_audio`, `train_rows` and `val_rows`) run in turns, with another
    // split between them.
    let place = Workplace::new("micro");
    let run = |settings: &[&str], more: &[&str]| {
        let mut flow: Command = finetune(&place, settings);
        expect_code(&flow.args(more).output().unwrap(), 0);
    };
    run(&[], &["--until", "train_data"]);
    run(&[], &["--until", "val_rows"]);
    run(&["split_seed=9"], &["--until", "manifest/split"]);
    run(&["split_seed=9"], &["--only", "train_rows"]);
    run(&["split_seed=9"], &["--only", "train_data"]);
    // A process for each segment: some of many are enough, since it is whole partitions that could be exchanged.
    let some =
        |segments: &[String]| -> Vec<String> { segments.iter().step_by(segments.len().div_ceil(8)).cloned().collect() };
    let (train, val) = (some(&train), some(&val));
    let check = || {
        for segment in &val {
            let text = lineage(&place, segment);
            assert!(
                !text.contains("train_data:") && !text.contains("train_rows:"),
                "{segment}:\n{text}"
            );
        }
        for segment in &train {
            let text = lineage(&place, segment);
            // One that training refuses (its text is too long) does not go on to `train_data`.
            let is_known = text.contains("train_data:") || text.contains("fitting:");
            assert!(
                is_known && text.contains("train_rows:") && !text.contains("val_rows:"),
                "{segment}:\n{text}"
            );
        }
    };
    check();
    run(&[], &["--only", "train_data"]);
    check();
    run(&["train.max_steps=4"], &["--from", "train_rows"]);
    check();
}
