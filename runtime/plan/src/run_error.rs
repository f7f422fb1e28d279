//! Why a run ended before its end.

use std::fmt;
use std::path::Path;

use flow_base::error::StageError;
use flow_base::event::StageFailure;
use flow_base::partition::Partition;
use flow_base::secret::Secrets;
use flow_store::StoreError;

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
    /// The command line names something that does not exist, or asks for something impossible: exit code 2.
    #[error("{message}")]
    Usage { message: String, help: Option<String> },
    /// The state directory: exit code 3 where another run holds it, else 1.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A signal ended the run after the commit of its current work: exit code 128 + signal.
    #[error("interrupted by signal {signal}")]
    Interrupted { signal: i32 },
    /// Another process of the run is lost: exit code 1.
    #[error("{message}")]
    Process { message: String },
    /// What another process of the run could not do, as it told: exit code 1.
    #[error("{message}")]
    OfProcess { message: String },
    /// Stages failed in a run that went on with what did not depend on them: exit code 1.
    #[error("{}", several(.failures, .left_out))]
    Several {
        /// In the order in which they came.
        failures: Vec<RunError>,
        left_out: Vec<LeftOut>,
    },
    /// A bug in the runtime: exit code 70.
    #[error("internal error: {message}")]
    Internal { message: String },
}

/// What a run left out since something before it failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// The stage's name; parts of a global stage are `NAME:keys`, `NAME:decide` and `NAME:apply`.
    pub stage: String,
    /// Empty for all of the stage.
    pub partitions: Vec<Partition>,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Most partitions that a message names; `flow plan --partitions` lists all.
        const NAMED: usize = 10;
        write!(f, "`{}`", self.stage)?;
        if self.partitions.is_empty() {
            return Ok(());
        }
        let named: Vec<&str> = self.partitions.iter().take(NAMED).map(Partition::as_str).collect();
        write!(f, ", partitions {}", named.join(", "))?;
        match self.partitions.len().saturating_sub(NAMED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// All failures, and what was left out for them, each on a line of its own.
fn several(failures: &[RunError], left_out: &[LeftOut]) -> String {
    let mut text = match failures.len() {
        1 => "1 failure:".to_string(),
        count => format!("{count} failures:"),
    };
    for failure in failures {
        text.push_str(&format!("\n  {failure}"));
    }
    if !left_out.is_empty() {
        text.push_str("\nleft out, as it depends on what failed:");
    }
    for left_out in left_out {
        text.push_str(&format!("\n  {left_out}"));
    }
    text
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

impl From<&RunError> for StageFailure {
    fn from(error: &RunError) -> Self {
        match error {
            RunError::Stage { partition, error, .. } => StageFailure {
                partition: partition.as_ref().map(Partition::to_string),
                message: error.to_string(),
            },
            error => StageFailure {
                partition: None,
                message: error.to_string(),
            },
        }
    }
}

impl RunError {
    pub fn stage(stage: impl Into<String>, partition: Option<Partition>, error: StageError) -> RunError {
        let stage = stage.into();
        RunError::Stage {
            stage,
            partition,
            error,
        }
    }

    pub fn internal(message: impl Into<String>) -> RunError {
        let message = message.into();
        RunError::Internal { message }
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            RunError::Stage {
                error: StageError::Failed { .. } | StageError::Damaged { .. },
                ..
            } => 1,
            RunError::Stage { .. } | RunError::Usage { .. } => 2,
            RunError::Store(error) if error.is_held() => 3,
            RunError::Store(_) | RunError::Process { .. } | RunError::OfProcess { .. } | RunError::Several { .. } => 1,
            RunError::Interrupted { signal } => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            RunError::Internal { .. } => 70,
        }
    }

    /// The damaged files that it names.
    pub fn damaged_files(&self) -> Vec<&Path> {
        match self {
            RunError::Store(StoreError::Damaged { path, .. })
            | RunError::Stage {
                error: StageError::Damaged { path, .. },
                ..
            } => vec![path],
            RunError::Several { failures, .. } => failures.iter().flat_map(RunError::damaged_files).collect(),
            _ => Vec::new(),
        }
    }

    /// The error without the values of secrets.
    pub fn hidden(self, secrets: &Secrets) -> RunError {
        if secrets.is_empty() {
            return self;
        }
        let text = |text: String| secrets.hide(&text).into_owned();
        match self {
            RunError::Stage {
                stage,
                partition,
                error,
            } => RunError::Stage {
                stage,
                partition,
                error: error.hidden(secrets),
            },
            RunError::Usage { message, help } => RunError::Usage {
                message: text(message),
                help: help.map(text),
            },
            RunError::Process { message } => RunError::Process { message: text(message) },
            RunError::OfProcess { message } => RunError::OfProcess { message: text(message) },
            RunError::Internal { message } => RunError::Internal { message: text(message) },
            RunError::Several { failures, left_out } => RunError::Several {
                failures: failures.into_iter().map(|failure| failure.hidden(secrets)).collect(),
                left_out,
            },
            // The runtime's own paths, and a number.
            RunError::Store(_) | RunError::Interrupted { .. } => self,
        }
    }

    /// What a person can do about it.
    pub fn help(&self) -> Option<String> {
        match self {
            RunError::Stage { error, .. } => match error {
                StageError::Setting { help, .. }
                | StageError::Input { help, .. }
                | StageError::Refused { help, .. }
                | StageError::Damaged { help, .. } => help.clone(),
                StageError::Failed { help, message, .. } => help.clone().or_else(|| disk_full(message)),
            },
            RunError::Usage { help, .. } => help.clone(),
            RunError::Store(error) => error.help(),
            RunError::Interrupted { .. } => Some("run it again: what is committed is not done again".to_string()),
            RunError::Process { .. } => Some(
                "look at what that process said last; then start all again: what is committed is not done again"
                    .to_string(),
            ),
            RunError::OfProcess { .. } => {
                Some("when it is mended, start all again: what is committed is not done again".to_string())
            }
            RunError::Several { failures, .. } => {
                let first = failures.iter().find_map(RunError::help);
                Some(match first {
                    Some(help) => format!("{help}; then run it again: what is committed is not done again"),
                    None => "run it again when these are mended: what is committed is not done again".to_string(),
                })
            }
            RunError::Internal { .. } => None,
        }
    }
}

/// The help for a full disk, where only the text of an error is known, which ends with the system's error number as
/// [`std::io::Error`] writes it. Where the error itself is known, [`flow_base::full_disk::full_disk`] names the folder.
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
