//! A proxy between one operator and the apiserver that fails on purpose: it refuses, delays, drops and cuts what a rule names, and kills the
//! operator at a write: before it is sent, after it is stored, or after the answer has arrived.
//!
//! It also counts what the operator really created and deleted, by the apiserver's own answers. It decides nothing about right and wrong.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, RETRY_AFTER};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use kube::Client;
use serde_json::{Value, json};

type Failure = std::io::Error;
type Answer = Response<UnsyncBoxBody<Bytes, Failure>>;

/// When, of a write, the operator is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Moment {
    /// The apiserver never sees it.
    BeforeSend,
    /// The apiserver has stored it; the operator never hears so.
    AfterCommit,
    /// The operator has heard so, and does nothing more.
    AfterReply,
}

/// What happens to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The operator is killed.
    Kill(Moment),
    /// The proxy answers in the apiserver's place, perhaps with `Retry-After` in seconds.
    Status(u16, Option<u32>),
    /// It is forwarded so much later.
    Delay(Duration),
    /// The connection ends; the apiserver never sees it.
    Drop,
    /// The apiserver has stored it; the connection ends.
    CommitThenDrop,
    /// Of a watch: it opens and then says nothing more.
    Stall,
    /// Of a watch: it ends with `410 Gone`.
    Gone,
}

/// A request as rules see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// Such as `PATCH deployments/chat-0123456789` or `WATCH pods`; no namespace in it.
    pub key: String,
    /// Which of the requests with this key it is, from 0, since [`Proxy::begin`].
    pub occurrence: usize,
    /// It changes something, other than by an Event.
    pub is_write: bool,
}

type Rule = Box<dyn FnMut(&Asked) -> Option<Fault> + Send>;

/// What was really created and deleted, by kind and name.
pub type Counts = BTreeMap<String, usize>;

#[derive(Default)]
struct Shared {
    rule: Option<Rule>,
    kill: Option<Box<dyn FnMut() + Send>>,
    occurrences: BTreeMap<String, usize>,
    writes: Vec<Asked>,
    counts: Counts,
    /// When something was last written, or the operator killed.
    disturbed: Option<std::time::Instant>,
    /// Passes of the operator that have begun since then.
    passes: usize,
}

impl Shared {
    fn disturb(&mut self) {
        self.disturbed = Some(std::time::Instant::now());
        self.passes = 0;
    }
}

/// A running proxy; it ends with its runtime.
#[derive(Clone)]
pub struct Proxy {
    /// `http://…`, for a kubeconfig.
    pub address: String,
    shared: Arc<Mutex<Shared>>,
}

impl Proxy {
    /// Starts one on a free port of the loopback.
    ///
    /// # Errors
    /// No port.
    pub async fn start(upstream: Client) -> anyhow::Result<Self> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let proxy = Self {
            address: format!("http://{}", listener.local_addr()?),
            shared: Arc::default(),
        };
        let shared = Arc::clone(&proxy.shared);
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (upstream, shared) = (upstream.clone(), Arc::clone(&shared));
                let service = service_fn(move |request| {
                    let (upstream, shared) = (upstream.clone(), Arc::clone(&shared));
                    async move { pass(&upstream, &shared, request).await }
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(socket), service);
                tokio::spawn(async move {
                    // Ended on purpose, or by an operator that was killed.
                    drop(connection.await);
                });
            }
        });
        Ok(proxy)
    }

    fn with<T>(&self, change: impl FnOnce(&mut Shared) -> T) -> T {
        change(&mut self.shared.lock().expect("no holder of this lock panics"))
    }

    /// How the operator is killed.
    pub fn on_kill(&self, kill: impl FnMut() + Send + 'static) {
        self.with(|shared| shared.kill = Some(Box::new(kill)));
    }

    /// Decides about every request from now on.
    pub fn when(&self, rule: impl FnMut(&Asked) -> Option<Fault> + Send + 'static) {
        self.with(|shared| shared.rule = Some(Box::new(rule)));
    }

    /// Counts anew.
    pub fn begin(&self) {
        self.with(|shared| {
            shared.occurrences.clear();
            shared.writes.clear();
            shared.counts.clear();
        });
    }

    /// The writes since [`Proxy::begin`], in order.
    pub fn writes(&self) -> Vec<Asked> {
        self.with(|shared| shared.writes.clone())
    }

    /// What was created and deleted since [`Proxy::begin`].
    pub fn counts(&self) -> Counts {
        self.with(|shared| shared.counts.clone())
    }

    /// Whether the operator has looked at everything since its last write and found nothing to do for `quiet`.
    pub fn is_settled(&self, quiet: Duration) -> bool {
        self.with(|shared| {
            shared.passes > 0 && shared.disturbed.is_none_or(|at| at.elapsed() > quiet)
        })
    }
}

