//! Where the recordings of a manifest may be, by what its rows say.

use std::path::{Path, PathBuf};

use super::recordings::Wanted;
use super::rows::{Refusal, refuse};
use crate::names::{names_shard_file, strip_dot_slash, unsafe_name};

/// Folders that a manifest's paths are relative to.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// The folder that the manifest lies in.
    pub folder: PathBuf,
    /// Extracted recordings, `<audio>/<lang>/<shard_id>/<member>`; may be empty.
    pub audio: PathBuf,
    /// Stands before a relative `tar_path`; may be empty.
    pub shards: PathBuf,
}

impl Places {
    /// For a path as NeMo gives it: relative to the manifest, or else to the current directory.
    pub fn of_path(&self, path: &str) -> Wanted {
        let mut files = vec![self.folder.join(path)];
        if Path::new(path).is_relative() && files[0] != Path::new(path) {
            files.push(path.into());
        }
        Wanted { files, member: None }
    }

    /// For a member of a shard's tar: extracted below `audio`, beside the tar, or still in it.
    pub fn of_member(&self, tar_path: &str, member: &str, shard_id: &str) -> Result<Wanted, Refusal> {
        if unsafe_name(member) || names_shard_file(member, shard_id) {
            return Err(refuse("unsafe_name", format!("{member:?}")));
        }
        let tar = self.shards.join(tar_path);
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

/// The two folders that a shard's tar lies in: `a/hi/hi_0001/hi_0001.tar` is in `hi` and `hi_0001`.
pub fn shard_folders(tar_path: &str) -> Option<(&str, &str)> {
    let mut parts = tar_path.rsplit('/').skip(1);
    let (shard, lang) = (parts.next()?, parts.next()?);
    let plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    (plain(shard) && plain(lang)).then_some((lang, shard))
}
