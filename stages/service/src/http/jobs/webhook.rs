//! Webhooks: the end of a job is sent to the URL of its request, signed as OpenAI's webhooks are (Standard Webhooks 1.0): the
//! header `webhook-signature` is `v1,` and the base64 of HMAC-SHA256 over `{webhook-id}.{webhook-timestamp}.{body}`.
//!
//! The id and the body of an event follow from the job, so that one that arrives twice, as after the death of the process, is
//! recognized. Redirections are not followed, and URLs are of listed origins alone, so that nobody reaches other machines of
//! the network through the service.

use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use serde_json::json;
use sha2::Sha256;
use tokio::sync::Semaphore;
use tokio::time::sleep;
use ureq::Agent;

use super::super::app::{App, Phase};
use super::super::service::reached;
use super::super::setting_file;
use super::folder::{Delivery, DeliveryState, Outcome};
use super::{Jobs, Owed, now};

/// Seconds from one attempt to the next; after the last one it is given up. A day and a half together.
const DELAYS: [u64; 10] = [5, 30, 120, 600, 1800, 3600, 7200, 14_400, 28_800, 57_600];

/// Longest time for a request.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Webhooks that are sent at once.
const AT_ONCE: usize = 8;

/// Fewest bytes of a secret.
const LEAST_SECRET: usize = 16;

/// What webhooks are signed with.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Reads a file: `whsec_` and base64, or any text of 16 bytes at least, without the space around it.
    ///
    /// # Errors
    /// If it cannot be read, is not base64 or too short.
    pub fn read(file: &Path) -> io::Result<Self> {
        Self::parse(&setting_file::read_text(file)?)
    }

    fn parse(text: &str) -> io::Result<Self> {
        let text = text.trim();
        let key = match text.strip_prefix("whsec_") {
            // The error would show a part of it.
            Some(digits) => STANDARD
                .decode(digits)
                .map_err(|_| io::Error::other("what follows `whsec_` is not base64"))?,
            None => text.as_bytes().to_vec(),
        };
        if key.len() < LEAST_SECRET {
            let why = format!("the secret has {} bytes, fewer than {LEAST_SECRET}", key.len());
            return Err(io::Error::other(why));
        }
        Ok(Self(key))
    }

    /// The header `webhook-signature`.
    fn signature(&self, id: &str, timestamp: u64, body: &str) -> String {
        // HMAC takes keys of any length.
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(&self.0) else {
            return String::new();
        };
        mac.update(format!("{id}.{timestamp}.{body}").as_bytes());
        format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
    }
}

/// The id of the event of a job.
fn event_id(job: &str) -> String {
    format!("evt_{}", job.trim_start_matches("job_"))
}

/// The body of the event of a job.
fn body(job: &str, outcome: &Outcome) -> String {
    let event = json!({
        "id": event_id(job),
        "object": "event",
        "created_at": outcome.finished_at,
        "type": format!("job.{}", outcome.end.name()),
        "data": {"id": job, "state": outcome.end.name(), "error": outcome.error},
    });
    event.to_string()
}

/// What became of an attempt.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Attempt {
    Accepted,
    /// 410: nobody wants it any more.
    Unwanted,
    Failed,
}

/// The state of the webhook after an attempt at the time `now`.
fn after(delivery: Delivery, attempt: Attempt, now: u64) -> Delivery {
    let delay = DELAYS.get(delivery.attempts as usize);
    let (state, next_at) = match (attempt, delay) {
        (Attempt::Accepted, _) => (DeliveryState::Delivered, now),
        (Attempt::Unwanted, _) | (Attempt::Failed, None) => (DeliveryState::GivenUp, now),
        (Attempt::Failed, Some(delay)) => (DeliveryState::Pending, now.saturating_add(*delay)),
    };
    Delivery {
        attempts: delivery.attempts.saturating_add(1),
        next_at,
        state,
    }
}

fn agent() -> Agent {
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .timeout_global(Some(TIMEOUT))
        // Neither a proxy of the environment: it would reach other hosts.
        .proxy(None)
        .user_agent(concat!("flow/", env!("CARGO_PKG_VERSION")));
    config.build().into()
}

/// Sends the event once; blocks.
fn send(agent: &Agent, secret: &Secret, owed: &Owed, timestamp: u64) -> Attempt {
    let id = event_id(&owed.id);
    let body = body(&owed.id, &owed.outcome);
    let sent = agent
        .post(&owed.url)
        .header("content-type", "application/json")
        .header("webhook-id", &id)
        .header("webhook-timestamp", timestamp.to_string())
        .header("webhook-signature", secret.signature(&id, timestamp, &body))
        .send(&body);
    match sent.map(|response| response.status()) {
        Ok(status) if status.is_success() => Attempt::Accepted,
        Ok(status) if status.as_u16() == 410 => Attempt::Unwanted,
        _ => Attempt::Failed,
    }
}

/// Sends the webhooks of all jobs that have ended and of those that will, until the service stops.
pub async fn send_all(app: App, jobs: Arc<Jobs>) {
    let receiver = jobs.sending.lock().unwrap_or_else(PoisonError::into_inner).take();
    let (Some(mut receiver), Some(secret)) = (receiver, jobs.secret.clone()) else {
        return;
    };
    let (agent, places) = (agent(), Arc::new(Semaphore::new(AT_ONCE)));
    loop {
        let number = tokio::select! {
            number = receiver.recv() => number,
            () = reached(app.phase.clone(), Phase::Draining) => return,
        };
        let Some(number) = number else { return };
        let deliver = deliver(
            Arc::clone(&app),
            Arc::clone(&jobs),
            number,
            agent.clone(),
            secret.clone(),
            Arc::clone(&places),
        );
        tokio::spawn(deliver);
    }
}

