//! The status as people and `kubectl wait` read it: conditions, phase and numbers, from the memory and what was observed.
//!
//! Nothing here decides anything. The same inputs give the same status to the byte, so that at rest nothing is written; a transition
//! time changes only when a condition's status does.
#![warn(clippy::wildcard_enum_match_arm)]

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use mixquant_crds::names::{LABEL_COMPONENT, LABEL_SERVICE};
use mixquant_crds::status::{
    ConditionType, MixQuantServiceStatus, Outcome, Phase, Reason, RolloutStage, RolloutStatus,
};

use crate::action::JobWork;
use crate::canary;
use crate::observed::{FrozenRevision, Observed, Traffic};
use crate::plan::{Decisions, Measured, World};

/// A condition's `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Truth {
    True,
    False,
    Unknown,
}

/// What a condition says.
struct Said {
    truth: Truth,
    reason: Reason,
    message: String,
}

fn said(truth: Truth, reason: Reason, message: impl Into<String>) -> Said {
    Said {
        truth,
        reason,
        message: message.into(),
    }
}

/// Whether two statuses remember the same; display is not compared.
pub fn same_memory(before: &MixQuantServiceStatus, after: &MixQuantServiceStatus) -> bool {
    let rollout = |status: &MixQuantServiceStatus| {
        let at = status.rollout.clone();
        at.map(|at| RolloutStatus { weight: 0, ..at })
    };
    before.stable == after.stable
        && before.canary == after.canary
        && rollout(before) == rollout(after)
        && before.calibrations == after.calibrations
        && before.failed_revisions == after.failed_revisions
}

/// Where the service stands, in the words that all conditions share.
struct Standing {
    phase: Phase,
    /// Why nothing moves until a person changes something.
    stalled: Option<(Reason, String)>,
    /// What is being done or waited for.
    busy: Option<(Reason, String)>,
}

/// The status after this pass's decisions.
pub fn report(
    world: &World<'_>,
    decisions: &Decisions,
    measured: &Measured,
    target: Option<&FrozenRevision>,
) -> MixQuantServiceStatus {
    let mut status = decisions.memory.clone();
    let standing = standing(world, decisions, measured, target);
    let sum = |count: fn(&crate::observed::ObservedDeployment) -> i32| {
        let roles = [&decisions.memory.stable, &decisions.memory.canary];
        let roles = roles.into_iter().flatten();
        roles
            .filter_map(|role| world.deployment(&role.revision))
            .map(count)
            .sum::<i32>()
    };
    status.observed_generation = Some(world.valid.generation);
    status.phase = Some(standing.phase);
    status.replicas = sum(|deployment| deployment.existing);
    status.ready_replicas = sum(|deployment| deployment.ready);
    status.selector = Some(format!(
        "{LABEL_SERVICE}={},{LABEL_COMPONENT}=engine",
        world.valid.name
    ));
    let weight = weight(world, decisions);
    if let Some(at) = &mut status.rollout {
        at.weight = weight;
    }
    let conditions = [
        (
            ConditionType::Ready,
            ready(world, decisions, &standing, target),
        ),
        (ConditionType::Available, available(world, decisions)),
        (ConditionType::Progressing, progressing(&standing)),
        (ConditionType::Calibrated, calibrated(measured)),
        (ConditionType::PrecisionOK, precision_ok(measured)),
        (ConditionType::SLOMet, slo_met(decisions)),
        (ConditionType::Reconciling, reconciling(&standing)),
        (ConditionType::Stalled, stalled(&standing)),
    ];
    let generation = world.valid.generation;
    status.conditions = conditions
        .into_iter()
        .filter_map(|(kind, said)| {
            let before = &decisions.memory.conditions;
            match said {
                Some(said) => Some(condition(before, kind, &said, (generation, world.now))),
                // Still true, and of this generation too.
                None => renewed(before, kind, generation),
            }
        })
        .collect();
    status
}

/// Percent of the traffic that reaches the canary now.
fn weight(world: &World<'_>, decisions: &Decisions) -> i32 {
    let memory = &decisions.memory;
    let shared = world.observed.traffic.as_ref();
    let shared = shared.is_some_and(|seen| seen.selects == Some(Traffic::All));
    let ready = |revision: &str| world.deployment(revision).map_or(0, |seen| seen.ready);
    match (&memory.stable, &memory.canary) {
        (Some(stable), Some(canary)) if shared => {
            canary::achieved_weight(ready(&canary.revision), ready(&stable.revision))
        }
        _ => 0,
    }
}

