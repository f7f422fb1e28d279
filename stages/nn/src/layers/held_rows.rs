//! Rows of an activation that come in blocks and are kept until they are no longer needed.

use std::ops::Range;

use candle_core::Tensor;

use crate::error::{Error, Result};

/// Rows along an axis, from some row of the whole on.
#[derive(Debug)]
pub struct HeldRows {
    axis: usize,
    /// Which row of the whole is the first of `pieces`.
    first: usize,
    end: usize,
    /// Rows before this one are not needed.
    needed: usize,
    pieces: Vec<Tensor>,
}

impl HeldRows {
    /// No rows, along an axis.
    pub fn new(axis: usize) -> Self {
        HeldRows {
            axis,
            first: 0,
            end: 0,
            needed: 0,
            pieces: Vec::new(),
        }
    }

    /// How many rows have come, with those that were dropped.
    pub fn end(&self) -> usize {
        self.end
    }

    /// How many rows are in memory.
    pub fn held(&self) -> usize {
        self.end - self.first
    }

    /// Appends rows.
    pub fn push(&mut self, rows: Tensor) -> Result<()> {
        self.end += rows.dim(self.axis)?;
        self.pieces.push(rows);
        Ok(())
    }

    /// These rows of the whole.
    ///
    /// # Errors
    /// If they have not come yet, or were dropped.
    pub fn get(&mut self, range: &Range<usize>) -> Result<Tensor> {
        if range.start < self.needed || range.end > self.end || range.is_empty() {
            return Err(Error::Input(format!(
                "rows {range:?} are not among those from {} to {}",
                self.needed, self.end
            )));
        }
        if self.pieces.len() > 1 {
            self.pieces = vec![Tensor::cat(&self.pieces, self.axis)?];
        }
        let part = self.pieces[0].narrow(self.axis, range.start - self.first, range.len())?;
        Ok(part.contiguous()?)
    }

    /// Forgets the rows before this one of the whole. Their memory is freed when they are half of what is held.
    pub fn drop_before(&mut self, row: usize) -> Result<()> {
        self.needed = row.clamp(self.needed, self.end);
        if self.needed == self.end {
            self.pieces.clear();
            self.first = self.end;
        } else if self.needed - self.first > self.end - self.needed {
            // Copied: a view would keep the whole tensor alive.
            let rest = self.get(&(self.needed..self.end))?.force_contiguous()?;
            self.pieces = vec![rest];
            self.first = self.needed;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn rows_are_there_from_when_they_come_until_they_are_dropped() {
        let rows = |range: Range<u32>| Tensor::arange(range.start, range.end, &Device::Cpu).unwrap();
        let mut held = HeldRows::new(0);
        assert_eq!(held.end(), 0);
        assert!(held.get(&(0..1)).is_err());
        held.push(rows(0..3)).unwrap();
        held.push(rows(3..7)).unwrap();
        assert_eq!(held.get(&(2..5)).unwrap().to_vec1::<u32>().unwrap(), [2, 3, 4]);
        held.drop_before(1).unwrap();
        assert!(held.get(&(0..2)).is_err());
        held.drop_before(4).unwrap();
        assert_eq!(held.first, 4);
        assert!(held.get(&(3..5)).is_err() && held.get(&(6..8)).is_err());
        assert_eq!(held.get(&(4..7)).unwrap().to_vec1::<u32>().unwrap(), [4, 5, 6]);
        held.drop_before(9).unwrap();
        assert_eq!(held.end(), 7);
        held.push(rows(7..8)).unwrap();
        assert_eq!(held.get(&(7..8)).unwrap().to_vec1::<u32>().unwrap(), [7]);
    }
}
