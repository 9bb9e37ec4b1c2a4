//! From traffic that is no longer calibration's to a recalibrated revision: what is found, told, opened and not opened.

use jiff::SignedDuration;
use mixquant_crds::Digest;
use mixquant_crds::report::PROMPT_LENGTHS;
use mixquant_crds::scalars::Span;
use mixquant_crds::status::MixQuantServiceStatus;
use mixquant_operator::action::{Action, JobWork, Metric, Plan};
use mixquant_operator::histogram::Histogram;
use mixquant_operator::samples::{Samples, Series, TrackSamples, Value};
use serde_json::json;

use crate::told::{self, Told, World};

/// The service at rest, with `spec.drift`.
fn watched(drift: &serde_json::Value) -> Told {
    let mut service = serde_json::to_value(told::service()).unwrap();
    service["spec"]["drift"] = drift.clone();
    Told::reach_with(serde_json::from_value(service).unwrap(), World::Serving)
}

fn recalibrating() -> serde_json::Value {
    json!({
        "action": "Recalibrate",
        "maxActivationsBeyondRangePercent": "2",
        "maxKvBeyondRangePercent": "2",
        "maxValveFallbackPercent": "2",
        "maxPromptLengthShiftPercent": "50",
        "minPrompts": 100,
        "coolDown": "2h",
    })
}

/// What stable's pods counted in a window.
#[derive(Clone, Copy)]
struct Counted {
    prompts: u64,
    /// Of a thousand rows.
    activations: u64,
    kv: u64,
    fallbacks: u64,
    /// Of a thousand prompts that are short.
    short: u64,
}

const CALM: Counted = Counted {
    prompts: 1000,
    activations: 1,
    kv: 1,
    fallbacks: 0,
    short: 100,
};

fn samples(told: &Told, counted: Counted) -> Samples {
    let mut counts = vec![0; PROMPT_LENGTHS.len() + 1];
    counts[0] = counted.prompts * counted.short / 1000;
    counts[5] = counted.prompts - counts[0];
    let lengths = Histogram {
        bounds: PROMPT_LENGTHS.map(f64::from).to_vec(),
        counts,
    };
    let count = |series, of_thousand| (series, Value::Count(of_thousand * counted.prompts));
    let values = [
        count(Series::Activations, 1000),
        count(Series::ActivationsBeyond, counted.activations),
        count(Series::KvRows, 1000),
        count(Series::KvBeyond, counted.kv),
        count(Series::QuantisedPrefills, 1000 - counted.fallbacks),
        count(Series::ValveFallbacks, counted.fallbacks),
        (Series::PromptTokens, Value::Histogram(lengths)),
    ];
    let track = TrackSamples {
        values: values.into(),
        pods: 2,
        grew_at: Some(told.now),
        ..TrackSamples::default()
    };
    Samples {
        since: Some(told.now),
        taken_at: Some(told.now),
        tracks: [(stable(told), track)].into(),
        ..Samples::default()
    }
}

fn status(told: &Told) -> &MixQuantServiceStatus {
    told.observed.service.status.as_ref().unwrap()
}

fn stable(told: &Told) -> String {
    status(told).stable.as_ref().unwrap().revision.clone()
}

fn rounds(told: &Told) -> i32 {
    status(told).drift.as_ref().map_or(0, |drift| drift.round)
}

/// The Drifted condition: `True Drifted`.
fn drifted(told: &Told) -> String {
    let conditions = &status(told).conditions;
    let found = conditions.iter().find(|found| found.type_ == "Drifted");
    found.map_or_else(String::new, |found| {
        format!("{} {}", found.status, found.reason)
    })
}

/// A pass an hour later in which `counted` was sampled.
fn look(told: &mut Told, counted: Counted) -> Plan {
    told.now += SignedDuration::from_hours(1);
    let plan = told.plan(&samples(told, counted));
    told.act(&plan);
    plan
}

fn counts(plan: &Plan, is: fn(&Metric) -> bool) -> usize {
    let metrics = plan.actions.iter();
    metrics
        .filter(|action| matches!(action, Action::Count(metric) if is(metric)))
        .count()
}

/// The canary goes its way until it is stable.
fn promote(told: &mut Told) {
    for _ in 0..12 {
        told.pods_ready();
        told.now += SignedDuration::from_secs(80);
        let samples = told.samples(1.0).unwrap_or_default();
        let plan = told.plan(&samples);
        told.act(&plan);
    }
}

/// Puts a number into what was counted.
type Set = fn(&mut Counted, u64);

