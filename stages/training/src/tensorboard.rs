//! The figures of `metrics.jsonl` as TensorBoard event files, in the folder `tensorboard` beside it.
//!
//! An event file is a sequence of records (length, checksum of the length, bytes, checksum of the bytes; checksums are
//! CRC-32C, masked), each a protocol buffer `Event`: `wall_time` 1, `step` 2, `file_version` 3, `summary` 5 (`value` 1
//! of `tag` 1 and `simple_value` 2), `session_log` 7 (`status` 1). Every run of training begins a new file; its
//! `session_log` with status START at step N makes TensorBoard ignore the steps from N on in older files.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::TrainingError;
use crate::metrics::seconds_since_epoch;

/// Folder of the event files, beside the checkpoints.
pub const FOLDER: &str = "tensorboard";

/// Whether a file is named as [`EventFile::begin`] names it.
pub(crate) fn is_ours(name: &str) -> bool {
    let parts = name
        .strip_prefix("events.out.tfevents.")
        .and_then(|rest| rest.strip_suffix(".flow"))
        .map(|rest| rest.split('.').collect::<Vec<_>>());
    parts.is_some_and(|parts| {
        let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        parts.len() == 3 && parts.iter().all(is_number)
    })
}

/// Appends to an event file.
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Begins a file for a run of training that continues after `step` steps. Without a checkpoint older files of flow,
    /// which belong to a run that left none, are removed; those of other programs stay.
    pub fn begin(checkpoints: &Path, checkpoint: Option<u64>) -> Result<Self, TrainingError> {
        let folder = checkpoints.join(FOLDER);
        if checkpoint.is_none() && folder.is_dir() {
            for entry in fs::read_dir(&folder).map_err(TrainingError::file(&folder))? {
                let path = entry.map_err(TrainingError::file(&folder))?.path();
                if path.file_name().and_then(|name| name.to_str()).is_some_and(is_ours) {
                    fs::remove_file(&path).map_err(TrainingError::file(&path))?;
                }
            }
        }
        fs::create_dir_all(&folder).map_err(TrainingError::file(&folder))?;
        let (now, process) = (seconds_since_epoch(), std::process::id());
        let path = folder.join(format!(
            "events.out.tfevents.{:010}.{:09}.{process}.flow",
            now as u64,
            (now.fract() * 1e9) as u32
        ));
        let file = File::create(&path).map_err(TrainingError::file(&path))?;
        let mut events = EventFile { path, file };
        let mut version = event(now, 0);
        bytes(&mut version, 3, b"brain.Event:2");
        events.write(&version)?;
        if let Some(step) = checkpoint.filter(|step| *step > 0) {
            let mut start = event(now, step);
            let mut log = Vec::new();
            number(&mut log, 1, 1);
            bytes(&mut start, 7, &log);
            events.write(&start)?;
        }
        Ok(events)
    }

    /// Writes the figures of a line of `metrics.jsonl`; lines without curves are skipped.
    pub fn line(&mut self, line: &Value) -> Result<(), TrainingError> {
        let Some(step) = line["step"].as_u64() else {
            return Ok(());
        };
        let scalars = scalars(line);
        if scalars.is_empty() {
            return Ok(());
        }
        let mut summary = Vec::new();
        for (tag, value) in scalars {
            let mut scalar = Vec::new();
            bytes(&mut scalar, 1, tag.as_bytes());
            key(&mut scalar, 2, 5);
            scalar.extend((value as f32).to_le_bytes());
            bytes(&mut summary, 1, &scalar);
        }
        let time = line["time"].as_f64().unwrap_or_else(seconds_since_epoch);
        let mut event = event(time, step);
        bytes(&mut event, 5, &summary);
        self.write(&event)
    }

    fn write(&mut self, event: &[u8]) -> Result<(), TrainingError> {
        let length = (event.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(event.len() + 16);
        record.extend(length);
        record.extend(masked(&length).to_le_bytes());
        record.extend(event);
        record.extend(masked(event).to_le_bytes());
        // In one call, so that a reader sees whole records.
        self.file.write_all(&record).map_err(TrainingError::file(&self.path))
    }
}

