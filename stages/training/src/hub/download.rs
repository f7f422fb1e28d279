//! One file, from the hub into the cache: in pieces if need be, and only whole.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::cache::Cache;
use super::client::{Client, Described, Refusal, Remote};
use super::{Hub, Reference, Tell};
use crate::error::TrainingError;

/// Attempts in a row that may bring nothing.
const ATTEMPTS: u32 = 5;

/// Downloads a file and links it into the snapshot. False: `tell` ended it; what came stays, to go on from.
pub(super) fn one(
    hub: &Hub,
    client: &Client,
    reference: &Reference,
    cache: &Cache,
    remote: &Remote,
    file: &str,
    tell: Tell<'_>,
) -> Result<bool, TrainingError> {
    let described = client.describe(reference, &remote.commit, file)?;
    let blob = cache.blob(&described.etag);
    if !blob.is_file() {
        let folder = blob.parent().unwrap_or(&blob);
        std::fs::create_dir_all(folder).map_err(|error| writing(folder, described.size, error))?;
        let waiting = blob.with_file_name(format!("{}.incomplete", described.etag));
        let mut target = OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .open(&waiting)
            .map_err(|error| writing(&waiting, described.size, error))?;
        // Another program of ours may be at it.
        // A file system without locks is used without them.
        while matches!(target.try_lock(), Err(TryLockError::WouldBlock)) {
            if !tell(&format!("{file}: another process downloads it; waiting")) {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        if !blob.is_file() {
            let transfer = Transfer {
                hub,
                client,
                reference,
                file,
                waiting: &waiting,
            };
            if !transfer.fill(&mut target, &remote.commit, &described, tell)? {
                return Ok(false);
            }
            if !whole(&mut target, &waiting, file, &described, tell)? {
                return Ok(false);
            }
            target
                .sync_all()
                .map_err(|error| writing(&waiting, described.size, error))?;
            std::fs::rename(&waiting, &blob).map_err(TrainingError::file(&blob))?;
        }
    }
    cache.link(&remote.commit, file, &described.etag)?;
    Ok(true)
}

struct Transfer<'a> {
    hub: &'a Hub,
    client: &'a Client,
    reference: &'a Reference,
    file: &'a str,
    waiting: &'a Path,
}

impl Transfer<'_> {
    /// Fills the file to its size, going on where an earlier attempt ended.
    fn fill(&self, target: &mut File, commit: &str, first: &Described, tell: Tell<'_>) -> Result<bool, TrainingError> {
        let length = |target: &File| {
            target
                .metadata()
                .map(|data| data.len())
                .map_err(TrainingError::file(self.waiting))
        };
        let mut failures = 0;
        let mut described = None;
        loop {
            let have = length(target)?;
            if first.size == Some(have) {
                return Ok(true);
            }
            if first.size.is_some_and(|size| have > size) {
                target.set_len(0).map_err(TrainingError::file(self.waiting))?;
                continue;
            }
            let outcome = self.some(target, have, described.as_ref().unwrap_or(first), tell)?;
            let refusal = match outcome {
                Outcome::Ended => return Ok(false),
                Outcome::Whole if first.size.is_none() => return Ok(true),
                Outcome::Whole => None,
                Outcome::Refused(refusal) if !refusal.passing => return Err(refusal.into()),
                Outcome::Refused(refusal) => Some(refusal),
            };
            if length(target)? > have {
                failures = 0;
            } else {
                failures += 1;
                if failures >= ATTEMPTS {
                    let reason = refusal.map_or("the connection ends too soon".to_owned(), |refusal| refusal.message);
                    return Err(TrainingError::Hub {
                        message: format!(
                            "{}: the download breaks off at {}: {reason}",
                            self.file,
                            amount(have, first.size)
                        ),
                        help: format!("run again: it goes on from there ({})", self.waiting.display()),
                    });
                }
                if !tell(&format!(
                    "{}: no answer, attempt {} of {ATTEMPTS}",
                    self.file,
                    failures + 1
                )) {
                    return Ok(false);
                }
                std::thread::sleep((self.hub.patience / 30).saturating_mul(1 << failures));
            }
            // Addresses of the hub's stores are good for a while only.
            described = self.client.describe(self.reference, commit, self.file).ok();
            if described.as_ref().is_some_and(|now| now.etag != first.etag) {
                described = None;
            }
        }
    }

    /// One request, and what comes of it.
    fn some(
        &self,
        target: &mut File,
        have: u64,
        described: &Described,
        tell: Tell<'_>,
    ) -> Result<Outcome, TrainingError> {
        let mut response = match self.client.open(self.reference, self.file, described, have) {
            Ok(response) => response,
            Err(refusal) => return Ok(Outcome::Refused(refusal)),
        };
        let mut have = have;
        if response.status().as_u16() != 206 && have > 0 {
            // The server begins at the first byte, or has none there.
            target.set_len(0).map_err(TrainingError::file(self.waiting))?;
            have = 0;
            if response.status().as_u16() == 416 {
                return Ok(Outcome::Whole);
            }
        }
        let mut body = response.body_mut().as_reader();
        let mut buffer = vec![0; 1 << 20];
        let mut told: Option<Instant> = None;
        loop {
            if told.is_none_or(|told| told.elapsed() >= Duration::from_secs(1)) {
                told = Some(Instant::now());
                if !tell(&format!("{}: {} downloaded", self.file, amount(have, described.size))) {
                    return Ok(Outcome::Ended);
                }
            }
            let count = match body.read(&mut buffer) {
                Ok(0) => return Ok(Outcome::Whole),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    return Ok(Outcome::Refused(Refusal {
                        message: error.to_string(),
                        help: String::new(),
                        passing: true,
                    }));
                }
            };
            target
                .write_all(&buffer[..count])
                .map_err(|error| writing(self.waiting, described.size, error))?;
            have += count as u64;
        }
    }
}

