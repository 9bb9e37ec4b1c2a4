//! What is promised of the number of pods that the load asks for, whatever the load; what is kept of it is in `loads`.
#![expect(clippy::unwrap_used, reason = "this is a test: a panic is its failure")]

use jiff::Timestamp;
use mixquant_crds::MixQuantService;
use mixquant_operator::load::Load;
use mixquant_operator::scaling::{choose, is_blind};
use mixquant_operator::validate::{Bounds, Scaling, Scheduled, Targets, validate};
use proptest::prelude::*;

fn scaling(queue: Option<f64>, requests: Option<f64>, kv: Option<f64>) -> Scaling {
    Scaling {
        bounds: Bounds { min: 1, max: 10 },
        targets: Targets {
            queue_length: queue,
            requests_per_second: requests,
            kv_cache_usage: kv,
        },
        up_window: 0,
        down_window: 300,
        schedule: Vec::new(),
    }
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + seconds).unwrap()
}

fn load(seconds: i64, pods: u32) -> Load {
    Load {
        at: at(seconds),
        pods,
        ..Load::default()
    }
}

/// A look every 15 seconds until now (second 0), `count` of them.
fn history(count: i64, entry: impl Fn(i64) -> Load) -> Vec<Load> {
    (0..count)
        .map(|index| entry((index + 1 - count) * 15))
        .collect()
}

fn chosen(scaling: &Scaling, loads: &[Load], current: i32) -> i32 {
    choose(scaling, loads, current, at(0)).replicas
}

#[test]
fn a_queue_is_spread_until_its_rest_is_the_target() {
    let scaling = scaling(Some(4.0), None, None);
    let of = |running: f64, waiting: f64| {
        let loads = history(1, |second| Load {
            running,
            waiting,
            ..load(second, 2)
        });
        chosen(&scaling, &loads, 2)
    };
    // Two pods run 16 each and 40 wait: 72 over 20 a pod.
    assert_eq!(of(32.0, 40.0), 4);
    // A queue at its target changes nothing.
    assert_eq!(of(32.0, 8.0), 2);
    // Nothing runs and much waits: nobody knows what a pod can run.
    assert_eq!(of(0.0, 40.0), 10);
}

#[test]
fn requests_and_caches_are_shared_out() {
    let requests = scaling(None, Some(2.0), None);
    let rising = |per_look: u64| {
        history(30, |second| Load {
            requests: u64::try_from((second + 600) / 15).unwrap() * per_look,
            ..load(second, 2)
        })
    };
    assert_eq!(chosen(&requests, &rising(99), 2), 4);
    assert_eq!(chosen(&requests, &rising(15), 2), 1);
    let caches = scaling(None, None, Some(0.5));
    let full = history(1, |second| Load {
        kv_cache_usage: 1.8,
        ..load(second, 2)
    });
    assert_eq!(chosen(&caches, &full, 2), 4);
}

#[test]
fn the_target_that_asks_for_the_most_pods_decides_and_is_named() {
    let scaling = scaling(Some(4.0), Some(2.0), Some(0.5));
    let loads = history(30, |second| Load {
        kv_cache_usage: 1.8,
        ..load(second, 2)
    });
    let choice = choose(&scaling, &loads, 2, at(0));
    assert_eq!(choice.replicas, 4);
    assert_eq!(
        choice.why,
        "KV caches hold 180 % of one pod's, 50 % a pod (2 pods)"
    );
    let much = history(1, |second| Load {
        kv_cache_usage: 20.0,
        ..load(second, 2)
    });
    let choice = choose(&scaling, &much, 2, at(0));
    assert_eq!(choice.replicas, 10);
    assert!(
        choice.why.ends_with(", at most 10 are allowed"),
        "{}",
        choice.why
    );
}

#[test]
fn a_burst_within_the_up_window_adds_nothing() {
    let mut scaling = scaling(None, None, Some(0.5));
    scaling.up_window = 60;
    let burst = |entries: i64| {
        history(30, |second| Load {
            kv_cache_usage: if second > -15 * entries { 1.8 } else { 1.0 },
            ..load(second, 2)
        })
    };
    assert_eq!(chosen(&scaling, &burst(4), 2), 2);
    assert_eq!(chosen(&scaling, &burst(5), 2), 4);
}

