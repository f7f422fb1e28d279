//! The one error type of this crate.

/// What can go wrong in a kernel. Messages are lower-case fragments that name the thing at fault.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tensor operation failed (shape, device or data type).
    #[error("tensor operation: {0}")]
    Tensor(#[from] candle_core::Error),
    /// An argument is invalid (a shape, a data type, a device).
    #[error("{0}")]
    Input(String),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
