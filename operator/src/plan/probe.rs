//! When are probes sent? In each interval of a trial's window, while somebody needs them: users are too few for the gates, or answers
//! are to be compared and not all are known. Called by `plan`; the shell sends what is asked for here and nothing else.
//!
//! It promotes nothing and writes nothing: probes are samples, and losing them leaves fewer samples.

use jiff::Timestamp;
use mixquant_crds::MixQuantServiceStatus;

use super::World;
use crate::action::{ProbeRound, Window};
use crate::canary;
use crate::probed::Probed;
use crate::revision::seconds_between;
use crate::samples::{Series, TrackSamples, Value};
use crate::validate::{Kind, kind};

/// A round may take an interval, within these bounds.
const SECONDS: (u32, u32) = (10, mixquant_crds::probe::MAX_SECONDS);

/// The round that is due now, of the trial that `memory` tells; `None` when none is.
pub(super) fn round(
    world: &World<'_>,
    memory: &MixQuantServiceStatus,
    window: Option<&Window>,
) -> Option<ProbeRound> {
    let requests = world.valid.probes?;
    let (canary, at, window) = (memory.canary.as_ref()?, memory.rollout.as_ref()?, window?);
    // Baselines first: what is counted before them is lost.
    if world.samples.since != Some(window.since) {
        return None;
    }
    let none = Probed::default();
    let probed = Some(&world.samples.probed);
    let probed = probed.filter(|probed| probed.since == Some(window.since));
    let probed = probed.unwrap_or(&none);
    let interval = world.valid.rollout.interval;
    if probed.running || !is_due(probed.began_at, window.since, interval, world.now) {
        return None;
    }
    let alone = canary::is_alone(&world.valid.rollout, at, world.valid.replicas);
    let compares = !alone && compares(world) && !probed.is_whole();
    (compares || is_idle(world, window, alone)).then(|| ProbeRound {
        window: window.clone(),
        artifact: canary.artifact_digest.clone(),
        first: probed.rounds.wrapping_mul(requests),
        requests,
        seconds: interval.clamp(SECONDS.0, SECONDS.1),
        alone,
    })
}

/// Whether a gate compares answers.
fn compares(world: &World<'_>) -> bool {
    let mut gates = world.valid.gates.iter();
    gates.any(|gate| kind(gate.metric) == Kind::Pairs)
}

/// One round an interval, counted from when the window began.
fn is_due(began: Option<Timestamp>, since: Timestamp, interval: u32, now: Timestamp) -> bool {
    let number = |at| seconds_between(since, at).div_euclid(i64::from(interval.max(1)));
    began.is_none_or(|began| number(began) < number(now))
}

/// Whether users send a track fewer requests than its gates need, or none lately.
fn is_idle(world: &World<'_>, window: &Window, alone: bool) -> bool {
    let counted = |kind| matches!(kind, Kind::Distribution | Kind::Share | Kind::Count);
    let gates = world.valid.gates.iter();
    let gates = gates.filter(|gate| counted(kind(gate.metric)));
    let needed = gates.map(|gate| gate.min_samples).max().unwrap_or(0);
    let [stable, canary] = &window.revisions;
    let tracks = [Some(canary), Some(stable).filter(|_| !alone)];
    tracks.into_iter().flatten().any(|revision| {
        let track = world.samples.tracks.get(revision);
        track.is_none_or(|track| {
            let age = track
                .grew_at
                .map_or(i64::MAX, |at| seconds_between(at, world.now));
            users(track) < needed || age > i64::from(world.valid.rollout.interval)
        })
    })
}

/// Requests of users that were answered.
fn users(track: &TrackSamples) -> u64 {
    let count = |series| match track.values.get(&series) {
        Some(Value::Count(count)) => *count,
        Some(Value::Histogram(_) | Value::Level(_)) | None => 0,
    };
    count(Series::Answered).saturating_sub(count(Series::Probes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_round_is_due_in_each_interval_of_the_window() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let due = |began: Option<i64>, now| is_due(began.map(at), at(100), 15, at(now));
        assert!(due(None, 100));
        assert!(!due(Some(100), 114));
        assert!(due(Some(100), 115));
        assert!(!due(Some(116), 129));
        assert!(due(Some(116), 130), "by the interval, not by the round");
    }
}
