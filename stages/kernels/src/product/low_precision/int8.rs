//! Products of int8: weights with a scale for each column, rows with a scale and a code of zero each, sums in whole numbers of 32
//! bits.
//!
//! Sums are exact, and what follows is the same two multiplications of floats everywhere: an element is the same to the bit on
//! every processor, for any number of threads and whatever the other rows.

use std::mem::MaybeUninit;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use bytemuck::Pod;
use rayon::prelude::*;

use super::quantise::{Codes, quantise_row};
use super::tiles::{PANEL, ROWS, Tile, Tiling, by_tiles, row_stride};
use crate::aligned::Aligned;

/// The largest depth whose sums fit into 32 bits: each product is 255 * 127 at the most.
pub const MOST_DEPTH: usize = (i32::MAX / (255 * 127)) as usize;

/// What a processor computes the sums with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int8Kernel {
    /// AVX-512 VNNI: four products of a byte without and one with a sign to each sum (`vpdpbusd`).
    #[cfg(target_arch = "x86_64")]
    Vnni,
    /// AVX2: two products of 16 bits to each sum (`vpmaddwd`). Those of bytes (`vpmaddubsw`) saturate.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Whatever the compiler makes of loops.
    Loops,
}

impl Int8Kernel {
    /// The best one that this processor has.
    pub fn best() -> Self {
        Self::available()[0]
    }

    /// All that this processor has, the best one first.
    pub fn available() -> Vec<Int8Kernel> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if crate::has_avx512() && is_x86_feature_detected!("avx512vnni") {
                found.push(Int8Kernel::Vnni);
            }
            if is_x86_feature_detected!("avx2") {
                found.push(Int8Kernel::Avx2);
            }
        }
        found.push(Int8Kernel::Loops);
        found
    }

    /// Steps of depth that lie together, columns of a vector, vectors of a panel, and rows of a tile.
    fn sizes(self) -> Sizes {
        let (group, lanes, vectors, rows) = match self {
            #[cfg(target_arch = "x86_64")]
            Int8Kernel::Vnni => (4, 16, 4, 6),
            #[cfg(target_arch = "x86_64")]
            Int8Kernel::Avx2 => (2, 8, 2, 4),
            Int8Kernel::Loops => (2, 8, 2, 4),
        };
        Sizes {
            group,
            lanes,
            vectors,
            rows,
        }
    }
}

/// Sizes of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Steps of depth that lie together.
    pub group: usize,
    /// Columns of a vector.
    pub lanes: usize,
    /// Most vectors of a panel.
    pub vectors: usize,
    /// Most rows of a tile.
    pub rows: usize,
}

impl Sizes {
    pub fn panel(self) -> usize {
        self.lanes * self.vectors
    }

    /// Vectors of a panel: the last one may have fewer.
    pub fn vectors_of(self, panel: usize, columns: usize) -> usize {
        (columns - panel * self.panel()).div_ceil(self.lanes).min(self.vectors)
    }

    /// Groups of depth.
    pub fn groups(self, depth: usize) -> usize {
        depth.div_ceil(self.group)
    }

    /// Numbers of all panels; those without an element are zero.
    pub fn packed(self, columns: usize, depth: usize) -> usize {
        columns.next_multiple_of(self.lanes) * self.groups(depth) * self.group
    }

    /// Packs a weight (columns, depth), row-major: panels behind one another, in each of them groups of depth, in each of them columns,
    /// and of each column the steps of the group. `code` makes of a column and a value of it what is packed.
    pub fn pack<T: Send>(
        self,
        weight: &[f32],
        [columns, depth]: [usize; 2],
        to: &mut [T],
        code: impl Fn(usize, f32) -> T + Sync,
    ) {
        if depth == 0 {
            return;
        }
        let size = self.panel() * self.groups(depth) * self.group;
        let panels = weight.par_chunks(self.panel() * depth).zip(to.par_chunks_mut(size));
        panels.enumerate().for_each(|(panel, (weight, to))| {
            let width = self.vectors_of(panel, columns) * self.lanes;
            for (column, row) in weight.chunks_exact(depth).enumerate() {
                for (group, steps) in row.chunks(self.group).enumerate() {
                    let to = &mut to[(group * width + column) * self.group..];
                    for (to, value) in to.iter_mut().zip(steps) {
                        *to = code(panel * self.panel() + column, *value);
                    }
                }
            }
        });
    }
}

