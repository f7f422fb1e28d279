//! Files that are embedded in the program: the pipelines, their configurations with the small model, and the small
//! corpus, so that a copied binary is complete.

use std::fs;
use std::io;
use std::iter;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use include_dir::{Dir, File, include_dir};

pub static PIPELINES: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/pipelines");
pub static CONFIGS: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/configs");
/// Recordings that `transcribe` takes by default, and sentences that `synthesize` never speaks.
static RECORDINGS: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/tests/data/golden/model/audio");
static SENTENCES: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/tests/data/golden/data/mini");
pub static CORPUS: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/tests/data/corpus/mini");

/// The path of each folder in the repository, and in extracted copies.
static FOLDERS: [(&str, &Dir<'static>); 5] = [
    ("pipelines", &PIPELINES),
    ("configs", &CONFIGS),
    ("tests/data/corpus/mini", &CORPUS),
    ("tests/data/golden/model/audio", &RECORDINGS),
    ("tests/data/golden/data/mini", &SENTENCES),
];

/// All files below a folder.
pub fn files<'d>(folder: &'d Dir<'static>) -> Vec<&'d File<'static>> {
    let below = folder.dirs().flat_map(files);
    folder.files().chain(below).collect()
}

/// The names of the pipelines that the program carries, without `.yaml`.
pub fn pipelines() -> Vec<String> {
    let name = |file: &File<'_>| Some(file.path().file_stem()?.to_str()?.to_string());
    let mut names: Vec<String> = PIPELINES.files().filter_map(name).collect();
    names.sort();
    names
}

/// The path of a pipeline that the program carries, written to the user's cache folder with all that it names. `name` is
/// `finetune` or `finetune.yaml`; none where there is no such pipeline.
///
/// # Errors
/// When the cache folder cannot be written.
pub fn pipeline(name: &str) -> io::Result<Option<PathBuf>> {
    let file = format!("{}.yaml", name.strip_suffix(".yaml").unwrap_or(name));
    if PIPELINES.get_file(&file).is_none() {
        return Ok(None);
    }
    let mut refused = None;
    for cache in cache_folders() {
        match copy_in(&cache) {
            Ok(folder) => return Ok(Some(folder.join("pipelines").join(file))),
            Err(error) => {
                let told = format!("{}: {error}", cache.display());
                refused.get_or_insert(io::Error::new(error.kind(), told));
            }
        }
    }
    Err(refused.unwrap_or_else(|| io::Error::other("there is no folder for them")))
}

/// Candidate cache folders, the best first: `$XDG_CACHE_HOME/flow` or `~/.cache/flow`, and one for temporary files,
/// which is created on demand.
fn cache_folders() -> impl Iterator<Item = PathBuf> {
    let set = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    let temporary = iter::once_with(|| private_folder(&std::env::temp_dir(), user())).flatten();
    cache.map(|cache| cache.join("flow")).into_iter().chain(temporary)
}

fn user() -> u32 {
    // SAFETY: it takes nothing, changes nothing and always succeeds.
    unsafe { libc::getuid() }
}

/// A folder that only this user can write, below a world-writable one; none if another user created it first.
fn private_folder(below: &Path, user: u32) -> Option<PathBuf> {
    let folder = below.join(format!("flow-{user}"));
    // An existing folder is checked next.
    let _ = fs::DirBuilder::new().mode(0o700).create(&folder);
    let found = fs::symlink_metadata(&folder).ok()?;
    (found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0).then_some(folder)
}

