//! Who splits the traffic, from `spec.traffic`.

use mixquant_crds::traffic::{GatewayRef, TrafficMode, TrafficSpec};
use serde::Serialize;

use super::Problems;

/// Who splits the traffic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Routing {
    /// The ratio of ready pods behind the one Service.
    ReplicaRatio,
    /// The weights of a route that the operator makes and owns.
    Own(OwnRoute),
    /// The weights of a user's route; nothing else of it is touched.
    Users {
        /// Its name.
        name: String,
    },
}

/// The service's own `HTTPRoute`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnRoute {
    /// At least one.
    pub parents: Vec<GatewayRef>,
    /// Every host where there is none.
    pub hostnames: Vec<String>,
    /// Pins a request to a track.
    pub track_header: Option<String>,
}

impl Routing {
    /// The route's name, of the service `service`; `None` where there is no route.
    pub fn route<'a>(&'a self, service: &'a str) -> Option<&'a str> {
        match self {
            Self::ReplicaRatio => None,
            Self::Own(_) => Some(service),
            Self::Users { name } => Some(name),
        }
    }
}

/// As far as a spec can be read; what is wrong with it is told by [`check`].
pub fn routing(spec: &TrafficSpec) -> Routing {
    match (spec.mode, &spec.route_ref) {
        (TrafficMode::ReplicaRatio, _) => Routing::ReplicaRatio,
        (TrafficMode::GatewayAPI, Some(route)) => Routing::Users {
            name: route.name.clone(),
        },
        (TrafficMode::GatewayAPI, None) => Routing::Own(OwnRoute {
            parents: spec.parent_refs.clone(),
            hostnames: spec.hostnames.clone(),
            track_header: spec.track_header.clone(),
        }),
    }
}

/// What the schema's rules say too, for what went around them.
pub(super) fn check(spec: &TrafficSpec, problems: &mut Problems) {
    let (own, users) = (!spec.parent_refs.is_empty(), spec.route_ref.is_some());
    let fits = match spec.mode {
        TrafficMode::ReplicaRatio => !own && !users,
        TrafficMode::GatewayAPI => own != users,
    };
    problems.require(
        fits,
        "traffic.parentRefs and traffic.routeRef belong to mode GatewayAPI: set exactly one of them there and leave both out with ReplicaRatio",
    );
    let shaped = !spec.hostnames.is_empty() || spec.track_header.is_some();
    problems.require(
        own || !shaped,
        "traffic.hostnames and traffic.trackHeader shape the route that the operator makes: set them beside parentRefs, or write them into your own route",
    );
}