#[test]
fn each_signal_beyond_its_bound_is_told_once_and_holds_until_it_is_well_below() {
    let reporting = |told: &mut Told| {
        told.observed.service.spec.drift.as_mut().unwrap().action =
            mixquant_crds::drift::DriftAction::Report;
    };
    let signals: [(&str, Set, [u64; 3]); 4] = [
        ("Activations", |c, n| c.activations = n, [21, 18, 15]),
        ("KvCache", |c, n| c.kv = n, [21, 18, 15]),
        ("ValveFallback", |c, n| c.fallbacks = n, [21, 18, 15]),
        ("PromptLength", |c, n| c.short = n, [510, 450, 390]),
    ];
    for (name, set, [beyond, near, below]) in signals {
        let mut told = watched(&recalibrating());
        reporting(&mut told);
        let with = |value| {
            let mut counted = CALM;
            set(&mut counted, value);
            counted
        };
        look(&mut told, CALM);
        assert_eq!(drifted(&told), "False WithinRanges", "{name}");
        let plan = look(&mut told, with(near));
        assert!(plan.actions.is_empty(), "{name}: {:?}", plan.actions);
        let plan = look(&mut told, with(beyond));
        assert_eq!(drifted(&told), "True Drifted", "{name}");
        assert_eq!(
            counts(&plan, |metric| matches!(metric, Metric::Drift { .. })),
            1
        );
        assert!(
            format!("{plan:?}").contains(&format!("signal: {name:?}")),
            "{plan:?}"
        );
        for still in [beyond, near, beyond] {
            let plan = look(&mut told, with(still));
            assert!(plan.actions.is_empty(), "{name}: quiet, {:?}", plan.actions);
        }
        look(&mut told, with(below));
        assert_eq!(drifted(&told), "False WithinRanges", "{name}");
        assert_eq!(rounds(&told), 0, "a report opens nothing");
    }
}

#[test]
fn a_window_is_looked_at_often_however_short_it_is_or_it_would_be_over_before_anything_is_counted()
{
    for (window, seconds) in [("1m", 60), ("1h", 3600), ("168h", 604_800)] {
        let mut told = watched(&recalibrating());
        told.observed.service.spec.drift.as_mut().unwrap().window = Span(window.into());
        let samples = samples(&told, CALM);
        let plan = told.plan(&samples);
        told.act(&plan);
        let samples = self::samples(&told, CALM);
        let again = told.plan(&samples).requeue.unwrap();
        assert!(again.as_secs() <= seconds / 4, "{window}: {again:?}");
    }
}

#[test]
fn few_prompts_and_pages_that_cannot_be_read_say_nothing() {
    const SERIES: Series = Series::ActivationsBeyond;
    let mut told = watched(&recalibrating());
    let far = Counted {
        activations: 500,
        ..CALM
    };
    look(&mut told, Counted { prompts: 99, ..far });
    assert_eq!(drifted(&told), "Unknown Inconclusive");
    let broken = |break_it: fn(&mut TrackSamples)| {
        let mut told = watched(&recalibrating());
        let mut samples = samples(&told, far);
        break_it(samples.tracks.values_mut().next().unwrap());
        let plan = told.plan(&samples);
        told.act(&plan);
        rounds(&told)
    };
    assert_eq!(broken(|track| track.problems.push("no answer".into())), 0);
    assert_eq!(broken(|track| track.pods = 0), 0);
    assert_eq!(
        broken(|track| drop(track.faults.insert(SERIES, vec!["fell".into()]))),
        0
    );
    assert_eq!(broken(|track| drop(track.values.remove(&SERIES))), 0);
    assert_eq!(broken(|_| {}), 1, "and without that it would have opened");
}

#[test]
fn drift_opens_one_recalibration_whose_artifact_goes_the_way_of_every_canary() {
    let mut told = watched(&recalibrating());
    let (before, far) = (
        stable(&told),
        Counted {
            activations: 100,
            ..CALM
        },
    );
    let plan = look(&mut told, far);
    assert_eq!(rounds(&told), 1);
    assert_eq!(
        counts(&plan, |metric| matches!(
            metric,
            Metric::Recalibration { .. }
        )),
        1
    );
    let plan = look(&mut told, far);
    let job = plan.actions.iter().find_map(|action| match action {
        Action::ApplyJob(job) => Some(job.clone()),
        _ => None,
    });
    let job = job.expect("a calibration Job");
    assert!(
        matches!(job.work, JobWork::Calibrate { round: 1, ref remove, .. } if remove.is_empty())
    );
    for _ in 0..3 {
        look(&mut told, far);
        assert_eq!(rounds(&told), 1, "never twice at once");
    }
    assert_eq!(stable(&told), before, "it serves meanwhile");
    told.answer_with(&Digest::of_bytes(b"recalibrated"));
    promote(&mut told);
    let stable_now = status(&told).stable.clone().unwrap();
    assert_ne!(stable_now.revision, before);
    assert_eq!(
        stable_now.artifact_digest,
        Digest::of_bytes(b"recalibrated")
    );
    assert!(status(&told).canary.is_none());
    assert_eq!(
        drifted(&told),
        "True Drifted",
        "until traffic says otherwise"
    );
    look(&mut told, CALM);
    assert_eq!(drifted(&told), "False WithinRanges");
    look(&mut told, far);
    assert_eq!(rounds(&told), 2, "the cool-down is over");
}

