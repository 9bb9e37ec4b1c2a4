//! From stored objects to what `plan` may know of them. Pure: called by `observe.rs` on what it read.

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod, Service};
use kube::ResourceExt;
use mixquant_crds::{JobMessage, names};
use serde_json::Value;
use tracing::warn;

use crate::build::meta::Owner;
use crate::build::{deployment, service};
use crate::compare::covers;
use crate::error::one_line;
use crate::observed::{
    JobState, ObservedDeployment, ObservedJob, ObservedPod, ObservedRevision, ObservedTraffic,
    Traffic,
};

/// A Job whose pod has not appeared after so many seconds is refused one: by a quota, for example.
const POD_APPEARS_SECONDS: i64 = 15;

/// A ControllerRevision; one whose data cannot be read is as good as gone.
pub fn revision(object: &ControllerRevision) -> Option<ObservedRevision> {
    match deployment::frozen(object) {
        Ok(frozen) => Some(ObservedRevision {
            frozen,
            number: object.revision,
            uid: object.uid()?,
        }),
        Err(error) => {
            warn!(name = object.name_any(), %error, "a ControllerRevision of ours cannot be read");
            None
        }
    }
}

/// What a Deployment is compared with.
pub struct Deployed<'a> {
    /// The service.
    pub owner: &'a Owner,
    /// Its revisions.
    pub revisions: &'a [ObservedRevision],
    /// Its engine pods.
    pub pods: &'a [Pod],
}

impl Deployed<'_> {
    /// A Deployment, with what is wrong with it or its pods.
    pub fn observed(&self, object: &Deployment) -> Option<ObservedDeployment> {
        let prefix = format!("{}-", self.owner.name);
        let revision = object.name_any().strip_prefix(&prefix)?.to_owned();
        let spec = object.spec.as_ref()?;
        let status = object.status.clone().unwrap_or_default();
        let existing = status.replicas.unwrap_or_default();
        let seen = status.observed_generation >= object.metadata.generation;
        Some(ObservedDeployment {
            uid: object.uid()?,
            replicas: spec.replicas.unwrap_or(1),
            existing,
            ready: status.ready_replicas.unwrap_or_default(),
            available: status.available_replicas.unwrap_or_default(),
            up_to_date: seen && status.updated_replicas.unwrap_or_default() == existing,
            matches: self.matches(object, &revision),
            problem: self.problem(object, &revision),
            revision,
        })
    }

    fn matches(&self, object: &Deployment, revision: &str) -> bool {
        let Some(kept) = self
            .revisions
            .iter()
            .find(|r| r.frozen.revision == revision)
        else {
            return true;
        };
        let replicas = object.spec.as_ref().and_then(|spec| spec.replicas);
        let desired =
            deployment::deployment(self.owner, &kept.frozen, replicas.unwrap_or_default());
        covers(&plain(object), &plain(&desired))
    }

    fn problem(&self, object: &Deployment, revision: &str) -> Option<String> {
        let refused = object
            .status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten())
            .find(|condition| condition.type_ == "ReplicaFailure" && condition.status == "True")
            .map(|condition| {
                one_line(
                    condition
                        .message
                        .as_deref()
                        .unwrap_or("no pod can be created"),
                )
            });
        refused.or_else(|| {
            self.pods
                .iter()
                .filter(|pod| revision_of(pod) == Some(revision))
                .find_map(pod_problem)
        })
    }
}

/// An object as JSON.
pub(crate) fn plain<K: serde::Serialize>(object: &K) -> Value {
    serde_json::to_value(object).expect("an object is plain data")
}

fn revision_of(pod: &Pod) -> Option<&str> {
    pod.labels().get(names::LABEL_REVISION).map(String::as_str)
}

fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

/// An engine pod that has not finished.
pub fn pod(object: &Pod) -> Option<ObservedPod> {
    if matches!(phase(object), "Succeeded" | "Failed") {
        return None;
    }
    let status = object.status.clone().unwrap_or_default();
    let containers = || status.container_statuses.iter().flatten();
    Some(ObservedPod {
        name: object.name_any(),
        uid: object.uid()?,
        revision: revision_of(object)?.to_owned(),
        ip: status.pod_ip.clone().filter(|ip| !ip.is_empty()),
        ready: status
            .conditions
            .iter()
            .flatten()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True"),
        terminating: object.metadata.deletion_timestamp.is_some(),
        restarts: containers().map(|container| container.restart_count).sum(),
        cannot_start: containers().find_map(cannot_start),
        out_of_memory: containers().any(out_of_memory),
        created_at: object.creation_timestamp()?.0,
    })
}

