//! Who gets the traffic: the Services' selectors, which turn it on and off, and the weights of a gateway's route, which split it.
//!
//! A canary has traffic only while a Service selects it, whatever a route says and whether or not its Gateway listens; so rolling back
//! and promoting need the selectors alone. The canary's Service turns to the canary only when the route was seen with the weight of this
//! step, taken by its Gateways; until then, and whenever nothing is on trial, it selects stable.

use std::time::Duration;

use mixquant_crds::MixQuantServiceStatus;

use super::effects::{name, push};
use super::{Decisions, World};
use crate::action::{Action, ObjectRef, RoutePatch, TrackRequest};
use crate::build::service::track_name;
use crate::canary::{self, Share};
use crate::observed::{FoundRoute, Kind, ObservedRoute, Track, Traffic};
use crate::validate::Routing;

/// How soon to look again at a Gateway that has not answered, should its watch be lost.
const LOOK_AGAIN: Duration = Duration::from_mins(1);

/// Whether the trial is at a place where people get its canary's answers.
fn shares(world: &World<'_>, memory: &MixQuantServiceStatus) -> bool {
    let at = memory.rollout.as_ref().filter(|_| memory.canary.is_some());
    at.is_some_and(|at| canary::shares_traffic(&world.valid.rollout, at))
}

/// Whether the trial is at a place where requests, or copies of them, reach its canary.
fn is_reached(world: &World<'_>, memory: &MixQuantServiceStatus) -> bool {
    let at = memory.rollout.as_ref().filter(|_| memory.canary.is_some());
    at.is_some_and(|at| canary::is_reached(&world.valid.rollout, at))
}

/// The pods that the main Service should select; `None` while there is nothing to select.
fn wanted_traffic(world: &World<'_>, memory: &MixQuantServiceStatus) -> Option<Traffic> {
    let stable = memory.stable.as_ref()?;
    // Beside a route the one address is stable's, unless stable has made room and may have nothing left.
    let made_room = memory
        .rollout
        .as_ref()
        .is_some_and(|at| !at.room.is_empty());
    let by_pods = !world.valid.rollout.routed || made_room;
    Some(if by_pods && shares(world, memory) {
        Traffic::All
    } else {
        Traffic::Only(stable.revision.clone())
    })
}

/// The revision that a track's Service should select.
fn wanted_track(world: &World<'_>, memory: &MixQuantServiceStatus, track: Track) -> Option<String> {
    let stable = memory.stable.as_ref()?;
    let canary = memory
        .canary
        .as_ref()
        .filter(|_| track == Track::Canary && world.valid.rollout.routed)
        .filter(|_| is_reached(world, memory))
        // Its weight would send requests to nobody.
        .filter(|canary| is_ready(world, &canary.revision))
        .filter(|canary| selects(world, track, &canary.revision) || may_turn(world, memory));
    Some(canary.unwrap_or(stable).revision.clone())
}

fn is_ready(world: &World<'_>, revision: &str) -> bool {
    world
        .deployment(revision)
        .is_some_and(|seen| seen.ready > 0)
}

/// Whether a track's Service is seen to select `revision`.
fn selects(world: &World<'_>, track: Track, revision: &str) -> bool {
    let seen = world.observed.tracks.of(track);
    let selected = seen.and_then(|seen| seen.selects.as_ref());
    matches!(selected, Some(Traffic::Only(only)) if only == revision)
}

/// Whether the Services have been seen to select what they should: pods that are in none of them may leave.
pub fn traffic_is_right(world: &World<'_>, memory: &MixQuantServiceStatus) -> bool {
    let seen = world.observed.traffic.as_ref();
    let main = wanted_traffic(world, memory) == seen.and_then(|seen| seen.selects.clone());
    main && Track::ALL.into_iter().all(|track| {
        let is_used = world.valid.rollout.routed || world.observed.tracks.of(track).is_some();
        let wanted = wanted_track(world, memory, track);
        !is_used || wanted.is_none_or(|wanted| selects(world, track, &wanted))
    })
}

/// What of the route the canary should have.
fn wanted_share(world: &World<'_>, memory: &MixQuantServiceStatus) -> Share {
    let at = memory.rollout.as_ref().filter(|_| memory.canary.is_some());
    at.map_or_else(Share::default, |at| {
        canary::asked_share(&world.valid.rollout, at, world.valid.replicas)
    })
}

