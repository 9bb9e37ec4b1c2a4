//! The admin port: `/metrics`, `/livez` and `/readyz`, and the health that the last two report.
//!
//! Alive means that the loops of this process turn; an API that is down does not kill it. Ready means that it can do its work: it sees the
//! API, and as the leader every watch has its first list and none has failed for long.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::clock;
use crate::metrics::Metrics;

/// A loop that has not turned for so long is stuck: the kubelet restarts the pod.
const STUCK: Duration = Duration::from_secs(90);
/// A watch may fail for so long before the pod is called unready.
const UNREADY: Duration = Duration::from_secs(30);
/// Connections at a time; Prometheus and the kubelet need two.
const MAX_CONNECTIONS: usize = 32;

#[derive(Default)]
struct State {
    leading: bool,
    unelected: bool,
    election: Option<Instant>,
    controller: Option<Instant>,
    watches: BTreeMap<&'static str, Watch>,
}

#[derive(Default)]
struct Watch {
    listed: bool,
    failing_since: Option<Instant>,
    error: String,
}

/// What the loops report about themselves.
pub struct Health {
    state: Mutex<State>,
    metrics: Arc<Metrics>,
}

impl Health {
    /// Nothing is known yet: alive, not ready.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            state: Mutex::default(),
            metrics,
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().expect("no holder of this lock panics"));
    }

    /// Whether this process leads.
    pub fn leading(&self, leading: bool) {
        self.metrics.leading(leading);
        self.change(|state| state.leading = leading);
    }

    /// This process leads without an election.
    pub fn leading_unelected(&self) {
        self.leading(true);
        self.change(|state| state.unelected = true);
    }

    /// The election saw or wrote the Lease.
    pub fn election_ticked(&self) {
        self.change(|state| state.election = Some(clock::monotonic()));
    }

    /// The controller's queue was polled.
    pub fn controller_ticked(&self) {
        self.change(|state| state.controller = Some(clock::monotonic()));
    }

    /// A watch exists, and has not listed anything yet.
    pub fn watch_started(&self, name: &'static str) {
        self.change(|state| drop(state.watches.insert(name, Watch::default())));
    }

    /// A watch has its list.
    pub fn watch_listed(&self, name: &'static str) {
        self.change(|state| {
            let watch = state.watches.entry(name).or_default();
            *watch = Watch {
                listed: true,
                ..Watch::default()
            };
        });
    }

    /// A watch is no more: what it watched is no kind of this cluster.
    pub fn watch_ended(&self, name: &'static str) {
        self.change(|state| drop(state.watches.remove(name)));
    }

    /// A watch got an event: whatever was wrong is over.
    pub fn watch_progressed(&self, name: &'static str) {
        self.change(|state| state.watches.entry(name).or_default().failing_since = None);
    }

    /// A watch failed.
    pub fn watch_failed(&self, name: &'static str, error: String) {
        self.change(|state| {
            let watch = state.watches.entry(name).or_default();
            watch.failing_since.get_or_insert_with(clock::monotonic);
            watch.error = error;
        });
    }

    /// What keeps this process from being alive; `None` when nothing does.
    pub fn stuck(&self, now: Instant) -> Option<String> {
        let state = self.state.lock().expect("no holder of this lock panics");
        let at = state.controller.filter(|_| state.leading)?;
        let idle = now.saturating_duration_since(at);
        (idle > STUCK).then(|| format!("the controller has not turned for {} s", idle.as_secs()))
    }

    /// What keeps this process from being ready; empty when nothing does.
    pub fn unready(&self, now: Instant) -> Vec<String> {
        let state = self.state.lock().expect("no holder of this lock panics");
        let mut reasons = Vec::new();
        let seen = state.election.map(|at| now.saturating_duration_since(at));
        if !state.unelected && seen.is_none_or(|seen| seen > UNREADY) {
            reasons.push("the lease cannot be read or written".to_owned());
        }
        for (name, watch) in &state.watches {
            let failing = watch
                .failing_since
                .map(|since| now.saturating_duration_since(since));
            if !watch.listed {
                reasons.push(format!("{name}: not listed yet {}", watch.error));
            } else if failing.is_some_and(|failing| failing > UNREADY) {
                reasons.push(format!("{name}: {}", watch.error));
            }
        }
        reasons
    }
}

