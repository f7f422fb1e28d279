//! Rounding of factors: weights and rows to int8 with scales, and both to bf16.

use crate::multiversion;

/// The largest code of a weight: codes are from -127 to 127.
const WEIGHT_CODES: f32 = 127.0;

/// The largest code of a row: codes are from 0 to 255.
const ROW_CODES: f32 = 255.0;

/// Values that all are below this are taken for zeros. (Else the factor to codes would not be finite.)
const NEGLIGIBLE: f32 = 1e-30;

/// Adding this rounds to a whole number, ties to even, and leaves it in the low bits.
const SHIFT: f32 = 12_582_912.0;

/// A whole number near a value of no more than some millions.
#[inline(always)]
fn nearest(value: f32) -> i32 {
    (value + SHIFT).to_bits().wrapping_sub(SHIFT.to_bits()).cast_signed()
}

/// Smallest and largest of some values and zero; no numbers if a value is not finite.
#[inline(always)]
fn range(values: &[f32]) -> (f32, f32) {
    // Whole numbers in the order of the floats, with what is not finite at the ends: the compiler makes vector code of these.
    let ordered = |bits: u32| (bits ^ ((bits.cast_signed() >> 31).cast_unsigned() >> 1)).cast_signed();
    let (mut smallest, mut largest) = (0, 0);
    for value in values {
        let value = ordered(value.to_bits());
        smallest = smallest.min(value);
        largest = largest.max(value);
    }
    let float = |value: i32| f32::from_bits(ordered(value.cast_unsigned()).cast_unsigned());
    let (smallest, largest) = (float(smallest), float(largest));
    if smallest.is_finite() && largest.is_finite() {
        (smallest, largest)
    } else {
        (f32::NAN, f32::NAN)
    }
}

/// How values become codes: `code = value / scale`, rounded, plus `zero`. If one value is not finite, the scale is no
/// number, and neither is any element of a product with it.
#[derive(Clone, Copy, Debug)]
pub struct Codes {
    /// The value from one code to the next.
    pub scale: f32,
    factor: f32,
    /// The code of zero.
    pub zero: i32,
}

impl Codes {
    /// Of the weights of an output: from -127 to 127, the largest of which is the largest weight.
    #[inline(always)]
    pub fn of_weights(weights: &[f32]) -> Self {
        let (smallest, largest) = range(weights);
        Self::spanning(f64::from(largest.max(-smallest)), WEIGHT_CODES)
    }

    /// Of a row: from 0 to 255, between its smallest and its largest value, or zero.
    #[inline(always)]
    pub fn of_row(row: &[f32]) -> Self {
        let (smallest, largest) = range(row);
        let codes = Self::spanning(f64::from(largest) - f64::from(smallest), ROW_CODES);
        Self {
            zero: -codes.offset(smallest),
            ..codes
        }
    }

    #[inline(always)]
    fn spanning(size: f64, codes: f32) -> Self {
        let (scale, factor) = if size < f64::from(NEGLIGIBLE) {
            (0.0, 0.0)
        } else {
            (size / f64::from(codes), f64::from(codes) / size)
        };
        Self {
            scale: scale as f32,
            factor: factor as f32,
            zero: 0,
        }
    }

    /// The code of a value less that of zero.
    #[inline(always)]
    fn offset(self, value: f32) -> i32 {
        // What is not a number has any code: the scale is none.
        if self.factor > 0.0 {
            nearest(value * self.factor)
        } else {
            0
        }
    }

    /// The code of a weight.
    #[inline(always)]
    pub fn weight(self, value: f32) -> i8 {
        self.offset(value) as i8
    }

    /// The code of a value of a row.
    #[inline(always)]
    pub fn row(self, value: f32) -> u8 {
        // Both ends may be rounded away from zero: 256 codes.
        (self.offset(value) + self.zero).min(255) as u8
    }
}

/// Codes of a row, and how they are made. `of` makes of a code and that of zero what the kernel reads.
#[inline(always)]
pub fn quantise_row<T>(row: &[f32], to: &mut [T], of: impl Fn(u8, i32) -> T) -> Codes {
    multiversion!({
        let codes = Codes::of_row(row);
        for (to, value) in to.iter_mut().zip(row) {
            *to = of(codes.row(*value), codes.zero);
        }
        codes
    })
}

/// The bits of the bf16 that is nearest, ties to even; subnormal numbers become zero.
#[inline(always)]
pub fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let size = bits & 0x7fff_ffff;
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // What is not a number stays none, and does not become infinite.
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
