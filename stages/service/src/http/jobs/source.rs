//! Recordings in object storage, which jobs name by URL: below the prefixes of `jobs.sources`, with the credentials of the service.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use flow_storage::{InputFile, ObjectReader, ObjectUrl, StorageError, StorageFault};
use tempfile::NamedTempFile;

use super::super::app::Log;
use super::super::error::ApiError;
use super::folder::JobRequest;
use super::settings::object;
use super::{Jobs, LEAST_BYTES, Status, blocking};
use crate::engine::{Reservation, TempFolder, cancellable};

/// Bytes that are read at once.
const PART: u64 = 8 << 20;

/// Why the recording of a job is not there.
#[derive(Debug)]
pub enum Unfetched {
    /// There may be room, or an answer, later.
    Later,
    Refused(ApiError),
}

/// Bounds of what is fetched.
#[derive(Clone, Copy)]
pub struct FetchLimits {
    pub bytes: u64,
    pub time: Duration,
    /// Tries for storage that does not answer.
    pub tries: u32,
}

impl Jobs {
    /// Checks the URL of a recording.
    ///
    /// # Errors
    /// 400 if recordings are not fetched there.
    pub fn check_source(&self, url: &str) -> Result<ObjectUrl, ApiError> {
        let refused = |message: &str| ApiError::parameter("url", "url_not_allowed", message);
        if self.settings.sources.is_empty() {
            return Err(refused("this server fetches no recordings: jobs.sources is not set"));
        }
        let found = object(url).map_err(|why| refused(&why))?;
        let is_below = |prefix: &String| {
            let prefix = object(prefix);
            prefix.is_ok_and(|prefix| found.below(&prefix).is_some_and(|key| !key.is_empty()))
        };
        match self.settings.sources.iter().any(is_below) {
            true => Ok(found),
            false => Err(refused(
                "the URL is not below a prefix that this server fetches recordings from",
            )),
        }
    }

    /// Fetches the recording of a job that names one, where it is not there yet.
    ///
    /// # Errors
    /// Why it is not there.
    pub async fn fetch(&self, request: &JobRequest, limits: FetchLimits, log: &Log) -> Result<(), Unfetched> {
        let Some(url) = request.url.as_deref().filter(|_| !self.folder.has_audio(&request.id)) else {
            return Ok(());
        };
        // The settings may be others than when the job was accepted.
        let url = self.check_source(url).map_err(Unfetched::Refused)?;
        let most = limits.bytes.min(self.settings.max_bytes);
        let limits = FetchLimits { bytes: most, ..limits };
        let folder = self.folder.private.clone();
        let storage = self.storage.clone();
        let fetched =
            cancellable(move |is_cancelled| fetched(&folder, limits, is_cancelled, || storage.open_now(&url)));
        let fetched = fetched.await.unwrap_or_else(|error| Err(unkept(&error)));
        let (file, reservation) = fetched.map_err(|failure| self.judged(request, limits, failure, log))?;
        // A job that was cancelled meanwhile keeps no recording.
        let _alone = self.commits.lock().await;
        let runs = |table: &super::Table| {
            let entry = table.jobs.get(&request.number);
            entry.is_some_and(|entry| matches!(entry.status, Status::Running(_)))
        };
        if !runs(&self.table()) {
            return Err(Unfetched::Later);
        }
        let (folder, id) = (Arc::clone(&self.folder), request.id.clone());
        let kept = blocking(move || folder.put_audio(&id, file.into_temp_path())).await;
        kept.map_err(|error| self.judged(request, limits, unkept(&error.kind()), log))?;
        if let Some(entry) = self.table().jobs.get_mut(&request.number) {
            entry.reservation = reservation;
        }
        Ok(())
    }

