//! What two lives are compared by: the objects of a namespace and the service's status, without what differs between any two runs (times,
//! uids, versions, messages with numbers in them).

use std::collections::BTreeMap;

use kube::api::{DynamicObject, ListParams};
use kube::discovery::ApiResource;
use kube::{Api, Client};
use serde_json::{Value, json};

use super::world::services;

/// Kinds that an operator's service has.
const KINDS: [(&str, &str, &str, &str); 8] = [
    ("apps", "v1", "Deployment", "deployments"),
    ("apps", "v1", "ControllerRevision", "controllerrevisions"),
    ("batch", "v1", "Job", "jobs"),
    ("", "v1", "Pod", "pods"),
    ("", "v1", "Service", "services"),
    ("", "v1", "ServiceAccount", "serviceaccounts"),
    (
        "networking.k8s.io",
        "v1",
        "NetworkPolicy",
        "networkpolicies",
    ),
    (
        "policy",
        "v1",
        "PodDisruptionBudget",
        "poddisruptionbudgets",
    ),
];

/// A namespace, comparable: by `kind/name`.
pub type State = BTreeMap<String, Value>;

/// Reads a namespace.
///
/// # Errors
/// What the apiserver refuses.
pub async fn read(client: &Client, namespace: &str) -> anyhow::Result<State> {
    let mut state = service(client, namespace).await?;
    for (group, version, kind, plural) in KINDS {
        let resource = ApiResource {
            group: group.into(),
            version: version.into(),
            api_version: if group.is_empty() {
                version.into()
            } else {
                format!("{group}/{version}")
            },
            kind: kind.into(),
            plural: plural.into(),
        };
        let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource);
        for object in api.list(&ListParams::default()).await? {
            let name = object.metadata.name.clone().unwrap_or_default();
            state.insert(format!("{kind}/{name}"), essence(kind, &object));
        }
    }
    Ok(state)
}

/// The service alone.
///
/// # Errors
/// What the apiserver refuses.
pub async fn service(client: &Client, namespace: &str) -> anyhow::Result<State> {
    let found = services(client, namespace)
        .list(&ListParams::default())
        .await?;
    let named = found.iter().map(|service| {
        let name = service.metadata.name.clone().unwrap_or_default();
        (format!("MixQuantService/{name}"), status(&service.data))
    });
    Ok(named.collect())
}

fn essence(kind: &str, object: &DynamicObject) -> Value {
    let owners: Vec<String> = object
        .metadata
        .owner_references
        .iter()
        .flatten()
        .map(|owner| format!("{}/{}", owner.kind, owner.name))
        .collect();
    let content = match kind {
        // Its addresses are the apiserver's to give.
        "Service" => {
            json!({"selector": object.data.pointer("/spec/selector"), "ports": object.data.pointer("/spec/ports")})
        }
        "Pod" => json!({"phase": object.data.pointer("/status/phase")}),
        "ControllerRevision" => {
            json!({"data": object.data.get("data"), "revision": object.data.get("revision")})
        }
        "Job" => json!({"template": object.data.pointer("/spec/template/spec")}),
        _ => object.data.get("spec").cloned().unwrap_or_default(),
    };
    let mut labels = object.metadata.labels.clone().unwrap_or_default();
    labels.retain(|label, _| !label.contains("controller-uid"));
    json!({"labels": labels, "owners": owners, "content": content})
}

fn status(service: &Value) -> Value {
    let at = |path: &str| service.pointer(path).cloned().unwrap_or_default();
    let list = |path: &str, field: &str| -> Vec<Value> {
        let items = service.pointer(path).and_then(Value::as_array);
        items
            .into_iter()
            .flatten()
            .map(|item| item[field].clone())
            .collect()
    };
    let conditions = service
        .pointer("/status/conditions")
        .and_then(Value::as_array);
    let conditions: Vec<String> = conditions
        .into_iter()
        .flatten()
        .map(|condition| {
            format!(
                "{}={} {}",
                condition["type"], condition["status"], condition["reason"]
            )
        })
        .collect();
    json!({
        "phase": at("/status/phase"),
        "stable": at("/status/stable"),
        "canary": at("/status/canary/revision"),
        "stage": at("/status/rollout/stage"),
        "step": at("/status/rollout/step"),
        "failed": list("/status/failedRevisions", "revision"),
        "promoted": list("/status/promoted", "revision"),
        "calibrations": list("/status/calibrations", "inputsDigest"),
        "replicas": [at("/status/replicas"), at("/status/readyReplicas")],
        "conditions": conditions,
    })
}

/// Where two states differ, in lines for people.
pub fn differences(expected: &State, found: &State) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, value) in expected {
        match found.get(name) {
            None => lines.push(format!("{name} is missing")),
            Some(other) if other != value => lines.push(format!(
                "{name}: {}",
                difference(value, other).unwrap_or_default()
            )),
            Some(_) => {}
        }
    }
    let more = found.keys().filter(|name| !expected.contains_key(*name));
    lines.extend(more.map(|name| format!("{name} is left over")));
    lines
}

/// The first place where two values differ, and both sides.
fn difference(expected: &Value, found: &Value) -> Option<String> {
    let within = |place: String, (one, other): (&Value, &Value)| {
        difference(one, other).map(|difference| format!("{place}{difference}"))
    };
    match (expected, found) {
        (Value::Object(one), Value::Object(other)) if one.keys().eq(other.keys()) => one
            .iter()
            .find_map(|(key, value)| within(format!("/{key}"), (value, &other[key]))),
        (Value::Array(one), Value::Array(other)) if one.len() == other.len() => one
            .iter()
            .zip(other)
            .enumerate()
            .find_map(|(index, pair)| within(format!("/{index}"), pair)),
        (one, other) => (one != other).then(|| format!(" is {other}, not {one}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_named_by_its_place() {
        let state = |value: Value| State::from([("Pod/a".to_owned(), value)]);
        let one = state(json!({"content": [1, {"x": true}], "labels": {}}));
        let other = state(json!({"content": [1, {"x": false}], "labels": {}}));
        assert_eq!(
            differences(&one, &other),
            ["Pod/a: /content/1/x is false, not true"]
        );
        assert_eq!(differences(&one, &State::new()), ["Pod/a is missing"]);
        assert_eq!(differences(&State::new(), &one), ["Pod/a is left over"]);
        assert!(differences(&one, &one).is_empty());
    }
}
