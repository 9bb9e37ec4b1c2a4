//! How a trial ends or comes to a halt: by promotion, by rolling back, by standing still until a person decides.
//!
//! It touches only the memory; effects follow. Every end is told with its evidence.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mixquant_crds::rollout::TrialFailure;
use mixquant_crds::status::{
    Halt, MixQuantServiceStatus, PromotedRevision, Reason, RolloutStage, RolloutStatus,
};

use super::{Decisions, World};
use crate::action::Metric;
use crate::canary;
use crate::observed::ObservedPod;

/// Revisions that were promoted and are remembered: as far as a rollback window may reach, and stable.
const PROMOTED: usize = 11;
/// A container that ended so often will go on ending.
const MAX_RESTARTS: i32 = 3;
/// What keeps a container from being made may be put right while the pod is young.
const YOUNG_SECONDS: u32 = 30;

/// The pointer moves. Traffic and pods follow as effects.
pub(super) fn promote(world: &World<'_>, decisions: &mut Decisions, why: &str) {
    let Some(canary) = decisions.memory.canary.take() else {
        return;
    };
    let note = format!("revision {} is stable: {why}", canary.revision);
    let promoted = &mut decisions.memory.promoted;
    promoted.retain(|known| known.revision != canary.revision);
    let revision = canary.revision.clone();
    let at = Time(world.now);
    promoted.insert(0, PromotedRevision { revision, at });
    promoted.truncate(PROMOTED);
    decisions.memory.stable = Some(canary);
    decisions.memory.rollout = None;
    decisions.tell(false, Reason::Promoted, note);
    decisions.count(Metric::Promotion);
}

/// Whether `revision` was stable so lately that going back to it takes no steps.
pub(super) fn in_rollback_window(
    world: &World<'_>,
    memory: &MixQuantServiceStatus,
    revision: &str,
) -> bool {
    let stable = memory.stable.as_ref().map(|stable| &stable.revision);
    let mut earlier = memory
        .promoted
        .iter()
        .filter(|known| Some(&known.revision) != stable)
        .take(world.valid.rollout.rollback_window);
    earlier.any(|known| known.revision == revision)
}

/// The trial has failed: remembered with its evidence before anything else happens.
pub(super) fn roll_back(
    world: &World<'_>,
    decisions: &mut Decisions,
    revision: &str,
    cause: Reason,
) {
    let evidence = evidence(world, decisions, revision, cause);
    let at = decisions.memory.rollout.as_ref();
    let needs_room = at.is_some_and(|at| !at.room.is_empty());
    let message = match world.valid.rollout.keep_failed {
        _ if needs_room => format!("{evidence}; its pods make room for stable's"),
        0 => evidence,
        kept => format!("{evidence}; its pods are kept for {kept} s"),
    };
    if let Some(at) = &mut decisions.memory.rollout {
        at.stage = RolloutStage::RollingBack;
        at.step_started_at = Time(world.now);
        at.paused = None;
    }
    let promoted = &mut decisions.memory.promoted;
    promoted.retain(|known| known.revision != revision);
    decisions.fail(world, revision, cause, &message);
    decisions.count(Metric::Rollback { cause });
}

/// The trial stands still until a person decides; told once.
pub(super) fn halt(world: &World<'_>, decisions: &mut Decisions, revision: &str, why: Halt) {
    let Some(at) = &mut decisions.memory.rollout else {
        return;
    };
    if at.paused.is_some() {
        return;
    }
    let cause = match why {
        Halt::Deadline => Reason::ProgressDeadlineExceeded,
        Halt::Gate | Halt::Spec => Reason::SLOViolated,
    };
    at.paused = Some(why);
    if why != Halt::Spec {
        let evidence = evidence(world, decisions, revision, cause);
        let note = format!("{evidence}; it stands still until a person promotes or aborts it");
        decisions.tell(true, Reason::RolloutPaused, note);
    }
}

/// A stage that takes too long has failed.
pub(super) fn check_deadline(world: &World<'_>, decisions: &mut Decisions, revision: &str) {
    let rollout = &world.valid.rollout;
    let Some(at) = decisions.memory.rollout.clone() else {
        return;
    };
    let Some(deadline) = canary::deadline(rollout, &at) else {
        return;
    };
    if world.now < deadline {
        decisions.wake_at(deadline, world.now);
    } else if canary::is_reached(rollout, &at)
        && at.waived.is_none()
        && rollout.on_failure == TrialFailure::Pause
    {
        halt(world, decisions, revision, Halt::Deadline);
    } else {
        roll_back(world, decisions, revision, Reason::ProgressDeadlineExceeded);
    }
}

/// Rolls back a canary whose pods end again and again or cannot be made: the deadline would only tell the same later.
pub(super) fn check_pods(world: &World<'_>, decisions: &mut Decisions, revision: &str) -> bool {
    let pods = world.observed.pods.iter();
    let mut ill = pods.filter(|pod| pod.revision == revision && !pod.ready && !pod.terminating);
    let hopeless = ill.clone().any(|pod| is_hopeless(pod, world.now));
    if hopeless {
        roll_back(world, decisions, revision, Reason::PodsFailing);
    } else if let Some(young) = ill.find(|pod| pod.cannot_start.is_some()) {
        decisions.wake_at(grown_up(young), world.now);
    }
    hopeless
}

fn grown_up(pod: &ObservedPod) -> Timestamp {
    canary::later(pod.created_at, YOUNG_SECONDS)
}

fn is_hopeless(pod: &ObservedPod, now: Timestamp) -> bool {
    pod.restarts >= MAX_RESTARTS || (pod.cannot_start.is_some() && now >= grown_up(pod))
}

fn place(world: &World<'_>, at: &RolloutStatus) -> String {
    match at.stage {
        RolloutStage::Starting => "while its pods started".to_owned(),
        RolloutStage::Stepping => match canary::copies(&world.valid.rollout, at) {
            None => format!("at step {}", at.step + 1),
            Some(percent) => format!("at step {} (mirrors {percent} %)", at.step + 1),
        },
        RolloutStage::Promoting | RolloutStage::RollingBack => "while it was promoted".to_owned(),
    }
}

fn evidence(world: &World<'_>, decisions: &Decisions, revision: &str, cause: Reason) -> String {
    let Some(at) = &decisions.memory.rollout else {
        return format!("revision {revision} failed");
    };
    let last = at.verdict.as_ref().map(|verdict| verdict.message.as_str());
    let place = place(world, at);
    let problem = world
        .deployment(revision)
        .and_then(|deployment| deployment.problem.as_deref());
    if cause == Reason::Aborted {
        return format!("revision {revision} was aborted by a person {place}");
    }
    if cause == Reason::PodsFailing {
        let mut pods = world.observed.pods.iter();
        let pod = pods.find(|pod| pod.revision == revision && pod.cannot_start.is_some());
        let why = pod.and_then(|pod| pod.cannot_start.as_deref()).or(problem);
        let why = why.unwrap_or("its containers end again and again");
        return format!("revision {revision} failed {place}: {why}");
    }
    if cause != Reason::ProgressDeadlineExceeded {
        let why = last.unwrap_or("no evidence");
        return format!("revision {revision} failed {place}: {why}");
    }
    let seconds = world.valid.rollout.progress_deadline;
    let route = super::route_problem(world, &decisions.memory);
    let why = problem
        .or(route.as_deref())
        .or(last)
        .unwrap_or("its pods are not ready");
    format!("revision {revision} did not move on within {seconds} s {place}: {why}")
}
