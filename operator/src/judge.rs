//! Is it good enough? The two gates: precision by a Job's report, time per output token by live traffic. Called by `plan`.
//!
//! A verdict is Pass, Fail or Inconclusive. What the samples cannot decide, a missing target, a number that is none: Inconclusive,
//! which never promotes.
//!
//! The rule for time per output token, at quantile q, all bounds by order statistics (no assumption on the distribution):
//! - Fewer than `minSamples` requests on a track that is compared: Inconclusive.
//! - Fail, when the canary's lower bound is above `maxMilliseconds`, or above stable's upper bound x the allowed ratio; each bound
//!   holds with 95 %, so a canary at the limit fails a look in less than 5 %.
//! - Pass, when the canary's upper bound (95 %) is at most `maxMilliseconds`, and its upper bound is at most stable's lower bound x
//!   the allowed ratio, each at 88 %: two equally uncertain bounds at 88 % make one statement about their ratio at 95 %.
//! - Otherwise Inconclusive: the window grows until the samples decide or the deadline does.
//!
//! `tests/verdicts.rs` measures its errors (quantile 0.9, 25 % allowed, 50 requests a look): a canary as fast as stable passes every
//! step, one of 1.5 times the latency passes a step in under 1 % and is never promoted.
#![warn(clippy::wildcard_enum_match_arm)]

use jiff::Timestamp;
use mixquant_crds::VerifyReport;
use mixquant_crds::status::Outcome;

use crate::action::Window;
use crate::revision::seconds_between;
use crate::samples::{Quantile, Samples, TrackSamples};
use crate::validate::{PrecisionLimits, Rollout, TpotGate};

/// Of each bound on its own.
const CONFIDENCE: f64 = 0.95;
/// Of each of two bounds that are compared: `2 * 1.163 = 1.645 * sqrt(2)` standard deviations.
const PAIRED_CONFIDENCE: f64 = 0.8776;

/// What a gate says, with the numbers in one line.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The decision.
    pub outcome: Outcome,
    /// The evidence.
    pub message: String,
    /// Stable's quantile in seconds, for display.
    pub stable: Option<f64>,
    /// The canary's.
    pub canary: Option<f64>,
}

impl Verdict {
    fn inconclusive(message: String) -> Self {
        Self {
            outcome: Outcome::Inconclusive,
            message,
            stable: None,
            canary: None,
        }
    }
}

/// The precision gate. The report's numbers are measured on fixed texts, so they decide: the outcome is Pass or Fail.
pub fn precision(report: &VerifyReport, limits: &PrecisionLimits) -> Verdict {
    // Written so that a number that is none (NaN) keeps no limit.
    let checks = [
        (
            report.perplexity_increase_percent <= limits.max_perplexity_increase,
            format!(
                "perplexity increase {:.3} % (limit {} %, {:.4} over baseline {:.4})",
                report.perplexity_increase_percent,
                limits.max_perplexity_increase,
                report.perplexity,
                report.baseline_perplexity,
            ),
        ),
        (
            report.top1_agreement_percent >= limits.min_top1_agreement,
            format!(
                "top-1 agreement {:.2} % (limit {} %)",
                report.top1_agreement_percent, limits.min_top1_agreement
            ),
        ),
        (
            report.kl_p99 <= limits.max_kl_p99,
            format!("KL p99 {:.4} (limit {})", report.kl_p99, limits.max_kl_p99),
        ),
        (report.tokens > 0, format!("{} tokens", report.tokens)),
    ];
    let outcome = if checks.iter().all(|(kept, _)| *kept) {
        Outcome::Pass
    } else {
        Outcome::Fail
    };
    let numbers = |wanted: bool| -> Vec<&str> {
        let these = checks.iter().filter(|(kept, _)| *kept == wanted);
        these.map(|(_, text)| text.as_str()).collect()
    };
    let message = match outcome {
        Outcome::Pass | Outcome::Inconclusive => numbers(true).join(", "),
        Outcome::Fail => {
            let worst = report.worst_slice.as_ref().map_or(String::new(), |slice| {
                format!(
                    "; worst slice {} with perplexity increase {:.3} %",
                    slice.name, slice.perplexity_increase_percent
                )
            });
            let kept = numbers(true);
            let separator = if kept.is_empty() { "" } else { "; kept: " };
            format!(
                "outside the limits: {}{separator}{}{worst}",
                numbers(false).join(", "),
                kept.join(", "),
            )
        }
    };
    Verdict {
        outcome,
        message,
        stable: None,
        canary: None,
    }
}

