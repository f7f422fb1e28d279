//! Augmentation of training audio: noise, rooms, levels, narrow channels, lossy codecs.
//!
//! Steps are applied to an utterance in the order of the settings, each with its probability. All draws come from a hash of
//! seed, epoch, utterance and step, so that they depend on nothing else: not on threads, ranks, resumption or other utterances.
//! Names and defaults are those of NeMo's `augmentor` and of Lhotse.

pub mod bands;
pub mod compress;
pub mod levels;
pub mod noise;
pub mod random_room;
pub mod rooms;
mod sounds;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::f64::consts::TAU;
use std::sync::{Arc, Mutex, PoisonError};

use flow_audio::AudioError;
use flow_audio::decode::SAMPLE_RATE;
use flow_kind::Shared;
use flow_random::SplitMix64;
use flow_storage::{Storage, is_url};
use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use bands::Codec;
use compress::LossyCodec;
use sounds::Sounds;

/// A step of augmentation: its name, and its settings. `prob` is the probability that it is applied to an utterance. `path` is
/// a folder or pattern of recordings, or a manifest of JSON lines with `audio_filepath` (`offset`, `duration`), or a URL of one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Step {
    /// Lhotse's mix with noise, as NeMo's `noise_path` has it: repeated until it fills the utterance but for its last 50 ms, at
    /// an SNR over the powers of the speech and of the piece of noise.
    Mix(Mix),
    /// NeMo's `noise`: a piece, or a shorter noise once, at an SNR over the powers of speech and whole noise.
    Noise(Noise),
    /// NeMo's `noise_norm`: speech and noise are brought to one level first.
    NoiseNorm(NoiseNorm),
    /// NeMo's `white_noise`: of an absolute level.
    WhiteNoise(WhiteNoise),
    /// Lhotse's reverberation by recorded or simulated impulse responses, at the utterance's own power.
    ReverbRir(ReverbRir),
    /// NeMo's `impulse`: recorded impulse responses; the result has a peak of 1.
    Impulse(Impulse),
    /// NeMo's `gain`, in dB.
    Gain(Gain),
    /// Lhotse's volume: a factor.
    PerturbVolume(PerturbVolume),
    /// Clipping by a gain that is too high, hard or by tanh; the peak stays.
    ClipAmplitude(ClipAmplitude),
    /// Removes what is above a frequency that is drawn.
    Lowpass(Lowpass),
    /// A telephone: 8 kHz and G.711.
    Narrowband(Narrowband),
    /// Lhotse's `compress`: a lossy codec at a low rate.
    Compress(Compress),
    /// NeMo's `shift`: moves the utterance within itself.
    Shift(Shift),
    /// NeMo's `silence` before and after the utterance, which becomes longer.
    Silence(Silence),
}

/// Declares the settings of a step, with defaults.
macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                $name { $($field: $default,)* }
            }
        }
    )*};
}

