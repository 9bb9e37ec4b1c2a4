//! The service's own `HTTPRoute`: two weighted backends, copies for a canary that nobody is to meet yet, and rules that pin a request to a
//! track. Only the fields that we say are typed.
//!
//! Every default of the API is written out, so that what is stored can be compared with what is wanted as a whole.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use mixquant_crds::traffic::GatewayRef;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::meta::{COMPONENT_ENGINE, Owner, labels};
use super::service::{PORT, track_name};
use crate::canary::Share;
use crate::observed::Track;
use crate::validate::OwnRoute;

/// The group and version of the kind.
pub const GROUP_VERSION: &str = "gateway.networking.k8s.io/v1";
/// The group alone.
pub const GROUP: &str = "gateway.networking.k8s.io";

/// What requests meet on their way from a Gateway.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "gateway.networking.k8s.io",
    version = "v1",
    kind = "HTTPRoute",
    plural = "httproutes",
    namespaced,
    schema = "disabled",
    status = "RouteStatus",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct RouteSpec {
    /// Its Gateways.
    #[serde(default)]
    pub parent_refs: Vec<Value>,
    /// The hosts that it is for; all of the listener's where there is none.
    #[serde(default)]
    pub hostnames: Vec<String>,
    /// The first one that matches decides.
    #[serde(default)]
    pub rules: Vec<Value>,
}

/// What its Gateways say.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RouteStatus {
    /// One for each Gateway and controller.
    #[serde(default)]
    pub parents: Vec<ParentStatus>,
}

/// What one Gateway says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ParentStatus {
    /// Which.
    pub parent_ref: Value,
    /// `Accepted`, `ResolvedRefs` and others.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// The route that gives the canary `share`. While it mirrors, a request that is pinned to the canary goes to stable: nobody gets the canary's
/// answers, whatever the request says.
pub fn route(owner: &Owner, wanted: &OwnRoute, share: Share) -> HTTPRoute {
    let mut rules = Vec::new();
    for track in [Track::Canary, Track::Stable] {
        if let Some(header) = &wanted.track_header {
            let header = json!({"type": "Exact", "name": header, "value": track.as_str()});
            let meets = share.mirror.map_or(track, |_| Track::Stable);
            rules.push(rule(Some(header), &[weighted(owner, meets, 1)]));
        }
    }
    let split = [
        (Track::Stable, 100 - share.weight),
        (Track::Canary, share.weight),
    ];
    let split = split.map(|(track, weight)| weighted(owner, track, weight));
    let mut split = rule(None, &split);
    if let Some(percent) = share.mirror {
        split["filters"] = json!([mirror(owner, percent)]);
    }
    rules.push(split);
    HTTPRoute {
        metadata: owner.object(owner.name.clone(), labels(&owner.name, COMPONENT_ENGINE)),
        spec: RouteSpec {
            parent_refs: wanted.parents.iter().map(parent).collect(),
            hostnames: wanted.hostnames.clone(),
            rules,
        },
        status: None,
    }
}

fn parent(gateway: &GatewayRef) -> Value {
    let mut parent = json!({"group": GROUP, "kind": "Gateway", "name": gateway.name});
    let optional = [
        ("namespace", &gateway.namespace),
        ("sectionName", &gateway.section_name),
    ];
    for (key, value) in optional {
        if let Some(value) = value {
            parent[key] = json!(value);
        }
    }
    parent
}

/// An answer may take as long as it needs: the engine ends requests itself, and gateways' own limits (often 15 s) would cut streams.
fn rule(header: Option<Value>, backends: &[Value]) -> Value {
    let mut matches = json!({"path": {"type": "PathPrefix", "value": "/"}});
    if let Some(header) = header {
        matches["headers"] = json!([header]);
    }
    json!({"matches": [matches], "backendRefs": backends, "timeouts": {"request": "0s"}})
}

fn weighted(owner: &Owner, track: Track, weight: i32) -> Value {
    let mut backend = backend(owner, track);
    backend["weight"] = json!(weight);
    backend
}

fn backend(owner: &Owner, track: Track) -> Value {
    let name = track_name(&owner.name, track);
    json!({"group": "", "kind": "Service", "name": name, "port": PORT})
}

/// All is what a mirror without a percentage means: so is it said, for a Gateway API that is older than percentages.
fn mirror(owner: &Owner, percent: i32) -> Value {
    let mut mirror = json!({"backendRef": backend(owner, Track::Canary)});
    if percent < 100 {
        mirror["percent"] = json!(percent);
    }
    json!({"type": "RequestMirror", "requestMirror": mirror})
}
