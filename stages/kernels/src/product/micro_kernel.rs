//! The micro-kernel, which computes one tile of a matrix product: up to three vectors by eight (AVX-512) or two by six (AVX2) sums, kept in registers.
//!
//! The *MR side* of a product is the one whose elements fill vectors; it is packed. Of the *NR side* one element
//! at a time is broadcast to a vector, straight from its matrix if that lies with the depth contiguous. The names are those of
//! BLIS, but that either factor may be the MR side.
//!
//! Each sum is one chain of fused multiplications and additions over the depth of a block, and the blocks are added in
//! order. So an element is the same to the bit whatever the size of the product, the side it was on, the number of
//! threads and the width of the vectors.

use std::arch::x86_64::*;

/// Depth of a block: sums are added to the result after this many products.
pub const KC: usize = 512;

/// Most elements of the NR side in a tile, for any processor.
pub const NR_MAX: usize = 8;

/// Tiles side by side along the NR side, which are written together.
pub const STRIP: usize = 4;

/// Most elements of the MR side in a tile, for any processor.
pub const MR_MAX: usize = 48;

/// Sums of a strip: row `j` holds those of its element `j` of the NR side.
#[repr(align(64))]
pub struct Sums(
    #[expect(dead_code, reason = "read and written through pointers to floats")] [[f32; MR_MAX]; STRIP * NR_MAX],
);

/// A vector of floats. The methods are inlined into functions that are compiled for it.
trait Vector: Copy {
    const LANES: usize;
    unsafe fn zero() -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn broadcast(from: *const f32) -> Self;
    unsafe fn multiply_add(self, factor: Self, sum: Self) -> Self;
    unsafe fn plus(self, other: Self) -> Self;
    unsafe fn store(self, to: *mut f32);
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each method is one instruction, and asks of its caller what that one asks"
)]
impl Vector for __m512 {
    const LANES: usize = 16;
    #[inline(always)]
    unsafe fn zero() -> Self {
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn broadcast(from: *const f32) -> Self {
        unsafe { _mm512_set1_ps(*from) }
    }
    #[inline(always)]
    unsafe fn multiply_add(self, factor: Self, sum: Self) -> Self {
        unsafe { _mm512_fmadd_ps(self, factor, sum) }
    }
    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        unsafe { _mm512_add_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, self) }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each method is one instruction, and asks of its caller what that one asks"
)]
impl Vector for __m256 {
    const LANES: usize = 8;
    #[inline(always)]
    unsafe fn zero() -> Self {
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn broadcast(from: *const f32) -> Self {
        unsafe { _mm256_set1_ps(*from) }
    }
    #[inline(always)]
    unsafe fn multiply_add(self, factor: Self, sum: Self) -> Self {
        unsafe { _mm256_fmadd_ps(self, factor, sum) }
    }
    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        unsafe { _mm256_add_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm256_storeu_ps(to, self) }
    }
}

/// Which instructions the processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processor {
    Avx512,
    Avx2,
}

impl Processor {
    /// The best that this processor has; none if it has neither.
    pub fn detect() -> Option<Processor> {
        if crate::has_avx512() {
            Some(Processor::Avx512)
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            Some(Processor::Avx2)
        } else {
            None
        }
    }

    /// Floats in a vector.
    pub fn lanes(self) -> usize {
        match self {
            Processor::Avx512 => 16,
            Processor::Avx2 => 8,
        }
    }

    /// Most vectors of the MR side in a tile.
    pub fn mr_vectors(self) -> usize {
        match self {
            Processor::Avx512 => 3,
            Processor::Avx2 => 2,
        }
    }

    /// Elements of the NR side in a tile.
    pub fn nr(self) -> usize {
        match self {
            Processor::Avx512 => 8,
            Processor::Avx2 => 6,
        }
    }
}

/// Calls the function that is made for this number of vectors.
macro_rules! by_vectors {
    ($function:ident, $nr_side:literal, $step:literal, $kernel:expr, $($vectors:literal)+) => {
        match $kernel.vectors {
            $($vectors => $function::<$vectors, $nr_side, $step>($kernel),)+
            _ => unreachable!("a tile has one to so many vectors"),
        }
    };
}

