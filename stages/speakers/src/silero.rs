//! Silero's voice activity detector (version 6, 16 kHz): the probability of speech for each 512 samples.
//!
//! Of each 512 samples, with the 64 before them: a Fourier transform as a convolution, its magnitudes at four places,
//! four convolutions with ReLU, an LSTM cell whose state goes on from window to window, and a logistic unit. The network
//! was read from `silero_vad.jit` of <https://github.com/snakers4/silero-vad>, which the bundled weights are from.

use std::sync::LazyLock;

use flow_kernels::linear::Linear;
use flow_kernels::lstm::{HIDDEN, Recurrent};
use flow_kernels::tanh::tanh_in_place;
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::weights::{Weights, unpack};

/// Sample rate of the input, in Hz.
pub const SAMPLE_RATE: u32 = 16_000;
/// Samples for each probability.
pub const WINDOW: usize = 512;
/// Largest size of a sample. Speech is in [-1, 1]; past this, squares would leave the range of f32.
pub const MAX_SAMPLE: f32 = 1e9;

/// Samples before a window that are part of its input.
const CONTEXT: usize = 64;
/// Samples after a window that mirror its end.
const MIRRORED: usize = 64;
const PADDED: usize = CONTEXT + WINDOW + MIRRORED;
/// Samples of a Fourier transform, and from one to the next.
const TRANSFORM: usize = 256;
const HOP: usize = 128;
/// Transforms of a window.
const FRAMES: usize = (PADDED - TRANSFORM) / HOP + 1;
const BINS: usize = TRANSFORM / 2 + 1;
/// Channels after the first and fourth convolution, and of the LSTM; and after the others.
const WIDE: usize = 128;
const NARROW: usize = 64;
const GATES: usize = 4 * WIDE;
/// Windows whose convolutions are computed together, by one thread.
const BLOCK: usize = 8;
/// Most windows that wait before they are computed, block by block on all threads: four seconds.
const WAITING: usize = 16 * BLOCK;

/// The weights that the crate carries; `THIRD_PARTY.md` says where they are from.
const BUNDLED: &[u8] = include_bytes!("../weights/silero-vad-16k.safetensors.zst");

/// The network.
#[derive(Debug, Clone)]
pub struct SileroVad {
    transform: Linear,
    convolutions: [Linear; 4],
    input: Linear,
    hidden: Recurrent,
    output: Vec<f32>,
    output_bias: f32,
}

impl SileroVad {
    /// With the bundled weights.
    pub fn bundled() -> Result<Self> {
        Self::from_safetensors(&unpack(BUNDLED, 4)?)
    }

