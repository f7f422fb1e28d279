//! Changes the sample rate with a windowed sinc.
//!
//! The filter is the default one of `torchaudio.functional.resample` (`sinc_interp_hann`, low-pass width 6,
//! roll-off 0.99), so that a model gets the same samples as in Python: output m is `sum over u of x[u] * h(m / to - u /
//! from)` with `h(t) = s * sinc(s t) * cos(pi s t / 12)^2 * (1 / from)` for `|s t| < 6`, else 0, and `s = 0.99 *
//! min(from, to)`. Only the taps inside the window are computed, which makes it cheap at any ratio of rates.

use std::ops::Range;

use crate::error::AudioError;

const ZERO_CROSSINGS: f64 = 6.0;
const ROLLOFF: f64 = 0.99;
/// Largest table of taps that is kept (8 MiB); odd rates above that compute taps for each output sample.
const TABLE_LIMIT: usize = 1 << 20;
/// Input samples that are taken at once, and most that are kept though nothing needs them.
const BLOCK: usize = 1 << 14;

/// Number of samples that [`resample`] gives: `ceil(to * frames / from)`.
pub fn resampled_length(frames: u64, from: u32, to: u32) -> u64 {
    // Frames are bounded by memory, far below 2^64 / 2^32.
    (frames * u64::from(to)).div_ceil(u64::from(from))
}

/// The part of the input that determines some of the output samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeededInput {
    /// Samples of the input; the last ones may lie past its end.
    pub input: Range<u64>,
    /// Which output sample the first one is that [`resample`] gives of them.
    pub first_output: u64,
}

/// The part of a signal whose [`resample`] result has the samples `output` of the whole, equal to the bit: it begins
/// with a period of the filter, far enough before them.
pub fn needed_input(output: Range<u64>, from: u32, to: u32) -> NeededInput {
    if from == to {
        return NeededInput {
            first_output: output.start,
            input: output,
        };
    }
    let kernel = Kernel::new(from, to);
    let (phases, step) = (kernel.phases as u64, kernel.step as u64);
    // Periods covered by half a window, and one for the position of the sample in its period.
    let margin = (kernel.width as u64).div_ceil(step) + 1;
    let first = (output.start / phases).saturating_sub(margin);
    let last = (output.end / phases).saturating_add(margin + 1);
    NeededInput {
        input: first.saturating_mul(step)..last.saturating_mul(step),
        first_output: first.saturating_mul(phases),
    }
}

/// Resamples one channel. Rates from 1 to 768 kHz; equal rates give the input back.
pub fn resample(signal: Vec<f32>, from: u32, to: u32) -> Result<Vec<f32>, AudioError> {
    let mut resampler = Resampler::new(from, to)?;
    if from == to {
        return Ok(signal);
    }
    let mut out = Vec::with_capacity(resampled_length(signal.len() as u64, from, to) as usize);
    for block in signal.chunks(BLOCK) {
        resampler.feed(block, &mut out);
    }
    resampler.finish(&mut out);
    Ok(out)
}

/// [`resample`] of a signal that comes in blocks. However it is cut, the samples are the same to the bit.
pub struct Resampler {
    from: u32,
    to: u32,
    /// None where the rates are equal.
    filter: Option<Filter>,
}

impl Resampler {
    /// Rates from 1 to 768 kHz.
    pub fn new(from: u32, to: u32) -> Result<Resampler, AudioError> {
        for rate in [from, to] {
            if !(1_000..=768_000).contains(&rate) {
                return Err(AudioError::SampleRate(rate));
            }
        }
        let filter = (from != to).then(|| Filter::new(from, to));
        Ok(Resampler { from, to, filter })
    }

    /// Takes the next samples, and appends what they complete to `out`.
    pub fn feed(&mut self, signal: &[f32], out: &mut Vec<f32>) {
        let Some(filter) = &mut self.filter else {
            out.extend_from_slice(signal);
            return;
        };
        filter.buffer.extend(signal.iter().map(|&sample| f64::from(sample)));
        let end = filter.offset + filter.buffer.len() as u64;
        while filter.window_end() <= end as i64 {
            filter.next_output(out);
        }
        filter.forget();
    }

    /// Appends what is left at the end of the signal, after which there is silence.
    pub fn finish(&mut self, out: &mut Vec<f32>) {
        if let Some(filter) = &mut self.filter {
            let end = filter.offset + filter.buffer.len() as u64;
            let length = resampled_length(end, self.from, self.to);
            while filter.outputs < length {
                filter.next_output(out);
            }
        }
    }
}

