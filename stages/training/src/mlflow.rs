//! The figures of `metrics.jsonl` in MLflow's file store, which `mlflow ui --backend-store-uri FOLDER` shows.
//!
//! The store is a folder. An experiment is a folder in it with `meta.yaml`, and a run is a folder in that, with `meta.yaml` and
//! `params`, `tags` and `metrics`: a file for each name. A line of a metric is `MILLISECONDS VALUE STEP`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use flow_kind::{RunLabels, random_hex};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::TrainingError;
use crate::metrics::seconds_since_epoch;
use crate::resolved_settings::ResolvedSettings;
use crate::tensorboard::scalars;

/// Name of the file beside the checkpoints that holds the run's id.
pub(crate) const RUN: &str = "mlflow_run";
/// The longest value of a parameter that MLflow takes, in bytes at most.
const LONGEST_VALUE: usize = 6000;
/// A larger `meta.yaml` is none of MLflow's.
const LARGEST_META: u64 = 1 << 20;
/// States of a run (`RunStatus` in MLflow's `service.proto`).
const RUNNING: u8 = 1;
const FINISHED: u8 = 3;
const KILLED: u8 = 5;

/// Writes the figures of training into MLflow's file store, too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MlflowSettings {
    /// Folder of the store on this machine. Several trainings may share it.
    pub folder: String,
    /// The experiment that the run belongs to. It is made where the store has none of that name.
    pub experiment_name: String,
}

impl Default for MlflowSettings {
    fn default() -> Self {
        MlflowSettings {
            folder: "mlruns".into(),
            experiment_name: "flow".into(),
        }
    }
}

impl MlflowSettings {
    /// # Errors
    /// With what is wrong with a setting.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.folder.trim().is_empty() || self.folder.contains("://") {
            return Err("`folder` names a folder on this machine, such as mlruns".into());
        }
        if self.experiment_name.trim().is_empty() {
            return Err("`experiment_name` is empty".into());
        }
        Ok(())
    }
}

/// Of `meta.yaml` of an experiment.
#[derive(Serialize, Deserialize)]
struct ExperimentMeta {
    #[serde(default)]
    artifact_location: String,
    #[serde(default)]
    creation_time: u64,
    experiment_id: String,
    #[serde(default)]
    last_update_time: u64,
    lifecycle_stage: String,
    name: String,
}

/// `meta.yaml` of a run.
#[derive(Serialize, Deserialize)]
struct RunMeta {
    artifact_uri: String,
    end_time: Option<u64>,
    entry_point_name: String,
    experiment_id: String,
    lifecycle_stage: String,
    run_id: String,
    run_name: String,
    source_name: String,
    /// 4: LOCAL.
    source_type: u8,
    source_version: String,
    start_time: u64,
    status: u8,
    tags: Vec<String>,
    user_id: String,
}

/// A run of the store.
pub(crate) struct Run {
    folder: PathBuf,
    meta: RunMeta,
}

