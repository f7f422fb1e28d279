//! Products of bf16: both factors are rounded, sums are in f32.
//!
//! A sum is one chain over the depth, two products at a time: first the odd step's, then the even one's is added. That is what
//! `vdpbf16ps` computes: a product of two bf16 is exact in f32, so it does not matter that the instruction rounds after each
//! multiplication. So an element is the same to the bit on every processor, for any number of threads and whatever the other
//! rows, where sums are no subnormal numbers.

use std::mem::MaybeUninit;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use bytemuck::Pod;
use rayon::prelude::*;

use super::int8::Sizes;
#[cfg(target_arch = "x86_64")]
use super::int8::by_size;
use super::quantise::{bf16_bits, from_bf16, round_row};
use super::tiles::{PANEL, ROWS, Tile, Tiling, by_tiles, row_stride};
use crate::aligned::Aligned;

/// Steps of depth that lie together.
const GROUP: usize = 2;

/// What a processor computes the sums with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bf16Kernel {
    /// AVX-512 BF16: two products to each sum (`vdpbf16ps`).
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// AVX2 and FMA: weights are widened where they are used.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Whatever the compiler makes of loops.
    Loops,
}

impl Bf16Kernel {
    /// The best one that this processor has.
    pub fn best() -> Self {
        Self::available()[0]
    }

    /// All that this processor has, the best one first.
    pub fn available() -> Vec<Bf16Kernel> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if crate::has_avx512() && is_x86_feature_detected!("avx512bf16") {
                found.push(Bf16Kernel::Avx512Bf16);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                found.push(Bf16Kernel::Avx2);
            }
        }
        found.push(Bf16Kernel::Loops);
        found
    }

    fn sizes(self) -> Sizes {
        let (lanes, vectors, rows) = match self {
            #[cfg(target_arch = "x86_64")]
            Bf16Kernel::Avx512Bf16 => (16, 4, 6),
            #[cfg(target_arch = "x86_64")]
            Bf16Kernel::Avx2 => (8, 2, 4),
            Bf16Kernel::Loops => (8, 2, 4),
        };
        Sizes {
            group: GROUP,
            lanes,
            vectors,
            rows,
        }
    }
}

/// The right-hand side of products, in bf16.
pub struct Bf16Matrix {
    kernel: Bf16Kernel,
    columns: usize,
    depth: usize,
    values: Aligned<u16>,
}

impl Bf16Matrix {
    /// From a weight as PyTorch keeps it, (columns, depth) row-major.
    pub fn new(kernel: Bf16Kernel, weight: &[f32], columns: usize, depth: usize) -> Self {
        assert_eq!(weight.len(), columns * depth, "size of the weight");
        let sizes = kernel.sizes();
        let mut values = Aligned::zeroed(sizes.packed(columns, depth));
        sizes.pack(weight, [columns, depth], &mut values, |_, value| bf16_bits(value));
        Self {
            kernel,
            columns,
            depth,
            values,
        }
    }

    pub fn columns(&self) -> usize {
        self.columns
    }

    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.values)
    }

    /// `out = a b`, with `a` (rows, depth) and `out` row-major; writes the whole of `out`, which has rows * columns elements.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn multiply(&self, a: &[f32], rows: usize, out: &mut [MaybeUninit<f32>]) {
        assert_eq!(a.len(), rows * self.depth, "size of the left-hand side");
        if self.depth == 0 {
            out.fill(MaybeUninit::new(0.0));
            return;
        }
        match self.kernel {
            #[cfg(target_arch = "x86_64")]
            Bf16Kernel::Avx512Bf16 => self.tiles::<u16>(a, rows, out, std::convert::identity, |tile, to| {
                // SAFETY: the kernel was found to be available, and the tile has what it says.
                unsafe { x86::avx512(tile, to) };
            }),
            #[cfg(target_arch = "x86_64")]
            Bf16Kernel::Avx2 => self.tiles::<f32>(a, rows, out, from_bf16, |tile, to| {
                // SAFETY: as above.
                unsafe { x86::avx2(tile, to) };
            }),
            Bf16Kernel::Loops => self.tiles::<f32>(a, rows, out, from_bf16, loops),
        }
    }

    fn tiles<T: Pod + Send + Sync>(
        &self,
        a: &[f32],
        rows: usize,
        out: &mut [MaybeUninit<f32>],
        of: impl Fn(u16) -> T + Sync,
        kernel: impl Fn(Bf16Tile<T>, &mut Tile) + Send + Sync,
    ) {
        let sizes = self.kernel.sizes();
        let stride = row_stride::<T>(self.depth);
        let mut rounded = Aligned::<T>::zeroed(rows * stride);
        let rows_of_task = (8192 / self.depth).max(1);
        a.par_chunks(rows_of_task * self.depth)
            .zip(rounded.par_chunks_mut(rows_of_task * stride))
            .for_each(|(a, to)| {
                for (row, to) in a.chunks_exact(self.depth).zip(to.chunks_exact_mut(stride)) {
                    round_row(row, to, &of);
                }
            });
        let tiling = Tiling {
            rows,
            columns: self.columns,
            row_bytes: stride * size_of::<T>(),
            panel: sizes.panel(),
            tile: sizes.rows,
        };
        let groups = sizes.groups(self.depth);
        by_tiles(tiling, out, |panel, range: Range<usize>, to| {
            let first = panel * sizes.panel();
            let vectors = sizes.vectors_of(panel, self.columns);
            let size = vectors * sizes.lanes * groups * GROUP;
            let rounded: &[T] = &rounded;
            let mut tile = Bf16Tile {
                groups,
                vectors,
                weights: &self.values[first * groups * GROUP..][..size],
                count: range.len(),
                rows: [&[]; ROWS],
            };
            for (i, row) in range.enumerate() {
                tile.rows[i] = &rounded[row * stride..][..groups * GROUP];
            }
            kernel(tile, to);
        });
    }
}

