//! Augments a spoken clip: reverberation, silence around it, noise, level.

use super::random::Random;

/// Sample rate of all clips, in Hz.
pub const RATE: u32 = 16_000;
/// Below this share of full scale a sample counts as silence.
const SILENCE: f32 = 0.004;
/// Kept of the silence before the first and after the last sound, in seconds.
const KEPT: [f64; 2] = [0.02, 0.04];
/// Reflections of a room, per second. That many of one size and random sign sound like noise.
const REFLECTIONS: f64 = 1_500.0;
/// When the first reflection comes, in seconds.
const FIRST_REFLECTION: f64 = 0.003;
/// Silence before and after the tone in a pause, in seconds.
const AROUND_TONE: f64 = 0.05;
/// How long a tone takes to reach its level, and to fall, in seconds.
const TONE_RAMP: f64 = 0.01;

/// The augmentation parameters of one clip.
#[derive(Clone, Debug, PartialEq)]
pub struct Scene {
    /// Of the loudest sample, in dB below (that is, negative) full scale.
    pub level: f64,
    /// Silence before and after, in seconds.
    pub silence: [f64; 2],
    /// Shortest clip, in seconds; padded with silence.
    pub shortest: f64,
    pub noise: Option<Noise>,
    pub room: Option<Room>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Noise {
    /// Power of the speech to that of the noise, in dB.
    pub ratio: f64,
    /// 0 for white, 1 for pink.
    pub colour: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Room {
    /// Until the reverberation has lost 60 dB, in seconds.
    pub decay: f64,
    /// Energy of the reverberation to that of the direct sound, in dB.
    pub level: f64,
}

/// Makes a clip of spoken sound at [`RATE`]; none if there is no sound in it. Full scale is 1 before and after.
pub fn stage(spoken: &[f32], scene: &Scene, random: &mut Random) -> Option<Vec<f32>> {
    let spoken = sounding(spoken)?;
    let speech = match &scene.room {
        Some(room) => in_room(spoken, room, random),
        None => spoken.to_vec(),
    };
    let loudness = power(&speech);
    let [before, after] = scene.silence.map(samples_in);
    let length = (before + speech.len() + after).max(samples_in(scene.shortest));
    let mut clip = vec![0.0; length];
    for (to, from) in clip.iter_mut().skip(before).zip(&speech) {
        *to = *from;
    }
    if let Some(noise) = &scene.noise {
        add_noise(&mut clip, loudness, noise, random);
    }
    let peak = clip.iter().fold(0.0f32, |peak, sample| peak.max(sample.abs()));
    let factor = (decibels(scene.level).min(1.0) / f64::from(peak)) as f32;
    clip.iter_mut().for_each(|sample| *sample *= factor);
    Some(clip)
}

/// What is between two sentences.
#[derive(Clone, Debug, PartialEq)]
pub struct Pause {
    pub seconds: f64,
    pub tone: Option<Tone>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Tone {
    /// In Hz.
    pub frequency: f64,
    /// Power of the tone to that of the speech before it, in dB.
    pub level: f64,
}

/// Adds a pause and a sentence to the sentences that are spoken already. The power of the sentence becomes `level` dB
/// of theirs. False, and nothing is added, if there is no sound in it.
pub fn join(spoken: &mut Vec<f32>, pause: &Pause, sentence: &[f32], level: f64) -> bool {
    let (Some(sentence), Some(sounding)) = (sounding(sentence), sounding(spoken)) else {
        return false;
    };
    let loudness = power(sounding);
    let begin = spoken.len();
    spoken.resize(begin + samples_in(pause.seconds), 0.0);
    if let Some(tone) = &pause.tone {
        add_tone(&mut spoken[begin..], loudness, tone);
    }
    let factor = ((loudness / power(sentence)).sqrt() * decibels(level)) as f32;
    spoken.extend(sentence.iter().map(|sample| sample * factor));
    true
}

/// Adds a tone in the middle of a pause, [`AROUND_TONE`] of which stay silent at each end. It is a triangle wave, which
/// needs no sine: those differ in their last bit between machines.
fn add_tone(pause: &mut [f32], loudness: f64, tone: &Tone) {
    /// The square of a triangle wave of height 1 has this mean.
    const POWER: f64 = 1.0 / 3.0;
    let silent = samples_in(AROUND_TONE);
    let Some(length) = pause.len().checked_sub(2 * silent).filter(|length| *length > 0) else {
        return;
    };
    let height = (loudness / POWER).sqrt() * decibels(tone.level);
    let ramp = samples_in(TONE_RAMP).clamp(1, length.div_ceil(2)) as f64;
    for (number, sample) in pause[silent..silent + length].iter_mut().enumerate() {
        let phase = (number as f64 * tone.frequency / f64::from(RATE)).fract();
        let wave = 4.0 * (phase - 0.5).abs() - 1.0;
        let edge = number.min(length - 1 - number) as f64 + 1.0;
        *sample = (height * wave * (edge / ramp).min(1.0)) as f32;
    }
}

/// Samples as numbers of 16 bits, in the upper half of 32 as [`flow_audio::flac::Samples`] holds them.
pub fn quantized(clip: &[f32]) -> Vec<i32> {
    let number = |sample: &f32| (sample.clamp(-1.0, 1.0) * 32_767.0).round() as i32;
    clip.iter().map(|sample| number(sample) << 16).collect()
}

/// The part that is not silent, with a margin.
fn sounding(signal: &[f32]) -> Option<&[f32]> {
    let loud = |sample: &f32| sample.abs() > SILENCE;
    let first = signal.iter().position(loud)?;
    let last = signal.iter().rposition(loud)?;
    let [before, after] = KEPT.map(samples_in);
    signal.get(first.saturating_sub(before)..(last + after).min(signal.len()))
}

/// The sound with the reverberation of a room, which goes on after it.
fn in_room(signal: &[f32], room: &Room, random: &mut Random) -> Vec<f32> {
    let reflections = reflections(room, random);
    let tail = reflections.last().map_or(0, |(delay, _)| *delay);
    let mut out = vec![0.0f32; signal.len() + tail];
    out[..signal.len()].copy_from_slice(signal);
    for (delay, factor) in reflections {
        for (to, from) in out[delay..].iter_mut().zip(signal) {
            *to += factor * from;
        }
    }
    out
}

/// Delays in samples, ascending, and factors: single reflections at random places of an even grid, with random sign,
/// which lose 60 dB until the end. Their energy together is that of the room's level.
fn reflections(room: &Room, random: &mut Random) -> Vec<(usize, f32)> {
    let count = ((room.decay - FIRST_REFLECTION).max(0.0) * REFLECTIONS) as usize;
    let mut found: Vec<(usize, f64)> = Vec::with_capacity(count);
    for number in 0..count {
        let at = FIRST_REFLECTION + (number as f64 + random.unit()) / REFLECTIONS;
        let sign = if random.unit() < 0.5 { -1.0 } else { 1.0 };
        found.push((samples_in(at), sign * decibels(-60.0 * at / room.decay)));
    }
    let energy: f64 = found.iter().map(|(_, factor)| factor * factor).sum();
    let scale = decibels(room.level) / energy.max(f64::MIN_POSITIVE).sqrt();
    found
        .into_iter()
        .map(|(delay, factor)| (delay, (factor * scale) as f32))
        .collect()
}

/// Adds noise over the whole clip, of a power that is `ratio` below `loudness`.
fn add_noise(clip: &mut [f32], loudness: f64, noise: &Noise, random: &mut Random) {
    let white: Vec<f32> = (0..clip.len()).map(|_| random.normal() as f32).collect();
    let pink = pink(&white);
    let (of_white, of_pink) = (
        (1.0 - noise.colour) / power(&white).sqrt(),
        noise.colour / power(&pink).sqrt(),
    );
    let both = white.iter().zip(&pink);
    let mixed: Vec<f32> = both
        .map(|(white, pink)| (of_white * f64::from(*white) + of_pink * f64::from(*pink)) as f32)
        .collect();
    let factor = (loudness / power(&mixed)).sqrt() * decibels(-noise.ratio);
    for (sample, noise) in clip.iter_mut().zip(&mixed) {
        *sample += (factor * f64::from(*noise)) as f32;
    }
}

/// White noise made pink, 3 dB less with each octave, by the three poles and the direct part of Paul Kellet's filter.
fn pink(white: &[f32]) -> Vec<f32> {
    const POLES: [(f64, f64); 3] = [(0.99765, 0.099_046), (0.963, 0.296_516_4), (0.57, 1.052_691_3)];
    const DIRECT: f64 = 0.1848;
    let mut states = [0.0f64; 3];
    let one = |sample: &f32| {
        let sample = f64::from(*sample);
        let mut sum = DIRECT * sample;
        for (state, (pole, gain)) in states.iter_mut().zip(POLES) {
            *state = pole * *state + gain * sample;
            sum += *state;
        }
        sum as f32
    };
    white.iter().map(one).collect()
}

/// Mean of the squares; never 0, so that it can be divided by.
fn power(signal: &[f32]) -> f64 {
    let sum: f64 = signal
        .iter()
        .map(|sample| f64::from(*sample) * f64::from(*sample))
        .sum();
    (sum / signal.len().max(1) as f64).max(f64::MIN_POSITIVE)
}

/// The factor of an amplitude.
fn decibels(level: f64) -> f64 {
    10f64.powf(level / 20.0)
}

/// Durations are settings, at most minutes.
fn samples_in(seconds: f64) -> usize {
    (seconds * f64::from(RATE)).round() as usize
}

#[cfg(test)]
#[path = "sound_tests.rs"]
mod tests;
