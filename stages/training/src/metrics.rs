//! `metrics.jsonl`: one JSON object per line, beside the checkpoints.
//!
//! `{"kind": "train", ...}` every `log_every` steps, `{"kind": "evaluation", ...}`, `{"kind": "skipped", ...}` and
//! `{"kind": "left_out", ...}` (recordings that could not be loaded) when they happen. `step` is the number of optimizer
//! steps done. The same figures go to TensorBoard's event files in the folder `tensorboard`.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::TrainingError;
use crate::tensorboard::EventFile;

/// Name of the file within the checkpoint folder.
pub const METRICS: &str = "metrics.jsonl";

/// Appends to the file.
pub struct Metrics {
    path: PathBuf,
    file: File,
    events: EventFile,
}

impl Metrics {
    /// Opens the file of a checkpoint folder for going on after a checkpoint of so many steps: lines of later steps,
    /// which no checkpoint kept, are removed, and so is a line that was cut off. Without a checkpoint it begins empty.
    pub fn open(folder: &Path, checkpoint: Option<u64>) -> Result<Self, TrainingError> {
        let path = folder.join(METRICS);
        let events = EventFile::begin(folder, checkpoint)?;
        let Some(step) = checkpoint else {
            let file = File::create(&path).map_err(TrainingError::file(&path))?;
            return Ok(Metrics { path, file, events });
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
        Ok(Metrics { path, file, events })
    }

    pub fn append(&mut self, value: &Value) -> Result<(), TrainingError> {
        let mut line = value.to_string();
        line.push('\n');
        self.file
            .write_all(line.as_bytes())
            .map_err(TrainingError::file(&self.path))?;
        self.events.line(value)
    }
}
