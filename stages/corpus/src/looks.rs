//! The metadata of files (size, times, inode), by which changes are detected without reading them.

use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};

use flow_audio::embedded::file_of;
use flow_kind::StageError;
use flow_storage::{FileVersion, Location, Storage, is_url};
use rayon::prelude::*;

use crate::ManifestError;
use crate::manifest_row::Wanted;

/// Rows whose recordings one thread checks.
const SHARE: usize = 512;

/// The version of the file that a path leads to.
///
/// # Errors
/// When the metadata cannot be read.
pub fn version_of(storage: &Storage, path: &Path) -> io::Result<FileVersion> {
    match Location::of_path(path)? {
        Location::Local(path) => std::fs::metadata(path).map(|metadata| FileVersion::of_file(&metadata)),
        Location::Object(url) => match storage.look(&url)? {
            Some(stat) => Ok(FileVersion::of_object(&stat)),
            None => Err(io::ErrorKind::NotFound.into()),
        },
    }
}

/// That of a path that leads to a file; none of what is not a file of this machine or cannot be looked at, and of what is not a URL.
///
/// # Errors
/// When storage does not say whether an object is there: it must not be taken for missing.
fn version_of_file(storage: &Storage, path: &Path) -> Result<Option<FileVersion>, ManifestError> {
    match Location::of_path(path) {
        Ok(Location::Local(path)) => {
            let metadata = std::fs::metadata(path).ok().filter(Metadata::is_file);
            Ok(metadata.map(|metadata| FileVersion::of_file(&metadata)))
        }
        Ok(Location::Object(url)) => match storage.look_at_many(&url) {
            Ok(stat) => Ok(stat.map(|stat| FileVersion::of_object(&stat))),
            Err(error) => Err(ManifestError::Recording(error)),
        },
        Err(_) => Ok(None),
    }
}

/// Checks that a file still has this version.
///
/// # Errors
/// When it has another one: the positions of its rows were read from an older file.
pub fn check_version(storage: &Storage, version: FileVersion, path: &Path) -> Result<(), StageError> {
    match version_of(storage, path) {
        Ok(now) if now == version => Ok(()),
        _ => Err(
            StageError::failed(format!("{} was changed while the run was going on", path.display()))
                .with_help("wait until it is written, then run again"),
        ),
    }
}

/// Where the recording of a row was found (index in the list of candidates; the tar is the last), and the metadata of
/// that file; none where it was not found.
pub type Look = Option<(usize, FileVersion)>;

/// The metadata of the recordings of rows, read by several threads.
///
/// # Errors
/// When storage does not say whether an object is there.
pub fn looks_of(storage: &Storage, wanted: &[Wanted]) -> Result<Vec<Look>, ManifestError> {
    let share = |wanted: &[Wanted]| {
        let mut eyes = Eyes::default();
        let looks = wanted.iter().map(|wanted| eyes.look(storage, wanted));
        looks.collect::<Vec<Result<Look, ManifestError>>>()
    };
    wanted.par_chunks(SHARE).flat_map_iter(share).collect()
}

/// Checks recordings one after the other, with caches, since consecutive rows often share a folder, a tar or a
/// recording.
#[derive(Default)]
pub struct Eyes {
    folder: Option<(PathBuf, bool)>,
    file: Option<(PathBuf, Option<FileVersion>)>,
    tar: Option<(PathBuf, Option<FileVersion>)>,
}

impl Eyes {
    /// In the order in which recordings are looked for.
    ///
    /// # Errors
    /// When storage does not say whether an object is there.
    pub fn look(&mut self, storage: &Storage, wanted: &Wanted) -> Result<Look, ManifestError> {
        for (place, file) in wanted.files.iter().enumerate() {
            // Of a recording within another file that one.
            let file = file_of(file);
            if self.folder_is_there(file)
                && let Some(look) = remembered(storage, &mut self.file, file)?
            {
                return Ok(Some((place, look)));
            }
        }
        let Some((tar, _)) = wanted.member.as_ref() else {
            return Ok(None);
        };
        Ok(remembered(storage, &mut self.tar, tar)?.map(|look| (wanted.files.len(), look)))
    }

