//! Puts speech into a room: convolution with the room's impulse response.

use std::cell::RefCell;

use realfft::RealFftPlanner;
use realfft::num_complex::Complex;

use super::levels::{power, scale};

thread_local! {
    static PLANNER: RefCell<RealFftPlanner<f64>> = RefCell::new(RealFftPlanner::new());
}

/// The first `skipped..skipped + length` samples of the full convolution of a signal and an impulse response, by overlap-add:
/// blocks of the signal are transformed together with the response. Computed in f64.
pub fn convolve(signal: &[f32], response: &[f32], skipped: usize, length: usize) -> Vec<f32> {
    let mut out = vec![0.0f64; skipped + length];
    if signal.is_empty() || response.is_empty() {
        return vec![0.0; length];
    }
    // Four times the response keeps the share of the overlap small, and the transforms in the cache.
    let size = (4 * response.len()).max(1024).next_power_of_two();
    let block = size - response.len() + 1;
    let (forward, inverse) = PLANNER.with_borrow_mut(|planner| {
        // Plans for each power of two stay.
        (planner.plan_fft_forward(size), planner.plan_fft_inverse(size))
    });
    let spectrum = |samples: &[f32]| {
        let mut padded = vec![0.0; size];
        for (to, from) in padded.iter_mut().zip(samples) {
            *to = f64::from(*from);
        }
        let mut spectrum = vec![Complex::default(); size / 2 + 1];
        // Fails for slices of other lengths alone.
        let _ = forward.process(&mut padded, &mut spectrum);
        spectrum
    };
    let of_response = spectrum(response);
    let mut convolved = vec![0.0; size];
    for (number, samples) in signal.chunks(block).enumerate() {
        let at = number * block;
        if at >= out.len() {
            break;
        }
        let mut product = spectrum(samples);
        for (x, h) in product.iter_mut().zip(&of_response) {
            *x *= h;
        }
        // Of a real signal these are real; rounding may leave a rest.
        product[0].im = 0.0;
        product[size / 2].im = 0.0;
        let _ = inverse.process(&mut product, &mut convolved);
        for (to, from) in out[at..].iter_mut().zip(&convolved) {
            *to += from / size as f64;
        }
    }
    out[skipped..].iter().map(|&x| x as f32).collect()
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
    let mut convolved = convolve(signal, &response, skipped, signal.len());
    let peak = super::levels::peak(&convolved);
    if peak > 0.0 {
        scale(&mut convolved, 1.0 / f64::from(peak));
        signal.copy_from_slice(&convolved);
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
    let mut convolved = convolve(signal, response, first_largest(response, |h| h), signal.len());
    let (before, after) = (power(signal), power(&convolved));
    if before > 0.0 && after > 0.0 {
        scale(&mut convolved, (before / after).sqrt());
        signal.copy_from_slice(&convolved);
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
