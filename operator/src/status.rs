//! The status as people and `kubectl wait` read it: conditions, phase and numbers, from the memory and what was observed.
//!
//! Nothing here decides anything. The same inputs give the same status to the byte, so that at rest nothing is written; a transition
//! time changes only when a condition's status does.
use jiff::Timestamp;
use mixquant_crds::names::{LABEL_COMPONENT, LABEL_SERVICE};
use mixquant_crds::status::{ConditionType, MixQuantServiceStatus, Phase, Reason, RolloutStatus};

use crate::observed::{FrozenRevision, Observed};
use crate::plan::{Decisions, Measured, World};

mod condition;
mod says;
mod standing;

use condition::{Truth, condition, renewed, said, with};
use standing::standing;

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
        && before.promoted == after.promoted
        && before.request == after.request
        && before.attempt == after.attempt
        && before.undo == after.undo
        && before.artifacts == after.artifacts
        && before.drift == after.drift
        && before.scaling == after.scaling
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
    let weight = crate::plan::weight(world, &decisions.memory);
    let mirror = crate::plan::mirror(world, &decisions.memory);
    if let Some(at) = &mut status.rollout {
        at.weight = weight;
        at.mirror = mirror;
    }
    let conditions = [
        (
            ConditionType::Ready,
            Some(says::ready(world, decisions, &standing, target)),
        ),
        (
            ConditionType::Available,
            Some(says::available(world, decisions)),
        ),
        (
            ConditionType::Progressing,
            Some(says::progressing(&standing)),
        ),
        (ConditionType::Calibrated, Some(says::calibrated(measured))),
        (
            ConditionType::PrecisionOK,
            Some(says::precision_ok(measured)),
        ),
        (ConditionType::SLOMet, says::slo_met(decisions)),
        (ConditionType::Drifted, says::drifted(world, decisions)),
        (ConditionType::Paused, says::paused(&standing)),
        (
            ConditionType::Reconciling,
            Some(says::reconciling(&standing)),
        ),
        (ConditionType::Stalled, Some(says::stalled(&standing))),
    ];
    let generation = world.valid.generation;
    status.conditions = conditions
        .into_iter()
        .filter_map(|(kind, said)| {
            let before = &decisions.memory.conditions;
            match said {
                Some(said) => Some(condition(before, kind, &said, (generation, world.now))),
                // Only there while there is something to say.
                None if matches!(kind, ConditionType::Paused | ConditionType::Drifted) => None,
                // Still true, and of this generation too.
                None => renewed(before, kind, generation),
            }
        })
        .collect();
    status
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
