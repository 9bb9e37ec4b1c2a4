//! The operator's core in a simulated cluster: thousands of seeded lives of a service, with crashes between any two actions.
//!
//! A failure prints its seed, and after shrinking the happenings and the trace that lead to it. `MIXQUANT_SEEDS=100000` runs longer,
//! `MIXQUANT_SEED=7` runs one.

mod world;

use std::collections::BTreeMap;
use std::env;
use std::num::NonZero;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use world::{Change, End, Failure, Happening, Order, Said, Scenario, run, shrink};

/// The seeds of a test that by default runs `count` of them.
fn seeds(count: u64) -> Range<u64> {
    let number = |name: &str| {
        env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    if let Some(seed) = number("MIXQUANT_SEED") {
        return seed..seed + 1;
    }
    0..number("MIXQUANT_SEEDS").map_or(count, |seeds| seeds * count / 2000)
}

/// Lives every seed, on all cores.
fn each<T: Send>(seeds: Range<u64>, live: impl Fn(u64) -> T + Sync) -> Vec<T> {
    let next = AtomicU64::new(seeds.start);
    let worker = || {
        let mut done = Vec::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return done;
            }
            done.push(live(seed));
        }
    };
    let count = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..count).map(|_| scope.spawn(worker)).collect();
        let joined = workers.into_iter().map(thread::ScopedJoinHandle::join);
        joined
            .flat_map(|done| done.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

/// A run in which a panic is a failure too.
fn life(scenario: &Scenario) -> Result<End, Failure> {
    told_life(scenario).map(|(end, _)| end)
}

/// The same, with what was published in it.
fn told_life(scenario: &Scenario) -> Result<(End, Said), Failure> {
    catch_unwind(AssertUnwindSafe(|| run(scenario))).unwrap_or_else(|_| {
        Err(Failure {
            message: "a panic (see above)".into(),
            trace: Vec::new(),
        })
    })
}

/// Ends the test with the smallest scenario that still fails.
fn report(scenario: &Scenario, failure: Failure) -> ! {
    let first = failure.message.clone();
    let (smallest, failure) = if failure.trace.is_empty() {
        (scenario.clone(), failure)
    } else {
        shrink(scenario, failure)
    };
    panic!(
        "seed {}: {first}\nshrunk to: {}\n{:#?}\ntrace:\n{}",
        scenario.seed,
        failure.message,
        smallest.happenings,
        failure.trace.join("\n")
    );
}

#[expect(clippy::print_stdout, reason = "how much was simulated is a result")]
fn say(what: &str, lives: usize, ends: &BTreeMap<String, usize>) {
    println!("{what}: {lives} lives, no invariant broken; they end {ends:?}");
}

#[test]
fn whatever_happens_no_invariant_breaks_and_the_service_comes_to_rest() {
    let lives = each(seeds(1200), |seed| {
        let scenario = Scenario::chaos(seed);
        let (end, said) = told_life(&scenario).unwrap_or_else(|failure| report(&scenario, failure));
        assert!(
            scenario.is_disturbed() || !end.good || end.phase == "Ready",
            "seed {seed}: a good spec ends {end:?}"
        );
        (end.phase, said)
    });
    let mut ends = BTreeMap::new();
    let mut all = Said::new();
    for (phase, said) in lives {
        *ends.entry(phase).or_default() += 1;
        for (kind, count) in said {
            *all.entry(kind).or_default() += count;
        }
    }
    say("anything at any time", ends.values().sum(), &ends);
    println!("published: {all:?}");
    // A simulation in which something never happens says nothing about it.
    if ends.values().sum::<usize>() >= 1000 {
        let never = HAPPENS.iter().filter(|kind| !all.contains_key(**kind));
        let never: Vec<_> = never.collect();
        assert!(never.is_empty(), "never published: {never:?} of {all:?}");
    }
}

/// What a thousand lives must have seen.
const HAPPENS: [&str; 22] = [
    "Aborted",
    "CalibrationFailed",
    "InsufficientCapacity",
    "InsufficientCapacity and waits",
    "PodsFailing",
    "PrecisionRegression",
    "ProgressDeadlineExceeded",
    "Promoted",
    "Promoted in full",
    "Promoted in the window",
    "RollingOut by copies",
    "RolloutPaused",
    "SLOViolated",
    "SLOViolated by copies",
    "Scaled",
    "abort done",
    "artifact removed",
    "promote done",
    "promote full done",
    "promote refused",
    "retry done",
    "undo done",
];

#[test]
fn crashes_and_stale_reads_change_nothing_about_the_end() {
    let phases = each(seeds(800), |seed| {
        let calm = Scenario::orderly(seed);
        let disturbed = calm.with_crashes();
        let expected = life(&calm).unwrap_or_else(|failure| report(&calm, failure));
        let end = life(&disturbed).unwrap_or_else(|failure| report(&disturbed, failure));
        assert_eq!(end, expected, "seed {seed}: {:#?}", disturbed.happenings);
        assert!(!end.good || end.phase == "Ready", "seed {seed}: {end:?}");
        end.phase
    });
    let mut ends = BTreeMap::new();
    for phase in phases {
        *ends.entry(phase).or_default() += 1;
    }
    let lives = 2 * ends.values().sum::<usize>();
    say(
        "each undisturbed and with crashes and stale reads",
        lives,
        &ends,
    );
}

fn told(happenings: &[Happening]) -> End {
    let scenario = Scenario {
        seed: 1,
        happenings: happenings.iter().map(|happening| (0, *happening)).collect(),
        order: Order::AllFromRest,
        gpus: None,
        traffic: 0,
    };
    life(&scenario).unwrap_or_else(|failure| report(&scenario, failure))
}

#[test]
fn an_operator_upgrade_restarts_no_pod() {
    let before = told(&[]);
    let after = told(&[Happening::UpgradeOperator]);
    assert_eq!(before, after);
}

#[test]
fn a_cleared_status_is_found_again_in_the_world() {
    let before = told(&[Happening::Change(Change::Image(1))]);
    let after = told(&[Happening::Change(Change::Image(1)), Happening::ClearStatus]);
    assert_eq!(
        (before.stable, before.pods, before.traffic),
        (after.stable, after.pods, after.traffic)
    );
    assert_eq!(after.phase, "Ready");
}

#[test]
fn data_that_went_after_their_use_stop_no_pod() {
    let end = told(&[Happening::Change(Change::DataGone)]);
    assert_eq!((end.phase.as_str(), end.pods[0].1), ("Pending", 2));
}

/// Everything made is owned by the service, so its deletion takes all of it; a service on its way out gets nothing new, at whatever
/// moment of its life that is.
#[test]
fn a_deleted_service_gets_nothing_new_and_leaves_nothing() {
    for seed in seeds(200) {
        let mut scenario = Scenario::chaos(seed);
        let last = scenario.happenings.last().map_or(0, |(at, _)| *at);
        let at = i64::try_from(seed).unwrap() * 7 % (last + 60);
        scenario.happenings.retain(|(then, _)| *then < at);
        scenario.happenings.push((at, Happening::Delete));
        let end = life(&scenario).unwrap_or_else(|failure| report(&scenario, failure));
        assert!(
            end.pods.is_empty() && end.traffic == "None",
            "seed {seed}: {end:?}"
        );
    }
}
