//! Log-mel features, as NeMo's `AudioToMelSpectrogramPreprocessor` makes them. Always in f32, but for the Fourier
//! transform: in quiet bands its rounding in f32 is the whole difference between two libraries, and f64 halves it.

mod on_device;
mod stream;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use flow_kernels::Noise;
use flow_kernels::device::{PerDevice, to_device};
use flow_kernels::log_mel::{Band, FrontEnd};
use rayon::prelude::*;
use realfft::num_complex::Complex;
use realfft::{RealFftPlanner, RealToComplex};

use crate::config::PreprocessorConfig;
use crate::error::{Error, Result};
use crate::parameters::ParameterBuilder;

pub use stream::{LogMelStream, Moments, Normalisation};

/// Added before the logarithm.
const LOG_GUARD: f32 = 1.0 / (1u32 << 24) as f32;
/// Added to the standard deviation.
const DEVIATION_GUARD: f32 = 1e-5;

/// Log-mel features of a batch: (batch, bands, frames) row-major. Frames at or past an utterance's length are 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Features {
    pub values: Vec<f32>,
    pub batch: usize,
    pub bands: usize,
    /// Frames of the tensor: 1 + samples of the longest signal / hop.
    pub frames: usize,
    /// Valid frames of each utterance: its samples / hop, rounded down.
    pub lengths: Vec<usize>,
}

impl Features {
    /// As a tensor (batch, bands, frames) of `dtype` on `device`.
    pub fn tensor(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let shape = (self.batch, self.bands, self.frames);
        let values = Tensor::from_slice(&self.values, shape, &Device::Cpu)?.to_dtype(dtype)?;
        Ok(to_device(&values, device)?)
    }
}

/// The logarithm of a band's energy in a power spectrum.
fn band_log_mel(band: &Band, power: &[f32]) -> f32 {
    let weighted = band.weights.iter().zip(&power[band.first..]);
    let sum: f32 = weighted.map(|(weight, power)| weight * power).sum();
    (sum + LOG_GUARD).ln()
}

/// Buffers of the Fourier transform, which serve one frame after another.
struct Spectrum {
    buffer: Vec<f64>,
    spectrum: Vec<Complex<f64>>,
    scratch: Vec<Complex<f64>>,
    power: Vec<f32>,
}

impl Spectrum {
    fn new(front_end: &LogMel) -> Self {
        let spectrum = front_end.fft.make_output_vec();
        Spectrum {
            buffer: vec![0.0; front_end.n_fft],
            scratch: front_end.fft.make_scratch_vec(),
            power: vec![0.0; spectrum.len()],
            spectrum,
        }
    }

    /// The power spectrum of frame `t` of a signal after pre-emphasis, of which `emphasised` is the part that begins at the
    /// sample `from`; what is before and after it counts as 0.
    fn power(&mut self, front_end: &LogMel, emphasised: &[f32], from: usize, t: usize) -> Result<&[f32]> {
        let window = &front_end.window;
        self.buffer.fill(0.0);
        // The window is centred in the FFT's input, whose middle is at sample `t * hop`.
        let margin = (front_end.n_fft - window.len()) / 2;
        // Index of the window's first sample, and how many of its samples are before the signal.
        let start = (t * front_end.hop + margin) as isize - (front_end.n_fft / 2) as isize - from as isize;
        let skipped = start.min(0).unsigned_abs().min(window.len());
        let first = start.max(0) as usize;
        let samples = emphasised.get(first..).unwrap_or(&[]);
        let inside = &mut self.buffer[margin + skipped..margin + window.len()];
        for ((value, &sample), &weight) in inside.iter_mut().zip(samples).zip(&window[skipped..]) {
            *value = f64::from(sample * weight);
        }
        front_end
            .fft
            .process_with_scratch(&mut self.buffer, &mut self.spectrum, &mut self.scratch)
            .map_err(|error| Error::Input(format!("fourier transform: {error}")))?;
        for (power, bin) in self.power.iter_mut().zip(&self.spectrum) {
            // NeMo takes the root and squares it again.
            let magnitude = (bin.re * bin.re + bin.im * bin.im).sqrt() as f32;
            *power = magnitude * magnitude;
        }
        Ok(&self.power)
    }
}

