//! The status of a `MixQuantService`: the operator's only memory, and what people and `kubectl wait` read.
//!
//! Only conditions are API; `phase` is derived from them for the printer. Written by the operator's `apply.rs` alone; a field is
//! memory (decides what happens next after a restart) or display (recomputed at every pass), and says which.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::report::{CalibrationReport, VerifyReport};

/// The state of a service.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MixQuantServiceStatus {
    /// The newest generation that this status speaks of.
    pub observed_generation: Option<i64>,
    /// Display: where the service is, in one word. Use conditions in programs.
    pub phase: Option<Phase>,
    /// Display: engine pods of both tracks.
    #[serde(default)]
    pub replicas: i32,
    /// Display: ready ones.
    #[serde(default)]
    pub ready_replicas: i32,
    /// Display: the label selector of the engine pods, for the scale subresource.
    pub selector: Option<String>,
    /// Memory: the revision that serves.
    pub stable: Option<RevisionStatus>,
    /// Memory: the revision that is on trial.
    pub canary: Option<RevisionStatus>,
    /// Memory: how far the trial is.
    pub rollout: Option<RolloutStatus>,
    /// Memory: calibrations by their inputs, newest first, so that going back recalibrates nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10))]
    pub calibrations: Vec<CalibrationRecord>,
    /// Memory: revisions that failed and are not tried again until the spec changes, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10))]
    pub failed_revisions: Vec<FailedRevision>,
    /// Display: the stable track's time per output token at the gate's quantile, such as `12 ms`.
    pub tpot: Option<String>,
    /// The API: one of each type.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Where a service is, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// Something that the spec names is not there yet.
    Pending,
    /// A Job measures the model.
    Calibrating,
    /// The first revision's pods start.
    Deploying,
    /// A canary is on trial.
    Canary,
    /// The canary passed and becomes stable.
    Promoting,
    /// The canary failed and leaves.
    RollingBack,
    /// The spec is what serves.
    Ready,
    /// Stable serves (or nothing does), and the newest spec failed.
    Degraded,
    /// The spec cannot work.
    Invalid,
}

/// One immutable pair of pod template and artifact.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RevisionStatus {
    /// The short revision digest: the suffix of its Deployment and the value of the pods' revision label.
    pub revision: String,
    /// The artifact that its pods serve.
    pub artifact_digest: Digest,
    /// The model that the artifact was made from.
    pub model_digest: Digest,
    /// The engine image.
    pub image: String,
}

/// How far a canary is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// What is being done.
    pub stage: RolloutStage,
    /// The index into `spec.rollout.steps`, from 0.
    pub step: i32,
    /// When the stage or step began.
    pub step_started_at: Time,
    /// The generation whose spec is rolled out.
    pub generation: i64,
    /// Over that spec without `replicas`: another request begins the trial anew, a scaled service does not.
    pub request: Digest,
    /// Display: percent of the ready pods that are the canary's.
    #[serde(default)]
    pub weight: i32,
    /// Fail verdicts in a row.
    #[serde(default)]
    pub failed_verdicts: i32,
    /// The newest verdict.
    pub verdict: Option<VerdictStatus>,
}

/// The stages of a rollout, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RolloutStage {
    /// The canary's pods start; no traffic.
    Starting,
    /// The canary takes its step's share of traffic and is judged.
    Stepping,
    /// The canary grows to the full number of pods and takes over.
    Promoting,
    /// Traffic is back on stable; the canary's pods leave.
    RollingBack,
}

/// One verdict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VerdictStatus {
    /// What was decided.
    pub outcome: Outcome,
    /// When.
    pub at: Time,
    /// The numbers that decided it, in one line.
    pub message: String,
}

/// What a verdict says. Inconclusive never promotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Outcome {
    /// The samples show that the limit is kept.
    Pass,
    /// The samples show that the limit is broken.
    Fail,
    /// The samples show neither.
    Inconclusive,
}

/// A calibration or verification that a Job has finished.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CalibrationRecord {
    /// Over everything that the Job read: model, data, plan.
    pub inputs_digest: Digest,
    /// The engine image that measured `report.verify`.
    pub image: String,
    /// What it measured and made.
    pub report: CalibrationReport,
}

