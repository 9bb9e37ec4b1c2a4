//! Is it good enough? The gates: precision by a Job's report, everything else by what a canary's pods measure on live traffic. Called by `plan`.
//!
//! A verdict is Pass, Fail or Inconclusive. What the samples cannot decide, a pod that did not answer, a number that is none:
//! Inconclusive, which never promotes. An error is no failure, and silence is what the gate's `noData` says.
//!
//! One rule for all metrics, with bounds that assume nothing about the distribution (order statistics, the binomial distribution):
//! - Fail, when the canary's lower bound is above the limit, or above stable's upper bound times the allowed ratio.
//! - Pass, when the canary's upper bound is within the limit, and within stable's lower bound times the ratio.
//! - Otherwise Inconclusive: the window grows until the samples decide or the deadline does.
//!
//! A window is looked at again and again, so each look may spend only a part of the error that the step as a whole is allowed
//! (`bounds::spent`): a canary exactly at its limit fails a step in about [`FAIL_BUDGET`] and passes it in about [`PASS_BUDGET`] of all
//! cases, however many looks that takes. Shares of requests (errors, fallbacks) pass by their estimate, for no feasible number of requests
//! proves a small share; counts and levels are what they are. `tests/verdicts.rs` measures the errors.
#![warn(clippy::wildcard_enum_match_arm)]

use jiff::Timestamp;
use mixquant_crds::rollout::{GateMetric, NoData, OnFailure};
use mixquant_crds::status::Outcome;

use crate::action::Window;
use crate::bounds;
use crate::revision::seconds_between;
use crate::samples::Samples;
use crate::validate::{Gate, Kind, kind};

mod pairs;
mod precision;
mod reading;
mod words;

pub use precision::precision;
use reading::{Blank, Reading};
pub use words::{amount, says};

/// A canary at its limit fails a step in at most about so many cases.
pub const FAIL_BUDGET: f64 = 0.05;
/// A canary at its limit passes a step in at most about so many cases; a promotion takes a Pass of every step and of the take-over.
pub const PASS_BUDGET: f64 = 0.10;
/// Nothing counted for so many intervals is a frozen page or no traffic: what was counted before proves no Pass any more.
const FRESH_INTERVALS: i64 = 2;

/// What a gate says, with the numbers in one line.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The decision.
    pub outcome: Outcome,
    /// The evidence.
    pub message: String,
    /// Stable's value in base units, for display.
    pub stable: Option<f64>,
    /// The canary's.
    pub canary: Option<f64>,
}

impl Verdict {
    fn plain(outcome: Outcome, message: String) -> Self {
        Self {
            outcome,
            message,
            stable: None,
            canary: None,
        }
    }
}

/// What a verdict may look at.
#[derive(Clone, Copy)]
pub struct Look<'a> {
    /// The requests that count: of stable and canary, in this order.
    pub window: &'a Window,
    /// Seconds between looks.
    pub interval: u32,
    /// What was measured.
    pub samples: &'a Samples,
    /// Containers of the canary that the kernel killed for memory.
    pub killed: u64,
    /// Nothing runs beside the canary: it took stable's place, and only its own limits can be judged.
    pub alone: bool,
    /// The time.
    pub now: Timestamp,
}

impl Look<'_> {
    /// Which look at the window this is, from 1.
    fn number(&self) -> u64 {
        let since = seconds_between(self.window.since, self.now);
        (since / i64::from(self.interval.max(1)))
            .max(1)
            .unsigned_abs()
    }

    /// Why samples may not be looked at.
    fn unusable(&self) -> Option<String> {
        let (Some(since), Some(taken_at)) = (self.samples.since, self.samples.taken_at) else {
            return Some("no samples yet".into());
        };
        if since < self.window.since {
            return Some("the samples are of an earlier step".into());
        }
        let age = seconds_between(taken_at, self.now);
        if age > i64::from(self.interval) {
            return Some(format!("the newest samples are {age} s old"));
        }
        None
    }
}

/// How sure bounds must be, for either decision.
#[derive(Debug, Clone, Copy)]
struct Confidence {
    /// Of a bound that is compared with a limit.
    single: f64,
    /// Of each of two bounds that are compared with each other.
    paired: f64,
}

impl Confidence {
    fn after(budget: f64, look: u64) -> Self {
        let single = 1.0 - bounds::spent(budget, look);
        Self {
            single,
            paired: bounds::paired(single),
        }
    }
}

