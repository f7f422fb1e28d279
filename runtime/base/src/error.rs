//! Why a stage cannot go on.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::secret::Secrets;

/// Why a stage cannot go on.
#[derive(Clone, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum StageError {
    /// A setting is wrong. `path` is its path below `with` (`rejects[1].when`); `offset` is the line and column (from
    /// 1) within a text setting such as SQL.
    #[error("{message}")]
    Setting {
        path: String,
        offset: Option<(usize, usize)>,
        message: String,
        help: Option<String>,
    },
    /// The inputs do not fit the stage.
    #[error("{message}")]
    Input {
        name: String,
        message: String,
        help: Option<String>,
    },
    /// The stage declines to run as it was asked (a changed training setting, say): exit code 2.
    #[error("{message}")]
    Refused { message: String, help: Option<String> },
    /// A failure while running: exit code 1. `row` is the `_row` of the row that caused it, if one did.
    #[error("{message}")]
    Failed {
        message: String,
        row: Option<u32>,
        help: Option<String>,
    },
    /// A file that the runtime wrote is not what it was when it was written: exit code 1, unless the run can remove it and
    /// make again what it held.
    #[error("{message}")]
    Damaged {
        path: PathBuf,
        message: String,
        help: Option<String>,
    },
}

impl StageError {
    pub fn failed(message: impl std::fmt::Display) -> Self {
        StageError::Failed {
            message: message.to_string(),
            row: None,
            help: None,
        }
    }

    pub fn setting(path: impl Into<String>, message: impl std::fmt::Display) -> Self {
        StageError::Setting {
            path: path.into(),
            offset: None,
            message: message.to_string(),
            help: None,
        }
    }

    pub fn input(name: impl Into<String>, message: impl Into<String>) -> Self {
        StageError::Input {
            name: name.into(),
            message: message.into(),
            help: None,
        }
    }

    pub fn refused(message: impl Into<String>, help: impl Into<String>) -> Self {
        StageError::Refused {
            message: message.into(),
            help: Some(help.into()),
        }
    }

    /// The error without the values of secrets.
    pub fn hidden(mut self, secrets: &Secrets) -> Self {
        let (StageError::Setting { message, help, .. }
        | StageError::Input { message, help, .. }
        | StageError::Refused { message, help }
        | StageError::Failed { message, help, .. }
        | StageError::Damaged { message, help, .. }) = &mut self;
        *message = secrets.hide(message).into_owned();
        *help = help.as_deref().map(|help| secrets.hide(help).into_owned());
        self
    }

    /// The same, as it came from another process.
    pub fn of_process(mut self, name: &str) -> Self {
        let (StageError::Setting { message, .. }
        | StageError::Input { message, .. }
        | StageError::Refused { message, .. }
        | StageError::Failed { message, .. }
        | StageError::Damaged { message, .. }) = &mut self;
        *message = format!("{name}: {message}");
        match self {
            // The path is one of that machine: here a sound file may have the same one.
            StageError::Damaged { message, help, .. } => StageError::Failed {
                message,
                row: None,
                help,
            },
            other => other,
        }
    }

    pub fn with_help(mut self, text: impl Into<String>) -> Self {
        let (StageError::Setting { help, .. }
        | StageError::Input { help, .. }
        | StageError::Refused { help, .. }
        | StageError::Failed { help, .. }
        | StageError::Damaged { help, .. }) = &mut self;
        *help = Some(text.into());
        self
    }
}

impl From<arrow::error::ArrowError> for StageError {
    fn from(error: arrow::error::ArrowError) -> Self {
        StageError::failed(error)
    }
}
