//! Kernels of neural networks that candle lacks or executes slowly, one file each, as functions from tensors to
//! tensors. Nothing here depends on a model or its parameters.
//!
//! The CPU side works on contiguous slices, generic over f32 and f64, and shares rows or channels out over rayon's
//! threads. Work is always cut by the size of the data, never by the number of threads, and partial sums are added in
//! order, so the result is the same for any number of threads.
//!
//! For tensors on a CUDA device, the first line of each function dispatches to the function of the same name in `cuda`.
//!
//! Also here: the [device] of tensors, the [threads] that compute, which treat [subnormal numbers](subnormals) as
//! zeros, and [random numbers](noise) that do not depend on the order in which they are drawn.

pub mod adamw;
pub mod attention;
pub mod batch_norm;
pub mod bias;
mod chunks;
pub mod column_sums;
pub mod counts;
mod cuda;
pub mod depthwise;
pub mod device;
pub mod elementwise;
pub mod embedding;
mod error;
pub mod gated_convolution;
pub mod glu;
pub mod joint;
pub mod layer_norm;
mod lengths;
pub mod lstm;
pub mod noise;
pub mod product;
pub mod squares;
pub mod subnormals;
pub mod subsample;
pub mod testing;
pub mod threads;
pub mod timings;
pub mod upload;
mod vectors;

#[cfg(test)]
#[path = "not_a_number_tests.rs"]
mod not_a_number;

pub use chunks::by_chunks;
pub(crate) use chunks::*;
pub use cuda::{cublaslt, emulator, greedy, log_mel, relative_attention, tdt};
pub use error::{Error, Result};
pub use lengths::Lengths;
pub use noise::Noise;
pub use vectors::Once;
#[cfg(target_arch = "x86_64")]
pub use vectors::has_avx512;
pub(crate) use vectors::*;

use std::marker::PhantomData;
use std::ops::{Deref, Range};

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor, WithDType};

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

/// Runs `$body` with the type alias `$T` set to f32 or f64 after a [`DType`]; other types are an error.
#[macro_export]
macro_rules! dispatch {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            other => Err($crate::unsupported(other).into()),
        }
    };
}

/// Calls the function of the same name in `cuda` where a tensor is on a device.
macro_rules! on_gpu {
    ($tensor:expr, $($call:tt)+) => {
        if $crate::cuda::holds($tensor) {
            return $crate::cuda::$($call)+;
        }
    };
}
pub(crate) use on_gpu;

/// Whether this device is one that the kernels in `cuda` are for.
pub fn is_gpu(device: &Device) -> bool {
    cuda::is_for(device)
}

/// Runs an operation that always runs on the CPU, with tensors on the CPU.
pub fn on_cpu<R>(work: impl FnOnce() -> R) -> R {
    cuda::without_emulation(work)
}

/// An error in a thread that emulates a device: on a real device the CPU kernel would not work.
fn no_device() -> Result<()> {
    if cuda::is_emulated() {
        return Err(Error::Input(
            "a kernel for the CPU was given a tensor on a device".into(),
        ));
    }
    Ok(())
}

/// The error of [`dispatch`] for another type.
pub fn unsupported(dtype: DType) -> Error {
    Error::Input(format!(
        "data type {} is not supported on the CPU; use f32 or f64",
        dtype.as_str()
    ))
}

/// The values of a contiguous CPU tensor; holds its read lock.
pub struct Slice<'a, T> {
    /// Candle's read guard, whose type candle does not name.
    storage: Box<dyn Deref<Target = Storage> + 'a>,
    range: Range<usize>,
    element: PhantomData<T>,
}

impl<T: Float> Deref for Slice<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &**self.storage {
            // `slice` checked device and type; the lock keeps both as they are.
            Storage::Cpu(values) => &values.as_slice::<T>().expect("type was checked")[self.range.clone()],
            _ => unreachable!("device was checked"),
        }
    }
}

/// The values of a tensor that is on the CPU, contiguous and of type `T`. Dereference it once, before a loop.
pub fn slice<T: Float>(tensor: &Tensor) -> Result<Slice<'_, T>> {
    no_device()?;
    let (storage, layout) = tensor.storage_and_layout();
    let (start, end) = layout
        .contiguous_offsets()
        .ok_or_else(|| Error::Input(format!("tensor of shape {:?} is not contiguous", tensor.dims())))?;
    match &*storage {
        Storage::Cpu(values) => {
            values.as_slice::<T>()?;
        }
        _ => return Err(Error::Input("kernel has no version for this device".into())),
    }
    Ok(Slice {
        storage: Box::new(storage),
        range: start..end,
        element: PhantomData,
    })
}

/// A CPU tensor made of `values` without a copy.
pub fn tensor<T: Float>(values: Vec<T>, shape: impl Into<Shape>) -> Result<Tensor> {
    no_device()?;
    Ok(Tensor::from_vec(values, shape.into(), &Device::Cpu)?)
}

struct Modify<T, F> {
    change: F,
    element: PhantomData<T>,
}

impl<T: Float, F: Fn(&mut [T])> InplaceOp1 for Modify<T, F> {
    fn name(&self) -> &'static str {
        "modify"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (start, end) = layout
            .contiguous_offsets()
            .ok_or_else(|| candle_core::Error::Msg("tensor to change is not contiguous".into()))?;
        let values = T::values_mut(storage)
            .ok_or_else(|| candle_core::Error::Msg("tensor to change has another type".into()))?;
        (self.change)(&mut values[start..end]);
        Ok(())
    }
}

/// Changes the values of a contiguous CPU tensor in place. Every tensor that shares its storage changes too; a tensor
/// read inside `change` must not be one of them.
pub fn modify<T: Float>(tensor: &Tensor, change: impl Fn(&mut [T])) -> Result<()> {
    no_device()?;
    tensor.inplace_op1(&Modify {
        change,
        element: PhantomData,
    })?;
    Ok(())
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
