//! The samples of a recording, or why there are none.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use flow_kind::StageError;
use flow_storage::Storage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::AudioError;
use crate::decode::SAMPLE_RATE;
use crate::part::stated_seconds;
use crate::recording_reader::{Channels, Progress, RecordingReader};

/// Why a recording is rejected: a reason in snake case, and a detail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: &'static str,
    pub detail: String,
}

impl Refusal {
    /// `reason` of the recording at `path`, which is what `detail` begins with.
    pub fn new(reason: &'static str, path: &Path, detail: impl std::fmt::Display) -> Self {
        Refusal {
            reason,
            detail: format!("{}{detail}", path.display()),
        }
    }

    /// The refusal of a recording that is longer than the setting `max_duration`.
    pub fn too_long(path: &Path, max_seconds: f64) -> Self {
        let detail = format!(" is longer than {max_seconds} s (`max_duration`): cut it into parts");
        Refusal::new("too_long", path, detail)
    }
}

/// How to treat a recording that cannot be decoded to its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnDamage {
    /// The samples before the damage are used.
    #[default]
    Keep,
    /// It is refused.
    Refuse,
}

/// Fewest samples before the damage that are used: one second.
const LEAST_KEPT: u64 = SAMPLE_RATE as u64;

impl OnDamage {
    /// Whether a recording is used that is damaged, for the reason `why`, after `samples` samples at 16 kHz.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn accept(self, path: &Path, samples: u64, why: &str) -> Result<(), Refusal> {
        if self == OnDamage::Keep && samples >= LEAST_KEPT {
            return Ok(());
        }
        let at = samples as f64 / f64::from(SAMPLE_RATE);
        Err(Refusal::new(
            "decode_error",
            path,
            format!(" is damaged at {at} s: {why}"),
        ))
    }
}

/// The samples of a recording: 16 kHz, mono, in [-1, 1].
#[derive(Clone, Debug, PartialEq)]
pub struct RecordingSamples {
    pub samples: Vec<f32>,
    /// Whether these are only the samples before its damage.
    pub damaged: bool,
    /// What a user has to know of how it was read, such as which one of several tracks.
    pub note: Option<String>,
}

/// Opens a recording. One that does not exist, is empty, is not audio, or is longer than `max_seconds` by its header is
/// a [`Refusal`].
///
/// # Errors
/// If the file is there and cannot be read.
pub fn open(
    storage: &Storage,
    path: &Path,
    max_seconds: f64,
    channels: Channels,
) -> Result<Result<RecordingReader, Refusal>, AudioError> {
    open_range(storage, path, None, max_seconds, channels, None)
}

/// The same of a recording that is the `range` (offset and size in bytes) of a file, if there is one, and of an audio track, counted
/// from 1; with none, of the one that is played.
///
/// # Errors
/// As [`open`].
pub fn open_range(
    storage: &Storage,
    path: &Path,
    range: Option<(u64, u64)>,
    max_seconds: f64,
    channels: Channels,
    track: Option<u32>,
) -> Result<Result<RecordingReader, Refusal>, AudioError> {
    let refused = |reason, detail: String| Ok(Err(Refusal::new(reason, path, detail)));
    // The length of a file; none of what is not a file.
    let file = crate::embedded::file_of(path);
    let length = match flow_storage::is_url(file) {
        true => flow_kind::open_input_file(storage, file)
            .and_then(|file| file.length())
            .map(Some),
        false => file.metadata().map(|found| found.is_file().then_some(found.len())),
    };
    match length {
        Ok(None) => return refused("missing_file", " is not a file".into()),
        Ok(Some(0)) => return refused("empty_file", " has 0 bytes".into()),
        Ok(Some(_)) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return refused("missing_file", " does not exist".into());
        }
        Err(source) => {
            let path = path.to_owned();
            return Err(AudioError::read(path, source));
        }
    }
    match RecordingReader::open_track(storage, path, range, channels, track) {
        Ok(reader) if reader.stated_seconds().is_some_and(|seconds| seconds > max_seconds) => {
            Ok(Err(Refusal::too_long(path, max_seconds)))
        }
        Ok(reader) => Ok(Ok(reader)),
        Err(error @ AudioError::Read { .. }) => Err(error),
        Err(AudioError::Unsupported(what)) => refused("unsupported_format", format!(": {what}")),
        Err(error) => refused("decode_error", format!(": {error}")),
    }
}

/// All samples of a recording of any format that [`crate::recording`] knows: 16 kHz, mono, in [-1, 1]. What [`open`] refuses,
/// one that is longer than `max_seconds`, and one that is damaged is a [`Refusal`].
///
/// # Errors
/// If the file is there and cannot be read.
pub fn samples(storage: &Storage, path: &Path, max_seconds: f64) -> Result<Result<Vec<f32>, Refusal>, StageError> {
    let whole = samples_or_damage(storage, path, max_seconds, OnDamage::Refuse, None)?;
    Ok(whole.map(|whole| whole.samples))
}

/// The same, with `on_damage` for damaged recordings, of an audio track, counted from 1; with none, of the one that is played.
///
/// # Errors
/// As [`samples`].
pub fn samples_or_damage(
    storage: &Storage,
    path: &Path,
    max_seconds: f64,
    on_damage: OnDamage,
    track: Option<u32>,
) -> Result<Result<RecordingSamples, Refusal>, StageError> {
    let mut reader =
        match open_range(storage, path, None, max_seconds, Channels::Mix, track).map_err(StageError::failed)? {
            Ok(reader) => reader,
            Err(refusal) => return Ok(Err(refusal)),
        };
    if on_damage == OnDamage::Keep {
        reader.fill_holes();
    }
    let most = (max_seconds * f64::from(SAMPLE_RATE)) as usize;
    let (mut samples, mut damaged) = (Vec::new(), false);
    loop {
        let progress = reader.read(&mut samples).map_err(StageError::failed)?;
        if samples.len() > most {
            return Ok(Err(Refusal::too_long(path, max_seconds)));
        }
        match progress {
            Progress::More => {}
            Progress::Damaged(why) => {
                if let Err(refusal) = on_damage.accept(path, samples.len() as u64, &why) {
                    return Ok(Err(refusal));
                }
                damaged = true;
                break;
            }
            Progress::End => break,
        }
    }
    let note = reader.note();
    Ok(Ok(RecordingSamples { samples, damaged, note }))
}

