//! What a run leaves in its folder: its frozen spec and plan, and its events.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use chrono::{SecondsFormat, Utc};

use flow_base::event::{Event, Events};
use flow_plan::Plan;
use flow_plan::run_error::RunError;
use flow_spec::Checked;
use flow_store::{Store, StoreError, write_atomically, write_json_atomically};

/// Keeps spec and plan. Reused partitions are none of the plan's: they are in the run's snapshots.
pub(super) fn freeze(store: &Store, id: &str, checked: &Checked, plan: &Plan) -> Result<(), RunError> {
    let folder = store.run_folder(id)?;
    write_atomically(&folder.join("spec.yaml"), checked.pipeline.frozen().as_bytes())?;
    write_json_atomically(&folder.join("plan.json"), plan)?;
    Ok(())
}

/// Writes events to `events.jsonl` until it is closed.
pub(super) struct EventLog {
    file: Arc<Mutex<Option<File>>>,
}

impl EventLog {
    pub fn open(folder: &Path, events: &Events) -> Result<Self, RunError> {
        let path = folder.join("events.jsonl");
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|source| StoreError::Io {
                action: "write",
                path: path.clone(),
                source,
            })?;
        let file = Arc::new(Mutex::new(Some(file)));
        let shared = Arc::clone(&file);
        events.listen(move |event| {
            let mut file = shared.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(open) = file.as_mut()
                && let Some(line) = line(event)
                && open.write_all(line.as_bytes()).is_err()
            {
                // A log that cannot be written ends the log, not the run.
                *file = None;
            }
        });
        Ok(EventLog { file })
    }

    pub fn close(&self) {
        if let Some(file) = self.file.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The log is for people; what counts is flushed with the records.
            let _ = file.sync_all();
        }
    }
}

/// The event as one line of JSON, with the time.
fn line(event: &Event) -> Option<String> {
    let mut value = serde_json::to_value(event).ok()?;
    let at = Utc::now().to_rfc3339_opts(SecondsFormat::Millis, true);
    value.as_object_mut()?.insert("at".to_string(), at.into());
    Some(format!("{value}\n"))
}
