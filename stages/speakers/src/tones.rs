//! Detects steady tones (beeps, dial and ringing tones, notes), which networks for voice activity may classify as
//! speech.

use std::sync::Arc;

use realfft::num_complex::Complex;
use realfft::{RealFftPlanner, RealToComplex};

use crate::error::{Error, Result};
use crate::silero::WINDOW;

/// Samples of a spectrum, whose middle is that of a window.
const SPECTRUM: usize = 2 * WINDOW;
/// A tone and its overtones: at most this many peaks, each with this many bins at either side (the main lobe of a Hann window, and one).
const PEAKS: usize = 3;
const LOBE: usize = 3;
/// Least share of the energy that is in the peaks, and least cosine between the amplitudes of a window and those of the one
/// before. In six minutes of synthetic speech of the golden recordings no five windows in a row had as much and were as alike;
/// of 1,188 windows of notes between sentences, 1,025 did.
const LEAST_SHARE: f32 = 0.995;
const LEAST_COSINE: f32 = 0.995;
/// A tone lasts for this many windows (0.16 s) at least.
const LEAST_WINDOWS: usize = 5;
/// Where one tone follows another within this many windows, what is between belongs to them.
const MOST_BETWEEN: usize = 3;
/// Spectra of less energy are silence: amplitudes of some 1e-5.
const SILENCE: f32 = 1e-5;

/// Finds steady tones, window by window of [`WINDOW`] samples, as samples come.
pub struct ToneDetector {
    transform: Arc<dyn RealToComplex<f32>>,
    hann: Vec<f32>,
    /// The samples from half a window before the next window; zeros before the first.
    pending: Vec<f32>,
    /// Amplitudes of the window before, if nearly all of it lay in few peaks.
    before: Option<Vec<f32>>,
    /// Whether each window so far is like the one before it.
    alike: Vec<bool>,
    samples: usize,
}

/// What [`ToneDetector::resume`] needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ToneState {
    /// Samples that wait.
    pub pending: Vec<f32>,
    /// Amplitudes of the last window that was looked at, if nearly all of it lay in few peaks.
    pub before: Option<Vec<f32>>,
    /// Whether each window so far is like the one before it.
    pub alike: Vec<bool>,
    /// Samples that were taken.
    pub samples: usize,
}

impl Default for ToneDetector {
    fn default() -> Self {
        let hann = |i: usize| (0.5 - 0.5 * (std::f64::consts::TAU * i as f64 / SPECTRUM as f64).cos()) as f32;
        Self {
            transform: RealFftPlanner::new().plan_fft_forward(SPECTRUM),
            hann: (0..SPECTRUM).map(hann).collect(),
            pending: vec![0.0; WINDOW / 2],
            before: None,
            alike: Vec::new(),
            samples: 0,
        }
    }
}

impl ToneDetector {
    /// A detector that goes on as one did whose [`ToneDetector::state`] this was.
    ///
    /// # Errors
    /// If it is no state.
    pub fn resume(state: ToneState) -> Result<Self> {
        let bins = SPECTRUM / 2 + 1;
        let is_whole = state.before.as_ref().is_none_or(|before| before.len() == bins);
        // Half a window of zeros comes before the first sample.
        let taken = (state.samples as u64).saturating_add(WINDOW as u64 / 2);
        let seen = (state.alike.len() as u64).saturating_mul(WINDOW as u64);
        if !is_whole || state.pending.len() >= SPECTRUM || seen.checked_add(state.pending.len() as u64) != Some(taken) {
            return Err(Error::Input("this is no state of the detector of tones".into()));
        }
        Ok(Self {
            pending: state.pending,
            before: state.before,
            alike: state.alike,
            samples: state.samples,
            ..Self::default()
        })
    }

    /// What is known so far, with the windows from this one on.
    pub fn state(&self, from: usize) -> ToneState {
        ToneState {
            pending: self.pending.clone(),
            before: self.before.clone(),
            alike: self.alike.get(from..).unwrap_or_default().to_vec(),
            samples: self.samples,
        }
    }

    /// Takes samples of 16 kHz.
    ///
    /// # Errors
    /// If one is not a finite number.
    pub fn feed(&mut self, samples: &[f32]) -> Result<()> {
        if samples.iter().any(|sample| !sample.is_finite()) {
            return Err(Error::Input("a sample is not a finite number".into()));
        }
        self.samples += samples.len();
        self.pending.extend_from_slice(samples);
        let mut first = 0;
        while self.pending.len() - first >= SPECTRUM {
            self.look_at(first);
            first += WINDOW;
        }
        self.pending.drain(..first);
        Ok(())
    }

