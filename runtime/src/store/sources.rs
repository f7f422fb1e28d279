//! Digests of source files, with a note of size, time and inode that spares reading a file again.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::StoreError;
use super::atomic::{self, Files};
use super::read_back;
use super::removed;
use crate::digest::Digest;
use crate::kind::FileRange;

/// Version of `sources.json`.
const SOURCES_VERSION: u64 = 1;

/// A file changed this recently is not noted: a further change within the same tick of the file system's
/// clock would not show.
const SETTLED: Duration = Duration::from_secs(2);

/// Digests of files outside the store. Cheap to clone; clones share what they know.
///
/// A note is a shortcut and no more: without it, or if size, modification time or inode differ from it, the
/// file is read again. Digests say nothing of paths and times.
#[derive(Clone, Default)]
pub struct SourceDigests {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    notes: Mutex<BTreeMap<String, Note>>,
    changed: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    size: u64,
    mtime_ns: i64,
    inode: u64,
    digest: Digest,
}

impl Note {
    fn of(metadata: &Metadata, digest: Digest) -> Self {
        let mtime_ns = metadata
            .mtime()
            .saturating_mul(1_000_000_000)
            .saturating_add(metadata.mtime_nsec());
        Note {
            size: metadata.len(),
            mtime_ns,
            inode: metadata.ino(),
            digest,
        }
    }

    fn fits(&self, metadata: &Metadata) -> bool {
        *self == Note::of(metadata, self.digest)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u64,
    files: BTreeMap<String, Note>,
}

impl read_back::Versioned for Stored {
    fn version(&self) -> u64 {
        self.version
    }
}

impl SourceDigests {
    /// The digest that stands for a file that is not there. (No file has it: it is not a digest of bytes alone.)
    pub fn absent() -> Digest {
        Digest::of_parts([b"flow: absent file".as_slice(), b""])
    }

    /// What a file counts as that is not there: as it was, if it was deleted by [`super::remove_source`].
    fn of_absent(path: &Path) -> Result<Digest, StoreError> {
        Ok(removed::digest(path)?.unwrap_or_else(Self::absent))
    }

    pub(super) fn load(path: &Path) -> Result<Self, StoreError> {
        let notes = match atomic::read(path)? {
            None => BTreeMap::new(),
            Some(bytes) => match read_back::from_json::<Stored>(path, &bytes, SOURCES_VERSION) {
                Ok(stored) => stored.files,
                // Lost notes cost time, not truth.
                Err(StoreError::Damaged { .. }) => BTreeMap::new(),
                Err(error) => return Err(error),
            },
        };
        Ok(SourceDigests {
            shared: Arc::new(Shared {
                notes: Mutex::new(notes),
                changed: AtomicBool::new(false),
            }),
        })
    }

    pub(super) fn save(&self, files: &Files, path: &Path) -> Result<(), StoreError> {
        if !self.shared.changed.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let stored = Stored {
            version: SOURCES_VERSION,
            files: self.notes().clone(),
        };
        files.replace(path, &read_back::to_json(path, &stored)?)
    }

    /// The digest of a file's bytes if it is known without reading the file; [`SourceDigests::absent`] if the
    /// file is not there; none if it would have to be read.
    ///
    /// # Errors
    /// If the file cannot be looked at, or is no file.
    pub fn known(&self, path: &Path) -> Result<Option<Digest>, StoreError> {
        let Some(metadata) = look(path)? else {
            return Self::of_absent(path).map(Some);
        };
        Ok(self.noted(path, &metadata))
    }

    /// The digest of a file's bytes, read if need be; [`SourceDigests::absent`] if it is not there.
    ///
    /// # Errors
    /// If the file cannot be read, is no file (a folder, a pipe), or changes while it is read.
    pub fn digest(&self, path: &Path) -> Result<Digest, StoreError> {
        // A file that somebody is just replacing gets a second chance.
        for _ in 0..2 {
            let Some(before) = look(path)? else {
                return Self::of_absent(path);
            };
            if let Some(digest) = self.noted(path, &before) {
                return Ok(digest);
            }
            let digest = match read_digest(path) {
                Ok(digest) => digest,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(StoreError::io("read", path, e)),
            };
            let Some(after) = look(path)? else { continue };
            let note = Note::of(&after, digest);
            if !note.fits(&before) {
                continue;
            }
            if let (true, Some(name)) = (has_settled(&after), name_of(path)) {
                self.notes().insert(name, note);
                self.shared.changed.store(true, Ordering::Release);
            }
            return Ok(digest);
        }
        let changing = io::Error::other("it changes while it is read; wait until it is written");
        Err(StoreError::io("digest", path, changing))
    }

