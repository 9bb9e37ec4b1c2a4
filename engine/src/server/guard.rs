//! A connection that nobody can hold for free: slow heads, silent connections and readers that never read end by a timer.
//!
//! hyper's own header timer also runs while a kept connection rests between two requests, where a client may rest much
//! longer; so hyper's timer bounds the rest, and this one bounds the head from its first byte on.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use hyper::body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

/// A request's head, from its first byte (of a new connection: from the accept) to its last.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// One write that the client's side does not take.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Whether a connection's request is being answered. Shared by the connection and its responses.
#[derive(Debug, Clone, Default)]
pub(super) struct Activity(Arc<AtomicBool>);

impl Activity {
    /// A request's head was read; until the guard is dropped it is being answered.
    pub(super) fn begin(&self) -> ActivityGuard {
        self.0.store(true, Ordering::Relaxed);
        ActivityGuard(self.0.clone())
    }

    fn busy(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Held while a request is answered.
#[derive(Debug)]
pub(super) struct ActivityGuard(Arc<AtomicBool>);

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// A TCP stream with timers.
pub(super) struct GuardedStream {
    stream: TcpStream,
    activity: Activity,
    head: Option<Pin<Box<Sleep>>>,
    write: Option<Pin<Box<Sleep>>>,
}

impl GuardedStream {
    pub(super) fn new(stream: TcpStream, activity: Activity) -> Self {
        Self {
            stream,
            activity,
            head: Some(Box::pin(sleep(HEAD_TIMEOUT))),
            write: None,
        }
    }

    fn bound_write(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if result.is_ready() {
            self.write = None;
            return result;
        }
        let timer = self
            .write
            .get_or_insert_with(|| Box::pin(sleep(WRITE_TIMEOUT)));
        ready!(timer.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client does not read",
        )))
    }
}

impl AsyncRead for GuardedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        let result = Pin::new(&mut this.stream).poll_read(context, buffer);
        if this.activity.busy() {
            this.head = None;
            return result;
        }
        if result.is_ready() {
            if buffer.filled().len() > before {
                this.head
                    .get_or_insert_with(|| Box::pin(sleep(HEAD_TIMEOUT)));
            }
            return result;
        }
        match &mut this.head {
            None => Poll::Pending,
            Some(timer) => {
                ready!(timer.as_mut().poll(context));
                Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the request's head does not end",
                )))
            }
        }
    }
}

impl AsyncWrite for GuardedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.bound_write(context, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.bound_write(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// A response's body that keeps its connection busy until the last byte.
pub(super) struct GuardedBody {
    pub(super) body: Body,
    pub(super) _guard: ActivityGuard,
}

impl hyper::body::Body for GuardedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
