//! Recordings in object storage, which jobs name by URL: below the prefixes of `jobs.sources`, with the credentials of the service.

use std::io;

use axum::http::StatusCode;
use flow_storage::{InputFile, StorageError, StorageFault};

use super::super::error::ApiError;
use super::super::upload::{Upload, Uploads};
use super::folder::JobRequest;
use super::settings::object;
use super::{Jobs, LEAST_BYTES, blocking};

/// Bytes that are asked for at once.
const PART: u64 = 8 << 20;

impl Jobs {
    /// Checks the URL of a recording.
    ///
    /// # Errors
    /// 400 if recordings are not fetched there.
    pub fn check_source(&self, url: &str) -> Result<(), ApiError> {
        let refused = |message: String| Err(ApiError::parameter("url", "url_not_allowed", message));
        let object = match object(url) {
            Ok(object) => object,
            Err(why) => return refused(why),
        };
        let is_below = |prefix: &String| {
            let prefix = super::settings::object(prefix);
            prefix.is_ok_and(|prefix| object.below(&prefix).is_some_and(|key| !key.is_empty()))
        };
        match self.settings.sources.iter().any(is_below) {
            true => Ok(()),
            false => refused("the URL is below none of the prefixes of this server's `jobs.sources`".to_owned()),
        }
    }

    /// Fetches the recording of a job that names one, where it is not there yet.
    ///
    /// # Errors
    /// If it cannot be read, has more than `most` bytes, or there is no room for it.
    pub async fn fetch(&self, request: &JobRequest, most: u64) -> Result<(), ApiError> {
        let Some(url) = request.url.as_deref().filter(|_| !self.folder.has_audio(&request.id)) else {
            return Ok(());
        };
        // The settings may be others than when the job was accepted.
        self.check_source(url)?;
        let object = object(url).map_err(|why| unreadable(&io::Error::other(why)))?;
        let upload = fetched(&self.uploads, most, &request.file_name, move || {
            InputFile::open_object(&object)
        })
        .await?;
        let kept = self.folder.put_audio(&request.id, upload.path);
        kept.map_err(|error| {
            let message = format!("the recording cannot be kept: {}", error.kind());
            ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "job_not_stored", message)
        })?;
        let mut reservation = upload.reservation;
        reservation.shrink(upload.bytes.max(LEAST_BYTES));
        if let Some(entry) = self.table().jobs.get_mut(&request.number) {
            entry.reservation = reservation;
        }
        Ok(())
    }
}

/// A copy of an object, part by part.
async fn fetched(
    uploads: &Uploads,
    most: u64,
    name: &str,
    open: impl FnOnce() -> io::Result<InputFile> + Send + 'static,
) -> Result<Upload, ApiError> {
    let opened = blocking(move || {
        let object = open()?;
        let length = object.length()?;
        Ok((object, length))
    });
    let (mut object, length) = opened.await.map_err(|error| unreadable(&error))?;
    if length > most {
        let message = format!("the recording has {length} bytes; at most {most} are taken");
        return Err(ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "recording_too_large",
            message,
        ));
    }
    let mut file = uploads.begin().await?;
    while file.bytes() < length {
        let (offset, bytes) = (file.bytes(), PART.min(length - file.bytes()));
        let read = blocking(move || {
            // At most `PART`.
            let mut part = vec![0; bytes as usize];
            object.read_exact_at(&mut part, offset)?;
            Ok((object, part))
        });
        let part;
        (object, part) = read.await.map_err(|error| unreadable(&error))?;
        file = file.with(&part).await?;
    }
    file.finish(name).await
}

fn unreadable(error: &io::Error) -> ApiError {
    let is_missing = StorageError::in_io(error)
        .is_some_and(|error| matches!(error.fault, StorageFault::NotFound | StorageFault::NoSuchBucket));
    let (status, code) = match is_missing {
        true => (StatusCode::NOT_FOUND, "recording_not_found"),
        false => (StatusCode::BAD_GATEWAY, "recording_unreadable"),
    };
    ApiError::new(status, code, error.to_string())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use flow_storage::Location;
    use flow_storage_testing::{Fault, FaultRule, TestServer};
    use tempfile::TempDir;

    use super::super::JobSettings;
    use super::*;

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(future)
    }

    fn jobs(folder: &TempDir) -> Jobs {
        let settings = JobSettings {
            folder: Some(folder.path().join("jobs")),
            sources: vec!["s3://calls/2026".to_owned(), "s3://open".to_owned()],
            max_bytes: 20 << 20,
            ..JobSettings::default()
        };
        let log: super::super::Log = Arc::new(|_| {});
        Jobs::open(&settings, &log).unwrap().unwrap()
    }

    #[test]
    fn recordings_are_fetched_below_the_listed_prefixes_alone() {
        let folder = TempDir::new().unwrap();
        let jobs = jobs(&folder);
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
    }

    #[test]
    fn objects_are_copied_or_it_is_told_why_not() {
        let folder = TempDir::new().unwrap();
        let bucket = folder.path().join("s3/calls");
        fs::create_dir_all(&bucket).unwrap();
        let recording: Vec<u8> = (0..9_000_000u32).map(|at| (at % 251) as u8).collect();
        fs::write(bucket.join("a.wav"), &recording).unwrap();
        fs::write(bucket.join("large.wav"), vec![0; 21 << 20]).unwrap();
        let server = TestServer::start(&folder.path().join("s3")).unwrap();
        let storage = Arc::new(server.storage());
        let jobs = jobs(&folder);
        let fetch = |name: &str, most: u64| {
            let url = format!("s3://calls/{name}");
            let Ok(Location::Object(url)) = Location::parse(&url) else {
                panic!("{url}");
            };
            let storage = Arc::clone(&storage);
            run(fetched(&jobs.uploads, most, name, move || {
                Ok(InputFile::Object(Box::new(storage.open(&url)?)))
            }))
        };
        let code = |found: Result<Upload, ApiError>| found.err().map(|error| error.code);
        server.fault(FaultRule::first(1, Fault::Status(503), "a.wav"));
        let found = fetch("a.wav", 1 << 30).unwrap();
        assert_eq!(fs::read(&found.path).unwrap(), recording);
        assert_eq!(found.name, "a.wav");
        assert_eq!(code(fetch("b.wav", 1 << 30)), Some("recording_not_found"));
        assert_eq!(code(fetch("a.wav", 1_000)), Some("recording_too_large"));
        assert_eq!(code(fetch("large.wav", 1 << 30)), Some("no_room_for_upload"));
        drop(found);
        server.fault(FaultRule::always(Fault::Status(403), "a.wav"));
        assert_eq!(code(fetch("a.wav", 1 << 30)), Some("recording_unreadable"));
    }
}
