//! Transcripts as server-sent events: text as it is decoded, and finally the whole.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::{Duration, Instant};

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use flow_transcription::Segment;
use flow_transcription::tokens::Token;
use futures::{Stream, stream};
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::form::{Asked, ResponseFormat};
use super::responses::{diarized_segment, usage};
use crate::engine::{Finished, Job, JobEvent, Reservation};
use crate::logprobs::logprobs;

/// Interval of keep-alive comments, so that proxies do not close an idle connection.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The part of a text that was sent.
#[derive(Default)]
struct Deltas {
    sent: String,
}

impl Deltas {
    /// The text that these segments add; None if nothing. All additions together are the transcript's text.
    fn add(&mut self, segments: &[Segment]) -> Option<String> {
        let before = self.sent.len();
        for text in segments.iter().map(|segment| segment.text.trim()) {
            if text.is_empty() {
                continue;
            }
            if !self.sent.is_empty() {
                self.sent.push(' ');
            }
            self.sent.push_str(text);
        }
        Some(self.sent[before..].to_owned()).filter(|added| !added.is_empty())
    }

    /// The part of the whole text that was not sent yet.
    fn rest(&self, text: &str) -> Option<String> {
        let rest = text.strip_prefix(self.sent.as_str())?;
        Some(rest.to_owned()).filter(|rest| !rest.is_empty())
    }
}

/// A job whose events are sent.
struct Sending {
    app: App,
    job: Job,
    begin: Instant,
    /// The first event of the job, which was received already.
    first: Option<JobEvent>,
    /// Whether segments with speakers are sent, instead of text.
    diarized: bool,
    /// Whether tokens with their log probabilities are sent.
    logprobs: bool,
    deltas: Deltas,
    /// How many words of the text were sent with their tokens.
    words: usize,
    events: VecDeque<Value>,
    is_over: bool,
    /// The reservation of the upload, held until everything is sent.
    _reservation: Reservation,
}

/// The response that sends the events of a job; when the client disconnects, the job is dropped and so cancelled.
pub fn events(
    app: App,
    job: Job,
    first: Option<JobEvent>,
    asked: &Asked,
    begin: Instant,
    reservation: Reservation,
) -> Response {
    let sending = Sending {
        app,
        job,
        begin,
        first,
        diarized: asked.format == ResponseFormat::DiarizedJson,
        logprobs: asked.logprobs,
        deltas: Deltas::default(),
        words: 0,
        events: VecDeque::new(),
        is_over: false,
        _reservation: reservation,
    };
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Sse::new(stream_of(sending)).keep_alive(keep_alive).into_response()
}

fn stream_of(sending: Sending) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold(sending, |mut sending| async move {
        loop {
            if let Some(value) = sending.events.pop_front() {
                return Some((Ok(event(&value)), sending));
            }
            if sending.is_over {
                return None;
            }
            let next = match sending.first.take() {
                Some(event) => Some(event),
                None => sending.job.next().await,
            };
            sending.take(next);
        }
    })
}

impl Sending {
    fn take(&mut self, event: Option<JobEvent>) {
        match event {
            Some(JobEvent::Segments(segments, tokens)) if !self.diarized => {
                let added = self.deltas.add(&segments);
                self.delta(added, &tokens);
            }
            Some(JobEvent::Segments(..)) => {}
            Some(JobEvent::Done(finished)) => {
                self.app.metrics.total(self.begin.elapsed().as_secs_f64());
                self.done(&finished);
                self.is_over = true;
            }
            Some(JobEvent::Failed(error)) => {
                self.events.push_back(ApiError::from(error).envelope());
                self.is_over = true;
            }
            None => self.is_over = true,
        }
    }

    fn done(&mut self, finished: &Finished) {
        let transcript = &finished.transcript;
        if self.diarized {
            let segments = (1..).zip(&transcript.segments);
            self.events
                .extend(segments.map(|(number, segment)| diarized_segment(number, segment)));
        } else {
            let rest = self.deltas.rest(&transcript.text);
            self.delta(rest, finished.tokens.get(self.words..).unwrap_or_default());
        }
        let mut done = json!({
            "type": "transcript.text.done",
            "text": transcript.text,
            "usage": usage(transcript),
        });
        if self.logprobs {
            done["logprobs"] = logprobs(&finished.tokens, true);
        }
        self.events.push_back(done);
    }

    /// The event that adds a text, and the tokens of its words.
    fn delta(&mut self, added: Option<String>, tokens: &[Vec<Token>]) {
        let Some(added) = added else { return };
        let mut event = json!({"type": "transcript.text.delta", "delta": added});
        if self.logprobs {
            event["logprobs"] = logprobs(tokens, self.words == 0);
            self.words += tokens.len();
        }
        self.events.push_back(event);
    }
}

/// Serialised on one line, since a line break would end the event.
fn event(value: &Value) -> Event {
    let name = value.get("type").and_then(Value::as_str).unwrap_or("error");
    Event::default().event(name).data(value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(texts: &[&str]) -> Vec<Segment> {
        let segment = |text: &&str| Segment {
            text: (*text).to_owned(),
            ..Segment::default()
        };
        texts.iter().map(segment).collect()
    }

    #[test]
    fn deltas_join_to_the_text() {
        let text = "One. Two three. Four.";
        let mut deltas = Deltas::default();
        let mut joined = String::new();
        joined.extend(deltas.add(&segments(&["One.", " Two three. "])));
        assert_eq!(deltas.add(&segments(&["", " "])), None);
        joined.extend(deltas.rest(text));
        assert_eq!(joined, text);
        joined.clear();
        let mut deltas = Deltas::default();
        for part in ["One.", "", "Two three.", "Four."] {
            joined.extend(deltas.add(&segments(&[part])));
        }
        assert_eq!(joined, text);
        assert_eq!(deltas.rest(text), None);
        assert_eq!(Deltas::default().rest(""), None);
    }
}
