//! Commands that need no run: completions, manual pages, the version, and `flow doctor`.

use std::path::Path;
use std::process::{Command, Output};

use crate::binary::{Workplace, expect_code, program, stderr};

fn flow(arguments: &[&str]) -> Output {
    program().args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn every_shell_gets_completions() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = flow(&["completions", shell]);
        expect_code(&output, 0);
        let script = stdout(&output);
        for word in ["completions", "lineage", "on-success"] {
            assert!(script.contains(word), "{shell} lacks {word}");
        }
    }
    let output = flow(&["completions", "cmd"]);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("powershell"), "{}", stderr(&output));
}

/// Completions by bash, if it is installed.
#[test]
fn bash_completes_commands() {
    let script = stdout(&flow(&["completions", "bash"]));
    let ask = format!("{script}\nCOMP_WORDS=(flow li) COMP_CWORD=1\n_flow flow li flow\necho \"${{COMPREPLY[@]}}\"\n");
    match Command::new("bash").args(["--norc", "-c", &ask]).output() {
        Ok(output) => {
            expect_code(&output, 0);
            assert_eq!(stdout(&output).trim(), "lineage");
        }
        Err(error) => println!("not looked at: bash: {error}"),
    }
}

#[test]
fn manual_pages_are_printed_and_written() {
    let page = flow(&["man"]);
    expect_code(&page, 0);
    let page = stdout(&page);
    assert!(page.contains(".TH flow 1") && page.contains("Exit codes"), "{page}");
    let place = Workplace::new("micro");
    let folder = place.path("share/man/man1");
    let output = program().args(["man", "--out"]).arg(&folder).output().unwrap();
    expect_code(&output, 0);
    assert_eq!(stdout(&output), "");
    let read =
        |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    for page in [read("flow.1"), page] {
        assert!(page.contains("flow\\-run(1)"), "{page}");
    }
    assert!(read("flow-run.1").contains("on\\-failure"));
    assert!(read("flow-model-info.1").contains("tensors"));
    // A page for each command that `flow --help` lists.
    let help = stdout(&flow(&["--help"]));
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands = commands.take_while(|line| line.starts_with("  "));
    let names = commands.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let names: Vec<&str> = names.filter(|name| !name.is_empty() && *name != "help").collect();
    assert!(names.contains(&"doctor"), "{names:?}");
    for name in names {
        read(&format!("flow-{name}.1"));
    }
    // A file stands where the folder should be.
    let output = program()
        .args(["man", "--out"])
        .arg(folder.join("flow.1"))
        .output()
        .unwrap();
    expect_code(&output, 1);
    assert!(stderr(&output).contains("flow.1"), "{}", stderr(&output));
}

/// As to a full disk. What clap prints counts, too.
#[test]
fn output_that_cannot_be_written_is_an_error() {
    for arguments in [
        &["--help"][..],
        &["--version"],
        &["help", "run"],
        &["speakers", "--help"],
        &["kinds"],
        &["kinds", "sql"],
        &["completions", "bash"],
        &["man"],
        &["graph", "build_manifest_v2"],
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = program().args(arguments).stdout(full).output().unwrap();
        expect_code(&output, 1);
        let said = stderr(&output);
        assert_eq!(
            said, "error: cannot write: standard output: No space left on device (os error 28)\n",
            "{arguments:?}"
        );
    }
}

