//! Copies of what a micro-batch needs to a device, beside the work that the device does meanwhile.
//!
//! On a GPU there are two buffers in page-locked host memory and two on the device, and a stream of their own for the
//! copies. The host fills one while what was in the other is still used: it waits only where a copy of two uploads ago is not
//! done, and the device only before it reads what was copied.

use candle_core::{Device, Tensor};

use super::is_gpu;
use crate::counts::copied_to_device;
use crate::error::Result;

/// The buffers of one device.
#[derive(Debug, Default)]
pub struct Upload {
    #[cfg(feature = "cuda")]
    buffers: std::sync::Mutex<Option<pinned::Buffers>>,
}

impl Upload {
    /// Copies `len` numbers to a device, which `fill` writes, and calls `read` with a vector of them there. What `read` launches
    /// may read it; the vector must not be kept. On the CPU it is made without a copy.
    ///
    /// # Errors
    /// Those of `read`, and where the device fails.
    pub fn with<R>(
        &self,
        device: &Device,
        len: usize,
        fill: impl FnOnce(&mut [u32]),
        read: impl FnOnce(&Tensor) -> Result<R>,
    ) -> Result<R> {
        if is_gpu(device) {
            copied_to_device(len * size_of::<u32>());
        }
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            // What a panic left is overwritten.
            let mut buffers = self.buffers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let buffers = match &mut *buffers {
                Some(buffers) if buffers.are_on(device) => buffers,
                other => other.insert(pinned::Buffers::new(device)?),
            };
            return buffers.with(len, fill, read);
        }
        let mut values = vec![0; len];
        fill(&mut values);
        read(&Tensor::from_vec(values, len, device)?)
    }
}

#[cfg(feature = "cuda")]
mod pinned {
    use std::sync::Arc;

    use candle_core::cuda_backend::cudarc::driver::result::memcpy_htod_async;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DevicePtr, DriverError, PinnedHostSlice};
    use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice};
    use candle_core::{DType, Device, Storage, Tensor};

    use crate::error::{Error, Result};

    pub struct Buffers {
        device: CudaDevice,
        copies: Arc<CudaStream>,
        buffers: [Option<Buffer>; 2],
        next: usize,
    }

    struct Buffer {
        host: PinnedHostSlice<u32>,
        on_device: Tensor,
        /// The address of `on_device`.
        start: u64,
        capacity: usize,
        /// The copy is done.
        copied: CudaEvent,
        /// The device has read it.
        read: CudaEvent,
    }

    fn failed(error: DriverError) -> Error {
        Error::Input(format!("a copy to the CUDA device: {error}"))
    }

    impl std::fmt::Debug for Buffers {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Buffers").finish_non_exhaustive()
        }
    }

    impl Buffers {
        pub fn new(device: &CudaDevice) -> Result<Self> {
            Ok(Self {
                device: device.clone(),
                copies: device.cuda_stream().context().new_stream().map_err(failed)?,
                buffers: [None, None],
                next: 0,
            })
        }

        pub fn are_on(&self, device: &CudaDevice) -> bool {
            self.device.id() == device.id()
        }

        pub fn with<R>(
            &mut self,
            len: usize,
            fill: impl FnOnce(&mut [u32]),
            read: impl FnOnce(&Tensor) -> Result<R>,
        ) -> Result<R> {
            let place = &mut self.buffers[self.next];
            self.next = 1 - self.next;
            let buffer = match place {
                Some(buffer) if buffer.capacity >= len => buffer,
                other => {
                    // The old one goes first.
                    *other = None;
                    other.insert(Buffer::new(&self.device, len.next_power_of_two().max(1024))?)
                }
            };
            buffer.upload(&self.device.cuda_stream(), &self.copies, len, fill)?;
            let result = read(&buffer.on_device.narrow(0, 0, len)?);
            buffer.read.record(&self.device.cuda_stream()).map_err(failed)?;
            result
        }
    }

    impl Buffer {
        fn new(device: &CudaDevice, capacity: usize) -> Result<Self> {
            let stream = device.cuda_stream();
            let context = stream.context();
            // SAFETY: the values of the tensor are written before they are read, by a copy.
            let on_device = unsafe { Tensor::empty(capacity, DType::U32, &Device::Cuda(device.clone()))? };
            let start = match &*on_device.storage_and_layout().0 {
                Storage::Cuda(storage) => match &storage.slice {
                    CudaStorageSlice::U32(slice) => Some(slice.device_ptr(&stream).0),
                    _ => None,
                },
                _ => None,
            };
            let start = start.ok_or_else(|| Error::Input("a buffer is not on the device".into()))?;
            // SAFETY: what is read of it is written first, by `fill`, which is given numbers.
            let mut host = unsafe { context.alloc_pinned::<u32>(capacity) }.map_err(failed)?;
            host.as_mut_slice().map_err(failed)?.fill(0);
            let event = || context.new_event(None).map_err(failed);
            let (copied, read) = (event()?, event()?);
            // The memory of the tensor is there for other streams when this stream has come to here.
            read.record(&stream).map_err(failed)?;
            Ok(Self {
                host,
                on_device,
                start,
                capacity,
                copied,
                read,
            })
        }

        /// Copies what `fill` writes, after everything that read the buffer; `stream` waits for it.
        fn upload(
            &mut self,
            stream: &CudaStream,
            copies: &CudaStream,
            len: usize,
            fill: impl FnOnce(&mut [u32]),
        ) -> Result<()> {
            self.copied.synchronize().map_err(failed)?;
            let host = &mut self.host.as_mut_slice().map_err(failed)?[..len];
            fill(host);
            copies.wait(&self.read).map_err(failed)?;
            // SAFETY: the address is that of a tensor of at least `len` numbers, which this owns, and no kernel reads it before
            // `copied`. The host's memory stays as it is until then: it is next written, or freed, after a wait for the event.
            unsafe { memcpy_htod_async(self.start, host, copies.cu_stream()) }.map_err(failed)?;
            self.copied.record(copies).map_err(failed)?;
            stream.wait(&self.copied).map_err(failed)
        }
    }

    impl Drop for Buffer {
        fn drop(&mut self) {
            // A failed device copies nothing any more.
            let _ = self.copied.synchronize();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::counted;
    use crate::flow_cuda_emulator::DeviceUnderTest;

    /// Each upload is seen as it was filled, however long it is and whatever was there before.
    #[test]
    fn what_is_filled_is_read() {
        let upload = Upload::default();
        for (round, len) in [3, 5000, 1, 5000, 70_000, 2].into_iter().enumerate() {
            let value = |i: usize| (round * 100_000 + i) as u32;
            let run = |device: &Device| {
                let fill = |values: &mut [u32]| (0..).zip(values).for_each(|(i, to)| *to = value(i));
                upload.with(device, len, fill, |vector| Ok(vector.copy()?.to_vec1::<u32>()?))
            };
            let (found, counts) = counted(|| DeviceUnderTest::get().run(run).unwrap());
            assert!(found == (0..len).map(value).collect::<Vec<_>>(), "{len}");
            assert_eq!((counts.to_device.count, counts.to_device.bytes), (1, 4 * len as u64));
        }
    }
}
