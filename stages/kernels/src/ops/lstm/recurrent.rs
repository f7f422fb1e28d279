//! The product of an LSTM's states with their weight, at each step one of few rows. The weight stays in the L2 cache
//! from step to step, and some of its columns in the L1 cache for all rows; sums stay in registers over the whole
//! depth.

use super::packed::{GATES, HIDDEN};

/// The columns of some units, as many as a vector has floats: by state, gate, and unit. Vectors begin at cache lines: what lies
/// across two is read twice.
#[derive(Clone, Debug)]
#[repr(align(64))]
struct Block<const UNITS: usize>([[[f32; UNITS]; 4]; HIDDEN]);

/// Floats of a vector of AVX-512, and of others.
const WIDE: usize = 16;
const NARROW: usize = 8;

/// The weight of the states.
#[derive(Clone, Debug)]
pub struct Recurrent(Layout);

/// How it is laid out for the processor.
#[derive(Clone, Debug)]
enum Layout {
    #[cfg(target_arch = "x86_64")]
    Wide(Vec<Block<WIDE>>),
    Narrow(Vec<Block<NARROW>>),
}

impl Recurrent {
    /// From PyTorch's layout, (4 [`HIDDEN`], [`HIDDEN`]).
    pub fn new(weight: &[f32]) -> Self {
        assert_eq!(weight.len(), GATES * HIDDEN, "the weight of the states");
        #[cfg(target_arch = "x86_64")]
        if crate::has_avx512() {
            return Self(Layout::Wide(blocks(weight)));
        }
        Self(Layout::Narrow(blocks(weight)))
    }

    /// Adds the products of the states of some chunks to their gates, (chunks, 4 [`HIDDEN`]). Each sum takes its products,
    /// fused, in order of the states: a chunk's result is equal to the bit whether computed alone or with others, and
    /// on every processor. If `backward` is changed from step to step, the columns of the weight that one step reads last, which
    /// the L1 cache still has, are the first that the next one reads.
    pub fn add(&self, states: &[[f32; HIDDEN]], gates: &mut [f32], backward: bool) {
        assert_eq!(gates.len(), states.len() * GATES, "gates of the chunks");
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this form is made on processors with AVX-512 alone.
            Layout::Wide(blocks) => unsafe { x86::wide(blocks, states, gates, backward) },
            Layout::Narrow(blocks) => narrow(blocks, states, gates, backward),
        }
    }
}

/// The columns of the weight in blocks.
fn blocks<const UNITS: usize>(weight: &[f32]) -> Vec<Block<UNITS>> {
    let mut blocks = vec![Block([[[0.0; UNITS]; 4]; HIDDEN]); HIDDEN / UNITS];
    for (row, weight) in weight.chunks_exact(HIDDEN).enumerate() {
        let (gate, unit) = (row / HIDDEN, row % HIDDEN);
        for (to, &value) in blocks[unit / UNITS].0.iter_mut().zip(weight) {
            to[gate][unit % UNITS] = value;
        }
    }
    blocks
}

fn narrow(blocks: &[Block<NARROW>], states: &[[f32; HIDDEN]], gates: &mut [f32], backward: bool) {
    #[cfg(all(target_arch = "x86_64", target_feature = "avx2", target_feature = "fma"))]
    // SAFETY: the program is compiled for processors that have these instructions.
    unsafe {
        x86::narrow(blocks, states, gates, backward);
    }
    #[cfg(not(all(target_arch = "x86_64", target_feature = "avx2", target_feature = "fma")))]
    {
        // Without effect on the sums.
        let _ = backward;
        scalars(blocks, states, gates);
    }
}

/// The same to the bit for any processor.
#[cfg(any(
    test,
    not(all(target_arch = "x86_64", target_feature = "avx2", target_feature = "fma"))
))]
fn scalars<const UNITS: usize>(blocks: &[Block<UNITS>], states: &[[f32; HIDDEN]], gates: &mut [f32]) {
    for (block, weight) in blocks.iter().enumerate() {
        for (states, gates) in states.iter().zip(gates.chunks_exact_mut(GATES)) {
            for (weight, state) in weight.0.iter().zip(states) {
                for (weight, gate) in weight.iter().zip(gates.chunks_exact_mut(HIDDEN)) {
                    for (sum, &weight) in gate[block * UNITS..][..UNITS].iter_mut().zip(weight) {
                        *sum = weight.mul_add(*state, *sum);
                    }
                }
            }
        }
    }
}

