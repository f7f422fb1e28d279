//! Sum of squares: the norm of a gradient.

use candle_core::{CpuStorage, Storage, Tensor};
use rayon::prelude::*;

use crate::error::{Error, Result};

/// Elements that one task works on. Fixed, so that sums do not depend on the number of threads.
const CHUNK: usize = 16 * 1024;

/// Sum of the squares of all elements, in 64 bits, chunk by chunk in a fixed order.
pub fn sum_of_squares(tensors: &[Tensor]) -> Result<f64> {
    if tensors.first().is_some_and(|tensor| crate::is_gpu(tensor.device())) {
        return super::cuda::squares(tensors);
    }
    tensors.iter().map(of_one).sum()
}

fn of_one(tensor: &Tensor) -> Result<f64> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let (start, end) = (layout.start_offset(), layout.start_offset() + tensor.elem_count());
    let sums: Vec<f64> = match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => values[start..end]
            .par_chunks(CHUNK)
            .map(|chunk| chunk.iter().map(|&x| f64::from(x) * f64::from(x)).sum())
            .collect(),
        Storage::Cpu(CpuStorage::F64(values)) => values[start..end]
            .par_chunks(CHUNK)
            .map(|chunk| chunk.iter().map(|x| x * x).sum())
            .collect(),
        _ => {
            return Err(Error::Input(format!(
                "gradients of type {:?} are not supported",
                tensor.dtype()
            )));
        }
    };
    Ok(sums.iter().sum())
}
