//! Transcripts as NeMo writes them: a manifest of JSON lines with `pred_text`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use arrow::array::{Array, AsArray};
use arrow::datatypes::{Float64Type, Int64Type};
use flow_kind::{Artifact, StageError};
use serde::Serialize;

use crate::error::EvaluationError;
use crate::figures::{float, text};

#[derive(Serialize)]
struct Line<'r> {
    /// A whole path: NeMo takes a relative one from the manifest's folder.
    audio_filepath: String,
    duration: f64,
    text: &'r str,
    pred_text: &'r str,
    lang: &'r str,
    segment_id: &'r str,
    set: &'r str,
    source: &'r str,
    /// Where in the recording the utterance begins, in seconds, as NeMo has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<f64>,
    /// Where the recording is in `audio_filepath`, in bytes, where that is a tar.
    #[serde(skip_serializing_if = "Option::is_none")]
    tar_offset: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tar_size: Option<i64>,
}

/// Appends the rows of an `evaluation.decode` to `file`. `shards` is put before the paths of tars.
fn write(input: &Artifact, shards: &Path, file: &mut impl Write) -> Result<(), EvaluationError> {
    for item in input.batches(None) {
        let (_, batch) = item?;
        let column = |name: &str| text(&batch, name);
        let optional = |name: &str| batch.column_by_name(name);
        let strings = |name: &str| optional(name).and_then(|c| c.as_string_opt::<i32>());
        let numbers = |name: &str| optional(name).and_then(|c| c.as_primitive_opt::<Int64Type>());
        let (names, segments, langs) = (column("set")?, column("segment_id")?, column("lang")?);
        let (references, hypotheses) = (column("reference")?, column("hypothesis")?);
        let durations = float(&batch, "duration")?;
        let (files, tars, sources) = (strings("audio_path"), strings("tar_path"), strings("source"));
        let starts = optional("start").and_then(|c| c.as_primitive_opt::<Float64Type>());
        let (offsets, sizes) = (numbers("tar_offset"), numbers("tar_size"));
        for row in 0..batch.num_rows() {
            let path = match (
                files.filter(|column| column.is_valid(row)),
                tars.filter(|column| column.is_valid(row)),
            ) {
                (Some(files), _) => Path::new(files.value(row)).to_path_buf(),
                (None, Some(tars)) => shards.join(tars.value(row)),
                (None, None) => Default::default(),
            };
            let path = if path.as_os_str().is_empty() {
                path
            } else {
                std::path::absolute(&path).map_err(EvaluationError::file(&path))?
            };
            let whole = |column: Option<&arrow::array::Int64Array>| {
                column
                    .filter(|column| column.is_valid(row))
                    .map(|column| column.value(row))
            };
            let line = Line {
                audio_filepath: path.to_string_lossy().into_owned(),
                duration: durations.value(row),
                text: references.value(row),
                pred_text: hypotheses.value(row),
                lang: langs.value(row),
                segment_id: segments.value(row),
                set: names.value(row),
                source: sources.map_or("", |sources| sources.value(row)),
                offset: starts
                    .filter(|starts| starts.is_valid(row))
                    .map(|starts| starts.value(row)),
                tar_offset: whole(offsets),
                tar_size: whole(sizes),
            };
            let mut text = serde_json::to_vec(&line).map_err(StageError::failed)?;
            text.push(b'\n');
            file.write_all(&text).map_err(StageError::failed)?;
        }
    }
    Ok(())
}

/// Writes the rows of all inputs, in their order, to a new file.
pub fn write_all<'a>(
    inputs: impl Iterator<Item = &'a Artifact>,
    shards: &Path,
    path: &Path,
) -> Result<(), EvaluationError> {
    let mut file = BufWriter::new(File::create(path).map_err(EvaluationError::file(path))?);
    for input in inputs {
        write(input, shards, &mut file)?;
    }
    file.flush().map_err(EvaluationError::file(path))
}
