//! Changes of level, place and shape of a signal.

/// The factor of an amplitude that `db` decibels are: `10^(db / 20)`.
pub fn amplitude(db: f64) -> f64 {
    10f64.powf(db / 20.0)
}

/// Sums that are taken side by side, so that none waits for another.
const LANES: usize = 16;

/// The mean of the squares; 0 of an empty signal.
pub fn power(signal: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let (chunks, rest) = signal.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        for (sum, &x) in sums.iter_mut().zip(chunk) {
            *sum += square(x);
        }
    }
    let squares = sums.iter().sum::<f64>() + rest.iter().map(|&x| square(x)).sum::<f64>();
    squares / signal.len().max(1) as f64
}

/// The largest magnitude.
pub fn peak(signal: &[f32]) -> f32 {
    let (chunks, rest) = signal.as_chunks::<LANES>();
    let mut peaks = [0.0f32; LANES];
    for chunk in chunks {
        for (peak, x) in peaks.iter_mut().zip(chunk) {
            *peak = peak.max(x.abs());
        }
    }
    peaks.iter().chain(rest).fold(0.0, |peak, x| peak.max(x.abs()))
}

/// Multiplies all samples; nothing is clipped.
pub fn scale(signal: &mut [f32], factor: f64) {
    for x in signal {
        *x = (f64::from(*x) * factor) as f32;
    }
}

/// Moves the signal `samples` earlier, or later where they are negative, and fills with zeros.
pub fn shift(signal: &mut [f32], samples: i64) {
    let length = signal.len();
    let by = usize::try_from(samples.unsigned_abs())
        .unwrap_or(usize::MAX)
        .min(length);
    if samples >= 0 {
        signal.copy_within(by.., 0);
        signal[length - by..].fill(0.0);
    } else {
        signal.copy_within(..length - by, by);
        signal[..by].fill(0.0);
    }
}

/// Silence of this many samples before and after.
pub fn pad(signal: &[f32], before: usize, after: usize) -> Vec<f32> {
    let mut padded = vec![0.0; before];
    padded.reserve(signal.len() + after);
    padded.extend_from_slice(signal);
    padded.resize(before + signal.len() + after, 0.0);
    padded
}

/// Clips a signal of any level as a recorder does whose gain is `gain_db` too high for it: the peak is taken for full scale,
/// raised by the gain, and what is above full scale is cut off (`hard`) or bent by tanh. The peak is then what it was before.
pub fn clip(signal: &mut [f32], gain_db: f64, hard: bool) {
    let peak = f64::from(peak(signal));
    if peak == 0.0 {
        return;
    }
    let gain = amplitude(gain_db);
    let bent = |x: f64| if hard { x.clamp(-1.0, 1.0) } else { x.tanh() };
    let back = peak / bent(gain);
    for x in signal {
        *x = (bent(f64::from(*x) / peak * gain) * back) as f32;
    }
}