settings! {
    Mix {
        /// Folder or pattern of recordings, or a manifest of JSON lines.
        path: String = String::new(),
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// SNR in dB: one number, or a range that is drawn from evenly.
        #[serde(deserialize_with = "number_or_range")]
        #[schemars(with = "NumberOrRange")]
        snr: [f64; 2] = [10.0, 20.0],
    }
    Noise {
        /// Folder or pattern of recordings, or a manifest of JSON lines.
        path: String = String::new(),
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Least SNR in dB.
        min_snr_db: f64 = 10.0,
        /// Largest SNR in dB.
        max_snr_db: f64 = 50.0,
        /// Most by which the noise is amplified, in dB.
        max_gain_db: f64 = 300.0,
    }
    NoiseNorm {
        /// Folder or pattern of recordings, or a manifest of JSON lines.
        path: String = String::new(),
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Least SNR in dB.
        min_snr_db: f64 = 10.0,
        /// Largest SNR in dB.
        max_snr_db: f64 = 50.0,
        /// SNRs to choose from, in place of the range.
        snr_samples: Vec<f64> = Vec::new(),
        /// RMS of both in dB; null: that of the utterance.
        norm_to_db: Option<f64> = None,
    }
    WhiteNoise {
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Least level in dB; whole dB are drawn.
        min_level: i32 = -90,
        /// End of the levels in dB, which is not drawn.
        max_level: i32 = -46,
    }
    ReverbRir {
        /// Folder or pattern of recordings, or a manifest of JSON lines. Left out: a room is simulated for each utterance.
        path: String = String::new(),
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Use the first 50 ms of the response alone.
        early_only: bool = false,
    }
    Impulse {
        /// Folder or pattern of recordings, or a manifest of JSON lines.
        path: String = String::new(),
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Subtract the mean of the response.
        normalize_impulse: bool = false,
        /// Begin where the response is loudest.
        shift_impulse: bool = false,
    }
    Gain {
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Least change of the level in dB.
        min_gain_dbfs: f64 = -10.0,
        /// Largest change of the level in dB.
        max_gain_dbfs: f64 = 10.0,
    }
    PerturbVolume {
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Least factor.
        scale_low: f64 = 0.125,
        /// Largest factor.
        scale_high: f64 = 2.0,
    }
    ClipAmplitude {
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Gain above full scale in dB, drawn evenly.
        gain_db: [f64; 2] = [0.0, 24.0],
        /// Share of clipped utterances that are cut off; others are bent.
        prob_hard: f64 = 0.5,
    }
    Lowpass {
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Least and largest frequency in Hz, drawn in steps of 100.
        frequencies_interval: [u32; 2] = [3500, 8000],
    }
    Narrowband {
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Codecs; one of them is drawn.
        codecs: Vec<Codec> = vec![Codec::MuLaw, Codec::ALaw],
    }
    Compress {
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Codecs; one of them is drawn. `opus` and `mp3` are possible.
        codecs: Vec<LossyCodec> = vec![LossyCodec::Opus],
        /// Least and largest level of compression. Of Opus, 0.8 is 56 kbit/s, 0.99 is 8.5 kbit/s, and 1 is 6 kbit/s. Of MP3, 0.6 is
        /// 64 kbit/s, 0.8 is 40 kbit/s, 0.95 is 16 kbit/s, and 0.99 is 8 kbit/s.
        compression_level_interval: [f64; 2] = [0.8, 0.99],
    }
    Shift {
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Least shift in milliseconds; positive is earlier.
        min_shift_ms: f64 = -5.0,
        /// Largest shift in milliseconds.
        max_shift_ms: f64 = 5.0,
    }
    Silence {
        /// Probability for an utterance.
        prob: f64 = 0.5,
        /// Least silence before, in seconds.
        min_start_silence_secs: f64 = 0.0,
        /// Largest silence before, in seconds.
        max_start_silence_secs: f64 = 0.0,
        /// Least silence after, in seconds.
        min_end_silence_secs: f64 = 0.0,
        /// Largest silence after, in seconds.
        max_end_silence_secs: f64 = 0.0,
    }
}

/// The longest silence that can be added on one side, in seconds.
const MOST_SILENCE: f64 = 60.0;

