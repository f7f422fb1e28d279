//! What listings told of objects, as small as it can be looked up: a bucket may have millions.
//!
//! The crate `fst` would shorten the keys alone: it maps a key to one number, so sizes, times and ETags, which are most of the bytes,
//! would need these records all the same. It also takes sorted keys alone, and servers may list in another order.

use std::time::{Duration, SystemTime};

use crate::location::ObjectUrl;
use crate::stat::Stat;

/// Every so many keys one is written whole, and its place is noted.
const BLOCK: usize = 16;

/// Objects of one bucket, sorted by key, each with what storage says of it. A key is written as what it does not share with the one
/// before, so that an object takes some 40 bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Listing {
    bytes: Vec<u8>,
    /// Where each block begins.
    blocks: Vec<usize>,
    count: usize,
    /// The key that was added last.
    last: String,
}

// What follows the time of an object, in one byte.
const NO_ETAG: u8 = 0;
/// 32 hexadecimal digits, in 16 bytes.
const MD5: u8 = 1;
/// The same, then a number: that of the parts of an upload.
const MD5_OF_PARTS: u8 = 2;
const OTHER_ETAG: u8 = 3;
const HAS_VERSION: u8 = 4;

impl Listing {
    pub fn len(&self) -> usize {
        self.count
    }

    /// Adds an object. Its key comes after all that were added.
    fn push_last(&mut self, key: &str, stat: &Stat) {
        let mut shared = 0;
        if self.count.is_multiple_of(BLOCK) {
            self.blocks.push(self.bytes.len());
        } else {
            let same = self.last.bytes().zip(key.bytes()).take_while(|(a, b)| a == b);
            shared = key.floor_char_boundary(same.count());
        }
        self.number(shared as u64);
        self.text(&key[shared..]);
        self.number(stat.size);
        let since = stat.modified.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.number(since.as_secs());
        let has_version = if stat.version.is_some() { HAS_VERSION } else { 0 };
        let etag = stat.etag.as_deref();
        match etag.and_then(md5_of) {
            _ if etag.is_none() => self.bytes.push(NO_ETAG | has_version),
            Some((md5, None)) => {
                self.bytes.push(MD5 | has_version);
                self.bytes.extend(md5);
            }
            Some((md5, Some(parts))) => {
                self.bytes.push(MD5_OF_PARTS | has_version);
                self.bytes.extend(md5);
                self.number(parts);
            }
            None => {
                self.bytes.push(OTHER_ETAG | has_version);
                self.text(etag.unwrap_or_default());
            }
        }
        if let Some(version) = &stat.version {
            self.text(version);
        }
        self.count += 1;
        self.last.clear();
        self.last.push_str(key);
    }

    /// Seven bits to a byte, the lowest first.
    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.bytes.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.bytes.push(number as u8);
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.bytes.extend(text.as_bytes());
    }

    /// The objects in the order of keys, from the first on whose key is `key` or comes after it.
    pub fn from<'l>(&'l self, key: &str) -> Cursor<'l> {
        // The last block whose first key is not after `key`.
        let first_key = |begin: usize| {
            let mut at = begin;
            self.number_at(&mut at);
            self.text_at(&mut at)
        };
        let block = self
            .blocks
            .partition_point(|begin| first_key(*begin) <= key)
            .saturating_sub(1);
        let begin = self.blocks.get(block).copied().unwrap_or(self.bytes.len());
        let mut cursor = Cursor {
            listing: self,
            next: begin,
            key: String::new(),
            stat: begin,
        };
        while cursor.is_before(key) {
            cursor.advance();
        }
        cursor
    }

    fn bytes_at(&self, at: &mut usize, length: usize) -> &[u8] {
        let bytes = self.bytes.get(*at..).unwrap_or_default();
        let bytes = &bytes[..length.min(bytes.len())];
        *at += bytes.len();
        bytes
    }

    fn byte_at(&self, at: &mut usize) -> u8 {
        self.bytes_at(at, 1).first().copied().unwrap_or_default()
    }

    fn number_at(&self, at: &mut usize) -> u64 {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte_at(at);
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        number
    }

    fn text_at(&self, at: &mut usize) -> &str {
        let length = self.number_at(at) as usize;
        std::str::from_utf8(self.bytes_at(at, length)).unwrap_or_default()
    }

    fn digits_at(&self, at: &mut usize) -> String {
        let digits = self.bytes_at(at, 16);
        digits.iter().fold(String::with_capacity(32), |mut text, byte| {
            for digit in [byte >> 4, byte & 15] {
                text.extend(char::from_digit(u32::from(digit), 16));
            }
            text
        })
    }

    /// What is said of an object; none if it is not among these.
    pub fn get(&self, key: &str) -> Option<Stat> {
        let mut cursor = self.from(key);
        (cursor.advance() && cursor.key() == key).then(|| cursor.stat())
    }

    /// Whether there is an object below a prefix, which may be empty.
    pub fn has_below(&self, prefix: &str) -> bool {
        let first = first_below(prefix);
        let mut cursor = self.from(&first);
        cursor.advance() && cursor.key().starts_with(&first)
    }

    /// Drops objects without bytes that have the name of a prefix of others.
    pub fn without_folders(self) -> Listing {
        let mut folders = std::collections::HashSet::new();
        let mut cursor = self.from("");
        while cursor.advance() {
            if cursor.size() == 0 && self.has_below(cursor.key()) {
                folders.insert(cursor.key().to_owned());
            }
        }
        if folders.is_empty() {
            return self;
        }
        let mut kept = Listing::default();
        let mut cursor = self.from("");
        while cursor.advance() {
            if !folders.contains(cursor.key()) {
                kept.push_last(cursor.key(), &cursor.stat());
            }
        }
        kept
    }
}

