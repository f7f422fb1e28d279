//! Metrics for Prometheus, in the text format of OpenMetrics.

use std::sync::atomic::AtomicI64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::engine::{EngineError, Finished, Observer};

/// Content type of [`Metrics::encode`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Outcome = [(&'static str, &'static str); 1];
type Route = [(&'static str, String); 3];

/// The metrics. They observe the engine as an [`Observer`].
pub struct Metrics {
    registry: Registry,
    queue_seconds: Histogram,
    decode_seconds: Histogram,
    total_seconds: Histogram,
    audio_seconds: Histogram,
    realtime_factor: Histogram,
    batch_windows: Histogram,
    batch_audio_seconds: Histogram,
    transcriptions: Family<Outcome, Counter>,
    responses: Family<Route, Counter>,
    pub queued: Gauge<i64, AtomicI64>,
    pub jobs: Gauge<i64, AtomicI64>,
    pub loaded_models: Gauge<i64, AtomicI64>,
    pub connections: Gauge<i64, AtomicI64>,
    pub refused_connections: Counter,
    pub ready: Gauge<i64, AtomicI64>,
}

impl Default for Metrics {
    fn default() -> Self {
        // Ten milliseconds to 87 minutes; a tenth of a second to 14.5 hours; a quarter to 4096.
        let seconds = || Histogram::new(exponential_buckets(0.01, 2.0, 20));
        let audio = || Histogram::new(exponential_buckets(0.1, 2.0, 20));
        let factor = Histogram::new(exponential_buckets(0.25, 2.0, 15));
        let mut metrics = Self {
            registry: Registry::default(),
            queue_seconds: seconds(),
            decode_seconds: seconds(),
            total_seconds: seconds(),
            audio_seconds: audio(),
            realtime_factor: factor,
            batch_windows: Histogram::new(exponential_buckets(1.0, 2.0, 10)),
            batch_audio_seconds: audio(),
            transcriptions: Family::default(),
            responses: Family::default(),
            queued: Gauge::default(),
            jobs: Gauge::default(),
            loaded_models: Gauge::default(),
            connections: Gauge::default(),
            refused_connections: Counter::default(),
            ready: Gauge::default(),
        };
        let mut registry = Registry::default();
        for (name, help, histogram) in [
            (
                "queue_seconds",
                "Time from a request to its first window in the model",
                &metrics.queue_seconds,
            ),
            (
                "decode_seconds",
                "Time from the first window of a request to its last one",
                &metrics.decode_seconds,
            ),
            (
                "request_seconds",
                "Time from a request to its transcript, its upload included",
                &metrics.total_seconds,
            ),
            (
                "audio_seconds",
                "Length of recordings that were transcribed",
                &metrics.audio_seconds,
            ),
            (
                "realtime_factor",
                "Seconds of audio for each second of decoding",
                &metrics.realtime_factor,
            ),
            (
                "batch_windows",
                "Windows that went through a model at once",
                &metrics.batch_windows,
            ),
            (
                "batch_audio_seconds",
                "Seconds of audio that went through a model at once",
                &metrics.batch_audio_seconds,
            ),
        ] {
            registry.register(format!("flow_{name}"), help, histogram.clone());
        }
        let help = "Requests for a transcript or a diarization, by what became of them";
        registry.register("flow_transcriptions", help, metrics.transcriptions.clone());
        let help = "Connections that were closed at once, as their address had too many";
        registry.register("flow_refused_connections", help, metrics.refused_connections.clone());
        let help = "Responses by method, route and status";
        registry.register("flow_http_responses", help, metrics.responses.clone());
        for (name, help, gauge) in [
            (
                "queued_requests",
                "Requests that wait or are transcribed",
                &metrics.queued,
            ),
            ("queued_jobs", "Jobs that wait or run", &metrics.jobs),
            ("loaded_models", "Models in memory", &metrics.loaded_models),
            ("connections", "Open connections", &metrics.connections),
            ("ready", "1 while requests are taken", &metrics.ready),
        ] {
            registry.register(format!("flow_{name}"), help, gauge.clone());
        }
        metrics.registry = registry;
        metrics
    }
}

impl Metrics {
    /// Counts a request that the engine refused.
    pub fn refused(&self, error: &EngineError) {
        self.transcriptions.get_or_create(&[("outcome", outcome(error))]).inc();
    }

    /// Counts a request with its transcript, `seconds` after it arrived.
    pub fn total(&self, seconds: f64) {
        self.total_seconds.observe(seconds);
    }

    pub fn response(&self, method: &str, route: &str, status: u16) {
        let labels = [
            ("method", method.to_owned()),
            ("route", route.to_owned()),
            ("status", status.to_string()),
        ];
        self.responses.get_or_create(&labels).inc();
    }

    /// All numbers as text.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("a string takes everything");
        text
    }
}

impl Observer for Metrics {
    fn batch(&self, windows: usize, seconds: f64) {
        self.batch_windows.observe(windows as f64);
        self.batch_audio_seconds.observe(seconds);
    }

    fn finished(&self, finished: Result<&Finished, &EngineError>) {
        let finished = match finished {
            Err(error) => return self.refused(error),
            Ok(finished) => finished,
        };
        self.transcriptions.get_or_create(&[("outcome", "done")]).inc();
        self.queue_seconds.observe(finished.queue_seconds);
        self.decode_seconds.observe(finished.decode_seconds);
        let audio = finished.transcript.metadata.duration_s;
        self.audio_seconds.observe(audio);
        let factor = audio / finished.decode_seconds;
        // Silence has no window, and takes no time.
        if factor.is_finite() {
            self.realtime_factor.observe(factor);
        }
    }
}

/// The result of a request, as a label.
fn outcome(error: &EngineError) -> &'static str {
    match error {
        EngineError::Busy { .. } => "busy",
        EngineError::Draining => "stopping",
        EngineError::UnknownModel(_) => "unknown_model",
        EngineError::NotDiarizing => "no_diarization",
        EngineError::Audio { .. } => "bad_audio",
        EngineError::Text { .. } => "bad_text",
        EngineError::Field { .. } => "bad_field",
        EngineError::TooLong { .. } => "too_long",
        EngineError::Timeout(_) => "timeout",
        EngineError::Cancelled => "cancelled",
        EngineError::Model(_) => "model_not_loaded",
        EngineError::NoMemory(_) => "no_memory",
        EngineError::Setting { .. } | EngineError::Failed(_) => "failed",
    }
}