impl Step {
    /// The name in settings.
    fn name(&self) -> &'static str {
        match self {
            Step::Mix(_) => "mix",
            Step::Noise(_) => "noise",
            Step::NoiseNorm(_) => "noise_norm",
            Step::WhiteNoise(_) => "white_noise",
            Step::ReverbRir(_) => "reverb_rir",
            Step::Impulse(_) => "impulse",
            Step::Gain(_) => "gain",
            Step::PerturbVolume(_) => "perturb_volume",
            Step::ClipAmplitude(_) => "clip_amplitude",
            Step::Lowpass(_) => "lowpass",
            Step::Narrowband(_) => "narrowband",
            Step::Compress(_) => "compress",
            Step::Shift(_) => "shift",
            Step::Silence(_) => "silence",
        }
    }

    /// Where the step's recordings are; none of a step without.
    fn path(&mut self) -> Option<&mut String> {
        match self {
            Step::ReverbRir(ReverbRir { path, .. }) if path.is_empty() => None,
            Step::Mix(Mix { path, .. })
            | Step::Noise(Noise { path, .. })
            | Step::NoiseNorm(NoiseNorm { path, .. })
            | Step::ReverbRir(ReverbRir { path, .. })
            | Step::Impulse(Impulse { path, .. }) => Some(path),
            _ => None,
        }
    }

    fn prob(&self) -> f64 {
        match self {
            Step::Mix(step) => step.prob,
            Step::Noise(step) => step.prob,
            Step::NoiseNorm(step) => step.prob,
            Step::WhiteNoise(step) => step.prob,
            Step::ReverbRir(step) => step.prob,
            Step::Impulse(step) => step.prob,
            Step::Gain(step) => step.prob,
            Step::PerturbVolume(step) => step.prob,
            Step::ClipAmplitude(step) => step.prob,
            Step::Lowpass(step) => step.prob,
            Step::Narrowband(step) => step.prob,
            Step::Compress(step) => step.prob,
            Step::Shift(step) => step.prob,
            Step::Silence(step) => step.prob,
        }
    }

    /// The ranges that are drawn from: their name, ends, and the numbers that are possible.
    fn ranges(&self) -> Vec<(&'static str, [f64; 2], [f64; 2])> {
        // Beyond these, f32 has no room for signal and noise together.
        const DB: [f64; 2] = [-200.0, 200.0];
        match self {
            Step::Mix(step) => vec![("snr", step.snr, DB)],
            Step::Noise(step) => vec![("snr_db", [step.min_snr_db, step.max_snr_db], DB)],
            Step::NoiseNorm(step) => {
                let samples = step.snr_samples.iter().map(|&snr| ("snr_samples", [snr, snr], DB));
                let norm = step.norm_to_db.map(|db| ("norm_to_db", [db, db], DB));
                let range = ("snr_db", [step.min_snr_db, step.max_snr_db], DB);
                samples.chain(norm).chain([range]).collect()
            }
            Step::WhiteNoise(step) => {
                // The upper end is not drawn.
                vec![(
                    "level",
                    [f64::from(step.min_level), f64::from(step.max_level) - 1.0],
                    DB,
                )]
            }
            Step::ReverbRir(_) | Step::Impulse(_) | Step::Narrowband(_) => Vec::new(),
            Step::Compress(step) => vec![(
                "compression_level_interval",
                step.compression_level_interval,
                [0.0, 1.0],
            )],
            Step::Gain(step) => vec![("gain_dbfs", [step.min_gain_dbfs, step.max_gain_dbfs], DB)],
            Step::PerturbVolume(step) => vec![("scale", [step.scale_low, step.scale_high], [0.0, 1e6])],
            Step::ClipAmplitude(step) => vec![
                ("gain_db", step.gain_db, [0.0, 100.0]),
                ("prob_hard", [0.0, step.prob_hard], [0.0, 1.0]),
            ],
            Step::Lowpass(step) => {
                let [low, high] = step.frequencies_interval;
                vec![(
                    "frequencies_interval",
                    [f64::from(low), f64::from(high)],
                    [500.0, 8000.0],
                )]
            }
            Step::Shift(step) => vec![("shift_ms", [step.min_shift_ms, step.max_shift_ms], [-1e6, 1e6])],
            Step::Silence(step) => {
                let most = [0.0, MOST_SILENCE];
                vec![
                    (
                        "start_silence_secs",
                        [step.min_start_silence_secs, step.max_start_silence_secs],
                        most,
                    ),
                    (
                        "end_silence_secs",
                        [step.min_end_silence_secs, step.max_end_silence_secs],
                        most,
                    ),
                ]
            }
        }
    }

    fn check(&self) -> Result<(), String> {
        if self.clone().path().is_some_and(|path| path.is_empty()) {
            return Err("`path` is needed: a folder of recordings, or a manifest".into());
        }
        if !(0.0..=1.0).contains(&self.prob()) {
            return Err(format!("`prob` is {}, not a number from 0 to 1", self.prob()));
        }
        if let Step::Noise(step) = self
            && !step.max_gain_db.is_finite()
        {
            return Err("`max_gain_db` is not a number".into());
        }
        if let Step::Narrowband(step) = self
            && step.codecs.is_empty()
        {
            return Err("`codecs` is empty".into());
        }
        if let Step::Compress(step) = self
            && step.codecs.is_empty()
        {
            return Err("`codecs` is empty".into());
        }
        for (name, [low, high], [least, most]) in self.ranges() {
            let possible = least..=most;
            if !possible.contains(&low) || !possible.contains(&high) {
                return Err(format!(
                    "`{name}` reaches from {low} to {high}; {least} to {most} are possible"
                ));
            }
            if low > high {
                return Err(format!(
                    "`{name}` reaches from {low} down to {high}; the smaller number comes first"
                ));
            }
        }
        Ok(())
    }

    /// The longest silence that the step adds, in seconds.
    fn added_seconds(&self) -> f64 {
        match self {
            Step::Silence(step) if step.prob > 0.0 => step.max_start_silence_secs + step.max_end_silence_secs,
            _ => 0.0,
        }
    }
}

