//! Reproducible random numbers: one SplitMix64 generator for each clip.

use flow_random::SplitMix64;
use sha2::{Digest as _, Sha256};

/// SplitMix64. The output of the kind depends on its numbers, so they must never change.
pub struct Random(SplitMix64);

impl Random {
    /// The generator of this seed and these names.
    pub fn of(seed: u64, names: &[&str]) -> Self {
        let mut hash = Sha256::new();
        hash.update(seed.to_le_bytes());
        for name in names {
            // With its length, so that ("a", "bc") is not ("ab", "c").
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name.as_bytes());
        }
        Random(SplitMix64::new(first_eight(&hash.finalize())))
    }

    pub fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// From 0 (may be met) to 1 (never met).
    pub fn unit(&mut self) -> f64 {
        self.0.unit()
    }

    /// Evenly within a range, both ends included as far as rounding goes.
    pub fn between(&mut self, [low, high]: [f64; 2]) -> f64 {
        low + (high - low) * self.unit()
    }

    /// A whole number of a range, both ends included.
    pub fn whole(&mut self, [low, high]: [u32; 2]) -> u32 {
        let count = u64::from(high.saturating_sub(low)) + 1;
        // Less than 2^33, times 2^32: fits.
        low + ((count * (self.next() >> 32)) >> 32) as u32
    }

    /// One of the items; none of no items.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        let last = u32::try_from(items.len().checked_sub(1)?).unwrap_or(u32::MAX);
        items.get(self.whole([0, last]) as usize)
    }

    /// Normally distributed, as the sum of twelve even numbers: mean 0, variance 1. (Logarithms and sines differ
    /// in their last bit between machines, sums do not.)
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }
}

/// A hash of a text, from 0 to 1.
pub fn place_of(text: &str) -> f64 {
    (first_eight(&Sha256::digest(text.as_bytes())) >> 11) as f64 / (1u64 << 53) as f64
}

fn first_eight(digest: &[u8]) -> u64 {
    let mut first = [0; 8];
    for (to, from) in first.iter_mut().zip(digest) {
        *to = *from;
    }
    u64::from_be_bytes(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_splitmix64_and_names_are_kept_apart() {
        // The first three numbers from seed 1234567, as its author's program gives them.
        let mut known = Random(SplitMix64::new(1_234_567));
        assert_eq!(
            [known.next(), known.next(), known.next()],
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
        let first = |names: &[&str]| Random::of(1, names).next();
        assert_ne!(first(&["a", "bc"]), first(&["ab", "c"]));
        assert_ne!(first(&["a"]), Random::of(2, &["a"]).next());
    }

    #[test]
    fn draws_are_even_and_stay_in_their_ranges() {
        let mut random = Random::of(1, &[]);
        let mut counts = [0u32; 5];
        for _ in 0..10_000 {
            counts[random.whole([0, 4]) as usize] += 1;
            assert!((-3.0..=2.0).contains(&random.between([-3.0, 2.0])));
        }
        assert!(counts.iter().all(|count| (1_800..2_200).contains(count)), "{counts:?}");
        let (mut sum, mut squares) = (0.0, 0.0);
        for _ in 0..50_000 {
            let number = random.normal();
            sum += number;
            squares += number * number;
        }
        assert!((sum / 50_000.0).abs() < 0.02 && (squares / 50_000.0 - 1.0).abs() < 0.02);
        assert_eq!(random.pick::<u8>(&[]), None);
        assert_eq!(random.whole([u32::MAX, u32::MAX]), u32::MAX);
    }
}
