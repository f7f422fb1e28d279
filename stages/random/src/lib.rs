//! SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014), the random number generator
//! of this workspace, apart from Python's Mersenne Twister. It has no dependencies, so that both the kernels and the
//! audio crate can use it.
//!
//! Outputs of stages and trained models depend on its numbers, so they must never change.

/// The increment of the state: 2^64 divided by the golden ratio, odd.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The output function: a one-to-one mix of 64 bits.
#[inline(always)]
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Number `n` of the generator of a seed, counted from 1, without those before it: a hash of (seed, n).
#[inline(always)]
pub fn nth(seed: u64, n: u64) -> u64 {
    mix(seed.wrapping_add(n.wrapping_mul(GAMMA)))
}

/// The generator of a seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mix(self.0)
    }

    /// Uniform in [0, 1) with 53 bits.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Below `end`, or 0 for 0, by the remainder: smaller numbers come up more often, by `end` of 2^64.
    #[inline]
    pub fn below(&mut self, end: usize) -> usize {
        (self.next_u64() % end.max(1) as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first five numbers from seed 1234567, as the program of Sebastiano Vigna (`splitmix64.c`) gives them.
    const KNOWN: [u64; 5] = [
        6_457_827_717_110_365_317,
        3_203_168_211_198_807_973,
        9_817_491_932_198_370_423,
        4_593_380_528_125_082_431,
        16_408_922_859_458_223_821,
    ];

    #[test]
    fn numbers_are_those_of_its_author() {
        let mut random = SplitMix64::new(1_234_567);
        for (n, known) in (1..).zip(KNOWN) {
            assert_eq!(random.next_u64(), known);
            assert_eq!(nth(1_234_567, n), known);
        }
    }

    #[test]
    fn draws_stay_in_their_ranges() {
        let mut random = SplitMix64::new(1);
        for end in [0, 1, 7, usize::MAX] {
            for _ in 0..1000 {
                assert!(random.below(end) < end.max(1));
                assert!((0.0..1.0).contains(&random.unit()));
            }
        }
    }

    /// Every crate but the kernels has the same setting in Cargo.toml, and `.ci/run` runs this in a release build.
    #[test]
    #[should_panic(expected = "attempt to multiply with overflow")]
    fn integer_overflow_is_an_error() {
        let length = std::hint::black_box(u64::MAX);
        std::hint::black_box(length * 2);
    }
}
