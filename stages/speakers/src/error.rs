//! What can go wrong.

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of this crate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("the weights cannot be read: {0}")]
    Weights(String),
    #[error("sample {at} is {value}; samples are finite numbers, at most {limit} in size")]
    Sample { at: u64, value: f32, limit: f32 },
    #[error("line {line}: {why}")]
    Line { line: usize, why: String },
    /// The hub did not deliver a file; `help` says what to do.
    #[error("{message}")]
    Hub { message: String, help: String },
    #[error("{0}")]
    Input(String),
}
