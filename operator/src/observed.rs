//! One observation of the world as plain data: what `observe.rs` read, all that `plan` may know beside the samples and the time.
//!
//! Everything in the lists is owned by this service (controller owner reference with its uid). An object of a name that we would use
//! but that belongs to someone else, or to an earlier service of the same name, goes to `foreign`: it is waited for, never adopted.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use mixquant_crds::{Digest, JobMessage, MixQuantService};
use serde::{Deserialize, Serialize};

/// The world of one service at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Observed {
    /// The resource with its status, which is the operator's memory.
    pub service: MixQuantService,
    /// `spec.calibration.dataset`.
    pub calibration_data: Dataset,
    /// `spec.verification.dataset`.
    pub evaluation_data: Dataset,
    /// The claim that `spec.model.source` names, where it names one.
    pub model_claim: Presence,
    /// The claim of `spec.artifacts`.
    pub artifact_claim: Presence,
    /// Our Jobs.
    #[serde(default)]
    pub jobs: Vec<ObservedJob>,
    /// Our `ControllerRevision`s.
    #[serde(default)]
    pub revisions: Vec<ObservedRevision>,
    /// Our Deployments.
    #[serde(default)]
    pub deployments: Vec<ObservedDeployment>,
    /// Our engine pods, without those that have finished.
    #[serde(default)]
    pub pods: Vec<ObservedPod>,
    /// Our main Service; `None` when there is none.
    #[serde(default)]
    pub traffic: Option<ObservedTraffic>,
    /// The Services of the tracks, which a gateway's route refers to.
    #[serde(default)]
    pub tracks: Tracks,
    /// The route that splits the traffic; `None` when the spec names none.
    #[serde(default)]
    pub route: Option<ObservedRoute>,
    /// The uid of a route of ours that the spec no longer asks for.
    #[serde(default)]
    pub old_route: Option<String>,
    /// Objects of names that we use and that are not ours.
    #[serde(default)]
    pub foreign: Vec<ObjectName>,
    /// What this operator is installed beside.
    #[serde(default)]
    pub installation: Installation,
    /// What should stand beside the pods, and how it is found. Empty when the spec cannot work.
    #[serde(default)]
    pub companions: Vec<ObservedCompanion>,
    /// The room for a canary; read only when a plan says that it matters. `None` also where nodes may not be read.
    #[serde(default)]
    pub room: Option<Room>,
}

/// How many of a canary's pods fit, those that run already among them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Room {
    /// When stable keeps 0, 1, 2, … of its pods that have a node; the last when it keeps all of them.
    pub fits: Vec<i32>,
    /// What each asks for.
    pub asked: String,
    /// What is free, and where.
    pub free: String,
}

/// What is the same for every service of an operator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Installation {
    /// Namespaces whose pods may read engine pods' metrics: the operator's own first.
    #[serde(default)]
    pub metrics_readers: Vec<String>,
    /// The cluster knows the kind `PodMonitor`.
    #[serde(default)]
    pub pod_monitors: bool,
    /// The cluster knows the kind `PrometheusRule`.
    #[serde(default)]
    pub prometheus_rules: bool,
    /// The cluster knows the kind `HTTPRoute`, and this operator may use it.
    #[serde(default)]
    pub http_routes: bool,
}

/// An object beside a service's pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Companion {
    /// The `ServiceAccount` of its pods.
    Account,
    /// The `NetworkPolicy` of engine pods.
    EngineNetwork,
    /// The `NetworkPolicy` of Jobs' pods.
    JobNetwork,
    /// The `PodDisruptionBudget` of engine pods.
    Budget,
    /// The `PodMonitor`.
    Monitor,
    /// The `PrometheusRule`.
    Rule,
}

/// A companion as it is found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObservedCompanion {
    /// Which.
    pub companion: Companion,
    /// How it is.
    pub state: CompanionState,
}

/// How a companion is found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CompanionState {
    /// As it should be.
    Right,
    /// Missing, or changed by someone.
    Wrong,
    /// This process may not look at it: nothing is done to it.
    Unreadable,
    /// Its name is taken.
    Foreign {
        /// By what.
        name: String,
    },
}

