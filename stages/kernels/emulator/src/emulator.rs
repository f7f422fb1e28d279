//! Runs kernels on the processor, thread by thread, to test them without a device.
//!
//! The kernel files are compiled by the system's C++ compiler with `emulator.h` before them. Each launch runs twice, with
//! blocks and threads in rising and in falling order, and both must give the same to the bit. Every tensor is copied for
//! it to memory that ends (the first time) or begins (the second) at a page that cannot be touched: a kernel that reads
//! or writes outside its tensors ends the test.
//!
//! While emulation is on in a thread, CPU tensors are treated as tensors on a device, and the kernels for the CPU
//! refuse their work: what passes would not have fallen back to them on a device either.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor};
use flow_kernels::counts::counted;
use flow_kernels::device::OUT_OF_MEMORY;
use flow_kernels::device::executor::{Executor, with_stand_in};
use flow_kernels::device::launch::{Argument, THREADS};
use flow_kernels::device::signature::Kernel;
use flow_kernels::device::sources::sources;
use flow_kernels::elementwise::add_in_place;
use flow_kernels::{Error, Result, product};
use half::bf16;

use super::compiled::Compiled;
use super::cublaslt;

/// Does `work` with emulation on, or off within it.
pub fn with<R>(on: bool, work: impl FnOnce() -> R) -> R {
    with_stand_in(on.then_some(&Emulator as &dyn Executor), work)
}

thread_local! {
    /// Of this thread: bytes of the largest allocation that does not fail, and of the largest one that was made.
    static ALLOCATIONS: Cell<[usize; 2]> = const { Cell::new([usize::MAX, 0]) };
}

/// Does `work` on a device on which a result of a kernel with more than `most` bytes finds no memory, as allocations fail on
/// a device that is full; and gives the bytes of the largest one that was made.
pub fn with_allocations<R>(most: usize, work: impl FnOnce() -> R) -> (R, usize) {
    struct Back([usize; 2]);
    impl Drop for Back {
        fn drop(&mut self) {
            ALLOCATIONS.set(self.0);
        }
    }
    let _back = Back(ALLOCATIONS.replace([most, 0]));
    let result = work();
    (result, ALLOCATIONS.get()[1])
}

/// Runs kernels on the processor, in place of the CUDA driver.
pub struct Emulator;

impl Executor for Emulator {
    fn launch(&self, kernel: &Kernel, blocks: [u32; 2], arguments: &[Argument]) -> Result<()> {
        launch(kernel, blocks, arguments)
    }

    fn allocate(&self, shape: Shape, dtype: DType, device: &Device) -> Result<Tensor> {
        allocate(shape.elem_count() * dtype.size_in_bytes())?;
        // Makes elements visible that a kernel does not write.
        let spoilt = Tensor::new(f32::NAN, device)?.to_dtype(dtype)?;
        Ok(spoilt.broadcast_as(shape)?.contiguous()?)
    }

    /// cuBLAS multiplies numbers in bf16 exactly, and adds in f32.
    fn product(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let multiply = || product::product(&a.to_dtype(DType::F32)?, &b.to_dtype(DType::F32)?);
        with(false, || counted(multiply).0)
    }

    fn multiply(&self, out: &Tensor, a: &Tensor, b: &Tensor, beta: f32) -> Result<()> {
        let result = self.product(a, b)?;
        if beta == 1.0 {
            return with(false, || add_in_place(out, &result));
        }
        Ok(out.inplace_op1(&Overwrite(bytes_of(&result)?))?)
    }

    fn cublaslt(&self) -> Option<&'static flow_kernels::device::cublaslt::Library> {
        cublaslt::chosen()
    }

    fn workspace(&self) -> usize {
        1 << 10
    }

    /// Memory of the host is aligned by chance to more than 16 bytes.
    fn most_aligned(&self) -> u64 {
        16
    }

    fn address(&self, tensor: &Tensor, _: &Device) -> Result<u64> {
        address(tensor)
    }

    fn stream(&self, _: &Device) -> Result<*mut c_void> {
        Ok(std::ptr::null_mut())
    }
}

/// An error if a result of this many bytes finds no memory.
fn allocate(bytes: usize) -> Result<()> {
    let [most, largest] = ALLOCATIONS.get();
    if bytes <= most {
        ALLOCATIONS.set([most, largest.max(bytes)]);
        return Ok(());
    }
    Err(Error::Input(format!("DriverError({OUT_OF_MEMORY}, \"out of memory\")")))
}

