//! Listings of prefixes.

use std::sync::Arc;

use futures::{StreamExt, TryStreamExt};
use object_store::ObjectMeta;

use crate::client::{CUT_ANSWERS, Client, key_of, pause};
use crate::error::{StorageError, StorageFault, is_cut};
use crate::listing::{Listing, ListingBuilder, first_below};
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

    /// What lies right below `url`: folders, and objects as storage describes them, sorted. There may be a million, each of some 200 bytes.
    async fn list_right_below(&self, url: &ObjectUrl) -> Result<(Vec<ObjectUrl>, Vec<ObjectMeta>), StorageError> {
        self.can_list(url)?;
        let key = key_of(url)?;
        let mut attempt = 0;
        let mut listed = loop {
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
        // A prefix itself may be an object without bytes, made by programs that show folders.
        listed.objects.retain(|meta| {
            let key = meta.location.as_ref();
            key != url.key() && self.can_name(&url.with_key(key))
        });
        listed.objects.sort_unstable_by(|a, b| a.location.cmp(&b.location));
        Ok((folders, listed.objects))
    }

    /// What lies right below `url`.
    pub async fn list_folder(&self, url: &ObjectUrl) -> Result<Folder, StorageError> {
        let (folders, objects) = self.list_right_below(url).await?;
        let objects = objects.into_iter().map(|meta| entry(url, &meta)).collect();
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

    /// All objects below `url`, in pages; none where there are more than `most`.
    pub async fn list_pages(&self, url: &ObjectUrl, most: usize) -> Result<Option<Listing>, StorageError> {
        self.can_list(url)?;
        let key = key_of(url)?;
        let mut stream = self.store.list(Some(&key));
        let mut found = ListingBuilder::default();
        let mut last = None;
        let mut seen = 0;
        let mut attempt = 0;
        loop {
            // The limit is one of a page: entries of a page come at once.
            match tokio::time::timeout(self.limits.whole(), stream.next()).await {
                Err(_) => return Err(self.timed_out(url)),
                Ok(None) => return Ok(Some(found.finish())),
                Ok(Some(Ok(_))) if seen == most => return Ok(None),
                Ok(Some(Ok(meta))) => {
                    seen += 1;
                    let entry = entry(url, &meta);
                    last = Some(meta.location);
                    if self.can_name(&entry.url) {
                        found.push(entry.url.key(), &entry.stat);
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

    /// All objects below `url`. The prefixes right below it are listed at the same time.
    pub async fn list(self: Arc<Self>, url: ObjectUrl) -> Result<Listing, StorageError> {
        let (mut folders, objects) = self.list_right_below(&url).await?;
        // In the order of the keys below them.
        folders.sort_by_cached_key(|prefix| first_below(prefix.key()));
        let mut objects = objects.into_iter().peekable();
        let mut found = ListingBuilder::default();
        let mut below = futures::stream::iter(folders)
            .map(|prefix| {
                let client = Arc::clone(&self);
                async move {
                    let listing = client.list_pages(&prefix, usize::MAX).await?;
                    Ok((prefix, listing.unwrap_or_default()))
                }
            })
            .buffered(AT_ONCE);
        while let Some((prefix, listing)) = below.try_next().await? {
            let first = first_below(prefix.key());
            while let Some(object) = objects.next_if(|object| *object.location.as_ref() < *first) {
                found.push(object.location.as_ref(), &Stat::of(&object));
            }
            found.append(&listing);
        }
        for object in objects {
            found.push(object.location.as_ref(), &Stat::of(&object));
        }
        Ok(found.finish().without_folders())
    }
}

fn entry(below: &ObjectUrl, meta: &ObjectMeta) -> Entry {
    Entry {
        url: below.with_key(meta.location.as_ref()),
        stat: Stat::of(meta),
    }
}
