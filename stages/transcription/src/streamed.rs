//! The samples of a recording as a stream of blocks, which can be read several times.

use std::path::PathBuf;

use flow_audio::decode::SAMPLE_RATE;
use flow_audio::recording_reader::{Channels, Progress, RecordingReader};
use flow_audio::samples::{OnDamage, Refusal, open};

use crate::{Result, TranscriptionError};

/// Takes the next samples (mono, 16 kHz, in [-1, 1]), of which there may be none. False: no more are wanted.
pub type Take<'a> = dyn FnMut(&[f32]) -> Result<bool> + 'a;

/// Samples of a recording that can be read several times.
pub trait Samples {
    /// Passes all samples to `take`, from the first one on, until it returns false.
    ///
    /// # Errors
    /// Those of `take`, and if the samples cannot be read.
    fn pass(&self, take: &mut Take<'_>) -> Result<()>;
}

/// The error of a recording that ends at so many samples, before its end of an earlier pass.
pub(crate) fn shorter(samples: u64) -> TranscriptionError {
    TranscriptionError::Input(format!(
        "the recording ends at {samples} samples, and had more when it was read before"
    ))
}

impl Samples for &[f32] {
    fn pass(&self, take: &mut Take<'_>) -> Result<()> {
        take(self).map(drop)
    }
}

/// A recording of any format that [`flow_audio::recording`] knows, decoded block by block.
#[derive(Clone, Debug)]
pub struct StreamedRecording {
    path: PathBuf,
    channels: Channels,
}

/// The extent of a recording.
#[derive(Clone, Debug, PartialEq)]
pub struct Extent {
    /// Samples at 16 kHz.
    pub samples: u64,
    /// Why it could not be decoded to its end, where it could not.
    pub damage: Option<String>,
}

impl StreamedRecording {
    pub fn new(path: impl Into<PathBuf>, channels: Channels) -> Self {
        StreamedRecording {
            path: path.into(),
            channels,
        }
    }

    /// Reads the recording as [`Samples::pass`] does, and returns its extent, as far as `take` accepted samples. One
    /// that does not exist, is no audio, or is longer than `max_seconds` is a [`Refusal`], and so is a damaged one that
    /// `on_damage` does not accept.
    ///
    /// # Errors
    /// Those of `take`, and if the file is there and cannot be read.
    pub fn first_pass(
        &self,
        max_seconds: f64,
        on_damage: OnDamage,
        take: &mut Take<'_>,
    ) -> Result<std::result::Result<Extent, Refusal>> {
        let mut reader = match open(&self.path, max_seconds, self.channels)? {
            Ok(reader) => reader,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let most = (max_seconds * f64::from(SAMPLE_RATE)) as u64;
        let mut extent = Extent {
            samples: 0,
            damage: None,
        };
        let mut block = Vec::new();
        loop {
            block.clear();
            let progress = reader.read(&mut block)?;
            extent.samples += block.len() as u64;
            if extent.samples > most {
                return Ok(Err(Refusal::too_long(&self.path, max_seconds)));
            }
            let wanted = take(&block)?;
            match progress {
                Progress::More if wanted => {}
                Progress::More | Progress::End => return Ok(Ok(extent)),
                Progress::Damaged(why) => {
                    let accepted = on_damage.accept(&self.path, extent.samples, &why);
                    extent.damage = Some(why);
                    return Ok(accepted.map(|()| extent));
                }
            }
        }
    }
}

impl Samples for StreamedRecording {
    fn pass(&self, take: &mut Take<'_>) -> Result<()> {
        let mut reader = RecordingReader::open(&self.path, None, self.channels)?;
        let mut block = Vec::new();
        loop {
            block.clear();
            let progress = reader.read(&mut block)?;
            if !take(&block)? || progress != Progress::More {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::wav;

    fn first_pass(
        bytes: &[u8],
        max_seconds: f64,
        on_damage: OnDamage,
    ) -> (std::result::Result<Extent, Refusal>, Vec<f32>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wav");
        std::fs::write(&path, bytes).unwrap();
        let recording = StreamedRecording::new(&path, Channels::Mix);
        let mut all = Vec::new();
        let extent = recording.first_pass(max_seconds, on_damage, &mut |block| {
            all.extend_from_slice(block);
            Ok(true)
        });
        let extent = extent.unwrap();
        if extent.is_ok() {
            let mut again = Vec::new();
            let pass = recording.pass(&mut |block| {
                again.extend_from_slice(block);
                Ok(true)
            });
            pass.unwrap();
            assert_eq!(again, all, "the second time");
        }
        (extent, all)
    }

    fn reason(bytes: &[u8], max_seconds: f64) -> &'static str {
        first_pass(bytes, max_seconds, OnDamage::Keep)
            .0
            .map_or_else(|refusal| refusal.reason, |_| "ok")
    }

    #[test]
    fn what_is_wrong_has_a_name() {
        let second = wav(16_000, &[0; 16_000]);
        assert_eq!(reason(&second, 10.0), "ok");
        assert_eq!(reason(&second, 1.0), "ok");
        assert_eq!(reason(&second, 0.5), "too_long");
        // A header that does not say how long it is.
        let mut streamed = second.clone();
        streamed[40..44].fill(0xff);
        assert_eq!(reason(&streamed, 0.5), "too_long");
        assert_eq!(reason(b"", 10.0), "empty_file");
        assert_eq!(reason(b"this is a text", 10.0), "unsupported_format");
        assert_eq!(reason(&wav(16_000, &[]), 10.0), "decode_error");
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().join("gone.wav"), folder.path().to_owned()] {
            let recording = StreamedRecording::new(path, Channels::Mix);
            let refused = recording.first_pass(10.0, OnDamage::Keep, &mut |_| Ok(true)).unwrap();
            assert_eq!(refused.unwrap_err().reason, "missing_file");
        }
    }

    #[test]
    fn a_recording_that_is_cut_is_there_up_to_the_cut() {
        let samples: Vec<i16> = (0..32_000).map(|at| (at % 1_000) as i16).collect();
        let whole = wav(16_000, &samples);
        let (extent, all) = first_pass(&whole, 10.0, OnDamage::Refuse);
        assert_eq!(
            extent.unwrap(),
            Extent {
                samples: 32_000,
                damage: None
            }
        );
        let (extent, kept) = first_pass(&whole[..44 + 48_000], 10.0, OnDamage::Keep);
        let extent = extent.unwrap();
        assert!(extent.damage.is_some());
        assert_eq!(extent.samples, kept.len() as u64);
        assert!((20_000..=24_000).contains(&kept.len()), "{}", kept.len());
        assert_eq!(kept, all[..kept.len()]);
        // Where damage is refused, and where there is less than a second before it.
        for (bytes, on_damage) in [(48_000, OnDamage::Refuse), (24_000, OnDamage::Keep)] {
            let (refused, _) = first_pass(&whole[..44 + bytes], 10.0, on_damage);
            let refusal = refused.unwrap_err();
            assert_eq!(refusal.reason, "decode_error");
            assert!(refusal.detail.contains("is damaged at"), "{}", refusal.detail);
        }
    }

    #[test]
    fn who_wants_no_more_gets_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wav");
        std::fs::write(&path, wav(16_000, &[0; 160_000])).unwrap();
        let recording = StreamedRecording::new(&path, Channels::Mix);
        let mut taken = 0;
        let pass = recording.pass(&mut |block| {
            taken += block.len();
            Ok(taken < 16_000)
        });
        pass.unwrap();
        assert!((16_000..32_000).contains(&taken), "{taken}");
    }
}