/// The right-hand side of products, in int8.
pub struct Int8Matrix {
    kernel: Int8Kernel,
    columns: usize,
    depth: usize,
    values: Aligned<i8>,
    /// The scale of each column, and zeros up to whole vectors.
    scales: Vec<f32>,
    /// The sum of the codes of each column: sums with codes of rows that are not less the code of zero are that many times too
    /// large.
    code_sums: Vec<i32>,
}

/// The rows of the left-hand side as a kernel reads them, and the codes of each.
struct Rows<T> {
    values: Aligned<T>,
    stride: usize,
    codes: Vec<Codes>,
}

impl Int8Matrix {
    /// From a weight as PyTorch keeps it, (columns, depth) row-major. `depth` must be no more than [`MOST_DEPTH`].
    pub fn new(kernel: Int8Kernel, weight: &[f32], columns: usize, depth: usize) -> Self {
        assert_eq!(weight.len(), columns * depth, "size of the weight");
        assert!(depth <= MOST_DEPTH, "a sum may not fit into 32 bits");
        let sizes = kernel.sizes();
        let mut values = Aligned::zeroed(sizes.packed(columns, depth));
        let codes: Vec<Codes> = weight.par_chunks_exact(depth.max(1)).map(Codes::of_weights).collect();
        sizes.pack(weight, [columns, depth], &mut values, |column, value| {
            codes[column].weight(value)
        });
        let sums = weight.par_chunks_exact(depth.max(1)).zip(&codes);
        let mut code_sums: Vec<i32> = sums
            .map(|(row, codes)| row.iter().map(|value| i32::from(codes.weight(*value))).sum())
            .collect();
        let mut scales: Vec<f32> = codes.iter().map(|codes| codes.scale).collect();
        let padded = columns.next_multiple_of(sizes.lanes);
        code_sums.resize(padded, 0);
        scales.resize(padded, 0.0);
        Self {
            kernel,
            columns,
            depth,
            values,
            scales,
            code_sums,
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
        size_of_val(&*self.values) + 4 * (self.scales.len() + self.code_sums.len())
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
            Int8Kernel::Vnni => {
                // Padding is multiplied with zeros alone.
                let a = self.quantised(a, rows, |code, _| code);
                self.tiles(&a, rows, out, |tile, to| {
                    // SAFETY: the kernel was found to be available, and the tile has what it says.
                    unsafe { x86::vnni(tile, to) };
                });
            }
            #[cfg(target_arch = "x86_64")]
            Int8Kernel::Avx2 => {
                let a = self.quantised(a, rows, less_zero);
                self.tiles(&a, rows, out, |tile, to| {
                    // SAFETY: as above.
                    unsafe { x86::avx2(tile, to) };
                });
            }
            Int8Kernel::Loops => {
                let a = self.quantised(a, rows, less_zero);
                self.tiles(&a, rows, out, loops);
            }
        }
    }

    fn quantised<T: Pod + Send>(&self, a: &[f32], rows: usize, of: impl Fn(u8, i32) -> T + Sync) -> Rows<T> {
        let stride = row_stride::<T>(self.depth);
        let mut values = Aligned::zeroed(rows * stride);
        let mut codes = vec![Codes::of_row(&[]); rows];
        let rows_of_task = (8192 / self.depth).max(1);
        a.par_chunks(rows_of_task * self.depth)
            .zip(values.par_chunks_mut(rows_of_task * stride))
            .zip(codes.par_chunks_mut(rows_of_task))
            .for_each(|((a, to), codes)| {
                let rows = a.chunks_exact(self.depth).zip(to.chunks_exact_mut(stride));
                for ((row, to), codes) in rows.zip(codes) {
                    *codes = quantise_row(row, to, &of);
                }
            });
        Rows { values, stride, codes }
    }

