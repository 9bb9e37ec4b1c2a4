//! The gateway: routes, what it has taken of them and when, the Services of the tracks, and what must hold of them at every moment.

use mixquant_crds::status::{MixQuantServiceStatus, RolloutStage, RolloutStatus};
use mixquant_crds::traffic::{GatewayRef, RouteRef, TrafficMode, TrafficSpec};
use mixquant_operator::action::{RoutePatch, TrackRequest};
use mixquant_operator::observed::{
    Backend, FoundRoute, Observed, ObservedRoute, ObservedTraffic, RouteSplit, Track, Traffic,
};

use super::cluster::Cluster;
use super::traffic::REQUESTS_PER_SECOND;

/// A route with one rule, and what the gateway has taken of it.
#[derive(Debug, Clone)]
pub(super) struct Route {
    uid: String,
    version: u64,
    generation: u64,
    /// Weights of stable and the canary.
    weights: [i32; 2],
    /// Those by which requests go, and the generation that they are of.
    taken: Option<([i32; 2], u64)>,
    /// When the gateway takes what is written.
    takes_at: i64,
}

/// What requests meet where a gateway splits them.
#[derive(Debug, Default)]
pub(super) struct Gateway {
    /// The service's own route.
    own: Option<Route>,
    /// A user's, which refers to the tracks from the start.
    users: Option<Route>,
    /// The revisions that the Services of stable and the canary select.
    tracks: [Option<String>; 2],
    /// It takes nothing until then.
    down_until: i64,
}

/// `spec.traffic`: 0 without a gateway, 1 with a route of its own, 2 with a user's.
pub(super) fn spec(mode: u8) -> TrafficSpec {
    let mut spec = TrafficSpec::default();
    if mode > 0 {
        spec.mode = TrafficMode::GatewayAPI;
    }
    match mode {
        1 => spec.parent_refs.push(GatewayRef {
            name: "edge".into(),
            namespace: None,
            section_name: None,
        }),
        2 => {
            spec.route_ref = Some(RouteRef {
                name: "mine".into(),
            });
        }
        _ => {}
    }
    spec
}

fn place(track: Track) -> usize {
    usize::from(track == Track::Canary)
}

impl Cluster {
    fn is_routed(&self) -> bool {
        self.service.spec.traffic.mode == TrafficMode::GatewayAPI
    }

    fn routes_users(&self) -> bool {
        self.service.spec.traffic.route_ref.is_some()
    }

    /// The route by which requests come.
    fn route(&self) -> Option<&Route> {
        if self.routes_users() {
            self.gateway.users.as_ref()
        } else {
            self.gateway.own.as_ref().filter(|_| self.is_routed())
        }
    }

    fn write(&mut self, route: Option<Route>, weights: [i32; 2]) -> Route {
        let lag = i64::try_from(self.dice.below(8)).unwrap();
        let before = route.unwrap_or(Route {
            uid: format!("route-{}", self.changes),
            version: 0,
            generation: 0,
            weights,
            taken: None,
            takes_at: 0,
        });
        Route {
            version: before.version + 1,
            generation: before.generation + 1,
            weights,
            takes_at: self.gateway.down_until.max(self.now + lag),
            ..before
        }
    }

    /// A user makes the route that the spec refers to, with weights of the user's.
    pub(super) fn make_users_route(&mut self) {
        if self.routes_users() && self.gateway.users.is_none() {
            let route = self.write(None, [50, 50]);
            self.gateway.users = Some(route);
        }
    }

    pub(super) fn apply_route(&mut self, weight: i32) -> Result<(), String> {
        self.may_weigh(weight)?;
        let before = self.gateway.own.take();
        let route = self.write(before, [100 - weight, weight]);
        self.gateway.own = Some(route);
        self.changed();
        Ok(())
    }

    /// `false` when somebody has changed it since it was seen.
    pub(super) fn patch_route(&mut self, patch: &RoutePatch) -> Result<bool, String> {
        let Some(before) = self.gateway.users.clone() else {
            return Ok(false);
        };
        if before.version.to_string() != patch.resource_version || before.uid != patch.uid {
            return Ok(false);
        }
        self.may_weigh(patch.weight)?;
        let route = self.write(Some(before), [100 - patch.weight, patch.weight]);
        self.gateway.users = Some(route);
        self.changed();
        Ok(true)
    }

    pub(super) fn delete_route(&mut self, uid: &str) -> Result<(), String> {
        if self.is_routed() && !self.routes_users() {
            return Err("the route that the spec asks for is deleted".into());
        }
        self.gateway.own.take_if(|own| own.uid == uid);
        self.changed();
        Ok(())
    }

