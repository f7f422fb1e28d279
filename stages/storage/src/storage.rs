//! Object storage as the rest of the program uses it: calls that wait for their answer.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use object_store::{ObjectStoreExt, PutMode};

use crate::blocks::Blocks;
use crate::client::{Client, key_of, wait};
use crate::counters::{Counters, StorageCounts};
use crate::error::{StorageError, StorageFault};
use crate::file_version::FileVersion;
use crate::kept_folder::KeptFolder;
use crate::list::{Entry, Folder};
use crate::listing::{ListedObjects, Listing, ListingBuilder};
use crate::location::{ObjectUrl, Scheme};
use crate::open_bucket::{self, Limits};
use crate::stat::Stat;

/// Object storage of all kinds, with one client for each bucket. Cheap to clone; clones share clients, listings and counts.
#[derive(Clone)]
pub struct Storage(Arc<Shared>);

/// One without settings and credentials: enough for files on this machine, and what tests without buckets use.
impl Default for Storage {
    fn default() -> Self {
        Storage::with_environment([])
    }
}

impl std::fmt::Debug for Storage {
    /// Without the environment, which has secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Storage").finish_non_exhaustive()
    }
}

struct Shared {
    environment: BTreeMap<String, String>,
    limits: Result<Limits, StorageError>,
    counters: Arc<Counters>,
    clients: Mutex<HashMap<(Scheme, String), Arc<Client>>>,
    remembered: Mutex<Remembered>,
    kept: Result<KeptFolder, StorageError>,
    blocks: Blocks,
    /// Locks of copies that this process uses, until it ends, by their folders.
    held: Mutex<HashMap<PathBuf, File>>,
}

/// What listings told of objects.
#[derive(Default)]
pub(crate) struct Remembered {
    /// By their prefixes.
    listings: BTreeMap<ObjectUrl, Remembering>,
    /// Of objects that were opened since.
    stats: BTreeMap<ObjectUrl, Stat>,
    /// Prefixes whose objects are looked at one by one.
    looked_at: HashMap<ObjectUrl, Arc<LookedAt>>,
    /// How many prefixes right below another one were listed as they were looked at.
    listed_below: HashMap<ObjectUrl, usize>,
    /// Paths of copies on this machine.
    pub kept: HashMap<ObjectUrl, PathBuf>,
    /// Requests under way whose answers are to be remembered, each with the objects that were forgotten since it began: what it
    /// says of these may be of before they were written.
    asking: HashMap<u64, HashSet<ObjectUrl>>,
    /// The number of the next of them.
    next: u64,
}

/// A prefix whose objects are looked at one by one.
#[derive(Default)]
struct LookedAt {
    /// How many were.
    looks: AtomicUsize,
    /// Whether the first look began.
    began: AtomicBool,
    /// Held by each look, and alone by a listing: looks wait for what it says.
    listing: RwLock<()>,
}

/// A listing that is remembered.
struct Remembering {
    /// The newer, the larger.
    number: u64,
    at: Instant,
    listing: Arc<Listing>,
    /// Whether nothing was forgotten since: what is not in it is not there.
    is_complete: bool,
    /// What it no longer says.
    forgotten: HashSet<ObjectUrl>,
}

impl Remembered {
    /// Remembers a listing, which is the newest.
    fn add(&mut self, prefix: &ObjectUrl, at: Instant, listing: Arc<Listing>, forgotten: HashSet<ObjectUrl>) {
        let remembering = Remembering {
            number: self.next,
            at,
            listing,
            is_complete: forgotten.is_empty(),
            forgotten,
        };
        self.next += 1;
        self.listings.insert(prefix.clone(), remembering);
    }

    /// The newest of the listings of this prefix and of those above it.
    fn newest(&self, from: Option<ObjectUrl>) -> Option<&Remembering> {
        let prefixes = std::iter::successors(from, ObjectUrl::parent);
        let listings = prefixes.filter_map(|prefix| self.listings.get(&prefix));
        listings.max_by_key(|listed| listed.number)
    }

