//! The table of the service's paths.

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{MethodRouter, get, post};

use super::app::App;
use super::jobs::handlers as jobs;
use super::{alignments, information, middleware, transcriptions};

/// The function of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Transcribe,
    Diarize,
    Align,
    Translate,
    Jobs,
    Job,
    JobResult,
    Models,
    Model,
    Health,
    Ready,
    Live,
    ReadyOfNim,
    Metrics,
    Version,
    OpenApi,
}

/// A path, and what it does.
#[derive(Debug, Clone, Copy)]
pub struct Endpoint {
    /// As in OpenAPI: `{id}` is a part that varies.
    pub path: &'static str,
    pub action: Action,
    /// Whether it needs an API key, where there are any.
    pub needs_key: bool,
    pub doc: &'static str,
}

const fn endpoint(path: &'static str, action: Action, needs_key: bool, doc: &'static str) -> Endpoint {
    Endpoint {
        path,
        action,
        needs_key,
        doc,
    }
}

/// All paths of this module.
pub const ENDPOINTS: &[Endpoint] = &[
    endpoint(
        "/v1/audio/transcriptions",
        Action::Transcribe,
        true,
        "Transcribe a recording",
    ),
    endpoint(
        "/v1/audio/diarizations",
        Action::Diarize,
        true,
        "Say who speaks when in a recording",
    ),
    endpoint(
        "/v1/audio/diarization",
        Action::Diarize,
        true,
        "The same as /v1/audio/diarizations",
    ),
    endpoint(
        "/v1/audio/alignments",
        Action::Align,
        true,
        "The times of a text that is known",
    ),
    endpoint(
        "/v1/audio/translations",
        Action::Translate,
        true,
        "Refused: there is no translation",
    ),
    endpoint(
        "/v1/jobs",
        Action::Jobs,
        true,
        "Transcribe a recording later; list such jobs",
    ),
    endpoint(
        "/v1/jobs/{id}",
        Action::Job,
        true,
        "One of the jobs; cancel or remove it",
    ),
    endpoint(
        "/v1/jobs/{id}/result",
        Action::JobResult,
        true,
        "The transcript of a job",
    ),
    endpoint("/v1/models", Action::Models, true, "The models that there are"),
    endpoint("/v1/models/{id}", Action::Model, true, "One of the models"),
    endpoint("/health", Action::Health, false, "Whether the server runs"),
    endpoint("/ready", Action::Ready, false, "Whether requests are taken: 200 or 503"),
    endpoint("/v1/health/live", Action::Live, false, "The same as /health"),
    endpoint("/v1/health/ready", Action::ReadyOfNim, false, "The same as /ready"),
    endpoint("/metrics", Action::Metrics, true, "Numbers for Prometheus"),
    endpoint("/v1/metrics", Action::Metrics, true, "The same as /metrics"),
    endpoint("/version", Action::Version, true, "The version of the program"),
    endpoint("/openapi.json", Action::OpenApi, true, "This description"),
];

impl Action {
    /// Its methods, as in OpenAPI. POST takes a form.
    pub fn methods(self) -> &'static [&'static str] {
        match self {
            Self::Transcribe | Self::Diarize | Self::Align | Self::Translate => &["post"],
            Self::Jobs => &["get", "post"],
            Self::Job => &["get", "delete"],
            _ => &["get"],
        }
    }

    fn handler(self) -> MethodRouter<App> {
        match self {
            Self::Transcribe => post(transcriptions::transcribe),
            Self::Diarize => post(transcriptions::diarize),
            Self::Align => post(alignments::align),
            Self::Translate => post(transcriptions::translate),
            Self::Jobs => get(jobs::list).post(jobs::create),
            Self::Job => get(jobs::show).delete(jobs::delete),
            Self::JobResult => get(jobs::result),
            Self::Models => get(information::models),
            Self::Model => get(information::model),
            Self::Health => get(information::health),
            Self::Ready => get(information::ready),
            Self::Live => get(information::live),
            Self::ReadyOfNim => get(information::ready_of_nim),
            Self::Metrics => get(information::metrics),
            Self::Version => get(information::version),
            Self::OpenApi => get(information::open_api),
        }
    }
}

/// The router of all paths, with `page` beside them, which needs no key.
pub fn router(app: &App, page: Router) -> Router {
    let (mut open, mut guarded) = (Router::new(), Router::new());
    for endpoint in ENDPOINTS {
        let path = match endpoint.action {
            // Names of models have slashes, as in OWNER/NAME.
            Action::Model => endpoint.path.replace("{id}", "{*id}"),
            _ => endpoint.path.to_owned(),
        };
        if endpoint.needs_key {
            guarded = guarded.route(&path, endpoint.action.handler());
        } else {
            open = open.route(&path, endpoint.action.handler());
        }
    }
    let guarded = guarded.route_layer(from_fn_with_state(app.clone(), middleware::need_key));
    let router = open
        .merge(guarded)
        .fallback(information::other)
        .with_state(app.clone())
        .merge(page)
        .method_not_allowed_fallback(information::wrong_method);
    middleware::around(app, router)
}
