//! From stored objects to what `plan` may know of them. Pure: called by `observe.rs` on what it read.

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{
    ContainerStateTerminated, ContainerStatus, Pod, PodStatus, Service,
};
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
    let all = || containers_of(&status);
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
        cannot_start: all().find_map(cannot_start),
        out_of_memory: all().any(out_of_memory),
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
    containers_of(status)
        .find_map(container_problem)
        .map(|problem| one_line(&format!("pod {name}: {problem}")))
}

/// The containers of a pod in the order in which they run: the download before the engine.
fn containers_of(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    let init = status.init_container_statuses.iter().flatten();
    init.chain(status.container_statuses.iter().flatten())
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

/// How the containers of a Job's pod ended: the Job's own, and a download only when it failed.
fn endings(status: &PodStatus) -> impl Iterator<Item = &ContainerStateTerminated> {
    let init = status.init_container_statuses.iter().flatten();
    let failed = init
        .filter_map(|container| container.state.as_ref()?.terminated.as_ref())
        .filter(|ended| ended.exit_code != 0);
    let own = status.container_statuses.iter().flatten();
    failed.chain(own.filter_map(|container| container.state.as_ref()?.terminated.as_ref()))
}

fn newest_message(pods: &[&Pod]) -> Option<Result<JobMessage, String>> {
    let ended = pods
        .iter()
        .filter_map(|pod| pod.status.as_ref())
        .flat_map(endings)
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

/// The main Service, or that of a track.
pub fn traffic(owner: &Owner, object: &Service) -> ObservedTraffic {
    let selector = object.spec.as_ref().and_then(|spec| spec.selector.clone());
    let selector = selector.unwrap_or_default();
    let revision = selector.get(names::LABEL_REVISION).cloned();
    let ours = selector == service::selector(&owner.name, revision.as_deref());
    let desired = service::service(owner, object.name_any(), selector);
    ObservedTraffic {
        selects: ours.then(|| revision.map_or(Traffic::All, Traffic::Only)),
        matches: covers(&plain(object), &plain(&desired)),
    }
}

pub mod route;
#[cfg(test)]
mod tests;
