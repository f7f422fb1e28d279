//! Tells the program what it was built from: `FLOW_VERSION`, which `flow --version` shows, and `FLOW_COMMIT`, by which
//! processes of one run tell their builds apart.
//!
//! Without git, or outside a repository of its own, the commit is left out, or `unknown`; nothing here fails a build.

use std::path::{Path, PathBuf};
use std::process::Command;

/// What the program is made of, beside the crates below `cli/`, `runtime/` and `stages/`. Where one of these changes it is compiled again
/// in any case, and only then is the commit asked for again.
const SOURCES: [&str; 12] = [
    "build.rs",
    "Cargo.toml",
    "Cargo.lock",
    "src",
    "inspect/src",
    "runtime/src",
    "ui/src",
    "configs",
    "pipelines",
    "tests/data/corpus/mini",
    "tests/data/golden/data/mini",
    "tests/data/golden/model/audio",
];

fn main() {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    for source in SOURCES {
        watch(&root.join(source));
    }
    for crates in ["cli", "runtime", "stages"] {
        for entry in std::fs::read_dir(root.join(crates)).into_iter().flatten().flatten() {
            watch(&entry.path().join("src"));
        }
    }
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let features = ["cuda", "nccl", "object-store", "service"]
        .into_iter()
        .filter(|name| std::env::var_os(format!("CARGO_FEATURE_{}", name.to_uppercase().replace('-', "_"))).is_some())
        .collect::<Vec<_>>();
    let mut features = if features.is_empty() {
        "none".to_string()
    } else {
        features.join(", ")
    };
    // `cargo quick` leaves such a program where a release build is expected.
    if std::env::var_os("CARGO_CFG_DEBUG_ASSERTIONS").is_some() {
        features += "; with debug assertions, for tests";
    }
    let commit = commit(&root);
    let built = match &commit {
        Some(commit) => format!("commit {commit}; features: {features}"),
        None => format!("features: {features}"),
    };
    println!("cargo:rustc-env=FLOW_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
    println!("cargo:rustc-env=FLOW_VERSION={version} ({built})");
}

/// Has this script run again when the path changes. A path that is not there would have it run at every build.
fn watch(path: &Path) {
    if path.exists() {
        println!("cargo:rerun-if-changed={}", path.display());
    }
}

/// The commit in short, with `-dirty` where files of the repository were changed since.
fn commit(root: &Path) -> Option<String> {
    // Another repository around this folder has commits of its own.
    if !root.join(".git").exists() {
        return None;
    }
    watch_commits(root);
    let commit = git(root, &["rev-parse", "--short", "HEAD"])?;
    if commit.is_empty() || !commit.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let changed = git(root, &["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changed.is_empty() {
        commit
    } else {
        format!("{commit}-dirty")
    })
}

/// HEAD, and the reference that it names.
fn watch_commits(root: &Path) -> Option<()> {
    // In a working tree of its own `.git` is a file, and references are in the folder that all of them share.
    let folder = root.join(git(root, &["rev-parse", "--git-dir"])?);
    let shared = root.join(git(root, &["rev-parse", "--git-common-dir"])?);
    let head = folder.join("HEAD");
    watch(&head);
    let text = std::fs::read_to_string(&head).ok()?;
    let reference = text.strip_prefix("ref: ")?.trim();
    let file = shared.join(reference);
    if file.is_file() {
        watch(&file);
    } else {
        // It is packed; the next commit makes a file of it.
        watch(&shared.join("packed-refs"));
        watch(&shared.join("refs/heads"));
    }
    Some(())
}

/// What git says; nothing where it cannot.
fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(arguments)
        // A build that git itself started (a hook) names another repository; and a look writes no index.
        .env_remove("GIT_DIR")
        .env_remove("GIT_WORK_TREE")
        .env_remove("GIT_INDEX_FILE")
        .env("GIT_OPTIONAL_LOCKS", "0")
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_string())
}