    /// Someone writes other weights into the route.
    pub(super) fn edit_route(&mut self, weight: i32) {
        let users = self.routes_users();
        let which = |gateway: &mut Gateway| {
            if users {
                gateway.users.take()
            } else {
                gateway.own.take()
            }
        };
        let Some(before) = which(&mut self.gateway) else {
            return;
        };
        let route = Some(self.write(Some(before), [100 - weight, weight]));
        if users {
            self.gateway.users = route;
        } else {
            self.gateway.own = route;
        }
    }

    /// Someone deletes the service's own route.
    pub(super) fn lose_route(&mut self) {
        self.gateway.own = None;
    }

    /// The gateway takes nothing for a while.
    pub(super) fn gateway_goes(&mut self, seconds: i64) {
        let until = self.now + seconds;
        self.gateway.down_until = until;
        let routes = [&mut self.gateway.own, &mut self.gateway.users];
        for route in routes.into_iter().flatten() {
            if route.takes_at > self.now {
                route.takes_at = route.takes_at.max(until);
            }
        }
    }

    pub(super) fn gateway_takes_next(&self) -> Option<i64> {
        let routes = [&self.gateway.own, &self.gateway.users];
        let routes = routes.into_iter().flatten();
        let behind = routes.filter(|route| !route.is_taken());
        behind.map(|route| route.takes_at.max(self.now + 1)).min()
    }

    pub(super) fn gateway_takes(&mut self) {
        let now = self.now;
        let mut changed = false;
        let routes = [&mut self.gateway.own, &mut self.gateway.users];
        for route in routes.into_iter().flatten() {
            if !route.is_taken() && route.takes_at <= now {
                route.taken = Some((route.weights, route.generation));
                route.version += 1;
                changed = true;
            }
        }
        if changed {
            self.changed();
        }
    }

    pub(super) fn apply_track(&mut self, request: &TrackRequest) -> Result<(), String> {
        let status = self.status();
        let revision = Some(&request.revision);
        let is_stable = status.stable.as_ref().map(|role| &role.revision) == revision;
        let is_canary = status.canary.as_ref().map(|role| &role.revision) == revision;
        let stage = status.rollout.map(|at| at.stage);
        let takes = matches!(
            stage,
            Some(RolloutStage::Stepping | RolloutStage::Promoting)
        );
        let is_on_trial = is_canary && takes && request.track == Track::Canary;
        if !(is_stable || is_on_trial) {
            return Err(format!("{request:?} at {stage:?}"));
        }
        self.gateway.tracks[place(request.track)] = Some(request.revision.clone());
        self.changed();
        Ok(())
    }

    /// Whether a track's Service selects `revision`.
    pub(super) fn is_in_a_track(&self, revision: &str) -> bool {
        let mut tracks = self.gateway.tracks.iter().flatten();
        tracks.any(|selected| selected == revision)
    }

    /// The most that a canary may have at a place of its trial.
    fn weight_at(&self, at: &RolloutStatus) -> i32 {
        let steps = &self.service.spec.rollout.steps;
        let weights = |steps: &[mixquant_crds::rollout::Step]| {
            let weights = steps.iter().filter_map(|step| step.weight);
            weights.max().unwrap_or(0)
        };
        let count = usize::try_from(at.step + 1).unwrap().min(steps.len());
        match at.stage {
            RolloutStage::Starting | RolloutStage::RollingBack => 0,
            // Where stable makes room, all may be the canary's.
            _ if !at.room.is_empty() => 100,
            RolloutStage::Stepping => weights(&steps[..count]),
            RolloutStage::Promoting => weights(steps),
        }
    }

    fn may_weigh(&self, weight: i32) -> Result<(), String> {
        let status = self.status();
        let at = status.rollout.filter(|_| status.canary.is_some());
        let most = at.map_or(0, |at| self.weight_at(&at));
        if weight > most {
            return Err(format!("the canary gets {weight} %, and its step {most} %"));
        }
        Ok(())
    }

    /// A step behind a gateway is left only when the gateway has been giving the canary its share.
    pub(super) fn may_leave_step(&self, before: &MixQuantServiceStatus) -> Result<(), String> {
        let (Some(at), Some(canary)) = (&before.rollout, &before.canary) else {
            return Ok(());
        };
        if !self.is_routed() || !at.room.is_empty() || self.now < self.floor.heals_at {
            return Ok(());
        }
        let taken = self.route().and_then(|route| route.taken);
        let weight = taken.map(|([_, canary], _)| canary);
        let turned = self.gateway.tracks[1].as_ref() == Some(&canary.revision);
        if self.weight_at(at) > 0 && (weight != Some(self.weight_at(at)) || !turned) {
            return Err(format!(
                "a step is left and the gateway gives the canary {weight:?}"
            ));
        }
        Ok(())
    }

