//! What engine pods measure and what of it a verdict may rest on: the series, their values, a window's samples by track.
//!
//! Filled by `scrape`, read by `judge`. Samples are soft state: losing them may only make a verdict Inconclusive, never Pass.

use std::collections::BTreeMap;

use jiff::Timestamp;
use mixquant_crds::names::engine_metrics as names;
use serde::{Deserialize, Serialize};

use crate::histogram::Histogram;
use crate::load::Load;
use crate::probed::Probed;

/// What the pods of both tracks measured inside one window.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Samples {
    /// When the window began: the newest of its pods' baselines may be later, none is earlier. `None` before the first scrape.
    pub since: Option<Timestamp>,
    /// When the newest scrape ended.
    pub taken_at: Option<Timestamp>,
    /// By revision.
    #[serde(default)]
    pub tracks: BTreeMap<String, TrackSamples>,
    /// What the pods that take traffic carried lately, oldest first; kept across windows, and empty where nothing scales by it.
    #[serde(default)]
    pub loads: Vec<Load>,
    /// What probes of the window have answered.
    #[serde(default)]
    pub probed: Probed,
}

/// One track's part, merged over its pods.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrackSamples {
    /// What was counted inside the window; a series that no pod has shown is absent.
    #[serde(default)]
    pub values: BTreeMap<Series, Value>,
    /// Pods that answered the newest scrape.
    pub pods: u32,
    /// Pods that did not, with the reason: nothing of this track may be judged.
    #[serde(default)]
    pub problems: Vec<String>,
    /// Series that a pod did not show, or not plainly, with the reason: these may not be judged.
    #[serde(default)]
    pub faults: BTreeMap<Series, Vec<String>>,
    /// When a scrape last found something counted anew; `None` when none has.
    #[serde(default)]
    pub grew_at: Option<Timestamp>,
}

/// A series of engine pods that gates, drift or scaling read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Series {
    /// Seconds per output token, one observation a request.
    Tpot,
    /// Seconds to the first token.
    Ttft,
    /// Seconds between tokens, one observation a token.
    Itl,
    /// Nats between the precise and the quantised first token.
    FirstTokenKl,
    /// Nats between the precise and the quantised prefill.
    ShadowKl,
    /// Requests that were answered.
    Answered,
    /// Those of them that were the operator's own probes.
    Probes,
    /// Requests that the engine failed.
    Errors,
    /// Requests whose client went away.
    Cancelled,
    /// Requests that were turned away.
    Rejected,
    /// Prompts read with quantised weights.
    QuantisedPrefills,
    /// Prompts that the safety valve had read again.
    ValveFallbacks,
    /// Steps whose logits were no numbers.
    NanLogits,
    /// Part of the KV cache in use, 0 to 1.
    KvUsage,
    /// Rows that linears read of prompts.
    Activations,
    /// Those beyond what calibration saw.
    ActivationsBeyond,
    /// Keys and values of prompts that the cache quantises.
    KvRows,
    /// Those beyond what calibration saw.
    KvBeyond,
    /// Tokens of a prompt, one observation a prompt.
    PromptTokens,
    /// Sequences that are being computed.
    Running,
    /// Requests that wait for a place.
    Waiting,
}

/// How a series is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// A histogram.
    Histogram,
    /// A counter, `_total` in the exposition.
    Counter,
    /// A gauge.
    Gauge,
}

/// Where a series is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The family's name, as in `crds::names`.
    pub family: &'static str,
    /// Its shape.
    pub shape: Shape,
    /// The label that its parts must carry.
    pub label: Option<(&'static str, &'static str)>,
}

impl Series {
    /// Every one.
    pub const ALL: [Self; 21] = [
        Self::Tpot,
        Self::Ttft,
        Self::Itl,
        Self::FirstTokenKl,
        Self::ShadowKl,
        Self::Answered,
        Self::Probes,
        Self::Errors,
        Self::Cancelled,
        Self::Rejected,
        Self::QuantisedPrefills,
        Self::ValveFallbacks,
        Self::NanLogits,
        Self::KvUsage,
        Self::Activations,
        Self::ActivationsBeyond,
        Self::KvRows,
        Self::KvBeyond,
        Self::PromptTokens,
        Self::Running,
        Self::Waiting,
    ];

