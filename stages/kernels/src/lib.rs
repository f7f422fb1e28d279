//! Kernels of neural networks that candle lacks or executes slowly, as functions from tensors to tensors. Nothing here
//! depends on a model or its parameters.
//!
//! Each operation is a folder of [`ops`]: `mod.rs` for the CPU, `cuda.rs` and a `.cu` file for CUDA devices. Operations
//! that exist for devices alone, or for the CPU alone, have no `cuda.rs`.
//!
//! The CPU side works on contiguous slices, generic over f32 and f64, and shares rows or channels out over rayon's
//! threads. Work is always cut by the size of the data, never by the number of threads, and partial sums are added in
//! order, so the result is the same for any number of threads.
//!
//! For tensors on a CUDA device, the first line of each function dispatches to the function of the same name in `cuda.rs`.
//!
//! Also here: the [device] of tensors, the [threads] that compute, which treat [subnormal numbers](subnormals) as
//! zeros, and [random numbers](noise) that do not depend on the order in which they are drawn.

mod aligned;
mod chunks;
pub mod counts;
pub mod device;
mod error;
mod float;
mod lengths;
pub mod noise;
pub mod ops;
pub mod product;
mod slices;
pub mod subnormals;
pub mod testing;
pub mod threads;
pub mod timings;
mod vectors;

pub use aligned::Aligned;
pub use chunks::by_chunks;
pub(crate) use chunks::*;
pub use device::{is_gpu, on_cpu, upload};
pub use error::{Error, Result};
pub use float::{Float, unsupported};
pub use lengths::Lengths;
pub use noise::Noise;
pub use ops::elementwise::glu;
pub use ops::sums::{bias, column_sums, embedding, squares};
pub use ops::{
    adamw, attention, batch_norm, ctc, depthwise, elementwise, gated_convolution, greedy, joint, layer_norm, linear,
    log_mel, lstm, relative_attention, subsample, tanh, tdt,
};
pub use product::cublaslt;
pub use slices::{Slice, modify, slice, tensor};
pub use vectors::Once;
#[cfg(target_arch = "x86_64")]
pub use vectors::has_avx512;
pub(crate) use vectors::*;

// As a dependency of the unit tests the emulator would be the executor of another copy of this crate.
#[cfg(test)]
extern crate self as flow_kernels;
#[cfg(test)]
#[path = "../emulator/src/lib.rs"]
pub mod flow_cuda_emulator;

/// Runs `$body` with the type alias `$T` set to f32 or f64 after a [`DType`](candle_core::DType); other types are an error.
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

/// Returns what `call` gives where a tensor is on a device.
macro_rules! on_gpu {
    ($tensor:expr, $($call:tt)+) => {
        if $crate::is_gpu($tensor.device()) {
            return $($call)+;
        }
    };
}
pub(crate) use on_gpu;
