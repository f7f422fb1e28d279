//! Recordings of noise and of impulse responses.

use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use flow_audio::AudioError;
use flow_audio::decode::{SAMPLE_RATE, decode, read_file};
use flow_audio::listing::recordings;
use flow_audio::part::{decode_row, stated_seconds};
use flow_kind::store::on_threads;
use flow_storage::{Location, Storage, folder_above, is_url, join, path_of_file_url};
use serde::Deserialize;

/// The longest recording that is decoded as a whole. Of longer ones in FLAC or WAV, only a piece is.
const LONGEST_SECONDS: f64 = 3600.0;
/// Samples of whole recordings that stay decoded: 256 MiB.
const CACHED_SAMPLES: usize = 64 << 20;
/// Objects that are looked at at the same time.
const AT_ONCE: usize = 32;

/// Recordings, each with a number from 0 in the order of their names.
pub struct Sounds {
    storage: Storage,
    sounds: Vec<Sound>,
    cache: Mutex<Cache>,
    /// Whether all of them stay decoded at once.
    fit_in_cache: OnceLock<bool>,
}

struct Sound {
    path: PathBuf,
    /// A part of the recording: its beginning and length in seconds.
    part: Option<(f64, f64)>,
    /// Of the file, in bytes.
    size: u64,
    /// The length of the file in seconds, where its header says it.
    stated: OnceLock<Option<f64>>,
}

/// Samples of a sound that other pieces may share.
#[derive(Clone, Debug)]
pub struct Piece {
    samples: Arc<[f32]>,
    range: Range<usize>,
}

impl Deref for Piece {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.samples[self.range.clone()]
    }
}

impl Sound {
    fn new(storage: &Storage, path: PathBuf, part: Option<(f64, f64)>) -> Result<Sound, String> {
        let failed = |error: &dyn std::fmt::Display| format!("cannot read {}: {error}", path.display());
        let size = match Location::of_path(&path).map_err(|error| error.to_string())? {
            Location::Local(file) => file.metadata().map_err(|error| failed(&error))?.len(),
            Location::Object(url) => match storage.look(&url) {
                Ok(Some(found)) => found.size,
                Ok(None) => return Err(failed(&"there is no such object")),
                Err(error) => return Err(error.to_string()),
            },
        };
        Ok(Sound {
            path,
            part,
            size,
            stated: OnceLock::new(),
        })
    }

    /// Its length, where the manifest or the header of the file states it.
    fn seconds(&self, storage: &Storage) -> Option<f64> {
        match self.part {
            Some((_, seconds)) => Some(seconds),
            None => *self.stated.get_or_init(|| stated_seconds(storage, &self.path, None)),
        }
    }
}

#[derive(Default)]
struct Cache {
    decoded: HashMap<usize, (Arc<[f32]>, u64)>,
    samples: usize,
    /// Rises with each use.
    uses: u64,
}

/// A line of a manifest of sounds, as NeMo has it. Other keys are passed over.
#[derive(Deserialize)]
struct Line {
    audio_filepath: PathBuf,
    offset: Option<f64>,
    duration: Option<f64>,
}

impl Sounds {
    /// Lists a folder or a pattern, or reads a manifest of JSON lines (`.json`, `.jsonl`) with `audio_filepath` and perhaps
    /// `offset` and `duration`. Paths in it are relative to its folder. All of them may be URLs of object storage.
    ///
    /// # Errors
    /// If there are none, one of them is not there, or a line is no such JSON object; the text names the path.
    pub fn open(storage: &Storage, path: &str) -> Result<Sounds, String> {
        let sounds = if is_manifest(path) {
            lines(storage, Path::new(path))?
        } else {
            let found = recordings(storage, &[path.to_owned()]).map_err(|error| error.to_string())?;
            let sounds = found
                .into_iter()
                .map(|recording| Sound::new(storage, recording.path, None));
            sounds.collect::<Result<_, _>>()?
        };
        if sounds.is_empty() {
            return Err(format!("{path} has no recordings"));
        }
        Ok(Sounds {
            storage: storage.clone(),
            sounds,
            cache: Mutex::default(),
            fit_in_cache: OnceLock::new(),
        })
    }

