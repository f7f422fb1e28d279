//! What the file system tells of changes below folders (inotify). Events only say when it is worth while to look.
//!
//! Not the `notify` crate: it also asks for the opening of files, so that a run which reads its sources fills the queue of events,
//! and the overflow looks like a change.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

/// When something changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changes {
    pub first: Instant,
    pub latest: Instant,
}

/// Watches folders with all that is below them, and single files.
pub struct FileEvents {
    folders: Vec<PathBuf>,
    files: Vec<PathBuf>,
    queue: OwnedFd,
    watched: HashMap<i32, Watched>,
    changes: Option<Changes>,
    /// A folder came or went, or events are missing: what is below it may be watched no longer.
    is_lost: bool,
}

/// A folder of which events come.
#[derive(Default)]
struct Watched {
    path: PathBuf,
    /// It is one of the folders, or below one: all events count. Of others, those of some names.
    is_below: bool,
    names: Vec<OsString>,
}

/// What changes something; reading does not.
fn flags() -> WatchFlags {
    WatchFlags::ATTRIB
        | WatchFlags::CREATE
        | WatchFlags::MODIFY
        | WatchFlags::CLOSE_WRITE
        | WatchFlags::DELETE
        | WatchFlags::MOVED_FROM
        | WatchFlags::MOVED_TO
        | WatchFlags::ONLYDIR
}

/// Events by which something gets a name, or loses it.
const NAMED: ReadFlags = ReadFlags::CREATE
    .union(ReadFlags::DELETE)
    .union(ReadFlags::MOVED_FROM)
    .union(ReadFlags::MOVED_TO);

impl FileEvents {
    /// Watches all that is below `folders`, and `files`; absolute paths all.
    ///
    /// # Errors
    /// Where the system does not tell of changes there, or of no more (`fs.inotify.max_user_watches`).
    pub fn watch(folders: &[PathBuf], files: &[PathBuf]) -> io::Result<FileEvents> {
        let mut events = FileEvents {
            folders: folders.to_vec(),
            files: files.to_vec(),
            queue: inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?,
            watched: HashMap::new(),
            changes: None,
            is_lost: false,
        };
        for path in folders.iter().chain(files) {
            // A folder that is moved or made again is reported by the one that it is in.
            if let (Some(parent), Some(name)) = (path.parent(), path.file_name()) {
                let parent = events.add(parent)?;
                parent.names.push(name.to_owned());
            }
        }
        for folder in folders {
            events.add_all(folder)?;
        }
        Ok(events)
    }

    fn add(&mut self, folder: &Path) -> io::Result<&mut Watched> {
        let id = inotify::add_watch(&self.queue, folder, flags())?;
        let watched = self.watched.entry(id).or_default();
        watched.path = folder.to_path_buf();
        Ok(watched)
    }

    /// Watches a folder and all below it.
    fn add_all(&mut self, folder: &Path) -> io::Result<()> {
        let mut seen = HashSet::new();
        let below = self.add_one(folder, &mut seen)?;
        self.add_below(below, &mut seen)
    }

    /// Watches folders below one that is watched, and all below them. Those that are gone meanwhile are passed over: an event
    /// of the folder that they were in tells of that.
    fn add_below(&mut self, mut left: Vec<PathBuf>, seen: &mut HashSet<i32>) -> io::Result<()> {
        while let Some(folder) = left.pop() {
            match self.add_one(&folder, seen) {
                Ok(below) => left.extend(below),
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Watches a folder, and gives those in it: none of one that was `seen`, as folders that links lead to more than once.
    fn add_one(&mut self, folder: &Path, seen: &mut HashSet<i32>) -> io::Result<Vec<PathBuf>> {
        let id = inotify::add_watch(&self.queue, folder, flags())?;
        let watched = self.watched.entry(id).or_default();
        watched.is_below = true;
        watched.path = folder.to_path_buf();
        if !seen.insert(id) {
            return Ok(Vec::new());
        }
        let mut below = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                below.push(path);
            }
        }
        Ok(below)
    }

    /// Whether these are watched, and nothing has gone wrong since.
    pub fn are_of(&self, folders: &[PathBuf], files: &[PathBuf]) -> bool {
        self.folders == folders && self.files == files && !self.is_lost
    }

    /// When something changed, since [`FileEvents::forget`]. Times are those at which this was called.
    pub fn changes(&mut self) -> Option<Changes> {
        let mut buffer = vec![MaybeUninit::uninit(); 1 << 16];
        let mut came: Vec<(i32, ReadFlags, OsString)> = Vec::new();
        let mut reader = Reader::new(&self.queue, &mut buffer);
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event
                        .file_name()
                        .map_or(OsStr::new(""), |name| OsStr::from_bytes(name.to_bytes()));
                    came.push((event.wd(), event.events(), name.to_owned()));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => {
                    self.is_lost = true;
                    break;
                }
            }
        }
        let mut is_changed = self.is_lost && self.changes.is_none();
        for (id, event, name) in came {
            is_changed |= self.note(id, event, &name);
        }
        if is_changed {
            let now = Instant::now();
            let first = self.changes.map_or(now, |changes| changes.first);
            self.changes = Some(Changes { first, latest: now });
        }
        self.changes
    }

    /// Forgets the changes: what comes from now on is reported.
    pub fn forget(&mut self) {
        self.changes();
        self.changes = None;
    }

    /// Whether an event is of what is watched.
    fn note(&mut self, id: i32, event: ReadFlags, name: &OsStr) -> bool {
        if event.intersects(ReadFlags::QUEUE_OVERFLOW | ReadFlags::UNMOUNT) {
            self.is_lost = true;
            return true;
        }
        if event.contains(ReadFlags::IGNORED) {
            self.watched.remove(&id);
            return false;
        }
        let Some(watched) = self.watched.get(&id) else {
            return false;
        };
        let is_named = watched.names.iter().any(|own| own == name);
        let (path, is_below) = (watched.path.join(name), watched.is_below);
        if event.intersects(NAMED) && is_named && self.folders.contains(&path) {
            self.is_lost = true;
        }
        let is_new = event.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
        if is_below && is_new && path.is_dir() {
            match self.add_all(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => self.is_lost = true,
                _ => {}
            }
        }
        is_below || is_named
    }
}

