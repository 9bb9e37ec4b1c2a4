//! The arithmetic of a trial: pods of a step, the weight that they achieve, when a verdict is due and when time is up.

use std::time::Duration;

use jiff::Timestamp;
use mixquant_crds::status::{RolloutStage, RolloutStatus};
use serde::Serialize;

use crate::action::Window;
use crate::places::{self, Split};
use crate::validate::{Rollout, Step};

/// What a gateway gives the canary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Share {
    /// Percent of people's requests; stable gets the rest.
    pub weight: i32,
    /// Percent of stable's requests that are copied to the canary, beside weight 0; nobody gets its answers to them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mirror: Option<i32>,
}

impl std::fmt::Display for Share {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.mirror {
            None => write!(to, "{} %", self.weight),
            Some(mirror) => write!(to, "copies of {mirror} %"),
        }
    }
}

/// Pods that take about `weight` percent of the traffic beside `stable` pods: `weight / (100 - weight) * stable`, rounded, at least 1.
pub fn replicas(weight: i32, stable: i32) -> i32 {
    let weight = weight.clamp(1, 99);
    let rest = 100 - weight;
    ((weight * stable + rest / 2) / rest).max(1)
}

/// Pods that carry `weight` percent of what `stable` pods carry: rounded up, so that none carries more than a pod of stable's did.
pub fn replicas_of_share(weight: i32, stable: i32) -> i32 {
    ((weight.clamp(1, 100) * stable + 99) / 100).max(1)
}

/// Percent of the ready pods that are the canary's, rounded; with a plain Service their share of the traffic.
pub fn achieved_weight(canary_ready: i32, stable_ready: i32) -> i32 {
    let all = canary_ready + stable_ready;
    if all <= 0 {
        return 0;
    }
    (canary_ready * 100 + all / 2) / all
}

/// The steps from the first to the one that a trial is at. An index that no step has (a forged status) is the last step.
fn so_far<'a>(rollout: &'a Rollout, at: &RolloutStatus) -> &'a [Step] {
    let index = usize::try_from(at.step).unwrap_or(0);
    let count = (index + 1).min(rollout.steps.len());
    &rollout.steps[..count]
}

/// The step that a trial is at.
pub fn step(rollout: &Rollout, at: &RolloutStatus) -> Step {
    *so_far(rollout, at)
        .last()
        .expect("validate refuses a rollout without steps")
}

/// Whether the step after `index` exists.
pub fn has_next(rollout: &Rollout, index: i32) -> bool {
    usize::try_from(index).is_ok_and(|index| index + 1 < rollout.steps.len())
}

/// Pods of one step, beside `stable` pods; a pause asks for none.
fn pods(rollout: &Rollout, step: &Step, stable: i32) -> Option<i32> {
    match *step {
        Step::Weight {
            replicas: Some(replicas),
            ..
        }
        | Step::Mirror {
            replicas: Some(replicas),
            ..
        }
        | Step::Replicas { replicas, .. } => Some(replicas),
        Step::Mirror { percent, .. } => Some(replicas_of_share(percent, stable)),
        Step::Weight { weight, .. } if rollout.routed => Some(replicas_of_share(weight, stable)),
        Step::Weight { weight, .. } => Some(replicas(weight, stable)),
        Step::Pause { .. } => None,
    }
}

/// Pods that the canary has at the last of `steps`, the first ones of the rollout, beside `stable` pods. Before its first share it waits
/// with the pods of that share; pods under judgement are never taken away.
pub fn size_after(rollout: &Rollout, steps: &[Step], stable: i32) -> i32 {
    let pods = |step| pods(rollout, step, stable);
    let so_far = steps.iter().filter_map(pods).max();
    let first = || rollout.steps.iter().find_map(pods);
    so_far.or_else(first).unwrap_or(1)
}

/// Pods that the canary should have now beside all `stable` pods, if they fit.
pub fn wanted(rollout: &Rollout, at: &RolloutStatus, stable: i32) -> i32 {
    let of_steps = size_after(rollout, so_far(rollout, at), stable);
    match at.stage {
        RolloutStage::Starting if at.waived.is_some() => stable,
        RolloutStage::Starting | RolloutStage::Stepping => of_steps,
        RolloutStage::Promoting => of_steps.max(stable),
        RolloutStage::RollingBack => 0,
    }
}

/// The most pods that a canary comes to want.
pub fn peak(rollout: &Rollout, stable: i32) -> i32 {
    size_after(rollout, &rollout.steps, stable).max(stable)
}

fn split(rollout: &Rollout, at: &RolloutStatus, stable: i32) -> Split {
    places::split(wanted(rollout, at, stable), stable, &at.room)
}

