//! What stands beside the pods, against an apiserver in memory: made once, put back when it is changed, left alone when it is somebody else's.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake;

use fake::{FakeApi, server, target, writer};
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Resource;
use kube::runtime::watcher::Event;
use mixquant_operator::action::{Action, CompanionRequest};
use mixquant_operator::apply::Writer;
use mixquant_operator::lease::Fence;
use mixquant_operator::observe::Observer;
use mixquant_operator::observed::CompanionState;
use serde_json::json;

/// One pass over what stands beside the pods: what was written, and the states before.
async fn beside(api: &FakeApi, writer: &Writer) -> (Vec<String>, Vec<CompanionState>) {
    let mut target = target(api).await;
    let observer = Observer::new(api.client(), vec!["system".into()]);
    let observed = Box::pin(observer.observe(&target.owner, &target.service))
        .await
        .unwrap();
    let wrong = observed
        .companions
        .iter()
        .filter(|seen| seen.state == CompanionState::Wrong);
    let actions: Vec<Action> = wrong
        .map(|seen| {
            Action::ApplyCompanion(CompanionRequest {
                companion: seen.companion,
                installation: observed.installation.clone(),
            })
        })
        .collect();
    Box::pin(writer.execute(&mut target, &actions))
        .await
        .unwrap();
    let states = observed.companions.into_iter().map(|seen| seen.state);
    (api.take_writes(), states.collect())
}

#[tokio::test]
async fn what_stands_beside_the_pods_is_made_once_and_put_back_when_somebody_opens_it() {
    let api = server();
    let writer = writer(&api, Fence::open());
    assert_eq!(beside(&api, &writer).await.0.len(), 4);
    assert_eq!(beside(&api, &writer).await.0, Vec::<String>::new());
    let policy = "/apis/networking.k8s.io/v1/namespaces/models/networkpolicies/chat-engine";
    api.change(policy, |object| object["spec"]["egress"] = json!([{}]));
    let budget = "/apis/policy/v1/namespaces/models/poddisruptionbudgets/chat-mixquant";
    api.change(budget, |object| {
        object["status"] = json!({"disruptionsAllowed": 1});
        object["spec"]["maxUnavailable"] = json!("100%");
    });
    let writes = beside(&api, &writer).await.0;
    assert_eq!(
        writes,
        [format!("PATCH {policy}"), format!("PATCH {budget}")]
    );
    assert_eq!(api.object(policy).unwrap()["spec"]["egress"], json!([]));
    assert_eq!(beside(&api, &writer).await.0, Vec::<String>::new());
}

#[tokio::test]
async fn the_prometheus_operators_kinds_are_made_where_the_cluster_knows_them() {
    let api = server();
    let writer = writer(&api, Fence::open());
    let kinds = ["PodMonitor", "PrometheusRule", "ServiceMonitor"].map(|kind| {
        let plural = format!("{}s", kind.to_lowercase());
        json!({"name": plural, "singularName": "", "namespaced": true, "kind": kind, "verbs": ["get"]})
    });
    let list = json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "monitoring.coreos.com/v1", "resources": kinds});
    api.put("/apis/monitoring.coreos.com/v1", list);
    assert_eq!(beside(&api, &writer).await.0.len(), 6);
    let (writes, states) = beside(&api, &writer).await;
    assert_eq!(writes, Vec::<String>::new());
    assert_eq!(states, vec![CompanionState::Right; 6]);
}

#[tokio::test]
async fn an_account_of_somebody_else_is_named_and_not_changed() {
    let api = server();
    let writer = writer(&api, Fence::open());
    let path = "/api/v1/namespaces/models/serviceaccounts/chat-mixquant";
    let theirs = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "chat-mixquant", "namespace": "models"}});
    api.put(path, theirs);
    let before = api.object(path);
    let (_, states) = beside(&api, &writer).await;
    let name = "ServiceAccount chat-mixquant".to_owned();
    assert_eq!(states[0], CompanionState::Foreign { name });
    assert_eq!(api.object(path), before);
}

/// A watch that has listed its kind.
fn listed<K: Resource<DynamicType = ()>>(observer: &Observer) {
    observer.known().heard(&Event::<K>::Init);
    observer.known().heard(&Event::<K>::InitDone);
}

#[tokio::test]
async fn what_stands_beside_a_service_is_read_again_only_when_a_watch_says_that_it_changed() {
    let api = server();
    let map = "/api/v1/namespaces/models/configmaps/texts";
    let data = json!({"calibration.jsonl": "abc", "evaluation.txt": "def"});
    api.put(map, json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "texts", "namespace": "models"}, "data": data}));
    for claim in ["models", "artifacts"] {
        let path = format!("/api/v1/namespaces/models/persistentvolumeclaims/{claim}");
        api.put(&path, json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim, "namespace": "models"}}));
    }
    assert_eq!(beside(&api, &writer(&api, Fence::open())).await.0.len(), 4);
    let (observer, target) = (
        Observer::new(api.client(), vec!["system".into()]),
        target(&api).await,
    );
    let reads = async || {
        api.take_reads();
        let observed = observer
            .observe(&target.owner, &target.service)
            .await
            .unwrap();
        assert!(
            observed
                .companions
                .iter()
                .all(|seen| seen.state == CompanionState::Right)
        );
        api.take_reads()
    };
    let unwatched = reads().await.len();
    assert_eq!(
        reads().await.len() + 3,
        unwatched,
        "without watches only the kinds and the bytes of data are remembered"
    );
    listed::<ServiceAccount>(&observer);
    listed::<NetworkPolicy>(&observer);
    listed::<PodDisruptionBudget>(&observer);
    listed::<ConfigMap>(&observer);
    listed::<PersistentVolumeClaim>(&observer);
    listed::<Service>(&observer);
    let first = reads().await;
    let second = reads().await;
    assert_eq!(
        (first.len(), second.len()),
        (14, 5),
        "first {first:?}, then {second:?}"
    );

    let policy = "/apis/networking.k8s.io/v1/namespaces/models/networkpolicies/chat-engine";
    let changed = serde_json::from_value(api.object(policy).unwrap()).unwrap();
    observer
        .known()
        .heard(&Event::<NetworkPolicy>::Apply(changed));
    let third = reads().await;
    assert_eq!(third.len(), second.len() + 1, "{third:?}");
    assert!(third.iter().any(|path| path == policy), "{third:?}");
}