#[test]
fn pods_stay_as_long_as_any_moment_of_the_down_window_needed_them() {
    let scaling = scaling(None, None, Some(0.5));
    let peak = |second_of_peak: i64| {
        history(30, |second| Load {
            kv_cache_usage: if second == second_of_peak { 1.4 } else { 0.1 },
            ..load(second, 4)
        })
    };
    assert_eq!(chosen(&scaling, &peak(-300), 4), 3);
    assert_eq!(chosen(&scaling, &peak(-315), 4), 1);
}

#[test]
fn what_is_not_known_takes_nothing_away() {
    let scaling = scaling(None, None, Some(0.5));
    let idle = history(30, |second| load(second, 4));
    assert_eq!(chosen(&scaling, &idle, 4), 1);
    assert_eq!(chosen(&scaling, &[], 4), 4);
    // A restart of the operator: the history is shorter than the window.
    assert_eq!(chosen(&scaling, &idle[10..], 4), 4);
    // A pod that did not answer, and a time without any look.
    let mut silent = idle.clone();
    silent[20].silent = 1;
    assert_eq!(chosen(&scaling, &silent, 4), 4);
    let mut gap = idle.clone();
    gap.drain(15..20);
    assert_eq!(chosen(&scaling, &gap, 4), 4);
    // The newest look is old.
    let old = choose(&scaling, &idle, 4, at(61));
    assert_eq!(old.replicas, 4);
    // Nobody can be asked.
    let none = history(30, |second| load(second, 0));
    assert_eq!(chosen(&scaling, &none, 4), 4);
}

/// One pod of four is there and full: nobody knows what the others would carry.
#[test]
fn pods_that_are_missing_count_as_fully_used() {
    let scaling = scaling(None, None, Some(0.9));
    let one = history(30, |second| Load {
        kv_cache_usage: 1.0,
        ..load(second, 1)
    });
    assert_eq!(chosen(&scaling, &one, 4), 4);
    // Pods that find no room go as soon as those that run suffice.
    let idle = history(30, |second| load(second, 2));
    assert_eq!(chosen(&scaling, &idle, 4), 2);
}

#[test]
fn what_pods_that_answer_carry_is_enough_to_add_more() {
    let scaling = scaling(None, None, Some(0.5));
    let half = history(1, |second| Load {
        silent: 3,
        kv_cache_usage: 3.0,
        ..load(second, 4)
    });
    assert_eq!(chosen(&scaling, &half, 5), 6);
}

#[test]
fn bounds_hold_without_any_load_and_change_with_the_clock() {
    let mut scaling = scaling(Some(4.0), None, None);
    scaling.bounds = Bounds { min: 3, max: 5 };
    assert_eq!(chosen(&scaling, &[], 1), 3);
    assert_eq!(chosen(&scaling, &[], 9), 5);
    let midnight = Timestamp::from_second(1_000_000 / 86_400 * 86_400).unwrap();
    scaling.schedule = vec![Scheduled {
        days: (0..7).collect(),
        from: 0,
        to: 60,
        time_zone: "UTC".into(),
        bounds: Bounds { min: 1, max: 2 },
    }];
    let choice = choose(&scaling, &[], 4, midnight);
    assert_eq!(
        (choice.replicas, choice.why.as_str()),
        (2, "the bounds are 1 to 2")
    );
}

fn night(days: &[i8], from: u16, to: u16) -> Scaling {
    let mut scaling = scaling(Some(4.0), None, None);
    scaling.bounds = Bounds { min: 2, max: 8 };
    scaling.schedule = vec![Scheduled {
        days: days.to_vec(),
        from,
        to,
        time_zone: "Europe/Berlin".into(),
        bounds: Bounds { min: 1, max: 3 },
    }];
    scaling
}

fn max_at(scaling: &Scaling, at: &str) -> i32 {
    scaling.bounds_at(at.parse().unwrap()).max
}

