//! Where the service stands: its phase, what it is busy with, what it is stuck at. All conditions share these words.

use mixquant_crds::status::{Halt, Phase, Reason, RevisionStatus, RolloutStage, RolloutStatus};

use crate::canary;
use crate::observed::FrozenRevision;
use crate::plan::{Decisions, Measured, World, route_problem, traffic_is_right};

/// Where the service stands, in the words that all conditions share.
pub(super) struct Standing {
    pub(super) phase: Phase,
    /// Why nothing moves until a person changes something.
    pub(super) stalled: Option<(Reason, String)>,
    /// What is being done or waited for.
    pub(super) busy: Option<(Reason, String)>,
}

pub(super) fn standing(
    world: &World<'_>,
    decisions: &Decisions,
    measured: &Measured,
    target: Option<&FrozenRevision>,
) -> Standing {
    let at = decisions.memory.rollout.as_ref();
    if let Some(at) = at.filter(|_| decisions.memory.canary.is_some()) {
        let mut standing = rolling(world, decisions, at);
        if !decisions.blocked.is_empty() {
            standing.busy = blocked(decisions).busy;
        }
        return standing;
    }
    let stuck = |phase, reason, message: &str| Standing {
        phase,
        stalled: Some((reason, message.to_owned())),
        busy: None,
    };
    let busy = |phase, reason, message: String| Standing {
        phase,
        stalled: None,
        busy: Some((reason, message)),
    };
    if let Some(why) = &decisions.no_room {
        return busy(Phase::Pending, Reason::InsufficientCapacity, why.clone());
    }
    if let Some(undo) = &decisions.memory.undo {
        return undone(world, decisions, &undo.revision);
    }
    match measured {
        Measured::Invalid { message } => stuck(Phase::Invalid, Reason::InvalidSpec, message),
        Measured::Failed { message, .. } => {
            stuck(Phase::Degraded, Reason::CalibrationFailed, message)
        }
        Measured::Rejected { message, .. } => {
            stuck(Phase::Degraded, Reason::PrecisionRegression, message)
        }
        Measured::Waiting { message } => {
            busy(Phase::Pending, Reason::DependencyMissing, message.clone())
        }
        Measured::Running { .. } if !decisions.blocked.is_empty() => blocked(decisions),
        Measured::Running { message, .. } => {
            busy(Phase::Calibrating, Reason::Calibrating, message.clone())
        }
        Measured::Accepted { .. } => {
            let failed = target.and_then(|target| decisions.failure(world.valid, &target.revision));
            match failed {
                Some(failed) => stuck(Phase::Degraded, failed.reason, &failed.message),
                None if !decisions.blocked.is_empty() => blocked(decisions),
                None if waits(world, decisions, target) => busy(
                    Phase::Paused,
                    Reason::RolloutPaused,
                    "spec.rollout.paused is true: what the spec asks for waits".into(),
                ),
                None => serving(world, decisions),
            }
        }
    }
}

/// Whether the spec's revision may not begin its trial.
fn waits(world: &World<'_>, decisions: &Decisions, target: Option<&FrozenRevision>) -> bool {
    let stable = decisions.memory.stable.as_ref();
    let serves = stable.map(|stable| &stable.revision) == target.map(|target| &target.revision);
    world.valid.rollout.paused && !serves
}

/// A person has put `revision` in the place of what the spec asks for.
fn undone(world: &World<'_>, decisions: &Decisions, revision: &str) -> Standing {
    let stable = decisions.memory.stable.as_ref();
    let serves = stable.is_some_and(|stable| stable.revision == revision);
    let (reason, message) = match decisions.failure(world.valid, revision) {
        Some(failed) => (failed.reason, failed.message.clone()),
        None if !decisions.blocked.is_empty() => return blocked(decisions),
        None if serves => (
            Reason::Undone,
            format!(
                "revision {revision} serves by a person's request; what the spec asks for waits until it changes or a retry is asked for"
            ),
        ),
        None => {
            let message = format!("revision {revision} waits: spec.rollout.paused is true");
            return Standing {
                phase: Phase::Paused,
                stalled: None,
                busy: Some((Reason::RolloutPaused, message)),
            };
        }
    };
    let runs = serving(world, decisions);
    if serves && runs.busy.is_some() {
        return runs;
    }
    Standing {
        phase: Phase::Degraded,
        stalled: Some((reason, message)),
        busy: None,
    }
}

fn blocked(decisions: &Decisions) -> Standing {
    Standing {
        phase: Phase::Pending,
        stalled: None,
        busy: Some((
            Reason::DependencyMissing,
            format!(
                "{} belongs to another owner: it is waited for; delete it or rename the service",
                decisions.blocked.join(", ")
            ),
        )),
    }
}

