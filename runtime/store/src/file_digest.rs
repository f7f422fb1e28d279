//! Digests of files as they are on the disk.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use flow_base::digest::Digest;

/// Digest of all bytes of a file of this machine.
pub(super) fn read_digest(path: &Path) -> io::Result<Digest> {
    digest_to_end(File::open(path)?)
}

/// Digest of what is left to read.
pub(super) fn digest_to_end(mut file: impl Read) -> io::Result<Digest> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Digest::from_bytes(*hasher.finalize().as_bytes())),
            Ok(read) => {
                hasher.update(&buffer[..read]);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}
