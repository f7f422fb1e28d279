//! Random bytes that nobody can guess, for secrets and names.

use std::fs::File;
use std::io::{self, Read};

/// From the system's generator for cryptography.
///
/// # Errors
/// If the system gives none.
pub fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// `N` of them as hexadecimal digits.
///
/// # Errors
/// As [`random_bytes`].
pub fn random_hex<const N: usize>() -> io::Result<String> {
    Ok(hex::encode(random_bytes::<N>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_are_the_same() {
        let (first, second) = (random_hex::<16>().unwrap(), random_hex::<16>().unwrap());
        assert_eq!(first.len(), 32);
        assert_ne!(first, second);
    }
}