/// The curves of a line: their names and values.
pub(crate) fn scalars(line: &Value) -> Vec<(String, f64)> {
    let mut found = Vec::new();
    let mut add = |tag: String, value: &Value| found.extend(value.as_f64().map(|value| (tag, value)));
    match line["kind"].as_str() {
        Some("train") => {
            // The names of transformers' Trainer and of Lightning, so that curves of several programs share a chart.
            for name in ["train_loss", "learning_rate"] {
                add(name.to_owned(), &line[name]);
            }
            for name in ["loss", "lr", "grad_norm", "padding", "epoch", "samples", "memory_mib"]
                .into_iter()
                .chain([
                    "device_memory_mib",
                    "device_memory_peak_mib",
                    "device_memory_reserved_mib",
                ])
                .chain(["flop_utilisation", "flop_utilisation_done"])
            {
                add(format!("train/{name}"), &line[name]);
            }
            if let Some(seconds) = line["seconds"].as_f64().filter(|seconds| *seconds > 0.0) {
                for (tag, name) in [
                    ("audio_seconds_per_second", "audio_seconds"),
                    ("tokens_per_second", "tokens"),
                    ("share_of_time_waiting_for_data", "waited_for_data"),
                ] {
                    if let Some(amount) = line[name].as_f64() {
                        add(format!("train/{tag}"), &(amount / seconds).into());
                    }
                }
            }
            for (rank, seconds) in line["rank_waits"].as_array().into_iter().flatten().enumerate() {
                add(format!("rank_waits/{rank}"), seconds);
            }
        }
        Some("evaluation") => {
            for name in ["val_loss", "val_wer", "val_cer"] {
                add(name.to_owned(), &line[name]);
            }
            add("validation/loss".to_owned(), &line["loss"]);
            for name in ["wer", "cer"] {
                add(format!("validation/{name}"), &line[name]);
                for (language, score) in line["languages"].as_object().into_iter().flatten() {
                    add(format!("validation_{name}/{language}"), &score[name]);
                }
            }
        }
        _ => {}
    }
    found
}

/// An event with its time and step.
fn event(time: f64, step: u64) -> Vec<u8> {
    let mut event = Vec::new();
    key(&mut event, 1, 1);
    event.extend(time.to_le_bytes());
    number(&mut event, 2, step);
    event
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn key(out: &mut Vec<u8>, field: u64, wire: u64) {
    varint(out, field << 3 | wire);
}

fn number(out: &mut Vec<u8>, field: u64, value: u64) {
    key(out, field, 0);
    varint(out, value);
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    key(out, field, 2);
    varint(out, value.len() as u64);
    out.extend(value);
}

/// Masked CRC-32C of records: rotated, plus a constant.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8)
}