/// Pods that the canary should have now, beside `stable` pods wanted.
pub fn size(rollout: &Rollout, at: &RolloutStatus, stable: i32) -> i32 {
    split(rollout, at, stable).canary
}

/// Pods that stable should have now, of `stable` wanted: fewer where it has made room.
pub fn stable_size(rollout: &Rollout, at: &RolloutStatus, stable: i32) -> i32 {
    split(rollout, at, stable).stable
}

/// Whether nothing runs beside the canary: it took the one place that there is.
pub fn is_alone(rollout: &Rollout, at: &RolloutStatus, stable: i32) -> bool {
    stable_size(rollout, at, stable) == 0
}

/// Whether people get the canary's answers: not before the first share. A pause before it is a dark start, unless stable has made room.
pub fn shares_traffic(rollout: &Rollout, at: &RolloutStatus) -> bool {
    match at.stage {
        // Where copies are asked for first, nobody is to get an answer before they were judged.
        RolloutStage::Stepping if at.room.is_empty() || (mirrors(rollout) && keeps_one(at)) => {
            let mut steps = so_far(rollout, at).iter();
            steps.any(|step| matches!(step, Step::Weight { .. } | Step::Replicas { .. }))
        }
        // Stable has made room, and whatever runs serves; or the canary takes over.
        RolloutStage::Stepping | RolloutStage::Promoting => true,
        RolloutStage::Starting | RolloutStage::RollingBack => false,
    }
}

/// Whether the rollout begins with copies of requests.
pub fn mirrors(rollout: &Rollout) -> bool {
    let mut steps = rollout.steps.iter();
    steps.any(|step| matches!(step, Step::Mirror { .. }))
}

/// Whether stable, which has made room, keeps a pod beside the canary. Where copies come first no other trial begins; a forged status may
/// say otherwise, and then somebody has to serve.
fn keeps_one(at: &RolloutStatus) -> bool {
    at.room.get(1).is_some_and(|beside_one| *beside_one > 0)
}

/// Percent of stable's requests that are copied to the canary now: from a step that mirrors until the first share.
pub fn copies(rollout: &Rollout, at: &RolloutStatus) -> Option<i32> {
    if at.stage != RolloutStage::Stepping || shares_traffic(rollout, at) {
        return None;
    }
    let mut back = so_far(rollout, at).iter().rev();
    back.find_map(|step| match *step {
        Step::Mirror { percent, .. } => Some(percent),
        Step::Weight { .. } | Step::Replicas { .. } | Step::Pause { .. } => None,
    })
}

/// Whether requests reach the canary, people's or copies of them: there is something to judge it by.
pub fn is_reached(rollout: &Rollout, at: &RolloutStatus) -> bool {
    shares_traffic(rollout, at) || copies(rollout, at).is_some()
}

/// What a gateway should give the canary now, beside `stable` pods wanted.
pub fn asked_share(rollout: &Rollout, at: &RolloutStatus, stable: i32) -> Share {
    Share {
        weight: asked_weight(rollout, at, stable),
        mirror: copies(rollout, at),
    }
}

fn asked_weight(rollout: &Rollout, at: &RolloutStatus, stable: i32) -> i32 {
    if !shares_traffic(rollout, at) {
        return 0;
    }
    if is_alone(rollout, at, stable) {
        return 100;
    }
    let weight = |step: &Step| match *step {
        Step::Weight { weight, .. } => Some(weight),
        Step::Mirror { .. } | Step::Replicas { .. } | Step::Pause { .. } => None,
    };
    let steps = match at.stage {
        // Whatever step a forged status names: who takes over has passed them all.
        RolloutStage::Promoting => rollout.steps.as_slice(),
        RolloutStage::Starting | RolloutStage::Stepping | RolloutStage::RollingBack => {
            so_far(rollout, at)
        }
    };
    let so_far = steps.iter().filter_map(weight).max();
    // Where stable has made room there is no dark start.
    let first = || rollout.steps.iter().find_map(weight);
    so_far.or_else(first).unwrap_or(0)
}

/// Whether this step's time runs: where a gateway splits the traffic, since it was seen to have taken the step's share.
pub fn is_shifted(rollout: &Rollout, at: &RolloutStatus) -> bool {
    !rollout.routed || at.shifted
}

/// The samples that a verdict of this step may rest on begin here.
pub fn window_start(rollout: &Rollout, at: &RolloutStatus) -> Timestamp {
    later(at.step_started_at.0, rollout.warm_up)
}

