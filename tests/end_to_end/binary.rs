//! Runs the program, and reads its output.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::Float64Type;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;
use tempfile::TempDir;

/// A corpus or a golden folder: the bundled one, or that of an environment variable.
pub fn data(variable: &str, bundled: &str, name: &str) -> PathBuf {
    let root = match std::env::var_os(variable) {
        Some(root) => PathBuf::from(root),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join(bundled),
    };
    root.join(name)
}

pub fn corpus(name: &str) -> PathBuf {
    data("FLOW_TEST_CORPUS", "tests/data/corpus", name)
}

/// A file or folder of the golden model data, unpacked where it is packed.
pub fn golden_model(name: &str) -> PathBuf {
    let path = data("FLOW_TEST_GOLDEN_MODEL", "tests/data/golden/model", name);
    let place = std::env::current_exe().unwrap().with_file_name("golden-model");
    flow_nn::testing::unpacked_copy(&path, &place).unwrap()
}

/// The same of the golden data of streaming.
pub fn golden_streaming(name: &str) -> PathBuf {
    let path = data("FLOW_TEST_GOLDEN_STREAMING", "tests/data/golden/streaming", name);
    let place = std::env::current_exe()
        .unwrap()
        .with_file_name("golden-streaming-model");
    flow_nn::testing::unpacked_copy(&path, &place).unwrap()
}

pub fn golden(name: &str) -> PathBuf {
    data("FLOW_TEST_GOLDEN", "tests/data/golden/data", name)
}

/// A temporary folder for one test, with a state directory and an output folder.
pub struct Workplace {
    pub folder: TempDir,
    pub shards: PathBuf,
}

impl Workplace {
    /// Reads the shards where they lie.
    pub fn new(corpus_name: &str) -> Self {
        Workplace {
            folder: tempfile::tempdir().unwrap(),
            shards: corpus(corpus_name).join("shards"),
        }
    }

    /// Reads the bundled shards, whatever the environment: for assertions that only hold for them.
    pub fn bundled(corpus_name: &str) -> Self {
        let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/corpus");
        Workplace {
            shards: corpora.join(corpus_name).join("shards"),
            ..Workplace::new(corpus_name)
        }
    }

    /// Works on a copy of the shards, for tests that change them.
    pub fn with_copy(corpus_name: &str) -> Self {
        let mut place = Workplace::new(corpus_name);
        let copy = place.folder.path().join("shards");
        copy_folder(&place.shards, &copy);
        place.shards = copy;
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn out(&self) -> PathBuf {
        self.path("out")
    }

    /// `flow COMMAND pipelines/build_manifest_v2.yaml` with this folder's settings.
    pub fn manifest_command(&self, command: &str, settings: &[&str]) -> Command {
        self.command(command, "pipelines/build_manifest_v2.yaml", settings)
    }

    pub fn command(&self, command: &str, pipeline: &str, settings: &[&str]) -> Command {
        let mut flow = program();
        flow.arg(command).arg(pipeline);
        flow.arg("--state").arg(self.path("state"));
        flow.args(["--set", &format!("shards={}", self.shards.display())]);
        flow.args(["--set", &format!("out={}", self.out().display())]);
        for setting in settings {
            flow.args(["--set", setting]);
        }
        if command == "run" {
            flow.args(["--progress", "plain"]);
        }
        flow
    }

    /// `flow transcribe` of the folder `recordings` into `texts`.
    pub fn transcribe_command(&self, formats: &str) -> Command {
        let mut flow = program();
        flow.current_dir(self.folder.path());
        flow.args(["transcribe", "recordings", "--out", "texts", "--state", "state"]);
        flow.args(["--format", formats, "--progress", "plain"]);
        flow
    }

    pub fn build_manifests(&self, settings: &[&str]) -> Output {
        let output = self.manifest_command("run", settings).output().unwrap();
        expect_code(&output, 0);
        output
    }

    /// Every file of the output folder but `flow.json`, with its bytes.
    pub fn out_bytes(&self) -> BTreeMap<String, Vec<u8>> {
        folder_bytes(&self.out())
    }
}

pub fn program() -> Command {
    let mut flow = Command::new(env!("CARGO_BIN_EXE_flow"));
    flow.current_dir(env!("CARGO_MANIFEST_DIR"));
    flow
}

/// The same command of the program that supports `FLOW_KILL_AT` and `FLOW_HANG_AT`: `examples/flow_with_failpoints.rs`,
/// which `cargo test` builds beside the tests.
pub fn with_failpoints(command: &Command) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_flow")).with_file_name("examples/flow_with_failpoints");
    assert!(
        program.exists(),
        "{} does not exist: build it by `cargo build --release --workspace --examples`",
        program.display()
    );
    let mut flow = Command::new(program);
    flow.current_dir(env!("CARGO_MANIFEST_DIR")).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => flow.env(name, value),
            None => flow.env_remove(name),
        };
    }
    flow
}

