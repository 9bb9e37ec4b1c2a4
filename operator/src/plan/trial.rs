//! The trial of a new revision: begins it, moves it at most one stage a pass, ends it by promotion or by rolling back.
//!
//! It touches only the memory. A stage is entered upwards only with what this pass has seen itself: pods that run, a Pass on samples of
//! this window. What the status says of earlier verdicts is never taken as proof.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mixquant_crds::status::{
    MixQuantServiceStatus, Outcome, Reason, RevisionStatus, RolloutStage, RolloutStatus,
};

use super::{Decisions, World, effects, verdict};
use crate::action::Metric;
use crate::canary;
use crate::observed::FrozenRevision;

/// Moves the memory on towards `target`; `None` while nothing is known to be worth serving.
pub(super) fn advance(
    world: &World<'_>,
    decisions: &mut Decisions,
    target: Option<&FrozenRevision>,
) {
    let stable = role(decisions.memory.stable.as_ref());
    let canary = role(decisions.memory.canary.as_ref());
    let Some(target) = target else {
        return finish_or_drop(world, decisions, canary.as_deref());
    };
    if stable.as_deref() == Some(&target.revision) {
        return drop_canary(decisions, "the spec is what stable serves");
    }
    if decisions.failure(world.valid, &target.revision).is_some() {
        return finish_or_drop(world, decisions, canary.as_deref());
    }
    match (canary, decisions.memory.rollout.clone()) {
        (Some(canary), Some(at))
            if canary == target.revision
                && at.request == world.valid.request
                && at.stage != RolloutStage::RollingBack =>
        {
            decisions.memory.rollout = Some(RolloutStatus {
                generation: world.valid.generation,
                ..at
            });
            stage(world, decisions, target);
        }
        (Some(_), _) => {
            drop_canary(decisions, "the spec has changed");
            begin(world, decisions, target);
        }
        (None, _) => begin(world, decisions, target),
    }
}

fn role(status: Option<&RevisionStatus>) -> Option<String> {
    status.map(|status| status.revision.clone())
}

/// A canary that failed leaves; one that nobody asks for any more is dropped.
fn finish_or_drop(world: &World<'_>, decisions: &mut Decisions, canary: Option<&str>) {
    let rolling_back = decisions
        .memory
        .rollout
        .as_ref()
        .is_some_and(|at| at.stage == RolloutStage::RollingBack);
    match canary {
        Some(canary) if rolling_back => {
            let gone = world
                .deployment(canary)
                .is_none_or(|deployment| deployment.replicas == 0);
            if gone && effects::traffic_is_right(world, &decisions.memory) {
                clear(&mut decisions.memory);
            }
        }
        Some(_) => drop_canary(decisions, "the spec has changed"),
        None => clear(&mut decisions.memory),
    }
}

fn clear(memory: &mut MixQuantServiceStatus) {
    memory.canary = None;
    memory.rollout = None;
}

fn drop_canary(decisions: &mut Decisions, why: &str) {
    if let Some(canary) = &decisions.memory.canary {
        let note = format!("the trial of revision {} ends: {why}", canary.revision);
        decisions.tell(false, Reason::RollingOut, note);
    }
    clear(&mut decisions.memory);
}

fn begin(world: &World<'_>, decisions: &mut Decisions, target: &FrozenRevision) {
    decisions.memory.canary = Some(RevisionStatus {
        revision: target.revision.clone(),
        artifact_digest: target.artifact_digest.clone(),
        model_digest: target.model_digest.clone(),
        image: target.image.clone(),
    });
    decisions.memory.rollout = Some(RolloutStatus {
        stage: RolloutStage::Starting,
        step: 0,
        step_started_at: Time(world.now),
        generation: world.valid.generation,
        request: world.valid.request.clone(),
        weight: 0,
        failed_verdicts: 0,
        verdict: None,
    });
    let note = match &decisions.memory.stable {
        Some(stable) => format!(
            "revision {} starts beside stable {}",
            target.revision, stable.revision
        ),
        None => format!("the first revision {} starts", target.revision),
    };
    decisions.tell(false, Reason::RollingOut, note);
    wake_at_deadline(world, decisions);
}

/// One stage of the trial of `target`, which is the canary.
fn stage(world: &World<'_>, decisions: &mut Decisions, target: &FrozenRevision) {
    let Some(at) = decisions.memory.rollout.clone() else {
        return;
    };
    let first = decisions.memory.stable.is_none();
    match at.stage {
        RolloutStage::Starting => starting(world, decisions, target, &at),
        RolloutStage::Stepping | RolloutStage::Promoting if first => {
            // Only a forged status says so: without stable there is nothing to step beside.
            begin(world, decisions, target);
        }
        RolloutStage::Stepping => stepping(world, decisions, target, &at),
        RolloutStage::Promoting => promoting(world, decisions, target, &at),
        RolloutStage::RollingBack => {}
    }
}

fn starting(
    world: &World<'_>,
    decisions: &mut Decisions,
    target: &FrozenRevision,
    at: &RolloutStatus,
) {
    let replicas = world.valid.replicas;
    if decisions.memory.stable.is_none() {
        if world.runs(&target.revision, replicas) {
            return promote(decisions, "all its pods are ready");
        }
    } else if world.runs(
        &target.revision,
        canary::size(&world.valid.rollout, at, replicas),
    ) && effects::others_are_gone(world, &decisions.memory)
    {
        return enter(world, decisions, RolloutStage::Stepping, 0);
    }
    check_deadline(world, decisions, target, at);
}