/// What is to be sampled for the trial; nothing while no request reaches the canary, or while nothing is judged.
pub fn window(rollout: &Rollout, at: &RolloutStatus, stable: &str, canary: &str) -> Option<Window> {
    let judged = is_reached(rollout, at) && at.waived.is_none() && is_shifted(rollout, at);
    judged.then(|| Window {
        since: window_start(rollout, at),
        revisions: [stable.to_owned(), canary.to_owned()],
    })
}

/// When the next verdict is due: an interval after the window began, then an interval after each verdict.
pub fn verdict_due(rollout: &Rollout, at: &RolloutStatus) -> Timestamp {
    let start = window_start(rollout, at);
    let last = at.verdict.as_ref().map_or(start, |verdict| verdict.at.0);
    later(last.max(start), rollout.interval)
}

/// When the step has lasted as long as it must; `None` in a pause that only a person ends.
pub fn held_until(rollout: &Rollout, at: &RolloutStatus) -> Option<Timestamp> {
    let seconds = match step(rollout, at) {
        Step::Weight { hold, .. } | Step::Mirror { hold, .. } | Step::Replicas { hold, .. } => hold,
        Step::Pause { .. } if at.released => 0,
        Step::Pause { duration } => duration?,
    };
    Some(later(at.step_started_at.0, seconds))
}

/// Whether the trial waits in a pause among its steps.
pub fn pauses(rollout: &Rollout, at: &RolloutStatus, now: Timestamp) -> bool {
    at.stage == RolloutStage::Stepping
        && matches!(step(rollout, at), Step::Pause { .. })
        && held_until(rollout, at).is_none_or(|until| now < until)
}

/// When the stage or step has failed by taking too long; `None` while a person is waited for. A pause with a duration does not count.
pub fn deadline(rollout: &Rollout, at: &RolloutStatus) -> Option<Timestamp> {
    if at.paused.is_some() {
        return None;
    }
    let from = match (at.stage, step(rollout, at)) {
        (RolloutStage::Stepping, Step::Pause { .. }) => held_until(rollout, at)?,
        _ => at.step_started_at.0,
    };
    Some(later(from, rollout.progress_deadline))
}

/// How long until `then`, at least one second: a pass that came a moment early is not repeated at once.
pub fn until(then: Timestamp, now: Timestamp) -> Duration {
    let seconds = (then.as_second() - now.as_second()).max(1);
    Duration::from_secs(seconds.unsigned_abs())
}

/// `seconds` after `at`; the end of time when there is no such moment.
pub fn later(at: Timestamp, seconds: u32) -> Timestamp {
    at.checked_add(jiff::SignedDuration::from_secs(i64::from(seconds)))
        .unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canary_pods_are_the_nearest_whole_number_and_at_least_one() {
        let table = [
            (10, 1, 1),
            (10, 2, 1),
            (10, 9, 1),
            (10, 18, 2),
            (20, 4, 1),
            (50, 1, 1),
            (50, 2, 2),
            (50, 1000, 1000),
            (80, 2, 8),
            (1, 1000, 10),
            (99, 1000, 99_000),
        ];
        for (weight, stable, expected) in table {
            assert_eq!(replicas(weight, stable), expected, "{weight} % of {stable}");
        }
    }

    #[test]
    fn a_share_by_a_gateway_needs_as_many_pods_as_carry_it() {
        let table = [
            (1, 1, 1),
            (10, 2, 1),
            (50, 2, 1),
            (51, 2, 2),
            (50, 3, 2),
            (10, 20, 2),
            (99, 10, 10),
        ];
        for (weight, stable, expected) in table {
            assert_eq!(
                replicas_of_share(weight, stable),
                expected,
                "{weight} % of {stable}"
            );
        }
    }

    #[test]
    fn a_rising_weight_never_takes_pods_away() {
        for stable in 1..60 {
            for weight in 1..99 {
                assert!(replicas(weight, stable) <= replicas(weight + 1, stable));
            }
        }
    }

    #[test]
    fn the_achieved_weight_is_the_share_of_ready_pods() {
        assert_eq!(achieved_weight(1, 2), 33);
        assert_eq!(achieved_weight(2, 2), 50);
        assert_eq!(achieved_weight(0, 2), 0);
        assert_eq!(achieved_weight(0, 0), 0);
        assert_eq!(achieved_weight(3, 0), 100);
    }

    #[test]
    fn a_wait_is_at_least_one_second() {
        let now = Timestamp::UNIX_EPOCH;
        assert_eq!(until(now, now), Duration::from_secs(1));
        assert_eq!(until(later(now, 90), now), Duration::from_secs(90));
    }
}
