//! Turns of live sessions that are heard as they are spoken, by cache-aware models.

use std::sync::Arc;
use std::time::Duration;

use flow_transcription::TranscriptionError;
use flow_transcription::decoding_request::DecodingRequest;
use flow_transcription::recognizer::listen::{HeardNext, Listener, Spoken};
use flow_transcription::recognizer::{Recognizer, RequestedDecoding};
use tokio::sync::oneshot;

use super::batcher::guarded;
use super::models::Lease;
use super::{Engine, EngineError};

/// How often, and after how long, the next part of a turn asks again for a place among those that wait.
const PLACE_TRIES: u32 = 100;
const PLACE_WAIT: Duration = Duration::from_millis(50);

/// What is kept of a turn that is heard as it is spoken.
pub struct LiveListener {
    listener: Listener,
    model: usize,
    /// Of the model that it is of.
    digest: String,
}

/// The next samples of a turn, which wait to be heard.
pub(crate) struct SpokenSamples {
    pub samples: Vec<f32>,
    pub listener: Listener,
    pub is_last: bool,
    pub reply: oneshot::Sender<Result<(Listener, HeardNext), EngineError>>,
}

impl SpokenSamples {
    pub fn refuse(self, error: EngineError) {
        // The client may have disconnected.
        let _ = self.reply.send(Err(error));
    }
}

/// Hears the next samples of turns together. If they cannot be, all of the turns have failed: what their listeners keep is of no use
/// then.
pub(crate) fn hear_together(recognizer: &Recognizer, mut turns: Vec<SpokenSamples>) {
    turns.retain(|turn| !turn.reply.is_closed());
    let (ended, mut turns): (Vec<_>, Vec<_>) = turns.into_iter().partition(|turn| turn.listener.has_ended());
    for turn in ended {
        turn.refuse(EngineError::Failed("the turn has ended before".to_owned()));
    }
    let heard = guarded(|| {
        let spoken = turns.iter_mut().map(|turn| Spoken {
            listener: &mut turn.listener,
            samples: &turn.samples,
            is_last: turn.is_last,
        });
        recognizer.hear_next(&mut spoken.collect::<Vec<_>>())
    });
    let heard = heard.map_err(EngineError::Failed);
    match heard.and_then(|heard| heard.map_err(failed)) {
        Ok(heard) => {
            for (turn, next) in turns.into_iter().zip(heard) {
                let _ = turn.reply.send(Ok((turn.listener, next)));
            }
        }
        Err(error) => turns.into_iter().for_each(|turn| turn.refuse(error.clone())),
    }
}

impl Engine {
    /// The latency, in seconds, with which a model hears what is spoken where so much is accepted; none if it hears windows.
    ///
    /// # Errors
    /// If there is no such model or it cannot be loaded.
    pub async fn latency(&self, model: Option<&str>, accepted: Option<f64>) -> Result<Option<f64>, EngineError> {
        let lease = self.lease(self.inner.shared.models.find(model)?).await?;
        let recognizer = &lease.model().recognizer;
        if recognizer.contexts().is_empty() {
            return Ok(None);
        }
        let context = recognizer.context_for(accepted).map_err(failed)?;
        Ok(Some(recognizer.latency(context)))
    }

    /// How a model is decoded for a request.
    ///
    /// # Errors
    /// If there is no such model, it cannot be loaded, or the request is out of its bounds.
    pub async fn decoding(
        &self,
        model: Option<&str>,
        request: &DecodingRequest,
    ) -> Result<Arc<RequestedDecoding>, EngineError> {
        let lease = self.lease(self.inner.shared.models.find(model)?).await?;
        lease.model().recognizer.decoding_for(request).map_err(failed)
    }

    /// Begins a turn that is heard as it is spoken, with this accepted latency.
    ///
    /// # Errors
    /// As [`Engine::latency`], and if the model hears windows alone.
    pub async fn listen(
        &self,
        model: Option<&str>,
        accepted: Option<f64>,
        asked: Arc<DecodingRequest>,
    ) -> Result<LiveListener, EngineError> {
        let index = self.inner.shared.models.find(model)?;
        let lease = self.lease(index).await?;
        let begin = move || {
            let recognizer = &lease.model().recognizer;
            let listener = recognizer.listen(recognizer.context_for(accepted)?, &asked)?;
            let digest = recognizer.digest.clone();
            Ok::<_, TranscriptionError>(LiveListener {
                listener,
                model: index,
                digest,
            })
        };
        let begun = tokio::task::spawn_blocking(begin).await;
        begun.map_err(|_| EngineError::Cancelled)?.map_err(failed)
    }

    /// Hears the next samples of a turn (mono, 16 kHz, in [-1, 1]), which ends with the last ones, beside those of others. The model
    /// may be unloaded between parts. While the engine drains, turns go on. Requires the timer of a tokio runtime.
    ///
    /// # Errors
    /// If the model cannot be loaded or is another one, a sample is not a number, or `max_queue` parts wait.
    pub async fn hear(
        &self,
        listener: LiveListener,
        samples: Vec<f32>,
        is_last: bool,
    ) -> Result<(LiveListener, HeardNext), EngineError> {
        let LiveListener {
            listener,
            model,
            digest,
        } = listener;
        if !samples.iter().all(|sample| sample.is_finite()) {
            let detail = "a sample is not a number".to_owned();
            let reason = "decode_error";
            return Err(EngineError::Audio { reason, detail });
        }
        // What was heard before would be lost without the rest.
        let mut tries = 0;
        let _place = loop {
            match self.inner.shared.live_place() {
                Err(EngineError::Busy { .. }) if tries < PLACE_TRIES => tokio::time::sleep(PLACE_WAIT).await,
                place => break place?,
            }
            tries += 1;
        };
        let lease = self.lease(model).await?;
        if lease.model().recognizer.digest != digest {
            return Err(EngineError::Failed("the model was replaced during a turn".to_owned()));
        }
        let (reply, answer) = oneshot::channel();
        lease.model().batcher.push_spoken(SpokenSamples {
            samples,
            listener,
            is_last,
            reply,
        });
        let (listener, next) = answer.await.map_err(|_| EngineError::Cancelled)??;
        let listener = LiveListener {
            listener,
            model,
            digest,
        };
        Ok((listener, next))
    }

    /// A model, once it is in memory.
    pub(super) async fn lease(&self, index: usize) -> Result<Lease, EngineError> {
        let shared = &self.inner.shared;
        let (send, receive) = oneshot::channel();
        let waiter = move |lease| {
            let _ = send.send(lease);
        };
        shared.models.acquire(index, Box::new(waiter));
        let lease = receive.await.map_err(|_| EngineError::Cancelled)?;
        lease.map_err(|error| shared.models.for_clients(index, error))
    }
}

fn failed(error: TranscriptionError) -> EngineError {
    EngineError::Failed(error.to_string())
}
