//! Sockets to requests: one accept loop for each port, with bounds on everything that a client controls.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::CONNECTION;
use axum::http::{HeaderName, HeaderValue};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tower::ServiceExt as _;

use crate::error::{Error, Result};
use crate::health::Health;

use super::guard::{Activity, GuardedBody, GuardedStream};

/// A connection that rests between two requests.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);
/// A request's head.
const MAX_HEAD_BYTES: usize = 64 << 10;
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Takes the port now, so that an occupied one is an error before anything is loaded.
///
/// # Errors
/// The address and the flag that chose it.
pub(super) fn bind(address: SocketAddr, flag: &str) -> Result<(StdListener, SocketAddr)> {
    let bound = || -> io::Result<(StdListener, SocketAddr)> {
        let listener = StdListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    bound().map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => {
            Error::internal(format!("cannot listen on {address}: the port is in use; end the process that holds it or choose another with {flag}"))
        }
        _ => Error::internal(format!("cannot listen on {address}: {error}; choose another address with {flag}")),
    })
}

/// One port's requests.
pub(super) struct Port {
    pub(super) router: Router,
    pub(super) health: Arc<Health>,
    /// Open connections at most.
    pub(super) max_connections: usize,
}

impl Port {
    /// Answers until `stop` resolves, then lets requests in progress end within `grace`. Whether all of them did.
    pub(super) async fn serve(
        self,
        listener: StdListener,
        stop: impl Future<Output = ()>,
        grace: Duration,
    ) -> io::Result<bool> {
        let listener = TcpListener::from_std(listener)?;
        let permits = Arc::new(Semaphore::new(self.max_connections));
        let graceful = GracefulShutdown::new();
        let mut stop = std::pin::pin!(stop);
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut stop => break,
                accepted = listener.accept() => accepted,
            };
            match (accepted, permits.clone().try_acquire_owned()) {
                (Ok((stream, _)), Ok(permit)) => self.spawn(stream, permit, &graceful),
                (Ok((stream, _)), Err(_)) => refuse(&stream),
                (Err(error), _) => {
                    // Out of file descriptors, most likely: they come back when connections end.
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(Duration::from_millis(50)).await;
                }
            }
        }
        drop(listener);
        Ok(timeout(grace, graceful.shutdown()).await.is_ok())
    }

    fn spawn(&self, stream: TcpStream, permit: OwnedSemaphorePermit, graceful: &GracefulShutdown) {
        // Tokens are small and each is wanted now. A socket that refuses the option still works.
        let _ = stream.set_nodelay(true);
        let activity = Activity::default();
        let io = TokioIo::new(GuardedStream::new(stream, activity.clone()));
        let (router, health) = (self.router.clone(), self.health.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            let guard = activity.begin();
            let (router, health) = (router.clone(), health.clone());
            async move {
                let id = request
                    .headers()
                    .get(REQUEST_ID)
                    .filter(|id| id.len() <= 128)
                    .cloned();
                let Ok(mut response) = router.oneshot(request.map(Body::new)).await;
                if let Some(id) = id {
                    response.headers_mut().insert(REQUEST_ID, id);
                }
                if health.draining() {
                    response
                        .headers_mut()
                        .insert(CONNECTION, HeaderValue::from_static("close"));
                }
                let response: Response<GuardedBody> = response.map(|body| GuardedBody {
                    body,
                    _guard: guard,
                });
                Ok::<_, Infallible>(response)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_TIMEOUT)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(io, service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection ended early");
            }
            drop(permit);
        });
    }
}

/// One connection too many: says so without waiting.
fn refuse(stream: &TcpStream) {
    let answer = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    // A client that does not take these bytes gets a closed connection instead.
    let _ = stream.try_write(answer);
}
