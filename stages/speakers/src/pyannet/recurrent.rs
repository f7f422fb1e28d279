//! The product of an LSTM's states with their weight, at each step one of few rows. The weight stays in the L2 cache
//! from step to step, and some of its columns in the L1 cache for all rows; sums stay in registers over the whole
//! depth.

use super::lstm::{GATES, HIDDEN};

/// Units that are computed together, as wide as a vector, and most chunks: with four gates, their sums and what these are
/// made of fill 16 vectors.
const UNITS: usize = 8;
const TILE: usize = 3;

/// A vector of each gate.
type Gates = [[f32; UNITS]; 4];

/// The weight.
pub struct Recurrent(
    /// By units / [`UNITS`], state, gate, and unit.
    Vec<[Gates; HIDDEN]>,
);

impl Recurrent {
    /// From PyTorch's layout, (4 [`HIDDEN`], [`HIDDEN`]).
    pub fn new(weight: &[f32]) -> Self {
        let mut blocks = vec![[[[0.0; UNITS]; 4]; HIDDEN]; HIDDEN / UNITS];
        for (row, weight) in weight.chunks_exact(HIDDEN).enumerate() {
            let (gate, unit) = (row / HIDDEN, row % HIDDEN);
            for (to, &value) in blocks[unit / UNITS].iter_mut().zip(weight) {
                to[gate][unit % UNITS] = value;
            }
        }
        Self(blocks)
    }

    /// Adds the products of the states of some chunks to their gates, (chunks, 4 [`HIDDEN`]). Each sum takes its products,
    /// fused, in order of the states: a chunk's result is equal to the bit whether computed alone or with others, and
    /// on every processor.
    pub fn add(&self, states: &[[f32; HIDDEN]], gates: &mut [f32]) {
        for (block, weight) in self.0.iter().enumerate() {
            let tiles = states.chunks(TILE).zip(gates.chunks_mut(TILE * GATES));
            for (states, gates) in tiles {
                match states {
                    [a, b, c] => add_tile(weight, [a, b, c], gates, block * UNITS),
                    [a, b] => add_tile(weight, [a, b], gates, block * UNITS),
                    [a] => add_tile(weight, [a], gates, block * UNITS),
                    _ => unreachable!("chunks of at most three"),
                }
            }
        }
    }
}

/// Adds to the units from `unit` of each gate of some chunks.
fn add_tile<const ROWS: usize>(
    weight: &[Gates; HIDDEN],
    states: [&[f32; HIDDEN]; ROWS],
    gates: &mut [f32],
    unit: usize,
) {
    let mut sums = [[[0.0; UNITS]; 4]; ROWS];
    for (sums, gates) in sums.iter_mut().zip(gates.chunks_exact(GATES)) {
        for (sums, gate) in sums.iter_mut().zip(gates.chunks_exact(HIDDEN)) {
            sums.copy_from_slice(&gate[unit..unit + UNITS]);
        }
    }
    #[cfg(all(target_arch = "x86_64", target_feature = "avx2", target_feature = "fma"))]
    vectors(weight, states, &mut sums);
    #[cfg(not(all(target_arch = "x86_64", target_feature = "avx2", target_feature = "fma")))]
    scalars(weight, states, &mut sums);
    for (sums, gates) in sums.iter().zip(gates.chunks_exact_mut(GATES)) {
        for (sums, gate) in sums.iter().zip(gates.chunks_exact_mut(HIDDEN)) {
            gate[unit..unit + UNITS].copy_from_slice(sums);
        }
    }
}

/// `sums += states weight`, with AVX intrinsics, since the compiler does not vectorise [`scalars`].
#[cfg(all(target_arch = "x86_64", target_feature = "avx2", target_feature = "fma"))]
#[inline(always)]
fn vectors<const ROWS: usize>(weight: &[Gates; HIDDEN], states: [&[f32; HIDDEN]; ROWS], sums: &mut [Gates; ROWS]) {
    use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps};

    // SAFETY: the program is compiled for processors that have these instructions, and each load and store is of an array
    // of eight floats.
    unsafe {
        let mut vectors = [[_mm256_setzero_ps(); 4]; ROWS];
        for (vectors, sums) in vectors.iter_mut().zip(sums.iter()) {
            for (vector, sums) in vectors.iter_mut().zip(sums) {
                *vector = _mm256_loadu_ps(sums.as_ptr());
            }
        }
        for (at, weight) in weight.iter().enumerate() {
            let mut factors = [_mm256_setzero_ps(); ROWS];
            for (factor, states) in factors.iter_mut().zip(states) {
                *factor = _mm256_set1_ps(states[at]);
            }
            for (gate, weight) in weight.iter().enumerate() {
                let weight = _mm256_loadu_ps(weight.as_ptr());
                for (vectors, factor) in vectors.iter_mut().zip(factors) {
                    vectors[gate] = _mm256_fmadd_ps(weight, factor, vectors[gate]);
                }
            }
        }
        for (vectors, sums) in vectors.iter().zip(sums.iter_mut()) {
            for (vector, sums) in vectors.iter().zip(sums) {
                _mm256_storeu_ps(sums.as_mut_ptr(), *vector);
            }
        }
    }
}

/// `sums += states weight`, the same to the bit for any processor.
#[cfg(any(
    test,
    not(all(target_arch = "x86_64", target_feature = "avx2", target_feature = "fma"))
))]
fn scalars<const ROWS: usize>(weight: &[Gates; HIDDEN], states: [&[f32; HIDDEN]; ROWS], sums: &mut [Gates; ROWS]) {
    for (at, weight) in weight.iter().enumerate() {
        for (sums, states) in sums.iter_mut().zip(states) {
            for (sum, &weight) in sums.as_flattened_mut().iter_mut().zip(weight.as_flattened()) {
                *sum = weight.mul_add(states[at], *sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_those_of_their_formula_for_any_number_of_chunks() {
        let value = |at: usize| (at * 7919 % 2003) as f32 / 1001.5 - 1.0;
        let weight: Vec<f32> = (0..GATES * HIDDEN).map(|at| value(at * 3 + 1)).collect();
        let recurrent = Recurrent::new(&weight);
        for chunks in 1..=7 {
            let state = |chunk: usize| std::array::from_fn(|at| value(chunk * 1_000 + at + 5));
            let states: Vec<[f32; HIDDEN]> = (0..chunks).map(state).collect();
            let before: Vec<f32> = (0..chunks * GATES).map(|at| value(at + 77)).collect();
            let mut gates = before.clone();
            recurrent.add(&states, &mut gates);
            for (at, &found) in gates.iter().enumerate() {
                let (chunk, gate) = (at / GATES, at % GATES);
                let mut expected = before[at];
                for (&state, &weight) in states[chunk].iter().zip(&weight[gate * HIDDEN..]) {
                    expected = weight.mul_add(state, expected);
                }
                assert_eq!(found, expected, "{chunks} {chunk} {gate}");
            }
        }
        // The form for other processors.
        let states = [&std::array::from_fn(value), &std::array::from_fn(|at| value(at + 9))];
        let mut sums = [[[0.5; UNITS]; 4]; 2];
        scalars(&recurrent.0[3], states, &mut sums);
        let mut gates = vec![0.5; 2 * GATES];
        recurrent.add(&[*states[0], *states[1]], &mut gates);
        for (gates, sums) in gates.chunks_exact(GATES).zip(&sums) {
            for (gate, sums) in gates.chunks_exact(HIDDEN).zip(sums) {
                assert_eq!(gate[3 * UNITS..4 * UNITS], sums[..]);
            }
        }
    }
}
