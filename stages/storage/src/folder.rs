//! Folders: what lies right below a prefix, from a listing of all that is below it, or from storage.

use std::io;
use std::path::Path;

use crate::client::wait;
use crate::error::StorageError;
use crate::list::Folder;
use crate::listing::{Listing, first_below};
use crate::location::{Location, ObjectUrl};
use crate::storage::Storage;

impl Storage {
    /// The names of what lies right below a prefix, in no order, each with whether it is a folder; none where it cannot be listed. If this process has listed the prefix
    /// or one above it ([`Storage::list_and_remember`]), the answer is from there, and nothing is asked for.
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn names_in(&self, url: &ObjectUrl) -> Result<Vec<(String, bool)>, StorageError> {
        if let Some(found) = self.of_listing(url, names_in) {
            return Ok(found);
        }
        if !url.can_be_listed() {
            return Ok(Vec::new());
        }
        let Folder { folders, objects } = self.list_folder(url)?;
        let folders = folders.iter().map(|folder| (folder.name().to_owned(), true));
        let objects = objects.iter().map(|object| (object.url.name().to_owned(), false));
        Ok(folders.chain(objects).collect())
    }

    /// Whether there is an object below a prefix, as far as that can be listed; of a listing as [`Storage::names_in`].
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn is_prefix(&self, url: &ObjectUrl) -> Result<bool, StorageError> {
        let is_listed = |listing: &Listing, url: &ObjectUrl| listing.has_below(url.key());
        if let Some(found) = self.of_listing(url, is_listed) {
            return Ok(found);
        }
        if !url.can_be_listed() {
            return Ok(false);
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
        Ok(Location::Object(url)) => Ok(storage.is_prefix(&url)?),
        Err(_) => Ok(false),
    }
}

/// The names of what lies right below a prefix, and whether they are of folders, in the order of keys. The objects of a folder in it are
/// passed over at once.
fn names_in(listing: &Listing, folder: &ObjectUrl) -> Vec<(String, bool)> {
    let first = first_below(folder.key());
    let mut names = Vec::new();
    let mut cursor = listing.from(&first);
    while cursor.advance() {
        let Some(below) = cursor.key().strip_prefix(&first) else {
            break;
        };
        match below.split_once('/') {
            None => names.push((below.to_owned(), false)),
            Some((name, _)) => {
                names.push((name.to_owned(), true));
                // `0` follows `/`.
                let after = format!("{first}{name}0");
                cursor = listing.from(&after);
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::listing::ListingBuilder;
    use crate::stat::Stat;

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
        let mut listing = ListingBuilder::default();
        keys.iter().for_each(|key| listing.push(key, &stat));
        let listing = listing.finish();
        let of = |folder: &str| {
            let names = names_in(&listing, &url(folder));
            let of = |wanted: bool| {
                let names = names.iter().filter(|(_, is_folder)| *is_folder == wanted);
                names.map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(" ")
            };
            (of(true), of(false))
        };
        let expected = |folders: &str, objects: &str| (folders.to_string(), objects.to_string());
        assert_eq!(of("s3://bucket"), expected("c c0 d", "a"));
        assert_eq!(of("s3://bucket/c"), expected("a-b a", "a.txt a0 b"));
        assert_eq!(of("s3://bucket/c/a"), expected("y", "x"));
        assert_eq!(of("s3://bucket/c/b"), expected("", ""));
    }
}
