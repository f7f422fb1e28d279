//! Files of tensors that the program carries, packed.

use std::io;
use std::path::Path;

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

/// The bytes of `path`, or where there is no such file those of `path.zst`, packed by elements of `size` bytes.
///
/// # Errors
/// If neither can be read, or what is packed is damaged.
pub fn read_packed(path: &Path, size: usize) -> io::Result<Vec<u8>> {
    match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut packed = path.as_os_str().to_owned();
            packed.push(".zst");
            unpack(&std::fs::read(packed)?, size)
        }
        read => read,
    }
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

    #[test]
    fn a_file_that_is_not_packed_comes_first() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        assert!(read_packed(&path, 1).is_err());
        let packed = zstd::encode_all(&b"packed"[..], 1).unwrap();
        std::fs::write(folder.path().join("a.safetensors.zst"), packed).unwrap();
        assert_eq!(read_packed(&path, 1).unwrap(), b"packed");
        std::fs::write(&path, "plain").unwrap();
        assert_eq!(read_packed(&path, 1).unwrap(), b"plain");
    }
}