    /// The digests of many files, read by up to `threads` threads, in the order of `paths`.
    pub fn digest_all(&self, paths: &[PathBuf], threads: usize) -> Vec<Result<Digest, StoreError>> {
        let next = AtomicUsize::new(0);
        let take = || {
            let mut done = Vec::new();
            while let Some((at, path)) =
                Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, paths.get(at)?)))
            {
                done.push((at, self.digest(path)));
            }
            done
        };
        let mut all = std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..threads.clamp(1, paths.len().max(1)))
                .map(|_| scope.spawn(take))
                .collect();
            let mut all = take();
            for helper in helpers {
                match helper.join() {
                    Ok(done) => all.extend(done),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            all
        });
        all.sort_by_key(|(at, _)| *at);
        all.into_iter().map(|(_, digest)| digest).collect()
    }

    /// The digests of parts of files, read by up to `threads` threads, in the order of `ranges`. Noted as files are: by
    /// size, time and inode of the file that a part is in.
    pub fn digest_ranges(&self, ranges: &[FileRange], threads: usize) -> Vec<Result<Digest, StoreError>> {
        let share = ranges.len().div_ceil(threads.max(1)).max(1);
        std::thread::scope(|scope| {
            let all = |ranges: &[FileRange]| ranges.iter().map(|range| self.digest_range(range)).collect::<Vec<_>>();
            let mut shares = ranges.chunks(share);
            let own = shares.next();
            let helpers: Vec<_> = shares.map(|share| scope.spawn(move || all(share))).collect();
            let mut digests = own.map(all).unwrap_or_default();
            for helper in helpers {
                match helper.join() {
                    Ok(done) => digests.extend(done),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            digests
        })
    }

    /// The digest of the bytes of a file in a range, as far as the file goes; [`SourceDigests::absent`] if it is not there.
    fn digest_range(&self, range: &FileRange) -> Result<Digest, StoreError> {
        let FileRange { path, offset, size } = range;
        let name = name_of(path).map(|name| format!("{name}@{offset}+{size}"));
        for _ in 0..2 {
            let Some(before) = look(path)? else {
                return Ok(Self::absent());
            };
            let noted = name.as_ref().and_then(|name| self.notes().get(name).copied());
            if let Some(note) = noted.filter(|note| note.fits(&before)) {
                return Ok(note.digest);
            }
            let digest = match read_range_digest(range) {
                Ok(digest) => digest,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(StoreError::io("read", path, e)),
            };
            let Some(after) = look(path)? else { continue };
            let note = Note::of(&after, digest);
            if !note.fits(&before) {
                continue;
            }
            if let (true, Some(name)) = (has_settled(&after), &name) {
                self.notes().insert(name.clone(), note);
                self.shared.changed.store(true, Ordering::Release);
            }
            return Ok(digest);
        }
        let changing = io::Error::other("it changes while it is read; wait until it is written");
        Err(StoreError::io("digest", path, changing))
    }

    fn noted(&self, path: &Path, metadata: &Metadata) -> Option<Digest> {
        let notes = self.notes();
        notes
            .get(&name_of(path)?)
            .filter(|note| note.fits(metadata))
            .map(|note| note.digest)
    }

    fn notes(&self) -> MutexGuard<'_, BTreeMap<String, Note>> {
        self.shared.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a further change would show.
fn has_settled(metadata: &Metadata) -> bool {
    let age = |at| SystemTime::now().duration_since(at).ok();
    metadata.modified().ok().and_then(age).is_some_and(|age| age >= SETTLED)
}

/// What the file system says of a file; none if it is not there.
fn look(path: &Path) -> Result<Option<Metadata>, StoreError> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(Some(metadata)),
        // Opening a pipe would wait for ever.
        Ok(_) => Err(StoreError::io("read", path, io::Error::other("it is not a file"))),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(StoreError::io("look at", path, e)),
    }
}

/// The name under which a file is noted; none for paths that are not Unicode, which are read each time.
fn name_of(path: &Path) -> Option<String> {
    std::path::absolute(path).ok()?.into_os_string().into_string().ok()
}

pub(super) fn read_digest(path: &Path) -> io::Result<Digest> {
    digest_to_end(File::open(path)?)
}

fn read_range_digest(range: &FileRange) -> io::Result<Digest> {
    let mut file = File::open(&range.path)?;
    file.seek(SeekFrom::Start(range.offset))?;
    digest_to_end(file.take(range.size))
}

