//! Reads small files whole, and writes files and folders atomically.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};

use super::{MAX_CONFIG, MAX_SMALL_FILE, broken};
use crate::Result;

/// Reads a tokenizer file or an index.
pub(super) fn read_small(path: &Path) -> Result<Vec<u8>> {
    read_at_most(path, MAX_SMALL_FILE)
}

/// Reads a configuration in YAML.
pub(super) fn read_config(path: &Path) -> Result<String> {
    String::from_utf8(read_at_most(path, MAX_CONFIG)?).map_err(|_| broken(path, "is no UTF-8"))
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

/// Writes a file under a temporary name, flushes and renames it. Name and lock are those of temporary files of the runtime, which
/// removes what a process that was killed left.
pub(super) fn write_renamed(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let token = RandomState::new().build_hasher().finish();
    let temporary = path.with_file_name(format!(".flow-tmp-{token:016x}"));
    let created = File::options().write(true).create_new(true).open(&temporary);
    let mut file = created.map_err(|error| broken(path, error))?;
    // Without locks the file counts as left after a day.
    let _ = file.lock();
    let written = write(&mut file)
        .and_then(|()| file.sync_all().map_err(|error| broken(path, error)))
        .and_then(|()| fs::rename(&temporary, path).map_err(|error| broken(path, error)));
    if written.is_err() {
        // The first error is reported, whether or not the remains can be removed.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Fills a new folder under a temporary name and renames it; an existing folder is replaced if `replaces` allows it.
pub(super) fn write_folder(
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
                    format!("holds `{name}`, which is no file of a model: such a folder is not replaced"),
                ));
            }
        }
    }
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent).map_err(fail)?;
    }
    let (writing, ()) = make_beside(folder, ".writing", |path| fs::create_dir(path)).map_err(fail)?;
    let written = fill(&writing)
        .and_then(|()| File::open(&writing).and_then(|opened| opened.sync_all()).map_err(fail))
        .and_then(|()| {
            if !folder.exists() {
                return fs::rename(&writing, folder).map_err(fail);
            }
            // The old folder is renamed onto an empty folder that is created here, so that the name is reserved.
            let (old, ()) = make_beside(folder, ".old", |path| fs::create_dir(path)).map_err(fail)?;
            let replaced = fs::rename(folder, &old).and_then(|()| {
                let placed = fs::rename(&writing, folder);
                if placed.is_err() {
                    // The first error counts.
                    let _ = fs::rename(&old, folder);
                }
                placed
            });
            match replaced {
                Ok(()) => fs::remove_dir_all(&old).map_err(fail),
                Err(error) => {
                    // Empty, or not there any more.
                    let _ = fs::remove_dir(&old);
                    Err(fail(error))
                }
            }
        });
    if written.is_err() {
        // As above: the first error counts.
        let _ = fs::remove_dir_all(&writing);
    }
    written
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_has_the_names_that_we_give_already_stays() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        let theirs = ["model.old", "model.writing", "model.writing-2", "file.tmp"];
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
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), theirs.len() + 2);
    }
}
