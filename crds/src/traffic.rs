//! The part of the custom resource that says who splits the traffic between stable and the canary: `traffic`.
//!
//! The comments here become the schema's descriptions (`kubectl explain mqs.spec.traffic`). A field that could not act is refused by a
//! rule, never ignored.

#![expect(
    unreachable_pub,
    reason = "KubeSchema repeats each struct inside a private scope"
)]

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Who splits the traffic.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("self.mode == 'GatewayAPI' ? has(self.parentRefs) != has(self.routeRef) : !has(self.parentRefs) && !has(self.routeRef)").message("traffic.parentRefs (the operator makes the route) and traffic.routeRef (it is yours) belong to mode GatewayAPI: set exactly one of them there and leave both out with ReplicaRatio"),
    validation = Rule::new("has(self.parentRefs) || (!has(self.hostnames) && !has(self.trackHeader))").message("traffic.hostnames and traffic.trackHeader shape the route that the operator makes: set them beside parentRefs, or write them into your own route"),
)]
pub struct TrafficSpec {
    /// The ratio of ready pods, or a gateway's weights.
    #[serde(default)]
    pub mode: TrafficMode,
    /// Gateways that an `HTTPRoute` of the service's name is made for. The operator owns it whole.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 8))]
    pub parent_refs: Vec<GatewayRef>,
    /// The host names of that route; every host without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(min = 1, max = 16),
        inner(
            length(min = 1, max = 253),
            regex(
                pattern = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
            )
        )
    )]
    pub hostnames: Vec<String>,
    /// Requests with this header go to the track that it names, `stable` or `canary`, whatever the weights are. Without a canary both are stable.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z][-A-Za-z0-9]*$')").message("traffic.trackHeader is not a header's name: write one such as x-mixquant-track"))]
    pub track_header: Option<String>,
    /// A route of yours whose rules name the Services `NAME-stable` and `NAME-canary`. Only their weights are changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route_ref: Option<RouteRef>,
}

/// Who splits the traffic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TrafficMode {
    /// The service's one address reaches the pods of both tracks alike: their ratio is the weight, as nearly as whole pods allow.
    #[default]
    ReplicaRatio,
    /// An `HTTPRoute` of the Gateway API has the weights: they are exact, and the canary has only the pods that its share needs.
    GatewayAPI,
}

/// A Gateway.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GatewayRef {
    /// Its name.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("traffic.parentRefs: a Gateway's name has only a-z, 0-9, - and ."))]
    pub name: String,
    /// Its namespace; the service's own without.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')").message("traffic.parentRefs: a namespace has only a-z, 0-9 and -"))]
    pub namespace: Option<String>,
    /// One of its listeners; all without.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("traffic.parentRefs: a listener's name has only a-z, 0-9, - and ."))]
    pub section_name: Option<String>,
}

/// An `HTTPRoute` in the service's namespace.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RouteRef {
    /// Its name.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("traffic.routeRef: a route's name has only a-z, 0-9, - and ."))]
    pub name: String,
}