/// The operands of a tile.
struct Bf16Tile<'a, T> {
    /// Groups of depth.
    groups: usize,
    /// Vectors of the panel.
    vectors: usize,
    /// `groups` times the columns of `vectors` times two.
    weights: &'a [u16],
    /// Rows of the tile: the first `count` of these, each of `groups` times two.
    count: usize,
    rows: [&'a [T]; ROWS],
}

/// The kernel without instructions of its own, in vectors of eight columns.
fn loops(tile: Bf16Tile<f32>, to: &mut Tile) {
    let width = 8 * tile.vectors;
    for (row, values) in tile.rows[..tile.count].iter().enumerate() {
        let mut sums = [0f32; PANEL];
        for (weights, pair) in tile.weights.chunks_exact(2 * width).zip(values.chunks_exact(2)) {
            for (sum, weights) in sums.iter_mut().zip(weights.chunks_exact(2)) {
                *sum = pair[1].mul_add(from_bf16(weights[1]), *sum);
                *sum = pair[0].mul_add(from_bf16(weights[0]), *sum);
            }
        }
        to.0[row] = sums;
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;

    /// # Safety
    ///
    /// The processor must have AVX-512 and its BF16, and the tile the numbers that it says, in vectors of sixteen columns.
    pub unsafe fn avx512(tile: Bf16Tile<u16>, to: &mut Tile) {
        // SAFETY: the caller's promise.
        unsafe { by_size!(bf16_avx512, tile, to, [1 2 3 4], [1 2 3 4 5 6]) }
    }

    /// # Safety
    ///
    /// The processor must have AVX2 and FMA, and the tile the numbers that it says, in vectors of eight columns.
    pub unsafe fn avx2(tile: Bf16Tile<f32>, to: &mut Tile) {
        // SAFETY: the caller's promise.
        unsafe { by_size!(bf16_avx2, tile, to, [1 2], [1 2 3 4]) }
    }

    /// No closures here: those would not be compiled for the processor.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn bf16_avx512<const VECTORS: usize, const NR: usize>(tile: Bf16Tile<u16>, to: &mut Tile) {
        // SAFETY: all that is read is within the operands, by the caller's promise, and `to` has room for every tile. A
        // vector of bf16 is 512 bits, as one of whole numbers is.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); VECTORS]; NR];
            let mut rows = [std::ptr::null::<u16>(); NR];
            for (j, row) in rows.iter_mut().enumerate() {
                *row = tile.rows[j].as_ptr();
            }
            let mut weights = tile.weights.as_ptr();
            for group in 0..tile.groups {
                let mut column = [_mm512_setzero_si512(); VECTORS];
                for (v, column) in column.iter_mut().enumerate() {
                    *column = _mm512_loadu_si512(weights.add(32 * v).cast());
                }
                weights = weights.add(32 * VECTORS);
                for (sums, row) in sums.iter_mut().zip(rows) {
                    let two = _mm512_set1_epi32(row.add(2 * group).cast::<i32>().read_unaligned());
                    let two = std::mem::transmute::<__m512i, __m512bh>(two);
                    for (sum, column) in sums.iter_mut().zip(column) {
                        let column = std::mem::transmute::<__m512i, __m512bh>(column);
                        *sum = _mm512_dpbf16_ps(*sum, two, column);
                    }
                }
            }
            for (j, sums) in sums.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate() {
                    _mm512_storeu_ps(to.0[j].as_mut_ptr().add(16 * v), *sum);
                }
            }
        }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn bf16_avx2<const VECTORS: usize, const NR: usize>(tile: Bf16Tile<f32>, to: &mut Tile) {
        // SAFETY: as above.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); VECTORS]; NR];
            let mut rows = [std::ptr::null::<f32>(); NR];
            for (j, row) in rows.iter_mut().enumerate() {
                *row = tile.rows[j].as_ptr();
            }
            let upper = _mm256_set1_epi32(0xffff_0000u32 as i32);
            let mut weights = tile.weights.as_ptr();
            for group in 0..tile.groups {
                let (mut even, mut odd) = ([_mm256_setzero_ps(); VECTORS], [_mm256_setzero_ps(); VECTORS]);
                for v in 0..VECTORS {
                    let pairs = _mm256_loadu_si256(weights.add(16 * v).cast());
                    even[v] = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs));
                    odd[v] = _mm256_castsi256_ps(_mm256_and_si256(pairs, upper));
                }
                weights = weights.add(16 * VECTORS);
                for (sums, row) in sums.iter_mut().zip(rows) {
                    let factor = _mm256_set1_ps(*row.add(2 * group + 1));
                    for (sum, odd) in sums.iter_mut().zip(odd) {
                        *sum = _mm256_fmadd_ps(factor, odd, *sum);
                    }
                    let factor = _mm256_set1_ps(*row.add(2 * group));
                    for (sum, even) in sums.iter_mut().zip(even) {
                        *sum = _mm256_fmadd_ps(factor, even, *sum);
                    }
                }
            }
            for (j, sums) in sums.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate() {
                    _mm256_storeu_ps(to.0[j].as_mut_ptr().add(8 * v), *sum);
                }
            }
        }
    }
}
