//! Data files of a state directory are compared with the digest in their names when a process first reads them: the format
//! does not notice every flipped bit.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::SystemTime;

use flow_storage::FileVersion;

use super::StoreError;
use super::file_digest::read_digest;
use flow_base::digest::Digest;

/// Most files that are remembered; a process that runs for days reads new ones again and again.
const MOST_KNOWN: usize = 1 << 16;

/// Files that were compared, as they were then.
static VERIFIED: LazyLock<Mutex<HashMap<PathBuf, FileVersion>>> = LazyLock::new(Mutex::default);

/// Compares the content of a data file with its name, once for each version of the file that has settled. Files with other names, such as
/// temporary ones, are not read.
///
/// # Errors
/// [`StoreError::Damaged`] if the content has another digest; [`StoreError::Io`] if it cannot be read.
pub(super) fn verify(path: &Path) -> Result<(), StoreError> {
    let Some(named) = named_digest(path) else {
        return Ok(());
    };
    let failed = |error| StoreError::io("read", path, error);
    let began = SystemTime::now();
    let state = FileVersion::of_file(&path.metadata().map_err(failed)?);
    let known = || VERIFIED.lock().unwrap_or_else(PoisonError::into_inner);
    if known().get(path) == Some(&state) {
        return Ok(());
    }
    let found = read_digest(path).map_err(failed)?;
    if found.short() != named {
        let detail = format!("its content has the digest {}, not that of its name", found.short());
        return Err(StoreError::damaged(path, detail));
    }
    if !state.is_settled(began) {
        return Ok(());
    }
    let mut known = known();
    if known.len() >= MOST_KNOWN {
        known.clear();
    }
    known.insert(path.to_path_buf(), state);
    Ok(())
}

/// The digest in the name of a data file: see [`super::record::data_file`].
fn named_digest(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?.strip_suffix(".parquet")?;
    let (_, digest) = name.rsplit_once('.')?;
    let is_digest = digest.len() == Digest::SHORT && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_digest.then_some(digest)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, FileTimes};

    use super::*;

    #[test]
    fn every_flipped_bit_of_a_data_file_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let content: Vec<u8> = (0..200).collect();
        let name = format!("key.port.{}.parquet", Digest::of(&content).short());
        let path = folder.path().join(name);
        fs::write(&path, &content).unwrap();
        verify(&path).unwrap();
        let modified = path.metadata().unwrap().modified().unwrap();
        for bit in 0..content.len() * 8 {
            let mut flipped = content.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, flipped).unwrap();
            // As on a bad disk: neither size nor time tells.
            let times = FileTimes::new().set_modified(modified);
            fs::File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_times(times)
                .unwrap();
            let error = verify(&path).unwrap_err().to_string();
            assert!(error.contains(".parquet"), "{error}");
        }
        fs::write(&path, content).unwrap();
        verify(&path).unwrap();
    }

    #[test]
    fn other_files_are_not_compared() {
        for name in [
            "a.parquet",
            "key.port.0123.parquet",
            "key.port.0123456789abcdex.parquet",
            ".tmp-1-2",
        ] {
            verify(Path::new(name)).unwrap();
        }
    }
}