    pub fn len(&self) -> usize {
        self.sounds.len()
    }

    /// A digest of the names of the files, in their folders below `root`, of their sizes and parts. It stays the same where the
    /// folder is copied or moved, also into object storage.
    pub fn digest(&self, root: &str) -> String {
        let local = path_of_file_url(root);
        let folder = local.as_deref().unwrap_or(Path::new(root));
        let is_prefix = |folder: &Path| self.sounds.iter().all(|sound| sound.path != folder);
        let is_folder = match is_url(folder) {
            true => !is_manifest(root) && !root.contains('*') && is_prefix(folder),
            false => folder.is_dir(),
        };
        let folder = match is_folder {
            true => folder,
            false => folder_above(folder).unwrap_or(folder),
        };
        let mut hasher = blake3::Hasher::new();
        for Sound { path, part, size, .. } in &self.sounds {
            let name = path.strip_prefix(folder).unwrap_or(path);
            hasher.update(name.to_string_lossy().as_bytes());
            hasher.update(&[0]);
            hasher.update(format!("{size} {part:?}\n").as_bytes());
        }
        hasher.finalize().to_hex()[..32].to_owned()
    }

    /// The path of a sound, for messages.
    pub fn path(&self, number: usize) -> &Path {
        &self.sounds[number].path
    }

    /// All samples of a sound: 16 kHz, mono.
    ///
    /// # Errors
    /// If it cannot be read or decoded, has no samples, or is longer than an hour.
    pub fn whole(&self, number: usize) -> Result<Arc<[f32]>, AudioError> {
        {
            let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
            cache.uses += 1;
            let uses = cache.uses;
            if let Some((samples, used)) = cache.decoded.get_mut(&number) {
                *used = uses;
                return Ok(samples.clone());
            }
        }
        let sound = &self.sounds[number];
        let samples: Arc<[f32]> = match sound.part {
            None => decode(&read_file(&self.storage, &sound.path)?, LONGEST_SECONDS)?.into(),
            Some((start, seconds)) => {
                decode_row(&self.storage, &sound.path, None, start, seconds, LONGEST_SECONDS)?.into()
            }
        };
        if samples.is_empty() {
            return Err(AudioError::Decode("no frames".into()));
        }
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.keep(number, &samples);
        Ok(samples)
    }

    /// A piece of `length` samples of a sound, from a place that `unit` in [0, 1) chooses evenly among those possible. A shorter
    /// sound is all of it.
    ///
    /// # Errors
    /// As [`whole`](Self::whole).
    pub fn piece(&self, number: usize, length: usize, unit: f64) -> Result<Piece, AudioError> {
        let sound = &self.sounds[number];
        let rate = f64::from(SAMPLE_RATE);
        let all = (sound.seconds(&self.storage).unwrap_or(0.0) * rate).floor();
        // A long recording is not decoded for a short piece, unless its samples stay for the pieces to come.
        if all > 4.0 * length as f64 && all.is_finite() {
            let first = ((all - length as f64 + 1.0) * unit) as usize;
            let fit = *self.fit_in_cache.get_or_init(|| self.fit(CACHED_SAMPLES));
            // Where the rest of it is damaged, the piece may still be good.
            if let Some(whole) = fit.then(|| self.whole(number).ok()).flatten() {
                let range = first..first + length;
                if range.end <= whole.len() {
                    return Ok(Piece { samples: whole, range });
                }
            }
            return self.decode_piece(number, first, length);
        }
        let whole = self.whole(number)?;
        let spare = whole.len().saturating_sub(length);
        let first = ((spare as f64 + 1.0) * unit) as usize;
        let first = first.min(spare);
        Ok(Piece {
            range: first..whole.len().min(first + length),
            samples: whole,
        })
    }

