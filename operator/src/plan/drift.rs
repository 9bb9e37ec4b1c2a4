//! Is live traffic still what calibration saw? Judges what stable's pods count at rest, remembers what it finds, and opens a
//! recalibration where the spec asks for it.
//!
//! A recalibration is one more round: the inputs of the calibration are others from the next pass on, so a Job runs, and what it makes goes
//! the way of every artifact. Nothing is opened while anything else is under way, after a failure that stands, before the cool-down is
//! over, or when the round before gave the artifact that it was to replace.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mixquant_crds::drift::{DriftFinding, DriftStatus, Recalibration, RecalibrationCause};
use mixquant_crds::report::PROMPT_LENGTHS;
use mixquant_crds::status::{CalibrationRecord, Reason};

use super::{Decisions, Measured, World};
use crate::action::Metric;
use crate::bounds::as_f64;
use crate::canary::later;
use crate::histogram::Histogram;
use crate::observed::FrozenRevision;
use crate::samples::{Series, TrackSamples, Value};
use crate::validate::Drift;

/// A bound that was crossed counts as crossed until its number is below this part of it.
const CALM: f64 = 0.8;

/// How often a window is looked at: what was counted before its first look and after its last one is not in it.
const LOOKS: u32 = 4;

/// A number that is watched, in percent.
struct Signal {
    /// The label `signal` of the metric.
    name: &'static str,
    says: &'static str,
    percent: f64,
    limit: f64,
}

impl Signal {
    fn crossed(&self) -> bool {
        self.percent > self.limit
    }

    fn describe(&self) -> String {
        let Self {
            says,
            percent,
            limit,
            ..
        } = self;
        format!("{percent:.2} % of {says} (limit {limit} %)")
    }
}

/// Looks at the samples of this pass, and opens a recalibration where one is due: only in a pass that is `idle`, so that what an earlier
/// revision leaves is gone by then and its artifact can go too.
pub(super) fn watch(
    world: &World<'_>,
    decisions: &mut Decisions,
    (measured, target): (&Measured, Option<&FrozenRevision>),
    idle: bool,
) {
    let Some(drift) = &world.valid.drift else {
        if let Some(memory) = &mut decisions.memory.drift {
            memory.finding = None;
        }
        return;
    };
    let Some(record) = at_rest(decisions, measured, target) else {
        return;
    };
    decisions
        .wake
        .push(Duration::from_secs((drift.window / LOOKS).max(1).into()));
    let signals = signals(world, drift, decisions, record);
    let crossed = signals.iter().any(Signal::crossed);
    if !signals.is_empty() {
        find(world, decisions, &signals);
    }
    if idle && drift.recalibrates && !world.valid.rollout.paused {
        open(world, decisions, drift, crossed);
    }
}

/// What was measured of the artifact that serves; nothing unless it is what the spec asks for and nothing else is under way.
fn at_rest<'a>(
    decisions: &Decisions,
    measured: &'a Measured,
    target: Option<&FrozenRevision>,
) -> Option<&'a CalibrationRecord> {
    let memory = &decisions.memory;
    let stable = memory.stable.as_ref()?;
    let alone = memory.canary.is_none() && memory.undo.is_none();
    let serves = target.is_some_and(|target| target.revision == stable.revision);
    match measured {
        Measured::Accepted { record, .. } if alone && serves => Some(record),
        Measured::Accepted { .. }
        | Measured::Waiting { .. }
        | Measured::Invalid { .. }
        | Measured::Running { .. }
        | Measured::Failed { .. }
        | Measured::Rejected { .. } => None,
    }
}

/// The numbers that can be told; none of too few prompts, or of pods that could not be read.
fn signals(
    world: &World<'_>,
    drift: &Drift,
    decisions: &Decisions,
    record: &CalibrationRecord,
) -> Vec<Signal> {
    let stable = decisions.memory.stable.as_ref();
    let track = stable.and_then(|stable| world.samples.tracks.get(&stable.revision));
    let Some(track) = track.filter(|track| track.problems.is_empty() && track.pods > 0) else {
        return Vec::new();
    };
    let Some(Value::Histogram(lengths)) = value(track, Series::PromptTokens) else {
        return Vec::new();
    };
    if lengths.count() < drift.min_prompts {
        return Vec::new();
    }
    let share = |beyond, rows: &[Series]| share(track, beyond, rows);
    let all = [
        (
            "Activations",
            "rows of activations beyond calibration's range",
            drift.max_activations,
            share(Series::ActivationsBeyond, &[Series::Activations]),
        ),
        (
            "KvCache",
            "scales of keys and values beyond calibration's range",
            drift.max_kv,
            share(Series::KvBeyond, &[Series::KvRows]),
        ),
        (
            "ValveFallback",
            "quantised prompts read again by the safety valve",
            drift.max_fallbacks,
            share(
                Series::ValveFallbacks,
                &[Series::ValveFallbacks, Series::QuantisedPrefills],
            ),
        ),
        (
            "PromptLength",
            "prompts of another length than calibration's texts",
            drift.max_length_shift,
            shift(lengths, &record.report.prompt_lengths),
        ),
    ];
    all.into_iter()
        .filter_map(|(name, says, limit, percent)| {
            Some(Signal {
                name,
                says,
                percent: percent?,
                limit: limit?,
            })
        })
        .collect()
}