/// A revision that failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FailedRevision {
    /// The short revision digest; for a failed calibration the short inputs digest.
    pub revision: String,
    /// The generation that asked for it.
    pub generation: i64,
    /// Over that generation's spec without `replicas`: another request tries the revision again.
    pub request: Digest,
    /// Why, as the conditions' reason.
    pub reason: Reason,
    /// The evidence in one line.
    pub message: String,
    /// When.
    pub at: Time,
}

/// The condition types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConditionType {
    /// Stable serves and the newest spec is it.
    Ready,
    /// Stable has enough ready pods.
    Available,
    /// Something is being done.
    Progressing,
    /// The spec's model is calibrated.
    Calibrated,
    /// The newest measured precision keeps `spec.verification`'s limits.
    PrecisionOK,
    /// The newest verdict of a canary on live traffic kept `spec.slo`.
    SLOMet,
    /// kstatus: the controller is at work.
    Reconciling,
    /// kstatus: the controller cannot go on until a person changes something.
    Stalled,
}

impl ConditionType {
    /// Every type, in the order of display.
    pub const ALL: [Self; 8] = [
        Self::Ready,
        Self::Available,
        Self::Progressing,
        Self::Calibrated,
        Self::PrecisionOK,
        Self::SLOMet,
        Self::Reconciling,
        Self::Stalled,
    ];

    /// The type as it stands in the object.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "Ready",
            Self::Available => "Available",
            Self::Progressing => "Progressing",
            Self::Calibrated => "Calibrated",
            Self::PrecisionOK => "PrecisionOK",
            Self::SLOMet => "SLOMet",
            Self::Reconciling => "Reconciling",
            Self::Stalled => "Stalled",
        }
    }
}

/// The reasons of conditions and Events, and the `cause` label of rollbacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Reason {
    /// The spec is what serves.
    Promoted,
    /// A Job measures the model.
    Calibrating,
    /// The Job failed.
    CalibrationFailed,
    /// The Job finished and its artifact is known.
    CalibrationSucceeded,
    /// The measured precision is within the limits.
    WithinLimits,
    /// The measured precision is outside the limits.
    PrecisionRegression,
    /// Live traffic broke a limit.
    SLOViolated,
    /// Live traffic keeps the limits.
    SLOKept,
    /// Too little is known.
    Inconclusive,
    /// Pods start.
    PodsNotReady,
    /// Enough pods are ready.
    PodsReady,
    /// A rollout is under way.
    RollingOut,
    /// A rollout ended by going back.
    RolledBack,
    /// A stage of the rollout took too long.
    ProgressDeadlineExceeded,
    /// Something that the spec names is missing, or a name that we need is taken.
    DependencyMissing,
    /// The spec cannot work.
    InvalidSpec,
    /// The API refused an object.
    ApplyFailed,
    /// Nothing is being done.
    Idle,
}

impl Reason {
    /// The reason as it stands in the object.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Promoted => "Promoted",
            Self::Calibrating => "Calibrating",
            Self::CalibrationFailed => "CalibrationFailed",
            Self::CalibrationSucceeded => "CalibrationSucceeded",
            Self::WithinLimits => "WithinLimits",
            Self::PrecisionRegression => "PrecisionRegression",
            Self::SLOViolated => "SLOViolated",
            Self::SLOKept => "SLOKept",
            Self::Inconclusive => "Inconclusive",
            Self::PodsNotReady => "PodsNotReady",
            Self::PodsReady => "PodsReady",
            Self::RollingOut => "RollingOut",
            Self::RolledBack => "RolledBack",
            Self::ProgressDeadlineExceeded => "ProgressDeadlineExceeded",
            Self::DependencyMissing => "DependencyMissing",
            Self::InvalidSpec => "InvalidSpec",
            Self::ApplyFailed => "ApplyFailed",
            Self::Idle => "Idle",
        }
    }
}

/// The verification of an existing artifact by another engine image.
impl CalibrationRecord {
    /// The same artifact, measured anew by `image`.
    #[must_use]
    pub fn verified_by(&self, image: &str, verify: VerifyReport) -> Self {
        Self {
            inputs_digest: self.inputs_digest.clone(),
            image: image.to_owned(),
            report: CalibrationReport {
                verify,
                ..self.report.clone()
            },
        }
    }
}
