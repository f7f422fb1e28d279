//! Adds noise to speech.
//!
//! The rules are those of NeMo (`nemo/collections/asr/parts/preprocessing/perturb.py`) and of Lhotse (`CutSet.mix`), whose
//! results they give for the same draws.

use super::levels::{amplitude, power};

/// `signal + normal * 10^(level_db / 20)`: NeMo's `white_noise`. The level is absolute.
pub fn white_noise(signal: &mut [f32], level_db: f64, mut normal: impl FnMut() -> f64) {
    let factor = amplitude(level_db);
    for x in signal {
        *x = (f64::from(*x) + normal() * factor) as f32;
    }
}

/// The factor of NeMo's noise: that of an SNR over the powers of all samples, at most `max_gain_db`. Silent noise adds nothing,
/// and nothing is added to silence.
pub fn noise_factor(signal_power: f64, noise_power: f64, snr_db: f64, max_gain_db: f64) -> f64 {
    if signal_power == 0.0 || noise_power == 0.0 {
        return 0.0;
    }
    let gain = 10.0 * (signal_power / noise_power).log10() - snr_db;
    amplitude(gain.min(max_gain_db))
}

/// Adds `noise * factor` from the sample `at` on, as far as the signal goes.
pub fn add(signal: &mut [f32], noise: &[f32], factor: f64, at: usize) {
    let rest = signal.get_mut(at..).unwrap_or_default();
    for (x, noise) in rest.iter_mut().zip(noise) {
        *x = (f64::from(*x) + f64::from(*noise) * factor) as f32;
    }
}

/// NeMo's `noise_norm`: signal and noise are each brought to an RMS of `norm_to_db` (none: the signal's own), the noise then
/// `snr_db` lower. An RMS of 0 counts as 0.01. Noise that is shorter than the signal has been repeated by [`repeated`].
pub fn noise_norm(signal: &mut [f32], noise: &[f32], snr_db: f64, norm_to_db: Option<f64>) {
    let rms = |signal: &[f32]| match power(signal).sqrt() {
        0.0 => 0.01,
        rms => rms,
    };
    let (of_signal, of_noise) = (rms(signal), rms(noise));
    let wanted = norm_to_db.map_or(of_signal, amplitude);
    let factors = (wanted / of_signal, wanted / of_noise * amplitude(-snr_db));
    for (x, noise) in signal.iter_mut().zip(noise) {
        *x = (f64::from(*x) * factors.0 + f64::from(*noise) * factors.1) as f32;
    }
}

/// Noise that fills `length` samples: doubled, with a quarter of a second of silence between, until it does.
pub fn repeated(noise: &[f32], length: usize, sample_rate: u32) -> Vec<f32> {
    let mut filled = noise.to_vec();
    while filled.len() < length && !noise.is_empty() {
        let once = filled.clone();
        filled.resize(filled.len() + sample_rate as usize / 4, 0.0);
        filled.extend(once);
    }
    filled.resize(length, 0.0);
    filled
}

/// Lhotse's mix: adds a track from the sample `at` on, at an SNR over the power of the speech (padding not counted) and that of
/// the track. Where one of them is silent, or there is no SNR, the track is added as it is. The result is as long as the longer
/// of the two.
pub fn mix(signal: &mut Vec<f32>, speech_power: f64, track: &[f32], at: usize, snr_db: Option<f64>) {
    let track_power = power(track);
    let factor = match snr_db {
        Some(snr) if speech_power > 0.0 && track_power > 0.0 => {
            (speech_power * 10f64.powf(-snr / 10.0) / track_power).sqrt()
        }
        _ => 1.0,
    };
    signal.resize(signal.len().max(at + track.len()), 0.0);
    add(signal, track, factor, at);
}
