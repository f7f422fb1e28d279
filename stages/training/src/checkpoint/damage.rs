//! Errors of damaged checkpoints.

use std::path::Path;

use flow_kind::store::is_fault_of_the_file;

use crate::error::TrainingError;

/// The error for a damaged checkpoint.
pub(super) fn damaged(checkpoint: &Path, message: String) -> TrainingError {
    TrainingError::Damaged {
        folder: checkpoint.to_owned(),
        message,
    }
}

/// The error where a file of a checkpoint cannot be read: damage, unless this process lacks the permission, memory or
/// file descriptors to read it.
pub(super) fn unreadable(checkpoint: &Path, name: &str, error: std::io::Error) -> TrainingError {
    if error.kind() == std::io::ErrorKind::PermissionDenied || !is_fault_of_the_file(&error) {
        return TrainingError::File {
            path: checkpoint.join(name),
            source: error,
        };
    }
    damaged(checkpoint, format!("{name}: {error}"))
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use super::*;
    use crate::checkpoint::record::{OPTIMIZER, RECORD};

    #[test]
    fn what_may_not_be_read_is_not_damaged() {
        let checkpoint = Path::new("checkpoints/step-000000004");
        // EACCES and EMFILE: no permission, too many open files.
        for number in [13, 24] {
            match unreadable(checkpoint, OPTIMIZER, Error::from_raw_os_error(number)) {
                TrainingError::File { path, source } => {
                    assert_eq!(path, checkpoint.join(OPTIMIZER));
                    assert_eq!(source.raw_os_error(), Some(number));
                }
                other => panic!("{number}: {other:?}"),
            }
        }
        for kind in [ErrorKind::NotFound, ErrorKind::InvalidData, ErrorKind::IsADirectory] {
            let error = unreadable(checkpoint, RECORD, kind.into());
            assert!(matches!(error, TrainingError::Damaged { .. }), "{kind}: {error:?}");
        }
        let denied = unreadable(checkpoint, RECORD, ErrorKind::PermissionDenied.into());
        match flow_kind::StageError::from(denied) {
            flow_kind::StageError::Failed { message, help, .. } => {
                assert!(message.contains("step-000000004/training.json"), "{message}");
                assert!(help.is_some_and(|help| help.contains("may not")));
            }
            other => panic!("{other:?}"),
        }
    }
}
