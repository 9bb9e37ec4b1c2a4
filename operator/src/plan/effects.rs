//! What must be done so that the world is what the memory says: in the order in which serving never suffers.
//!
//! Turn traffic (towards pods that this pass has seen ready), keep the template, add pods, and take pods away only when the Service has
//! been *seen* not to select them. Everything is a difference to what was observed, so that a world that is right needs no action.

use jiff::Timestamp;
use mixquant_crds::MixQuantServiceStatus;
use mixquant_crds::status::{Reason, RevisionStatus, RolloutStage};

use super::{Decisions, Measured, World, traffic};
use crate::action::{
    Action, CompanionRequest, DeploymentRequest, Event, JobRequest, NewRevision, ObjectRef,
    ScaleRequest,
};
use crate::canary;
use crate::observed::{
    Companion, CompanionState, FrozenRevision, JobState, Kind, ObjectName, ObservedDeployment,
};
use crate::revision::{freeze_again, object_name};

/// Whether no pod of a third revision is left that would share the canary's traffic.
pub(super) fn others_are_gone(world: &World<'_>, memory: &MixQuantServiceStatus) -> bool {
    let mut deployments = world.observed.deployments.iter();
    deployments.all(|deployment| {
        wanted_replicas(world, memory, &deployment.revision).is_some()
            || (deployment.replicas == 0 && deployment.existing == 0)
    })
}

/// Until when the pods of a revision that failed are kept to be looked at; `None` when they may leave. A new trial needs their room.
pub(super) fn kept_until(
    world: &World<'_>,
    memory: &MixQuantServiceStatus,
    revision: &str,
) -> Option<Timestamp> {
    let canary = memory.canary.as_ref();
    if canary.is_some_and(|canary| canary.revision != revision) {
        return None;
    }
    // Stable waits for their room.
    if memory
        .rollout
        .as_ref()
        .is_some_and(|at| !at.room.is_empty())
    {
        return None;
    }
    let mut failed = memory.failed_revisions.iter();
    let failed = failed
        .find(|failed| failed.revision == revision && failed.request == world.valid.request)?;
    let until = canary::later(failed.at.0, world.valid.rollout.keep_failed);
    (world.now < until).then_some(until)
}

/// The pods of a revision with a role; `None` for one without.
fn wanted_replicas(
    world: &World<'_>,
    memory: &MixQuantServiceStatus,
    revision: &str,
) -> Option<i32> {
    let is =
        |role: &Option<RevisionStatus>| role.as_ref().is_some_and(|role| role.revision == revision);
    if is(&memory.stable) {
        let at = memory.rollout.as_ref().filter(|_| memory.canary.is_some());
        let all = world.valid.replicas;
        return Some(at.map_or(all, |at| canary::stable_size(&world.valid.rollout, at, all)));
    }
    let at = memory.rollout.as_ref().filter(|_| is(&memory.canary))?;
    Some(match (at.stage, &memory.stable) {
        (RolloutStage::RollingBack, _) => match kept_until(world, memory, revision) {
            Some(_) => world.deployment(revision).map_or(0, |seen| seen.replicas),
            None => 0,
        },
        (RolloutStage::Starting | RolloutStage::Stepping | RolloutStage::Promoting, None) => {
            world.valid.replicas
        }
        (
            RolloutStage::Starting | RolloutStage::Stepping | RolloutStage::Promoting,
            Some(stable),
        ) => {
            let size = canary::size(&world.valid.rollout, at, world.valid.replicas);
            // Somebody has deleted all that stable could come back from: the canary is left to serve.
            let lost = world.deployment(&stable.revision).is_none() && !is_kept(world, stable);
            if lost {
                size.max(world.valid.replicas)
            } else {
                size
            }
        }
    })
}

/// Everything to be done in this pass, in order.
pub(super) fn effects(
    world: &World<'_>,
    decisions: &mut Decisions,
    measured: &Measured,
    target: Option<&FrozenRevision>,
) -> Vec<Action> {
    let mut actions = Vec::new();
    // Pods are not created while their account is missing.
    let (account, beside) = companions(world, decisions);
    actions.extend(account);
    jobs(world, decisions, measured, &mut actions);
    let mut pods = Vec::new();
    roles(world, decisions, target, &mut pods);
    leavers(world, decisions, &mut pods);
    // The view that shows the Services elsewhere may be older than the step that turned them to the pods that leave: said once more, it is so.
    let surely = pods.iter().any(|action| takes_all_away(world, action));
    traffic::selectors(world, decisions, surely, &mut actions);
    actions.extend(pods);
    history(world, decisions, target, &mut actions);
    traffic::route(world, decisions, &mut actions);
    // Last: a refusal of one of these ends the pass, and must not keep what serves from being rolled back.
    actions.extend(beside);
    actions
}

