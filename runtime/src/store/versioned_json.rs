//! JSON files with a version number.

use std::io::{self, Write};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::StoreError;

/// A JSON file with a version number.
pub(super) trait Versioned: DeserializeOwned {
    fn version(&self) -> u64;
}

/// The version alone, of a file whose other fields a newer flow may have changed.
#[derive(Deserialize)]
struct Head {
    version: u64,
}

/// Parses a JSON file; a version later than `known` is refused as such.
pub(super) fn from_json<T: Versioned>(path: &Path, bytes: &[u8], known: u64) -> Result<T, StoreError> {
    let parsed: Result<T, _> = serde_json::from_slice(bytes);
    let version = match &parsed {
        Ok(value) => value.version(),
        Err(_) => serde_json::from_slice::<Head>(bytes).map_or(0, |head| head.version),
    };
    if version > known {
        return Err(StoreError::Newer {
            path: path.to_path_buf(),
            found: version,
            known,
        });
    }
    parsed.map_err(|e| StoreError::Damaged {
        path: path.to_path_buf(),
        detail: e.to_string(),
    })
}

/// Writes what [`to_json`] gives, without having all of it in memory.
pub(super) fn write_json(file: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *file, value)?;
    file.write_all(b"\n")
}

pub(super) fn to_json(path: &Path, value: &impl Serialize) -> Result<Vec<u8>, StoreError> {
    let mut bytes = serde_json::to_vec(value).map_err(|e| StoreError::Damaged {
        path: path.to_path_buf(),
        detail: e.to_string(),
    })?;
    bytes.push(b'\n');
    Ok(bytes)
}