/// Sends the webhook of a job until it is accepted or given up.
async fn deliver(app: App, jobs: Arc<Jobs>, number: u64, agent: Agent, secret: Secret, places: Arc<Semaphore>) {
    // None once it is done, or the job was removed.
    while let Some(owed) = jobs.owed_webhook(number) {
        // Settings may have changed since the job was accepted.
        if !jobs.settings.allows_webhook(&owed.url) {
            return;
        }
        let wait = Duration::from_secs(owed.delivery.next_at.saturating_sub(now()));
        tokio::select! {
            () = sleep(wait) => {}
            () = reached(app.phase.clone(), Phase::Draining) => return,
        }
        // The semaphore is never closed.
        let Ok(_place) = places.acquire().await else { return };
        let (agent, secret, id, delivery) = (agent.clone(), secret.clone(), owed.id.clone(), owed.delivery);
        let sent = tokio::task::spawn_blocking(move || send(&agent, &secret, &owed, now())).await;
        let delivery = after(delivery, sent.unwrap_or(Attempt::Failed), now());
        if let Err(error) = jobs.note_delivery(number, id, delivery).await {
            (app.log)(&format!("warning: the state of a webhook cannot be written: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::super::folder::End;
    use super::*;

    fn outcome() -> Outcome {
        Outcome {
            end: End::Done,
            finished_at: 1_700_000_000,
            audio_seconds: Some(2.0),
            content_type: None,
            error: None,
        }
    }

    #[test]
    fn signatures_are_those_of_standard_webhooks() {
        // The example of the specification's reference libraries.
        let secret = Secret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n").unwrap();
        assert_eq!(
            secret.signature("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, "{\"test\": 2432232314}"),
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
        );
        let plain = Secret::parse("a secret of many letters").unwrap();
        assert_ne!(plain.signature("a", 1, "b"), secret.signature("a", 1, "b"));
    }

    #[test]
    fn secrets_that_are_none_are_refused_and_not_told() {
        for wrong in [
            "",
            "short",
            "whsec_",
            "whsec_c2hvcnQ=",
            "whsec_no base64 of anything at all",
        ] {
            let error = Secret::parse(wrong).err().unwrap().to_string();
            assert!(!error.contains("base64 of") && !error.contains("c2hv"), "{error}");
        }
    }

    #[test]
    fn attempts_are_bounded_and_wait_longer_each_time() {
        let mut delivery = Delivery::default();
        let mut now = 1000;
        let mut waits = Vec::new();
        while delivery.state == DeliveryState::Pending {
            delivery = after(delivery, Attempt::Failed, now);
            waits.push(delivery.next_at - now);
            now = delivery.next_at;
        }
        assert_eq!(delivery.state, DeliveryState::GivenUp);
        assert_eq!(delivery.attempts as usize, DELAYS.len() + 1);
        assert!(waits[..DELAYS.len()].is_sorted_by(|a, b| a < b), "{waits:?}");
        let accepted = after(Delivery::default(), Attempt::Accepted, 7);
        assert_eq!((accepted.state, accepted.attempts), (DeliveryState::Delivered, 1));
        assert_eq!(
            after(Delivery::default(), Attempt::Unwanted, 7).state,
            DeliveryState::GivenUp
        );
    }

    /// Answers one request, and gives what it received.
    fn receiver(answer: &'static str) -> (String, thread::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let received = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let (mut text, mut byte) = (Vec::new(), [0]);
            let whole = body("job_0a", &outcome());
            while !text.ends_with(whole.as_bytes()) && stream.read(&mut byte).unwrap() > 0 {
                text.push(byte[0]);
            }
            write!(stream, "{answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
            String::from_utf8(text).unwrap()
        });
        (url, received)
    }

    #[test]
    fn an_event_is_sent_with_its_signature_and_redirections_are_not_followed() {
        let secret = Secret::parse("0123456789abcdef").unwrap();
        for (answer, expected) in [
            ("HTTP/1.1 204 No Content", Attempt::Accepted),
            ("HTTP/1.1 500 Broken", Attempt::Failed),
            ("HTTP/1.1 410 Gone", Attempt::Unwanted),
            ("HTTP/1.1 307 There\r\nLocation: http://127.0.0.1:1/", Attempt::Failed),
            ("no HTTP", Attempt::Failed),
        ] {
            let (url, received) = receiver(answer);
            let owed = Owed {
                url,
                id: "job_0a".to_owned(),
                outcome: outcome(),
                delivery: Delivery::default(),
            };
            assert_eq!(send(&agent(), &secret, &owed, 99), expected, "{answer}");
            let received = received.join().unwrap();
            let (head, sent) = received.split_once("\r\n\r\n").unwrap();
            let signature = secret.signature("evt_0a", 99, sent);
            for line in [
                "webhook-id: evt_0a",
                "webhook-timestamp: 99",
                &format!("webhook-signature: {signature}"),
            ] {
                assert!(head.lines().any(|found| found == line), "{line}:\n{head}");
            }
            assert_eq!(sent, body("job_0a", &outcome()));
            assert!(sent.contains("\"type\":\"job.done\""), "{sent}");
        }
        let owed = Owed {
            url: "http://127.0.0.1:1/".to_owned(),
            id: "job_0a".to_owned(),
            outcome: outcome(),
            delivery: Delivery::default(),
        };
        assert_eq!(send(&agent(), &secret, &owed, 99), Attempt::Failed, "nobody listens");
    }
}
