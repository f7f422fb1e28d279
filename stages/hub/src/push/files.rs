//! Files that are to be pushed.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::client::MOST_FILES;
use crate::error::HubError;
use crate::reference::is_inside;

/// Folders below the first one.
const MOST_DEPTH: usize = 16;

/// A file as it is to be in a repository.
#[derive(Clone, Debug)]
pub struct NewFile {
    /// In the repository, such as `data/train-00000-of-00001.parquet`.
    pub path: String,
    /// In bytes.
    pub size: u64,
    /// Left out where the repository has a file of this path.
    pub unless_there: bool,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    File(PathBuf),
    Bytes(Vec<u8>),
}

/// The files of a folder and below it, by their paths. Names that begin with a dot and what exports leave for this machine
/// (`flow.json`, `model.flow.json`, and `rejects.parquet` beside them, which has paths) are left out.
///
/// # Errors
/// Where a folder cannot be read, a name cannot be one of a repository, or something is neither a file nor a folder.
pub fn files_below(folder: &Path) -> Result<Vec<NewFile>, HubError> {
    let mut found = Vec::new();
    let mut pending = vec![(folder.to_owned(), String::new(), 0)];
    while let Some((folder, prefix, depth)) = pending.pop() {
        let refused = |path: &Path, why: &str| HubError::Reference {
            message: format!("{} cannot be pushed: {why}", path.display()),
        };
        for entry in std::fs::read_dir(&folder).map_err(HubError::file(&folder))? {
            let path = entry.map_err(HubError::file(&folder))?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
                return Err(refused(&path, "its name is not UTF-8"));
            };
            let is_for_here = name == "rejects.parquet" && path.with_file_name("flow.json").exists();
            if name.starts_with('.') || name == "flow.json" || name.ends_with(".flow.json") || is_for_here {
                continue;
            }
            let inside = format!("{prefix}{name}");
            if !is_inside(&inside) {
                return Err(refused(&path, "its name is not allowed in a repository"));
            }
            let is_link = path.is_symlink();
            let metadata = path.metadata().map_err(HubError::file(&path))?;
            if metadata.is_dir() {
                if is_link || depth >= MOST_DEPTH {
                    return Err(refused(
                        &path,
                        "it is a link to a folder, or there are too many folders in each other",
                    ));
                }
                pending.push((path, format!("{inside}/"), depth + 1));
            } else if metadata.is_file() {
                found.push(NewFile {
                    path: inside,
                    size: metadata.len(),
                    unless_there: false,
                    content: Content::File(path),
                });
            } else {
                return Err(refused(&path, "it is not a regular file"));
            }
            if found.len() > MOST_FILES {
                return Err(refused(&folder, &format!("it has more than {MOST_FILES} files")));
            }
        }
    }
    found.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(found)
}

impl NewFile {
    /// A file with these bytes, which is left out where the repository has one of this path.
    pub fn unless_there(path: &str, bytes: Vec<u8>) -> NewFile {
        NewFile {
            path: path.to_owned(),
            size: bytes.len() as u64,
            unless_there: true,
            content: Content::Bytes(bytes),
        }
    }

    /// Its bytes from `from` on.
    pub(super) fn open(&self, from: u64) -> Result<Box<dyn Read + '_>, HubError> {
        match &self.content {
            Content::Bytes(bytes) => {
                let mut bytes = Cursor::new(bytes);
                bytes.set_position(from);
                Ok(Box::new(bytes))
            }
            Content::File(path) => {
                let opened = File::open(path).and_then(|mut file| {
                    if file.metadata()?.len() != self.size {
                        return Err(io::Error::other("it is being changed"));
                    }
                    file.seek(SeekFrom::Start(from))?;
                    Ok(file)
                });
                Ok(Box::new(opened.map_err(HubError::file(path))?))
            }
        }
    }

    pub(super) fn read(&self, from: u64, size: u64) -> Result<Vec<u8>, HubError> {
        let mut bytes = Vec::new();
        let read = self.open(from)?.take(size).read_to_end(&mut bytes);
        read.map_err(HubError::file(Path::new(&self.path)))?;
        match bytes.len() as u64 == size {
            true => Ok(bytes),
            false => Err(HubError::file(Path::new(&self.path))(
                io::ErrorKind::UnexpectedEof.into(),
            )),
        }
    }

    /// The SHA-256 in hexadecimal digits. `progress` is given the bytes that were read; none where it returns false.
    pub(super) fn sha256(&self, progress: &mut dyn FnMut(u64) -> bool) -> Result<Option<String>, HubError> {
        let mut digest = Sha256::new();
        let whole = self.each_piece(progress, &mut |piece| digest.update(piece))?;
        Ok(whole.then(|| hex::encode(digest.finalize())))
    }

    /// The SHA-1 by which git names it.
    pub(super) fn git_digest(&self) -> Result<String, HubError> {
        let mut digest = Sha1::new_with_prefix(format!("blob {}\0", self.size));
        self.each_piece(&mut |_| true, &mut |piece| digest.update(piece))?;
        Ok(hex::encode(digest.finalize()))
    }

    fn each_piece(&self, progress: &mut dyn FnMut(u64) -> bool, take: &mut dyn FnMut(&[u8])) -> Result<bool, HubError> {
        /// Bytes between two reports.
        const REPORT: u64 = 256 << 20;
        let mut reader = self.open(0)?;
        let mut buffer = vec![0; 1 << 20];
        let (mut done, mut reported) = (0, 0);
        loop {
            let count = reader
                .read(&mut buffer)
                .map_err(HubError::file(Path::new(&self.path)))?;
            if count == 0 {
                return Ok(true);
            }
            take(&buffer[..count]);
            done += count as u64;
            if done - reported >= REPORT {
                reported = done;
                if !progress(done) {
                    return Ok(false);
                }
            }
        }
    }
}

/// The folder and split of a file that is numbered as datasets are: `data/train` of `data/train-00000-of-00003.parquet`.
pub(super) fn numbered(path: &str) -> Option<&str> {
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let (rest, count) = path.strip_suffix(".parquet")?.rsplit_once("-of-")?;
    let (split, number) = rest.rsplit_once('-')?;
    (is_number(count) && is_number(number)).then_some(split)
}
