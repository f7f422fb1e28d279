//! Mistakes in pipelines, settings and the command line: exit code 2, and the place is shown.

use std::path::Path;
use std::process::Output;

use crate::binary::{Workplace, expect_code, program, stderr};

/// `flow check` on the shipped pipeline after one replacement in its text.
fn check_edited(place: &Workplace, from: &str, to: &str) -> (Output, usize) {
    let pipeline = Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines/build_manifest_v2.yaml");
    let text = std::fs::read_to_string(pipeline).unwrap();
    assert!(text.contains(from), "the pipeline no longer says `{from}`");
    let line = text[..text.find(from).unwrap()].matches('\n').count() + 1;
    let edited = place.path("edited.yaml");
    std::fs::write(&edited, text.replacen(from, to, 1)).unwrap();
    (program().arg("check").arg(&edited).output().unwrap(), line)
}

#[test]
fn the_shipped_pipelines_are_right() {
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines")).unwrap() {
        let path = entry.unwrap().path();
        let mut check = program();
        check.arg("check").arg(&path);
        if path.ends_with("plan_batches.yaml") {
            check.args(["--set", "manifest=m.parquet", "--set", "out=b.parquet"]);
        }
        expect_code(&check.output().unwrap(), 0);
    }
}

#[test]
fn a_typo_is_shown_with_file_line_and_a_suggestion() {
    let place = Workplace::new("micro");
    for (from, to, hints) in [
        (
            "uses: manifest.scan",
            "uses: manifest.scn",
            &["manifest.scn", "manifest.scan"][..],
        ),
        ("rejects:", "rejcts:", &["rejcts", "rejects"]),
        ("flow: 1", "flow: 99", &["99"]),
        ("isnan(duration_s)", "isnan(duraton_s)", &["duraton_s"]),
    ] {
        let (output, line) = check_edited(&place, from, to);
        expect_code(&output, 2);
        let text = stderr(&output);
        for hint in hints {
            assert!(text.contains(hint), "`{hint}` is missing for `{to}`:\n{text}");
        }
        let place = format!("edited.yaml:{line}:");
        assert!(text.contains(&place), "expected {place} for `{to}`:\n{text}");
    }
}

#[test]
fn an_unknown_parameter_is_refused_with_a_suggestion() {
    let place = Workplace::new("micro");
    let output = place.manifest_command("run", &["min_qualty=0.4"]).output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("min_quality"), "{}", stderr(&output));
    let output = place.manifest_command("run", &["min_quality=high"]).output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("min_quality"), "{}", stderr(&output));
}

#[test]
fn a_missing_shards_folder_is_named() {
    let mut place = Workplace::new("micro");
    place.shards = place.path("nowhere");
    let output = place.manifest_command("run", &[]).output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("nowhere"), "{}", stderr(&output));
}

#[test]
fn a_state_directory_of_a_newer_version_is_refused_by_name() {
    let place = Workplace::new("micro");
    place.build_manifests(&[]);
    std::fs::write(place.path("state").join("FORMAT"), b"{\"version\":99}").unwrap();
    let output = place.manifest_command("run", &[]).output().unwrap();
    assert!(!output.status.success());
    assert!(stderr(&output).contains("99"), "{}", stderr(&output));
}
