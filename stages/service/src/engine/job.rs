//! A request that was taken.

use std::pin::Pin;
use std::task::{Context, Poll};

use flow_transcription::{Segment, Transcript};
use futures::{Stream, StreamExt};

use super::EngineError;

/// What happens to a request.
#[derive(Debug, Clone)]
pub enum JobEvent {
    /// Segments that will not change any more, in order: all segments come this way, before `Done`. Without speakers; not sent
    /// where the request asks who speaks.
    Segments(Vec<Segment>),
    /// The last event.
    Done(Box<Finished>),
    /// The last event.
    Failed(EngineError),
}

/// A transcript, and what it took.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    pub transcript: Transcript,
    /// Seconds from the request until its first window was decoded.
    pub queue_seconds: f64,
    /// Seconds from then on until its last window was decoded.
    pub decode_seconds: f64,
    /// In how many batches its windows were.
    pub batches: usize,
}

/// A request that was taken: a stream of [`JobEvent`]s. Dropping it cancels the request.
pub struct Job {}

impl Job {
    /// The next event; None after the last one.
    pub async fn next(&mut self) -> Option<JobEvent> {
        StreamExt::next(self).await
    }

    /// Waits for the transcript.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn finish(mut self) -> Result<Finished, EngineError> {
        while let Some(event) = self.next().await {
            match event {
                JobEvent::Segments(_) => {}
                JobEvent::Done(finished) => return Ok(*finished),
                JobEvent::Failed(error) => return Err(error),
            }
        }
        Err(EngineError::Failed("the result was taken before".to_owned()))
    }
}

impl Stream for Job {
    type Item = JobEvent;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<JobEvent>> {
        todo!()
    }
}
