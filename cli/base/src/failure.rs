//! Errors of commands, their messages, and exit codes.

use std::fmt::Write;
use std::io;
use std::sync::Arc;

use flow_base::escape::escape_lines;
use flow_inspect::InspectError;
use flow_kind::StageError;
use flow_processes::JoinError;
use flow_runtime::run::RunError;
use flow_spec::{Checked, Diagnostic, Diagnostics, Style};
use flow_store::StoreError;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Done,
    /// A stage failed, or a file could not be read or written.
    Failed,
    /// The pipeline, a setting or the command line is wrong.
    Usage,
    /// Another run holds the state directory.
    Held,
    /// `plan --exit-code`: something would run. `run`: ended past a reject limit that only warns.
    Noted,
    /// `transcribe --require-coverage`: less of a recording's speech has words.
    Uncovered,
    /// A bug in flow.
    Bug,
    /// Ended by a signal of this number.
    Interrupted(i32),
    /// The exit code of process 0 of the run.
    As(u8),
}

impl Exit {
    pub fn code(self) -> u8 {
        match self {
            Exit::Done => 0,
            Exit::Failed => 1,
            Exit::Usage => 2,
            Exit::Held => 3,
            Exit::Noted => 4,
            Exit::Uncovered => 5,
            Exit::Bug => 70,
            Exit::Interrupted(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            Exit::As(code) => code,
        }
    }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Pipeline(#[from] Diagnostics),
    #[error("{message}")]
    Usage { message: String, help: Option<String> },
    #[error("{error}")]
    Run {
        error: RunError,
        checked: Arc<CheckedForErrors>,
    },
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The processes of a run did not come together.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// Process 0 ended the run, and why.
    #[error("process 0 ended the run: {message}")]
    Ended { code: u8, message: String },
    /// A damaged file of the state directory, rejects that cannot be read, or a model that is not available.
    #[error("{message}")]
    Unreadable { message: String, help: Option<String> },
    /// Standard output or a file of the user could not be written.
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
    #[error("this is a bug in flow: {0}")]
    Bug(String),
}

/// A checked pipeline, kept to show places in it.
pub struct CheckedForErrors(pub Arc<Checked>);

impl std::fmt::Debug for CheckedForErrors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.pipeline.name)
    }
}

impl From<InspectError> for Failure {
    fn from(error: InspectError) -> Failure {
        match error {
            InspectError::Store(error) => Failure::Store(error),
            InspectError::NotFound { message, help } => Failure::usage(message, help),
            InspectError::Unreadable(message) => Failure::Unreadable { message, help: None },
        }
    }
}

impl Failure {
    pub fn usage(message: impl Into<String>, help: impl Into<String>) -> Self {
        Failure::Usage {
            message: message.into(),
            help: Some(help.into()),
        }
    }

    pub fn unreadable(message: impl std::fmt::Display) -> Self {
        Failure::Unreadable {
            message: message.to_string(),
            help: None,
        }
    }

    pub fn run(error: RunError, checked: &Arc<Checked>) -> Self {
        Failure::Run {
            error: error.hidden(&checked.pipeline.secrets),
            checked: Arc::new(CheckedForErrors(Arc::clone(checked))),
        }
    }

    /// The same, of a pipeline that the user does not see: without its text, and with the options (parameter, option) that gave
    /// the values.
    pub fn by_options(self, options: &[(&str, &str)]) -> Self {
        let found = match self {
            Failure::Pipeline(Diagnostics(found)) => found,
            Failure::Run { error, checked } => match diagnostic(&error, &checked.0) {
                Some(found) => vec![found],
                None => return Failure::Run { error, checked },
            },
            other => return other,
        };
        let told = found.into_iter().map(|mut found| {
            let stage = found
                .message
                .strip_prefix("stage `")
                .and_then(|rest| rest.split_once("`: "));
            if let Some((_, message)) = stage {
                found.message = message.to_owned();
            }
            let given = options.iter().find_map(|(param, option)| {
                let help = found
                    .help
                    .as_ref()
                    .filter(|help| help.contains(&format!("(--set {param}=")))?;
                // Behind what the setting itself has to say.
                let own = &help[..help.find(&format!("`${{{param}}}` is "))?];
                Some(format!("{own}given by {option}"))
            });
            found.help = given.or(found.help);
            found.place = None;
            found
        });
        Failure::Pipeline(Diagnostics(told.collect()))
    }

    pub fn exit(&self) -> Exit {
        match self {
            Failure::Pipeline(_) | Failure::Usage { .. } | Failure::Join(JoinError::Refused { .. }) => Exit::Usage,
            Failure::Ended { code, .. } => Exit::As(*code),
            Failure::Run { error, .. } => match error {
                RunError::Stage {
                    error: StageError::Failed { .. } | StageError::Damaged { .. },
                    ..
                } => Exit::Failed,
                RunError::Stage { .. } | RunError::Usage { .. } => Exit::Usage,
                RunError::Store(error) => store_exit(error),
                RunError::Process { .. } | RunError::OfProcess { .. } | RunError::Several { .. } => Exit::Failed,
                RunError::Interrupted { signal } => Exit::Interrupted(*signal),
                RunError::Internal { .. } => Exit::Bug,
            },
            Failure::Store(error) => store_exit(error),
            // The reader of standard output has closed it (`flow plan | head`).
            Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Done,
            Failure::Unreadable { .. } | Failure::Output(_) | Failure::Join(_) => Exit::Failed,
            Failure::Bug(_) => Exit::Bug,
        }
    }

    /// The message for the user; may be empty.
    pub fn render(&self, style: Style) -> String {
        match self {
            Failure::Pipeline(diagnostics) => {
                let mut text = diagnostics.render(style);
                if diagnostics.0.len() > 1 {
                    let _ = write!(text, "\n{} mistakes", diagnostics.0.len());
                }
                text
            }
            Failure::Usage { message, help } | Failure::Unreadable { message, help } => {
                with_help(message, help.as_deref())
            }
            Failure::Run { error, checked } => render_run(error, &checked.0, style),
            Failure::Store(error) => with_help(&error.to_string(), error.help().as_deref()),
            Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => String::new(),
            Failure::Join(JoinError::Failed { message, help }) if !help.is_empty() => with_help(message, Some(help)),
            Failure::Output(_) | Failure::Bug(_) | Failure::Join(_) | Failure::Ended { .. } => {
                with_help(&self.to_string(), None)
            }
        }
    }
}

fn store_exit(error: &StoreError) -> Exit {
    if error.is_held() { Exit::Held } else { Exit::Failed }
}

fn render_run(error: &RunError, checked: &Checked, style: Style) -> String {
    match (diagnostic(error, checked), error) {
        (Some(found), _) => found.render(style),
        (None, RunError::Internal { message }) => with_help(&format!("this is a bug in flow: {message}"), None),
        (None, error) => with_help(&error.to_string(), error.help().as_deref()),
    }
}

/// An error of the pipeline, with its place there; failures while running have none.
fn diagnostic(error: &RunError, checked: &Checked) -> Option<Diagnostic> {
    match error {
        RunError::Stage {
            stage,
            error: wrong @ (StageError::Setting { .. } | StageError::Input { .. } | StageError::Refused { .. }),
            ..
        } => {
            let name = stage.split(':').next().unwrap_or(stage);
            Some(checked.diagnose(checked.position(name)?, wrong))
        }
        _ => None,
    }
}

fn with_help(message: &str, help: Option<&str>) -> String {
    let text = match help {
        Some(help) => format!("error: {message}\n  help: {help}"),
        None => format!("error: {message}"),
    };
    escape_lines(&text).into_owned()
}
