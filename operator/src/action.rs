//! What `plan` may ask for: a closed set of idempotent effects, executed in order by `apply.rs`, the only writer.
//!
//! Contract with the shell, on which the proofs in the simulator rest:
//! 1. Actions run in order and the first error ends the pass. A crash between any two of them is harmless.
//! 2. Before the first action of a plan the service is read again from the API (a consistent read, no cache). If its resourceVersion
//!    is not the observed one, the whole plan is dropped and a new pass starts: nothing is ever done from stale memory.
//! 3. `Remember` and `Report` replace the whole status with a resourceVersion precondition; a conflict ends the pass.
//! 4. `Delete` carries the observed uid as its precondition. Every object made carries the controller owner reference.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use mixquant_crds::drift::RecalibrationCause;
use mixquant_crds::status::{MixQuantServiceStatus, Outcome, Reason};
use mixquant_crds::{Digest, PrecisionPlan};
use serde::Serialize;

use crate::canary::Share;
use crate::load::LoadWindow;
use crate::observed::{
    Companion, FrozenRevision, Installation, ObjectName, RouteSplit, Track, Traffic,
};

/// One effect.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Action {
    /// Memory before muscle: the status whose memory the actions after it act on.
    Remember(Box<MixQuantServiceStatus>),
    /// Creates the `ControllerRevision` that keeps a revision's template. Its data never change.
    ApplyRevision(Box<NewRevision>),
    /// Creates, scales or repairs the Deployment of a revision, from its frozen template.
    ApplyDeployment(Box<DeploymentRequest>),
    /// Scales a Deployment whose frozen template is lost; the one that it carries stays.
    ScaleDeployment(ScaleRequest),
    /// Creates, retargets or repairs the main Service.
    ApplyTraffic(Traffic),
    /// Creates, retargets or repairs the Service of a track.
    ApplyTrack(TrackRequest),
    /// Creates or repairs the service's own route, with this percentage for the canary.
    ApplyRoute(Share),
    /// Changes the weights of a user's route, if nobody has changed it since it was seen.
    PatchRoute(RoutePatch),
    /// Creates or repairs an object beside the pods.
    ApplyCompanion(CompanionRequest),
    /// Creates a Job. One that exists is left as it is.
    ApplyJob(JobRequest),
    /// Deletes an object in the background.
    Delete(ObjectRef),
    /// Publishes an Event on the service; losing one loses nothing.
    Publish(Event),
    /// Counts in the operator's own metrics.
    Count(Metric),
    /// The last: display and conditions.
    Report(Box<MixQuantServiceStatus>),
}

/// A revision to keep.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NewRevision {
    /// `data` of the `ControllerRevision`.
    pub frozen: FrozenRevision,
    /// Its `revision`.
    pub number: i64,
}

/// A Deployment as it should be.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeploymentRequest {
    /// What its pods are built from.
    pub frozen: FrozenRevision,
    /// `spec.replicas`.
    pub replicas: i32,
}

/// A Deployment that only has another number of pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ScaleRequest {
    /// Its name.
    pub name: String,
    /// The precondition: another Deployment of the name stays as it is.
    pub uid: String,
    /// `spec.replicas`.
    pub replicas: i32,
}

/// The Service of a track as it should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TrackRequest {
    /// Which.
    pub track: Track,
    /// The revision whose pods it selects.
    pub revision: String,
}

/// A change of weights in a user's route.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RoutePatch {
    /// Its name.
    pub name: String,
    /// The precondition: another route of the name stays as it is.
    pub uid: String,
    /// The precondition: one that somebody has changed since stays as it is.
    pub resource_version: String,
    /// Where the weights are.
    pub splits: Vec<RouteSplit>,
    /// Percent for the canary; stable gets the rest.
    pub weight: i32,
}

/// A Job as it should be; datasets, lengths, claims and resources are in the `ValidService`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct JobRequest {
    /// Its name.
    pub name: String,
    /// What it does.
    pub work: JobWork,
}