/// The file of a pipeline, where it is one.
pub fn pipeline_file(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    path.is_file().then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel queues an event before the call that causes it returns.
    fn is_told(events: &mut FileEvents) -> bool {
        let told = events.changes().is_some();
        events.forget();
        told
    }

    #[test]
    fn changes_below_a_folder_are_told_and_reading_is_none() {
        let place = tempfile::tempdir().unwrap();
        let (folder, file) = (place.path().join("shards"), place.path().join("pipeline.yaml"));
        let index = folder.join("en/en_1/index");
        std::fs::create_dir_all(folder.join("en/en_1")).unwrap();
        std::fs::write(&index, "a").unwrap();
        std::fs::write(&file, "a").unwrap();
        std::os::unix::fs::symlink(&folder, folder.join("en/loop")).unwrap();
        let (folders, files) = ([folder.clone()], [file.clone()]);
        let mut events = FileEvents::watch(&folders, &files).unwrap();
        assert!(events.are_of(&folders, &files) && !events.are_of(&folders, &[]));
        assert!(!is_told(&mut events));

        std::fs::write(place.path().join("other"), "a").unwrap();
        std::fs::read(&index).unwrap();
        std::fs::read_dir(folder.join("en")).unwrap().for_each(drop);
        assert!(!is_told(&mut events), "of another file, or of reading");

        let (one, two) = (folder.join("en/en_2"), folder.join("en/en_3/a/b"));
        std::fs::create_dir(&one).unwrap();
        assert!(is_told(&mut events));
        std::fs::create_dir_all(&two).unwrap();
        assert!(is_told(&mut events));
        for path in [one.join("index"), two.join("index"), index.clone(), file.clone()] {
            std::fs::write(&path, "b").unwrap();
            assert!(is_told(&mut events), "{}", path.display());
        }
        std::fs::rename(folder.join("en/en_3"), folder.join("en/en_4")).unwrap();
        assert!(is_told(&mut events));
        std::fs::create_dir(folder.join("en/en_4/a/c")).unwrap();
        assert!(is_told(&mut events));
        std::fs::write(folder.join("en/en_4/a/c/index"), "c").unwrap();
        assert!(is_told(&mut events), "in a folder that was moved");
        std::fs::remove_file(&index).unwrap();
        assert!(is_told(&mut events));
        assert!(events.are_of(&folders, &files));
    }

    /// As one that a program that fetches shards makes and removes while folders are walked through.
    #[test]
    fn a_folder_that_goes_meanwhile_leaves_the_others_watched() {
        let place = tempfile::tempdir().unwrap();
        let stays = place.path().join("en_1");
        std::fs::create_dir_all(stays.join("a")).unwrap();
        std::fs::write(place.path().join("file"), "").unwrap();
        let mut events = FileEvents::watch(&[], &[]).unwrap();
        let gone = [place.path().join("gone"), place.path().join("file")];
        let below = std::iter::once(stays.clone()).chain(gone).collect();
        events.add_below(below, &mut HashSet::new()).unwrap();
        for path in [stays.join("index"), stays.join("a/index")] {
            std::fs::write(path, "").unwrap();
            assert!(is_told(&mut events));
        }
    }

    #[test]
    fn a_folder_that_was_moved_away_is_lost() {
        let place = tempfile::tempdir().unwrap();
        let folders = [place.path().join("shards")];
        std::fs::create_dir(&folders[0]).unwrap();
        let mut events = FileEvents::watch(&folders, &[]).unwrap();
        std::fs::rename(&folders[0], place.path().join("away")).unwrap();
        assert!(events.changes().is_some() && !events.are_of(&folders, &[]));
        assert!(FileEvents::watch(&folders, &[]).is_err());
        std::fs::rename(place.path().join("away"), &folders[0]).unwrap();
        let mut events = FileEvents::watch(&folders, &[]).unwrap();
        assert!(!is_told(&mut events));
        std::fs::write(folders[0].join("a"), "a").unwrap();
        assert!(is_told(&mut events));
    }

    #[test]
    fn after_lost_events_there_is_a_change() {
        let place = tempfile::tempdir().unwrap();
        let folders = [place.path().to_path_buf()];
        let mut events = FileEvents::watch(&folders, &[]).unwrap();
        assert!(events.note(-1, ReadFlags::QUEUE_OVERFLOW, OsStr::new("")));
        assert!(!events.are_of(&folders, &[]));
        assert!(events.changes().is_some());
    }
}
