//! Why a recording cannot be decoded.

use symphonia::core::errors::Error as SymphoniaError;

use crate::flac::{self, Fault, Status};

/// What is said of a WAV whose samples go on after those that its header mentions.
pub(crate) const LONGER_THAN_ITS_HEADER_SAYS: &str = "more follows than its header says";
/// What is reported of a recording whose end is missing.
pub(crate) const ENDS_TOO_SOON: &str = "the file is truncated";

pub(crate) fn no_frames() -> Fault {
    flac::fault(Status::NoAudio, "no frames")
}

pub(crate) fn broken(detail: impl ToString) -> Fault {
    flac::fault(Status::DecodeError, detail)
}

pub(crate) fn failed(error: SymphoniaError) -> Fault {
    match error {
        SymphoniaError::Unsupported(what) => flac::fault(Status::UnsupportedFormat, what),
        SymphoniaError::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => broken(ENDS_TOO_SOON),
        other => broken(other),
    }
}
