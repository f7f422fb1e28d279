//! Launches of kernels for CUDA devices, on f32 tensors on a device.
//!
//! Each `.cu` file is compiled by the build script for the cards that are common, and otherwise by NVRTC when a kernel of it is
//! first used (`compiled.rs`). What is launched, with which arguments and on how many blocks is decided by an operation once;
//! [`launch`] checks the arguments and hands them to the [`executor`](super::executor).

use candle_core::{DType, Device, Shape, Tensor};

use super::executor::executor;
use super::signature::{self, Kernel, Parameter};
use super::to_device;
use crate::counts::{copied_to_device, launched};
use crate::error::{Error, Result};
use crate::noise::DropMask;
use crate::timings;

/// Threads of every block; as in `prelude.cuh`.
pub const THREADS: usize = 256;

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub enum Argument<'a> {
    /// A contiguous tensor that is read.
    Read(&'a Tensor),
    /// The same, or no tensor.
    ReadIf(Option<&'a Tensor>),
    /// A contiguous tensor that is written, or read and written.
    Write(&'a Tensor),
    /// The same, or no tensor.
    WriteIf(Option<&'a Tensor>),
    /// Contiguous tensors that are read, as a table of pointers.
    ReadAll(&'a [Tensor]),
    /// The same, that are written.
    WriteAll(&'a [Tensor]),
    /// A table of numbers. All tables of a launch go to the device in one copy.
    Longs(&'a [u64]),
    Int(usize),
    /// A number that may be negative.
    Signed(i32),
    Long(u64),
    /// A number that is rounded to 32 bits.
    Float(f64),
    Double(f64),
}

/// How many blocks a kernel runs on.
#[derive(Clone, Copy, Debug)]
pub struct Grid([usize; 2]);

impl<'a> Argument<'a> {
    /// The tensors that it is.
    pub fn tensors(&self) -> &'a [Tensor] {
        match *self {
            Argument::Read(tensor)
            | Argument::Write(tensor)
            | Argument::ReadIf(Some(tensor))
            | Argument::WriteIf(Some(tensor)) => std::slice::from_ref(tensor),
            Argument::ReadAll(tensors) | Argument::WriteAll(tensors) => tensors,
            _ => &[],
        }
    }

    /// Entries of the table that is copied to the device for it.
    fn table_len(&self) -> usize {
        match self {
            Argument::ReadAll(tensors) | Argument::WriteAll(tensors) => tensors.len(),
            Argument::Longs(numbers) => numbers.len(),
            _ => 0,
        }
    }
}

impl Grid {
    /// A thread for each of `n` elements.
    pub fn elements(n: usize) -> Self {
        Self([n.div_ceil(THREADS), 1])
    }

    /// A block for each row.
    pub fn rows(rows: usize) -> Self {
        Self([rows, 1])
    }

    /// Blocks in each dimension of the grid.
    pub fn of(x: usize, y: usize) -> Self {
        Self([x, y])
    }

    /// As the device takes it; none if there is nothing to do.
    fn blocks(self, kernel: &str) -> Result<Option<[u32; 2]>> {
        let [x, y] = self.0;
        if x == 0 || y == 0 {
            return Ok(None);
        }
        match (i32::try_from(x), u16::try_from(y)) {
            (Ok(_), Ok(_)) => Ok(Some([x as u32, y as u32])),
            _ => Err(Error::Input(format!("kernel {kernel}: {x} x {y} blocks are too many"))),
        }
    }
}

/// Runs a kernel; one whose blocks wait for each other on no more blocks than can run at once. Every argument is checked against the parameters that the kernel's file declares.
pub fn launch(name: &str, grid: Grid, arguments: &[Argument]) -> Result<()> {
    let kernel = signature::kernel(name)?;
    check(kernel, arguments)?;
    let Some(blocks) = grid.blocks(name)? else {
        return Ok(());
    };
    launched(kernel.name);
    let entries: usize = arguments.iter().map(Argument::table_len).sum();
    if entries > 0 {
        copied_to_device(entries * size_of::<u64>());
    }
    let tensors = || arguments.iter().flat_map(Argument::tensors);
    let device = tensors().next().map_or(&Device::Cpu, Tensor::device);
    let described = || (kernel.name.to_owned(), tensors().map(timings::bytes).sum(), 0);
    timings::around(device, described, || executor().launch(kernel, blocks, arguments))
}

/// Checks arguments against a kernel's parameters: a mistake would be a wrong access in the device's memory.
fn check(kernel: &Kernel, arguments: &[Argument]) -> Result<()> {
    let wrong = |at: usize| Err(Error::Input(format!("kernel {}: wrong argument {at}", kernel.name)));
    if arguments.len() != kernel.parameters.len() {
        return Err(Error::Input(format!(
            "kernel {}: {} arguments for {} parameters",
            kernel.name,
            arguments.len(),
            kernel.parameters.len()
        )));
    }
    for (at, (parameter, argument)) in kernel.parameters.iter().zip(arguments).enumerate() {
        let (dtype, tensors) = match (*parameter, argument) {
            (Parameter::Pointer { dtype, written: false }, Argument::Read(tensor) | Argument::ReadIf(Some(tensor)))
            | (
                Parameter::Pointer { dtype, written: true },
                Argument::Write(tensor) | Argument::WriteIf(Some(tensor)),
            ) => (dtype, std::slice::from_ref(*tensor)),
            (Parameter::Pointers { dtype, written: false }, Argument::ReadAll(tensors))
            | (Parameter::Pointers { dtype, written: true }, Argument::WriteAll(tensors)) => (dtype, *tensors),
            (Parameter::Pointer { written: false, .. }, Argument::ReadIf(None))
            | (Parameter::Pointer { written: true, .. }, Argument::WriteIf(None))
            | (Parameter::Longs, Argument::Longs(_))
            | (Parameter::Int, Argument::Signed(_))
            | (Parameter::Long, Argument::Long(_))
            | (Parameter::Float, Argument::Float(_))
            | (Parameter::Double, Argument::Double(_)) => continue,
            (Parameter::Int, Argument::Int(value)) if i32::try_from(*value).is_ok() => continue,
            (Parameter::Int, Argument::Int(value)) => {
                return Err(Error::Input(format!(
                    "kernel {}: a size of {value} is too large",
                    kernel.name
                )));
            }
            _ => return wrong(at),
        };
        let unfit = |tensor: &&Tensor| tensor.dtype() != dtype || !tensor.is_contiguous();
        if let Some(tensor) = tensors.iter().find(unfit) {
            return Err(Error::Input(format!(
                "kernel {}: argument {at} must be a contiguous tensor of type {}, not one of type {}",
                kernel.name,
                dtype.as_str(),
                tensor.dtype().as_str()
            )));
        }
    }
    Ok(())
}

/// A tensor in f32 whose values are to be written, all of them, by a kernel; on the device of another.
pub(crate) fn fresh(shape: impl Into<Shape>, like: &Tensor) -> Result<Tensor> {
    fresh_of(DType::F32, shape, like.device())
}

/// The same of another type.
pub(crate) fn fresh_of(dtype: DType, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    executor().allocate(shape.into(), dtype, device)
}

/// A tensor that a kernel writes in f32 or in bf16, as the two pointers that it takes for it.
pub(crate) fn in_either<'a>(tensor: impl Into<Option<&'a Tensor>>) -> [Argument<'a>; 2] {
    let tensor = tensor.into();
    let of = |dtype: DType| Argument::WriteIf(tensor.filter(|tensor| tensor.dtype() == dtype));
    [of(DType::F32), of(DType::BF16)]
}

/// A tensor in f32 or in bf16 that a kernel reads, as the two pointers that it takes for it.
pub(crate) fn read_in_either(tensor: &Tensor) -> [Argument<'_>; 2] {
    let of = |dtype: DType| Argument::ReadIf(Some(tensor).filter(|tensor| tensor.dtype() == dtype));
    [of(DType::F32), of(DType::BF16)]
}

/// Of a kernel for f32 and one for bf16, by their names, the one that reads this tensor.
pub(crate) fn of_either<'a>(tensor: &Tensor, [wide, narrow]: [&'a str; 2]) -> &'a str {
    match tensor.dtype() {
        DType::BF16 => narrow,
        _ => wide,
    }
}

/// A tensor for [`in_either`].
pub(crate) fn fresh_in(dtype: DType, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    match dtype {
        DType::F32 | DType::BF16 => fresh_of(dtype, shape, device),
        other => Err(Error::Input(format!(
            "a kernel gives f32 or bf16, not {}",
            other.as_str()
        ))),
    }
}

/// Numbers on a device.
pub(crate) fn numbers(values: impl Iterator<Item = usize>, device: &Device) -> Result<Tensor> {
    let values = values
        .map(u32::try_from)
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|_| Error::Input("a length or index is too large for the device".into()))?;
    let count = values.len();
    to_device(&Tensor::from_vec(values, count, &Device::Cpu)?, device)
}

/// An error unless a tensor has as many elements as another: a kernel depends on the size of one of them.
pub(crate) fn alike(what: &str, a: &Tensor, b: &Tensor) -> Result<()> {
    if a.elem_count() == b.elem_count() {
        return Ok(());
    }
    let (a, b) = (a.dims(), b.dims());
    Err(Error::Input(format!("{what}: shapes {a:?} and {b:?} do not fit")))
}

/// Factor, key and threshold of a dropout mask, the factor times `factor`.
pub(crate) fn mask_arguments<'a>(mask: Option<DropMask>, factor: f64) -> [Argument<'a>; 3] {
    let (key, threshold) = mask.map_or((0, 0), |mask| mask.key_and_threshold());
    let keep = mask.map_or(1.0, |mask| mask.keep_factor);
    [
        Argument::Float(factor * keep),
        Argument::Long(key),
        Argument::Long(threshold),
    ]
}