    fn tiles<T: Pod + Sync>(
        &self,
        a: &Rows<T>,
        rows: usize,
        out: &mut [MaybeUninit<f32>],
        kernel: impl Fn(Int8Tile<T>, &mut Tile) + Send + Sync,
    ) {
        let sizes = self.kernel.sizes();
        let tiling = Tiling {
            rows,
            columns: self.columns,
            row_bytes: a.stride * size_of::<T>(),
            panel: sizes.panel(),
            tile: sizes.rows,
        };
        let groups = sizes.groups(self.depth);
        by_tiles(tiling, out, |panel, range: Range<usize>, to| {
            let first = panel * sizes.panel();
            let vectors = sizes.vectors_of(panel, self.columns);
            let width = vectors * sizes.lanes;
            let values: &[T] = &a.values;
            let mut tile = Int8Tile {
                groups,
                vectors,
                weights: &self.values[first * groups * sizes.group..][..width * groups * sizes.group],
                code_sums: &self.code_sums[first..][..width],
                scales: &self.scales[first..][..width],
                count: range.len(),
                rows: [&[]; ROWS],
                row_scales: [0.0; ROWS],
                zeros: [0; ROWS],
            };
            for (i, row) in range.enumerate() {
                tile.rows[i] = &values[row * a.stride..][..groups * sizes.group];
                tile.row_scales[i] = a.codes[row].scale;
                tile.zeros[i] = a.codes[row].zero;
            }
            kernel(tile, to);
        });
    }
}

/// The operands of a tile.
struct Int8Tile<'a, T> {
    /// Groups of depth.
    groups: usize,
    /// Vectors of the panel.
    vectors: usize,
    /// `groups` times the columns of `vectors` times the steps of a group.
    weights: &'a [i8],
    /// Of each column of `vectors`.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for one kernel alone"))]
    code_sums: &'a [i32],
    scales: &'a [f32],
    /// Rows of the tile: the first `count` of these, each of `groups` times the steps of a group.
    count: usize,
    rows: [&'a [T]; ROWS],
    row_scales: [f32; ROWS],
    /// Codes of zero.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for one kernel alone"))]
    zeros: [i32; ROWS],
}

/// A code of a row as kernels of 16 bits read it.
fn less_zero(code: u8, zero: i32) -> i16 {
    i16::from(code) - zero as i16
}

/// The kernel without instructions of its own, in groups of two steps and vectors of eight columns.
fn loops(tile: Int8Tile<i16>, to: &mut Tile) {
    let width = 8 * tile.vectors;
    for (row, (values, scale)) in tile.rows[..tile.count].iter().zip(tile.row_scales).enumerate() {
        let mut sums = [0i32; PANEL];
        for (weights, pair) in tile.weights.chunks_exact(2 * width).zip(values.chunks_exact(2)) {
            let (even, odd) = (i32::from(pair[0]), i32::from(pair[1]));
            for (sum, weights) in sums.iter_mut().zip(weights.chunks_exact(2)) {
                *sum += even * i32::from(weights[0]) + odd * i32::from(weights[1]);
            }
        }
        for ((to, sum), column) in to.0[row].iter_mut().zip(sums).zip(tile.scales) {
            *to = sum as f32 * column * scale;
        }
    }
}