fn standing(
    world: &World<'_>,
    decisions: &Decisions,
    measured: &Measured,
    target: Option<&FrozenRevision>,
) -> Standing {
    let at = decisions.memory.rollout.as_ref();
    if let Some(at) = at.filter(|_| decisions.memory.canary.is_some()) {
        return rolling(world, decisions, at);
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
                None => serving(world, decisions),
            }
        }
    }
}

fn blocked(decisions: &Decisions) -> Standing {
    let names: Vec<String> = decisions
        .blocked
        .iter()
        .map(|object| format!("{:?} {}", object.kind, object.name))
        .collect();
    Standing {
        phase: Phase::Pending,
        stalled: None,
        busy: Some((
            Reason::DependencyMissing,
            format!(
                "{} belongs to another owner: it is waited for; delete it or rename the service",
                names.join(", ")
            ),
        )),
    }
}

/// A trial is under way.
fn rolling(world: &World<'_>, decisions: &Decisions, at: &RolloutStatus) -> Standing {
    let revision = |role: &Option<mixquant_crds::status::RevisionStatus>| {
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
    let pods = format!("{ready} of {wanted} pods available{problem}");
    let (phase, message) = match at.stage {
        RolloutStage::Starting if decisions.memory.stable.is_none() => (
            Phase::Deploying,
            format!("revision {canary} starts, {pods}"),
        ),
        RolloutStage::Starting => (Phase::Canary, format!("canary {canary} starts, {pods}")),
        RolloutStage::Stepping => (
            Phase::Canary,
            format!(
                "canary {canary} is at step {} of {steps}, {pods}",
                at.step + 1
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
    let reason = match at.stage {
        RolloutStage::Starting | RolloutStage::Stepping | RolloutStage::Promoting => {
            Reason::RollingOut
        }
        RolloutStage::RollingBack => Reason::RolledBack,
    };
    Standing {
        phase,
        stalled: None,
        busy: Some((reason, message)),
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
    let replicas = world.valid.replicas;
    let stable = decisions.memory.stable.as_ref();
    let runs = stable.is_some_and(|stable| world.runs(&stable.revision, replicas));
    let selected = crate::plan::traffic_is_right(world, &decisions.memory);
    if runs && selected {
        return Standing {
            phase: Phase::Ready,
            stalled: None,
            busy: None,
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

/// How many of stable's pods are there, and what is wrong with the others.
fn pods(world: &World<'_>, decisions: &Decisions) -> String {
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

fn ready(
    world: &World<'_>,
    decisions: &Decisions,
    standing: &Standing,
    target: Option<&FrozenRevision>,
) -> Option<Said> {
    let stable = decisions.memory.stable.as_ref();
    let current = stable.map(|stable| &stable.revision) == target.map(|target| &target.revision);
    Some(match (&standing.stalled, &standing.busy, stable) {
        (None, None, Some(stable)) if current => said(
            Truth::True,
            Reason::Promoted,
            format!("revision {} serves what the spec asks for", stable.revision),
        ),
        (Some((reason, message)), _, _) => said(Truth::False, *reason, message.clone()),
        // A first deployment under way has not failed: nobody knows yet.
        (None, Some((reason, message)), None) if *reason != Reason::RolledBack => {
            said(Truth::Unknown, *reason, message.clone())
        }
        (None, Some((reason, message)), _) => said(Truth::False, *reason, message.clone()),
        (None, None, _) => said(Truth::False, Reason::PodsNotReady, pods(world, decisions)),
    })
}

/// Stable serves: at most a quarter of its pods is missing, as a Deployment's own rule has it.
fn available(world: &World<'_>, decisions: &Decisions) -> Option<Said> {
    let replicas = world.valid.replicas;
    let enough = (replicas - replicas / 4).max(1);
    let stable = decisions.memory.stable.as_ref();
    let seen = stable.and_then(|stable| world.deployment(&stable.revision));
    let message = pods(world, decisions);
    Some(if seen.is_some_and(|seen| seen.available >= enough) {
        said(Truth::True, Reason::PodsReady, message)
    } else {
        said(Truth::False, Reason::PodsNotReady, message)
    })
}

fn progressing(standing: &Standing) -> Option<Said> {
    Some(match (&standing.stalled, &standing.busy) {
        (Some((reason, message)), _) => said(Truth::False, *reason, message.clone()),
        (None, Some((Reason::DependencyMissing, message))) => {
            said(Truth::False, Reason::DependencyMissing, message.clone())
        }
        (None, Some((reason, message))) => said(Truth::True, *reason, message.clone()),
        (None, None) => said(Truth::False, Reason::Idle, "nothing is to be done"),
    })
}

fn calibrated(measured: &Measured) -> Option<Said> {
    Some(match measured {
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
    })
}

fn precision_ok(measured: &Measured) -> Option<Said> {
    let unknown = |reason, message: &str| said(Truth::Unknown, reason, message);
    Some(match measured {
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
    })
}

/// The newest verdict; `None` (what was said stands) when there is none newer.
fn slo_met(decisions: &Decisions) -> Option<Said> {
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

fn reconciling(standing: &Standing) -> Option<Said> {
    Some(match &standing.busy {
        Some((reason, message)) => said(Truth::True, *reason, message.clone()),
        None => said(Truth::False, Reason::Idle, "nothing is to be done"),
    })
}

fn stalled(standing: &Standing) -> Option<Said> {
    Some(match &standing.stalled {
        Some((reason, message)) => said(Truth::True, *reason, message.clone()),
        None => said(Truth::False, Reason::Idle, "nothing waits for a person"),
    })
}

/// Kubernetes keeps this many bytes of a condition's message.
const MAX_CONDITION_MESSAGE: usize = 32_768;

fn condition(
    before: &[Condition],
    kind: ConditionType,
    said: &Said,
    (generation, now): (i64, Timestamp),
) -> Condition {
    let status = match said.truth {
        Truth::True => "True",
        Truth::False => "False",
        Truth::Unknown => "Unknown",
    };
    let old = before
        .iter()
        .find(|condition| condition.type_ == kind.as_str() && condition.status == status);
    Condition {
        type_: kind.as_str().to_owned(),
        status: status.to_owned(),
        reason: said.reason.as_str().to_owned(),
        message: said
            .message
            .chars()
            .take(MAX_CONDITION_MESSAGE / 4)
            .collect(),
        observed_generation: Some(generation),
        last_transition_time: old.map_or(Time(now), |old| old.last_transition_time.clone()),
    }
}

fn renewed(before: &[Condition], kind: ConditionType, generation: i64) -> Option<Condition> {
    let old = before.iter().find(|old| old.type_ == kind.as_str())?;
    Some(Condition {
        observed_generation: Some(generation),
        ..old.clone()
    })
}

/// `before` with some conditions replaced, in the order of display.
fn with(
    before: &MixQuantServiceStatus,
    said: &[(ConditionType, Said)],
    at: (i64, Timestamp),
) -> Vec<Condition> {
    let new = |kind| said.iter().find(|(replaced, _)| *replaced == kind);
    ConditionType::ALL
        .into_iter()
        .filter_map(|kind| match new(kind) {
            Some((_, said)) => Some(condition(&before.conditions, kind, said, at)),
            None => renewed(&before.conditions, kind, at.0),
        })
        .collect()
}

/// The status of a service whose spec cannot work: what serves goes on serving, and nothing is done.
pub fn invalid(observed: &Observed, problem: &str, now: Timestamp) -> MixQuantServiceStatus {
    let mut status = observed.service.status.clone().unwrap_or_default();
    let generation = observed.service.metadata.generation.unwrap_or(0);
    let stopped = |truth| said(truth, Reason::InvalidSpec, problem);
    status.observed_generation = Some(generation);
    status.phase = Some(Phase::Invalid);
    let new = [
        (ConditionType::Ready, stopped(Truth::False)),
        (ConditionType::Progressing, stopped(Truth::False)),
        (
            ConditionType::Reconciling,
            said(Truth::False, Reason::Idle, "nothing is to be done"),
        ),
        (ConditionType::Stalled, stopped(Truth::True)),
    ];
    status.conditions = with(&status, &new, (generation, now));
    status
}

/// Whether both statuses are of the same invalid spec.
pub fn says_invalid(before: &MixQuantServiceStatus, after: &MixQuantServiceStatus) -> bool {
    let ready = |status: &MixQuantServiceStatus| {
        let mut all = status.conditions.iter();
        let ready = all.find(|condition| condition.type_ == ConditionType::Ready.as_str());
        ready.map(|ready| (ready.reason.clone(), ready.message.clone()))
    };
    ready(before) == ready(after)
}

/// The status after the API refused an object: `message` names verb, object and the server's answer. The shell writes it when it
/// differs from what is there; the next pass that goes through replaces it.
pub fn apply_failed(
    before: &MixQuantServiceStatus,
    message: &str,
    generation: i64,
    now: Timestamp,
) -> MixQuantServiceStatus {
    let refused = |truth| said(truth, Reason::ApplyFailed, message);
    let new = [
        (ConditionType::Ready, refused(Truth::False)),
        (ConditionType::Progressing, refused(Truth::False)),
        (ConditionType::Reconciling, refused(Truth::True)),
    ];
    MixQuantServiceStatus {
        conditions: with(before, &new, (generation, now)),
        ..before.clone()
    }
}
