//! JSON files with a version number and, in the state directory and in checkpoints, a checksum: a flipped bit in a number is
//! valid JSON, too.

use std::borrow::Cow;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{StoreError, atomic};

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
///
/// # Errors
/// [`StoreError::Damaged`] if it is not JSON of this form, or not what its checksum says.
pub(super) fn from_json<T: Versioned>(path: &Path, bytes: &[u8], known: u64) -> Result<T, StoreError> {
    let bytes = &*checked(path, bytes)?;
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
    parsed.map_err(|e| StoreError::damaged(path, e))
}

/// The last field of an object with a checksum: BLAKE3 of all bytes before it, the first 16 hexadecimal digits.
const CHECKSUM: &[u8] = b",\"blake3\":\"";
const DIGITS: usize = 16;

/// The object without its checksum, which is compared. Files of a flow that wrote none are taken as they are.
pub fn checked<'a>(path: &Path, bytes: &'a [u8]) -> Result<Cow<'a, [u8]>, StoreError> {
    let object = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let split = object.len().checked_sub(CHECKSUM.len() + DIGITS + b"\"}".len());
    let Some((covered, rest)) = split.map(|at| object.split_at(at)) else {
        return Ok(Cow::Borrowed(bytes));
    };
    let digits = rest.strip_prefix(CHECKSUM).and_then(|rest| rest.strip_suffix(b"\"}"));
    match digits {
        None => Ok(Cow::Borrowed(bytes)),
        Some(digits) if digits == short_digest(&blake3::hash(covered)).as_bytes() => {
            Ok(Cow::Owned([covered, b"}"].concat()))
        }
        Some(_) => Err(StoreError::damaged(path, "its checksum is that of other bytes")),
    }
}

fn short_digest(digest: &blake3::Hash) -> String {
    digest.to_hex()[..DIGITS].to_string()
}

/// Passes on all bytes but the last one, and hashes what it passes on.
struct Sealing<'a> {
    file: &'a mut dyn Write,
    hasher: blake3::Hasher,
    last: Option<u8>,
}

impl Write for Sealing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some((last, others)) = bytes.split_last() else {
            return Ok(());
        };
        if let Some(byte) = self.last.replace(*last) {
            self.hasher.update(&[byte]);
            self.file.write_all(&[byte])?;
        }
        self.hasher.update(others);
        self.file.write_all(others)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes an object, its checksum and a newline, without having all of it in memory.
pub(super) fn write_sealed_json(file: &mut dyn Write, object: &impl Serialize) -> io::Result<()> {
    let sealing = Sealing {
        file: &mut *file,
        hasher: blake3::Hasher::new(),
        last: None,
    };
    // JSON comes in pieces of some bytes.
    let mut pieces = BufWriter::with_capacity(1 << 16, sealing);
    serde_json::to_writer(&mut pieces, object)?;
    let sealing = pieces.into_inner().map_err(io::IntoInnerError::into_error)?;
    if sealing.last != Some(b'}') {
        return Err(io::Error::other("only an object can have a checksum"));
    }
    let digits = short_digest(&sealing.hasher.finalize());
    file.write_all(&[CHECKSUM, digits.as_bytes(), b"\"}\n"].concat())
}

/// The text of an object, which may have white space, with its checksum. None if it is not an object.
pub fn sealed(object: &str) -> Option<String> {
    let covered = object.trim_end().strip_suffix('}')?;
    let digits = short_digest(&blake3::hash(covered.as_bytes()));
    Some(format!("{covered},\"blake3\":\"{digits}\"}}\n"))
}

/// Writes a note that only saves time: an object, with its checksum.
///
/// # Errors
/// If it cannot be written.
pub fn write_note(path: &Path, note: &impl Serialize) -> Result<(), StoreError> {
    atomic::write_atomically(path, &to_sealed_json(path, note)?)
}

