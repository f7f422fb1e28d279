//! One clip: its sentence and parameters, drawn from its number alone, and its recording.

use serde::Serialize;

use super::espeak::{Espeak, Manner, Unspoken};
use super::random::Random;
use super::sentences::{Choice, Language};
use super::settings::SynthesizeSettings;
use super::sound::{self, Noise, RATE, Room, Scene};
use crate::error::AudioError;
use crate::flac::{Samples, StreamInfo};
use crate::flac_encode::encode;
use crate::resample::resample;

/// What is to be spoken, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    pub text: String,
    pub variant: String,
    pub speed: u32,
    pub pitch: u32,
    pub scene: Scene,
}

/// A clip that was spoken.
#[derive(Clone, Debug)]
pub struct Clip {
    pub number: u32,
    pub segment_id: String,
    pub text: String,
    /// With its variant: `hi+f2`.
    pub voice: String,
    pub drawn: Drawn,
    pub frames: u64,
    pub flac: Vec<u8>,
}

impl Clip {
    /// Name of its member in the tar.
    pub fn member(&self) -> String {
        format!("{}.flac", self.segment_id)
    }

    /// In seconds.
    pub fn duration(&self) -> f64 {
        self.frames as f64 / f64::from(RATE)
    }
}

/// A clip that was refused.
#[derive(Clone, Debug)]
pub struct Refused {
    pub number: u32,
    pub segment_id: String,
    pub why: Unspoken,
    /// Whether it was rejected by a setting, not for a fault.
    pub by_rule: bool,
    pub values: String,
}

/// The parameters of a shard.
pub struct Maker<'a> {
    pub settings: &'a SynthesizeSettings,
    pub language: &'a Language,
    pub choice: Choice<'a>,
    pub shard_id: &'a str,
    /// Variants of the voice that this side speaks with.
    pub variants: &'a [String],
    pub espeak: &'a Espeak,
}

#[derive(Serialize)]
struct Values<'a> {
    text: &'a str,
    voice: &'a str,
    speed: u32,
    pitch: u32,
}

impl Maker<'_> {
    fn random(&self, number: u32, what: &str) -> Random {
        Random::of(
            self.settings.seed,
            &[&self.language.name, self.shard_id, &number.to_string(), what],
        )
    }

    /// The parameters of clip `number`. None where no sentence is left.
    pub fn draw(&self, number: u32) -> Option<Drawn> {
        let settings = self.settings;
        let text = self.language.draw(&mut self.random(number, "text"), &self.choice)?;
        let mut random = self.random(number, "manner");
        // Drawn in a fixed order, whether needed or not, so that a setting affects only its own parameter.
        let variant = random.pick(self.variants).cloned().unwrap_or_default();
        let (speed, pitch) = (random.whole(settings.speed), random.whole(settings.pitch));
        let level = random.between(settings.gain);
        let silence = [random.between(settings.silence), random.between(settings.silence)];
        let noisy = random.unit() < settings.noise.share;
        let noise = Noise {
            ratio: random.between(settings.noise.ratio),
            colour: random.between(settings.noise.colour),
        };
        let in_room = random.unit() < settings.room.share;
        let room = Room {
            decay: random.between(settings.room.decay),
            level: random.between(settings.room.level),
        };
        let scene = Scene {
            level,
            silence,
            shortest: settings.min_duration,
            noise: noisy.then_some(noise),
            room: in_room.then_some(room),
        };
        Some(Drawn {
            text,
            variant,
            speed,
            pitch,
            scene,
        })
    }

    /// Makes clip `number`. None where no sentence is left.
    pub fn make(&self, number: u32) -> Result<Option<Result<Clip, Refused>>, AudioError> {
        let Some(drawn) = self.draw(number) else {
            return Ok(None);
        };
        let manner = Manner {
            voice: self.language.voice(),
            variant: &drawn.variant,
            speed: drawn.speed,
            pitch: drawn.pitch,
        };
        let voice = manner.name();
        let segment_id = format!("{}_{}_{number:05}", self.shard_id, self.settings.seed);
        let refused = |why: Unspoken, by_rule| {
            let values = Values {
                text: &drawn.text,
                voice: &voice,
                speed: drawn.speed,
                pitch: drawn.pitch,
            };
            Ok(Some(Err(Refused {
                number,
                segment_id: segment_id.clone(),
                why,
                by_rule,
                // Plain data: cannot fail to serialise.
                values: serde_json::to_string(&values).unwrap_or_default(),
            })))
        };
        let sound = match self.espeak.speak(&drawn.text, &manner)? {
            Ok(sound) => sound,
            Err(why) => return refused(why, false),
        };
        let silent = || Unspoken {
            reason: "no_audio",
            detail: "espeak-ng gave nothing but silence".into(),
        };
        let signal = match resample(sound.signal, sound.rate, RATE) {
            Ok(signal) => signal,
            Err(error) => {
                let (reason, detail) = ("espeak_failed", error.to_string());
                return refused(Unspoken { reason, detail }, false);
            }
        };
        let Some(signal) = sound::stage(&signal, &drawn.scene, &mut self.random(number, "sound")) else {
            return refused(silent(), false);
        };
        let duration = signal.len() as f64 / f64::from(RATE);
        if duration > self.settings.max_duration {
            let detail = format!("{duration:.2} s, more than {} s", self.settings.max_duration);
            let reason = "duration_too_long";
            return refused(Unspoken { reason, detail }, true);
        }
        let frames = signal.len() as u64;
        let samples = Samples {
            info: StreamInfo {
                sample_rate: RATE,
                channels: 1,
                bits: 16,
                total_frames: frames,
                md5: [0; 16],
            },
            interleaved: sound::quantized(&signal),
        };
        let Some(flac) = encode(&samples) else {
            return refused(silent(), false);
        };
        Ok(Some(Ok(Clip {
            number,
            segment_id: segment_id.clone(),
            text: drawn.text.clone(),
            voice: voice.clone(),
            frames,
            flac,
            drawn,
        })))
    }
}