    /// [`SileroVad::bundled`], read once.
    pub fn shared() -> Result<&'static Self> {
        static NETWORK: LazyLock<Result<SileroVad>> = LazyLock::new(SileroVad::bundled);
        NETWORK.as_ref().map_err(Clone::clone)
    }

    /// With the weights of a safetensors file, under the names of the bundled ones: `stft_conv.weight` (258, 1, 256),
    /// `conv{1..4}.{weight,bias}`, `lstm_cell.{weight,bias}_{ih,hh}` and `final_conv.{weight,bias}`.
    pub fn from_safetensors(bytes: &[u8]) -> Result<Self> {
        let weights = Weights::open(bytes)?;
        let convolution = |name: &str, inputs: usize, outputs: usize| -> Result<Linear> {
            let weight = weights.floats(&format!("{name}.weight"), &[outputs, inputs, 3])?;
            Ok(Linear::convolution(
                &weight,
                3,
                weights.floats(&format!("{name}.bias"), &[outputs])?,
            ))
        };
        let transform = weights.floats("stft_conv.weight", &[2 * BINS, 1, TRANSFORM])?;
        // The fourth convolution has one frame between two of padding, so only the middle one of its three taps
        // matters.
        let fourth = weights.floats("conv4.weight", &[WIDE, NARROW, 3])?;
        let middle: Vec<f32> = fourth.iter().skip(1).step_by(3).copied().collect();
        let mut bias = weights.floats("lstm_cell.bias_ih", &[GATES])?;
        let second = weights.floats("lstm_cell.bias_hh", &[GATES])?;
        bias.iter_mut().zip(&second).for_each(|(bias, second)| *bias += second);
        Ok(Self {
            transform: Linear::convolution(&transform, TRANSFORM, vec![0.0; 2 * BINS]),
            convolutions: [
                convolution("conv1", BINS, WIDE)?,
                convolution("conv2", WIDE, NARROW)?,
                convolution("conv3", NARROW, NARROW)?,
                Linear::new(&middle, weights.floats("conv4.bias", &[WIDE])?),
            ],
            input: Linear::new(&weights.floats("lstm_cell.weight_ih", &[GATES, WIDE])?, bias),
            hidden: Recurrent::new(&weights.floats("lstm_cell.weight_hh", &[GATES, HIDDEN])?),
            output: weights.floats("final_conv.weight", &[1, WIDE, 1])?,
            output_bias: weights.floats("final_conv.bias", &[1])?[0],
        })
    }

    /// A detector at the beginning of a recording.
    pub fn stream(&self) -> SileroStream<'_> {
        SileroStream {
            network: self,
            waves: vec![0.0; PADDED],
            gates: Vec::new(),
            buffers: Buffers::new(),
            hidden: [0.0; WIDE],
            cell: [0.0; WIDE],
            ready: 0,
            filled: 0,
            fed: 0,
        }
    }

    /// A detector that goes on behind `fed` samples, as one did whose [`SileroStream::state`] this was.
    ///
    /// # Errors
    /// If it is no state, or `fed` is no number of whole windows.
    pub fn resume(&self, state: &[f32], fed: u64) -> Result<SileroStream<'_>> {
        if state.len() != CONTEXT + 2 * WIDE || !fed.is_multiple_of(WINDOW as u64) {
            let why = format!("{} values at sample {fed} are no state of the detector", state.len());
            return Err(Error::Input(why));
        }
        let mut stream = self.stream();
        let (context, memory) = state.split_at(CONTEXT);
        let (hidden, cell) = memory.split_at(WIDE);
        stream.waves[..CONTEXT].copy_from_slice(context);
        stream.hidden.copy_from_slice(hidden);
        stream.cell.copy_from_slice(cell);
        stream.fed = fed;
        Ok(stream)
    }

    /// Probabilities of whole recordings (mono, 16 kHz, in [-1, 1]), each one for [`WINDOW`] samples, the last window
    /// filled up with zeros. Recordings are distributed over rayon's threads; each has its own result or error.
    pub fn probabilities(&self, recordings: &[&[f32]]) -> Vec<Result<Vec<f32>>> {
        recordings
            .par_iter()
            .map(|samples| {
                let mut probabilities = Vec::with_capacity(samples.len().div_ceil(WINDOW));
                let mut stream = self.stream();
                stream.feed(samples, &mut probabilities)?;
                stream.finish(&mut probabilities);
                Ok(probabilities)
            })
            .collect()
    }

    /// Convolutions of windows (windows, PADDED), at most a block of them, and the products of the LSTM's gates with what
    /// comes of them: `gates` (windows, GATES).
    fn encode(&self, waves: &[f32], buffers: &mut Buffers, gates: &mut [f32]) {
        let windows = waves.len() / PADDED;
        let b = buffers;
        let [first, second, third, fourth] = &self.convolutions;
        let frames = windows * FRAMES;
        self.transform.apply(waves, &mut b.spectra, frames, &|row| {
            (row / FRAMES * PADDED + row % FRAMES * HOP, row * 2 * BINS)
        });
        for (row, spectrum) in b.spectra.chunks_exact(2 * BINS).take(frames).enumerate() {
            let (real, imaginary) = spectrum.split_at(BINS);
            let at = (row / FRAMES * (FRAMES + 2) + 1 + row % FRAMES) * BINS;
            let magnitudes = b.magnitudes[at..at + BINS].iter_mut();
            for (magnitude, (&real, &imaginary)) in magnitudes.zip(real.iter().zip(imaginary)) {
                *magnitude = real.mul_add(real, imaginary * imaginary).sqrt();
            }
        }
        // Frames are between a frame of zeros before and one after, as the convolutions pad them.
        first.apply(&b.magnitudes, &mut b.first, frames, &|row| {
            let (window, frame) = (row / FRAMES * (FRAMES + 2), row % FRAMES);
            ((window + frame) * BINS, (window + 1 + frame) * WIDE)
        });
        relu(&mut b.first[..windows * (FRAMES + 2) * WIDE]);
        second.apply(&b.first, &mut b.second, 2 * windows, &|row| {
            let (window, frame) = (row / 2, row % 2);
            (
                (window * (FRAMES + 2) + 2 * frame) * WIDE,
                (window * 3 + 1 + frame) * NARROW,
            )
        });
        relu(&mut b.second[..windows * 3 * NARROW]);
        third.apply(&b.second, &mut b.third, windows, &|row| {
            (row * 3 * NARROW, row * NARROW)
        });
        relu(&mut b.third[..windows * NARROW]);
        fourth.apply(&b.third, &mut b.encoded, windows, &|row| (row * NARROW, row * WIDE));
        relu(&mut b.encoded[..windows * WIDE]);
        self.input
            .apply(&b.encoded, gates, windows, &|row| (row * WIDE, row * GATES));
    }
}

