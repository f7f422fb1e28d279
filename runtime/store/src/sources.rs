//! Digests of source files, cached by size, times and inode, so that unchanged files are not read again.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use flow_storage::{FileVersion, InputFile, Location, Storage, StorageError, is_url};
use serde::{Deserialize, Serialize};

use super::StoreError;
use super::atomic::{self, Files};
use super::digested_file::DigestedFile;
use super::file_digest::digest_to_end;
use super::tombstone;
use super::versioned_json;
use flow_base::digest::Digest;

/// A part of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRange {
    pub path: PathBuf,
    /// In bytes.
    pub offset: u64,
    /// In bytes.
    pub size: u64,
}

/// Version of `sources.json` and `sources.jsonl`.
const SOURCES_VERSION: u64 = 2;

/// How long before an earlier run must have seen a version whose times are in the future.
const SEEN_BEFORE: Duration = Duration::from_secs(2);

/// Objects that are digested at the same time: their threads wait for answers most of the time.
const OBJECTS_AT_ONCE: usize = 32;

/// All digests, as of the end of the last run.
const FILE: &str = "sources.json";
/// Digests made by the current run, one to a line.
const JOURNAL: &str = "sources.jsonl";

/// Digests of files outside the store. Cheap to clone; clones share what they know.
///
/// A cache: without an entry, or if size, times or inode (of an object: size, ETag or version) differ from it, the file is read
/// again. Digests depend on contents alone.
#[derive(Clone, Default)]
pub struct SourceDigests {
    storage: Storage,
    shared: Arc<SharedNotes>,
}

#[derive(Default)]
struct SharedNotes {
    notes: Mutex<BTreeMap<String, Note>>,
    /// What is in `notes` and not yet in the journal.
    fresh: Mutex<Vec<(String, Note)>>,
    changed: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    size: u64,
    mtime_ns: i64,
    inode: u64,
    /// Changes with every change of the file or its metadata, and cannot be set by programs.
    #[serde(default)]
    ctime_ns: i64,
    /// Of an object: its ETag and version, in place of inode and times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    version: Option<Digest>,
    digest: Digest,
    /// When the file was first seen in this state (seconds since 1970, by this machine's clock), if it may have been
    /// changed just before: such a note is not trusted. If a later reading finds the same state, its note is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seen: Option<u64>,
}

impl Note {
    fn of(state: &FileVersion, digest: Digest) -> Self {
        Note {
            size: state.size,
            mtime_ns: state.mtime_ns,
            inode: state.inode,
            ctime_ns: state.ctime_ns,
            version: state.tag.map(Digest::from_bytes),
            digest,
            seen: None,
        }
    }

    fn fits(&self, state: &FileVersion) -> bool {
        let noted = FileVersion {
            size: self.size,
            mtime_ns: self.mtime_ns,
            inode: self.inode,
            ctime_ns: self.ctime_ns,
            tag: self.version.map(|tag| *tag.as_bytes()),
        };
        noted == *state
    }
}

/// Whether any change from now on gives another version. One whose times never settle has, if an earlier run has seen it.
fn is_settled(state: &FileVersion, known: Option<&Note>, now: SystemTime) -> bool {
    let seen = known
        .filter(|note| note.fits(state))
        .and_then(|note| note.seen)
        .map(|at| SystemTime::UNIX_EPOCH + Duration::from_secs(at));
    let is_old = |at: SystemTime| now.duration_since(at).is_ok_and(|age| age >= SEEN_BEFORE);
    state.is_settled(now) || seen.is_some_and(is_old)
}

/// The note of a file, as one process of a run sends it to another.
#[derive(Clone, Serialize, Deserialize)]
pub struct NotedFile(String, Note);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u64,
    files: BTreeMap<String, Note>,
}

/// The same, to be written.
#[derive(Serialize)]
struct ToStore<'a> {
    version: u64,
    files: &'a BTreeMap<String, Note>,
}

impl versioned_json::Versioned for Stored {
    fn version(&self) -> u64 {
        self.version
    }
}

/// A line of the journal.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct JournalLine {
    version: u64,
    file: String,
    note: Note,
}

