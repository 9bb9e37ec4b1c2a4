//! `spec.drift`: from when live traffic is no longer what calibration saw, and what follows; and the status that remembers it.
//!
//! The numbers are counted by engine pods against the ranges in their artifact (`docs/drift.md`) and judged by the operator.

#![expect(
    unreachable_pub,
    reason = "KubeSchema repeats each struct inside a private scope"
)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::scalars::{Decimal, Span};

/// From when live traffic is no longer what calibration saw, and what follows. Only what is set here is watched.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("has(self.maxActivationsBeyondRangePercent) || has(self.maxKvBeyondRangePercent) || has(self.maxValveFallbackPercent) || has(self.maxPromptLengthShiftPercent) || has(self.recalibrateEvery)").message("spec.drift watches nothing: set one of maxActivationsBeyondRangePercent, maxKvBeyondRangePercent, maxValveFallbackPercent, maxPromptLengthShiftPercent and recalibrateEvery, or remove it"),
    validation = Rule::new("!has(self.recalibrateEvery) || self.action == 'Recalibrate'").message("drift.recalibrateEvery needs action Recalibrate"),
    validation = Rule::new("!has(self.recalibrateEvery) || duration(self.recalibrateEvery) >= duration(self.coolDown)").message("drift.recalibrateEvery is shorter than drift.coolDown: raise it, or lower coolDown")
)]
pub struct DriftSpec {
    /// `Report` (the condition `Drifted`, an Event, a metric), or `Recalibrate`: that, and a new calibration on other texts of the same data, whose artifact goes through verification and the canary.
    #[serde(default)]
    pub action: DriftAction,
    /// Percent of the rows that linears read of prompts whose largest magnitude is beyond what 99.9 percent of calibration's rows reached.
    #[x_kube(validation = Rule::new("double(self) > 0.1 && double(self) <= 100.0").message("drift.maxActivationsBeyondRangePercent must lie above 0.1, which calibration's own texts reach, and at most at 100"))]
    pub max_activations_beyond_range_percent: Option<Decimal>,
    /// The same of the scales of keys and values that the cache quantises.
    #[x_kube(validation = Rule::new("double(self) > 0.1 && double(self) <= 100.0").message("drift.maxKvBeyondRangePercent must lie above 0.1, which calibration's own texts reach, and at most at 100"))]
    pub max_kv_beyond_range_percent: Option<Decimal>,
    /// Percent of the prompts read by the quantised copy that the safety valve had read again.
    #[x_kube(validation = Rule::new("double(self) > 0.0 && double(self) <= 100.0").message("drift.maxValveFallbackPercent must lie above 0 and at most at 100"))]
    pub max_valve_fallback_percent: Option<Decimal>,
    /// How many percent of the prompts would need another length for their lengths to be distributed as those of calibration's texts.
    #[x_kube(validation = Rule::new("double(self) > 0.0 && double(self) < 100.0").message("drift.maxPromptLengthShiftPercent must lie between 0 and 100"))]
    pub max_prompt_length_shift_percent: Option<Decimal>,
    /// Numbers of fewer prompts than this say nothing.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    #[serde(default = "min_prompts")]
    pub min_prompts: i32,
    /// The span of traffic that is looked at; the next one begins anew.
    #[serde(default = "window")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1m') && duration(self) <= duration('168h')").message("drift.window must lie between 1m and 168h"))]
    pub window: Span,
    /// Recalibrations are at least so far apart.
    #[serde(default = "cool_down")]
    pub cool_down: Span,
    /// A recalibration is due so long after the one before, or after stable was promoted, whatever the numbers say.
    pub recalibrate_every: Option<Span>,
}

fn min_prompts() -> i32 {
    500
}

fn window() -> Span {
    Span("1h".into())
}

fn cool_down() -> Span {
    Span("24h".into())
}

/// What follows from drift.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DriftAction {
    /// It is told.
    #[default]
    Report,
    /// It is told, and the model is calibrated anew.
    Recalibrate,
}

/// What is remembered of drift.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DriftStatus {
    /// Recalibrations so far: which of the data's texts a calibration reads.
    #[serde(default)]
    pub round: i32,
    /// The newest recalibration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recalibration: Option<Recalibration>,
    /// What the newest window that could tell has said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finding: Option<DriftFinding>,
}

/// A recalibration that was opened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Recalibration {
    /// When.
    pub at: Time,
    /// Why.
    pub cause: RecalibrationCause,
    /// The artifact that served then. One that gives the same artifact again has nothing new to read.
    pub replaces: Digest,
}

/// Why a recalibration was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RecalibrationCause {
    /// A bound was crossed.
    Drift,
    /// `recalibrateEvery`.
    Schedule,
}

impl RecalibrationCause {
    /// The word in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Drift => "Drift",
            Self::Schedule => "Schedule",
        }
    }
}

/// Whether traffic has drifted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DriftFinding {
    /// Whether a bound is crossed; it holds until every number is below four fifths of its bound.
    pub drifted: bool,
    /// Since when.
    pub at: Time,
    /// The numbers that decided it.
    pub message: String,
}
