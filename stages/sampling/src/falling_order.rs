//! Sorting by random keys, the slowest part of planning an epoch of millions of rows.

/// Bits of a digit. 2,048 counters and as many places to write to stay in the second cache.
const DIGIT: u32 = 11;
/// Bits of a key that the radix passes sort by: those left in a 64-bit word beside an index (32 bits).
const BITS: u32 = 32;
/// Shorter lists are sorted by comparison.
const SHORT: usize = 512;

/// The places of `keys` by falling key; of equal keys, the later place comes first. Keys are from 0 to 1.
pub fn falling_order(keys: &[f64]) -> Vec<u32> {
    let by_key = |a: &u32, b: &u32| {
        let (a, b) = (*a as usize, *b as usize);
        keys[b].total_cmp(&keys[a]).then(b.cmp(&a))
    };
    if keys.len() < SHORT {
        let mut places: Vec<u32> = (0..keys.len() as u32).collect();
        places.sort_unstable_by(by_key);
        return places;
    }
    // A word is the complement of a key's first bits, and its place. The two highest bits of a number from 0 to 1 are
    // always 0; those after them, read as an integer, rise with the number.
    let mut words: Vec<u64> = Vec::with_capacity(keys.len());
    let mut counts = [[0u32; 1 << DIGIT]; BITS.div_ceil(DIGIT) as usize];
    for (place, key) in keys.iter().enumerate().rev() {
        let word = !(key.to_bits() << 2) & 0xffff_ffff_0000_0000 | place as u64;
        words.push(word);
        for (pass, counts) in counts.iter_mut().enumerate() {
            counts[digit(word, pass)] += 1;
        }
    }
    let mut sorted = vec![0u64; words.len()];
    for (pass, counts) in counts.iter_mut().enumerate() {
        let mut start = 0;
        for count in counts.iter_mut() {
            start += std::mem::replace(count, start);
        }
        for &word in &words {
            let next = &mut counts[digit(word, pass)];
            sorted[*next as usize] = word;
            *next += 1;
        }
        std::mem::swap(&mut words, &mut sorted);
    }
    // Keys that are equal in these bits are adjacent; they are sorted by their other bits.
    let mut places: Vec<u32> = Vec::with_capacity(words.len());
    for alike in words.chunk_by(|a, b| a >> BITS == b >> BITS) {
        let from = places.len();
        places.extend(alike.iter().map(|&word| word as u32));
        if alike.len() > 1 {
            places[from..].sort_unstable_by(by_key);
        }
    }
    places
}

fn digit(word: u64, pass: usize) -> usize {
    (word >> (BITS + DIGIT * pass as u32)) as usize & ((1 << DIGIT) - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn equals_a_sort_by_comparison(
            keys in proptest::collection::vec((0.0f64..=1.0, 0usize..4), 0..1500),
            exponent in prop_oneof![Just(1.0), Just(1e-9), Just(1e6), 1e-3f64..30.0],
        ) {
            // Many equal keys, and many that differ in the last bits alone.
            let keys: Vec<f64> = keys
                .iter()
                .map(|&(key, kind)| match kind {
                    0 => (key * 8.0).floor() / 8.0,
                    1 => 0.5 + key * 1e-15,
                    _ => key.powf(exponent),
                })
                .collect();
            let mut expected: Vec<(f64, u32)> = keys.iter().copied().zip(0..).collect();
            expected.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
            let expected: Vec<u32> = expected.into_iter().map(|(_, place)| place).collect();
            prop_assert_eq!(falling_order(&keys), expected);
        }
    }
}