/// Steps as settings have them: maps of one name. By way of JSON, as serde_yaml wants a tag (`!mix`) for an enum.
pub(crate) fn steps<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Step>, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    serde_json::from_value(value).map_err(D::Error::custom)
}

/// A number, or the least and the largest one.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
enum NumberOrRange {
    Number(f64),
    Range([f64; 2]),
}

fn number_or_range<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[f64; 2], D::Error> {
    match NumberOrRange::deserialize(deserializer) {
        Ok(NumberOrRange::Number(number)) => Ok([number, number]),
        Ok(NumberOrRange::Range(range)) => Ok(range),
        Err(_) => Err(D::Error::custom("expected a number of dB, or two in a list: [10, 20]")),
    }
}

/// Checks the numbers of steps.
///
/// # Errors
/// With the number of the step, from 1, its name, and what is wrong.
pub fn check(steps: &[Step]) -> Result<(), String> {
    for (number, step) in (1..).zip(steps) {
        let named = |why| format!("step {number}, `{}`: {why}", step.name());
        step.check().map_err(named)?;
    }
    Ok(())
}

/// The most seconds by which steps make an utterance longer.
pub fn added_seconds(steps: &[Step]) -> f64 {
    steps.iter().map(Step::added_seconds).sum()
}

/// The steps with a digest of the recordings in place of each path: names, sizes and parts, not the folder. Two such lists are
/// equal where the same draws give the same signals.
///
/// # Errors
/// If there are no recordings.
pub fn identified(storage: &Storage, steps: &[Step]) -> Result<Vec<Step>, String> {
    let mut steps = steps.to_vec();
    for step in &mut steps {
        let name = step.name();
        if let Some(path) = step.path() {
            let sounds = Sounds::open(storage, path).map_err(|why| format!("`{name}`: {why}"))?;
            *path = sounds.digest(path);
        }
    }
    Ok(steps)
}

/// Random numbers of one step for one utterance.
struct Draws(SplitMix64);

impl Draws {
    fn uniform(&mut self, [low, high]: [f64; 2]) -> f64 {
        low + (high - low) * self.0.unit()
    }

    fn below(&mut self, end: usize) -> usize {
        self.0.below(end)
    }

    /// Numbers of the standard normal distribution, by Box and Muller's transform (1958), which makes two at a time.
    fn normals(&mut self) -> impl FnMut() -> f64 {
        let mut second = None;
        move || {
            if let Some(second) = second.take() {
                return second;
            }
            // The logarithm is of a number in (0, 1].
            let radius = (-2.0 * (1.0 - self.0.unit()).ln()).sqrt();
            let (sin, cos) = (TAU * self.0.unit()).sin_cos();
            second = Some(radius * sin);
            radius * cos
        }
    }
}

/// Steps with their recordings.
pub struct Augmenter {
    steps: Vec<(Step, Option<Arc<Sounds>>)>,
    /// What could not be used, and whether it was reported.
    broken: Mutex<BTreeMap<String, bool>>,
}

/// The recordings in use, by their paths.
static SOUNDS: Shared<String, Sounds> = Shared::new();