    /// Whether a failure may pass.
    fn judged(&self, request: &JobRequest, limits: FetchLimits, failure: Failure, log: &Log) -> Unfetched {
        match failure {
            Failure::NoRoom => Unfetched::Later,
            Failure::Refused(error) => Unfetched::Refused(error),
            Failure::Storage(error) => {
                // The client is not told the server's own words.
                log(&format!(
                    "warning: the recording of the job {} cannot be fetched: {error}",
                    request.id
                ));
                let (status, code, message) = match StorageError::in_io(&error).map(|error| error.fault) {
                    Some(StorageFault::NotFound | StorageFault::NoSuchBucket) => (
                        StatusCode::NOT_FOUND,
                        "recording_not_found",
                        "there is no recording at this URL",
                    ),
                    Some(StorageFault::PermissionDenied) => (
                        StatusCode::FORBIDDEN,
                        "recording_unreadable",
                        "the service may not read this recording",
                    ),
                    _ => (
                        StatusCode::BAD_GATEWAY,
                        "recording_unreadable",
                        "the recording cannot be read from its storage",
                    ),
                };
                let may_pass = StorageError::in_io(&error)
                    .is_none_or(|error| !error.is_of_the_object() && error.fault != StorageFault::NoSuchBucket);
                let mut table = self.table();
                let entry = table.jobs.get_mut(&request.number);
                let tries = entry.map_or(limits.tries, |entry| {
                    entry.tries += 1;
                    entry.tries
                });
                match may_pass && tries < limits.tries {
                    true => Unfetched::Later,
                    false => Unfetched::Refused(ApiError::new(status, code, message)),
                }
            }
        }
    }
}

#[derive(Debug)]
enum Failure {
    NoRoom,
    Storage(io::Error),
    Refused(ApiError),
}

impl From<StorageError> for Failure {
    fn from(error: StorageError) -> Self {
        Self::Storage(error.into())
    }
}

fn unkept(error: &dyn Display) -> Failure {
    let message = format!("the recording cannot be kept: {error}");
    Failure::Refused(ApiError::new(
        StatusCode::INSUFFICIENT_STORAGE,
        "job_not_stored",
        message,
    ))
}

