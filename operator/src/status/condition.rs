//! One condition: what is said, and when it last changed.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use mixquant_crds::MixQuantServiceStatus;
use mixquant_crds::status::{ConditionType, Reason};

/// A condition's `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Truth {
    True,
    False,
    Unknown,
}

/// What a condition says.
pub(super) struct Said {
    pub(super) truth: Truth,
    pub(super) reason: Reason,
    pub(super) message: String,
}

pub(super) fn said(truth: Truth, reason: Reason, message: impl Into<String>) -> Said {
    Said {
        truth,
        reason,
        message: message.into(),
    }
}

/// Kubernetes keeps this many bytes of a condition's message.
const MAX_CONDITION_MESSAGE: usize = 32_768;

pub(super) fn condition(
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

pub(super) fn renewed(
    before: &[Condition],
    kind: ConditionType,
    generation: i64,
) -> Option<Condition> {
    let old = before.iter().find(|old| old.type_ == kind.as_str())?;
    Some(Condition {
        observed_generation: Some(generation),
        ..old.clone()
    })
}

/// `before` with some conditions replaced, in the order of display.
pub(super) fn with(
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
