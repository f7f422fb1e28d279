//! Log-mel features of Kaldi (`compute-fbank-feats`), as torchaudio's `compliance.kaldi.fbank` makes them: frames of 25 ms
//! each 10 ms, of 16 kHz, without padding at the edges, dither or energy; 80 bands.
//!
//! A frame: less its mean, pre-emphasis, window, padded to 512, power spectrum, triangles in mel, logarithm.

use std::f64::consts::PI;
use std::sync::Arc;

use realfft::{RealFftPlanner, RealToComplex};

use crate::error::{Error, Result};

/// Samples of a frame, and from one to the next.
pub const FRAME: usize = 400;
pub const SHIFT: usize = 160;
/// Bands of a frame.
pub const BANDS: usize = 80;

const TRANSFORM: usize = 512;
const SAMPLE_RATE: f64 = 16_000.0;
const LOWEST: f64 = 20.0;
const HIGHEST: f64 = SAMPLE_RATE / 2.0;
const PRE_EMPHASIS: f64 = 0.97;
/// Least energy of a band before the logarithm: the epsilon of f32.
const LEAST: f64 = f32::EPSILON as f64;
/// Largest size of a sample: past it, squares would leave the range of f32.
const MAX_SAMPLE: f32 = 1e9;

/// The weights of a frame's samples, symmetric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Window {
    /// `0.54 - 0.46 cos`.
    Hamming,
    /// Hann's window to the power of 0.85, Kaldi's default.
    Povey,
}

/// What makes features.
#[derive(Clone)]
pub struct Fbank {
    scale: f64,
    window: Vec<f64>,
    /// The first bin and the weights of each band.
    bands: Vec<(usize, Vec<f64>)>,
    fft: Arc<dyn RealToComplex<f64>>,
}

impl std::fmt::Debug for Fbank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fbank")
            .field("scale", &self.scale)
            .finish_non_exhaustive()
    }
}

impl Fbank {
    /// Features with samples in [-1, 1] multiplied by `scale` first.
    pub fn new(window: Window, scale: f64) -> Self {
        let weight = |at: usize| {
            let cosine = (2.0 * PI * at as f64 / (FRAME - 1) as f64).cos();
            match window {
                Window::Hamming => 0.54 - 0.46 * cosine,
                Window::Povey => (0.5 - 0.5 * cosine).powf(0.85),
            }
        };
        Self {
            scale,
            window: (0..FRAME).map(weight).collect(),
            bands: bands(),
            fft: RealFftPlanner::new().plan_fft_forward(TRANSFORM),
        }
    }

    /// The features of WeSpeaker's networks: Hamming window, samples scaled to 16-bit integers.
    pub fn wespeaker() -> Self {
        Self::new(Window::Hamming, 32_768.0)
    }

    /// The features of 3D-Speaker's networks (CAM++): Povey's window, samples in [-1, 1].
    pub fn three_d_speaker() -> Self {
        Self::new(Window::Povey, 1.0)
    }

    /// Frames of this many samples: those that fit in whole.
    pub fn frames(samples: usize) -> usize {
        if samples < FRAME {
            0
        } else {
            1 + (samples - FRAME) / SHIFT
        }
    }