/// The front end: pre-emphasis, windowed power spectrum, mel bands, logarithm, normalisation per band and utterance.
#[derive(Clone)]
pub struct LogMel {
    hop: usize,
    n_fft: usize,
    preemphasis: f32,
    dither: f32,
    normalized: bool,
    window: Vec<f32>,
    bands: Vec<Band>,
    fft: Arc<dyn RealToComplex<f64>>,
    /// Made when features are first computed on a device.
    on_devices: Arc<PerDevice<FrontEnd>>,
}

impl std::fmt::Debug for LogMel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogMel")
            .field("hop", &self.hop)
            .field("n_fft", &self.n_fft)
            .field("bands", &self.bands.len())
            .finish_non_exhaustive()
    }
}

impl LogMel {
    /// The front end with window and filter bank from the loaded tensors `preprocessor.featurizer.{window,fb}`, or
    /// computed where there are none.
    pub fn new(config: &PreprocessorConfig, builder: &mut ParameterBuilder) -> Result<Self> {
        let length = (config.window_size * config.sample_rate as f64) as usize;
        let bins = config.n_fft / 2 + 1;
        let window = builder.fixed(
            "preprocessor.featurizer.window",
            &[length],
            hann(length).into_iter().map(f64::from).collect(),
        )?;
        let bank = builder.fixed(
            "preprocessor.featurizer.fb",
            &[1, config.features, bins],
            mel_filter_bank(config).into_iter().map(f64::from).collect(),
        )?;
        let values = |id| -> Result<Vec<f32>> { Ok(builder.get(id).flatten_all()?.to_dtype(DType::F32)?.to_vec1()?) };
        let bands = values(bank)?
            .chunks_exact(bins)
            .map(|row| {
                let first = row.iter().position(|w| *w != 0.0).unwrap_or(0);
                let end = row.iter().rposition(|w| *w != 0.0).map_or(first, |last| last + 1);
                Band {
                    first,
                    weights: row[first..end].to_vec(),
                }
            })
            .collect();
        Ok(Self {
            hop: (config.window_stride * config.sample_rate as f64) as usize,
            n_fft: config.n_fft,
            preemphasis: config.preemphasis as f32,
            dither: config.dither as f32,
            normalized: config.normalized,
            window: values(window)?,
            bands,
            fft: RealFftPlanner::new().plan_fft_forward(config.n_fft),
            on_devices: Arc::default(),
        })
    }

    /// Frames that are valid for a signal of this many samples.
    pub fn frames(&self, samples: usize) -> usize {
        samples / self.hop
    }

    /// Features of a batch of signals (mono, in [-1, 1]). Dither is added with `noise` only.
    pub fn compute(&self, signals: &[&[f32]], noise: Option<&mut Noise>) -> Result<Features> {
        if signals.is_empty() {
            return Err(Error::Input("a batch of signals is empty".into()));
        }
        let longest = signals.iter().map(|signal| signal.len()).max().unwrap_or(0);
        let frames = 1 + longest / self.hop;
        let bands = self.bands.len();
        let dither = self.dither_seed(noise);
        let mut values = vec![0.0; signals.len() * bands * frames];
        values
            .par_chunks_mut(bands * frames)
            .zip(signals)
            .enumerate()
            .try_for_each(|(index, (out, signal))| {
                let noise = dither.map(|seed| dither_of(seed, index));
                self.utterance(signal, out, frames, noise)
            })?;
        Ok(Features {
            values,
            batch: signals.len(),
            bands,
            frames,
            lengths: signals.iter().map(|signal| self.frames(signal.len())).collect(),
        })
    }

    /// The seed of a batch's dither, if there is any.
    fn dither_seed(&self, noise: Option<&mut Noise>) -> Option<u64> {
        noise.filter(|_| self.dither > 0.0).map(Noise::bits)
    }

    /// Features of one signal into `out`, (bands, frames), which is zero.
    fn utterance(&self, signal: &[f32], out: &mut [f32], frames: usize, noise: Option<Noise>) -> Result<()> {
        let valid = self.frames(signal.len());
        let emphasised = self.emphasise(signal, noise);
        let mut spectrum = Spectrum::new(self);
        for t in 0..valid {
            let power = spectrum.power(self, &emphasised, 0, t)?;
            for (band, row) in self.bands.iter().zip(out.chunks_exact_mut(frames)) {
                row[t] = band_log_mel(band, power);
            }
        }
        if !self.normalized {
            return Ok(());
        }
        for rows in out.chunks_mut(TOGETHER * frames) {
            let mut rows: Vec<&mut [f32]> = rows.chunks_exact_mut(frames).map(|row| &mut row[..valid]).collect();
            match <&mut [&mut [f32]; TOGETHER]>::try_from(&mut rows[..]) {
                Ok(rows) => normalise(rows),
                Err(_) => rows.into_iter().for_each(|row| normalise(&mut [row])),
            }
        }
        Ok(())
    }

