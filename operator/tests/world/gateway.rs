//! The gateway: routes, what it has taken of them and when, the Services of the tracks, and what must hold of them at every moment.

use mixquant_crds::rollout::Step;
use mixquant_crds::status::{MixQuantServiceStatus, RolloutStage, RolloutStatus};
use mixquant_crds::traffic::{GatewayRef, RouteRef, TrafficMode, TrafficSpec};
use mixquant_crds::{MixQuantServiceSpec, Span};
use mixquant_operator::action::{RoutePatch, TrackRequest};
use mixquant_operator::canary::Share;
use mixquant_operator::observed::{
    Backend, FoundRoute, Observed, ObservedRoute, ObservedTraffic, RouteSplit, Track, Traffic,
};

use super::cluster::Cluster;
use super::traffic::REQUESTS_PER_SECOND;

/// What a route says: weights of stable and the canary, and percent of the requests that are copied to the canary.
type Said = ([i32; 2], Option<i32>);

fn said(share: Share) -> Said {
    ([100 - share.weight, share.weight], share.mirror)
}

/// A route with one rule, and what the gateway has taken of it.
#[derive(Debug, Clone)]
pub(super) struct Route {
    uid: String,
    version: u64,
    generation: u64,
    says: Said,
    /// That by which requests go, and the generation that it is of.
    taken: Option<(Said, u64)>,
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

/// The rollout begins with copies of so many percent, or without; only where the route is the service's own.
pub(super) fn mirror(spec: &mut MixQuantServiceSpec, percent: Option<i32>) {
    let steps = &mut spec.rollout.steps;
    steps.retain(|step| step.mirror.is_none());
    if percent.is_some() && !spec.traffic.parent_refs.is_empty() {
        steps.insert(
            0,
            Step {
                weight: None,
                mirror: percent,
                canary_replicas: None,
                hold: Some(Span("20s".into())),
                pause: None,
            },
        );
    }
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

    fn write(&mut self, route: Option<Route>, says: Said) -> Route {
        let lag = i64::try_from(self.dice.below(8)).unwrap();
        let before = route.unwrap_or(Route {
            uid: format!("route-{}", self.changes),
            version: 0,
            generation: 0,
            says,
            taken: None,
            takes_at: 0,
        });
        Route {
            version: before.version + 1,
            generation: before.generation + 1,
            says,
            takes_at: self.gateway.down_until.max(self.now + lag),
            ..before
        }
    }

    /// A user makes the route that the spec refers to, with weights of the user's.
    pub(super) fn make_users_route(&mut self) {
        if self.routes_users() && self.gateway.users.is_none() {
            let route = self.write(None, ([50, 50], None));
            self.gateway.users = Some(route);
        }
    }

    pub(super) fn apply_route(&mut self, share: Share) -> Result<(), String> {
        self.may_weigh(share.weight)?;
        if share.mirror.is_some() && share.mirror != self.mirrors_at() {
            return Err(format!("copies of {share} and the step asks for none"));
        }
        let before = self.gateway.own.take();
        let route = self.write(before, said(share));
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
        let route = self.write(Some(before), ([100 - patch.weight, patch.weight], None));
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
        let says = ([100 - weight, weight], before.says.1);
        let route = Some(self.write(Some(before), says));
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
                route.taken = Some((route.says, route.generation));
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

    /// Percent of the requests that are to be copied at the place where memory says that the trial of the spec as it is stands.
    pub(super) fn mirrors_at(&self) -> Option<i32> {
        let status = self.status();
        let at = status.rollout.filter(|_| status.canary.is_some())?;
        let is_of_spec = Some(at.generation) == self.service.metadata.generation;
        if at.stage != RolloutStage::Stepping || !is_of_spec {
            return None;
        }
        let steps = &self.service.spec.rollout.steps;
        let count = usize::try_from(at.step + 1).unwrap().min(steps.len());
        let so_far = &steps[..count];
        let shares = so_far.iter().any(|step| step.weight.is_some());
        let mirrors = so_far.iter().rev().find_map(|step| step.mirror);
        mirrors.filter(|_| !shares)
    }

    /// Who is to answer copies only answers nobody else.
    pub(super) fn check_copies(&self) -> Result<(), String> {
        let status = self.status();
        let (Some(_), Some(canary)) = (self.mirrors_at(), status.canary) else {
            return Ok(());
        };
        let taken = self.route().and_then(|route| route.taken);
        let weight = taken.map_or(0, |(([_, weight], _), _)| weight);
        let by_route = weight > 0 && self.gateway.tracks[1].as_ref() == Some(&canary.revision);
        if by_route || self.traffic == Some(Traffic::All) {
            return Err(format!(
                "people meet {}, which is to answer copies only (weight {weight})",
                canary.revision
            ));
        }
        Ok(())
    }

    /// The most that a canary may have at a place of its trial.
    fn weight_at(&self, at: &RolloutStatus) -> i32 {
        let steps = &self.service.spec.rollout.steps;
        let weights = |steps: &[Step]| {
            let weights = steps.iter().filter_map(|step| step.weight);
            weights.max().unwrap_or(0)
        };
        let count = usize::try_from(at.step + 1).unwrap().min(steps.len());
        match at.stage {
            RolloutStage::Starting | RolloutStage::RollingBack => 0,
            // Where stable makes room, all may be the canary's.
            _ if !at.room.is_empty() && self.mirrors_at().is_none() => 100,
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
        let weight = taken.map(|(([_, canary], _), _)| canary);
        let copies = taken.and_then(|((_, copies), _)| copies);
        let turned = self.gateway.tracks[1].as_ref() == Some(&canary.revision);
        if self.weight_at(at) > 0 && (weight != Some(self.weight_at(at)) || !turned) {
            return Err(format!(
                "a step is left and the gateway gives the canary {weight:?}"
            ));
        }
        if let Some(asked) = self.mirrors_at()
            && (copies != Some(asked) || !turned)
        {
            return Err(format!(
                "a step is left and the gateway copies {copies:?} to the canary"
            ));
        }
        Ok(())
    }

    /// Whoever comes by the route finds enough pods behind each Service that has a weight.
    pub(super) fn check_route(&self, floor: i32) -> Result<(), String> {
        let Some((([stable, canary], _), _)) = self.route().and_then(|route| route.taken) else {
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
        let Some(((weights, copies), _)) = taken else {
            let pods = self.pods.iter().enumerate();
            let pods = pods.filter(|(_, pod)| self.is_ready(pod) && self.selects(&pod.revision));
            return vec![(pods.map(|(index, _)| index).collect(), 100)];
        };
        let [stable, canary] = &self.gateway.tracks;
        let [to_stable, to_canary] = weights;
        // A copy is made of a request whoever answers it.
        let ways = [
            (stable, to_stable),
            (canary, to_canary),
            (canary, copies.unwrap_or(0)),
        ];
        let ways = ways.map(|(revision, percent)| {
            let ready = revision.as_deref().map(|revision| self.ready_of(revision));
            (ready.unwrap_or_default(), percent.unsigned_abs().into())
        });
        ways.to_vec()
    }

    /// Requests of some seconds are answered.
    pub(super) fn serve(&mut self, seconds: i64) {
        // More than this in one go tells nothing new.
        let requests = REQUESTS_PER_SECOND * seconds.clamp(0, 60).unsigned_abs();
        if self.quiet {
            return;
        }
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
        let weights = self.route().map(|route| (route.says, route.is_taken()));
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
        let ([stable, canary], mirror) = self.says;
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
            mirror,
            problem: (!self.is_taken()).then(|| "Gateway edge has not seen it yet".into()),
        }
    }
}
