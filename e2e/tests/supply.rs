//! A model that comes from a web server instead of a volume, on a real cluster: the init container downloads it into each pod, also when a
//! connection breaks, and the same model is not calibrated again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use futures::StreamExt as _;
use mixquant_e2e::cluster::is_true;
use mixquant_e2e::means;
use mixquant_e2e::namespace::with_temp_namespace;
use mixquant_e2e::service::{Service, revision};
use serde_json::{Value, json};
use tower_http::services::ServeDir;

/// The scenario as a whole.
const SCENARIO: Duration = Duration::from_mins(10);
/// From `kubectl apply` to Ready, and from a patch to its end.
const STAGE: Duration = Duration::from_mins(4);
/// The node's address, see `e2e/cluster/cluster`.
const NODE: &str = "172.31.255.1";
/// What one answer with weights carries before its connection breaks.
const CUT_BYTES: usize = 1 << 20;

/// How often each shard of the weights was asked for.
#[derive(Default)]
struct Asked([AtomicU64; 2]);

impl Asked {
    fn counts(&self) -> [u64; 2] {
        self.0.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Serves files; the first answer with the second shard breaks off.
    async fn answer(&self, request: Request, next: Next) -> Response {
        let path = request.uri().path();
        let is = |shard: &str| path.ends_with(&format!("model-{shard}-of-00002.safetensors"));
        let shard = ["00001", "00002"].into_iter().position(is);
        let Some(shard) = shard.filter(|_| request.method() == "GET") else {
            return next.run(request).await;
        };
        let earlier = self.0[shard].fetch_add(1, Ordering::Relaxed);
        let response = next.run(request).await;
        if shard == 0 || earlier > 0 {
            return response;
        }
        let (parts, body) = response.into_parts();
        let mut left = CUT_BYTES;
        let cut = body.into_data_stream().map(move |piece| {
            let piece = piece?;
            left = left
                .checked_sub(piece.len())
                .ok_or_else(|| axum::Error::new("cut"))?;
            Ok::<_, axum::Error>(piece)
        });
        Response::from_parts(parts, Body::from_stream(cut))
    }
}

/// Serves the repository's models on the node's address; the port, and what is asked of it.
async fn web_server() -> anyhow::Result<(u16, Arc<Asked>)> {
    let asked = Arc::new(Asked::default());
    let seen = Arc::clone(&asked);
    let files = Router::new()
        .fallback_service(ServeDir::new(means::repository().join("e2e/models")))
        .layer(from_fn(move |request: Request, next: Next| {
            let seen = Arc::clone(&seen);
            async move { seen.answer(request, next).await }
        }));
    let listener = tokio::net::TcpListener::bind((NODE, 0)).await?;
    let port = listener.local_addr()?.port();
    // It ends with the test's runtime.
    tokio::spawn(async move { axum::serve(listener, files).await });
    Ok((port, asked))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_model_moves_from_a_volume_to_a_web_server_under_load_and_is_not_calibrated_again() {
    with_temp_namespace("supply", SCENARIO, |context| async move {
        ensure!(
            context.cluster.local,
            "the web server listens on the local cluster's node"
        );
        let service = Service::create(context.clone())?;
        let before = service.kubectl_wait_ready(STAGE).await?;
        let (stable, digest) = (
            &before["status"]["stable"],
            &before["status"]["stable"]["modelDigest"],
        );
        ensure!(digest.is_string(), "{stable}");
        let (port, asked) = web_server().await?;
        let load = service.load(SCENARIO).await?;
        service.patch(&json!({"model": {"digest": digest, "source": {
            "persistentVolumeClaim": null,
            "objectStore": {"uri": format!("http://{NODE}:{port}/kube-llama-10m")},
        }}}))?;
        let old = revision(&before, "stable").to_owned();
        let object = service
            .wait(STAGE, "promoted with the download", |object| {
                is_true(object, "Ready") && revision(object, "stable") != old
            })
            .await?;
        let report = load.stop().await;
        ensure!(report.failed == 0 && report.exact > 0, "{report}");
        ensure!(
            object["status"]["stable"]["artifactDigest"] == stable["artifactDigest"],
            "calibrated again: {}",
            object["status"]
        );
        let pods =
            context
                .kubectl
                .get(&["pods", "--selector", "app.kubernetes.io/component=engine"])?;
        let pods = pods["items"].as_array().context("no pods")?.clone();
        let downloads = |pod: &Value| pod["spec"]["initContainers"][0]["name"] == "fetch";
        ensure!(
            pods.len() >= 2 && pods.iter().any(downloads),
            "no pod downloads: {pods:?}"
        );
        let [first, second] = asked.counts();
        ensure!(second == first + 1, "the shards were asked for {first} and {second} times: once more for the broken connection is expected");
        means::say(&format!("from a web server by {first} pods, one connection broken: {report}"));
        Ok(())
    })
    .await;
}