/// The filter, and the input samples that are still needed.
struct Filter {
    kernel: Kernel,
    /// The taps of all phases, one after the other; empty where they are too many.
    table: Vec<f64>,
    /// The taps of one phase, where there is no table.
    own: Vec<f64>,
    /// The first sample under the window of each phase, counted from the beginning of its period.
    firsts: Vec<i64>,
    /// Input samples, as `f64` once rather than for each tap that a sample is multiplied with.
    buffer: Vec<f64>,
    /// Which sample of the input the first one of `buffer` is.
    offset: u64,
    /// Where the period of the next output sample begins in the input, and its phase.
    period: i64,
    phase: usize,
    outputs: u64,
}

impl Filter {
    fn new(from: u32, to: u32) -> Filter {
        let kernel = Kernel::new(from, to);
        let phases = kernel.phases;
        let mut table = Vec::new();
        if phases.saturating_mul(kernel.width) <= TABLE_LIMIT {
            table.resize(phases * kernel.width, 0.0);
            for (phase, taps) in table.chunks_exact_mut(kernel.width).enumerate() {
                kernel.taps(phase, taps);
            }
        }
        Filter {
            table,
            own: vec![0.0; kernel.width],
            firsts: (0..phases).map(|phase| kernel.first(phase)).collect(),
            kernel,
            buffer: Vec::new(),
            offset: 0,
            period: 0,
            phase: 0,
            outputs: 0,
        }
    }

    /// The first input sample under the window of the next output sample; negative before the beginning.
    fn window_start(&self) -> i64 {
        self.period + self.firsts[self.phase]
    }

    fn window_end(&self) -> i64 {
        self.window_start() + self.kernel.width as i64
    }

    fn next_output(&mut self, out: &mut Vec<f32>) {
        let (phase, width) = (self.phase, self.kernel.width);
        let taps = if self.table.is_empty() {
            self.kernel.taps(phase, &mut self.own);
            &self.own[..]
        } else {
            &self.table[phase * width..][..width]
        };
        let first = self.period + self.firsts[phase] - self.offset as i64;
        out.push(weighted_sum(taps, &self.buffer, first) as f32);
        self.outputs += 1;
        self.phase += 1;
        if self.phase == self.kernel.phases {
            (self.period, self.phase) = (self.period + self.kernel.step as i64, 0);
        }
    }

    /// Drops input samples that no output sample needs any more.
    fn forget(&mut self) {
        let done = self.window_start() - self.offset as i64;
        // A few are kept, since moving the rest costs more.
        if let Ok(done) = usize::try_from(done)
            && done >= BLOCK
        {
            let done = done.min(self.buffer.len());
            self.buffer.drain(..done);
            self.offset += done as u64;
        }
    }
}

/// Sum of `taps[i] * signal[first + i]`; the signal is 0 outside.
fn weighted_sum(taps: &[f64], signal: &[f64], first: i64) -> f64 {
    let skip = first.min(0).unsigned_abs() as usize;
    let start = first.max(0) as usize;
    let (Some(taps), Some(signal)) = (taps.get(skip..), signal.get(start..)) else {
        return 0.0;
    };
    let length = taps.len().min(signal.len());
    let (taps, signal) = (&taps[..length], &signal[..length]);
    // Four sums at once: one is bound by the latency of an addition.
    let mut sums = [0.0f64; 4];
    for (taps, signal) in taps.chunks_exact(4).zip(signal.chunks_exact(4)) {
        for ((sum, tap), sample) in sums.iter_mut().zip(taps).zip(signal) {
            *sum += tap * sample;
        }
    }
    let whole = length / 4 * 4;
    let rest: f64 = taps[whole..]
        .iter()
        .zip(&signal[whole..])
        .map(|(tap, sample)| tap * sample)
        .sum();
    (sums[0] + sums[1]) + (sums[2] + sums[3]) + rest
}

/// The filter for one pair of rates, in lowest terms: `phases` output samples correspond to `step` input samples.
struct Kernel {
    phases: usize,
    step: usize,
    /// Taps per phase.
    width: usize,
    /// Half the window, in input samples.
    reach: f64,
    /// Cut-off: 0.99 times the smaller of `phases` and `step`.
    cutoff: f64,
}

impl Kernel {
    fn new(from: u32, to: u32) -> Self {
        let divisor = greatest_common_divisor(from, to);
        let (step, phases) = ((from / divisor) as usize, (to / divisor) as usize);
        let cutoff = step.min(phases) as f64 * ROLLOFF;
        let reach = ZERO_CROSSINGS * step as f64 / cutoff;
        Kernel {
            phases,
            step,
            width: (2.0 * reach).floor() as usize + 2,
            reach,
            cutoff,
        }
    }

