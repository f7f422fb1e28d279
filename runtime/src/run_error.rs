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
                | StageError::Refused { help, .. } => help.clone(),
                StageError::Failed { help, message, .. } => help.clone().or_else(|| disk_full(message)),
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

/// What to do about a full disk. Stages tell of it in words, which end as [`std::io::Error`] writes the system's number.
fn disk_full(message: &str) -> Option<String> {
    // ENOSPC and, on Linux, EDQUOT.
    let is_full = [28, 122]
        .iter()
        .any(|number| message.contains(&format!("(os error {number})")));
    is_full.then(|| {
        "the disk (or the quota) is full: free some space, or name a folder on another disk, and run again; \
         what was committed stays"
            .to_string()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_with_what_to_do_whichever_stage_found_it() {
        let full = std::io::Error::from_raw_os_error(28);
        let failed = |error: StageError| RunError::Stage {
            stage: "train".into(),
            partition: None,
            error,
        };
        let help = failed(StageError::failed(format!("work/checkpoints/a: {full}"))).help();
        assert!(help.is_some_and(|help| help.contains("free some space")));
        let told = StageError::failed(format!("a: {full}")).with_help("ask the owner");
        assert_eq!(failed(told).help().as_deref(), Some("ask the owner"));
        let missing = std::io::Error::from_raw_os_error(2);
        assert_eq!(failed(StageError::failed(missing)).help(), None);
    }
}
