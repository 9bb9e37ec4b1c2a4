//! How many pods does the load need? From the load of the last minutes, the targets and the bounds to a number with its reason. Pure; asked by `plan`.
//!
//! Sums over pods are compared with what one pod may carry, so pods that are still starting ask for no more of their kind. What is not known
//! takes no pod away: pods that should be there and are not count as fully used; pods that did not answer make the load a lower bound, which may add pods and nothing else; a history shorter than
//! the window (after a restart of the operator) or with a gap in it takes nothing away either. It must never look at anything but its
//! arguments, and never leave the bounds.

use jiff::Timestamp;

use crate::load::Load;
use crate::revision::seconds_between;
use crate::validate::{Scaling, Targets};

/// Seconds between two looks.
pub const LOOK: u32 = 15;
/// Seconds over which requests are counted: a shorter time would be noise.
const RATE: i64 = 60;
/// Entries farther apart leave a time of which nothing is known; a newest entry older than this says nothing of now.
const GAP: i64 = 60;
/// Without an entry that tells everything for so many seconds, nothing is known.
const BLIND: i64 = 300;
/// A need this near to the pods that there are changes nothing, or a load at a target would add and take away pods for ever.
const TOLERANCE: f64 = 0.1;

/// How many pods there should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The number, within the bounds.
    pub replicas: i32,
    /// The numbers that decided it.
    pub why: String,
}

/// Seconds of load that decisions look back at.
pub fn keep(scaling: &Scaling) -> u32 {
    let window = scaling.up_window.max(scaling.down_window);
    let longest = i64::from(window).max(BLIND);
    u32::try_from(longest + RATE + GAP).unwrap_or(u32::MAX)
}

/// What one entry of the history asks for.
struct Need {
    /// Pods at least.
    pods: i32,
    /// Nothing was missing: these pods are enough.
    complete: bool,
    /// The numbers.
    why: String,
}

/// How many pods `current` ones should become; the same number where nothing is to change.
pub fn choose(scaling: &Scaling, loads: &[Load], current: i32, now: Timestamp) -> Choice {
    let bounds = scaling.bounds_at(now);
    let within = |replicas: i32, why: String| {
        let replicas = bounds.nearest(replicas);
        Choice { replicas, why }
    };
    let wanted = up(scaling, loads, current, now).or_else(|| down(scaling, loads, current, now));
    let Some(need) = wanted else {
        return within(
            current,
            format!("the bounds are {} to {}", bounds.min, bounds.max),
        );
    };
    let limit = match need.pods {
        pods if pods > bounds.max => format!(", at most {} are allowed", bounds.max),
        pods if pods < bounds.min => format!(", at least {} are asked for", bounds.min),
        _ => String::new(),
    };
    within(need.pods, format!("{}{limit}", need.why))
}

/// Whether the load has not been known for so long that somebody should look.
pub fn is_blind(scaling: &Scaling, loads: &[Load], now: Timestamp) -> bool {
    let old = |load: &Load| seconds_between(load.at, now) >= BLIND;
    let lately = || (0..loads.len()).filter(|index| !old(&loads[*index]));
    // The first entries of a new process cannot tell a rate.
    loads.first().is_some_and(old)
        && lately().all(|index| !is_complete(&scaling.targets, loads, index))
}

/// More pods, when they were needed all through the window.
fn up(scaling: &Scaling, loads: &[Load], current: i32, now: Timestamp) -> Option<Need> {
    let window = covered(loads, scaling.up_window, now)?;
    let needs = window.map(|index| need(&scaling.targets, loads, index, current));
    let least = needs.min_by_key(|need| need.pods)?;
    (least.pods > current).then_some(least)
}

