//! What each gate says of numbers that are known.

use std::collections::BTreeMap;

use super::*;
use crate::histogram::Histogram;
use crate::samples::{Series, TrackSamples, Value};

fn gate_on(metric: GateMetric) -> Gate {
    Gate {
        name: "gate".into(),
        metric,
        quantile: (kind(metric) == Kind::Distribution).then_some(0.9),
        max: None,
        max_ratio: None,
        min_samples: 50,
        no_data: NoData::Hold,
        on_failure: OnFailure::Rollback,
    }
}

fn tpot() -> Gate {
    Gate {
        max: Some(0.1),
        max_ratio: Some(1.25),
        ..gate_on(GateMetric::TPOT)
    }
}

/// All `count` at `value`, in buckets of ratio 1.02.
fn histogram(value: f64, count: u64) -> Value {
    let bounds: Vec<f64> = (0..500).map(|power| 0.001 * 1.02_f64.powi(power)).collect();
    let mut counts = vec![0; bounds.len() + 1];
    counts[bounds.partition_point(|bound| *bound < value)] = count;
    Value::Histogram(Histogram { bounds, counts })
}

fn track(values: &[(Series, Value)]) -> TrackSamples {
    TrackSamples {
        values: values.iter().cloned().collect(),
        pods: 1,
        grew_at: Some(Timestamp::UNIX_EPOCH),
        ..TrackSamples::default()
    }
}

fn latency(value: f64, count: u64) -> TrackSamples {
    track(&[(Series::Tpot, histogram(value, count))])
}

fn window() -> Window {
    Window {
        since: Timestamp::UNIX_EPOCH,
        revisions: ["a".into(), "b".into()],
    }
}

fn samples(stable: TrackSamples, canary: TrackSamples) -> Samples {
    Samples {
        since: Some(Timestamp::UNIX_EPOCH),
        taken_at: Some(Timestamp::UNIX_EPOCH),
        tracks: BTreeMap::from([("a".to_owned(), stable), ("b".to_owned(), canary)]),
        ..Samples::default()
    }
}

fn looked(of: &Gate, samples: &Samples, now: Timestamp) -> Verdict {
    let window = window();
    let look = Look {
        window: &window,
        interval: 15,
        samples,
        killed: 0,
        alone: false,
        now,
    };
    gate(of, &look)
}

fn judged(of: &Gate, stable: TrackSamples, canary: TrackSamples) -> Verdict {
    looked(of, &samples(stable, canary), Timestamp::UNIX_EPOCH)
}

#[test]
fn both_limits_are_kept_or_the_canary_fails() {
    let outcome = |stable, canary| judged(&tpot(), latency(stable, 200), latency(canary, 200));
    assert_eq!(outcome(0.020, 0.020).outcome, Outcome::Pass);
    assert_eq!(outcome(0.020, 0.023).outcome, Outcome::Pass);
    assert_eq!(outcome(0.020, 0.030).outcome, Outcome::Fail, "over stable");
    assert_eq!(
        outcome(0.150, 0.150).outcome,
        Outcome::Fail,
        "over the limit"
    );
}

/// Each latency and divergence is judged on its own series: the others' numbers say nothing about it.
#[test]
fn every_distribution_is_judged_by_its_own_series() {
    for (metric, series) in [
        (GateMetric::TPOT, Series::Tpot),
        (GateMetric::TTFT, Series::Ttft),
        (GateMetric::ITL, Series::Itl),
        (GateMetric::FirstTokenKl, Series::FirstTokenKl),
        (GateMetric::ShadowKl, Series::ShadowKl),
    ] {
        let gate = Gate {
            max: Some(0.1),
            ..gate_on(metric)
        };
        let others: Vec<(Series, Value)> = [
            Series::Tpot,
            Series::Ttft,
            Series::Itl,
            Series::FirstTokenKl,
            Series::ShadowKl,
        ]
        .into_iter()
        .filter(|other| *other != series)
        .map(|other| (other, histogram(0.02, 200)))
        .collect();
        let with = |value| {
            let mut canary = track(&others);
            canary.values.insert(series, histogram(value, 200));
            judged(&gate, TrackSamples::default(), canary).outcome
        };
        assert_eq!(with(0.05), Outcome::Pass, "{metric:?}");
        assert_eq!(with(0.2), Outcome::Fail, "{metric:?}");
        let blind = judged(&gate, TrackSamples::default(), track(&others));
        assert_eq!(blind.outcome, Outcome::Inconclusive, "{}", blind.message);
    }
}

