//! Listings of prefixes.

use std::collections::HashSet;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt};

use crate::client::{CUT_ANSWERS, Client, key_of, pause};
use crate::error::{StorageError, StorageFault, is_cut};
use crate::location::ObjectUrl;
use crate::stat::Stat;

/// Prefixes that are listed at the same time.
const AT_ONCE: usize = 16;

/// An object in a listing.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub url: ObjectUrl,
    pub stat: Stat,
}

/// What lies right below a prefix, sorted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Folder {
    pub folders: Vec<ObjectUrl>,
    pub objects: Vec<Entry>,
}

impl Client {
    fn can_list(&self, url: &ObjectUrl) -> Result<(), StorageError> {
        if url.can_be_listed() {
            return Ok(());
        }
        let said = "a web server's address cannot be listed; name files";
        Err(StorageError::of(StorageFault::Unsupported, &url.to_string(), said))
    }

    /// Whether an object can be named by a URL. One that cannot is left out of listings, which is noted.
    fn can_name(&self, url: &ObjectUrl) -> bool {
        let readable = url.is_readable();
        if !readable {
            self.counters.left_out(url.key());
        }
        readable
    }

    /// What lies right below `url`.
    pub async fn list_folder(&self, url: &ObjectUrl) -> Result<Folder, StorageError> {
        self.can_list(url)?;
        let key = key_of(url)?;
        let mut attempt = 0;
        let listed = loop {
            match tokio::time::timeout(self.limits.whole(), self.store.list_with_delimiter(Some(&key))).await {
                Ok(Ok(listed)) => break listed,
                Ok(Err(error)) if is_cut(&error) && attempt < CUT_ANSWERS => {}
                Ok(Err(error)) => return Err(self.fault(url, &error)),
                Err(_) => return Err(self.timed_out(url)),
            }
            attempt += 1;
            pause(attempt).await;
        };
        let mut folders: Vec<ObjectUrl> = listed
            .common_prefixes
            .iter()
            .map(|prefix| url.with_key(prefix.as_ref()))
            .collect();
        folders.sort_unstable();
        folders.retain(|folder| self.can_name(folder));
        let mut objects: Vec<Entry> = listed.objects.iter().map(|meta| entry(url, meta)).collect();
        objects.retain(|entry| self.can_name(&entry.url));
        // A prefix itself may be an object without bytes, made by programs that show folders.
        objects.retain(|entry| entry.url.key() != url.key());
        objects.sort_unstable_by(|a, b| a.url.cmp(&b.url));
        Ok(Folder { folders, objects })
    }

    /// Whether there is an object below `url`.
    pub async fn has_any(&self, url: &ObjectUrl) -> Result<bool, StorageError> {
        self.can_list(url)?;
        let key = key_of(url)?;
        let mut attempt = 0;
        loop {
            let mut stream = self.store.list(Some(&key));
            match tokio::time::timeout(self.limits.whole(), stream.next()).await {
                Err(_) => return Err(self.timed_out(url)),
                Ok(None) => return Ok(false),
                Ok(Some(Ok(_))) => return Ok(true),
                Ok(Some(Err(error))) if is_cut(&error) && attempt < CUT_ANSWERS => {
                    attempt += 1;
                    pause(attempt).await;
                }
                Ok(Some(Err(error))) => return Err(self.fault(url, &error)),
            }
        }
    }

    /// All objects below `url`, in pages.
    async fn list_pages(&self, url: &ObjectUrl) -> Result<Vec<Entry>, StorageError> {
        let key = key_of(url)?;
        let mut stream = self.store.list(Some(&key));
        let mut found: Vec<Entry> = Vec::new();
        let mut last = None;
        let mut attempt = 0;
        loop {
            // The limit is one of a page: entries of a page come at once.
            match tokio::time::timeout(self.limits.whole(), stream.next()).await {
                Err(_) => return Err(self.timed_out(url)),
                Ok(None) => return Ok(found),
                Ok(Some(Ok(meta))) => {
                    let entry = entry(url, &meta);
                    last = Some(meta.location);
                    if self.can_name(&entry.url) {
                        found.push(entry);
                    }
                }
                Ok(Some(Err(error))) if is_cut(&error) && attempt < CUT_ANSWERS => {
                    attempt += 1;
                    pause(attempt).await;
                    stream = match &last {
                        Some(last) => self.store.list_with_offset(Some(&key), last),
                        None => self.store.list(Some(&key)),
                    };
                }
                Ok(Some(Err(error))) => return Err(self.fault(url, &error)),
            }
        }
    }

    /// All objects below `url`, sorted by key. The prefixes right below it are listed at the same time.
    pub async fn list(self: Arc<Self>, url: ObjectUrl) -> Result<Vec<Entry>, StorageError> {
        let folder = self.list_folder(&url).await?;
        let below = futures::stream::iter(folder.folders)
            .map(|prefix| {
                let client = Arc::clone(&self);
                async move { client.list_pages(&prefix).await }
            })
            .buffer_unordered(AT_ONCE)
            .try_concat()
            .await?;
        let mut found = folder.objects;
        found.extend(below);
        without_folders(&mut found);
        found.sort_unstable_by(|a, b| a.url.cmp(&b.url));
        Ok(found)
    }
}

/// Drops objects without bytes that have the name of a prefix of others.
fn without_folders(found: &mut Vec<Entry>) {
    let empty: HashSet<&str> = found
        .iter()
        .filter(|entry| entry.stat.size == 0)
        .map(|entry| entry.url.key())
        .collect();
    if empty.is_empty() {
        return;
    }
    let mut folders = HashSet::new();
    for entry in found.iter() {
        let mut key = entry.url.key();
        while let Some((parent, _)) = key.rsplit_once('/') {
            if empty.contains(parent) {
                folders.insert(parent.to_string());
            }
            key = parent;
        }
    }
    found.retain(|entry| entry.stat.size > 0 || !folders.contains(entry.url.key()));
}

fn entry(below: &ObjectUrl, meta: &object_store::ObjectMeta) -> Entry {
    Entry {
        url: below.with_key(meta.location.as_ref()),
        stat: Stat::of(meta),
    }
}