    fn folder_is_there(&mut self, file: &Path) -> bool {
        if is_url(file) {
            return true;
        }
        // The current directory is there.
        let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
            return true;
        };
        match &self.folder {
            Some((known, there)) if known == folder => *there,
            _ => {
                let there = folder.is_dir();
                self.folder = Some((folder.to_path_buf(), there));
                there
            }
        }
    }
}

fn remembered(
    storage: &Storage,
    last: &mut Option<(PathBuf, Option<FileVersion>)>,
    path: &Path,
) -> Result<Option<FileVersion>, ManifestError> {
    match last {
        Some((known, look)) if known == path => Ok(*look),
        _ => {
            // Links are followed: folders of recordings are often made of them.
            let look = version_of_file(storage, path)?;
            *last = Some((path.to_path_buf(), look));
            Ok(look)
        }
    }
}

/// The looks of a sequence of recordings, as one digest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chain([u8; 32]);

impl Chain {
    pub fn add(&mut self, look: &Look) {
        let mut bytes = [0; 72];
        bytes[..32].copy_from_slice(&self.0);
        if let Some((place, file)) = look {
            bytes[32..40].copy_from_slice(&(*place as u64 + 1).to_le_bytes());
            bytes[40..48].copy_from_slice(&file.size.to_le_bytes());
            bytes[48..64].copy_from_slice(&i128::from(file.mtime_ns).to_le_bytes());
            match file.tag {
                Some(tag) => bytes[64..72].copy_from_slice(&tag[..8]),
                None => bytes[64..72].copy_from_slice(&file.inode.to_le_bytes()),
            }
        }
        self.0 = *blake3::hash(&bytes).as_bytes();
    }

    /// Appends the recordings of another sequence.
    pub fn join(&mut self, other: Chain) {
        let mut bytes = [0; 64];
        bytes[..32].copy_from_slice(&self.0);
        bytes[32..].copy_from_slice(&other.0);
        self.0 = *blake3::hash(&bytes).as_bytes();
    }

    pub fn to_hex(self) -> String {
        blake3::Hash::from(self.0).to_hex().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(wanted: &[Wanted]) -> Chain {
        let mut chain = Chain::default();
        looks_of(&Storage::default(), wanted)
            .unwrap()
            .iter()
            .for_each(|look| chain.add(look));
        chain
    }

    #[test]
    fn whatever_happens_to_a_recording_shows() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let wanted: Vec<Wanted> = (0..2_000)
            .map(|number| Wanted {
                files: vec![at("none/x.flac"), at(&format!("{number}.flac"))],
                member: Some((at("a.tar"), "x".into())),
            })
            .collect();
        let nothing = chain(&wanted);
        std::fs::write(at("a.tar"), b"tar").unwrap();
        let in_tar = chain(&wanted);
        std::fs::write(at("1234.flac"), b"one").unwrap();
        let extracted = chain(&wanted);
        assert_eq!(chain(&wanted), extracted);
        let old = std::fs::metadata(at("1234.flac")).unwrap().modified().unwrap();
        std::fs::write(at("other"), b"two").unwrap();
        let set_time = |name: &str| {
            let file = std::fs::File::options().write(true).open(at(name)).unwrap();
            file.set_modified(old).unwrap();
        };
        set_time("other");
        // Same size and time, another inode.
        std::fs::rename(at("other"), at("1234.flac")).unwrap();
        let replaced = chain(&wanted);
        std::fs::create_dir(at("none")).unwrap();
        std::fs::write(at("none/x.flac"), b"").unwrap();
        let all_at_one_place = chain(&wanted);
        let all = [nothing, in_tar, extracted, replaced, all_at_one_place];
        for (number, one) in all.iter().enumerate() {
            assert!(!all[..number].contains(one), "{number}");
        }
    }
}
