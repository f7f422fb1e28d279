//! For tests of this crate and of those above it: golden files that are packed, as paths.

pub mod golden;

use std::io;
use std::path::{Path, PathBuf};

use crate::tensor_files::read_packed;

/// For what reads no packed files: `path` itself; where there is only `path.zst`, or `path` is a folder
/// with packed files, an unpacked copy below `place` that is called as `path` is. Elements are as wide as the ending says.
///
/// # Errors
/// If a file cannot be read or written, or what is packed is damaged.
pub fn unpacked_copy(path: &Path, place: &Path) -> io::Result<PathBuf> {
    let copy = place.join(path.file_name().unwrap_or_default());
    if path.is_dir() {
        let entries: Vec<PathBuf> = std::fs::read_dir(path)?
            .map(|entry| Ok(entry?.path()))
            .collect::<io::Result<_>>()?;
        let packed = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "zst");
        if !entries.iter().any(packed) {
            return Ok(path.into());
        }
        for entry in entries {
            let name = if packed(&entry) {
                entry.with_extension("")
            } else {
                entry
            };
            write_if_changed(
                &copy.join(name.file_name().unwrap_or_default()),
                &read_packed(&name, element_size(&name))?,
            )?;
        }
        return Ok(copy);
    }
    let mut packed = path.as_os_str().to_owned();
    packed.push(".zst");
    if path.exists() || !Path::new(&packed).exists() {
        return Ok(path.into());
    }
    write_if_changed(&copy, &read_packed(path, element_size(path))?)?;
    Ok(copy)
}

/// Bytes of an element of a file: weights are of 32 bits.
fn element_size(path: &Path) -> usize {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("nemo" | "safetensors") => 4,
        _ => 1,
    }
}

/// Replaces a file as a whole, as other tests may be reading it.
fn write_if_changed(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if std::fs::read(path).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    io::Write::write_all(&mut file, bytes)?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_files_are_copied_and_plain_ones_stay_where_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let (place, at) = (folder.path().join("place"), |name: &str| folder.path().join(name));
        let packed = |bytes: &[u8]| zstd::encode_all(bytes, 1).unwrap();
        std::fs::write(at("plain.nemo"), "plain").unwrap();
        std::fs::write(at("a.nemo.zst"), packed(&[0, 4, 1, 5, 2, 6, 3, 7])).unwrap();
        assert_eq!(unpacked_copy(&at("plain.nemo"), &place).unwrap(), at("plain.nemo"));
        assert_eq!(unpacked_copy(&at("missing"), &place).unwrap(), at("missing"));
        assert!(!place.exists());
        let copy = unpacked_copy(&at("a.nemo"), &place).unwrap();
        assert_eq!(copy, place.join("a.nemo"));
        assert_eq!(std::fs::read(&copy).unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
        // One that was changed since is not taken for it.
        std::fs::write(&copy, "old").unwrap();
        assert_eq!(
            std::fs::read(unpacked_copy(&at("a.nemo"), &place).unwrap())
                .unwrap()
                .len(),
            8
        );

        std::fs::create_dir(at("hf")).unwrap();
        std::fs::write(at("hf/config.json"), "{}").unwrap();
        assert_eq!(unpacked_copy(&at("hf"), &place).unwrap(), at("hf"));
        std::fs::write(at("hf/tokenizer.json.zst"), packed(b"pieces")).unwrap();
        let copy = unpacked_copy(&at("hf"), &place).unwrap();
        let read = |name: &str| std::fs::read_to_string(copy.join(name)).unwrap();
        assert_eq!(
            (copy.clone(), read("config.json"), read("tokenizer.json")),
            (place.join("hf"), "{}".into(), "pieces".into())
        );
    }
}
