//! Requests for transcripts and diarizations.

use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use futures::Stream;
use tempfile::TempPath;
use tokio::time::timeout;

use super::app::{App, Phase};
use super::body::{BodyError, limited};
use super::channels::{self, SubmitError, Submitted};
use super::error::ApiError;
use super::events::events;
use super::form::{self, Asked, ResponseFormat, TranscriptionForm};
use super::multipart::{Multipart, boundary};
use super::responses;
use super::service::reached;
use super::upload::Uploads;
use crate::engine::{EngineError, Finished, JobEvent, Reservation};

/// The response header that lists ignored fields.
pub const IGNORED: HeaderName = HeaderName::from_static("x-flow-ignored");

/// How long the status line of a stream waits for the first event, so that an early error gets its own status code.
const FIRST_EVENT: Duration = Duration::from_secs(5);

/// A request that the engine accepted.
struct Taken {
    submitted: Submitted,
    asked: Asked,
    /// The reservation of the upload.
    reservation: Reservation,
}

/// `POST /v1/audio/transcriptions`.
pub async fn transcribe(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let begin = Instant::now();
    let form = read_request(&app, request, false).await?;
    let taken = submit(&app, form).await?;
    let mut response = if taken.asked.stream {
        let mut job = taken.submitted.into_single()?;
        let first = timeout(FIRST_EVENT, job.next()).await.ok().flatten();
        if let Some(JobEvent::Failed(error)) = first {
            return Err(error.into());
        }
        events(app, job, first, &taken.asked, begin, taken.reservation)
    } else {
        let finished = finish(&app, taken.submitted, begin).await?;
        responses::transcript(&finished, &taken.asked)?
    };
    tell_ignored(&mut response, &taken.asked.ignored);
    Ok(response)
}

/// `POST /v1/audio/diarizations`: turns of speakers, from the transcribed words.
pub async fn diarize(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let begin = Instant::now();
    let mut form = read_request(&app, request, true).await?;
    if form.asked.stream {
        let message = "a diarization cannot be streamed";
        return Err(ApiError::parameter("stream", "unsupported_value", message));
    }
    let format = form.asked.format;
    if !matches!(
        format,
        ResponseFormat::Json | ResponseFormat::VerboseJson | ResponseFormat::DiarizedJson
    ) {
        let message = format!("a diarization is JSON, not `{}`", format.name());
        return Err(ApiError::parameter("response_format", "unsupported_value", message));
    }
    form.asked.diarize = true;
    let taken = submit(&app, form).await?;
    let finished = finish(&app, taken.submitted, begin).await?;
    let mut response = Json(responses::diarization(&finished)).into_response();
    tell_ignored(&mut response, &taken.asked.ignored);
    Ok(response)
}

/// `POST /v1/audio/translations`: not supported.
pub async fn translate() -> ApiError {
    let message = "the models of this server transcribe, they do not translate: use /v1/audio/transcriptions";
    ApiError::bad_request("translation_not_supported", message)
}

/// Reads the form of a request that is answered with the transcript.
async fn read_request(app: &App, request: Request, is_diarization: bool) -> Result<TranscriptionForm, ApiError> {
    // Checked before the upload is read.
    app.check_ready()?;
    app.engine()?.check_room().map_err(|error| refused(app, error))?;
    let form = read_form(app, request, &app.uploads, is_diarization).await?;
    for (field, is_given) in [("webhook", form.webhook.is_some()), ("url", form.url.is_some())] {
        if is_given {
            let message = format!("`{field}` is a field of jobs: send the form to /v1/jobs");
            return Err(ApiError::parameter(field, "unsupported_value", message));
        }
    }
    Ok(form)
}

/// Reads a form, whose file goes to the folder of `uploads`.
///
/// # Errors
/// If the service is not ready or is stopped, the body is no form, or a field is wrong.
pub async fn read_form(
    app: &App,
    request: Request,
    uploads: &Uploads,
    is_diarization: bool,
) -> Result<TranscriptionForm, ApiError> {
    app.check_ready()?;
    let form = multipart(app, request)?;
    let mut form = tokio::select! {
        form = form::read(form, uploads, is_diarization) => form?,
        // Otherwise it would be refused after the whole upload.
        () = reached(app.phase.clone(), Phase::Draining) => return Err(EngineError::Draining.into()),
    };
    app.engine()?.text_style(&form.asked.decoding)?;
    form.asked.known_speakers = known_speakers(app, uploads, std::mem::take(&mut form.references)).await?;
    Ok(form)
}

/// The form in the body of a request.
///
/// # Errors
/// If the body is no form, or compressed.
pub fn multipart(
    app: &App,
    request: Request,
) -> Result<Multipart<impl Stream<Item = Result<Bytes, BodyError>> + Unpin + use<>>, ApiError> {
    let content_type = request
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    let Some(boundary) = content_type.and_then(boundary) else {
        let message = "the body has to be a form: multipart/form-data with a boundary";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "no_form", message));
    };
    let encoding = request.headers().get(CONTENT_ENCODING);
    if let Some(encoding) = encoding.filter(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity")) {
        let encoding = String::from_utf8_lossy(encoding.as_bytes());
        let message = format!("a body of the encoding `{encoding}` is not taken: send it as it is");
        return Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported_encoding",
            message,
        ));
    }
    let body = limited(request.into_body(), app.settings.body_limits());
    Ok(Multipart::new(body, &boundary))
}

/// The embeddings of the voices of known speakers.
async fn known_speakers(
    app: &App,
    uploads: &Uploads,
    references: Vec<(String, Vec<u8>)>,
) -> Result<Vec<(String, Vec<f32>)>, ApiError> {
    if references.is_empty() {
        return Ok(Vec::new());
    }
    let folder = uploads.folder.clone();
    let computed = app.engine()?.voices(references, move || folder.file()).await;
    computed.map_err(|error| {
        let is_audio = matches!(error, EngineError::Audio { .. });
        let error = ApiError::from(error);
        ApiError {
            param: if is_audio {
                Some("known_speaker_references[]")
            } else {
                error.param
            },
            ..error
        }
    })
}

async fn submit(app: &App, form: TranscriptionForm) -> Result<Taken, ApiError> {
    let TranscriptionForm { upload, asked, .. } = form;
    Ok(Taken {
        submitted: submit_counted(app, &asked, upload.path, upload.name).await?,
        asked,
        reservation: upload.reservation,
    })
}

/// Submits a recording. One that the engine refuses is counted.
pub async fn submit_counted(app: &App, asked: &Asked, audio: TempPath, name: String) -> Result<Submitted, ApiError> {
    let submitted = channels::submit(app.engine()?, asked, audio, name, None).await;
    submitted.map_err(|error| match error {
        SubmitError::Engine(error) => refused(app, error),
        SubmitError::Request(error) => error,
    })
}

/// Counts a request that the engine refuses.
pub fn refused(app: &App, error: EngineError) -> ApiError {
    app.metrics.refused(&error);
    error.into()
}

async fn finish(app: &App, submitted: Submitted, begin: Instant) -> Result<Finished, ApiError> {
    let finished = submitted.finish().await?;
    app.metrics.total(begin.elapsed().as_secs_f64());
    Ok(finished)
}

/// Lists ignored fields in a header.
pub fn tell_ignored(response: &mut Response, ignored: &[String]) {
    if ignored.is_empty() {
        return;
    }
    // Names have only characters that are valid in a header.
    if let Ok(value) = HeaderValue::from_str(&ignored.join(", ")) {
        response.headers_mut().insert(IGNORED, value);
    }
}
