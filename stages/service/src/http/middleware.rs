//! Middleware for all requests.

use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{CACHE_CONTROL, LOCATION, RETRY_AFTER, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderName, HeaderValue, Method};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use chrono::{SecondsFormat, Utc};
use serde_json::json;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::app::App;
use super::body::read_rest;
use super::error::ApiError;
use super::server::Peer;
use super::transcriptions::IGNORED;

/// The header with the request id, which OpenAI's clients show.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Most characters of a path in a log.
const MAX_PATH: usize = 200;

/// Adds the middleware to the routes; the last layer sees a request first.
pub fn around(app: &App, router: Router) -> Router {
    let mut router = router;
    if let Some(cors) = cors(&app.settings.cors) {
        router = router.layer(cors);
    }
    router
        .layer(from_fn_with_state(app.clone(), known_caller))
        .layer(from_fn(read_rest))
        .layer(from_fn_with_state(app.clone(), observe))
}

/// CORS responses.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    let origin = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        let listed: Vec<HeaderValue> = origins
            .iter()
            // As browsers send them.
            .filter_map(|origin| HeaderValue::from_str(&origin.to_ascii_lowercase()).ok())
            .collect();
        if listed.is_empty() {
            return None;
        }
        AllowOrigin::list(listed)
    };
    Some(
        CorsLayer::new()
            .allow_origin(origin)
            .allow_methods([Method::GET, Method::POST, Method::DELETE])
            // Allows the requested headers: clients add their own, and `*` would not include `Authorization`.
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([IGNORED, LOCATION, REQUEST_ID, RETRY_AFTER]),
    )
}

/// Refuses requests without one of the keys.
pub async fn need_key(State(app): State<App>, request: Request, next: Next) -> Result<Response, ApiError> {
    app.keys.check(request.headers())?;
    Ok(next.run(request).await)
}

/// Refuses requests for other hosts and from other origins.
async fn known_caller(State(app): State<App>, request: Request, next: Next) -> Result<Response, ApiError> {
    app.callers.check(request.uri(), request.headers())?;
    Ok(next.run(request).await)
}

/// Logs and counts a request when it ends, also if its client disconnects before the response.
struct Observed {
    app: App,
    begin: Instant,
    id: String,
    method: &'static str,
    route: Option<String>,
    /// Address of the client and path, where requests are logged.
    logged: Option<(Option<String>, String)>,
    /// None: there is no response.
    status: Option<u16>,
}

impl Drop for Observed {
    fn drop(&mut self) {
        if let Some(status) = self.status {
            let route = self.route.as_deref().unwrap_or("other");
            self.app.metrics.response(self.method, route, status);
        }
        if let Some((peer, path)) = &self.logged {
            let line = json!({
                "time": Utc::now().to_rfc3339_opts(SecondsFormat::Millis, true),
                "request": self.id,
                "peer": peer,
                "method": self.method,
                "path": path,
                "status": self.status,
                "seconds": (self.begin.elapsed().as_secs_f64() * 1e3).round() / 1e3,
            });
            (self.app.log)(&line.to_string());
        }
    }
}

/// Counts the response, adds the request id, and prints a log line if enabled.
async fn observe(State(app): State<App>, request: Request, next: Next) -> Response {
    let extensions = request.extensions();
    let logged = app.settings.log_requests.then(|| {
        let peer = extensions.get::<Peer>().map(|Peer(address)| address.to_string());
        // Without the query, which may contain private data.
        let path: String = request.uri().path().chars().take(MAX_PATH).collect();
        (peer, path)
    });
    let mut observed = Observed {
        begin: Instant::now(),
        id: app.request_id(),
        method: known_method(request.method()),
        route: extensions.get::<MatchedPath>().map(|path| path.as_str().to_owned()),
        logged,
        status: None,
        app,
    };
    let mut response = next.run(request).await;
    observed.status = Some(response.status().as_u16());
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&observed.id) {
        headers.insert(REQUEST_ID, id);
    }
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers
        .entry(CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    response
}

/// The method as a label; uncommon methods share one, so that clients cannot create labels.
fn known_method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}