#[test]
fn a_night_begins_on_its_day_and_ends_on_the_next_by_the_clock_of_its_zone() {
    // Friday nights; 2026-01-02 is a Friday, and Berlin is an hour ahead of UTC.
    let scaling = night(&[4], 22 * 60, 6 * 60);
    assert_eq!(max_at(&scaling, "2026-01-02T20:59:59Z"), 8);
    assert_eq!(max_at(&scaling, "2026-01-02T21:00:00Z"), 3);
    assert_eq!(max_at(&scaling, "2026-01-03T04:59:59Z"), 3);
    assert_eq!(max_at(&scaling, "2026-01-03T05:00:00Z"), 8);
    // The night before is Thursday's, the one after Saturday's.
    assert_eq!(max_at(&scaling, "2026-01-02T02:00:00Z"), 8);
    assert_eq!(max_at(&scaling, "2026-01-03T22:00:00Z"), 8);
    // In summer two hours ahead.
    assert_eq!(max_at(&scaling, "2026-07-03T20:00:00Z"), 3);
    assert_eq!(scaling.most(), 8);
}

#[test]
fn a_whole_day_ends_at_midnight() {
    let sunday = night(&[6], 0, 24 * 60);
    assert_eq!(max_at(&sunday, "2026-01-03T22:59:59Z"), 8);
    assert_eq!(max_at(&sunday, "2026-01-03T23:00:00Z"), 3);
    assert_eq!(max_at(&sunday, "2026-01-04T22:59:59Z"), 3);
    assert_eq!(max_at(&sunday, "2026-01-04T23:00:00Z"), 8);
}

