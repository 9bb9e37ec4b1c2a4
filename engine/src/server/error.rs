//! What a client gets instead of an answer: a status and OpenAI's error object, always with a message that says what to change.

use axum::Json;
use axum::http::header::{CONNECTION, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::error::Error;

/// A refused or failed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    /// What is wrong and what would be right.
    pub message: String,
    /// The field that is meant, if one is.
    pub param: Option<String>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
        }
    }

    /// The request is wrong in this field.
    pub(super) fn field(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(name.into()),
            ..Self::new(StatusCode::BAD_REQUEST, message)
        }
    }

    /// The request is wrong as a whole.
    pub(super) fn request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// There is no such model or path.
    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    /// The path exists, the method does not.
    pub(super) fn method(message: impl Into<String>) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, message)
    }

    /// The body is too long.
    pub(super) fn too_large(limit: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the body has more than {limit} bytes"),
        )
    }

    /// The body took too long.
    pub(super) fn timeout(message: impl Into<String>) -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, message)
    }

    /// No room now; another try may succeed.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// The engine failed.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// Whether the rest of the request was not read, so that no other can follow.
    fn ends_connection(&self) -> bool {
        matches!(
            self.status,
            StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT
        )
    }

    /// OpenAI's error object.
    pub(super) fn body(&self) -> Value {
        let kind = match self.status {
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let (message, param, code) = (&self.message, &self.param, self.status.as_u16());
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }
}

impl From<Error> for ApiError {
    /// What tokenizer and template refuse is the client's text; everything else is the engine's fault.
    fn from(error: Error) -> Self {
        match error.reason {
            mixquant_crds::FailureReason::DataInvalid => Self::request(error.message),
            _ => Self::internal(error.message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if self.ends_connection() {
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(CONNECTION, close);
        }
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response
                .headers_mut()
                .insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
