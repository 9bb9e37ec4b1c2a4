//! Where a service stands, in one line and one exit code: what `status` answers. Pure; read from conditions only, as any program may.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use mixquant_crds::MixQuantService;
use mixquant_crds::status::ConditionType;
use serde::Serialize;

use super::Exit;
use super::answer::Plain;
use super::table::{Style, Tone, span};

/// Where a service stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum State {
    /// The spec is what serves.
    Ready,
    /// Something is under way, or not begun.
    Progressing,
    /// The rollout stands still until a person or a pause's end lets it go on.
    Paused,
    /// Nothing moves until a person changes something: rolled back, refused, invalid.
    Degraded,
}

/// Where a service stands, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Standing {
    /// The service.
    pub namespace: String,
    /// The service.
    pub name: String,
    /// In one word.
    pub state: State,
    /// Whether anything serves.
    pub available: bool,
    /// Why, as in the condition.
    pub reason: String,
    /// Why, with the numbers.
    pub message: String,
    /// Seconds for which it has been so.
    pub since_seconds: Option<i64>,
}

/// A condition of a service.
pub fn condition(service: &MixQuantService, kind: ConditionType) -> Option<&Condition> {
    let mut all = service.status.as_ref()?.conditions.iter();
    all.find(|condition| condition.type_ == kind.as_str())
}

/// Whether a condition is true.
pub fn is_true(service: &MixQuantService, kind: ConditionType) -> bool {
    condition(service, kind).is_some_and(|condition| condition.status == "True")
}

/// Where `service` stands.
pub fn standing(service: &MixQuantService, now: Timestamp) -> Standing {
    let told = |state, condition: &Condition| Standing {
        namespace: service.namespace().unwrap_or_default(),
        name: service.name_any(),
        state,
        available: is_true(service, ConditionType::Available),
        reason: condition.reason.clone(),
        message: condition.message.clone(),
        since_seconds: Some(
            now.duration_since(condition.last_transition_time.0)
                .as_secs(),
        ),
    };
    let unknown = |reason: &str, message: String| Standing {
        namespace: service.namespace().unwrap_or_default(),
        name: service.name_any(),
        state: State::Progressing,
        available: is_true(service, ConditionType::Available),
        reason: reason.into(),
        message,
        since_seconds: None,
    };
    let generation = service.metadata.generation;
    let Some(status) = &service.status else {
        return unknown(
            "Unseen",
            "the operator has not looked at it yet: does it run?".into(),
        );
    };
    if status.observed_generation < generation {
        let generation = generation.unwrap_or(0);
        return unknown(
            "Unseen",
            format!("the operator has not seen generation {generation} yet"),
        );
    }
    let of = |kind| condition(service, kind);
    match (of(ConditionType::Ready), of(ConditionType::Stalled)) {
        (_, Some(stalled)) if stalled.status == "True" => told(State::Degraded, stalled),
        (Some(ready), _) if ready.status == "True" => told(State::Ready, ready),
        _ if is_true(service, ConditionType::Paused) => {
            let paused = of(ConditionType::Paused).expect("what is true is there");
            told(State::Paused, paused)
        }
        (Some(ready), _) => told(State::Progressing, ready),
        (None, _) => unknown("Unseen", "its status has no conditions yet".into()),
    }
}

impl Standing {
    /// Whether there is nothing more to wait for.
    pub fn is_final(&self, pause_is_good: bool) -> bool {
        match self.state {
            State::Ready | State::Degraded => true,
            State::Paused => pause_is_good,
            State::Progressing => false,
        }
    }

    /// What a script should do.
    pub fn exit(&self, pause_is_good: bool) -> Exit {
        match self.state {
            State::Ready => Exit::Done,
            State::Paused if pause_is_good => Exit::Done,
            State::Progressing | State::Paused => Exit::NotYet,
            State::Degraded => Exit::No,
        }
    }
}

impl State {
    /// Its colour.
    pub fn tone(self) -> Tone {
        match self {
            Self::Ready => Tone::Good,
            Self::Progressing | Self::Paused => Tone::Busy,
            Self::Degraded => Tone::Bad,
        }
    }
}

impl Plain for Standing {
    fn plain(&self, style: Style) -> String {
        let state = style.paint(self.state.tone(), &format!("{:?}", self.state));
        let since = self
            .since_seconds
            .map_or(String::new(), |seconds| format!(" for {}", span(seconds)));
        let serves = if self.available || self.state == State::Ready {
            ""
        } else {
            "; nothing serves"
        };
        let line = format!("{}: {}{serves}", self.reason, self.message);
        format!(
            "{}: {state}{since}: {}\n",
            style.paint(Tone::Plain, &self.name),
            style.paint(Tone::Plain, &line.replace('\n', " "))
        )
    }
}