/// What the keys of all objects below a prefix begin with.
pub(crate) fn first_below(prefix: &str) -> String {
    match prefix {
        "" => String::new(),
        prefix => format!("{prefix}/"),
    }
}

/// The digest of an ETag of 32 small hexadecimal digits, and the number after it.
fn md5_of(etag: &str) -> Option<([u8; 16], Option<u64>)> {
    let (digits, parts) = match etag.split_once('-') {
        Some((digits, parts)) => (
            digits,
            Some(parts.parse::<u64>().ok().filter(|n| n.to_string() == parts)?),
        ),
        None => (etag, None),
    };
    let is_small = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if digits.len() != 32 || !digits.bytes().all(is_small) {
        return None;
    }
    let number = u128::from_str_radix(digits, 16).ok()?;
    Some((number.to_be_bytes(), parts))
}

/// A place in a listing, before the first object or at one.
pub(crate) struct Cursor<'l> {
    listing: &'l Listing,
    /// Where the next object is in the bytes.
    next: usize,
    /// Of the object that this is at.
    key: String,
    /// Where the bytes have what is said of it.
    stat: usize,
}

impl Cursor<'_> {
    /// Whether the next object has a key before this one.
    fn is_before(&self, key: &str) -> bool {
        let listing = self.listing;
        if self.next >= listing.bytes.len() {
            return false;
        }
        let mut at = self.next;
        let shared = listing.number_at(&mut at) as usize;
        let rest = listing.text_at(&mut at);
        let own = self.key.bytes().take(shared).chain(rest.bytes());
        own.cmp(key.bytes()).is_lt()
    }

    /// Goes to the next object; false where there is none.
    pub fn advance(&mut self) -> bool {
        let listing = self.listing;
        if self.next >= listing.bytes.len() {
            return false;
        }
        let mut at = self.next;
        self.key.truncate(listing.number_at(&mut at) as usize);
        self.key.push_str(listing.text_at(&mut at));
        self.stat = at;
        let (_, _) = (listing.number_at(&mut at), listing.number_at(&mut at));
        let form = listing.byte_at(&mut at);
        match form & !HAS_VERSION {
            MD5 => at += 16,
            MD5_OF_PARTS => {
                at += 16;
                listing.number_at(&mut at);
            }
            OTHER_ETAG => drop(listing.text_at(&mut at)),
            _ => {}
        }
        if form & HAS_VERSION != 0 {
            listing.text_at(&mut at);
        }
        self.next = at;
        true
    }

    /// Of the object that this is at.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Of the object that this is at, in bytes.
    pub fn size(&self) -> u64 {
        self.listing.number_at(&mut self.stat.clone())
    }

    /// What is said of the object that this is at.
    pub fn stat(&self) -> Stat {
        let (listing, mut at) = (self.listing, self.stat);
        let size = listing.number_at(&mut at);
        let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(listing.number_at(&mut at));
        let form = listing.byte_at(&mut at);
        let etag = match form & !HAS_VERSION {
            MD5 => Some(listing.digits_at(&mut at)),
            MD5_OF_PARTS => Some(format!("{}-{}", listing.digits_at(&mut at), listing.number_at(&mut at))),
            OTHER_ETAG => Some(listing.text_at(&mut at).to_owned()),
            _ => None,
        };
        let version = (form & HAS_VERSION != 0).then(|| listing.text_at(&mut at).to_owned());
        Stat {
            size,
            modified,
            etag,
            version,
        }
    }
}

/// Takes objects in any order; those in the order of keys cost no more memory than the listing.
#[derive(Default)]
pub(crate) struct ListingBuilder {
    sorted: Listing,
    /// What came out of order.
    others: Vec<(String, Stat)>,
}

impl ListingBuilder {
    pub fn push(&mut self, key: &str, stat: &Stat) {
        match self.sorted.count == 0 || *key > *self.sorted.last {
            true => self.sorted.push_last(key, stat),
            false => self.others.push((key.to_owned(), stat.clone())),
        }
    }

