//! `POST /v1/audio/alignments`: the times of a text that is known, as `flow align` gives them.

use std::time::Instant;

use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use flow_transcription::Format;
use flow_transcription::alignment::{AlignmentSettings, segments_of_text};
use futures::Stream;

use super::app::{App, Phase};
use super::body::BodyError;
use super::error::ApiError;
use super::form::{FILE, Field, FieldType, MODEL, given, none_of, once};
use super::multipart::Multipart;
use super::service::reached;
use super::transcriptions::{multipart, refused};
use super::upload::{Upload, Uploads};
use crate::engine::{AlignmentRequest, EngineError};
use crate::options::shown;

/// Most bytes of a text: some 40 hours of speech.
const MAX_TEXT: usize = 4 << 20;
/// Most bytes of another field.
const MAX_VALUE: usize = 1 << 10;
/// Values of `response_format`.
const FORMATS: &[&str] = &["json", "srt", "vtt", "txt", "tsv", "ctm", "jsonl"];

/// All fields of an alignment.
pub const FIELDS: &[Field] = &[
    FILE,
    Field::new("text", FieldType::String, "its text: each line is a segment"),
    Field::new(
        "subtitles",
        FieldType::String,
        "its text as SRT or WebVTT, in place of `text`: the cues are kept and get new times",
    ),
    MODEL,
    Field::new(
        "response_format",
        FieldType::Choice(FORMATS),
        "the form of the result; `json` if not given",
    ),
    Field::new(
        "delay",
        FieldType::Number,
        "seconds by which the model emits tokens late, which are subtracted from all times; 0.08 if not given",
    ),
];

/// A form that was read.
struct AlignmentForm {
    upload: Upload,
    segments: Vec<String>,
    model: Option<String>,
    format: Format,
    delay: Option<f64>,
}

pub async fn align(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let begin = Instant::now();
    app.check_ready()?;
    let engine = app.engine()?;
    engine.check_room().map_err(|error| refused(&app, error))?;
    let form = tokio::select! {
        form = read(multipart(&app, request)?, &app.uploads) => form?,
        () = reached(app.phase.clone(), Phase::Draining) => return Err(EngineError::Draining.into()),
    };
    let AlignmentForm {
        upload, model, format, ..
    } = form;
    let usual = AlignmentSettings::default();
    let request = AlignmentRequest {
        model,
        audio: upload.path,
        source_name: upload.name,
        text: form.segments,
        settings: AlignmentSettings {
            delay: form.delay.unwrap_or(usual.delay),
            ..usual
        },
    };
    let (found, transcript) = engine.align(request).await.map_err(|error| refused(&app, error))?;
    let written = found.write(&transcript, format);
    let bytes = written
        .map_err(|error| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", error.to_string()))?;
    app.metrics.total(begin.elapsed().as_secs_f64());
    let content_type = match format {
        Format::Json => "application/json",
        Format::Vtt => "text/vtt; charset=utf-8",
        _ => "text/plain; charset=utf-8",
    };
    Ok(([(CONTENT_TYPE, content_type)], bytes).into_response())
}

async fn read<S>(mut form: Multipart<S>, uploads: &Uploads) -> Result<AlignmentForm, ApiError>
where
    S: Stream<Item = Result<Bytes, BodyError>> + Unpin,
{
    let (mut upload, mut text, mut model, mut format, mut delay) = (None, None, None, None, None);
    while let Some(part) = form.next_part().await? {
        match part.name.as_str() {
            "file" => {
                let name = part.file_name.as_deref().unwrap_or_default();
                let stored = uploads.store(&mut form, name).await?;
                once("file", &mut upload, stored)?;
            }
            name @ ("text" | "subtitles") => {
                let (name, is_subtitles) = match name {
                    "text" => ("text", false),
                    _ => ("subtitles", true),
                };
                let wrong = |why: String| ApiError::parameter(name, "invalid_value", why);
                if let Some(given) = given(name, MAX_TEXT, &mut form).await? {
                    once(name, &mut text, segments_of_text(&given, is_subtitles).map_err(wrong)?)?;
                }
            }
            "model" => {
                if let Some(name) = given("model", MAX_VALUE, &mut form).await? {
                    once("model", &mut model, name)?;
                }
            }
            "response_format" => {
                if let Some(name) = given("response_format", MAX_VALUE, &mut form).await? {
                    let known = FORMATS.contains(&&*name).then(|| name.parse().ok()).flatten();
                    let known: Format = known.ok_or_else(|| none_of("response_format", &name, FORMATS))?;
                    once("response_format", &mut format, known)?;
                }
            }
            "delay" => {
                if let Some(text) = given("delay", MAX_VALUE, &mut form).await? {
                    let number = text.trim().parse::<f64>().ok();
                    let number = number.filter(|number| (0.0..=1.0).contains(number));
                    let number = number.ok_or_else(|| {
                        let message = format!("`{}` is not a number from 0 to 1", shown(&text));
                        ApiError::parameter("delay", "invalid_value", message)
                    })?;
                    once("delay", &mut delay, number)?;
                }
            }
            name => {
                let message = format!("an alignment has no field `{}`", shown(name));
                return Err(ApiError::bad_request("unknown_parameter", message));
            }
        }
    }
    let missing = |name: &'static str, what: &str| {
        ApiError::parameter(name, "missing_required_parameter", format!("the form has no {what}"))
    };
    let upload: Upload = upload.ok_or_else(|| missing("file", "`file`, which is the recording"))?;
    if upload.bytes == 0 {
        return Err(ApiError::parameter("file", "empty_file", "the file is empty"));
    }
    Ok(AlignmentForm {
        upload,
        segments: text.ok_or_else(|| missing("text", "`text` or `subtitles`"))?,
        model,
        format: format.unwrap_or(Format::Json),
        delay,
    })
}