fn digest_to_end(mut file: impl Read) -> io::Result<Digest> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Digest::from_bytes(*hasher.finalize().as_bytes())),
            Ok(read) => {
                hasher.update(&buffer[..read]);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn age(path: &Path, seconds: u64) {
        let then = SystemTime::now() - Duration::from_secs(seconds);
        File::options()
            .write(true)
            .open(path)
            .unwrap()
            .set_modified(then)
            .unwrap();
    }

    #[test]
    fn a_note_is_trusted_until_size_time_or_inode_differ() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let stored = folder.path().join("sources.json");
        std::fs::write(&path, b"first").unwrap();
        age(&path, 100);
        let digests = SourceDigests::default();
        assert_eq!(digests.known(&path).unwrap(), None);
        assert_eq!(digests.digest(&path).unwrap(), Digest::of(b"first"));
        assert_eq!(digests.known(&path).unwrap(), Some(Digest::of(b"first")));
        digests.save(&Files::default(), &stored).unwrap();

        // Same size, same time: the shortcut believes the note, which shows that the file is not read.
        let loaded = SourceDigests::load(&stored).unwrap();
        let time = std::fs::metadata(&path).unwrap().modified().unwrap();
        std::fs::write(&path, b"other").unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(time)
            .unwrap();
        assert_eq!(loaded.digest(&path).unwrap(), Digest::of(b"first"));
        // Another time, another size, another inode: read again.
        age(&path, 50);
        assert_eq!(loaded.digest(&path).unwrap(), Digest::of(b"other"));
        std::fs::write(&path, b"longer").unwrap();
        assert_eq!(loaded.digest(&path).unwrap(), Digest::of(b"longer"));
        let beside = folder.path().join("b");
        std::fs::write(&beside, b"longEr").unwrap();
        File::options()
            .write(true)
            .open(&beside)
            .unwrap()
            .set_modified(time)
            .unwrap();
        std::fs::rename(&beside, &path).unwrap();
        assert_eq!(loaded.digest(&path).unwrap(), Digest::of(b"longEr"));
    }

    #[test]
    fn a_range_is_read_again_only_where_its_file_moved() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tar");
        std::fs::write(&path, b"0123456789").unwrap();
        age(&path, 100);
        let time = std::fs::metadata(&path).unwrap().modified().unwrap();
        let range = |offset, size| FileRange {
            path: path.clone(),
            offset,
            size,
        };
        let wanted = [range(2, 3), range(8, 5), range(20, 1)];
        let digests = SourceDigests::default();
        let of = |ranges: &[FileRange]| -> Vec<Digest> {
            let found = digests.digest_ranges(ranges, 2).into_iter();
            found.collect::<Result<_, _>>().unwrap()
        };
        let bytes = [b"234".as_slice(), b"89", b""].map(Digest::of);
        assert_eq!(of(&wanted), bytes);
        assert_eq!(digests.known(&path).unwrap(), None, "the file as a whole was not read");
        // Same size, same time, same inode: the notes are believed, which shows that nothing is read.
        std::fs::write(&path, b"abcdefghij").unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(time)
            .unwrap();
        assert_eq!(of(&wanted), bytes);
        age(&path, 50);
        assert_eq!(of(&wanted[..1]), [Digest::of(b"cde")]);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(of(&wanted[..1]), [SourceDigests::absent()]);
    }

    #[test]
    fn a_file_changed_just_now_is_not_noted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, b"1").unwrap();
        let digests = SourceDigests::default();
        digests.digest(&path).unwrap();
        assert_eq!(digests.known(&path).unwrap(), None);
    }

    #[test]
    fn absent_files_have_a_digest_and_folders_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let digests = SourceDigests::default();
        let missing = folder.path().join("none/at/all");
        assert_eq!(digests.digest(&missing).unwrap(), SourceDigests::absent());
        assert_ne!(SourceDigests::absent(), Digest::of(b""));
        let error = digests.digest(folder.path()).unwrap_err().to_string();
        assert!(error.contains("not a file"), "{error}");
        let paths: Vec<PathBuf> = (0..50)
            .map(|i| {
                let path = folder.path().join(i.to_string());
                std::fs::write(&path, i.to_string()).unwrap();
                path
            })
            .collect();
        let all: Vec<Digest> = digests.digest_all(&paths, 4).into_iter().map(Result::unwrap).collect();
        assert_eq!(
            all,
            (0..50)
                .map(|i| Digest::of(i.to_string().as_bytes()))
                .collect::<Vec<_>>()
        );
        assert!(digests.digest_all(&[], 4).is_empty());
    }

    #[test]
    fn damaged_notes_are_forgotten_and_newer_ones_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sources.json");
        std::fs::write(&path, b"{\"version\":1,\"files\":{\"/a\":{\"si").unwrap();
        assert!(SourceDigests::load(&path).unwrap().notes().is_empty());
        std::fs::write(&path, b"{\"version\":2,\"places\":[]}").unwrap();
        assert!(matches!(
            SourceDigests::load(&path),
            Err(StoreError::Newer { found: 2, .. })
        ));
    }
}
