//! From a person's verb to the patch that says it: an annotation with an id that the operator answers, or the spec's own switch. Pure.
//!
//! A request names the revision that it speaks of, so that it never acts on one that came in between.

use mixquant_crds::status::{Answer, RolloutStage};
use mixquant_crds::{MixQuantService, Request, names};
use serde::Serialize;
use serde_json::{Value, json};

use super::Exit;
use super::answer::Plain;
use super::facts::Facts;
use super::table::{Style, Tone};

/// What a person may order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verb {
    /// End the pause that the canary waits in; with `full` skip what is left.
    Promote {
        /// Skip steps and verdicts.
        full: bool,
    },
    /// Begin no trial and move none on.
    Pause,
    /// Roll the canary back.
    Abort,
    /// Try again what failed for the spec as it stands.
    Retry,
    /// Let an earlier revision serve.
    Undo {
        /// Its number or its name; the one before stable without it.
        to: Option<String>,
    },
}

/// How it is said.
#[derive(Debug, Clone, PartialEq)]
pub struct Saying {
    /// A merge patch of the service.
    pub patch: Value,
    /// The request in it, which the operator answers.
    pub request: Option<Request>,
    /// In words.
    pub says: String,
}

/// How `verb` is said of the service that `facts` are of; `id` is a new one.
///
/// # Errors
/// Why it makes no sense now.
pub fn saying(verb: &Verb, facts: &Facts, id: &str) -> Result<Saying, String> {
    let paused = facts.service.spec.rollout.paused;
    let command = match verb {
        Verb::Pause if paused => return Err("it is paused already: `promote` lets it go on".into()),
        Verb::Pause => return Ok(switch(true)),
        // Then the rollout waits for the switch alone.
        Verb::Promote { full: false } if paused => return Ok(switch(false)),
        Verb::Promote { full } => mixquant_crds::Command::Promote {
            revision: canary(facts)?,
            full: *full,
        },
        Verb::Abort => mixquant_crds::Command::Abort {
            revision: canary(facts)?,
        },
        Verb::Retry => mixquant_crds::Command::Retry,
        Verb::Undo { to } => mixquant_crds::Command::Undo {
            revision: earlier(facts, to.as_deref())?,
        },
    };
    let request = Request {
        id: id.to_owned(),
        command,
    };
    let mut patch =
        json!({"metadata": {"annotations": {names::ANNOTATION_REQUEST: request.to_string()}}});
    if paused && matches!(verb, Verb::Promote { .. }) {
        patch["spec"] = json!({"rollout": {"paused": false}});
    }
    Ok(Saying {
        patch,
        says: format!("{} was asked for", request.command),
        request: Some(request),
    })
}

fn switch(paused: bool) -> Saying {
    let says = if paused {
        "spec.rollout.paused is true: no trial begins and none moves on; a broken limit still rolls back"
    } else {
        "spec.rollout.paused is false: the rollout goes on"
    };
    Saying {
        patch: json!({"spec": {"rollout": {"paused": paused}}}),
        request: None,
        says: says.into(),
    }
}

fn canary(facts: &Facts) -> Result<String, String> {
    let status = facts.service.status.as_ref();
    let leaves = status
        .and_then(|status| status.rollout.as_ref())
        .is_some_and(|at| at.stage == RolloutStage::RollingBack);
    match status.and_then(|status| status.canary.as_ref()) {
        Some(canary) if !leaves => Ok(canary.revision.clone()),
        Some(canary) => Err(format!(
            "canary {} is being rolled back already",
            canary.revision
        )),
        None => {
            Err("no revision is on trial: `kubectl mixquant status` says where it stands".into())
        }
    }
}

/// The revision to go back to.
fn earlier(facts: &Facts, to: Option<&str>) -> Result<String, String> {
    let status = facts.service.status.clone().unwrap_or_default();
    let stable = status.stable.map(|stable| stable.revision);
    if let Some(to) = to {
        let mut kept = facts.revisions.iter();
        let is = |kept: &&super::facts::Kept| {
            kept.frozen.revision == to || to.parse() == Ok(kept.number)
        };
        return match kept.find(is) {
            Some(kept) => Ok(kept.frozen.revision.clone()),
            None => Err(format!(
                "no revision `{to}` is kept: `kubectl mixquant history` lists numbers and names"
            )),
        };
    }
    let mut promoted = status.promoted.iter().map(|promoted| &promoted.revision);
    let before = promoted
        .find(|revision| stable.as_ref() != Some(*revision) && facts.kept(revision).is_some());
    before
        .cloned()
        .ok_or_else(|| "no revision that served before is kept: name one with --to-revision".into())
}

/// What became of an order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    /// The service.
    pub name: String,
    /// What was said.
    pub says: String,
    /// The request, as the operator finds it.
    pub request: Option<String>,
    /// The operator's answer, when it came in time.
    pub accepted: Option<bool>,
    /// In its words.
    pub answer: Option<String>,
}

/// What became of `saying`, from the service as it is now.
pub fn outcome(saying: &Saying, service: &MixQuantService) -> Outcome {
    let request = saying.request.as_ref().map(ToString::to_string);
    let status = service.status.as_ref();
    let answered = status.and_then(|status| status.request.as_ref());
    let answered = answered.filter(|answered| Some(&answered.request) == request.as_ref());
    Outcome {
        name: service.metadata.name.clone().unwrap_or_default(),
        says: saying.says.clone(),
        request,
        accepted: answered.map(|answered| answered.answer == Answer::Accepted),
        answer: answered.map(|answered| answered.message.clone()),
    }
}

impl Outcome {
    /// Whether nothing more is to be waited for.
    pub fn is_final(&self) -> bool {
        self.request.is_none() || self.accepted.is_some()
    }

    /// What a script should do.
    pub fn exit(&self) -> Exit {
        match (self.is_final(), self.accepted) {
            (false, _) => Exit::NotYet,
            (true, Some(false)) => Exit::No,
            (true, _) => Exit::Done,
        }
    }
}

impl Plain for Outcome {
    fn plain(&self, style: Style) -> String {
        let (tone, answer) = match (&self.answer, self.accepted) {
            (Some(answer), Some(false)) => (Tone::Bad, format!("refused: {answer}")),
            (Some(answer), _) => (Tone::Good, format!("done: {answer}")),
            (None, _) if self.is_final() => (Tone::Plain, self.says.clone()),
            (None, _) => (
                Tone::Busy,
                format!(
                    "{}; the operator has not answered yet (status.request): does it run?",
                    self.says
                ),
            ),
        };
        format!(
            "{}: {}\n",
            style.paint(Tone::Plain, &self.name),
            style.paint(tone, &answer)
        )
    }
}
