//! Small files read whole, and files and folders that stand complete or not at all.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::{MAX_SMALL_FILE, broken};
use crate::Result;

/// Reads a configuration or tokenizer file.
pub(super) fn read_small(path: &Path) -> Result<Vec<u8>> {
    let length = fs::metadata(path).map_err(|error| broken(path, error))?.len();
    if length > MAX_SMALL_FILE {
        return Err(broken(path, format!("has {length} bytes, too many for such a file")));
    }
    fs::read(path).map_err(|error| broken(path, error))
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(ending);
    PathBuf::from(name)
}

/// Writes a file under a temporary name, flushes and renames it.
pub(super) fn write_renamed(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let temporary = beside(path, ".tmp");
    let written = File::create(&temporary)
        .map_err(|error| broken(path, error))
        .and_then(|mut file| {
            write(&mut file)?;
            file.sync_all().map_err(|error| broken(path, error))
        })
        .and_then(|()| fs::rename(&temporary, path).map_err(|error| broken(path, error)));
    if written.is_err() {
        // The first error is what the user must see, whether or not the remains can be removed.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Fills a new folder under a temporary name and renames it, in the place of a folder that `replaces` allows.
pub(super) fn write_folder(
    folder: &Path,
    replace: bool,
    is_ours: impl Fn(&str) -> bool,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
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
    let writing = beside(folder, ".writing");
    let old = beside(folder, ".old");
    let written = remove_if_there(&writing)
        .and_then(|()| fs::create_dir_all(&writing))
        .map_err(fail)
        .and_then(|()| fill(&writing))
        .and_then(|()| File::open(&writing).and_then(|opened| opened.sync_all()).map_err(fail))
        .and_then(|()| {
            if folder.exists() {
                remove_if_there(&old)
                    .and_then(|()| fs::rename(folder, &old))
                    .map_err(fail)?;
            }
            fs::rename(&writing, folder).map_err(fail)?;
            remove_if_there(&old).map_err(fail)
        });
    if written.is_err() {
        // As above: the first error counts.
        let _ = remove_if_there(&writing);
    }
    written
}

fn remove_if_there(folder: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
