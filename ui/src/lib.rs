//! `flow ui`: a browser interface to a state directory, its exports and other rows, on this machine. Pages are rendered
//! by the server, with a style sheet and a script beside those of the page of `flow serve`, which is that of transcripts.
//!
//! URLs never contain file paths: they name runs, stages, ports and positions of rows.

mod access;
mod address;
mod app;
mod browse;
mod corrections;
mod dag;
mod differences;
mod evaluation;
mod filters;
mod follower;
mod layout;
mod page_error;
mod picture;
mod rates;
mod rows;
mod run_summary;
mod runs;
pub mod server;
mod sound;
mod state_directory;
mod summaries;
mod table_ref;
mod tables;
mod training;
mod transcripts;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use flow_service::http::Service;
use flow_service::page;
use tower::{ServiceExt, service_fn};

use access::Access;
pub use app::Settings;
use app::{App, Shared};
use page_error::PageError;

/// The largest form that is taken, as bytes.
const MAX_FORM: usize = 128 << 10;

/// The router, and the URL that opens the pages. `service` transcribes recordings and the microphone.
///
/// # Errors
/// If the machine gives no random numbers.
pub fn site(settings: Settings, address: SocketAddr, service: Option<&Service>) -> io::Result<(Router, String)> {
    let access = Access::new(address)?;
    let url = access.url(address);
    let app: Shared = Arc::new(App::new(settings, access, service.is_some()));
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
    Ok((
        router.layer(from_fn_with_state(Arc::clone(&app.access), access::guard)),
        url,
    ))
}

async fn asset(kind: &'static str, text: &'static str) -> Response {
    ([(CONTENT_TYPE, kind), (CACHE_CONTROL, "no-cache")], text).into_response()
}