/// Calls the function that is made for this number of vectors and rows.
#[cfg(target_arch = "x86_64")]
macro_rules! by_size {
    ($function:ident, $tile:expr, $to:expr, [$($vectors:literal)+], $rows:tt) => {
        match $tile.vectors {
            $($vectors => by_size!(@ $function, $tile, $to, $vectors, $rows),)+
            _ => unreachable!("a panel has one to so many vectors"),
        }
    };
    (@ $function:ident, $tile:expr, $to:expr, $vectors:literal, [$($rows:literal)+]) => {
        match $tile.count {
            $($rows => $function::<$vectors, $rows>($tile, $to),)+
            _ => unreachable!("a tile has one to that many rows"),
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use by_size;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;

    /// # Safety
    ///
    /// The processor must have AVX-512 and VNNI, and the tile the numbers that it says, in groups of four steps and vectors
    /// of sixteen columns.
    pub unsafe fn vnni(tile: Int8Tile<u8>, to: &mut Tile) {
        // SAFETY: the caller's promise.
        unsafe { by_size!(int8_avx512, tile, to, [1 2 3 4], [1 2 3 4 5 6]) }
    }

    /// # Safety
    ///
    /// The processor must have AVX2, and the tile the numbers that it says, in groups of two steps and vectors of eight
    /// columns.
    pub unsafe fn avx2(tile: Int8Tile<i16>, to: &mut Tile) {
        // SAFETY: the caller's promise.
        unsafe { by_size!(int8_avx2, tile, to, [1 2], [1 2 3 4]) }
    }

    /// No closures here: those would not be compiled for the processor.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn int8_avx512<const VECTORS: usize, const NR: usize>(tile: Int8Tile<u8>, to: &mut Tile) {
        // SAFETY: all that is read is within the operands, by the caller's promise, and `to` has room for every tile.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); VECTORS]; NR];
            let mut rows = [std::ptr::null::<u8>(); NR];
            for (j, row) in rows.iter_mut().enumerate() {
                *row = tile.rows[j].as_ptr();
                let zero = _mm512_set1_epi32(-tile.zeros[j]);
                for (v, sum) in sums[j].iter_mut().enumerate() {
                    let codes = _mm512_loadu_si512(tile.code_sums.as_ptr().add(16 * v).cast());
                    *sum = _mm512_mullo_epi32(zero, codes);
                }
            }
            let mut weights = tile.weights.as_ptr();
            for group in 0..tile.groups {
                let mut column = [_mm512_setzero_si512(); VECTORS];
                for (v, column) in column.iter_mut().enumerate() {
                    *column = _mm512_loadu_si512(weights.add(64 * v).cast());
                }
                weights = weights.add(64 * VECTORS);
                for (sums, row) in sums.iter_mut().zip(rows) {
                    let four = _mm512_set1_epi32(row.add(4 * group).cast::<i32>().read_unaligned());
                    for (sum, column) in sums.iter_mut().zip(column) {
                        *sum = _mm512_dpbusd_epi32(*sum, four, column);
                    }
                }
            }
            for (j, sums) in sums.iter().enumerate() {
                let scale = _mm512_set1_ps(tile.row_scales[j]);
                for (v, sum) in sums.iter().enumerate() {
                    let column = _mm512_loadu_ps(tile.scales.as_ptr().add(16 * v));
                    let value = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(*sum), column), scale);
                    _mm512_storeu_ps(to.0[j].as_mut_ptr().add(16 * v), value);
                }
            }
        }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn int8_avx2<const VECTORS: usize, const NR: usize>(tile: Int8Tile<i16>, to: &mut Tile) {
        // SAFETY: as above.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); VECTORS]; NR];
            let mut rows = [std::ptr::null::<i16>(); NR];
            for (j, row) in rows.iter_mut().enumerate() {
                *row = tile.rows[j].as_ptr();
            }
            let mut weights = tile.weights.as_ptr();
            for group in 0..tile.groups {
                let mut column = [_mm256_setzero_si256(); VECTORS];
                for (v, column) in column.iter_mut().enumerate() {
                    *column = _mm256_cvtepi8_epi16(_mm_loadu_si128(weights.add(16 * v).cast()));
                }
                weights = weights.add(16 * VECTORS);
                for (sums, row) in sums.iter_mut().zip(rows) {
                    let two = _mm256_set1_epi32(row.add(2 * group).cast::<i32>().read_unaligned());
                    for (sum, column) in sums.iter_mut().zip(column) {
                        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(two, column));
                    }
                }
            }
            for (j, sums) in sums.iter().enumerate() {
                let scale = _mm256_set1_ps(tile.row_scales[j]);
                for (v, sum) in sums.iter().enumerate() {
                    let column = _mm256_loadu_ps(tile.scales.as_ptr().add(8 * v));
                    let value = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(*sum), column), scale);
                    _mm256_storeu_ps(to.0[j].as_mut_ptr().add(8 * v), value);
                }
            }
        }
    }
}
