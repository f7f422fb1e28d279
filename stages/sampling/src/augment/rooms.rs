//! Puts speech into a room: convolution with the room's impulse response.

use std::cell::RefCell;

use rustfft::FftPlanner;
use rustfft::num_complex::Complex;

use super::levels::{peak, power, scale};

/// Transforms of more samples, unless the response needs them, leave the cache.
const LARGEST: usize = 1 << 15;

/// Samples of a transform for which a thread keeps memory, some 9 MB with the plans (responses of eight seconds); and those of a signal:
/// a minute of 16 kHz.
const KEPT_SIZE: usize = 1 << 18;
const KEPT_INPUT: usize = 1 << 20;

thread_local! {
    static CONVOLVER: RefCell<Convolver> = RefCell::new(Convolver::default());
}

/// What the convolutions of one thread share: plans of transforms by size, and buffers, since fresh memory for each signal may cost
/// a third of the time.
struct Convolver {
    planner: FftPlanner<f32>,
    /// The signal between zeros: it begins at place `response.len() - 1 - skipped`.
    input: Vec<f32>,
    samples: Vec<Complex<f32>>,
    spectrum: Vec<Complex<f32>>,
    /// The transform of the response, over the size.
    response: Vec<Complex<f32>>,
    scratch: Vec<Complex<f32>>,
}

impl Default for Convolver {
    fn default() -> Self {
        Convolver {
            planner: FftPlanner::new(),
            input: Vec::new(),
            samples: Vec::new(),
            spectrum: Vec::new(),
            response: Vec::new(),
            scratch: Vec::new(),
        }
    }
}

/// Replaces a signal by `skipped..skipped + signal.len()` of its full convolution with an impulse response, by overlap-save: blocks
/// of the signal are transformed together with the samples before them that the response still reaches. Two blocks are the real
/// and the imaginary part of one complex transform: the response is real, so they stay apart. Computed in f32; the error is some
/// 130 dB below the loudest parts of both blocks.
///
/// A signal that would become silent stays as it is; returns whether it was replaced. `skipped` is less than the length of the
/// response.
pub fn convolve(signal: &mut [f32], response: &[f32], skipped: usize) -> bool {
    !signal.is_empty()
        && skipped < response.len()
        && CONVOLVER.with_borrow_mut(|convolver| convolver.convolve(signal, response, skipped))
}

impl Convolver {
    fn convolve(&mut self, signal: &mut [f32], response: &[f32], skipped: usize) -> bool {
        let reach = response.len() - 1;
        let size = transform_size(response.len(), signal.len());
        let block = size - reach;
        let (forward, inverse) = (self.planner.plan_fft_forward(size), self.planner.plan_fft_inverse(size));
        let scratch = forward.get_outofplace_scratch_len();
        self.scratch
            .resize(scratch.max(inverse.get_outofplace_scratch_len()), Complex::default());

        // Of a power of two: rounds nothing.
        let factor = 1.0 / size as f32;
        self.samples.clear();
        self.samples
            .extend(response.iter().map(|h| Complex::new(h * factor, 0.0)));
        for buffer in [&mut self.samples, &mut self.spectrum, &mut self.response] {
            buffer.resize(size, Complex::default());
        }
        forward.process_outofplace_with_scratch(&mut self.samples, &mut self.response, &mut self.scratch);

        self.input.clear();
        self.input.resize(reach - skipped, 0.0);
        self.input.extend_from_slice(signal);
        self.input.resize(signal.len().next_multiple_of(2 * block) + reach, 0.0);

        for (out, first) in signal.chunks_mut(2 * block).zip((0..).step_by(2 * block)) {
            let input = &self.input[first..first + size + block];
            for ((to, &re), &im) in self.samples.iter_mut().zip(input).zip(&input[block..]) {
                *to = Complex::new(re, im);
            }
            forward.process_outofplace_with_scratch(&mut self.samples, &mut self.spectrum, &mut self.scratch);
            for (x, h) in self.spectrum.iter_mut().zip(&self.response) {
                *x *= h;
            }
            inverse.process_outofplace_with_scratch(&mut self.spectrum, &mut self.samples, &mut self.scratch);
            let (early, late) = out.split_at_mut(block.min(out.len()));
            for (to, from) in early.iter_mut().zip(&self.samples[reach..]) {
                *to = from.re;
            }
            for (to, from) in late.iter_mut().zip(&self.samples[reach..]) {
                *to = from.im;
            }
        }
        let heard = signal.iter().any(|&x| x != 0.0);
        if !heard {
            signal.copy_from_slice(&self.input[reach - skipped..][..signal.len()]);
        }
        if size > KEPT_SIZE || self.input.len() > KEPT_INPUT {
            *self = Convolver::default();
        }
        heard
    }
}

/// The power of two at which transforms of all pairs of blocks and of the response need the fewest operations.
fn transform_size(response: usize, length: usize) -> usize {
    let least = (2 * response).max(1024).next_power_of_two();
    let most = (response + length).next_power_of_two().clamp(least, LARGEST.max(least));
    let sizes = std::iter::successors(Some(least), |size| Some(2 * size)).take_while(|size| *size <= most);
    let operations = |size: &usize| {
        let pairs = length.div_ceil(2 * (size - response + 1));
        (2 * pairs + 1) * size * size.ilog2() as usize
    };
    sizes.min_by_key(operations).unwrap_or(least)
}

/// NeMo's `impulse`: the signal in the room, from its first sample on, or, with `shift`, from where the response is loudest;
/// then scaled to a peak of 1. With `normalize` the response loses its mean first.
pub fn impulse(signal: &mut [f32], response: &[f32], normalize: bool, shift: bool) {
    let mut response = response.to_vec();
    if normalize && !response.is_empty() {
        let mean = response.iter().map(|&h| f64::from(h)).sum::<f64>() / response.len() as f64;
        for h in &mut response {
            *h = (f64::from(*h) - mean) as f32;
        }
    }
    let skipped = if shift { first_largest(&response, f32::abs) } else { 0 };
    if convolve(signal, &response, skipped) {
        scale(signal, 1.0 / f64::from(peak(signal)));
    }
}

/// Lhotse's `reverb_rir` with one channel: the signal in the room, from where the response has its largest value (not its
/// largest magnitude), at the signal's own power. `early_only` takes the first 50 ms of the response.
pub fn reverb_rir(signal: &mut [f32], response: &[f32], early_only: bool, sample_rate: u32) {
    let most = if early_only {
        sample_rate as usize / 20
    } else {
        usize::MAX
    };
    let response = &response[..response.len().min(most)];
    let before = power(signal);
    if convolve(signal, response, first_largest(response, |h| h)) {
        scale(signal, (before / power(signal)).sqrt());
    }
}

/// The place of the first of the largest values; 0 if there are none.
fn first_largest(response: &[f32], of: impl Fn(f32) -> f32) -> usize {
    let mut largest = 0;
    for (at, &h) in response.iter().enumerate() {
        if of(h) > of(response[largest]) {
            largest = at;
        }
    }
    largest
}