fn stepping(
    world: &World<'_>,
    decisions: &mut Decisions,
    target: &FrozenRevision,
    at: &RolloutStatus,
) {
    let rollout = &world.valid.rollout;
    let passed = match verdict::judge(world, decisions, at) {
        Some(Outcome::Fail) if too_many_failures(world, decisions) => {
            return roll_back(world, decisions, target, Reason::SLOViolated);
        }
        Some(Outcome::Pass) => true,
        Some(Outcome::Fail | Outcome::Inconclusive) | None => false,
    };
    if passed && canary::held(rollout, at, world.now) {
        let (stage, step) = if canary::has_next(rollout, at.step) {
            (RolloutStage::Stepping, at.step + 1)
        } else {
            (RolloutStage::Promoting, at.step)
        };
        return enter(world, decisions, stage, step);
    }
    check_deadline(world, decisions, target, at);
}

fn promoting(
    world: &World<'_>,
    decisions: &mut Decisions,
    target: &FrozenRevision,
    at: &RolloutStatus,
) {
    match verdict::judge(world, decisions, at) {
        Some(Outcome::Fail) if too_many_failures(world, decisions) => {
            return roll_back(world, decisions, target, Reason::SLOViolated);
        }
        // The verdict counts pods that run all, see `verdict::judge`.
        Some(Outcome::Pass) => return promote(decisions, "it passed every step"),
        Some(Outcome::Fail | Outcome::Inconclusive) | None => {}
    }
    check_deadline(world, decisions, target, at);
}

fn too_many_failures(world: &World<'_>, decisions: &Decisions) -> bool {
    let failed = decisions.memory.rollout.as_ref();
    failed.is_some_and(|at| at.failed_verdicts >= world.valid.rollout.failure_limit)
}

fn enter(world: &World<'_>, decisions: &mut Decisions, stage: RolloutStage, step: i32) {
    let rollout = &world.valid.rollout;
    let weight = canary::step(rollout, step).weight;
    let count = rollout.steps.len();
    if let Some(at) = &mut decisions.memory.rollout {
        at.stage = stage;
        at.step = step;
        at.step_started_at = Time(world.now);
        at.failed_verdicts = 0;
        let due = canary::verdict_due(rollout, at);
        decisions.wake_at(due, world.now);
    }
    let revision = role(decisions.memory.canary.as_ref()).unwrap_or_default();
    let note = match stage {
        RolloutStage::Promoting => {
            format!("revision {revision} passed all {count} steps and grows to take over")
        }
        RolloutStage::Stepping | RolloutStage::Starting | RolloutStage::RollingBack => format!(
            "revision {revision} takes step {} of {count}: weight {weight} %",
            step + 1
        ),
    };
    decisions.tell(false, Reason::RollingOut, note);
}

/// The pointer moves. Traffic and pods follow as effects.
fn promote(decisions: &mut Decisions, why: &str) {
    let Some(canary) = decisions.memory.canary.take() else {
        return;
    };
    let note = format!("revision {} is stable: {why}", canary.revision);
    decisions.memory.stable = Some(canary);
    decisions.memory.rollout = None;
    decisions.tell(false, Reason::Promoted, note);
    decisions.count(Metric::Promotion);
}

fn check_deadline(
    world: &World<'_>,
    decisions: &mut Decisions,
    target: &FrozenRevision,
    at: &RolloutStatus,
) {
    if world.now >= canary::deadline(&world.valid.rollout, at) {
        roll_back(world, decisions, target, Reason::ProgressDeadlineExceeded);
    } else {
        wake_at_deadline(world, decisions);
    }
}

fn wake_at_deadline(world: &World<'_>, decisions: &mut Decisions) {
    if let Some(at) = &decisions.memory.rollout {
        let deadline = canary::deadline(&world.valid.rollout, at);
        decisions.wake_at(deadline, world.now);
    }
}

/// The trial has failed: remembered with its evidence before anything else happens.
fn roll_back(world: &World<'_>, decisions: &mut Decisions, target: &FrozenRevision, cause: Reason) {
    let message = evidence(world, decisions, target, cause);
    if let Some(at) = &mut decisions.memory.rollout {
        at.stage = RolloutStage::RollingBack;
        at.step_started_at = Time(world.now);
    }
    decisions.fail(world, &target.revision, cause, &message);
    decisions.count(Metric::Rollback { cause });
}

fn evidence(
    world: &World<'_>,
    decisions: &Decisions,
    target: &FrozenRevision,
    cause: Reason,
) -> String {
    let revision = &target.revision;
    let Some(at) = &decisions.memory.rollout else {
        return format!("revision {revision} failed");
    };
    let last = at.verdict.as_ref().map(|verdict| verdict.message.as_str());
    let place = match at.stage {
        RolloutStage::Starting => "while its pods started".to_owned(),
        RolloutStage::Stepping => format!("at step {}", at.step + 1),
        RolloutStage::Promoting | RolloutStage::RollingBack => "while it was promoted".to_owned(),
    };
    if cause != Reason::ProgressDeadlineExceeded {
        return format!(
            "revision {revision} failed {place}: {}",
            last.unwrap_or("no evidence")
        );
    }
    let seconds = world.valid.rollout.progress_deadline;
    let problem = world
        .deployment(revision)
        .and_then(|deployment| deployment.problem.as_deref());
    let why = problem.or(last).unwrap_or("its pods are not ready");
    format!("revision {revision} did not move on within {seconds} s {place}: {why}")
}
