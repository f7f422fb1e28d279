//! Manifests as NeMo reads them: one JSON object to a line.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use arrow::array::{Array, AsArray, RecordBatch, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Schema};
use flow_corpus::ManifestError;
use flow_corpus::extra::{self, EXTRA};
use flow_corpus::files::trailing_number;
use flow_corpus::names::strip_dot_slash;
use flow_corpus::times::{TIME_KEYS, unread_among};
use flow_kind::{Artifact, Digest, Partition, StageError};
use serde::Serialize;
use serde_json::Value;

use crate::columns;
use crate::extracted::Extracted;
use crate::pieces::{Piece, Standing, Taken, inputs_of, parts_of, runs};
use crate::place_columns::{Places, columns_of, with_extra};
use crate::recipe::Recipe;
use crate::write_parts::check_rows;
use crate::write_settings::WriteSettings;

#[derive(Serialize)]
struct Line<'r> {
    audio_filepath: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<f64>,
    duration: f64,
    text: &'r str,
    lang: &'r str,
    segment_id: &'r str,
    shard_id: Value,
    tar_member_name: &'r str,
    tar_path: &'r str,
    source: &'r str,
}

/// Writes all rows of `artifact`, in the order of the parquet manifest. Further columns become keys, where they are not null.
/// Gives where the lines of runs of partitions lie, and `to`. `path` is what errors name.
///
/// # Errors
/// When a duration or an offset is not a number, a row does not say where its recording is, or the file cannot be written.
pub(crate) fn write_lines<W: Write>(
    artifact: &Artifact,
    extracted: &Extracted<'_>,
    recipe: &Recipe<'_>,
    standing: &Standing,
    path: &Path,
    to: W,
) -> Result<(Vec<Piece>, W), StageError> {
    let failed = |e| ManifestError::io(path, e);
    let mut file = Pieces::new(to);
    let (partitions, parts) = parts_of(artifact);
    let recipe_of_lines = recipe.of_file(&Schema::empty(), artifact.schema());
    let lines = Lines {
        artifact,
        extracted,
        recipe,
    };
    for run in runs(&parts) {
        let inputs = inputs_of(&recipe_of_lines, &parts[run.clone()]);
        if let Some(taken) = standing.take(&[], &inputs) {
            file.push(&taken).map_err(failed)?;
            continue;
        }
        file.begin();
        for at in run {
            let written = lines.write(partitions[at], &mut |line| {
                file.write(line).map_err(|e| failed(e).into())
            })?;
            check_rows(&parts[at], written)?;
        }
        file.end(inputs);
    }
    Ok(file.finish().map_err(failed)?)
}

/// A file that is written piece by piece.
struct Pieces<W: Write> {
    file: BufWriter<W>,
    /// Bytes that are written.
    end: u64,
    /// Where the current piece begins, and the digest of its bytes.
    start: u64,
    content: blake3::Hasher,
    pieces: Vec<Piece>,
}

impl<W: Write> Pieces<W> {
    fn new(to: W) -> Pieces<W> {
        Pieces {
            file: BufWriter::with_capacity(1 << 18, to),
            end: 0,
            start: 0,
            content: blake3::Hasher::new(),
            pieces: Vec::new(),
        }
    }

    fn begin(&mut self) {
        self.start = self.end;
        self.content.reset();
    }

    /// Bytes of a piece that is made again.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.content.update(bytes);
        self.end += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    fn end(&mut self, inputs: Digest) {
        self.pieces.push(Piece {
            inputs,
            start: self.start,
            bytes: self.end - self.start,
            tail: String::new(),
            content: Digest::from_bytes(*self.content.finalize().as_bytes()),
        });
    }

    /// A piece that is taken over.
    fn push(&mut self, taken: &Taken) -> io::Result<()> {
        self.pieces.push(Piece {
            inputs: taken.inputs,
            start: self.end,
            bytes: taken.bytes.len() as u64,
            tail: String::new(),
            content: taken.content,
        });
        self.end += taken.bytes.len() as u64;
        self.file.write_all(&taken.bytes)
    }

    fn finish(self) -> io::Result<(Vec<Piece>, W)> {
        let to = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok((self.pieces, to))
    }
}

/// The lines of an artifact's rows.
struct Lines<'l> {
    artifact: &'l Artifact,
    extracted: &'l Extracted<'l>,
    recipe: &'l Recipe<'l>,
}