/// Held while a long recording is processed (more than ten minutes, or 20 MB where its header has no length): these
/// take much memory and are processed one at a time. None for other recordings. While waiting for the lock,
/// `is_stopped` is polled.
///
/// # Errors
/// If `is_stopped` becomes true before the lock is taken.
pub fn lock_if_long(
    storage: &Storage,
    path: &Path,
    is_stopped: &dyn Fn() -> bool,
) -> Result<Option<MutexGuard<'static, ()>>, Stopped> {
    static LONG: Mutex<()> = Mutex::new(());
    let is_long = stated_seconds(storage, path, None).map_or_else(
        || {
            let length = flow_kind::open_input_file(storage, path).and_then(|file| file.length());
            length.is_ok_and(|length| length > 20_000_000)
        },
        |seconds| seconds > 600.0,
    );
    if is_long {
        lock(&LONG, is_stopped).map(Some)
    } else {
        Ok(None)
    }
}

/// The wait was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped;

fn lock<'m>(mutex: &'m Mutex<()>, is_stopped: &dyn Fn() -> bool) -> Result<MutexGuard<'m, ()>, Stopped> {
    // Much shorter than the lock is held.
    const EVERY: Duration = Duration::from_millis(20);
    loop {
        if is_stopped() {
            return Err(Stopped);
        }
        match mutex.try_lock() {
            Ok(guard) => return Ok(guard),
            // The lock protects no data, so a panic leaves nothing inconsistent.
            Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(EVERY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data;

    fn wav(rate: u32, samples: &[i16]) -> Vec<u8> {
        test_data::wav(rate, 1, samples)
    }

    fn reason(name: &str, bytes: &[u8], max_seconds: f64) -> &'static str {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        samples(&Storage::default(), &path, max_seconds)
            .unwrap()
            .map_or_else(|refusal| refusal.reason, |_| "ok")
    }

    #[test]
    fn whoever_is_stopped_does_not_wait_for_the_lock() {
        let mutex = Mutex::new(());
        let held = lock(&mutex, &|| false).unwrap();
        let asked = std::cell::Cell::new(0);
        let stopped = lock(&mutex, &|| {
            asked.set(asked.get() + 1);
            asked.get() > 2
        });
        assert_eq!(stopped.map(drop), Err(Stopped));
        drop(held);
        assert!(lock(&mutex, &|| false).is_ok());
    }

    #[test]
    fn what_is_wrong_has_a_name() {
        let second = wav(16_000, &[0; 16_000]);
        assert_eq!(reason("a.wav", &second, 10.0), "ok");
        assert_eq!(reason("a.wav", &second, 0.5), "too_long");
        // The length in the header of lossy recordings counts as well.
        for name in ["tone.m4a", "tone.ogg", "tone.opus"] {
            assert_eq!(reason(name, &test_data::tone(name), 0.5), "too_long", "{name}");
        }
        assert_eq!(reason("a.wav", b"", 10.0), "empty_file");
        assert_eq!(reason("a.wav", b"this is a text", 10.0), "unsupported_format");
        // No `fmt ` chunk: `audio.probe` says the same of it.
        assert_eq!(reason("a.wav", b"RIFF\x04\0\0\0WAVE", 10.0), "unsupported_format");
        assert_eq!(reason("a.wav", &wav(16_000, &[]), 10.0), "decode_error");
        let folder = tempfile::tempdir().unwrap();
        let refused = |path: &Path| samples(&Storage::default(), path, 10.0).unwrap().unwrap_err().reason;
        assert_eq!(refused(&folder.path().join("gone.wav")), "missing_file");
        assert_eq!(refused(folder.path()), "missing_file");
    }

    #[test]
    fn what_is_before_the_damage_is_kept_or_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wav");
        let whole = wav(16_000, &[7; 48_000]);
        let read = |bytes: &[u8], on_damage| {
            std::fs::write(&path, bytes).unwrap();
            samples_or_damage(&Storage::default(), &path, 10.0, on_damage, None).unwrap()
        };
        let (cut, stump) = (&whole[..44 + 64_000], &whole[..44 + 20_000]);
        for on_damage in [OnDamage::Keep, OnDamage::Refuse] {
            let all = read(&whole, on_damage).unwrap();
            assert!(!all.damaged && all.samples.len() == 48_000);
            let refused = read(stump, on_damage).unwrap_err();
            assert!(
                refused.reason == "decode_error" && refused.detail.contains("is damaged at"),
                "{refused:?}"
            );
        }
        let kept = read(cut, OnDamage::Keep).unwrap();
        assert!(kept.damaged && (30_000..=32_000).contains(&kept.samples.len()));
        assert_eq!(read(cut, OnDamage::Refuse).unwrap_err().reason, "decode_error");
        assert_eq!(
            samples(&Storage::default(), &path, 10.0).unwrap().unwrap_err().reason,
            "decode_error"
        );
    }

    #[test]
    fn other_rates_become_16_khz() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wav");
        std::fs::write(&path, wav(8_000, &[1000; 4_000])).unwrap();
        assert_eq!(samples(&Storage::default(), &path, 10.0).unwrap().unwrap().len(), 8_000);
    }
}
