//! Voice activity of a recording whose samples come in blocks.

use flow_speakers::silero::{MAX_SAMPLE, SAMPLE_RATE, SileroStream, SileroVad, WINDOW};
use flow_speakers::tones::{ToneDetector, ToneState};
use serde::{Deserialize, Serialize};

use crate::energy::{frame_levels, speech_probabilities};
use crate::recognizer::VoiceActivity;
use crate::streamed::shorter;
use crate::{Result, TranscriptionError};

/// What was found in a recording.
pub(crate) struct SpeechActivity {
    /// The probability of speech of each frame of [`WINDOW`] samples, the last one of which may be shorter.
    pub probabilities: Vec<f32>,
    /// Whether each frame is part of a steady tone; empty where none were looked for.
    pub tones: Vec<bool>,
    pub samples: u64,
}

/// What the network of voice activity found in a stretch of a recording, and all that it needs to go on behind it. Numbers are the
/// bits of `f32`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActivityPart {
    /// Samples from the beginning of the recording to the end of the stretch.
    pub samples: u64,
    /// Probabilities of the frames of the stretch.
    frames: Vec<u32>,
    /// The state of the network.
    network: Vec<u32>,
    /// The state of the detector of tones. Of `alike` what is new, as `0` and `1`.
    pending: Vec<u32>,
    before: Option<Vec<u32>>,
    alike: String,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn from_bits(bits: &[u32]) -> Vec<f32> {
    bits.iter().map(|bits| f32::from_bits(*bits)).collect()
}

/// The probability of speech for each frame of [`WINDOW`] samples; independent of the blocks, to the bit.
pub(crate) struct Activity<'a> {
    method: Method<'a>,
    /// A probability for each frame, or its level in decibels.
    frames: Vec<f32>,
    samples: u64,
    /// Samples at the beginning of which everything is known, since they were heard before.
    known: u64,
    /// Frames, and windows that were looked at for tones, of the parts that were given out.
    given: (usize, usize),
}

enum Method<'a> {
    Off,
    /// Samples of a frame that is not complete yet.
    Energy(Vec<f32>),
    /// Steady tones count as no speech, although the network classifies notes and beeps as speech.
    Neural(Box<Neural<'a>>),
}

struct Neural<'a> {
    network: SileroStream<'a>,
    tones: ToneDetector,
    /// Samples that wait until there are [`TOGETHER`].
    waiting: Vec<f32>,
}

/// Samples that the network takes at once, while another thread looks for tones in them: four seconds.
const TOGETHER: usize = 4 * SAMPLE_RATE as usize;

impl Neural<'_> {
    fn run(&mut self, frames: &mut Vec<f32>) -> Result<()> {
        let Neural {
            network,
            tones,
            waiting,
        } = self;
        let (heard, looked) = rayon::join(|| network.feed(waiting, frames), || tones.feed(waiting));
        waiting.clear();
        heard
            .and(looked)
            .map_err(|error| TranscriptionError::Input(error.to_string()))
    }
}

impl<'a> Activity<'a> {
    pub fn new(method: VoiceActivity, network: &'a SileroVad) -> Self {
        Activity {
            method: match method {
                VoiceActivity::Off => Method::Off,
                VoiceActivity::Energy => Method::Energy(Vec::new()),
                VoiceActivity::Neural => Method::Neural(Box::new(Neural {
                    network: network.stream(),
                    tones: ToneDetector::default(),
                    waiting: Vec::new(),
                })),
            },
            frames: Vec::new(),
            samples: 0,
            known: 0,
            given: (0, 0),
        }
    }

    /// What was found since the last call, where the network heard something since then.
    pub fn part(&mut self) -> Option<ActivityPart> {
        let Method::Neural(neural) = &self.method else {
            return None;
        };
        let (frames, alike) = self.given;
        let new = self.frames.get(frames..).filter(|new| !new.is_empty())?;
        let network = neural.network.state()?;
        let tones = neural.tones.state(alike);
        let part = ActivityPart {
            samples: self.known.max(self.samples) - neural.waiting.len() as u64,
            frames: bits(new),
            network: bits(&network),
            pending: bits(&tones.pending),
            before: tones.before.as_deref().map(bits),
            alike: tones.alike.iter().map(|alike| if *alike { '1' } else { '0' }).collect(),
        };
        self.given = (self.frames.len(), alike + tones.alike.len());
        Some(part)
    }