    fn emphasise(&self, signal: &[f32], noise: Option<Noise>) -> Vec<f32> {
        let Some(mut noise) = noise else {
            return self.differences(signal);
        };
        let mut noisy = signal.to_vec();
        for samples in noisy.chunks_mut(2) {
            let (first, second) = noise.normal_pair();
            for (sample, normal) in samples.iter_mut().zip([first, second]) {
                *sample += self.dither * normal as f32;
            }
        }
        self.differences(&noisy)
    }

    /// Each sample less a part of the one before it.
    fn differences(&self, signal: &[f32]) -> Vec<f32> {
        let mut out = Vec::with_capacity(signal.len());
        out.extend(signal.first());
        out.extend(signal.windows(2).map(|pair| pair[1] - self.preemphasis * pair[0]));
        out
    }
}

/// The dither of an utterance of a batch.
fn dither_of(seed: u64, index: usize) -> Noise {
    Noise::new(seed.wrapping_add(index as u64))
}

/// Rows that are normalised together: their sums are independent chains of additions.
const TOGETHER: usize = 8;

/// Rows of one length to mean 0 and deviation 1 (with n - 1; a deviation of one frame counts as 0).
fn normalise<const ROWS: usize>(rows: &mut [&mut [f32]; ROWS]) {
    let length = rows[0].len();
    let n = length as f64;
    let mut sums = [0.0f64; ROWS];
    for t in 0..length {
        for (sum, row) in sums.iter_mut().zip(rows.iter()) {
            *sum += f64::from(row[t]);
        }
    }
    let means = sums.map(|sum| (sum / n) as f32);
    let mut squares = [0.0f64; ROWS];
    for t in 0..length {
        for ((square, row), mean) in squares.iter_mut().zip(rows.iter()).zip(means) {
            *square += f64::from(row[t] - mean).powi(2);
        }
    }
    for ((row, mean), square) in rows.iter_mut().zip(means).zip(squares) {
        let deviation = if length > 1 {
            (square / (n - 1.0)).sqrt() as f32
        } else {
            0.0
        };
        for x in row.iter_mut() {
            *x = (*x - mean) / (deviation + DEVIATION_GUARD);
        }
    }
}

/// The symmetric Hann window, computed in f32 as torch does.
fn hann(length: usize) -> Vec<f32> {
    let step = (std::f64::consts::TAU / (length.max(2) - 1) as f64) as f32;
    (0..length).map(|n| 0.5 - 0.5 * (n as f32 * step).cos()).collect()
}

/// Slaney's mel scale: linear below 1 kHz, logarithmic above.
fn mel_to_hertz(mel: f64) -> f64 {
    let linear = 200.0 / 3.0;
    if mel < 15.0 {
        mel * linear
    } else {
        1000.0 * ((mel - 15.0) * (6.4f64.ln() / 27.0)).exp()
    }
}

fn hertz_to_mel(hertz: f64) -> f64 {
    if hertz < 1000.0 {
        hertz * 3.0 / 200.0
    } else {
        15.0 + (hertz / 1000.0).ln() * 27.0 / 6.4f64.ln()
    }
}

