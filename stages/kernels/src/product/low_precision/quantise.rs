//! Rounding of factors: rows to int8 with a scale of their own, and to bf16.

use crate::multiversion;

/// The largest code: codes are from -127 to 127.
const LARGEST: f32 = 127.0;

/// A row whose largest value is below this is a row of zeros. (Else the factor to codes would not be finite.)
const NEGLIGIBLE: f32 = 1e-30;

/// Adding this rounds to a whole number, ties to even, and leaves it in the low bits.
const SHIFT: f32 = 12_582_912.0;

/// The value of one code, and the factor from values to codes. A row with an infinite value or one that is no number has a
/// scale that is no number, and so have all elements of a product with it.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub value: f32,
    factor: f32,
}

impl Scale {
    /// Of a row: its largest value is code 127.
    #[inline(always)]
    pub fn of(row: &[f32]) -> Self {
        // Whole numbers are in the order of the floats that they are the bits of, with all that is not finite at the end.
        let largest = row
            .iter()
            .fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7fff_ffff));
        let largest = f32::from_bits(largest);
        if !largest.is_finite() {
            return Self {
                value: f32::NAN,
                factor: 0.0,
            };
        }
        if largest < NEGLIGIBLE {
            return Self {
                value: 0.0,
                factor: 0.0,
            };
        }
        Self {
            value: largest / LARGEST,
            factor: LARGEST / largest,
        }
    }

    /// The code of a value of the row.
    #[inline(always)]
    pub fn code(self, value: f32) -> i8 {
        let shifted = if self.factor > 0.0 {
            value * self.factor + SHIFT
        } else {
            SHIFT
        };
        shifted.to_bits() as i8
    }
}

/// Codes of a row, and its scale. `of` makes of a code what the kernel reads.
#[inline(always)]
pub fn quantise_row<T>(row: &[f32], to: &mut [T], of: impl Fn(i8) -> T) -> f32 {
    multiversion!({
        let scale = Scale::of(row);
        for (to, value) in to.iter_mut().zip(row) {
            *to = of(scale.code(*value));
        }
        scale.value
    })
}

/// The bits of the bf16 that is nearest, ties to even; subnormal numbers become zero.
#[inline(always)]
pub fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let size = bits & 0x7fff_ffff;
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // What is no number stays none, and does not become infinite.
    let nan = bits >> 16 | 0x40;
    let kept = if size > 0x7f80_0000 { nan } else { nearest };
    (if size < 0x0080_0000 { bits >> 16 & 0x8000 } else { kept }) as u16
}

/// The value of bits of bf16.
#[inline(always)]
pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds a row; `of` makes of bits what the kernel reads.
#[inline(always)]
pub fn round_row<T>(row: &[f32], to: &mut [T], of: impl Fn(u16) -> T) {
    multiversion!({
        for (to, value) in to.iter_mut().zip(row) {
            *to = of(bf16_bits(*value));
        }
    });
}
