//! Uploaded files: written in blocks to a private folder, under names that clients cannot choose.

use std::io::{self, Write};

use axum::body::Bytes;
use axum::http::StatusCode;
use futures::Stream;
use tempfile::{NamedTempFile, TempPath};

use super::body::BodyError;
use super::error::ApiError;
use super::multipart::Multipart;
use crate::engine::{Reservation, TempFolder};

/// Bytes that are written at once.
const BLOCK: usize = 256 << 10;

/// Room for this many bytes is reserved at once.
pub(super) const RESERVED: u64 = 4 << 20;

/// Most bytes of a name.
const MAX_NAME: usize = 255;

/// Name of a file without one.
const NO_NAME: &str = "audio";

/// The target of uploads.
#[derive(Clone)]
pub struct Uploads {
    pub folder: TempFolder,
}

/// A file that a client sent.
pub struct Upload {
    /// Deleted when it is dropped.
    pub path: TempPath,
    /// The client's name of it: a text, not a path.
    pub name: String,
    pub bytes: u64,
    /// Its reservation.
    pub reservation: Reservation,
}

impl Uploads {
    /// Writes the content of the part that is read to a file.
    ///
    /// # Errors
    /// If the body cannot be read, or there is no room.
    pub async fn store<S>(&self, form: &mut Multipart<S>, name: &str) -> Result<Upload, ApiError>
    where
        S: Stream<Item = Result<Bytes, BodyError>> + Unpin,
    {
        let mut file = self.begin().await?;
        while let Some(chunk) = form.chunk().await? {
            file = file.with(&chunk).await?;
        }
        file.finish(name).await
    }

    /// An empty file.
    ///
    /// # Errors
    /// If there is no room.
    pub async fn begin(&self) -> Result<Unfinished, ApiError> {
        let reservation = self.folder.reserve(RESERVED).ok_or_else(no_room)?;
        let folder = self.folder.clone();
        Ok(Unfinished {
            file: blocking(move || folder.file()).await?,
            block: Vec::with_capacity(BLOCK),
            bytes: 0,
            reservation,
        })
    }
}

/// A file of which more is to come.
pub struct Unfinished {
    file: NamedTempFile,
    /// What is not written yet.
    block: Vec<u8>,
    bytes: u64,
    reservation: Reservation,
}

impl Unfinished {
    /// All bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// With these bytes at its end.
    ///
    /// # Errors
    /// If there is no room.
    pub async fn with(mut self, bytes: &[u8]) -> Result<Self, ApiError> {
        self.bytes += bytes.len() as u64;
        self.block.extend_from_slice(bytes);
        let reserved = self.reservation.bytes();
        if self.bytes > reserved && !self.reservation.grow(RESERVED.max(self.bytes - reserved)) {
            return Err(no_room());
        }
        match self.block.len() >= BLOCK {
            true => self.written().await,
            false => Ok(self),
        }
    }

    async fn written(mut self) -> Result<Self, ApiError> {
        blocking(move || {
            self.file.write_all(&self.block)?;
            self.block.clear();
            self.block.shrink_to(BLOCK);
            Ok(self)
        })
        .await
    }

    /// # Errors
    /// If there is no room.
    pub async fn finish(self, name: &str) -> Result<Upload, ApiError> {
        let whole = self.written().await?;
        Ok(Upload {
            path: whole.file.into_temp_path(),
            name: plain_name(name),
            bytes: whole.bytes,
            reservation: whole.reservation,
        })
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    let failed = |error: &dyn std::fmt::Display| {
        let message = format!("the file cannot be kept: {error}");
        ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "upload_not_stored", message)
    };
    // Only the kind of the error: its message may contain a path.
    match done {
        Ok(result) => result.map_err(|error| failed(&error.kind())),
        Err(error) => Err(failed(&error)),
    }
}

/// The code of an error that passes when other uploads are gone.
pub const NO_ROOM: &str = "no_room_for_upload";

fn no_room() -> ApiError {
    ApiError::unavailable(NO_ROOM, "there is no room for more uploads now")
}

/// The last component of a client's file name, without control characters, of 255 bytes at most.
fn plain_name(given: &str) -> String {
    let last = given.rsplit(['/', '\\']).next().unwrap_or_default();
    let mut name: String = last.chars().filter(|c| !c.is_control()).collect();
    let mut end = name.len().min(MAX_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name.truncate(end);
    let name = name.trim();
    if matches!(name, "" | "." | "..") {
        return NO_NAME.to_owned();
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_text_alone() {
        for (given, name) in [
            ("talk.wav", "talk.wav"),
            ("../../etc/x", "x"),
            ("C:\\Users\\a\\talk.wav", "talk.wav"),
            ("a\r\nb\0.wav", "ab.wav"),
            ("", NO_NAME),
            ("..", NO_NAME),
            ("a/", NO_NAME),
            (" \t", NO_NAME),
            ("नमस्ते.flac", "नमस्ते.flac"),
        ] {
            assert_eq!(plain_name(given), name, "{given:?}");
        }
        let long = plain_name(&"न".repeat(200));
        assert!(long.len() <= MAX_NAME && long.chars().all(|c| c == 'न'));
    }
}
