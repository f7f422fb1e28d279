//! What can go wrong in evaluation.

use std::path::{Path, PathBuf};

use flow_kind::{RejectSet, StageError};

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum EvaluationError {
    #[error("{message}")]
    Setting { path: String, message: String },
    #[error("{message}")]
    Data { message: String },
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    /// The run was cancelled.
    #[error("ended before it was done")]
    Cancelled,
    #[error("the page cannot be drawn: {0}")]
    Drawing(String),
    #[error(transparent)]
    Model(#[from] flow_model::Error),
    #[error(transparent)]
    Kernel(#[from] flow_kernels::Error),
    #[error(transparent)]
    Audio(#[from] flow_audio::AudioError),
    #[error(transparent)]
    Stage(#[from] StageError),
}

impl EvaluationError {
    pub fn setting(path: impl Into<String>, message: impl std::fmt::Display) -> Self {
        EvaluationError::Setting {
            path: path.into(),
            message: message.to_string(),
        }
    }

    pub fn file(path: &Path) -> impl FnOnce(std::io::Error) -> EvaluationError + '_ {
        move |source| EvaluationError::File {
            path: path.to_owned(),
            source,
        }
    }
}

/// The error where there is nothing to score: what is missing, and the most frequent reason of the rows that were
/// rejected before.
pub fn nothing_to_score(what: impl std::fmt::Display, rejects: &RejectSet) -> StageError {
    StageError::failed(format!("{what} ({})", rejects.in_words()))
        .with_help("`flow rejects` shows what was refused; or look at how the rows are split and chosen")
}

impl From<EvaluationError> for StageError {
    fn from(error: EvaluationError) -> Self {
        match error {
            EvaluationError::Stage(error) => error,
            EvaluationError::Setting { path, message } => StageError::setting(path, message),
            EvaluationError::File { path, source } => {
                let help = flow_kind::full_disk(&path, &source);
                let failed = StageError::failed(EvaluationError::File { path, source });
                help.into_iter().fold(failed, StageError::with_help)
            }
            other => StageError::failed(other),
        }
    }
}
