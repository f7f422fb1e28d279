//! Stochastic rounding of weights in bf16.
//!
//! A bf16 number has a significand of 8 bits: the number after 1 is 1 + 1/128, so rounding to nearest would lose every
//! update of 1e-4. Rounding up with a probability equal to the fraction that is cut off keeps the updates on average.

use flow_random::nth;
use half::bf16;
use rayon::prelude::*;

use super::CHUNK;

/// The seed of a parameter's rounding at one of its updates.
pub fn seed(name: &str, update: u64) -> u64 {
    let letters = name.bytes().fold(0, |state, byte| nth(state ^ u64::from(byte), 1));
    nth(letters ^ update, 1)
}

/// Stores `values`, each as one of its two neighbours in bf16, with probabilities such that the mean over many seeds is
/// the value. Values that bf16 holds exactly, infinities and NaN are unchanged.
pub(super) fn store(values: &[f32], stored: &mut [bf16], seed: u64) {
    let chunks = stored.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK)).enumerate();
    chunks.for_each(|(number, (stored, values))| {
        let first = (number * CHUNK) as u64;
        for (index, (stored, value)) in (first..).zip(stored.iter_mut().zip(values)) {
            *stored = round(*value, nth(seed ^ index, 1) as u16);
        }
    });
}

/// `noise` from 0 to 65535, the 16 bits that are cut off.
fn round(value: f32, noise: u16) -> bf16 {
    if !value.is_finite() {
        return bf16::from_f32(value);
    }
    // Magnitudes of floating-point numbers are ordered as their bits are, so a carry leads to the next one up.
    let bits = value.to_bits().wrapping_add(u32::from(noise)) >> 16;
    bf16::from_bits(bits as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_the_value_and_the_neighbours_are_its_own() {
        for value in [1.0f32, -1.0, 1.002, -1.002, 0.3, 3.3e-5, -7.7e8, 1e-39] {
            let below = bf16::from_bits((value.to_bits() >> 16) as u16).to_f32();
            let above = bf16::from_bits((value.to_bits() >> 16) as u16 + 1).to_f32();
            let values = vec![value; 40_000];
            let mut stored = vec![bf16::ZERO; values.len()];
            store(&values, &mut stored, seed("a.weight", 7));
            assert!(
                stored.iter().all(|s| s.to_f32() == below || s.to_f32() == above),
                "{value}"
            );
            let mean = stored.iter().map(|s| f64::from(s.to_f32())).sum::<f64>() / stored.len() as f64;
            // Four standard deviations of the mean of so many draws, at most half a step each.
            let allowed = f64::from((above - below).abs()) * 0.5 * 4.0 / (values.len() as f64).sqrt();
            assert!((mean - f64::from(value)).abs() <= allowed, "{value}: {mean}");
        }
        assert_eq!(round(1.5, u16::MAX).to_f32(), 1.5);
        assert!(round(f32::NAN, u16::MAX).is_nan());
        assert_eq!(round(f32::INFINITY, 9), bf16::INFINITY);
        // Other seeds for other parameters and updates, the same for the same.
        assert_ne!(seed("a.weight", 7), seed("a.weight", 8));
        assert_ne!(seed("a.weight", 7), seed("b.weight", 7));
    }
}
