//! Small files that settings name: no pipe is waited for, and no device is read without end.

use std::io::{self, Read};
use std::path::Path;

use flow_kind::open_regular_file;

/// Most bytes of such a file.
const MOST: u64 = 4 << 20;

/// # Errors
/// If it cannot be read, is not a regular file, or has more than 4 MiB.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular_file(path)?.take(MOST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST {
        return Err(io::Error::other(format!("it has more than {MOST} bytes")));
    }
    Ok(bytes)
}

/// # Errors
/// As [`read`], and if it is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| io::Error::other("it is not UTF-8 text"))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    #[test]
    fn only_small_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        fs::write(&file, "sk-1\n").unwrap();
        assert_eq!(read_text(&file).unwrap(), "sk-1\n");
        fs::write(&file, [0xff]).unwrap();
        assert_eq!(read_text(&file).unwrap_err().to_string(), "it is not UTF-8 text");
        let link = folder.path().join("zero");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        for device in [Path::new("/dev/zero"), &link] {
            assert_eq!(
                read(device).unwrap_err().to_string(),
                "it is a device, not a regular file"
            );
        }
        let large = File::create(&file).unwrap();
        large.set_len(MOST).unwrap();
        assert_eq!(read(&file).unwrap().len() as u64, MOST);
        large.set_len(1 << 40).unwrap();
        assert!(read(&file).unwrap_err().to_string().contains("more than"));
        assert!(read(folder.path()).unwrap_err().to_string().contains("a folder"));
    }
}