/// Reasons of a waiting container that no waiting cures. A pull that fails is not among them: registries come back.
const CANNOT_START: [&str; 5] = [
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "InvalidImageName",
    "RunContainerError",
];

fn cannot_start(container: &ContainerStatus) -> Option<String> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref()?;
    let message = waiting.message.as_deref().unwrap_or_default();
    CANNOT_START
        .contains(&reason)
        .then(|| one_line(&format!("{reason}: {message}")))
}

fn out_of_memory(container: &ContainerStatus) -> bool {
    [&container.state, &container.last_state]
        .into_iter()
        .filter_map(|state| state.as_ref()?.terminated.as_ref())
        .any(|ended| ended.reason.as_deref() == Some("OOMKilled"))
}

/// What keeps a pod from running, in one line; `None` when nothing does.
pub fn pod_problem(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let name = pod.name_any();
    let unschedulable = status.conditions.iter().flatten().find(|condition| {
        condition.type_ == "PodScheduled"
            && condition.status == "False"
            && condition.reason.as_deref() == Some("Unschedulable")
    });
    if let Some(condition) = unschedulable {
        let message = condition.message.as_deref().unwrap_or_default();
        return Some(one_line(&format!("pod {name} is unschedulable: {message}")));
    }
    if status.phase.as_deref() == Some("Failed") && status.reason.is_some() {
        let (reason, message) = (status.reason.as_deref(), status.message.as_deref());
        return Some(one_line(&format!(
            "pod {name} failed: {}: {}",
            reason.unwrap_or_default(),
            message.unwrap_or_default()
        )));
    }
    status
        .container_statuses
        .iter()
        .flatten()
        .find_map(container_problem)
        .map(|problem| one_line(&format!("pod {name}: {problem}")))
}

fn container_problem(container: &ContainerStatus) -> Option<String> {
    let state = container.state.as_ref()?;
    let last = container
        .last_state
        .as_ref()
        .and_then(|state| state.terminated.as_ref());
    if let Some(waiting) = &state.waiting {
        let reason = waiting.reason.as_deref().unwrap_or_default();
        if matches!(reason, "" | "ContainerCreating" | "PodInitializing") {
            return None;
        }
        let detail = last.map_or_else(
            || waiting.message.clone().unwrap_or_default(),
            |ended| format!("the last try {}", ending(ended)),
        );
        return Some(format!("{reason}: {detail}"));
    }
    let ended = state.terminated.as_ref().or(last)?;
    (ended.exit_code != 0 && !container.ready).then(|| ending(ended))
}

fn ending(ended: &ContainerStateTerminated) -> String {
    let reason = ended.reason.as_deref().unwrap_or("Error");
    let mut text = format!("ended with exit code {} ({reason})", ended.exit_code);
    if let Some(why) = last_words(ended.message.as_deref().unwrap_or_default()) {
        text += ": ";
        text += why;
    }
    text
}

/// Why a program ended: its error line, or else the last thing it said. A message can be the end of its log.
fn last_words(message: &str) -> Option<&str> {
    let lines = || message.lines().map(str::trim).rev();
    lines()
        .find_map(|line| line.strip_prefix("error: "))
        .or_else(|| lines().find(|line| !line.is_empty()))
}

