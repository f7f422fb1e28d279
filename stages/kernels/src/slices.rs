//! Values of tensors on the CPU as slices.

use std::marker::PhantomData;
use std::ops::{Deref, Range};

use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Shape, Storage, Tensor};

use crate::device::executor::has_stand_in;
use crate::error::{Error, Result};
use crate::float::Float;

/// An error in a thread that emulates a device: on a real device the CPU kernel would not work.
fn no_device() -> Result<()> {
    if has_stand_in() {
        return Err(Error::Input(
            "a kernel for the CPU was given a tensor on a device".into(),
        ));
    }
    Ok(())
}

/// The values of a contiguous CPU tensor; holds its read lock.
pub struct Slice<'a, T> {
    /// Candle's read guard, whose type candle does not name.
    storage: Box<dyn Deref<Target = Storage> + 'a>,
    range: Range<usize>,
    element: PhantomData<T>,
}

impl<T: Float> Deref for Slice<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &**self.storage {
            // `slice` checked device and type; the lock keeps both as they are.
            Storage::Cpu(values) => &values.as_slice::<T>().expect("type was checked")[self.range.clone()],
            _ => unreachable!("device was checked"),
        }
    }
}

/// The values of a tensor that is on the CPU, contiguous and of type `T`. Dereference it once, before a loop.
pub fn slice<T: Float>(tensor: &Tensor) -> Result<Slice<'_, T>> {
    no_device()?;
    let (storage, layout) = tensor.storage_and_layout();
    let (start, end) = layout
        .contiguous_offsets()
        .ok_or_else(|| Error::Input(format!("tensor of shape {:?} is not contiguous", tensor.dims())))?;
    match &*storage {
        Storage::Cpu(values) => {
            values.as_slice::<T>()?;
        }
        _ => return Err(Error::Input("kernel has no version for this device".into())),
    }
    Ok(Slice {
        storage: Box::new(storage),
        range: start..end,
        element: PhantomData,
    })
}

/// A CPU tensor made of `values` without a copy.
pub fn tensor<T: Float>(values: Vec<T>, shape: impl Into<Shape>) -> Result<Tensor> {
    no_device()?;
    Ok(Tensor::from_vec(values, shape.into(), &Device::Cpu)?)
}

struct Modify<T, F> {
    change: F,
    element: PhantomData<T>,
}

impl<T: Float, F: Fn(&mut [T])> InplaceOp1 for Modify<T, F> {
    fn name(&self) -> &'static str {
        "modify"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (start, end) = layout
            .contiguous_offsets()
            .ok_or_else(|| candle_core::Error::Msg("tensor to change is not contiguous".into()))?;
        let values = T::values_mut(storage)
            .ok_or_else(|| candle_core::Error::Msg("tensor to change has another type".into()))?;
        (self.change)(&mut values[start..end]);
        Ok(())
    }
}

/// Changes the values of a contiguous CPU tensor in place. Every tensor that shares its storage changes too; a tensor
/// read inside `change` must not be one of them.
pub fn modify<T: Float>(tensor: &Tensor, change: impl Fn(&mut [T])) -> Result<()> {
    no_device()?;
    tensor.inplace_op1(&Modify {
        change,
        element: PhantomData,
    })?;
    Ok(())
}