/// The cyclic checksum of Castagnoli's polynomial, bit by bit: events are few and short.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |mut sum: u32, byte| {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = if sum & 1 == 1 { sum >> 1 ^ 0x82F6_3B78 } else { sum >> 1 };
        }
        sum
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The payloads of a file's records, whose checksums must be right.
    fn records(path: &Path) -> Vec<Vec<u8>> {
        let all = fs::read(path).unwrap();
        let (mut rest, mut found) = (all.as_slice(), Vec::new());
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(rest[8..12], masked(&rest[..8]).to_le_bytes());
            let payload = &rest[12..12 + length];
            assert_eq!(rest[12 + length..16 + length], masked(payload).to_le_bytes());
            found.push(payload.to_vec());
            rest = &rest[16 + length..];
        }
        found
    }

    #[test]
    fn the_checksum_is_castagnolis() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
    }

    /// A file as a training run that went on after step 300 writes it.
    fn written(folder: &Path) -> EventFile {
        let mut events = EventFile::begin(folder, Some(300)).unwrap();
        for line in [
            json!({ "kind": "train", "step": 310, "loss": 2.5, "train_loss": 2.5, "learning_rate": 0.5, "audio_seconds": 90.0, "seconds": 2.0, "tokens": 50, "waited_for_data": 0.5, "rank_waits": [0.0, 0.125], "device_memory_peak_mib": 4096, "device_memory_mib": null }),
            json!({ "kind": "evaluation", "step": 310, "wer": 0.25, "val_wer": 0.25, "cer": null, "languages": { "hi": { "wer": 0.5 } } }),
            json!({ "kind": "skipped", "step": 311 }),
            json!({ "kind": "train", "step": 320, "loss": 1.5, "seconds": 0.0 }),
        ] {
            events.line(&line).unwrap();
        }
        events
    }

    /// Needs a Python that has TensorBoard; `FLOW_TEST_PYTHON` names it.
    #[test]
    #[ignore = "needs a Python with TensorBoard"]
    fn tensorboard_itself_reads_the_scalars() {
        const READ: &str = "import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1]).Reload()
print(json.dumps({tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in events.Tags()['scalars']}))";
        let temp = tempfile::tempdir().unwrap();
        written(temp.path());
        let python = std::env::var("FLOW_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
        let output = std::process::Command::new(&python)
            .args(["-c", READ])
            .arg(temp.path().join(FOLDER))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{python}: {said}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        let expected = json!({
            "train/loss": [[310, 2.5], [320, 1.5]],
            "train/audio_seconds_per_second": [[310, 45.0]],
            "train/device_memory_peak_mib": [[310, 4096.0]],
            "train/tokens_per_second": [[310, 25.0]],
            "train/share_of_time_waiting_for_data": [[310, 0.25]],
            "rank_waits/0": [[310, 0.0]],
            "rank_waits/1": [[310, 0.125]],
            "train_loss": [[310, 2.5]],
            "learning_rate": [[310, 0.5]],
            "val_wer": [[310, 0.25]],
            "validation/wer": [[310, 0.25]],
            "validation_wer/hi": [[310, 0.5]],
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn the_validation_loss_is_a_scalar_beside_the_error_rates() {
        let line =
            json!({ "kind": "evaluation", "step": 310, "loss": 1.5, "val_loss": 1.5, "wer": 0.25, "val_wer": 0.25 });
        let expected = [
            ("val_loss", 1.5),
            ("val_wer", 0.25),
            ("validation/loss", 1.5),
            ("validation/wer", 0.25),
        ];
        assert_eq!(scalars(&line), expected.map(|(name, value)| (name.to_owned(), value)));
    }

    #[test]
    fn lines_become_scalars() {
        let temp = tempfile::tempdir().unwrap();
        let events = written(temp.path());
        let records = records(&events.path);
        assert_eq!(records.len(), 5);
        let holds = |record: usize, part: &[u8]| records[record].windows(part.len()).any(|window| window == part);
        assert!(holds(0, b"brain.Event:2"));
        // START, at step 300.
        assert!(holds(1, &[0x10, 0xAC, 0x02]) && holds(1, &[0x3A, 2, 0x08, 1]));
        let scalar = |tag: &str, value: f32| {
            let mut bytes = vec![0x0A, tag.len() as u8];
            bytes.extend(tag.as_bytes());
            bytes.push(0x15);
            bytes.extend(value.to_le_bytes());
            bytes
        };
        assert!(holds(2, &scalar("train/loss", 2.5)) && holds(2, &scalar("train/audio_seconds_per_second", 45.0)));
        assert!(holds(2, &scalar("train/device_memory_peak_mib", 4096.0)) && !holds(2, b"device_memory_mib"));
        assert!(holds(3, &scalar("validation/wer", 0.25)) && holds(3, &scalar("validation_wer/hi", 0.5)));
        assert!(holds(2, &scalar("train_loss", 2.5)) && holds(2, &scalar("learning_rate", 0.5)));
        assert!(holds(3, &scalar("val_wer", 0.25)));
        assert!(!holds(3, b"validation/cer"));

        // A run that begins again removes flow's files of the previous one, and keeps those of other programs.
        let theirs = [
            "events.out.tfevents.1700000000.node1.77.0",
            "my-events.out.tfevents.1.2.3.flow",
            "events.out.tfevents.1.2.x.flow",
        ];
        for name in theirs {
            fs::write(temp.path().join(FOLDER).join(name), "theirs").unwrap();
        }
        EventFile::begin(temp.path(), None).unwrap();
        assert_eq!(
            fs::read_dir(temp.path().join(FOLDER)).unwrap().count(),
            1 + theirs.len()
        );
        assert!(theirs.iter().all(|name| temp.path().join(FOLDER).join(name).exists()));
    }
}
