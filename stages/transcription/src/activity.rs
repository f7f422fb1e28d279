//! Voice activity of a recording whose samples come in blocks.

use flow_speakers::silero::{MAX_SAMPLE, SAMPLE_RATE, SileroStream, SileroVad, WINDOW};
use flow_speakers::tones::ToneDetector;

use crate::energy::{frame_levels, speech_probabilities};
use crate::recognizer::VoiceActivity;
use crate::{Result, TranscriptionError};

/// What was found in a recording.
pub(crate) struct SpeechActivity {
    /// The probability of speech of each frame of [`WINDOW`] samples, the last one of which may be shorter.
    pub probabilities: Vec<f32>,
    /// Whether each frame is part of a steady tone; empty where none were looked for.
    pub tones: Vec<bool>,
    pub samples: u64,
}

/// The probability of speech for each frame of [`WINDOW`] samples; independent of the blocks, to the bit.
pub(crate) struct Activity<'a> {
    method: Method<'a>,
    /// A probability for each frame, or its level in decibels.
    frames: Vec<f32>,
    samples: u64,
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
        }
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
        self.samples += samples.len() as u64;
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

    #[test]
    fn a_tone_has_its_onset_and_its_end() {
        let of = |text: &str| text.chars().map(|sign| sign == '#').collect::<Vec<_>>();
        assert_eq!(with_ends(&of("#..#....##.")), of("#####..####"));
        assert!(with_ends(&[]).is_empty());
    }
}
