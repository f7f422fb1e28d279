//! Devices: where tensors are stored and computed.

#[cfg(feature = "cuda")]
mod compiled;
pub mod cublaslt;
#[cfg(feature = "cuda")]
mod cuda;
mod driver;
pub mod executor;
pub mod launch;
#[cfg(test)]
mod launch_tests;
pub(crate) mod placed;
pub mod signature;
pub mod sources;
pub mod upload;

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Instant;

use candle_core::{Device, Tensor, WithDType};

use crate::counts::{copied_to_device, copied_to_host};
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
            Self::Cuda(number) => open_cuda(number.unwrap_or(rank)),
        }
    }
}

/// Whether kernels for devices are for tensors on this device.
pub fn is_gpu(device: &Device) -> bool {
    device.is_cuda() || executor::has_stand_in()
}

/// Runs an operation that always runs on the CPU, with tensors on the CPU.
pub fn on_cpu<R>(work: impl FnOnce() -> R) -> R {
    executor::with_stand_in(None, work)
}

/// What is made once for each device, when it is first asked for there.
#[derive(Debug)]
pub struct PerDevice<T>(Mutex<Vec<(Device, Arc<T>)>>);

impl<T> Default for PerDevice<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> PerDevice<T> {
    /// That of this device; `make` makes it where there is none yet.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get<E>(
        &self,
        device: &Device,
        make: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<Arc<T>, E> {
        // The list is valid after a panic: each change is one insertion.
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, made)) = made.iter().find(|(of, _)| of.same_device(device)) {
            return Ok(made.clone());
        }
        let new = Arc::new(make()?);
        made.push((device.clone(), new.clone()));
        Ok(new)
    }
}

static TF32: LazyLock<PerDevice<AtomicBool>> = LazyLock::new(PerDevice::default);

fn tf32_switch(device: &Device) -> Arc<AtomicBool> {
    let switch = TF32.get(device, || Ok::<_, Infallible>(AtomicBool::new(false)));
    switch.unwrap_or_else(|never| match never {})
}

/// From now on factors in f32 of matrix products on a GPU are rounded to TF32, which has 10 bits of a fraction, as bf16 has 7 (sums
/// stay in f32), or are not, as is so at first. Another [`Device`] that was opened for the same GPU has a switch of its own.
pub fn set_tf32(device: &Device, allowed: bool) {
    tf32_switch(device).store(allowed, Ordering::Relaxed);
}

/// What [`set_tf32`] said last.
pub fn tf32(device: &Device) -> bool {
    tf32_switch(device).load(Ordering::Relaxed)
}

/// Whether an error says that a device has no memory left for a tensor or a library's workspace.
pub fn is_out_of_memory(error: &impl fmt::Display) -> bool {
    let message = error.to_string();
    // As the driver and cuBLAS name it; candle and this crate pass their words on.
    [OUT_OF_MEMORY, "CUBLAS_STATUS_ALLOC_FAILED"]
        .iter()
        .any(|name| message.contains(name))
}

/// How the driver calls it.
pub const OUT_OF_MEMORY: &str = "CUDA_ERROR_OUT_OF_MEMORY";

/// Gives memory that no tensor has back to the driver, so that a failed allocation can be tried again in one piece. Waits
/// for the device.
///
/// # Errors
/// If work that was given to the device before has failed.
pub fn release_memory(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        use candle_core::cuda_backend::cudarc::driver::result;
        let stream = device.cuda_stream();
        let synchronized = stream.synchronize();
        synchronized.map_err(|error| Error::Input(format!("a wait for the CUDA device: {error}")))?;
        // SAFETY: the device is one that is open, and the pool is its own.
        let trimmed = unsafe {
            result::device::get_default_mem_pool(stream.context().cu_device())
                .and_then(|pool| result::mem_pool::trim_to(pool, 0))
        };
        // Where it fails, the next allocation tells.
        let _ = trimmed;
    }
    let _ = device;
    Ok(())
}

/// Does `work`, and once more where a device had no memory left for it and memory that no tensor has was given back.
///
/// # Errors
/// Those of `work`, and of [`release_memory`].
pub fn with_released_memory<T>(device: &Device, mut work: impl FnMut() -> Result<T>) -> Result<T> {
    match work() {
        Err(error) if is_out_of_memory(&error) => {
            release_memory(device)?;
            work()
        }
        outcome => outcome,
    }
}

/// Bytes of a device's memory that no process has taken, as the driver says. None for the CPU, and where the driver does not
/// tell.
pub fn free_memory(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        let (free, _) = device.cuda_stream().context().mem_get_info().ok()?;
        return Some(free as u64);
    }
    let _ = device;
    None
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

