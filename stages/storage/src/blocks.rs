//! Objects of which parts are read in no order, again and again, such as recordings in tars while a model is trained: they are
//! asked for in large blocks, which are kept on this machine.
//!
//! A block is a file: the bytes, then their BLAKE3. Objects are taken in as long as all of them together fit into the folder;
//! of any other, each part is asked for by itself, as blocks would be thrown away before they are needed again.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;

use crate::error::StorageError;
use crate::evict;
use crate::kept_folder::{KeptFolder, folder_name, make_private, version_of};
use crate::location::ObjectUrl;
use crate::stat::Stat;

/// Bytes of a block.
pub(crate) const BLOCK: u64 = 8 << 20;

const DIGEST: usize = blake3::OUT_LEN;

/// A block that is used is marked as used after so long.
const MARK_AFTER: Duration = Duration::from_secs(600);

/// What a process knows of the blocks on its machine.
pub(crate) struct Blocks {
    known: Mutex<Known>,
    /// Each block is asked for by one thread at a time.
    asking: Vec<Mutex<()>>,
    hasher: RandomState,
    /// Bytes of blocks since others were last removed for them.
    written: AtomicU64,
    has_evicted: AtomicBool,
    /// Whether a block could not be written.
    is_full: AtomicBool,
}

#[derive(Default)]
struct Known {
    /// Names of the folders of objects that were taken in, or not.
    objects: HashMap<String, bool>,
    /// Bytes of those that were.
    bytes: u64,
    /// Blocks that were compared with their digests.
    verified: HashSet<(String, u64)>,
}

impl Default for Blocks {
    fn default() -> Self {
        Blocks {
            known: Mutex::default(),
            asking: (0..64).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            written: AtomicU64::new(0),
            has_evicted: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
        }
    }
}

/// An object whose blocks are read.
pub(crate) struct BlockSource<'a> {
    pub url: &'a ObjectUrl,
    pub stat: &'a Stat,
    /// Asks storage for some of its bytes.
    pub ask: &'a dyn Fn(Range<u64>) -> Result<Bytes, StorageError>,
}

impl Blocks {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether blocks of an object are kept. An eighth of the folder is left to others.
    fn takes(&self, object: &str, size: u64, limit: u64) -> bool {
        if self.is_full.load(Ordering::Relaxed) {
            return false;
        }
        let mut known = self.known();
        if let Some(taken) = known.objects.get(object) {
            return *taken;
        }
        let taken = known.bytes.saturating_add(size) <= limit - limit / 8;
        if taken {
            known.bytes += size;
        }
        known.objects.insert(object.to_string(), taken);
        taken
    }

    /// Whether the blocks of an object that are read are kept.
    pub fn keeps(&self, url: &ObjectUrl, stat: &Stat, folder: &KeptFolder) -> bool {
        self.takes(&folder_name(&version_of(url, stat)), stat.size, folder.limit)
    }

    /// Fills `buffer` with the bytes at `offset` of an object, which has them.
    pub fn read(
        &self,
        source: &BlockSource<'_>,
        buffer: &mut [u8],
        offset: u64,
        folder: &KeptFolder,
    ) -> io::Result<()> {
        let stat = source.stat;
        let object = folder_name(&version_of(source.url, stat));
        if !self.takes(&object, stat.size, folder.limit) {
            let end = offset + buffer.len() as u64;
            buffer.copy_from_slice(&(source.ask)(offset..end)?);
            return Ok(());
        }
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let number = at / BLOCK;
            let within = at % BLOCK;
            let length = (BLOCK - within).min((buffer.len() - done) as u64) as usize;
            let part = &mut buffer[done..done + length];
            self.read_block(source, &object, number, within, part, folder)?;
            done += length;
        }
        Ok(())
    }

    /// Fills `part` with bytes of one block.
    fn read_block(
        &self,
        source: &BlockSource<'_>,
        object: &str,
        number: u64,
        within: u64,
        part: &mut [u8],
        folder: &KeptFolder,
    ) -> io::Result<()> {
        let path = folder.blocks().join(object).join(number.to_string());
        let name = (object.to_string(), number);
        let start = number * BLOCK;
        let end = (start + BLOCK).min(source.stat.size);
        let length = (end - start) as usize;
        if self.known().verified.contains(&name) && read_part(&path, length, within, part) {
            return Ok(());
        }
        let turn = self.hasher.hash_one(&name) as usize % self.asking.len();
        let _turn = self.asking[turn].lock().unwrap_or_else(PoisonError::into_inner);
        if self.known().verified.contains(&name) && read_part(&path, length, within, part) {
            return Ok(());
        }
        let bytes = match read_whole(&path, length) {
            Some(bytes) => bytes,
            None => {
                let bytes = (source.ask)(start..end)?;
                self.make_room(length as u64, folder);
                // A folder that is empty may be removed between two steps of the first attempt.
                if write(&path, &bytes).is_err() && write(&path, &bytes).is_err() {
                    self.is_full.store(true, Ordering::Relaxed);
                }
                bytes
            }
        };
        part.copy_from_slice(&bytes[within as usize..within as usize + part.len()]);
        self.known().verified.insert(name);
        Ok(())
    }

    /// Takes others away, before the first block and then from time to time.
    fn make_room(&self, bytes: u64, folder: &KeptFolder) {
        let sixteenth = folder.limit / 16;
        let written = self.written.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if !self.has_evicted.swap(true, Ordering::Relaxed) || written > sixteenth {
            self.written.store(0, Ordering::Relaxed);
            evict::to(folder, (folder.limit - sixteenth).saturating_sub(bytes));
        }
    }
}

/// Reads a part of a block that was compared with its digest before. False where it is gone.
fn read_part(path: &Path, length: usize, within: u64, part: &mut [u8]) -> bool {
    let Ok(file) = File::open(path) else { return false };
    let Ok(metadata) = file.metadata() else { return false };
    if metadata.len() != (length + DIGEST) as u64 {
        return false;
    }
    mark_used(&file);
    file.read_exact_at(part, within).is_ok()
}

/// The bytes of a block, if they have their digest.
fn read_whole(path: &Path, length: usize) -> Option<Bytes> {
    let mut file = File::open(path).ok()?;
    if file.metadata().ok()?.len() != (length + DIGEST) as u64 {
        return None;
    }
    let mut bytes = vec![0; length + DIGEST];
    file.read_exact(&mut bytes).ok()?;
    let digest = bytes.split_off(length);
    if blake3::hash(&bytes).as_bytes()[..] != digest[..] {
        return None;
    }
    mark_used(&file);
    Some(bytes.into())
}

fn mark_used(file: &File) {
    let used = file.metadata().and_then(|metadata| metadata.modified());
    let is_old = used.is_ok_and(|used| used.elapsed().is_ok_and(|since| since > MARK_AFTER));
    if is_old {
        let _ = file.set_modified(SystemTime::now());
    }
}

/// Writes a block under a name of its own, and renames it.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    make_private(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(bytes)?;
    file.write_all(blake3::hash(bytes).as_bytes())?;
    file.persist(path).map(drop).map_err(|error| error.error)
}