/// A Job, with the newest answer of its pods.
pub fn job(object: &Job, pods: &[Pod], now: Timestamp) -> Option<ObservedJob> {
    let uid = object.uid()?;
    let created_at = object.creation_timestamp()?.0;
    let mine: Vec<&Pod> = pods
        .iter()
        .filter(|pod| pod.owner_references().iter().any(|owner| owner.uid == uid))
        .collect();
    let (state, finished_at) = job_state(object);
    let waited = now.duration_since(created_at).as_secs();
    let running = state == JobState::Running;
    let pod_problem = match mine.as_slice() {
        [] if running && waited >= POD_APPEARS_SECONDS => Some(format!(
            "no pod of Job {} has been created: `kubectl describe job` says why",
            object.name_any()
        )),
        pods => pods
            .iter()
            .filter(|_| running)
            .find_map(|pod| pod_problem(pod)),
    };
    Some(ObservedJob {
        name: object.name_any(),
        uid,
        state,
        message: newest_message(&mine),
        created_at,
        finished_at,
        pod_problem,
    })
}

fn job_state(object: &Job) -> (JobState, Option<Timestamp>) {
    if object.metadata.deletion_timestamp.is_some() {
        return (JobState::Deleting, None);
    }
    let conditions = object
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    for condition in conditions.filter(|condition| condition.status == "True") {
        let at = condition.last_transition_time.as_ref().map(|time| time.0);
        match condition.type_.as_str() {
            "Complete" => return (JobState::Succeeded, at),
            "Failed" => {
                let reason = condition.reason.clone().unwrap_or_default();
                let text = one_line(condition.message.as_deref().unwrap_or_default());
                return (JobState::Failed { reason, text }, at);
            }
            _ => {}
        }
    }
    (JobState::Running, None)
}

fn newest_message(pods: &[&Pod]) -> Option<Result<JobMessage, String>> {
    let ended = pods
        .iter()
        .filter_map(|pod| pod.status.as_ref())
        .flat_map(|status| status.container_statuses.iter().flatten())
        .filter_map(|container| container.state.as_ref()?.terminated.as_ref())
        .max_by_key(|ended| ended.finished_at.as_ref().map(|time| time.0))?;
    let text = ended.message.as_deref().unwrap_or_default();
    let report = serde_json::from_str(text);
    if report.is_err() && (text.is_empty() || ended.exit_code != 0) {
        return Some(Err(one_line(&format!(
            "no report: the container {}",
            ending(ended)
        ))));
    }
    Some(report.map_err(|error| {
        let start: String = text.chars().take(200).collect();
        one_line(&format!("the report cannot be read ({error}): {start}"))
    }))
}

