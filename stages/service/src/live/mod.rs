//! Live transcription: audio comes as it is spoken, and words go back as soon as they are certain.
//!
//! Most models hear whole windows. So a window that grows is decoded again and again ([`session`]), and what two decodes agree on is
//! said ([`agreement`]). A cache-aware model hears each sample once, and its words are certain. Clients speak OpenAI's protocol for transcription sessions ([`protocol`]) over
//! a WebSocket ([`socket`]).

use std::future::ready;
use std::sync::Arc;

use flow_speakers::diarizer::{OnlineDiarizer, OnlineSettings};
use flow_transcription::decoding_request::DecodingRequest;
use flow_transcription::recognizer::Heard;
use flow_transcription::recognizer::listen::HeardNext;
use flow_transcription::text_style::TextStyle;
use futures::future::BoxFuture;
use tempfile::NamedTempFile;

use crate::engine::{Engine, EngineError, LiveListener};
use crate::live::session_event::{DecodeRequest, Requested};

pub mod agreement;
pub mod protocol;
pub mod session;
pub mod session_event;
pub mod settings;
pub mod socket;
pub mod speakers;
#[cfg(test)]
mod test_data;

pub use settings::LiveSettings;
pub use socket::routes;

/// What live transcription needs of the engine.
pub trait Decoder: Send + Sync + 'static {
    /// Names of the models, the default one first.
    fn models(&self) -> Vec<String>;

    /// Whether the service is being stopped: sessions end when what was said so far is transcribed.
    fn is_stopping(&self) -> bool;

    /// What tells the speakers of a session apart, those that are known by name; none if sessions may not ask for it.
    fn online_diarizer(
        &self,
        _settings: OnlineSettings,
        _known: Vec<(String, Vec<f32>)>,
    ) -> Option<flow_speakers::Result<OnlineDiarizer>> {
        None
    }

    /// The latency, in seconds, with which a model (or the default one) hears what is spoken where so much is accepted; none if it
    /// hears windows.
    fn latency(
        &self,
        _model: Option<String>,
        _accepted: Option<f64>,
    ) -> BoxFuture<'static, Result<Option<f64>, EngineError>> {
        Box::pin(async { Ok(None) })
    }

    /// Hears the next part of a turn with a model that hears what is spoken: the first one without a listener, the others with
    /// that of the part before.
    fn hear(
        &self,
        _model: Option<String>,
        _accepted: Option<f64>,
        _listener: Option<LiveListener>,
        _decoding: Arc<DecodingRequest>,
        _request: DecodeRequest,
    ) -> BoxFuture<'static, Result<(LiveListener, HeardNext), EngineError>> {
        Box::pin(async { Err(EngineError::Failed("the model hears windows".to_owned())) })
    }

    /// How numbers and fillers are written for a request.
    ///
    /// # Errors
    /// If there is no table of its language.
    fn text_style(&self, _decoding: &DecodingRequest) -> Result<TextStyle, EngineError> {
        Ok(TextStyle::default())
    }

    /// What a model, or the default one, makes of phrases and languages.
    fn requested(
        &self,
        _model: Option<String>,
        _decoding: Arc<DecodingRequest>,
    ) -> BoxFuture<'static, Result<Requested, EngineError>> {
        Box::pin(ready(Ok(Requested::default())))
    }

    /// The embeddings of voices, by names and recordings.
    fn voices(&self, _references: Vec<(String, Vec<u8>)>) -> BoxFuture<'static, Result<Voices, EngineError>> {
        Box::pin(ready(Err(EngineError::NotDiarizing)))
    }

    /// Transcribes a window with a model, or the default one, and phrases and languages.
    fn decode(
        &self,
        model: Option<String>,
        decoding: Arc<DecodingRequest>,
        request: DecodeRequest,
    ) -> BoxFuture<'static, Result<Heard, EngineError>>;
}

/// Names with the embeddings of their voices.
pub type Voices = Vec<(String, Vec<f32>)>;

impl Decoder for Engine {
    fn models(&self) -> Vec<String> {
        Engine::models(self).into_iter().map(|model| model.name).collect()
    }

    fn is_stopping(&self) -> bool {
        !self.is_ready()
    }

    fn online_diarizer(
        &self,
        settings: OnlineSettings,
        known: Vec<(String, Vec<f32>)>,
    ) -> Option<flow_speakers::Result<OnlineDiarizer>> {
        Engine::online_diarizer(self, settings, known)
    }

    fn latency(
        &self,
        model: Option<String>,
        accepted: Option<f64>,
    ) -> BoxFuture<'static, Result<Option<f64>, EngineError>> {
        let engine = self.clone();
        Box::pin(async move { engine.latency(model.as_deref(), accepted).await })
    }

    fn hear(
        &self,
        model: Option<String>,
        accepted: Option<f64>,
        listener: Option<LiveListener>,
        decoding: Arc<DecodingRequest>,
        request: DecodeRequest,
    ) -> BoxFuture<'static, Result<(LiveListener, HeardNext), EngineError>> {
        let engine = self.clone();
        let is_last = request.spoken.is_some_and(|part| part.ends);
        Box::pin(async move {
            let listener = match listener {
                Some(listener) => listener,
                None => engine.listen(model.as_deref(), accepted, decoding).await?,
            };
            engine.hear(listener, request.samples, is_last).await
        })
    }

    fn text_style(&self, decoding: &DecodingRequest) -> Result<TextStyle, EngineError> {
        Engine::text_style(self, decoding)
    }

    fn requested(
        &self,
        model: Option<String>,
        decoding: Arc<DecodingRequest>,
    ) -> BoxFuture<'static, Result<Requested, EngineError>> {
        let engine = self.clone();
        Box::pin(async move {
            let decoding = engine.decoding(model.as_deref(), &decoding).await?;
            Ok(Requested {
                phrases: decoding.phrases.clone(),
                warnings: decoding.notes.clone(),
            })
        })
    }

    fn voices(&self, references: Vec<(String, Vec<u8>)>) -> BoxFuture<'static, Result<Voices, EngineError>> {
        let engine = self.clone();
        Box::pin(async move { Engine::voices(&engine, references, NamedTempFile::new).await })
    }

    fn decode(
        &self,
        model: Option<String>,
        decoding: Arc<DecodingRequest>,
        request: DecodeRequest,
    ) -> BoxFuture<'static, Result<Heard, EngineError>> {
        let engine = self.clone();
        let grows = !request.is_final;
        Box::pin(async move {
            engine
                .decode_window(
                    model.as_deref(),
                    (request.samples, Some(request.speech)),
                    grows,
                    decoding,
                )
                .await
        })
    }
}
