//! The first layer of SincNet (Ravanelli and Bengio 2018, in the parametrization of asteroid's `ParamSincFB`): band-pass
//! filters that are given by two frequencies each.

#![allow(
    clippy::needless_range_loop,
    reason = "loops over taps and filters become vectors in this form"
)]

use std::f64::consts::PI;

use flow_kernels::multiversion;
use flow_kernels::product::PackedRhs;

use super::kernel_error;
use crate::error::{Error, Result};

/// Samples of a filter, and from one place of the filters to the next.
pub const TAPS: usize = 251;
pub const STRIDE: usize = 10;
/// Filters: an even and an odd one for each pair of frequencies.
pub const FILTERS: usize = 80;
pub const PAIRS: usize = FILTERS / 2;

const HALF: usize = TAPS / 2;
/// Half of a filter with its centre, and floats from one row of sums to the next.
const FOLDED: usize = HALF + 1;
const FOLDED_STEP: usize = FOLDED.next_multiple_of(16);
/// Outputs of even filters, or of odd ones, with zeros behind them: whole vectors.
const PADDED: usize = PAIRS.next_multiple_of(16);
/// Pooled frames that are computed together: they stay in the second cache.
const BLOCK: usize = 40;
const SAMPLE_RATE: f32 = 16_000.0;
/// Least frequency and least width of a band, in Hz.
const LEAST_LOW: f32 = 50.0;
const LEAST_BAND: f32 = 50.0;

/// The filters.
pub struct SincFilters {
    packed: PackedRhs,
    /// Halves of the even filters, and of the odd ones.
    folded: [PackedRhs; 2],
    /// Sum of each filter: its output for a waveform of ones.
    sums: Vec<f32>,
}

impl SincFilters {
    /// From the parameters of [`PAIRS`] pairs, in Hz.
    pub fn new(low_hz: &[f32], band_hz: &[f32]) -> Result<Self> {
        let filters = filters(low_hz, band_hz)?;
        let sum = |filter: &[f32]| filter.iter().map(|&value| f64::from(value)).sum::<f64>() as f32;
        let folded = |filters: &[f32]| {
            let mut halves = vec![0.0; PADDED * FOLDED];
            for (half, filter) in halves.chunks_exact_mut(FOLDED).zip(filters.chunks_exact(TAPS)) {
                half.copy_from_slice(&filter[..FOLDED]);
                // The centre is added to itself.
                half[HALF] *= 0.5;
            }
            PackedRhs::from_weight(&halves, PADDED).map_err(kernel_error)
        };
        let (even, odd) = filters.split_at(PAIRS * TAPS);
        Ok(Self {
            folded: [folded(even)?, folded(odd)?],
            sums: filters.chunks_exact(TAPS).map(sum).collect(),
            packed: PackedRhs::from_weight(&filters, FILTERS).map_err(kernel_error)?,
        })
    }

    pub fn sums(&self) -> &[f32] {
        &self.sums
    }

    /// Outputs of the filters for a waveform: (frames, [`FILTERS`]), for all frames that are wholly within it.
    pub fn apply(&self, wave: &[f32]) -> Result<Vec<f32>> {
        self.packed
            .product_of_rows(wave, frames(wave.len()), STRIDE)
            .map_err(kernel_error)
    }

    /// Absolute values of the outputs, and of each `POOL` frames the largest: (frames / `POOL`, [`FILTERS`]). An even filter
    /// is half a filter of the sums of samples as far before its centre as behind it, an odd one of their differences: half
    /// of the multiplications. The results differ from those of [`apply`](Self::apply) by rounding.
    pub fn pooled<const POOL: usize>(&self, wave: &[f32]) -> Result<Vec<f32>> {
        let count = frames(wave.len()) / POOL;
        let reversed: Vec<f32> = wave.iter().rev().copied().collect();
        let mut out = vec![0.0; count * FILTERS];
        let mut sides = [(); 2].map(|()| vec![0.0; BLOCK * POOL * FOLDED_STEP]);
        let mut outputs = [(); 2].map(|()| vec![0.0; BLOCK * POOL * PADDED]);
        for (block, out) in out.chunks_mut(BLOCK * FILTERS).enumerate() {
            let rows = out.len() / FILTERS * POOL;
            let [plus, minus] = &mut sides;
            multiversion!({
                let rows_of_both = plus
                    .chunks_exact_mut(FOLDED_STEP)
                    .zip(minus.chunks_exact_mut(FOLDED_STEP));
                for (row, (plus, minus)) in rows_of_both.enumerate().take(rows) {
                    let start = (block * BLOCK * POOL + row) * STRIDE;
                    let before = &wave[start..][..FOLDED];
                    let behind = &reversed[wave.len() - TAPS - start..][..FOLDED];
                    for at in 0..FOLDED {
                        plus[at] = before[at] + behind[at];
                        minus[at] = before[at] - behind[at];
                    }
                }
            });
            for ((folded, side), outputs) in self.folded.iter().zip(&sides).zip(&mut outputs) {
                folded
                    .product_of_rows_into(side, rows, FOLDED_STEP, &mut outputs[..rows * PADDED])
                    .map_err(kernel_error)?;
            }
            multiversion!({
                for (frame, out) in out.chunks_exact_mut(FILTERS).enumerate() {
                    for (outputs, out) in outputs.iter().zip(out.chunks_exact_mut(PAIRS)) {
                        let rows = &outputs[frame * POOL * PADDED..][..POOL * PADDED];
                        for at in 0..PAIRS {
                            let mut largest = rows[at].abs();
                            for row in 1..POOL {
                                let value = rows[row * PADDED + at].abs();
                                largest = if largest > value { largest } else { value };
                            }
                            out[at] = largest;
                        }
                    }
                }
            });
        }
        Ok(out)
    }
}