    /// For each window of the samples, the last one perhaps shorter, whether it is part of a steady tone.
    pub fn finish(mut self) -> Vec<bool> {
        let windows = self.samples.div_ceil(WINDOW);
        while self.alike.len() < windows {
            self.pending.resize(self.pending.len().max(SPECTRUM), 0.0);
            self.look_at(0);
            self.pending.drain(..WINDOW);
        }
        tones(&self.alike)
    }

    fn look_at(&mut self, first: usize) {
        let mut wave: Vec<f32> = self.pending[first..first + SPECTRUM]
            .iter()
            .zip(&self.hann)
            .map(|(sample, weight)| sample * weight)
            .collect();
        let mut spectrum = self.transform.make_output_vec();
        // The lengths fit.
        let done = self.transform.process(&mut wave, &mut spectrum);
        debug_assert!(done.is_ok());
        let energy: Vec<f32> = spectrum.iter().map(Complex::norm_sqr).collect();
        let amplitudes = in_few_peaks(&energy).then(|| energy.iter().map(|value| value.sqrt()).collect::<Vec<f32>>());
        let alike = match (&self.before, &amplitudes) {
            (Some(before), Some(now)) => cosine(before, now) >= LEAST_COSINE,
            _ => false,
        };
        self.alike.push(alike);
        self.before = amplitudes;
    }
}

fn in_few_peaks(energy: &[f32]) -> bool {
    let all: f32 = energy.iter().sum();
    if all < SILENCE {
        return false;
    }
    let mut rest = energy.to_vec();
    let mut peaks = 0.0;
    for _ in 0..PEAKS {
        let highest = (0..rest.len())
            .max_by(|&a, &b| rest[a].total_cmp(&rest[b]))
            .unwrap_or(0);
        let lobe = highest.saturating_sub(LOBE)..(highest + LOBE + 1).min(rest.len());
        peaks += rest[lobe.clone()].iter().sum::<f32>();
        rest[lobe].fill(0.0);
    }
    peaks >= LEAST_SHARE * all
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    product(a, b) / (product(a, a) * product(b, b)).sqrt()
}

/// Which windows are part of a tone, given which are like the one before.
fn tones(alike: &[bool]) -> Vec<bool> {
    let mut tones = vec![false; alike.len()];
    let mut end_of_last: Option<usize> = None;
    let mut window = 0;
    while window < alike.len() {
        let length = alike[window..].iter().take_while(|alike| **alike).count();
        // The window that the first one is like is part of the tone, too.
        if length + 1 >= LEAST_WINDOWS {
            let first = window.saturating_sub(1);
            let from = end_of_last.filter(|&end| first <= end + MOST_BETWEEN).unwrap_or(first);
            tones[from..window + length].fill(true);
            end_of_last = Some(window + length);
        }
        window += length + 1;
    }
    tones
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    fn detect(samples: &[f32], block: usize) -> Vec<bool> {
        let mut detector = ToneDetector::default();
        for block in samples.chunks(block) {
            detector.feed(block).unwrap();
        }
        detector.finish()
    }

    /// `seconds` of a tone with two overtones, fading.
    fn tone(frequency: f32, seconds: f32) -> Vec<f32> {
        let sample = |i: usize| {
            let t = i as f32 / 16_000.0;
            let partial = |n: f32| (std::f32::consts::TAU * n * frequency * t).sin() / (n * n);
            0.3 * (-2.0 * t).exp() * (partial(1.0) + partial(2.0) + partial(3.0))
        };
        (0..(16_000.0 * seconds) as usize).map(sample).collect()
    }

    #[test]
    fn tones_are_found_and_speech_is_none() {
        let melody = [tone(440.0, 0.5), tone(523.0, 0.4), vec![0.0; 16_000], tone(350.0, 0.1)].concat();
        let found = detect(&melody, 700);
        assert_eq!(found.len(), melody.len().div_ceil(WINDOW));
        // 0.9 s are 28 windows; at the ends a spectrum reaches into what is beside.
        let first: Vec<bool> = found[1..27].to_vec();
        assert!(first.iter().filter(|tone| **tone).count() >= 24, "{first:?}");
        assert!(!found[30..].contains(&true), "too short a tone, and silence");
        for (name, samples) in golden::recordings() {
            // A vowel that is held may be one: of other recordings than the bundled ones, too, no more than that.
            let found = detect(&samples, 16_000).iter().filter(|tone| **tone).count();
            assert!(found * WINDOW * 100 <= samples.len(), "{name}: {found} windows");
        }
        assert!(ToneDetector::default().feed(&[f32::NAN]).is_err());
        assert!(ToneDetector::default().finish().is_empty());
    }

    #[test]
    fn blocks_do_not_matter() {
        let samples = [tone(440.0, 0.6), vec![0.0; 333], tone(600.0, 0.3)].concat();
        let whole = detect(&samples, samples.len());
        assert!(whole.contains(&true));
        for block in [1, 17, 512, 1000] {
            assert_eq!(detect(&samples, block), whole);
        }
    }
}
