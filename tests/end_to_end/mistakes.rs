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
        if path.is_dir() {
            // What other pipelines include.
            continue;
        }
        let mut check = program();
        check.arg("check").arg(&path);
        if path.ends_with("plan_batches.yaml") {
            check.args(["--set", "manifest=m.parquet", "--set", "out=b.parquet"]);
        }
        expect_code(&check.output().unwrap(), 0);
    }
}

#[test]
fn parameters_are_listed_with_those_of_included_files_and_without_secrets() {
    let mut check = program();
    check.args(["check", "pipelines/finetune.yaml", "--params"]);
    check.args(["--set", "train.max_steps=7", "--set", "hub_token=not-to-be-shown"]);
    check.current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = check.output().unwrap();
    expect_code(&output, 0);
    let listed = String::from_utf8(output.stdout).unwrap();
    let line = |name: &str| {
        let found = listed.lines().find(|line| line.split(' ').next() == Some(name));
        found.unwrap_or_else(|| panic!("{name}: {listed}"))
    };
    // The value that is given; the help of the file that is included.
    assert!(line("train.max_steps").contains('7') && line("train.max_steps").ends_with("optimizer steps in total"));
    assert!(line("min_quality").contains("0.5") && line("nfc").contains("false"));
    assert!(!line("hub_token").contains("not-to-be-shown"), "{}", line("hub_token"));
}

#[test]
fn an_overlay_may_come_through_a_pipe_of_the_shell() {
    let check = |overlay: &str| {
        let script = format!("\"$0\" check pipelines/finetune.yaml --config <(printf '{overlay}')");
        let mut shell = std::process::Command::new("bash");
        shell.args(["-c", &script]).arg(program().get_program());
        shell.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap()
    };
    expect_code(&check("flow: 1\\nparams: {val_percent: 20}\\n"), 0);
    let wrong = check("flow: 1\\nparams: {val_prcent: 20}\\n");
    expect_code(&wrong, 2);
    assert!(
        stderr(&wrong).contains("did you mean `val_percent`?"),
        "{}",
        stderr(&wrong)
    );
}

/// The time for many mistakes must not be quadratic, which took a minute.
#[test]
fn each_of_many_unknown_names_is_told_with_its_place() {
    let place = Workplace::new("micro");
    let overlay = place.path("many.yaml");
    let names: String = (0..2_000)
        .map(|number| format!("  unknown_{number}: {}\n", "x".repeat(180)))
        .collect();
    std::fs::write(&overlay, format!("flow: 1\nparams:\n{names}")).unwrap();
    let mut check = program();
    check
        .args(["check", "pipelines/finetune.yaml", "--config"])
        .arg(&overlay);
    let output = check.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    expect_code(&output, 2);
    let said = stderr(&output);
    assert!(
        said.contains("2000 mistakes"),
        "{}",
        &said[said.len().saturating_sub(500)..]
    );
    for line in [3, 2_002] {
        assert!(said.contains(&format!("many.yaml:{line}:3")), "line {line}");
    }
}

/// Every overlay fits the pipeline that it is for, and those of devices fit after a model's.
#[test]
fn the_shipped_overlays_are_right() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    let yaml = |folder: &Path| -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries
            .filter(|path| path.extension().is_some_and(|e| e == "yaml"))
            .collect()
    };
    let check = |overlays: &[&Path]| {
        let mut check = program();
        check.args(["check", "pipelines/finetune.yaml"]);
        for overlay in overlays {
            check.arg("--config").arg(overlay);
        }
        expect_code(&check.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap(), 0);
    };
    let models = yaml(&root);
    for overlay in models.iter().filter(|path| !path.ends_with("languages.yaml")) {
        check(&[overlay]);
    }
    let devices = yaml(&root.join("devices"));
    assert_eq!(devices.len(), 4);
    for device in &devices {
        check(&[&root.join("parakeet_tdt_0.6b_v3.yaml"), device]);
    }
}

/// `flow memory` reports the needs of training, and whether they fit.
#[test]
fn memory_is_told_before_anything_runs() {
    let memory = |size: &str| {
        let mut command = program();
        command.args(["memory", "pipelines/finetune.yaml", "--device-memory", size]);
        for setting in [
            "model.d_model=32",
            "model.layers=6",
            "model.heads=2",
            "model.pred_hidden=24",
            "init=none",
            // A secret is read where settings are read once more.
            "hub_token=${env:FLOW_TEST_TOKEN}",
        ] {
            command.args(["--set", setting]);
        }
        command.env("FLOW_TEST_TOKEN", "hf_0123456789abcdef");
        command.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap()
    };
    let fits = memory("8GB");
    expect_code(&fits, 0);
    let text = String::from_utf8_lossy(&fits.stdout).into_owned();
    for part in [
        "parameters",
        "optimizer: adamw8bit",
        "fits into 8.0 GB",
        "the largest max_batch_seconds that fits: ",
    ] {
        assert!(text.contains(part), "`{part}` is missing:\n{text}");
    }
    let largest = text
        .lines()
        .last()
        .and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    assert!(largest.is_some_and(|seconds| seconds > 100.0), "{text}");
    let too_small = memory("5MB");
    expect_code(&too_small, 4);
    let text = String::from_utf8_lossy(&too_small.stdout).into_owned();
    assert!(
        text.contains("does not fit into 5 MB") && text.contains("not even one clip"),
        "{text}"
    );
    expect_code(&memory("much"), 2);
}

