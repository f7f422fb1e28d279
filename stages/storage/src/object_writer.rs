//! Writes an object in parts.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};

use crate::client::{Begun, Client, begin, key_of, wait};
use crate::error::{StorageError, StorageFault};
use crate::location::ObjectUrl;
use crate::object_reader::ObjectReader;
use crate::storage::{Storage, can_write};

/// Bytes of a part. S3 takes 10,000 parts of an object, so that one may have 156 GiB.
const PART: usize = 16 << 20;

/// Parts that are under way at the same time; each is held in memory.
const PARTS_AT_ONCE: usize = 4;

/// For which a writer that is given up waits until its parts are taken back.
const ABORT: Duration = Duration::from_secs(10);

/// Writes an object. It is there, whole, after [`ObjectWriter::finish`]; a writer that is dropped before leaves nothing, and an object
/// that was there stays. (Where the process is killed, the storage keeps the parts of the upload until a rule of the bucket for
/// incomplete uploads deletes them; they are no object.)
///
/// It holds up to five parts of 16 MiB.
pub struct ObjectWriter {
    storage: Storage,
    client: Arc<Client>,
    url: ObjectUrl,
    buffer: Vec<u8>,
    upload: Option<Box<dyn MultipartUpload>>,
    parts: VecDeque<Begun<()>>,
    /// Of all that was written.
    bytes: u64,
    digest: blake3::Hasher,
}

impl Storage {
    /// Begins to write an object in parts. It is there with [`ObjectWriter::finish`], whole, or not at all.
    ///
    /// # Errors
    /// For locations that are read only, and when there is no client for the bucket.
    pub fn create(&self, url: &ObjectUrl) -> Result<ObjectWriter, StorageError> {
        can_write(url)?;
        Ok(ObjectWriter::new(self.clone(), self.client(url)?, url.clone()))
    }
}

impl ObjectWriter {
    fn new(storage: Storage, client: Arc<Client>, url: ObjectUrl) -> Self {
        ObjectWriter {
            storage,
            client,
            url,
            buffer: Vec::new(),
            upload: None,
            parts: VecDeque::new(),
            bytes: 0,
            digest: blake3::Hasher::new(),
        }
    }

    pub fn url(&self) -> &ObjectUrl {
        &self.url
    }

    fn send_part(&mut self) -> Result<(), StorageError> {
        let mut upload = match self.upload.take() {
            Some(upload) => upload,
            None => {
                let (client, url) = (Arc::clone(&self.client), self.url.clone());
                wait(async move {
                    let key = key_of(&url)?;
                    client.limited(&url, client.store.put_multipart(&key)).await
                })?
            }
        };
        let part = upload.put_part(PutPayload::from(Bytes::from(std::mem::take(&mut self.buffer))));
        self.upload = Some(upload);
        let (client, url) = (Arc::clone(&self.client), self.url.clone());
        self.parts
            .push_back(begin(async move { client.limited(&url, part).await })?);
        while self.parts.len() > PARTS_AT_ONCE {
            self.wait_for_part()?;
        }
        Ok(())
    }

    fn wait_for_part(&mut self) -> Result<(), StorageError> {
        self.parts.pop_front().map_or(Ok(()), Begun::wait)
    }

    /// Writes what is left, and makes the object visible.
    ///
    /// # Errors
    /// When it cannot be written: there is no object then, or the one that was there before.
    pub fn finish(mut self) -> Result<(), StorageError> {
        if self.upload.is_none() {
            let bytes = std::mem::take(&mut self.buffer);
            return self.storage.put(&self.url, bytes);
        }
        if !self.buffer.is_empty() {
            self.send_part()?;
        }
        while !self.parts.is_empty() {
            self.wait_for_part()?;
        }
        let Some(mut upload) = self.upload.take() else {
            return Ok(());
        };
        let (client, url) = (Arc::clone(&self.client), self.url.clone());
        let completed = wait(async move {
            let completed = client.limited(&url, upload.complete()).await.map(drop);
            if completed.is_err() {
                // The parts would cost money for ever.
                let _ = tokio::time::timeout(ABORT, upload.abort()).await;
            }
            completed
        });
        self.storage.forget(&self.url);
        match completed {
            Err(error) if is_open(&error) && self.stands() => Ok(()),
            completed => completed,
        }
    }

    /// Whether the object is the one that was written: looked at where the answer to its last request may be lost. The client
    /// sends that again, and is told that there is no such upload.
    fn stands(&self) -> bool {
        let found = match self.storage.stat(&self.url) {
            Ok(found) if found.size == self.bytes => found,
            _ => return false,
        };
        let mut digest = blake3::Hasher::new();
        let reader = ObjectReader::new(self.storage.clone(), self.url.clone(), found);
        let read = reader.copy_to(&mut |bytes| {
            digest.update(bytes);
            Ok(true)
        });
        matches!(read, Ok(true)) && digest.finalize() == self.digest.finalize()
    }
}

/// Whether a request with this error may have been done. Some say of an upload that is no more that it is not there, others that
/// it is not permitted.
fn is_open(error: &StorageError) -> bool {
    use StorageFault::{NotFound, Other, PermissionDenied, TimedOut, Unavailable};
    matches!(
        error.fault,
        NotFound | Other | PermissionDenied | TimedOut | Unavailable
    )
}

impl Write for ObjectWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = bytes.len().min(PART - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..length]);
        self.bytes += length as u64;
        self.digest.update(&bytes[..length]);
        if self.buffer.len() == PART {
            self.send_part()?;
        }
        Ok(length)
    }

    /// What is written becomes visible with [`ObjectWriter::finish`] alone.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for ObjectWriter {
    fn drop(&mut self) {
        let Some(mut upload) = self.upload.take() else {
            return;
        };
        // A part that comes after the upload is aborted would stay.
        for part in self.parts.drain(..) {
            let _ = part.wait();
        }
        let aborted = begin(async move {
            let _ = tokio::time::timeout(ABORT, upload.abort()).await;
            Ok(())
        });
        let _ = aborted.and_then(Begun::wait);
    }
}
