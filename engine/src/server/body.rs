//! A request's body: bounded in size, in time, and in how many large ones are held at once.

use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_LENGTH;
use axum::http::{HeaderMap, Request};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::error::ApiError;

/// The longest body.
const MAX_BYTES: usize = 4 << 20;
/// From the end of the head to the end of the body.
const TIMEOUT: Duration = Duration::from_secs(30);
/// A longer body, or one of undeclared length, is one of at most `MAX_LARGE` at a time: 128 MiB in all.
const LARGE_BYTES: usize = 64 << 10;
const MAX_LARGE: usize = 32;

static LARGE: Semaphore = Semaphore::const_new(MAX_LARGE);

/// Reads the body.
///
/// # Errors
/// Too large, too slow, or not well formed.
pub(super) async fn read_body(request: Request<Body>) -> Result<Bytes, ApiError> {
    let declared = declared_length(request.headers());
    if declared.is_some_and(|length| length > MAX_BYTES) {
        return Err(ApiError::too_large(MAX_BYTES));
    }
    let read = async {
        let large = declared.is_none_or(|length| length > LARGE_BYTES);
        let _permit = if large {
            LARGE.acquire().await.ok()
        } else {
            None
        };
        Limited::new(request.into_body(), MAX_BYTES).collect().await
    };
    match timeout(TIMEOUT, read).await {
        Err(_) => Err(ApiError::timeout()),
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::too_large(MAX_BYTES)),
        Ok(Err(_)) => Err(ApiError::request(
            "the body ended early or was not well formed",
        )),
    }
}

fn declared_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