    /// The newest listing that has what is below `url`, if it is complete.
    fn complete(&self, url: &ObjectUrl) -> Option<&Remembering> {
        self.newest(Some(url.clone())).filter(|listed| listed.is_complete)
    }

    /// What is known of an object: nothing, or what is said of it, or that it is not there.
    fn known(&self, url: &ObjectUrl) -> Option<Option<Stat>> {
        if let Some(stat) = self.stats.get(url) {
            return Some(Some(stat.clone()));
        }
        // One of the object itself is of what is below it.
        let newest = self.newest(url.parent())?;
        match newest.listing.get(url.key()) {
            Some(stat) if !newest.forgotten.contains(url) => Some(Some(stat)),
            Some(_) => None,
            None => newest.is_complete.then_some(None),
        }
    }
}

/// Removes what is below a prefix.
fn remove_below<V>(of: &mut BTreeMap<ObjectUrl, V>, prefix: &ObjectUrl) {
    let first = match prefix.key() {
        "" => prefix.clone(),
        key => prefix.with_key(&format!("{key}/")),
    };
    let urls = of.range(&first..).map(|(url, _)| url);
    let gone: Vec<ObjectUrl> = urls.take_while(|url| below(prefix, url)).cloned().collect();
    for url in gone {
        of.remove(&url);
    }
}

/// A request under way whose answer is to be remembered.
struct Asking<'a> {
    storage: &'a Storage,
    number: u64,
}

impl Asking<'_> {
    /// Objects that were forgotten meanwhile; none if all were.
    fn forgotten(&self, remembered: &Remembered) -> Option<HashSet<ObjectUrl>> {
        remembered.asking.get(&self.number).cloned()
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.storage.remembered().asking.remove(&self.number);
    }
}

/// A listing of a prefix is used for so long by whoever asks for another one.
const LISTING_AGE: Duration = Duration::from_secs(60);

/// A page of a listing has so many objects.
const PAGE: usize = 1_000;

/// How many objects of a folder are looked at before it is listed, in at most as many pages. Folders with more objects are listed
/// after the next number. All pages are at most four thirds of the looks; the largest listing takes some 330 MB.
const LISTED_AFTER: [usize; 6] = [8, 32, 128, 512, 2_048, 8_192];

/// After so many folders beside each other were listed, the next ones are listed at once, in at most a page.
const LISTED_BESIDE: usize = 2;

/// Folders whose looks are counted; then counting begins again.
const MOST_FOLDERS: usize = 100_000;

/// Most objects that are remembered beside those of listings.
const MOST_OPENED: usize = 1_000_000;

impl Storage {
    /// One that is set by the environment of the process. It reads the environment now, and no bucket is asked anything yet. A
    /// program makes one in `main` and hands it down, so that all parts share clients, listings and counts.
    pub fn of_environment() -> Storage {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Storage::with_environment(std::env::vars_os().filter_map(text))
    }

    /// One that is set by these variables in place of the environment's.
    pub fn with_environment(variables: impl IntoIterator<Item = (String, String)>) -> Storage {
        let environment: BTreeMap<String, String> = variables.into_iter().collect();
        Storage(Arc::new(Shared {
            limits: Limits::of(&environment),
            kept: KeptFolder::of(&environment),
            environment,
            counters: Arc::default(),
            clients: Mutex::default(),
            remembered: Mutex::default(),
            blocks: Blocks::default(),
            held: Mutex::default(),
        }))
    }

    /// Requests and bytes so far.
    pub fn counts(&self) -> StorageCounts {
        self.0.counters.counts()
    }

    /// Keys of objects (and prefixes) that listings left out since the process began, as no URL can name them: with `//`, a part
    /// `.` or `..`, or what looks like a query. A thousand at most.
    pub fn left_out(&self) -> BTreeSet<String> {
        self.0.counters.all_left_out()
    }