fn lock(shared: &Mutex<Shared>) -> std::sync::MutexGuard<'_, Shared> {
    shared.lock().expect("no holder of this lock panics")
}

async fn pass(
    upstream: &Client,
    shared: &Arc<Mutex<Shared>>,
    request: Request<Incoming>,
) -> Result<Answer, Failure> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(Failure::other)?.to_bytes();
    let mut asked = describe(&parts.method, &parts.uri, &body);
    let fault = {
        let mut shared = lock(shared);
        let occurrence = shared.occurrences.entry(asked.key.clone()).or_default();
        asked.occurrence = *occurrence;
        *occurrence += 1;
        if asked.is_write {
            shared.writes.push(asked.clone());
            shared.disturb();
        }
        // Every pass lists the pods.
        shared.passes += usize::from(asked.key == "GET pods");
        shared.rule.as_mut().and_then(|rule| rule(&asked))
    };
    match fault {
        Some(Fault::Status(code, after)) => return Ok(refusal(code, after)),
        Some(Fault::Delay(time)) => tokio::time::sleep(time).await,
        Some(Fault::Drop) => return Err(Failure::other("dropped on purpose")),
        Some(Fault::Kill(Moment::BeforeSend)) => {
            kill(shared);
            return Err(Failure::other("killed on purpose"));
        }
        Some(Fault::Stall) => return Ok(stream(futures::stream::pending().boxed())),
        Some(Fault::Gone) => return Ok(gone()),
        Some(Fault::Kill(_) | Fault::CommitThenDrop) | None => {}
    }
    let answer = forward(upstream, parts, body).await?;
    count(shared, &asked, answer.status());
    match fault {
        Some(Fault::CommitThenDrop) => Err(Failure::other("dropped on purpose")),
        Some(Fault::Kill(Moment::AfterCommit)) => {
            kill(shared);
            Err(Failure::other("killed on purpose"))
        }
        Some(Fault::Kill(_)) => {
            // The answer is on its way first: a few milliseconds later the operator has it and does what comes next.
            let shared = Arc::clone(shared);
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(3)).await;
                kill(&shared);
            });
            Ok(answer)
        }
        _ => Ok(answer),
    }
}

fn kill(shared: &Mutex<Shared>) {
    let kill = lock(shared).kill.take();
    if let Some(mut kill) = kill {
        kill();
        let mut shared = lock(shared);
        shared.kill = Some(kill);
        shared.disturb();
    }
}

fn count(shared: &Mutex<Shared>, asked: &Asked, status: StatusCode) {
    if !asked.is_write {
        return;
    }
    let object = asked.key.split_once(' ').map_or("", |(_, object)| object);
    let event = if status == StatusCode::CREATED {
        format!("create {object}")
    } else if asked.key.starts_with("DELETE ") && status.is_success() {
        format!("delete {object}")
    } else {
        return;
    };
    *lock(shared).counts.entry(event).or_default() += 1;
}

async fn forward(
    upstream: &Client,
    mut parts: hyper::http::request::Parts,
    body: Bytes,
) -> Result<Answer, Failure> {
    for header in [HOST, CONNECTION, AUTHORIZATION] {
        parts.headers.remove(header);
    }
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    parts.uri = path.parse().map_err(Failure::other)?;
    let request = Request::from_parts(parts, kube::client::Body::from(body));
    let answer = upstream.send(request).await.map_err(Failure::other)?;
    Ok(answer.map(|body| body.map_err(Failure::other).boxed_unsync()))
}

