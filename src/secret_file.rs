//! The file with the secret that the processes of a run share.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use flow_kind::open_regular_file;
use flow_processes::SharedSecret;

use flow_cli::failure::Failure;

/// Fewest bytes of a secret.
const LEAST: usize = 16;

/// Most bytes of the file.
const MOST: usize = 4096;

/// Reads the secret: all bytes of the file but one newline at its end. Warns where others may read it.
///
/// # Errors
/// If it cannot be read, is not a regular file, or is too short or too long for a secret.
pub fn read(path: &Path, warn: &dyn Fn(String)) -> Result<SharedSecret, Failure> {
    let refused = |why: String| {
        Failure::usage(
            format!("--secret-file: {} {why}", path.display()),
            "make one by `(umask 077; head -c 32 /dev/urandom | base64 > FILE)`, and copy it to all machines",
        )
    };
    let (bytes, mode) = open_regular_file(path)
        .and_then(read_some)
        .map_err(|error| refused(format!("cannot be read: {error}")))?;
    if bytes.len() > MOST {
        return Err(refused(format!("is longer than {MOST} bytes")));
    }
    let secret = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    let secret = secret.strip_suffix(b"\r").unwrap_or(secret);
    if secret.len() < LEAST {
        return Err(refused(format!(
            "has a secret of {} bytes, fewer than {LEAST}",
            secret.len()
        )));
    }
    if mode & 0o077 != 0 {
        warn(format!(
            "others than its owner have access to {} (mode {:03o}), which holds the secret of this run: `chmod 600` it",
            path.display(),
            mode & 0o777
        ));
    }
    Ok(SharedSecret::new(secret))
}

/// The beginning of a file, by one byte more than a secret may have, and its mode.
fn read_some(file: File) -> io::Result<(Vec<u8>, u32)> {
    let mode = file.metadata()?.permissions().mode();
    let mut bytes = Vec::new();
    file.take(MOST as u64 + 1).read_to_end(&mut bytes)?;
    Ok((bytes, mode))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::fs::Permissions;

    use super::*;

    #[test]
    fn secrets_are_read_within_bounds_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let warnings = RefCell::new(String::new());
        let read = |bytes: &[u8], mode: u32| {
            std::fs::write(&path, bytes).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            warnings.borrow_mut().clear();
            super::read(&path, &|warning| *warnings.borrow_mut() += &warning).map_err(|failure| failure.to_string())
        };
        let text = b"0123456789abcdef";
        let secret = read(text, 0o600).unwrap();
        assert_eq!(warnings.borrow().as_str(), "");
        assert!(secret == SharedSecret::new(text));
        assert_eq!(format!("{secret:?}"), "SharedSecret");
        // As editors end their files; of two newlines one belongs to the secret.
        assert!(read(b"0123456789abcdef\n", 0o600).unwrap() == secret);
        assert!(read(b"0123456789abcdef\r\n", 0o600).unwrap() == secret);
        assert!(read(b"0123456789abcdef\n\n", 0o600).unwrap() != secret);
        for mode in [0o640, 0o604] {
            assert!(read(text, mode).unwrap() == secret);
            let warned = warnings.borrow();
            assert!(
                warned.contains(&format!("mode {mode:o}")) && warned.contains("chmod 600"),
                "{warned}"
            );
        }
        for (bytes, said) in [
            (&b""[..], "0 bytes, fewer than 16"),
            (b"0123456789abcde\n", "15 bytes"),
            (&[7; 4097], "longer than 4096"),
        ] {
            let message = read(bytes, 0o600).unwrap_err();
            assert!(message.contains(said) && message.contains("secret"), "{message}");
        }
        read(&[7; 4096], 0o600).unwrap();
        for (path, said) in [
            (folder.path().join("none"), "cannot be read"),
            (folder.path().to_path_buf(), "a folder, not a regular file"),
            ("/dev/urandom".into(), "a device, not a regular file"),
        ] {
            let message = super::read(&path, &|_| {}).unwrap_err().to_string();
            assert!(message.contains(said), "{message}");
        }
    }
}
