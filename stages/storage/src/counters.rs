//! What was asked of object storage.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Requests and bytes since the process began. A request that was sent again counts again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StorageCounts {
    /// Pages of listings.
    pub list: u64,
    pub head: u64,
    pub get: u64,
    /// Whole objects, parts, and the beginnings and ends of uploads in parts.
    pub put: u64,
    pub delete: u64,
    /// Requests that were answered by 429 or 5xx, or not at all: they are sent again, while there is time.
    pub failed: u64,
    /// Bytes of objects that came.
    pub bytes_read: u64,
    /// Bytes that were sent.
    pub bytes_written: u64,
}

impl StorageCounts {
    /// All requests.
    pub fn requests(&self) -> u64 {
        self.list + self.head + self.get + self.put + self.delete
    }
}

impl fmt::Display for StorageCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} requests (list {}, head {}, get {}, put {}, delete {}); {} failed and were retried or given up; {} bytes read, {} written",
            self.requests(),
            self.list,
            self.head,
            self.get,
            self.put,
            self.delete,
            self.failed,
            self.bytes_read,
            self.bytes_written
        )
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    list: AtomicU64,
    head: AtomicU64,
    get: AtomicU64,
    put: AtomicU64,
    delete: AtomicU64,
    failed: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    left_out: Mutex<BTreeSet<String>>,
}

/// Most keys that are remembered as left out.
const MOST_LEFT_OUT: usize = 1000;

impl Counters {
    pub fn counts(&self) -> StorageCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StorageCounts {
            list: of(&self.list),
            head: of(&self.head),
            get: of(&self.get),
            put: of(&self.put),
            delete: of(&self.delete),
            failed: of(&self.failed),
            bytes_read: of(&self.bytes_read),
            bytes_written: of(&self.bytes_written),
        }
    }

    /// An object of this key is left out of a listing: no URL names it.
    pub fn left_out(&self, key: &str) {
        let mut left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        if left_out.len() < MOST_LEFT_OUT {
            left_out.insert(key.to_owned());
        }
    }

    pub fn all_left_out(&self) -> BTreeSet<String> {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn read(&self, bytes: usize) {
        self.bytes_read.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// A request leaves, with its method, the query of its URL and this many bytes.
    #[cfg(feature = "object-store")]
    pub fn sent(&self, method: &str, query: &str, bytes: u64) {
        let lists = is_listing(query);
        let counter = match method {
            "GET" if lists => &self.list,
            "PROPFIND" => &self.list,
            "GET" => &self.get,
            "HEAD" => &self.head,
            "DELETE" => &self.delete,
            _ => &self.put,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        self.bytes_written.fetch_add(bytes, Ordering::Relaxed);
    }

    #[cfg(feature = "object-store")]
    pub fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }
}

/// Whether the query of a URL asks for a listing.
#[cfg(feature = "object-store")]
pub(crate) fn is_listing(query: &str) -> bool {
    ["list-type=", "comp=list", "prefix="]
        .iter()
        .any(|word| query.contains(word))
}
