//! Many services under one operator, on an apiserver alone: all settle, it rests and stays small, and one more service gets its turn while
//! others are edited all the time. `make many` has 1,000 services and is the benchmark of the times that are printed; `make test` a few.
#![expect(
    clippy::unwrap_used,
    reason = "the helpers of these tests are tests too"
)]

use std::time::{Duration, Instant};

use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use mixquant_e2e::apiserver;
use mixquant_e2e::means;
use mixquant_e2e::program::Operator;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

const NAMESPACE: &str = "many";
/// From the operator's start until every service has its Job and its status.
const SETTLED: Duration = Duration::from_mins(5);
/// Memory that the operator may hold.
const MAX_RESIDENT_BYTES: u64 = 128 << 20;
/// How long nothing may be written once all are settled.
const REST: Duration = Duration::from_secs(10);
/// Edits a second, for so long.
const EDITS: u32 = 100;
const EDITS_IN_FLIGHT: usize = 16;
const STORM: Duration = Duration::from_secs(20);
/// In the midst of them a new service gets its turn: how soon is a matter of the machine, and printed.
const HANDLED: Duration = Duration::from_mins(2);

struct World {
    services: Api<DynamicObject>,
    operator: Operator,
}

impl World {
    /// The services whose calibration Job runs, by the status that the operator wrote for this generation.
    async fn calibrating(&self) -> usize {
        let list = self.services.list(&ListParams::default()).await.unwrap();
        list.iter()
            .filter(|service| is_calibrating(service))
            .count()
    }

    async fn create(&self, name: &str, example: &Value) {
        let mut service = example.clone();
        service["metadata"]["name"] = json!(name);
        let service = serde_json::from_value(service).unwrap();
        self.services
            .create(&PostParams::default(), &service)
            .await
            .unwrap();
    }
}

fn is_calibrating(service: &DynamicObject) -> bool {
    let status = &service.data["status"];
    status["phase"] == "Calibrating"
        && status["observedGeneration"].as_i64() == service.metadata.generation
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_services_settle_rest_and_do_not_keep_a_new_one_waiting() {
    if means::program("curl").is_none() {
        return means::skip("curl is missing");
    }
    let Some(server) = apiserver::with_resource() else {
        return;
    };
    let count = std::env::var("MIXQUANT_SERVICES").map_or(40, |text| text.parse().unwrap());
    let kubectl = server.kubectl.in_namespace(NAMESPACE);
    let client = client(&kubectl).await;
    apiserver::furnish(&client, NAMESPACE).await.unwrap();
    let example =
        std::fs::read_to_string(means::repository().join("crds/examples/chat.yaml")).unwrap();
    let example: Value = serde_norway::from_str(&example).unwrap();
    let Some(operator) = Operator::start(&kubectl, &["--watch-namespace", NAMESPACE]) else {
        return;
    };
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(
        "mixquant.io",
        "v1alpha1",
        "MixQuantService",
    ));
    let services = Api::namespaced_with(client, NAMESPACE, &kind);
    let world = World { services, operator };

    let start = Instant::now();
    for index in 0..count {
        world.create(&format!("chat-{index}"), &example).await;
    }
    while world.calibrating().await < count {
        assert!(
            start.elapsed() < SETTLED,
            "{} of {count} are settled after {SETTLED:?}",
            world.calibrating().await
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let settled = start.elapsed();
    rests(&world).await;
    let (waited, rate) = storm(&world, count, &example).await;
    let [now, most] = world.operator.resident_bytes().unwrap();
    means::say(&format!(
        "{count} services: settled in {settled:.1?} (their making included), {} MiB held, {} MiB at most; one more during {rate:.0} edits a second: {waited:.1?}",
        now >> 20,
        most >> 20
    ));
    assert!(
        most < MAX_RESIDENT_BYTES,
        "the operator held {} MiB",
        most >> 20
    );
}

async fn client(kubectl: &mixquant_e2e::kubectl::Kubectl) -> kube::Client {
    let file = kube::config::Kubeconfig::read_from(kubectl.kubeconfig().unwrap()).unwrap();
    let config =
        kube::Config::from_custom_kubeconfig(file, &kube::config::KubeConfigOptions::default())
            .await
            .unwrap();
    kube::Client::try_from(config).unwrap()
}

/// Once all that is under way has ended, nothing more is written.
async fn rests(world: &World) {
    let writes = || world.operator.sum("mixquant_operator_api_writes_total");
    let deadline = Instant::now() + Duration::from_mins(2);
    loop {
        let before = writes();
        assert!(before > 0.0, "the metrics were not read");
        tokio::time::sleep(REST).await;
        let more = writes() - before;
        if more.abs() < 0.5 {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{more} writes in {REST:?} although every service is settled"
        );
    }
}

/// Edits services one after another and makes a new one in the midst; how long until its Job runs, and the edits a second that the
/// apiserver took.
async fn storm(world: &World, count: usize, example: &Value) -> (Duration, f64) {
    let services = world.services.clone();
    let editing = tokio::spawn(async move {
        let start = Instant::now();
        let mut tick = tokio::time::interval(Duration::from_secs(1) / EDITS);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut edits: JoinSet<kube::Result<()>> = JoinSet::new();
        let mut done = 0_u32;
        for edit in 0.. {
            tick.tick().await;
            // An apiserver that does not keep up gets fewer edits, not a backlog.
            if edits.len() >= EDITS_IN_FLIGHT {
                edits.join_next().await.unwrap().unwrap().unwrap();
            }
            if start.elapsed() > STORM {
                break;
            }
            let (services, name) = (services.clone(), format!("chat-{}", edit % count));
            let patch = json!({"spec": {"replicas": 1 + (edit / count) % 7 + edit % 2}});
            edits.spawn(async move {
                let (as_usual, patch) = (PatchParams::default(), Patch::Merge(&patch));
                services.patch(&name, &as_usual, &patch).await.map(drop)
            });
            done += 1;
        }
        for edited in edits.join_all().await {
            edited.unwrap();
        }
        f64::from(done) / start.elapsed().as_secs_f64()
    });
    tokio::time::sleep(STORM / 4).await;
    let start = Instant::now();
    world.create("one-more", example).await;
    loop {
        let service = world.services.get("one-more").await.unwrap();
        if is_calibrating(&service) {
            break;
        }
        assert!(
            start.elapsed() < HANDLED,
            "a new service still waits after {:?}: {}",
            start.elapsed(),
            service.data["status"]
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    (start.elapsed(), editing.await.unwrap())
}