/// Whether an action leaves a revision without pods that it has.
fn takes_all_away(world: &World<'_>, action: &Action) -> bool {
    if let Action::ApplyDeployment(request) = action {
        let seen = world.deployment(&request.frozen.revision);
        return request.replicas == 0 && seen.is_some_and(|seen| seen.replicas > 0);
    }
    matches!(action, Action::Delete(gone) if gone.object.kind == Kind::Deployment)
}

/// What stands beside the pods and is not right: the account, and the others.
fn companions(world: &World<'_>, decisions: &mut Decisions) -> (Vec<Action>, Vec<Action>) {
    let mut wrong = Vec::new();
    for seen in &world.observed.companions {
        match &seen.state {
            CompanionState::Right | CompanionState::Unreadable => {}
            CompanionState::Wrong => wrong.push(seen.companion),
            CompanionState::Foreign { name } => decisions.block(name.clone()),
        }
    }
    let (account, beside): (Vec<_>, Vec<_>) = wrong
        .into_iter()
        .partition(|companion| *companion == Companion::Account);
    let apply = |companion| {
        Action::ApplyCompanion(CompanionRequest {
            companion,
            installation: world.observed.installation.clone(),
        })
    };
    (
        account.into_iter().map(apply).collect(),
        beside.into_iter().map(apply).collect(),
    )
}

pub(super) fn name(kind: Kind, name: String) -> ObjectName {
    ObjectName { kind, name }
}

/// Adds an action on an object unless the name is someone else's.
pub(super) fn push(
    world: &World<'_>,
    decisions: &mut Decisions,
    actions: &mut Vec<Action>,
    (object, action): (ObjectName, Action),
) {
    if world.is_foreign(&object) {
        decisions.block(object.to_string());
    } else {
        actions.push(action);
    }
}

fn jobs(
    world: &World<'_>,
    decisions: &mut Decisions,
    measured: &Measured,
    actions: &mut Vec<Action>,
) {
    let keep = match measured {
        // What is wanted is unknown, so nothing is known to be unwanted.
        Measured::Waiting { .. } | Measured::Invalid { .. } => return,
        Measured::Running {
            job, keep, remove, ..
        } => {
            wanted_job(world, decisions, (job, remove.as_ref()), actions);
            keep
        }
        Measured::Failed { keep, .. }
        | Measured::Rejected { keep, .. }
        | Measured::Accepted { keep, .. } => keep,
    };
    for job in &world.observed.jobs {
        if !keep.contains(&job.name) && job.state != JobState::Deleting {
            actions.push(Action::Delete(ObjectRef {
                object: name(Kind::Job, job.name.clone()),
                uid: job.uid.clone(),
            }));
        }
    }
}

fn wanted_job(
    world: &World<'_>,
    decisions: &mut Decisions,
    (job, remove): (&JobRequest, Option<&ObjectRef>),
    actions: &mut Vec<Action>,
) {
    if let Some(old) = remove {
        actions.push(Action::Delete(old.clone()));
    } else if !world.observed.jobs.iter().any(|seen| seen.name == job.name) {
        let object = name(Kind::Job, job.name.clone());
        let started = Action::Publish(Event {
            warning: false,
            reason: Reason::Calibrating,
            note: format!("Job {} starts", job.name),
        });
        let foreign = world.is_foreign(&object);
        let action = Action::ApplyJob(job.clone());
        push(world, decisions, actions, (object, action));
        // After its effect: a Job that a quota refuses does not start, however often it is tried.
        if !foreign {
            actions.push(started);
        }
    }
}

/// Stable and canary: their template is kept, their pods are there.
fn roles(
    world: &World<'_>,
    decisions: &mut Decisions,
    target: Option<&FrozenRevision>,
    actions: &mut Vec<Action>,
) {
    let memory = decisions.memory.clone();
    let may_leave = traffic::traffic_is_right(world, &memory);
    // What stable makes room with must be able to come back.
    let is_stable = |role: &RevisionStatus| Some(role) == memory.stable.as_ref();
    for role in [&memory.stable, &memory.canary].into_iter().flatten() {
        let Some(replicas) = wanted_replicas(world, &memory, &role.revision) else {
            continue;
        };
        let seen = world.deployment(&role.revision);
        let Some(frozen) = template(world, role, target, actions) else {
            // Its template is lost: what should run goes on by the template that its Deployment has, what should not is deleted.
            match seen {
                Some(seen) if replicas == 0 && may_leave && !is_stable(role) => {
                    actions.push(delete_deployment(world, seen));
                }
                Some(seen) if seen.replicas < replicas => {
                    actions.push(Action::ScaleDeployment(ScaleRequest {
                        name: object_name(&world.valid.name, &role.revision),
                        uid: seen.uid.clone(),
                        replicas,
                    }));
                }
                Some(_) | None => {}
            }
            continue;
        };
        let right = match seen {
            Some(seen) => seen.matches && seen.replicas == replicas,
            // Nothing to take away.
            None => replicas == 0,
        };
        // Taking away waits until the Service is seen elsewhere.
        if right || (replicas == 0 && !may_leave) {
            continue;
        }
        let object = object_name(&world.valid.name, &role.revision);
        let action = Action::ApplyDeployment(Box::new(DeploymentRequest { frozen, replicas }));
        let object = name(Kind::Deployment, object);
        push(world, decisions, actions, (object, action));
    }
}

