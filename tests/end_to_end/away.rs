//! Outside of the repository: pipelines by name, by path from another folder, and in a new folder.

use std::path::Path;
use std::process::{Command, Output};

use crate::binary::{expect_code, folder_bytes, program, stderr};

/// The program in a folder of the test's own, with a cache folder there.
fn flow(folder: &Path, arguments: &[&str]) -> Output {
    let mut flow: Command = program();
    flow.current_dir(folder).env("XDG_CACHE_HOME", folder.join("cache"));
    flow.args(arguments).output().unwrap()
}

const FEW_STEPS: [&str; 6] = [
    "--set",
    "train.max_steps=2",
    "--set",
    "train.eval_every=0",
    "--set",
    "train.max_samples=8",
];

#[test]
fn the_program_does_its_main_job_wherever_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let output = flow(at, &["new", "demo"]);
    expect_code(&output, 0);
    let demo = at.join("demo");
    let run = [&["run", "pipeline.yaml", "--progress", "plain"][..], &FEW_STEPS].concat();
    let output = flow(&demo, &run);
    expect_code(&output, 0);
    assert!(demo.join("work/mini/report/report.html").is_file());
    let made = folder_bytes(&demo.join("work/mini/manifests"));

    // The pipelines that the program carries, by name: the same rows, in folders below the current one.
    let output = flow(at, &["run", "build_manifest_v2", "--progress", "plain"]);
    expect_code(&output, 0);
    let written = std::fs::read_to_string(at.join("demo/build_manifest_v2.yaml")).unwrap();
    let out = written
        .lines()
        .find_map(|line| line.trim().strip_prefix("out: {default: "))
        .unwrap();
    let out = out.split(',').next().unwrap();
    let names = |folder: &Path| folder_bytes(folder).into_keys().collect::<Vec<_>>();
    assert_eq!(names(&at.join(out)), made.keys().cloned().collect::<Vec<_>>());

    // By a path, from elsewhere: what the file names is found beside it.
    let pipeline = Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines/finetune.yaml");
    for pipeline in ["finetune", "evaluate.yaml", pipeline.to_str().unwrap()] {
        let output = flow(at, &["check", pipeline]);
        expect_code(&output, 0);
    }
    let output = flow(at, &["check", "finetne"]);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("finetune"), "{}", stderr(&output));
}

#[test]
fn no_folder_is_left_among_temporary_files_where_there_is_a_cache() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let temporary = at.join("tmp");
    std::fs::create_dir(&temporary).unwrap();
    let check = |cache: &Path| {
        let mut flow = program();
        flow.current_dir(at)
            .env("TMPDIR", &temporary)
            .env("XDG_CACHE_HOME", cache);
        expect_code(&flow.args(["check", "finetune"]).output().unwrap(), 0);
        let mut folders = std::fs::read_dir(&temporary).unwrap();
        folders.any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with("flow-"))
    };
    assert!(!check(&at.join("cache")));
    // A cache that cannot be made.
    let file = at.join("file");
    std::fs::write(&file, "").unwrap();
    assert!(check(&file));
}

#[test]
fn the_repositorys_path_of_a_carried_pipeline_is_answered_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let output = flow(folder.path(), &["run", "pipelines/finetune.yaml"]);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("`flow run finetune`"), "{}", stderr(&output));
    let output = flow(folder.path(), &["check", "pipelines/other.yaml"]);
    assert!(stderr(&output).contains("pipelines/other.yaml"), "{}", stderr(&output));
    assert!(!stderr(&output).contains("carries a pipeline"), "{}", stderr(&output));
}

#[test]
fn new_folders_hold_what_runs_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    expect_code(&flow(at, &["new", "--like", "manifest", "a"]), 0);
    let output = flow(&at.join("a"), &["run", "pipeline.yaml", "--progress", "plain"]);
    expect_code(&output, 0);
    // What is there is left alone.
    let output = flow(at, &["new", "a"]);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("is not empty"), "{}", stderr(&output));
    let root = env!("CARGO_MANIFEST_DIR");
    expect_code(&flow(at, &["new", "--like", "own-kind", "--source", root, "b"]), 0);
    let made = std::fs::read_to_string(at.join("b/Cargo.toml")).unwrap();
    assert!(made.contains("flow-runtime") && made.contains("schemars"), "{made}");
    assert!(at.join("b/src/main.rs").is_file() && at.join("b/audio").is_dir());
    let output = flow(at, &["new", "--like", "own-kind", "--source", "a", "c"]);
    expect_code(&output, 2);
    expect_code(&flow(at, &["new", "--like", "own-kind", "c"]), 2);
    assert!(!at.join("c").exists());
}