    /// Where it is found on a metrics page.
    pub const fn source(self) -> Source {
        let (family, shape, label) = match self {
            Self::Tpot => (names::REQUEST_TIME_PER_OUTPUT_TOKEN, Shape::Histogram, None),
            Self::Ttft => (names::TIME_TO_FIRST_TOKEN, Shape::Histogram, None),
            Self::Itl => (names::INTER_TOKEN_LATENCY, Shape::Histogram, None),
            Self::FirstTokenKl => (names::FIRST_TOKEN_KL, Shape::Histogram, None),
            Self::ShadowKl => (names::SHADOW_AUDIT_KL, Shape::Histogram, None),
            Self::Answered => (names::REQUESTS, Shape::Counter, Some(("outcome", "ok"))),
            Self::Probes => (names::PROBES, Shape::Counter, None),
            Self::Errors => (names::REQUESTS, Shape::Counter, Some(("outcome", "error"))),
            Self::Cancelled => (
                names::REQUESTS,
                Shape::Counter,
                Some(("outcome", "cancelled")),
            ),
            Self::Rejected => (
                names::REQUESTS,
                Shape::Counter,
                Some(("outcome", "rejected")),
            ),
            Self::QuantisedPrefills => (
                names::PREFILL_PRECISION,
                Shape::Counter,
                Some(("precision", "W8A8")),
            ),
            Self::ValveFallbacks => (names::VALVE_FALLBACK, Shape::Counter, None),
            Self::NanLogits => (names::NAN_LOGITS, Shape::Counter, None),
            Self::KvUsage => (names::KV_CACHE_USAGE, Shape::Gauge, None),
            Self::Activations => (names::ACTIVATION_ROWS, Shape::Counter, None),
            Self::ActivationsBeyond => (names::ACTIVATION_ROWS_BEYOND_RANGE, Shape::Counter, None),
            Self::KvRows => (names::KV_ROWS, Shape::Counter, None),
            Self::KvBeyond => (names::KV_ROWS_BEYOND_RANGE, Shape::Counter, None),
            Self::PromptTokens => (names::REQUEST_PROMPT_TOKENS, Shape::Histogram, None),
            Self::Running => (names::REQUESTS_RUNNING, Shape::Gauge, None),
            Self::Waiting => (names::REQUESTS_WAITING, Shape::Gauge, None),
        };
        Source {
            family,
            shape,
            label,
        }
    }
}

/// What a series says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Value {
    /// Of a histogram.
    Histogram(Histogram),
    /// Of a counter.
    Count(u64),
    /// Of a gauge: over a window the greatest that was seen.
    Level(f64),
}

impl Value {
    /// Whether `after` may be a later reading of the same process.
    pub fn continues(&self, after: &Self) -> bool {
        match (self, after) {
            (Self::Histogram(before), Self::Histogram(after)) => before.continues(after),
            (Self::Count(before), Self::Count(after)) => before <= after,
            (Self::Level(_), Self::Level(_)) => true,
            (Self::Histogram(_) | Self::Count(_) | Self::Level(_), _) => false,
        }
    }

    /// The reading that a process has reached: `after`, and of a gauge the greatest.
    #[must_use]
    pub fn reached(&self, after: Self) -> Self {
        match (self, after) {
            (Self::Level(before), Self::Level(after)) => Self::Level(before.max(after)),
            (_, after) => after,
        }
    }

    /// Adds what was measured from `baseline` to `newest`; `false` when they do not fit together.
    pub fn add(&mut self, baseline: &Self, newest: &Self) -> bool {
        match (self, baseline, newest) {
            (Self::Histogram(total), Self::Histogram(baseline), Self::Histogram(newest)) => {
                total.add(baseline, newest)
            }
            (Self::Count(total), Self::Count(baseline), Self::Count(newest)) => {
                *total = total.saturating_add(newest.saturating_sub(*baseline));
                true
            }
            (Self::Level(total), Self::Level(_), Self::Level(newest)) => {
                *total = total.max(*newest);
                true
            }
            (Self::Histogram(_) | Self::Count(_) | Self::Level(_), _, _) => false,
        }
    }

    /// Nothing measured, of the same shape.
    #[must_use]
    pub fn nothing(&self) -> Self {
        match self {
            Self::Histogram(_) => Self::Histogram(Histogram::default()),
            Self::Count(_) => Self::Count(0),
            Self::Level(_) => Self::Level(0.0),
        }
    }

    /// Observations of a histogram, or a counter's count; `None` of a gauge.
    pub fn count(&self) -> Option<u64> {
        match self {
            Self::Histogram(histogram) => Some(histogram.count()),
            Self::Count(count) => Some(*count),
            Self::Level(_) => None,
        }
    }
}
