//! What the program carries: the pipelines, their configurations with the small model, and the small corpus. So it does its
//! main job wherever it is copied to.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use include_dir::{Dir, File, include_dir};

pub static PIPELINES: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/pipelines");
pub static CONFIGS: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/configs");
pub static CORPUS: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/tests/data/corpus/mini");

/// Where each folder lies in the repository, and so in a copy of it.
static FOLDERS: [(&str, &Dir<'static>); 3] = [
    ("pipelines", &PIPELINES),
    ("configs", &CONFIGS),
    ("tests/data/corpus/mini", &CORPUS),
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
    Ok(Some(copy_in(&cache_folder())?.join("pipelines").join(file)))
}

/// `$XDG_CACHE_HOME/flow`, `~/.cache/flow`, or a folder for temporary files where there is no home.
fn cache_folder() -> PathBuf {
    let set = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    cache.unwrap_or_else(std::env::temp_dir).join("flow")
}

/// The folder below `cache` that holds this program's files, which are written if they are not all there.
fn copy_in(cache: &Path) -> io::Result<PathBuf> {
    let all: Vec<(PathBuf, &File<'static>)> = FOLDERS
        .iter()
        .flat_map(|(folder, of)| {
            files(of)
                .into_iter()
                .map(move |file| (Path::new(folder).join(file.path()), file))
        })
        .collect();
    let mut hash = blake3::Hasher::new();
    for (path, file) in &all {
        hash.update(path.as_os_str().as_encoded_bytes());
        hash.update(&(file.contents().len() as u64).to_le_bytes());
        hash.update(file.contents());
    }
    let folder = cache.join(format!("bundle-{}", &hash.finalize().to_hex()[..16]));
    // A file that somebody changed is not what this program carries.
    let stands = |(path, file): &(PathBuf, &File<'static>)| {
        fs::read(folder.join(path)).is_ok_and(|found| found == file.contents())
    };
    if all.iter().all(stands) {
        return Ok(folder);
    }
    fs::create_dir_all(cache)?;
    let beside = tempfile::Builder::new().prefix(".bundle-").tempdir_in(cache)?;
    for (path, file) in &all {
        write(&beside.path().join(path), file.contents())?;
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    match fs::rename(beside.path(), &folder) {
        Ok(()) => drop(beside.keep()),
        // Another process was first.
        Err(_) if all.iter().all(stands) => {}
        Err(error) => return Err(error),
    }
    Ok(folder)
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
    fn what_is_carried_is_what_the_repository_holds_and_a_damaged_copy_is_made_again() {
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
            assert!(seen > 5, "{folder}");
        }
        let cache = tempfile::tempdir().expect("a folder");
        let folder = copy_in(cache.path()).expect("written");
        let pipeline = folder.join("pipelines/finetune.yaml");
        fs::write(&pipeline, b"other").expect("written");
        assert_eq!(copy_in(cache.path()).expect("written"), folder);
        assert!(fs::read(&pipeline).expect("a file").starts_with(b"# Raw shards"));
        assert_eq!(fs::read_dir(cache.path()).expect("a folder").count(), 1);
        assert!(pipelines().contains(&"finetune".to_string()));
    }
}
