//! Temporary files in folders of the user. Whoever writes one holds a lock on it, which ends with the process: the next who
//! writes into the folder removes those that nobody holds. Their names are of no other program.

use std::collections::HashSet;
use std::fs::{File, Metadata, Permissions, TryLockError};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;

use super::lock::{is_of_one_machine, new_token};

/// How their names begin; a token follows.
pub const TEMPORARY_PREFIX: &str = ".flow-tmp-";
const TOKEN: usize = 16;

/// On file systems that machines share, the lock of another machine may not be seen. A file that nobody has written for so
/// long was left by a process that is no more.
const LEFT: Duration = Duration::from_secs(24 * 3600);

/// Folders that this process has cleaned up, by device and inode.
static CLEANED: LazyLock<Mutex<HashSet<(u64, u64)>>> = LazyLock::new(Mutex::default);
/// Most folders that are remembered.
const MOST_CLEANED: usize = 1 << 16;

/// Opens a folder for [`create_temporary_file`].
pub(super) fn open_folder(folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(folder, flags, Mode::empty())?)
}

/// Makes a file in a folder that is open, and gives its name there. It is to be renamed, or removed, before the [`File`] is
/// dropped. `path` is the folder's. What processes that are no more left there is removed, the first time in a process.
///
/// # Errors
/// When no file can be made.
pub fn create_temporary_file(folder: impl AsFd, path: &Path) -> io::Result<(String, File)> {
    clean_up_once(&folder, path);
    loop {
        let name = format!("{TEMPORARY_PREFIX}{}", new_token());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&folder, &name, flags, Mode::from_raw_mode(0o666)) {
            Ok(file) => File::from(file),
            Err(Errno::EXIST) => continue,
            Err(errno) => return Err(errno.into()),
        };
        // Without locks the file counts as left after a day.
        let _ = file.lock();
        // Another process may have found it before it was locked.
        if file.metadata()?.nlink() > 0 {
            return Ok((name, file));
        }
    }
}

/// Gives a file that is to take the place of `path` the permissions of what is there, if that is a regular file.
///
/// # Errors
/// When they cannot be set.
pub(super) fn keep_permissions(file: &File, path: &Path) -> io::Result<()> {
    let Ok(before) = std::fs::symlink_metadata(path) else {
        return Ok(());
    };
    let permissions = |about: &Metadata| about.mode() & 0o777;
    if before.is_file() && permissions(&before) != permissions(&file.metadata()?) {
        file.set_permissions(Permissions::from_mode(permissions(&before)))?;
    }
    Ok(())
}

fn clean_up_once(folder: impl AsFd, path: &Path) {
    let Ok(about) = rustix::fs::fstat(&folder) else { return };
    {
        let mut cleaned = CLEANED.lock().unwrap_or_else(PoisonError::into_inner);
        if cleaned.len() >= MOST_CLEANED {
            cleaned.clear();
        }
        if !cleaned.insert((about.st_dev as _, about.st_ino as _)) {
            return;
        }
    }
    // The next process tries again.
    let _ = clean_up(folder, path);
}

/// Removes what processes that are no more left in a folder.
///
/// # Errors
/// When the folder cannot be read.
pub fn remove_left(folder: &Path) -> io::Result<()> {
    clean_up(open_folder(folder)?, folder)
}

/// Removes temporary files of processes that are no more.
fn clean_up(folder: impl AsFd, path: &Path) -> io::Result<()> {
    let locks_decide = is_of_one_machine(path);
    for entry in Dir::read_from(&folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().to_str() else { continue };
        if !is_temporary(name) {
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::openat(&folder, name, flags, Mode::empty()) else {
            continue;
        };
        let file = File::from(file);
        let is_left = match file.try_lock() {
            Ok(()) if locks_decide => true,
            Err(TryLockError::WouldBlock) => false,
            _ => is_old(&file),
        };
        if is_left && file.metadata().is_ok_and(|about| about.is_file()) {
            // One that is another user's, or gone meanwhile, keeps no other one.
            let _ = rustix::fs::unlinkat(&folder, name, AtFlags::empty());
        }
    }
    Ok(())
}

fn is_temporary(name: &str) -> bool {
    let token = name.strip_prefix(TEMPORARY_PREFIX);
    token.is_some_and(|token| token.len() == TOKEN && token.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn is_old(file: &File) -> bool {
    let written = file.metadata().and_then(|about| about.modified());
    let age = written.map(|written| SystemTime::now().duration_since(written).unwrap_or_default());
    age.is_ok_and(|age| age > LEFT)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn names(folder: &Path) -> BTreeSet<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn what_nobody_holds_is_removed_and_what_the_user_has_stays() {
        let dir = tempfile::tempdir().unwrap();
        let folder = open_folder(dir.path()).unwrap();
        let (left, file) = create_temporary_file(&folder, dir.path()).unwrap();
        // As when the process is killed.
        drop(file);
        let (held, file) = create_temporary_file(&folder, dir.path()).unwrap();
        assert!(is_temporary(&left) && is_temporary(&held));
        let mut expected = BTreeSet::from([held]);
        for users in [
            ".flow-tmp-1-2",
            ".flow-tmp-mine",
            ".tmp-1-2",
            ".flow-tmp-0123456789abcdefg",
        ] {
            std::fs::write(dir.path().join(users), "mine").unwrap();
            expected.insert(users.to_owned());
        }
        let a_folder = format!("{TEMPORARY_PREFIX}{}", "0".repeat(TOKEN));
        std::fs::create_dir(dir.path().join(&a_folder)).unwrap();
        expected.insert(a_folder);
        assert!(names(dir.path()).contains(&left));
        clean_up(&folder, dir.path()).unwrap();
        assert_eq!(names(dir.path()), expected);
        drop(file);
    }
}
