//! Temporary files that the operating system deletes.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// An empty file in `folder` (created where it is missing) without a name: it is deleted when it is closed, also by a crash.
/// No other file is touched: where a name is taken (by a process of another machine or container with the same process
/// number), the next one is tried.
///
/// # Errors
/// When it cannot be created.
pub fn unlinked_file(folder: &Path) -> io::Result<File> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    std::fs::create_dir_all(folder)?;
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("unlinked-{}-{number}", std::process::id()));
        match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_of_the_same_name_stays() {
        let folder = tempfile::tempdir().unwrap();
        // The numbers that come next; other tests may take some of them.
        for number in 0..1_000 {
            let name = format!("unlinked-{}-{number}", std::process::id());
            std::fs::write(folder.path().join(name), "others").unwrap();
        }
        let mut file = unlinked_file(folder.path()).unwrap();
        file.write_all(b"own").unwrap();
        let files = std::fs::read_dir(folder.path()).unwrap();
        let mut count = 0;
        for path in files.map(|entry| entry.unwrap().path()) {
            assert_eq!(std::fs::read(&path).unwrap(), b"others", "{}", path.display());
            count += 1;
        }
        assert_eq!(count, 1_000);
    }
}
