//! What a gateway splits the traffic by, against an apiserver in memory: what is read of a route, what is written to it, and that a user's
//! route is never overwritten.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake;

use fake::{FakeApi, SERVICE, server, target, writer};
use mixquant_operator::action::{Action, RoutePatch, TrackRequest};
use mixquant_operator::canary::Share;
use mixquant_operator::error::Error;
use mixquant_operator::lease::Fence;
use mixquant_operator::observe::Observer;
use mixquant_operator::observed::{FoundRoute, Observed, ObservedRoute, Track};
use serde_json::{Value, json};

const OWN: &str = "/apis/gateway.networking.k8s.io/v1/namespaces/models/httproutes/chat";
const MINE: &str = "/apis/gateway.networking.k8s.io/v1/namespaces/models/httproutes/mine";
const KINDS: &str = "/apis/gateway.networking.k8s.io/v1";

/// A cluster with the Gateway API and the example behind a gateway.
fn routed(traffic: Value) -> FakeApi {
    let api = server();
    api.put(
        KINDS,
        json!({"kind": "APIResourceList", "groupVersion": "gateway.networking.k8s.io/v1", "resources": [
            {"name": "httproutes", "singularName": "httproute", "namespaced": true, "kind": "HTTPRoute", "verbs": ["get"]}]}),
    );
    api.change(SERVICE, |service| service["spec"]["traffic"] = traffic);
    api
}

fn own() -> Value {
    json!({"mode": "GatewayAPI", "parentRefs": [{"name": "edge", "namespace": "gateways"}], "trackHeader": "x-mixquant-track"})
}

fn users() -> Value {
    json!({"mode": "GatewayAPI", "routeRef": {"name": "mine"}})
}

async fn observed(api: &FakeApi, may_use: bool) -> Observed {
    let target = target(api).await;
    let observer = Observer::new(api.client(), Vec::new()).with_gateway_api(may_use);
    let observed = observer.observe(&target.owner, &target.service);
    Box::pin(observed).await.unwrap()
}

async fn found(api: &FakeApi) -> FoundRoute {
    match observed(api, true).await.route {
        Some(ObservedRoute::Found(found)) => found,
        other => panic!("{other:?}"),
    }
}

async fn execute(api: &FakeApi, action: Action) -> Result<(), Error> {
    let writer = writer(api, Fence::open());
    Box::pin(writer.execute(&mut target(api).await, &[action])).await
}

fn give(weight: i32, mirror: Option<i32>) -> Action {
    Action::ApplyRoute(Share { weight, mirror })
}

/// A route of a user with one rule for both tracks and one of its own.
fn mine() -> Value {
    let backend = |name: &str, weight: i32| json!({"group": "", "kind": "Service", "name": name, "port": 80, "weight": weight});
    json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
        "metadata": {"name": "mine", "namespace": "models", "generation": 3},
        "spec": {"parentRefs": [{"name": "edge", "namespace": "gateways"}], "rules": [
            {"backendRefs": [backend("other", 1)]},
            {"backendRefs": [backend("chat-canary", 10), backend("other", 5), backend("chat-stable", 90)]}]}})
}

/// Its Gateway says of a generation that it is accepted, or why not.
fn said(generation: i64, accepted: &str) -> Value {
    let condition = |kind: &str, status: &str| {
        json!({"type": kind, "status": status, "reason": "NoMatchingParent", "message": "no listener",
            "observedGeneration": generation, "lastTransitionTime": "2026-01-01T00:00:00Z"})
    };
    json!({"parents": [{"controllerName": "example.com/gateway",
        "parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "edge", "namespace": "gateways"},
        "conditions": [condition("Accepted", accepted), condition("ResolvedRefs", "True")]}]})
}