/// Data in a `ConfigMap`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Dataset {
    /// It is there and not empty.
    Present {
        /// Over the bytes of the key's value.
        digest: Digest,
    },
    /// It is not there.
    Missing {
        /// What is missing, by name, such as ``ConfigMap `texts` has no key `a.txt` ``.
        what: String,
    },
}

/// Whether something that the spec names is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Presence {
    /// It is.
    Present,
    /// It is not.
    Missing {
        /// What is missing, by name, such as ``PersistentVolumeClaim `models` does not exist``.
        what: String,
    },
}

/// A kind of object that the operator makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// `batch/v1`.
    Job,
    /// `apps/v1`.
    ControllerRevision,
    /// `apps/v1`.
    Deployment,
    /// `v1`, the main Service and those of the tracks.
    Service,
    /// `gateway.networking.k8s.io/v1`.
    HTTPRoute,
}

/// An object in the service's namespace.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectName {
    /// Its kind.
    pub kind: Kind,
    /// Its name.
    pub name: String,
}

impl std::fmt::Display for ObjectName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {}", self.kind, self.name)
    }
}

/// A calibration or verification Job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObservedJob {
    /// Its name.
    pub name: String,
    /// Its uid, the precondition of its deletion.
    pub uid: String,
    /// Where it is. A Job that is being deleted is `Deleting` whatever it was.
    pub state: JobState,
    /// The termination message of its newest finished pod: `Err` with the reason when the text is no [`JobMessage`], `None` when no
    /// pod has finished or the pod is gone.
    #[serde(default)]
    pub message: Option<Result<JobMessage, String>>,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it succeeded or failed.
    #[serde(default)]
    pub finished_at: Option<Timestamp>,
    /// What keeps its pod from running: unschedulable, image pull, quota.
    #[serde(default)]
    pub pod_problem: Option<String>,
}

/// Where a Job is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum JobState {
    /// Pods run, wait or are tried again.
    Running,
    /// Condition Complete.
    Succeeded,
    /// Condition Failed.
    Failed {
        /// The condition's reason: `BackoffLimitExceeded`, `DeadlineExceeded`, `PodFailurePolicy`.
        reason: String,
        /// The condition's message.
        text: String,
    },
    /// It has a deletion timestamp.
    Deleting,
}

/// A revision's rendered engine pod template, frozen: what a `ControllerRevision`'s `data` holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FrozenRevision {
    /// The short revision digest: the suffix of the Deployment's and the `ControllerRevision`'s name, the pods' revision label.
    pub revision: String,
    /// Over what the spec asked for (see `revision::intent`): finds this revision again whatever today's operator would render.
    pub intent: Digest,
    /// The model.
    pub model_digest: Digest,
    /// The artifact.
    pub artifact_digest: Digest,
    /// The engine image.
    pub image: String,
    /// The template without the revision label, which is added when the Deployment is built.
    pub template: PodTemplateSpec,
}

/// A `ControllerRevision` of ours.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObservedRevision {
    /// Its data.
    pub frozen: FrozenRevision,
    /// Its `revision` number, rising.
    pub number: i64,
    /// Its uid, the precondition of its deletion.
    pub uid: String,
}

/// A Deployment of ours.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObservedDeployment {
    /// The revision that it runs.
    pub revision: String,
    /// Its uid, the precondition of its deletion.
    pub uid: String,
    /// `spec.replicas`.
    pub replicas: i32,
    /// `status.replicas`: pods that exist, terminating ones not counted.
    pub existing: i32,
    /// `status.readyReplicas`.
    pub ready: i32,
    /// `status.availableReplicas`.
    pub available: i32,
    /// The Deployment controller has seen the newest spec and all pods are of it.
    pub up_to_date: bool,
    /// Its spec (replicas aside) is what we would apply; true when its `ControllerRevision` is gone and nothing can be compared.
    pub matches: bool,
    /// What is wrong with it or its pods: `ReplicaFailure` text, image pull, crash loop, unschedulable, out of memory.
    #[serde(default)]
    pub problem: Option<String>,
}

