//! The CUDA driver as an [`Executor`]; in a build without CUDA every call of it is an error.

use std::ffi::c_void;

use candle_core::{DType, Device, Shape, Tensor};

use super::cublaslt::{self, Library};
#[cfg(feature = "cuda")]
use super::cuda;
use super::executor::Executor;
use super::launch::Argument;
use super::signature::Kernel;
#[cfg(not(feature = "cuda"))]
use crate::error::Error;
use crate::error::Result;
#[cfg(feature = "cuda")]
use crate::timings;

pub(super) struct Driver;

#[cfg(not(feature = "cuda"))]
fn without_cuda<T>(what: &str) -> Result<T> {
    Err(Error::Input(format!("{what}: built without CUDA")))
}

#[cfg(not(feature = "cuda"))]
const PRODUCT: &str = "a matrix product";

impl Executor for Driver {
    #[cfg(feature = "cuda")]
    fn launch(&self, kernel: &Kernel, blocks: [u32; 2], arguments: &[Argument]) -> Result<()> {
        cuda::launch(kernel, blocks, arguments)
    }

    #[cfg(not(feature = "cuda"))]
    fn launch(&self, kernel: &Kernel, _: [u32; 2], _: &[Argument]) -> Result<()> {
        without_cuda(&format!("kernel {}", kernel.name))
    }

    fn allocate(&self, shape: Shape, dtype: DType, device: &Device) -> Result<Tensor> {
        // SAFETY: the values of a tensor on a device are numbers whatever their bits are, and each kernel that is given one
        // writes all of it.
        Ok(unsafe { Tensor::empty(shape, dtype, device)? })
    }

    fn product(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        if a.rank() != 2 || b.rank() != 2 {
            return Ok(a.matmul(b)?.to_dtype(DType::F32)?);
        }
        let shape = Shape::from((a.dim(0)?, b.dim(1)?));
        let out = self.allocate(shape, DType::F32, a.device())?;
        self.multiply(&out, a, b, 0.0)?;
        Ok(out)
    }

    #[cfg(feature = "cuda")]
    fn multiply(&self, out: &Tensor, a: &Tensor, b: &Tensor, beta: f32) -> Result<()> {
        let described = || timings::product(out, a, b);
        timings::around(out.device(), described, || cuda::multiply(out, a, b, beta))
    }

    #[cfg(not(feature = "cuda"))]
    fn multiply(&self, _: &Tensor, _: &Tensor, _: &Tensor, _: f32) -> Result<()> {
        without_cuda(PRODUCT)
    }

    fn cublaslt(&self) -> Option<&'static Library> {
        cublaslt::check().is_ok().then(|| Library::installed().ok()).flatten()
    }

    fn workspace(&self) -> usize {
        32 << 20
    }

    fn most_aligned(&self) -> u64 {
        256
    }

    #[cfg(feature = "cuda")]
    fn address(&self, tensor: &Tensor, device: &Device) -> Result<u64> {
        cuda::address(tensor, device)
    }

    #[cfg(not(feature = "cuda"))]
    fn address(&self, _: &Tensor, _: &Device) -> Result<u64> {
        without_cuda(PRODUCT)
    }

    #[cfg(feature = "cuda")]
    fn stream(&self, device: &Device) -> Result<*mut c_void> {
        match device {
            Device::Cuda(device) => cuda::bound_stream(device),
            _ => Ok(std::ptr::null_mut()),
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn stream(&self, _: &Device) -> Result<*mut c_void> {
        without_cuda(PRODUCT)
    }
}