impl Lines<'_> {
    /// Gives each line of a partition, with its end, to `write`, and says how many there are.
    fn write(
        &self,
        partition: &Partition,
        write: &mut dyn FnMut(&[u8]) -> Result<(), StageError>,
    ) -> Result<u64, StageError> {
        let WriteSettings {
            shards,
            extra_columns: further,
            ..
        } = self.recipe.settings;
        let schema = self.artifact.schema();
        let wanted = columns_of(schema, further);
        let mut written = 0;
        for batch in self.artifact.read(partition, Some(&wanted))? {
            let batch = batch?;
            let places = Places::of(&batch)?;
            let extras = if with_extra(schema) {
                Some(columns::text(&batch, EXTRA)?)
            } else {
                None
            };
            let text = |name| columns::text(&batch, name);
            let (ids, shard_ids, texts, langs) = (text("segment_id")?, text("shard_id")?, text("text")?, text("lang")?);
            let (members, sources) = (text("tar_member_name")?, text("source")?);
            let durations = columns::number(&batch, "duration")?;
            let columns = further
                .iter()
                .map(|name| Ok((name, as_json(&batch, name)?)))
                .collect::<Result<Vec<_>, StageError>>()?;
            for row in 0..batch.num_rows() {
                let place = places.of_row(row, shards, self.extracted, partition)?;
                let is_tarred = place.in_tar && self.extracted.audio.as_os_str().is_empty();
                let shard = is_tarred
                    .then(|| trailing_number(Path::new(&*place.tar_path)))
                    .flatten();
                let extra = extras.filter(|extras| extras.is_valid(row) && !extras.value(row).is_empty());
                let mut others = match extra.map(|extras| extra::members(extras.value(row))).transpose() {
                    Ok(others) => others.unwrap_or_default(),
                    Err(error) => {
                        let id = ids.value(row);
                        let message = format!("{partition}: `{EXTRA}` of {id} is not a JSON object: {error}");
                        return Err(StageError::failed(message));
                    }
                };
                others.extend(columns.iter().filter_map(|(name, values)| {
                    let value = values.is_valid(row).then(|| values.value(row))?;
                    Some(((*name).clone(), value))
                }));
                let line = Line {
                    audio_filepath: match place.file {
                        Some(file) => file,
                        // NeMo's tarred form.
                        None if is_tarred => strip_dot_slash(members.value(row)).to_string(),
                        None => self.extracted.path(&place.tar_path, members.value(row))?,
                    },
                    // Where other keys could be taken for where the row begins, the line says it.
                    offset: place.offset.or_else(|| has_times(&others).then_some(0.0)),
                    duration: durations.value(row),
                    text: texts.value(row),
                    lang: langs.value(row),
                    segment_id: ids.value(row),
                    shard_id: shard.map_or_else(|| shard_ids.value(row).into(), Value::from),
                    tar_member_name: members.value(row),
                    tar_path: &place.tar_path,
                    source: sources.value(row),
                };
                for (what, seconds) in [("duration", Some(line.duration)), ("offset", line.offset)] {
                    if let Some(seconds) = seconds.filter(|seconds| !seconds.is_finite()) {
                        let message = format!("{partition}: the {what} of {} is {seconds} s", line.segment_id);
                        return Err(StageError::failed(message));
                    }
                }
                let beside = numbers_of_times(&others);
                others.extend(beside.iter().map(|(name, text)| (name.clone(), text.as_str())));
                let mut text = serde_json::to_vec(&line).map_err(StageError::failed)?;
                add_members(&mut text, &others);
                text.push(b'\n');
                write(&text)?;
                written += 1;
            }
        }
        Ok(written)
    }
}

/// Values of a column as JSON; null where a row has none.
///
/// # Errors
/// Where a number is infinite or none, which JSON has not.
pub(crate) fn as_json(batch: &RecordBatch, name: &str) -> Result<StringArray, StageError> {
    let failed = |message: String| StageError::failed(format!("column `{name}`: {message}"));
    let column = batch
        .column_by_name(name)
        .ok_or_else(|| failed("it does not exist".into()))?;
    let as_is = matches!(column.data_type(), DataType::Boolean) || column.data_type().is_integer();
    let texts = cast(column, &DataType::Utf8)?;
    let texts = texts.as_string::<i32>();
    let json = |text: &str| match column.data_type() {
        _ if as_is => Ok(text.to_string()),
        data_type if data_type.is_numeric() => {
            let number: serde_json::Number = text
                .parse()
                .map_err(|_| failed(format!("{text} is not a number that JSON has")))?;
            Ok(number.to_string())
        }
        _ => serde_json::to_string(text).map_err(StageError::failed),
    };
    texts.iter().map(|text| text.map(json).transpose()).collect()
}

/// Whether a reader could take one of these keys for where the row begins or ends.
fn has_times(members: &BTreeMap<String, &str>) -> bool {
    let names = members.keys().map(String::as_str);
    names.clone().any(|name| TIME_KEYS.contains(&name)) || unread_among(names).is_some()
}

/// Numbers among the members that have names of times, as texts: as numbers they would say where the row lies.
fn numbers_of_times(members: &BTreeMap<String, &str>) -> Vec<(String, String)> {
    let is_number = |value: &str| value.starts_with(|first: char| first == '-' || first.is_ascii_digit());
    let times = members.iter().filter(|(name, _)| TIME_KEYS.contains(&name.as_str()));
    let numbers = times.filter(|(_, value)| is_number(value));
    numbers
        .map(|(name, value)| (name.clone(), format!("\"{value}\"")))
        .collect()
}

/// Puts members into the JSON object `line`.
fn add_members(line: &mut Vec<u8>, members: &BTreeMap<String, &str>) {
    if !members.is_empty() {
        line.pop();
        line.push(b',');
        // Line breaks can only occur between values.
        let text = extra::object(members).replace(['\n', '\r'], " ");
        line.extend_from_slice(&text.as_bytes()[1..]);
    }
}
