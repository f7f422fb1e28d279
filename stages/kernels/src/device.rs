//! Devices: where tensors are stored and computed.

use std::fmt;
use std::str::FromStr;

use candle_core::{Device, Tensor, WithDType};

use crate::counts::{copied_to_device, copied_to_host};
use crate::error::{Error, Result};
use crate::is_gpu;

/// A device as a setting names it: `cpu`, `cuda` (the first ones), or `cuda:1` (that one).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    #[default]
    Cpu,
    Cuda(Option<usize>),
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.trim() {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            other => other
                .strip_prefix("cuda:")
                .and_then(|number| number.parse().ok())
                .map(|number| Self::Cuda(Some(number)))
                .ok_or_else(|| Error::Input(format!("a device is `cpu`, `cuda` or `cuda:0`, not `{text}`"))),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => write!(f, "cpu"),
            Self::Cuda(None) => write!(f, "cuda"),
            Self::Cuda(Some(number)) => write!(f, "cuda:{number}"),
        }
    }
}

impl DeviceChoice {
    /// Whether this program was built with support for it (not whether this machine has one).
    pub fn check(self) -> Result<()> {
        if self != Self::Cpu && !cfg!(feature = "cuda") {
            return Err(Error::Input(format!(
                "this program was built without CUDA, so `{self}` is not available; build it with `cargo build --release \
                 --features cuda` (docs/gpu.md), or use `cpu`"
            )));
        }
        Ok(())
    }

    /// The device of a rank, which is 0 where there is one. With `cuda`, rank 1 has the second device, and so on.
    pub fn open(self, rank: usize) -> Result<Device> {
        self.check()?;
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(number) => cuda(number.unwrap_or(rank)),
        }
    }
}

/// How many GPUs this process sees: those of its machine, or of them those that `CUDA_VISIBLE_DEVICES` names.
///
/// # Errors
/// Where this program was built without CUDA, or the driver is not there.
pub fn visible_gpus() -> Result<usize> {
    #[cfg(feature = "cuda")]
    {
        use candle_core::cuda_backend::cudarc::driver::CudaContext;
        let count = CudaContext::device_count();
        let count = count.map_err(|error| Error::Input(format!("the CUDA driver cannot be asked: {error:?}")))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }
    #[cfg(not(feature = "cuda"))]
    DeviceChoice::Cuda(None).check().map(|()| 0)
}

/// The values of a vector, in host memory. Waits for a device that it lies on.
pub fn to_host<T: WithDType>(vector: &Tensor) -> Result<Vec<T>> {
    if is_gpu(vector.device()) {
        copied_to_host(vector.elem_count() * vector.dtype().size_in_bytes());
    }
    Ok(vector.to_vec1::<T>()?)
}

/// A tensor in host memory, copied to a device; itself if that is the CPU.
pub fn to_device(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    if is_gpu(device) {
        copied_to_device(tensor.elem_count() * tensor.dtype().size_in_bytes());
    }
    Ok(tensor.to_device(device)?)
}

/// A tensor on another device, with a storage of its own size. Candle moves all of the storage that a tensor is a part of.
pub fn moved(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    if tensor.device().same_device(device) {
        return Ok(tensor.clone());
    }
    if is_gpu(tensor.device()) {
        return Ok(tensor.force_contiguous()?.to_device(device)?);
    }
    Ok(tensor.to_device(device)?)
}

#[cfg(feature = "cuda")]
fn cuda(number: usize) -> Result<Device> {
    let failed = |error: candle_core::Error| Error::Input(format!("CUDA device {number}: {error}"));
    // A stream of its own: that of candle's default is another one in every thread.
    let device = Device::new_cuda_with_stream(number).map_err(failed)?;
    if let Device::Cuda(device) = &device {
        // SAFETY: all work on a device goes through its one stream, in the order in which it is given, so nothing has to
        // wait for another stream's use of a tensor. Tensors go from device to device through host memory.
        unsafe { device.disable_event_tracking() };
        keep_memory(device);
    }
    Ok(device)
}

/// The most bytes that tensors on a device have had at once since [`forget_peak_memory`], as the driver counts them: with
/// what its allocator rounds up to, without what libraries take for themselves. None for the CPU, and where the driver does
/// not tell.
pub fn peak_memory(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return peak::most(device);
    }
    let _ = device;
    None
}

/// From now on [`peak_memory`] counts anew.
pub fn forget_peak_memory(device: &Device) {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        peak::forget(device);
    }
    let _ = device;
}

#[cfg(feature = "cuda")]
mod peak {
    use candle_core::CudaDevice;
    use candle_core::cuda_backend::cudarc::driver::{result, sys};

    const MOST_USED: sys::CUmemPool_attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;

    pub fn most(device: &CudaDevice) -> Option<u64> {
        let mut most = 0u64;
        // SAFETY: the device is one that is open, the pool is its own, and the attribute is a 64-bit number.
        let read = unsafe {
            result::device::get_default_mem_pool(device.cuda_stream().context().cu_device())
                .and_then(|pool| result::mem_pool::get_attribute(pool, MOST_USED, (&raw mut most).cast()))
        };
        read.is_ok().then_some(most)
    }

    pub fn forget(device: &CudaDevice) {
        let mut none = 0u64;
        // SAFETY: as above; 0 is the one value that this attribute may be set to.
        let reset = unsafe {
            result::device::get_default_mem_pool(device.cuda_stream().context().cu_device())
                .and_then(|pool| result::mem_pool::set_attribute(pool, MOST_USED, (&raw mut none).cast()))
        };
        // What was counted before is then told too, and that is all.
        let _ = reset;
    }
}

/// Keeps memory that tensors gave back for the next ones. Otherwise the driver takes it at every wait for the device, of
/// which a training step has many, and maps it anew.
#[cfg(feature = "cuda")]
fn keep_memory(device: &candle_core::CudaDevice) {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    let stream = device.cuda_stream();
    let mut threshold = u64::MAX;
    // SAFETY: the device is one that is open, the pool is its own, and the attribute is a 64-bit number.
    let kept = unsafe {
        result::device::get_default_mem_pool(stream.context().cu_device()).and_then(|pool| {
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast())
        })
    };
    // A failure is ignored: a device without such a pool is only slower.
    let _ = kept;
}

#[cfg(not(feature = "cuda"))]
fn cuda(number: usize) -> Result<Device> {
    Err(Error::Input(format!("CUDA device {number}: built without CUDA")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for text in ["cpu", "cuda", "cuda:0", "cuda:7"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda0"] {
            let error = wrong.parse::<DeviceChoice>().unwrap_err().to_string();
            assert!(error.contains("`cuda:0`"), "{error}");
        }
        assert!(matches!(DeviceChoice::Cpu.open(3), Ok(Device::Cpu)));
        #[cfg(not(feature = "cuda"))]
        for refused in [DeviceChoice::Cuda(None), DeviceChoice::Cuda(Some(1))] {
            assert!(refused.open(0).unwrap_err().to_string().contains("--features cuda"));
        }
    }
}
