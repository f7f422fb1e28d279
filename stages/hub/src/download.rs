//! Downloads one file from the hub into the cache. A download can be resumed; only a complete file gets its final name.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::cache::Cache;
use crate::client::{HttpClient, RemoteFile, RemoteRevision, RequestError};
use crate::error::HubError;
use crate::hub::{Hub, Progress};
use crate::reference::HubReference;

/// Attempts in a row without a new byte after which a download fails.
const ATTEMPTS: u32 = 5;

/// Downloads a file and links it into the snapshot. False: `progress` cancelled it; the bytes so far stay, and the next
/// download resumes after them.
pub(crate) fn download_file(
    hub: &Hub,
    client: &HttpClient,
    reference: &HubReference,
    cache: &Cache,
    remote: &RemoteRevision,
    file: &str,
    progress: Progress<'_>,
) -> Result<bool, HubError> {
    let remote_file = client.describe(reference, &remote.commit, file)?;
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
            if !transfer.fill(&mut target, &remote.commit, &remote_file, progress)? {
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
    cache.link(&remote.commit, file, &remote_file.etag)?;
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
    fn fill(
        &self,
        target: &mut File,
        commit: &str,
        first: &RemoteFile,
        progress: Progress<'_>,
    ) -> Result<bool, HubError> {
        let length = |target: &File| {
            target
                .metadata()
                .map(|data| data.len())
                .map_err(HubError::file(self.partial))
        };
        let mut failures = 0;
        let mut remote_file = None;
        loop {
            let have = length(target)?;
            if first.size == Some(have) {
                return Ok(true);
            }
            if first.size.is_some_and(|size| have > size) {
                target.set_len(0).map_err(HubError::file(self.partial))?;
                continue;
            }
            let outcome = self.request(target, have, remote_file.as_ref().unwrap_or(first), progress)?;
            let error = match outcome {
                Transferred::Cancelled => return Ok(false),
                Transferred::End if first.size.is_none() => return Ok(true),
                Transferred::End => None,
                Transferred::Failed(error) if !error.transient => return Err(error.into()),
                Transferred::Failed(error) => Some(error),
            };
            if length(target)? > have {
                failures = 0;
            } else {
                failures += 1;
                if failures >= ATTEMPTS {
                    let reason = error.map_or("the connection ends too soon".to_owned(), |error| error.message);
                    return Err(HubError::Unavailable {
                        message: format!(
                            "{}: the download breaks off at {}: {reason}",
                            self.file,
                            amount(have, first.size)
                        ),
                        help: format!("run again: it goes on from there ({})", self.partial.display()),
                    });
                }
                if !progress(&format!(
                    "{}: no answer, attempt {} of {ATTEMPTS}",
                    self.file,
                    failures + 1
                )) {
                    return Ok(false);
                }
                std::thread::sleep((self.hub.timeout / 30).saturating_mul(1 << failures));
            }
            // Addresses of the hub's storage expire.
            remote_file = self.client.describe(self.reference, commit, self.file).ok();
            if remote_file.as_ref().is_some_and(|now| now.etag != first.etag) {
                remote_file = None;
            }
        }
    }

    /// One request for the bytes from `have` on, appended to `target`.
    fn request(
        &self,
        target: &mut File,
        have: u64,
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
            if response.status().as_u16() == 416 {
                return Ok(Transferred::End);
            }
        }
        let mut body = response.body_mut().as_reader();
        let mut buffer = vec![0; 1 << 20];
        let mut reported: Option<Instant> = None;
        loop {
            if reported.is_none_or(|reported| reported.elapsed() >= Duration::from_secs(1)) {
                reported = Some(Instant::now());
                if !progress(&format!("{}: {} downloaded", self.file, amount(have, remote_file.size))) {
                    return Ok(Transferred::Cancelled);
                }
            }
            let count = match body.read(&mut buffer) {
                Ok(0) => return Ok(Transferred::End),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    return Ok(Transferred::Failed(RequestError {
                        message: error.to_string(),
                        help: String::new(),
                        transient: true,
                    }));
                }
            };
            target
                .write_all(&buffer[..count])
                .map_err(|error| write_error(self.partial, remote_file.size, error))?;
            have += count as u64;
        }
    }
}

enum Transferred {
    /// The response body ended, which need not be the end of the file.
    End,
    Failed(RequestError),
    Cancelled,
}

/// Compares the SHA-256 of the file with that of the hub, if the hub gives one, and removes the file if they differ.
/// False: `progress` cancelled it.
fn verify_checksum(
    target: &mut File,
    path: &Path,
    file: &str,
    remote_file: &RemoteFile,
    progress: Progress<'_>,
) -> Result<bool, HubError> {
    let Some(expected) = remote_file.sha256() else {
        return Ok(true);
    };
    let failed = HubError::file(path);
    let mut digest = Sha256::new();
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
    if found == expected {
        return Ok(true);
    }
    std::fs::remove_file(path).map_err(HubError::file(path))?;
    Err(HubError::Unavailable {
        message: format!("{file} came damaged: its SHA-256 is {found}, the hub says {expected}"),
        help: "it was taken away; run again to download it anew. If it happens again, a proxy may be changing what it passes on".into(),
    })
}

fn write_error(path: &Path, size: Option<u64>, error: std::io::Error) -> HubError {
    if error.kind() != ErrorKind::StorageFull && error.kind() != ErrorKind::QuotaExceeded {
        return HubError::file(path)(error);
    }
    HubError::Unavailable {
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
