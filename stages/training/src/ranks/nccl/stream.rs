//! The two streams of a rank: the one that its model computes on, and the one that NCCL works on beside it.

use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{
    CudaStorage, CudaStorageSlice,
    cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr},
};
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Tensor};
#[cfg(feature = "cuda")]
use std::sync::Arc;

use super::library::Memory;

/// Both streams.
#[derive(Clone)]
pub(super) enum Streams {
    /// Of the stand-in: what is given to it is finished when it says so.
    Host,
    #[cfg(feature = "cuda")]
    Cuda {
        compute: Arc<CudaStream>,
        exchange: Arc<CudaStream>,
    },
}

/// A point in the work of a stream.
pub(super) enum Mark {
    Host,
    #[cfg(feature = "cuda")]
    Cuda(CudaEvent),
}

#[cfg(feature = "cuda")]
fn driver(error: impl std::fmt::Debug) -> String {
    format!("the GPU cannot be asked: {error:?}")
}

impl Streams {
    /// Those of a device on which tensors are.
    pub fn of(device: &Device) -> Result<Self, String> {
        match device {
            Device::Cpu => Ok(Self::Host),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let compute = device.cuda_stream();
                let exchange = compute.context().new_stream().map_err(driver)?;
                Ok(Self::Cuda { compute, exchange })
            }
            _ => Err("this program has no NCCL for its device".into()),
        }
    }

    /// NCCL works on the device of the thread that calls it.
    pub fn use_device(&self) -> Result<(), String> {
        match self {
            Self::Host => Ok(()),
            #[cfg(feature = "cuda")]
            Self::Cuda { compute, .. } => compute.context().bind_to_thread().map_err(driver),
        }
    }

    /// NCCL's stream, as its functions take it.
    pub fn exchange(&self) -> *mut c_void {
        match self {
            Self::Host => std::ptr::null_mut(),
            #[cfg(feature = "cuda")]
            Self::Cuda { exchange, .. } => exchange.cu_stream().cast(),
        }
    }

    /// The point that the model's stream has come to.
    pub fn computed(&self) -> Result<Mark, String> {
        match self {
            Self::Host => Ok(Mark::Host),
            #[cfg(feature = "cuda")]
            Self::Cuda { compute, .. } => compute.record_event(None).map(Mark::Cuda).map_err(driver),
        }
    }

    /// The point that NCCL's stream has come to.
    pub fn exchanged(&self) -> Result<Mark, String> {
        match self {
            Self::Host => Ok(Mark::Host),
            #[cfg(feature = "cuda")]
            Self::Cuda { exchange, .. } => exchange.record_event(None).map(Mark::Cuda).map_err(driver),
        }
    }

    /// NCCL's stream goes on when the model's has come to `mark`.
    pub fn exchange_after(&self, mark: &Mark) -> Result<(), String> {
        match (self, mark) {
            #[cfg(feature = "cuda")]
            (Self::Cuda { exchange, .. }, Mark::Cuda(event)) => exchange.wait(event).map_err(driver),
            _ => Ok(()),
        }
    }

    /// The model's stream goes on when NCCL's has come to `mark`. The host does not wait.
    pub fn compute_after(&self, mark: &Mark) -> Result<(), String> {
        match (self, mark) {
            #[cfg(feature = "cuda")]
            (Self::Cuda { compute, .. }, Mark::Cuda(event)) => compute.wait(event).map_err(driver),
            _ => Ok(()),
        }
    }
}

impl Mark {
    /// Whether its stream has come to it.
    pub fn is_past(&self) -> Result<bool, String> {
        match self {
            Self::Host => Ok(true),
            #[cfg(feature = "cuda")]
            Self::Cuda(event) => event.try_is_complete().map_err(driver),
        }
    }
}

/// Finds out where a tensor is.
struct Locate {
    found: AtomicPtr<c_void>,
    #[cfg(feature = "cuda")]
    streams: Streams,
}

impl Locate {
    fn at(&self, address: *mut c_void) -> candle_core::Result<()> {
        self.found.store(address, Ordering::Relaxed);
        Ok(())
    }
}

impl InplaceOp1 for Locate {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let from = layout.start_offset();
        match storage {
            CpuStorage::F32(numbers) => self.at(numbers[from..].as_mut_ptr().cast()),
            CpuStorage::F64(numbers) => self.at(numbers[from..].as_mut_ptr().cast()),
            CpuStorage::BF16(numbers) => self.at(numbers[from..].as_mut_ptr().cast()),
            CpuStorage::F16(numbers) => self.at(numbers[from..].as_mut_ptr().cast()),
            CpuStorage::I64(numbers) => self.at(numbers[from..].as_mut_ptr().cast()),
            _ => candle_core::bail!("a tensor of a type that is not exchanged"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        let Streams::Cuda { exchange, .. } = &self.streams else {
            candle_core::bail!("a tensor on a GPU in a rank that is on none")
        };
        // Nothing waits for the end of the pointer's use: the marks of both streams keep the order.
        fn start<T>(numbers: &CudaSlice<T>, stream: &Arc<CudaStream>, from: usize) -> *mut c_void {
            let address = numbers.device_ptr(stream).0 + (from * size_of::<T>()) as u64;
            address as *mut c_void
        }
        let from = layout.start_offset();
        match &storage.slice {
            CudaStorageSlice::F32(numbers) => self.at(start(numbers, exchange, from)),
            CudaStorageSlice::F64(numbers) => self.at(start(numbers, exchange, from)),
            CudaStorageSlice::BF16(numbers) => self.at(start(numbers, exchange, from)),
            CudaStorageSlice::F16(numbers) => self.at(start(numbers, exchange, from)),
            CudaStorageSlice::I64(numbers) => self.at(start(numbers, exchange, from)),
            _ => candle_core::bail!("a tensor of a type that is not exchanged"),
        }
    }
}

/// Where a contiguous tensor is. What is written there changes every tensor that shares its storage.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
pub(super) fn memory(tensor: &Tensor, streams: &Streams) -> Result<Memory, String> {
    if !tensor.is_contiguous() {
        return Err("a tensor that is not contiguous".into());
    }
    let locate = Locate {
        found: AtomicPtr::new(std::ptr::null_mut()),
        #[cfg(feature = "cuda")]
        streams: streams.clone(),
    };
    tensor.inplace_op1(&locate).map_err(|error| error.to_string())?;
    Ok(Memory {
        address: locate.found.into_inner(),
        count: tensor.elem_count(),
        dtype: tensor.dtype(),
    })
}
