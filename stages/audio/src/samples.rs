//! The samples of a recording, or why there are none.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use flow_runtime::StageError;

use crate::AudioError;
use crate::decode::{MAX_RECORDING_BYTES, read_file};
use crate::format::recognise;
use crate::part::{decode_part, stated_seconds};

/// Why a recording is refused: a name in snake case, and words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: &'static str,
    pub detail: String,
}

/// A recording of any format that [`crate::recording`] knows, decoded: 16 kHz, mono, in [-1, 1]. FLAC and WAV are decoded
/// block by block, others from [`MAX_RECORDING_BYTES`] at most.
///
/// # Errors
/// If the file is there and cannot be read. What is wrong with what it holds is a [`Refusal`].
pub fn samples(path: &Path, max_seconds: f64) -> Result<Result<Vec<f32>, Refusal>, StageError> {
    let refused = |reason, detail: String| Ok(Err(Refusal { reason, detail }));
    let shown = path.display();
    let size = match path.metadata() {
        Ok(metadata) if metadata.is_file() => metadata.len(),
        Ok(_) => return refused("missing_file", format!("{shown} is no file")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return refused("missing_file", format!("{shown} is not there"));
        }
        Err(error) => return Err(StageError::failed(format!("cannot read {shown}: {error}"))),
    };
    if size == 0 {
        return refused("empty_file", format!("{shown} has 0 bytes"));
    }
    let too_long = || {
        let detail = format!("{shown} is longer than {max_seconds} s (`max_duration`): cut it into parts");
        refused("too_long", detail)
    };
    if stated_seconds(path, None).is_some_and(|seconds| seconds > max_seconds) {
        return too_long();
    }
    match decode_part(path, None, 0.0, max_seconds, max_seconds) {
        Ok(part) if part.signal.iter().all(|sample| sample.is_finite()) => Ok(Ok(part.signal)),
        Ok(_) => refused("decode_error", format!("{shown} holds samples that are no numbers")),
        Err(AudioError::TooLong { .. }) => too_long(),
        Err(AudioError::TooLarge { .. }) => {
            let detail = format!(
                "{shown} has {size} bytes; a recording may have {MAX_RECORDING_BYTES}, unless it is FLAC or WAV that can be \
                 decoded from the beginning to the end its header names"
            );
            refused("too_large", detail)
        }
        Err(error @ AudioError::Read { .. }) => Err(StageError::failed(error)),
        Err(error) => {
            // What it is, where it is no audio at all.
            let format = read_file(path).ok().map(|bytes| recognise(&bytes));
            match format {
                Some(Err(what)) => refused("unsupported_format", format!("{shown}: {what}")),
                _ => refused("decode_error", format!("{shown}: {error}")),
            }
        }
    }
}

/// Held while a long recording is worked on (more than ten minutes, or 20 MB where its header does not say how long it is):
/// those take much memory, and go one after the other. None for other recordings.
pub fn lock_if_long(path: &Path) -> Option<MutexGuard<'static, ()>> {
    static LONG: Mutex<()> = Mutex::new(());
    let is_long = stated_seconds(path, None).map_or_else(
        || path.metadata().is_ok_and(|metadata| metadata.len() > 20_000_000),
        |seconds| seconds > 600.0,
    );
    is_long.then(|| LONG.lock().unwrap_or_else(PoisonError::into_inner))
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
        samples(&path, max_seconds)
            .unwrap()
            .map_or_else(|refusal| refusal.reason, |_| "ok")
    }

    #[test]
    fn what_is_wrong_has_a_name() {
        let second = wav(16_000, &[0; 16_000]);
        assert_eq!(reason("a.wav", &second, 10.0), "ok");
        assert_eq!(reason("a.wav", &second, 0.5), "too_long");
        assert_eq!(reason("a.wav", b"", 10.0), "empty_file");
        assert_eq!(reason("a.wav", b"this is a text", 10.0), "unsupported_format");
        assert_eq!(reason("a.wav", b"RIFF\x04\0\0\0WAVE", 10.0), "decode_error");
        assert_eq!(reason("a.wav", &wav(16_000, &[]), 10.0), "decode_error");
        let folder = tempfile::tempdir().unwrap();
        let refused = |path: &Path| samples(path, 10.0).unwrap().unwrap_err().reason;
        assert_eq!(refused(&folder.path().join("gone.wav")), "missing_file");
        assert_eq!(refused(folder.path()), "missing_file");
    }

    #[test]
    fn other_rates_become_16_khz() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wav");
        std::fs::write(&path, wav(8_000, &[1000; 4_000])).unwrap();
        assert_eq!(samples(&path, 10.0).unwrap().unwrap().len(), 8_000);
    }
}
