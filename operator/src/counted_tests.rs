//! The bookkeeping of a window, on answers that are known.

use super::*;
use crate::histogram::Histogram;
use crate::observed::fixture::pod;

fn scrape(process_start: u64, counts: [u64; 3]) -> Scrape {
    let tpot = Histogram {
        bounds: vec![0.01, 0.02],
        counts: counts.into(),
    };
    Scrape {
        process_start,
        series: [(Series::Tpot, Ok(Value::Histogram(tpot)))].into(),
    }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// One round in which one pod answers.
fn round(trial: &mut Counted, pod: &ObservedPod, answer: Scrape, second: i64) {
    trial.begin();
    trial.absorb(pod, Ok(answer), at(second));
}

fn window() -> Window {
    Window {
        since: Timestamp::UNIX_EPOCH,
        revisions: ["stable".into(), "canary".into()],
    }
}

fn tpot(samples: &Samples, revision: &str) -> Vec<u64> {
    match samples.tracks[revision].values.get(&Series::Tpot) {
        Some(Value::Histogram(histogram)) => histogram.counts.clone(),
        other => panic!("{other:?}"),
    }
}

fn counts(trial: &Counted, revision: &str) -> Vec<u64> {
    tpot(&trial.samples(), revision)
}

#[test]
fn only_what_was_counted_inside_the_window_is_a_sample() {
    let mut trial = Counted::new(window());
    trial.absorb(&pod("a", "canary"), Ok(scrape(1, [100, 5, 0])), at(1));
    assert_eq!(counts(&trial, "canary"), [0, 0, 0]);
    trial.absorb(&pod("a", "canary"), Ok(scrape(1, [110, 5, 1])), at(1));
    trial.absorb(&pod("b", "canary"), Ok(scrape(9, [7, 7, 7])), at(1));
    trial.absorb(&pod("b", "canary"), Ok(scrape(9, [8, 7, 7])), at(1));
    trial.absorb(&pod("c", "stable"), Ok(scrape(9, [0, 0, 0])), at(1));
    assert_eq!(counts(&trial, "canary"), [11, 0, 1]);
    assert_eq!(counts(&trial, "stable"), [0, 0, 0]);
}

#[test]
fn a_restarted_process_counts_from_its_own_start_and_keeps_what_was_seen_before() {
    let mut trial = Counted::new(window());
    for (start, count) in [(1, 100), (1, 120), (2, 3), (2, 8)] {
        trial.absorb(&pod("a", "canary"), Ok(scrape(start, [count, 0, 0])), at(1));
    }
    assert_eq!(counts(&trial, "canary"), [25, 0, 0]);
}

#[test]
fn counters_that_fall_inside_one_process_give_no_negative_and_no_huge_count() {
    let mut trial = Counted::new(window());
    for count in [100, 130, 10, 12] {
        trial.begin();
        trial.absorb(&pod("a", "canary"), Ok(scrape(1, [count, 0, 0])), at(1));
    }
    assert_eq!(counts(&trial, "canary"), [2, 0, 0]);
}

#[test]
fn frozen_counters_are_no_samples_and_counters_that_freeze_say_since_when() {
    let mut trial = Counted::new(window());
    for second in 0..5 {
        round(
            &mut trial,
            &pod("a", "canary"),
            scrape(1, [100, 0, 0]),
            second,
        );
    }
    assert_eq!(counts(&trial, "canary"), [0, 0, 0]);
    assert_eq!(trial.samples().tracks["canary"].grew_at, None);
    for (second, count) in [(7, 120), (8, 120), (9, 120)] {
        round(
            &mut trial,
            &pod("a", "canary"),
            scrape(1, [count, 0, 0]),
            second,
        );
    }
    assert_eq!(trial.samples().tracks["canary"].grew_at, Some(at(7)));
}

#[test]
fn a_series_that_is_missing_or_wrong_is_a_fault_of_that_series_alone() {
    let mut trial = Counted::new(window());
    let mut answer = scrape(1, [1, 2, 3]);
    answer
        .series
        .insert(Series::KvUsage, Err("NaN is no level".into()));
    round(&mut trial, &pod("a", "canary"), answer.clone(), 1);
    let track = &trial.samples().tracks["canary"];
    assert!(track.problems.is_empty() && !track.faults.contains_key(&Series::Tpot));
    assert!(track.faults[&Series::KvUsage][0].contains("NaN is no level"));
    assert!(track.faults[&Series::Errors][0].contains("mixquant_requests is not exported"));
    // What comes back is counted from there on, and is no fault any more.
    answer.series.insert(Series::Errors, Ok(Value::Count(7)));
    round(&mut trial, &pod("a", "canary"), answer.clone(), 2);
    answer.series.insert(Series::Errors, Ok(Value::Count(9)));
    round(&mut trial, &pod("a", "canary"), answer, 3);
    let track = &trial.samples().tracks["canary"];
    assert!(!track.faults.contains_key(&Series::Errors));
    assert_eq!(track.values[&Series::Errors], Value::Count(2));
}

#[test]
fn of_a_level_the_greatest_in_the_window_is_kept() {
    let mut trial = Counted::new(window());
    for (second, level) in [(1, 0.2), (2, 0.9), (3, 0.1)] {
        let mut answer = scrape(1, [0, 0, 0]);
        answer
            .series
            .insert(Series::KvUsage, Ok(Value::Level(level)));
        round(&mut trial, &pod("a", "canary"), answer, second);
    }
    let track = &trial.samples().tracks["canary"];
    assert_eq!(track.values[&Series::KvUsage], Value::Level(0.9));
}

#[test]
fn a_pod_that_fails_is_named_with_its_reason() {
    let mut trial = Counted::new(window());
    trial.absorb(&pod("a", "canary"), Err("connection refused".into()), at(1));
    let samples = trial.samples();
    assert_eq!(
        samples.tracks["canary"].problems,
        ["pod chat-a: connection refused"]
    );
    assert_eq!(samples.tracks["canary"].pods, 0);
}
