//! Transcribes recordings of many clients concurrently: their windows are batched together, in fair shares.

mod alignment;
mod batcher;
mod cancellable;
mod error;
mod job;
mod models;
mod preparation;
mod progress_log;
mod schedule;
mod settings;
mod settled;
mod shared;
mod spoken;
mod temp_folder;
#[cfg(test)]
mod tests;
mod work;

use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use flow_audio::samples::samples;
use flow_speakers::clustering::Clusters;
use flow_speakers::diarizer::{Diarizer, KnownSpeakers, OnlineDiarizer, OnlineSettings};
use flow_speakers::silero::SAMPLE_RATE;
use flow_speakers::stages::known;
use flow_storage::Storage;
use flow_transcription::decoding_request::DecodingRequest;
use flow_transcription::recognizer::Heard;
use flow_transcription::text_style::{Tables, TextStyle};
use tempfile::{NamedTempFile, TempPath};
use tokio::sync::{Notify, oneshot};

use batcher::{LiveWindow, guarded};
pub(crate) use cancellable::cancellable;
use models::{Lease, Models};
use preparation::Preparation;
use shared::{Places, Shared};
use work::Work;

pub use alignment::AlignmentRequest;
pub use error::EngineError;
pub use job::{Finished, Job, JobEvent, JobProgress};
pub use progress_log::Logged;
pub use settings::{EngineSettings, ModelSettings};
pub use spoken::LiveListener;
pub use temp_folder::{Reservation, TempFolder};

/// Longest recording of a voice by which a speaker is known, in seconds.
pub const LONGEST_REFERENCE: f64 = 60.0;

/// Transcribes for many clients concurrently. Cheap to clone. Its threads end with the last clone.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.preparation.stop();
        self.shared.cancel_all();
        self.shared.models.stop();
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("models", &self.models())
            .finish_non_exhaustive()
    }
}

/// A request for a transcript.
#[derive(Debug)]
pub struct TranscriptionRequest {
    /// Name of the model; none: the first one.
    pub model: Option<String>,
    /// A private file, deleted with the request.
    pub audio: TempPath,
    /// Name of the recording in `metadata.source_file` and messages.
    pub source_name: String,
    /// Whether to diarize.
    pub diarize: bool,
    /// How to diarize.
    pub speakers: SpeakerRequest,
    /// Whether to give the tokens of words.
    pub tokens: bool,
    /// Phrases, languages, and how numbers and fillers are written.
    pub decoding: Arc<DecodingRequest>,
    /// The channel that is transcribed, from 0; none: the mean of all.
    pub channel: Option<u32>,
    /// The log of what is done, by which the same request goes on later; none: it is not kept. Requests of a minute have none.
    pub log: Option<PathBuf>,
}

/// What a request says of its speakers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SpeakerRequest {
    /// The number of speakers, or limits of it.
    pub clusters: Clusters,
    /// Names with the embeddings of their voices, of [`Engine::voices`]. Empty: those of the settings.
    pub known: Vec<(String, Vec<f32>)>,
}

/// Information about a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelState {
    pub name: String,
    /// Whether it is in memory now.
    pub loaded: bool,
    /// BLAKE3 of its files, in hexadecimal digits, once it was loaded.
    pub digest: Option<String>,
    /// Languages of the tags in its vocabulary, once it was loaded.
    pub languages: Vec<String>,
}