fn requests(ok: u64, errors: u64) -> TrackSamples {
    track(&[
        (Series::Answered, Value::Count(ok)),
        (Series::Errors, Value::Count(errors)),
    ])
}

#[test]
fn failed_requests_are_a_share_of_those_answered_or_failed() {
    let gate = Gate {
        max: Some(0.01),
        ..gate_on(GateMetric::ErrorRate)
    };
    let outcome = |ok, errors| judged(&gate, requests(1, 0), requests(ok, errors)).outcome;
    assert_eq!(outcome(200, 0), Outcome::Pass);
    assert_eq!(outcome(199, 1), Outcome::Pass);
    assert_eq!(outcome(195, 5), Outcome::Inconclusive, "2.5 % may be luck");
    assert_eq!(outcome(180, 20), Outcome::Fail);
    assert_eq!(outcome(0, 60), Outcome::Fail, "all fail");
    assert_eq!(outcome(49, 0), Outcome::Inconclusive, "too few");
    let relative = Gate {
        max: None,
        max_ratio: Some(1.5),
        ..gate
    };
    let outcome = |stable, canary| judged(&relative, stable, canary).outcome;
    assert_eq!(outcome(requests(990, 10), requests(990, 10)), Outcome::Pass);
    assert_eq!(outcome(requests(1000, 0), requests(1000, 0)), Outcome::Pass);
    assert_eq!(
        outcome(requests(990, 10), requests(900, 100)),
        Outcome::Fail
    );
}

#[test]
fn fallbacks_are_a_share_of_the_quantised_prefills() {
    let gate = Gate {
        max: Some(0.05),
        ..gate_on(GateMetric::ValveFallbackRate)
    };
    let outcome = |prefills, fallbacks| {
        let canary = track(&[
            (Series::QuantisedPrefills, Value::Count(prefills)),
            (Series::ValveFallbacks, Value::Count(fallbacks)),
            (Series::Answered, Value::Count(100_000)),
        ]);
        judged(&gate, TrackSamples::default(), canary).outcome
    };
    assert_eq!(outcome(200, 2), Outcome::Pass);
    assert_eq!(outcome(200, 40), Outcome::Fail);
    assert_eq!(outcome(10, 10), Outcome::Inconclusive);
}

#[test]
fn one_step_without_numbers_fails_and_none_passes_only_with_requests() {
    let gate = Gate {
        max: Some(0.0),
        ..gate_on(GateMetric::NanLogits)
    };
    let outcome = |ok, nan| {
        let mut canary = requests(ok, 0);
        canary.values.insert(Series::NanLogits, Value::Count(nan));
        judged(&gate, TrackSamples::default(), canary).outcome
    };
    assert_eq!(outcome(200, 0), Outcome::Pass);
    assert_eq!(outcome(200, 1), Outcome::Fail);
    assert_eq!(outcome(3, 0), Outcome::Inconclusive);
}

#[test]
fn the_fullest_cache_is_held_against_its_limit() {
    let gate = Gate {
        max: Some(0.95),
        ..gate_on(GateMetric::KvCacheUsage)
    };
    let outcome = |level| {
        let canary = track(&[(Series::KvUsage, Value::Level(level))]);
        judged(&gate, TrackSamples::default(), canary).outcome
    };
    assert_eq!(outcome(0.95), Outcome::Pass);
    assert_eq!(outcome(0.96), Outcome::Fail);
    let blind = judged(&gate, TrackSamples::default(), track(&[]));
    assert_eq!(blind.outcome, Outcome::Inconclusive);
}

