//! Addresses of the recordings that a page plays.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use flow_audio::listing;
use flow_kind::Storage;
use flow_speakers::stages::recording_name;

use flow_cli::failure::Failure;

/// The recordings of a folder by the names that RTTM gives them. A name that several files have is an error if it is one of
/// `wanted`.
pub fn recordings(storage: &Storage, folder: &Path, wanted: &[&str]) -> Result<BTreeMap<String, PathBuf>, Failure> {
    let help = "--audio names the folder of the recordings";
    let Some(name) = folder.to_str() else {
        return Err(Failure::usage(format!("{} is not UTF-8", folder.display()), help));
    };
    if !folder.is_dir() {
        return Err(Failure::usage(format!("{name} is not a folder"), help));
    }
    let found =
        listing::recordings(storage, &[name.to_owned()]).map_err(|error| Failure::usage(error.to_string(), help))?;
    let mut recordings: BTreeMap<String, PathBuf> = BTreeMap::new();
    for recording in found {
        let name = recording_name(&recording.file);
        if !wanted.contains(&name.as_str()) {
            continue;
        }
        if let Some(other) = recordings.insert(name.clone(), recording.path.clone()) {
            let (one, two) = (other.display(), recording.path.display());
            return Err(Failure::usage(
                format!("both {one} and {two} are called {name}"),
                "name the folder that holds one of them only",
            ));
        }
    }
    Ok(recordings)
}

/// The address of a file for a page in `folder`: relative, with `%` for what addresses cannot hold.
pub fn address(folder: &Path, file: &Path) -> Result<String, Failure> {
    let real = |path: &Path| {
        let wrong = |error| Failure::unreadable(format!("{}: {error}", path.display()));
        path.canonicalize().map_err(wrong)
    };
    let (folder, file) = (real(folder)?, real(file)?);
    let parts = |path: &Path| -> Vec<Vec<u8>> {
        let normal = path.components().filter_map(|part| match part {
            Component::Normal(name) => Some(name.as_encoded_bytes().to_vec()),
            _ => None,
        });
        normal.collect()
    };
    let (from, to) = (parts(&folder), parts(&file));
    let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = std::iter::repeat_n("..".to_owned(), from.len() - common);
    let down = to[common..].iter().map(|name| escaped(name));
    // Before a first part with a colon, the address would be taken for one with a scheme: `escaped` leaves none.
    Ok(up.chain(down).collect::<Vec<_>>().join("/"))
}

/// Unreserved characters (RFC 3986) stay.
fn escaped(name: &[u8]) -> String {
    let mut text = String::new();
    for &byte in name {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text += &format!("%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_without_an_address_is_named() {
        let place = tempfile::tempdir().unwrap();
        let error = address(place.path(), &place.path().join("gone.wav")).unwrap_err();
        assert!(error.to_string().contains("gone.wav"), "{error}");
        let error = address(Path::new("gone"), place.path()).unwrap_err();
        assert!(error.to_string().starts_with("gone: "), "{error}");
    }

    #[test]
    fn recordings_are_found_and_named_from_where_the_page_is() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path();
        fs::create_dir_all(root.join("in/old")).unwrap();
        fs::create_dir_all(root.join("out/pages")).unwrap();
        for file in ["in/my talk #1.flac", "in/b.wav", "in/old/c:ä.mp3"] {
            fs::write(root.join(file), b"x").unwrap();
        }
        let found = recordings(&Storage::default(), &root.join("in"), &["my_talk_#1", "c:ä", "gone"]).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["c:ä", "my_talk_#1"]);
        let address = |folder: &str, name: &str| address(&root.join(folder), &found[name]).unwrap();
        assert_eq!(address("out/pages", "my_talk_#1"), "../../in/my%20talk%20%231.flac");
        assert_eq!(address("in/old", "c:ä"), "c%3A%C3%A4.mp3");
        assert_eq!(address("in", "c:ä"), "old/c%3A%C3%A4.mp3");

        fs::write(root.join("in/old/b.flac"), b"x").unwrap();
        assert!(recordings(&Storage::default(), &root.join("in"), &["c:ä"]).is_ok());
        let error = recordings(&Storage::default(), &root.join("in"), &["b"])
            .unwrap_err()
            .to_string();
        assert!(error.contains("b.flac") && error.contains("b.wav"), "{error}");
        assert!(recordings(&Storage::default(), &root.join("gone"), &["b"]).is_err());
        assert!(recordings(&Storage::default(), &root.join("out"), &["b"]).is_err());
    }
}
