//! The product of a single row with a matrix whose depth lies contiguous, as weights do: the matrix is read once, and
//! turned in registers, so that a vector holds the sums of eight elements of the result.
//!
//! Each sum is the chain that the micro-kernel computes for it, so an element is the same to the bit as in any other product.

use std::arch::x86_64::*;

use super::micro_kernel::{KC, transposed_8x8};

/// Most elements of the result that are computed together: four vectors, which hide each other's latency.
pub const COLUMNS: usize = 32;

/// Floats ahead of those that are read, in each row of the matrix, that are fetched meanwhile.
const AHEAD: usize = 32;

/// `to[i] = sum of row[k] * from[i * step + k]`, for `count` elements.
///
/// # Safety
///
/// The processor must have AVX2 and FMA; `from` must have `row.len()` floats at each multiple of `step` below `count`
/// times `step`, and `to` `count` floats, which are written wholly.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn gemv(row: &[f32], from: *const f32, step: usize, count: usize, to: *mut f32) {
    // Where rows are a multiple of 2 KiB apart, few of them fit into the L1 cache at the same time.
    let spread = !step.is_multiple_of(512);
    let mut done = 0;
    // SAFETY: each call has elements before `count`.
    unsafe {
        while spread && done + COLUMNS <= count {
            vectors::<4>(row, from.add(done * step), step, to.add(done));
            done += COLUMNS;
        }
        while done + 16 <= count {
            vectors::<2>(row, from.add(done * step), step, to.add(done));
            done += 16;
        }
        while done + 8 <= count {
            vectors::<1>(row, from.add(done * step), step, to.add(done));
            done += 8;
        }
        for i in done..count {
            *to.add(i) = one(row, from.add(i * step));
        }
    }
}

/// `8 * VECTORS` elements of the result.
///
/// # Safety
///
/// As for [`gemv`], with that count.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn vectors<const VECTORS: usize>(row: &[f32], from: *const f32, step: usize, to: *mut f32) {
    // SAFETY: the caller's promise; a prefetch may name any address.
    unsafe {
        for start in (0..row.len()).step_by(KC) {
            let end = row.len().min(start + KC);
            let mut sums = [_mm256_setzero_ps(); VECTORS];
            let mut k = start;
            while k + 8 <= end {
                for (v, sum) in sums.iter_mut().enumerate() {
                    let mut x = [_mm256_setzero_ps(); 8];
                    for (i, x) in x.iter_mut().enumerate() {
                        let from = from.add((8 * v + i) * step + k);
                        *x = _mm256_loadu_ps(from);
                        if k % 16 == 0 {
                            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
                        }
                    }
                    for (j, x) in transposed_8x8(x).into_iter().enumerate() {
                        *sum = _mm256_fmadd_ps(x, _mm256_set1_ps(*row.get_unchecked(k + j)), *sum);
                    }
                }
                k += 8;
            }
            while k < end {
                let factor = _mm256_set1_ps(row[k]);
                for (v, sum) in sums.iter_mut().enumerate() {
                    let mut x = [0.0; 8];
                    for (i, x) in x.iter_mut().enumerate() {
                        *x = *from.add((8 * v + i) * step + k);
                    }
                    *sum = _mm256_fmadd_ps(_mm256_loadu_ps(x.as_ptr()), factor, *sum);
                }
                k += 1;
            }
            for (v, sum) in sums.into_iter().enumerate() {
                let to = to.add(8 * v);
                let sum = if start > 0 {
                    _mm256_add_ps(_mm256_loadu_ps(to), sum)
                } else {
                    sum
                };
                _mm256_storeu_ps(to, sum);
            }
        }
    }
}

/// One element of the result.
///
/// # Safety
///
/// `from` must have `row.len()` floats.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn one(row: &[f32], from: *const f32) -> f32 {
    // SAFETY: the caller's promise.
    let other = unsafe { std::slice::from_raw_parts(from, row.len()) };
    let chain = |(row, other): (&[f32], &[f32])| row.iter().zip(other).fold(0.0, |sum: f32, (a, b)| b.mul_add(*a, sum));
    let blocks = row.chunks(KC).zip(other.chunks(KC));
    blocks.map(chain).reduce(|sum, block| sum + block).unwrap_or(0.0)
}
