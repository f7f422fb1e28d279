//! Loops that the compiler makes vector code of.

use std::array::from_fn;

use super::Float;

/// Independent partial sums of a reduction: enough for a vector of any processor.
pub(crate) const LANES: usize = 16;

/// Sum of `f` over the elements of slices of one length, in interleaved sums so that it can be vectorised.
#[inline(always)]
pub(crate) fn sum_of<T: Float, const N: usize>(slices: [&[T]; N], f: impl Fn([T; N]) -> T) -> T {
    // Arrays by value: the compiler keeps those in registers.
    let (mut even, mut odd) = ([T::zero(); LANES], [T::zero(); LANES]);
    let mut rest = slices;
    while rest[0].len() >= 2 * LANES {
        let block = rest.map(|slice| &slice[..2 * LANES]);
        rest = rest.map(|slice| &slice[2 * LANES..]);
        even = from_fn(|lane| even[lane] + f(block.map(|slice| slice[lane])));
        odd = from_fn(|lane| odd[lane] + f(block.map(|slice| slice[LANES + lane])));
    }
    let mut sums: [T; LANES] = from_fn(|lane| even[lane] + odd[lane]);
    for i in 0..rest[0].len() {
        sums[i % LANES] += f(rest.map(|slice| slice[i]));
    }
    sum_lanes(sums)
}

/// Sum of all lanes, in a fixed order.
#[inline(always)]
pub(crate) fn sum_lanes<T: Float>(lanes: [T; LANES]) -> T {
    let eight: [T; 8] = from_fn(|lane| lanes[lane] + lanes[lane + 8]);
    let four: [T; 4] = from_fn(|lane| eight[lane] + eight[lane + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Runs a block with the widest vectors that the processor has. What it computes is the same to the bit: the order of
/// sums is written out in the code, and no multiplication is contracted with an addition unless the code says so.
///
/// The block stands twice in the program, so that each copy is compiled for its processor.
macro_rules! widest {
    ($body:expr) => {{
        #[cfg(target_arch = "x86_64")]
        {
            if $crate::kernels::has_avx512() {
                // Inlined at any size: a closure that is merely called from there is compiled without AVX-512. (As an
                // argument, because an attribute may not stand before any other closure.)
                let work = std::convert::identity(
                    #[inline(always)]
                    || $body,
                );
                // SAFETY: the processor has what the function is compiled for.
                unsafe { $crate::kernels::with_avx512(work) }
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
pub(crate) use widest;

/// Whether [`with_avx512`] may be called.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Calls `work`, which is inlined and so compiled for AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn with_avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
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
