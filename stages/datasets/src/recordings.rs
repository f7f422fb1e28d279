//! The recordings of a dataset's rows: where they are, and as what the dataset has them.

use std::path::PathBuf;

use arrow::array::{Array, Float64Array, Int64Array, RecordBatch, StringArray};
use flow_audio::AudioError;
use flow_audio::decode::{SAMPLE_RATE, frame_limit, read_file, read_range};
use flow_audio::embedded;
use flow_audio::flac_encode::{MOST_RATE, encode_signal};
use flow_audio::format::recognise;
use flow_audio::part::{TOLERANCE_SECONDS, decode_rows, stated_seconds};
use flow_audio::recording::check;
use flow_audio::recording_reader::{Channels, RecordingReader};
use flow_corpus::columns;
use flow_corpus::places::prefixed;
use flow_kind::{StageError, UNREADABLE};
use flow_storage::{Storage, is_url};

/// The name that a recording has in the dataset: nothing is read by it.
fn file_name(id: &str, bytes: &[u8]) -> String {
    let plain = |c: char| if c.is_control() || "/\\:".contains(c) { '_' } else { c };
    let stem: String = id.chars().map(plain).collect();
    match recognise(bytes) {
        Ok(format) => format!("{stem}.{}", format.as_str()),
        Err(_) => stem,
    }
}

/// Where the recordings of a batch are.
pub(crate) struct RecordingPlaces<'b> {
    paths: Option<&'b StringArray>,
    starts: Option<&'b Float64Array>,
    ranges: Option<[&'b Int64Array; 2]>,
    tars: &'b StringArray,
    shards: &'b str,
}

/// Where the recording of a row is.
pub(crate) struct RowPlace {
    pub path: PathBuf,
    /// Offset and size in bytes.
    pub range: Option<(u64, u64)>,
    /// Where the row begins in it, in seconds.
    pub start: Option<f64>,
}

impl<'b> RecordingPlaces<'b> {
    pub(crate) fn of(batch: &'b RecordBatch, shards: &'b str) -> Result<Self, StageError> {
        let has = |name: &str| batch.column_by_name(name).is_some();
        let ranges = match has("offset") && has("size") {
            true => Some([columns::whole(batch, "offset")?, columns::whole(batch, "size")?]),
            false => None,
        };
        Ok(RecordingPlaces {
            paths: has("audio_path")
                .then(|| columns::text(batch, "audio_path"))
                .transpose()?,
            starts: has("start").then(|| columns::number(batch, "start")).transpose()?,
            ranges,
            tars: columns::text(batch, "tar_path")?,
            shards,
        })
    }

    pub(crate) fn of_row(&self, row: usize) -> Result<RowPlace, String> {
        let range = match self.ranges {
            Some([offsets, sizes]) if offsets.is_valid(row) && sizes.is_valid(row) => {
                let range = (u64::try_from(offsets.value(row)), u64::try_from(sizes.value(row)));
                match range {
                    (Ok(offset), Ok(size)) => Some((offset, size)),
                    _ => return Err("`offset` or `size` is negative".into()),
                }
            }
            _ => None,
        };
        let named = self
            .paths
            .filter(|paths| paths.is_valid(row) && !paths.value(row).is_empty());
        let path = match named {
            Some(paths) => paths.value(row).into(),
            None if range.is_some() && self.tars.is_valid(row) && !self.tars.value(row).is_empty() => {
                prefixed(self.tars.value(row), self.shards).into()
            }
            None => return Err("the row has neither `audio_path` nor a place in `tar_path`".into()),
        };
        let start = self
            .starts
            .filter(|starts| starts.is_valid(row))
            .map(|starts| starts.value(row));
        Ok(RowPlace { path, range, start })
    }
}

impl RowPlace {
    pub(crate) fn is_of_same_recording(&self, other: &RowPlace) -> bool {
        (&self.path, self.range) == (&other.path, other.range)
    }

    /// The recording, if the row is all of it. One whose header does not say how long it is is decoded.
    fn whole(&self, storage: &Storage, seconds: f64, whole: Whole) -> Result<Option<Audio>, AudioError> {
        if self.start.is_some_and(|start| start != 0.0) {
            return Ok(None);
        }
        let is_all = |length: f64| (length - seconds).abs() <= TOLERANCE_SECONDS;
        let stated = match stated_seconds(storage, &self.path, self.range) {
            Some(length) => Some(length),
            None => RecordingReader::open(storage, &self.path, self.range, Channels::Mix)?.stated_seconds(),
        };
        if stated.is_some_and(|length| !is_all(length)) {
            return Ok(None);
        }
        let own_file = self.own_file().filter(|_| whole == Whole::Path);
        if let (Some(path), true) = (&own_file, stated.is_some()) {
            return Ok(Some(Audio::File(path.clone())));
        }
        let bytes = self.stored_bytes(storage)?;
        if whole == Whole::Checked || stated.is_none() {
            // One that is far longer than its row is refused.
            let checked = check(&bytes, frame_limit(MOST_RATE, seconds * 2.0 + 30.0));
            match (checked, stated) {
                (Ok(_), Some(_)) => {}
                (Ok(length), None) if is_all(length) => {}
                (Err(fault), Some(_)) => return Err(AudioError::Decode(fault.to_string())),
                // A part, or damage, which is refused where the part is read.
                (_, None) => return Ok(None),
            }
        }
        Ok(Some(own_file.map_or_else(|| Audio::Bytes(bytes), Audio::File)))
    }

