//! What each condition says of a service.

use mixquant_crds::status::{ConditionType, Outcome, Phase, Reason};

use super::condition::{Said, Truth, said};
use super::standing::{Standing, pods};
use crate::action::JobWork;
use crate::canary;
use crate::observed::FrozenRevision;
use crate::plan::{Decisions, Measured, World};

pub(super) fn ready(
    world: &World<'_>,
    decisions: &Decisions,
    standing: &Standing,
    target: Option<&FrozenRevision>,
) -> Said {
    let stable = decisions.memory.stable.as_ref();
    let current = stable.map(|stable| &stable.revision) == target.map(|target| &target.revision);
    match (&standing.stalled, &standing.busy, stable) {
        (None, None, Some(stable)) if current => said(
            Truth::True,
            Reason::Promoted,
            format!("revision {} serves what the spec asks for", stable.revision),
        ),
        // A first deployment under way has not failed: nobody knows yet.
        (None, Some((reason, message)), None) if *reason != Reason::RolledBack => {
            said(Truth::Unknown, *reason, message.clone())
        }
        (Some((reason, message)), _, _) | (None, Some((reason, message)), _) => {
            said(Truth::False, *reason, message.clone())
        }
        (None, None, _) => said(Truth::False, Reason::PodsNotReady, pods(world, decisions)),
    }
}

/// Stable serves: at most a quarter of its pods is missing, as a Deployment's own rule has it. A canary that takes their place and the
/// traffic counts too.
pub(super) fn available(world: &World<'_>, decisions: &Decisions) -> Said {
    let least = world.least();
    let enough = (least - least / 4).max(1);
    let stable = decisions.memory.stable.as_ref();
    let seen = stable.and_then(|stable| world.deployment(&stable.revision));
    let message = pods(world, decisions);
    let memory = &decisions.memory;
    let rollout = &world.valid.rollout;
    let at = memory.rollout.as_ref();
    let in_place = at.is_some_and(|at| !at.room.is_empty() && canary::shares_traffic(rollout, at));
    let canary = memory.canary.as_ref().filter(|_| in_place);
    let canary = canary.and_then(|canary| world.deployment(&canary.revision));
    let more = canary.map_or(0, |canary| canary.available);
    if seen.is_some_and(|seen| seen.available.saturating_add(more) >= enough) {
        said(Truth::True, Reason::PodsReady, message)
    } else {
        said(Truth::False, Reason::PodsNotReady, message)
    }
}

pub(super) fn progressing(standing: &Standing) -> Said {
    // Within a trial a gateway is waited for until the deadline: that is progress.
    let waits = standing.phase == Phase::Deploying;
    match (&standing.stalled, &standing.busy) {
        (None, Some((reason @ Reason::TrafficNotReady, message))) if waits => {
            said(Truth::False, *reason, message.clone())
        }
        (Some((reason, message)), _)
        | (
            None,
            Some((reason @ (Reason::DependencyMissing | Reason::InsufficientCapacity), message)),
        ) => said(Truth::False, *reason, message.clone()),
        (None, Some((reason, message))) => said(Truth::True, *reason, message.clone()),
        (None, None) => said(Truth::False, Reason::Idle, "nothing is to be done"),
    }
}

pub(super) fn calibrated(measured: &Measured) -> Said {
    match measured {
        Measured::Waiting { message } => {
            said(Truth::Unknown, Reason::DependencyMissing, message.clone())
        }
        Measured::Invalid { message } => said(Truth::Unknown, Reason::InvalidSpec, message.clone()),
        Measured::Running { job, message, .. } => match &job.work {
            JobWork::Calibrate { .. } => said(Truth::False, Reason::Calibrating, message.clone()),
            JobWork::Verify { artifact } => said(
                Truth::True,
                Reason::CalibrationSucceeded,
                format!("artifact {artifact}"),
            ),
        },
        Measured::Failed { message, .. } => {
            said(Truth::False, Reason::CalibrationFailed, message.clone())
        }
        Measured::Rejected { .. } => said(
            Truth::True,
            Reason::CalibrationSucceeded,
            "calibrated, and its precision is outside the limits",
        ),
        Measured::Accepted { record, .. } => said(
            Truth::True,
            Reason::CalibrationSucceeded,
            format!(
                "artifact {} of model {}",
                record.report.artifact_digest, record.report.model_digest
            ),
        ),
    }
}

