//! Files of tensors that the program carries, packed.

use std::io;

/// The bytes of a packed file: zstd over bytes that are shuffled as by Blosc and HDF5, first those at multiples of `size` (that
/// of an element), then those one behind them, and so on. Signs and exponents, which repeat, then lie together.
///
/// # Errors
/// If what is packed is damaged.
pub fn unpack(packed: &[u8], size: usize) -> io::Result<Vec<u8>> {
    let shuffled = zstd::decode_all(packed)?;
    let mut bytes = vec![0; shuffled.len()];
    let mut from = shuffled.into_iter();
    for first in 0..size {
        for (to, byte) in bytes.iter_mut().skip(first).step_by(size).zip(&mut from) {
            *to = byte;
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_carried_is_unshuffled() {
        // 7 bytes in elements of 2: those at 0, 2, 4, 6, then those at 1, 3, 5.
        let packed = zstd::encode_all(&[0u8, 2, 4, 6, 1, 3, 5][..], 1).unwrap();
        assert_eq!(unpack(&packed, 2).unwrap(), [0, 1, 2, 3, 4, 5, 6]);
        assert!(unpack(&packed[..8], 2).is_err());
    }
}
