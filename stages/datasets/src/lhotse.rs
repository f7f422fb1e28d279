//! Manifests of Lhotse: recordings, supervisions and cuts. Recordings stay where they are.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use flow_audio::AudioError;
use flow_audio::part::{Extent, TOLERANCE_SECONDS, extent};
use flow_corpus::columns::with_extra;
use flow_corpus::extra::EXTRA;
use flow_corpus::file_stem;
use flow_corpus::partitions::with_rows;
use flow_kind::{Artifact, Digest, ExportSet, Partition, StageError};
use flow_storage::{Storage, is_url};

use crate::lhotse_items::{CutItem, Lines, Names, RecordingItem, SupervisionRows};
use crate::recordings::RowPlace;
use crate::refused::Refused;
use crate::rows::{RowsOfPartition, Unusable, read_together, wanted_columns};
use crate::settings::DatasetSettings;
use crate::writing::Writing;

/// Rows whose recordings are looked at together.
const READ_ROWS: usize = 256;
/// Recordings whose lengths are remembered: rows of a long one are in many batches.
const REMEMBERED: usize = 4096;

/// Writes three files for each split.
///
/// # Errors
/// If a value is null, a recording is a part of a file, more rows than `max_unreadable` allows have no readable recording, or a
/// file cannot be written.
pub(crate) fn write_lhotse(
    settings: &DatasetSettings,
    splits: &[(&'static str, &Artifact)],
    set: &mut ExportSet,
    writing: &Writing<'_>,
) -> Result<(), StageError> {
    let names = ["recordings", "supervisions", "cuts"];
    let of_split = |(split, _): &(&str, &Artifact)| names.map(|name| format!("{name}_{split}.jsonl.gz"));
    set.refuse_others(splits.iter().flat_map(of_split))?;
    let mut refused = Refused::of(writing.stage);
    for (split, artifact) in splits {
        write_split(settings, split, artifact, set, &mut refused, writing)?;
    }
    refused.finish(splits, settings, set, writing)
}

fn write_split(
    settings: &DatasetSettings,
    split: &'static str,
    artifact: &Artifact,
    set: &mut ExportSet,
    refused: &mut Refused<'_>,
    writing: &Writing<'_>,
) -> Result<(), StageError> {
    let schema = artifact.schema();
    let mut wanted = wanted_columns(schema, &settings.extra_columns);
    wanted.extend(with_extra(schema).then_some(EXTRA));
    let name = |what: &str| format!("{what}_{split}.jsonl.gz");
    let mut recordings = Recordings {
        lines: Lines::create(set, &name("recordings"))?,
        names: Names::default(),
        given: HashMap::new(),
    };
    let mut supervisions = Lines::create(set, &name("supervisions"))?;
    let mut cuts = Lines::create(set, &name("cuts"))?;
    let mut names = Names::default();
    let mut rows = 0u64;
    let extents = Extents::default();
    for partition in with_rows(artifact) {
        for batch in artifact.read(partition, Some(&wanted))? {
            let batch = batch?;
            let mut from = 0;
            while from < batch.num_rows() {
                writing.go_on()?;
                let count = read_together(&batch, from, READ_ROWS, f64::INFINITY)?;
                let of_partition = RowsOfPartition {
                    batch: &batch.slice(from, count),
                    partition,
                    shards: &settings.shards,
                };
                let read =
                    |rows: &[RowPlace], seconds: &[f64]| locate(writing.storage, rows, seconds, partition, &extents);
                let (batch, places) = of_partition.with_recordings(set, refused, read)?;
                from += count;
                let of_batch = SupervisionRows::of(&batch, &settings.extra_columns)?;
                for (row, place) in places.iter().enumerate() {
                    let recording = recordings.item(place)?;
                    let id = names.give(of_batch.id(row));
                    let at = (recording.id, place.start, place.duration);
                    let supervision = of_batch.item(row, &id, at, partition)?;
                    supervisions.push(&supervision)?;
                    cuts.push(&CutItem::of(place.start, supervision, recording))?;
                    rows += 1;
                }
            }
        }
    }
    recordings.lines.close()?;
    supervisions.close()?;
    cuts.close()?;
    set.note_rows(&name("cuts"), rows);
    set.guard_rows(split, vec![name("cuts")], rows, settings.max_shrink);
    Ok(())
}

/// The recordings of a split, each of which is written when the first of its rows comes.
struct Recordings {
    lines: Lines,
    names: Names,
    /// Names by the digests of paths.
    given: HashMap<Digest, String>,
}

impl Recordings {
    fn item<'a>(&'a mut self, place: &'a Place) -> Result<RecordingItem<'a>, StageError> {
        match self.given.entry(Digest::of(place.source.as_bytes())) {
            Entry::Occupied(given) => Ok(place.recording(given.into_mut())),
            Entry::Vacant(new) => {
                let id = self.names.give(&file_stem(Path::new(&place.source)));
                self.lines.push(&place.recording(&id))?;
                Ok(place.recording(new.insert(id)))
            }
        }
    }
}

/// Where a row is.
struct Place {
    /// How Lhotse calls its source: `file` or `url`.
    kind: &'static str,
    /// An absolute path, or a URL.
    source: String,
    extent: Extent,
    /// In seconds; those of a row that is the whole recording are the recording's.
    start: f64,
    duration: f64,
}

impl Place {
    /// The recording, called `id`.
    fn recording<'a>(&'a self, id: &'a str) -> RecordingItem<'a> {
        let source = (self.kind, self.source.as_str());
        RecordingItem::of(id, source, self.extent.sample_rate, self.extent.frames)
    }
}

/// Lengths of recordings, by their paths.
#[derive(Default)]
struct Extents(Mutex<HashMap<PathBuf, Extent>>);

impl Extents {
    fn of(&self, storage: &Storage, path: &Path) -> Result<Extent, AudioError> {
        let remembered = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(extent) = remembered().get(path) {
            return Ok(*extent);
        }
        let extent = extent(storage, path, None)?;
        let mut all = remembered();
        if all.len() >= REMEMBERED {
            all.clear();
        }
        all.insert(path.to_path_buf(), extent);
        Ok(extent)
    }
}

/// Where rows of one recording are, whose durations are `seconds`.
fn locate(
    storage: &Storage,
    rows: &[RowPlace],
    seconds: &[f64],
    partition: &Partition,
    extents: &Extents,
) -> Vec<Result<Place, Unusable>> {
    let Some(first) = rows.first() else {
        return Vec::new();
    };
    let (kind, source) = match (first.own_file(), first.path.to_str()) {
        (Some(file), _) => ("file", file),
        (None, Some(url)) if first.range.is_none() && is_url(&first.path) => ("url", url.to_owned()),
        _ => return vec![Err(Unusable::Run(within_a_file(first, partition)))],
    };
    match extents.of(storage, &first.path) {
        Ok(extent) => {
            let place = |(row, seconds): (&RowPlace, &f64)| {
                let (start, duration) = part(row.start.unwrap_or(0.0), *seconds, &extent)?;
                Ok(Place {
                    kind,
                    source: source.clone(),
                    extent,
                    start,
                    duration,
                })
            };
            rows.iter().zip(seconds).map(place).collect()
        }
        Err(error) => Unusable::of_rows(error, rows.len()),
    }
}

fn within_a_file(row: &RowPlace, partition: &Partition) -> StageError {
    let message = format!(
        "{partition}: a recording is within {}, and manifests of Lhotse name files of one recording each",
        row.path.display()
    );
    StageError::failed(message)
        .with_help("write `format: shar`, which holds the recordings; or place them as files with audio.extract")
}

/// Start and duration of a row in its recording, in seconds, by the rules by which rows are decoded.
fn part(start: f64, seconds: f64, extent: &Extent) -> Result<(f64, f64), Unusable> {
    let refuse = |reason, detail| Err(Unusable::Row(reason, detail));
    if extent.channels != 1 {
        let why = format!(
            "the recording has {} channels; `format: shar` mixes them",
            extent.channels
        );
        return refuse("several_channels", why);
    }
    if !(start.is_finite() && start >= 0.0) {
        return refuse("offset_invalid", format!("{start} s"));
    }
    if !(seconds.is_finite() && seconds > 0.0) {
        return refuse("duration_invalid", format!("{seconds} s"));
    }
    let length = extent.seconds();
    if start == 0.0 && (length - seconds).abs() <= TOLERANCE_SECONDS {
        return Ok((0.0, length));
    }
    let end = start + seconds;
    let duration = seconds.min(length - start);
    if end > length + TOLERANCE_SECONDS || duration <= 0.0 {
        return refuse(
            "duration_past_end",
            format!("the row ends at {end} s, the recording at {length} s"),
        );
    }
    Ok((start, duration))
}