impl Augmenter {
    /// # Errors
    /// If there are no recordings where a step looks for them; with the text of the fault.
    pub fn open(storage: &Storage, steps: &[Step]) -> Result<Augmenter, String> {
        let open = |step: &Step| -> Result<_, String> {
            let mut step = step.clone();
            let sounds = match step.path() {
                Some(path) => Some(SOUNDS.get(path.clone(), || Sounds::open(storage, path))?),
                None => None,
            };
            Ok((step, sounds))
        };
        Ok(Augmenter {
            steps: steps.iter().map(open).collect::<Result<_, String>>()?,
            broken: Mutex::default(),
        })
    }

    /// The utterance as it is heard in an epoch. A step whose recording cannot be decoded leaves the signal as it is.
    ///
    /// # Errors
    /// If object storage does not give a recording: what is heard must not depend on a network.
    pub fn apply(&self, mut signal: Vec<f32>, seed: i64, epoch: u64, segment_id: &str) -> Result<Vec<f32>, AudioError> {
        if signal.is_empty() {
            return Ok(signal);
        }
        for (number, (step, sounds)) in (0u64..).zip(&self.steps) {
            let mut draws = Draws(SplitMix64::new(draw_seed(number, seed, epoch, segment_id)));
            if draws.0.unit() >= step.prob() {
                continue;
            }
            let chosen = sounds.as_ref().map(|sounds| Chosen {
                number: Cell::new(draws.below(sounds.len())),
                sounds,
            });
            if let Err(error) = step.apply(&mut signal, chosen.as_ref(), &mut draws) {
                if let AudioError::Read { path, .. } = &error
                    && is_url(path)
                {
                    return Err(error);
                }
                let path = chosen.map(|chosen| chosen.path()).unwrap_or_default();
                let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
                broken
                    .entry(format!("`{}` leaves {path} out: {error}", step.name()))
                    .or_default();
            }
        }
        Ok(signal)
    }

    /// What could not be used and was not told by an earlier call.
    pub fn newly_broken(&self) -> Vec<String> {
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        let new = broken
            .iter_mut()
            .filter_map(|(message, told)| (!std::mem::replace(told, true)).then_some(message));
        new.cloned().collect()
    }
}

fn draw_seed(step: u64, seed: i64, epoch: u64, segment_id: &str) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher
        .update(b"augment")
        .update(&step.to_le_bytes())
        .update(&seed.to_le_bytes())
        .update(&epoch.to_le_bytes())
        .update(segment_id.as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first)
}

/// A recording that was drawn.
struct Chosen<'a> {
    sounds: &'a Sounds,
    /// Of several that a step draws, the newest: the one that an error is about.
    number: Cell<usize>,
}

impl Chosen<'_> {
    fn path(&self) -> String {
        self.sounds.path(self.number.get()).display().to_string()
    }
}

