//! Error responses in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::engine::EngineError;

/// Default of `Retry-After`, in seconds.
const RETRY_SECONDS: u64 = 5;

/// Why a request is refused, or failed.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    pub code: &'static str,
    /// The parameter that caused it.
    pub param: Option<&'static str>,
    pub message: String,
    /// Seconds, for the header `Retry-After`.
    pub retry_after: Option<u64>,
}

impl ApiError {
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            param: None,
            message: message.into(),
            retry_after: None,
        }
    }

    /// A parameter with a wrong value: 400.
    pub fn parameter(param: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            param: Some(param),
            ..Self::new(StatusCode::BAD_REQUEST, code, message)
        }
    }

    /// An invalid request: 400.
    pub fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, message)
    }

    /// The server cannot do it now: 503 with `Retry-After`.
    pub fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            retry_after: Some(RETRY_SECONDS),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message)
        }
    }

    /// The first model is not loaded yet.
    pub fn loading() -> Self {
        Self::unavailable("model_loading", "the model is being loaded")
    }

    /// OpenAI's name of the class of errors.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The body of the response.
    pub fn envelope(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind(),
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        match error {
            EngineError::Busy { retry_after } => Self {
                retry_after: Some(retry_after.max(1)),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message)
            },
            EngineError::Draining => Self::unavailable("server_stopping", message),
            EngineError::UnknownModel(_) => Self {
                param: Some("model"),
                ..Self::new(StatusCode::NOT_FOUND, "model_not_found", message)
            },
            EngineError::NotDiarizing => Self::parameter("response_format", "diarization_not_available", message),
            EngineError::Audio { reason, .. } => Self::parameter("file", reason, message),
            EngineError::Text { reason, .. } => Self::parameter("text", reason, message),
            EngineError::Field { field, .. } => Self::parameter(field, "invalid_value", message),
            EngineError::TooLong { .. } => Self::parameter("file", "audio_too_long", message),
            EngineError::Timeout(_) => Self::new(StatusCode::GATEWAY_TIMEOUT, "decode_timeout", message),
            EngineError::Cancelled => Self::unavailable("cancelled", message),
            EngineError::Model(_) => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "model_not_loaded", message),
            EngineError::NoMemory(_) => Self::unavailable("no_memory_for_model", message),
            EngineError::Setting { .. } | EngineError::Failed(_) => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.envelope())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_openais_envelope() {
        let busy = ApiError::from(EngineError::Busy { retry_after: 7 });
        let response = busy.clone().into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[RETRY_AFTER], "7");
        assert_eq!(busy.envelope()["error"]["type"], "rate_limit_error");
        assert_eq!(busy.envelope()["error"]["param"], Value::Null);

        let unknown = ApiError::from(EngineError::UnknownModel("no model is called `x`: a, b".to_owned()));
        assert_eq!(unknown.status, StatusCode::NOT_FOUND);
        assert_eq!(
            unknown.envelope(),
            json!({"error": {
                "message": "no model is called `x`: a, b",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }})
        );
        let stopping = ApiError::from(EngineError::Draining).into_response();
        assert_eq!(stopping.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(stopping.headers().contains_key(RETRY_AFTER));
    }
}
