//! When probes are sent, and what their answers do to a trial.

use jiff::{SignedDuration, Timestamp};
use mixquant_crds::MixQuantService;
use mixquant_crds::status::{Outcome, Reason};
use mixquant_operator::action::{Action, ProbeRound};
use mixquant_operator::probed::{Pair, Probed};
use mixquant_operator::samples::{Samples, Series, Value};

use crate::told::{self, Told, World};

/// The service of all cases, with probes and a gate on their answers.
fn service() -> MixQuantService {
    let mut service = told::service();
    let probe = r#"{"requestsPerInterval": 12}"#;
    service.spec.probe = Some(serde_json::from_str(probe).unwrap());
    let gate = r#"{"name": "answers", "metric": "NllIncrease", "max": "0.05"}"#;
    service.spec.gates = vec![serde_json::from_str(gate).unwrap()];
    service
}

/// A canary at its first step, so many seconds after its window opened.
fn stepping(after: i64) -> Told {
    let mut told = Told::reach_with(service(), World::Stepping);
    told.now = window(&told) + SignedDuration::from_secs(after);
    told
}

fn window(told: &Told) -> Timestamp {
    told.plan(&Samples::default()).window.unwrap().since
}

/// What both tracks counted: latencies alike, of requests so many of users and so many probes.
fn counted(told: &Told, users: u64, probes: u64) -> Samples {
    let mut samples = told.samples(1.0).unwrap();
    for track in samples.tracks.values_mut() {
        let answered = Value::Count(users + probes);
        track.values.insert(Series::Answered, answered);
        track.values.insert(Series::Probes, Value::Count(probes));
    }
    samples
}

/// All 32 texts, of which the canary's answers are so much less likely.
fn answered(told: &Told, increase: f64) -> Probed {
    let pair = Pair {
        stable: 2.0,
        canary: 2.0 + increase,
    };
    Probed {
        rounds: 3,
        texts: Some(32),
        pairs: (0..32).map(|text| (text, pair)).collect(),
        began_at: Some(told.now - SignedDuration::from_secs(15)),
        ..Probed::new(window(told))
    }
}

fn round(told: &Told, samples: &Samples) -> Option<ProbeRound> {
    told.plan(samples).probe
}

#[test]
fn one_round_is_due_in_each_interval_of_a_quiet_trial() {
    let told = stepping(1);
    let first = round(&told, &counted(&told, 0, 0)).unwrap();
    assert_eq!((first.first, first.requests, first.seconds), (0, 12, 15));
    assert_eq!(first.window.since, window(&told));
    let status = told.observed.service.status.clone().unwrap();
    assert_eq!(first.artifact, status.canary.unwrap().artifact_digest);
    assert!(!first.alone);
    let sent = |running, began: i64, after: i64| {
        let told = stepping(after);
        let mut samples = counted(&told, 0, 12);
        samples.probed = Probed {
            running,
            rounds: 1,
            began_at: Some(window(&told) + SignedDuration::from_secs(began)),
            ..Probed::new(window(&told))
        };
        round(&told, &samples).map(|round| round.first)
    };
    assert_eq!(sent(true, 1, 16), None, "it runs");
    assert_eq!(sent(false, 1, 14), None, "this interval has had its round");
    assert_eq!(sent(false, 1, 16), Some(12), "the next texts");
}

#[test]
fn with_users_enough_probes_end_when_all_texts_are_answered() {
    let told = stepping(30);
    let mut samples = counted(&told, 1000, 36);
    assert!(round(&told, &samples).is_some(), "no text is answered");
    samples.probed = answered(&told, 0.0);
    assert_eq!(round(&told, &samples), None);
    samples.probed.problems.push("canary: status 500".into());
    assert!(
        round(&told, &samples).is_some(),
        "a problem is looked at again"
    );
    let mut samples = counted(&told, 99, 1000);
    samples.probed = answered(&told, 0.0);
    assert!(round(&told, &samples).is_some(), "probes are no users");
    let mut samples = counted(&told, 1000, 36);
    samples.probed = answered(&told, 0.0);
    for track in samples.tracks.values_mut() {
        track.grew_at = Some(told.now - SignedDuration::from_secs(16));
    }
    assert!(round(&told, &samples).is_some(), "the users are gone");
}

#[test]
fn no_probe_is_sent_outside_of_a_trials_window_nor_where_the_spec_has_none() {
    let mut told = stepping(30);
    let samples = counted(&told, 0, 0);
    let earlier = Samples {
        since: Some(window(&told) - SignedDuration::from_secs(60)),
        ..samples.clone()
    };
    assert_eq!(round(&told, &earlier), None, "baselines first");
    assert_eq!(round(&told, &Samples::default()), None);
    let spec = &mut told.observed.service.spec;
    (spec.probe, spec.gates) = (None, Vec::new());
    assert_eq!(round(&told, &samples), None);
    for world in [
        World::Serving,
        World::Starting,
        World::RollingBack,
        World::Degraded,
    ] {
        let told = Told::reach_with(service(), world);
        let plan = told.plan(&Samples::default());
        let since = plan.window.map(|window| window.since);
        let samples = Samples {
            since,
            taken_at: Some(told.now),
            ..Samples::default()
        };
        assert_eq!(round(&told, &samples), None, "{world:?}");
    }
}

/// What a verdict at the end of the first step says of answers that are so much less likely.
fn judged(increase: f64) -> (Told, String) {
    let mut told = stepping(60);
    let mut samples = counted(&told, 0, 1000);
    samples.probed = answered(&told, increase);
    let plan = told.plan(&samples);
    told.act(&plan);
    let published = plan.actions.iter().find_map(|action| match action {
        Action::Publish(event) if event.reason == Reason::SLOViolated => Some(event.note.clone()),
        _ => None,
    });
    (told, published.unwrap_or_default())
}

#[test]
fn probes_alone_let_a_canary_that_answers_as_well_take_its_next_step() {
    let (told, published) = judged(0.0);
    let at = told.observed.service.status.unwrap().rollout.unwrap();
    let verdict = at.verdict.unwrap();
    assert_eq!(
        (verdict.outcome, at.step),
        (Outcome::Pass, 1),
        "{published}"
    );
    let said = |name: &str| {
        let mut gates = verdict.gates.iter();
        gates
            .find(|gate| gate.name == name)
            .unwrap()
            .message
            .clone()
    };
    assert!(
        said("tpot").contains("1000 requests (1000 of them probes)"),
        "{}",
        said("tpot")
    );
    assert!(
        said("answers").contains("on the same 32 texts"),
        "{}",
        said("answers")
    );
}

#[test]
fn a_canary_that_answers_worse_leaves_with_the_numbers_as_the_reason() {
    let mut told = stepping(20);
    for _ in 0..2 {
        let mut samples = counted(&told, 0, 1000);
        samples.probed = answered(&told, 0.3);
        let plan = told.plan(&samples);
        told.act(&plan);
        told.now += SignedDuration::from_secs(20);
    }
    let status = told.observed.service.status.unwrap();
    let failed = &status.failed_revisions[0];
    assert_eq!(failed.reason, Reason::SLOViolated);
    assert!(
        failed
            .message
            .contains("NLL increase above limit 0.0500 nats a token"),
        "{}",
        failed.message
    );
}