impl versioned_json::Versioned for JournalLine {
    fn version(&self) -> u64 {
        self.version
    }
}

impl SourceDigests {
    /// Without notes. Files that are objects are read with `storage`.
    pub fn new(storage: &Storage) -> SourceDigests {
        SourceDigests {
            storage: storage.clone(),
            shared: Arc::default(),
        }
    }

    pub(super) fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The digest that represents a file that is not there. (No file has it: it is not a digest of bytes alone.)
    pub fn absent() -> Digest {
        Digest::of_parts([b"flow: absent file".as_slice(), b""])
    }

    /// The digest that represents a file that is there and cannot be read. No file has it, so that what is computed
    /// without the file is computed again once it can be read.
    pub fn unreadable() -> Digest {
        Digest::of_parts([b"flow: unreadable file".as_slice(), b""])
    }

    /// The digest of a missing file: its former digest if it was deleted by [`super::remove_source`].
    fn of_absent(path: &Path) -> Result<Digest, StoreError> {
        Ok(tombstone::digest(path)?.unwrap_or_else(Self::absent))
    }

    /// Reads the notes of earlier runs in the state directory `dir`.
    pub(super) fn load(storage: &Storage, dir: &Path) -> Result<Self, StoreError> {
        let path = dir.join(FILE);
        let mut notes = match atomic::read(&path)? {
            None => BTreeMap::new(),
            Some(bytes) => match versioned_json::from_json::<Stored>(&path, &bytes, SOURCES_VERSION) {
                Ok(stored) => stored.files,
                // Without notes, files are only read again.
                Err(StoreError::Damaged { .. }) => BTreeMap::new(),
                Err(error) => return Err(error),
            },
        };
        // The journal of a run that was interrupted.
        let path = dir.join(JOURNAL);
        let journal = atomic::read(&path)?;
        for line in journal.iter().flat_map(|bytes| bytes.split(|byte| *byte == b'\n')) {
            match versioned_json::from_json::<JournalLine>(&path, line, SOURCES_VERSION) {
                Ok(line) => {
                    notes.insert(line.file, line.note);
                }
                Err(StoreError::Damaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(SourceDigests {
            storage: storage.clone(),
            shared: Arc::new(SharedNotes {
                notes: Mutex::new(notes),
                fresh: Mutex::default(),
                changed: AtomicBool::new(journal.is_some()),
            }),
        })
    }

    /// Writes all notes, in place of the journal.
    pub(super) fn save(&self, files: &Files, dir: &Path) -> Result<(), StoreError> {
        if !self.shared.changed.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        self.fresh().clear();
        let notes = self.notes();
        let stored = ToStore {
            version: SOURCES_VERSION,
            files: &notes,
        };
        files.replace_with(&dir.join(FILE), |file| versioned_json::write_sealed_json(file, &stored))?;
        drop(notes);
        files.remove(&dir.join(JOURNAL))
    }

    /// Adds to the journal what was noted since it was last called.
    pub(super) fn append(&self, dir: &Path) -> Result<(), StoreError> {
        let mut fresh = self.fresh();
        if fresh.is_empty() {
            return Ok(());
        }
        let path = dir.join(JOURNAL);
        let mut lines = Vec::new();
        for (file, note) in fresh.drain(..) {
            let version = SOURCES_VERSION;
            lines.extend(versioned_json::to_sealed_json(
                &path,
                &JournalLine { version, file, note },
            )?);
        }
        // Not flushed: after a power failure the files are read again.
        File::options()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(&lines))
            .map_err(|e| StoreError::io("write", &path, e))
    }

    /// The notes of files and of ranges of files.
    pub fn noted_files<'a>(
        &self,
        files: impl IntoIterator<Item = &'a PathBuf>,
        ranges: impl IntoIterator<Item = &'a FileRange>,
    ) -> Vec<NotedFile> {
        let notes = self.notes();
        let names = files.into_iter().filter_map(|path| name_of(path));
        let names = names.chain(ranges.into_iter().filter_map(range_name));
        names
            .filter_map(|name| notes.get(&name).copied().map(|note| NotedFile(name, note)))
            .collect()
    }

    /// In a process that follows a run: what was noted since the last call.
    pub fn take_noted(&self) -> Vec<NotedFile> {
        self.fresh()
            .drain(..)
            .map(|(name, note)| NotedFile(name, note))
            .collect()
    }

    /// Takes notes of another process.
    pub fn put_noted(&self, noted: Vec<NotedFile>) {
        if noted.is_empty() {
            return;
        }
        {
            let mut notes = self.notes();
            for NotedFile(name, note) in &noted {
                notes.insert(name.clone(), *note);
            }
        }
        self.fresh()
            .extend(noted.into_iter().map(|NotedFile(name, note)| (name, note)));
        self.shared.changed.store(true, Ordering::Release);
    }

    /// The digest of a file's bytes if it is known without reading the file; [`SourceDigests::absent`] if the
    /// file is not there; none if it would have to be read.
    ///
    /// # Errors
    /// If the file cannot be looked at, or is not a file.
    pub fn known(&self, path: &Path) -> Result<Option<Digest>, StoreError> {
        let Some(state) = look(&self.storage, path)? else {
            return Self::of_absent(path).map(Some);
        };
        Ok(name_of(path).and_then(|name| self.noted(&name, &state)))
    }

    /// The digest of a file's bytes, read if need be; [`SourceDigests::absent`] if it is not there.
    ///
    /// # Errors
    /// If the file cannot be read, is not a file (a folder, a pipe), or changes while it is read.
    pub fn digest(&self, path: &Path) -> Result<Digest, StoreError> {
        match self.digest_if_there(path, name_of(path), || {
            digest_to_end(InputFile::open(&self.storage, path)?)
        })? {
            Some(digest) => Ok(digest),
            None => Self::of_absent(path),
        }
    }

    /// The digest that is noted under `name`, or that `read` gives of the file's bytes; none if the file is not there.
    fn digest_if_there(
        &self,
        path: &Path,
        name: Option<String>,
        read: impl Fn() -> io::Result<Digest>,
    ) -> Result<Option<Digest>, StoreError> {
        // A file that is being replaced at this moment is tried once more.
        for _ in 0..2 {
            let Some(before) = look(&self.storage, path)? else {
                return Ok(None);
            };
            if let Some(digest) = name.as_ref().and_then(|name| self.noted(name, &before)) {
                return Ok(Some(digest));
            }
            let began = SystemTime::now();
            let digest = match read() {
                Ok(digest) => digest,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(StoreError::io("read", path, e)),
            };
            let Some(after) = look(&self.storage, path)? else {
                continue;
            };
            if !Note::of(&after, digest).fits(&before) {
                continue;
            }
            if let Some(name) = name {
                self.note(name, &before, began, digest);
            }
            return Ok(Some(digest));
        }
        let changing = io::Error::other("it changes while it is read; wait until it is written");
        Err(StoreError::io("digest", path, changing))
    }

    /// As [`SourceDigests::digest`], for a file that is optional for the rest: where it cannot be read,
    /// [`SourceDigests::unreadable`] and the reason.
    ///
    /// # Errors
    /// Where the file is not the cause: this process may open no more files, or a newer flow left a note about it.
    pub fn digest_or_why_not(&self, path: &Path) -> Result<(Digest, Option<StoreError>), StoreError> {
        match self.digest(path) {
            Ok(digest) => Ok((digest, None)),
            Err(error) if is_of_the_file(&error) => Ok((Self::unreadable(), Some(error))),
            Err(error) => Err(error),
        }
    }

    /// Removes the note of a file, so that the next request for its digest reads it.
    pub fn forget(&self, path: &Path) {
        if let Some(name) = name_of(path)
            && self.notes().remove(&name).is_some()
        {
            self.shared.changed.store(true, Ordering::Release);
        }
    }

    /// The digests of many files as [`SourceDigests::digest_or_why_not`] gives them, read by up to `threads` threads,
    /// in the order of `paths`.
    pub fn digest_all(&self, paths: &[PathBuf], threads: usize) -> Vec<Result<Digest, StoreError>> {
        let threads = match paths.iter().any(is_url) {
            true => threads.max(OBJECTS_AT_ONCE),
            false => threads,
        };
        on_threads(paths, threads, |path| {
            self.digest_or_why_not(path).map(|(digest, _)| digest)
        })
    }

    /// Finishes a [`DigestedFile`] that a caller has read, and notes its digest, which is returned with the path.
    ///
    /// # Errors
    /// If the rest of the file cannot be read, or it was changed since it was opened.
    pub fn note_read(&self, file: DigestedFile) -> Result<(PathBuf, Digest), StoreError> {
        let (path, state, opened, digest) = file.finish()?;
        if let Some(name) = name_of(&path) {
            self.note(name, &state, opened, digest);
        }
        Ok((path, digest))
    }

    /// Notes the digest of a file that was as `state` says when reading it began, and that was not changed since.
    fn note(&self, name: String, state: &FileVersion, began: SystemTime, digest: Digest) {
        let mut note = Note::of(state, digest);
        let mut notes = self.notes();
        let known = notes.get(&name).copied();
        if !is_settled(state, known.as_ref(), began) {
            let earlier = known.filter(|known| known.fits(state)).and_then(|known| known.seen);
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            note.seen = Some(earlier.unwrap_or(now.map_or(0, |now| now.as_secs() + 1)));
        }
        if known != Some(note) {
            notes.insert(name.clone(), note);
            drop(notes);
            self.fresh().push((name, note));
            self.shared.changed.store(true, Ordering::Release);
        }
    }

    /// The digests of parts of files, read by up to `threads` threads, in the order of `ranges`: [`SourceDigests::absent`]
    /// of a file that is not there, [`SourceDigests::unreadable`] of one that cannot be read. Noted as files are: by size,
    /// times and inode of the file that a part is in.
    pub fn digest_ranges(&self, ranges: &[FileRange], threads: usize) -> Vec<Result<Digest, StoreError>> {
        on_threads(ranges, threads, |range| self.digest_range(range))
    }

    /// The digest of the bytes of a file in a range, as far as the file goes.
    fn digest_range(&self, range: &FileRange) -> Result<Digest, StoreError> {
        match self.digest_if_there(&range.path, range_name(range), || {
            read_range_digest(&self.storage, range)
        }) {
            Ok(digest) => Ok(digest.unwrap_or_else(Self::absent)),
            Err(error) if is_of_the_file(&error) => Ok(Self::unreadable()),
            Err(error) => Err(error),
        }
    }

    fn noted(&self, name: &str, state: &FileVersion) -> Option<Digest> {
        let notes = self.notes();
        notes
            .get(name)
            .filter(|note| note.seen.is_none() && note.fits(state))
            .map(|note| note.digest)
    }

    fn fresh(&self) -> MutexGuard<'_, Vec<(String, Note)>> {
        self.shared.fresh.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notes(&self) -> MutexGuard<'_, BTreeMap<String, Note>> {
        self.shared.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name under which a range of a file is noted.
fn range_name(range: &FileRange) -> Option<String> {
    let FileRange { path, offset, size } = range;
    name_of(path).map(|name| format!("{name}@{offset}+{size}"))
}

/// Calls `work` for each item on up to `threads` threads; the results are in the order of the items.
pub fn on_threads<T: Sync, R: Send>(items: &[T], threads: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let take = || {
        let mut done = Vec::new();
        while let Some((at, item)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, items.get(at)?)))
        {
            done.push((at, work(item)));
        }
        done
    };
    let mut all = std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads.clamp(1, items.len().max(1)))
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
    all.into_iter().map(|(_, done)| done).collect()
}

