//! The route of a told cluster: it says at once what it is told, and its Gateway takes that at once or when the case says so.

use mixquant_crds::MixQuantService;
use mixquant_operator::action::RoutePatch;
use mixquant_operator::canary::Share;
use mixquant_operator::observed::{
    Backend, FoundRoute, ObservedRoute, ObservedTraffic, RouteSplit, Traffic,
};
use mixquant_operator::validate::Routing;
use mixquant_operator::validate::traffic::routing;

use super::Told;

/// What a Gateway that lags says.
const LAGS: &str = "Gateway edge has not seen its generation yet";

/// A route that says `share`.
fn found(share: Share, problem: Option<String>) -> FoundRoute {
    FoundRoute {
        uid: "route-uid".into(),
        resource_version: "2".into(),
        matches: true,
        splits: vec![split(share.weight)],
        mirror: share.mirror,
        problem,
    }
}

fn split(weight: i32) -> RouteSplit {
    let backend = |place, weight| Backend { place, weight };
    RouteSplit {
        rule: 0,
        stable: backend(0, 100 - weight),
        canary: backend(1, weight),
    }
}

/// A share of people's requests, without copies.
fn weight(weight: i32) -> Share {
    Share {
        weight,
        mirror: None,
    }
}

/// The route that a service finds: none of its own yet, a user's with weights of the user's.
pub(super) fn first(service: &MixQuantService) -> Option<ObservedRoute> {
    match routing(&service.spec.traffic) {
        Routing::ReplicaRatio => None,
        Routing::Own(_) => Some(ObservedRoute::Missing),
        Routing::Users { .. } => Some(ObservedRoute::Found(FoundRoute {
            resource_version: "1".into(),
            ..found(weight(50), None)
        })),
    }
}

impl Told {
    pub(super) fn put_route(&mut self, share: Share) {
        let problem = self.gateway_lags.then(|| LAGS.to_owned());
        self.observed.route = Some(ObservedRoute::Found(found(share, problem)));
    }

    pub(super) fn patch_route(&mut self, patch: &RoutePatch) {
        let found = match &self.observed.route {
            Some(ObservedRoute::Found(found)) => found,
            other => panic!("a patch of {other:?}"),
        };
        assert_eq!(patch.resource_version, found.resource_version);
        self.put_route(weight(patch.weight));
    }

    /// The Gateway takes what the route says; `false` when it has already.
    pub fn gateway_takes(&mut self) -> bool {
        match &mut self.observed.route {
            Some(ObservedRoute::Found(found)) => found.problem.take().is_some(),
            _ => false,
        }
    }

    /// Someone gives the canary so many percent; `None` where there is no route, or where it has that already.
    pub fn edit_route(&mut self, percent: i32) -> Option<()> {
        match &self.observed.route {
            Some(ObservedRoute::Found(found)) if !found.splits[0].gives(percent) => {
                let mirror = found.mirror;
                self.put_route(Share {
                    mirror,
                    ..weight(percent)
                });
                Some(())
            }
            _ => None,
        }
    }

    pub(super) fn selects(revision: &str) -> ObservedTraffic {
        ObservedTraffic {
            selects: Some(Traffic::Only(revision.to_owned())),
            matches: true,
        }
    }

    /// Passes in which the gateway takes the weight of a step.
    pub(super) fn shift(&mut self) {
        if routing(&self.observed.service.spec.traffic) != Routing::ReplicaRatio {
            self.pods_ready();
            for _ in 0..4 {
                self.pass();
            }
        }
    }
}
