//! What the operator did, by the local apiserver's own audit log: its writes, and the rights that it made use of.
//!
//! Read by the scenarios that watch the operator at rest and that compare its rights with what the chart grants. Never by the operator.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::cluster::Cluster;
use crate::operator::NAMESPACE;

/// The operator's service account, cluster role and role begin with this name.
const NAME: &str = "mixquant-operator";

/// `verb group/resource` (`get pods`, `patch mixquant.io/mixquantservices/status`): one thing that somebody may do.
pub type Right = String;

fn right(verb: &str, group: &str, resource: &str) -> Right {
    let slash = if group.is_empty() { "" } else { "/" };
    format!("{verb} {group}{slash}{resource}")
}

/// The operator's requests to the apiserver in the order of the log, the rotated files first.
fn events(cluster: &Cluster) -> anyhow::Result<Vec<Value>> {
    let folder = cluster.run_folder()?.join("log");
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
        .with_context(|| folder.display().to_string())?
        .into_iter()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("audit")
        })
        .collect();
    ensure!(!files.is_empty(), "no audit log in {}", folder.display());
    files.sort(); // audit-DATE.log before audit.log
    let user = format!("system:serviceaccount:{NAMESPACE}:{NAME}");
    let mut events = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let of_operator = text
            .lines()
            .filter(|line| line.contains(&user))
            // The last line may be half-written.
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter(|event| event["user"]["username"] == *user);
        events.extend(of_operator);
    }
    Ok(events)
}

fn word<'a>(event: &'a Value, pointer: &str) -> &'a str {
    event.pointer(pointer).and_then(Value::as_str).unwrap_or("")
}

/// What the operator wrote since `since` (as the audit log writes times), each as `verb resource`.
///
/// # Errors
/// No audit log that can be read: the local cluster only.
pub fn writes_since(cluster: &Cluster, since: &str) -> anyhow::Result<Vec<String>> {
    Ok(events(cluster)?
        .iter()
        .filter(|event| word(event, "/requestReceivedTimestamp") > since)
        .filter(|event| !["get", "list", "watch"].contains(&word(event, "/verb")))
        .map(|event| {
            format!(
                "{} {}",
                word(event, "/verb"),
                word(event, "/objectRef/resource")
            )
        })
        .collect())
}

/// The rights that the operator has made use of since the cluster started.
///
/// # Errors
/// As of [`writes_since`].
pub fn used(cluster: &Cluster) -> anyhow::Result<BTreeSet<Right>> {
    let mut used = BTreeSet::new();
    for event in events(cluster)? {
        let code = event
            .pointer("/responseStatus/code")
            .and_then(Value::as_u64);
        let (group, mut resource) = (
            word(&event, "/objectRef/apiGroup"),
            word(&event, "/objectRef/resource").to_owned(),
        );
        // Discovery has no object, and what was refused was not made use of.
        if resource.is_empty() || code == Some(403) {
            continue;
        }
        let part = word(&event, "/objectRef/subresource");
        if !part.is_empty() {
            resource = format!("{resource}/{part}");
        }
        used.insert(right(word(&event, "/verb"), group, &resource));
        // Server-side apply of an object that was not there needs the right to create it.
        if word(&event, "/verb") == "patch" && code == Some(201) {
            used.insert(right("create", group, &resource));
        }
    }
    Ok(used)
}

/// The rights that the chart has given to the operator, read from the cluster.
///
/// # Errors
/// The roles cannot be read.
pub fn granted(cluster: &Cluster) -> anyhow::Result<BTreeSet<Right>> {
    let mut granted = BTreeSet::new();
    let lease = format!("{NAME}-lease");
    for role in [
        ["clusterrole", NAME, "--namespace", NAMESPACE],
        ["role", &lease, "--namespace", NAMESPACE],
    ] {
        let role = cluster.kubectl.get(&role)?;
        for rule in role["rules"].as_array().into_iter().flatten() {
            for group in words(rule, "apiGroups") {
                for resource in words(rule, "resources") {
                    let rights = words(rule, "verbs").map(|verb| right(verb, group, resource));
                    granted.extend(rights);
                }
            }
        }
    }
    Ok(granted)
}

fn words<'a>(rule: &'a Value, field: &str) -> impl Iterator<Item = &'a str> {
    rule[field]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
}