/// The cluster tells who was killed: this gate needs no scrape, and none can blind it.
#[test]
fn a_container_killed_for_memory_fails_its_gate_without_any_sample() {
    let of = Gate {
        max: Some(0.0),
        ..gate_on(GateMetric::OutOfMemory)
    };
    let outcome = |killed| {
        let (window, samples) = (window(), Samples::default());
        let look = Look {
            window: &window,
            interval: 15,
            samples: &samples,
            killed,
            alone: false,
            now: Timestamp::UNIX_EPOCH,
        };
        gate(&of, &look).outcome
    };
    assert_eq!((outcome(0), outcome(1)), (Outcome::Pass, Outcome::Fail));
}

#[test]
fn too_few_requests_on_either_track_say_what_no_data_says() {
    for (no_data, expected) in [
        (NoData::Hold, Outcome::Inconclusive),
        (NoData::Fail, Outcome::Fail),
        (NoData::Pass, Outcome::Pass),
    ] {
        let gate = Gate { no_data, ..tpot() };
        for (stable, canary) in [(49, 500), (500, 49), (0, 0)] {
            let verdict = judged(&gate, latency(0.02, stable), latency(0.2, canary));
            assert_eq!(verdict.outcome, expected, "{}", verdict.message);
        }
    }
}

/// An error is no failure and no silence: `noData` has no say in it.
#[test]
fn what_could_not_be_read_is_inconclusive_whatever_no_data_says() {
    for no_data in [NoData::Hold, NoData::Fail, NoData::Pass] {
        let gate = Gate { no_data, ..tpot() };
        for blind in [0, 1] {
            let mut tracks = [latency(0.02, 500), latency(0.2, 500)];
            tracks[blind].problems = vec!["pod x: timeout".into()];
            let [stable, canary] = tracks.clone();
            let verdict = judged(&gate, stable, canary);
            assert_eq!(verdict.outcome, Outcome::Inconclusive);
            assert!(verdict.message.contains("pod x: timeout"));
            tracks[blind].problems.clear();
            let faults = [(Series::Tpot, vec!["pod x: NaN".to_owned()])];
            tracks[blind].faults = faults.into();
            let [stable, canary] = tracks;
            let verdict = judged(&gate, stable, canary);
            assert_eq!(verdict.outcome, Outcome::Inconclusive);
            assert!(verdict.message.contains("pod x: NaN"));
        }
        let silent = judged(&gate, TrackSamples::default(), TrackSamples::default());
        assert_eq!(silent.outcome, Outcome::Inconclusive, "a renamed series");
        let (window, samples) = (window(), Samples::default());
        let never = Look {
            window: &window,
            interval: 15,
            samples: &samples,
            killed: 0,
            alone: false,
            now: Timestamp::UNIX_EPOCH,
        };
        assert_eq!(super::gate(&gate, &never).outcome, Outcome::Inconclusive);
    }
}

/// Pods that were judged a moment ago and are gone leave nobody to be judged.
#[test]
fn a_track_of_which_no_pod_answers_is_inconclusive_whatever_was_counted_before() {
    for gone in [0, 1] {
        let mut tracks = [latency(0.02, 500), latency(0.02, 500)];
        tracks[gone].pods = 0;
        let [stable, canary] = tracks;
        let verdict = judged(&tpot(), stable, canary);
        assert_eq!(verdict.outcome, Outcome::Inconclusive);
        assert!(verdict.message.contains("no pod of revision"));
    }
}

/// Counters that froze after a good start prove nothing; what they showed of a bad one stands.
#[test]
fn counters_that_froze_pass_nothing() {
    let now = Timestamp::from_second(60).unwrap();
    let outcome = |canary: f64, grew: i64| {
        let mut tracks = [latency(0.02, 500), latency(canary, 500)];
        for track in &mut tracks {
            track.grew_at = Some(Timestamp::from_second(grew).unwrap());
        }
        let [stable, canary] = tracks;
        let samples = Samples {
            taken_at: Some(now),
            ..samples(stable, canary)
        };
        let window = window();
        let look = Look {
            window: &window,
            interval: 15,
            samples: &samples,
            killed: 0,
            alone: false,
            now,
        };
        gate(&tpot(), &look).outcome
    };
    assert_eq!(outcome(0.02, 30), Outcome::Pass);
    assert_eq!(outcome(0.02, 29), Outcome::Inconclusive);
    assert_eq!(outcome(0.2, 29), Outcome::Fail);
}

