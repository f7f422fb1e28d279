//! The recordings of rows: finding, decoding, and serving them. Only files named by a row of an opened table are read,
//! and only decoded audio is sent.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::Schema;
use axum::extract::{Query, State};
use axum::http::header::{ACCEPT_RANGES, CONTENT_RANGE, CONTENT_TYPE, RANGE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use flow_audio::decode::{SAMPLE_RATE, decode};
use flow_audio::recording_reader::{Channels, Progress};
use flow_audio::wire_audio::wav_header;
use flow_audio::{AudioError, RecordingReader};
use flow_storage::Storage;

use super::app::{App, Shared, answer};
use super::page_error::PageError;
use super::picture::{spectrogram, waveform};
use super::table_ref::{Pairs, Table};
use super::tables::{REJECTED, row_of, value};

/// The longest sound that is sent.
const MAX_SECONDS: f64 = 900.0;
/// For decoding one.
const TIME_LIMIT: Duration = Duration::from_secs(30);
/// Number of decoded sounds in the cache, since a browser requests ranges and pictures.
const REMEMBERED: usize = 4;

/// Where the recording of a row is.
#[derive(Debug, PartialEq)]
pub enum Place {
    /// In the row itself.
    Bytes(Vec<u8>),
    Stored {
        path: PathBuf,
        /// Offset and size in bytes.
        range: Option<(u64, u64)>,
        /// The member of the tar.
        member: Option<String>,
        /// Seconds.
        start: f64,
        duration: Option<f64>,
    },
}

impl Place {
    /// Whether rows of such columns may have a recording.
    pub fn may_be_in(schema: &Schema) -> bool {
        let names = ["clip", "audio_path", "audio_filepath", "tar_path", REJECTED];
        names.iter().any(|name| schema.column_with_name(name).is_some())
    }

    /// The place of a row's recording, or why it is unknown.
    pub fn of_row(row: &RecordBatch, table: &Table) -> Result<Place, String> {
        let clip = row
            .column_by_name("clip")
            .and_then(|column| column.as_binary_opt::<i32>());
        if let Some(clip) = clip.filter(|clip| clip.is_valid(0)) {
            return Ok(Place::Bytes(clip.value(0).to_vec()));
        }
        let number = |name: &str| {
            let number: f64 = value(row, name)?.parse().ok()?;
            Some(number).filter(|number| number.is_finite() && *number >= 0.0)
        };
        let stored = |path, range, member, start, duration| Place::Stored {
            path,
            range,
            member,
            start,
            duration,
        };
        let bytes = |offset: &str, size: &str| Some((number(offset)? as u64, number(size)? as u64));
        if let Some(path) = value(row, "audio_filepath") {
            // As NeMo has it: `offset` are seconds.
            let start = number("offset").unwrap_or(0.0);
            return Ok(stored(beside(&path, table), None, None, start, number("duration")));
        }
        let range = bytes("offset", "size").or_else(|| bytes("tar_offset", "tar_size"));
        let start = number("start");
        let duration = start.and_then(|_| number("duration"));
        if let Some(path) = value(row, "audio_path") {
            return Ok(stored(
                beside(&path, table),
                range,
                None,
                start.unwrap_or(0.0),
                duration,
            ));
        }
        let Some(tar) = value(row, "tar_path") else {
            return Err("the row does not say where its recording is".into());
        };
        // Rows of stages have paths below `shards`, written manifests whole ones.
        let whole = beside(&tar, table);
        let below = table.shards.as_ref().map(|shards| shards.join(&tar));
        let path = match below {
            Some(below) if below.is_file() || !whole.is_file() => below,
            _ => whole,
        };
        if range.is_some() {
            return Ok(stored(path, range, None, start.unwrap_or(0.0), duration));
        }
        match value(row, "tar_member_name") {
            Some(member) => Ok(stored(path, None, Some(member), 0.0, None)),
            None => Err("the row does not say where in the tar its recording is".into()),
        }
    }

    /// Checks that there is a file at the place.
    pub fn found(self) -> Result<Place, String> {
        if let Place::Stored { path, .. } = &self {
            let name = path.display();
            let metadata = flow_audio::embedded::file_of(path)
                .metadata()
                .map_err(|error| format!("{name}: {error}"))?;
            if !metadata.is_file() {
                return Err(format!("{name} is not a regular file"));
            }
        }
        Ok(self)
    }

    /// The samples: 16 kHz, mono, in [-1, 1].
    pub fn samples(&self, storage: &Storage) -> Result<Vec<f32>, String> {
        let (path, range, member, start, duration) = match self {
            Place::Bytes(bytes) => return decode(bytes, MAX_SECONDS).map_err(|error| error.to_string()),
            Place::Stored {
                path,
                range,
                member,
                start,
                duration,
            } => (path, *range, member, *start, *duration),
        };
        let range = match member {
            None => range,
            Some(member) => Some(member_range(path, member)?),
        };
        let rate = f64::from(SAMPLE_RATE);
        let first = (start * rate) as usize;
        let wanted = (duration.unwrap_or(MAX_SECONDS).min(MAX_SECONDS) * rate) as usize;
        let begin = Instant::now();
        let failed = |error: AudioError| match error {
            AudioError::Read { .. } => error.to_string(),
            other => format!("{}: {other}", path.display()),
        };
        let mut reader = RecordingReader::open(storage, path, range, Channels::Mix).map_err(failed)?;
        let (mut samples, mut passed) = (Vec::new(), 0);
        loop {
            let progress = reader.read(&mut samples).map_err(failed)?;
            let skipped = samples.len().min(first - passed);
            samples.drain(..skipped);
            passed += skipped;
            let is_enough = samples.len() >= wanted;
            if is_enough || progress == Progress::End {
                samples.truncate(wanted);
                break;
            }
            if let Progress::Damaged(why) = progress {
                // The part before the damage is used.
                if samples.is_empty() {
                    return Err(format!("{}: {why}", path.display()));
                }
                break;
            }
            if begin.elapsed() > TIME_LIMIT {
                return Err(format!("{}: the place is too far into the recording", path.display()));
            }
        }
        if samples.is_empty() {
            return Err(format!("{}: there is no sound at {start} s", path.display()));
        }
        Ok(samples)
    }
}

/// A path of a manifest: where it leads, or beside the manifest if nothing is there.
fn beside(path: &str, table: &Table) -> PathBuf {
    let path = PathBuf::from(path);
    match &table.beside {
        Some(folder) if path.is_relative() && !path.exists() => folder.join(path),
        _ => path,
    }
}

/// Where a member is in a tar.
fn member_range(tar: &Path, member: &str) -> Result<(u64, u64), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", tar.display());
    let file: File = flow_kind::open_regular_file(tar).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    let listing = flow_audio::tar::list(&mut BufReader::new(file), length).map_err(failed)?;
    let wanted = member.strip_prefix("./").unwrap_or(member);
    // The later one of a name counts, as with `tar -x`.
    let found = listing.members.iter().rfind(|member| member.name == wanted);
    let found = found.ok_or_else(|| format!("{} has no member `{member}`", tar.display()))?;
    Ok((found.offset, found.size))
}

