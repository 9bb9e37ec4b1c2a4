//! Reads what a gateway splits the traffic by: the Services of the tracks and the route. Part of the observer; decides nothing.
//!
//! A service that no gateway serves costs one list; routes are asked for only where the operator may use them and the cluster has them.

use k8s_openapi::api::core::v1::Service;
use kube::{Api, ResourceExt};
use mixquant_crds::MixQuantServiceSpec;

use super::{Observer, selector_of};
use crate::build::meta::Owner;
use crate::build::route::{GROUP_VERSION, HTTPRoute};
use crate::build::service::track_name;
use crate::error::Error;
use crate::observed::{
    Installation, Kind, ObjectName, Observed, ObservedRoute, ObservedTraffic, Track, Tracks,
};
use crate::read::{self, DEADLINE};
use crate::stored;
use crate::validate::Routing;
use crate::validate::traffic::routing;

/// Asked of a track's Service.
const ABSENT: &str = "is it absent";

/// What was read.
#[derive(Default)]
pub(super) struct Routed {
    tracks: Tracks,
    route: Option<ObservedRoute>,
    old_route: Option<String>,
    foreign: Vec<ObjectName>,
}

impl Routed {
    pub(super) fn describe(self, observed: &mut Observed) {
        observed.tracks = self.tracks;
        observed.route = self.route;
        observed.old_route = self.old_route;
        observed.foreign.extend(self.foreign);
    }
}

impl Observer {
    pub(super) async fn routed(
        &self,
        owner: &Owner,
        spec: &MixQuantServiceSpec,
        installation: &Installation,
    ) -> Result<Routed, Error> {
        let routing = routing(&spec.traffic);
        let mut routed = Routed::default();
        self.tracks(owner, &routing, &mut routed).await?;
        let was_routed = routed.tracks != Tracks::default();
        if routing == Routing::ReplicaRatio && !was_routed {
            return Ok(routed);
        }
        if installation.http_routes {
            match self.routes(owner, &routing, &mut routed).await {
                // What stands beside it goes on being looked after, rollbacks first of all.
                Err(error @ Error::Refused { code: 403, .. }) => {
                    let why = error.to_string();
                    routed.route = Some(ObservedRoute::Unknown { why });
                }
                done => done?,
            }
        } else if routing != Routing::ReplicaRatio {
            let why = self.why_no_routes();
            routed.route = Some(ObservedRoute::Unknown { why });
        }
        Ok(routed)
    }

    async fn tracks(
        &self,
        owner: &Owner,
        routing: &Routing,
        routed: &mut Routed,
    ) -> Result<(), Error> {
        let namespace = owner.namespace.as_str();
        let api: Api<Service> = self.api(namespace);
        let names = Track::ALL.map(|track| track_name(&owner.name, track));
        let is_absent = |name: &String| self.known.recall::<Service>(namespace, name, ABSENT);
        let ours = match routing {
            // A Service of somebody else that has such a name is none of our affair then.
            Routing::ReplicaRatio if names.iter().all(|name| is_absent(name).is_some()) => {
                return Ok(());
            }
            Routing::ReplicaRatio => {
                let readings = names.map(|name| {
                    let reading = self.known.begin::<Service>(namespace, &name);
                    (name, reading)
                });
                let ours = read::list(&api, &selector_of(owner)).await?;
                for (name, reading) in readings {
                    if ours.iter().all(|one| one.name_any() != name) {
                        self.known.keep(reading, ABSENT, String::new());
                    }
                }
                Some(ours)
            }
            Routing::Own(_) | Routing::Users { .. } => None,
        };
        for track in Track::ALL {
            let name = track_name(&owner.name, track);
            let found = match &ours {
                Some(ours) => ours.iter().find(|one| one.name_any() == name).cloned(),
                None => read::get(&api, &name, DEADLINE).await?,
            };
            match found {
                Some(found) if owner.claims(&found.metadata) => {
                    let seen: ObservedTraffic = stored::traffic(owner, &found);
                    *routed.tracks.of_mut(track) = Some(seen);
                }
                Some(_) if ours.is_none() => routed.foreign.push(ObjectName {
                    kind: Kind::Service,
                    name,
                }),
                Some(_) | None => {}
            }
        }
        Ok(())
    }

    /// The route that the spec asks for, and one of ours that it does not.
    async fn routes(
        &self,
        owner: &Owner,
        routing: &Routing,
        routed: &mut Routed,
    ) -> Result<(), Error> {
        let api: Api<HTTPRoute> = self.api(&owner.namespace);
        let named = read::get(&api, &owner.name, DEADLINE).await?;
        let ours = named.as_ref().filter(|route| owner.claims(&route.metadata));
        routed.route = match routing {
            Routing::ReplicaRatio => None,
            Routing::Own(own) => {
                if named.is_some() && ours.is_none() {
                    routed.foreign.push(ObjectName {
                        kind: Kind::HTTPRoute,
                        name: owner.name.clone(),
                    });
                }
                let found = ours.map(|live| stored::route::route(owner, live, Some(own)));
                Some(found.map_or(ObservedRoute::Missing, ObservedRoute::Found))
            }
            Routing::Users { name } => {
                let live = read::get(&api, name, DEADLINE).await?;
                let found = live.map(|live| stored::route::route(owner, &live, None));
                Some(found.map_or(ObservedRoute::Missing, ObservedRoute::Found))
            }
        };
        if !matches!(routing, Routing::Own(_)) {
            routed.old_route = ours.and_then(ResourceExt::uid);
        }
        Ok(())
    }

    fn why_no_routes(&self) -> String {
        if self.gateway_api {
            format!(
                "the cluster does not know the kind HTTPRoute of {GROUP_VERSION}: install the Gateway API, or set spec.traffic.mode to ReplicaRatio"
            )
        } else {
            "this operator may not use HTTPRoutes: install its chart with gatewayAPI.enabled=true, or set spec.traffic.mode to ReplicaRatio".into()
        }
    }
}
