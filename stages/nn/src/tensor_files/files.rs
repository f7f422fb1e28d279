//! Reads small files whole, and writes files and folders atomically.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};

use super::{MAX_CONFIG, MAX_SMALL_FILE, broken};
use crate::Result;

/// Reads a tokenizer file or an index.
pub fn read_small(path: &Path) -> Result<Vec<u8>> {
    read_at_most(path, MAX_SMALL_FILE)
}

/// Reads a configuration in YAML.
pub fn read_config(path: &Path) -> Result<String> {
    String::from_utf8(read_at_most(path, MAX_CONFIG)?).map_err(|_| broken(path, "is not UTF-8"))
}

fn read_at_most(path: &Path, most: u64) -> Result<Vec<u8>> {
    let length = fs::metadata(path).map_err(|error| broken(path, error))?.len();
    if length > most {
        let what = format!("has {length} bytes, where such a file has at most {most}");
        return Err(broken(path, what));
    }
    fs::read(path).map_err(|error| broken(path, error))
}

/// Creates something beside `path` under a free name, `<name><ending>` or `<name><ending>-2` and so on: existing files
/// of such names may be the user's. `make` must fail if the name is taken.
fn make_beside<T>(
    path: &Path,
    ending: &str,
    make: impl Fn(&Path) -> std::io::Result<T>,
) -> std::io::Result<(PathBuf, T)> {
    // Without a trailing slash, after which the ending would name something inside the folder.
    let path = path.components().as_path();
    let mut number = 1u64;
    loop {
        let mut name = path.as_os_str().to_os_string();
        name.push(ending);
        if number > 1 {
            name.push(format!("-{number}"));
        }
        let beside = PathBuf::from(name);
        match make(&beside) {
            Ok(made) => return Ok((beside, made)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(error),
        }
    }
}

/// How the names of temporary files begin; sixteen digits follow. Names and locks are those of the runtime, which removes what a
/// process that was killed left.
const TEMPORARY_PREFIX: &str = ".flow-tmp-";
/// How the name of a folder ends that is being written. Before it stands the name of a temporary file beside it, which is there as
/// long as the folder is being written.
const WRITING: &str = ".writing";

/// A file of a new temporary name beside `path`, locked.
fn create_temporary(path: &Path) -> std::io::Result<(PathBuf, File)> {
    loop {
        let token = RandomState::new().build_hasher().finish();
        let temporary = path.with_file_name(format!("{TEMPORARY_PREFIX}{token:016x}"));
        let file = File::options().write(true).create_new(true).open(&temporary)?;
        // Without locks the file counts as left after a day.
        let _ = file.lock();
        // Another process may have taken it for one that was left before it was locked.
        if temporary.exists() {
            return Ok((temporary, file));
        }
    }
}

/// The folder that is written under the protection of a temporary file.
fn folder_of(temporary: &Path) -> PathBuf {
    let mut name = temporary.as_os_str().to_os_string();
    name.push(WRITING);
    name.into()
}

/// Removes folders that processes left when they were killed: their temporary file is gone. What cannot be removed does no harm.
fn remove_left_folders(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let temporary = name.to_str().and_then(|name| name.strip_suffix(WRITING));
        let token = temporary.and_then(|name| name.strip_prefix(TEMPORARY_PREFIX));
        let is_ours =
            token.is_some_and(|token| token.len() == 16 && token.bytes().all(|byte| byte.is_ascii_hexdigit()));
        if let (true, Some(temporary)) = (is_ours, temporary)
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
            && parent.join(temporary).symlink_metadata().is_err()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Writes a file under a temporary name, flushes and renames it.
pub fn write_renamed(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let created = create_temporary(path);
    let (temporary, mut file) = created.map_err(|error| broken(path, error))?;
    let written = write(&mut file)
        .and_then(|()| file.sync_all().map_err(|error| broken(path, error)))
        .and_then(|()| fs::rename(&temporary, path).map_err(|error| broken(path, error)));
    if written.is_err() {
        // The first error is reported, whether or not the remains can be removed.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Fills a new folder under a temporary name and renames it; an existing folder is replaced if `replaces` allows it. Removes the
/// folders that processes left beside it whose temporary files the runtime has removed.
pub fn write_folder(
    folder: &Path,
    replace: bool,
    is_ours: impl Fn(&str) -> bool,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    // The target of a symbolic link is replaced, not the link.
    let folder = &fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
    let fail = |error: std::io::Error| broken(folder, error);
    if folder.exists() {
        if !replace {
            return Err(broken(folder, "is there already"));
        }
        for entry in fs::read_dir(folder).map_err(fail)? {
            let name = entry.map_err(fail)?.file_name().to_string_lossy().into_owned();
            if !is_ours(&name) {
                return Err(broken(
                    folder,
                    format!("holds `{name}`, which is not a file of a model: such a folder is not replaced"),
                ));
            }
        }
    }
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent).map_err(fail)?;
        remove_left_folders(match parent.as_os_str().is_empty() {
            true => Path::new("."),
            false => parent,
        });
    }
    let (temporary, lock) = create_temporary(folder).map_err(fail)?;
    let writing = folder_of(&temporary);
    let created = fs::create_dir(&writing).map_err(fail);
    let written = created
        .and_then(|()| fill(&writing))
        .and_then(|()| File::open(&writing).and_then(|opened| opened.sync_all()).map_err(fail))
        .and_then(|()| {
            if !folder.exists() {
                return fs::rename(&writing, folder).map_err(fail);
            }
            replace_folder(&writing, folder).map_err(fail)
        });
    if written.is_err() {
        // As above: the first error counts.
        let _ = fs::remove_dir_all(&writing);
    }
    // After the folder, which counts as left without it.
    let _ = fs::remove_file(&temporary);
    drop(lock);
    written
}

/// Puts the folder `new` in the place of `folder`, which is removed. Where the file system can exchange two names, a process that
/// is killed leaves one of the two under the name of `folder` and the other under that of `new`, never a third name.
fn replace_folder(new: &Path, folder: &Path) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};

    match renameat_with(CWD, new, CWD, folder, RenameFlags::EXCHANGE) {
        Ok(()) => fs::remove_dir_all(new),
        Err(_) => replace_by_two_renames(new, folder),
    }
}

