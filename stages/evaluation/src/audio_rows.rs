//! Manifest rows chosen for transcription, with the place of their audio.

use std::path::Path;

use arrow::datatypes::Schema;
use flow_runtime::{Artifact, Input, StageError};
use flow_sampling::dataset::{AudioColumns, Dataset};

use crate::transcribe::{Utterance, sample};

/// Chosen rows, in manifest order.
pub struct AudioRows {
    pub utterances: Vec<Utterance>,
    data: Dataset,
    /// Row numbers of the utterances.
    rows: Vec<u32>,
}

/// Refuses rows that lack a column. `members` says whether the port `members` of an `audio.probe` is at hand.
pub fn check_rows(rows: &Input, members: bool) -> Result<(), StageError> {
    let refuse = |message: String, help: Option<&str>| {
        Err(StageError::Input {
            name: rows.name.clone(),
            message,
            help: help.map(str::to_owned),
        })
    };
    for name in ["segment_id", "lang", "text", "duration"] {
        if rows.schema.column_with_name(name).is_none() {
            return refuse(format!("`{}` has no column `{name}`", rows.name), None);
        }
    }
    if AudioColumns::of(&rows.schema, members).is_none() {
        let help =
            "rows of audio.extract have `audio_path`; or give the port `members` of an audio.probe as a further input";
        return refuse(format!("`{}` does not say where the audio is", rows.name), Some(help));
    }
    Ok(())
}

/// Whether a schema is that of the port `members` of an `audio.probe`.
pub fn is_members(schema: &Schema) -> bool {
    ["name", "offset", "size", "stored"]
        .iter()
        .all(|name| schema.column_with_name(name).is_some())
}

impl AudioRows {
    /// Reads rows and chooses `per_language` of each language (0: all), always the same ones. `shards` stands
    /// before every `tar_path`.
    pub fn read(
        rows: &Artifact,
        members: Option<&Artifact>,
        shards: &str,
        per_language: usize,
    ) -> Result<Self, StageError> {
        let data = Dataset::read(rows, members, Path::new(shards), None)?;
        let count = u32::try_from(data.len()).map_err(|_| StageError::failed("more than 2^32 rows"))?;
        let all: Vec<_> = (0..count).filter_map(|row| Some((row, data.utterance(row)?))).collect();
        let chosen = sample(all.iter().map(|(_, u)| (u.lang, u.segment_id, u.text)), per_language);
        let (mut utterances, mut numbers) = (Vec::with_capacity(chosen.len()), Vec::with_capacity(chosen.len()));
        for (row, u) in chosen.into_iter().filter_map(|index| all.get(index)) {
            numbers.push(*row);
            utterances.push(Utterance {
                segment_id: u.segment_id.into(),
                lang: u.lang.into(),
                text: u.text.into(),
                duration: u.duration,
            });
        }
        drop(all);
        Ok(AudioRows {
            utterances,
            data,
            rows: numbers,
        })
    }

    /// The signal of the utterance at `index`: 16 kHz mono.
    pub fn signal(&self, index: usize) -> Result<Vec<f32>, String> {
        let utterance = self
            .rows
            .get(index)
            .and_then(|&row| self.data.utterance(row))
            .ok_or("there is no such row")?;
        let signal = utterance.signal().map_err(|e| e.to_string())?;
        if signal.iter().any(|sample| !sample.is_finite()) {
            return Err("the audio holds samples that are no numbers".into());
        }
        Ok(signal)
    }
}
