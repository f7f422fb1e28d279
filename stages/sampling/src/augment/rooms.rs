//! Puts speech into a room: convolution with the room's impulse response.

use std::cell::RefCell;

use realfft::RealFftPlanner;
use realfft::num_complex::Complex;

use super::levels::{peak, power};

/// Transforms of more samples, unless the response needs them, leave the cache.
const LARGEST: usize = 1 << 15;

thread_local! {
    static PLANNER: RefCell<RealFftPlanner<f32>> = RefCell::new(RealFftPlanner::new());
}

/// The first `skipped..skipped + length` samples of the full convolution of a signal and an impulse response, by overlap-save:
/// blocks of the signal are transformed together with the samples before them that the response still reaches. Computed in f32;
/// the error is some 130 dB below the loudest parts of a block.
pub fn convolve(signal: &[f32], response: &[f32], skipped: usize, length: usize) -> Vec<f32> {
    let mut out = vec![0.0; length];
    if signal.is_empty() || response.is_empty() {
        return out;
    }
    let before = response.len() - 1;
    let size = transform_size(response.len(), length);
    let (forward, inverse) = PLANNER.with_borrow_mut(|planner| {
        // Plans for each power of two stay.
        (planner.plan_fft_forward(size), planner.plan_fft_inverse(size))
    });
    let mut samples = vec![0.0; size];
    let mut scratch = vec![Complex::default(); forward.get_scratch_len().max(inverse.get_scratch_len())];
    let mut of_response = vec![Complex::default(); size / 2 + 1];
    let mut spectrum = of_response.clone();
    // The size is a power of two, so that this rounds nothing.
    for (to, from) in samples.iter_mut().zip(response) {
        *to = from / size as f32;
    }
    // Transforms fail for slices of other lengths alone.
    let _ = forward.process_with_scratch(&mut samples, &mut of_response, &mut scratch);
    for (number, out) in out.chunks_mut(size - before).enumerate() {
        // In the full convolution.
        let first = skipped + number * (size - before);
        let silent = before.saturating_sub(first);
        let heard = signal
            .get((first + silent).saturating_sub(before)..)
            .unwrap_or_default();
        let heard = &heard[..heard.len().min(size - silent)];
        samples[..silent].fill(0.0);
        samples[silent..silent + heard.len()].copy_from_slice(heard);
        samples[silent + heard.len()..].fill(0.0);
        let _ = forward.process_with_scratch(&mut samples, &mut spectrum, &mut scratch);
        for (x, h) in spectrum.iter_mut().zip(&of_response) {
            *x *= h;
        }
        // Of a real signal these are real; rounding may leave a rest.
        spectrum[0].im = 0.0;
        spectrum[size / 2].im = 0.0;
        let _ = inverse.process_with_scratch(&mut spectrum, &mut samples, &mut scratch);
        out.copy_from_slice(&samples[before..before + out.len()]);
    }
    out
}

/// The power of two at which transforms of all blocks and of the response need the fewest operations.
fn transform_size(response: usize, length: usize) -> usize {
    let least = (2 * response).max(1024).next_power_of_two();
    let most = (response + length).next_power_of_two().clamp(least, LARGEST.max(least));
    let sizes = std::iter::successors(Some(least), |size| Some(2 * size)).take_while(|size| *size <= most);
    let operations = |size: &usize| {
        let blocks = length.div_ceil(size - response + 1);
        (2 * blocks + 1) * size * size.ilog2() as usize
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
    let convolved = convolve(signal, &response, skipped, signal.len());
    let peak = peak(&convolved);
    if peak > 0.0 {
        scaled(signal, &convolved, 1.0 / f64::from(peak));
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
    let convolved = convolve(signal, response, first_largest(response, |h| h), signal.len());
    let (before, after) = (power(signal), power(&convolved));
    if before > 0.0 && after > 0.0 {
        scaled(signal, &convolved, (before / after).sqrt());
    }
}

/// `signal = convolved * factor`.
fn scaled(signal: &mut [f32], convolved: &[f32], factor: f64) {
    for (to, from) in signal.iter_mut().zip(convolved) {
        *to = (f64::from(*from) * factor) as f32;
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
