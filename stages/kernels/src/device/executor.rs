//! What runs kernels and products for a thread: the CUDA driver, or in tests another one in its place (the crate `flow-cuda-emulator`).

use std::cell::Cell;
use std::ffi::c_void;

use candle_core::{DType, Device, Shape, Tensor};

use super::cublaslt::Library;
use super::driver::Driver;
use super::launch::Argument;
use super::signature::Kernel;
use crate::error::Result;

/// Runs kernels, and products that cuBLASLt does not compute, after everything that it was given before.
pub trait Executor: Sync {
    /// Runs a kernel on that many blocks. Its arguments were checked.
    fn launch(&self, kernel: &Kernel, blocks: [u32; 2], arguments: &[Argument]) -> Result<()>;

    /// A tensor whose values are to be written, all of them.
    fn allocate(&self, shape: Shape, dtype: DType, device: &Device) -> Result<Tensor>;

    /// `a b` in f32 for matrices (m, k) and (k, n) of one type, f32, bf16 or f16, or for stacks of them.
    fn product(&self, a: &Tensor, b: &Tensor) -> Result<Tensor>;

    /// `out = beta out + a b` for matrices (m, k) and (k, n), with `out` in f32 and contiguous; `beta` is 0 or 1.
    fn multiply(&self, out: &Tensor, a: &Tensor, b: &Tensor, beta: f32) -> Result<()>;

    /// The functions of cuBLASLt, where it is there.
    fn cublaslt(&self) -> Option<&'static Library>;

    /// Bytes of the workspace of cuBLASLt's products.
    fn workspace(&self) -> usize;

    /// The most that the address of a tensor may be known to be a multiple of, in bytes.
    fn most_aligned(&self) -> u64;

    /// The address of the first value of a tensor on this device.
    fn address(&self, tensor: &Tensor, device: &Device) -> Result<u64>;

    /// The device's stream, whose context becomes that of the calling thread.
    fn stream(&self, device: &Device) -> Result<*mut c_void>;
}

thread_local! {
    /// In place of the driver: this thread treats CPU tensors as tensors on a device.
    static STAND_IN: Cell<Option<&'static dyn Executor>> = const { Cell::new(None) };
}

/// The one of this thread.
pub(crate) fn executor() -> &'static dyn Executor {
    STAND_IN.get().unwrap_or(&Driver)
}

/// Whether this thread has another executor in place of the driver.
pub(crate) fn has_stand_in() -> bool {
    STAND_IN.get().is_some()
}

/// Does `work` on this thread with another executor in place of the driver; with none, CPU tensors are CPU tensors.
pub fn with_stand_in<R>(stand_in: Option<&'static dyn Executor>, work: impl FnOnce() -> R) -> R {
    struct Back(Option<&'static dyn Executor>);
    impl Drop for Back {
        fn drop(&mut self) {
            STAND_IN.set(self.0);
        }
    }
    let _back = Back(STAND_IN.replace(stand_in));
    work()
}
