//! Sums over rows that a kernel has begun. On a device each block of a kernel adds up the rows that it has; what the blocks
//! found is added up later, that of many kernels in one launch.

use candle_core::Tensor;

use crate::cuda;
use crate::error::Result;

/// Sums over rows, one for each column, in f32 on a device. Their order depends on sizes alone.
#[derive(Debug)]
pub struct ColumnSums(Sums);

#[derive(Debug)]
enum Sums {
    /// (columns)
    Whole(Tensor),
    /// (blocks, columns), on a device.
    Partial(Tensor),
}

impl ColumnSums {
    /// Sums (columns) that are whole.
    pub(crate) fn whole(sums: Tensor) -> Self {
        Self(Sums::Whole(sums))
    }

    /// What each block of a kernel found, (blocks, columns).
    pub(crate) fn partial(sums: Tensor) -> Self {
        Self(Sums::Partial(sums))
    }

    /// The sums, (columns).
    pub fn total(self) -> Result<Tensor> {
        match self.0 {
            Sums::Whole(sums) => Ok(sums),
            Sums::Partial(partial) => {
                let width = partial.dim(1)?;
                Ok(cuda::sums::totals(&[partial])?.narrow(0, 0, width)?)
            }
        }
    }
}

/// The sums of each, (columns), with as few launches as there can be.
pub fn totals(sums: Vec<ColumnSums>) -> Result<Vec<Tensor>> {
    let mut partial = Vec::new();
    for sums in &sums {
        if let Sums::Partial(tensor) = &sums.0 {
            partial.push(tensor.clone());
        }
    }
    let mut added = Vec::with_capacity(partial.len());
    for some in partial.chunks(cuda::sums::TOGETHER) {
        let all = cuda::sums::totals(some)?;
        let mut first = 0;
        for part in some {
            let width = part.dim(1)?;
            added.push(all.narrow(0, first, width)?);
            first += width;
        }
    }
    let mut added = added.into_iter();
    Ok(sums
        .into_iter()
        .filter_map(|sums| match sums.0 {
            Sums::Whole(sums) => Some(sums),
            Sums::Partial(_) => added.next(),
        })
        .collect())
}