    pub(crate) fn client(&self, url: &ObjectUrl) -> Result<Arc<Client>, StorageError> {
        let name = (url.scheme(), url.bucket().to_string());
        let mut clients = self.0.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(&name) {
            return Ok(Arc::clone(client));
        }
        let limits = self.0.limits.clone()?;
        let mut secrets = open_bucket::secrets(&self.0.environment);
        let store = open_bucket::open(url, &self.0.environment, &limits, &self.0.counters, &mut secrets)?;
        let client = Arc::new(Client {
            store,
            limits,
            counters: Arc::clone(&self.0.counters),
            secrets,
        });
        clients.insert(name, Arc::clone(&client));
        Ok(client)
    }

    pub(crate) fn remembered(&self) -> MutexGuard<'_, Remembered> {
        self.0.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn environment(&self) -> &BTreeMap<String, String> {
        &self.0.environment
    }

    pub(crate) fn kept(&self) -> Result<KeptFolder, StorageError> {
        self.0.kept.clone()
    }

    pub(crate) fn blocks(&self) -> &Blocks {
        &self.0.blocks
    }

    /// The locks of copies that are held until the process ends.
    pub(crate) fn held(&self) -> MutexGuard<'_, HashMap<PathBuf, File>> {
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what a listing told of an object.
    pub(crate) fn forget(&self, url: &ObjectUrl) {
        let mut remembered = self.remembered();
        for forgotten in remembered.asking.values_mut() {
            forgotten.insert(url.clone());
        }
        remembered.stats.remove(url);
        remembered.kept.retain(|kept, _| kept != url && !below(kept, url));
        for prefix in std::iter::successors(url.parent(), ObjectUrl::parent) {
            let Some(listed) = remembered.listings.get_mut(&prefix) else {
                continue;
            };
            if listed.listing.len() == 0 {
                remembered.listings.remove(&prefix);
                continue;
            }
            // What cannot be listed again stays known.
            listed.is_complete &= !prefix.can_be_listed();
            if listed.listing.get(url.key()).is_some() {
                listed.forgotten.insert(url.clone());
            }
        }
    }

    /// Forgets what is remembered of all objects: they are asked for again.
    pub fn forget_all(&self) {
        let mut remembered = self.remembered();
        // Answers to requests that are under way are not remembered either.
        *remembered = Remembered {
            next: remembered.next,
            ..Remembered::default()
        };
    }

