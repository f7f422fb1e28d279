//! The number types of kernels for the CPU.

use candle_core::{CpuStorage, DType, WithDType};

use crate::error::Error;

/// f32 or f64.
pub trait Float: WithDType + num_traits::Float + std::iter::Sum {
    /// From f64, rounded.
    fn of(value: f64) -> Self;
    /// To f64, exact.
    fn wide(self) -> f64;
    /// `e^x` to about two units in the last place, in a form that the compiler can vectorise; saturates at 1e-38 and
    /// 1e38 in f32 instead of reaching 0 and infinity. NaN stays NaN.
    fn exp_quick(self) -> Self;
    /// `e^-x`, the same to the bit as `(-x).exp_quick()`, with an instruction less.
    fn exp_minus(self) -> Self;
    /// The values of a CPU storage of this type.
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut Vec<Self>>;

    /// Logistic function.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::one() / (Self::one() + self.exp_minus())
    }

    /// `x` times its logistic function.
    #[inline(always)]
    fn silu(self) -> Self {
        self / (Self::one() + self.exp_minus())
    }
}

impl Float for f32 {
    #[inline(always)]
    fn of(value: f64) -> Self {
        value as f32
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        f64::from(self)
    }
    #[inline(always)]
    fn exp_quick(self) -> Self {
        exp::<false>(self)
    }
    #[inline(always)]
    fn exp_minus(self) -> Self {
        exp::<true>(self)
    }
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut Vec<Self>> {
        match storage {
            CpuStorage::F32(values) => Some(values),
            _ => None,
        }
    }
}

impl Float for f64 {
    #[inline(always)]
    fn of(value: f64) -> Self {
        value
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }
    #[inline(always)]
    fn exp_quick(self) -> Self {
        self.exp()
    }
    #[inline(always)]
    fn exp_minus(self) -> Self {
        (-self).exp()
    }
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut Vec<Self>> {
        match storage {
            CpuStorage::F64(values) => Some(values),
            _ => None,
        }
    }
}

/// `e^x`, or `e^-x`.
#[inline(always)]
fn exp<const MINUS: bool>(x: f32) -> f32 {
    // e^x = 2^n * e^r, |r| <= ln(2)/2, with e^r = 1 + r + r^2 p(r): of all p of
    // degree 4 the one with the least relative error, 3e-9.
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
    const SHIFT: f32 = 12_582_912.0;
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    let (low, high) = if MINUS { (-88.37, 87.0) } else { (-87.0, 88.37) };
    let x = if x < low { low } else { x };
    let x = if x > high { high } else { x };
    let shifted = x.mul_add(if MINUS { -LOG2_E } else { LOG2_E }, SHIFT);
    let n = shifted - SHIFT;
    let r = n.mul_add(-0.693_359_4, if MINUS { -x } else { x });
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 0.0013814539f32;
    let p = p.mul_add(r, 0.008368745);
    let p = p.mul_add(r, 0.04166839);
    let p = p.mul_add(r, 0.16666521);
    let p = p.mul_add(r, 0.49999994);
    let p = p.mul_add(r * r, r) + 1.0;
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// The error of [`dispatch`](crate::dispatch) for another type.
pub fn unsupported(dtype: DType) -> Error {
    Error::Input(format!(
        "data type {} is not supported on the CPU; use f32 or f64",
        dtype.as_str()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_exponential_is_close_and_keeps_nan() {
        let mut worst = 0.0f64;
        for step in -8_699..8_836 {
            let x = step as f32 * 0.01 + 0.003_7;
            if !(-87.0..88.37).contains(&x) {
                continue;
            }
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(x.exp_quick()) - exact).abs() / exact);
            assert_eq!((-x).exp_minus().to_bits(), x.exp_quick().to_bits(), "{x}");
        }
        // Two units in the last place of f32.
        assert!(worst < 2.4e-7, "{worst}");
        assert!(f32::NAN.exp_quick().is_nan() && f32::NAN.exp_minus().is_nan());
        assert!(f32::NEG_INFINITY.exp_quick() < 2e-38);
        assert!(f32::INFINITY.exp_quick() > 2e38);
        assert!((0.0f32.exp_quick() - 1.0).abs() == 0.0);
    }
}