#[tokio::test]
async fn the_own_route_is_made_once_changed_by_its_weight_and_put_back_when_someone_adds_a_rule() {
    let api = routed(own());
    assert_eq!(
        observed(&api, true).await.route,
        Some(ObservedRoute::Missing)
    );
    execute(&api, give(10, None)).await.unwrap();
    assert_eq!(api.take_writes(), [format!("PATCH {OWN}")]);
    let seen = found(&api).await;
    assert!(
        seen.matches && seen.splits.len() == 1 && seen.splits[0].gives(10),
        "{seen:?}"
    );
    execute(&api, give(10, None)).await.unwrap();
    assert_eq!(api.take_writes(), Vec::<String>::new());
    execute(&api, give(50, None)).await.unwrap();
    assert!(found(&api).await.splits[0].gives(50));
    api.take_writes();
    api.change(OWN, |route| {
        let rules = route["spec"]["rules"].as_array_mut().unwrap();
        rules.insert(0, json!({"backendRefs": [{"name": "thief", "port": 80}]}));
    });
    assert!(!found(&api).await.matches);
    execute(&api, give(50, None)).await.unwrap();
    assert_eq!(api.take_writes(), [format!("PATCH {OWN}")]);
    assert!(found(&api).await.matches);
}

#[tokio::test]
async fn copies_come_with_the_own_route_and_go_with_it_and_an_api_that_knows_no_percent_is_told() {
    let api = routed(own());
    execute(&api, give(0, Some(20))).await.unwrap();
    let seen = found(&api).await;
    assert!(
        seen.matches && seen.mirror == Some(20) && seen.splits[0].gives(0),
        "{seen:?}"
    );
    api.take_writes();
    execute(&api, give(0, Some(20))).await.unwrap();
    assert_eq!(api.take_writes(), Vec::<String>::new());
    // What it stores of a percentage that it does not know is a mirror of everything.
    api.change(OWN, |route| {
        let mirror = &mut route["spec"]["rules"][2]["filters"][0]["requestMirror"];
        assert!(mirror.as_object_mut().unwrap().remove("percent").is_some());
    });
    let seen = found(&api).await;
    assert!(seen.matches && seen.mirror == Some(100), "{seen:?}");
    execute(&api, give(25, None)).await.unwrap();
    let seen = found(&api).await;
    assert!(
        seen.matches && seen.mirror.is_none() && seen.splits[0].gives(25),
        "{seen:?}"
    );
    assert!(api.object(OWN).unwrap()["spec"]["rules"][2]["filters"].is_null());
}

#[tokio::test]
async fn a_route_counts_as_taken_only_when_its_gateway_says_so_of_the_newest_generation() {
    let api = routed(users());
    api.put(MINE, mine());
    for (status, problem) in [
        (json!({}), Some("Gateway edge has said nothing of it yet")),
        (
            said(2, "True"),
            Some("Gateway edge has not seen its generation 3 yet"),
        ),
        (
            said(3, "False"),
            Some("Gateway edge says Accepted=False NoMatchingParent: no listener"),
        ),
        (said(3, "True"), None),
    ] {
        api.change(MINE, |route| route["status"] = status);
        assert_eq!(found(&api).await.problem.as_deref(), problem);
    }
    api.change(MINE, |route| {
        let conditions = &mut route["status"]["parents"][0]["conditions"];
        conditions.as_array_mut().unwrap().pop();
    });
    let problem = found(&api).await.problem.unwrap();
    assert!(problem.contains("has not said ResolvedRefs"), "{problem}");
}

/// The weights of a user's route as the observation shows them, to be changed to `weight`.
fn patch(seen: &FoundRoute, weight: i32) -> Action {
    Action::PatchRoute(RoutePatch {
        name: "mine".into(),
        uid: seen.uid.clone(),
        resource_version: seen.resource_version.clone(),
        splits: seen.splits.clone(),
        weight,
    })
}