/// The sound of the row that an address names.
fn clip(app: &App, pairs: &[(String, String)]) -> Result<Arc<Vec<f32>>, PageError> {
    let mut clips = app.clips.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(at) = clips.iter().position(|(known, _)| known == pairs) {
        let known = clips.remove(at);
        let samples = Arc::clone(&known.1);
        clips.push(known);
        return Ok(samples);
    }
    drop(clips);
    let (_, table, row) = row_of(app, pairs)?;
    let place = Place::of_row(&row, &table);
    let samples = place.and_then(|place| place.samples(&app.settings.storage));
    let samples = samples.map_err(|why| PageError::new(StatusCode::UNPROCESSABLE_ENTITY, why))?;
    let samples = Arc::new(samples);
    // Results of a running run may change, and so may files.
    if samples.len() <= (60 * SAMPLE_RATE) as usize {
        let mut clips = app.clips.lock().unwrap_or_else(PoisonError::into_inner);
        clips.push((pairs.to_vec(), Arc::clone(&samples)));
        let too_many = clips.len().saturating_sub(REMEMBERED);
        clips.drain(..too_many);
    }
    Ok(samples)
}

pub async fn sound(State(app): State<Shared>, Query(pairs): Query<Pairs>, headers: HeaderMap) -> Response {
    answer(&app, move |app| Ok(part_of(&wav(&clip(app, &pairs)?), &headers))).await
}

