//! `flow ui`: a browser interface to a state directory, its exports and other rows, on this machine. Pages are rendered
//! by the server, with a style sheet and a script beside those of the page of `flow serve`, which is that of transcripts.
//!
//! URLs never contain file paths: they name runs, stages, ports and positions of rows.

mod access;
mod browse;
mod corrections;
mod dag;
mod differences;
mod evaluation;
mod filters;
mod follower;
mod layout;
mod picture;
mod rows;
mod run_summary;
mod runs;
pub mod server;
mod sound;
mod state_directory;
mod tables;
mod training;
mod transcripts;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use flow_kind::StageError;
use flow_manifest::ManifestError;
use flow_service::http::Service;
use flow_service::page;
use flow_store::{Store, StoreError};
use tokio::sync::Semaphore;
use tower::{ServiceExt, service_fn};

use access::Access;
use flow_inspect::InspectError;
use follower::Follower;
use run_summary::RunSummary;
use tables::{Pairs, Table, TableRef};

/// Requests that are processed concurrently; others wait.
const AT_ONCE: usize = 3;
/// The largest form that is taken, as bytes.
const MAX_FORM: usize = 128 << 10;

/// The inputs of the interface.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    pub state: PathBuf,
    /// Parquet files and files of JSON lines.
    pub files: Vec<PathBuf>,
    /// The folder of shards, where it is not that of a run.
    pub shards: Option<PathBuf>,
    /// JSON transcripts, and folders of them.
    pub transcripts: Vec<PathBuf>,
    /// Folders that their recordings are in.
    pub recordings: Vec<PathBuf>,
    /// The file of corrections, where some may be made.
    pub corrections: Option<PathBuf>,
}

/// The state that all requests share.
pub struct App {
    settings: Settings,
    access: Access,
    /// Whether there is a model for recordings and the microphone.
    transcribes: bool,
    /// With the time at which it was opened.
    store: Mutex<Option<(Store, Instant)>>,
    questions: Arc<Semaphore>,
    /// Of runs that are over.
    summaries: Mutex<BTreeMap<String, Arc<RunSummary>>>,
    followers: Mutex<Vec<(String, Arc<Mutex<Follower>>)>>,
    tables: Mutex<Vec<(TableRef, Table)>>,
    clips: Mutex<Vec<(Pairs, Arc<Vec<f32>>)>>,
}

type Shared = Arc<App>;

/// Errors of a request.
#[derive(Debug)]
pub struct PageError {
    status: StatusCode,
    message: String,
}

impl PageError {
    fn new(status: StatusCode, message: impl Into<String>) -> PageError {
        PageError {
            status,
            message: message.into(),
        }
    }

    fn bad_request(message: impl Into<String>) -> PageError {
        PageError::new(StatusCode::BAD_REQUEST, message)
    }

    /// Not found.
    fn absent(what: &str) -> PageError {
        PageError::new(StatusCode::NOT_FOUND, format!("there is no such {what}"))
    }

    /// Damaged files: shown as an error page.
    fn unreadable(error: impl std::fmt::Display) -> PageError {
        PageError::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string())
    }
}

impl From<InspectError> for PageError {
    fn from(error: InspectError) -> Self {
        PageError::unreadable(error)
    }
}

impl From<StoreError> for PageError {
    fn from(error: StoreError) -> Self {
        PageError::unreadable(error)
    }
}

impl From<StageError> for PageError {
    fn from(error: StageError) -> Self {
        PageError::unreadable(error)
    }
}

impl From<ManifestError> for PageError {
    fn from(error: ManifestError) -> Self {
        PageError::unreadable(error)
    }
}

impl From<io::Error> for PageError {
    fn from(error: io::Error) -> Self {
        PageError::unreadable(error)
    }
}

impl IntoResponse for PageError {
    fn into_response(self) -> Response {
        layout::error_page(self.status, &self.message)
    }
}

/// Runs blocking work of a request on a separate thread. A panic only affects this request.
async fn answer(app: &Shared, work: impl FnOnce(&App) -> Result<Response, PageError> + Send + 'static) -> Response {
    let permit = Arc::clone(&app.questions).acquire_owned().await;
    let worker = Arc::clone(app);
    let done = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work(&worker)
    });
    match done.await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => error.into_response(),
        Err(_) => {
            let message = "this page could not be made; this is a bug in flow, and the lines that it printed say where";
            PageError::new(StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
        }
    }
}

/// The router, and the URL that opens the pages. `service` transcribes recordings and the microphone.
///
/// # Errors
/// If the machine gives no random numbers.
pub fn site(settings: Settings, address: SocketAddr, service: Option<&Service>) -> io::Result<(Router, String)> {
    let access = Access::new(address)?;
    let url = access.url(address);
    let app: Shared = Arc::new(App {
        settings,
        access,
        transcribes: service.is_some(),
        store: Mutex::default(),
        questions: Arc::new(Semaphore::new(AT_ONCE)),
        summaries: Mutex::default(),
        followers: Mutex::default(),
        tables: Mutex::default(),
        clips: Mutex::default(),
    });
    let router = Router::new()
        .route("/", get(runs::list))
        .route("/runs/{id}", get(runs::show))
        .route("/runs/{id}/live", get(runs::follow))
        .route("/runs/{id}/log", get(runs::log))
        .route("/runs/{id}/report", get(runs::report))
        .route("/tables", get(tables::list))
        .route("/rows", get(rows::list))
        .route("/counts", get(rows::counts))
        .route("/row", get(rows::row))
        .route("/sound", get(sound::sound))
        .route("/waveform", get(sound::show_waveform))
        .route("/spectrogram", get(sound::show_spectrogram))
        .route("/evaluation", get(evaluation::list))
        .route("/evaluation/show", get(evaluation::show))
        .route("/training", get(training::list))
        .route("/training/live", get(training::follow))
        .route("/transcripts", get(transcripts::list))
        .route("/transcripts/show", get(transcripts::show))
        .route("/transcripts/json", get(transcripts::json))
        .route("/transcripts/sound", get(transcripts::sound))
        .route("/corrections", post(corrections::post))
        .route(
            "/assets/ui.css",
            get(|| asset("text/css; charset=utf-8", include_str!("ui.css"))),
        )
        .route(
            "/assets/ui.js",
            get(|| asset("text/javascript; charset=utf-8", include_str!("ui.js"))),
        )
        .fallback(|| async { PageError::absent("page") })
        .layer(DefaultBodyLimit::max(MAX_FORM))
        .with_state(Arc::clone(&app))
        .merge(page::files());
    let router = match service {
        Some(service) => {
            // It has limits of its own, and looks at the whole path.
            let paths = service.router(Router::new());
            let answered = service_fn(move |request: Request| paths.clone().oneshot(request));
            router.route_service("/v1/{*path}", answered)
        }
        None => router,
    };
    Ok((router.layer(from_fn_with_state(app, access::guard)), url))
}

async fn asset(kind: &'static str, text: &'static str) -> Response {
    ([(CONTENT_TYPE, kind), (CACHE_CONTROL, "no-cache")], text).into_response()
}
