//! Why a run ended before its end.

use crate::error::StageError;
use crate::partition::Partition;
use crate::store::StoreError;

/// Why a run ended before its end.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A stage failed: exit code 1 (2 where the stage refused, or a setting or input is wrong).
    #[error("stage `{stage}`{}: {error}", at(.partition, .error))]
    Stage {
        stage: String,
        partition: Option<Partition>,
        #[source]
        error: StageError,
    },
    /// The command line names what is not there, or asks for what cannot be: exit code 2.
    #[error("{message}")]
    Usage { message: String, help: Option<String> },
    /// The state directory: exit code 3 where another run holds it, else 1.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A signal ended the run after what was in hand was committed: exit code 128 + signal.
    #[error("interrupted by signal {signal}")]
    Interrupted { signal: i32 },
    /// Another process of the run is lost: exit code 1.
    #[error("{message}")]
    Process { message: String },
    /// Our bug: exit code 70.
    #[error("internal error: {message}")]
    Internal { message: String },
}

fn at(partition: &Option<Partition>, error: &StageError) -> String {
    let mut text = String::new();
    if let Some(partition) = partition {
        text.push_str(&format!(", partition {partition}"));
    }
    if let StageError::Failed { row: Some(row), .. } = error {
        text.push_str(&format!(", row {row}"));
    }
    text
}

impl RunError {
    pub fn exit_code(&self) -> u8 {
        match self {
            RunError::Stage {
                error: StageError::Failed { .. },
                ..
            } => 1,
            RunError::Stage { .. } | RunError::Usage { .. } => 2,
            RunError::Store(error) if error.is_held() => 3,
            RunError::Store(_) | RunError::Process { .. } => 1,
            RunError::Interrupted { signal } => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            RunError::Internal { .. } => 70,
        }
    }

    /// What a person can do about it.
    pub fn help(&self) -> Option<String> {
        match self {
            RunError::Stage { error, .. } => match error {
                StageError::Setting { help, .. }
                | StageError::Input { help, .. }
                | StageError::Refused { help, .. }
                | StageError::Failed { help, .. } => help.clone(),
            },
            RunError::Usage { help, .. } => help.clone(),
            RunError::Store(error) => error.help(),
            RunError::Interrupted { .. } => Some("run it again: what is committed is not done again".to_string()),
            RunError::Process { .. } => Some(
                "look at what that process said last; then start all again: what is committed is not done again"
                    .to_string(),
            ),
            RunError::Internal { .. } => None,
        }
    }
}