/// With intrinsics, since the compiler does not vectorise [`scalars`].
#[cfg(target_arch = "x86_64")]
#[allow(
    clippy::needless_range_loop,
    reason = "loops over registers are unrolled in this form"
)]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Block, GATES, HIDDEN, NARROW, WIDE};

    /// Makes the product for vectors of a width. For a single chunk as many blocks are taken together as fill 32 KiB, most of
    /// the L1 cache; otherwise one by one, for tiles of most chunks whose sums fit into the registers.
    macro_rules! product {
        (
            $product:ident, $tile:ident, $features:literal, $units:ident, $together:literal, [$($rows:literal)+], $most:literal,
            $zero:ident, $load:ident, $store:ident, $set1:ident, $fmadd:ident
        ) => {
            /// Adds the products of the states of chunks to their gates.
            ///
            /// # Safety
            ///
            /// The processor must have the instructions; each chunk has its gates.
            #[target_feature(enable = $features)]
            pub unsafe fn $product(
                blocks: &[Block<$units>],
                states: &[[f32; HIDDEN]],
                gates: &mut [f32],
                backward: bool,
            ) {
                debug_assert_eq!(gates.len(), states.len() * GATES);
                // SAFETY: the caller's promise; units of a block are below `HIDDEN`.
                unsafe {
                    if let [state] = states {
                        let parts = blocks.as_chunks::<$together>().0;
                        for number in 0..parts.len() {
                            let number = if backward { parts.len() - 1 - number } else { number };
                            let gates = gates.as_mut_ptr().add($together * number * $units);
                            let weights = std::array::from_fn(|block| &parts[number][block]);
                            $tile::<1, $together>(weights, [state], gates);
                        }
                        return;
                    }
                    for block in 0..blocks.len() {
                        let block = if backward { blocks.len() - 1 - block } else { block };
                        let weight = &blocks[block];
                        for (states, gates) in states.chunks($most).zip(gates.chunks_mut($most * GATES)) {
                            let gates = gates.as_mut_ptr().add(block * $units);
                            match states.len() {
                                $($rows => $tile::<$rows, 1>([weight], std::array::from_fn(|row| &states[row]), gates),)+
                                _ => unreachable!("a tile has at most so many chunks"),
                            }
                        }
                    }
                }
            }

            /// Adds to the units of some blocks of each gate of some chunks, the first of which is at `gates`.
            ///
            /// # Safety
            ///
            /// The processor must have the instructions; each of the chunks has [`GATES`] floats from where the first
            /// one's gates begin, with the units of the blocks within [`HIDDEN`].
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn $tile<const ROWS: usize, const BLOCKS: usize>(
                weights: [&Block<$units>; BLOCKS],
                states: [&[f32; HIDDEN]; ROWS],
                gates: *mut f32,
            ) {
                // SAFETY: the caller's promise; weights are arrays of the size of a vector.
                unsafe {
                    let mut sums = [[[$zero(); 4]; BLOCKS]; ROWS];
                    for row in 0..ROWS {
                        for block in 0..BLOCKS {
                            for gate in 0..4 {
                                let from = gates.add(row * GATES + gate * HIDDEN + block * $units);
                                sums[row][block][gate] = $load(from);
                            }
                        }
                    }
                    for at in 0..HIDDEN {
                        let mut factors = [$zero(); ROWS];
                        for row in 0..ROWS {
                            factors[row] = $set1(states[row][at]);
                        }
                        for block in 0..BLOCKS {
                            for gate in 0..4 {
                                let weight = $load(weights[block].0[at][gate].as_ptr());
                                for row in 0..ROWS {
                                    sums[row][block][gate] = $fmadd(weight, factors[row], sums[row][block][gate]);
                                }
                            }
                        }
                    }
                    for row in 0..ROWS {
                        for block in 0..BLOCKS {
                            for gate in 0..4 {
                                let to = gates.add(row * GATES + gate * HIDDEN + block * $units);
                                $store(to, sums[row][block][gate]);
                            }
                        }
                    }
                }
            }
        };
    }

    product!(
        wide, wide_tile, "avx512f", WIDE, 1, [1 2 3 4 5 6], 6,
        _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps
    );
    product!(
        narrow, narrow_tile, "avx2,fma", NARROW, 2, [1 2 3], 3,
        _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_those_of_their_formula_for_any_number_of_chunks_and_processor() {
        let value = |at: usize| (at * 7919 % 2003) as f32 / 1001.5 - 1.0;
        let weight: Vec<f32> = (0..GATES * HIDDEN).map(|at| value(at * 3 + 1)).collect();
        let recurrent = Recurrent::new(&weight);
        let other = blocks::<NARROW>(&weight);
        for chunks in 1..=14 {
            let state = |chunk: usize| std::array::from_fn(|at| value(chunk * 1_000 + at + 5));
            let states: Vec<[f32; HIDDEN]> = (0..chunks).map(state).collect();
            let before: Vec<f32> = (0..chunks * GATES).map(|at| value(at + 77)).collect();
            let mut gates = before.clone();
            recurrent.add(&states, &mut gates, false);
            for (at, &found) in gates.iter().enumerate() {
                let (chunk, gate) = (at / GATES, at % GATES);
                let mut expected = before[at];
                for (&state, &weight) in states[chunk].iter().zip(&weight[gate * HIDDEN..]) {
                    expected = weight.mul_add(state, expected);
                }
                assert_eq!(found, expected, "{chunks} {chunk} {gate}");
            }
            let mut backward = before.clone();
            recurrent.add(&states, &mut backward, true);
            assert_eq!(gates, backward, "{chunks}");
            // The forms for other processors.
            for backward in [false, true] {
                let mut of_narrow = before.clone();
                narrow(&other, &states, &mut of_narrow, backward);
                assert_eq!(gates, of_narrow, "{chunks} {backward}");
            }
            let mut of_scalars = before;
            scalars(&other, &states, &mut of_scalars);
            assert_eq!(gates, of_scalars, "{chunks}");
        }
    }
}
