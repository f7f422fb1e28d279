//! Writes recordings into a folder, and never outside it.
//!
//! Every folder on the way is opened without following links, and the file is renamed into place within the
//! folder that was opened. So neither a member's name nor a planted link leads outside.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use flow_kind::store::create_temporary_file;
use flow_storage::InputFile;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use flow_audio::decode::read_open_range;
use flow_audio::error::AudioError;

const PIECE: usize = 1 << 20;
/// Of a recording in object storage that has more bytes, so many are asked for at once.
const LARGE: u64 = 8 << 20;

/// A folder that receives recordings.
pub struct Target {
    path: PathBuf,
    root: OwnedFd,
    /// Folders below the root that are open already, by name relative to it.
    folders: Mutex<HashMap<String, std::sync::Arc<OwnedFd>>>,
}

/// The bytes that a recording is copied from.
#[derive(Clone, Copy)]
pub struct Range<'a> {
    pub file: &'a InputFile,
    /// For messages.
    pub path: &'a Path,
    pub offset: u64,
    pub size: u64,
}

/// The content of a file to be written.
#[derive(Clone, Copy)]
pub enum Content<'a> {
    Copy(Range<'a>),
    Bytes(&'a [u8]),
}

impl Content<'_> {
    fn size(&self) -> u64 {
        match self {
            Content::Copy(range) => range.size,
            Content::Bytes(bytes) => bytes.len() as u64,
        }
    }

    /// Gives the bytes piece by piece until `take` returns false.
    pub(crate) fn each_piece(&self, mut take: impl FnMut(&[u8]) -> Result<bool, AudioError>) -> Result<(), AudioError> {
        match self {
            Content::Copy(range) => each_piece(*range, take),
            Content::Bytes(bytes) => bytes
                .chunks(PIECE)
                .try_fold(true, |go_on, piece| if go_on { take(piece) } else { Ok(false) })
                .map(|_| ()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    Written,
    /// The same bytes were there.
    Standing,
}

impl Target {
    /// Opens the folder; makes it if there is none. The folder itself may be reached through links.
    pub fn open(path: &Path) -> Result<Self, AudioError> {
        let failed = |source| AudioError::write(path, source);
        std::fs::create_dir_all(path).map_err(failed)?;
        let root = rustix::fs::open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| failed(errno.into()))?;
        Ok(Target {
            path: path.to_owned(),
            root,
            folders: Mutex::default(),
        })
    }

    /// Writes the file of that name (plain components, no `..`), unless the same bytes are there
    /// already. The file appears whole or not at all.
    pub fn place(&self, components: &[&str], content: Content<'_>) -> Result<Placed, AudioError> {
        let Some((name, folders)) = components.split_last() else {
            return Err(AudioError::unsafe_path(&self.path, "it has no name"));
        };
        let folder = self.folder(folders)?;
        let path = self.path.join(components.join("/"));
        if self.stands(&folder, name, &path, content)? {
            return Ok(Placed::Standing);
        }
        let (temporary, mut file) = create_temporary_file(&*folder, path.parent().unwrap_or(&self.path))
            .map_err(|source| AudioError::write(&path, source))?;
        let written = write(content, &mut file, &path).and_then(|()| {
            rustix::fs::renameat(&*folder, &temporary, &*folder, *name).map_err(|errno| judged(&path, errno))
        });
        if written.is_err() {
            // The first error is reported.
            let _ = rustix::fs::unlinkat(&*folder, &temporary, AtFlags::empty());
        }
        written.map(|()| Placed::Written)
    }

    /// Flushes the written files to the disk.
    pub fn sync(&self) -> Result<(), AudioError> {
        let failed = |errno: Errno| AudioError::write(&self.path, errno.into());
        rustix::fs::syncfs(&self.root).map_err(failed)
    }

    fn folder(&self, components: &[&str]) -> Result<std::sync::Arc<OwnedFd>, AudioError> {
        let key = components.join("/");
        let mut open = self.folders.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(folder) = open.get(&key) {
            return Ok(folder.clone());
        }
        let mut path = self.path.clone();
        let mut folder = rustix::io::dup(&self.root).map_err(|errno| judged(&path, errno))?;
        for component in components {
            path.push(component);
            match rustix::fs::mkdirat(&folder, *component, Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(judged(&path, errno)),
            }
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            folder =
                rustix::fs::openat(&folder, *component, flags, Mode::empty()).map_err(|errno| judged(&path, errno))?;
        }
        // A shard has one folder or a few; more would keep too many descriptors open.
        if open.len() >= 64 {
            open.clear();
        }
        let folder = std::sync::Arc::new(folder);
        open.insert(key, folder.clone());
        Ok(folder)
    }

    /// The bytes of a plain file, no larger than one recording may be; none if there is none. Makes no folder.
    pub fn read(&self, components: &[&str]) -> Result<Option<Vec<u8>>, AudioError> {
        let path = self.path.join(components.join("/"));
        let Some((name, folders)) = components.split_last() else {
            return Ok(None);
        };
        let mut folder = rustix::io::dup(&self.root).map_err(|errno| judged(&path, errno))?;
        for component in folders {
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            folder = match rustix::fs::openat(&folder, *component, flags, Mode::empty()) {
                Ok(folder) => folder,
                Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => return Ok(None),
                Err(errno) => return Err(judged(&path, errno)),
            };
        }
        let Some((file, size)) = open_plain(&folder, name, &path)? else {
            return Ok(None);
        };
        read_open_range(&file.into(), &path, 0, size).map(Some)
    }

    /// Whether a plain file with the same bytes is there.
    fn stands(&self, folder: &OwnedFd, name: &str, path: &Path, content: Content<'_>) -> Result<bool, AudioError> {
        let Some((mut standing, size)) = open_plain(folder, name, path)? else {
            return Ok(false);
        };
        if size != content.size() {
            return Ok(false);
        }
        let mut same = true;
        let mut there = Vec::new();
        content.each_piece(|piece| {
            there.resize(piece.len(), 0);
            same = same && standing.read_exact(&mut there).is_ok() && there == piece;
            Ok(same)
        })?;
        Ok(same)
    }
}

/// Opens a plain file, without following a link, and gives its size. None if something else or nothing is there.
fn open_plain(folder: &OwnedFd, name: &str, path: &Path) -> Result<Option<(File, u64)>, AudioError> {
    // Without O_NONBLOCK, a FIFO would wait for a writer for ever.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(folder, name, flags, Mode::empty()) {
        Ok(file) => file,
        // A link (ELOOP) is replaced by the file, not followed; so is a file that cannot be read.
        Err(Errno::NOENT | Errno::LOOP | Errno::ACCESS | Errno::NXIO) => return Ok(None),
        Err(errno) => return Err(judged(path, errno)),
    };
    let stat = rustix::fs::fstat(&file).map_err(|errno| judged(path, errno))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Err(AudioError::unsafe_path(path, "a folder is there")),
        FileType::RegularFile => Ok(u64::try_from(stat.st_size).ok().map(|size| (File::from(file), size))),
        _ => Ok(None),
    }
}