    /// Adds the objects of a listing.
    pub fn append(&mut self, listing: &Listing) {
        let mut cursor = listing.from("");
        while cursor.advance() {
            self.push(cursor.key(), &cursor.stat());
        }
    }

    pub fn finish(mut self) -> Listing {
        if self.others.is_empty() {
            self.sorted.bytes.shrink_to_fit();
            return self.sorted;
        }
        let mut cursor = self.sorted.from("");
        while cursor.advance() {
            self.others.push((cursor.key().to_owned(), cursor.stat()));
        }
        self.others.sort_by(|a, b| a.0.cmp(&b.0));
        self.others.dedup_by(|later, first| later.0 == first.0);
        let mut sorted = Listing::default();
        for (key, stat) in &self.others {
            sorted.push_last(key, stat);
        }
        sorted
    }
}

/// Objects that a listing gave, below a prefix.
#[derive(Clone, Debug)]
pub struct ListedObjects {
    pub(crate) listing: std::sync::Arc<Listing>,
    pub(crate) prefix: ObjectUrl,
}

impl ListedObjects {
    pub fn is_empty(&self) -> bool {
        !self.listing.has_below(self.prefix.key())
    }

    /// The objects, sorted by key, each made when it is asked for.
    pub fn iter(&self) -> impl Iterator<Item = crate::list::Entry> {
        let first = first_below(self.prefix.key());
        let mut cursor = self.listing.from(&first);
        std::iter::from_fn(move || {
            (cursor.advance() && cursor.key().starts_with(&first)).then(|| crate::list::Entry {
                url: self.prefix.with_key(cursor.key()),
                stat: cursor.stat(),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(size: u64, etag: Option<&str>, version: Option<&str>) -> Stat {
        Stat {
            size,
            modified: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + size),
            etag: etag.map(str::to_owned),
            version: version.map(str::to_owned),
        }
    }

    #[test]
    fn every_object_is_found_again_as_it_was_listed() {
        let md5 = "0123456789abcdef0123456789abcdef";
        let of_parts = format!("{md5}-1200");
        let etags = [
            None,
            Some(md5),
            Some(of_parts.as_str()),
            Some("W/\"weak"),
            Some("0x8D"),
            Some(""),
        ];
        let odd = [format!("{md5}-01"), md5.to_uppercase(), format!("{md5}-")];
        let etags: Vec<Option<&str>> = etags
            .into_iter()
            .chain(odd.iter().map(|odd| Some(odd.as_str())))
            .collect();
        let mut keys: Vec<String> = (0..500)
            .map(|n| {
                format!(
                    "corpus/हिन्दी/{}/ह{}ि{n}.wav",
                    n % 7,
                    char::from_u32(0x900 + n % 100).unwrap()
                )
            })
            .collect();
        keys.extend(["a", "a/b", "a-b", "a0", "é", "è"].map(str::to_owned));
        let of = |n: usize| {
            stat(
                n as u64 * n as u64 * 9_999_999_999,
                etags[n % etags.len()],
                n.is_multiple_of(5).then_some("v"),
            )
        };
        let mut builder = ListingBuilder::default();
        keys.iter().enumerate().for_each(|(n, key)| builder.push(key, &of(n)));
        let unsorted = builder.finish();
        let expected: std::collections::BTreeMap<&String, Stat> =
            keys.iter().enumerate().map(|(n, key)| (key, of(n))).collect();
        let mut builder = ListingBuilder::default();
        expected.iter().for_each(|(key, stat)| builder.push(key, stat));
        let mut joined = ListingBuilder::default();
        joined.append(&builder.finish());
        for listing in [unsorted, joined.finish()] {
            let mut found = Vec::new();
            let mut cursor = listing.from("");
            while cursor.advance() {
                found.push((cursor.key().to_owned(), cursor.stat()));
            }
            let all: Vec<(String, Stat)> = expected
                .iter()
                .map(|(key, stat)| ((*key).clone(), stat.clone()))
                .collect();
            assert_eq!(found, all);
            for (key, stat) in &expected {
                assert_eq!(listing.get(key).as_ref(), Some(stat));
                assert_eq!(listing.get(&format!("{key}x")), None);
                let mut after = listing.from(&format!("{key}\u{0}"));
                let next = expected.range::<String, _>(format!("{key}\u{0}")..).next();
                assert_eq!(
                    after.advance().then(|| after.key().to_owned()),
                    next.map(|(key, _)| (*key).clone())
                );
            }
            assert!(listing.has_below("a") && listing.has_below("") && listing.has_below("corpus/हिन्दी"));
            assert!(!listing.has_below("a0") && !listing.has_below("corpus/ह"));
            assert_eq!(listing.len(), keys.len());
        }
        assert!(Listing::default().get("a").is_none() && !Listing::default().has_below(""));
    }
}
