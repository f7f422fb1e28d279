//! Downloads one file from the hub into the cache. A download can be resumed; only a complete file gets its final name.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use sha1::Sha1;
use sha2::digest::DynDigest;
use sha2::{Digest, Sha256};

use crate::cache::Cache;
use crate::client::{EtagDigest, HttpClient, RemoteFile, RequestError};
use crate::error::HubError;
use crate::hub::{Hub, Progress};
use crate::reference::HubReference;

/// Bytes that a file has to grow by for a download to be getting on.
const STRETCH: u64 = 256 << 10;
/// Requests in a row within one stretch after which a download fails.
pub(crate) const TRIES: u32 = 6;
/// Requests for a file, of those that end before half the time-out, after which a download fails.
const BREAKS: u32 = 100;
/// The largest file whose size the hub does not say. It says that of all weights.
const MOST_UNANNOUNCED: u64 = 256 << 20;

/// Downloads a file and links it into the snapshot. False: `progress` cancelled it; the bytes so far stay, and the next
/// download resumes after them.
pub(crate) fn download_file(
    hub: &Hub,
    client: &HttpClient,
    reference: &HubReference,
    cache: &Cache,
    commit: &str,
    file: &str,
    progress: Progress<'_>,
) -> Result<bool, HubError> {
    let remote_file = client.describe(reference, commit, file)?;
    let blob = cache.blob(&remote_file.etag);
    if !blob.is_file() {
        let folder = blob.parent().unwrap_or(&blob);
        std::fs::create_dir_all(folder).map_err(|error| write_error(folder, remote_file.size, error))?;
        let partial = blob.with_file_name(format!("{}.incomplete", remote_file.etag));
        let mut target = OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .open(&partial)
            .map_err(|error| write_error(&partial, remote_file.size, error))?;
        // Another process of this program may be downloading the file. On a file system without locks none is taken.
        while matches!(target.try_lock(), Err(TryLockError::WouldBlock)) {
            if !progress(&format!("{file}: another process downloads it; waiting")) {
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
                partial: &partial,
            };
            if !transfer.fill(&mut target, commit, &remote_file, progress)? {
                return Ok(false);
            }
            if !verify_checksum(&mut target, &partial, file, &remote_file, progress)? {
                return Ok(false);
            }
            target
                .sync_all()
                .map_err(|error| write_error(&partial, remote_file.size, error))?;
            std::fs::rename(&partial, &blob).map_err(HubError::file(&blob))?;
        }
    }
    cache.link(commit, file, &remote_file.etag)?;
    Ok(true)
}

struct Transfer<'a> {
    hub: &'a Hub,
    client: &'a HttpClient,
    reference: &'a HubReference,
    file: &'a str,
    partial: &'a Path,
}

