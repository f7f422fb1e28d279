//! Memory at cache lines.

use std::ops::{Deref, DerefMut};

use bytemuck::Pod;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Numbers that begin at a cache line, so that vectors of them are in one line. Derefs to them.
#[derive(Debug, Default)]
pub struct Aligned<T> {
    values: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Pod> Aligned<T> {
    /// So many zeros.
    pub fn zeroed(len: usize) -> Self {
        // A line more than is needed; without a step where the allocator knows of zeros.
        let values = vec![T::zeroed(); len + LINE / size_of::<T>() - 1];
        // A number of elements, as memory of elements begins at a multiple of their size; otherwise the start does not matter.
        let start = values.as_ptr().align_offset(LINE).min(LINE / size_of::<T>() - 1);
        Self { values, start, len }
    }

    /// Changes the length. The values are then without meaning.
    pub fn resize(&mut self, len: usize) {
        if self.room() < len {
            *self = Self::zeroed(len);
        }
        self.len = len;
    }

    /// The most that [`resize`](Self::resize) takes without fresh memory.
    pub fn room(&self) -> usize {
        (self.values.len() + 1).saturating_sub(LINE / size_of::<T>())
    }
}

impl<T: Pod> From<&[T]> for Aligned<T> {
    fn from(values: &[T]) -> Self {
        let mut aligned = Self::zeroed(values.len());
        aligned.copy_from_slice(values);
        aligned
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values[self.start..self.start + self.len]
    }
}

impl<T> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_begin_at_a_cache_line_whatever_their_number() {
        let mut floats = Aligned::<f32>::default();
        for len in [105, 56_000, 7, 0, 1] {
            let room = floats.room();
            floats.resize(len);
            assert_eq!((floats.len(), floats.as_ptr() as usize % LINE), (len, 0));
            assert_eq!(floats.room(), room.max(len));
        }
        for len in [1, 63, 64, 65] {
            let bytes = Aligned::<u8>::zeroed(len);
            assert!((bytes.as_ptr() as usize).is_multiple_of(LINE) && *bytes == vec![0; len]);
        }
        assert_eq!(*Aligned::from(&[1.0, 2.0][..]), [1.0, 2.0]);
    }
}
