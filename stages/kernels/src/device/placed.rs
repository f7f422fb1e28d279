//! Matrices in memory, as libraries for products are told of them.

use candle_core::Tensor;

/// How a matrix, or a stack of matrices that are equally far apart, is in memory. Numbers are of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Placed {
    pub rows: usize,
    pub columns: usize,
    /// Columns are contiguous, not rows.
    pub transposed: bool,
    /// From one row to the next; if it is transposed, from one column to the next.
    pub leading: usize,
    /// How many matrices, and from one to the next. Of one that is in no stack: 1, and 0.
    pub count: usize,
    pub step: usize,
}

impl Placed {
    /// None where neither rows nor columns are contiguous, or matrices of a stack are not equally far apart.
    pub fn of(tensor: &Tensor) -> Option<Self> {
        let ([stack @ .., rows, columns], [steps @ .., row_step, column_step]) = (tensor.dims(), tensor.stride())
        else {
            return None;
        };
        let (rows, columns) = (*rows, *columns);
        // The step along an axis of one element says nothing.
        let (transposed, leading) = match (*row_step, *column_step) {
            (step, 1) if step >= columns || rows == 1 => (false, step.max(columns)),
            (1, step) if step >= rows || columns == 1 => (true, step.max(rows)),
            // A step of 0 repeats one element, which no leading dimension says.
            (step, _) if columns == 1 && (step > 0 || rows == 1) => (false, step),
            (_, step) if rows == 1 && step > 0 => (true, step),
            _ => return None,
        };
        let (mut count, mut step) = (1, 0);
        for (&dim, &of_dim) in stack.iter().zip(steps).rev().filter(|(dim, _)| **dim != 1) {
            if count > 1 && of_dim != step * count {
                return None;
            }
            if count == 1 {
                step = of_dim;
            }
            count *= dim;
        }
        Some(Self {
            rows,
            columns,
            transposed,
            leading: leading.max(1),
            count,
            step,
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn stacks_whose_matrices_are_equally_far_apart_are_told_from_others() {
        let of = |tensor: &Tensor| Placed::of(tensor);
        let all = Tensor::zeros((4, 3, 5, 6), DType::F32, &Device::Cpu).unwrap();
        let placed = of(&all).unwrap();
        assert_eq!(
            (placed.count, placed.step, placed.leading, placed.transposed),
            (12, 30, 6, false)
        );
        let placed = of(&all.transpose(2, 3).unwrap()).unwrap();
        assert_eq!(
            (placed.rows, placed.columns, placed.leading, placed.transposed),
            (6, 5, 6, true)
        );
        let placed = of(&all.narrow(1, 1, 1).unwrap()).unwrap();
        assert_eq!((placed.count, placed.step), (4, 90));
        assert_eq!(of(&all.narrow(1, 0, 2).unwrap()), None);
        assert_eq!(of(&all.transpose(0, 1).unwrap()), None);
        let shared = all.narrow(0, 0, 1).unwrap().narrow(1, 0, 1).unwrap();
        let placed = of(&shared.broadcast_as((4, 3, 5, 6)).unwrap()).unwrap();
        assert_eq!((placed.count, placed.step), (12, 0));
        // Elements that are repeated are in no matrix.
        let one = all
            .flatten_all()
            .unwrap()
            .narrow(0, 0, 1)
            .unwrap()
            .reshape((1, 1))
            .unwrap();
        for (shape, is_matrix) in [((1, 1), true), ((5, 1), false), ((1, 6), false), ((5, 6), false)] {
            assert_eq!(of(&one.broadcast_as(shape).unwrap()).is_some(), is_matrix, "{shape:?}");
        }
        // Heads behind time.
        let heads = Tensor::zeros((2, 5, 3, 6), DType::F32, &Device::Cpu).unwrap();
        let of_one = heads.narrow(0, 0, 1).unwrap().transpose(1, 2).unwrap();
        let placed = of(&of_one).unwrap();
        assert_eq!((placed.count, placed.step, placed.leading), (3, 6, 18));
        assert_eq!(of(&heads.transpose(1, 2).unwrap()), None);
        assert_eq!(
            of(&all.narrow(3, 0, 1).unwrap().narrow(2, 0, 1).unwrap())
                .unwrap()
                .leading,
            6
        );
    }
}