#[tokio::test]
async fn of_a_users_route_only_the_weights_of_the_tracks_change() {
    let api = routed(users());
    api.put(MINE, mine());
    let seen = found(&api).await;
    assert!(
        seen.matches && seen.splits[0].rule == 1 && seen.splits[0].gives(10),
        "{seen:?}"
    );
    execute(&api, patch(&seen, 25)).await.unwrap();
    assert_eq!(api.take_writes(), [format!("PATCH {MINE}")]);
    let mut expected = mine();
    let backends = &mut expected["spec"]["rules"][1]["backendRefs"];
    backends[0]["weight"] = json!(25);
    backends[2]["weight"] = json!(75);
    assert_eq!(api.object(MINE).unwrap()["spec"], expected["spec"]);
}

#[tokio::test]
async fn a_users_edit_in_between_is_never_overwritten() {
    let api = routed(users());
    api.put(MINE, mine());
    let seen = found(&api).await;
    api.change(MINE, |route| {
        route["spec"]["rules"].as_array_mut().unwrap().swap(0, 1);
    });
    let edited = api.object(MINE).unwrap();
    let error = execute(&api, patch(&seen, 25)).await.unwrap_err();
    assert!(error.is_conflict() && !error.is_refusal(), "{error}");
    assert_eq!(api.object(MINE).unwrap(), edited);
    // The names are tested too: places that are another's are never written to.
    let now = found(&api).await;
    let wrong = FoundRoute {
        splits: seen.splits.clone(),
        ..now
    };
    let error = execute(&api, patch(&wrong, 25)).await.unwrap_err();
    assert!(error.is_refusal(), "{error}");
    assert_eq!(api.object(MINE).unwrap(), edited);
}

#[tokio::test]
async fn without_the_right_or_the_kind_nothing_is_asked_and_what_helps_is_told() {
    let api = routed(own());
    let why = |observed: Observed| match observed.route {
        Some(ObservedRoute::Unknown { why }) => why,
        other => panic!("{other:?}"),
    };
    let text = why(observed(&api, false).await);
    assert!(text.contains("gatewayAPI.enabled=true"), "{text}");
    api.0.lock().unwrap().objects.remove(KINDS);
    let text = why(observed(&api, true).await);
    assert!(text.contains("install the Gateway API"), "{text}");
}

#[tokio::test]
async fn services_of_the_tracks_turn_and_those_of_others_are_not_adopted() {
    let api = routed(own());
    let canary = "/api/v1/namespaces/models/services/chat-canary";
    let turn = |revision: &str| {
        Action::ApplyTrack(TrackRequest {
            track: Track::Canary,
            revision: revision.into(),
        })
    };
    for revision in ["aaaaaaaaaa", "bbbbbbbbbb"] {
        execute(&api, turn(revision)).await.unwrap();
        let selector = &api.object(canary).unwrap()["spec"]["selector"];
        assert_eq!(selector["mixquant.io/revision"], json!(revision));
    }
    assert!(observed(&api, true).await.tracks.canary.unwrap().matches);
    api.put(canary, json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat-canary", "namespace": "models"}}));
    let observed = observed(&api, true).await;
    assert_eq!(observed.tracks.canary, None);
    assert_eq!(observed.foreign[0].name, "chat-canary");
    let error = execute(&api, turn("aaaaaaaaaa")).await.unwrap_err();
    assert!(matches!(error, Error::Foreign { .. }), "{error}");
}

#[tokio::test]
async fn a_route_that_is_no_longer_asked_for_is_seen_as_long_as_the_tracks_are_there() {
    let api = routed(own());
    execute(&api, give(0, None)).await.unwrap();
    let stable = TrackRequest {
        track: Track::Stable,
        revision: "aaaaaaaaaa".into(),
    };
    execute(&api, Action::ApplyTrack(stable)).await.unwrap();
    api.change(SERVICE, |service| service["spec"]["traffic"] = json!({}));
    let seen = observed(&api, true).await;
    assert!(seen.old_route.is_some() && seen.route.is_none() && seen.tracks.stable.is_some());
}
