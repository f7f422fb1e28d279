//! Reads and decodes a sample of a manifest's rows, to estimate what would be taken and rejected.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use flow_audio::part::{TOLERANCE_SECONDS, decode_row, stated_seconds};
use flow_audio::recording_reader::{Channels, RecordingReader};
use flow_kind::{Out, StageError};
use flow_storage::Storage;
use flow_text::language_tag::{same_language, tag_of, untagged};

use flow_corpus::ReadSettings;
use flow_corpus::kept_rows::{KeptRows, Refused};
use flow_corpus::manifest_row::{ManifestRow, refuse};
use flow_corpus::recordings::{Found, Recordings};
use flow_corpus::rows::Rows;

use crate::opening::open;

/// Partitions of which rows are read.
const MOST_PARTITIONS: usize = 8;
/// Seconds of a recording that are decoded at most.
const LONGEST_DECODED: f64 = 300.0;

/// Statistics of the sampled rows of a manifest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ManifestSample {
    /// Partitions of the manifest, and those of which rows were read.
    pub partitions: usize,
    pub partitions_read: usize,
    /// Rows of these, and those whose recordings were looked at.
    pub rows_read: u64,
    pub rows: u64,
    /// Of the rows that would be taken, in seconds.
    pub seconds: f64,
    /// How many of them have recordings of each sample rate and number of channels.
    pub layouts: BTreeMap<(u32, u32), u64>,
    /// How many of them are of each language.
    pub languages: BTreeMap<String, u64>,
    /// The places of those whose text has no word.
    pub without_text: Vec<String>,
    /// Their languages and texts.
    pub texts: Vec<(String, String)>,
    /// How many of their texts begin with a language tag, and where those are whose tag is another than the row's language.
    pub tagged: u64,
    pub other_tag: Vec<String>,
    /// How many of them are parts of longer recordings.
    pub parts: u64,
    /// The places of those that have another text than one before them on the same part of the same recording.
    pub told_twice: Vec<String>,
    /// Of all rows that were read those that would be rejected, by the reason.
    pub refused: Refused,
    /// Whether time ran out before all chosen rows were looked at.
    pub is_cut: bool,
}

impl ManifestSample {
    /// Reads evenly spread rows of the manifest that `settings` names, and decodes the recordings of at most `most` of
    /// them. Stops after `limit`, but finishes the row that it has begun. `scratch` is a folder for temporary files.
    ///
    /// # Errors
    /// When the manifest cannot be read.
    pub fn of(
        storage: &Storage,
        settings: &ReadSettings,
        scratch: &Path,
        most: usize,
        limit: Duration,
    ) -> Result<Self, StageError> {
        let began = Instant::now();
        let manifest = open(storage, settings, scratch, &mut |_| true).map_err(StageError::from)?;
        let names = manifest.names();
        let chosen = spread(names.len(), MOST_PARTITIONS);
        let mut sample = ManifestSample {
            partitions: names.len(),
            ..ManifestSample::default()
        };
        let each = most.div_ceil(chosen.len().max(1));
        for partition in chosen.into_iter().filter_map(|place| names.get(place)) {
            if began.elapsed() >= limit {
                sample.is_cut = true;
                break;
            }
            sample.partitions_read += 1;
            let mut out = Out::new(partition.clone());
            let mut recordings = Recordings::new(storage, settings.check_audio);
            let mut rows = Rows::new(&mut out, &mut recordings)
                .with_rules(settings.row_rules())
                .keeping(KeptRows::default());
            manifest.read(storage, partition, &mut rows)?;
            let kept = rows.take_kept();
            sample.rows_read += kept.seen;
            sample.refused.extend(kept.refused);
            let places = spread(kept.rows.len(), each);
            let rows_of_it = kept.rows.into_iter().enumerate();
            for (_, (_, place, row)) in rows_of_it.filter(|(at, _)| places.contains(at)) {
                if began.elapsed() >= limit {
                    sample.is_cut = true;
                    break;
                }
                sample.rows += 1;
                match rows.found(row)? {
                    Ok((row, found)) => {
                        if rows.is_told_twice(&row, &found) {
                            sample.told_twice.push(place.clone());
                        }
                        sample.look_at(storage, place, &row, &found);
                    }
                    Err(refusal) => sample.refused.add(|| place, refusal),
                }
            }
        }
        Ok(sample)
    }

    fn look_at(&mut self, storage: &Storage, place: String, row: &ManifestRow, found: &Found) {
        let path = Path::new(&found.audio_path);
        let range = found
            .range
            .map(|(offset, size)| (offset.unsigned_abs(), size.unsigned_abs()));
        let start = row.start.unwrap_or(0.0);
        let opened = match RecordingReader::open(storage, path, range, Channels::Mix) {
            Ok(opened) => opened,
            Err(error) => return self.refused.add(|| place, refuse("decode_error", error.to_string())),
        };
        if found.duration <= LONGEST_DECODED
            && let Err(error) = decode_row(storage, path, range, start, found.duration, LONGEST_DECODED)
        {
            return self.refused.add(|| place, refuse("decode_error", error.to_string()));
        }
        *self
            .layouts
            .entry((opened.sample_rate(), opened.channels()))
            .or_default() += 1;
        *self.languages.entry(row.lang.clone()).or_default() += 1;
        self.texts.push((row.lang.clone(), row.text.clone()));
        self.seconds += found.duration;
        let is_part = |length: f64| start > 0.0 || length - found.duration > TOLERANCE_SECONDS;
        self.parts += u64::from(stated_seconds(storage, path, range).is_some_and(is_part));
        if let Some(tag) = tag_of(&row.text) {
            self.tagged += 1;
            if !same_language(tag, &row.lang) {
                self.other_tag.push(place.clone());
            }
        }
        if untagged(&row.text).is_empty() {
            self.without_text.push(place);
        }
    }
}

/// At most this many of the first `count` numbers, evenly spread, the first among them.
fn spread(count: usize, most: usize) -> Vec<usize> {
    let take = count.min(most);
    (0..take).map(|number| number * count / take).collect()
}

#[cfg(test)]
#[path = "sample_tests.rs"]
mod tests;
