//! BLAKE3 digests: of committed bytes, of recipes, of keys.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A BLAKE3 digest, written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        Digest(*blake3::hash(bytes).as_bytes())
    }

    /// Digest of several parts. Each part's length is hashed with it, so that moving a byte from one
    /// part to the next changes the digest.
    pub fn of_parts<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        let mut all = DigestOfParts::default();
        for part in parts {
            all.add(part.as_ref());
        }
        all.finish()
    }

    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Digest(bytes)
    }

    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub fn to_hex(&self) -> String {
        hex::encode(self.0)
    }

    /// Length of [`Digest::short`].
    pub const SHORT: usize = 16;

    /// The first 16 hexadecimal digits: enough for a file name, or for a reader's eye.
    pub fn short(&self) -> String {
        hex::encode(&self.0[..Self::SHORT / 2])
    }

    pub fn from_hex(text: &str) -> Option<Self> {
        let mut bytes = [0u8; 32];
        hex::decode_to_slice(text, &mut bytes).ok()?;
        Some(Digest(bytes))
    }
}

/// [`Digest::of_parts`] of parts that come one by one.
#[derive(Default)]
pub struct DigestOfParts(blake3::Hasher);

impl DigestOfParts {
    pub fn add(&mut self, part: &[u8]) {
        self.0.update(&(part.len() as u64).to_le_bytes());
        self.0.update(part);
    }

    pub fn finish(&self) -> Digest {
        Digest(*self.0.finalize().as_bytes())
    }
}

impl AsRef<[u8]> for Digest {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.short())
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_hex())
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(HexDigits)
    }
}

/// Reads digests without a string for each of them: an index has hundreds of thousands.
struct HexDigits;

impl de::Visitor<'_> for HexDigits {
    type Value = Digest;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("64 hexadecimal digits")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Digest, E> {
        Digest::from_hex(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
    }
}