fn is_of_the_file(error: &StoreError) -> bool {
    match error {
        StoreError::Io { source, .. } => is_fault_of_the_file(source),
        StoreError::Damaged { .. } => true,
        _ => false,
    }
}

/// Whether a file is to blame for an error of reading it, and not this process, which may open no more files or has no
/// memory left, or may not use the bucket: the next file would then fail as well.
pub fn is_fault_of_the_file(error: &io::Error) -> bool {
    if let Some(error) = StorageError::in_io(error) {
        return error.is_of_the_object();
    }
    !matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// What the file system, or object storage, says of a file; none if it is not there.
fn look(storage: &Storage, path: &Path) -> Result<Option<FileVersion>, StoreError> {
    let failed = |error: StorageError| StoreError::io("look at", path, error.into());
    let path = match Location::of_path(path).map_err(failed)? {
        Location::Object(url) => {
            let found = storage.look(&url).map_err(failed)?;
            return Ok(found.as_ref().map(FileVersion::of_object));
        }
        Location::Local(path) => path,
    };
    let path = path.as_path();
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(Some(FileVersion::of_file(&metadata))),
        // Opening a pipe would wait for ever.
        Ok(_) => Err(StoreError::io("read", path, io::Error::other("it is not a file"))),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(StoreError::io("look at", path, e)),
    }
}