impl Run {
    /// Opens the run of a checkpoint folder, or begins it. Its metrics are those of `lines`, which are what `metrics.jsonl` holds:
    /// after an interruption no line comes twice.
    ///
    /// # Errors
    /// If the store cannot be read or written.
    pub fn open<'a>(
        checkpoints: &Path,
        settings: &MlflowSettings,
        of: &ResolvedSettings,
        lines: impl Iterator<Item = &'a Value>,
    ) -> Result<Run, TrainingError> {
        let root = Path::new(&settings.folder);
        fs::create_dir_all(root).map_err(TrainingError::file(root))?;
        let root = &root.canonicalize().map_err(TrainingError::file(root))?;
        let experiment_id = experiment(root, &settings.experiment_name)?;
        let run_id = run_id(checkpoints)?;
        let folder = root.join(&experiment_id).join(&run_id);
        let artifacts = folder.join("artifacts");
        fs::create_dir_all(&artifacts).map_err(TrainingError::file(&artifacts))?;
        let earlier = read_meta::<RunMeta>(&folder);
        let RunLabels { name, note } = &of.labels;
        let known = earlier.as_ref().map(|meta| meta.run_name.clone());
        let run_name = name.clone().or(known).unwrap_or_else(|| of.checkpoints.clone());
        let run = Run {
            meta: RunMeta {
                artifact_uri: artifacts.to_string_lossy().into_owned(),
                end_time: None,
                entry_point_name: String::new(),
                experiment_id,
                lifecycle_stage: "active".into(),
                run_id,
                run_name: run_name.clone(),
                source_name: "flow".into(),
                source_type: 4,
                source_version: env!("CARGO_PKG_VERSION").into(),
                start_time: earlier.map_or_else(now, |meta| meta.start_time),
                status: RUNNING,
                tags: Vec::new(),
                user_id: String::new(),
            },
            folder,
        };
        run.write_meta()?;
        let params = parameters(of);
        run.replace_all(
            "params",
            params.iter().map(|(name, value)| (name.as_str(), value.as_str())),
        )?;
        let tags = [
            ("mlflow.runName", Some(run_name.as_str())),
            ("mlflow.note.content", note.as_deref()),
            ("mlflow.source.name", Some("flow")),
            ("mlflow.source.type", Some("LOCAL")),
        ];
        for (name, value) in tags {
            if let Some(value) = value {
                replace(&run.folder.join("tags").join(name), value)?;
            }
        }
        let mut metrics: BTreeMap<String, String> = BTreeMap::new();
        for line in lines {
            for (name, point) in points(line) {
                metrics.entry(name).or_default().push_str(&point);
            }
        }
        run.replace_all(
            "metrics",
            metrics.iter().map(|(name, points)| (name.as_str(), points.as_str())),
        )?;
        Ok(run)
    }

    /// Adds the figures of a line of `metrics.jsonl`; lines without curves are skipped.
    pub fn line(&self, line: &Value) -> Result<(), TrainingError> {
        for (name, point) in points(line) {
            let path = self.folder.join("metrics").join(name);
            make_folder_of(&path)?;
            let file = File::options().create(true).append(true).open(&path);
            // In one call, so that a reader sees whole lines.
            let written = file.and_then(|mut file| file.write_all(point.as_bytes()));
            written.map_err(TrainingError::file(&path))?;
        }
        Ok(())
    }

    /// Marks the run as one that has done all its steps.
    pub fn finish(&mut self) -> Result<(), TrainingError> {
        self.end(FINISHED)
    }

    fn end(&mut self, status: u8) -> Result<(), TrainingError> {
        self.meta.status = status;
        self.meta.end_time = Some(now());
        self.write_meta()
    }

    fn write_meta(&self) -> Result<(), TrainingError> {
        write_meta(&self.folder, &self.meta)
    }

    /// Makes `kind` a folder with these files alone.
    fn replace_all<'a>(
        &self,
        kind: &str,
        files: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<(), TrainingError> {
        let folder = self.folder.join(kind);
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(TrainingError::file(&folder))?;
        }
        fs::create_dir_all(&folder).map_err(TrainingError::file(&folder))?;
        for (name, content) in files {
            replace(&folder.join(name), content)?;
        }
        Ok(())
    }
}

impl Drop for Run {
    /// A run that is stopped or fails can be gone on with.
    fn drop(&mut self) {
        if self.meta.status == RUNNING {
            // Training has ended by now; the next run sets it right.
            let _ = self.end(KILLED);
        }
    }
}

/// The id of the experiment of a name, which is made where there is none.
fn experiment(root: &Path, name: &str) -> Result<String, TrainingError> {
    for entry in fs::read_dir(root).map_err(TrainingError::file(root))? {
        let path = entry.map_err(TrainingError::file(root))?.path();
        let id = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some(meta) = read_meta::<ExperimentMeta>(&path)
            && (meta.name == name && meta.lifecycle_stage == "active" && meta.experiment_id == id)
        {
            return Ok(id);
        }
    }
    // By the name, so that two trainings that begin at once make one. MLflow's own ids are numbers of 18 digits, too.
    let digest = blake3::hash(name.as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&digest.as_bytes()[..8]);
    let id = format!(
        "{:018}",
        u64::from_le_bytes(first) % 900_000_000_000_000_000 + 100_000_000_000_000_000
    );
    let folder = root.join(&id);
    fs::create_dir_all(&folder).map_err(TrainingError::file(&folder))?;
    let meta = ExperimentMeta {
        artifact_location: folder.to_string_lossy().into_owned(),
        creation_time: now(),
        experiment_id: id.clone(),
        last_update_time: now(),
        lifecycle_stage: "active".into(),
        name: name.to_owned(),
    };
    write_meta(&folder, &meta)?;
    Ok(id)
}