/// A trial is under way.
fn rolling(world: &World<'_>, decisions: &Decisions, at: &RolloutStatus) -> Standing {
    let revision = |role: &Option<RevisionStatus>| {
        role.as_ref()
            .map_or_else(String::new, |role| role.revision.clone())
    };
    let canary = revision(&decisions.memory.canary);
    let seen = world.deployment(&canary);
    let ready = seen.map_or(0, |seen| seen.available);
    let problem = seen.and_then(|seen| seen.problem.as_deref());
    let problem = problem.map_or(String::new(), |problem| format!(": {problem}"));
    let steps = world.valid.rollout.steps.len();
    let wanted = match decisions.memory.stable {
        Some(_) => canary::size(&world.valid.rollout, at, world.valid.replicas),
        None => world.valid.replicas,
    };
    let pods = format!(
        "{ready} of {wanted} pods available{}{problem}",
        beside(world, decisions, at)
    );
    let (phase, message) = match at.stage {
        RolloutStage::Starting if decisions.memory.stable.is_none() => (
            Phase::Deploying,
            format!("revision {canary} starts, {pods}"),
        ),
        RolloutStage::Starting => (Phase::Canary, format!("canary {canary} starts, {pods}")),
        RolloutStage::Stepping => (
            Phase::Canary,
            format!(
                "canary {canary} is at step {} of {steps}{}, {pods}",
                at.step + 1,
                mirrors(world, at)
            ),
        ),
        RolloutStage::Promoting => (
            Phase::Promoting,
            format!("canary {canary} takes over, {pods}"),
        ),
        RolloutStage::RollingBack => (
            Phase::RollingBack,
            format!("canary {canary} leaves: {}", failed(world, decisions)),
        ),
    };
    if let Some(why) = stands_still(world, at) {
        return Standing {
            phase: Phase::Paused,
            stalled: None,
            busy: Some((Reason::RolloutPaused, format!("{message}; {why}"))),
        };
    }
    let waits = canary::is_reached(&world.valid.rollout, at)
        .then(|| route_problem(world, &decisions.memory))
        .flatten();
    let (reason, message) = match (at.stage, waits) {
        (RolloutStage::RollingBack, _) => (Reason::RolledBack, message),
        (_, Some(problem)) => (Reason::TrafficNotReady, format!("{message}; {problem}")),
        (_, None) => (Reason::RollingOut, message),
    };
    Standing {
        phase,
        stalled: None,
        busy: Some((reason, message)),
    }
}

/// That nobody gets the canary's answers yet, where it gets copies of the requests.
fn mirrors(world: &World<'_>, at: &RolloutStatus) -> String {
    let copies = canary::copies(&world.valid.rollout, at);
    copies.map_or(String::new(), |percent| format!(", mirrors {percent} %"))
}

/// What stable has left, where it has made room.
fn beside(world: &World<'_>, decisions: &Decisions, at: &RolloutStatus) -> String {
    let replicas = world.valid.replicas;
    let kept = canary::stable_size(&world.valid.rollout, at, replicas);
    match &decisions.memory.stable {
        Some(stable) if kept < replicas => format!(
            " in the place of stable {}, which keeps {kept} of {replicas}",
            stable.revision
        ),
        Some(_) | None => String::new(),
    }
}

/// Why a trial stands still, and what lets it go on.
fn stands_still(world: &World<'_>, at: &RolloutStatus) -> Option<String> {
    let said = at.verdict.as_ref().map_or("", |verdict| &verdict.message);
    match at.paused {
        _ if at.stage == RolloutStage::RollingBack => None,
        Some(Halt::Spec) => Some("spec.rollout.paused is true".into()),
        Some(Halt::Gate) => Some(format!("a gate failed ({said}): promote or abort it")),
        Some(Halt::Deadline) => Some(format!(
            "its deadline passed undecided ({said}): promote or abort it"
        )),
        None if canary::pauses(&world.valid.rollout, at, world.now) => {
            let until = canary::held_until(&world.valid.rollout, at);
            Some(until.map_or_else(
                || "it pauses until a person promotes it".to_owned(),
                |until| format!("it pauses until {until}"),
            ))
        }
        None => None,
    }
}

/// The evidence against the canary that leaves.
fn failed(world: &World<'_>, decisions: &Decisions) -> String {
    let canary = decisions.memory.canary.as_ref();
    let failed = canary.and_then(|canary| decisions.failure(world.valid, &canary.revision));
    failed.map_or_else(|| "it failed".into(), |failed| failed.message.clone())
}

/// Stable is what the spec asks for; are its pods there?
fn serving(world: &World<'_>, decisions: &Decisions) -> Standing {
    let stable = decisions.memory.stable.as_ref();
    let runs = stable.is_some_and(|stable| is_up(world, &stable.revision));
    let selected = traffic_is_right(world, &decisions.memory);
    let problem = route_problem(world, &decisions.memory);
    if runs && selected {
        let busy = problem.map(|problem| (Reason::TrafficNotReady, problem));
        return Standing {
            phase: match busy {
                Some(_) => Phase::Deploying,
                None => Phase::Ready,
            },
            stalled: None,
            busy,
        };
    }
    let message = if runs {
        "the Service does not select stable yet".to_owned()
    } else {
        pods(world, decisions)
    };
    Standing {
        phase: Phase::Deploying,
        stalled: None,
        busy: Some((Reason::PodsNotReady, message)),
    }
}

/// Whether stable's pods are there. Those that only the load asks for may still be on their way.
fn is_up(world: &World<'_>, stable: &str) -> bool {
    if world.valid.scaling.is_none() {
        return world.runs(stable, world.valid.replicas);
    }
    let seen = world.deployment(stable);
    seen.is_some_and(|seen| seen.up_to_date && seen.available >= world.least())
}

/// How many of stable's pods are there, and what is wrong with the others.
pub(super) fn pods(world: &World<'_>, decisions: &Decisions) -> String {
    let Some(stable) = &decisions.memory.stable else {
        return "no revision serves yet".into();
    };
    let seen = world.deployment(&stable.revision);
    let available = seen.map_or(0, |seen| seen.available);
    let problem = seen.and_then(|seen| seen.problem.as_deref());
    let problem = problem.map_or(String::new(), |problem| format!(": {problem}"));
    format!(
        "{available} of {} pods of stable {} are available{problem}",
        world.valid.replicas, stable.revision
    )
}