/// As in emulator.h.
#[repr(C)]
struct Launch {
    blocks: [u32; 2],
    threads: u32,
    falling: u32,
    cooperative: u32,
}

type Emulated = unsafe extern "C" fn(*const Launch, *mut *mut c_void) -> *const c_char;

fn library() -> &'static Compiled {
    static LIBRARY: OnceLock<Compiled> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let sources = sources().unwrap();
        let mut text = String::new();
        for define in &sources.defines {
            text.push_str(&format!("#define {}\n", define.replacen('=', " ", 1)));
        }
        text.push_str(&format!("{}\n{}\n", include_str!("emulator.h"), sources.prelude));
        sources.files.iter().for_each(|file| text.push_str(file.source));
        text.push_str(include_str!("faults.cu"));
        Compiled::new("kernels", &text)
    })
}

/// The most blocks that wait for each other: the grid of a kernel with barriers of the grid is cut to them, as on a device
/// that runs no more at once.
const BLOCKS_AT_ONCE: u32 = 6;

/// Runs a kernel in both orders and writes back what it wrote.
fn launch(kernel: &Kernel, mut blocks: [u32; 2], arguments: &[Argument]) -> Result<()> {
    if kernel.cooperative {
        blocks[0] = blocks[0].min(BLOCKS_AT_ONCE);
    }
    let name = CString::new(format!("emulate_{}", kernel.name)).unwrap();
    // SAFETY: emulator.h defines every symbol of this name with this signature.
    let emulated: Emulated = unsafe { std::mem::transmute(library().function(&name)) };
    let rising = run(kernel, emulated, blocks, arguments, false)?;
    let falling = run(kernel, emulated, blocks, arguments, true)?;
    if rising != falling {
        return Err(Error::Input(format!(
            "kernel {}: what it gives depends on the order of threads",
            kernel.name
        )));
    }
    for (argument, all) in arguments.iter().zip(rising) {
        for (tensor, bytes) in written(argument).iter().zip(all) {
            tensor.inplace_op1(&Overwrite(bytes))?;
        }
    }
    Ok(())
}

/// The tensors of an argument that a kernel writes.
fn written<'a>(argument: &Argument<'a>) -> &'a [Tensor] {
    match argument {
        Argument::Write(_) | Argument::WriteIf(_) | Argument::WriteAll(_) => argument.tensors(),
        _ => &[],
    }
}

/// The bytes of every tensor that is written, for each argument, as the kernel left them.
fn run(
    kernel: &Kernel,
    emulated: Emulated,
    blocks: [u32; 2],
    arguments: &[Argument],
    falling: bool,
) -> Result<Vec<Vec<Vec<u8>>>> {
    let mut guarded: Vec<Vec<Guarded>> = Vec::with_capacity(arguments.len());
    let mut tables: Vec<Guarded> = Vec::new();
    let mut values: Vec<u64> = Vec::with_capacity(arguments.len());
    for argument in arguments {
        let memory = argument
            .tensors()
            .iter()
            .map(|tensor| Ok(Guarded::new(&bytes_of(tensor)?, falling)))
            .collect::<Result<Vec<_>>>()?;
        let mut table = |entries: &[u64]| {
            tables.push(Guarded::new(bytemuck::cast_slice(entries), falling));
            tables.last().map_or(0, |table| table.start as u64)
        };
        values.push(match argument {
            Argument::Int(value) => u64::from(*value as u32),
            Argument::Signed(value) => u64::from(*value as u32),
            Argument::Long(value) => *value,
            Argument::Float(value) => u64::from((*value as f32).to_bits()),
            Argument::Double(value) => value.to_bits(),
            Argument::Longs(numbers) => table(numbers),
            Argument::ReadAll(_) | Argument::WriteAll(_) => {
                let starts: Vec<u64> = memory.iter().map(|memory| memory.start as u64).collect();
                table(&starts)
            }
            _ => memory.first().map_or(0, |memory| memory.start as u64),
        });
        guarded.push(memory);
    }
    let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|value| (value as *mut u64).cast()).collect();
    let launch = Launch {
        blocks,
        threads: THREADS as u32,
        falling: u32::from(falling),
        cooperative: u32::from(kernel.cooperative),
    };
    // SAFETY: the pointers are to as many values as the kernel has parameters, each of the size that it reads on a
    // little-endian machine, and stay valid for the call.
    let message = unsafe { emulated(&launch, pointers.as_mut_ptr()) };
    if !message.is_null() {
        // SAFETY: a literal of emulator.h.
        let message = unsafe { CStr::from_ptr(message) }.to_string_lossy();
        return Err(Error::Input(format!("kernel {}: {message}", kernel.name)));
    }
    let left = |(argument, memory): (&Argument, Vec<Guarded>)| {
        let count = written(argument).len();
        memory[..count].iter().map(|memory| memory.bytes().to_vec()).collect()
    };
    Ok(arguments.iter().zip(guarded).map(left).collect())
}

