//! Memory at cache lines for numbers of any type.

use bytemuck::{Pod, Zeroable};

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: bytes, of which all may be zero.
unsafe impl Zeroable for Line {}
// SAFETY: 64 bytes without padding, aligned to their size, and all values of bytes are ones of it.
unsafe impl Pod for Line {}

/// Numbers of a type, from the start of a cache line on, at first zeros.
pub struct Lines(Vec<Line>);

impl Lines {
    /// Room for `count` numbers at least, rounded up to whole lines.
    pub fn zeroed<T: Pod>(count: usize) -> Self {
        Self(vec![Line([0; 64]); (count * size_of::<T>()).div_ceil(64)])
    }

    pub fn bytes(&self) -> usize {
        size_of_val(self.0.as_slice())
    }

    pub fn values<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(&self.0)
    }

    pub fn values_mut<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// From one row of so many numbers to the next, in numbers: whole lines, and one more, as rows that lie a multiple of 4096
/// bytes apart would share a set of the first cache.
pub fn row_stride<T: Pod>(depth: usize) -> usize {
    let line = 64 / size_of::<T>();
    depth.next_multiple_of(line) + line
}
