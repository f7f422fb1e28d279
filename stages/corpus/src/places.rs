//! Candidate paths of the recordings of a manifest's rows.

use std::path::{Component, Path, PathBuf};

use flow_storage::{is_url, path_of_file_url};

use crate::manifest_row::{Refusal, Wanted, refuse};
use crate::names::{names_shard_file, strip_dot_slash, unsafe_name};
use crate::tree::join;

/// A path below the folder of shards.
pub fn prefixed(path: &str, shards: &str) -> String {
    let prefix = match shards {
        "" => "",
        root if root.chars().all(|c| c == '/') => "/",
        other => other.trim_end_matches('/'),
    };
    let slash = if prefix.is_empty() || prefix == "/" { "" } else { "/" };
    format!("{prefix}{slash}{path}")
}

/// Folders that a manifest's paths are relative to.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// The folder of the manifest.
    pub folder: PathBuf,
    /// No part of `folder` is a symbolic link, so that `folder/..` is its parent.
    pub plain: bool,
    /// Extracted recordings, `<audio>/<lang>/<shard_id>/<member>`; may be empty.
    pub audio: PathBuf,
    /// Folder that is put before a relative `tar_path`; may be empty.
    pub shards: PathBuf,
}

impl Places {
    /// For a path as NeMo gives it: relative to the manifest, or else to the current directory.
    pub fn of_path(&self, path: &str) -> Wanted {
        if is_url(path) {
            return Wanted::file(path_of_file_url(path).unwrap_or_else(|| path.into()));
        }
        let mut files = vec![self.below_folder(path)];
        if Path::new(path).is_relative() && files[0] != Path::new(path) {
            files.push(path.into());
        }
        Wanted { files, member: None }
    }

    /// `path` relative to the current directory, without `folder/../` where that is equivalent: manifests written from
    /// these rows must not need the folder that they were read from.
    fn below_folder(&self, path: &str) -> PathBuf {
        let (mut folder, mut rest) = (self.folder.as_path(), Path::new(path));
        while self.plain
            && let Ok(above) = rest.strip_prefix("..")
            && let Some(Component::Normal(_)) = folder.components().next_back()
            && let Some(parent) = folder.parent()
        {
            (folder, rest) = (parent, above);
        }
        join(folder, rest)
    }

    /// For a member of a shard's tar: extracted below `audio`, beside the tar, or still in it.
    pub fn of_member(&self, tar_path: &str, member: &str, shard_id: &str) -> Result<Wanted, Refusal> {
        if unsafe_name(member) || names_shard_file(member, shard_id) {
            return Err(refuse("unsafe_name", format!("{member:?}")));
        }
        let tar = match is_url(tar_path) {
            true => path_of_file_url(tar_path).unwrap_or_else(|| tar_path.into()),
            false => self.shards.join(tar_path),
        };
        let bare = strip_dot_slash(member);
        let beside = tar.parent().map(Path::to_path_buf).unwrap_or_default();
        let mut files = Vec::new();
        if !self.audio.as_os_str().is_empty()
            && let Some((lang, shard)) = shard_folders(tar_path)
        {
            files.push(self.audio.join(lang).join(shard).join(bare));
        }
        files.push(beside.join(bare));
        Ok(Wanted {
            files,
            member: Some((tar, bare.to_string())),
        })
    }
}

/// Whether a part of a path is a symbolic link.
pub fn leads_through_link(path: &Path) -> bool {
    path.ancestors()
        .any(|part| part.symlink_metadata().is_ok_and(|metadata| metadata.is_symlink()))
}

/// The two folders that a shard's tar is in: `a/hi/hi_0001/hi_0001.tar` is in `hi` and `hi_0001`.
pub fn shard_folders(tar_path: &str) -> Option<(&str, &str)> {
    let mut parts = tar_path.rsplit('/').skip(1);
    let (shard, lang) = (parts.next()?, parts.next()?);
    let plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    (plain(shard) && plain(lang)).then_some((lang, shard))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_of_a_manifest_does_not_need_the_first_ones_folder() {
        let of = |folder: &str, plain: bool, path: &str| {
            let places = Places {
                folder: folder.into(),
                plain,
                ..Places::default()
            };
            places.of_path(path).files[0].to_str().unwrap().to_owned()
        };
        assert_eq!(of("work/o1", true, "../../au/a.wav"), "au/a.wav");
        assert_eq!(of("/data/o1", true, "../au/a.wav"), "/data/au/a.wav");
        assert_eq!(of("o1", true, "../../a.wav"), "../a.wav");
        assert_eq!(of("../o1", true, "../../a.wav"), "../../a.wav");
        assert_eq!(of("o1", true, "au/../a.wav"), "o1/au/../a.wav");
        assert_eq!(of("s3://bucket/o1", true, "../au/a.wav"), "s3://bucket/au/a.wav");
        assert_eq!(of("s3://bucket/o1", true, "./au/a.wav"), "s3://bucket/o1/au/a.wav");
        assert_eq!(of("s3://bucket/o1", true, "gs://other/a.wav"), "gs://other/a.wav");
        assert_eq!(of("o1", true, "file:///data/a%20b.wav"), "/data/a b.wav");
        // From behind a link `..` leads elsewhere.
        assert_eq!(of("link", false, "../a.wav"), "link/../a.wav");
    }
}
