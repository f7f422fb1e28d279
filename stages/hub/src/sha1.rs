//! SHA-1, the digest by which git names a file. It is used here to find damage alone, and none of the crates below has it.

/// A digest that is being computed.
pub(crate) struct Sha1 {
    state: [u32; 5],
    /// The block that is not full yet.
    block: [u8; 64],
    filled: usize,
    /// Bytes so far.
    length: u64,
}

impl Sha1 {
    pub fn new() -> Self {
        Sha1 {
            state: [0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476, 0xc3d2_e1f0],
            block: [0; 64],
            filled: 0,
            length: 0,
        }
    }

    /// The digest that git gives a file of this many bytes, which have to follow.
    pub fn of_git_blob(length: u64) -> Self {
        let mut digest = Self::new();
        digest.update(format!("blob {length}\0").as_bytes());
        digest
    }

    pub fn update(&mut self, mut bytes: &[u8]) {
        self.length = self.length.wrapping_add(bytes.len() as u64);
        while !bytes.is_empty() {
            let (taken, rest) = bytes.split_at(bytes.len().min(64 - self.filled));
            self.block[self.filled..self.filled + taken.len()].copy_from_slice(taken);
            self.filled += taken.len();
            bytes = rest;
            if self.filled == 64 {
                self.compress();
                self.filled = 0;
            }
        }
    }

    pub fn finish(mut self) -> [u8; 20] {
        let bits = self.length.wrapping_mul(8);
        self.update(&[0x80]);
        while self.filled != 56 {
            self.update(&[0]);
        }
        self.update(&bits.to_be_bytes());
        let mut digest = [0; 20];
        for (to, word) in digest.chunks_exact_mut(4).zip(self.state) {
            to.copy_from_slice(&word.to_be_bytes());
        }
        digest
    }

    fn compress(&mut self) {
        let mut words = [0u32; 80];
        for (word, bytes) in words.iter_mut().zip(self.block.chunks_exact(4)) {
            *word = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        for at in 16..80 {
            words[at] = (words[at - 3] ^ words[at - 8] ^ words[at - 14] ^ words[at - 16]).rotate_left(1);
        }
        let [mut a, mut b, mut c, mut d, mut e] = self.state;
        for (round, word) in words.into_iter().enumerate() {
            let (mixed, constant) = match round {
                0..20 => ((b & c) | (!b & d), 0x5a82_7999),
                20..40 => (b ^ c ^ d, 0x6ed9_eba1),
                40..60 => ((b & c) | (b & d) | (c & d), 0x8f1b_bcdc),
                _ => (b ^ c ^ d, 0xca62_c1d6u32),
            };
            let next = [mixed, e, constant, word]
                .into_iter()
                .fold(a.rotate_left(5), u32::wrapping_add);
            (a, b, c, d, e) = (next, a, b.rotate_left(30), c, d);
        }
        for (state, add) in self.state.iter_mut().zip([a, b, c, d, e]) {
            *state = state.wrapping_add(add);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(mut sha1: Sha1, bytes: &[u8], pieces: usize) -> String {
        bytes.chunks(pieces).for_each(|piece| sha1.update(piece));
        hex::encode(sha1.finish())
    }

    #[test]
    fn known_digests() {
        let million = vec![b'a'; 1_000_000];
        let longer = b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
        let cases: [(&[u8], &str); 4] = [
            (b"", "da39a3ee5e6b4b0d3255bfef95601890afd80709"),
            (b"abc", "a9993e364706816aba3e25717850c26c9cd0d89d"),
            (longer, "84983e441c3bd26ebaae4aa1f95129e5e54670f1"),
            (&million, "34aa973cd4c4daa4f61eeb2bdbad27316534016f"),
        ];
        for (bytes, expected) in cases {
            for pieces in [1, 63, 64, 65, 1 << 20] {
                assert_eq!(digest(Sha1::new(), bytes, pieces), expected, "{pieces}");
            }
        }
        // git hash-object
        for (text, expected) in [
            ("", "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"),
            ("hello\n", "ce013625030ba8dba906f756967f9e9ca394464a"),
        ] {
            let blob = Sha1::of_git_blob(text.len() as u64);
            assert_eq!(digest(blob, text.as_bytes(), 64), expected);
        }
    }
}
