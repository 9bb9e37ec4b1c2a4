//! The running operator as the scenarios touch it: where its pod is, how it is killed, what its metrics say.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use crate::cluster::{Cluster, Target, wait_for};
use crate::program::kibibytes;

/// Where `scripts/install` puts it.
pub const NAMESPACE: &str = "mixquant-system";
/// Selects its pods.
pub const SELECTOR: &str = "app.kubernetes.io/name=mixquant-operator";
/// The name of its process.
const PROCESS: &str = "mixquant-operator";

fn pod(cluster: &Cluster) -> anyhow::Result<Value> {
    let list = cluster
        .kubectl
        .in_namespace(NAMESPACE)
        .get(&["pods", "--selector", SELECTOR])?;
    let pods = list["items"].as_array().cloned().unwrap_or_default();
    pods.into_iter()
        .find(|pod| pod["metadata"]["deletionTimestamp"].is_null())
        .context("the operator has no pod: run scripts/install")
}

/// The name of its pod.
pub fn pod_name(cluster: &Cluster) -> anyhow::Result<String> {
    Ok(text(&pod(cluster)?, "/metadata/name"))
}

fn text(pod: &Value, pointer: &str) -> String {
    let found = pod.pointer(pointer).and_then(Value::as_str);
    found.unwrap_or_default().to_owned()
}

/// Kills the operator's process with SIGKILL on the local node; elsewhere its pod, with no time to end. Returns when another one runs.
pub async fn kill(cluster: &Cluster) -> anyhow::Result<()> {
    let pod = pod(cluster)?;
    let (name, uid) = (text(&pod, "/metadata/name"), text(&pod, "/metadata/uid"));
    if !cluster.local {
        cluster.kubectl.in_namespace(NAMESPACE).must(&[
            "delete",
            "pod",
            &name,
            "--grace-period=0",
            "--force",
        ])?;
        return Ok(());
    }
    let restarts = restart_count(&pod);
    let process = process_of(&uid)?;
    let status = Command::new("kill")
        .args(["-KILL", &process.to_string()])
        .status()?;
    ensure!(status.success(), "kill -KILL {process} failed");
    let target = Target {
        api_version: "v1",
        kind: "Pod",
        plural: "pods",
        namespace: NAMESPACE,
        name: &name,
    };
    wait_for(
        &cluster.client,
        target,
        Duration::from_mins(1),
        "restarted and ready",
        |pod| {
            restart_count(pod) > restarts
                && pod.pointer("/status/containerStatuses/0/ready") == Some(&Value::Bool(true))
        },
    )
    .await
    .map(drop)
}

fn restart_count(pod: &Value) -> i64 {
    pod.pointer("/status/containerStatuses/0/restartCount")
        .and_then(Value::as_i64)
        .unwrap_or(0)
}

/// The process of the operator inside the pod `uid`: its cgroup's path names the pod.
fn process_of(uid: &str) -> anyhow::Result<u32> {
    for entry in std::fs::read_dir("/proc")? {
        let folder = entry?.path();
        let Some(id) = folder
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        if is_operator(&folder, uid) {
            return Ok(id);
        }
    }
    bail!("no process {PROCESS} of pod {uid} runs on this machine")
}

fn is_operator(process: &Path, uid: &str) -> bool {
    let read = |file: &str| std::fs::read_to_string(process.join(file)).unwrap_or_default();
    // The kernel cuts a process's name at 15 bytes.
    read("comm").trim() == &PROCESS[..15] && read("cgroup").contains(uid)
}

/// Memory that the operator's process holds now, in bytes (its resident set). The local node only.
pub fn resident_bytes(cluster: &Cluster) -> anyhow::Result<u64> {
    let uid = text(&pod(cluster)?, "/metadata/uid");
    let status = std::fs::read_to_string(format!("/proc/{}/status", process_of(&uid)?))?;
    Ok(kibibytes(&status, "VmRSS:")? * 1024)
}

/// The operator's metrics page.
pub fn metrics(cluster: &Cluster) -> anyhow::Result<String> {
    let name = pod_name(cluster)?;
    cluster.kubectl.must(&[
        "get",
        "--raw",
        &format!("/api/v1/namespaces/{NAMESPACE}/pods/{name}:8080/proxy/metrics"),
    ])
}
