//! Finds the shards of a corpus: folders exactly two levels below `shards`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use flow_kind::store::TOMBSTONE_SUFFIX;

use flow_storage::{Location, Storage, StorageError, folders_two_levels_below, is_url};

use flow_audio::error::AudioError;
use flow_audio::listing::is_of_program;

/// One shard: `<shards>/<lang>/<shard_id>/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    pub lang: String,
    pub shard_id: String,
    pub folder: PathBuf,
}

impl Shard {
    /// `<lang>/<shard_id>`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.lang, self.shard_id)
    }

    /// Where its tar is, if it has one.
    pub fn tar(&self) -> PathBuf {
        self.folder.join(format!("{}.tar", self.shard_id))
    }

    /// The shard of that name below `shards`. None where the name is not of two plain components.
    pub fn named(shards: &Path, name: &str) -> Option<Shard> {
        let (lang, shard_id) = name.split_once('/')?;
        let plain = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['/', '\0']);
        if !plain(lang) || !plain(shard_id) {
            return None;
        }
        let folder = shards.join(lang).join(shard_id);
        Some(Shard {
            lang: lang.to_owned(),
            shard_id: shard_id.to_owned(),
            folder,
        })
    }
}

/// All shards in byte order of (`lang`, `shard_id`). Files, links to folders and folders of programs are skipped.
pub fn list(storage: &Storage, shards: &Path) -> Result<Vec<Shard>, AudioError> {
    if is_url(shards) {
        return list_objects(storage, shards).map_err(|error| AudioError::read(shards, error.into()));
    }
    let mut found = Vec::new();
    for lang in folders_in(shards)? {
        for folder in folders_in(&shards.join(&lang))? {
            let path = shards.join(&lang).join(&folder);
            let (Ok(lang), Ok(shard_id)) = (lang.clone().into_string(), folder.into_string()) else {
                let source = std::io::Error::other("the name of the folder is not UTF-8");
                return Err(AudioError::read(path, source));
            };
            found.push(Shard {
                lang,
                shard_id,
                folder: path,
            });
        }
    }
    Ok(found)
}

/// The shards below a prefix of object storage.
fn list_objects(storage: &Storage, shards: &Path) -> Result<Vec<Shard>, StorageError> {
    let Location::Object(url) = Location::of_path(shards)? else {
        return Ok(Vec::new());
    };
    let found = folders_two_levels_below(storage, &url)?;
    let shard = |(lang, shard_id): (String, String)| Shard {
        folder: shards.join(&lang).join(&shard_id),
        lang,
        shard_id,
    };
    let is_shard =
        |(lang, shard_id): &(String, String)| ![lang, shard_id].iter().any(|name| is_of_program(name.as_ref()));
    Ok(found.into_iter().filter(is_shard).map(shard).collect())
}

fn folders_in(folder: &Path) -> Result<Vec<OsString>, AudioError> {
    let failed = |source| AudioError::read(folder, source);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_dir() && !is_of_program(&entry.file_name()) {
            names.push(entry.file_name());
        }
    }
    names.sort();
    Ok(names)
}

/// Files below a shard's folder that may be recordings: (name relative to the folder, size), by name. The
/// shard's own files, links, files that an interrupted extraction left behind and notes of deleted tars are skipped.
pub fn recordings(storage: &Storage, shard: &Shard) -> Result<Vec<(String, u64)>, AudioError> {
    if is_url(&shard.folder) {
        return recording_objects(storage, shard).map_err(|error| AudioError::read(&shard.folder, error.into()));
    }
    let mut found = Vec::new();
    let mut pending = vec![(shard.folder.clone(), String::new())];
    while let Some((folder, prefix)) = pending.pop() {
        let failed = |source| AudioError::read(&folder, source);
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        };
        for entry in entries {
            let entry = entry.map_err(failed)?;
            // A manifest cannot name what is not UTF-8.
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let kind = entry.file_type().map_err(failed)?;
            if kind.is_dir() {
                pending.push((entry.path(), format!("{prefix}{name}/")));
            } else if kind.is_file() {
                let own = prefix.is_empty() && flow_audio::member_name::is_shard_file(&name, &shard.shard_id);
                let ours = name.starts_with(flow_kind::store::TEMPORARY_PREFIX) || name.ends_with(TOMBSTONE_SUFFIX);
                if !own && !ours {
                    found.push((format!("{prefix}{name}"), entry.metadata().map_err(failed)?.len()));
                }
            }
        }
    }
    found.sort();
    Ok(found)
}

fn recording_objects(storage: &Storage, shard: &Shard) -> Result<Vec<(String, u64)>, StorageError> {
    let Location::Object(url) = Location::of_path(&shard.folder)? else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for entry in storage.list_and_remember(&url)?.iter() {
        let name = entry.url.below(&url).unwrap_or_default();
        let own = flow_audio::member_name::is_shard_file(name, &shard.shard_id);
        if !own && !name.is_empty() && !name.ends_with(TOMBSTONE_SUFFIX) {
            found.push((name.to_string(), entry.stat.size));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_programs_are_no_shards() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["hi/hi_0", "__MACOSX/hi", "lost+found/1", "hi/.ipynb_checkpoints"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let names: Vec<String> = list(&Storage::default(), root.path())
            .unwrap()
            .iter()
            .map(Shard::name)
            .collect();
        assert_eq!(names, ["hi/hi_0"]);
    }
}
