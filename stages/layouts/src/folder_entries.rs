//! What is in folders: what layouts are recognised by.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use flow_audio::listing::is_of_program;
use flow_corpus::ManifestError;
use flow_corpus::tree::{self, TreeEntry};
use flow_storage::{Storage, is_url};

/// Names in a folder, without those that begin with a dot and the folders of programs.
#[derive(Debug, Default)]
pub struct Entries {
    pub names: BTreeSet<String>,
    /// Of these, folders and links to folders.
    pub folders: BTreeSet<String>,
    /// Names that are not UTF-8, as they can be shown, and whether they are of folders.
    pub unnamed: BTreeSet<(String, bool)>,
}

thread_local! {
    /// What is in the folders that were looked into while a layout is found out: each layout asks, and there may be a million files.
    static KEPT: RefCell<Option<HashMap<PathBuf, Rc<Entries>>>> = const { RefCell::new(None) };
}

/// Runs `detect`, which finds out a layout: each folder is listed once meanwhile.
pub fn remembering_folders<T>(detect: impl FnOnce() -> T) -> T {
    KEPT.set(Some(HashMap::new()));
    let found = detect();
    KEPT.set(None);
    found
}

/// What is in a folder, to find out a layout; of what is not a folder, or cannot be read, nothing.
pub fn entries_of(storage: &Storage, folder: &Path) -> Rc<Entries> {
    let known = KEPT.with_borrow(|kept| kept.as_ref()?.get(folder).map(Rc::clone));
    known.unwrap_or_else(|| {
        let found = tree::or_note(folder, entries_in(storage, folder));
        KEPT.with_borrow_mut(|kept| {
            if let Some(kept) = kept {
                kept.insert(folder.to_path_buf(), Rc::clone(&found));
            }
        });
        found
    })
}

/// What is in a folder, to read all of it.
///
/// # Errors
/// When it cannot be read.
pub fn read_entries(storage: &Storage, folder: &Path) -> Result<Rc<Entries>, ManifestError> {
    entries_in(storage, folder).map_err(|error| ManifestError::io(folder, error))
}

fn entries_in(storage: &Storage, folder: &Path) -> io::Result<Rc<Entries>> {
    let mut found = Entries::default();
    for TreeEntry { name, is_folder, .. } in tree::entries(storage, folder)? {
        let name = match name.into_string() {
            Ok(name) => name,
            Err(name) => {
                found.unnamed.insert((name.to_string_lossy().into_owned(), is_folder));
                continue;
            }
        };
        if name.starts_with('.') || is_of_program(name.as_ref()) {
            continue;
        }
        if is_folder {
            found.folders.insert(name.clone());
        }
        found.names.insert(name);
    }
    Ok(Rc::new(found))
}

/// Folders that are looked into to find out a layout.
pub const MOST_FOLDERS: usize = 200;

/// Paths by which a folder above a prefix is tried, each by a request.
const ASKED: usize = 8;

/// The first folder of some above `folder`, itself included, or else the current one, below which one of the relative `paths` is;
/// none where there is no such folder or no relative path. Above a prefix the current one does not count.
pub fn base_of<'p>(storage: &Storage, folder: &Path, paths: impl Iterator<Item = &'p str>) -> Option<PathBuf> {
    let relative: Vec<&str> = paths
        .filter(|path| Path::new(path).is_relative() && !is_url(path))
        .collect();
    let is_below = |base: &PathBuf| {
        let most = if is_url(base) { ASKED } else { relative.len() };
        let mut paths = relative.iter().take(most);
        paths.any(|path| tree::is_file(storage, &tree::join(base, plain_file(path))))
    };
    if is_url(folder) {
        let mut above = std::iter::successors(Some(folder), |folder| tree::folder_above(folder)).take(6);
        return above.find(|base| is_below(&base.to_path_buf())).map(Path::to_path_buf);
    }
    let absolute = std::path::absolute(folder).ok()?;
    let ways = absolute.ancestors().count();
    // As the folder was written, so that rows have paths of the same kind.
    let above = (0..ways.min(6)).scan(folder.to_path_buf(), |way, step| {
        if step > 0 {
            *way = match way.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                Some(parent) if !way.ends_with("..") => parent.to_path_buf(),
                _ => absolute.ancestors().nth(step)?.to_path_buf(),
            };
        }
        Some(way.clone())
    });
    let here = std::iter::once(PathBuf::new());
    here.chain(above).find(is_below)
}

/// The file that a path leads to, without the place of a recording in it (`a.ark:1234`).
fn plain_file(path: &str) -> &str {
    match path.rsplit_once(':') {
        Some((file, place)) if !place.is_empty() && place.bytes().all(|byte| byte.is_ascii_digit()) => file,
        _ => path,
    }
}