    /// Features (frames, [`BANDS`]) of mono samples of 16 kHz in [-1, 1]. Computed in f64, rounded at the end. A sample
    /// that is not finite, or larger than 1e9, is an error.
    pub fn compute(&self, samples: &[f32]) -> Result<Vec<f32>> {
        if let Some(at) = samples
            .iter()
            .position(|sample| sample.is_nan() || sample.abs() > MAX_SAMPLE)
        {
            return Err(Error::Sample {
                at: at as u64,
                value: samples[at],
                limit: MAX_SAMPLE,
            });
        }
        let mut features = Vec::with_capacity(Self::frames(samples.len()) * BANDS);
        let mut wave = vec![0.0; TRANSFORM];
        let mut spectrum = self.fft.make_output_vec();
        let mut scratch = self.fft.make_scratch_vec();
        let mut power = vec![0.0; TRANSFORM / 2];
        for frame in samples.windows(FRAME).step_by(SHIFT) {
            for (wave, &sample) in wave.iter_mut().zip(frame) {
                *wave = f64::from(sample) * self.scale;
            }
            let mean = wave[..FRAME].iter().sum::<f64>() / FRAME as f64;
            // The first sample is its own predecessor.
            let mut before = wave[0] - mean;
            for (wave, weight) in wave.iter_mut().zip(&self.window) {
                let sample = *wave - mean;
                *wave = (sample - PRE_EMPHASIS * before) * weight;
                before = sample;
            }
            wave[FRAME..].fill(0.0);
            self.fft
                .process_with_scratch(&mut wave, &mut spectrum, &mut scratch)
                .map_err(|error| Error::Input(format!("Fourier transform: {error}")))?;
            for (power, bin) in power.iter_mut().zip(&spectrum) {
                *power = bin.norm_sqr();
            }
            features.extend(self.bands.iter().map(|(first, weights)| {
                let energy: f64 = weights
                    .iter()
                    .zip(&power[*first..])
                    .map(|(weight, power)| weight * power)
                    .sum();
                energy.max(LEAST).ln() as f32
            }));
        }
        Ok(features)
    }
}

/// Triangles of equal width in mel that overlap by half, over the bins below the highest frequency.
fn bands() -> Vec<(usize, Vec<f64>)> {
    let mel = |frequency: f64| 1127.0 * (1.0 + frequency / 700.0).ln();
    let (low, high) = (mel(LOWEST), mel(HIGHEST));
    let step = (high - low) / (BANDS + 1) as f64;
    let band = |band: usize| {
        let [left, center, right] = [0, 1, 2].map(|edge| low + (band + edge) as f64 * step);
        let weight = |bin: usize| {
            let mel = mel(bin as f64 * SAMPLE_RATE / TRANSFORM as f64);
            ((mel - left) / (center - left))
                .min((right - mel) / (right - center))
                .max(0.0)
        };
        let weights: Vec<f64> = (0..TRANSFORM / 2).map(weight).collect();
        let first = weights.iter().position(|weight| *weight > 0.0).unwrap_or(0);
        let end = weights
            .iter()
            .rposition(|weight| *weight > 0.0)
            .map_or(first, |last| last + 1);
        (first, weights[first..end].to_vec())
    };
    (0..BANDS).map(band).collect()
}