/// The id of the run of a checkpoint folder, which is noted there.
fn run_id(checkpoints: &Path) -> Result<String, TrainingError> {
    let path = checkpoints.join(RUN);
    let noted = fs::read_to_string(&path).unwrap_or_default();
    let noted = noted.trim();
    if noted.len() == 32 && noted.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(noted.to_owned());
    }
    let id = random_hex::<16>().map_err(TrainingError::file(&path))?;
    replace(&path, &format!("{id}\n"))?;
    Ok(id)
}

/// The settings of training, one for each line of MLflow's table: maps within maps have names with dots.
fn parameters(settings: &ResolvedSettings) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    if let Ok(Value::Object(mut all)) = serde_json::to_value(&settings.settings) {
        all.remove("hub_token");
        all.extend(settings.recorded());
        flatten("", &Value::Object(all), &mut found);
    }
    found
}

fn flatten(name: &str, value: &Value, found: &mut BTreeMap<String, String>) {
    if let Value::Object(fields) = value {
        for (field, value) in fields {
            let name = match name {
                "" => safe(field),
                name => format!("{name}.{}", safe(field)),
            };
            flatten(&name, value, found);
        }
        return;
    }
    let mut text = match value {
        Value::String(text) if !text.contains(char::is_control) => text.clone(),
        value => value.to_string(),
    };
    text.truncate(text.floor_char_boundary(LONGEST_VALUE));
    found.insert(name.to_owned(), text);
}

/// The curves of a line: names, and lines of their files.
fn points(line: &Value) -> impl Iterator<Item = (String, String)> {
    let step = line["step"].as_u64();
    let time = line["time"]
        .as_f64()
        .map_or_else(now, |seconds| (seconds * 1000.0) as u64);
    let points = step.map(|step| {
        let point = move |(name, value): (String, f64)| {
            let parts: Vec<String> = name.split('/').map(safe).collect();
            (parts.join("/"), format!("{time} {value} {step}\n"))
        };
        scalars(line).into_iter().map(point)
    });
    points.into_iter().flatten()
}

/// A part of a name as MLflow allows it, which is a part of a path: `_` and the code point in place of other characters.
fn safe(part: &str) -> String {
    let dots = part.chars().all(|c| c == '.');
    let mut safe = String::new();
    for c in part.chars().take(100) {
        match c {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '_' | '-' | ' ' => safe.push(c),
            '.' if !dots => safe.push(c),
            other => safe.push_str(&format!("_{:x}", u32::from(other))),
        }
    }
    if safe.is_empty() { "_".into() } else { safe }
}

/// Milliseconds since 1970.
fn now() -> u64 {
    (seconds_since_epoch() * 1000.0) as u64
}

/// `meta.yaml` of a folder; none where it is not there or is another one's.
fn read_meta<T: serde::de::DeserializeOwned>(folder: &Path) -> Option<T> {
    let path = folder.join("meta.yaml");
    let metadata = path.metadata().ok()?;
    let text = (metadata.is_file() && metadata.len() <= LARGEST_META).then(|| fs::read_to_string(&path))?;
    let text = text.ok()?;
    flow_yaml_guard::check(&text).ok()?;
    serde_yaml::from_str(&text).ok()
}

fn write_meta(folder: &Path, meta: &impl Serialize) -> Result<(), TrainingError> {
    let text = serde_yaml::to_string(meta).map_err(|error| TrainingError::data(format!("meta.yaml: {error}")))?;
    replace(&folder.join("meta.yaml"), &text)
}

/// Writes a file as a whole.
fn replace(path: &Path, content: &str) -> Result<(), TrainingError> {
    make_folder_of(path)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let writing = path.with_file_name(format!(".{name}.{}.writing", std::process::id()));
    fs::write(&writing, content).map_err(TrainingError::file(&writing))?;
    fs::rename(&writing, path).map_err(TrainingError::file(path))
}

