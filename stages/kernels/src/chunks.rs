//! Computes results chunk by chunk, on all threads. Chunks depend only on the size of the data, and partial sums are
//! added in order, so results do not depend on the number of threads.

use std::mem::MaybeUninit;
use std::ops::Range;

use rayon::prelude::*;

use super::{Float, LANES, lanes, multiversion};

/// Rows per chunk of work for rows of `width` elements: about 8192 elements.
pub(crate) fn rows_per_chunk(width: usize) -> usize {
    (8192 / width.max(1)).max(1)
}

/// Sums of `width` accumulators over chunks of `rows` rows: `add(rows, sums)` adds the given rows to the sums. Chunks
/// depend on `rows` alone, and their sums are added in order.
pub(crate) fn sum_over_rows<T: Float>(
    rows: usize,
    width: usize,
    add: impl Fn(Range<usize>, &mut [T]) + Sync,
) -> Vec<T> {
    // At most 32 chunks, so that adding them up stays cheap beside the work.
    let chunk = rows.div_ceil(32).max(16);
    let count = rows.div_ceil(chunk).max(1);
    let mut partial = vec![T::zero(); count * width];
    partial
        .par_chunks_mut(width.max(1))
        .enumerate()
        .for_each(|(index, sums)| {
            add(index * chunk..((index + 1) * chunk).min(rows), sums);
        });
    total(&partial, width)
}

/// Fills uninitialised memory with zeros.
///
/// New tensors are filled chunk by chunk, each chunk zeroed just before: the zeros are then still in the cache when
/// they are overwritten, whereas those of `vec![0.0; n]` go through memory.
fn zeroed<T: Float>(chunk: &mut [MaybeUninit<T>]) -> &mut [T] {
    chunk.fill(MaybeUninit::new(T::zero()));
    // SAFETY: every element was written just now.
    unsafe { written(chunk) }
}

/// `len` values, cut into chunks of `chunk` (the last may be shorter): `fill(number, chunk)` changes each from zeros.
pub fn by_chunks<T: Float>(len: usize, chunk: usize, fill: impl Fn(usize, &mut [T]) + Sync) -> Vec<T> {
    let mut out = Vec::with_capacity(len);
    out.spare_capacity_mut()[..len]
        .par_chunks_mut(chunk.max(1))
        .enumerate()
        .for_each(|(number, chunk)| fill(number, zeroed(chunk)));
    // SAFETY: the chunks are all of the first `len` elements, and each was initialised by `zeroed`.
    unsafe { out.set_len(len) };
    out
}

/// A block of values that is copied to uninitialised memory.
#[inline(always)]
fn written_as<T: Float>(values: [T; LANES]) -> [MaybeUninit<T>; LANES] {
    let mut out = [MaybeUninit::uninit(); LANES];
    for (out, value) in out.iter_mut().zip(values) {
        out.write(value);
    }
    out
}

/// # Safety
///
/// Every element must have been written.
unsafe fn written<T: Float>(values: &mut [MaybeUninit<T>]) -> &mut [T] {
    // SAFETY: the caller's promise; `MaybeUninit<T>` has the layout of `T`.
    unsafe { &mut *(values as *mut [MaybeUninit<T>] as *mut [T]) }
}

/// Element-wise `f` over slices of equal length, in chunks of `chunk`; `finish(first, chunk)` may change a chunk while
/// it is still in the cache.
pub(crate) fn mapped<T: Float, const N: usize>(
    slices: [&[T]; N],
    chunk: usize,
    f: impl Fn([T; N]) -> T + Sync,
    finish: impl Fn(usize, &mut [T]) + Sync,
) -> Vec<T> {
    let len = slices.iter().map(|slice| slice.len()).min().unwrap_or(0);
    let mut out = Vec::with_capacity(len);
    out.spare_capacity_mut()[..len]
        .par_chunks_mut(chunk.max(1))
        .enumerate()
        .for_each(|(number, out)| {
            multiversion!({
                let first = number * chunk;
                let mut here: [&[T]; N] = [&[]; N];
                for (here, slice) in here.iter_mut().zip(slices) {
                    *here = &slice[first..][..out.len()];
                }
                // Block by block: the compiler does not vectorise loops with bounds checks, or where captures of `f`
                // may alias the output.
                let (blocks, rest) = out.as_chunks_mut::<LANES>();
                let done = blocks.len() * LANES;
                for (at, out) in blocks.iter_mut().enumerate() {
                    let mut block = [[T::zero(); LANES]; N];
                    for (block, here) in block.iter_mut().zip(here) {
                        block.copy_from_slice(&here[at * LANES..][..LANES]);
                    }
                    *out = written_as(lanes(|lane| f(lanes(|slice| block[slice][lane]))));
                }
                for (i, out) in rest.iter_mut().enumerate() {
                    out.write(f(lanes(|slice| here[slice][done + i])));
                }
                // SAFETY: every element was written just now.
                finish(first, unsafe { written(out) });
            })
        });
    // SAFETY: the chunks are all of the first `len` elements, and each was written wholly.
    unsafe { out.set_len(len) };
    out
}

