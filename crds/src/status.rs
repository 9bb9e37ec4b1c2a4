//! The status of a `MixQuantService`: the operator's only memory, and what people and `kubectl wait` read.
//!
//! Only conditions are API; `phase` is derived from them for the printer. Written by the operator's `apply.rs` alone; a field is
//! memory (decides what happens next after a restart) or display (recomputed at every pass), and says which.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::condition::{ConditionType, Reason};
use crate::digest::Digest;
use crate::drift::DriftStatus;
pub use crate::phase::Phase;
use crate::report::{CalibrationReport, VerifyReport};
use crate::rollout::OnFailure;

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
    /// Memory: revisions that were promoted, newest first; the first is stable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 11))]
    pub promoted: Vec<PromotedRevision>,
    /// Memory: the newest request of a person, and its answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<RequestStatus>,
    /// Memory: retries of the spec as it stands.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<AttemptStatus>,
    /// Memory: the revision that a person put in the place of what the spec asks for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub undo: Option<UndoStatus>,
    /// Memory: artifacts that this service's calibrations have put on the volume, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub artifacts: Vec<ArtifactStatus>,
    /// Memory: whether traffic has drifted from what calibration saw, and the recalibrations that followed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drift: Option<DriftStatus>,
    /// Memory: the number of engine pods that `spec.scaling` has chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<crate::scaling::ScalingStatus>,
    /// Display: the stable track's time per output token at the gate's quantile, such as `12 ms`.
    pub tpot: Option<String>,
    /// Display: when that was written. Outside of trials it is written anew at most every ten minutes, and only when it has changed by more
    /// than a fifth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_at: Option<Time>,
    /// The API: one of each type.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
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
    /// Display: percent of the traffic that reaches the canary: of the ready pods its own, or what the gateway has taken.
    #[serde(default)]
    pub weight: i32,
    /// Display: percent of the requests that the gateway copies to the canary, whose answers nobody gets.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub mirror: i32,
    /// The gateway was seen to have taken this step's weight or mirror, and the step's time began then.
    #[serde(default, skip_serializing_if = "is_false")]
    pub shifted: bool,
    /// Fail verdicts in a row.
    #[serde(default)]
    pub failed_verdicts: i32,
    /// The newest verdict.
    pub verdict: Option<VerdictStatus>,
    /// Why the trial stands still until a person decides; a pause among the steps is not told here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<Halt>,
    /// Whether a person has ended the pause of this step.
    #[serde(default, skip_serializing_if = "is_false")]
    pub released: bool,
    /// Why this trial takes no steps and needs no verdicts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waived: Option<Waiver>,
    /// Where not everything fits: of the canary's pods so many fit when stable keeps 0, 1, 2, … of its own. Stable makes room by this.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1001))]
    pub room: Vec<i32>,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature that serde calls"
)]
fn is_zero(value: &i32) -> bool {
    *value == 0
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature that serde calls"
)]
fn is_false(value: &bool) -> bool {
    !value
}

/// Why a trial stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Halt {
    /// `spec.rollout.paused`.
    Spec,
    /// A gate failed whose `onFailure` is Pause.
    Gate,
    /// The deadline passed, and `rollout.onFailure` is Pause.
    Deadline,
}

/// Why a trial takes no steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Waiver {
    /// A person asked for `promote REVISION full`.
    Request,
    /// The revision was stable lately: `rollout.rollbackWindow`.
    RollbackWindow,
}

/// A revision that became stable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PromotedRevision {
    /// The short revision digest.
    pub revision: String,
    /// When.
    pub at: Time,
}

/// A person's request and its answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RequestStatus {
    /// The request as it was read.
    pub request: String,
    /// Whether it was done.
    pub answer: Answer,
    /// What was done, or why nothing was.
    pub message: String,
    /// When.
    pub at: Time,
}

/// The answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Answer {
    /// It was done.
    Accepted,
    /// It was not: the message says why.
    Refused,
}

/// Retries of one spec.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttemptStatus {
    /// Over the spec that was retried, without `replicas`.
    pub spec: Digest,
    /// The first retry is attempt 2.
    pub number: i32,
}

/// A revision that serves instead of what the spec asks for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UndoStatus {
    /// Over the spec that was undone, without `replicas`: another spec ends this.
    pub spec: Digest,
    /// The short revision digest.
    pub revision: String,
}

/// An artifact on the volume.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ArtifactStatus {
    /// The artifact.
    pub digest: Digest,
    /// No revision needs it: the next calibration Job removes it, and nothing serves from it any more.
    #[serde(default, skip_serializing_if = "is_false")]
    pub leaves: bool,
}

/// The stages of a rollout, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RolloutStage {
    /// The canary's pods start; no traffic.
    Starting,
    /// The canary takes its step's share of traffic, or copies of it, and is judged.
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
    /// What each gate said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub gates: Vec<GateStatus>,
}

/// What one gate said.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GateStatus {
    /// The gate's name.
    pub name: String,
    /// What it decided.
    pub outcome: Outcome,
    /// What its failure does.
    pub on_failure: OnFailure,
    /// Its numbers: the canary's and stable's with their bounds, and the limit.
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