    /// Begins a request whose answer is to be remembered.
    fn asking(&self) -> Asking<'_> {
        let mut remembered = self.remembered();
        let number = remembered.next;
        remembered.next += 1;
        remembered.asking.insert(number, HashSet::new());
        Asking { storage: self, number }
    }

    /// What lies right below a prefix. One that has nothing below it is not there, which shows in an empty [`Folder`] alone.
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn list_folder(&self, url: &ObjectUrl) -> Result<Folder, StorageError> {
        let (client, url) = (self.client(url)?, url.clone());
        wait(async move { client.list_folder(&url).await })
    }

    /// All objects below a prefix, sorted by key.
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn list(&self, url: &ObjectUrl) -> Result<Vec<Entry>, StorageError> {
        let (client, prefix) = (self.client(url)?, url.clone());
        let listing = Arc::new(wait(client.list(prefix.clone()))?);
        Ok(ListedObjects { listing, prefix }.iter().collect())
    }

    /// As [`Storage::list`]; [`Storage::look`] then answers from this listing, without a request, until the object is written or
    /// found to be changed. One of the minute before is used again.
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn list_and_remember(&self, url: &ObjectUrl) -> Result<ListedObjects, StorageError> {
        let listed = |listing: &Arc<Listing>| ListedObjects {
            listing: Arc::clone(listing),
            prefix: url.clone(),
        };
        if let Some(known) = self.remembered().complete(url)
            && (known.at.elapsed() < LISTING_AGE || !url.can_be_listed())
        {
            return Ok(listed(&known.listing));
        }
        let (client, prefix) = (self.client(url)?, url.clone());
        let found = self.list_to_remember(url, || wait(client.list(prefix)).map(Some))?;
        Ok(listed(&found.unwrap_or_default()))
    }

    /// Remembers the listing of a prefix that `list` gives, if it gives one.
    fn list_to_remember(
        &self,
        url: &ObjectUrl,
        list: impl FnOnce() -> Result<Option<Listing>, StorageError>,
    ) -> Result<Option<Arc<Listing>>, StorageError> {
        let began = Instant::now();
        let asking = self.asking();
        let Some(listing) = list()?.map(Arc::new) else {
            return Ok(None);
        };
        let mut remembered = self.remembered();
        remove_below(&mut remembered.stats, url);
        remove_below(&mut remembered.listings, url);
        if let Some(forgotten) = asking.forgotten(&remembered) {
            remembered.add(url, began, Arc::clone(&listing), forgotten);
        }
        Ok(Some(listing))
    }

    /// Remembers all that is below a prefix which cannot be listed: keys from there on, sizes in bytes, and ETags. From now on it is looked
    /// into as a prefix of a bucket is. Objects that cannot be named by a path and the prefix are left out, which is noted.
    ///
    /// # Errors
    /// When a key has an empty part, `.` or `..`.
    pub fn remember_all(
        &self,
        url: &ObjectUrl,
        objects: impl IntoIterator<Item = (String, u64, String)>,
    ) -> Result<(), StorageError> {
        let mut listing = ListingBuilder::default();
        for (key, size, etag) in objects {
            // Paths of URLs are percent-encoded, and names that lists have are not.
            if url.scheme().is_web() && key.contains(['%', '?', '#']) {
                self.0.counters.left_out(&key);
                continue;
            }
            let stat = Stat {
                size,
                modified: SystemTime::UNIX_EPOCH,
                etag: Some(etag),
                version: None,
            };
            listing.push(url.join(&key)?.key(), &stat);
        }
        let listing = Arc::new(listing.finish());
        self.remembered().add(url, Instant::now(), listing, HashSet::new());
        Ok(())
    }

    /// Remembers that an object has nothing below it, as a file has nothing: nobody asks for what is below it from now on.
    pub fn remember_file(&self, url: &ObjectUrl) {
        self.remembered()
            .add(url, Instant::now(), Arc::default(), HashSet::new());
    }

    /// What `of` finds in a listing of this process, if there is one of all that is below `url`.
    pub(crate) fn of_listing<T>(&self, url: &ObjectUrl, of: impl FnOnce(&Listing, &ObjectUrl) -> T) -> Option<T> {
        let listing = Arc::clone(&self.remembered().complete(url)?.listing);
        Some(of(&listing, url))
    }

    /// What is said of an object; none if it is not there. It may be from a listing of this process.
    ///
    /// # Errors
    /// When the object cannot be looked at.
    pub fn look(&self, url: &ObjectUrl) -> Result<Option<Stat>, StorageError> {
        if let Some(known) = self.remembered().known(url) {
            return Ok(known);
        }
        match self.stat(url) {
            Ok(stat) => Ok(Some(stat)),
            Err(error) if error.fault == StorageFault::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// As [`Storage::look`], for one of many objects: after some of a folder have been looked at, the folder is listed where that
    /// takes few requests, and the listing answers for the rest.
    ///
    /// # Errors
    /// When the object cannot be looked at.
    pub fn look_at_many(&self, url: &ObjectUrl) -> Result<Option<Stat>, StorageError> {
        if let Some(known) = self.remembered().known(url) {
            return Ok(known);
        }
        let Some(folder) = url.parent().filter(ObjectUrl::can_be_listed) else {
            return self.look(url);
        };
        let (looked_at, beside) = {
            let mut remembered = self.remembered();
            let beside = folder
                .parent()
                .and_then(|above| remembered.listed_below.get(&above).copied());
            if remembered.looked_at.len() >= MOST_FOLDERS {
                remembered.looked_at.clear();
                remembered.listed_below.clear();
            }
            let looked_at = remembered.looked_at.entry(folder.clone()).or_default();
            (Arc::clone(looked_at), beside.unwrap_or_default())
        };
        let list = |most: usize, as_looked: Option<&Stat>| {
            let _listing = looked_at.listing.write().unwrap_or_else(PoisonError::into_inner);
            self.list_at_most(&folder, most, url, as_looked);
        };
        if !looked_at.began.swap(true, Ordering::Relaxed) && beside >= LISTED_BESIDE {
            list(PAGE, None);
        }
        let found = {
            let _look = looked_at.listing.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = self.remembered().known(url) {
                return Ok(known);
            }
            self.look(url)?
        };
        if found.is_some() {
            let looks = looked_at.looks.fetch_add(1, Ordering::Relaxed) + 1;
            if LISTED_AFTER.contains(&looks) {
                list(looks * PAGE, found.as_ref());
            }
        }
        Ok(found)
    }

    /// Lists a folder and remembers it, unless it has more than `most` objects, or says another thing of an object than a look at it did:
    /// answers must not depend on the way. What keeps it from being listed is no error: its objects are looked at one by one.
    fn list_at_most(&self, folder: &ObjectUrl, most: usize, url: &ObjectUrl, as_looked: Option<&Stat>) {
        let Ok(client) = self.client(folder) else { return };
        let list = || {
            let prefix = folder.clone();
            let listing = wait(async move { client.list_pages(&prefix, most).await })?;
            // Without an ETag there is the time alone, which listings may give to another precision.
            let is_same = |listed: Stat| {
                as_looked.is_none_or(|looked| {
                    looked.etag.is_some() && FileVersion::of_object(&listed) == FileVersion::of_object(looked)
                })
            };
            let listing = listing.filter(|listing| as_looked.is_none() || listing.get(url.key()).is_some_and(is_same));
            Ok(listing.map(Listing::without_folders))
        };
        // It may be forbidden (403). Whether the server is down, the next look says.
        let listed = self.list_to_remember(folder, list);
        if let (Ok(Some(_)), Some(above)) = (listed, folder.parent()) {
            *self.remembered().listed_below.entry(above).or_default() += 1;
        }
    }

    /// What storage says of an object now.
    ///
    /// # Errors
    /// When it is not there or cannot be looked at.
    pub fn stat(&self, url: &ObjectUrl) -> Result<Stat, StorageError> {
        let (client, url) = (self.client(url)?, url.clone());
        wait(async move {
            let key = key_of(&url)?;
            let meta = client.limited(&url, client.store.head(&key)).await?;
            Ok(Stat::of(&meta))
        })
    }

    /// All bytes of an object of at most `most` bytes.
    ///
    /// # Errors
    /// When it is not there, cannot be read, or is larger.
    pub fn read(&self, url: &ObjectUrl, most: u64) -> Result<Bytes, StorageError> {
        let found = match self.look(url)? {
            Some(found) => found,
            None => return Err(StorageError::of(StorageFault::NotFound, &url.to_string(), "")),
        };
        if found.size > most {
            let said = format!("{} bytes, and {most} are allowed", found.size);
            return Err(StorageError::of(StorageFault::TooLarge, &url.to_string(), &said));
        }
        self.get(url, None, &found)
    }

    /// The bytes of an object in `range`, of the object that `found` was told of.
    ///
    /// # Errors
    /// When they cannot be read, the object ends before them, or it was changed since.
    pub fn read_range(&self, url: &ObjectUrl, range: Range<u64>, found: &Stat) -> Result<Bytes, StorageError> {
        if range.start > range.end || range.end > found.size {
            let said = format!(
                "bytes {} to {} were asked for of {}",
                range.start, range.end, found.size
            );
            return Err(StorageError::of(StorageFault::Other, &url.to_string(), &said));
        }
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        self.get(url, Some(range), found)
    }

    fn get(&self, url: &ObjectUrl, range: Option<Range<u64>>, found: &Stat) -> Result<Bytes, StorageError> {
        let (client, address, of) = (self.client(url)?, url.clone(), found.clone());
        let got = wait(async move { client.get(&address, range, Some(&of)).await });
        got.map(|(_, bytes)| bytes).inspect_err(|_| self.forget(url))
    }

    /// What is said of an object that is opened, which is remembered.
    ///
    /// # Errors
    /// When it is not there or cannot be looked at.
    pub(crate) fn opened(&self, url: &ObjectUrl) -> Result<Stat, StorageError> {
        let asking = self.asking();
        let Some(found) = self.look(url)? else {
            return Err(StorageError::of(StorageFault::NotFound, &url.to_string(), ""));
        };
        let mut remembered = self.remembered();
        let is_current = asking
            .forgotten(&remembered)
            .is_some_and(|forgotten| !forgotten.contains(url));
        if is_current && remembered.stats.len() < MOST_OPENED && remembered.known(url).is_none() {
            // Who opens it again needs no other look: once it is changed, reading says so.
            remembered.stats.insert(url.clone(), found.clone());
        }
        drop(remembered);
        Ok(found)
    }

    /// The folder for copies of objects that are being read: `FLOW_STORAGE_CACHE`, or that of the system for temporary files.
    pub fn cache_folder(&self) -> PathBuf {
        let named = self
            .0
            .environment
            .get("FLOW_STORAGE_CACHE")
            .filter(|named| !named.is_empty());
        named.map_or_else(std::env::temp_dir, PathBuf::from)
    }

    /// Writes an object whole, in place of one that is there.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn put(&self, url: &ObjectUrl, bytes: impl Into<Bytes>) -> Result<(), StorageError> {
        self.put_mode(url, bytes.into(), PutMode::Overwrite).map(drop)
    }

    /// Writes an object whole where there is none.
    ///
    /// # Errors
    /// [`StorageFault::AlreadyExists`] when there is one; when it cannot be written.
    pub fn put_if_absent(&self, url: &ObjectUrl, bytes: impl Into<Bytes>) -> Result<(), StorageError> {
        self.put_mode(url, bytes.into(), PutMode::Create).map(drop)
    }

    /// Deletes an object. One that is not there is deleted already.
    ///
    /// # Errors
    /// When it cannot be deleted.
    pub fn delete(&self, url: &ObjectUrl) -> Result<(), StorageError> {
        can_write(url)?;
        let (client, address) = (self.client(url)?, url.clone());
        let deleted = wait(async move {
            let key = key_of(&address)?;
            client.limited(&address, client.store.delete(&key)).await
        });
        self.forget(url);
        match deleted {
            Err(error) if error.fault == StorageFault::NotFound => Ok(()),
            deleted => deleted,
        }
    }
}

