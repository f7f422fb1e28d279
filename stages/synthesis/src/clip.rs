//! One clip: its sentence and parameters, drawn from its number alone, and its recording.

use serde::Serialize;

use super::espeak::{Espeak, Manner, Unspoken};
use super::random::Random;
use super::sentences::{Choice, Language};
use super::settings::SynthesizeSettings;
use super::sound::{self, Noise, Pause, RATE, Room, Scene, Tone};
use flow_audio::AudioError;
use flow_audio::flac::{Samples, StreamInfo};
use flow_audio::flac_encode::encode;
use flow_audio::resample::resample;

/// What is to be spoken, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    pub text: String,
    pub variant: String,
    pub speed: u32,
    pub pitch: u32,
    pub scene: Scene,
    /// How many seconds further sentences are added for; none if there are none.
    pub until: Option<f64>,
}

/// How somebody speaks, whatever the language.
#[derive(Clone, Debug, PartialEq)]
struct Speaker {
    variant: String,
    speed: u32,
    pitch: u32,
}

/// A further sentence of a clip.
#[derive(Clone, Debug)]
struct Further<'a> {
    language: &'a Language,
    text: String,
    speaker: Speaker,
    pause: Pause,
    level: f64,
}

/// Below this length a pause holds no tone, in seconds.
const SHORTEST_TONED: f64 = 0.3;
/// Frequencies of tones in pauses, in Hz.
const FREQUENCIES: [f64; 2] = [200.0, 2_000.0];
/// Levels of tones in pauses, in dB of the speech.
const TONE_LEVELS: [f64; 2] = [-20.0, 0.0];

/// A clip that was spoken.
#[derive(Clone, Debug)]
pub struct Clip {
    pub number: u32,
    pub segment_id: String,
    pub text: String,
    /// With its variant: `hi+f2`. Of several sentences each one once, with spaces between.
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
    /// All other languages that are spoken, for further sentences of a clip.
    pub others: &'a [&'a Language],
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
        let mut random = self.random(number, "joined");
        let joined = random.unit() < settings.joined.share;
        let until = random.between(settings.joined.seconds);
        Some(Drawn {
            text,
            variant,
            speed,
            pitch,
            scene,
            until: joined.then_some(until),
        })
    }

    /// What the further sentence `place` (from 1) of clip `number` is, after one of this speaker. None where no sentence
    /// is left to say.
    fn draw_further(&self, number: u32, place: u32, before: &Speaker) -> Option<Further<'_>> {
        let settings = self.settings;
        let mut random = self.random(number, &format!("sentence {place}"));
        let elsewhere = random.unit() < settings.joined.languages;
        // Which other languages there are changes nothing where none is asked for.
        let other = if elsewhere {
            random.pick(self.others).copied()
        } else {
            None
        };
        let language = other.unwrap_or(self.language);
        let another = random.unit() < settings.joined.voices;
        let speaker = Speaker {
            variant: random.pick(self.variants).cloned().unwrap_or_default(),
            speed: random.whole(settings.speed),
            pitch: random.whole(settings.pitch),
        };
        let seconds = random.between(settings.joined.pause);
        let toned = random.unit() < settings.joined.tones && seconds >= SHORTEST_TONED;
        let tone = Tone {
            frequency: random.between(FREQUENCIES),
            level: random.between(TONE_LEVELS),
        };
        let level = random.between(settings.joined.level);
        let text = language.draw(&mut random, &self.choice)?;
        Some(Further {
            language,
            text,
            speaker: if another { speaker } else { before.clone() },
            pause: Pause {
                seconds,
                tone: toned.then_some(tone),
            },
            level,
        })
    }

    /// Adds sentences to the first one, which is spoken, to its text and to its voice, until there are `until` seconds of
    /// them. One that espeak-ng fails to speak, or that would make the clip too long, ends that.
    fn join(
        &self,
        number: u32,
        drawn: &Drawn,
        until: f64,
        spoken: &mut Vec<f32>,
        (text, voice): (&mut String, &mut String),
    ) -> Result<(), AudioError> {
        let seconds = |samples: usize| samples as f64 / f64::from(RATE);
        let echo = drawn.scene.room.as_ref().map_or(0.0, |room| room.decay);
        let around = drawn.scene.silence.iter().sum::<f64>() + echo;
        let mut before = Speaker {
            variant: drawn.variant.clone(),
            speed: drawn.speed,
            pitch: drawn.pitch,
        };
        let mut place = 0;
        while seconds(spoken.len()) < until {
            place += 1;
            let Some(further) = self.draw_further(number, place, &before) else {
                break;
            };
            let manner = Manner {
                voice: further.language.voice(),
                variant: &further.speaker.variant,
                speed: further.speaker.speed,
                pitch: further.speaker.pitch,
            };
            let Ok(sound) = self.espeak.speak(&further.text, &manner)? else {
                break;
            };
            let Ok(signal) = resample(sound.signal, sound.rate, RATE) else {
                break;
            };
            let longest = around + seconds(spoken.len() + signal.len()) + further.pause.seconds;
            if longest > self.settings.max_duration || !sound::join(spoken, &further.pause, &signal, further.level) {
                break;
            }
            text.push(' ');
            text.push_str(&further.text);
            let name = manner.name();
            if !voice.split(' ').any(|known| known == name) {
                voice.push(' ');
                voice.push_str(&name);
            }
            before = further.speaker;
        }
        Ok(())
    }

    /// Speaks clip `number`. None where no sentence is left to say.
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
        let (mut text, mut voice) = (drawn.text.clone(), voice.clone());
        let mut signal = signal;
        if let Some(until) = drawn.until {
            self.join(number, &drawn, until, &mut signal, (&mut text, &mut voice))?;
        }
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
            text,
            voice,
            frames,
            flac,
            drawn,
        })))
    }
}