/// Whether pods of a role could be made again: its template is kept, or rendering it again gives the same.
pub(super) fn is_kept(world: &World<'_>, role: &RevisionStatus) -> bool {
    let mut kept = world.observed.revisions.iter();
    kept.any(|kept| kept.frozen.revision == role.revision)
        || freeze_again(world.valid, role, world.render).is_some()
}

/// The template of a role: kept, or the target's, or rendered again; what was not kept is kept from now on.
fn template(
    world: &World<'_>,
    role: &RevisionStatus,
    target: Option<&FrozenRevision>,
    actions: &mut Vec<Action>,
) -> Option<FrozenRevision> {
    let mut kept = world.observed.revisions.iter();
    if let Some(kept) = kept.find(|kept| kept.frozen.revision == role.revision) {
        return Some(kept.frozen.clone());
    }
    let frozen = target
        .filter(|target| target.revision == role.revision)
        .cloned()
        .or_else(|| freeze_again(world.valid, role, world.render))?;
    let object = name(
        Kind::ControllerRevision,
        object_name(&world.valid.name, &role.revision),
    );
    if !world.is_foreign(&object) {
        let number = world.observed.revisions.iter().map(|kept| kept.number);
        actions.push(Action::ApplyRevision(Box::new(NewRevision {
            frozen: frozen.clone(),
            number: number.max().unwrap_or(0) + 1,
        })));
    }
    Some(frozen)
}

/// Deployments without a role lose their pods once the Service is seen not to select them.
fn leavers(world: &World<'_>, decisions: &mut Decisions, actions: &mut Vec<Action>) {
    if !traffic::traffic_is_right(world, &decisions.memory) {
        return;
    }
    let mut moments = Vec::new();
    for deployment in without_role(world, decisions) {
        if deployment.replicas > 0
            && let Some(until) = kept_until(world, &decisions.memory, &deployment.revision)
        {
            moments.push(until);
            continue;
        }
        let mut kept = world.observed.revisions.iter();
        match kept.find(|kept| kept.frozen.revision == deployment.revision) {
            Some(_) if deployment.replicas == 0 => {}
            Some(kept) => actions.push(Action::ApplyDeployment(Box::new(DeploymentRequest {
                frozen: kept.frozen.clone(),
                replicas: 0,
            }))),
            // It could never be used again.
            None => actions.push(delete_deployment(world, deployment)),
        }
    }
    for moment in moments {
        decisions.wake_at(moment, world.now);
    }
}

fn without_role<'a>(
    world: &World<'a>,
    decisions: &Decisions,
) -> impl Iterator<Item = &'a ObservedDeployment> {
    let has_role = roles_of(decisions);
    let deployments = world.observed.deployments.iter();
    deployments.filter(move |deployment| !has_role.contains(&deployment.revision))
}

fn roles_of(decisions: &Decisions) -> Vec<String> {
    let memory = &decisions.memory;
    let roles = [&memory.stable, &memory.canary].into_iter().flatten();
    roles.map(|role| role.revision.clone()).collect()
}

fn delete_deployment(world: &World<'_>, deployment: &ObservedDeployment) -> Action {
    Action::Delete(ObjectRef {
        object: name(
            Kind::Deployment,
            object_name(&world.valid.name, &deployment.revision),
        ),
        uid: deployment.uid.clone(),
    })
}

/// Old revisions beyond the history go, pods first seen gone.
fn history(
    world: &World<'_>,
    decisions: &Decisions,
    target: Option<&FrozenRevision>,
    actions: &mut Vec<Action>,
) {
    let mut used = roles_of(decisions);
    used.extend(target.map(|target| target.revision.clone()));
    let kept = world.observed.revisions.iter();
    let mut old: Vec<_> = kept
        .filter(|kept| !used.contains(&kept.frozen.revision))
        .collect();
    old.sort_by_key(|kept| std::cmp::Reverse(kept.number));
    for kept in old.into_iter().skip(world.valid.rollout.history) {
        match world.deployment(&kept.frozen.revision) {
            Some(deployment) if deployment.replicas > 0 => {}
            Some(deployment) => actions.push(delete_deployment(world, deployment)),
            None => actions.push(Action::Delete(ObjectRef {
                object: name(
                    Kind::ControllerRevision,
                    object_name(&world.valid.name, &kept.frozen.revision),
                ),
                uid: kept.uid.clone(),
            })),
        }
    }
}
