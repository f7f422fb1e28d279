//! The client of one bucket: requests in the words of this crate, each with a limit of time.

use std::future::Future;
use std::ops::Range;
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, ObjectStore};
use tokio::runtime::Runtime;
use tokio::task::AbortHandle;

use crate::counters::Counters;
use crate::error::{StorageError, StorageFault, of_client};
use crate::location::ObjectUrl;
use crate::open_bucket::Limits;
use crate::stat::Stat;

/// Times that an answer which is cut without notice is asked for again.
pub(crate) const CUT_ANSWERS: usize = 5;

/// The runtime on whose threads all requests are made.
pub(crate) fn runtime() -> Result<&'static Runtime, StorageError> {
    static RUNTIME: OnceLock<Result<Runtime, String>> = OnceLock::new();
    let made = RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("storage")
            .enable_all()
            .build()
            .map_err(|error| error.to_string())
    });
    made.as_ref().map_err(|error| {
        let message = format!("no threads for object storage: {error}");
        StorageError::new(StorageFault::Other, message)
    })
}

/// Waits for a future on the threads for object storage. The calling thread may be one of another tokio runtime.
pub(crate) fn wait<T: Send + 'static>(
    future: impl Future<Output = Result<T, StorageError>> + Send + 'static,
) -> Result<T, StorageError> {
    begin(future)?.wait()
}

/// A future that is under way. Dropped, it ends where it stands.
pub(crate) struct Begun<T> {
    answer: mpsc::Receiver<Result<T, StorageError>>,
    task: AbortHandle,
}

impl<T> Begun<T> {
    pub fn wait(self) -> Result<T, StorageError> {
        self.answer.recv().unwrap_or_else(|_| {
            let message = "a request to object storage ended without an answer";
            Err(StorageError::new(StorageFault::Other, message))
        })
    }
}

impl<T> Drop for Begun<T> {
    fn drop(&mut self) {
        // One that has answered has ended.
        self.task.abort();
    }
}

/// Begins a future on the threads for object storage.
pub(crate) fn begin<T: Send + 'static>(
    future: impl Future<Output = Result<T, StorageError>> + Send + 'static,
) -> Result<Begun<T>, StorageError> {
    let (send, receive) = mpsc::sync_channel(1);
    let task = runtime()?.spawn(async move {
        // Nobody waits any more: the answer is of no use.
        let _ = send.send(future.await);
    });
    Ok(Begun {
        answer: receive,
        task: task.abort_handle(),
    })
}

pub(crate) struct Client {
    pub store: Arc<dyn ObjectStore>,
    pub limits: Limits,
    pub counters: Arc<Counters>,
    pub secrets: Vec<String>,
}

impl Client {
    /// An error of the client's, in the words of this crate.
    pub fn fault(&self, url: &ObjectUrl, error: &object_store::Error) -> StorageError {
        of_client(&url.to_string(), error, &self.secrets)
    }

    /// What `request` gives, or an error when it takes longer than a request with all its retries may.
    pub async fn limited<T>(
        &self,
        url: &ObjectUrl,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, StorageError> {
        let begun = Instant::now();
        let answer = match tokio::time::timeout(self.limits.whole(), request).await {
            Ok(answer) => answer.map_err(|error| self.fault(url, &error)),
            Err(_) => Err(self.timed_out(url)),
        };
        tracing::debug!(%url, elapsed = ?begun.elapsed(), error = answer.as_ref().err().map(tracing::field::display), "request");
        answer
    }

    pub fn timed_out(&self, url: &ObjectUrl) -> StorageError {
        let said = format!("{} seconds", self.limits.whole().as_secs());
        StorageError::of(StorageFault::TimedOut, &url.to_string(), &said)
    }

    /// The bytes in `range`, or all. `of` is what was found of the object before, whose bytes alone are given.
    pub async fn get(
        &self,
        url: &ObjectUrl,
        range: Option<Range<u64>>,
        of: Option<&Stat>,
    ) -> Result<(Stat, Bytes), StorageError> {
        let mut attempt = 0;
        loop {
            let begun = Instant::now();
            let options = GetOptions {
                range: range.clone().map(GetRange::Bounded),
                if_match: of.and_then(Stat::strong_etag).map(str::to_string),
                ..GetOptions::default()
            };
            let request = self.get_once(url, options, of);
            let answer = match tokio::time::timeout(self.limits.whole(), request).await {
                Ok(answer) => answer,
                Err(_) => return Err(self.timed_out(url)),
            };
            match answer {
                Ok(found) => {
                    tracing::debug!(%url, bytes = found.1.len(), elapsed = ?begun.elapsed(), attempt, "get");
                    return Ok(found);
                }
                Err(CutOr::Fault(fault)) => {
                    tracing::debug!(%url, elapsed = ?begun.elapsed(), attempt, error = %fault, "get");
                    return Err(fault);
                }
                Err(CutOr::Cut(said)) if attempt == CUT_ANSWERS => {
                    return Err(StorageError::of(StorageFault::Other, &url.to_string(), &said));
                }
                Err(CutOr::Cut(said)) => {
                    tracing::debug!(%url, attempt, said, "an answer was cut; it is asked for again")
                }
            }
            attempt += 1;
            pause(attempt).await;
        }
    }

    async fn get_once(&self, url: &ObjectUrl, options: GetOptions, of: Option<&Stat>) -> Result<(Stat, Bytes), CutOr> {
        let fault = |error| CutOr::Fault(self.fault(url, &error));
        let key = key_of(url).map_err(CutOr::Fault)?;
        let answer = self.store.get_opts(&key, options).await.map_err(fault)?;
        let stat = Stat::of(&answer.meta);
        // Before its bytes: another object may be of any size.
        if of.is_some_and(|of| !of.is_same(&stat)) {
            let changed = StorageError::of(StorageFault::Changed, &url.to_string(), "");
            return Err(CutOr::Fault(changed));
        }
        let wanted = answer.range.end - answer.range.start;
        // Room is made as bytes come: a length that is stated may be wrong.
        let mut bytes = BytesMut::with_capacity(wanted.min(16 << 20) as usize);
        let mut stream = answer.into_stream();
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(|error| CutOr::Cut(self.fault(url, &error).to_string()))?;
            self.counters.read(piece.len());
            bytes.extend_from_slice(&piece);
        }
        if bytes.len() as u64 != wanted {
            return Err(CutOr::Cut(format!("{} bytes came of {wanted}", bytes.len())));
        }
        Ok((stat, bytes.freeze()))
    }
}

/// Before an answer is asked for again, the more times it was cut the longer.
pub(crate) async fn pause(attempt: usize) {
    tokio::time::sleep(std::time::Duration::from_millis(50 << attempt.min(10))).await;
}

/// An answer that was cut may be asked for again.
enum CutOr {
    Cut(String),
    Fault(StorageError),
}

/// The key in the client's form.
pub(crate) fn key_of(url: &ObjectUrl) -> Result<Key, StorageError> {
    Key::parse(url.key())
        .map_err(|error| StorageError::of(StorageFault::Location, &url.to_string(), &error.to_string()))
}