    /// Decodes `length` samples of a sound from the sample `first` on, and as little else as its format allows.
    pub(super) fn decode_piece(&self, number: usize, first: usize, length: usize) -> Result<Piece, AudioError> {
        let sound = &self.sounds[number];
        let rate = f64::from(SAMPLE_RATE);
        let start = sound.part.map_or(0.0, |(start, _)| start) + first as f64 / rate;
        let decoded = decode_row(
            &self.storage,
            &sound.path,
            None,
            start,
            length as f64 / rate,
            LONGEST_SECONDS,
        )?;
        Ok(Piece {
            range: 0..decoded.len(),
            samples: decoded.into(),
        })
    }

    /// Whether all sounds together have at most `most_samples`. Unknown lengths count as too long.
    fn fit(&self, most_samples: usize) -> bool {
        // Each header of an object is waited for.
        let objects: Vec<&Sound> = self.sounds.iter().filter(|sound| is_url(&sound.path)).collect();
        on_threads(&objects, AT_ONCE.min(objects.len()), |sound| {
            sound.seconds(&self.storage)
        });
        let mut left = most_samples as f64 / f64::from(SAMPLE_RATE);
        self.sounds.iter().all(|sound| {
            left -= sound.seconds(&self.storage).unwrap_or(f64::INFINITY);
            left >= 0.0
        })
    }
}

impl Cache {
    fn keep(&mut self, number: usize, samples: &Arc<[f32]>) {
        self.uses += 1;
        if let Some((before, _)) = self.decoded.insert(number, (samples.clone(), self.uses)) {
            self.samples -= before.len();
        }
        self.samples += samples.len();
        while self.samples > CACHED_SAMPLES && self.decoded.len() > 1 {
            let oldest = self.decoded.iter().min_by_key(|(_, (_, used))| *used);
            let Some(oldest) = oldest.map(|(number, _)| *number) else {
                return;
            };
            if let Some((forgotten, _)) = self.decoded.remove(&oldest) {
                self.samples -= forgotten.len();
            }
        }
    }
}

/// Whether a path is one of a manifest of sounds.
fn is_manifest(path: &str) -> bool {
    [".json", ".jsonl"].iter().any(|ending| path.ends_with(ending))
}

fn lines(storage: &Storage, manifest: &Path) -> Result<Vec<Sound>, String> {
    let bytes = read_file(storage, manifest).map_err(|error| error.to_string())?;
    let text = String::from_utf8(bytes).map_err(|error| format!("{}: {error}", manifest.display()))?;
    let folder = manifest.parent().unwrap_or(Path::new(""));
    let mut named = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() {
            continue;
        }
        let wrong = |why: String| format!("{}, line {number}: {why}", manifest.display());
        let line: Line = serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
        let start = line.offset.unwrap_or(0.0);
        let part = match line.duration {
            Some(seconds) if seconds > 0.0 && start >= 0.0 && seconds.is_finite() && start.is_finite() => {
                Some((start, seconds))
            }
            None if start == 0.0 => None,
            None => return Err(wrong("`offset` without `duration`".into())),
            Some(_) => return Err(wrong("`offset` and `duration` are not those of a part".into())),
        };
        let path = join(folder, line.audio_filepath);
        named.push((number, path.to_str().and_then(path_of_file_url).unwrap_or(path), part));
    }
    let threads = if named.iter().any(|(_, path, _)| is_url(path)) {
        AT_ONCE.min(named.len())
    } else {
        1
    };
    let sounds = on_threads(&named, threads, |(number, path, part)| {
        let wrong = |why: String| format!("{}, line {number}: {why}", manifest.display());
        Sound::new(storage, path.clone(), *part).map_err(wrong)
    });
    sounds.into_iter().collect()
}