/// The name under which a file is noted; none for paths that are not Unicode, which are read each time.
fn name_of(path: &Path) -> Option<String> {
    if let Ok(Location::Object(url)) = Location::of_path(path) {
        return Some(url.to_string());
    }
    std::path::absolute(path).ok()?.into_os_string().into_string().ok()
}

fn read_range_digest(storage: &Storage, range: &FileRange) -> io::Result<Digest> {
    let mut file = InputFile::open(storage, &range.path)?;
    if range.size != u64::MAX {
        // Members of one tar are read one after the other, and again when they are used.
        file = file.in_blocks();
    }
    file.seek(SeekFrom::Start(range.offset))?;
    digest_to_end(file.take(range.size))
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
        std::fs::write(&path, b"first").unwrap();
        age(&path, 100);
        let digests = SourceDigests::default();
        assert_eq!(digests.known(&path).unwrap(), None);
        assert_eq!(digests.digest(&path).unwrap(), Digest::of(b"first"));
        assert_eq!(digests.known(&path).unwrap(), Some(Digest::of(b"first")));
        digests.save(&Files::default(), folder.path()).unwrap();

        // The note is trusted, which shows that the file is not read.
        let loaded = SourceDigests::load(&Storage::default(), folder.path()).unwrap();
        let time = std::fs::metadata(&path).unwrap().modified().unwrap();
        for note in loaded.notes().values_mut() {
            note.digest = Digest::of(b"as noted");
        }
        assert_eq!(loaded.digest(&path).unwrap(), Digest::of(b"as noted"));
        // Same size, time and inode: an unpacking program has set the time back. The clock of a file system ticks every
        // few milliseconds.
        std::thread::sleep(Duration::from_millis(20));
        std::fs::write(&path, b"other").unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(time)
            .unwrap();
        assert_eq!(loaded.digest(&path).unwrap(), Digest::of(b"other"));
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
        // The notes are believed, which shows that nothing is read.
        let noted = Digest::of(b"as noted");
        digests.notes().values_mut().for_each(|note| note.digest = noted);
        assert_eq!(of(&wanted), [noted; 3]);
        // Same size, time and inode: unpacked again. The clock of a file system ticks every few milliseconds.
        std::thread::sleep(Duration::from_millis(20));
        std::fs::write(&path, b"abcdefghij").unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_modified(time).unwrap();
        assert_eq!(of(&wanted[..1]), [Digest::of(b"cde")]);
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
    fn a_time_in_the_future_is_trusted_once_the_file_was_seen_long_enough() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, b"1").unwrap();
        let ahead = SystemTime::now() + Duration::from_secs(86_400);
        let file = File::options().write(true).open(&path).unwrap();
        file.set_modified(ahead).unwrap();
        let digests = SourceDigests::default();
        digests.digest(&path).unwrap();
        assert_eq!(digests.known(&path).unwrap(), None, "just changed");
        // As if it had been seen by a run of ten seconds ago, which the next one reads from the journal.
        digests.append(folder.path()).unwrap();
        let journal = folder.path().join(JOURNAL);
        let seen = digests.notes().values().next().unwrap().seen.unwrap();
        let text = versioned_json::unsealed(&std::fs::read_to_string(&journal).unwrap());
        let older = text.replace(&format!("\"seen\":{seen}"), &format!("\"seen\":{}", seen - 10));
        assert_ne!(older, text);
        std::fs::write(&journal, older).unwrap();
        let next = SourceDigests::load(&Storage::default(), folder.path()).unwrap();
        assert_eq!(next.known(&path).unwrap(), None);
        next.digest(&path).unwrap();
        assert_eq!(next.known(&path).unwrap(), Some(Digest::of(b"1")));
        // A change leaves another time, however far ahead the old one was.
        std::fs::write(&path, b"2").unwrap();
        assert_eq!(next.digest(&path).unwrap(), Digest::of(b"2"));
    }

    #[test]
    fn what_was_noted_survives_a_run_that_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..3).map(|i| folder.path().join(format!("file {i}"))).collect();
        let digests = SourceDigests::default();
        for (i, path) in paths.iter().enumerate() {
            std::fs::write(path, i.to_string()).unwrap();
            age(path, 100);
            digests.digest(path).unwrap();
            digests.append(folder.path()).unwrap();
        }
        // The last line was not written to its end.
        let journal = folder.path().join(JOURNAL);
        let text = std::fs::read(&journal).unwrap();
        std::fs::write(&journal, &text[..text.len() - 9]).unwrap();
        let loaded = SourceDigests::load(&Storage::default(), folder.path()).unwrap();
        let known = |digests: &SourceDigests| -> Vec<bool> {
            let known = paths.iter().map(|path| digests.known(path).unwrap().is_some());
            known.collect()
        };
        assert_eq!(known(&loaded), [true, true, false]);
        // The next run puts all into one file before it notes more.
        loaded.save(&Files::default(), folder.path()).unwrap();
        assert!(!journal.exists());
        loaded.digest(&paths[2]).unwrap();
        loaded.append(folder.path()).unwrap();
        assert_eq!(
            known(&SourceDigests::load(&Storage::default(), folder.path()).unwrap()),
            [true; 3]
        );
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
    fn a_file_that_cannot_be_read_has_a_digest_that_no_file_has_until_it_can() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let digests = SourceDigests::default();
        let path = folder.path().join("a.tar");
        let ways: [(&str, &dyn Fn()); 4] = [
            ("not a file", &|| std::fs::create_dir(&path).unwrap()),
            ("symbolic links", &|| symlink(&path, &path).unwrap()),
            // A regular file by its metadata whose reading gives an I/O error, also for root.
            ("os error 5", &|| symlink("/proc/self/mem", &path).unwrap()),
            ("a.tar.flow-removed", &|| {
                std::fs::create_dir(folder.path().join("a.tar.flow-removed")).unwrap();
            }),
        ];
        for (said, make) in ways {
            make();
            let (digest, why) = digests.digest_or_why_not(&path).unwrap();
            assert_eq!(digest, SourceDigests::unreadable(), "{said}");
            let why = why.unwrap().to_string();
            assert!(why.contains(said) && why.contains("a.tar"), "{why}");
            assert_eq!(
                digests.digest_all(std::slice::from_ref(&path), 2)[0].as_ref().unwrap(),
                &digest
            );
            assert!(digests.notes().is_empty(), "{said}");
            let _ = std::fs::remove_dir(&path);
            let _ = std::fs::remove_file(&path);
        }
        std::fs::remove_dir(folder.path().join("a.tar.flow-removed")).unwrap();
        let distinct = [SourceDigests::absent(), SourceDigests::unreadable(), Digest::of(b"")];
        assert!(distinct[0] != distinct[1] && distinct[1] != distinct[2]);
        std::fs::write(&path, "rows").unwrap();
        age(&path, 100);
        let (digest, why) = digests.digest_or_why_not(&path).unwrap();
        assert!(why.is_none() && digest == Digest::of(b"rows"));
        digests.forget(&path);
        assert_eq!(digests.known(&path).unwrap(), None);
    }

    #[test]
    fn damaged_notes_are_forgotten_and_newer_ones_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sources.json");
        std::fs::write(&path, b"{\"version\":1,\"files\":{\"/a\":{\"si").unwrap();
        assert!(
            SourceDigests::load(&Storage::default(), folder.path())
                .unwrap()
                .notes()
                .is_empty()
        );
        std::fs::write(&path, b"{\"version\":3,\"places\":[]}").unwrap();
        assert!(matches!(
            SourceDigests::load(&Storage::default(), folder.path()),
            Err(StoreError::Newer { found: 3, .. })
        ));
    }
}
