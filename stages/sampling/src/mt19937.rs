//! The random numbers of Python's `random.Random`, bit for bit: MT19937 (Matsumoto and Nishimura, 1998), seeded
//! with `init_by_array` as CPython does. The crate `rand_mt` (4.2) gives the same numbers, 50 million of them in 0.9 s instead of
//! 1.2 s: an epoch of millions of rows would gain some hundredths of a second from one more dependency.

const N: usize = 624;
const M: usize = 397;

/// A generator in the state in which `random.Random(seed)` would be.
#[derive(Clone)]
pub struct Mt19937 {
    state: [u32; N],
    /// The tempered output of the whole `state`.
    tempered: [u32; N],
    next: usize,
}

impl Mt19937 {
    /// `random.Random(seed)`: the key is the magnitude of `seed` in 32-bit limbs, the least one first.
    pub fn new(seed: i128) -> Self {
        let mut rest = seed.unsigned_abs();
        let mut key = vec![rest as u32];
        rest >>= 32;
        while rest != 0 {
            key.push(rest as u32);
            rest >>= 32;
        }
        let mut generator = Mt19937 {
            state: [0; N],
            tempered: [0; N],
            next: N,
        };
        generator.seed_by_number(19_650_218);
        generator.seed_by_key(&key);
        generator
    }

    fn seed_by_number(&mut self, seed: u32) {
        self.state[0] = seed;
        for i in 1..N {
            let before = self.state[i - 1];
            self.state[i] = 1_812_433_253u32
                .wrapping_mul(before ^ (before >> 30))
                .wrapping_add(i as u32);
        }
    }

    fn seed_by_key(&mut self, key: &[u32]) {
        let state = &mut self.state;
        let mix = |state: &[u32; N], i: usize| state[i - 1] ^ (state[i - 1] >> 30);
        let (mut i, mut j) = (1, 0);
        for _ in 0..N.max(key.len()) {
            state[i] = (state[i] ^ mix(state, i).wrapping_mul(1_664_525))
                .wrapping_add(key[j])
                .wrapping_add(j as u32);
            i += 1;
            j += 1;
            if i >= N {
                state[0] = state[N - 1];
                i = 1;
            }
            if j >= key.len() {
                j = 0;
            }
        }
        for _ in 0..N - 1 {
            state[i] = (state[i] ^ mix(state, i).wrapping_mul(1_566_083_941)).wrapping_sub(i as u32);
            i += 1;
            if i >= N {
                state[0] = state[N - 1];
                i = 1;
            }
        }
        state[0] = 0x8000_0000;
    }

    fn renew(&mut self) {
        let twist = |this: u32, next: u32, far: u32| {
            let y = (this & 0x8000_0000) | (next & 0x7fff_ffff);
            far ^ (y >> 1) ^ (0u32.wrapping_sub(y & 1) & 0x9908_b0df)
        };
        let state = &mut self.state;
        // Three loops in place of one over indices modulo N, so that they become vector instructions.
        for i in 0..N - M {
            state[i] = twist(state[i], state[i + 1], state[i + M]);
        }
        for i in N - M..N - 1 {
            state[i] = twist(state[i], state[i + 1], state[i + M - N]);
        }
        state[N - 1] = twist(state[N - 1], state[0], state[M - 1]);
        for (tempered, &state) in self.tempered.iter_mut().zip(state.iter()) {
            let mut y = state;
            y ^= y >> 11;
            y ^= (y << 7) & 0x9d2c_5680;
            y ^= (y << 15) & 0xefc6_0000;
            *tempered = y ^ (y >> 18);
        }
        self.next = 0;
    }

    /// 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.next == N {
            self.renew();
        }
        let bits = self.tempered[self.next];
        self.next += 1;
        bits
    }

    /// `random()`: in [0, 1), 53 bits.
    pub fn random(&mut self) -> f64 {
        let high = self.next_u32() >> 5;
        let low = self.next_u32() >> 6;
        (f64::from(high) * 67_108_864.0 + f64::from(low)) * (1.0 / 9_007_199_254_740_992.0)
    }

    /// `getrandbits(bits)` for 1 to 32 bits.
    pub fn bits(&mut self, bits: u32) -> u32 {
        self.next_u32() >> (32 - bits.clamp(1, 32))
    }

    /// `_randbelow(n)`: uniform in 0 .. n. 0 where `n` is 0.
    pub fn below(&mut self, n: u32) -> u32 {
        if n == 0 {
            return 0;
        }
        let bits = 32 - n.leading_zeros();
        loop {
            let value = self.bits(bits);
            if value < n {
                return value;
            }
        }
    }

    /// `shuffle(items)`. Lists of 2^32 items or more are not shuffled as Python does.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.below(i as u32 + 1);
            items.swap(i, j as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::test_data::golden;

    #[derive(serde::Deserialize)]
    struct Case {
        seed: i128,
        random: Vec<String>,
        getrandbits_1_7_20_32: Vec<u32>,
        shuffle20: Vec<u32>,
        shuffle1000_sha256: String,
        after: String,
    }

    #[test]
    fn equals_python() {
        let text = std::fs::read(golden("sampler_synth").join("rng.json")).unwrap();
        let cases: Vec<Case> = serde_json::from_slice(&text).unwrap();
        assert_eq!(cases.len(), 8);
        for case in cases {
            let mut generator = Mt19937::new(case.seed);
            for expected in &case.random {
                assert_eq!(
                    generator.random().to_bits(),
                    expected.parse::<f64>().unwrap().to_bits(),
                    "{}",
                    case.seed
                );
            }
            let bits: Vec<u32> = [1, 7, 20, 32].iter().map(|&bits| generator.bits(bits)).collect();
            assert_eq!(bits, case.getrandbits_1_7_20_32);
            let mut list: Vec<u32> = (0..20).collect();
            generator.shuffle(&mut list);
            assert_eq!(list, case.shuffle20);
            let mut list: Vec<u32> = (0..1000).collect();
            generator.shuffle(&mut list);
            let json = serde_json::to_string(&list).unwrap();
            assert_eq!(hex::encode(Sha256::digest(json)), case.shuffle1000_sha256);
            assert_eq!(
                generator.random().to_bits(),
                case.after.parse::<f64>().unwrap().to_bits()
            );
        }
    }
}