/// Whether the Gateways have taken a route by which the canary gets what it should, of people's requests exactly. Copies may be too many:
/// better on the canary than on stable, which would be behind its Service otherwise; the step's time does not run by them.
fn may_turn(world: &World<'_>, memory: &MixQuantServiceStatus) -> bool {
    let share = wanted_share(world, memory);
    match &world.observed.route {
        Some(ObservedRoute::Found(found)) => {
            let mirror = share.mirror.map(|asked| found.mirror.unwrap_or(asked));
            says(found, Share { mirror, ..share }) && found.problem.is_none()
        }
        Some(ObservedRoute::Unknown { .. } | ObservedRoute::Missing) | None => false,
    }
}

fn route_is_taken(world: &World<'_>, memory: &MixQuantServiceStatus) -> bool {
    route_problem(world, memory).is_none()
}

/// What keeps the gateway from splitting the traffic as it should; `None` when it does, or when no gateway is asked.
pub fn route_problem(world: &World<'_>, memory: &MixQuantServiceStatus) -> Option<String> {
    let service = &world.valid.name;
    let route = world.valid.traffic.route(service)?;
    memory.stable.as_ref()?;
    let tracks = Track::ALL
        .map(|track| track_name(service, track))
        .join(" and ");
    let why = match &world.observed.route {
        None => "has not been looked at".to_owned(),
        Some(ObservedRoute::Unknown { why }) => return Some(why.clone()),
        Some(ObservedRoute::Missing) => match world.valid.traffic {
            Routing::Users { .. } => format!(
                "does not exist: create it with a rule whose backendRefs are {tracks}, or correct spec.traffic.routeRef"
            ),
            Routing::Own(_) | Routing::ReplicaRatio => "does not exist yet".into(),
        },
        Some(ObservedRoute::Found(found)) => {
            let share = wanted_share(world, memory);
            if found.splits.is_empty() && matches!(world.valid.traffic, Routing::Users { .. }) {
                format!("has no rule whose backendRefs are {tracks}: add one")
            } else if !says(found, share) {
                format!(
                    "does not give the canary {share} yet{}",
                    why_not(found, share)
                )
            } else {
                found.problem.clone()?
            }
        }
    };
    Some(format!("HTTPRoute {route}: {why}"))
}

fn says(found: &FoundRoute, share: Share) -> bool {
    let mut splits = found.splits.iter();
    let weighs = !found.splits.is_empty() && splits.all(|split| split.gives(share.weight));
    found.matches && weighs && found.mirror == share.mirror
}

/// What an API that drops a field of the route leaves to be told.
fn why_not(found: &FoundRoute, share: Share) -> &'static str {
    let lost = share.mirror.is_some() && found.mirror.is_some_and(|mirror| mirror == 100);
    if lost {
        ": the cluster's Gateway API may be older than 1.3 and know no percent of a mirror; install a newer one, or mirror 100"
    } else {
        ""
    }
}

/// Whether the gateway splits the traffic as the trial's place asks, and the canary has its share.
pub(super) fn has_shifted(world: &World<'_>, memory: &MixQuantServiceStatus) -> bool {
    let canary = memory.canary.as_ref();
    let turned = canary.is_some_and(|canary| {
        !is_reached(world, memory) || selects(world, Track::Canary, &canary.revision)
    });
    turned && route_is_taken(world, memory) && traffic_is_right(world, memory)
}

/// Percent of the traffic that reaches the canary now.
pub fn weight(world: &World<'_>, memory: &MixQuantServiceStatus) -> i32 {
    let (Some(stable), Some(canary)) = (&memory.stable, &memory.canary) else {
        return 0;
    };
    let before = memory.rollout.as_ref().map_or(0, |at| at.weight);
    if world.valid.rollout.routed {
        return match &world.observed.route {
            _ if !selects(world, Track::Canary, &canary.revision) => 0,
            // Until the gateway says that it has taken the new weight, the old one is what counts.
            Some(ObservedRoute::Found(found)) if found.problem.is_none() => {
                let split = found.splits.first();
                split.map_or(before, |split| split.canary.weight)
            }
            Some(_) | None => before,
        };
    }
    let seen = world.observed.traffic.as_ref();
    if seen.is_none_or(|seen| seen.selects != Some(Traffic::All)) {
        return 0;
    }
    let ready = |revision: &str| world.deployment(revision).map_or(0, |seen| seen.ready);
    canary::achieved_weight(ready(&canary.revision), ready(&stable.revision))
}