#[cfg(test)]
mod tests {
    use flow_transcription::{Metadata, Transcript};

    use super::*;

    #[test]
    fn what_the_engine_does_is_counted() {
        let metrics = Metrics::default();
        metrics.batch(3, 20.0);
        let finished = Finished {
            transcript: Transcript {
                metadata: Metadata {
                    duration_s: 10.0,
                    ..Metadata::default()
                },
                ..Transcript::default()
            },
            warnings: Vec::new(),
            tokens: Vec::new(),
            queue_seconds: 0.5,
            decode_seconds: 2.0,
            batches: 1,
        };
        metrics.finished(Ok(&finished));
        metrics.finished(Ok(&Finished {
            decode_seconds: 0.0,
            ..finished
        }));
        metrics.finished(Err(&EngineError::Cancelled));
        metrics.refused(&EngineError::Busy { retry_after: 1 });
        metrics.response("GET", "/health", 200);
        metrics.queued.set(4);
        let text = metrics.encode();
        for line in [
            "flow_batch_windows_sum 3.0",
            "flow_batch_audio_seconds_sum 20.0",
            "flow_audio_seconds_sum 20.0",
            "flow_audio_seconds_count 2",
            "flow_realtime_factor_sum 5.0",
            "flow_realtime_factor_count 1",
            "flow_queue_seconds_sum 1.0",
            "flow_transcriptions_total{outcome=\"done\"} 2",
            "flow_transcriptions_total{outcome=\"cancelled\"} 1",
            "flow_transcriptions_total{outcome=\"busy\"} 1",
            "flow_http_responses_total{method=\"GET\",route=\"/health\",status=\"200\"} 1",
            "flow_queued_requests 4",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