    /// The first input sample under the window of `phase`, counted from the beginning of its period.
    fn first(&self, phase: usize) -> i64 {
        (self.step as f64 * phase as f64 / self.phases as f64 - self.reach).ceil() as i64
    }

    fn taps(&self, phase: usize, taps: &mut [f64]) {
        let first = self.first(phase);
        let (step, phases) = (self.step as f64, self.phases as f64);
        for (index, tap) in taps.iter_mut().enumerate() {
            let t = ((first + index as i64) as f64 / step - phase as f64 / phases) * self.cutoff;
            *tap = if t.abs() >= ZERO_CROSSINGS {
                0.0
            } else {
                let window = (std::f64::consts::PI * t / ZERO_CROSSINGS / 2.0).cos();
                sinc(t) * window * window * self.cutoff / step
            };
        }
    }
}

fn sinc(t: f64) -> f64 {
    if t == 0.0 {
        return 1.0;
    }
    let x = std::f64::consts::PI * t;
    x.sin() / x
}

fn greatest_common_divisor(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same sum straight from the formula, over all input samples.
    fn direct(signal: &[f32], from: u32, to: u32) -> Vec<f64> {
        let s = ROLLOFF * f64::from(from.min(to));
        let length = resampled_length(signal.len() as u64, from, to);
        let at = |m: u64| {
            let taps = signal.iter().enumerate().map(|(u, x)| {
                let t = s * (m as f64 / f64::from(to) - u as f64 / f64::from(from));
                if t.abs() >= 6.0 {
                    return 0.0;
                }
                let window = (std::f64::consts::PI * t / 12.0).cos().powi(2);
                f64::from(*x) * sinc(t) * window * s / f64::from(from)
            });
            taps.sum()
        };
        (0..length).map(at).collect()
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(60))]
        #[test]
        fn equals_the_formula_at_any_rate(
            from in 1_000u32..768_000,
            usual in 0usize..8,
            signal in proptest::collection::vec(-1.0f32..1.0, 0..300),
        ) {
            // Half of the cases at common rates, half at any rate.
            let from = [8_000, 11_025, 22_050, 44_100].get(usual).copied().unwrap_or(from);
            let expected = direct(&signal, from, 16_000);
            let got = resample(signal, from, 16_000).unwrap();
            proptest::prop_assert_eq!(got.len(), expected.len());
            for (a, b) in got.iter().zip(&expected) {
                // One rounding to f32 of values of about 1, and phases computed in another order.
                proptest::prop_assert!((f64::from(*a) - b).abs() < 2e-7, "{} {}", a, b);
            }
        }
    }

    /// The whole signal at once, as the reference for blocks.
    fn at_once(signal: &[f32], from: u32, to: u32) -> Vec<f32> {
        let mut filter = Filter::new(from, to);
        filter.buffer = signal.iter().map(|&sample| f64::from(sample)).collect();
        let mut out = Vec::new();
        for _ in 0..resampled_length(signal.len() as u64, from, to) {
            filter.next_output(&mut out);
        }
        out
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(60))]
        #[test]
        fn blocks_of_any_size_give_the_same_bits(
            from in 1_000u32..100_000,
            usual in 0usize..10,
            length in 0usize..60_000,
            sizes in proptest::collection::vec(1usize..20_000, 1..8),
        ) {
            let from = [8_000, 11_025, 22_050, 44_100, 48_000].get(usual).copied().unwrap_or(from);
            let sample = |at: usize| ((at * at % 1_009) as f32 / 504.5 - 1.0) * 0.9;
            let signal: Vec<f32> = (0..length).map(sample).collect();
            let bits = |signal: &[f32]| signal.iter().map(|sample| sample.to_bits()).collect::<Vec<_>>();
            let expected = bits(&at_once(&signal, from, 16_000));
            proptest::prop_assert_eq!(&bits(&resample(signal.clone(), from, 16_000).unwrap()), &expected);
            let (mut resampler, mut out) = (Resampler::new(from, 16_000).unwrap(), Vec::new());
            let mut rest = &signal[..];
            for size in sizes.iter().cycle() {
                let (block, after) = rest.split_at(rest.len().min(*size));
                resampler.feed(block, &mut out);
                rest = after;
                if rest.is_empty() {
                    break;
                }
            }
            resampler.finish(&mut out);
            proptest::prop_assert_eq!(bits(&out), expected);
        }
    }

    #[test]
    fn rates_that_nobody_records_at_are_refused() {
        assert!(matches!(
            resample(vec![0.0; 4], 999, 16_000),
            Err(AudioError::SampleRate(999))
        ));
        assert!(matches!(
            resample(vec![0.0; 4], 4_000_000_000, 16_000),
            Err(AudioError::SampleRate(_))
        ));
    }
}