/// A companion to make true.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CompanionRequest {
    /// Which.
    pub companion: Companion,
    /// What it depends on beside the service.
    pub installation: Installation,
}

/// What a Job does.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum JobWork {
    /// Makes an artifact by this plan and verifies it.
    Calibrate {
        /// What the artifact should hold.
        plan: PrecisionPlan,
        /// `spec.model.digest`: another model fails the Job.
        expect_model: Option<Digest>,
        /// Which of the data's texts it reads: 0, and one more with each recalibration.
        #[serde(skip_serializing_if = "is_zero")]
        round: i32,
        /// Artifacts that no revision needs, removed before it writes its own.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        remove: Vec<Digest>,
    },
    /// Verifies an artifact that exists with the spec's engine image.
    Verify {
        /// The artifact.
        artifact: Digest,
    },
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature that serde calls"
)]
fn is_zero(number: &i32) -> bool {
    *number == 0
}

/// An object to delete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectRef {
    /// Kind and name.
    pub object: ObjectName,
    /// The precondition: another object of the name stays.
    pub uid: String,
}

/// An Event on the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// Type Warning instead of Normal.
    pub warning: bool,
    /// Its reason, the same word as the condition's.
    pub reason: Reason,
    /// Its note: the evidence in one line.
    pub note: String,
}

/// Something to count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Metric {
    /// `operator_metrics::ROLLBACKS`, by cause.
    Rollback {
        /// The label `cause`.
        cause: Reason,
    },
    /// `operator_metrics::PROMOTIONS`.
    Promotion,
    /// `operator_metrics::DRIFTS`.
    Drift {
        /// The label `signal`: what crossed its bound.
        signal: String,
    },
    /// `operator_metrics::RECALIBRATIONS`.
    Recalibration {
        /// The label `cause`.
        cause: RecalibrationCause,
    },
    /// `operator_metrics::VERDICTS`.
    Verdict {
        /// The label `gate`: [`PRECISION_GATE`], or the name of a gate on live traffic.
        gate: String,
        /// The label `verdict`.
        outcome: Outcome,
    },
}

/// The `gate` label of `spec.verification`, whose verdict rests on a Job's report.
pub const PRECISION_GATE: &str = "precision";

/// What to do now, and when time alone may change the answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// In order. Empty at rest.
    pub actions: Vec<Action>,
    /// Plan again after this span even if nothing happens; `None` at rest, where watches wake us.
    pub requeue: Option<Duration>,
    /// Since when samples of the trial count: `scrape.rs` takes its baselines at or after this moment and forgets older ones. `None`
    /// when nothing serves yet.
    pub window: Option<Window>,
    /// Whose load is kept for the next passes; `None` where nothing scales by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load: Option<LoadWindow>,
    /// Probes to send now; `None` when none are due. Those under way go on as long as the window is theirs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe: Option<ProbeRound>,
    /// The room for a canary decides something here and was not known: the shell reads it (see [`crate::capacity::room`]) and plans anew.
    /// Where it may not be read, this plan stands: pods are added and the scheduler decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asks_room: Option<Box<RoomQuestion>>,
}

/// Whose room matters.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RoomQuestion {
    /// The canary's pods.
    pub template: PodTemplateSpec,
    /// The revision whose pods stay, if they may.
    pub stable: String,
}

/// The requests that a verdict may rest on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Window {
    /// When the step began plus the warm-up. Also the window's identity: another moment is another window.
    pub since: Timestamp,
    /// The revisions whose pods are scraped: stable and canary; at rest stable twice.
    pub revisions: [String; 2],
}

/// Probes for a pod of each track, all at once within a deadline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProbeRound {
    /// Where their answers count.
    pub window: Window,
    /// The artifact whose texts are asked: the canary's.
    pub artifact: Digest,
    /// The first text, counted on from the beginning where there are fewer.
    pub first: u32,
    /// How many.
    pub requests: u32,
    /// When it ends, whatever is answered by then.
    pub seconds: u32,
    /// There is no stable to ask.
    pub alone: bool,
}
