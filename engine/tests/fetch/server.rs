//! Servers on loopback that hold models: a real S3 (`s3s` over `s3s-fs`, which checks signatures) and a plain web server, each behind a
//! layer that can refuse, cut, hold and change what passes.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::{Body, Bytes};
use axum::http::header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, ETAG, LOCATION, RANGE};
use axum::http::{HeaderMap, Method, Request, Response, StatusCode};
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use mixquant_crds::Digest;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;

pub(crate) const KEY: &str = "AKIATESTS";
pub(crate) const SECRET: &str = "not-a-secret";
pub(crate) const BUCKET: &str = "models";

/// What happens to an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It passes.
    None,
    /// Another status in its place.
    Status(u16),
    /// The connection ends after so many bytes of the body.
    Cut(u64),
    /// Nothing more comes after so many bytes of the body.
    Hold(u64),
}

type Rule = Box<dyn FnMut(&Seen) -> Fault + Send>;
type Inner = Arc<dyn Fn(Request<Incoming>) -> BoxFuture<'static, Response<Body>> + Send + Sync>;

/// A request for a file's bytes.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    /// Counted from 0, over all files.
    pub(crate) number: usize,
    pub(crate) path: String,
    pub(crate) authorization: Option<String>,
}

#[derive(Default)]
struct State {
    rule: Mutex<Option<Rule>>,
    reads: AtomicUsize,
    requests: AtomicUsize,
    bytes: AtomicU64,
}

/// A server that lives as long as this value.
pub(crate) struct Server {
    pub(crate) address: String,
    pub(crate) root: tempfile::TempDir,
    state: Arc<State>,
    _runtime: tokio::runtime::Runtime,
}

impl Server {
    /// An S3 server with an empty bucket.
    pub(crate) fn s3() -> Self {
        Self::start(|root| {
            std::fs::create_dir(root.join(BUCKET)).unwrap();
            let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root).unwrap());
            builder.set_auth(SimpleAuth::from_single(KEY, SECRET));
            let service = builder.build();
            Arc::new(move |request| {
                let answer = hyper::service::Service::call(&service, request);
                async move {
                    match answer.await {
                        Ok(answer) => answer.map(Body::new),
                        Err(error) => panic!("the S3 server itself fails: {error:?}"),
                    }
                }
                .boxed()
            })
        })
    }

    /// A web server that knows HEAD, GET and ranges. `/moved/HOST/…` redirects to `/…` there.
    pub(crate) fn web() -> Self {
        Self::start(|root| {
            let root = root.to_owned();
            Arc::new(move |request| {
                let answer = web_answer(
                    &root,
                    request.method(),
                    request.uri().path(),
                    request.headers(),
                );
                async move { answer }.boxed()
            })
        })
    }

    fn start(inner: impl FnOnce(&Path) -> Inner) -> Self {
        let root = tempfile::tempdir().unwrap();
        let inner = inner(root.path());
        let state = Arc::new(State::default());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime
            .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
            .unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        runtime.spawn(serve(listener, inner, Arc::clone(&state)));
        Self {
            address,
            root,
            state,
            _runtime: runtime,
        }
    }

    /// Its host and port.
    pub(crate) fn host(&self) -> &str {
        self.address.trim_start_matches("http://")
    }

    /// Decides about every read of a file's bytes from now on.
    pub(crate) fn when(&self, rule: impl FnMut(&Seen) -> Fault + Send + 'static) {
        *self.state.rule.lock().unwrap() = Some(Box::new(rule));
    }

    /// Reads of files' bytes so far.
    pub(crate) fn reads(&self) -> usize {
        self.state.reads.load(Ordering::SeqCst)
    }

    /// Requests of any kind so far.
    pub(crate) fn requests(&self) -> usize {
        self.state.requests.load(Ordering::SeqCst)
    }

    /// Bytes of files that were sent so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.state.bytes.load(Ordering::SeqCst)
    }

    /// Copies a model's folder to `below` on the server, and returns the folder.
    pub(crate) fn put(&self, model: &Path, below: &str) -> PathBuf {
        let folder = self.root.path().join(below);
        std::fs::create_dir_all(&folder).unwrap();
        for entry in std::fs::read_dir(model).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
        }
        folder
    }
}