/// `len` values that `fill` writes.
///
/// # Safety
///
/// `fill` must write every element of what it is given, unless it panics.
pub(crate) unsafe fn filled<T: Float>(len: usize, fill: impl FnOnce(&mut [MaybeUninit<T>])) -> Vec<T> {
    let mut out = Vec::with_capacity(len);
    fill(&mut out.spare_capacity_mut()[..len]);
    // SAFETY: `fill` wrote all of them, by the caller's promise.
    unsafe { out.set_len(len) };
    out
}

/// Two results of `rows` rows, `widths` wide, made together: `fill(first row, rows of one, rows of other)`.
pub(crate) fn two_by_rows<T: Float>(
    rows: usize,
    widths: [usize; 2],
    fill: impl Fn(usize, &mut [T], &mut [T]) + Sync,
) -> (Vec<T>, Vec<T>) {
    if widths.contains(&0) {
        // Nothing to cut into rows.
        return (vec![T::zero(); rows * widths[0]], vec![T::zero(); rows * widths[1]]);
    }
    let per_piece = rows_per_chunk(widths[0].max(widths[1]));
    let (mut one, mut other) = (Vec::new(), Vec::new());
    one.reserve_exact(rows * widths[0]);
    other.reserve_exact(rows * widths[1]);
    one.spare_capacity_mut()[..rows * widths[0]]
        .par_chunks_mut((per_piece * widths[0]).max(1))
        .zip(other.spare_capacity_mut()[..rows * widths[1]].par_chunks_mut((per_piece * widths[1]).max(1)))
        .enumerate()
        .for_each(|(number, (one, other))| fill(number * per_piece, zeroed(one), zeroed(other)));
    // SAFETY: both have the same number of chunks, as no width is zero, and `zeroed` initialised each.
    unsafe {
        one.set_len(rows * widths[0]);
        other.set_len(rows * widths[1]);
    }
    (one, other)
}

/// A result of `rows` rows of `width`, and sums over rows that are found on the way: `fill(rows, their part of the
/// result, sums)` adds to `sums`, which are `sums` long. Chunks are those of [`sum_over_rows`].
pub(crate) fn rows_and_sums<T: Float>(
    rows: usize,
    width: usize,
    sums: usize,
    fill: impl Fn(Range<usize>, &mut [T], &mut [T]) + Sync,
) -> (Vec<T>, Vec<T>) {
    if width == 0 || sums == 0 {
        // Nothing to cut into rows.
        return (vec![T::zero(); rows * width], vec![T::zero(); sums]);
    }
    let chunk = rows.div_ceil(32).max(16);
    let count = rows.div_ceil(chunk).max(1);
    let block = rows_per_chunk(width);
    let mut partial = vec![T::zero(); count * sums];
    let mut out = Vec::with_capacity(rows * width);
    out.spare_capacity_mut()[..rows * width]
        .par_chunks_mut((chunk * width).max(1))
        .zip(partial.par_chunks_mut(sums.max(1)))
        .enumerate()
        .for_each(|(number, (out, sums))| {
            for (at, out) in out.chunks_mut((block * width).max(1)).enumerate() {
                let first = number * chunk + at * block;
                let here = first..first + out.len() / width.max(1);
                fill(here, zeroed(out), sums);
            }
        });
    // SAFETY: there is a chunk of `partial` for each chunk of `out`, so `zeroed` initialised all of it.
    unsafe { out.set_len(rows * width) };
    (out, total(&partial, sums))
}

/// Partial sums of `width` each, added in order.
fn total<T: Float>(partial: &[T], width: usize) -> Vec<T> {
    let mut total = partial[..width].to_vec();
    for sums in partial[width..].chunks_exact(width.max(1)) {
        for (total, &sum) in total.iter_mut().zip(sums) {
            *total += sum;
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_results_of_any_size_and_start_at_zero() {
        for (rows, width) in [(0, 3), (1, 1), (17, 5), (100, 3), (1000, 7), (5, 20_000), (40, 0)] {
            let add_one = |values: &mut [f64]| values.iter_mut().for_each(|value| *value += 1.0);
            let ones = vec![1.0; rows * width];
            assert_eq!(by_chunks(rows * width, 13, |_, chunk| add_one(chunk)), ones);
            let (one, other) = two_by_rows(rows, [width, 2], |first, one, other| {
                add_one(one);
                let here = other.chunks_exact_mut(2).enumerate();
                here.for_each(|(row, other)| other[1] = (first + row) as f64);
            });
            assert_eq!(one, ones);
            assert_eq!(other.len(), 2 * rows);
            let numbered = |(row, pair): (usize, &[f64])| pair == [0.0, row as f64];
            assert!(width == 0 || other.chunks_exact(2).enumerate().all(numbered));
            let (out, sums) = rows_and_sums(rows, width, 2, |rows, out: &mut [f64], sums| {
                assert_eq!(out.len(), rows.len() * width);
                add_one(out);
                sums[0] += rows.len() as f64;
                sums[1] += rows.sum::<usize>() as f64;
            });
            assert_eq!(out, ones);
            if width > 0 {
                assert_eq!(sums, [rows as f64, (0..rows).sum::<usize>() as f64]);
            }
        }
    }
}