/// What one gate says of the canary.
pub fn gate(gate: &Gate, look: &Look<'_>) -> Verdict {
    if gate.metric == GateMetric::OutOfMemory {
        return decide(gate, &Reading::killed(look), None);
    }
    if kind(gate.metric) == Kind::Pairs {
        return pairs::increase(gate, look);
    }
    if let Some(why) = look.unusable() {
        return Verdict::plain(Outcome::Inconclusive, why);
    }
    let [stable, canary] = &look.window.revisions;
    let canary = match Reading::of(gate, canary, look) {
        Ok(canary) => canary,
        Err(blank) => return without(gate, "canary", blank),
    };
    if look.alone && gate.max.is_none() {
        let why =
            "nothing runs beside the canary to compare with: give the gate a limit of its own";
        return Verdict::plain(
            Outcome::Inconclusive,
            format!("{} {why}", words::name(gate)),
        );
    }
    // Without a relative limit stable's samples are for display only.
    let ratio = gate.max_ratio.filter(|_| !look.alone);
    let stable = match (ratio, Reading::of(gate, stable, look)) {
        (Some(_), Err(blank)) => return without(gate, "stable", blank),
        (None, Err(_)) => None,
        (_, Ok(stable)) => Some(stable),
    };
    let mut verdict = decide(gate, &canary, stable.as_ref().filter(|_| !look.alone));
    if look.alone && gate.max_ratio.is_some() {
        verdict.message += ", alone: the limit over stable is not judged";
    }
    verdict
}

/// The verdict without numbers of a track.
fn without(gate: &Gate, track: &str, blank: Blank) -> Verdict {
    match blank {
        Blank::Unseen(why) => Verdict::plain(Outcome::Inconclusive, format!("{track}: {why}")),
        Blank::Few(why) => {
            let (outcome, says) = match gate.no_data {
                NoData::Hold => (Outcome::Inconclusive, ""),
                NoData::Fail => (Outcome::Fail, ", and noData is Fail"),
                NoData::Pass => (Outcome::Pass, ", and noData is Pass"),
            };
            Verdict::plain(outcome, format!("{track}: {why}{says}"))
        }
    }
}

fn decide(gate: &Gate, canary: &Reading, stable: Option<&Reading>) -> Verdict {
    let mut broken = Vec::new();
    let mut open = Vec::new();
    if let Some(limit) = gate.max {
        let text = || format!("limit {}", amount(gate.metric, limit));
        if canary.fail.0 > limit {
            broken.push(text());
        } else if canary.pass.1 > limit {
            open.push(text());
        }
    }
    if let (Some(ratio), Some(stable)) = (gate.max_ratio, stable) {
        let text = || format!("{:.0} % over stable", (ratio - 1.0) * 100.0);
        if canary.fail_paired.0 > stable.fail_paired.1 * ratio {
            broken.push(text());
        } else if canary.pass_paired.1 > stable.pass_paired.0 * ratio {
            open.push(text());
        }
    }
    let (outcome, says) = if !broken.is_empty() {
        (Outcome::Fail, format!("above {}", broken.join(" and ")))
    } else if !open.is_empty() {
        (
            Outcome::Inconclusive,
            format!("too few samples to decide on {}", open.join(" and ")),
        )
    } else if canary.stale || stable.is_some_and(|stable| stable.stale) {
        (Outcome::Inconclusive, "counts nothing any more".to_owned())
    } else {
        (Outcome::Pass, "within the limits".to_owned())
    };
    let against = stable.map_or(String::new(), |stable| {
        format!(", stable {}", stable.describe(gate.metric))
    });
    Verdict {
        outcome,
        message: format!(
            "{} {says}: canary {}{against}",
            words::name(gate),
            canary.describe(gate.metric)
        ),
        stable: stable.map(|stable| stable.value),
        canary: Some(canary.value),
    }
}

/// What all gates together say.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// Fail, when a gate that decides fails; else Inconclusive, when one is; else Pass.
    pub outcome: Outcome,
    /// The evidence of the gates that made it so.
    pub message: String,
    /// What a Fail does: Rollback when any failed gate says so, else Pause.
    pub does: OnFailure,
}

/// Puts the verdicts of all gates together; gates that only record decide nothing.
pub fn together(verdicts: &[(&Gate, Verdict)]) -> Judgement {
    let deciding = || {
        let all = verdicts.iter();
        all.filter(|(gate, _)| gate.on_failure != OnFailure::Record)
    };
    let says = |outcome: Outcome| -> Vec<&str> {
        let of = deciding().filter(|(_, verdict)| verdict.outcome == outcome);
        of.map(|(_, verdict)| verdict.message.as_str()).collect()
    };
    let outcome = [Outcome::Fail, Outcome::Inconclusive]
        .into_iter()
        .find(|outcome| !says(*outcome).is_empty());
    // Without a gate that decides nothing is proven.
    let otherwise = if deciding().next().is_some() {
        Outcome::Pass
    } else {
        Outcome::Inconclusive
    };
    let outcome = outcome.unwrap_or(otherwise);
    let rolls_back = deciding().any(|(gate, verdict)| {
        verdict.outcome == Outcome::Fail && gate.on_failure == OnFailure::Rollback
    });
    Judgement {
        outcome,
        message: says(outcome).join("; "),
        does: if outcome == Outcome::Fail && !rolls_back {
            OnFailure::Pause
        } else {
            OnFailure::Rollback
        },
    }
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;
