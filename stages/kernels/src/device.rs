//! Devices: where tensors are stored and computed.

use std::fmt;
use std::str::FromStr;

use candle_core::Device;

use crate::error::{Error, Result};

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

/// Keeps freed memory in the pool for the next tensors. Otherwise the driver returns it to the system at every
/// synchronisation, of which a training step has many, and maps it again.
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