/// An engine pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObservedPod {
    /// Its name.
    pub name: String,
    /// Its uid: with the process start time the identity of its counters.
    pub uid: String,
    /// The revision that it runs.
    pub revision: String,
    /// Where it is scraped, once it has one.
    #[serde(default)]
    pub ip: Option<String>,
    /// Condition Ready.
    pub ready: bool,
    /// It has a deletion timestamp.
    #[serde(default)]
    pub terminating: bool,
    /// Restarts of its container.
    pub restarts: i32,
    /// Why its container cannot even be made: a missing Secret, a name that is none. Time alone does not cure it.
    #[serde(default)]
    pub cannot_start: Option<String>,
    /// The kernel killed its container for memory, now or the last time that it ended.
    #[serde(default)]
    pub out_of_memory: bool,
    /// When it was created.
    pub created_at: Timestamp,
}

/// The main Service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObservedTraffic {
    /// The pods that it selects now; `None` when the selector is none of ours.
    #[serde(default)]
    pub selects: Option<Traffic>,
    /// The rest of its spec (ports, type, labels) is what we would apply.
    pub matches: bool,
}

/// The pods that the main Service selects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Traffic {
    /// Pods of one revision.
    Only(String),
    /// Engine pods of every revision of this service.
    All,
}

/// A role in the traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Track {
    /// What serves.
    Stable,
    /// What is on trial; stable itself while nothing is.
    Canary,
}

impl Track {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Stable, Self::Canary];

    /// The suffix of its Service's name, and the header value that pins a request to it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stable => "stable",
            Self::Canary => "canary",
        }
    }
}

/// The Services of both tracks; `None` where there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tracks {
    /// `NAME-stable`.
    #[serde(default)]
    pub stable: Option<ObservedTraffic>,
    /// `NAME-canary`.
    #[serde(default)]
    pub canary: Option<ObservedTraffic>,
}

impl Tracks {
    /// The Service of a track.
    pub fn of(&self, track: Track) -> Option<&ObservedTraffic> {
        match track {
            Track::Stable => self.stable.as_ref(),
            Track::Canary => self.canary.as_ref(),
        }
    }

    /// The same, to be changed.
    pub fn of_mut(&mut self, track: Track) -> &mut Option<ObservedTraffic> {
        match track {
            Track::Stable => &mut self.stable,
            Track::Canary => &mut self.canary,
        }
    }
}

/// The `HTTPRoute` of a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ObservedRoute {
    /// It cannot be looked at.
    Unknown {
        /// Why, and what helps.
        why: String,
    },
    /// There is none.
    Missing,
    /// It is there.
    Found(FoundRoute),
}

/// A route that is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FoundRoute {
    /// Its uid.
    pub uid: String,
    /// Its resourceVersion, the precondition of every change to a user's route.
    pub resource_version: String,
    /// Its spec is what we would apply, weights and mirror aside; of a user's route always.
    pub matches: bool,
    /// Its rules that name both tracks.
    #[serde(default)]
    pub splits: Vec<RouteSplit>,
    /// Percent of the requests that its splitting rule copies to the canary; never said of a user's route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<i32>,
    /// What its Gateways have not taken of its newest generation; `None` when they have taken it whole.
    #[serde(default)]
    pub problem: Option<String>,
}

/// A rule that splits the traffic between the tracks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RouteSplit {
    /// Its place among the route's rules.
    pub rule: usize,
    /// The backend of stable.
    pub stable: Backend,
    /// The backend of the canary.
    pub canary: Backend,
}

impl RouteSplit {
    /// Whether the canary's share is `weight` percent.
    pub fn gives(&self, weight: i32) -> bool {
        self.canary.weight == weight && self.stable.weight == 100 - weight
    }
}

/// A backend of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Backend {
    /// Its place among the rule's backends.
    pub place: usize,
    /// Its weight.
    pub weight: i32,
}

#[cfg(test)]
pub(crate) mod fixture {
    use super::{ObservedPod, Timestamp};

    /// A pod that is ready and has never been anything else.
    pub(crate) fn pod(uid: &str, revision: &str) -> ObservedPod {
        ObservedPod {
            name: format!("chat-{uid}"),
            uid: uid.into(),
            revision: revision.into(),
            ip: Some("127.0.0.1".into()),
            ready: true,
            terminating: false,
            restarts: 0,
            cannot_start: None,
            out_of_memory: false,
            created_at: Timestamp::UNIX_EPOCH,
        }
    }
}
