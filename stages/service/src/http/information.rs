//! Endpoints with information about the service.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tower::ServiceExt;

use super::app::App;
use super::error::ApiError;
use super::metrics::CONTENT_TYPE as METRICS_TYPE;
use super::openapi;
use crate::engine::{Engine, EngineError, ModelState};

/// `GET /v1/models`.
pub async fn models(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let models = app.engine()?.models();
    let data: Value = models.iter().map(|model| described(&app, model)).collect();
    Ok(Json(
        json!({"object": "list", "data": data, "jobs": app.jobs.is_some()}),
    ))
}

/// `GET /v1/models/{id}`.
pub async fn model(State(app): State<App>, id: Result<Path<String>, PathRejection>) -> Result<Json<Value>, ApiError> {
    let models = app.engine()?.models();
    // A path that is not UTF-8 is not a model name.
    let found = id
        .ok()
        .and_then(|Path(id)| models.iter().find(|model| model.name == id));
    match found {
        Some(model) => Ok(Json(described(&app, model))),
        None => {
            let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
            let message = format!("there is no model of that name; there are {}", names.join(", "));
            Err(EngineError::UnknownModel(message).into())
        }
    }
}

fn described(app: &App, model: &ModelState) -> Value {
    json!({
        "id": model.name,
        "object": "model",
        // That of the service: files have no reliable time.
        "created": app.started_at(),
        "owned_by": "flow",
        "loaded": model.loaded,
        "digest": model.digest,
        "languages": model.languages,
        "diarization": app.engine.get().is_some_and(Engine::diarizes),
    })
}

/// `GET /health`.
pub async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// `GET /ready`.
pub async fn ready(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    app.check_ready()?;
    Ok(Json(json!({"status": "ready"})))
}

/// `GET /v1/health/live`, in the form of NVIDIA's NIM.
pub async fn live() -> Json<Value> {
    Json(json!({"object": "health.response", "message": "Service is live.", "status": "live"}))
}

/// `GET /v1/health/ready`, in the form of NVIDIA's NIM.
pub async fn ready_of_nim(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    app.check_ready()?;
    Ok(Json(
        json!({"object": "health.response", "message": "Service is ready.", "status": "ready"}),
    ))
}

/// `GET /metrics`.
pub async fn metrics(State(app): State<App>) -> Response {
    let metrics = &app.metrics;
    if let Some(engine) = app.engine.get() {
        metrics.queued.set(engine.queued() as i64);
        let loaded = engine.models().iter().filter(|model| model.loaded).count();
        metrics.loaded_models.set(loaded as i64);
    }
    if let Some(jobs) = &app.jobs {
        metrics.jobs.set(jobs.queued() as i64);
    }
    let open = app
        .settings
        .max_connections
        .saturating_sub(app.connections.available_permits());
    metrics.connections.set(open as i64);
    metrics.ready.set(i64::from(app.check_ready().is_ok()));
    ([(CONTENT_TYPE, METRICS_TYPE)], metrics.encode()).into_response()
}

/// `GET /version`.
pub async fn version(State(app): State<App>) -> Json<Value> {
    Json(json!({"name": "flow", "version": app.version}))
}

/// `GET /openapi.json`.
pub async fn open_api(State(app): State<App>) -> Json<Value> {
    Json(openapi::document(&app.version))
}

/// All other paths: those of live sessions once the engine is there.
pub async fn other(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    app.keys.check(request.headers())?;
    app.check_ready()?;
    if let Some(live) = app.live.get() {
        let Ok(response) = live.clone().oneshot(request).await;
        return Ok(response);
    }
    Err(not_found().await)
}

/// Response for an unknown path.
pub async fn not_found() -> ApiError {
    ApiError::new(
        StatusCode::NOT_FOUND,
        "unknown_url",
        "there is nothing at this path; see /openapi.json",
    )
}

/// Response for a known path with another method.
pub async fn wrong_method() -> ApiError {
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        "this path takes another method",
    )
}
