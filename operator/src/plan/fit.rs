//! Does the canary fit? Asked before its pods are made and before they grow; `places::fit` has the arithmetic.
//!
//! The answer is memory (`status.rollout.room`) before anything gives way, and the gap is told before it opens. A canary that fits nowhere
//! is not begun: stable is left as it is and the question is asked again.

use std::time::Duration;

use mixquant_crds::rollout::Surge;
use mixquant_crds::status::{ConditionType, Reason, RolloutStage, RolloutStatus};

use super::{Decisions, World, effects};
use crate::action::RoomQuestion;
use crate::canary;
use crate::observed::FrozenRevision;
use crate::places::{self, Fit};
use crate::validate::ValidService;

/// How often a canary without room is looked at again: nodes and other pods are not watched.
const LOOK_AGAIN: Duration = Duration::from_mins(1);

fn fit(world: &World<'_>, decisions: &mut Decisions, target: &FrozenRevision, wanted: i32) -> Fit {
    let Some(stable) = &decisions.memory.stable else {
        return Fit::Beside;
    };
    let known = world.observed.room.as_ref();
    if let (None, Surge::Auto | Surge::Never) = (known, world.valid.rollout.surge) {
        decisions.asks_room = Some(Box::new(RoomQuestion {
            template: target.template.clone(),
            stable: stable.revision.clone(),
        }));
    }
    let peak = canary::peak(&world.valid.rollout, world.valid.replicas).max(wanted);
    match places::fit(world.valid, (wanted, peak), known) {
        Fit::Instead { .. } if !effects::is_kept(world, stable) => Fit::Nowhere(format!(
            "stable would have to make room, and its template is lost, so it could not come back: no ControllerRevision of {}",
            stable.revision
        )),
        fit @ (Fit::Beside | Fit::Instead { .. } | Fit::Nowhere(_)) => fit,
    }
}

/// Whether a trial of `target` that would begin `at` this stage finds room; told once when it does not. The first revision is not asked:
/// nothing has to give way for it.
pub(super) fn may_begin(
    world: &World<'_>,
    decisions: &mut Decisions,
    target: &FrozenRevision,
    at: &RolloutStatus,
) -> bool {
    if decisions.memory.stable.is_none() {
        return true;
    }
    let wanted = canary::wanted(&world.valid.rollout, at, world.valid.replicas);
    let Fit::Nowhere(why) = fit(world, decisions, target, wanted) else {
        return true;
    };
    let message = format!("revision {} waits: {why}", target.revision);
    let mut said = decisions.memory.conditions.iter();
    let told = said.any(|said| {
        said.type_ == ConditionType::Ready.as_str()
            && said.reason == Reason::InsufficientCapacity.as_str()
    });
    if !told {
        decisions.tell(true, Reason::InsufficientCapacity, message.clone());
    }
    decisions.no_room = Some(message);
    decisions.wake.push(LOOK_AGAIN);
    false
}

/// Whether stable may have `replicas` pods while `target` is on trial: only where all of them, and the canary's at its largest, fit as well.
pub(super) fn may_grow(
    world: &World<'_>,
    decisions: &mut Decisions,
    target: &FrozenRevision,
    replicas: i32,
) -> bool {
    let at = decisions.memory.rollout.as_ref();
    let free = at.is_some_and(|at| at.room.is_empty() && at.stage != RolloutStage::RollingBack);
    let valid = ValidService {
        replicas,
        ..world.valid.clone()
    };
    let grown = World {
        valid: &valid,
        ..*world
    };
    let peak = canary::peak(&valid.rollout, replicas);
    free && fit(&grown, decisions, target, peak) == Fit::Beside
}

/// Before the canary's pods are made or grow: where they do not all fit beside stable's, some of stable's make room from now on.
pub(super) fn make_room(world: &World<'_>, decisions: &mut Decisions, target: &FrozenRevision) {
    let memory = &decisions.memory;
    let (Some(stable), Some(canary), Some(at)) = (&memory.stable, &memory.canary, &memory.rollout)
    else {
        return;
    };
    let replicas = world.valid.replicas;
    let wanted = canary::wanted(&world.valid.rollout, at, replicas);
    let has = |revision: &str| world.deployment(revision).map_or(0, |seen| seen.replicas);
    // Stable grows too: when the trial that it made room for gives way to another.
    let grows = wanted > has(&canary.revision) || replicas > has(&stable.revision);
    let leaves = at.stage == RolloutStage::RollingBack;
    if !at.room.is_empty() || !grows || leaves || canary.revision != target.revision {
        return;
    }
    let Fit::Instead { fits, gap } = fit(world, decisions, target, wanted) else {
        return;
    };
    if let Some(at) = &mut decisions.memory.rollout {
        at.room = fits;
    }
    decisions.tell(true, Reason::InsufficientCapacity, gap);
}
