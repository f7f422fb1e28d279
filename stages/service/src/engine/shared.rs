//! The state that all threads of the engine share, and the limits of requests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use flow_speakers::diarizer::{Diarizer, KnownSpeakers};
use flow_storage::Storage;
use flow_transcription::decoding_request::DecodingRequest;
use flow_transcription::recognizer::RecognitionSettings;
use flow_transcription::text_style::{Tables, TextStyle};
use tokio::sync::{Mutex as AsyncMutex, Notify};

use super::models::Models;
use super::preparation::Preparation;
use super::work::Work;
use super::{EngineError, EngineSettings, Observer};

/// Longest time that a client is asked to wait, in seconds.
const MOST_RETRY_AFTER: f64 = 60.0;

pub(crate) struct Shared {
    /// Without credentials: uploads are files of this machine.
    pub storage: Storage,
    pub settings: EngineSettings,
    pub recognition: RecognitionSettings,
    pub tables: Tables,
    pub models: Arc<Models>,
    pub preparation: Preparation,
    pub diarizer: Option<Arc<Diarizer>>,
    pub known_speakers: Option<KnownSpeakers>,
    pub observer: Arc<dyn Observer>,
    pub places: Mutex<Places>,
    /// Some request has ended.
    pub ended: Notify,
    /// Held while voices of known speakers are computed.
    pub voices: Arc<AsyncMutex<()>>,
    /// Held while a text is aligned.
    pub aligning: Arc<AsyncMutex<()>>,
}

/// The requests that wait or run.
#[derive(Default)]
pub(crate) struct Places {
    pub jobs: HashMap<u64, Weak<Work>>,
    pub next: u64,
    pub draining: bool,
    /// Windows of live sessions.
    live: usize,
    /// Texts that are aligned, or wait for it.
    alignments: usize,
    /// Moving average of the duration of requests, in seconds.
    mean_seconds: Option<f64>,
}

/// The place of a window of a live session.
pub(crate) struct LivePlace(Arc<Shared>);

impl Drop for LivePlace {
    fn drop(&mut self) {
        self.0.places().live -= 1;
        self.0.ended.notify_waiters();
    }
}

/// The place of a request for an alignment.
pub(crate) struct AlignmentPlace(Arc<Shared>);

impl Drop for AlignmentPlace {
    fn drop(&mut self) {
        self.0.places().alignments -= 1;
        self.0.ended.notify_waiters();
    }
}

impl Shared {
    pub fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How numbers and fillers are written for a request.
    pub fn text_style(&self, request: &DecodingRequest) -> Result<TextStyle, EngineError> {
        let style = self
            .tables
            .style(request, (self.settings.numbers, self.settings.fillers));
        style.map_err(|(field, why)| EngineError::Field { field, why })
    }

    /// A place for a window of a live session, of which there are as many as of requests.
    pub fn live_place(self: &Arc<Self>) -> Result<LivePlace, EngineError> {
        let mut places = self.places();
        if places.live >= self.settings.max_queue {
            return Err(EngineError::Busy { retry_after: 1 });
        }
        places.live += 1;
        drop(places);
        Ok(LivePlace(Arc::clone(self)))
    }

    /// A place for an alignment, among those of requests.
    pub fn alignment_place(self: &Arc<Self>) -> Result<AlignmentPlace, EngineError> {
        let mut places = self.places();
        places.check_room(self.settings.max_queue)?;
        places.alignments += 1;
        drop(places);
        Ok(AlignmentPlace(Arc::clone(self)))
    }

    /// Releases the place of a request, which took `seconds`.
    pub fn release(&self, job: u64, took: Duration) {
        let mut places = self.places();
        if places.jobs.remove(&job).is_some() {
            let took = took.as_secs_f64();
            places.mean_seconds = Some(places.mean_seconds.map_or(took, |mean| 0.8 * mean + 0.2 * took));
        }
        drop(places);
        self.ended.notify_waiters();
    }

    /// Ends all requests.
    pub fn cancel_all(&self) {
        let jobs: Vec<Weak<Work>> = self.places().jobs.values().cloned().collect();
        for work in jobs.iter().filter_map(Weak::upgrade) {
            work.end(Err(EngineError::Cancelled));
        }
    }
}

impl Places {
    /// Whether nothing waits or runs.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.live == 0 && self.alignments == 0
    }

    /// Whether there is a place for one more request.
    ///
    /// # Errors
    /// [`EngineError::Draining`], or [`EngineError::Busy`] where there are `max_queue`.
    pub fn check_room(&self, max_queue: usize) -> Result<(), EngineError> {
        if self.draining {
            return Err(EngineError::Draining);
        }
        if self.jobs.len() + self.alignments >= max_queue {
            let retry_after = self.retry_after();
            return Err(EngineError::Busy { retry_after });
        }
        Ok(())
    }

    /// Estimated seconds until one of the requests ends.
    pub fn retry_after(&self) -> u64 {
        let each = self.mean_seconds.unwrap_or(1.0) / self.jobs.len().max(1) as f64;
        each.clamp(1.0, MOST_RETRY_AFTER).ceil() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_come_back_when_a_place_may_be_free() {
        let mut places = Places::default();
        assert_eq!(places.retry_after(), 1);
        places.mean_seconds = Some(50.0);
        assert_eq!(places.retry_after(), 50);
        places.jobs = (0..4).map(|job| (job, Weak::new())).collect();
        assert_eq!(places.retry_after(), 13);
        places.mean_seconds = Some(1e9);
        assert_eq!(places.retry_after(), 60);
    }
}