pub async fn show_waveform(State(app): State<Shared>, Query(pairs): Query<Pairs>) -> Response {
    answer(&app, move |app| {
        let drawn = waveform(&clip(app, &pairs)?);
        Ok(([(CONTENT_TYPE, "image/svg+xml")], drawn).into_response())
    })
    .await
}

pub async fn show_spectrogram(State(app): State<Shared>, Query(pairs): Query<Pairs>) -> Response {
    answer(&app, move |app| {
        let drawn = spectrogram(&clip(app, &pairs)?)?;
        Ok(([(CONTENT_TYPE, "image/png")], drawn).into_response())
    })
    .await
}

/// Samples as a WAV of 16 bits.
pub fn wav(samples: &[f32]) -> Vec<u8> {
    let mut bytes = wav_header(SAMPLE_RATE, 1, 2, Some(samples.len() as u32 * 2)).to_vec();
    for sample in samples {
        bytes.extend_from_slice(&((sample.clamp(-1.0, 1.0) * 32767.0) as i16).to_le_bytes());
    }
    bytes
}

/// The part of a WAV that is asked for, or all of it.
pub fn part_of(bytes: &[u8], headers: &HeaderMap) -> Response {
    let kind = (CONTENT_TYPE, "audio/wav".to_owned());
    let accepts = (ACCEPT_RANGES, "bytes".to_owned());
    let length = bytes.len();
    match wanted_range(headers, length) {
        None => ([kind, accepts], bytes.to_vec()).into_response(),
        Some(None) => {
            let range = (CONTENT_RANGE, format!("bytes */{length}"));
            (StatusCode::RANGE_NOT_SATISFIABLE, [accepts, range]).into_response()
        }
        Some(Some((first, last))) => {
            let range = (CONTENT_RANGE, format!("bytes {first}-{last}/{length}"));
            (
                StatusCode::PARTIAL_CONTENT,
                [kind, accepts, range],
                bytes[first..=last].to_vec(),
            )
                .into_response()
        }
    }
}

/// The header `Range` (RFC 9110, 14.2): None where it is absent or to be ignored, Some(None) where the range is not
/// satisfiable, else the first and the last position.
pub fn wanted_range(headers: &HeaderMap, length: usize) -> Option<Option<(usize, usize)>> {
    let spec = headers.get(RANGE)?.to_str().ok()?.strip_prefix("bytes=")?;
    let (first, last) = spec.split_once('-')?;
    let number = |text: &str| -> Option<usize> {
        let is_number = !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
        is_number.then(|| text.parse().unwrap_or(usize::MAX))
    };
    let end = length.checked_sub(1)?;
    if first.is_empty() {
        let count = number(last)?;
        return Some((count > 0).then(|| (length - count.min(length), end)));
    }
    let first = number(first)?;
    let last = if last.is_empty() { end.max(first) } else { number(last)? };
    if last < first {
        return None;
    }
    Some((first <= end).then(|| (first, last.min(end))))
}

#[cfg(test)]
#[path = "sound_tests.rs"]
mod tests;
