//! Why a request has no transcript.

/// Error of a request, or of the engine.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum EngineError {
    /// The queue is full.
    #[error("too many requests wait; try again in {retry_after} s")]
    Busy {
        /// Estimated seconds until there is room.
        retry_after: u64,
    },
    #[error("the server is being stopped and takes no more requests")]
    Draining,
    /// The message names the available models.
    #[error("{0}")]
    UnknownModel(String),
    #[error("speakers are not distinguished here: the server was started without diarization")]
    NotDiarizing,
    /// The recording cannot be transcribed: `reason` is one of `flow transcribe`'s, such as `unsupported_format`.
    #[error("{detail}")]
    Audio { reason: &'static str, detail: String },
    /// A text that does not fit its recording; `reason` is that of a reject of `transcription.align`.
    #[error("{detail}")]
    Text { reason: &'static str, detail: String },
    #[error("the recording is longer than {max_duration} s, which is the most that is taken")]
    TooLong {
        /// In seconds.
        max_duration: f64,
    },
    /// A field of the request that cannot be as it is.
    #[error("{why}")]
    Field { field: &'static str, why: String },
    /// `decode_timeout` has expired.
    #[error("transcribing took longer than {0} s, which is the limit")]
    Timeout(
        /// In seconds.
        f64,
    ),
    #[error("the request was cancelled")]
    Cancelled,
    /// A model cannot be loaded.
    #[error("{0}")]
    Model(String),
    /// A model does not fit into memory beside those in use.
    #[error("{0}")]
    NoMemory(String),
    /// Wrong settings of the engine.
    #[error("setting `engine.{setting}`: {why}")]
    Setting { setting: &'static str, why: String },
    /// Something else, such as a panic.
    #[error("{0}")]
    Failed(String),
}

impl EngineError {
    pub(crate) fn setting(setting: &'static str, why: impl Into<String>) -> Self {
        EngineError::Setting {
            setting,
            why: why.into(),
        }
    }
}
