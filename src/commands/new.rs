//! `flow new`: creates a project folder.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::arguments::{NewArguments, Start};
use crate::bundle::{self, CONFIGS, CORPUS, PIPELINES};
use flow_cli::failure::{Exit, Failure};

pub fn new(arguments: &NewArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let folder = &arguments.folder;
    let shown = folder.display();
    let failed = |error: std::io::Error| Failure::unreadable(format!("{shown} cannot be written: {error}"));
    match fs::read_dir(folder) {
        Ok(mut entries) => {
            if entries.next().is_some() {
                return Err(Failure::usage(
                    format!("{shown} is not empty"),
                    "name a folder that is not there yet",
                ));
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let files = match arguments.like {
        Start::Finetune => finetune(),
        Start::Manifest => manifest(),
        Start::OwnKind => own_kind(arguments.source.as_deref())?,
    };
    let is_new = !folder.exists();
    let mut writes = files
        .iter()
        .map(|(path, contents)| bundle::write(&folder.join(path), contents));
    if let Err(error) = writes.try_for_each(|written| written) {
        if is_new {
            // Half a project would be in the way of the next attempt. A failure to remove it is ignored.
            let _ = fs::remove_dir_all(folder);
        }
        return Err(failed(error));
    }
    let run = match arguments.like {
        Start::OwnKind => "cargo run --release -- run pipeline.yaml",
        Start::Finetune | Start::Manifest => "flow run pipeline.yaml",
    };
    writeln!(out, "made {shown}; now: cd {shown} && {run}")?;
    Ok(Exit::Done)
}

/// Paths below the new folder, with what they hold.
type Files = Vec<(PathBuf, Vec<u8>)>;

/// A pipeline that the program carries, with the paths that the files have in the new folder.
fn pipeline(name: &str) -> Vec<u8> {
    let text = PIPELINES.get_file(name).and_then(|file| file.contents_utf8());
    text.unwrap_or_default()
        .replace("${file_dir}/../configs/", "${file_dir}/")
        .replace("${file_dir}/../tests/data/corpus/mini/shards", "${file_dir}/corpus")
        .into_bytes()
}

fn config(name: &str) -> Option<(PathBuf, Vec<u8>)> {
    Some((PathBuf::from(name), CONFIGS.get_file(name)?.contents().to_vec()))
}

fn corpus() -> Files {
    let shards = CORPUS.get_dir("shards").into_iter().flat_map(bundle::files);
    let below = |path: &Path| path.strip_prefix("shards").map(|path| Path::new("corpus").join(path));
    // The corpus has some for tests: of an unfinished download, for example.
    let is_temporary = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with('.') || name.ends_with(".tmp")
    };
    shards
        .filter(|file| !is_temporary(file.path()))
        .filter_map(|file| Some((below(file.path()).ok()?, file.contents().to_vec())))
        .chain([(PathBuf::from(".gitignore"), b".flow/\nwork/\n".to_vec())])
        .collect()
}

fn finetune() -> Files {
    let mut files = corpus();
    files.push(("pipeline.yaml".into(), pipeline("finetune.yaml")));
    for part in [
        "build_manifest_v2.yaml",
        "evaluate.yaml",
        "parts/manifests.yaml",
        "parts/recordings.yaml",
        "parts/replay.yaml",
        "parts/training.yaml",
    ] {
        files.push((part.into(), pipeline(part)));
    }
    files.extend(
        ["models/small.nemo", "tokenizers/mini.model"]
            .into_iter()
            .filter_map(config),
    );
    files
}

fn manifest() -> Files {
    let mut files = corpus();
    files.push(("pipeline.yaml".into(), pipeline("build_manifest_v2.yaml")));
    files
}

/// A package that depends on flow's crates in the folder `source`.
fn own_kind(source: Option<&Path>) -> Result<Files, Failure> {
    let source = source.unwrap_or(Path::new("."));
    let wrong = |why: String| {
        Failure::usage(
            format!("{} is not a clone of flow's repository: {why}", source.display()),
            "give the folder that holds flow's Cargo.toml with --source",
        )
    };
    let read = |name: &str| {
        let path = source.join(name);
        fs::read(&path).map_err(|error| wrong(format!("{}: {error}", path.display())))
    };
    let text = |name: &str| read(name).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let workspace = text("Cargo.toml")?;
    if !workspace.contains("name = \"flow\"") {
        return Err(wrong("its Cargo.toml has no package `flow`".into()));
    }
    let (program, pipeline) = (text("examples/own_kind.rs")?, text("examples/own_kind.yaml")?);
    let lock = read("Cargo.lock")?;
    let source = source.canonicalize().map_err(|error| wrong(error.to_string()))?;
    // The versions that flow itself uses, so that types are identical.
    let versions = workspace.lines().filter(|line| {
        let name = line.split_once(" =").map(|(name, _)| name);
        name.is_some_and(|name| ["arrow", "schemars", "serde"].contains(&name))
    });
    let versions: Vec<&str> = versions.collect();
    let at = |folder: &str| source.join(folder).display().to_string();
    let manifest = format!(
        "[package]\nname = \"own-kind\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[dependencies]\n\
         flow = {{ path = {:?} }}\nflow-runtime = {{ path = {:?} }}\n{}\n\n[profile.release]\nstrip = true\n\n\
         [workspace]\n",
        at(""),
        at("runtime"),
        versions.join("\n"),
    );
    let pipeline = pipeline
        .replace("tests/data/golden/model/manifest.jsonl", "${file_dir}/rows.jsonl")
        .replace("examples/own_kind.rs", "src/main.rs");
    let program = program
        .replace("cargo run --release --example own_kind --", "cargo run --release --")
        .replace("examples/own_kind.yaml", "pipeline.yaml");
    let rows = text("tests/data/golden/model/manifest.jsonl")?;
    let mut files: Files = Vec::new();
    for line in rows.lines() {
        let row: serde_json::Value = serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
        let audio = row["audio_filepath"].as_str().unwrap_or_default();
        files.push((audio.into(), read(&format!("tests/data/golden/model/{audio}"))?));
    }
    files.extend([
        ("Cargo.toml".into(), manifest.into_bytes()),
        ("Cargo.lock".into(), lock),
        ("src/main.rs".into(), program.into_bytes()),
        ("pipeline.yaml".into(), pipeline.into_bytes()),
        ("rows.jsonl".into(), rows.into_bytes()),
        (".gitignore".into(), b".flow/\nwork/\ntarget/\n".to_vec()),
    ]);
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_filled_is_not_left_behind() {
        let below = tempfile::tempdir().unwrap();
        let file = below.path().join("file");
        fs::write(&file, b"").unwrap();
        let new_in = |folder: PathBuf| {
            let arguments = NewArguments {
                folder,
                like: Start::Manifest,
                source: None,
            };
            new(&arguments, &mut Vec::new())
        };
        assert!(new_in(file.join("project")).is_err());
        // Folders of the project can be made, its files cannot: their paths are too long.
        let mut long = below.path().to_owned();
        while long.as_os_str().len() < 4070 {
            let rest = 4070 - long.as_os_str().len();
            long.push("x".repeat(rest.saturating_sub(1).clamp(1, 200)));
        }
        assert!(new_in(long.clone()).is_err() && long.parent().unwrap().exists() && !long.exists());
        let project = below.path().join("project");
        new_in(project.clone()).unwrap();
        assert!(project.join("pipeline.yaml").is_file() && new_in(project).is_err());
    }

    #[test]
    fn no_temporary_file_of_the_corpus_is_copied() {
        for files in [finetune(), manifest()] {
            let names = files.iter().map(|(path, _)| path.to_string_lossy());
            let shards = names.clone().filter(|name| name.ends_with(".parquet")).count();
            let odd: Vec<_> = names
                .filter(|name| name.contains("/.") || name.ends_with(".tmp") || name.ends_with('~'))
                .collect();
            assert!(shards > 20 && odd.is_empty(), "{shards} {odd:?}");
        }
    }
}