/// Bytes between two pages that cannot be touched.
struct Guarded {
    map: *mut c_void,
    mapped: usize,
    start: *mut u8,
    len: usize,
}

impl Guarded {
    fn new(bytes: &[u8], at_begin: bool) -> Self {
        const PAGE: usize = 4096;
        let len = bytes.len();
        let inner = len.next_multiple_of(PAGE);
        let mapped = inner + 2 * PAGE;
        // SAFETY: a new map of its own; the part that is opened is within it, and so do the copied bytes.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let map = libc::mmap(std::ptr::null_mut(), mapped, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(map, libc::MAP_FAILED);
            let open = map.cast::<u8>().add(PAGE);
            if inner > 0 {
                assert_eq!(
                    libc::mprotect(open.cast(), inner, libc::PROT_READ | libc::PROT_WRITE),
                    0
                );
            }
            // The length is a multiple of the element's size, so that what ends at the page is aligned.
            let start = if at_begin { open } else { open.add(inner - len) };
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, len);
            Self {
                map,
                mapped,
                start,
                len,
            }
        }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: `new` wrote them, and nothing else refers to them while the kernel does not run.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the map of `new`.
        unsafe { libc::munmap(self.map, self.mapped) };
    }
}

/// The bytes of a contiguous tensor's own part of its storage.
fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(Error::Input("the emulator works on the CPU".into()));
    };
    let range = layout.start_offset()..layout.start_offset() + tensor.elem_count();
    fn cast<T: bytemuck::NoUninit>(values: &[T]) -> Vec<u8> {
        bytemuck::cast_slice(values).to_vec()
    }
    Ok(match tensor.dtype() {
        DType::F32 => cast(&storage.as_slice::<f32>()?[range]),
        DType::F64 => cast(&storage.as_slice::<f64>()?[range]),
        DType::U8 => cast(&storage.as_slice::<u8>()?[range]),
        DType::U32 => cast(&storage.as_slice::<u32>()?[range]),
        DType::BF16 => storage.as_slice::<bf16>()?[range]
            .iter()
            .flat_map(|value| value.to_bits().to_le_bytes())
            .collect(),
        other => return Err(Error::Input(format!("the emulator has no {}", other.as_str()))),
    })
}

/// The address of a tensor's first value, also to write there. It is used while nothing else uses the tensor.
fn address(tensor: &Tensor) -> Result<u64> {
    let locate = Locate(AtomicU64::new(0));
    tensor.inplace_op1(&locate)?;
    Ok(locate.0.into_inner())
}

struct Locate(AtomicU64);

impl InplaceOp1 for Locate {
    fn name(&self) -> &'static str {
        "locate"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (start, width) = (layout.start_offset(), storage.dtype().size_in_bytes());
        let begin = match storage {
            CpuStorage::F32(values) => values.as_mut_ptr() as u64,
            CpuStorage::BF16(values) => values.as_mut_ptr() as u64,
            CpuStorage::F16(values) => values.as_mut_ptr() as u64,
            CpuStorage::U8(values) => values.as_mut_ptr() as u64,
            _ => candle_core::bail!("the emulator has no products of this type"),
        };
        self.0.store(begin + (start * width) as u64, Ordering::Relaxed);
        Ok(())
    }
}

struct Overwrite(Vec<u8>);

impl InplaceOp1 for Overwrite {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let start = layout.start_offset();
        let range = start..start + layout.shape().elem_count();
        let bytes = &self.0;
        match storage {
            CpuStorage::F32(values) => bytemuck::cast_slice_mut(&mut values[range]).copy_from_slice(bytes),
            CpuStorage::F64(values) => bytemuck::cast_slice_mut(&mut values[range]).copy_from_slice(bytes),
            CpuStorage::U8(values) => values[range].copy_from_slice(bytes),
            CpuStorage::U32(values) => bytemuck::cast_slice_mut(&mut values[range]).copy_from_slice(bytes),
            CpuStorage::BF16(values) => {
                for (value, bytes) in values[range].iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = bf16::from_bits(u16::from_le_bytes(*bytes));
                }
            }
            _ => candle_core::bail!("the emulator has no tensors of this type"),
        }
        Ok(())
    }
}