    /// The absolute path of its file, where that holds this recording alone and is on this machine.
    pub(crate) fn own_file(&self) -> Option<String> {
        if self.range.is_some() || is_url(&self.path) || embedded::parse(&self.path).is_some() {
            return None;
        }
        Some(std::path::absolute(&self.path).ok()?.to_str()?.to_owned())
    }

    pub(crate) fn stored_bytes(&self, storage: &Storage) -> Result<Vec<u8>, AudioError> {
        let size = match self.range {
            Some((_, size)) => Some(size),
            None => std::fs::metadata(&self.path).ok().map(|metadata| metadata.len()),
        };
        if let Some(size) = size.filter(|size| i32::try_from(*size).is_err()) {
            let why = format!("{size} bytes; a row of a dataset has less than 2 GiB");
            return Err(AudioError::Decode(why));
        }
        match self.range {
            Some((offset, size)) => read_range(storage, &self.path, offset, size),
            None => read_file(storage, &self.path),
        }
    }
}

/// The recording of a row, as a dataset has it.
pub(crate) enum Audio {
    Bytes(Vec<u8>),
    /// An absolute path, where its file stays.
    File(String),
}

impl Audio {
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        match self {
            Audio::Bytes(bytes) => Some(bytes),
            Audio::File(_) => None,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes().map_or(0, <[u8]>::len)
    }

    /// The path in the dataset of the row called `id`. Nothing is read by that of bytes.
    pub(crate) fn name(&self, id: &str) -> String {
        match self {
            Audio::Bytes(bytes) => file_name(id, bytes),
            Audio::File(path) => path.clone(),
        }
    }
}

/// What a row has that is the whole recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whole {
    /// The recording's bytes as they are stored, which the caller decodes.
    Bytes,
    /// The same, decoded from the beginning to the end, which finds damage.
    Checked,
    /// Its path, if it is a file of its own, else its bytes. Only its header is read if that says how long it is.
    Path,
}

/// The recordings of several rows of one recording. A row that is the whole recording has what `whole` says; other rows have FLAC of
/// their samples at 16 kHz, 16 bits wide. `seconds` are the durations of the rows.
pub(crate) fn audio_of_rows(
    storage: &Storage,
    rows: &[RowPlace],
    seconds: &[f64],
    whole: Whole,
) -> Vec<Result<Audio, AudioError>> {
    let mut parts = Vec::new();
    let whole: Vec<Option<Result<Audio, AudioError>>> = (rows.iter().zip(seconds))
        .map(|(row, seconds)| match row.whole(storage, *seconds, whole) {
            Ok(Some(audio)) => Some(Ok(audio)),
            Ok(None) => {
                parts.push((row.start.unwrap_or(0.0), *seconds));
                None
            }
            Err(error) => Some(Err(error)),
        })
        .collect();
    let Some(first) = rows.first().filter(|_| !parts.is_empty()) else {
        return whole.into_iter().flatten().collect();
    };
    let mut cut = decode_rows(storage, &first.path, first.range, &parts, f64::INFINITY).into_iter();
    let mut next = || {
        let signal = cut
            .next()
            .unwrap_or_else(|| Err(AudioError::Decode("no samples".into())))?;
        let flac = encode_signal(&signal, SAMPLE_RATE);
        let flac = flac.ok_or_else(|| AudioError::Decode("the row has no samples".into()))?;
        Ok(Audio::Bytes(flac))
    };
    let audio = |whole: Option<_>| whole.unwrap_or_else(&mut next);
    whole.into_iter().map(audio).collect()
}

/// The reason and detail of the reject for a recording that cannot be read. Other errors are those of this process.
pub(crate) fn refusal(error: AudioError) -> Result<(&'static str, String), AudioError> {
    let reason = match &error {
        AudioError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => "missing_audio",
        error if error.is_unreadable() => UNREADABLE,
        AudioError::Decode(_)
        | AudioError::Unsupported(_)
        | AudioError::SampleRate(_)
        | AudioError::TooLong { .. }
        | AudioError::TooLarge { .. }
        | AudioError::PastEnd { .. } => "decode_error",
        _ => return Err(error),
    };
    Ok((reason, error.to_string()))
}
