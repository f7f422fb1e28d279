//! Clients of `flow serve`: the newest official clients of OpenAI's API, and a browser.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::binary::program;
use crate::served::{PATIENCE, Served};

const KEY: &str = "sk-test";

/// A service that requires a key and accepts 1 MiB at most, and the folder of its settings.
fn service() -> (Served, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("keys.txt"), KEY).unwrap();
    let config = folder.path().join("serve.yaml");
    fs::write(&config, "http: {keys: keys.txt, max_upload: 1048576}\n").unwrap();
    let mut flow = program();
    flow.args(["serve", "--listen", "127.0.0.1:0", "--diarize", "--model"]);
    flow.args(["configs/models/small.nemo", "--config"]).arg(&config);
    // It asks for keys, but not where it is asked whether it is ready.
    (Served::start(flow, PATIENCE).unwrap(), folder)
}

/// A folder below the target folder, kept for the next time.
fn kept(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Whether a step of the installation succeeds; says what it printed if not.
#[allow(clippy::print_stderr, reason = "tells why nothing was tested")]
fn installed(command: &mut Command) -> bool {
    match command.stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            let (out, errors) = (
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr),
            );
            eprintln!("skipped: {command:?} failed:\n{out}{errors}");
            false
        }
        Err(error) => {
            eprintln!("skipped: {command:?}: {error}");
            false
        }
    }
}

/// Runs a client to its end. `arguments` are those after the address of the service.
fn run(client: &mut Command, service: &Served, arguments: &[&OsStr]) {
    let output = client.arg(&service.url).args(arguments).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("{client:?}: {error}"));
    let (out, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success(),
        "{out}{errors}\nthe service says:\n{}",
        service.told()
    );
}

/// Runs a client of OpenAI's API, which is given address, key and recording.
fn run_openai(client: &mut Command) {
    let (service, _folder) = service();
    let recording = repository("tests/data/golden/model/audio/eval3_es.wav");
    run(client, &service, &[OsStr::new(KEY), recording.as_os_str()]);
}

/// Whether npm installs a package into a folder.
fn npm_installs(package: &str, folder: &Path) -> bool {
    // Without it npm installs into a folder further up that has one.
    fs::write(folder.join("package.json"), "{\"private\": true}\n").unwrap();
    let mut install = Command::new("npm");
    install.args(["install", "--no-audit", "--no-fund", "--silent", package]);
    installed(install.current_dir(folder))
}

/// Node with a script of `tests/browser`, in a folder of this name with what it needs; none where that is not available.
pub fn browser(script: &str, folder: &str) -> Option<Command> {
    let folder = kept(folder);
    let chromium = std::env::var("FLOW_TEST_CHROMIUM").unwrap_or_else(|_| "chromium".into());
    if !installed(Command::new(&chromium).arg("--version")) || !npm_installs("playwright-core@latest", &folder) {
        return None;
    }
    let mut browser = Command::new("node");
    browser
        .arg(repository("tests/browser").join(script))
        .current_dir(&folder);
    if let Some(pictures) = std::env::var_os("FLOW_TEST_PICTURES") {
        fs::create_dir_all(&pictures).unwrap();
        // It runs in another folder.
        browser.env("FLOW_TEST_PICTURES", fs::canonicalize(pictures).unwrap());
    }
    Some(browser)
}

pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// `cargo test --release --test end_to_end -- --ignored openai`. `FLOW_TEST_PYTHON` names another Python than `python3`.
#[test]
#[ignore = "installs the Python package openai from a package index"]
fn openais_python_client_works_as_its_users_know_it() {
    let folder = kept("openai_python");
    let python = folder.join("bin/python");
    let system = std::env::var("FLOW_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let made = python.exists() || installed(Command::new(system).args(["-m", "venv"]).arg(&folder));
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--upgrade", "openai[realtime]"]);
    if made && installed(&mut install) {
        run_openai(Command::new(&python).arg(repository("tests/clients/openai_client.py")));
    }
}

/// `cargo test --release --test end_to_end -- --ignored openai`.
#[test]
#[ignore = "installs the Node package openai from a package index"]
fn openais_node_client_works_as_its_users_know_it() {
    let folder = kept("openai_node");
    if npm_installs("openai@latest", &folder) {
        run_openai(
            Command::new("node")
                .arg(repository("tests/clients/openai_client.mjs"))
                .current_dir(&folder),
        );
    }
}

/// `FLOW_TEST_PICTURES=FOLDER cargo test --release --test end_to_end -- --ignored browser` saves pictures of the page there.
/// `FLOW_TEST_CHROMIUM` names another browser than `chromium`.
#[test]
#[ignore = "needs chromium, and installs the Node package playwright-core from a package index"]
fn the_page_works_in_a_browser() {
    let Some(mut browser) = browser("page.mjs", "browser") else {
        return;
    };
    let mut flow = program();
    flow.args(["serve", "--listen", "127.0.0.1:0", "--diarize", "--model"]);
    let jobs = tempfile::tempdir().unwrap();
    flow.arg("configs/models/small.nemo").arg("--jobs").arg(jobs.path());
    let service = Served::start(flow, PATIENCE).unwrap();
    let recording = repository("tests/data/golden/model/audio/eval3_es.wav");
    let conversation = repository("tests/data/golden/speakers/conv2.flac");
    let arguments = [recording.as_os_str(), conversation.as_os_str()];
    run(&mut browser, &service, &arguments);
}
