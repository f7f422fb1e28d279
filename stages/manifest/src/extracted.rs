//! Where extracted recordings are, as manifests name them.

use std::path::{Component, Path, PathBuf};

use flow_corpus::ManifestError;
use flow_corpus::names::strip_dot_slash;
use flow_corpus::places::{leads_through_link, shard_folders};
use flow_kind::StageError;
use flow_storage::is_url;

/// Where extracted recordings are, as `audio.extract` places them.
pub struct Extracted<'s> {
    /// Empty: beside the tars.
    pub audio: &'s Path,
    /// The folder of the manifest.
    pub out: &'s Path,
    /// `out` contains a symbolic link, so that its parent is not the folder before it in the path.
    linked: bool,
}

impl<'s> Extracted<'s> {
    pub fn new(audio: &'s Path, out: &'s Path) -> Self {
        let linked = leads_through_link(out);
        Extracted { audio, out, linked }
    }

    pub(crate) fn is_linked(&self) -> bool {
        self.linked
    }

    /// The recording of a member: as it is where it is absolute, otherwise relative to the manifest's folder, which is how
    /// NeMo reads it.
    pub(crate) fn path(&self, tar_path: &str, member: &str) -> Result<String, StageError> {
        let member = strip_dot_slash(member);
        let path = match (self.audio.as_os_str().is_empty(), shard_folders(tar_path)) {
            (false, Some((lang, shard))) => self.audio.join(lang).join(shard).join(member),
            _ => Path::new(tar_path).parent().unwrap_or(Path::new("")).join(member),
        };
        self.seen(&path)
    }

    /// A path relative to the current directory, as written in the manifest.
    pub(crate) fn seen(&self, path: &Path) -> Result<String, StageError> {
        if is_url(path) {
            return Ok(path.to_string_lossy().into_owned());
        }
        let seen = match self.linked || is_url(self.out) {
            true => std::path::absolute(path),
            false => seen_from(self.out, path),
        };
        let path = seen.map_err(|e| ManifestError::io(path, e))?;
        path.into_os_string()
            .into_string()
            .map_err(|path| StageError::failed(format!("{}: the path is not UTF-8", path.display())))
    }
}

/// `path` (relative to the current directory) relative to `folder`.
fn seen_from(folder: &Path, path: &Path) -> std::io::Result<PathBuf> {
    if path.is_absolute() {
        return Ok(path.to_path_buf());
    }
    let mut up = PathBuf::new();
    for part in folder.components() {
        match part {
            Component::Normal(_) => up.push(".."),
            Component::CurDir => {}
            // The names of folders above the current directory are not known.
            _ => return std::path::absolute(path),
        }
    }
    let plain: PathBuf = path.components().filter(|part| *part != Component::CurDir).collect();
    Ok(up.join(plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_seen_from_the_manifest() {
        let call = |audio: &str, out: &str| {
            let extracted = Extracted::new(Path::new(audio), Path::new(out));
            extracted.path("s/hi/hi_1/hi_1.tar", "./a/b.flac").unwrap()
        };
        assert_eq!(call("", "work/out"), "../../s/hi/hi_1/a/b.flac");
        assert_eq!(call("./audio", "./out"), "../audio/hi/hi_1/a/b.flac");
        assert_eq!(call("/data/audio", "out"), "/data/audio/hi/hi_1/a/b.flac");
        let here = std::env::current_dir().unwrap();
        assert_eq!(
            call("audio", "/out"),
            here.join("audio/hi/hi_1/a/b.flac").to_str().unwrap()
        );
        assert_eq!(
            call("audio", "../out"),
            here.join("audio/hi/hi_1/a/b.flac").to_str().unwrap()
        );
        // A manifest in object storage names files of this machine by their whole paths, and objects by their URLs.
        assert_eq!(
            call("audio", "s3://bucket/out"),
            here.join("audio/hi/hi_1/a/b.flac").to_str().unwrap()
        );
        for out in ["s3://bucket/out", "out"] {
            assert_eq!(call("s3://bucket/audio", out), "s3://bucket/audio/hi/hi_1/a/b.flac");
        }
        // From behind a link `..` leads elsewhere.
        let folder = tempfile::tempdir_in(".").unwrap();
        let folder = folder.path().strip_prefix(&here).unwrap_or(folder.path());
        std::fs::create_dir(folder.join("real")).unwrap();
        std::os::unix::fs::symlink("real", folder.join("link")).unwrap();
        let out = |name: &str| folder.join(name).join("out").to_str().unwrap().to_owned();
        assert_eq!(
            call("audio", &out("link")),
            here.join("audio/hi/hi_1/a/b.flac").to_str().unwrap()
        );
        assert!(call("audio", &out("real")).ends_with("../audio/hi/hi_1/a/b.flac"));
    }
}
