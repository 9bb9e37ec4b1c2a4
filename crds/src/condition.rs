//! The words of the conditions of a `MixQuantService`: their types, and the reasons that they share with Events and with the causes of rollbacks.
//!
//! They are API: programs wait for them. Written by the operator's `status.rs`; it never says a word that does not stand here.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
    /// Traffic is beyond a bound of `spec.drift`; absent without one.
    Drifted,
    /// The rollout waits for a person or for a pause to end; absent otherwise.
    Paused,
    /// kstatus: the controller is at work.
    Reconciling,
    /// kstatus: the controller cannot go on until a person changes something.
    Stalled,
}

impl ConditionType {
    /// Every type, in the order of display.
    pub const ALL: [Self; 10] = [
        Self::Ready,
        Self::Available,
        Self::Progressing,
        Self::Calibrated,
        Self::PrecisionOK,
        Self::SLOMet,
        Self::Drifted,
        Self::Paused,
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
            Self::Drifted => "Drifted",
            Self::Paused => "Paused",
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
    /// Traffic is not what calibration saw.
    Drifted,
    /// Traffic is what calibration saw.
    WithinRanges,
    /// The model is calibrated anew because of drift or its age.
    Recalibrating,
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
    /// The canary's pods end again and again, or cannot be made.
    PodsFailing,
    /// A person rolled the canary back.
    Aborted,
    /// A person put another revision in the place of what the spec asks for.
    Undone,
    /// The rollout stands still.
    RolloutPaused,
    /// A person's request was answered.
    Requested,
    /// Pods have no room on nodes or in a quota: stable makes room, or the canary waits.
    InsufficientCapacity,
    /// The gateway has not taken what its route says.
    TrafficNotReady,
    /// The number of pods follows the load.
    Scaled,
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
            Self::Drifted => "Drifted",
            Self::WithinRanges => "WithinRanges",
            Self::Recalibrating => "Recalibrating",
            Self::SLOViolated => "SLOViolated",
            Self::SLOKept => "SLOKept",
            Self::Inconclusive => "Inconclusive",
            Self::PodsNotReady => "PodsNotReady",
            Self::PodsReady => "PodsReady",
            Self::RollingOut => "RollingOut",
            Self::RolledBack => "RolledBack",
            Self::ProgressDeadlineExceeded => "ProgressDeadlineExceeded",
            Self::PodsFailing => "PodsFailing",
            Self::Aborted => "Aborted",
            Self::Undone => "Undone",
            Self::RolloutPaused => "RolloutPaused",
            Self::Requested => "Requested",
            Self::InsufficientCapacity => "InsufficientCapacity",
            Self::TrafficNotReady => "TrafficNotReady",
            Self::Scaled => "Scaled",
            Self::DependencyMissing => "DependencyMissing",
            Self::InvalidSpec => "InvalidSpec",
            Self::ApplyFailed => "ApplyFailed",
            Self::Idle => "Idle",
        }
    }
}