/// Names of the folders exactly two levels below a prefix in which objects lie, each once, sorted. The listing is remembered
/// ([`Storage::list_and_remember`]).
///
/// # Errors
/// When it cannot be listed.
pub fn folders_two_levels_below(storage: &Storage, url: &ObjectUrl) -> Result<Vec<(String, String)>, StorageError> {
    let mut found = BTreeSet::new();
    for entry in storage.list_and_remember(url)?.iter() {
        let mut parts = entry.url.below(url).unwrap_or_default().splitn(3, '/');
        if let (Some(outer), Some(inner), Some(_)) = (parts.next(), parts.next(), parts.next()) {
            found.insert((outer.to_string(), inner.to_string()));
        }
    }
    Ok(found.into_iter().collect())
}

/// Whether `url` is below `prefix`.
fn below(prefix: &ObjectUrl, url: &ObjectUrl) -> bool {
    url.below(prefix).is_some()
}

pub(crate) fn can_write(url: &ObjectUrl) -> Result<(), StorageError> {
    match url.scheme() {
        Scheme::Https | Scheme::Http => {
            let said = "addresses of web servers are read only";
            Err(StorageError::of(StorageFault::Unsupported, &url.to_string(), said))
        }
        _ if url.key().is_empty() => {
            let said = "it names a bucket, and no object in it";
            Err(StorageError::of(StorageFault::Location, &url.to_string(), said))
        }
        _ => Ok(()),
    }
}
