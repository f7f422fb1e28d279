//! The result of a check.

use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Ok,
    /// Something is slower than necessary, or a part of the program cannot be used.
    Warn,
    /// Runs cannot work.
    Fail,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Warn => "warn",
            State::Fail => "fail",
        }
    }
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    pub name: String,
    pub state: State,
    pub found: String,
    /// What to do about it.
    pub help: Option<String>,
}

impl Check {
    pub fn ok(name: impl Into<String>, found: impl Into<String>) -> Check {
        Check {
            name: name.into(),
            state: State::Ok,
            found: found.into(),
            help: None,
        }
    }

    pub fn warn(name: impl Into<String>, found: impl Into<String>, help: impl Into<String>) -> Check {
        Check {
            state: State::Warn,
            help: Some(help.into()),
            ..Check::ok(name, found)
        }
    }

    pub fn fail(name: impl Into<String>, found: impl Into<String>, help: impl Into<String>) -> Check {
        Check {
            state: State::Fail,
            ..Check::warn(name, found, help)
        }
    }
}