/// A copy of an object as it is now, flushed, with its reservation.
fn fetched(
    folder: &TempFolder,
    limits: FetchLimits,
    is_cancelled: &dyn Fn() -> bool,
    open: impl FnOnce() -> Result<ObjectReader, StorageError>,
) -> Result<(NamedTempFile, Reservation), Failure> {
    let begin = Instant::now();
    let object = InputFile::Object(Box::new(open()?));
    let length = object.length().map_err(Failure::Storage)?;
    if length > limits.bytes {
        let message = format!("the recording has {length} bytes; at most {} are taken", limits.bytes);
        let (status, code) = (StatusCode::PAYLOAD_TOO_LARGE, "recording_too_large");
        return Err(Failure::Refused(ApiError::new(status, code, message)));
    }
    let reservation = folder.reserve(length.max(LEAST_BYTES)).ok_or(Failure::NoRoom)?;
    let mut file = folder.file().map_err(|error| unkept(&error.kind()))?;
    let mut part = vec![0; PART.min(length) as usize];
    let mut offset = 0;
    while offset < length {
        if is_cancelled() || begin.elapsed() > limits.time {
            return Err(Failure::Storage(io::ErrorKind::TimedOut.into()));
        }
        let part = &mut part[..PART.min(length - offset) as usize];
        object.read_exact_at(part, offset).map_err(Failure::Storage)?;
        file.write_all(part).map_err(|error| unkept(&error.kind()))?;
        offset += part.len() as u64;
    }
    file.as_file().sync_all().map_err(|error| unkept(&error.kind()))?;
    Ok((file, reservation))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use flow_storage::Storage;
    use flow_storage_testing::{Fault, FaultRule, TestServer};
    use tempfile::TempDir;

    use super::super::JobSettings;
    use super::*;

    const LIMITS: FetchLimits = FetchLimits {
        bytes: 20 << 20,
        time: Duration::from_secs(600),
        tries: 2,
    };

    #[test]
    fn recordings_are_fetched_below_the_listed_prefixes_alone() {
        let folder = TempDir::new().unwrap();
        let open = |name: &str, sources: &[&str]| {
            let settings = JobSettings {
                folder: Some(folder.path().join(name)),
                sources: sources.iter().map(|source| source.to_string()).collect(),
                ..JobSettings::default()
            };
            let log: Log = Arc::new(|_| {});
            Jobs::open(&Storage::default(), &settings, &log).unwrap().unwrap()
        };
        let jobs = open("jobs", &["s3://calls/2026", "s3://open"]);
        for allowed in ["s3://calls/2026/a.wav", "s3://calls/2026/may/a.wav", "s3://open/a.wav"] {
            jobs.check_source(allowed).unwrap();
        }
        for refused in [
            "s3://calls/2027/a.wav",
            "s3://calls/2026",
            "s3://calls/20260/a.wav",
            "s3://calls/2026/../2027/a.wav",
            "s3://other/a.wav",
            "gs://calls/2026/a.wav",
            "https://calls/2026/a.wav",
            "file:///etc/passwd",
            "/etc/passwd",
            "",
        ] {
            assert_eq!(
                jobs.check_source(refused).unwrap_err().code,
                "url_not_allowed",
                "{refused}"
            );
        }
        let none = open("none", &[]).check_source("s3://open/a.wav").unwrap_err();
        assert!(none.message.contains("jobs.sources"), "{none:?}");
    }

    #[test]
    fn objects_are_copied_or_it_is_told_why_not() {
        let folder = TempDir::new().unwrap();
        let bucket = folder.path().join("s3/calls");
        fs::create_dir_all(&bucket).unwrap();
        let recording: Vec<u8> = (0..9_000_000u32).map(|at| (at % 251) as u8).collect();
        fs::write(bucket.join("a.wav"), &recording).unwrap();
        fs::write(bucket.join("large.wav"), vec![0; 12 << 20]).unwrap();
        let server = TestServer::start(&folder.path().join("s3")).unwrap();
        let storage = server.storage();
        let private = TempFolder::new(folder.path(), 20 << 20).unwrap();
        let fetch = |name: &str, limits: FetchLimits, stopped: bool| {
            let url = object(&format!("s3://calls/{name}")).unwrap();
            fetched(&private, limits, &|| stopped, || storage.open_now(&url))
        };
        let fault = |failure: Result<_, Failure>| match failure.err().unwrap() {
            Failure::NoRoom => "no room".to_owned(),
            Failure::Refused(error) => error.code.to_owned(),
            Failure::Storage(error) => match StorageError::in_io(&error) {
                Some(error) => format!("{:?}", error.fault),
                None => format!("{:?}", error.kind()),
            },
        };
        server.fault(FaultRule::first(1, Fault::Status(503), "a.wav"));
        let (file, reservation) = fetch("a.wav", LIMITS, false).unwrap();
        assert_eq!(fs::read(file.path()).unwrap(), recording);
        assert_eq!(reservation.bytes(), 9_000_000);
        assert_eq!(fault(fetch("b.wav", LIMITS, false)), "NotFound");
        assert_eq!(
            fault(fetch("a.wav", FetchLimits { bytes: 1_000, ..LIMITS }, false)),
            "recording_too_large"
        );
        assert_eq!(fault(fetch("large.wav", LIMITS, false)), "no room");
        drop((file, reservation));
        assert_eq!(fault(fetch("large.wav", LIMITS, true)), "TimedOut");
        let hurry = FetchLimits {
            time: Duration::ZERO,
            ..LIMITS
        };
        assert_eq!(fault(fetch("large.wav", hurry, false)), "TimedOut");
        // Another object of the same name, fetched by the same client.
        fs::write(bucket.join("a.wav"), b"other").unwrap();
        let (file, _reservation) = fetch("a.wav", LIMITS, false).unwrap();
        assert_eq!(fs::read(file.path()).unwrap(), b"other");
        server.fault(FaultRule::always(Fault::Status(403), "a.wav"));
        assert_eq!(fault(fetch("a.wav", LIMITS, false)), "PermissionDenied");
        // What was not kept leaves nothing.
        drop((file, _reservation));
        assert!(private.reserve(20 << 20).is_some());
        let left = fs::read_dir(private.path()).unwrap().flatten();
        assert_eq!(
            left.filter(|entry| entry.file_name().to_string_lossy().starts_with("upload-"))
                .count(),
            0
        );
    }
}