/// Names a request: verb, kind and name, without the namespace, so that two lives are alike.
fn describe(method: &Method, uri: &hyper::Uri, body: &[u8]) -> Asked {
    let parts: Vec<&str> = uri
        .path()
        .split('/')
        .filter(|part| !part.is_empty())
        .collect();
    // /api/v1/… and /apis/GROUP/VERSION/…
    let rest = parts
        .get(if parts.first() == Some(&"api") { 2 } else { 3 }..)
        .unwrap_or_default();
    let rest = match rest {
        ["namespaces", _, rest @ ..] if !rest.is_empty() => rest,
        rest => rest,
    };
    let mut object = rest.join("/");
    let watches = uri
        .query()
        .is_some_and(|query| query.contains("watch=true") || query.contains("watch=1"));
    let verb = if watches { "WATCH" } else { method.as_str() };
    if method == Method::POST {
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        if let Some(name) = body.pointer("/metadata/name").and_then(Value::as_str) {
            object = format!("{object}/{name}");
        }
    }
    let changes = [Method::POST, Method::PUT, Method::PATCH, Method::DELETE].contains(method);
    Asked {
        is_write: changes && !object.starts_with("events"),
        key: format!("{verb} {object}"),
        occurrence: 0,
    }
}

fn refusal(code: u16, after: Option<u32>) -> Answer {
    let reason = match code {
        409 => "Conflict",
        429 => "TooManyRequests",
        403 => "Forbidden",
        _ => "InternalError",
    };
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason,
        "message": "refused on purpose", "code": code});
    let body = Full::new(Bytes::from(status.to_string()));
    let mut answer = Response::new(body.map_err(|never| match never {}).boxed_unsync());
    *answer.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = answer.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        hyper::header::HeaderValue::from_static("application/json"),
    );
    if let Some(after) = after {
        headers.insert(RETRY_AFTER, after.into());
    }
    answer
}

fn gone() -> Answer {
    let event = json!({"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "status": "Failure",
        "reason": "Expired", "message": "too old resource version", "code": 410}});
    let line = Bytes::from(format!("{event}\n"));
    stream(futures::stream::iter([Ok(line)]).boxed())
}

fn stream(lines: futures::stream::BoxStream<'static, Result<Bytes, Failure>>) -> Answer {
    let body = StreamBody::new(lines.map_ok(Frame::data));
    let mut answer = Response::new(body.boxed_unsync());
    let json = hyper::header::HeaderValue::from_static("application/json");
    answer.headers_mut().insert(CONTENT_TYPE, json);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_named_without_their_namespace() {
        let named = |method: Method, uri: &str, body: &str| {
            let asked = describe(&method, &uri.parse().expect("a URI"), body.as_bytes());
            (asked.key, asked.is_write)
        };
        let named = |method, uri, body| {
            let (key, write) = named(method, uri, body);
            format!("{key}{}", if write { " (write)" } else { "" })
        };
        for (method, uri, body, expected) in [
            (
                Method::PATCH,
                "/apis/apps/v1/namespaces/a/deployments/chat-1?fieldManager=x",
                "",
                "PATCH deployments/chat-1 (write)",
            ),
            (
                Method::PATCH,
                "/apis/mixquant.io/v1alpha1/namespaces/a/mixquantservices/chat/status",
                "",
                "PATCH mixquantservices/chat/status (write)",
            ),
            (
                Method::POST,
                "/api/v1/namespaces/a/services",
                r#"{"metadata": {"name": "chat"}}"#,
                "POST services/chat (write)",
            ),
            (
                Method::POST,
                "/apis/events.k8s.io/v1/namespaces/a/events",
                r#"{"metadata": {"name": "x"}}"#,
                "POST events/x",
            ),
            (
                Method::GET,
                "/api/v1/namespaces/a/pods?watch=true&x=y",
                "",
                "WATCH pods",
            ),
            (
                Method::GET,
                "/apis/batch/v1/namespaces/a/jobs",
                "",
                "GET jobs",
            ),
            (Method::GET, "/api/v1/namespaces/a", "", "GET namespaces/a"),
        ] {
            assert_eq!(named(method, uri, body), expected, "{uri}");
        }
    }
}
