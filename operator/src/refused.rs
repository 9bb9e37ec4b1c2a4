//! What the status says when a pass cannot do its work: the spec cannot work, the stored object cannot be read, or the API refuses an object.
//!
//! Pure. Memory and everything that other conditions say stay as they are: stable goes on serving.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use mixquant_crds::MixQuantService;
use mixquant_crds::status::{ConditionType, MixQuantServiceStatus, Phase, Reason};
use serde_json::{Value, json};

/// The status of a service that cannot go on until a person changes something.
pub fn status(
    service: &MixQuantService,
    reason: Reason,
    message: &str,
    now: Timestamp,
) -> MixQuantServiceStatus {
    let mut status = service.status.clone().unwrap_or_default();
    let generation = service.metadata.generation;
    status.observed_generation = generation;
    if reason == Reason::InvalidSpec {
        status.phase = Some(Phase::Invalid);
    }
    for (type_, value) in verdicts() {
        let condition = condition((type_, value), (reason, message), generation, now);
        put(&mut status.conditions, condition);
    }
    status
}

/// The same as JSON on top of a stored status that this version cannot read.
pub fn raw_status(stored: &Value, generation: Option<i64>, message: &str, now: Timestamp) -> Value {
    let mut status = stored.clone();
    if !status.is_object() {
        status = json!({});
    }
    let mut conditions: Vec<Condition> = status
        .get("conditions")
        .and_then(|conditions| serde_json::from_value(conditions.clone()).ok())
        .unwrap_or_default();
    for (type_, value) in verdicts() {
        let what = (Reason::InvalidSpec, message);
        put(
            &mut conditions,
            condition((type_, value), what, generation, now),
        );
    }
    status["conditions"] = json!(conditions);
    status["observedGeneration"] = json!(generation);
    status["phase"] = json!(Phase::Invalid);
    status
}

fn verdicts() -> [(ConditionType, &'static str); 3] {
    [
        (ConditionType::Ready, "False"),
        (ConditionType::Stalled, "True"),
        (ConditionType::Reconciling, "False"),
    ]
}

fn condition(
    (type_, value): (ConditionType, &str),
    (reason, message): (Reason, &str),
    generation: Option<i64>,
    now: Timestamp,
) -> Condition {
    Condition {
        type_: type_.as_str().to_owned(),
        status: value.to_owned(),
        reason: reason.as_str().to_owned(),
        message: message.to_owned(),
        observed_generation: generation,
        last_transition_time: Time(now),
    }
}

/// Replaces the condition of the same type; its transition time moves only when its status does.
fn put(conditions: &mut Vec<Condition>, mut new: Condition) {
    match conditions.iter_mut().find(|old| old.type_ == new.type_) {
        Some(old) => {
            if old.status == new.status {
                new.last_transition_time = old.last_transition_time.clone();
            }
            *old = new;
        }
        None => conditions.push(new),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_refusal_changes_nothing_and_keeps_what_else_is_known() {
        let stored = json!({"stable": {"revision": "abc"}, "unknown": 1, "conditions": [
            {"type": "Available", "status": "True", "reason": "PodsReady", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
        let first = raw_status(&stored, Some(3), "no", Timestamp::UNIX_EPOCH);
        let later = Timestamp::from_second(1000).unwrap();
        assert_eq!(raw_status(&first, Some(3), "no", later), first);
        assert_eq!(first["stable"], stored["stable"]);
        assert_eq!(first["conditions"][0]["status"], "True");
        assert_eq!(first["conditions"][1]["reason"], "InvalidSpec");
        assert_eq!(
            raw_status(&json!("x"), None, "no", later)["phase"],
            "Invalid"
        );
    }
}
