//! Transcribes recordings of many clients at once: windows of all of them go through the model together, in fair shares.

mod error;
mod job;
mod settings;
mod temp_folder;

use std::sync::Arc;
use std::time::Duration;

use flow_transcription::recognizer::Heard;
use tempfile::TempPath;

pub use error::EngineError;
pub use job::{Finished, Job, JobEvent};
pub use settings::{EngineSettings, ModelSettings};
pub use temp_folder::{Reservation, TempFolder};

/// Transcribes for many clients at once. Cheap to clone. Its threads end with the last clone.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {}

/// What a client wants transcribed.
#[derive(Debug)]
pub struct TranscriptionRequest {
    /// None: the first one.
    pub model: Option<String>,
    /// A private file, deleted with the request.
    pub audio: TempPath,
    /// What `metadata.source_file` and messages call it.
    pub source_name: String,
    /// Whether to tell who speaks.
    pub diarize: bool,
}

/// What is known of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelState {
    pub name: String,
    /// Whether it is in memory now.
    pub loaded: bool,
    /// BLAKE3 of its files, in hexadecimal digits, once it was loaded.
    pub digest: Option<String>,
    /// That its vocabulary has tags of, once it was loaded.
    pub languages: Vec<String>,
}

/// Is told what the engine does, for metrics. It is called by the engine's threads and should return at once.
pub trait Observer: Send + Sync {
    /// A batch of so many windows, with so many seconds of audio, was decoded in `elapsed` seconds.
    fn batch(&self, windows: usize, seconds: f64, elapsed: f64);
    /// A request that was taken has ended.
    fn finished(&self, finished: Result<&Finished, &EngineError>);
}

impl Engine {
    /// Loads the first model and decodes something with it, so that the first request is as fast as others; with
    /// `diarization`, the networks of that as well. It blocks as long as that takes.
    ///
    /// # Errors
    /// If a setting is wrong or a model cannot be loaded.
    pub fn start(settings: EngineSettings) -> Result<Engine, EngineError> {
        struct Nobody;
        impl Observer for Nobody {
            fn batch(&self, _: usize, _: f64, _: f64) {}
            fn finished(&self, _: Result<&Finished, &EngineError>) {}
        }
        Engine::start_observed(settings, Arc::new(Nobody))
    }

    /// [`Engine::start`] with somebody who is told what it does.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start_observed(settings: EngineSettings, observer: Arc<dyn Observer>) -> Result<Engine, EngineError> {
        let _ = (settings, observer);
        todo!()
    }

    /// Whether requests are taken: from the start on, until [`Engine::drain`].
    pub fn is_ready(&self) -> bool {
        let _ = &self.inner;
        todo!()
    }

    /// In the order of the settings.
    pub fn models(&self) -> Vec<ModelState> {
        todo!()
    }

    /// Requests that wait or run.
    pub fn queued(&self) -> usize {
        todo!()
    }

    /// Takes a request. Dropping the job cancels it.
    ///
    /// # Errors
    /// [`EngineError::Busy`], [`EngineError::Draining`], [`EngineError::UnknownModel`], [`EngineError::NotDiarizing`].
    pub fn submit(&self, request: TranscriptionRequest) -> Result<Job, EngineError> {
        let _ = request;
        todo!()
    }

    /// Decodes a window of at most `max_window` seconds (mono, 16 kHz, in [-1, 1]), for live sessions: it goes before windows of
    /// recordings. While the engine drains, windows are still decoded. Times of words are those in the window.
    ///
    /// # Errors
    /// If there is no such model or it cannot be loaded, the window is too long or no audio, or too many wait.
    pub async fn decode_window(&self, model: Option<&str>, samples: Vec<f32>) -> Result<Heard, EngineError> {
        let _ = (model, samples);
        todo!()
    }

    /// Takes no more requests; returns when those taken are done. After `limit` they are cancelled.
    pub async fn drain(&self, limit: Duration) {
        let _ = limit;
        todo!()
    }
}
