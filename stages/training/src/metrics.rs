//! `metrics.jsonl`: one JSON object per line, beside the checkpoints.
//!
//! `{"kind": "train", ...}` every `log_every` steps, `{"kind": "evaluation", ...}`, `{"kind": "skipped", ...}` and
//! `{"kind": "left_out", ...}` (recordings that could not be loaded) and `{"kind": "out_of_memory", ...}` (micro-batches for
//! which a device had no memory left) when they happen. `step` is the number of optimizer
//! steps done, `time` when the line was written, in seconds since 1970. Figures that other programs report too are
//! repeated under their usual names: `train_loss` and `learning_rate` in lines of training, `val_loss`, `val_wer` and
//! `val_cer` in evaluations. The same figures go to TensorBoard's event files in the folder `tensorboard`, and
//! where the settings ask for it into MLflow's file store.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::error::TrainingError;
use crate::mlflow;
use crate::resolved_settings::ResolvedSettings;
use crate::tensorboard::EventFile;

/// Name of the file within the checkpoint folder.
pub const METRICS: &str = "metrics.jsonl";

/// Appends to the file.
pub struct Metrics {
    path: PathBuf,
    file: File,
    events: EventFile,
    mlflow: Option<mlflow::Run>,
}

impl Metrics {
    /// Opens the file of a checkpoint folder to continue after a checkpoint of `step` steps: lines of later steps are
    /// removed, and so is a truncated line. Without a checkpoint it begins empty.
    pub fn open(folder: &Path, checkpoint: Option<u64>) -> Result<Self, TrainingError> {
        let path = folder.join(METRICS);
        let events = EventFile::begin(folder, checkpoint)?;
        let Some(step) = checkpoint else {
            let file = File::create(&path).map_err(TrainingError::file(&path))?;
            return Ok(Metrics {
                path,
                file,
                events,
                mlflow: None,
            });
        };
        if path.exists() {
            let kept: Vec<String> = BufReader::new(File::open(&path).map_err(TrainingError::file(&path))?)
                .split(b'\n')
                .filter_map(|line| {
                    let line = String::from_utf8(line.ok()?).ok()?;
                    let value: Value = serde_json::from_str(&line).ok()?;
                    (value["step"].as_u64()? <= step).then_some(line)
                })
                .collect();
            let mut text = kept.join("\n");
            if !text.is_empty() {
                text.push('\n');
            }
            let writing = folder.join(".metrics.jsonl.writing");
            fs::write(&writing, text).map_err(TrainingError::file(&writing))?;
            fs::rename(&writing, &path).map_err(TrainingError::file(&path))?;
        }
        let file = File::options()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(TrainingError::file(&path))?;
        Ok(Metrics {
            path,
            file,
            events,
            mlflow: None,
        })
    }

    /// Writes what the file holds, and later lines, into MLflow's file store too, where the settings ask for it.
    pub fn follow_settings(&mut self, settings: &ResolvedSettings) -> Result<(), TrainingError> {
        if let Some(mlflow) = &settings.mlflow {
            let folder = self.path.parent().unwrap_or(Path::new(""));
            self.mlflow = Some(mlflow::Run::open(folder, mlflow, settings, self.lines().iter())?);
        }
        Ok(())
    }

    /// All steps are done.
    pub fn finish(&mut self) -> Result<(), TrainingError> {
        self.mlflow.as_mut().map_or(Ok(()), mlflow::Run::finish)
    }

    fn lines(&self) -> Vec<Value> {
        let text = fs::read_to_string(&self.path).unwrap_or_default();
        text.lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }

    /// Whether there is an evaluation after this many steps.
    pub fn has_evaluation(&self, step: u64) -> bool {
        self.lines()
            .iter()
            .any(|line| line["kind"] == "evaluation" && line["step"] == step)
    }

    /// Writes a line, with the time and the usual names.
    pub fn append(&mut self, value: &Value) -> Result<(), TrainingError> {
        let value = &with_usual_names(value.clone(), seconds_since_epoch());
        let mut line = value.to_string();
        line.push('\n');
        self.file
            .write_all(line.as_bytes())
            .map_err(TrainingError::file(&self.path))?;
        self.events.line(value)?;
        self.mlflow.as_ref().map_or(Ok(()), |run| run.line(value))
    }
}

/// Kind of a line, our name of a figure, and the usual one.
const USUAL: [(&str, &str, &str); 5] = [
    ("train", "loss", "train_loss"),
    ("train", "lr", "learning_rate"),
    ("evaluation", "loss", "val_loss"),
    ("evaluation", "wer", "val_wer"),
    ("evaluation", "cer", "val_cer"),
];

fn with_usual_names(mut line: Value, time: f64) -> Value {
    for (kind, ours, usual) in USUAL {
        if line["kind"] == kind {
            line[usual] = line[ours].clone();
        }
    }
    if let (Some(audio), Some(seconds)) = (line["audio_seconds"].as_f64(), line["seconds"].as_f64())
        && seconds > 0.0
    {
        line["audio_seconds_per_second"] = Value::from(audio / seconds);
    }
    line["time"] = Value::from(time);
    line
}

/// Seconds since 1970; 0 where the clock is set to an earlier time.
pub(crate) fn seconds_since_epoch() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |past| past.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_stand_under_their_usual_names_too() {
        let temp = tempfile::tempdir().unwrap();
        let mut metrics = Metrics::open(temp.path(), None).unwrap();
        let before = seconds_since_epoch();
        for line in [
            json!({ "kind": "train", "step": 10, "loss": 2.5, "lr": 1e-3, "audio_seconds": 90.0, "seconds": 2.0 }),
            json!({ "kind": "evaluation", "step": 10, "loss": 1.5, "wer": 0.25, "cer": null, "seconds": 3.0 }),
            json!({ "kind": "skipped", "step": 11, "loss": null }),
        ] {
            metrics.append(&line).unwrap();
        }
        let text = fs::read_to_string(temp.path().join(METRICS)).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let train = &lines[0];
        assert_eq!((&train["train_loss"], &train["loss"]), (&json!(2.5), &json!(2.5)));
        assert_eq!((&train["learning_rate"], &train["lr"]), (&json!(1e-3), &json!(1e-3)));
        assert_eq!(train["audio_seconds_per_second"], 45.0);
        assert_eq!((&lines[1]["val_wer"], &lines[1]["wer"]), (&json!(0.25), &json!(0.25)));
        assert_eq!((&lines[1]["val_loss"], lines[1].get("train_loss")), (&json!(1.5), None));
        assert!(lines[1].get("val_cer").is_some_and(Value::is_null));
        assert!(lines[1].get("audio_seconds_per_second").is_none() && lines[2].get("train_loss").is_none());
        for line in &lines {
            let time = line["time"].as_f64().unwrap();
            assert!(time >= before && time <= seconds_since_epoch(), "{line}");
        }
    }
}
