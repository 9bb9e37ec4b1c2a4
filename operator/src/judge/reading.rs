//! What one track says of a gate's metric: an estimate, and how far the samples can tell it.

use mixquant_crds::rollout::GateMetric;

use super::words::amount;
use super::{Confidence, FAIL_BUDGET, FRESH_INTERVALS, Gate, Kind, Look, PASS_BUDGET, kind};
use crate::bounds::{as_f64, proportion};
use crate::histogram::Histogram;
use crate::revision::seconds_between;
use crate::samples::{Series, TrackSamples, Value};

/// Not below the first, not above the second.
type Bounds = (f64, f64);

/// A track's numbers for one gate, in base units.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Reading {
    revision: String,
    /// Samples that it rests on; `None` where nothing is sampled.
    count: Option<u64>,
    /// Requests in the window that were probes.
    probes: u64,
    /// The estimate.
    pub(super) value: f64,
    /// For a Fail, against a limit.
    pub(super) fail: Bounds,
    /// For a Fail, against the other track.
    pub(super) fail_paired: Bounds,
    /// For a Pass, against a limit.
    pub(super) pass: Bounds,
    /// For a Pass, against the other track.
    pub(super) pass_paired: Bounds,
    /// Nothing was counted lately: it may still fail, but it proves no Pass.
    pub(super) stale: bool,
}

/// Why a track has no numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Blank {
    /// It could not be read: nothing is known.
    Unseen(String),
    /// It was read, and too little happened.
    Few(String),
}

/// The series of a metric: what is measured, and of how many requests.
fn series(metric: GateMetric) -> (Series, &'static [Series]) {
    const REQUESTS: &[Series] = &[Series::Answered, Series::Errors];
    match metric {
        GateMetric::TPOT => (Series::Tpot, &[]),
        GateMetric::TTFT => (Series::Ttft, &[]),
        GateMetric::ITL => (Series::Itl, &[]),
        GateMetric::FirstTokenKl => (Series::FirstTokenKl, &[]),
        GateMetric::ShadowKl => (Series::ShadowKl, &[]),
        GateMetric::ErrorRate => (Series::Errors, REQUESTS),
        GateMetric::ValveFallbackRate => (Series::ValveFallbacks, &[Series::QuantisedPrefills]),
        GateMetric::NanLogits => (Series::NanLogits, REQUESTS),
        // The last two are read elsewhere: of the pods' states, and of probes.
        GateMetric::KvCacheUsage | GateMetric::OutOfMemory | GateMetric::NllIncrease => {
            (Series::KvUsage, &[])
        }
    }
}

impl Reading {
    /// Exactly this.
    fn exact(revision: &str, value: f64, count: Option<u64>) -> Self {
        let bounds = (value, value);
        Self {
            revision: revision.to_owned(),
            count,
            probes: 0,
            value,
            fail: bounds,
            fail_paired: bounds,
            pass: bounds,
            pass_paired: bounds,
            stale: false,
        }
    }

    /// The canary's containers that were killed for memory: the cluster tells, no samples are needed.
    pub(super) fn killed(look: &Look<'_>) -> Self {
        let [_, canary] = &look.window.revisions;
        Self::exact(canary, as_f64(look.killed), None)
    }

    /// What `revision` says of the gate's metric.
    pub(super) fn of(gate: &Gate, revision: &str, look: &Look<'_>) -> Result<Self, Blank> {
        let Some(track) = look.samples.tracks.get(revision) else {
            return Err(Blank::Unseen(format!("no samples of revision {revision}")));
        };
        if let Some(problem) = track.problems.first() {
            return Err(Blank::Unseen(format!("revision {revision}: {problem}")));
        }
        if track.pods == 0 {
            // What pods counted that are gone now says nothing of those that serve.
            return Err(Blank::Unseen(format!(
                "no pod of revision {revision} answered"
            )));
        }
        let (what, of) = series(gate.metric);
        let measured = value(track, revision, what)?;
        let mut requests = 0_u64;
        for series in of {
            let count = value(track, revision, *series)?.count().unwrap_or(0);
            requests = requests.saturating_add(count);
        }
        let look_number = look.number();
        let fail = Confidence::after(FAIL_BUDGET, look_number);
        let pass = Confidence::after(PASS_BUDGET, look_number);
        let reading = match (kind(gate.metric), measured) {
            (Kind::Level, Value::Level(level)) => Ok(Self::exact(revision, *level, None)),
            (Kind::Distribution, Value::Histogram(histogram)) => {
                enough(gate, revision, histogram.count())?;
                Self::quantile(gate, revision, histogram, (fail, pass))
            }
            (Kind::Count, Value::Count(count)) => {
                enough(gate, revision, requests)?;
                Ok(Self::exact(revision, as_f64(*count), Some(requests)))
            }
            (Kind::Share, Value::Count(events)) => {
                enough(gate, revision, requests)?;
                let estimate = as_f64((*events).min(requests)) / as_f64(requests.max(1));
                let bounds = |confidence| proportion(*events, requests, confidence);
                Ok(Self {
                    fail: bounds(fail.single),
                    fail_paired: bounds(fail.paired),
                    ..Self::exact(revision, estimate, Some(requests))
                })
            }
            (Kind::Level | Kind::Distribution | Kind::Count | Kind::Share | Kind::Pairs, _) => {
                let family = what.source().family;
                Err(Blank::Unseen(format!(
                    "revision {revision} has no usable {family}"
                )))
            }
        }?;
        let stale = reading.count.is_some() && is_stale(track, look);
        let probes = match track.values.get(&Series::Probes) {
            Some(Value::Count(probes)) => *probes,
            Some(Value::Histogram(_) | Value::Level(_)) | None => 0,
        };
        Ok(Self {
            probes,
            stale,
            ..reading
        })
    }

