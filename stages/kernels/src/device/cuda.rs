//! Kernels and products on a CUDA device.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::cublas::result::gemm_ex;
use candle_core::cuda_backend::cudarc::cublas::sys as blas;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice};
use candle_core::{DType, Device, Storage, Tensor};

use super::compiled::function;
use super::launch::{Argument, THREADS};
use super::placed::Placed;
use super::signature::Kernel;
use super::tf32;
use crate::error::{Error, Result};

/// How many multiprocessors a device has.
const PROCESSORS: CUdevice_attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;

/// A scalar as a kernel takes it.
enum Value {
    Pointer(u64),
    /// The place of a table's first entry among those of all tables.
    Table(usize),
    Int(i32),
    Long(u64),
    Float(f32),
    Double(f64),
}

/// Launches a kernel whose arguments were checked. It runs after everything that the device was given before.
pub fn launch(kernel: &Kernel, blocks: [u32; 2], arguments: &[Argument]) -> Result<()> {
    let device = device_of(kernel, arguments)?;
    let stream = device.cuda_stream();
    let mut table: Vec<u64> = Vec::new();
    let mut values = arguments
        .iter()
        .map(|argument| {
            Ok(match *argument {
                Argument::Read(tensor)
                | Argument::Write(tensor)
                | Argument::ReadIf(Some(tensor))
                | Argument::WriteIf(Some(tensor)) => Value::Pointer(pointer(kernel.name, tensor, &device, &stream)?),
                Argument::ReadIf(None) | Argument::WriteIf(None) => Value::Pointer(0),
                Argument::ReadAll(tensors) | Argument::WriteAll(tensors) => {
                    let start = table.len();
                    for tensor in tensors {
                        table.push(pointer(kernel.name, tensor, &device, &stream)?);
                    }
                    Value::Table(start)
                }
                Argument::Longs(numbers) => {
                    table.extend_from_slice(numbers);
                    Value::Table(table.len() - numbers.len())
                }
                // The check has shown that the number fits.
                Argument::Int(value) => Value::Int(value as i32),
                Argument::Signed(value) => Value::Int(value),
                Argument::Long(value) => Value::Long(value),
                Argument::Float(value) => Value::Float(value as f32),
                Argument::Double(value) => Value::Double(value),
            })
        })
        .collect::<Result<Vec<_>>>()?;
    // Given back, in the order of the stream, when the kernel was launched.
    let table = if table.is_empty() {
        None
    } else {
        Some(stream.clone_htod(&table).map_err(|error| failed(kernel.name, error))?)
    };
    let start = table.as_ref().map_or(0, |table| table.device_ptr(&stream).0);
    for value in &mut values {
        if let Value::Table(at) = *value {
            *value = Value::Pointer(start + (at * size_of::<u64>()) as u64);
        }
    }
    let function = function(kernel, &stream)?;
    let mut x = blocks[0];
    if kernel.cooperative {
        let of_each = function.occupancy_max_active_blocks_per_multiprocessor(THREADS as u32, 0, None);
        let processors = stream
            .context()
            .attribute(PROCESSORS)
            .map_err(|error| failed(kernel.name, error))?;
        let at_once = of_each.map_err(|error| failed(kernel.name, error))? * processors.unsigned_abs();
        x = x.min(at_once.max(1));
    }
    let mut builder = stream.launch_builder(&function);
    for value in &values {
        match value {
            Value::Pointer(value) | Value::Long(value) => builder.arg(value),
            Value::Int(value) => builder.arg(value),
            Value::Float(value) => builder.arg(value),
            Value::Double(value) => builder.arg(value),
            Value::Table(_) => return Err(failed(kernel.name, "a table is not on the device")),
        };
    }
    let config = LaunchConfig {
        grid_dim: (x, blocks[1], 1),
        block_dim: (THREADS as u32, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: number, types and element types of the arguments are those that the kernel's file declares (`check`), the
    // pointers are of tensors on this device, which the caller holds, and there is one stream to a device, so memory that
    // is given back afterwards is not used again before the kernel has ended. That a kernel stays within its tensors is
    // what the tests under the emulator are for.
    let launched = unsafe {
        if kernel.cooperative {
            builder.launch_cooperative(config)
        } else {
            builder.launch(config)
        }
    };
    launched.map_err(|error| failed(kernel.name, error))?;
    Ok(())
}

fn failed(what: &str, error: impl std::fmt::Display) -> Error {
    Error::Input(format!("CUDA kernel {what}: {error}"))
}

/// The device that the tensors are on.
fn device_of(kernel: &Kernel, arguments: &[Argument]) -> Result<CudaDevice> {
    let first = arguments.iter().find_map(|argument| match argument {
        Argument::Read(tensor)
        | Argument::Write(tensor)
        | Argument::ReadIf(Some(tensor))
        | Argument::WriteIf(Some(tensor)) => Some(tensor.device()),
        Argument::ReadAll(tensors) | Argument::WriteAll(tensors) => tensors.first().map(Tensor::device),
        _ => None,
    });
    match first {
        Some(Device::Cuda(device)) => Ok(device.clone()),
        _ => Err(failed(kernel.name, "a tensor is not on the device")),
    }
}

/// The address of a tensor's first value.
fn pointer(what: &str, tensor: &Tensor, device: &CudaDevice, stream: &Arc<CudaStream>) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        return Err(failed(what, "a tensor is not on the device"));
    };
    if storage.device.id() != device.id() {
        return Err(failed(what, "tensors are on different devices"));
    }
    // The pointer is used after the guard that marks the end of its use is dropped: there is one stream, which keeps
    // the order.
    fn start<T>(slice: &CudaSlice<T>, stream: &Arc<CudaStream>) -> u64 {
        slice.device_ptr(stream).0
    }
    let start = match &storage.slice {
        CudaStorageSlice::F32(slice) => start(slice, stream),
        CudaStorageSlice::F64(slice) => start(slice, stream),
        CudaStorageSlice::BF16(slice) => start(slice, stream),
        CudaStorageSlice::F16(slice) => start(slice, stream),
        CudaStorageSlice::U8(slice) => start(slice, stream),
        CudaStorageSlice::U32(slice) => start(slice, stream),
        _ => return Err(failed(what, "a tensor is of a type that no kernel takes")),
    };
    Ok(start + (layout.start_offset() * tensor.dtype().size_in_bytes()) as u64)
}