async fn serve(listener: tokio::net::TcpListener, inner: Inner, state: Arc<State>) {
    loop {
        let (socket, _) = listener.accept().await.unwrap();
        let (inner, state) = (Arc::clone(&inner), Arc::clone(&state));
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let (inner, state) = (Arc::clone(&inner), Arc::clone(&state));
                async move { Ok::<_, Infallible>(answer(&state, request, &inner).await) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(socket), service);
            // Clients that hang up, and answers that are cut on purpose.
            let _ended = connection.await;
        });
    }
}

async fn answer(state: &Arc<State>, request: Request<Incoming>, inner: &Inner) -> Response<Body> {
    state.requests.fetch_add(1, Ordering::SeqCst);
    let lists = request
        .uri()
        .query()
        .is_some_and(|query| query.contains("list-type"));
    if request.method() != Method::GET || lists {
        return inner(request).await;
    }
    let seen = Seen {
        number: state.reads.fetch_add(1, Ordering::SeqCst),
        path: request.uri().path().to_owned(),
        authorization: request
            .headers()
            .get("authorization")
            .map(|value| value.to_str().unwrap().to_owned()),
    };
    let fault = state
        .rule
        .lock()
        .unwrap()
        .as_mut()
        .map_or(Fault::None, |rule| rule(&seen));
    if let Fault::Status(status) = fault {
        return Response::builder()
            .status(status)
            .body(Body::empty())
            .unwrap();
    }
    let answer = inner(request).await;
    let (until, ends) = match fault {
        Fault::Cut(bytes) => (bytes, true),
        Fault::Hold(bytes) => (bytes, false),
        Fault::None | Fault::Status(_) => (u64::MAX, true),
    };
    let state = Arc::clone(state);
    let mut left = until;
    let (parts, body) = answer.into_parts();
    let limited = body.into_data_stream().map(move |bytes| {
        let bytes: Bytes = bytes.map_err(std::io::Error::other)?;
        let take = left.min(bytes.len() as u64);
        left -= take;
        state.bytes.fetch_add(take, Ordering::SeqCst);
        if take < bytes.len() as u64 {
            return Err(std::io::Error::other("cut on purpose"));
        }
        Ok(bytes)
    });
    let body = if ends {
        Body::from_stream(limited)
    } else {
        let held = limited.take_while(|bytes| std::future::ready(bytes.is_ok()));
        Body::from_stream(held.chain(futures::stream::pending()))
    };
    Response::from_parts(parts, body)
}

fn web_answer(root: &Path, method: &Method, path: &str, headers: &HeaderMap) -> Response<Body> {
    let plain = |status: StatusCode| {
        Response::builder()
            .status(status)
            .body(Body::empty())
            .unwrap()
    };
    if let Some((to, rest)) = path
        .strip_prefix("/moved/")
        .and_then(|path| path.split_once('/'))
    {
        return Response::builder()
            .status(StatusCode::FOUND)
            .header(LOCATION, format!("http://{to}/{rest}"))
            .body(Body::empty())
            .unwrap();
    }
    let Ok(content) = std::fs::read(root.join(path.trim_start_matches('/'))) else {
        return plain(StatusCode::NOT_FOUND);
    };
    let size = content.len();
    let asked = headers.get(RANGE).map(|range| {
        let range = range.to_str().unwrap().strip_prefix("bytes=").unwrap();
        let (first, last) = range.split_once('-').unwrap();
        (
            first.parse::<usize>().unwrap(),
            last.parse::<usize>().unwrap().min(size - 1),
        )
    });
    let (first, last) = asked.unwrap_or((0, size.saturating_sub(1)));
    let body = &content[first..(last + 1).min(size)];
    let answer = Response::builder()
        .header(ETAG, format!("\"{}\"", Digest::of_bytes(&content).short()))
        .header(ACCEPT_RANGES, "bytes")
        .header(CONTENT_LENGTH, body.len());
    let answer = match asked {
        Some(_) => answer
            .status(StatusCode::PARTIAL_CONTENT)
            .header(CONTENT_RANGE, format!("bytes {first}-{last}/{size}")),
        None => answer,
    };
    let body = if method == Method::HEAD {
        Body::empty()
    } else {
        Body::from(body.to_vec())
    };
    answer.body(body).unwrap()
}