/// Triangular filters of unit area on Slaney's mel scale (librosa's default), (bands, n_fft / 2 + 1).
fn mel_filter_bank(config: &PreprocessorConfig) -> Vec<f32> {
    let bins = config.n_fft / 2 + 1;
    let (low, high) = (hertz_to_mel(config.low_frequency), hertz_to_mel(config.high_frequency));
    let corners: Vec<f64> = (0..config.features + 2)
        .map(|i| mel_to_hertz(low + (high - low) * i as f64 / (config.features + 1) as f64))
        .collect();
    let mut bank = Vec::with_capacity(config.features * bins);
    for corner in corners.windows(3) {
        let area = 2.0 / (corner[2] - corner[0]);
        for bin in 0..bins {
            let hertz = bin as f64 * config.sample_rate as f64 / config.n_fft as f64;
            let rising = (hertz - corner[0]) / (corner[1] - corner[0]);
            let falling = (corner[2] - hertz) / (corner[2] - corner[1]);
            // Rounded twice, as librosa does.
            let triangle = rising.min(falling).max(0.0) as f32;
            bank.push((f64::from(triangle) * area) as f32);
        }
    }
    bank
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::golden;

    pub fn front_end() -> LogMel {
        let mut builder = ParameterBuilder::from_tensors(DType::F32, Device::Cpu, golden::weights());
        LogMel::new(&golden::preprocessor(), &mut builder).unwrap()
    }

    pub fn values(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Largest difference over the valid frames of utterance `index`, and whether everything else is 0.
    pub fn compare(features: &Features, index: usize, expected: &Tensor) -> (f32, bool) {
        let (bands, stored) = expected.dims2().unwrap();
        let expected = values(expected);
        let mut worst = 0.0f32;
        let mut padding_is_zero = true;
        for band in 0..bands {
            for t in 0..features.frames {
                let found = features.values[(index * bands + band) * features.frames + t];
                if t < features.lengths[index] {
                    worst = worst.max((found - expected[band * stored + t]).abs());
                } else {
                    padding_is_zero &= found == 0.0;
                }
            }
        }
        (worst, padding_is_zero)
    }

    #[test]
    fn mel_equals_nemo() {
        let golden = golden::tensors("mel.safetensors");
        let waves = golden::waves("eval");
        let signals: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
        let features = front_end().compute(&signals, None).unwrap();
        assert_eq!(features.lengths, golden::lengths(&golden["eval.mel_len"]));
        let shape = golden::lengths(&golden["eval.mel_padded_shape"]);
        assert_eq!([features.batch, features.bands, features.frames], shape[..]);
        for i in 0..waves.len() {
            let (worst, zero) = compare(&features, i, &golden[&format!("eval{i}.mel")]);
            println!("eval{i}: {worst:e}");
            // NeMo's transform in f32 differs by 2.4e-5 from the exact values in quiet bins.
            assert!(worst < 6e-5, "eval{i}: {worst}");
            assert!(zero);
        }
    }

    #[test]
    fn short_and_odd_signals_equal_nemo() {
        let golden = golden::tensors("mel.safetensors");
        let front_end = front_end();
        let names = golden
            .keys()
            .filter_map(|key| key.strip_prefix("special.")?.strip_suffix(".wav"));
        let names: Vec<&str> = names.collect();
        assert!(!names.is_empty());
        for name in names {
            let wave = values(&golden[&format!("special.{name}.wav")]);
            let features = front_end.compute(&[&wave], None).unwrap();
            let length = golden::lengths(&golden[&format!("special.{name}.len")]);
            assert_eq!(features.lengths, length, "{name}");
            let (worst, zero) = compare(&features, 0, &golden[&format!("special.{name}.mel")]);
            assert!(zero, "{name}");
            println!("{name}: {worst:e}");
            let loudest = wave.iter().fold(0.0f32, |loudest, sample| loudest.max(sample.abs()));
            let bound = match loudest {
                // Rounding noise divided by 1e-5: no two libraries agree on it.
                0.0 => 2.0,
                // All bands close to the guard, so that deviations are small.
                quiet if quiet < 1e-3 => 2e-3,
                _ => 1.5e-4,
            };
            assert!(worst < bound, "{name}: {worst}");
        }
    }

    #[test]
    fn computed_window_and_filter_bank_equal_the_stored_ones() {
        let golden = golden::tensors("mel.safetensors");
        let stored = values(&golden["filterbank"]);
        let worst = mel_filter_bank(&golden::preprocessor())
            .iter()
            .zip(&stored)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        // A unit in the last place of the largest weight.
        let largest = stored.iter().fold(0.0f32, |largest, weight| largest.max(*weight));
        assert!(worst <= 1.2e-7 * largest, "{worst} of {largest}");
        let window = values(&golden["window"]);
        let worst = hann(window.len())
            .iter()
            .zip(window)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(worst <= 1.2e-7, "{worst}");
    }

    #[test]
    fn empty_signals_give_no_frames_and_dither_depends_on_the_seed() {
        let front_end = LogMel {
            dither: 1e-3,
            ..front_end()
        };
        let features = front_end.compute(&[&[], &[0.5; 100]], None).unwrap();
        assert_eq!((features.frames, features.lengths), (1, vec![0, 0]));
        assert!(front_end.compute(&[], None).is_err());
        let wave = golden::wave("eval", 0);
        let with = |seed| front_end.compute(&[&wave], Some(&mut Noise::new(seed))).unwrap();
        assert_eq!(with(1), with(1));
        assert_ne!(with(1), with(2));
    }
}
