//! The admin port: liveness, readiness, metrics, and the operator's probes of answers. It has its own thread and runtime, so that a busy API never delays an answer here.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use mixquant_crds::names::PROBE_PATH;

use crate::health::Health;
use crate::metrics::Metrics;

use super::probe::{MAX_BODY, Prober};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// `/livez`, `/readyz`, `/metrics`, [`PROBE_PATH`].
pub(super) fn router(health: &Arc<Health>, metrics: &Arc<Metrics>, prober: &Arc<Prober>) -> Router {
    let prober = prober.clone();
    let (live, ready, metrics) = (health.clone(), health.clone(), metrics.clone());
    Router::new()
        .route(
            "/livez",
            get(async move || probe(live.live(Instant::now()))),
        )
        .route(
            "/readyz",
            get(async move || probe(ready.ready(Instant::now()))),
        )
        .route(
            "/metrics",
            get(async move || ([(CONTENT_TYPE, OPEN_METRICS)], metrics.text())),
        )
        .route(
            PROBE_PATH,
            post(async move |body| prober.answer(body).await)
                .layer(DefaultBodyLimit::max(MAX_BODY)),
        )
}

/// A probe's answer: 200, or 503 with the reason.
pub(super) fn probe(state: Result<(), String>) -> Response {
    match state {
        Ok(()) => "ok\n".into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}