/// The values of a vector, in host memory. Waits for a device that it is on.
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
fn open_cuda(number: usize) -> Result<Device> {
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

/// Bytes of a device's memory, as the driver counts them: with what its allocator rounds up to, without what libraries take
/// for themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// That tensors have now.
    pub used: u64,
    /// The most that they have had at once since [`forget_peak_memory`].
    pub peak: u64,
    /// That the allocator holds, for them and for the next ones.
    pub reserved: u64,
}

/// The memory of tensors on a device. None for the CPU, and where the driver does not tell.
pub fn memory(device: &Device) -> Option<DeviceMemory> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return pool::memory(device);
    }
    let _ = device;
    None
}

/// The most bytes of [`DeviceMemory`].
pub fn peak_memory(device: &Device) -> Option<u64> {
    memory(device).map(|memory| memory.peak)
}

/// From now on [`peak_memory`] counts anew.
pub fn forget_peak_memory(device: &Device) {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        pool::forget_peak(device);
    }
    let _ = device;
}

/// A point in the work that a device was given: on a GPU an event in its stream, elsewhere the time.
#[derive(Debug)]
pub struct Moment(At);

#[derive(Debug)]
enum At {
    Host(Instant),
    #[cfg(feature = "cuda")]
    Device(candle_core::cuda_backend::cudarc::driver::CudaEvent),
}

impl Moment {
    /// That behind everything that the device was given before.
    ///
    /// # Errors
    /// If the device fails.
    pub fn of(device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
            let event = device.cuda_stream().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
            return match event {
                Ok(event) => Ok(Self(At::Device(event))),
                Err(error) => Err(Error::Input(format!("an event of the CUDA device: {error}"))),
            };
        }
        let _ = device;
        Ok(Self(At::Host(Instant::now())))
    }

    /// Seconds from an earlier moment to this one. Waits until a device has come here.
    ///
    /// # Errors
    /// If the device fails, or the moments are of different devices.
    pub fn since(&self, earlier: &Self) -> Result<f64> {
        match (&self.0, &earlier.0) {
            (At::Host(now), At::Host(then)) => Ok(now.saturating_duration_since(*then).as_secs_f64()),
            #[cfg(feature = "cuda")]
            (At::Device(now), At::Device(then)) => match then.elapsed_ms(now) {
                Ok(milliseconds) => Ok(f64::from(milliseconds) / 1e3),
                Err(error) => Err(Error::Input(format!(
                    "the time between events of CUDA devices: {error}"
                ))),
            },
            #[cfg(feature = "cuda")]
            _ => Err(Error::Input("moments of different devices".into())),
        }
    }
}

/// What the driver calls a device; none for the CPU.
pub fn name(device: &Device) -> Option<String> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return device.cuda_stream().context().name().ok();
    }
    let _ = device;
    None
}

#[cfg(feature = "cuda")]
mod pool {
    use candle_core::CudaDevice;
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    use sys::CUmemPool_attribute as Attribute;

    use super::DeviceMemory;

    const PEAK: Attribute = Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;

    fn read(device: &CudaDevice, attribute: Attribute) -> Option<u64> {
        let mut value = 0u64;
        // SAFETY: the device is one that is open, the pool is its own, and the attribute is a 64-bit number.
        let read = unsafe {
            result::device::get_default_mem_pool(device.cuda_stream().context().cu_device())
                .and_then(|pool| result::mem_pool::get_attribute(pool, attribute, (&raw mut value).cast()))
        };
        read.is_ok().then_some(value)
    }

    pub fn memory(device: &CudaDevice) -> Option<DeviceMemory> {
        Some(DeviceMemory {
            used: read(device, Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            peak: read(device, PEAK)?,
            reserved: read(device, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
        })
    }

    pub fn forget_peak(device: &CudaDevice) {
        let mut none = 0u64;
        // SAFETY: as above; 0 is the one value that this attribute may be set to.
        let reset = unsafe {
            result::device::get_default_mem_pool(device.cuda_stream().context().cu_device())
                .and_then(|pool| result::mem_pool::set_attribute(pool, PEAK, (&raw mut none).cast()))
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
fn open_cuda(number: usize) -> Result<Device> {
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

    /// A second device is told from the first without one: candle's for Metal is there in every build (two of it cannot be
    /// compared).
    #[test]
    fn each_device_has_what_was_made_for_it() {
        let (first, second) = (Device::Cpu, Device::Metal(candle_core::MetalDevice));
        let made = PerDevice::<&str>::default();
        let get = |device: &Device, name: &'static str| made.get(device, || Ok::<_, Error>(name));
        assert_eq!(*get(&first, "first").unwrap(), "first");
        let failed = made.get(&second, || Err(Error::Input("no memory".into())));
        assert!(failed.is_err());
        assert_eq!(*get(&second, "second").unwrap(), "second");
        assert_eq!(*get(&first, "again").unwrap(), "first");
    }
}