/// Percent of the requests that are copied to the canary now.
pub fn mirror(world: &World<'_>, memory: &MixQuantServiceStatus) -> i32 {
    let (Some(canary), Some(at)) = (&memory.canary, &memory.rollout) else {
        return 0;
    };
    match &world.observed.route {
        _ if !selects(world, Track::Canary, &canary.revision) => 0,
        Some(ObservedRoute::Found(found)) if found.problem.is_none() => found.mirror.unwrap_or(0),
        Some(_) => at.mirror,
        None => 0,
    }
}

/// What the Services select. The weights come later, see [`route`]: a canary that failed leaves by its selector.
///
/// `surely`: also where they are seen to be right already.
pub(super) fn selectors(
    world: &World<'_>,
    decisions: &mut Decisions,
    surely: bool,
    actions: &mut Vec<Action>,
) {
    main_service(world, decisions, surely, actions);
    for track in Track::ALL {
        track_service(world, decisions, (track, surely), actions);
    }
}

fn main_service(
    world: &World<'_>,
    decisions: &mut Decisions,
    surely: bool,
    actions: &mut Vec<Action>,
) {
    let Some(wanted) = wanted_traffic(world, &decisions.memory) else {
        return;
    };
    let seen = world.observed.traffic.as_ref();
    let right = seen.is_some_and(|seen| seen.matches && seen.selects.as_ref() == Some(&wanted));
    if surely || !right {
        let object = name(Kind::Service, world.valid.name.clone());
        let action = Action::ApplyTraffic(wanted);
        push(world, decisions, actions, (object, action));
    }
}

/// The Services of the tracks stay when another way to split is asked for: a route that still names them goes on serving.
fn track_service(
    world: &World<'_>,
    decisions: &mut Decisions,
    (track, surely): (Track, bool),
    actions: &mut Vec<Action>,
) {
    let seen = world.observed.tracks.of(track);
    let Some(revision) = wanted_track(world, &decisions.memory, track) else {
        return;
    };
    let is_used = world.valid.rollout.routed || seen.is_some();
    let right = seen.is_some_and(|seen| seen.matches) && selects(world, track, &revision);
    if is_used && (surely || !right) {
        let object = name(Kind::Service, track_name(&world.valid.name, track));
        let action = Action::ApplyTrack(TrackRequest { track, revision });
        push(world, decisions, actions, (object, action));
    }
}

/// The weights. After everything that pods and selectors need: a user's edit or a refusal here ends the pass.
pub(super) fn route(world: &World<'_>, decisions: &mut Decisions, actions: &mut Vec<Action>) {
    let own = name(Kind::HTTPRoute, world.valid.name.clone());
    if let Some(uid) = &world.observed.old_route {
        actions.push(Action::Delete(ObjectRef {
            object: own.clone(),
            uid: uid.clone(),
        }));
    }
    if route_problem(world, &decisions.memory).is_none() {
        return;
    }
    decisions.wake.push(LOOK_AGAIN);
    let share = wanted_share(world, &decisions.memory);
    match (&world.valid.traffic, &world.observed.route) {
        (Routing::Own(_), Some(ObservedRoute::Missing)) => {
            let action = Action::ApplyRoute(share);
            push(world, decisions, actions, (own, action));
        }
        (Routing::Own(_), Some(ObservedRoute::Found(found))) if !says(found, share) => {
            let action = Action::ApplyRoute(share);
            push(world, decisions, actions, (own, action));
        }
        (Routing::Users { name }, Some(ObservedRoute::Found(found)))
            if !found.splits.is_empty() && !says(found, share) =>
        {
            actions.push(Action::PatchRoute(RoutePatch {
                name: name.clone(),
                uid: found.uid.clone(),
                resource_version: found.resource_version.clone(),
                splits: found.splits.clone(),
                weight: share.weight,
            }));
        }
        _ => {}
    }
}