/// Receives events of the engine, for metrics. Called by the engine's threads; should return at once.
pub trait Observer: Send + Sync {
    /// A batch of `windows` windows, with `seconds` of audio, was decoded.
    fn batch(&self, windows: usize, seconds: f64);
    /// An accepted request has ended.
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
            fn batch(&self, _: usize, _: f64) {}
            fn finished(&self, _: Result<&Finished, &EngineError>) {}
        }
        Engine::start_observed(settings, Arc::new(Nobody))
    }

    /// [`Engine::start`] with an observer.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start_observed(settings: EngineSettings, observer: Arc<dyn Observer>) -> Result<Engine, EngineError> {
        settings.check()?;
        let tables = Tables::with_files(settings.text_tables.iter().map(PathBuf::as_path));
        let tables = tables.map_err(|why| EngineError::setting("text_tables", why))?;
        let diarizer = settings.diarization.then(Diarizer::bundled).transpose();
        let diarizer = diarizer.map_err(|error| EngineError::Model(error.to_string()))?;
        let known_speakers = known_speakers(&settings, diarizer.as_ref())?;
        let engine = Engine {
            inner: Arc::new(Inner {
                shared: Arc::new(Shared {
                    storage: Storage::default(),
                    recognition: settings.recognition(),
                    tables,
                    models: Models::new(&settings, Arc::clone(&observer))?,
                    preparation: Preparation::default(),
                    diarizer: diarizer.map(Arc::new),
                    known_speakers,
                    observer,
                    places: Mutex::new(Places::default()),
                    ended: Notify::new(),
                    voices: Arc::default(),
                    aligning: Arc::default(),
                    settings,
                }),
            }),
        };
        preparation::start(&engine.inner.shared)?;
        engine.warm()?;
        Ok(engine)
    }

    /// Loads the first model and decodes a second of silence.
    fn warm(&self) -> Result<(), EngineError> {
        let (send, receive) = mpsc::channel();
        let waiter = move |lease| {
            // The receiver exists: it is waited for below.
            let _ = send.send(lease);
        };
        self.inner.shared.models.acquire(0, Box::new(waiter));
        let lease: Lease = receive.recv().map_err(|_| EngineError::Cancelled)??;
        let silence = vec![0.0; SAMPLE_RATE as usize];
        let decoded = guarded(|| lease.model().recognizer.decode(&[&silence]));
        decoded
            .map_err(EngineError::Failed)?
            .map_err(|error| EngineError::Model(error.to_string()))?;
        Ok(())
    }

    /// Whether requests are accepted: until [`Engine::drain`].
    pub fn is_ready(&self) -> bool {
        !self.inner.shared.places().draining
    }

    /// In the order of the settings.
    pub fn models(&self) -> Vec<ModelState> {
        self.inner.shared.models.states()
    }

    /// Whether requests may ask who speaks.
    pub fn diarizes(&self) -> bool {
        self.inner.shared.diarizer.is_some()
    }

    /// What tells speakers of a live session apart; none without `diarization`. `known`: names with the embeddings of their
    /// voices; if there are none, those of the settings.
    ///
    /// # Errors
    /// If a setting is out of range.
    pub fn online_diarizer(
        &self,
        settings: OnlineSettings,
        known: Vec<(String, Vec<f32>)>,
    ) -> Option<flow_speakers::Result<OnlineDiarizer>> {
        let shared = &self.inner.shared;
        let diarizer = shared.diarizer.clone()?;
        let known = match known.is_empty() {
            true => Ok(shared.known_speakers.clone()),
            false => KnownSpeakers::new(known, shared.settings.known_threshold).map(Some),
        };
        Some(known.and_then(|known| OnlineDiarizer::new(diarizer, settings, known)))
    }

    /// The embeddings of voices, by names and recordings of these, each of which is written to a file that `new_file` makes. One
    /// request at a time; dropping the future cancels it.
    ///
    /// # Errors
    /// [`EngineError::NotDiarizing`]; [`EngineError::Audio`] if a recording cannot be decoded, is longer than
    /// [`LONGEST_REFERENCE`] seconds or has no speech; [`EngineError::Failed`] if a file cannot be written.
    pub async fn voices(
        &self,
        references: Vec<(String, Vec<u8>)>,
        new_file: impl Fn() -> io::Result<NamedTempFile> + Send + 'static,
    ) -> Result<Vec<(String, Vec<f32>)>, EngineError> {
        let engine = self.clone();
        // Not on a thread: a client that goes while it waits leaves nothing behind.
        let turn = Arc::clone(&self.inner.shared.voices).lock_owned().await;
        let computed = cancellable(move |is_cancelled| {
            let _turn = turn;
            let not_kept =
                |error: io::Error| EngineError::Failed(format!("the reference cannot be kept: {}", error.kind()));
            let voices = references.into_iter().map(|(name, bytes)| {
                let mut file = new_file().map_err(not_kept)?;
                file.write_all(&bytes).map_err(not_kept)?;
                let voice = engine.voice(file.path(), &format!("the reference of {name}"), is_cancelled)?;
                Ok((name, voice))
            });
            voices.collect()
        });
        computed.await.map_err(|error| EngineError::Failed(error.to_string()))?
    }

    /// The embedding of the one voice in a recording.
    fn voice(&self, recording: &Path, name: &str, is_cancelled: &dyn Fn() -> bool) -> Result<Vec<f32>, EngineError> {
        let shared = &self.inner.shared;
        let diarizer = shared.diarizer.as_ref().ok_or(EngineError::NotDiarizing)?;
        let named = |detail: String| detail.replace(&recording.display().to_string(), name);
        let wrong = |reason, detail: String| EngineError::Audio {
            reason,
            detail: named(detail),
        };
        if is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        let found = guarded(|| {
            let decoded = samples(&shared.storage, recording, LONGEST_REFERENCE)
                .map_err(|error| EngineError::Failed(named(error.to_string())))?;
            let decoded = decoded.map_err(|refusal| wrong(refusal.reason, refusal.detail))?;
            let voice = diarizer.voice(&decoded, is_cancelled);
            voice.map_err(|error| wrong("no_voice", format!("{name}: {error}")))
        });
        found.map_err(EngineError::Failed)??.ok_or(EngineError::Cancelled)
    }

    /// Requests that wait or run.
    pub fn queued(&self) -> usize {
        self.inner.shared.places().jobs.len()
    }

    /// The most requests that it takes at a time, those that run and those that wait.
    pub fn max_queue(&self) -> usize {
        self.inner.shared.settings.max_queue
    }

    /// Checks whether a request would be accepted now, before an upload is read.
    ///
    /// # Errors
    /// [`EngineError::Busy`], [`EngineError::Draining`].
    pub fn check_room(&self) -> Result<(), EngineError> {
        let shared = &self.inner.shared;
        shared.places().check_room(shared.settings.max_queue)
    }

    /// Checks whether there is such a model, and whether speakers are distinguished where that is asked for.
    ///
    /// # Errors
    /// [`EngineError::UnknownModel`], [`EngineError::NotDiarizing`].
    pub fn check(&self, model: Option<&str>, diarize: bool) -> Result<(), EngineError> {
        self.inner.shared.models.find(model)?;
        if diarize && !self.diarizes() {
            return Err(EngineError::NotDiarizing);
        }
        Ok(())
    }

    /// How numbers and fillers are written for a request.
    ///
    /// # Errors
    /// [`EngineError::Field`] if it asks for a style in a language that has no table.
    pub fn text_style(&self, decoding: &DecodingRequest) -> Result<TextStyle, EngineError> {
        self.inner.shared.text_style(decoding)
    }

    /// Accepts a request. Dropping the job cancels it.
    ///
    /// # Errors
    /// [`EngineError::Busy`], [`EngineError::Draining`], [`EngineError::UnknownModel`], [`EngineError::NotDiarizing`],
    /// [`EngineError::Field`].
    pub fn submit(&self, request: TranscriptionRequest) -> Result<Job, EngineError> {
        let shared = &self.inner.shared;
        self.check(request.model.as_deref(), request.diarize)?;
        let model = shared.models.find(request.model.as_deref())?;
        let style = shared.text_style(&request.decoding)?;
        let work = {
            let mut places = shared.places();
            places.check_room(shared.settings.max_queue)?;
            let id = places.next;
            places.next += 1;
            let work = Arc::new(Work::new(id, request, style, Arc::clone(shared)));
            places.jobs.insert(id, Arc::downgrade(&work));
            work
        };
        // A request that is cancelled while its model is loaded is removed.
        let (waiting, of_waiter) = (Arc::downgrade(&work), Arc::clone(shared));
        let waiter = move |lease| {
            let Some(work) = waiting.upgrade() else { return };
            match lease {
                Ok(lease) => {
                    work.set_lease(lease);
                    of_waiter.preparation.push(work);
                }
                Err(error) => work.end(Err(of_waiter.models.for_clients(model, error))),
            }
        };
        shared.models.acquire(model, Box::new(waiter));
        Ok(Job::new(work))
    }

    /// Decodes a window of at most `max_window` seconds (mono, 16 kHz, in [-1, 1]), for live sessions: it goes before windows of
    /// recordings. While the engine drains, windows are still decoded. Times of words are those in the window. One that still
    /// grows is decoded once, others as those of recordings. `decoding`: phrases and languages. Phrases are boosted in the stretches of
    /// speech (seconds from the window's beginning); everywhere where these are not known.
    ///
    /// # Errors
    /// If there is no such model or it cannot be loaded, the window is too long or no audio, or `max_queue` windows wait.
    pub async fn decode_window(
        &self,
        model: Option<&str>,
        (samples, speech): (Vec<f32>, Option<Vec<Range<f64>>>),
        grows: bool,
        decoding: Arc<DecodingRequest>,
    ) -> Result<Heard, EngineError> {
        let shared = &self.inner.shared;
        let index = shared.models.find(model)?;
        let max_window = shared.settings.max_window;
        if samples.len() as f64 > max_window * f64::from(SAMPLE_RATE) {
            return Err(EngineError::TooLong {
                max_duration: max_window,
            });
        }
        if !samples.iter().all(|sample| sample.is_finite()) {
            let detail = "a sample is not a number".to_owned();
            let reason = "decode_error";
            return Err(EngineError::Audio { reason, detail });
        }
        if samples.is_empty() {
            return Ok(Heard::default());
        }
        let _place = shared.live_place()?;
        let lease = self.lease(index).await?;
        let (reply, answer) = oneshot::channel();
        let window = LiveWindow {
            signal: samples,
            speech,
            grows,
            decoding,
            reply,
        };
        lease.model().batcher.push_live(window);
        answer.await.map_err(|_| EngineError::Cancelled)?
    }

    /// Accepts no more requests; returns when the accepted ones are done. After `limit` they are cancelled. Requires
    /// the timer of a tokio runtime.
    pub async fn drain(&self, limit: Duration) {
        let shared = &self.inner.shared;
        shared.places().draining = true;
        let all_done = async {
            loop {
                let mut ended = pin!(shared.ended.notified());
                // Registered before the check, so that no notification in between is missed.
                ended.as_mut().enable();
                if shared.places().is_empty() {
                    break;
                }
                ended.await;
            }
        };
        if tokio::time::timeout(limit, all_done).await.is_err() {
            shared.cancel_all();
        }
    }
}

/// The voices of `known_speakers`.
fn known_speakers(
    settings: &EngineSettings,
    diarizer: Option<&Diarizer>,
) -> Result<Option<KnownSpeakers>, EngineError> {
    let (Some(path), Some(diarizer)) = (&settings.known_speakers, diarizer) else {
        return Ok(None);
    };
    let known = known::load(&Storage::default(), path, settings.known_threshold, diarizer, &|| false);
    known.map_err(|error| EngineError::setting("known_speakers", error.to_string()))
}