/// The same for file systems that cannot exchange names: a process that is killed in between leaves the old folder as
/// `<folder>.old`.
fn replace_by_two_renames(new: &Path, folder: &Path) -> std::io::Result<()> {
    // The old folder is renamed onto an empty folder that is created here, so that the name is reserved.
    let (old, ()) = make_beside(folder, ".old", |path| fs::create_dir(path))?;
    let replaced = fs::rename(folder, &old).and_then(|()| {
        let placed = fs::rename(new, folder);
        if placed.is_err() {
            // The first error counts.
            let _ = fs::rename(&old, folder);
        }
        placed
    });
    match replaced {
        Ok(()) => fs::remove_dir_all(&old),
        Err(error) => {
            // Empty, or not there any more.
            let _ = fs::remove_dir(&old);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_has_the_names_that_we_give_already_stays() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        // Of another process that is writing, or a name that is not ours.
        let held = ".flow-tmp-00000000000000aa";
        let theirs = [
            "model.old",
            &format!("{held}.writing"),
            ".flow-tmp-mine.writing",
            "file.tmp",
        ];
        let left = ".flow-tmp-00000000000000bb.writing";
        fs::write(at(held), "").unwrap();
        fs::create_dir(at(left)).unwrap();
        fs::write(at(left).join("weights"), "").unwrap();
        for name in &theirs[..3] {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("mine"), "mine").unwrap();
        }
        fs::write(at("file.tmp"), "mine").unwrap();
        let write = |text: &str| {
            write_folder(
                &at("model/"),
                true,
                |name| name == "weights",
                |folder| fs::write(folder.join("weights"), text).map_err(|error| broken(folder, error)),
            )
        };
        write("first").unwrap();
        write("second").unwrap();
        assert_eq!(fs::read_to_string(at("model/weights")).unwrap(), "second");
        write_renamed(&at("file"), |file| {
            file.write_all(b"new").map_err(|error| broken(&at("file"), error))
        })
        .unwrap();
        assert_eq!(fs::read_to_string(at("file")).unwrap(), "new");
        assert!(theirs[..3].iter().all(|name| at(name).join("mine").exists()));
        assert_eq!(fs::read_to_string(at("file.tmp")).unwrap(), "mine");
        // No temporary file is left, also after a failure.
        assert!(write_folder(&at("model"), true, |_| true, |folder| Err(broken(folder, "full"))).is_err());
        assert!(write_renamed(&at("file"), |_| Err(broken(&at("file"), "full"))).is_err());
        assert!(!at(left).exists());
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), theirs.len() + 3);
    }

    #[test]
    fn folders_are_replaced_with_and_without_an_exchange_of_names() {
        for replace in [replace_folder, replace_by_two_renames] {
            let place = tempfile::tempdir().unwrap();
            let [new, folder] = ["new", "model"].map(|name| place.path().join(name));
            for (path, text) in [(&new, "new"), (&folder, "old")] {
                fs::create_dir(path).unwrap();
                fs::write(path.join(text), text).unwrap();
            }
            replace(&new, &folder).unwrap();
            let names = |path: &Path| -> Vec<_> {
                let entries = fs::read_dir(path).unwrap();
                entries.map(|entry| entry.unwrap().file_name()).collect()
            };
            assert_eq!(
                (names(place.path()), names(&folder)),
                (vec!["model".into()], vec!["new".into()])
            );
        }
    }
}
