//! The paths of jobs.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, Request, State};
use axum::http::header::{CONTENT_TYPE, LOCATION};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::Value;

use super::super::app::App;
use super::super::error::ApiError;
use super::super::transcriptions::{read_form, tell_ignored};
use super::super::upload::NO_ROOM;
use super::Jobs;
use super::folder::JobRequest;
use crate::options::shown;

/// The header by which a request that is sent again is recognized.
const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// Most characters of its value.
const MAX_KEY: usize = 255;

/// Jobs of a list, where the request does not say how many, and at most.
const USUAL_LIMIT: usize = 20;
const MAX_LIMIT: usize = 100;

const STATES: [&str; 5] = ["queued", "running", "done", "failed", "cancelled"];

fn jobs(app: &App) -> Result<&Arc<Jobs>, ApiError> {
    app.jobs.as_ref().ok_or_else(|| {
        let message = "this server has no jobs: `flow serve --jobs FOLDER` keeps them";
        ApiError::new(StatusCode::NOT_FOUND, "no_jobs", message)
    })
}

/// `POST /v1/jobs`: the form of a transcription.
pub async fn create(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let jobs = jobs(&app)?;
    let owner = app.keys.owner(request.headers());
    let idempotency_key = idempotency_key(request.headers())?;
    // The form of a job that is known is read, too: it may be another one.
    let is_known = |key: &String| jobs.knows_key(owner.as_deref(), key);
    if !idempotency_key.as_ref().is_some_and(is_known) {
        jobs.check_room()?;
    }
    let form = read_form(&app, request, &jobs.uploads, false).await.map_err(of_jobs)?;
    if form.asked.stream {
        let message = "a job cannot be streamed: ask for its result";
        return Err(ApiError::parameter("stream", "unsupported_value", message));
    }
    app.engine()?.check(form.asked.model.as_deref(), form.asked.diarize)?;
    if let Some(url) = &form.webhook {
        jobs.check_webhook(url)?;
    }
    if let Some(url) = &form.url {
        jobs.check_source(url)?;
    }
    let ignored = form.asked.ignored.clone();
    let request = JobRequest {
        id: String::new(),
        number: 0,
        created_at: 0,
        owner,
        idempotency_key,
        file_name: form.upload.name.clone(),
        bytes: form.upload.bytes,
        url: form.url,
        asked: form.asked,
        webhook: form.webhook,
    };
    // A client that goes does not stop what has begun.
    let (of, upload) = (Arc::clone(jobs), form.upload);
    let done = tokio::spawn(async move { of.accept(request, upload).await }).await;
    let mut response = accepted(done.map_err(|error| broken(&error))??);
    tell_ignored(&mut response, &ignored);
    Ok(response)
}

fn accepted(job: Value) -> Response {
    let location = format!("/v1/jobs/{}", job["id"].as_str().unwrap_or_default());
    let mut response = (StatusCode::ACCEPTED, Json(job)).into_response();
    if let Ok(location) = HeaderValue::from_str(&location) {
        response.headers_mut().insert(LOCATION, location);
    }
    response
}

/// The errors of uploads, in the words of jobs.
fn of_jobs(error: ApiError) -> ApiError {
    if error.code != NO_ROOM {
        return error;
    }
    ApiError {
        retry_after: error.retry_after,
        ..ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            "no_room_for_job",
            "the jobs have as many bytes as `jobs.max_bytes` allows: delete some, or come back later",
        )
    }
}

fn broken(error: &tokio::task::JoinError) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", error.to_string())
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(IDEMPOTENCY_KEY) else {
        return Ok(None);
    };
    let key = value.to_str().ok().filter(|key| (1..=MAX_KEY).contains(&key.len()));
    let key = key.ok_or_else(|| {
        let message = format!("`Idempotency-Key` has from 1 to {MAX_KEY} visible ASCII characters");
        ApiError::bad_request("invalid_idempotency_key", message)
    })?;
    Ok(Some(key.to_owned()))
}

/// The query of a list.
#[derive(Deserialize)]
pub struct ListQuery {
    limit: Option<String>,
    after: Option<String>,
    state: Option<String>,
    #[serde(flatten)]
    unknown: BTreeMap<String, String>,
}

/// `GET /v1/jobs`.
pub async fn list(
    State(app): State<App>,
    query: Result<Query<ListQuery>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    let jobs = jobs(&app)?;
    let Query(query) = query.map_err(|error| ApiError::bad_request("invalid_query", error.body_text()))?;
    if let Some(name) = query.unknown.keys().next() {
        let message = format!(
            "there is no parameter `{}`; there are limit, after and state",
            shown(name)
        );
        return Err(ApiError::bad_request("unknown_parameter", message));
    }
    let limit = query.limit.map_or(Ok(USUAL_LIMIT), |text| {
        let limit = text.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
        limit.ok_or_else(|| {
            let message = format!(
                "`limit` is `{}`; it must be a whole number from 1 to {MAX_LIMIT}",
                shown(&text)
            );
            ApiError::parameter("limit", "invalid_value", message)
        })
    })?;
    if query.state.as_deref().is_some_and(|state| !STATES.contains(&state)) {
        let message = format!("`state` is none of {}", STATES.join(", "));
        return Err(ApiError::parameter("state", "invalid_value", message));
    }
    let owner = app.keys.owner(&headers);
    let listed = jobs.list(owner.as_deref(), limit, query.after.as_deref(), query.state.as_deref())?;
    Ok(Json(listed))
}

/// A path that is not UTF-8 is not an id.
fn id_of(path: Result<Path<String>, PathRejection>) -> String {
    path.map(|Path(id)| id).unwrap_or_default()
}

/// `GET /v1/jobs/{id}`.
pub async fn show(
    State(app): State<App>,
    path: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    let owner = app.keys.owner(&headers);
    Ok(Json(jobs(&app)?.find(owner.as_deref(), &id_of(path))?))
}

/// `GET /v1/jobs/{id}/result`: what the request would have answered.
pub async fn result(
    State(app): State<App>,
    path: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let owner = app.keys.owner(&headers);
    let (content_type, bytes, ignored) = jobs(&app)?.result(owner.as_deref(), &id_of(path)).await?;
    let mut response = bytes.into_response();
    if let Ok(content_type) = HeaderValue::from_str(&content_type) {
        response.headers_mut().insert(CONTENT_TYPE, content_type);
    }
    tell_ignored(&mut response, &ignored);
    Ok(response)
}

/// `DELETE /v1/jobs/{id}`: cancels a job, or removes one that has ended.
pub async fn delete(
    State(app): State<App>,
    path: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    let owner = app.keys.owner(&headers);
    let (of, id, log) = (Arc::clone(jobs(&app)?), id_of(path), Arc::clone(&app.log));
    let deleted = tokio::spawn(async move { of.delete(owner.as_deref(), &id, &log).await }).await;
    Ok(Json(deleted.map_err(|error| broken(&error))??))
}