fn make_folder_of(path: &Path) -> Result<(), TrainingError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(TrainingError::file(folder))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::metrics::Metrics;
    use crate::settings::TrainSettings;

    fn settings(folder: &Path) -> ResolvedSettings {
        let mut settings = ResolvedSettings::from(TrainSettings {
            checkpoints: "work/run".into(),
            mlflow: Some(MlflowSettings {
                folder: folder.join("mlruns").to_string_lossy().into_owned(),
                experiment_name: "Hindi, first".into(),
            }),
            ..TrainSettings::default()
        });
        settings.labels = RunLabels {
            name: Some("half: the rows".into()),
            note: Some("two\nlines".into()),
        };
        settings
    }

    fn step(step: u64) -> Value {
        json!({ "kind": "train", "step": step, "loss": 1.0 / step as f64, "lr": 1e-6, "seconds": 2.0, "tokens": 50 })
    }

    /// Trains for six steps, of which two are lost by an interruption and done again.
    fn written(folder: &Path) -> PathBuf {
        let checkpoints = folder.join("checkpoints");
        fs::create_dir_all(&checkpoints).unwrap();
        let settings = settings(folder);
        let mut metrics = Metrics::open(&checkpoints, None).unwrap();
        metrics.follow_settings(&settings).unwrap();
        for line in [
            step(1),
            step(2),
            json!({ "kind": "evaluation", "step": 2, "wer": 0.25, "languages": { "hi": { "wer": 0.5 }, "../../x": { "wer": 0.75 } } }),
            step(3),
            step(4),
        ] {
            metrics.append(&line).unwrap();
        }
        drop(metrics);
        let mut metrics = Metrics::open(&checkpoints, Some(2)).unwrap();
        metrics.follow_settings(&settings).unwrap();
        for number in 3..=6 {
            metrics.append(&step(number)).unwrap();
        }
        metrics.finish().unwrap();
        run_folder(folder)
    }

    /// The one run of the one experiment.
    fn run_folder(folder: &Path) -> PathBuf {
        let only = |folder: &Path| {
            let mut found = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
            let first = found.find(|path| path.is_dir()).unwrap();
            assert!(
                found.all(|path| path.is_file()),
                "more than one in {}",
                folder.display()
            );
            first
        };
        only(&only(&folder.join("mlruns")))
    }

    #[test]
    fn a_resumed_training_is_one_run_without_doubled_points() {
        let temp = tempfile::tempdir().unwrap();
        let run = written(temp.path());
        let points = |name: &str| -> Vec<(f64, u64)> {
            let text = fs::read_to_string(run.join("metrics").join(name)).unwrap();
            let point = |line: &str| {
                let fields: Vec<&str> = line.split(' ').collect();
                assert!(
                    fields.len() == 3 && fields[0].parse::<u64>().unwrap() > 1_600_000_000_000,
                    "{line}"
                );
                (fields[1].parse().unwrap(), fields[2].parse().unwrap())
            };
            text.lines().map(point).collect()
        };
        let losses: Vec<(f64, u64)> = (1..=6).map(|step| (1.0 / step as f64, step)).collect();
        assert_eq!(points("train/loss"), losses);
        assert_eq!(
            points("learning_rate"),
            (1..=6).map(|step| (1e-6, step)).collect::<Vec<_>>()
        );
        assert_eq!(points("validation_wer/hi"), [(0.5, 2)]);
        // A language is a part of a path.
        assert_eq!(points("validation_wer/_2e_2e/_2e_2e/x"), [(0.75, 2)]);
    }

    #[test]
    fn names_and_states_are_those_of_the_run() {
        let temp = tempfile::tempdir().unwrap();
        let run = written(temp.path());
        let read = |name: &str| fs::read_to_string(run.join(name)).unwrap();
        assert_eq!(read("tags/mlflow.runName"), "half: the rows");
        assert_eq!(read("tags/mlflow.note.content"), "two\nlines");
        assert_eq!(read("params/phase1_lr"), "0.0003");
        assert_eq!(
            (read("params/betas"), read("params/init")),
            ("[0.9,0.98]".into(), "none".into())
        );
        assert_eq!(read("params/model.d_model"), "144");
        let meta: RunMeta = read_meta(&run).unwrap();
        assert_eq!((meta.status, meta.run_name.as_str()), (FINISHED, "half: the rows"));
        assert!(meta.end_time.unwrap() >= meta.start_time);

        // One that is interrupted is not running any more; a run without a name keeps the one that it has.
        let mut settings = settings(temp.path());
        settings.labels = RunLabels::default();
        let mut metrics = Metrics::open(&temp.path().join("checkpoints"), Some(6)).unwrap();
        metrics.follow_settings(&settings).unwrap();
        assert_eq!(read_meta::<RunMeta>(&run).unwrap().status, RUNNING);
        drop(metrics);
        let again: RunMeta = read_meta(&run).unwrap();
        assert_eq!(
            (again.status, again.run_name, again.start_time),
            (KILLED, meta.run_name, meta.start_time)
        );

        // An experiment of MLflow's own with this name is used, and damaged ones are not.
        let other = tempfile::tempdir().unwrap();
        for (id, meta) in [
            ("3", "name: flow\nexperiment_id: '3'\nlifecycle_stage: deleted\n"),
            ("4", "[[["),
            (
                "5",
                "name: flow\nexperiment_id: '5'\nlifecycle_stage: active\nworkspace: default\n",
            ),
        ] {
            fs::create_dir(other.path().join(id)).unwrap();
            fs::write(other.path().join(id).join("meta.yaml"), meta).unwrap();
        }
        assert_eq!(experiment(other.path(), "flow").unwrap(), "5");
        let made = experiment(other.path(), "new").unwrap();
        assert!(made.len() == 18 && experiment(other.path(), "new").unwrap() == made);
    }

    #[test]
    fn parts_of_names_stay_in_their_folder() {
        for (part, expected) in [
            ("hi", "hi"),
            ("..", "_2e_2e"),
            ("v.1", "v.1"),
            ("", "_"),
            ("a/b\\c\n", "a_2fb_5cc_a"),
            ("हि", "_939_93f"),
        ] {
            assert_eq!(safe(part), expected);
        }
        assert!(
            MlflowSettings {
                folder: "s3://bucket".into(),
                ..MlflowSettings::default()
            }
            .check()
            .is_err()
        );
        assert!(
            MlflowSettings {
                experiment_name: " ".into(),
                ..MlflowSettings::default()
            }
            .check()
            .is_err()
        );
    }

    /// Needs a Python that has `mlflow-skinny`; `FLOW_TEST_PYTHON` names it.
    #[test]
    #[ignore = "needs a Python with MLflow"]
    fn mlflow_itself_reads_the_run() {
        const READ: &str = "import json, sys
from mlflow import MlflowClient
client = MlflowClient('file:' + sys.argv[1])
run, = client.search_runs([client.get_experiment_by_name('Hindi, first').experiment_id])
history = {name: [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics}
print(json.dumps({'history': history, 'status': run.info.status, 'name': run.info.run_name,
    'note': run.data.tags['mlflow.note.content'], 'rate': run.data.params['phase1_lr']}))";
        let temp = tempfile::tempdir().unwrap();
        written(temp.path());
        let python = std::env::var("FLOW_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
        let output = std::process::Command::new(&python)
            .args(["-c", READ])
            .arg(temp.path().join("mlruns"))
            .env("MLFLOW_ALLOW_FILE_STORE", "true")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{python}: {said}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        let losses: Vec<Value> = (1..=6).map(|step| json!([step, 1.0 / step as f64])).collect();
        assert_eq!(found["history"]["train/loss"], json!(losses));
        assert_eq!(found["history"]["train/tokens_per_second"][5], json!([6, 25.0]));
        assert_eq!(found["history"]["val_wer"], json!([[2, 0.25]]));
        assert_eq!(found["history"]["validation_wer/hi"], json!([[2, 0.5]]));
        assert_eq!(
            (&found["status"], &found["name"]),
            (&json!("FINISHED"), &json!("half: the rows"))
        );
        assert_eq!(
            (&found["note"], &found["rate"]),
            (&json!("two\nlines"), &json!("0.0003"))
        );
    }
}
