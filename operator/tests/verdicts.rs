//! How often the TPOT gate errs, by simulated rollouts: a window that grows by 50 requests a track and look, until Pass, Fail or the
//! deadline of 40 looks (10 minutes of 15 s), at quantile 0.9 and a regression limit of 25 %.

use jiff::Timestamp;
use mixquant_crds::status::Outcome;
use mixquant_operator::action::Window;
use mixquant_operator::judge::tpot;
use mixquant_operator::samples::{Histogram, Samples, TrackSamples};
use mixquant_operator::validate::{Rollout, TpotGate};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const LOOKS: u32 = 40;
const PER_LOOK: u32 = 50;

/// What a trial of one step came to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Rates {
    passed: u32,
    failed: u32,
    undecided: u32,
    /// Looks until Pass, summed.
    looks: u32,
}

fn bounds() -> Vec<f64> {
    (0..157).map(|power| 0.001 * 1.05_f64.powi(power)).collect()
}

/// Log-normal latencies around 20 ms, `spread` wide.
fn observe(track: &mut Histogram, random: &mut StdRng, slowness: f64, spread: f64) {
    let radius = (-2.0 * (1.0 - random.random::<f64>()).ln()).sqrt();
    let normal = radius * (std::f64::consts::TAU * random.random::<f64>()).cos();
    let latency = 0.020 * slowness * (spread * normal).exp();
    let bucket = track.bounds.partition_point(|bound| *bound < latency);
    track.counts[bucket] += 1;
}

/// One step: the first decided look decides, a Fail at once (`failureLimit` 1).
fn step(random: &mut StdRng, slowness: f64, spread: f64) -> (Outcome, u32) {
    let gate = TpotGate {
        quantile: 0.9,
        max_seconds: None,
        max_ratio: Some(1.25),
    };
    let rollout = Rollout {
        steps: Vec::new(),
        interval: 15,
        min_samples: 50,
        failure_limit: 1,
        warm_up: 0,
        progress_deadline: 600,
    };
    let now = Timestamp::UNIX_EPOCH;
    let window = Window {
        since: now,
        revisions: ["stable".into(), "canary".into()],
    };
    let bounds = bounds();
    let empty = Histogram {
        counts: vec![0; bounds.len() + 1],
        bounds,
    };
    let mut tracks = [empty.clone(), empty];
    for look in 1..=LOOKS {
        for _ in 0..PER_LOOK {
            observe(&mut tracks[0], random, 1.0, spread);
            observe(&mut tracks[1], random, slowness, spread);
        }
        let track = |histogram: &Histogram| TrackSamples {
            tpot: histogram.clone(),
            pods: 1,
            problems: Vec::new(),
        };
        let samples = Samples {
            since: Some(now),
            taken_at: Some(now),
            tracks: [
                ("stable".to_owned(), track(&tracks[0])),
                ("canary".to_owned(), track(&tracks[1])),
            ]
            .into(),
        };
        match tpot(&gate, &rollout, &window, &samples, now).outcome {
            Outcome::Inconclusive => {}
            decided @ (Outcome::Pass | Outcome::Fail) => return (decided, look),
        }
    }
    (Outcome::Inconclusive, LOOKS)
}

#[expect(
    clippy::print_stdout,
    reason = "the measured rates are what this test is for"
)]
fn rates(runs: u32, slowness: f64, spread: f64) -> Rates {
    let mut rates = Rates::default();
    let mut random = StdRng::seed_from_u64(7);
    for _ in 0..runs {
        let (outcome, looks) = step(&mut random, slowness, spread);
        match outcome {
            Outcome::Pass => {
                rates.passed += 1;
                rates.looks += looks;
            }
            Outcome::Fail => rates.failed += 1,
            Outcome::Inconclusive => rates.undecided += 1,
        }
    }
    println!("{slowness} times stable's latency, spread {spread}: {rates:?} of {runs}");
    rates
}

/// Spread 0.2 is what an engine under even load shows, 0.5 a noisy neighbour's.
#[test]
fn a_healthy_canary_passes_in_99_of_100_steps_and_nearly_never_fails() {
    for (spread, most_looks) in [(0.2, 2), (0.35, 6), (0.5, 12)] {
        let rates = rates(400, 1.0, spread);
        assert!(rates.passed >= 396, "spread {spread}: {rates:?}");
        assert!(rates.failed <= 2, "spread {spread}: {rates:?}");
        assert!(
            rates.looks / rates.passed <= most_looks,
            "spread {spread}: {rates:?}"
        );
    }
}

/// A look that is lucky lets a bad canary through one step in some hundreds where latencies are wide; the next step has a window of
/// its own, so three in a row (two steps and the take-over) are what nobody will see.
#[test]
fn a_canary_of_half_again_the_latency_is_never_promoted() {
    for spread in [0.2, 0.35, 0.5] {
        let rates = rates(400, 1.5, spread);
        assert!(rates.passed <= 4, "spread {spread}: {rates:?}");
        assert!(rates.failed >= 390, "spread {spread}: {rates:?}");
        let mut random = StdRng::seed_from_u64(11);
        for trial in 0..400 {
            let promoted = (0..3).all(|_| step(&mut random, 1.5, spread).0 == Outcome::Pass);
            assert!(!promoted, "spread {spread}: trial {trial} is promoted");
        }
    }
}

/// At the limit itself either answer is right half the time; what the samples cannot tell stays undecided and is rolled back.
#[test]
fn a_canary_at_the_limit_is_mostly_undecided() {
    let rates = rates(200, 1.25, 0.2);
    assert!(rates.passed <= 60, "{rates:?}");
    assert!(rates.failed <= 30, "{rates:?}");
}