#[test]
fn the_version_has_the_commit_and_the_features() {
    let output = flow(&["--version"]);
    expect_code(&output, 0);
    let said = stdout(&output);
    let version = said
        .trim_end()
        .strip_prefix(concat!("flow ", env!("CARGO_PKG_VERSION"), " ("));
    let built = version
        .and_then(|text| text.strip_suffix(')'))
        .unwrap_or_else(|| panic!("{said}"));
    let all = [
        ("cuda", cfg!(feature = "cuda")),
        ("nccl", cfg!(feature = "nccl")),
        ("object-store", cfg!(feature = "object-store")),
        ("service", cfg!(feature = "service")),
    ];
    let features: Vec<&str> = all.into_iter().filter_map(|(name, on)| on.then_some(name)).collect();
    let features = match features.is_empty() {
        true => "features: none".to_string(),
        false => format!("features: {}", features.join(", ")),
    };
    let features = match cfg!(debug_assertions) {
        true => features + "; with debug assertions, for tests",
        false => features,
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let head = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(["rev-parse", "HEAD"])
        .output();
    let head = head
        .ok()
        .filter(|head| head.status.success() && root.join(".git").exists());
    match head.map(|head| stdout(&head)) {
        Some(head) => {
            let commit = built
                .strip_prefix("commit ")
                .and_then(|text| text.strip_suffix(&format!("; {features}")));
            let commit = commit.unwrap_or_else(|| panic!("{said}"));
            let commit = commit.strip_suffix("-dirty").unwrap_or(commit);
            assert!(commit.len() >= 4 && head.starts_with(commit), "{said} of {head}");
        }
        None => assert_eq!(built, features),
    }
}

/// The search for the largest batch would not end, or numbers would wrap around.
#[test]
fn memory_is_predicted_for_numbers_that_can_be() {
    for (option, value) in [
        ("--longest", "nan"),
        ("--longest", "1e300"),
        ("--longest", "0"),
        ("--tokens-per-second", "inf"),
        ("--vocabulary", "18446744073709551615"),
        ("--vocabulary", "0"),
        ("--set", "max_duration=1e300"),
    ] {
        let output = program()
            .args(["memory", "pipelines/finetune.yaml", option, value])
            .output()
            .unwrap();
        expect_code(&output, 2);
        let name = if option == "--set" { "--longest" } else { option };
        assert!(stderr(&output).contains(name), "{option} {value}: {}", stderr(&output));
    }
}

/// `flow doctor` with a token, without the network.
fn doctor(place: &Workplace, arguments: &[&str]) -> Output {
    let mut flow = program();
    flow.arg("doctor")
        .arg("--state")
        .arg(place.path("state"))
        .args(arguments);
    flow.env("HF_HUB_OFFLINE", "1").env("HF_TOKEN", "hf_very_secret");
    flow.output().unwrap()
}

#[test]
fn the_machine_is_looked_at_and_nothing_is_changed() {
    let place = Workplace::new("micro");
    let output = doctor(&place, &["--json"]);
    let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(report["version"], 1);
    let code = if report["state"] == "fail" { 1 } else { 0 };
    expect_code(&output, code);
    let checks = report["checks"].as_array().unwrap();
    let names: Vec<&str> = checks.iter().map(|check| check["name"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "cores",
            "memory",
            "vector instructions",
            "open files",
            "state directory",
            "temporary directory",
            "espeak-ng",
            "CUDA driver",
            "NCCL",
            "hub token",
            "hub"
        ]
    );
    for check in checks {
        let state = check["state"].as_str().unwrap();
        assert!(["ok", "warn", "fail"].contains(&state), "{check}");
        assert!(!check["found"].as_str().unwrap().is_empty(), "{check}");
        // Every problem comes with help.
        assert!(state == "ok" || check["help"].is_string(), "{check}");
    }
    assert_eq!(checks[9]["found"], "from HF_TOKEN");
    assert!(checks[10]["found"].as_str().unwrap().contains("HF_HUB_OFFLINE"));

    let text = doctor(&place, &[]);
    expect_code(&text, code);
    assert_eq!(
        stdout(&text).lines().filter(|line| !line.starts_with("      ")).count(),
        12
    );
    for output in [&output, &text] {
        assert!(!stdout(output).contains("hf_very_secret") && !stderr(output).contains("hf_very_secret"));
    }
    assert!(!place.path("state").exists(), "a look makes no state directory");
}

#[test]
fn what_cannot_work_is_exit_code_1() {
    let place = Workplace::new("micro");
    std::fs::write(place.path("state"), "a file").unwrap();
    let output = doctor(&place, &[]);
    expect_code(&output, 1);
    let said = stdout(&output);
    assert!(said.contains("\nfail  state directory: "), "{said}");
    if !cfg!(feature = "cuda") {
        std::fs::remove_file(place.path("state")).unwrap();
        let output = doctor(&place, &["--device", "cuda", "--selftest"]);
        expect_code(&output, 1);
        let said = stdout(&output);
        assert!(said.contains("\nfail  CUDA driver: "), "{said}");
        assert!(said.contains("\nfail  self-test: "), "{said}");
        assert!(said.contains("--features cuda"), "{said}");
    }
}

#[test]
fn the_program_carries_its_self_test() {
    let place = Workplace::new("micro");
    // Nothing of the repository is needed.
    let output = Command::new(env!("CARGO_BIN_EXE_flow"))
        .args(["doctor", "--selftest", "--json", "--state"])
        .arg(place.path("state"))
        .env("HF_HUB_OFFLINE", "1")
        .current_dir(place.folder.path())
        .output()
        .unwrap();
    let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let checks = report["checks"].as_array().unwrap().iter();
    let tests = checks.filter(|check| check["name"].as_str().is_some_and(|name| name.starts_with("self-test")));
    let tests: Vec<_> = tests
        .map(|check| (&check["name"], &check["state"], &check["found"]))
        .collect();
    assert_eq!(tests.len(), 3, "{tests:?}");
    assert!(tests.iter().all(|(_, state, _)| **state == "ok"), "{tests:?}");
}

#[test]
fn every_command_says_what_to_do_about_a_model_that_the_hub_does_not_give() {
    let place = Workplace::new("micro");
    let recording = "tests/data/golden/model/audio/eval3_es.wav";
    let out = place.path("out");
    for command in [
        &["serve", "--listen", "127.0.0.1:0", "--model"][..],
        &["ui", "--listen", "127.0.0.1:0", "--model"],
        &["transcribe", recording, "--out", out.to_str().unwrap(), "--model"],
        &["model", "info"],
    ] {
        let mut flow = program();
        flow.args(command).arg("hf://nobody/nothing");
        flow.env("HF_HUB_OFFLINE", "1").env("HF_HOME", place.path("hub"));
        let output = flow.output().unwrap();
        expect_code(&output, 1);
        let said = stderr(&output);
        assert!(
            said.contains("nobody/nothing") && said.contains("help: unset HF_HUB_OFFLINE"),
            "{command:?}: {said}"
        );
    }
}
