//! A request's body: bounded in size and in time; and all large ones together are bounded in what they hold while they arrive.
//!
//! Nobody gets room for what has not come yet. Where the room is all taken, a body that stands still gives its place to one that moves (`seats`
//! decides that, this file waits and reads). A body that is refused is read on for a while: a client that is still sending reads no answer.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_LENGTH;
use axum::http::{HeaderMap, Request};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout};

use super::error::ApiError;
use super::seats::{ROOM, Seat};

/// The longest body.
pub(super) const MAX_BYTES: usize = 4 << 20;
/// From the end of the head to the end of the body.
const TIMEOUT: Duration = Duration::from_secs(30);
/// What is read of a body whose answer is known, and for how long.
const MAX_DRAINED: usize = 64 << 20;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Reads the body.
///
/// # Errors
/// Too large, too slow, or not well formed.
pub(super) async fn read_body(request: Request<Body>) -> Result<Bytes, ApiError> {
    let declared = declared_length(request.headers());
    let mut body = request.into_body();
    let read = async {
        if declared.is_some_and(|length| length > MAX_BYTES) {
            return Err(ApiError::too_large(MAX_BYTES));
        }
        collect(&mut body).await
    };
    let read = timeout(TIMEOUT, read).await;
    let read = read.unwrap_or_else(|_| Err(ApiError::timeout("the body did not arrive in time")));
    if read.is_err() {
        tokio::spawn(timeout(DRAIN_TIMEOUT, drain(body)));
    }
    read
}

async fn collect(body: &mut Body) -> Result<Bytes, ApiError> {
    let mut seat = Seat::new(&ROOM);
    let mut bytes = Vec::new();
    loop {
        let frame = tokio::select! {
            biased;
            () = seat.lost() => return Err(lost()),
            frame = body.frame() => frame,
        };
        match frame {
            None => return Ok(bytes.into()),
            Some(Err(_)) => {
                return Err(ApiError::request(
                    "the body ended early or was not well formed",
                ));
            }
            Some(Ok(frame)) => {
                let Ok(data) = frame.into_data() else {
                    continue;
                };
                let length = bytes.len() + data.len();
                if length > MAX_BYTES {
                    return Err(ApiError::too_large(MAX_BYTES));
                }
                while let Err(later) = seat.grow(length, Instant::now()) {
                    tokio::select! {
                        biased;
                        () = seat.lost() => return Err(lost()),
                        () = later.wait() => {}
                    }
                }
                bytes.extend_from_slice(&data);
            }
        }
    }
}

fn lost() -> ApiError {
    ApiError::timeout("the body stood still while others needed its place: send it again")
}

async fn drain(mut body: Body) {
    let mut drained = 0;
    while let Some(Ok(frame)) = body.frame().await {
        drained += frame.data_ref().map_or(0, Bytes::len);
        if drained > MAX_DRAINED {
            return;
        }
    }
}

fn declared_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