    /// Begins behind what was found before in the same recording, in parts from its beginning on. All samples are fed nevertheless;
    /// those of the parts are not heard again.
    ///
    /// # Errors
    /// If these are not the parts of a recording.
    pub fn resume(&mut self, parts: &[ActivityPart], network: &'a SileroVad) -> Result<()> {
        let (Some(last), Method::Neural(neural)) = (parts.last(), &mut self.method) else {
            return Ok(());
        };
        let wrong =
            |error: &dyn std::fmt::Display| TranscriptionError::Input(format!("earlier voice activity: {error}"));
        let frames: Vec<f32> = parts.iter().flat_map(|part| from_bits(&part.frames)).collect();
        let alike: Vec<bool> = parts
            .iter()
            .flat_map(|part| part.alike.bytes().map(|sign| sign == b'1'))
            .collect();
        let given = (frames.len(), alike.len());
        if !last.samples.is_multiple_of(TOGETHER as u64) || frames.len() as u64 != last.samples / WINDOW as u64 {
            return Err(wrong(&format!(
                "{} frames do not fit {} samples",
                frames.len(),
                last.samples
            )));
        }
        let state = ToneState {
            pending: from_bits(&last.pending),
            before: last.before.as_deref().map(from_bits),
            alike,
            samples: usize::try_from(last.samples).map_err(|error| wrong(&error))?,
        };
        let resumed = network.resume(&from_bits(&last.network), last.samples);
        neural.network = resumed.map_err(|error| wrong(&error))?;
        neural.tones = ToneDetector::resume(state).map_err(|error| wrong(&error))?;
        (self.frames, self.known, self.given) = (frames, last.samples, given);
        Ok(())
    }

    /// Takes samples (mono, 16 kHz, in [-1, 1]).
    ///
    /// # Errors
    /// If one is NaN, or far too large.
    pub fn feed(&mut self, samples: &[f32]) -> Result<()> {
        let wrong = |sample: &f32| sample.is_nan() || sample.abs() > MAX_SAMPLE;
        if let Some(at) = samples.iter().position(wrong) {
            let (at, value) = (self.samples + at as u64, samples[at]);
            let why = format!("sample {at} is {value}; it must be a number of at most {MAX_SAMPLE}");
            return Err(TranscriptionError::Input(why));
        }
        let before = self.known.saturating_sub(self.samples);
        self.samples += samples.len() as u64;
        let samples = samples
            .get(usize::try_from(before).unwrap_or(usize::MAX)..)
            .unwrap_or_default();
        match &mut self.method {
            Method::Off => {}
            Method::Energy(rest) => {
                rest.extend_from_slice(samples);
                let whole = rest.len() / WINDOW * WINDOW;
                self.frames.extend(frame_levels(&rest[..whole], WINDOW));
                rest.drain(..whole);
            }
            Method::Neural(neural) => {
                let mut rest = samples;
                while !rest.is_empty() {
                    let (taken, after) = rest.split_at(rest.len().min(TOGETHER - neural.waiting.len()));
                    neural.waiting.extend_from_slice(taken);
                    if neural.waiting.len() == TOGETHER {
                        neural.run(&mut self.frames)?;
                    }
                    rest = after;
                }
            }
        }
        Ok(())
    }

    /// Samples that were fed.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// What was found in all samples.
    ///
    /// # Errors
    /// If the network refuses samples.
    pub fn finish(mut self) -> Result<SpeechActivity> {
        if self.samples < self.known {
            return Err(shorter(self.samples));
        }
        let mut tones = Vec::new();
        let probabilities = match self.method {
            Method::Off => vec![1.0; self.samples.div_ceil(WINDOW as u64) as usize],
            Method::Energy(rest) => {
                self.frames.extend(frame_levels(&rest, WINDOW));
                speech_probabilities(&self.frames)
            }
            Method::Neural(mut neural) => {
                neural.run(&mut self.frames)?;
                let Neural {
                    network,
                    tones: detector,
                    ..
                } = *neural;
                network.finish(&mut self.frames);
                tones = with_ends(&detector.finish());
                for (probability, _) in self.frames.iter_mut().zip(&tones).filter(|(_, tone)| **tone) {
                    *probability = 0.0;
                }
                self.frames
            }
        };
        Ok(SpeechActivity {
            probabilities,
            tones,
            samples: self.samples,
        })
    }
}