/// The gate on time per output token: the canary of `window` against the limit and against stable.
pub fn tpot(
    gate: &TpotGate,
    rollout: &Rollout,
    window: &Window,
    samples: &Samples,
    now: Timestamp,
) -> Verdict {
    let [stable, canary] = &window.revisions;
    if let Some(why) = unusable(rollout, window, samples, now) {
        return Verdict::inconclusive(why);
    }
    let read = |revision: &String| match samples.tracks.get(revision) {
        Some(track) => Track::read(gate, revision, track, rollout.min_samples),
        None => Err(format!("no samples of revision {revision}")),
    };
    let canary = match read(canary) {
        Ok(canary) => canary,
        Err(why) => return Verdict::inconclusive(format!("canary: {why}")),
    };
    // Without a relative limit stable's samples are for display only.
    let stable = match (gate.max_ratio, read(stable)) {
        (Some(_), Err(why)) => return Verdict::inconclusive(format!("stable: {why}")),
        (None, Err(_)) => None,
        (_, Ok(stable)) => Some(stable),
    };
    compare(gate, &canary, stable.as_ref())
}

/// Why samples may not be looked at.
fn unusable(
    rollout: &Rollout,
    window: &Window,
    samples: &Samples,
    now: Timestamp,
) -> Option<String> {
    let (Some(since), Some(taken_at)) = (samples.since, samples.taken_at) else {
        return Some("no samples yet".into());
    };
    if since < window.since {
        return Some("the samples are of an earlier step".into());
    }
    let age = seconds_between(taken_at, now);
    if age > i64::from(rollout.interval) {
        return Some(format!("the newest samples are {age} s old"));
    }
    None
}

/// What a track's samples say.
struct Track {
    name: String,
    count: u64,
    single: Quantile,
    paired: Quantile,
}

impl Track {
    fn read(
        gate: &TpotGate,
        revision: &str,
        samples: &TrackSamples,
        min_samples: u64,
    ) -> Result<Self, String> {
        if let Some(problem) = samples.problems.first() {
            return Err(format!("revision {revision}: {problem}"));
        }
        let count = samples.tpot.count();
        if count < min_samples {
            return Err(format!(
                "revision {revision} answered {count} requests of {min_samples} needed"
            ));
        }
        let quantile = |confidence| samples.tpot.quantile(gate.quantile, confidence);
        match (quantile(CONFIDENCE), quantile(PAIRED_CONFIDENCE)) {
            (Some(single), Some(paired)) => Ok(Self {
                name: revision.to_owned(),
                count,
                single,
                paired,
            }),
            _ => Err(format!("revision {revision} has no usable histogram")),
        }
    }

    fn describe(&self) -> String {
        format!(
            "{} {} [{}, {}] of {} requests",
            self.name,
            milliseconds(self.single.value),
            milliseconds(self.single.lower),
            milliseconds(self.single.upper),
            self.count
        )
    }
}