pub(super) fn precision_ok(measured: &Measured) -> Said {
    let unknown = |reason, message: &str| said(Truth::Unknown, reason, message);
    match measured {
        Measured::Waiting { message } => unknown(Reason::DependencyMissing, message),
        Measured::Invalid { message } => unknown(Reason::InvalidSpec, message),
        Measured::Running { .. } => unknown(Reason::Calibrating, "not measured yet"),
        Measured::Failed { .. } => unknown(Reason::CalibrationFailed, "not measured"),
        Measured::Rejected { message, .. } => {
            said(Truth::False, Reason::PrecisionRegression, message.clone())
        }
        Measured::Accepted { message, .. } => {
            said(Truth::True, Reason::WithinLimits, message.clone())
        }
    }
}

/// The newest verdict; `None` (what was said stands) when there is none newer.
pub(super) fn slo_met(decisions: &Decisions) -> Option<Said> {
    let at = decisions.memory.rollout.as_ref();
    let verdict = decisions
        .verdict
        .as_ref()
        .or(at.and_then(|at| at.verdict.as_ref()));
    if let Some(verdict) = verdict {
        let (truth, reason) = match verdict.outcome {
            Outcome::Pass => (Truth::True, Reason::SLOKept),
            Outcome::Fail => (Truth::False, Reason::SLOViolated),
            Outcome::Inconclusive => (Truth::Unknown, Reason::Inconclusive),
        };
        return Some(said(truth, reason, verdict.message.clone()));
    }
    let mut before = decisions.memory.conditions.iter();
    if before.any(|condition| condition.type_ == ConditionType::SLOMet.as_str()) {
        return None;
    }
    Some(said(
        Truth::Unknown,
        Reason::Inconclusive,
        "no canary has been judged yet",
    ))
}

/// Only there where the spec asks for it. The numbers are those that decided it, so that nothing is written at rest.
pub(super) fn drifted(world: &World<'_>, decisions: &Decisions) -> Option<Said> {
    world.valid.drift.as_ref()?;
    let memory = decisions.memory.drift.as_ref();
    let round = memory.map_or(0, |drift| drift.round);
    let rounds = if round == 0 {
        String::new()
    } else {
        format!("; recalibrations so far: {round}")
    };
    Some(match memory.and_then(|drift| drift.finding.as_ref()) {
        None => said(
            Truth::Unknown,
            Reason::Inconclusive,
            format!("no window has had drift.minPrompts prompts yet{rounds}"),
        ),
        Some(finding) => {
            let (truth, reason) = if finding.drifted {
                (Truth::True, Reason::Drifted)
            } else {
                (Truth::False, Reason::WithinRanges)
            };
            said(truth, reason, format!("{}{rounds}", finding.message))
        }
    })
}

/// Only there while a rollout stands still.
pub(super) fn paused(standing: &Standing) -> Option<Said> {
    let paused = standing.busy.as_ref()?;
    let (reason, message) = paused;
    (*reason == Reason::RolloutPaused).then(|| said(Truth::True, *reason, message.clone()))
}

pub(super) fn reconciling(standing: &Standing) -> Said {
    match &standing.busy {
        Some((reason, message)) => said(Truth::True, *reason, message.clone()),
        None => said(Truth::False, Reason::Idle, "nothing is to be done"),
    }
}

pub(super) fn stalled(standing: &Standing) -> Said {
    match &standing.stalled {
        Some((reason, message)) => said(Truth::True, *reason, message.clone()),
        None => said(Truth::False, Reason::Idle, "nothing waits for a person"),
    }
}