/// Calls the function that is made for this number of elements and of vectors; the NR side is not packed.
macro_rules! by_count {
    ($function:ident, $kernel:expr, $($nr_side:literal)+; $vectors:tt) => {
        match $kernel.count {
            $($nr_side => by_count!(@ $function, $nr_side, $kernel, $vectors),)+
            _ => unreachable!("a tile has one to so many elements"),
        }
    };
    (@ $function:ident, $nr_side:literal, $kernel:expr, [$($vectors:literal)+]) => {
        by_vectors!($function, $nr_side, 1, $kernel, $($vectors)+)
    };
}

/// Steps of depth that lie contiguously in each element of the NR side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Floats from the start of the element.
    pub offset: usize,
    pub depth: usize,
}

/// The operands of a tile.
pub struct MicroKernel<'a> {
    /// Where the steps of depth are in the elements of the NR side; one piece that begins at zero if that is packed.
    pub pieces: &'a [Piece],
    /// Vectors of the MR side.
    pub vectors: usize,
    /// The MR side, packed: a row of `vectors` vectors for each step of depth.
    pub mr_side: *const f32,
    /// Elements of the NR side.
    pub count: usize,
    /// Where each element of the NR side begins; those past `count` are not read.
    pub nr_side: [*const f32; NR_MAX],
    /// Whether the NR side is packed: one depth step is then `Processor::nr()` elements, otherwise one.
    pub packed: bool,
    /// Elements of the NR side to fetch into the cache meanwhile: this many floats behind those of this tile.
    pub ahead: Option<usize>,
    /// Where the sums go: one row per element of the NR side, all `vectors` of it, so many floats apart.
    pub sums: *mut f32,
    pub sums_step: usize,
    /// Whether they are added to what is there.
    pub add: bool,
}