impl Transfer<'_> {
    /// Downloads until the file has its size, after the bytes of earlier attempts. False: `progress` cancelled it.
    ///
    /// A server may answer wrongly for ever. So requests that end early are counted, and those that bring little are
    /// counted apart and are made after pauses that grow.
    fn fill(
        &self,
        target: &mut File,
        commit: &str,
        first: &RemoteFile,
        progress: Progress<'_>,
    ) -> Result<bool, HubError> {
        let length = |target: &File| {
            let metadata = target.metadata().map_err(HubError::file(self.partial))?;
            Ok::<u64, HubError>(metadata.len())
        };
        let mut have = length(target)?;
        if have > first.size.unwrap_or(MOST_UNANNOUNCED) {
            target.set_len(0).map_err(HubError::file(self.partial))?;
            have = 0;
        }
        // What starts over gets on only beyond where it was.
        let mut furthest = have;
        let mut stretch = have;
        let (mut tries, mut breaks) = (0, 0);
        let mut remote_file = None;
        loop {
            if first.size == Some(have) {
                return Ok(true);
            }
            let begin = Instant::now();
            let now = remote_file.as_ref().unwrap_or(first);
            let outcome = self.request(target, have, first.size, now, progress)?;
            let server = now.server().to_owned();
            let before = have;
            have = length(target)?;
            tracing::debug!(
                file = self.file,
                server,
                before,
                have,
                elapsed = ?begin.elapsed(),
                "request"
            );
            let error = match outcome {
                Transferred::Cancelled => return Ok(false),
                Transferred::End if first.size.is_none() => return Ok(true),
                Transferred::End => None,
                Transferred::TooLong => return Err(self.too_long(first.size, &server)),
                Transferred::Failed(error) if !error.transient => return Err(error.into()),
                Transferred::Failed(error) => Some(error),
            };
            if first.size == Some(have) {
                return Ok(true);
            }
            let is_new = have > furthest;
            furthest = furthest.max(have);
            if furthest - stretch >= STRETCH {
                stretch = furthest;
                tries = 0;
            } else {
                tries += 1;
            }
            breaks += u32::from(begin.elapsed() < self.hub.timeout / 2);
            if tries >= TRIES || breaks >= BREAKS {
                let reason = match (error, is_new) {
                    (Some(error), _) => error.message,
                    (None, true) => "the connection ends too soon, each time".to_owned(),
                    (None, false) => "the answer has no more bytes".to_owned(),
                };
                return Err(HubError::unavailable(
                    format!(
                        "{}: the download from {server} breaks off at {}: {reason}",
                        self.file,
                        amount(have, first.size)
                    ),
                    format!(
                        "run again: it goes on from there ({}). If it ends there again, check HF_ENDPOINT and the proxy settings",
                        self.partial.display()
                    ),
                ));
            }
            let line = format!("{}: it breaks off, try {} of {TRIES}", self.file, tries + 1);
            if tries > 0 && !pause(self.hub.timeout, tries, &line, progress) {
                return Ok(false);
            }
            // Addresses of the hub's storage expire.
            remote_file = self.client.describe(self.reference, commit, self.file).ok();
            if remote_file.as_ref().is_some_and(|now| now.etag != first.etag) {
                remote_file = None;
            }
        }
    }

    /// The error of a server that goes on behind the end of a file, whose bytes are removed.
    fn too_long(&self, size: Option<u64>, server: &str) -> HubError {
        if let Err(error) = std::fs::remove_file(self.partial) {
            return HubError::file(self.partial)(error);
        }
        let why = match size {
            Some(size) => format!("more than the {size} bytes that the hub says it has"),
            None => format!("more than {MOST_UNANNOUNCED} bytes, and the hub does not say how many it has"),
        };
        HubError::unavailable(
            format!("{}: {server} sends {why}", self.file),
            "the damaged file was deleted; check HF_ENDPOINT, and whether a proxy modifies downloads",
        )
    }

    /// One request for the bytes from `have` on, appended to `target`, of which it never makes more than `size`.
    fn request(
        &self,
        target: &mut File,
        have: u64,
        size: Option<u64>,
        remote_file: &RemoteFile,
        progress: Progress<'_>,
    ) -> Result<Transferred, HubError> {
        let mut response = match self.client.open(self.reference, self.file, remote_file, have) {
            Ok(response) => response,
            Err(error) => return Ok(Transferred::Failed(error)),
        };
        let mut have = have;
        if response.status().as_u16() != 206 && have > 0 {
            // The server ignores the range (200), or has no bytes there (416).
            target.set_len(0).map_err(HubError::file(self.partial))?;
            have = 0;
        }
        if response.status().as_u16() == 416 {
            let message = "it has no bytes there (status 416)".to_owned();
            return Ok(Transferred::failed(message));
        }
        let most = size.unwrap_or(MOST_UNANNOUNCED);
        let mut body = response.body_mut().as_reader();
        let mut buffer = vec![0; 1 << 20];
        let mut reported: Option<Instant> = None;
        loop {
            if reported.is_none_or(|reported| reported.elapsed() >= Duration::from_secs(1)) {
                reported = Some(Instant::now());
                if !progress(&format!("{}: {} downloaded", self.file, amount(have, size))) {
                    return Ok(Transferred::Cancelled);
                }
            }
            let count = match body.read(&mut buffer) {
                Ok(0) => return Ok(Transferred::End),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Ok(Transferred::failed(error.to_string())),
            };
            // At the end of the file one more read tells whether the answer ends, too.
            if count as u64 > most.saturating_sub(have) {
                return Ok(Transferred::TooLong);
            }
            target
                .write_all(&buffer[..count])
                .map_err(|error| write_error(self.partial, size, error))?;
            have += count as u64;
        }
    }
}

