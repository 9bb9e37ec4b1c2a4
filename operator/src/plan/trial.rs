//! The trial of a new revision: begins it and moves it at most one stage a pass; `ending` ends it by promotion or by rolling back.
//!
//! It touches only the memory. A stage is entered upwards only with what this pass has seen itself: pods that run, a Pass on samples of
//! this window. What the status says of earlier verdicts is never taken as proof.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mixquant_crds::rollout::OnFailure;
use mixquant_crds::status::{
    Halt, MixQuantServiceStatus, Outcome, Reason, RevisionStatus, RolloutStage, RolloutStatus,
    Waiver,
};

use super::{Decisions, World, effects, ending, fit, traffic, verdict};
use crate::canary;
use crate::observed::FrozenRevision;
use crate::validate::Step;

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
        let why = match decisions.memory.undo {
            Some(_) => "a person asked for what stable serves",
            None => "the spec is what stable serves",
        };
        return drop_canary(decisions, why);
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
            let kept = effects::kept_until(world, &decisions.memory, canary).is_some();
            if (gone || kept) && traffic::traffic_is_right(world, &decisions.memory) {
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

/// Whether the traffic can be split: a trial behind a gateway that does not listen could only fail.
fn may_split(world: &World<'_>, memory: &MixQuantServiceStatus) -> bool {
    !world.valid.rollout.routed
        || (traffic::route_problem(world, memory).is_none()
            && traffic::traffic_is_right(world, memory))
}

/// Whether this step's time runs. Behind a gateway it begins when the weight was seen to be taken.
fn time_runs(world: &World<'_>, decisions: &mut Decisions) -> bool {
    let rollout = &world.valid.rollout;
    let shifted = traffic::has_shifted(world, &decisions.memory);
    let Some(at) = &mut decisions.memory.rollout else {
        return false;
    };
    if canary::is_shifted(rollout, at) {
        return true;
    }
    if shifted {
        at.shifted = true;
        at.step_started_at = Time(world.now);
        wake_in_step(world, decisions);
    }
    false
}

fn begin(world: &World<'_>, decisions: &mut Decisions, target: &FrozenRevision) {
    if world.valid.rollout.paused {
        return;
    }
    let stable = decisions.memory.stable.as_ref();
    let back =
        stable.is_some() && ending::in_rollback_window(world, &decisions.memory, &target.revision);
    if stable.is_some() && !back && !may_split(world, &decisions.memory) {
        return;
    }
    let note = match stable {
        Some(stable) if back => format!(
            "revision {} was stable lately: it takes over from {} when its pods run",
            target.revision, stable.revision
        ),
        Some(stable) => format!(
            "revision {} starts beside stable {}",
            target.revision, stable.revision
        ),
        None => format!("the first revision {} starts", target.revision),
    };
    let at = RolloutStatus {
        stage: RolloutStage::Starting,
        step: 0,
        step_started_at: Time(world.now),
        generation: world.valid.generation,
        request: world.valid.request.clone(),
        weight: 0,
        mirror: 0,
        shifted: false,
        failed_verdicts: 0,
        verdict: None,
        paused: None,
        released: false,
        waived: back.then_some(Waiver::RollbackWindow),
        room: Vec::new(),
    };
    if !fit::may_begin(world, decisions, target, &at) {
        return clear(&mut decisions.memory);
    }
    decisions.memory.canary = Some(RevisionStatus {
        revision: target.revision.clone(),
        artifact_digest: target.artifact_digest.clone(),
        model_digest: target.model_digest.clone(),
        image: target.image.clone(),
    });
    decisions.memory.rollout = Some(at);
    decisions.tell(false, Reason::RollingOut, note);
    ending::check_deadline(world, decisions, &target.revision);
}

/// `spec.rollout.paused` stops the trial, and its end lets it go on with time and a window of its own.
fn stop_or_go(world: &World<'_>, decisions: &mut Decisions) {
    let paused = world.valid.rollout.paused;
    let Some(at) = &mut decisions.memory.rollout else {
        return;
    };
    match at.paused {
        None if paused => at.paused = Some(Halt::Spec),
        Some(Halt::Spec) if !paused => {
            at.paused = None;
            at.failed_verdicts = 0;
            at.step_started_at = Time(world.now);
        }
        None | Some(Halt::Spec | Halt::Gate | Halt::Deadline) => {}
    }
}

/// One stage of the trial of `target`, which is the canary.
fn stage(world: &World<'_>, decisions: &mut Decisions, target: &FrozenRevision) {
    stop_or_go(world, decisions);
    let revision = target.revision.as_str();
    if ending::check_pods(world, decisions, revision) {
        return;
    }
    let Some(at) = decisions.memory.rollout.clone() else {
        return;
    };
    let first = decisions.memory.stable.is_none();
    match at.stage {
        RolloutStage::Starting => starting(world, decisions, revision, &at),
        RolloutStage::Stepping | RolloutStage::Promoting if first => {
            // Only a forged status says so: without stable there is nothing to step beside.
            begin(world, decisions, target);
        }
        RolloutStage::Stepping => stepping(world, decisions, revision, &at),
        RolloutStage::Promoting => promoting(world, decisions, revision, &at),
        RolloutStage::RollingBack => {}
    }
}

/// Whether the canary's pods of this stage all run.
fn runs(world: &World<'_>, revision: &str, at: &RolloutStatus) -> bool {
    let wanted = canary::size(&world.valid.rollout, at, world.valid.replicas);
    world.runs(revision, wanted)
}

fn starting(world: &World<'_>, decisions: &mut Decisions, revision: &str, at: &RolloutStatus) {
    let first = decisions.memory.stable.is_none();
    let ready = if first {
        world.runs(revision, world.valid.replicas)
    } else {
        runs(world, revision, at) && effects::others_are_gone(world, &decisions.memory)
    };
    if ready && at.paused.is_none() {
        return match at.waived {
            _ if first => ending::promote(world, decisions, "all its pods are ready"),
            Some(Waiver::RollbackWindow) => {
                ending::promote(
                    world,
                    decisions,
                    "it was stable lately and all its pods are ready",
                );
            }
            Some(Waiver::Request) => {
                ending::promote(
                    world,
                    decisions,
                    "a person asked for it and all its pods are ready",
                );
            }
            None => enter(world, decisions, RolloutStage::Stepping, 0),
        };
    }
    ending::check_deadline(world, decisions, revision);
}

fn stepping(world: &World<'_>, decisions: &mut Decisions, revision: &str, at: &RolloutStatus) {
    let rollout = &world.valid.rollout;
    if !time_runs(world, decisions) {
        return ending::check_deadline(world, decisions, revision);
    }
    let passed = if canary::is_reached(rollout, at) {
        match judged(world, decisions, revision, at) {
            Some(passed) => passed,
            None => return,
        }
    } else {
        // A dark start: nothing is measured before a request comes.
        runs(world, revision, at)
    };
    let until = canary::held_until(rollout, at);
    if stands_still(decisions) {
        return;
    }
    if passed && until.is_some_and(|until| world.now >= until) {
        let (stage, step) = if canary::has_next(rollout, at.step) {
            (RolloutStage::Stepping, at.step + 1)
        } else {
            (RolloutStage::Promoting, at.step)
        };
        return enter(world, decisions, stage, step);
    }
    if let Some(until) = until.filter(|until| world.now < *until) {
        decisions.wake_at(until, world.now);
    }
    ending::check_deadline(world, decisions, revision);
}

fn promoting(world: &World<'_>, decisions: &mut Decisions, revision: &str, at: &RolloutStatus) {
    if at.waived.is_some() {
        if runs(world, revision, at) && at.paused.is_none() {
            let why = "a person asked for it and all its pods are ready";
            return ending::promote(world, decisions, why);
        }
        return ending::check_deadline(world, decisions, revision);
    }
    if !time_runs(world, decisions) {
        return ending::check_deadline(world, decisions, revision);
    }
    match judged(world, decisions, revision, at) {
        None => {}
        // The verdict counts pods that run all, see `verdict::judge`.
        Some(true) if !stands_still(decisions) => {
            ending::promote(world, decisions, "it passed every step");
        }
        Some(_) => ending::check_deadline(world, decisions, revision),
    }
}

fn stands_still(decisions: &Decisions) -> bool {
    let at = decisions.memory.rollout.as_ref();
    at.is_some_and(|at| at.paused.is_some())
}

/// Whether this pass has a Pass; `None` when its verdict has ended the trial.
fn judged(
    world: &World<'_>,
    decisions: &mut Decisions,
    revision: &str,
    at: &RolloutStatus,
) -> Option<bool> {
    let Some(judgement) = verdict::judge(world, decisions, at) else {
        return Some(false);
    };
    let failed = decisions.memory.rollout.as_ref();
    let failed = failed.map_or(0, |at| at.failed_verdicts);
    let ends = judgement.outcome == Outcome::Fail && failed >= world.valid.rollout.failure_limit;
    if ends && judgement.does == OnFailure::Rollback {
        ending::roll_back(world, decisions, revision, Reason::SLOViolated);
        return None;
    }
    if ends {
        ending::halt(world, decisions, revision, Halt::Gate);
    }
    Some(judgement.outcome == Outcome::Pass)
}

/// The moments of a step at which time alone changes something.
fn wake_in_step(world: &World<'_>, decisions: &mut Decisions) {
    let rollout = &world.valid.rollout;
    let Some(at) = &decisions.memory.rollout else {
        return;
    };
    let moments = [
        Some(canary::verdict_due(rollout, at)),
        canary::held_until(rollout, at),
    ];
    for moment in moments.into_iter().flatten() {
        decisions.wake_at(moment, world.now);
    }
}

fn enter(world: &World<'_>, decisions: &mut Decisions, stage: RolloutStage, step: i32) {
    let rollout = &world.valid.rollout;
    let count = rollout.steps.len();
    let revision = role(decisions.memory.canary.as_ref()).unwrap_or_default();
    let Some(at) = &mut decisions.memory.rollout else {
        return;
    };
    at.stage = stage;
    at.step = step;
    at.step_started_at = Time(world.now);
    at.failed_verdicts = 0;
    at.released = false;
    at.shifted = false;
    let what = match canary::step(rollout, at) {
        Step::Weight {
            weight,
            replicas: Some(replicas),
            ..
        } => format!("weight {weight} %, {replicas} pods"),
        Step::Weight { weight, .. } => format!("weight {weight} %"),
        Step::Mirror { percent, .. } => {
            format!("mirrors {percent} % of the requests, and nobody gets its answers")
        }
        Step::Replicas { replicas, .. } => format!("{replicas} pods"),
        Step::Pause {
            duration: Some(seconds),
        } => format!("a pause of {seconds} s"),
        Step::Pause { duration: None } => "a pause until a person promotes it".to_owned(),
    };
    wake_in_step(world, decisions);
    let note = match stage {
        RolloutStage::Promoting => {
            format!("revision {revision} passed all {count} steps and grows to take over")
        }
        RolloutStage::Stepping | RolloutStage::Starting | RolloutStage::RollingBack => format!(
            "revision {revision} takes step {} of {count}: {what}",
            step + 1
        ),
    };
    decisions.tell(false, Reason::RollingOut, note);
}
