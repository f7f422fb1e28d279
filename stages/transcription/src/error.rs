/// Error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum TranscriptionError {
    /// A transcript that cannot be read or written; `place` is where in it, such as `segments[3].start`.
    #[error("not a transcript: {place}: {why}")]
    Transcript { place: String, why: String },
    #[error("the transcript has version {found}; this program reads versions up to {newest}: use a newer one")]
    Version { found: u64, newest: u64 },
    #[error("setting `{setting}`: {why}")]
    Setting { setting: &'static str, why: String },
    /// A text that cannot be aligned with its recording; `reason` is that of a reject.
    #[error("{why}")]
    Text { reason: &'static str, why: String },
    /// Arguments that do not fit together.
    #[error("{0}")]
    Input(String),
    #[error(transparent)]
    Audio(#[from] flow_audio::AudioError),
    #[error(transparent)]
    Model(#[from] flow_model::Error),
}

pub type Result<T> = std::result::Result<T, TranscriptionError>;

impl TranscriptionError {
    pub(crate) fn transcript(place: impl Into<String>, why: impl Into<String>) -> Self {
        TranscriptionError::Transcript {
            place: place.into(),
            why: why.into(),
        }
    }

    /// The same about a recording, where it names only a setting.
    pub(crate) fn of(self, recording: &str) -> Self {
        match self {
            TranscriptionError::Setting { setting, why } => TranscriptionError::Setting {
                setting,
                why: format!("{recording}: {why}"),
            },
            other => other,
        }
    }

    pub(crate) fn setting(setting: &'static str, why: impl Into<String>) -> Self {
        TranscriptionError::Setting {
            setting,
            why: why.into(),
        }
    }
}

impl From<TranscriptionError> for flow_kind::StageError {
    fn from(error: TranscriptionError) -> Self {
        match &error {
            TranscriptionError::Setting { setting, why } => flow_kind::StageError::setting(*setting, why),
            _ => flow_kind::StageError::failed(error),
        }
    }
}
