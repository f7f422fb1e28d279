//! Writes with a condition (compare-and-swap): an object is written where there is none, or where it is still the version
//! that was seen.

use std::thread;
use std::time::Duration;

use bytes::Bytes;
use object_store::{PutMode, PutOptions, PutPayload, UpdateVersion};

use crate::client::{CUT_ANSWERS, key_of, wait};
use crate::error::{StorageError, StorageFault};
use crate::location::ObjectUrl;
use crate::object_reader::ObjectReader;
use crate::stat::Stat;
use crate::storage::{Storage, can_write};

/// Which version of an object one was, for a write with a condition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectVersion {
    /// Without `"` around it. S3 and Azure compare it.
    pub etag: Option<String>,
    /// Google Cloud Storage compares it.
    pub version: Option<String>,
}

impl From<&Stat> for ObjectVersion {
    fn from(stat: &Stat) -> Self {
        ObjectVersion {
            etag: stat.etag.clone(),
            version: stat.version.clone(),
        }
    }
}

impl ObjectVersion {
    fn is_of(&self, stat: &Stat) -> bool {
        match (&self.etag, &stat.etag) {
            (Some(etag), Some(found)) => etag == found,
            _ => self.version.is_some() && self.version == stat.version,
        }
    }
}

impl Storage {
    /// Writes an object whole, in one request: where there is none, or (with `of`) where it is still that version. Where the
    /// answer is lost, the object is looked at: one that has these bytes is written. So they must be no one else's.
    ///
    /// # Errors
    /// [`StorageFault::AlreadyExists`] where there is an object, [`StorageFault::Changed`] where it is another version or gone,
    /// [`StorageFault::Unsupported`] where the storage knows no such condition; when it cannot be written.
    pub fn put_if(
        &self,
        url: &ObjectUrl,
        bytes: &Bytes,
        of: Option<&ObjectVersion>,
    ) -> Result<ObjectVersion, StorageError> {
        let mode = || match of {
            None => PutMode::Create,
            Some(of) => PutMode::Update(UpdateVersion {
                e_tag: of.etag.as_ref().map(|etag| format!("\"{etag}\"")),
                version: of.version.clone(),
            }),
        };
        let mut attempt = 0;
        loop {
            let error = match self.put_mode(url, bytes.clone(), mode()) {
                Ok(version) => return Ok(version),
                Err(error) => error,
            };
            let is_cut = matches!(
                error.fault,
                StorageFault::Unavailable | StorageFault::TimedOut | StorageFault::Other
            );
            // One that is to be replaced and is gone is told as not found by some.
            let is_gone = of.is_some() && error.fault == StorageFault::NotFound;
            let is_refused = is_gone || matches!(error.fault, StorageFault::AlreadyExists | StorageFault::Changed);
            if !is_cut && !is_refused {
                return Err(error);
            }
            let found = match self.stat(url) {
                Ok(found) => Some(found),
                Err(missing) if missing.fault == StorageFault::NotFound => None,
                Err(_) => return Err(error),
            };
            let is_before = found.as_ref().is_some_and(|found| of.is_some_and(|of| of.is_of(found)));
            match found {
                None if of.is_none() => {}
                // Not written yet, by nobody else, either: S3 refuses one of two writes at the same time (409), also where
                // neither is done.
                Some(_) if is_before => {}
                Some(found) if found.size == bytes.len() as u64 => {
                    return match self.read_now(url, found.size) {
                        Ok(Some((version, standing))) if standing == *bytes => Ok(version),
                        Ok(_) => Err(as_refused(error, url, of)),
                        Err(_) => Err(error),
                    };
                }
                _ => return Err(as_refused(error, url, of)),
            }
            if attempt == CUT_ANSWERS {
                return Err(error);
            }
            attempt += 1;
            thread::sleep(Duration::from_millis(50 << attempt.min(10)));
        }
    }

    /// Writes an object whole, in one request, in place of one that is there.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn replace(&self, url: &ObjectUrl, bytes: Bytes) -> Result<ObjectVersion, StorageError> {
        self.put_mode(url, bytes, PutMode::Overwrite)
    }

    pub(crate) fn put_mode(&self, url: &ObjectUrl, bytes: Bytes, mode: PutMode) -> Result<ObjectVersion, StorageError> {
        can_write(url)?;
        let (client, address) = (self.client(url)?, url.clone());
        let put = wait(async move {
            let key = key_of(&address)?;
            let options = PutOptions::from(mode);
            let put = client.store.put_opts(&key, PutPayload::from(bytes), options);
            client.limited(&address, put).await
        });
        // Also what another thread was told meanwhile.
        self.forget(url);
        put.map(|put| ObjectVersion {
            etag: put.e_tag.map(|etag| etag.trim_matches('"').to_string()),
            version: put.version,
        })
    }

    /// All bytes of an object of at most `most` bytes as it is now, and which version it is; none where there is none. Nothing
    /// that was told before is used.
    ///
    /// # Errors
    /// When it cannot be read, or is larger.
    pub fn read_now(&self, url: &ObjectUrl, most: u64) -> Result<Option<(ObjectVersion, Bytes)>, StorageError> {
        let mut attempt = 0;
        loop {
            let found = match self.stat(url) {
                Ok(found) => found,
                Err(error) if error.fault == StorageFault::NotFound => return Ok(None),
                Err(error) => return Err(error),
            };
            if found.size > most {
                let said = format!("{} bytes, and {most} are allowed", found.size);
                return Err(StorageError::of(StorageFault::TooLarge, &url.to_string(), &said));
            }
            let (client, address) = (self.client(url)?, url.clone());
            let got = wait(async move { client.get(&address, None, Some(&found)).await });
            match got {
                Ok((stat, bytes)) => return Ok(Some((ObjectVersion::from(&stat), bytes))),
                // It was written or deleted in between.
                Err(error) if matches!(error.fault, StorageFault::Changed | StorageFault::NotFound) => {
                    if attempt == CUT_ANSWERS {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
            attempt += 1;
        }
    }

    /// As [`Storage::open`], of the object as it is now: nothing that was told before is used.
    ///
    /// # Errors
    /// When it is not there or cannot be looked at.
    pub fn open_now(&self, url: &ObjectUrl) -> Result<ObjectReader, StorageError> {
        Ok(ObjectReader::new(self.clone(), url.clone(), self.stat(url)?))
    }
}

/// What is refused where another's bytes stand, also if the answer that said so was lost.
fn as_refused(error: StorageError, url: &ObjectUrl, of: Option<&ObjectVersion>) -> StorageError {
    match error.fault {
        StorageFault::AlreadyExists | StorageFault::Changed => error,
        _ => {
            let fault = of.map_or(StorageFault::AlreadyExists, |_| StorageFault::Changed);
            StorageError::of(fault, &url.to_string(), "")
        }
    }
}
