//! An accepted request, as seen by its client.

use std::future::poll_fn;
use std::sync::{Arc, Weak};

use flow_transcription::tokens::Token;
use flow_transcription::{Segment, Transcript};

use super::EngineError;
use super::work::Work;

/// An event of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum JobEvent {
    /// Final segments, in order: all segments are sent this way, before `Done`. Without speakers; not sent where the
    /// request asks for speakers. With the tokens of each of their words, where the request asks for these.
    Segments(Vec<Segment>, Vec<Vec<Token>>),
    /// The last event.
    Done(Box<Finished>),
    /// The last event.
    Failed(EngineError),
}

/// A transcript, with processing times.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    pub transcript: Transcript,
    /// What a user has to know of how the recording is read, such as its DC offset: as `flow transcribe` warns.
    pub warnings: Vec<String>,
    /// The tokens of each word, where the request asks for them.
    pub tokens: Vec<Vec<Token>>,
    /// Seconds from the request until its first window was decoded.
    pub queue_seconds: f64,
    /// Seconds from then on until its last window was decoded.
    pub decode_seconds: f64,
    /// Number of batches with its windows.
    pub batches: usize,
}

/// An accepted request, with its [`JobEvent`]s. Dropping it cancels the request.
pub struct Job {
    work: Arc<Work>,
}

impl Job {
    pub(crate) fn new(work: Arc<Work>) -> Self {
        Job { work }
    }

    /// The next event; None after the last one.
    pub async fn next(&mut self) -> Option<JobEvent> {
        poll_fn(|context| self.work.poll(context)).await
    }

    pub fn progress(&self) -> JobProgress {
        JobProgress {
            works: vec![Arc::downgrade(&self.work)],
        }
    }

    /// Waits for the transcript.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn finish(mut self) -> Result<Finished, EngineError> {
        while let Some(event) = self.next().await {
            match event {
                JobEvent::Segments(..) => {}
                JobEvent::Done(finished) => return Ok(*finished),
                JobEvent::Failed(error) => return Err(error),
            }
        }
        Err(EngineError::Failed("the result was taken before".to_owned()))
    }
}

/// Tells how far a request is, or several of the same recording.
#[derive(Clone)]
pub struct JobProgress {
    works: Vec<Weak<Work>>,
}

impl JobProgress {
    /// That of several requests.
    pub fn of_all(all: impl Iterator<Item = JobProgress>) -> Self {
        JobProgress {
            works: all.flat_map(|progress| progress.works).collect(),
        }
    }

    /// Seconds of audio of which nothing more is to be decoded, and of all; of several requests those of the one that has the
    /// most to do. None before windows are found, and after the end.
    pub fn seconds(&self) -> Option<(f64, f64)> {
        let works = self.works.iter().filter_map(Weak::upgrade);
        let seconds = works.filter_map(|work| work.decoded_seconds());
        seconds.max_by(|a, b| (a.1 - a.0).total_cmp(&(b.1 - b.0)))
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job")
            .field("id", &self.work.id())
            .finish_non_exhaustive()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Has no effect on a request that has ended.
        self.work.end(Err(EngineError::Cancelled));
    }
}
