//! Services under load through many rollouts and rollbacks: what a month of changes does to them, in an hour.
//!
//! `make test` does one round with one service; `make rollouts` 50 with each of two at a time (`MIXQUANT_SOAK_ROUNDS`,
//! `MIXQUANT_SOAK_SERVICES`). Besides the failed requests (none) it watches what only
//! shows over time: endpoints that are ready, objects that are left behind, memory that grows.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use mixquant_e2e::cluster::is_true;
use mixquant_e2e::means;
use mixquant_e2e::namespace::{Context, with_temp_namespace};
use mixquant_e2e::operator;
use mixquant_e2e::service::{NAME, Service, image, revision};
use serde_json::{Value, json};

/// From a patch to its end, promoted or rolled back.
const ROLLOUT: Duration = Duration::from_mins(3);
/// Replicas of the manifest: stable never serves from fewer pods.
const REPLICAS: usize = 2;
/// Memory that the operator may hold at the end.
const MAX_RESIDENT_BYTES: u64 = 64 << 20;
/// Revisions without a role that are kept.
const HISTORY: usize = 1;

fn number(variable: &str) -> u32 {
    std::env::var(variable).map_or(1, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{variable} is no number"))
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn rollouts_and_rollbacks_under_load_lose_no_request_no_endpoint_and_leave_nothing() {
    let (services, rounds) = (
        number("MIXQUANT_SOAK_SERVICES"),
        number("MIXQUANT_SOAK_ROUNDS"),
    );
    let lives = (1..=services).map(|index| soak(format!("soak{index}"), rounds));
    futures::future::join_all(lives).await;
}

/// One service through its rounds.
async fn soak(name: String, rounds: u32) {
    let deadline = ROLLOUT * (2 * rounds + 3);
    with_temp_namespace(&name.clone(), deadline, move |context| async move {
        let service = Service::create(context.clone())?;
        service.patch(&json!({"rollout": {"revisionHistoryLimit": HISTORY}}))?;
        service.kubectl_wait_ready(ROLLOUT).await?;
        let endpoints = Endpoints::watch(context.clone());
        let load = service.load(deadline).await?;
        let images = [image("MIXQUANT_NEXT_ENGINE_IMAGE")?, image("MIXQUANT_ENGINE_IMAGE")?];
        for (round, image) in (1..=rounds).zip(images.iter().cycle()) {
            promote(&service, image).await.with_context(|| format!("round {round}: promotion"))?;
            roll_back(&service).await.with_context(|| format!("round {round}: rollback"))?;
            means::say(&format!("{name}, round {round} of {rounds}: promoted and rolled back; {}", load.so_far().await));
        }
        let (report, fewest) = (load.stop().await, endpoints.stop().await?);
        ensure!(report.failed == 0, "{report}");
        ensure!(fewest >= REPLICAS, "only {fewest} endpoints were ready at some moment");
        let revisions = context.kubectl.get(&["controllerrevisions"])?;
        let revisions = revisions["items"].as_array().map_or(0, Vec::len);
        ensure!(revisions <= HISTORY + 1, "{revisions} revisions are kept, {HISTORY} of them without a role");
        let running = service.deployments()?.into_iter().filter(|deployment| deployment.1 > 0).count();
        ensure!(running == 1, "{running} Deployments have pods");
        let bytes = operator::resident_bytes(&context.cluster)?;
        ensure!(bytes < MAX_RESIDENT_BYTES, "the operator holds {} MiB", bytes >> 20);
        means::say(&format!(
            "{name}: {rounds} promotions and {rounds} rollbacks: never fewer than {fewest} ready endpoints, {revisions} revisions kept, operator {} KiB; {report}",
            bytes >> 10
        ));
        Ok(())
    })
    .await;
}

/// A good change: a new image, through its steps, until the old revision is gone.
async fn promote(service: &Service, image: &str) -> anyhow::Result<()> {
    service.patch(&json!({"engine": {"image": image}}))?;
    service
        .wait(ROLLOUT, "promoted and at rest", |object| {
            object["status"]["stable"]["image"] == image
                && is_true(object, "Ready")
                && object["status"]["rollout"].is_null()
        })
        .await
        .map(drop)
}

/// A bad change: too little CPU. It is rolled back by itself, then the spec is put right again.
async fn roll_back(service: &Service) -> anyhow::Result<()> {
    let before = service.get()?;
    let starved = json!({"requests": {"cpu": "40m"}, "limits": {"cpu": "40m"}});
    service.patch(&json!({"engine": {"resources": starved}}))?;
    let object = service
        .wait(ROLLOUT, "rolled back", |object| {
            is_true(object, "Stalled") && revision(object, "canary").is_empty()
        })
        .await?;
    ensure!(
        revision(&object, "stable") == revision(&before, "stable"),
        "stable moved: {}",
        object["status"]
    );
    let resources = &before["spec"]["engine"]["resources"];
    let limits = json!({"cpu": null, "memory": resources["limits"]["memory"]});
    service.patch(
        &json!({"engine": {"resources": {"requests": resources["requests"], "limits": limits}}}),
    )?;
    service
        .kubectl_wait_ready(Duration::from_mins(1))
        .await
        .map(drop)
}

/// Counts the ready endpoints of the service, several times a second, and keeps the fewest.
struct Endpoints {
    stop: Arc<AtomicBool>,
    fewest: Arc<AtomicUsize>,
    watcher: tokio::task::JoinHandle<anyhow::Result<()>>,
}

impl Endpoints {
    fn watch(context: Context) -> Self {
        let (stop, fewest) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicUsize::new(usize::MAX)),
        );
        let watcher = tokio::spawn({
            let (stop, fewest) = (Arc::clone(&stop), Arc::clone(&fewest));
            async move {
                let mut ticks = tokio::time::interval(Duration::from_millis(250));
                while !stop.load(Ordering::Relaxed) {
                    ticks.tick().await;
                    fewest.fetch_min(ready(&context).await?, Ordering::Relaxed);
                }
                Ok(())
            }
        });
        Self {
            stop,
            fewest,
            watcher,
        }
    }

    async fn stop(self) -> anyhow::Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        self.watcher.await??;
        Ok(self.fewest.load(Ordering::Relaxed))
    }
}

/// Endpoints of the service that are ready now.
async fn ready(context: &Context) -> anyhow::Result<usize> {
    let path = format!(
        "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3D{NAME}",
        context.namespace
    );
    let request = hyper::Request::get(path).body(Vec::new())?;
    let list: Value = context.cluster.client.request(request).await?;
    let slices = list["items"].as_array().cloned().unwrap_or_default();
    let endpoints = slices
        .iter()
        .filter_map(|slice| slice["endpoints"].as_array())
        .flatten();
    Ok(endpoints
        .filter(|endpoint| endpoint["conditions"]["ready"] == true)
        .count())
}