enum Outcome {
    /// The answer came to its end, which need not be that of the file.
    Whole,
    Refused(Refusal),
    Ended,
}

/// Holds the bytes against their checksum; takes the file away if they are others.
fn whole(
    target: &mut File,
    path: &Path,
    file: &str,
    described: &Described,
    tell: Tell<'_>,
) -> Result<bool, TrainingError> {
    let Some(wanted) = described.sha256() else {
        return Ok(true);
    };
    let failed = TrainingError::file(path);
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0u64;
    let mut told = Instant::now();
    let read = target.seek(SeekFrom::Start(0)).and_then(|_| {
        loop {
            let count = target.read(&mut buffer)?;
            if count == 0 {
                return Ok(true);
            }
            digest.update(&buffer[..count]);
            done += count as u64;
            if told.elapsed() >= Duration::from_secs(1) {
                told = Instant::now();
                if !tell(&format!("{file}: {} checked", amount(done, described.size))) {
                    return Ok(false);
                }
            }
        }
    });
    if !read.map_err(failed)? {
        return Ok(false);
    }
    let found = hex::encode(digest.finalize());
    if found == wanted {
        return Ok(true);
    }
    std::fs::remove_file(path).map_err(TrainingError::file(path))?;
    Err(TrainingError::Hub {
        message: format!("{file} came damaged: its SHA-256 is {found}, the hub says {wanted}"),
        help: "it was taken away; run again to download it anew. If it happens again, a proxy may be changing what it passes on".into(),
    })
}

fn writing(path: &Path, size: Option<u64>, error: std::io::Error) -> TrainingError {
    if error.kind() != ErrorKind::StorageFull && error.kind() != ErrorKind::QuotaExceeded {
        return TrainingError::file(path)(error);
    }
    TrainingError::Hub {
        message: format!(
            "the disk is full: {} does not fit{}",
            path.display(),
            size.map(|size| format!(", the file has {} MB", size.div_ceil(1_000_000)))
                .unwrap_or_default()
        ),
        help: "make room, or set HF_HOME to a folder on another disk, and run again: the download goes on".into(),
    }
}

/// `12.0 of 2400.3 MB (0 %)`.
fn amount(done: u64, size: Option<u64>) -> String {
    let mb = |bytes: u64| bytes as f64 / 1e6;
    match size {
        Some(size) if size > 0 => format!("{:.1} of {:.1} MB ({} %)", mb(done), mb(size), done * 100 / size),
        _ => format!("{:.1} MB", mb(done)),
    }
}