/// The least time of a step on a card, and what is no card or no micro-batch.
#[test]
fn the_least_time_of_a_step_is_told() {
    let memory = |arguments: &[&str]| {
        let mut command = program();
        command
            .args(["memory", "pipelines/finetune.yaml", "--set", "init=none"])
            .args(arguments);
        command.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap()
    };
    let output = memory(&["--roofline", "--device", "l4", "--micro-batch", "2x3x10"]);
    expect_code(&output, 0);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in [
        "2 clips of 3 s with 10 tokens each, on NVIDIA L4",
        "joint network and loss",
        "model FLOP utilisation",
    ] {
        assert!(text.contains(part), "`{part}` is missing:\n{text}");
    }
    for wrong in [
        &["--roofline", "--device", "abacus"][..],
        &["--roofline", "--micro-batch", "2x3"],
        &["--device", "h100"],
        &["--roofline", "--device-memory", "8GB"],
    ] {
        expect_code(&memory(wrong), 2);
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

/// `flow check` reports problems that are detectable without running anything.
#[test]
fn check_warns_of_what_will_go_wrong() {
    let place = Workplace::new("micro");
    let manifest = place.path("train.jsonl");
    std::fs::write(&manifest, "{}\n").unwrap();
    let manifest = manifest.display().to_string();
    let (train, val) = (format!("train_manifest={manifest}"), format!("val_manifest={manifest}"));
    let check = |set: &[&str]| {
        let mut check = program();
        check.args(["check", "pipelines/finetune.yaml"]);
        for value in ["out", "audio", "checkpoints", "model_out", "report"] {
            check
                .arg("--set")
                .arg(format!("{value}={}", place.path(value).display()));
        }
        for value in set {
            check.args(["--set", value]);
        }
        let output = check.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr(&output).to_string(),
        )
    };
    let (code, said, _) = check(&[]);
    assert!(code == Some(0) && !said.contains("warning"), "{said}");
    for (set, expected) in [
        (&["shards=nowhere/shards"][..], "nowhere/shards does not exist"),
        (&["init=nowhere.nemo"], "nowhere.nemo does not exist"),
        (
            &["init=nvidia/parakeet-tdt-0.6b-v2"],
            "is written hf://nvidia/parakeet-tdt-0.6b-v2",
        ),
        (&["tokenizer=nowhere.model"], "nowhere.model does not exist"),
        (
            &["train_manifest=nowhere.jsonl", val.as_str()],
            "nowhere.jsonl does not exist",
        ),
        (&[train.as_str(), val.as_str()], "what is trained on cannot validate"),
        (
            &["min_duration=5", "max_duration=1"],
            "`min_duration` is 5, more than `max_duration`, 1",
        ),
    ] {
        let (code, said, _) = check(set);
        assert_eq!(code, Some(0), "{set:?}: {said}");
        assert!(said.contains("warning: ") && said.contains(expected), "{set:?}: {said}");
    }
    let (code, said, _) = check(&[&train, &val, "allow_overlap=true"]);
    assert!(code == Some(0) && !said.contains("warning"), "{said}");
    let (code, _, said) = check(&["train.phase1_lr=3"]);
    assert!(code == Some(2) && said.contains("3 is above 1"), "{said}");
    let (code, _, said) = check(&["train.learning_rate=3e-4"]);
    assert!(
        code == Some(2) && said.contains("here that is `train.phase1_lr` and `train.phase2_lr`"),
        "{said}"
    );
}

/// Rows that are parts of recordings, and lose the columns that say which part: all of a recording would be taken for each.
#[test]
fn a_path_alone_is_not_enough_for_parts_of_recordings() {
    let place = Workplace::new("micro");
    let check = |columns: &str| {
        let pipeline = place.path("parts.yaml");
        let text = format!(
            "flow: 1\nstages:\n  rows: {{uses: manifest.read, with: {{manifest: m.jsonl}}}}\n  \
             some: {{uses: sql, from: rows, with: {{query: 'SELECT _row, segment_id, text, duration, lang, {columns} FROM rows'}}}}\n  \
             same: {{uses: sql, from: some, with: {{query: 'SELECT * FROM some'}}}}\n  \
             load: {{uses: sampling.load, from: same, with: {{steps: 2}}}}\n"
        );
        std::fs::write(&pipeline, text).unwrap();
        program().arg("check").arg(&pipeline).output().unwrap()
    };
    expect_code(&check("audio_path, start, \"offset\", size"), 0);
    let output = check("audio_path");
    expect_code(&output, 2);
    assert!(
        stderr(&output).contains("not `offset`, `size`, `start`"),
        "{}",
        stderr(&output)
    );
}

/// A model of the hub that is named without `hf://`, before anything is trained.
#[test]
fn a_model_of_the_hub_without_its_scheme_is_recognised() {
    let place = Workplace::new("micro");
    let output = crate::training::finetune(&place, &["init=nvidia/parakeet-tdt-0.6b-v2"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(
        stderr(&output).contains("hf://nvidia/parakeet-tdt-0.6b-v2"),
        "{}",
        stderr(&output)
    );
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
