//! Matrices as they are in memory.

/// A matrix within a slice: element (row, column) at `start + row * row_step + column * column_step`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    values: &'a [f32],
    start: usize,
    pub rows: usize,
    pub columns: usize,
    pub row_step: usize,
    pub column_step: usize,
}

impl<'a> Matrix<'a> {
    /// None if an element is outside of `values`.
    pub fn new(
        values: &'a [f32],
        start: usize,
        [rows, columns]: [usize; 2],
        [row_step, column_step]: [usize; 2],
    ) -> Option<Self> {
        if rows > 0 && columns > 0 {
            let last = start
                .checked_add((rows - 1).checked_mul(row_step)?)?
                .checked_add((columns - 1).checked_mul(column_step)?)?;
            values.get(last)?;
        }
        Some(Self {
            values,
            start,
            rows,
            columns,
            row_step,
            column_step,
        })
    }

    pub fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_step: self.column_step,
            column_step: self.row_step,
            ..self
        }
    }

    /// Whether the storage has the float that lies `behind` floats behind an element.
    pub fn has(&self, row: usize, column: usize, behind: usize) -> bool {
        let offsets = [
            row.checked_mul(self.row_step),
            column.checked_mul(self.column_step),
            Some(behind),
        ];
        let place = offsets
            .into_iter()
            .try_fold(self.start, |place, offset| place.checked_add(offset?));
        place.is_some_and(|place| place < self.values.len())
    }

    /// Pointer to an element; it need not exist.
    #[inline]
    pub fn at(&self, row: usize, column: usize) -> *const f32 {
        let offset = self.start + row * self.row_step + column * self.column_step;
        self.values.as_ptr().wrapping_add(offset)
    }
}