    /// Whoever comes by the route finds enough pods behind each Service that has a weight.
    pub(super) fn check_route(&self, floor: i32) -> Result<(), String> {
        let Some(([stable, canary], _)) = self.route().and_then(|route| route.taken) else {
            return Ok(());
        };
        for (track, weight, floor) in [
            (Track::Stable, stable, floor),
            (Track::Canary, canary, floor.min(1)),
        ] {
            let Some(revision) = &self.gateway.tracks[place(track)] else {
                continue;
            };
            let ready = self.ready_of(revision).len();
            if weight > 0 && i32::try_from(ready).unwrap() < floor {
                return Err(format!(
                    "{ready} pods of {revision} stand behind {track:?} with weight {weight}"
                ));
            }
        }
        Ok(())
    }

    fn ready_of(&self, revision: &str) -> Vec<usize> {
        let pods = self.pods.iter().enumerate();
        let ready = pods.filter(|(_, pod)| pod.revision == revision && self.is_ready(pod));
        ready.map(|(index, _)| index).collect()
    }

    /// The pods that each of the next requests may reach, and percent of the requests.
    fn ways(&self) -> Vec<(Vec<usize>, u64)> {
        let taken = self.route().and_then(|route| route.taken);
        let Some((weights, _)) = taken else {
            let pods = self.pods.iter().enumerate();
            let pods = pods.filter(|(_, pod)| self.is_ready(pod) && self.selects(&pod.revision));
            return vec![(pods.map(|(index, _)| index).collect(), 100)];
        };
        let tracks = self.gateway.tracks.iter().zip(weights);
        tracks
            .map(|(revision, weight)| {
                let ready = revision.as_deref().map(|revision| self.ready_of(revision));
                (ready.unwrap_or_default(), weight.unsigned_abs().into())
            })
            .collect()
    }

    /// Requests of some seconds are answered.
    pub(super) fn serve(&mut self, seconds: i64) {
        // More than this in one go tells nothing new.
        let requests = REQUESTS_PER_SECOND * seconds.clamp(0, 60).unsigned_abs();
        for (ready, percent) in self.ways() {
            if ready.is_empty() {
                continue;
            }
            for request in 0..requests * percent / 100 {
                let index = ready[usize::try_from(request).unwrap() % ready.len()];
                let pod = &mut self.pods[index];
                let manners = pod.manners;
                pod.counters.observe(&mut self.dice, &manners);
            }
        }
    }

    /// What the operator sees of it.
    pub(super) fn show_gateway(&self, observed: &mut Observed) {
        for track in Track::ALL {
            let revision = self.gateway.tracks[place(track)].clone();
            *observed.tracks.of_mut(track) = revision.map(|revision| ObservedTraffic {
                selects: Some(Traffic::Only(revision)),
                matches: true,
            });
        }
        if self.is_routed() {
            let found = self.route().map(Route::seen);
            observed.route = Some(found.map_or(ObservedRoute::Missing, ObservedRoute::Found));
        }
        if !self.is_routed() || self.routes_users() {
            observed.old_route = self.gateway.own.as_ref().map(|own| own.uid.clone());
        }
    }

    /// Where it stands at the end.
    pub(super) fn end_of_gateway(&self) -> String {
        let weights = self.route().map(|route| (route.weights, route.is_taken()));
        let own = self.gateway.own.is_some();
        format!("{:?} {weights:?} {own}", self.gateway.tracks)
    }

    pub(super) fn collect_gateway(&mut self) {
        self.gateway.own = None;
        self.gateway.tracks = [None, None];
    }
}

impl Route {
    fn is_taken(&self) -> bool {
        self.taken
            .is_some_and(|(_, generation)| generation == self.generation)
    }

    fn seen(&self) -> FoundRoute {
        let [stable, canary] = self.weights;
        let backend = |place, weight| Backend { place, weight };
        FoundRoute {
            uid: self.uid.clone(),
            resource_version: self.version.to_string(),
            matches: true,
            splits: vec![RouteSplit {
                rule: 0,
                stable: backend(0, stable),
                canary: backend(1, canary),
            }],
            problem: (!self.is_taken()).then(|| "Gateway edge has not seen it yet".into()),
        }
    }
}
