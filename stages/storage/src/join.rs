//! Paths that may hold URLs: the folder above one, and what is called something from a folder on.

use std::path::{Component, Path, PathBuf};

use crate::location::is_url;

/// The folder that a file or folder is in, as it is written: empty for the current folder. None of `/` and of a bucket.
pub fn folder_above(path: &Path) -> Option<&Path> {
    let above = path.parent()?;
    (!is_url(path) || is_url(above)).then_some(above)
}

/// What a corpus calls `path`, from `folder` on. Below a prefix `.` and `..` are resolved, as keys have none; `path` may be a URL.
pub fn join(folder: &Path, path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    if is_url(path) {
        return path.to_path_buf();
    }
    if !is_url(folder) || path.is_absolute() {
        return folder.join(path);
    }
    let mut joined = folder.to_path_buf();
    for part in path.components() {
        match part {
            Component::ParentDir => match folder_above(&joined) {
                Some(above) => joined = above.to_path_buf(),
                None => return folder.join(path),
            },
            Component::Normal(part) => joined.push(part),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_below_a_prefix_are_keys() {
        let join = |folder: &str, path: &str| join(Path::new(folder), path).to_str().unwrap().to_owned();
        assert_eq!(join("s3://b/c", "./d/../e/a.wav"), "s3://b/c/e/a.wav");
        assert_eq!(join("s3://b/c", "../a.wav"), "s3://b/a.wav");
        assert_eq!(join("s3://b/c", "gs://d/a.wav"), "gs://d/a.wav");
        assert_eq!(join("s3://b/c", "/data/a.wav"), "/data/a.wav");
        assert_eq!(join("c", "../a.wav"), "c/../a.wav");
        // No object is there.
        assert_eq!(join("s3://b", "../a.wav"), "s3://b/../a.wav");
        assert_eq!(folder_above(Path::new("s3://b/c")), Some(Path::new("s3://b")));
        assert_eq!(folder_above(Path::new("s3://b")), None);
        assert_eq!(folder_above(Path::new("a")), Some(Path::new("")));
    }
}