impl Step {
    /// Changes the signal; an error leaves it as it is.
    fn apply(&self, signal: &mut Vec<f32>, chosen: Option<&Chosen<'_>>, draws: &mut Draws) -> Result<(), AudioError> {
        let length = signal.len();
        let sound = || chosen.ok_or_else(|| AudioError::Decode("no recording".into()));
        match self {
            Step::Mix(step) => {
                let Chosen { sounds, number } = sound()?;
                let snr = draws.uniform(step.snr);
                let speech = levels::power(signal);
                // As Lhotse's CutSet.mix with `preserve_id`: what is left is 50 ms at most.
                let filled = length.saturating_sub(SAMPLE_RATE as usize / 20);
                let mut at = 0;
                let mut tracks = Vec::new();
                while at < filled {
                    let track = sounds.piece(number.get(), filled - at, draws.0.unit())?;
                    let after = at + track.len().max(1);
                    tracks.push((track, at));
                    at = after;
                    number.set(draws.below(sounds.len()));
                }
                for (track, at) in tracks {
                    noise::mix(signal, speech, &track, at, Some(snr));
                }
                signal.truncate(length);
            }
            Step::Noise(step) => {
                let Chosen { sounds, number } = sound()?;
                let snr = draws.uniform([step.min_snr_db, step.max_snr_db]);
                let whole = sounds.whole(number.get())?;
                let factor = noise::noise_factor(levels::power(signal), levels::power(&whole), snr, step.max_gain_db);
                let (from, at) = match whole.len().checked_sub(length) {
                    Some(spare) => (draws.below(spare + 1), 0),
                    None => (0, draws.below(length - whole.len() + 1)),
                };
                noise::add(signal, &whole[from..], factor, at);
            }
            Step::NoiseNorm(step) => {
                let Chosen { sounds, number } = sound()?;
                let snr = match step.snr_samples.as_slice() {
                    [] => draws.uniform([step.min_snr_db, step.max_snr_db]),
                    samples => samples[draws.below(samples.len())],
                };
                let piece = sounds.piece(number.get(), length, draws.0.unit())?;
                let filled = noise::repeated(&piece, length, SAMPLE_RATE);
                noise::noise_norm(signal, &filled, snr, step.norm_to_db);
            }
            Step::WhiteNoise(step) => {
                let levels = usize::try_from(step.max_level.saturating_sub(step.min_level)).unwrap_or(0);
                let level = f64::from(step.min_level) + draws.below(levels) as f64;
                noise::white_noise(signal, level, draws.normals());
            }
            Step::ReverbRir(step) => {
                let response = match chosen {
                    Some(Chosen { sounds, number }) => sounds.whole(number.get())?,
                    None => random_room::impulse_response(&mut draws.0, SAMPLE_RATE).into(),
                };
                rooms::reverb_rir(signal, &response, step.early_only, SAMPLE_RATE);
            }
            Step::Impulse(step) => {
                let Chosen { sounds, number } = sound()?;
                let response = sounds.whole(number.get())?;
                rooms::impulse(signal, &response, step.normalize_impulse, step.shift_impulse);
            }
            Step::Gain(step) => {
                let gain = draws.uniform([step.min_gain_dbfs, step.max_gain_dbfs]);
                levels::scale(signal, levels::amplitude(gain));
            }
            Step::PerturbVolume(step) => {
                levels::scale(signal, draws.uniform([step.scale_low, step.scale_high]));
            }
            Step::ClipAmplitude(step) => {
                let gain = draws.uniform(step.gain_db);
                levels::clip(signal, gain, draws.0.unit() < step.prob_hard);
            }
            Step::Lowpass(step) => {
                let [low, high] = step.frequencies_interval;
                let cutoff = low + 100 * draws.below((high.saturating_sub(low) / 100) as usize + 1) as u32;
                bands::lowpass(signal, cutoff, SAMPLE_RATE)?;
            }
            Step::Narrowband(step) => {
                let codec = step.codecs[draws.below(step.codecs.len())];
                bands::narrowband(signal, codec, SAMPLE_RATE)?;
            }
            Step::Compress(step) => {
                let codec = step.codecs[draws.below(step.codecs.len())];
                let level = draws.uniform(step.compression_level_interval);
                match codec {
                    LossyCodec::Opus => compress::opus(signal, compress::opus_rate(level), SAMPLE_RATE)?,
                    LossyCodec::Mp3 => compress::mp3(signal, compress::mp3_rate(level), SAMPLE_RATE)?,
                }
            }
            Step::Shift(step) => {
                let ms = draws.uniform([step.min_shift_ms, step.max_shift_ms]);
                let samples = shift_samples(ms);
                // NeMo leaves clips alone that would be moved out of themselves.
                if samples.unsigned_abs() < length as u64 {
                    levels::shift(signal, samples);
                }
            }
            Step::Silence(step) => {
                let seconds = [
                    draws.uniform([step.min_start_silence_secs, step.max_start_silence_secs]),
                    draws.uniform([step.min_end_silence_secs, step.max_end_silence_secs]),
                ];
                let [before, after] = seconds.map(|seconds| (seconds * f64::from(SAMPLE_RATE)) as usize);
                *signal = levels::pad(signal, before, after);
            }
        }
        Ok(())
    }
}

/// Whole samples of a shift, as NeMo rounds them: down.
fn shift_samples(ms: f64) -> i64 {
    (ms * f64::from(SAMPLE_RATE) / 1000.0).floor() as i64
}