/// Fewer pods, when none of them was needed at any time of the window.
fn down(scaling: &Scaling, loads: &[Load], current: i32, now: Timestamp) -> Option<Need> {
    let window = covered(loads, scaling.down_window, now)?;
    let mut most: Option<Need> = None;
    for index in window {
        let mut need = need(&scaling.targets, loads, index, current);
        if !need.complete {
            return None;
        }
        // A load that few pods carry looks small: those that are missing would carry their part of it.
        let there = i32::try_from(loads[index].pods).unwrap_or(i32::MAX);
        need.pods = need.pods.saturating_add((current - there).max(0));
        if most.as_ref().is_none_or(|most| need.pods > most.pods) {
            most = Some(need);
        }
    }
    most.filter(|most| most.pods < current)
}

/// The entries of the last `window` seconds and the one before them, newest first; `None` when there is a time in it of which nothing is known.
fn covered(
    loads: &[Load],
    window: u32,
    now: Timestamp,
) -> Option<impl Iterator<Item = usize> + use<>> {
    let mut later = now;
    for (index, load) in loads.iter().enumerate().rev() {
        if load.at > later || seconds_between(load.at, later) > GAP {
            return None;
        }
        later = load.at;
        if seconds_between(load.at, now) >= i64::from(window) {
            return Some((index..loads.len()).rev());
        }
    }
    None
}

fn is_complete(targets: &Targets, loads: &[Load], index: usize) -> bool {
    let load = &loads[index];
    let counted = targets.requests_per_second.is_none() || rate(loads, index).is_some();
    load.silent == 0 && load.pods > 0 && counted
}

/// Requests a second until the entry; `None` while too few entries are known.
fn rate(loads: &[Load], index: usize) -> Option<f64> {
    let newest = &loads[index];
    let mut earlier = loads[..index].iter().rev();
    let first = earlier.find(|load| seconds_between(load.at, newest.at) >= RATE)?;
    let seconds = seconds_between(first.at, newest.at);
    let requests = newest.requests.saturating_sub(first.requests);
    Some(to_f64(requests) / to_f64(seconds.unsigned_abs()))
}

fn need(targets: &Targets, loads: &[Load], index: usize, current: i32) -> Need {
    let load = &loads[index];
    let pods = f64::from(load.pods.max(1));
    let queue = targets.queue_length.map(|target| {
        // Spread over more pods, as many run on each as do now, and what is beyond that waits.
        let needed = (load.running + load.waiting) / (load.running / pods + target);
        let (waiting, running) = (load.waiting, load.running);
        (
            needed,
            format!("{waiting:.0} requests wait and {running:.0} run, {target} may wait a pod"),
        )
    });
    let requests = targets.requests_per_second.zip(rate(loads, index));
    let requests = requests.map(|(target, rate)| {
        (
            rate / target,
            format!("{rate:.2} requests a second, {target} a pod"),
        )
    });
    let kv_cache = targets.kv_cache_usage.map(|target| {
        let used = load.kv_cache_usage;
        let (percent, of) = (used * 100.0, target * 100.0);
        (
            used / target,
            format!("KV caches hold {percent:.0} % of one pod's, {of:.0} % a pod"),
        )
    });
    let needs = [queue, requests, kv_cache].into_iter().flatten();
    let most = needs.max_by(|one, other| one.0.total_cmp(&other.0));
    let (needed, why) = most.unwrap_or((0.0, String::new()));
    Need {
        pods: whole(needed, current),
        complete: is_complete(targets, loads, index),
        why: format!("{why} ({} pods)", load.pods),
    }
}

/// Whole pods for a need; those that there are, where it is near enough.
fn whole(needed: f64, current: i32) -> i32 {
    let there = f64::from(current);
    if (needed / there - 1.0).abs() <= TOLERANCE {
        return current;
    }
    #[expect(clippy::cast_possible_truncation, reason = "between 0 and a million")]
    let pods = (needed - 1e-9).ceil().clamp(0.0, 1e6) as i32;
    pods
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts and seconds of minutes are far below 2^53"
)]
fn to_f64(count: u64) -> f64 {
    count as f64
}
