//! What can go wrong in training.

use std::path::{Path, PathBuf};

use flow_hub::HubError;
use flow_kind::StageError;

/// Errors of this crate. Messages name the thing and say what to do.
#[derive(Debug, thiserror::Error)]
pub enum TrainingError {
    /// A setting has a value that cannot be used.
    #[error("{message}")]
    Setting { path: String, message: String },
    /// Training was asked to continue in a way that is refused.
    #[error("{message}")]
    Refused { message: String, help: Option<String> },
    /// A checkpoint is damaged.
    #[error("checkpoint {} is damaged: {message}", folder.display())]
    Damaged { folder: PathBuf, message: String },
    /// Another process trains into the folder.
    #[error("{} is in use: {owner}", folder.display())]
    Locked { folder: PathBuf, owner: String },
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("{message}")]
    Data { message: String },
    /// A model could not be fetched from the Hugging Face hub.
    #[error("{message}")]
    Hub { message: String, help: String },
    /// A rank failed, or did not take part in a collective operation in time.
    #[error("rank {rank} of training failed: {message}")]
    Rank { rank: usize, message: String },
    /// Too many steps had no finite loss or gradient.
    #[error("{message}")]
    NotFinite { message: String },
    /// Too many steps were skipped, the last because none of its utterances could be loaded.
    #[error("{message}")]
    NothingLoaded { message: String },
    /// Object storage could not be read or written.
    #[error(transparent)]
    Storage(#[from] flow_storage::StorageError),
    #[error(transparent)]
    Model(#[from] flow_model::Error),
    #[error(transparent)]
    Kernel(#[from] flow_kernels::Error),
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    #[error(transparent)]
    Evaluation(#[from] flow_evaluation::EvaluationError),
}

impl TrainingError {
    pub fn setting(path: impl Into<String>, message: impl std::fmt::Display) -> Self {
        TrainingError::Setting {
            path: path.into(),
            message: message.to_string(),
        }
    }

    pub(crate) fn data(message: impl Into<String>) -> Self {
        let message = message.into();
        TrainingError::Data { message }
    }

    pub(crate) fn rank(rank: usize, message: impl Into<String>) -> Self {
        let message = message.into();
        TrainingError::Rank { rank, message }
    }

    pub(crate) fn refused(message: impl Into<String>, help: impl Into<String>) -> Self {
        TrainingError::Refused {
            message: message.into(),
            help: Some(help.into()),
        }
    }

    /// The message, with what is to be done about it: for where only a text is passed on.
    pub fn with_help(&self) -> String {
        match self {
            TrainingError::Refused {
                message,
                help: Some(help),
            } => format!("{message}; {help}"),
            error => error.to_string(),
        }
    }

    /// The rank that failed and why, of an error of `rank`.
    pub(crate) fn of_rank(self, rank: usize) -> (usize, String) {
        match self {
            TrainingError::Rank { rank, message } => (rank, message),
            error => (rank, error.with_help()),
        }
    }

    pub fn file(path: &Path) -> impl FnOnce(std::io::Error) -> TrainingError + '_ {
        move |source| TrainingError::File {
            path: path.to_owned(),
            source,
        }
    }
}

/// Every reference to the hub in this crate is the value of a setting `init`.
impl From<HubError> for TrainingError {
    fn from(error: HubError) -> Self {
        match error {
            HubError::Reference { message } => TrainingError::setting("init", message),
            HubError::Unavailable { message, help } => TrainingError::Hub { message, help },
            HubError::File { path, source } => TrainingError::File { path, source },
        }
    }
}

impl From<TrainingError> for StageError {
    fn from(error: TrainingError) -> Self {
        let message = error.to_string();
        match error {
            TrainingError::Setting { path, .. } => StageError::setting(path, message),
            TrainingError::Refused { help, .. } => StageError::Refused { message, help },
            TrainingError::Hub { help, .. } => StageError::failed(message).with_help(help),
            TrainingError::Damaged { .. } => StageError::failed(message).with_help("no checkpoint of its folder is sound; put back what was changed, or move them out of it to start over"),
            TrainingError::Rank { .. } => StageError::failed(message).with_help("the newest checkpoint is intact; run again to continue from it, with a longer `rank_timeout` if the rank was only slow"),
            TrainingError::Locked { .. } => StageError::Refused { message, help: Some("wait for it, or give another folder as `checkpoints`".into()) },
            TrainingError::File { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => StageError::failed(message).with_help("this user may not do that: change the owner or mode of the file, or run as a user who may"),
            TrainingError::NotFinite { .. } => StageError::failed(message).with_help("lower the rate, raise the warm-up, or look at the segments that are named; `max_bad_steps` sets the limit"),
            TrainingError::NothingLoaded { .. } => StageError::failed(message).with_help("check that the audio is where the rows say; `max_bad_steps` sets the limit"),
            TrainingError::File { path, source } => {
                let help = flow_kind::full_disk(&path, &source);
                help.into_iter().fold(StageError::failed(message), StageError::with_help)
            }
            _ => StageError::failed(message),
        }
    }
}