fn value(track: &TrackSamples, series: Series) -> Option<&Value> {
    let plain = !track.faults.contains_key(&series);
    track.values.get(&series).filter(|_| plain)
}

/// Percent of `of` that `what` is; nothing of nothing.
fn share(track: &TrackSamples, what: Series, of: &[Series]) -> Option<f64> {
    let count = |series| value(track, series)?.count();
    let what = count(what)?;
    let mut all = 0_u64;
    for series in of {
        all = all.saturating_add(count(*series)?);
    }
    (all > 0).then(|| 100.0 * as_f64(what) / as_f64(all))
}

/// The total variation distance of two distributions of lengths, in percent; nothing where the lengths are counted by other bounds.
fn shift(lengths: &Histogram, calibrated: &[u64]) -> Option<f64> {
    let expected: u64 = calibrated.iter().sum();
    let same =
        lengths.bounds == PROMPT_LENGTHS.map(f64::from) && lengths.counts.len() == calibrated.len();
    if !same || expected == 0 || lengths.count() == 0 {
        return None;
    }
    let part = |count: &u64, all: u64| as_f64(*count) / as_f64(all);
    let pairs = lengths.counts.iter().zip(calibrated);
    let apart: f64 = pairs
        .map(|(live, calibrated)| (part(live, lengths.count()) - part(calibrated, expected)).abs())
        .sum();
    Some(50.0 * apart)
}

/// Remembers and tells what changed.
fn find(world: &World<'_>, decisions: &mut Decisions, signals: &[Signal]) {
    let memory = decisions.memory.drift.get_or_insert_default();
    let before = memory.finding.as_ref().map(|finding| finding.drifted);
    let crossed = signals.iter().any(Signal::crossed);
    let calm = signals
        .iter()
        .all(|signal| signal.percent <= CALM * signal.limit);
    let drifted = crossed || (before == Some(true) && !calm);
    if before == Some(drifted) {
        return;
    }
    let told: Vec<String> = signals.iter().map(Signal::describe).collect();
    let message = told.join(", ");
    memory.finding = Some(DriftFinding {
        drifted,
        at: Time(world.now),
        message: message.clone(),
    });
    if drifted {
        decisions.tell(true, Reason::Drifted, message);
        for signal in signals.iter().filter(|signal| signal.crossed()) {
            let signal = signal.name.to_owned();
            decisions.count(Metric::Drift { signal });
        }
    } else if before.is_some() {
        decisions.tell(false, Reason::WithinRanges, message);
    }
}

/// Opens the next round where one is due.
fn open(world: &World<'_>, decisions: &mut Decisions, drift: &Drift, crossed: bool) {
    let memory = &decisions.memory;
    let Some(stable) = &memory.stable else { return };
    let last = memory.drift.as_ref();
    let last = last.and_then(|drift| drift.recalibration.as_ref());
    if last.is_some_and(|last| last.replaces == stable.artifact_digest) {
        // The round before has given the same artifact: there are no other texts to read.
        return;
    }
    let promoted = memory.promoted.first().map(|promoted| promoted.at.0);
    let since = last.map(|last| last.at.0).into_iter().chain(promoted).max();
    let scheduled = drift.every.zip(since);
    let scheduled = scheduled.map(|(every, since)| later(since, every));
    let allowed = last.map(|last| later(last.at.0, drift.cool_down));
    let cool = allowed.is_none_or(|allowed| world.now >= allowed);
    let due = scheduled.is_some_and(|moment| world.now >= moment);
    let replaces = stable.artifact_digest.clone();
    if !cool || !(crossed || due) {
        for moment in scheduled.into_iter().chain(allowed.filter(|_| crossed)) {
            decisions.wake_at(moment, world.now);
        }
        return;
    }
    let cause = if crossed {
        RecalibrationCause::Drift
    } else {
        RecalibrationCause::Schedule
    };
    let memory = decisions.memory.drift.get_or_insert_default();
    memory.round = memory.round.saturating_add(1);
    memory.recalibration = Some(Recalibration {
        at: Time(world.now),
        cause,
        replaces,
    });
    let why = match cause {
        RecalibrationCause::Drift => "traffic has drifted",
        RecalibrationCause::Schedule => "drift.recalibrateEvery is over",
    };
    let note = format!(
        "recalibration {} is opened: {why}; stable serves until its artifact has passed verification and the canary",
        memory.round
    );
    decisions.tell(false, Reason::Recalibrating, note);
    decisions.count(Metric::Recalibration { cause });
}

/// Which of the data's texts a calibration reads now.
pub(super) fn round(memory: Option<&DriftStatus>) -> i32 {
    memory.map_or(0, |drift| drift.round)
}
