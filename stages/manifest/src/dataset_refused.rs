//! Rows of a dataset that are left out since their recordings cannot be read.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray, UInt32Array};
use flow_corpus::written_set::REJECTS;
use flow_kind::event::Event;
use flow_kind::reject::of_rows;
use flow_kind::{Artifact, ExportFile, ExportSet, Partition, Reject, RejectClass, StageError};
use parquet::arrow::ArrowWriter;

use crate::dataset_rows::{Writing, failed_to_write};
use crate::write_rejects::rejects_schema;
use crate::write_settings::WriteSettings;

/// Rows whose recordings cannot be read: a file that is made when the first one comes.
pub(crate) struct Refused<'s> {
    stage: &'s str,
    file: Option<(ArrowWriter<ExportFile>, PathBuf)>,
    by_reason: BTreeMap<&'static str, u64>,
}

impl<'s> Refused<'s> {
    pub(crate) fn of(stage: &'s str) -> Refused<'s> {
        Refused {
            stage,
            file: None,
            by_reason: BTreeMap::new(),
        }
    }

    pub(crate) fn add(
        &mut self,
        batch: &RecordBatch,
        row: usize,
        partition: &Partition,
        (reason, detail): (&'static str, &str),
        set: &mut ExportSet,
    ) -> Result<(), StageError> {
        let mut rejects = Vec::new();
        of_rows(
            batch,
            "segment_id",
            &[row],
            reason,
            RejectClass::Fault,
            detail,
            |reject| {
                rejects.push(reject);
            },
        )?;
        if self.file.is_none() {
            let file = set.create(REJECTS)?;
            let path = file.path().to_path_buf();
            let writer = ArrowWriter::try_new(file, rejects_schema(), None);
            self.file = Some((writer.map_err(|error| failed_to_write(&path, &error))?, path));
        }
        if let Some((writer, path)) = &mut self.file {
            let rows = reject_rows(&rejects, partition, self.stage)?;
            writer.write(&rows).map_err(|error| failed_to_write(path, &error))?;
        }
        *self.by_reason.entry(reason).or_default() += 1;
        Ok(())
    }

    /// Ends the file, and warns of the rows of the splits that were refused, if there are any.
    ///
    /// # Errors
    /// If they are more than `max_unreadable` allows, or the file cannot be written.
    pub(crate) fn finish(
        self,
        splits: &[(&'static str, &Artifact)],
        settings: &WriteSettings,
        set: &mut ExportSet,
        writing: &Writing<'_>,
    ) -> Result<(), StageError> {
        let Some((writer, path)) = self.file else {
            return Ok(());
        };
        let rows: u64 = splits.iter().map(|(_, artifact)| artifact.rows()).sum();
        let file = writer.into_inner().map_err(|error| failed_to_write(&path, &error))?;
        file.close();
        let refused: u64 = self.by_reason.values().sum();
        let reasons: Vec<String> = self
            .by_reason
            .iter()
            .map(|(reason, rows)| format!("{rows} {reason}"))
            .collect();
        let told = format!(
            "the recordings of {refused} of {rows} rows cannot be read: {}",
            reasons.join(", ")
        );
        if refused as f64 > rows as f64 * settings.max_unreadable {
            let help = match reasons.iter().any(|reason| reason.contains("several_channels")) {
                true => "`format: shar` mixes their channels; `max_unreadable` is the share that may be left out",
                false => {
                    "look whether all recordings are there (a disk that is not mounted?); `max_unreadable` is the share that may be \
                     missing"
                }
            };
            return Err(StageError::refused(told, help));
        }
        if refused == rows && !settings.allow_empty {
            set.guard_empty(told.clone());
        }
        let told = format!("{told}; {REJECTS} of the dataset lists them");
        writing.events.send(Event::warning(Some(self.stage.to_owned()), told));
        Ok(())
    }
}

/// Rejects of a partition as `rejects.parquet` has them.
fn reject_rows(rejects: &[Reject], partition: &Partition, stage: &str) -> Result<RecordBatch, StageError> {
    let text = |value: &dyn Fn(&Reject) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(rejects.iter().map(value)))
    };
    let rows: UInt32Array = rejects.iter().map(|reject| reject.row).collect();
    let ids: StringArray = rejects.iter().map(|reject| reject.id.as_deref()).collect();
    let columns = vec![
        text(&|_| partition.to_string()),
        Arc::new(rows),
        Arc::new(ids),
        text(&|_| stage.to_owned()),
        text(&|reject| reject.reason.clone()),
        text(&|reject| reject.class.as_str().to_owned()),
        text(&|reject| reject.detail.clone()),
        text(&|reject| reject.values.clone()),
    ];
    Ok(RecordBatch::try_new(rejects_schema(), columns)?)
}
