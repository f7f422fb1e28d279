//! Sums over rows that a kernel has begun. On a device each block of a kernel adds up the rows that it has; what the blocks
//! found is added up later, that of many kernels in one launch.

use candle_core::Tensor;

use super::cuda::{self, PartialSums};
use crate::error::Result;

/// Sums over rows, one for each column, in f32 on a device. Their order depends on sizes alone.
#[derive(Debug)]
pub struct ColumnSums(Sums);

#[derive(Debug)]
enum Sums {
    /// (columns)
    Whole(Tensor),
    /// On a device.
    Partial(PartialSums),
}

impl ColumnSums {
    /// Sums (columns) that are whole.
    pub fn whole(sums: Tensor) -> Self {
        Self(Sums::Whole(sums))
    }

    /// What each block of a kernel found, (blocks, columns).
    pub(crate) fn partial(sums: Tensor) -> Self {
        Self(Sums::Partial(PartialSums { sums, taps: 0 }))
    }

    /// The same of kernels and biases of a convolution: columns (taps + 1, channels), of which the last are the biases. The sums
    /// are the kernels' as (channels, taps), and then the biases'.
    pub(crate) fn partial_of_taps(sums: Tensor, taps: usize) -> Self {
        Self(Sums::Partial(PartialSums { sums, taps }))
    }

    /// The sums, (columns).
    pub fn total(self) -> Result<Tensor> {
        match self.0 {
            Sums::Whole(sums) => Ok(sums),
            Sums::Partial(partial) => Ok(cuda::totals(&[partial], 1, None)?.0),
        }
    }
}

/// What one launch adds up.
pub struct Added {
    /// The sums, behind each other: what was given to be added to, if any was.
    pub sums: Tensor,
    /// Those that are to be apart, each.
    pub apart: Vec<Tensor>,
}

/// The sums of each behind each other, added to `to` in place where that is given; and of each of `apart` by itself. In one
/// launch; none where it takes more, or where sums are whole already: see [`totals`].
pub fn add_together(sums: &[ColumnSums], apart: &[ColumnSums], to: Option<&Tensor>) -> Result<Option<Added>> {
    let mut partial = Vec::new();
    for sums in sums.iter().chain(apart) {
        let Sums::Partial(tensor) = &sums.0 else {
            return Ok(None);
        };
        partial.push(tensor.clone());
    }
    if sums.is_empty() || partial.len() > cuda::TOGETHER {
        return Ok(None);
    }
    let (sum, rest) = cuda::totals(&partial, sums.len(), to)?;
    let (mut first, mut each) = (0, Vec::new());
    for (tensor, rest) in partial[sums.len()..].iter().zip(rest.iter().cycle()) {
        let width = tensor.sums.dim(1)?;
        each.push(rest.narrow(0, first, width)?);
        first += width;
    }
    Ok(Some(Added { sums: sum, apart: each }))
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
    for some in partial.chunks(cuda::TOGETHER) {
        let (all, _) = cuda::totals(some, some.len(), None)?;
        let mut first = 0;
        for part in some {
            let width = part.sums.dim(1)?;
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
