//! The one error type of this crate.

use std::path::PathBuf;

/// What can go wrong in the model crate. Messages are lower-case fragments that name the thing at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor operation failed (shape, device or data type).
    #[error("tensor operation: {0}")]
    Tensor(#[from] candle_core::Error),
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    /// A file is not what it should be.
    #[error("{path}: {what}")]
    File { path: PathBuf, what: String },
    /// The model configuration is wrong or asks for something that this crate does not have.
    #[error("model configuration: {0}")]
    Config(String),
    /// A tensor that the model needs is not among the given ones.
    #[error("tensor `{name}` is missing; the model needs it with shape {shape:?}")]
    MissingTensor { name: String, shape: Vec<usize> },
    /// A tensor has another shape than the model needs.
    #[error("tensor `{name}` has shape {found:?}, the model needs {expected:?}")]
    TensorShape {
        name: String,
        found: Vec<usize>,
        expected: Vec<usize>,
    },
    /// A name was declared twice.
    #[error("parameter `{0}` is declared twice")]
    DuplicateParameter(String),
    /// A name does not say which part of the model the parameter is in.
    #[error("parameter `{0}` belongs to no parameter group of the model")]
    ParameterGroup(String),
    /// What the caller gave cannot be used (an empty batch, a non-finite sample, ...).
    #[error("{0}")]
    Input(String),
    /// The tokenizer could not be read or cannot do what was asked.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
}

impl From<flow_kernels::Error> for Error {
    fn from(error: flow_kernels::Error) -> Self {
        match error {
            flow_kernels::Error::Tensor(error) => Error::Tensor(error),
            flow_kernels::Error::Input(message) => Error::Input(message),
        }
    }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