#[track_caller]
pub fn expect_code(output: &Output, code: i32) {
    assert_eq!(
        output.status.code(),
        Some(code),
        "stdout:\n{}\nstderr:\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The partitions of each stage that ran in the last run, from the state directory.
pub fn ran(state: &Path) -> BTreeMap<String, u64> {
    let mut flow = program();
    flow.args(["log", "--json", "--state"]).arg(state);
    let output = flow.output().unwrap();
    expect_code(&output, 0);
    let mut ran = BTreeMap::new();
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        if event["event"] == "stage_started" {
            let stage = event["stage"].as_str().unwrap().to_owned();
            ran.insert(stage, event["run"].as_u64().unwrap());
        }
    }
    ran
}

/// A mono WAV file of 16 kHz and 16 bits.
pub fn wav(samples: &[i16]) -> Vec<u8> {
    let data = 2 * samples.len() as u32;
    let mut file = b"RIFF".to_vec();
    file.extend((36 + data).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    file.extend(16_000u32.to_le_bytes());
    file.extend(32_000u32.to_le_bytes());
    file.extend(b"\x02\0\x10\0data");
    file.extend(data.to_le_bytes());
    file.extend(samples.iter().flat_map(|sample| sample.to_le_bytes()));
    file
}

pub fn folder_bytes(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_file() && name.ends_with(".parquet") {
            files.insert(name, std::fs::read(&path).unwrap());
        }
    }
    assert!(!files.is_empty(), "{} holds no parquet file", folder.display());
    files
}

/// Every file below a folder with its bytes.
pub fn files(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let (mut found, mut folders) = (BTreeMap::new(), vec![root.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(
                    path.strip_prefix(root).unwrap().to_owned(),
                    std::fs::read(&path).unwrap(),
                );
            }
        }
    }
    found
}

pub fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).unwrap();
        }
    }
}

pub fn read_parquet(path: &Path) -> Vec<RecordBatch> {
    let file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    ParquetRecordBatchReaderBuilder::try_new(file)
        .unwrap()
        .build()
        .unwrap()
        .map(Result::unwrap)
        .collect()
}

/// One row of a manifest.
#[derive(Clone, Debug, PartialEq)]
pub struct ManifestRow {
    pub segment_id: String,
    pub shard_id: String,
    pub text: String,
    pub duration: f64,
    pub lang: String,
    pub tar_member_name: String,
    pub tar_path: String,
    pub source: String,
}

pub const MANIFEST_COLUMNS: [&str; 8] = [
    "segment_id",
    "shard_id",
    "text",
    "duration",
    "lang",
    "tar_member_name",
    "tar_path",
    "source",
];

/// Reads a manifest; checks that it has exactly the eight columns, in their order, without nulls.
pub fn read_manifest(path: &Path) -> Vec<ManifestRow> {
    let mut rows = Vec::new();
    for batch in read_parquet(path) {
        let names: Vec<_> = batch
            .schema()
            .fields()
            .iter()
            .map(|field| field.name().clone())
            .collect();
        assert_eq!(names, MANIFEST_COLUMNS, "{}", path.display());
        let text = |column: usize, row: usize| {
            let column = batch.column(column);
            assert!(!column.is_null(row));
            column.as_string::<i32>().value(row).to_string()
        };
        for row in 0..batch.num_rows() {
            rows.push(ManifestRow {
                segment_id: text(0, row),
                shard_id: text(1, row),
                text: text(2, row),
                duration: batch.column(3).as_primitive::<Float64Type>().value(row),
                lang: text(4, row),
                tar_member_name: text(5, row),
                tar_path: text(6, row),
                source: text(7, row),
            });
        }
    }
    rows
}

/// One line of `rejects.parquet`.
#[derive(Clone, Debug)]
pub struct RejectRow {
    pub partition: String,
    pub segment_id: Option<String>,
    pub reason: String,
    pub class: String,
    pub detail: String,
    pub values: String,
}

pub fn read_rejects(path: &Path) -> Vec<RejectRow> {
    let mut rows = Vec::new();
    for batch in read_parquet(path) {
        let text = |name: &str, row: usize| {
            let column = batch.column_by_name(name).unwrap_or_else(|| panic!("no column {name}"));
            (!column.is_null(row)).then(|| column.as_string::<i32>().value(row).to_string())
        };
        for row in 0..batch.num_rows() {
            assert!(text("stage", row).is_some_and(|stage| !stage.is_empty()));
            rows.push(RejectRow {
                partition: text("partition", row).unwrap(),
                segment_id: text("segment_id", row),
                reason: text("reason", row).unwrap(),
                class: text("class", row).unwrap(),
                detail: text("detail", row).unwrap(),
                values: text("values", row).unwrap_or_default(),
            });
        }
    }
    rows
}