fn write(content: Content<'_>, into: &mut File, path: &Path) -> Result<(), AudioError> {
    content.each_piece(|piece| {
        into.write_all(piece)
            .map(|()| true)
            .map_err(|source| AudioError::write(path, source))
    })
}

/// Gives the bytes of a range piece by piece until `take` returns false.
fn each_piece(from: Range<'_>, mut take: impl FnMut(&[u8]) -> Result<bool, AudioError>) -> Result<(), AudioError> {
    if from.size > LARGE && matches!(from.file, InputFile::Object(_)) {
        return each_piece_of_object(from, take);
    }
    let mut buffer = vec![0u8; PIECE.min(from.size as usize)];
    let mut done = 0;
    while done < from.size {
        let length = buffer.len().min((from.size - done) as usize);
        let piece = &mut buffer[..length];
        from.file.read_exact_at(piece, from.offset + done).map_err(|source| {
            if source.kind() == std::io::ErrorKind::UnexpectedEof {
                let (path, offset, size) = (from.path.to_owned(), from.offset, from.size);
                return AudioError::PastEnd { path, offset, size };
            }
            AudioError::read(from.path, source)
        })?;
        if !take(piece)? {
            break;
        }
        done += length as u64;
    }
    Ok(())
}

/// The same of a large recording in an object: in large ranges, of which the next one is asked for while one is used.
fn each_piece_of_object(
    from: Range<'_>,
    mut take: impl FnMut(&[u8]) -> Result<bool, AudioError>,
) -> Result<(), AudioError> {
    let failed = |source| AudioError::read(from.path, source);
    let length = from.file.length().map_err(failed)?;
    let Some(end) = from.offset.checked_add(from.size).filter(|end| *end <= length) else {
        let (path, offset, size) = (from.path.to_owned(), from.offset, from.size);
        return Err(AudioError::PastEnd { path, offset, size });
    };
    let mut at = from.offset;
    let mut ask = || {
        let range = at..at.saturating_add(LARGE).min(end);
        at = range.end;
        match range.is_empty() {
            true => Ok(None),
            false => from.file.ask_for(range).map_err(failed),
        }
    };
    let mut next = ask()?;
    while let Some(asked) = next {
        next = ask()?;
        let bytes = asked.bytes().map_err(|error| failed(error.into()))?;
        for piece in bytes.chunks(PIECE) {
            if !take(piece)? {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Distinguishes errors of this name from errors that would affect the next one too.
fn judged(path: &Path, errno: Errno) -> AudioError {
    let why = match errno {
        Errno::LOOP | Errno::NOTDIR => "a link or a file is where a folder is needed",
        Errno::ISDIR => "a folder is there",
        Errno::NAMETOOLONG => "the name is too long for the file system",
        Errno::INVAL | Errno::ILSEQ => "the file system does not take the name",
        _ => {
            return AudioError::write(path, errno.into());
        }
    };
    AudioError::unsafe_path(path, why)
}

#[cfg(test)]
#[path = "place_tests.rs"]
mod tests;
