//! The number of pods that this pass works with: the spec's, or what `scaling` makes of the load. It is memory before anything follows from it.
//!
//! A trial compares two tracks under one load: while it lasts no pod is taken away, and pods are added only where the trial's own pods keep
//! their room. A status that is lost or that somebody wrote is no order: the number begins anew with no fewer pods than there are, and
//! never leaves the bounds.

use std::borrow::Cow;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mixquant_crds::MixQuantServiceStatus;
use mixquant_crds::scaling::{Hold, ScalingStatus};
use mixquant_crds::status::Reason;

use super::{Decisions, World, fit};
use crate::canary;
use crate::load::LoadWindow;
use crate::observed::FrozenRevision;
use crate::scaling::{self, Choice};
use crate::validate::{Scaling, ValidService};

/// The service with the number of pods that are wanted now.
pub(super) fn scaled<'a>(
    world: &World<'a>,
    decisions: &mut Decisions,
    target: Option<&FrozenRevision>,
) -> Cow<'a, ValidService> {
    let Some(scaling) = &world.valid.scaling else {
        decisions.memory.scaling = None;
        return Cow::Borrowed(world.valid);
    };
    let known = decisions.memory.scaling.take();
    let current = begun(world, &decisions.memory, (scaling, known.as_ref()));
    let choice = choice(world, decisions, target, (scaling, current));
    let next = match known {
        Some(known) if known.desired_replicas == choice.replicas => known,
        Some(ScalingStatus {
            desired_replicas: before,
            ..
        }) => {
            let note = format!("{before} to {} pods: {}", choice.replicas, choice.why);
            decisions.tell(false, Reason::Scaled, note);
            ScalingStatus {
                desired_replicas: choice.replicas,
                reason: choice.why,
                last_scale_time: Some(Time(world.now)),
                held: None,
            }
        }
        None => ScalingStatus {
            desired_replicas: choice.replicas,
            reason: format!("it begins with {current}"),
            last_scale_time: None,
            held: None,
        },
    };
    decisions.memory.scaling = Some(next);
    if decisions.memory.stable.is_some() {
        let look = Duration::from_secs(scaling::LOOK.into());
        decisions.wake.push(look);
    }
    Cow::Owned(ValidService {
        replicas: choice.replicas,
        ..world.valid.clone()
    })
}

/// The pods that there are to scale from.
fn begun(
    world: &World<'_>,
    memory: &MixQuantServiceStatus,
    (scaling, known): (&Scaling, Option<&ScalingStatus>),
) -> i32 {
    let most = scaling.most();
    if let Some(known) = known {
        return known.desired_replicas.clamp(1, most);
    }
    // Nobody knows what was decided before: a lost status takes no pod away.
    let stable = memory.stable.as_ref();
    let deployments = world.observed.deployments.iter();
    let deployments = deployments
        .filter(|deployment| stable.is_none_or(|stable| stable.revision == deployment.revision));
    let there = deployments.map(|deployment| deployment.replicas).max();
    let bounds = scaling.bounds_at(world.now);
    bounds.nearest(world.valid.replicas.max(there.unwrap_or(0)))
}

fn choice(
    world: &World<'_>,
    decisions: &mut Decisions,
    target: Option<&FrozenRevision>,
    (scaling, current): (&Scaling, i32),
) -> Choice {
    let same = || Choice {
        replicas: current,
        why: "a canary is on trial".into(),
    };
    let loads = &world.samples.loads;
    let choice = scaling::choose(scaling, loads, current, world.now);
    let (stable, canary) = (&decisions.memory.stable, &decisions.memory.canary);
    match (stable, canary, target) {
        (_, None, _) => choice,
        // The first revision has no load yet, and what leaves has no say.
        (None, Some(_), _) | (Some(_), Some(_), None) => same(),
        (Some(_), Some(canary), Some(target)) => {
            let grows = choice.replicas > current && canary.revision == target.revision;
            if grows && fit::may_grow(world, decisions, target, choice.replicas) {
                choice
            } else {
                same()
            }
        }
    }
}

/// Says what keeps the number as it is, once this pass has moved the trial.
pub(super) fn say_what_holds(world: &World<'_>, decisions: &mut Decisions) {
    let memory = &mut decisions.memory;
    let (Some(scaling), Some(status)) = (&world.valid.scaling, &mut memory.scaling) else {
        return;
    };
    let blind = || scaling::is_blind(scaling, &world.samples.loads, world.now);
    status.held = if memory.canary.is_some() && memory.stable.is_some() {
        Some(Hold::Trial)
    } else {
        blind().then_some(Hold::NoData)
    };
}

/// What the shell keeps of the load until the next pass; nothing while nothing serves, and nothing that nobody scales by.
pub(super) fn load_window(world: &World<'_>, memory: &MixQuantServiceStatus) -> Option<LoadWindow> {
    let scaling = world.valid.scaling.as_ref()?;
    let stable = memory.stable.as_ref()?;
    let at = memory.rollout.as_ref();
    let shares = at.is_some_and(|at| canary::shares_traffic(&world.valid.rollout, at));
    let canary = memory.canary.as_ref().filter(|_| shares);
    let revisions = [Some(stable), canary].into_iter().flatten();
    Some(LoadWindow {
        revisions: revisions.map(|role| role.revision.clone()).collect(),
        keep: scaling::keep(scaling),
    })
}