/// Tones with the frame before and the one after each, which hold its onset and its end.
fn with_ends(tones: &[bool]) -> Vec<bool> {
    let is_tone = |at: usize| tones.get(at).is_some_and(|tone| *tone);
    (0..tones.len())
        .map(|at| is_tone(at) || is_tone(at + 1) || at.checked_sub(1).is_some_and(is_tone))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn blocks_of_any_size_give_the_same_bits(
            length in 0usize..150_000, sizes in prop::collection::vec(1usize..90_000, 1..6),
        ) {
            let network = SileroVad::bundled().unwrap();
            let samples: Vec<f32> = (0..length).map(|at| ((at * at % 1_009) as f32 / 504.5 - 1.0) * 0.5).collect();
            for method in [VoiceActivity::Off, VoiceActivity::Energy, VoiceActivity::Neural] {
                let mut whole = Activity::new(method, &network);
                whole.feed(&samples).unwrap();
                let mut parts = Activity::new(method, &network);
                let mut rest = &samples[..];
                for size in sizes.iter().cycle() {
                    let (block, after) = rest.split_at(rest.len().min(*size));
                    parts.feed(block).unwrap();
                    rest = after;
                    if rest.is_empty() {
                        break;
                    }
                }
                let (whole, parts) = (whole.finish().unwrap(), parts.finish().unwrap());
                prop_assert_eq!(whole.samples, length as u64);
                prop_assert_eq!(whole.probabilities.len(), length.div_ceil(WINDOW));
                let bits = |frames: &[f32]| frames.iter().map(|frame| frame.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&parts.probabilities), bits(&whole.probabilities), "{:?}", method);
                prop_assert_eq!(parts.tones, whole.tones);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]
        #[test]
        fn what_was_heard_before_is_not_heard_again_and_the_bits_are_the_same(
            length in 0usize..400_000, cuts in prop::collection::vec(1usize..250_000, 1..5),
        ) {
            let network = SileroVad::bundled().unwrap();
            let tone = |at: usize| (at as f32 * 0.2).sin() * 0.4;
            let noise = |at: usize| ((at * at % 1_009) as f32 / 504.5 - 1.0) * 0.5;
            // A tone goes on over the ends of parts.
            let samples: Vec<f32> = (0..length).map(|at| if at / 50_000 % 2 == 1 { tone(at) } else { noise(at) }).collect();
            let mut whole = Activity::new(VoiceActivity::Neural, &network);
            whole.feed(&samples).unwrap();
            let whole = whole.finish().unwrap();
            let mut parts: Vec<ActivityPart> = Vec::new();
            for cut in cuts {
                // It dies somewhere, perhaps before the end of what was known.
                let mut activity = Activity::new(VoiceActivity::Neural, &network);
                activity.resume(&parts, &network).unwrap();
                let known = parts.last().map_or(0, |part| part.samples) as usize;
                for block in samples[..(known + cut).min(length)].chunks(70_001) {
                    activity.feed(block).unwrap();
                    let written = serde_json::to_string(&activity.part()).unwrap();
                    parts.extend(serde_json::from_str::<Option<ActivityPart>>(&written).unwrap());
                }
            }
            let mut last = Activity::new(VoiceActivity::Neural, &network);
            last.resume(&parts, &network).unwrap();
            last.feed(&samples).unwrap();
            let last = last.finish().unwrap();
            prop_assert_eq!(bits(&last.probabilities), bits(&whole.probabilities));
            prop_assert_eq!(last.tones, whole.tones);
            if let Some(part) = parts.last_mut() {
                part.frames.pop();
                prop_assert!(Activity::new(VoiceActivity::Neural, &network).resume(&parts, &network).is_err());
            }
        }
    }

    #[test]
    fn a_tone_has_its_onset_and_its_end() {
        let of = |text: &str| text.chars().map(|sign| sign == '#').collect::<Vec<_>>();
        assert_eq!(with_ends(&of("#..#....##.")), of("#####..####"));
        assert!(with_ends(&[]).is_empty());
    }
}