/// Intermediate values for a block of windows.
#[derive(Debug, Clone)]
struct Buffers {
    /// (windows, FRAMES, 2 BINS): real parts, then imaginary ones.
    spectra: Vec<f32>,
    /// (windows, 1 + FRAMES + 1, BINS)
    magnitudes: Vec<f32>,
    /// (windows, 1 + FRAMES + 1, WIDE)
    first: Vec<f32>,
    /// (windows, 1 + 2, NARROW)
    second: Vec<f32>,
    /// (windows, NARROW)
    third: Vec<f32>,
    /// (windows, WIDE)
    encoded: Vec<f32>,
}

impl Buffers {
    fn new() -> Self {
        let zeros = |values: usize| vec![0.0; values];
        Self {
            spectra: zeros(BLOCK * FRAMES * 2 * BINS),
            magnitudes: zeros(BLOCK * (FRAMES + 2) * BINS),
            first: zeros(BLOCK * (FRAMES + 2) * WIDE),
            second: zeros(BLOCK * 3 * NARROW),
            third: zeros(BLOCK * NARROW),
            encoded: zeros(BLOCK * WIDE),
        }
    }
}

/// The detector within a recording. Samples come in blocks of any size; the probabilities do not depend on them, to the
/// bit.
#[derive(Debug, Clone)]
pub struct SileroStream<'a> {
    network: &'a SileroVad,
    /// (windows that wait + 1, PADDED): the window after the last whole one is being filled. As long as was ever needed.
    waves: Vec<f32>,
    /// (windows, GATES)
    gates: Vec<f32>,
    buffers: Buffers,
    hidden: [f32; WIDE],
    cell: [f32; WIDE],
    /// Whole windows that wait, and samples of the one after them.
    ready: usize,
    filled: usize,
    /// Samples of the recording so far.
    fed: u64,
}

impl SileroStream<'_> {
    /// Takes samples (mono, 16 kHz, in [-1, 1]) and appends a probability for each window that they complete. A sample
    /// that is not finite, or larger than [`MAX_SAMPLE`], is an error, and nothing of `samples` is taken.
    pub fn feed(&mut self, samples: &[f32], probabilities: &mut Vec<f32>) -> Result<()> {
        if let Some(at) = samples
            .iter()
            .position(|sample| sample.is_nan() || sample.abs() > MAX_SAMPLE)
        {
            return Err(Error::Sample {
                at: self.fed + at as u64,
                value: samples[at],
                limit: MAX_SAMPLE,
            });
        }
        let mut rest = samples;
        while !rest.is_empty() {
            let (taken, left) = rest.split_at(rest.len().min(WINDOW - self.filled));
            let at = self.ready * PADDED + CONTEXT + self.filled;
            self.waves[at..at + taken.len()].copy_from_slice(taken);
            self.filled += taken.len();
            rest = left;
            if self.filled == WINDOW {
                self.complete(probabilities);
            }
        }
        self.run(probabilities);
        self.fed += samples.len() as u64;
        Ok(())
    }

    /// What [`SileroVad::resume`] needs: the last samples, then the memory of the network. None within a window.
    pub fn state(&self) -> Option<Vec<f32>> {
        let is_between = self.ready == 0 && self.filled == 0;
        is_between.then(|| [&self.waves[..CONTEXT], &self.hidden, &self.cell].concat())
    }

    /// Ends the recording: a last window that has samples is filled up with zeros.
    pub fn finish(mut self, probabilities: &mut Vec<f32>) {
        if self.filled > 0 {
            let at = self.ready * PADDED + CONTEXT;
            self.waves[at + self.filled..at + WINDOW].fill(0.0);
            self.complete(probabilities);
            self.run(probabilities);
        }
    }

    /// Mirrors the end of a window that is full, and gives its last samples to the next one.
    fn complete(&mut self, probabilities: &mut Vec<f32>) {
        if self.waves.len() < (self.ready + 2) * PADDED {
            self.waves.resize((self.ready + 2) * PADDED, 0.0);
        }
        let (window, next) = self.waves[self.ready * PADDED..].split_at_mut(PADDED);
        let (heard, mirrored) = window.split_at_mut(CONTEXT + WINDOW);
        for (mirrored, &sample) in mirrored.iter_mut().zip(heard.iter().rev().skip(1)) {
            *mirrored = sample;
        }
        next[..CONTEXT].copy_from_slice(&heard[WINDOW..]);
        self.ready += 1;
        self.filled = 0;
        if self.ready == WAITING {
            self.run(probabilities);
        }
    }

    /// Computes the windows that wait.
    fn run(&mut self, probabilities: &mut Vec<f32>) {
        let windows = std::mem::take(&mut self.ready);
        if windows == 0 {
            return;
        }
        let network = self.network;
        if self.gates.len() < windows * GATES {
            self.gates.resize(windows * GATES, 0.0);
        }
        let (waves, gates) = (&self.waves[..windows * PADDED], &mut self.gates[..windows * GATES]);
        if windows <= BLOCK {
            network.encode(waves, &mut self.buffers, gates);
        } else {
            waves
                .par_chunks(BLOCK * PADDED)
                .zip(gates.par_chunks_mut(BLOCK * GATES))
                .for_each_init(Buffers::new, |buffers, (waves, gates)| {
                    network.encode(waves, buffers, gates)
                });
        }
        for (window, gates) in gates.chunks_exact_mut(GATES).enumerate() {
            network.hidden.add(&[self.hidden], gates, window % 2 == 1);
            step(gates, &mut self.cell, &mut self.hidden);
            let mut sum = network.output_bias;
            for (&hidden, &weight) in self.hidden.iter().zip(&network.output) {
                sum = hidden.max(0.0).mul_add(weight, sum);
            }
            probabilities.push(logistic(sum));
        }
        // Moves the samples of the next window to the front.
        let from = windows * PADDED;
        self.waves.copy_within(from..from + CONTEXT + self.filled, 0);
    }
}