/// The folder below `cache` with this program's files, which are written if it does not exist.
fn copy_in(cache: &Path) -> io::Result<PathBuf> {
    let all: Vec<(PathBuf, &File<'static>)> = FOLDERS
        .iter()
        .flat_map(|(folder, of)| {
            let below = move |file: &'static File<'static>| (Path::new(folder).join(file.path()), file);
            files(of).into_iter().map(below)
        })
        .collect();
    let mut hash = blake3::Hasher::new();
    for (path, file) in &all {
        hash.update(path.as_os_str().as_encoded_bytes());
        hash.update(&(file.contents().len() as u64).to_le_bytes());
        hash.update(file.contents());
    }
    let name = format!("bundle-{}", &hash.finalize().to_hex()[..16]);
    // A modified copy is left alone, since other processes may be reading it: the next name is tried.
    for number in 0..100 {
        let folder = match number {
            0 => cache.join(&name),
            number => cache.join(format!("{name}-{number}")),
        };
        if !folder.exists() {
            fs::create_dir_all(cache)?;
            let beside = tempfile::Builder::new().prefix(".bundle-").tempdir_in(cache)?;
            for (path, file) in &all {
                write(&beside.path().join(path), file.contents())?;
            }
            // If another process was first, the rename fails, and its copy is checked below.
            if fs::rename(beside.path(), &folder).is_ok() {
                drop(beside.keep());
            }
        }
        if holds(&folder, &all) {
            return Ok(folder);
        }
    }
    Err(io::Error::other(format!(
        "{} holds nothing but changed copies of these files; remove them",
        cache.display()
    )))
}

/// Number of files below a folder.
fn count(folder: &Path) -> io::Result<usize> {
    let mut files = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        files += if entry.file_type()?.is_dir() {
            count(&entry.path())?
        } else {
            1
        };
    }
    Ok(files)
}

/// Whether a folder holds these files and no others.
fn holds(folder: &Path, all: &[(PathBuf, &File<'static>)]) -> bool {
    let same = |(path, file): &(PathBuf, &File<'static>)| {
        fs::read(folder.join(path)).is_ok_and(|found| found == file.contents())
    };
    all.iter().all(same) && count(folder).is_ok_and(|files| files == all.len())
}

/// Writes a file with the folders above it.
pub fn write(path: &Path, contents: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, contents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_carried_is_what_the_repository_holds_and_a_changed_copy_is_not_used() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        for (folder, of) in FOLDERS {
            let mut seen = 0;
            for file in files(of) {
                let path = root.join(folder).join(file.path());
                assert!(
                    fs::read(&path).expect("a file") == file.contents(),
                    "{}",
                    path.display()
                );
                seen += 1;
            }
            assert_eq!(seen, count(&root.join(folder)).expect("a folder"), "{folder}");
        }
        let cache = tempfile::tempdir().expect("a folder");
        let folder = copy_in(cache.path()).expect("written");
        assert_eq!(copy_in(cache.path()).expect("it stands"), folder);
        // A copy with changed or additional files is neither used nor removed.
        let pipeline = folder.join("pipelines/finetune.yaml");
        fs::write(&pipeline, b"other").expect("written");
        let second = copy_in(cache.path()).expect("written");
        assert!(second != folder && fs::read(&pipeline).expect("a file") == b"other");
        fs::write(second.join("configs/more.yaml"), b"more").expect("written");
        let third = copy_in(cache.path()).expect("written");
        assert!(third != second && third != folder);
        let text = fs::read(third.join("pipelines/finetune.yaml")).expect("a file");
        assert!(text.starts_with(b"# Raw shards"));
        assert_eq!(fs::read_dir(cache.path()).expect("a folder").count(), 3);
        assert!(pipelines().contains(&"finetune".to_string()));
    }

    #[test]
    fn a_folder_of_somebody_else_is_not_used() {
        let below = tempfile::tempdir().expect("a folder");
        let folder = private_folder(below.path(), user()).expect("a folder");
        assert_eq!(private_folder(below.path(), user()), Some(folder.clone()));
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(&folder, open).expect("changed");
        assert_eq!(private_folder(below.path(), user()), None);
        assert_eq!(private_folder(below.path(), user() + 1), None);
        fs::remove_dir(&folder).expect("removed");
        std::os::unix::fs::symlink(below.path(), &folder).expect("a link");
        assert_eq!(private_folder(below.path(), user()), None);
    }

    #[test]
    fn many_first_users_at_once_get_one_copy() {
        let cache = tempfile::tempdir().expect("a folder");
        let copies: Vec<PathBuf> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| copy_in(cache.path()))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("no panic").expect("written"))
                .collect()
        });
        assert!(copies.iter().all(|copy| *copy == copies[0]), "{copies:?}");
        assert_eq!(fs::read_dir(cache.path()).expect("a folder").count(), 1);
    }
}
