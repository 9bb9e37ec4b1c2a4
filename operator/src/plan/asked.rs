//! What people ask of a rollout: reads the request in the annotation, answers it once, and keeps what follows from it in the memory.
//!
//! A request is acted on in the pass that answers it, and never again: its answer is memory. One that was there before this status
//! was is refused, for nobody knows whether it was answered before the status was lost. Nothing here moves the trial beyond what was
//! asked; a request is an order, the verdicts are not its affair.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mixquant_crds::names::ANNOTATION_REQUEST;
use mixquant_crds::status::{
    Answer, AttemptStatus, Halt, MixQuantServiceStatus, Reason, RequestStatus, RolloutStage,
    RolloutStatus, UndoStatus, Waiver,
};
use mixquant_crds::{Command, Digest, Request};
use serde_json::json;

use super::{Decisions, World, ending};
use crate::canary;
use crate::revision::object_name;
use crate::validate::ValidService;

/// A longer text is cut where it is answered.
const MAX_KEPT: usize = 256;

/// The service as it is asked for now: a retry is a request of its own, so that what failed before is tried again.
pub(super) fn attempted<'a>(
    valid: &'a ValidService,
    memory: &MixQuantServiceStatus,
) -> Cow<'a, ValidService> {
    let Some(attempt) = &memory.attempt else {
        return Cow::Borrowed(valid);
    };
    let request = json!({"spec": attempt.spec, "attempt": attempt.number});
    Cow::Owned(ValidService {
        request: Digest::of_json(&request).expect("a JSON value is JSON"),
        ..valid.clone()
    })
}

/// What was asked of another spec, or of a revision that is gone, holds no longer.
pub(super) fn expire(world: &World<'_>, decisions: &mut Decisions) {
    let spec = &world.valid.spec;
    let memory = &mut decisions.memory;
    memory.attempt = memory.attempt.take().filter(|kept| kept.spec == *spec);
    let Some(undo) = memory.undo.take_if(|undo| undo.spec == *spec) else {
        memory.undo = None;
        return;
    };
    let stable = memory.stable.as_ref();
    let serves = stable.is_some_and(|stable| stable.revision == undo.revision);
    if serves || is_kept(world, &undo.revision) {
        memory.undo = Some(undo);
    } else {
        let note = format!(
            "revision {} is gone: the spec's revision is tried again",
            undo.revision
        );
        decisions.tell(true, Reason::Undone, note);
    }
}

/// A waiver holds only with what it rests on: the annotation that asks for it, or the rollback window. The status alone gives none.
pub(super) fn confirm(world: &World<'_>, decisions: &mut Decisions) {
    let memory = &decisions.memory;
    let (Some(canary), Some(at)) = (&memory.canary, &memory.rollout) else {
        return;
    };
    let holds = match at.waived {
        None => true,
        Some(Waiver::Request) => {
            let full = Command::Promote {
                revision: canary.revision.clone(),
                full: true,
            };
            request(world).is_some_and(|text| {
                let request = text.parse::<Request>();
                request.is_ok_and(|request| request.command == full)
                    && is_answered(memory.request.as_ref(), &text)
            })
        }
        Some(Waiver::RollbackWindow) => ending::in_rollback_window(world, memory, &canary.revision),
    };
    if !holds && let Some(at) = &mut decisions.memory.rollout {
        at.waived = None;
    }
}

fn is_kept(world: &World<'_>, revision: &str) -> bool {
    let mut kept = world.observed.revisions.iter();
    kept.any(|kept| kept.frozen.revision == revision)
}

/// Answers the newest request, unless it is answered already.
pub(super) fn answer(world: &World<'_>, decisions: &mut Decisions) {
    let Some(text) = request(world) else {
        return;
    };
    if is_answered(decisions.memory.request.as_ref(), &text) {
        return;
    }
    let answered = if world.observed.service.status.is_none() {
        Err(
            "it was there before this status was, and may have been done: ask again with a new id"
                .into(),
        )
    } else {
        match text.parse::<Request>() {
            Ok(request) => act(world, decisions, &request.command),
            Err(error) => Err(error.to_string()),
        }
    };
    let (answer, message) = match answered {
        Ok(message) => (Answer::Accepted, message),
        Err(message) => (Answer::Refused, message),
    };
    let warning = answer == Answer::Refused;
    let verb = if warning { "refused" } else { "done" };
    decisions.tell(
        warning,
        Reason::Requested,
        format!("request `{text}` is {verb}: {message}"),
    );
    decisions.memory.request = Some(RequestStatus {
        request: text,
        answer,
        message,
        at: Time(world.now),
    });
}