    fn quantile(
        gate: &Gate,
        revision: &str,
        histogram: &Histogram,
        (fail, pass): (Confidence, Confidence),
    ) -> Result<Self, Blank> {
        let at = |confidence| {
            let quantile = histogram.quantile(gate.quantile?, confidence)?;
            Some((quantile.value, (quantile.lower, quantile.upper)))
        };
        let all = [fail.single, fail.paired, pass.single, pass.paired].map(at);
        let [
            Some((value, fail)),
            Some((_, fail_paired)),
            Some((_, pass)),
            Some((_, pass_paired)),
        ] = all
        else {
            return Err(Blank::Unseen(format!(
                "revision {revision} has no usable histogram"
            )));
        };
        Ok(Self {
            revision: revision.to_owned(),
            count: Some(histogram.count()),
            probes: 0,
            value,
            fail,
            fail_paired,
            pass,
            pass_paired,
            stale: false,
        })
    }

    /// The numbers as people read them.
    pub(super) fn describe(&self, metric: GateMetric) -> String {
        let value = amount(metric, self.value);
        let bounds = match kind(metric) {
            Kind::Distribution | Kind::Share => format!(
                " [{}, {}]",
                amount(metric, self.fail.0),
                amount(metric, self.fail.1)
            ),
            Kind::Count | Kind::Level | Kind::Pairs => String::new(),
        };
        let of = self.count.map_or(String::new(), |count| {
            let what = match metric {
                GateMetric::ITL => "tokens",
                GateMetric::FirstTokenKl | GateMetric::ShadowKl | GateMetric::ValveFallbackRate => {
                    "prompts"
                }
                GateMetric::TPOT
                | GateMetric::TTFT
                | GateMetric::ErrorRate
                | GateMetric::NanLogits
                | GateMetric::KvCacheUsage
                | GateMetric::OutOfMemory
                | GateMetric::NllIncrease => "requests",
            };
            let probes = match self.probes {
                0 => String::new(),
                probes if what == "requests" => {
                    format!(" ({} of them probes)", probes.min(count))
                }
                probes => format!(" (with {probes} probes)"),
            };
            format!(" of {count} {what}{probes}")
        });
        format!("{} {value}{bounds}{of}", self.revision)
    }
}

/// A series of a track, unless a pod does not show it plainly.
fn value<'a>(track: &'a TrackSamples, revision: &str, series: Series) -> Result<&'a Value, Blank> {
    let faults = track.faults.get(&series);
    if let Some(fault) = faults.and_then(|faults| faults.first()) {
        return Err(Blank::Unseen(format!("revision {revision}: {fault}")));
    }
    track.values.get(&series).ok_or_else(|| {
        let family = series.source().family;
        Blank::Unseen(format!("revision {revision}: no pod has shown {family}"))
    })
}

/// Whether the samples are enough.
fn enough(gate: &Gate, revision: &str, count: u64) -> Result<(), Blank> {
    if count < gate.min_samples {
        return Err(Blank::Few(format!(
            "revision {revision} has {count} samples of {} needed",
            gate.min_samples
        )));
    }
    Ok(())
}

/// Whether a track has counted nothing for so long that its samples say nothing of now.
fn is_stale(track: &TrackSamples, look: &Look<'_>) -> bool {
    let age = track
        .grew_at
        .map_or(i64::MAX, |at| seconds_between(at, look.now));
    age > FRESH_INTERVALS * i64::from(look.interval)
}