/// The main Service.
pub fn traffic(owner: &Owner, object: &Service) -> ObservedTraffic {
    let selector = object.spec.as_ref().and_then(|spec| spec.selector.clone());
    let selector = selector.unwrap_or_default();
    let revision = selector.get(names::LABEL_REVISION).cloned();
    let ours = selector == service::selector(&owner.name, revision.as_deref());
    let desired = service::service(owner, selector);
    ObservedTraffic {
        selects: ours.then(|| revision.map_or(Traffic::All, Traffic::Only)),
        matches: covers(&plain(object), &plain(&desired)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod_with(status: &Value) -> Pod {
        let pod = json!({"metadata": {"name": "chat-1", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"mixquant.io/revision": "abc"}}, "spec": {"containers": []}, "status": status});
        serde_json::from_value(pod).unwrap()
    }

    fn container(state: &Value, last: &Value) -> Value {
        json!({"phase": "Running", "containerStatuses": [{"name": "engine", "ready": false, "restartCount": 3, "image": "", "imageID": "",
            "state": state, "lastState": last}]})
    }

    #[test]
    fn what_keeps_a_pod_from_running_is_said_with_its_reason_and_exit_code() {
        let killed = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
        let waiting = |reason: &str, message: &str| json!({"waiting": {"reason": reason, "message": message}});
        let running = json!({"running": {}});
        let unschedulable = json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
            "reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient cpu."}]});
        for (status, problem) in [
            (
                container(&waiting("CrashLoopBackOff", "back-off 20s"), &killed),
                Some("CrashLoopBackOff: the last try ended with exit code 137 (OOMKilled)"),
            ),
            (
                container(&waiting("ImagePullBackOff", "no such image"), &json!({})),
                Some("ImagePullBackOff: no such image"),
            ),
            (
                container(&running, &killed),
                Some("ended with exit code 137 (OOMKilled)"),
            ),
            (
                unschedulable,
                Some("is unschedulable: 0/1 nodes are available: 1 Insufficient cpu."),
            ),
            (
                container(&waiting("ContainerCreating", ""), &json!({})),
                None,
            ),
            (container(&running, &json!({})), None),
            (json!({"phase": "Pending"}), None),
        ] {
            let found = pod_problem(&pod_with(&status));
            match (problem, found) {
                (None, found) => assert_eq!(found, None, "{status}"),
                (Some(problem), found) => {
                    let found = found.expect("a problem");
                    assert!(found.ends_with(problem), "{found}");
                    assert!(found.starts_with("pod chat-1"), "{found}");
                }
            }
        }
    }

    #[test]
    fn a_container_that_cannot_be_made_and_one_killed_for_memory_are_seen() {
        let seen = |state: Value, last: Value| {
            let found = pod(&pod_with(&container(&state, &last))).unwrap();
            (found.cannot_start, found.out_of_memory)
        };
        let waiting = |reason: &str| json!({"waiting": {"reason": reason, "message": "secret x"}});
        let killed = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
        let (why, _) = seen(waiting("CreateContainerConfigError"), json!({}));
        assert_eq!(why.as_deref(), Some("CreateContainerConfigError: secret x"));
        for reason in ["ImagePullBackOff", "CrashLoopBackOff", "ContainerCreating"] {
            assert_eq!(seen(waiting(reason), json!({})), (None, false), "{reason}");
        }
        assert!(seen(json!({"running": {}}), killed.clone()).1);
        assert!(seen(killed, json!({})).1);
        let failed = json!({"terminated": {"exitCode": 137, "reason": "Error"}});
        assert!(!seen(json!({"running": {}}), failed).1);
    }

    #[test]
    fn a_finished_pod_is_no_engine_pod() {
        assert!(pod(&pod_with(&json!({"phase": "Failed"}))).is_none());
        let alive = pod(&pod_with(&json!({"phase": "Running", "podIP": "10.0.0.1"}))).unwrap();
        assert_eq!(alive.ip.as_deref(), Some("10.0.0.1"));
        assert!(!alive.ready);
    }

    fn job_with(status: &Value) -> Job {
        let job = json!({"metadata": {"name": "j", "uid": "job", "creationTimestamp": "2026-01-01T00:00:00Z"}, "status": status});
        serde_json::from_value(job).unwrap()
    }

    #[test]
    fn a_job_that_gets_no_pod_says_so_after_a_while() {
        let created: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let job_at = |seconds: i64| {
            let now = created + jiff::SignedDuration::from_secs(seconds);
            job(&job_with(&json!({})), &[], now).unwrap()
        };
        assert_eq!(job_at(1).pod_problem, None);
        assert!(job_at(20).pod_problem.unwrap().contains("no pod of Job j"));
    }

    #[test]
    fn an_answer_that_is_missing_or_is_no_report_is_an_error_with_what_there_was() {
        let pods = |message: Option<&str>| {
            let ended = json!({"terminated": {"exitCode": 1, "reason": "Error", "message": message, "finishedAt": "2026-01-01T00:00:05Z"}});
            let mut pod = pod_with(&container(&ended, &json!({})));
            let owner =
                json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "job"}]);
            pod.metadata.owner_references = serde_json::from_value(owner).unwrap();
            [pod]
        };
        let message = |text| {
            let now = Timestamp::UNIX_EPOCH;
            job(&job_with(&json!({})), &pods(text), now)
                .unwrap()
                .message
        };
        let Some(Err(silent)) = message(None) else {
            panic!("a pod without a message");
        };
        assert!(silent.contains("exit code 1"), "{silent}");
        let Some(Err(garbled)) = message(Some("panicked at x")) else {
            panic!("a pod with another message");
        };
        assert!(garbled.contains("panicked at x"), "{garbled}");
    }

    #[test]
    fn the_error_line_of_a_log_is_why_a_program_ended() {
        let log = "{\"level\":\"INFO\"}\nerror: --max-sequence-length 4096 is longer than the context of 1024\n";
        assert!(last_words(log).is_some_and(|why| why.starts_with("--max-sequence-length 4096")));
        assert_eq!(last_words("one\ntwo\n\n"), Some("two"));
        assert_eq!(last_words("\n"), None);
    }
}