/// The LSTM cell after its products, gates in the order input, forget, candidate, output:
/// `c' = f c + i g`, `h' = o tanh(c')`.
fn step(gates: &mut [f32], cell: &mut [f32; WIDE], hidden: &mut [f32; WIDE]) {
    let (input, rest) = gates.split_at_mut(WIDE);
    let (forget, rest) = rest.split_at_mut(WIDE);
    let (candidate, output) = rest.split_at_mut(WIDE);
    tanh_in_place(candidate);
    for (cell, ((input, forget), candidate)) in cell.iter_mut().zip(input.iter().zip(&*forget).zip(&*candidate)) {
        *cell = logistic(*forget) * *cell + logistic(*input) * candidate;
    }
    hidden.copy_from_slice(cell);
    tanh_in_place(hidden);
    for (hidden, &output) in hidden.iter_mut().zip(&*output) {
        *hidden *= logistic(output);
    }
}

fn logistic(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn relu(values: &mut [f32]) {
    for value in values {
        *value = value.max(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    /// Absolute: probabilities are at most 1. What was measured between libraries is 1e-6.
    const TOLERANCE: f32 = 1e-4;

    /// Largest distance in parts of the largest value.
    fn distance(found: &[f32], expected: &[f32]) -> f32 {
        assert_eq!(found.len(), expected.len());
        let size = expected.iter().fold(1e-3f32, |size, value| size.max(value.abs()));
        let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
        differences.fold(0.0, f32::max) / size
    }

    /// Channels first, as the golden data has them, of frames that are one after the other.
    fn channels_first(frames: &[f32], channels: usize) -> Vec<f32> {
        let count = frames.len() / channels;
        (0..frames.len())
            .map(|at| frames[at % count * channels + at / count])
            .collect()
    }

    #[test]
    fn each_stage_is_that_of_the_original() {
        let tensors = golden::Tensors::load("silero_vad.safetensors");
        let network = SileroVad::bundled().unwrap();
        let stages: Vec<String> = tensors
            .names()
            .into_iter()
            .filter_map(|name| name.strip_suffix(".padded").map(String::from))
            .collect();
        assert!(!stages.is_empty());
        for stage in stages {
            let golden = |name: &str| tensors.floats(&format!("{stage}.{name}")).1;
            let check = |name: &str, found: &[f32]| {
                // Relative to the largest value of the stage: sums of up to 387 products in f32.
                let distance = distance(found, &golden(name));
                assert!(distance < TOLERANCE, "{stage}.{name}: {distance}");
            };
            let mut stream = network.stream();
            let input = golden("input");
            stream.waves[..CONTEXT].copy_from_slice(&input[..CONTEXT]);
            stream.hidden.copy_from_slice(&golden("h_before"));
            stream.cell.copy_from_slice(&golden("c_before"));
            stream.waves[CONTEXT..CONTEXT + WINDOW].copy_from_slice(&input[CONTEXT..]);
            let mut probabilities = Vec::new();
            stream.filled = WINDOW;
            stream.complete(&mut probabilities);
            check("padded", &stream.waves[..PADDED]);
            stream.run(&mut probabilities);
            let b = &stream.buffers;
            let inner = |frames: &[f32], count: usize, channels: usize| {
                channels_first(&frames[channels..(1 + count) * channels], channels)
            };
            check("magnitude", &inner(&b.magnitudes, FRAMES, BINS));
            check("conv1", &inner(&b.first, FRAMES, WIDE));
            check("conv2", &inner(&b.second, 2, NARROW));
            check("conv3", &b.third[..NARROW]);
            check("conv4", &b.encoded[..WIDE]);
            check("c", &stream.cell);
            check("h", &stream.hidden);
            check("prob", &probabilities);
        }
    }

    #[test]
    fn whole_recordings_get_the_probabilities_of_the_original() {
        let tensors = golden::Tensors::load("silero_vad.safetensors");
        let network = SileroVad::bundled().unwrap();
        let recordings = golden::recordings();
        let signals: Vec<&[f32]> = recordings.iter().map(|(_, samples)| samples.as_slice()).collect();
        let mut compared = 0;
        for ((name, _), found) in recordings.iter().zip(network.probabilities(&signals)) {
            let Some((_, expected)) = tensors.find(&format!("{name}.prob")) else {
                continue;
            };
            let found = found.unwrap();
            assert_eq!(found.len(), expected.len(), "{name}");
            for (window, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!(
                    (found - expected).abs() < TOLERANCE,
                    "{name} {window}: {found}, not {expected}"
                );
            }
            compared += 1;
        }
        assert!(compared > 0);
    }

    #[test]
    fn the_cut_of_a_recording_changes_no_bit() {
        let network = SileroVad::bundled().unwrap();
        let (_, samples) = &golden::recordings()[0];
        let samples = &samples[..samples.len().min(100_123)];
        let whole = network.probabilities(&[samples]).remove(0).unwrap();
        let mut state = 1u64;
        for largest in [1, 100, 511, 512, 513, 1_000, 20_000] {
            let mut found = Vec::new();
            let mut stream = network.stream();
            let mut rest = if largest == 1 { &samples[..2_000] } else { samples };
            let expected = if largest == 1 { 4 } else { whole.len() };
            while !rest.is_empty() {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let piece = (1 + (state >> 33) as usize % largest).min(rest.len());
                stream.feed(&rest[..piece], &mut found).unwrap();
                // A window is answered as soon as it is complete.
                assert_eq!(found.len() as u64, stream.fed / WINDOW as u64);
                rest = &rest[piece..];
            }
            stream.finish(&mut found);
            assert_eq!(found.len(), expected);
            // The last window of the short cut ends with zeros.
            let same = if largest == 1 { expected - 1 } else { expected };
            assert_eq!(found[..same], whole[..same], "pieces of up to {largest}");
        }
    }

    #[test]
    fn bad_samples_and_weights_are_refused_by_name() {
        let network = SileroVad::bundled().unwrap();
        let mut stream = network.stream();
        let mut found = Vec::new();
        stream.feed(&[0.0; 700], &mut found).unwrap();
        for bad in [f32::NAN, f32::INFINITY, -2e9] {
            let error = stream.feed(&[0.5, bad], &mut found).unwrap_err();
            assert!(matches!(error, Error::Sample { at: 701, .. }), "{error}");
        }
        assert_eq!(found.len(), 1);
        let loud = network.probabilities(&[&[MAX_SAMPLE; 2_000], &[], &[f32::NAN]]);
        assert!(
            loud[0]
                .as_ref()
                .unwrap()
                .iter()
                .all(|probability| (0.0..=1.0).contains(probability))
        );
        assert_eq!(loud[1], Ok(Vec::new()));
        assert!(loud[2].is_err());

        let bundled = unpack(BUNDLED, 4).unwrap();
        assert!(matches!(
            SileroVad::from_safetensors(&bundled[..1000]),
            Err(Error::Weights(_))
        ));
        let mut renamed = bundled.clone();
        let at = renamed.windows(10).position(|bytes| bytes == b"conv4.bias").unwrap();
        renamed[at + 4] = b'5';
        let error = SileroVad::from_safetensors(&renamed).unwrap_err();
        assert!(error.to_string().contains("conv4.bias"), "{error}");
    }
}