const PRODUCT: &str = "matrix product";

/// The address of the first value of a tensor, which is on this device, for a library's product.
pub fn address(tensor: &Tensor, device: &Device) -> Result<u64> {
    let Device::Cuda(device) = device else {
        return Err(failed(PRODUCT, "a tensor is not on the device"));
    };
    pointer(PRODUCT, tensor, device, &device.cuda_stream())
}

/// The stream of a device, whose context becomes that of the calling thread.
pub fn bound_stream(device: &CudaDevice) -> Result<*mut c_void> {
    let stream = device.cuda_stream();
    let bound = stream.context().bind_to_thread();
    bound.map_err(|error| failed(PRODUCT, error))?;
    Ok(stream.cu_stream().cast())
}

/// `out = beta out + a b` by cuBLAS, with sums and result in f32: `a` (m, k) and `b` (k, n) of one type, f32, bf16 or f16, row-major
/// or transposed, `out` (m, n) row-major.
pub fn multiply(out: &Tensor, a: &Tensor, b: &Tensor, beta: f32) -> Result<()> {
    let Device::Cuda(device) = out.device() else {
        return Err(failed(PRODUCT, "a tensor is not on the device"));
    };
    let ((m, k), (l, n)) = (a.dims2()?, b.dims2()?);
    if k != l || out.dims() != [m, n] || a.dtype() != b.dtype() || !out.is_contiguous() || out.dtype() != DType::F32 {
        return Err(failed(PRODUCT, "matrices do not fit"));
    }
    let kind = match a.dtype() {
        DType::F32 => blas::cudaDataType::CUDA_R_32F,
        DType::BF16 => blas::cudaDataType::CUDA_R_16BF,
        DType::F16 => blas::cudaDataType::CUDA_R_16F,
        other => return Err(failed(PRODUCT, other.as_str())),
    };
    if m == 0 || n == 0 {
        return Ok(());
    }
    let size = |value: usize| i32::try_from(value).map_err(|error| failed(PRODUCT, error));
    let (m, n, k) = (size(m)?, size(n)?, size(k)?);
    let placed = |matrix: &Tensor| -> Result<_> {
        let placed =
            Placed::of(matrix).ok_or_else(|| failed(PRODUCT, "a matrix is neither row-major nor transposed"))?;
        let operation = match placed.transposed {
            true => blas::cublasOperation_t::CUBLAS_OP_T,
            false => blas::cublasOperation_t::CUBLAS_OP_N,
        };
        Ok((operation, size(placed.leading)?))
    };
    let ((op_a, lda), (op_b, ldb)) = (placed(a)?, placed(b)?);
    let compute = match a.dtype() {
        DType::F32 if tf32(out.device()) => blas::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        _ => blas::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    };
    bound_stream(device)?;
    let [to, of_a, of_b] = [
        address(out, out.device())?,
        address(a, out.device())?,
        address(b, out.device())?,
    ];
    let alpha = 1.0f32;
    let handle = device.cublas_handle();
    // SAFETY: the three matrices lie whole within their tensors, which the caller holds, on this device; the handle's stream is
    // the device's only one. What is row-major to us is transposed to cuBLAS, so it computes the transposed product.
    unsafe {
        gemm_ex(
            *handle.handle(),
            op_b,
            op_a,
            n,
            m,
            k,
            (&raw const alpha).cast(),
            of_b as *const _,
            kind,
            ldb,
            of_a as *const _,
            kind,
            lda,
            (&raw const beta).cast(),
            to as *mut _,
            blas::cudaDataType::CUDA_R_32F,
            n,
            compute,
            blas::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    }
    .map_err(|error| failed(PRODUCT, error))
}