/// Waits before another try, longer after each, and reports `line` meanwhile. `timeout` is the longest wait. False: `progress`
/// cancelled it.
pub(crate) fn pause(timeout: Duration, tries: u32, line: &str, progress: Progress<'_>) -> bool {
    let mut left = (timeout / 30).saturating_mul(1 << tries.min(8)).min(timeout);
    loop {
        if !progress(line) {
            return false;
        }
        if left.is_zero() {
            return true;
        }
        let step = left.min(Duration::from_secs(1));
        std::thread::sleep(step);
        left -= step;
    }
}

enum Transferred {
    /// The response body ended, which need not be the end of the file.
    End,
    /// There are more bytes than the file has.
    TooLong,
    Failed(RequestError),
    Cancelled,
}

impl Transferred {
    /// A failure that another request may not have.
    fn failed(message: String) -> Self {
        Transferred::Failed(RequestError {
            message,
            help: String::new(),
            transient: true,
        })
    }
}

/// Compares the digest of the file with that of the hub, if the hub gives one, and removes the file if they differ.
/// False: `progress` cancelled it.
fn verify_checksum(
    target: &mut File,
    path: &Path,
    file: &str,
    remote_file: &RemoteFile,
    progress: Progress<'_>,
) -> Result<bool, HubError> {
    let Some(kind) = remote_file.digest() else {
        return Ok(true);
    };
    let failed = HubError::file(path);
    let length = target.metadata().map_err(HubError::file(path))?.len();
    let (name, mut digest): (&str, Box<dyn DynDigest>) = match kind {
        EtagDigest::Sha256 => ("SHA-256", Box::new(Sha256::new())),
        // Git digests a header before the content.
        EtagDigest::GitBlob => (
            "SHA-1 in git",
            Box::new(Sha1::new_with_prefix(format!("blob {length}\0"))),
        ),
    };
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0u64;
    let mut reported = Instant::now();
    let read = target.seek(SeekFrom::Start(0)).and_then(|_| {
        loop {
            let count = target.read(&mut buffer)?;
            if count == 0 {
                return Ok(true);
            }
            digest.update(&buffer[..count]);
            done += count as u64;
            if reported.elapsed() >= Duration::from_secs(1) {
                reported = Instant::now();
                if !progress(&format!("{file}: {} checked", amount(done, remote_file.size))) {
                    return Ok(false);
                }
            }
        }
    });
    if !read.map_err(failed)? {
        return Ok(false);
    }
    let found = hex::encode(digest.finalize());
    let expected = &remote_file.etag;
    if found.eq_ignore_ascii_case(expected) {
        return Ok(true);
    }
    std::fs::remove_file(path).map_err(HubError::file(path))?;
    Err(HubError::unavailable(
        format!(
            "{file} came damaged from {}: its {name} is {found}, the hub says {expected}",
            remote_file.server()
        ),
        "the damaged file was deleted; run again to download it. If it happens again, a proxy may be modifying downloads",
    ))
}

fn write_error(path: &Path, size: Option<u64>, error: std::io::Error) -> HubError {
    if error.kind() != ErrorKind::StorageFull && error.kind() != ErrorKind::QuotaExceeded {
        return HubError::file(path)(error);
    }
    HubError::unavailable(
        format!(
            "the disk is full: {} does not fit{}",
            path.display(),
            size.map(|size| format!(", the file has {} MB", size.div_ceil(1_000_000)))
                .unwrap_or_default()
        ),
        "make room, or set HF_HOME to a folder on another disk, and run again: the download goes on",
    )
}

/// `12.0 of 2400.3 MB (0 %)`.
pub(crate) fn amount(done: u64, size: Option<u64>) -> String {
    let mb = |bytes: u64| bytes as f64 / 1e6;
    match size {
        // Of a small file megabytes say nothing.
        Some(size) if size < 100_000 => format!("{done} of {size} bytes"),
        Some(size) => {
            let percent = u128::from(done) * 100 / u128::from(size);
            format!("{:.1} of {:.1} MB ({percent} %)", mb(done), mb(size))
        }
        _ => format!("{:.1} MB", mb(done)),
    }
}