fn compare(gate: &TpotGate, canary: &Track, stable: Option<&Track>) -> Verdict {
    let mut broken = Vec::new();
    let mut open = Vec::new();
    if let Some(limit) = gate.max_seconds {
        let text = || format!("limit {}", milliseconds(limit));
        if canary.single.lower > limit {
            broken.push(text());
        } else if canary.single.upper > limit {
            open.push(text());
        }
    }
    if let (Some(ratio), Some(stable)) = (gate.max_ratio, stable) {
        let text = || format!("{:.0} % over stable", (ratio - 1.0) * 100.0);
        if canary.single.lower > stable.single.upper * ratio {
            broken.push(text());
        } else if canary.paired.upper > stable.paired.lower * ratio {
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
    } else {
        (Outcome::Pass, "within the limits".to_owned())
    };
    let against = stable.map_or(String::new(), |stable| {
        format!(", stable {}", stable.describe())
    });
    Verdict {
        outcome,
        message: format!(
            "TPOT p{} {says}: canary {}{against}",
            percent(gate.quantile),
            canary.describe()
        ),
        stable: stable.map(|stable| stable.single.value),
        canary: Some(canary.single.value),
    }
}

/// A quantile as in `p95` or `p99.5`.
fn percent(quantile: f64) -> String {
    let text = format!("{:.2}", quantile * 100.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Seconds as milliseconds for people.
pub fn milliseconds(seconds: f64) -> String {
    if seconds.is_infinite() {
        return "unbounded".into();
    }
    let value = seconds * 1000.0;
    if value < 10.0 {
        format!("{value:.2} ms")
    } else {
        format!("{value:.0} ms")
    }
}

#[cfg(test)]
mod tests {
    use mixquant_crds::Slice;

    use super::*;
    use crate::samples::Histogram;

    const LIMITS: PrecisionLimits = PrecisionLimits {
        max_perplexity_increase: 1.0,
        min_top1_agreement: 95.0,
        max_kl_p99: 0.1,
    };

    fn report() -> VerifyReport {
        VerifyReport {
            baseline_perplexity: 8.0,
            perplexity: 8.04,
            perplexity_increase_percent: 0.5,
            kl_mean: 0.001,
            kl_p99: 0.05,
            top1_agreement_percent: 97.0,
            worst_slice: None,
            tokens: 1000,
            artifact_digest: None,
        }
    }

    #[test]
    fn precision_at_its_limits_passes_and_beyond_one_of_them_fails() {
        let judged = |change: fn(&mut VerifyReport)| {
            let mut report = report();
            change(&mut report);
            precision(&report, &LIMITS).outcome
        };
        assert_eq!(judged(|_| {}), Outcome::Pass);
        assert_eq!(
            judged(|report| report.perplexity_increase_percent = 1.0),
            Outcome::Pass
        );
        let broken: [fn(&mut VerifyReport); 7] = [
            |report| report.perplexity_increase_percent = 1.001,
            |report| report.top1_agreement_percent = 94.9,
            |report| report.kl_p99 = 0.11,
            |report| report.tokens = 0,
            |report| report.perplexity_increase_percent = f64::NAN,
            |report| report.kl_p99 = f64::INFINITY,
            |report| report.top1_agreement_percent = f64::NAN,
        ];
        for change in broken {
            assert_eq!(judged(change), Outcome::Fail);
        }
    }

    #[test]
    fn a_precision_failure_tells_numbers_limits_and_the_worst_slice() {
        let mut report = report();
        report.perplexity_increase_percent = 7.5;
        report.worst_slice = Some(Slice {
            name: "code".into(),
            perplexity_increase_percent: 31.0,
            kl_mean: 0.4,
            top1_agreement_percent: 60.0,
            tokens: 200,
        });
        let message = precision(&report, &LIMITS).message;
        for part in [
            "7.500 % (limit 1 %",
            "97.00 % (limit 95 %)",
            "code",
            "31.000 %",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }

    const GATE: TpotGate = TpotGate {
        quantile: 0.9,
        max_seconds: Some(0.1),
        max_ratio: Some(1.25),
    };

    fn rules() -> Rollout {
        Rollout {
            steps: Vec::new(),
            interval: 15,
            min_samples: 50,
            failure_limit: 1,
            warm_up: 0,
            progress_deadline: 600,
        }
    }

    /// All `requests` at `seconds`, in buckets of ratio 1.02.
    fn track(seconds: f64, requests: u64) -> TrackSamples {
        let bounds: Vec<f64> = (0..400).map(|power| 0.001 * 1.02_f64.powi(power)).collect();
        let mut counts = vec![0; bounds.len() + 1];
        counts[bounds.partition_point(|bound| *bound < seconds)] = requests;
        TrackSamples {
            tpot: Histogram { bounds, counts },
            pods: 1,
            problems: Vec::new(),
        }
    }

    fn judged(gate: &TpotGate, stable: TrackSamples, canary: TrackSamples) -> Verdict {
        let now = Timestamp::UNIX_EPOCH;
        let window = Window {
            since: now,
            revisions: ["a".into(), "b".into()],
        };
        let samples = Samples {
            since: Some(now),
            taken_at: Some(now),
            tracks: [("a".to_owned(), stable), ("b".to_owned(), canary)].into(),
        };
        tpot(gate, &rules(), &window, &samples, now)
    }

    #[test]
    fn both_limits_are_kept_or_the_canary_fails() {
        let outcome =
            |stable, canary| judged(&GATE, track(stable, 200), track(canary, 200)).outcome;
        assert_eq!(outcome(0.020, 0.020), Outcome::Pass);
        assert_eq!(outcome(0.020, 0.023), Outcome::Pass);
        assert_eq!(outcome(0.020, 0.030), Outcome::Fail, "over stable");
        assert_eq!(
            outcome(0.150, 0.150),
            Outcome::Fail,
            "over the absolute limit"
        );
    }

    #[test]
    fn too_few_requests_on_either_track_are_no_verdict() {
        for (stable, canary) in [(49, 500), (500, 49), (0, 0)] {
            let verdict = judged(&GATE, track(0.02, stable), track(0.2, canary));
            assert_eq!(
                verdict.outcome,
                Outcome::Inconclusive,
                "{}",
                verdict.message
            );
        }
    }

    #[test]
    fn without_a_relative_limit_stable_needs_no_samples() {
        let absolute = TpotGate {
            max_ratio: None,
            ..GATE
        };
        let outcome =
            |canary| judged(&absolute, TrackSamples::default(), track(canary, 200)).outcome;
        assert_eq!(outcome(0.02), Outcome::Pass);
        assert_eq!(outcome(0.2), Outcome::Fail);
    }

    #[test]
    fn a_target_that_was_not_seen_makes_every_verdict_inconclusive() {
        for blind in [0, 1] {
            let mut tracks = [track(0.02, 500), track(0.2, 500)];
            tracks[blind].problems = vec!["pod x: timeout".into()];
            let [stable, canary] = tracks;
            let verdict = judged(&GATE, stable, canary);
            assert_eq!(verdict.outcome, Outcome::Inconclusive);
            assert!(verdict.message.contains("pod x: timeout"));
        }
    }

    /// Above the last bucket a latency has no number: never a Pass, and a Fail only when the bucket itself is above the limit.
    #[test]
    fn latencies_beyond_the_buckets_never_pass() {
        let mut beyond = track(0.02, 0);
        *beyond.tpot.counts.last_mut().unwrap() = 500;
        let verdict = judged(&GATE, track(0.02, 500), beyond);
        assert_eq!(verdict.outcome, Outcome::Fail, "{}", verdict.message);
    }
}