/// The text of the newest request.
fn request(world: &World<'_>) -> Option<String> {
    let annotations = world.observed.service.metadata.annotations.as_ref()?;
    let text = annotations.get(ANNOTATION_REQUEST)?;
    Some(text.trim().chars().take(MAX_KEPT).collect())
}

/// An id is answered once; a text without one counts as a whole.
fn is_answered(known: Option<&RequestStatus>, text: &str) -> bool {
    let id = |text: &str| text.parse::<Request>().ok().map(|request| request.id);
    known.is_some_and(|known| {
        known.request == text || (id(text).is_some() && id(&known.request) == id(text))
    })
}

fn act(world: &World<'_>, decisions: &mut Decisions, command: &Command) -> Result<String, String> {
    match command {
        Command::Promote { revision, full } => {
            let at = trial(world, decisions, revision)?;
            promote(world, at, *full)
        }
        Command::Abort { revision } => {
            trial(world, decisions, revision)?;
            ending::roll_back(world, decisions, revision, Reason::Aborted);
            Ok(format!("revision {revision} is rolled back"))
        }
        Command::Retry => retry(world, decisions),
        Command::Undo { revision } => undo(world, decisions, revision),
    }
}

/// The trial of `revision`, which must be the canary of what is asked for now.
fn trial<'a>(
    world: &World<'_>,
    decisions: &'a mut Decisions,
    revision: &str,
) -> Result<&'a mut RolloutStatus, String> {
    let memory = &mut decisions.memory;
    let canary = memory
        .canary
        .as_ref()
        .map(|canary| canary.revision.as_str());
    match (canary, &mut memory.rollout) {
        (Some(canary), Some(at))
            if canary == revision
                && at.request == world.valid.request
                && at.stage != RolloutStage::RollingBack =>
        {
            Ok(at)
        }
        (Some(canary), _) => Err(format!(
            "revision {revision} is not on trial; the canary is {canary}"
        )),
        (None, _) => Err(format!(
            "revision {revision} is not on trial; there is no canary"
        )),
    }
}

fn promote(world: &World<'_>, at: &mut RolloutStatus, full: bool) -> Result<String, String> {
    let rollout = &world.valid.rollout;
    if rollout.paused {
        return Err("spec.rollout.paused is true: set it to false first".into());
    }
    let message = if full {
        at.waived = Some(Waiver::Request);
        if at.stage == RolloutStage::Stepping {
            at.stage = RolloutStage::Promoting;
        }
        "it becomes stable when all its pods run; the steps and verdicts that are left are skipped"
    } else if matches!(at.paused, Some(Halt::Gate | Halt::Deadline)) {
        "the trial goes on where it stood still, with a window of its own"
    } else if canary::pauses(rollout, at, world.now) {
        at.released = true;
        "the pause is over"
    } else {
        return Err("it waits for no person: the gates decide; `full` skips them".into());
    };
    at.paused = None;
    at.failed_verdicts = 0;
    at.step_started_at = Time(world.now);
    Ok(message.into())
}

fn retry(world: &World<'_>, decisions: &mut Decisions) -> Result<String, String> {
    let memory = &mut decisions.memory;
    let mut failed = memory.failed_revisions.iter();
    let failed = failed.any(|failed| failed.request == world.valid.request);
    if !failed && memory.undo.is_none() {
        return Err("nothing has failed for the spec as it stands".into());
    }
    let number = memory.attempt.as_ref().map_or(1, |attempt| attempt.number);
    let number = number.saturating_add(1);
    memory.undo = None;
    memory.attempt = Some(AttemptStatus {
        spec: world.valid.spec.clone(),
        number,
    });
    Ok(format!(
        "what the spec asks for is tried again, attempt {number}"
    ))
}

fn undo(world: &World<'_>, decisions: &mut Decisions, revision: &str) -> Result<String, String> {
    if !is_kept(world, revision) {
        let name = object_name(&world.valid.name, revision);
        return Err(format!(
            "there is no ControllerRevision {name}: `kubectl get controllerrevisions` lists what is kept"
        ));
    }
    if decisions.failure(world.valid, revision).is_some() {
        return Err(format!(
            "revision {revision} failed for this spec: ask for a retry to try it again"
        ));
    }
    let memory = &mut decisions.memory;
    let stable = memory.stable.as_ref();
    let serves = stable.is_some_and(|stable| stable.revision == revision);
    if serves && memory.canary.is_none() {
        return Err(format!("revision {revision} serves already"));
    }
    memory.undo = Some(UndoStatus {
        spec: world.valid.spec.clone(),
        revision: revision.to_owned(),
    });
    Ok(format!(
        "revision {revision} serves instead of what the spec asks for, until the spec changes or a retry is asked for"
    ))
}
