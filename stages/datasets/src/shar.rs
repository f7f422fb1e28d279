//! Lhotse Shar: numbered shards of cuts, each with a tar of their recordings in the same order.

use std::io::{BufWriter, Write};
use std::path::PathBuf;

use flow_audio::decode::{SAMPLE_RATE, decode, frame_limit, read_file};
use flow_audio::flac_encode::{MOST_RATE, encode, encode_signal};
use flow_audio::{AudioError, flac, recording, tar_write};
use flow_corpus::columns::with_extra;
use flow_corpus::extra::EXTRA;
use flow_corpus::partitions::with_rows;
use flow_kind::event::Event;
use flow_kind::{Artifact, ExportFile, ExportSet, StageError};
use flow_storage::Storage;

use crate::lhotse_items::{CutItem, Lines, Names, RecordingItem, SupervisionRows};
use crate::recordings::{Audio, RowPlace, Whole, audio_of_rows};
use crate::refused::Refused;
use crate::rows::{RowsOfPartition, Unusable, read_together, wanted_columns};
use crate::settings::DatasetSettings;
use crate::writing::{Writing, failed_to_write};

/// Rows whose recordings are read at once, and their seconds.
const READ_ROWS: usize = 16;
const READ_SECONDS: f64 = 240.0;

/// Writes each split into a folder of its own, with nothing else: Lhotse takes every file in it for a field of the cuts.
///
/// # Errors
/// If a value is null, more rows than `max_unreadable` allows have no readable recording, or a file cannot be written.
pub(crate) fn write_shar(
    settings: &DatasetSettings,
    splits: &[(&'static str, &Artifact)],
    set: &mut ExportSet,
    writing: &Writing<'_>,
) -> Result<(), StageError> {
    set.refuse_others(splits.iter().map(|(split, _)| split.to_string()))?;
    let mut refused = Refused::of(writing.stage);
    let mut clipped = Clipped::default();
    for (split, artifact) in splits {
        write_split(settings, split, artifact, set, (&mut refused, &mut clipped), writing)?;
    }
    clipped.warn(writing);
    refused.finish(splits, settings, set, writing)
}

fn write_split(
    settings: &DatasetSettings,
    split: &'static str,
    artifact: &Artifact,
    set: &mut ExportSet,
    (refused, clipped): (&mut Refused<'_>, &mut Clipped),
    writing: &Writing<'_>,
) -> Result<(), StageError> {
    let schema = artifact.schema();
    let mut wanted = wanted_columns(schema, &settings.extra_columns);
    wanted.extend(with_extra(schema).then_some(EXTRA));
    let mut names = Names::default();
    let mut rows = 0u64;
    let mut shard = Shard::create(set, split, 0)?;
    let mut shards = 1;
    for partition in with_rows(artifact) {
        for batch in artifact.read(partition, Some(&wanted))? {
            let batch = batch?;
            let mut from = 0;
            while from < batch.num_rows() {
                writing.go_on()?;
                let count = read_together(&batch, from, READ_ROWS, READ_SECONDS)?;
                let of_partition = RowsOfPartition {
                    batch: &batch.slice(from, count),
                    partition,
                    shards: &settings.shards,
                };
                let (batch, recordings) =
                    of_partition.with_recordings(set, refused, |rows, seconds| read(writing.storage, rows, seconds))?;
                from += count;
                let supervisions = SupervisionRows::of(&batch, &settings.extra_columns)?;
                for (row, recording) in recordings.iter().enumerate() {
                    if shard.cuts_written >= settings.shard_rows {
                        let next = Shard::create(set, split, shards)?;
                        std::mem::replace(&mut shard, next).close()?;
                        shards += 1;
                    }
                    clipped.add(supervisions.id(row), recording.largest);
                    let id = names.give(&plain(supervisions.id(row)));
                    let item = RecordingItem::of(&id, ("shar", ""), recording.rate, recording.frames);
                    let place = (id.as_str(), 0.0, item.duration);
                    let supervision = supervisions.item(row, &id, place, partition)?;
                    shard.push(&CutItem::of(0.0, supervision, item.clone()), &item, &recording.flac)?;
                    rows += 1;
                }
            }
        }
    }
    shard.close()?;
    let first = cuts_name(split, 0);
    // However many shards a set has, it has the first one.
    set.note_rows(&first, rows);
    set.guard_rows(split, vec![first], rows, settings.max_shrink);
    Ok(())
}

fn cuts_name(split: &str, number: usize) -> String {
    format!("{split}/cuts.{number:06}.jsonl.gz")
}

/// An id as Lhotse can find it again by the name of a member: a path that Python's `pathlib` leaves as it is.
fn plain(id: &str) -> String {
    let plain = |c: char| if c.is_control() || c == '\\' { '_' } else { c };
    let id: String = id.chars().map(plain).collect();
    let parts = id.split('/').map(|part| match part {
        "" | "." | ".." => "_",
        part => part,
    });
    parts.collect::<Vec<_>>().join("/")
}

/// The recording of a row: FLAC of one channel.
struct Recording {
    flac: Vec<u8>,
    rate: u32,
    frames: u64,
    /// See [`recording::decode_with_largest`].
    largest: f64,
}

/// Rows with floating-point samples above full scale, which FLAC cannot hold. Lhotse clips them, too, but says nothing.
#[derive(Default)]
struct Clipped {
    rows: u64,
    /// The first row, and its largest sample.
    first: Option<(String, f64)>,
}

impl Clipped {
    fn add(&mut self, id: &str, largest: f64) {
        if largest > 1.0 {
            self.rows += 1;
            self.first.get_or_insert_with(|| (id.to_owned(), largest));
        }
    }

    fn warn(&self, writing: &Writing<'_>) {
        let Some((id, largest)) = &self.first else { return };
        let told = format!(
            "recordings of {} rows have samples above full scale, which are clipped; the first is {id} with {largest:.3}, where 1 is full scale",
            self.rows
        );
        writing
            .events
            .send(Event::warning(Some(writing.stage.to_owned()), told));
    }
}

/// The recordings of rows of one recording. That of a row that is the whole recording keeps its rate, and its bytes if it is FLAC of
/// one channel. Others are mixed, and have 16 kHz.
fn read(storage: &Storage, rows: &[RowPlace], seconds: &[f64]) -> Vec<Result<Recording, Unusable>> {
    let audio = audio_of_rows(storage, rows, seconds, Whole::Bytes).into_iter();
    let flac = |(audio, seconds): (Result<Audio, AudioError>, &f64)| {
        let bytes = match audio? {
            Audio::Bytes(bytes) => bytes,
            Audio::File(path) => read_file(storage, path.as_ref())?,
        };
        // One that is far longer than its row is refused.
        Ok(flac_of(bytes, seconds * 2.0 + 30.0)?)
    };
    audio.zip(seconds).map(flac).collect()
}

fn flac_of(bytes: Vec<u8>, max_seconds: f64) -> Result<Recording, AudioError> {
    let undecoded = |fault: flac::Fault| AudioError::Decode(fault.to_string());
    let limit = frame_limit(MOST_RATE, max_seconds);
    let (samples, largest) = recording::decode_with_largest(&bytes, limit).map_err(undecoded)?;
    // One that is copied is whole.
    if let Some(info) = flac::stated_info(&bytes)
        && info.channels == 1
        && info.total_frames == samples.interleaved.len() as u64
    {
        return Ok(Recording {
            flac: bytes,
            rate: info.sample_rate,
            frames: info.total_frames,
            largest,
        });
    }
    if samples.info.channels == 1
        && let Some(flac) = encode(&samples)
    {
        return Ok(Recording {
            flac,
            rate: samples.info.sample_rate,
            frames: samples.interleaved.len() as u64,
            largest,
        });
    }
    drop(samples);
    let signal = decode(&bytes, max_seconds)?;
    let flac = encode_signal(&signal, SAMPLE_RATE);
    Ok(Recording {
        flac: flac.ok_or_else(|| AudioError::Decode("the recording has no samples".into()))?,
        rate: SAMPLE_RATE,
        frames: signal.len() as u64,
        largest,
    })
}

/// Cuts and the tar of their recordings, which are being written.
struct Shard {
    cuts: Lines,
    cuts_written: usize,
    tar: BufWriter<ExportFile>,
    path: PathBuf,
}

impl Shard {
    fn create(set: &mut ExportSet, split: &str, number: usize) -> Result<Shard, StageError> {
        let cuts = Lines::create(set, &cuts_name(split, number))?;
        let tar = set.create(&format!("{split}/recording.{number:06}.tar"))?;
        Ok(Shard {
            cuts,
            cuts_written: 0,
            path: tar.path().to_path_buf(),
            tar: BufWriter::with_capacity(1 << 18, tar),
        })
    }

    /// Adds a cut, and its recording: data first, then what they are.
    fn push(&mut self, cut: &CutItem<'_>, recording: &RecordingItem<'_>, flac: &[u8]) -> Result<(), StageError> {
        let mut told = serde_json::to_vec(recording).map_err(StageError::failed)?;
        told.push(b'\n');
        let members = [("flac", flac), ("json", &told)];
        for (ending, data) in members {
            let written = tar_write::write_member(&mut self.tar, &format!("{}.{ending}", recording.id), data);
            written.map_err(|error| failed_to_write(&self.path, &error))?;
        }
        self.cuts_written += 1;
        self.cuts.push(cut)
    }

    fn close(self) -> Result<(), StageError> {
        let Shard {
            cuts, mut tar, path, ..
        } = self;
        cuts.close()?;
        tar.write_all(&tar_write::END)
            .map_err(|error| failed_to_write(&path, &error))?;
        let file = tar
            .into_inner()
            .map_err(|error| failed_to_write(&path, error.error()))?;
        file.close();
        Ok(())
    }
}