impl MicroKernel<'_> {
    /// Computes the sums.
    ///
    /// # Safety
    ///
    /// The processor must be at least this one. `mr_side` must have `vectors * lanes` floats for each step of depth of all
    /// pieces; each of the first `count` pointers the floats of all pieces, or `(depth - 1) * nr() + 1` if packed; `sums` `count`
    /// rows, or `nr()` if packed. `vectors` must be 1 to `mr_vectors()`, and `count` 1 to `nr()`, or `nr()` if packed.
    pub unsafe fn run(self, processor: Processor) {
        // SAFETY: the caller's promise.
        unsafe {
            match (processor, self.packed) {
                (Processor::Avx512, true) => by_vectors!(avx512, 8, 8, self, 1 2 3),
                (Processor::Avx512, false) => by_count!(avx512, self, 1 2 3 4 5 6 7 8; [1 2 3]),
                (Processor::Avx2, true) => by_vectors!(avx2, 6, 6, self, 1 2),
                (Processor::Avx2, false) => by_count!(avx2, self, 1 2 3 4 5 6; [1 2]),
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512<const VECTORS: usize, const NR: usize, const STEP: usize>(kernel: MicroKernel) {
    // SAFETY: the caller's promise.
    unsafe { sums::<__m512, VECTORS, NR, STEP>(kernel) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const VECTORS: usize, const NR: usize, const STEP: usize>(kernel: MicroKernel) {
    // SAFETY: the caller's promise.
    unsafe { sums::<__m256, VECTORS, NR, STEP>(kernel) }
}

/// One step of depth. No closures here: those would not be compiled for the processor.
#[inline(always)]
unsafe fn step<V: Vector, const VECTORS: usize, const NR: usize>(
    nr_side: &[*const f32; NR],
    at: usize,
    mr_side: *const f32,
    sums: &mut [[V; VECTORS]; NR],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut row = [V::zero(); VECTORS];
        for (v, row) in row.iter_mut().enumerate() {
            *row = V::load(mr_side.add(v * V::LANES));
        }
        for (sums, nr_side) in sums.iter_mut().zip(nr_side) {
            let factor = V::broadcast(nr_side.add(at));
            for (sum, row) in sums.iter_mut().zip(row) {
                *sum = row.multiply_add(factor, *sum);
            }
        }
    }
}

#[inline(always)]
unsafe fn sums<V: Vector, const VECTORS: usize, const NR: usize, const STEP: usize>(kernel: MicroKernel) {
    // SAFETY: all that is read is within the pieces of the pointers, by the caller's promise; a prefetch may name any
    // address.
    unsafe {
        let mut sums = [[V::zero(); VECTORS]; NR];
        let mut mr_side = kernel.mr_side;
        for piece in kernel.pieces {
            let mut nr_side = [std::ptr::null(); NR];
            for (to, from) in nr_side.iter_mut().zip(kernel.nr_side) {
                *to = from.wrapping_add(piece.offset);
            }
            let mut k = 0;
            while k + 4 <= piece.depth {
                if let Some(ahead) = kernel.ahead
                    && k % 16 == 0
                {
                    for pointer in nr_side {
                        _mm_prefetch::<_MM_HINT_T1>(pointer.wrapping_add(k * STEP + ahead).cast());
                    }
                }
                step(&nr_side, k * STEP, mr_side, &mut sums);
                step(&nr_side, (k + 1) * STEP, mr_side.add(VECTORS * V::LANES), &mut sums);
                step(&nr_side, (k + 2) * STEP, mr_side.add(2 * VECTORS * V::LANES), &mut sums);
                step(&nr_side, (k + 3) * STEP, mr_side.add(3 * VECTORS * V::LANES), &mut sums);
                mr_side = mr_side.add(4 * VECTORS * V::LANES);
                k += 4;
            }
            while k < piece.depth {
                step(&nr_side, k * STEP, mr_side, &mut sums);
                mr_side = mr_side.add(VECTORS * V::LANES);
                k += 1;
            }
        }
        for (j, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                let to = kernel.sums.add(j * kernel.sums_step + v * V::LANES);
                let sum = if kernel.add { V::load(to).plus(*sum) } else { *sum };
                sum.store(to);
            }
        }
    }
}

/// Eight rows of eight floats, transposed.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn transposed_8x8(x: [__m256; 8]) -> [__m256; 8] {
    // Pairs of rows, then groups of four rows, within halves of vectors; then halves.
    let pairs = [
        _mm256_unpacklo_ps(x[0], x[1]),
        _mm256_unpackhi_ps(x[0], x[1]),
        _mm256_unpacklo_ps(x[2], x[3]),
        _mm256_unpackhi_ps(x[2], x[3]),
        _mm256_unpacklo_ps(x[4], x[5]),
        _mm256_unpackhi_ps(x[4], x[5]),
        _mm256_unpacklo_ps(x[6], x[7]),
        _mm256_unpackhi_ps(x[6], x[7]),
    ];
    let fours = [
        _mm256_shuffle_ps::<0x44>(pairs[0], pairs[2]),
        _mm256_shuffle_ps::<0xEE>(pairs[0], pairs[2]),
        _mm256_shuffle_ps::<0x44>(pairs[1], pairs[3]),
        _mm256_shuffle_ps::<0xEE>(pairs[1], pairs[3]),
        _mm256_shuffle_ps::<0x44>(pairs[4], pairs[6]),
        _mm256_shuffle_ps::<0xEE>(pairs[4], pairs[6]),
        _mm256_shuffle_ps::<0x44>(pairs[5], pairs[7]),
        _mm256_shuffle_ps::<0xEE>(pairs[5], pairs[7]),
    ];
    [
        _mm256_permute2f128_ps::<0x20>(fours[0], fours[4]),
        _mm256_permute2f128_ps::<0x20>(fours[1], fours[5]),
        _mm256_permute2f128_ps::<0x20>(fours[2], fours[6]),
        _mm256_permute2f128_ps::<0x20>(fours[3], fours[7]),
        _mm256_permute2f128_ps::<0x31>(fours[0], fours[4]),
        _mm256_permute2f128_ps::<0x31>(fours[1], fours[5]),
        _mm256_permute2f128_ps::<0x31>(fours[2], fours[6]),
        _mm256_permute2f128_ps::<0x31>(fours[3], fours[7]),
    ]
}

/// Transposes eight rows of eight floats: element (i, j) at `from + i * from_row + j` goes to `to + j * to_row + i`,
/// added to what is there if `add`.
///
/// # Safety
///
/// The processor must have AVX2, and all 64 elements must be there on both sides.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub unsafe fn transpose_8x8(from: *const f32, from_row: usize, to: *mut f32, to_row: usize, add: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut x = [_mm256_setzero_ps(); 8];
        for (i, x) in x.iter_mut().enumerate() {
            *x = _mm256_loadu_ps(from.add(i * from_row));
        }
        for (row, values) in transposed_8x8(x).into_iter().enumerate() {
            let to = to.add(row * to_row);
            let values = if add {
                _mm256_add_ps(_mm256_loadu_ps(to), values)
            } else {
                values
            };
            _mm256_storeu_ps(to, values);
        }
    }
}