/// What [`write_note`] wrote; none if it is not there, of another form, or damaged.
pub fn read_note<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let bytes = std::fs::read(path).ok()?;
    match checked(path, &bytes).ok()? {
        Cow::Owned(note) => serde_json::from_slice(&note).ok(),
        Cow::Borrowed(_) => None,
    }
}

/// What [`write_sealed_json`] writes.
pub(super) fn to_sealed_json(path: &Path, object: &impl Serialize) -> Result<Vec<u8>, StoreError> {
    let mut bytes = Vec::new();
    write_sealed_json(&mut bytes, object).map_err(|error| StoreError::io("write", path, error))?;
    Ok(bytes)
}

/// An object and a newline, without a checksum: for files that other programs read.
pub(super) fn to_json(path: &Path, value: &impl Serialize) -> Result<Vec<u8>, StoreError> {
    let mut bytes = serde_json::to_vec(value).map_err(|error| StoreError::io("write", path, error.into()))?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// The lines of a file without their checksums, for tests that change them.
#[cfg(test)]
pub(super) fn unsealed(text: &str) -> String {
    let line = |line: &str| String::from_utf8(checked(Path::new(""), line.as_bytes()).unwrap().into_owned()).unwrap();
    text.lines().map(|text| line(text) + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Counted {
        version: u64,
        rows: Vec<u64>,
        name: String,
    }

    impl Versioned for Counted {
        fn version(&self) -> u64 {
            self.version
        }
    }

    fn counted() -> Counted {
        Counted {
            version: 1,
            rows: vec![10, 20],
            name: "}".to_string(),
        }
    }

    #[test]
    fn every_flipped_bit_is_an_error_or_changes_nothing() {
        let path = Path::new("x.json");
        let sealed = to_sealed_json(path, &counted()).unwrap();
        assert_eq!(from_json::<Counted>(path, &sealed, 1).unwrap(), counted());
        for at in 0..sealed.len() * 8 {
            let mut flipped = sealed.clone();
            flipped[at / 8] ^= 1 << (at % 8);
            match from_json::<Counted>(path, &flipped, 1) {
                Ok(read) => assert_eq!(read, counted(), "bit {at}"),
                Err(error) => assert!(error.to_string().contains("x.json"), "{error}"),
            }
        }
    }

    #[test]
    fn a_damaged_note_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes.json");
        assert_eq!(read_note::<Counted>(&path), None);
        write_note(&path, &counted()).unwrap();
        assert_eq!(read_note(&path), Some(counted()));
        let note = std::fs::read(&path).unwrap();
        for at in 0..note.len() * 8 {
            let mut flipped = note.clone();
            flipped[at / 8] ^= 1 << (at % 8);
            std::fs::write(&path, flipped).unwrap();
            let read = read_note::<Counted>(&path);
            assert!(read.is_none() || read == Some(counted()), "bit {at}");
        }
        // Of a flow that gave none a checksum.
        std::fs::write(&path, to_json(&path, &counted()).unwrap()).unwrap();
        assert_eq!(read_note::<Counted>(&path), None);
    }

    #[test]
    fn text_with_spaces_is_sealed_as_it_is() {
        let path = Path::new("x.json");
        let pretty = serde_json::to_string_pretty(&counted()).unwrap() + "\n";
        let with_checksum = sealed(&pretty).unwrap();
        assert!(with_checksum.starts_with(pretty.trim_end().strip_suffix('}').unwrap()));
        assert_eq!(
            from_json::<Counted>(path, with_checksum.as_bytes(), 1).unwrap(),
            counted()
        );
        assert!(matches!(checked(path, with_checksum.as_bytes()), Ok(Cow::Owned(_))));
        assert_eq!(sealed("[1]"), None);
    }

    #[test]
    fn files_without_a_checksum_are_read() {
        let path = Path::new("x.json");
        let plain = to_json(path, &counted()).unwrap();
        assert_eq!(from_json::<Counted>(path, &plain, 1).unwrap(), counted());
        assert!(write_sealed_json(&mut Vec::new(), &[1, 2]).is_err());
    }
}