/// Takes from each of `features` (frames, [`BANDS`]) the mean of its band over all frames.
pub fn subtract_mean(features: &mut [f32]) {
    let mut sums = [0.0f64; BANDS];
    for frame in features.chunks_exact(BANDS) {
        for (sum, &value) in sums.iter_mut().zip(frame) {
            *sum += f64::from(value);
        }
    }
    let frames = (features.len() / BANDS) as f64;
    for frame in features.chunks_exact_mut(BANDS) {
        for (value, sum) in frame.iter_mut().zip(&sums) {
            *value = (f64::from(*value) - sum / frames) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    /// Compares with `NAME.fbank` and `NAME.fbank_centred` of a golden file. The largest distance may be 2e-3: of
    /// logarithms of small energies, which the original computes in f32; the mean 1e-4.
    fn compare(tensors: &golden::Tensors, name: &str, fbank: &Fbank, samples: &[f32]) {
        let close = |found: &[f32], what: &str| {
            let (shape, expected) = tensors.floats(&format!("{name}.{what}"));
            assert_eq!((found.len(), BANDS), (shape[0] * shape[1], shape[1]), "{name}.{what}");
            let differences: Vec<f32> = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).collect();
            let largest = differences.iter().copied().fold(0.0, f32::max);
            let mean = differences.iter().sum::<f32>() / differences.len() as f32;
            assert!(largest < 2e-3 && mean < 1e-4, "{name}.{what}: {largest}, {mean}");
        };
        let mut found = fbank.compute(samples).unwrap();
        close(&found, "fbank");
        if tensors.has(&format!("{name}.fbank_centred")) {
            subtract_mean(&mut found);
            close(&found, "fbank_centred");
        }
    }

    /// Compares all features of a file: of the samples that are beside them, or of the part of a recording that they are alike.
    /// Of the bundled file there are so many at least.
    fn compare_all(file: &str, fbank: &Fbank, bundled: usize) {
        let tensors = golden::Tensors::load(file);
        let mut compared = 0;
        for name in tensors.names() {
            let Some(name) = name.strip_suffix(".fbank") else {
                continue;
            };
            let (shape, expected) = tensors.floats(&format!("{name}.fbank"));
            let samples = match tensors.find(&format!("{name}.input")) {
                Some((_, input)) => Some(input),
                None => golden::parts(FRAME + (shape[0] - 1) * SHIFT, 1_000).find(|samples| {
                    let first = fbank.compute(&samples[..FRAME]).unwrap();
                    golden::alike(&first, &expected[..BANDS], 0.01)
                }),
            };
            let Some(samples) = samples else {
                golden::not_compared(
                    &format!("{file}, {name}"),
                    "no recording of the folder has these features",
                );
                continue;
            };
            compare(&tensors, name, fbank, &samples);
            compared += 1;
        }
        assert!(compared >= if golden::is_bundled() { bundled } else { 1 }, "{file}");
    }

    #[test]
    fn features_for_wespeaker_are_those_of_the_original() {
        compare_all("wespeaker_stages.safetensors", &Fbank::wespeaker(), 4);
    }

    #[test]
    fn features_for_campplus_are_those_of_the_original() {
        compare_all("campplus_real.safetensors", &Fbank::three_d_speaker(), 1);
    }

    #[test]
    fn a_tone_lies_in_the_band_around_it() {
        // Its energy grows by the square.
        let tone = |size: f32| -> Vec<f32> {
            (0..FRAME)
                .map(|at| size * (2.0 * std::f32::consts::PI * 1000.0 * at as f32 / 16_000.0).sin())
                .collect()
        };
        let [quiet, loud] = [0.1, 0.2].map(|size| Fbank::three_d_speaker().compute(&tone(size)).unwrap());
        let peak = |features: &[f32]| (0..BANDS).max_by(|a, b| features[*a].total_cmp(&features[*b])).unwrap();
        let mel = |frequency: f64| 1127.0 * (1.0 + frequency / 700.0).ln();
        let step = (mel(HIGHEST) - mel(LOWEST)) / (BANDS + 1) as f64;
        let center = (mel(1000.0) - mel(LOWEST)) / step - 1.0;
        assert!((peak(&loud) as f64 - center).abs() <= 1.0, "{} {center}", peak(&loud));
        assert!((loud[peak(&loud)] - quiet[peak(&loud)] - 4f32.ln()).abs() < 1e-4);
    }

    #[test]
    fn only_whole_frames_count_and_bad_samples_are_refused() {
        let fbank = Fbank::wespeaker();
        for (samples, frames) in [(0, 0), (399, 0), (400, 1), (559, 1), (560, 2)] {
            let found = fbank.compute(&vec![0.0; samples]).unwrap();
            assert_eq!((found.len(), Fbank::frames(samples)), (frames * BANDS, frames));
            assert!(found.iter().all(|value| (f64::from(*value) - LEAST.ln()).abs() < 1e-5));
        }
        let mut samples = vec![0.0; 500];
        samples[450] = f32::INFINITY;
        assert!(matches!(fbank.compute(&samples), Err(Error::Sample { at: 450, .. })));
        subtract_mean(&mut []);
    }
}