#[test]
fn without_a_relative_limit_stable_needs_no_samples() {
    let absolute = Gate {
        max_ratio: None,
        ..tpot()
    };
    let outcome = |canary| judged(&absolute, TrackSamples::default(), latency(canary, 200)).outcome;
    assert_eq!(outcome(0.02), Outcome::Pass);
    assert_eq!(outcome(0.2), Outcome::Fail);
}

/// Above the last bucket a latency has no number: never a Pass, and a Fail only when the bucket itself is above the limit.
#[test]
fn latencies_beyond_the_buckets_never_pass() {
    let mut beyond = latency(0.02, 0);
    if let Some(Value::Histogram(histogram)) = beyond.values.get_mut(&Series::Tpot) {
        *histogram.counts.last_mut().unwrap() = 500;
    }
    let verdict = judged(&tpot(), latency(0.02, 500), beyond);
    assert_eq!(verdict.outcome, Outcome::Fail, "{}", verdict.message);
}

/// What one look decides, the thirtieth look at as many requests leaves open.
#[test]
fn a_later_look_needs_more_than_an_early_one() {
    let of = Gate {
        max: Some(0.025),
        max_ratio: None,
        ..tpot()
    };
    let at = |second: i64, fast: u64, slow: u64| {
        let now = Timestamp::from_second(second).unwrap();
        let mut canary = latency(0.02, fast);
        let (Some(Value::Histogram(all)), Value::Histogram(tail)) =
            (canary.values.get_mut(&Series::Tpot), histogram(0.03, slow))
        else {
            panic!("histograms");
        };
        for (sum, more) in all.counts.iter_mut().zip(tail.counts) {
            *sum += more;
        }
        canary.grew_at = Some(now);
        let samples = Samples {
            taken_at: Some(now),
            ..samples(TrackSamples::default(), canary)
        };
        looked(&of, &samples, now).outcome
    };
    // 22 of 262 lie above: p90 is below the limit, by how much is the question.
    assert_eq!(at(15, 240, 22), Outcome::Inconclusive);
    assert_eq!(at(450, 240, 22), Outcome::Inconclusive);
    assert_eq!(at(15, 282, 18), Outcome::Pass);
    assert_eq!(at(450, 282, 18), Outcome::Inconclusive);
}

#[test]
fn all_gates_together_are_as_bad_as_the_worst_that_decides() {
    use Outcome::{Fail, Inconclusive, Pass};

    let named = |on_failure| Gate {
        on_failure,
        ..tpot()
    };
    let gates = [
        named(OnFailure::Rollback),
        named(OnFailure::Pause),
        named(OnFailure::Record),
    ];
    let verdict = |outcome| Verdict::plain(outcome, format!("{outcome:?}"));
    let all = |outcomes: [Outcome; 3]| {
        let verdicts: Vec<_> = gates
            .iter()
            .zip(outcomes)
            .map(|(gate, outcome)| (gate, verdict(outcome)))
            .collect();
        let judgement = together(&verdicts);
        (judgement.outcome, judgement.does)
    };
    assert_eq!(all([Pass, Pass, Pass]).0, Pass);
    assert_eq!(all([Pass, Pass, Fail]).0, Pass, "Record decides nothing");
    assert_eq!(all([Pass, Inconclusive, Pass]).0, Inconclusive);
    assert_eq!(all([Inconclusive, Fail, Pass]), (Fail, OnFailure::Pause));
    assert_eq!(all([Fail, Fail, Pass]), (Fail, OnFailure::Rollback));
    let only_record = [(&gates[2], verdict(Pass))];
    assert_eq!(together(&only_record).outcome, Inconclusive);
}
