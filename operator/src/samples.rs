//! Latency samples as histograms: difference, merge and quantiles with confidence bounds. Filled by `scrape.rs`, read by `judge.rs`.
//!
//! Samples are soft state. Losing them may only make a verdict Inconclusive, never Pass.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

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
}

/// One track's part.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrackSamples {
    /// Time per output token, seconds, one observation a request; merged over the pods.
    pub tpot: Histogram,
    /// Pods that answered the newest scrape.
    pub pods: u32,
    /// Pods that did not, or whose answer was no number, with the reason.
    #[serde(default)]
    pub problems: Vec<String>,
}

/// Counts between bounds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Histogram {
    /// Upper bounds, rising, finite, in the metric's unit.
    pub bounds: Vec<f64>,
    /// Observations in each bucket (not cumulative), one more than `bounds`: the last is above all of them. Empty with no bounds.
    pub counts: Vec<u64>,
}
