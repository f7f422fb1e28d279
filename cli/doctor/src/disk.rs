//! Checks free space and speed of the folders that runs write to.

use std::ffi::CString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use flow_storage::{Storage, is_url};
use flow_store::Store;
use flow_training::memory::gigabytes;

use super::check::Check;

/// Free space below which larger runs may fail (warning), and below which any run may (failure).
const LITTLE: u64 = 5_000_000_000;
const NONE: u64 = 50_000_000;
/// Every commit is flushed: each group of partitions, and each checkpoint.
const SLOW_FLUSH: Duration = Duration::from_millis(100);
/// Number of flushes; the median counts.
const FLUSHES: usize = 5;

/// The state directory, or, where it is not there yet, the folder that it would be made in.
pub fn state_directory(storage: &Storage, state: &Path) -> Check {
    let name = "state directory";
    if is_url(state) {
        return state_in_object_storage(storage, state);
    }
    let standing = standing(state);
    let shown = match standing == state {
        true => state.display().to_string(),
        false => format!("{} (not there yet)", state.display()),
    };
    let (room, flush) = match room_and_speed(standing) {
        Ok(measured) => measured,
        Err(error) => {
            return Check::fail(
                name,
                format!("{shown}: cannot write in {}: {error}", standing.display()),
                "give this user the right to write there, or name another folder with --state",
            );
        }
    };
    let found = told(&shown, room, flush);
    if room < NONE {
        let help = "make room, or name a folder of another disk with --state";
        Check::fail(name, found, help)
    } else if room < LITTLE {
        let help = "make room (`flow gc` removes what old runs left), or name a folder of another disk with --state";
        Check::warn(name, found, help)
    } else if flush > SLOW_FLUSH {
        let help = "commits and checkpoints wait for it: name a folder of a local disk with --state";
        Check::warn(name, found, help)
    } else {
        Check::ok(name, found)
    }
}

/// A state directory in object storage: whether it can be reached. That it takes writes with conditions, a run finds out.
fn state_in_object_storage(storage: &Storage, state: &Path) -> Check {
    let name = "state directory";
    let copy =
        match Store::is_there(storage, state).and_then(|is_there| Ok((is_there, Store::folder_of(storage, state)?))) {
            Ok(found) => found,
            Err(error) => {
                let help = "see docs/storage.md for what it needs, or name a folder with --state";
                return Check::fail(name, error.to_string(), help);
            }
        };
    let (is_there, copy) = copy;
    let shown = if is_there { "" } else { " (not there yet)" };
    let check = state_directory(storage, &copy);
    Check {
        found: format!("{}{shown}, with a copy in {}", state.display(), check.found),
        ..check
    }
}

pub fn temporary_directory(folder: &Path) -> Check {
    let name = "temporary directory";
    match room_and_speed(folder) {
        Err(error) => Check::warn(
            name,
            format!("cannot write in {}: {error}", folder.display()),
            "set TMPDIR to a folder that this user may write to",
        ),
        Ok((room, flush)) => {
            let found = told(&folder.display().to_string(), room, flush);
            if room < NONE {
                return Check::warn(name, found, "make room, or set TMPDIR to a folder of another disk");
            }
            Check::ok(name, found)
        }
    }
}

fn told(folder: &str, room: u64, flush: Duration) -> String {
    format!(
        "{folder}: {} free, a flush takes {:.1} ms",
        gigabytes(room),
        flush.as_secs_f64() * 1e3
    )
}

/// The folder itself, or its nearest existing ancestor.
fn standing(folder: &Path) -> &Path {
    let there = folder.ancestors().find(|folder| folder.exists());
    // The last ancestor of a relative path is empty: the current directory.
    there.unwrap_or(Path::new("."))
}

/// Free bytes for this user, and the median time of flushing a small file.
fn room_and_speed(folder: &Path) -> std::io::Result<(u64, Duration)> {
    let room = room(folder)?;
    let mut times = Vec::with_capacity(FLUSHES);
    let mut file = tempfile::Builder::new().prefix(".flow-doctor-").tempfile_in(folder)?;
    for _ in 0..FLUSHES {
        let started = Instant::now();
        file.write_all(&[0x5a; 4096])?;
        file.as_file().sync_all()?;
        times.push(started.elapsed());
    }
    file.close()?;
    times.sort_unstable();
    Ok((room, times[FLUSHES / 2]))
}

fn room(folder: &Path) -> std::io::Result<u64> {
    let path = CString::new(folder.as_os_str().as_bytes())?;
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the path ends with a zero, and what is written is as large as the function writes.
    if unsafe { libc::statvfs(path.as_ptr(), found.as_mut_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the function said that it wrote it.
    let found = unsafe { found.assume_init() };
    // The types of these numbers differ from system to system.
    #[allow(clippy::unnecessary_cast)]
    let (blocks, size) = (found.f_bavail as u64, found.f_frsize as u64);
    Ok(blocks.saturating_mul(size))
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;
    use flow_storage::Storage;

    #[test]
    fn folders_are_measured_and_left_as_they_were() {
        let folder = tempfile::tempdir().unwrap();
        let (room, flush) = room_and_speed(folder.path()).unwrap();
        assert!(room > 0 && flush > Duration::ZERO);
        let new = folder.path().join("not/there");
        let check = state_directory(&Storage::default(), &new);
        assert!(check.found.contains("(not there yet)"), "{}", check.found);
        assert!(!new.exists());
        assert!(!temporary_directory(folder.path()).found.contains("cannot write"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_is_none_fails() {
        let folder = tempfile::tempdir().unwrap();
        assert!(room_and_speed(&folder.path().join("none")).is_err());
        assert_eq!(temporary_directory(&folder.path().join("none")).state, State::Warn);
        assert_eq!(standing(Path::new("no/such/folder")), Path::new("."));
        assert_eq!(standing(&folder.path().join("a/b")), folder.path());
        // A file stands where the state directory should be.
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(state_directory(&Storage::default(), &file).state, State::Fail);
    }
}