/// Serves until `stop`, then lets requests that run end (at most 2 s).
pub async fn serve(
    listener: TcpListener,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    stop: CancellationToken,
) {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(5))
        .max_buf_size(16 * 1024);
    loop {
        let permit = tokio::select! {
            () = stop.cancelled() => break,
            permit = Arc::clone(&connections).acquire_owned() => permit.expect("never closed"),
        };
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, for one: wait for some to come back.
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (metrics, health) = (Arc::clone(&metrics), Arc::clone(&health));
        let service = hyper::service::service_fn(move |request| {
            let response = answer(&request, &metrics, &health);
            async move { Ok::<_, Infallible>(response) }
        });
        let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                debug!(%error, "a connection to the admin port ended badly");
            }
            drop(permit);
        });
    }
    let _ = tokio::time::timeout(Duration::from_secs(2), graceful.shutdown()).await;
}

fn answer(
    request: &Request<Incoming>,
    metrics: &Metrics,
    health: &Health,
) -> Response<Full<Bytes>> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return text(
            StatusCode::METHOD_NOT_ALLOWED,
            "only GET is answered\n".into(),
        );
    }
    let now = clock::monotonic();
    match request.uri().path() {
        "/livez" => match health.stuck(now) {
            None => text(StatusCode::OK, "ok\n".into()),
            Some(reason) => text(StatusCode::INTERNAL_SERVER_ERROR, reason + "\n"),
        },
        "/readyz" => {
            let reasons = health.unready(now);
            if reasons.is_empty() {
                text(StatusCode::OK, "ok\n".into())
            } else {
                text(StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n")
            }
        }
        "/metrics" => {
            let mut response = text(StatusCode::OK, metrics.encode());
            response.headers_mut().insert(
                header::CONTENT_TYPE,
                header::HeaderValue::from_static(
                    "application/openmetrics-text; version=1.0.0; charset=utf-8",
                ),
            );
            response
        }
        _ => text(StatusCode::NOT_FOUND, "/metrics, /livez, /readyz\n".into()),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn health() -> Health {
        Health::new(Arc::default())
    }

    #[test]
    fn nothing_known_is_alive_and_not_ready() {
        let now = clock::monotonic();
        assert_eq!(health().stuck(now), None);
        assert_eq!(health().unready(now).len(), 1);
    }

    #[test]
    fn a_failing_watch_makes_unready_after_a_while_and_never_dead() {
        let health = health();
        health.leading(true);
        health.election_ticked();
        health.controller_ticked();
        health.watch_started("pods");
        let now = clock::monotonic();
        assert!(health.unready(now)[0].contains("not listed"));
        health.watch_listed("pods");
        assert!(health.unready(now).is_empty());
        health.watch_failed("pods", "connection refused".into());
        assert!(health.unready(now).is_empty());
        health.election_ticked();
        let later = clock::monotonic() + UNREADY + Duration::from_secs(1);
        assert!(
            health
                .unready(later)
                .iter()
                .any(|reason| reason.contains("pods: connection refused"))
        );
        assert_eq!(health.stuck(later), None);
        health.watch_progressed("pods");
        assert!(!health.unready(later).iter().any(|r| r.contains("pods")));
    }

    #[test]
    fn a_leader_whose_loop_stands_still_is_dead_and_a_candidate_is_not() {
        let health = health();
        health.controller_ticked();
        let later = clock::monotonic() + STUCK + Duration::from_secs(2);
        assert_eq!(health.stuck(later), None);
        health.leading(true);
        assert!(health.stuck(later).unwrap().contains("has not turned"));
    }
}
