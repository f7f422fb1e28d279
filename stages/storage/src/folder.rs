//! Folders: what lies right below a prefix, from a listing of all that is below it, or from storage.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use crate::client::wait;
use crate::error::StorageError;
use crate::list::{Entry, Folder};
use crate::location::{Location, ObjectUrl};
use crate::stat::Stat;
use crate::storage::Storage;

impl Storage {
    /// What lies right below a prefix, as [`Storage::list_folder`] gives it. If this process has listed the prefix or one above it
    /// ([`Storage::list_and_remember`]), the answer is from there, and nothing is asked for.
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn look_into(&self, url: &ObjectUrl) -> Result<Folder, StorageError> {
        if let Some(found) = self.of_listing(url, folder_of) {
            return Ok(found);
        }
        self.list_folder(url)
    }

    /// Whether there is an object below a prefix; of a listing as [`Storage::look_into`].
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn is_prefix(&self, url: &ObjectUrl) -> Result<bool, StorageError> {
        let is_listed = |stats: &BTreeMap<ObjectUrl, Stat>, url: &ObjectUrl| {
            let first = stats.range(first_below(url)..).next();
            first.is_some_and(|(first, _)| first.below(url).is_some())
        };
        if let Some(found) = self.of_listing(url, is_listed) {
            return Ok(found);
        }
        let (client, url) = (self.client(url)?, url.clone());
        wait(async move { client.has_any(&url).await })
    }
}

/// Whether a path or URL names a folder, or a prefix with objects below it. What is not a URL that can be used names none.
///
/// # Errors
/// When storage does not say whether something is there.
pub fn is_folder(storage: &Storage, path: &Path) -> io::Result<bool> {
    match Location::of_path(path) {
        Ok(Location::Local(path)) => Ok(path.is_dir()),
        Ok(Location::Object(url)) if !url.can_be_listed() => Ok(false),
        Ok(Location::Object(url)) => Ok(storage.is_prefix(&url)?),
        Err(_) => Ok(false),
    }
}

/// The first URL that may be below a prefix, in the order of URLs.
fn first_below(folder: &ObjectUrl) -> ObjectUrl {
    match folder.key() {
        "" => folder.clone(),
        key => folder.with_key(&format!("{key}/")),
    }
}

/// What lies right below a prefix, by what is known of all objects below it. The objects of a folder in it are passed over at once.
fn folder_of(stats: &BTreeMap<ObjectUrl, Stat>, folder: &ObjectUrl) -> Folder {
    let first = first_below(folder);
    let mut found = Folder::default();
    let mut rest = stats.range(first.clone()..);
    while let Some((url, stat)) = rest.next() {
        match url.below(folder).map(|below| below.split_once('/')) {
            None => break,
            Some(None) => found.objects.push(Entry {
                url: url.clone(),
                stat: stat.clone(),
            }),
            Some(Some((name, _))) => {
                let inner = folder.with_key(&format!("{}{name}", first.key()));
                // `0` follows `/`.
                let after = folder.with_key(&format!("{}0", inner.key()));
                found.folders.push(inner);
                rest = stats.range(after..);
            }
        }
    }
    found.folders.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn a_listing_answers_for_every_folder_in_it() {
        let url = |text: &str| match Location::parse(text) {
            Ok(Location::Object(url)) => url,
            other => panic!("{other:?}"),
        };
        let stat = Stat {
            size: 1,
            modified: SystemTime::UNIX_EPOCH,
            etag: None,
            version: None,
        };
        let keys = [
            "a", "c/a-b/x", "c/a.txt", "c/a/x", "c/a/y/z", "c/a0", "c/b", "c0/x", "d/e",
        ];
        let stats: BTreeMap<ObjectUrl, Stat> = keys
            .iter()
            .map(|key| (url(&format!("s3://bucket/{key}")), stat.clone()))
            .chain([(url("s3://bucket2/c/other"), stat.clone())])
            .collect();
        let of = |folder: &str| {
            let found = folder_of(&stats, &url(folder));
            let names = |urls: Vec<&ObjectUrl>| urls.iter().map(|url| url.name().to_string()).collect::<Vec<_>>();
            (
                names(found.folders.iter().collect()).join(" "),
                names(found.objects.iter().map(|entry| &entry.url).collect()).join(" "),
            )
        };
        let expected = |folders: &str, objects: &str| (folders.to_string(), objects.to_string());
        assert_eq!(of("s3://bucket"), expected("c c0 d", "a"));
        assert_eq!(of("s3://bucket/c"), expected("a a-b", "a.txt a0 b"));
        assert_eq!(of("s3://bucket/c/a"), expected("y", "x"));
        assert_eq!(of("s3://bucket/c/b"), expected("", ""));
        assert_eq!(of("s3://bucket2"), expected("c", ""));
        assert_eq!(of("s3://bucket3"), expected("", ""));
    }
}