#[test]
fn scaling_that_went_around_the_schema_is_refused_with_its_fix() {
    for (scaling, part) in [
        (
            r#"{"minReplicas": 0, "maxReplicas": 3, "targets": {"queueLength": 4}}"#,
            "between 1 and 1000",
        ),
        (
            r#"{"minReplicas": 4, "maxReplicas": 3, "targets": {"queueLength": 4}}"#,
            "not above the second",
        ),
        (
            r#"{"minReplicas": 1, "maxReplicas": 3, "targets": {}}"#,
            "scaling.targets needs",
        ),
        (
            r#"{"minReplicas": 1, "maxReplicas": 3, "targets": {"requestsPerSecond": "0"}}"#,
            "above 0",
        ),
        (
            r#"{"minReplicas": 1, "maxReplicas": 3, "targets": {"queueLength": 4}, "scaleDown": {"stabilizationWindowSeconds": 3601}}"#,
            "between 0 and 3600",
        ),
        (
            r#"{"minReplicas": 1, "maxReplicas": 3, "targets": {"queueLength": 4}, "schedule": [
                {"from": "22:00", "to": "06:00", "timeZone": "Europe/Atlantis", "minReplicas": 1, "maxReplicas": 2}]}"#,
            "`Europe/Atlantis` is no time zone",
        ),
    ] {
        let text = include_str!("../../crds/examples/chat.yaml");
        let mut service: MixQuantService = serde_norway::from_str(text).unwrap();
        service.spec.scaling = Some(serde_json::from_str(scaling).unwrap());
        let text = validate(&service).unwrap_err().to_string();
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn a_load_that_is_unknown_for_five_minutes_is_told() {
    let scaling = scaling(None, Some(2.0), None);
    let silent = |entries: usize| {
        let mut loads = history(30, |second| load(second, 2));
        let count = loads.len();
        for load in &mut loads[count - entries..] {
            load.silent = 1;
        }
        is_blind(&scaling, &loads, at(0))
    };
    assert!(!silent(19));
    assert!(silent(20));
    // A new process has not looked for long.
    let young = history(10, |second| load(second, 0));
    assert!(!is_blind(&scaling, &young, at(0)));
    assert!(!is_blind(&scaling, &[], at(0)));
}

fn any_load() -> impl Strategy<Value = (u32, u32, f64, f64, f64, u64)> {
    (
        0_u32..8,
        0_u32..2,
        0.0..64.0,
        0.0..200.0,
        0.0..8.0,
        0_u64..500,
    )
}

fn any_scaling() -> impl Strategy<Value = Scaling> {
    let targets = (
        prop::option::of(1.0..50.0),
        prop::option::of(0.1..50.0),
        0.05..1.0,
    );
    (targets, 1_i32..8, 0_i32..8, 0_u32..120, 0_u32..600).prop_map(
        |((queue, requests, kv), min, more, up_window, down_window)| Scaling {
            bounds: Bounds {
                min,
                max: min + more,
            },
            up_window,
            down_window,
            ..scaling(queue, requests, Some(kv))
        },
    )
}

fn any_history() -> impl Strategy<Value = Vec<Load>> {
    let entry = (any_load(), 5_i64..40);
    prop::collection::vec(entry, 0..60).prop_map(|entries| {
        let total: i64 = entries.iter().map(|(_, later)| later).sum();
        let (mut second, mut counted) = (-total, 0);
        let entries = entries.into_iter();
        let entries = entries.map(|((pods, silent, running, waiting, kv, requests), later)| {
            second += later;
            counted += requests;
            Load {
                at: at(second),
                pods,
                silent,
                running,
                waiting,
                kv_cache_usage: kv,
                requests: counted,
            }
        });
        entries.collect()
    })
}

/// Seconds from an entry until now.
fn age(load: &Load) -> i64 {
    at(0).as_second() - load.at.as_second()
}

proptest! {
    #[test]
    fn no_choice_leaves_the_bounds(scaling in any_scaling(), loads in any_history(), current in 1_i32..20) {
        let replicas = chosen(&scaling, &loads, current);
        prop_assert!((scaling.bounds.min..=scaling.bounds.max).contains(&replicas));
    }

    /// A pod goes only when the whole window was seen, every pod answered all through it, and none of its moments needed that pod.
    #[test]
    fn a_pod_goes_only_when_no_moment_of_the_window_needed_it(scaling in any_scaling(), loads in any_history(), current in 1_i32..20) {
        let bounds = Bounds { min: 1, max: 1_000_000 };
        let scaling = Scaling { bounds, ..scaling };
        let replicas = chosen(&scaling, &loads, current);
        if replicas < current {
            let window = i64::from(scaling.down_window);
            prop_assert!(age(&loads[0]) >= window);
            let at_once = Scaling { up_window: 0, down_window: 0, ..scaling.clone() };
            for (index, load) in loads.iter().enumerate().filter(|(_, load)| age(load) <= window) {
                prop_assert!(load.silent == 0 && load.pods > 0);
                // Taken alone it asks for no more than is left.
                let alone = choose(&at_once, &loads[..=index], current, load.at);
                prop_assert!(alone.replicas <= replicas);
            }
        }
    }

    /// The newest load alone, heavier in any way: never fewer pods.
    #[test]
    fn more_load_never_asks_for_fewer_pods(
        scaling in any_scaling(), loads in any_history(), current in 1_i32..20,
        waiting in 0.0..100.0, kv in 0.0..4.0, requests in 0_u64..1000
    ) {
        prop_assume!(!loads.is_empty());
        let mut heavier = loads.clone();
        let last = heavier.last_mut().unwrap();
        last.waiting += waiting;
        last.kv_cache_usage += kv;
        last.requests += requests;
        prop_assert!(chosen(&scaling, &heavier, current) >= chosen(&scaling, &loads, current));
    }

    /// As long as nothing waits longer than is allowed, more running requests never ask for fewer pods either.
    #[test]
    fn more_running_requests_never_ask_for_fewer_pods(
        pods in 1_u32..8, running in 0.0..64.0, more in 0.0..64.0, share in 0.0..1.0, target in 1.0..50.0, current in 1_i32..20
    ) {
        let scaling = scaling(Some(target), None, None);
        let of = |running: f64| history(1, |second| Load {
            running,
            waiting: share * target * f64::from(pods),
            ..load(second, pods)
        });
        prop_assert!(chosen(&scaling, &of(running + more), current) >= chosen(&scaling, &of(running), current));
    }

    /// A load that stays as it is comes to rest: what was chosen is chosen again.
    #[test]
    fn a_steady_load_is_answered_once(kv in 0.0..8.0, target in 0.05..1.0, current in 1_i32..10) {
        let scaling = scaling(None, None, Some(target));
        let loads = history(40, |second| Load { kv_cache_usage: kv, ..load(second, 10) });
        let first = chosen(&scaling, &loads, current);
        prop_assert_eq!(chosen(&scaling, &loads, first), first);
    }
}