#[test]
fn the_cool_down_is_kept_and_its_end_is_not_slept_through() {
    let mut drift = recalibrating();
    drift["coolDown"] = json!("48h");
    let mut told = watched(&drift);
    let far = Counted { kv: 300, ..CALM };
    look(&mut told, far);
    told.pass();
    told.answer_with(&Digest::of_bytes(b"recalibrated"));
    promote(&mut told);
    let plan = look(&mut told, far);
    assert_eq!(rounds(&told), 1);
    assert!(
        plan.requeue.is_some(),
        "it looks again when the cool-down is over"
    );
    told.now += SignedDuration::from_hours(48);
    look(&mut told, far);
    assert_eq!(rounds(&told), 2);
}

#[test]
fn a_recalibration_that_fails_is_not_tried_again_by_itself() {
    let mut told = watched(&recalibrating());
    let far = Counted {
        activations: 100,
        ..CALM
    };
    let before = stable(&told);
    look(&mut told, far);
    told.pass();
    told.fail_jobs();
    for _ in 0..60 {
        look(&mut told, far);
    }
    assert_eq!((rounds(&told), stable(&told)), (1, before));
    let phase = format!("{:?}", status(&told).phase.unwrap());
    assert_eq!(phase, "Degraded");
}

#[test]
fn one_that_gives_the_same_artifact_is_the_last_until_the_data_change() {
    let mut told = watched(&recalibrating());
    let far = Counted { short: 900, ..CALM };
    let artifact = status(&told).stable.clone().unwrap().artifact_digest;
    look(&mut told, far);
    told.pass();
    told.answer_with(&artifact);
    for _ in 0..60 {
        look(&mut told, far);
    }
    assert_eq!(rounds(&told), 1);
    assert_eq!(format!("{:?}", status(&told).phase.unwrap()), "Ready");
    told.observed.calibration_data = mixquant_operator::observed::Dataset::Present {
        digest: Digest::of_bytes(b"texts of today"),
    };
    told.pass();
    told.answer_with(&Digest::of_bytes(b"of today"));
    promote(&mut told);
    look(&mut told, far);
    assert_eq!(rounds(&told), 2);
}

#[test]
fn nothing_is_opened_while_paused_undone_or_on_trial() {
    let far = Counted {
        activations: 100,
        ..CALM
    };
    let mut told = watched(&recalibrating());
    told.observed.service.spec.rollout.paused = true;
    look(&mut told, far);
    assert_eq!(
        (rounds(&told), drifted(&told).as_str()),
        (0, "True Drifted")
    );

    let mut service = serde_json::to_value(told::service()).unwrap();
    service["spec"]["drift"] = recalibrating();
    let mut told = Told::reach_with(serde_json::from_value(service).unwrap(), World::Stepping);
    look(&mut told, far);
    assert_eq!(
        (rounds(&told), drifted(&told).as_str()),
        (0, "Unknown Inconclusive")
    );
}

#[test]
fn a_schedule_recalibrates_without_drift_and_wakes_for_it() {
    let mut told = watched(&json!({"action": "Recalibrate", "recalibrateEvery": "24h"}));
    let promoted = told.now;
    let plan = look(&mut told, CALM);
    assert!(
        plan.requeue
            .is_some_and(|after| after.as_secs() <= 23 * 3600),
        "{plan:?}"
    );
    assert_eq!(rounds(&told), 0);
    told.now = promoted + SignedDuration::from_hours(25);
    told.pass();
    assert_eq!(rounds(&told), 1);
}

#[test]
fn artifacts_that_no_revision_needs_are_removed_by_the_next_calibration() {
    let mut told = watched(&recalibrating());
    told.observed.service.spec.rollout.revision_history_limit = 1;
    let far = Counted {
        activations: 100,
        ..CALM
    };
    let mut removed = Vec::new();
    for round in 1..=4_u8 {
        told.now += SignedDuration::from_hours(3);
        look(&mut told, far);
        let plan = told.plan(&Samples::default());
        told.act(&plan);
        for action in &plan.actions {
            if let Action::ApplyJob(job) = action
                && let JobWork::Calibrate { remove, .. } = &job.work
            {
                removed.push(remove.clone());
            }
        }
        told.answer_with(&Digest::of_bytes(&[round]));
        promote(&mut told);
        assert_eq!(rounds(&told), i32::from(round));
    }
    // Stable and the one revision of history keep theirs.
    let first = Digest::of_bytes(b"artifact");
    assert_eq!(
        removed,
        [vec![], vec![], vec![first], vec![Digest::of_bytes(&[1])]]
    );
    let known: Vec<_> = status(&told)
        .artifacts
        .iter()
        .map(|known| known.digest.clone())
        .collect();
    assert_eq!(known, [4_u8, 3, 2].map(|round| Digest::of_bytes(&[round])));
}
