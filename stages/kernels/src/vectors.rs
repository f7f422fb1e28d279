//! Loops that the compiler vectorises.

use super::Float;

/// Independent partial sums of a reduction: enough for a vector of any processor.
pub(crate) const LANES: usize = 16;

/// `f` of each lane. Replaces `array::from_fn` and `array::map`, which the compiler may not inline: functions that are
/// called from [`multiversion!`](crate::multiversion) are not compiled for its instruction set.
#[inline(always)]
pub(crate) fn lanes<T: Float, const N: usize>(mut f: impl FnMut(usize) -> T) -> [T; N] {
    let mut values = [T::zero(); N];
    for (lane, value) in values.iter_mut().enumerate() {
        *value = f(lane);
    }
    values
}

/// Sum of `f` over the elements of slices of one length, in interleaved sums so that it can be vectorised.
#[inline(always)]
pub(crate) fn sum_of<T: Float, const N: usize>(slices: [&[T]; N], f: impl Fn([T; N]) -> T) -> T {
    let (mut blocks, mut rests): ([&[[T; 2 * LANES]]; N], _) = ([&[]; N], slices);
    for ((blocks, rest), slice) in blocks.iter_mut().zip(&mut rests).zip(slices) {
        (*blocks, *rest) = slice.as_chunks();
    }
    // Arrays by value: the compiler keeps those in registers.
    let (mut even, mut odd) = ([T::zero(); LANES], [T::zero(); LANES]);
    let zeros = [T::zero(); 2 * LANES];
    let mut block = [&zeros; N];
    for at in 0..blocks[0].len() {
        for (block, blocks) in block.iter_mut().zip(blocks) {
            *block = &blocks[at];
        }
        even = lanes(|lane| even[lane] + f(lanes(|slice| block[slice][lane])));
        odd = lanes(|lane| odd[lane] + f(lanes(|slice| block[slice][LANES + lane])));
    }
    let mut sums: [T; LANES] = lanes(|lane| even[lane] + odd[lane]);
    for at in 0..rests[0].len() {
        sums[at % LANES] += f(lanes(|slice| rests[slice][at]));
    }
    sum_lanes(sums)
}

/// Sum of all lanes, in a fixed order.
#[inline(always)]
pub(crate) fn sum_lanes<T: Float>(sums: [T; LANES]) -> T {
    let eight: [T; 8] = lanes(|lane| sums[lane] + sums[lane + 8]);
    let four: [T; 4] = lanes(|lane| eight[lane] + eight[lane + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Runs a block with the multiversion vectors that the processor has. What it computes is the same to the bit: the order of
/// sums is written out in the code, and no multiplication is contracted with an addition unless the code says so.
///
/// The block is in the program twice, each copy compiled for its instruction set. `.ci/vector_code` checks the machine
/// code, which it finds by the name of the surrounding function. Functions that the block calls are compiled for the same
/// instructions only where they are inlined: they are `#[inline(always)]`.
#[macro_export]
macro_rules! multiversion {
    ($body:expr) => {{
        #[cfg(target_arch = "x86_64")]
        {
            /// Calls `work`, which is inlined and so compiled for AVX-512. Defined in the macro, so that its symbol
            /// name contains the surrounding function.
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn with_avx512<R>(work: impl FnOnce() -> R) -> R {
                work()
            }
            if $crate::has_avx512() {
                // Inlined at any size: a closure that is merely called from there is compiled without AVX-512. (As an
                // argument, because an attribute may not precede any other closure.) One that could be called more than
                // once would be called by a function in between, which need not be inlined.
                let once = $crate::Once;
                let work = std::convert::identity(
                    #[inline(always)]
                    || {
                        let _consumed = once;
                        $body
                    },
                );
                // SAFETY: the processor has what the function is compiled for.
                unsafe { with_avx512(work) }
            } else {
                $body
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            $body
        }
    }};
}

/// For [`multiversion!`](crate::multiversion): a closure that moves this value out of itself implements `FnOnce` only.
#[doc(hidden)]
#[derive(Debug)]
pub struct Once;

/// Whether the processor has what the block of [`multiversion!`](crate::multiversion) is compiled for.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_over_any_length_are_whole() {
        for count in [0, 1, 31, 32, 33, 100] {
            let values: Vec<f64> = (0..count).map(|i| i as f64).collect();
            let expected: f64 = values.iter().map(|x| x * x).sum();
            assert_eq!(sum_of([&values, &values], |[a, b]| a * b), expected);
        }
    }
}