/// Frames of this many samples.
pub fn frames(samples: usize) -> usize {
    match samples.checked_sub(TAPS) {
        Some(rest) => rest / STRIDE + 1,
        None => 0,
    }
}

/// The even filters, then the odd ones: (80, 251). With `low` and `high` the edges of a band in radians per sample and `n`
/// the place before the centre, the left half is `(sin(high n) - sin(low n)) / (n / 2)` or
/// `(cos(low n) - cos(high n)) / (n / 2)`, times a Hamming window, over twice the width of the band; the right half mirrors
/// it, with the other sign for odd filters. In f32, as the networks were trained with.
pub fn filters(low_hz: &[f32], band_hz: &[f32]) -> Result<Vec<f32>> {
    let mut filters = vec![0.0; FILTERS * TAPS];
    let (even, odd) = filters.split_at_mut(PAIRS * TAPS);
    let halves = even.chunks_exact_mut(TAPS).zip(odd.chunks_exact_mut(TAPS));
    for ((&low_hz, &band_hz), (even, odd)) in low_hz.iter().zip(band_hz).zip(halves) {
        let low = LEAST_LOW + low_hz.abs();
        let high = (low + LEAST_BAND + band_hz.abs()).clamp(LEAST_LOW, SAMPLE_RATE / 2.0);
        let band = high - low;
        if band == 0.0 || !band.is_finite() {
            return Err(Error::Weights(format!("a sinc filter goes from {low} Hz to {high} Hz")));
        }
        even[HALF] = 1.0;
        for tap in 0..HALF {
            let window = 0.54 - 0.46 * (2.0 * PI * tap as f64 / (TAPS - 1) as f64).cos();
            let n = 2.0 * PI as f32 * ((tap as f32 - HALF as f32) / SAMPLE_RATE);
            let scaled = |difference: f32| difference / (n / 2.0) * window as f32 / (2.0 * band);
            even[tap] = scaled((high * n).sin() - (low * n).sin());
            odd[tap] = scaled((low * n).cos() - (high * n).cos());
            even[TAPS - 1 - tap] = even[tap];
            odd[TAPS - 1 - tap] = -odd[tap];
        }
    }
    Ok(filters)
}

/// Instance norm of a wave with one weight and one bias, `(x - mean) gain + bias`, with its biased variance.
#[derive(Debug, Clone, Copy)]
pub struct WaveNorm {
    pub mean: f64,
    pub gain: f64,
    pub bias: f64,
}

impl WaveNorm {
    /// Of a wave that is followed by `zeros` zeros.
    pub fn new(wave: &[f32], zeros: usize, weight: f32, bias: f32) -> Self {
        let count = (wave.len() + zeros) as f64;
        let mean = sum(wave, |x| x) / count;
        let squares = sum(wave, |x| (x - mean) * (x - mean)) + zeros as f64 * mean * mean;
        Self {
            mean,
            gain: f64::from(weight) / (squares / count + super::sincnet::EPSILON).sqrt(),
            bias: f64::from(bias),
        }
    }

    pub fn apply(&self, wave: &[f32]) -> Vec<f32> {
        let (mean, gain, bias) = (self.mean as f32, self.gain as f32, self.bias as f32);
        wave.iter().map(|&x| (x - mean).mul_add(gain, bias)).collect()
    }
}

/// Sum in lanes, so that it can be vectorised; in f64, as 160,000 values in f32 would lose digits.
pub fn sum(values: &[f32], f: impl Fn(f64) -> f64) -> f64 {
    let mut sums = [0.0f64; 8];
    let (blocks, rest) = values.as_chunks::<8>();
    for block in blocks {
        for (sum, &value) in sums.iter_mut().zip(block) {
            *sum += f(f64::from(value));
        }
    }
    for (sum, &value) in sums.iter_mut().zip(rest) {
        *sum += f(f64::from(value));
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths that do not fill a block, and that have less frames than are pooled.
    #[test]
    fn folded_filters_give_what_the_filters_give() {
        let value = |at: usize| (at * 7919 % 2003) as f32 / 1001.5 - 1.0;
        let low: Vec<f32> = (0..PAIRS).map(|pair| 30.0 + 150.0 * pair as f32).collect();
        let filters = SincFilters::new(&low, &[100.0; PAIRS]).unwrap();
        for samples in [250, 251, 270, 271, 1500, 3000] {
            let wave: Vec<f32> = (0..samples).map(value).collect();
            let whole = filters.apply(&wave).unwrap();
            let found = filters.pooled::<3>(&wave).unwrap();
            assert_eq!(found.len(), frames(samples) / 3 * FILTERS);
            for (at, found) in found.iter().enumerate() {
                let row = |row: usize| whole[(at / FILTERS * 3 + row) * FILTERS + at % FILTERS].abs();
                let expected = row(0).max(row(1)).max(row(2));
                // Sums of 251 products below 1.
                assert!((found - expected).abs() < 1e-4, "{samples} {at}: {found} {expected}");
            }
        }
    }
}
