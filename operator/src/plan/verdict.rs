//! One verdict of a trial, when it is due: every gate on this pass's samples, put together and remembered with its evidence.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mixquant_crds::rollout::GateMetric;
use mixquant_crds::status::{GateStatus, Outcome, RolloutStage, RolloutStatus, VerdictStatus};

use super::{Decisions, World};
use crate::action::Metric;
use crate::canary;
use crate::judge::{self, Judgement, Look, Verdict, amount};
use crate::revision::seconds_between;
use crate::samples::{Series, TrackSamples, Value};
use crate::validate::Gate;

/// Outside of trials the time per output token is written at most so often.
const QUIET_SECONDS: i64 = 600;
/// And only when it has changed by this part.
const CHANGE: f64 = 0.2;

/// The verdict of this pass; `None` when none is due. Pods that do not all run make it Inconclusive: they would be judged unseen.
pub(super) fn judge(
    world: &World<'_>,
    decisions: &mut Decisions,
    at: &RolloutStatus,
) -> Option<Judgement> {
    let rollout = &world.valid.rollout;
    let due = canary::verdict_due(rollout, at);
    if world.now < due {
        decisions.wake_at(due, world.now);
        return None;
    }
    let memory = &decisions.memory;
    let (stable, canary) = (memory.stable.as_ref()?, memory.canary.as_ref()?);
    let window = canary::window(rollout, at, &stable.revision, &canary.revision)?;
    let look = Look {
        window: &window,
        interval: rollout.interval,
        samples: world.samples,
        killed: killed(world, &canary.revision),
        alone: canary::is_alone(rollout, at, world.valid.replicas),
        now: world.now,
    };
    let gates = world.valid.gates.iter();
    let verdicts: Vec<_> = gates.map(|gate| (gate, judge::gate(gate, &look))).collect();
    let mut judgement = judge::together(&verdicts);
    let wanted = canary::size(rollout, at, world.valid.replicas);
    if judgement.outcome == Outcome::Pass && !world.runs(&canary.revision, wanted) {
        judgement.outcome = Outcome::Inconclusive;
        judgement.message = format!("not all of the canary's {wanted} pods run");
    }
    if judgement.outcome == Outcome::Pass
        && let Some(problem) = super::route_problem(world, &decisions.memory)
    {
        judgement.outcome = Outcome::Inconclusive;
        judgement.message = problem;
    }
    show_tpot(world, decisions, at, &verdicts, judgement.outcome);
    for (gate, verdict) in &verdicts {
        decisions.count(Metric::Verdict {
            gate: gate.name.clone(),
            outcome: verdict.outcome,
        });
    }
    remember(world, decisions, &judgement, verdicts);
    Some(judgement)
}

/// Containers of a revision that the kernel killed for memory.
fn killed(world: &World<'_>, revision: &str) -> u64 {
    let pods = world.observed.pods.iter();
    let killed = pods.filter(|pod| pod.revision == revision && pod.out_of_memory);
    killed.count().try_into().unwrap_or(u64::MAX)
}

/// What stable serves is shown until the canary takes its place.
fn show_tpot(
    world: &World<'_>,
    decisions: &mut Decisions,
    at: &RolloutStatus,
    verdicts: &[(&Gate, Verdict)],
    outcome: Outcome,
) {
    let mut all = verdicts.iter();
    let Some((_, tpot)) = all.find(|(gate, _)| gate.metric == GateMetric::TPOT) else {
        return;
    };
    let shown = match at.stage {
        RolloutStage::Promoting if outcome == Outcome::Pass => tpot.canary,
        RolloutStage::Starting
        | RolloutStage::Stepping
        | RolloutStage::Promoting
        | RolloutStage::RollingBack => tpot.stable,
    };
    if let Some(shown) = shown {
        decisions.memory.tpot = Some(amount(GateMetric::TPOT, shown));
        decisions.memory.tpot_at = Some(Time(world.now));
    }
}

/// Outside of trials: what stable's pods measure lately, when it differs from what is shown by more than [`CHANGE`] and nothing was
/// written for [`QUIET_SECONDS`].
pub(super) fn show_at_rest(world: &World<'_>, decisions: &mut Decisions) {
    let memory = &mut decisions.memory;
    let (None, Some(stable)) = (&memory.canary, &memory.stable) else {
        return;
    };
    let quiet = memory
        .tpot_at
        .as_ref()
        .is_some_and(|at| seconds_between(at.0, world.now) < QUIET_SECONDS);
    let track = world.samples.tracks.get(&stable.revision);
    let Some(measured) = track
        .filter(|_| !quiet)
        .and_then(|track| lately(world, track))
    else {
        return;
    };
    let shown = memory.tpot.as_deref().and_then(|text| {
        let milliseconds: f64 = text.strip_suffix(" ms")?.parse().ok()?;
        Some(milliseconds / 1000.0)
    });
    if shown.is_none_or(|shown| (measured / shown - 1.0).abs() > CHANGE) {
        memory.tpot = Some(amount(GateMetric::TPOT, measured));
        memory.tpot_at = Some(Time(world.now));
    }
}

/// A track's time per output token at the gate's quantile, when it can be told plainly.
fn lately(world: &World<'_>, track: &TrackSamples) -> Option<f64> {
    let mut gates = world.valid.gates.iter();
    let gate = gates.find(|gate| gate.metric == GateMetric::TPOT)?;
    let plain = track.problems.is_empty() && !track.faults.contains_key(&Series::Tpot);
    match track.values.get(&Series::Tpot).filter(|_| plain)? {
        Value::Histogram(histogram) if histogram.count() >= gate.min_samples => {
            let quantile = histogram.quantile(gate.quantile?, 0.95)?;
            Some(quantile.value).filter(|value| value.is_finite())
        }
        Value::Histogram(_) | Value::Count(_) | Value::Level(_) => None,
    }
}

fn remember(
    world: &World<'_>,
    decisions: &mut Decisions,
    judgement: &Judgement,
    verdicts: Vec<(&Gate, Verdict)>,
) {
    let said = VerdictStatus {
        outcome: judgement.outcome,
        at: Time(world.now),
        message: judgement.message.clone(),
        gates: verdicts
            .into_iter()
            .map(|(gate, verdict)| GateStatus {
                name: gate.name.clone(),
                outcome: verdict.outcome,
                on_failure: gate.on_failure,
                message: verdict.message,
            })
            .collect(),
    };
    decisions.verdict = Some(said.clone());
    let Some(at) = &mut decisions.memory.rollout else {
        return;
    };
    at.failed_verdicts = match judgement.outcome {
        Outcome::Pass => 0,
        Outcome::Fail => at.failed_verdicts.saturating_add(1),
        // It neither proves nor clears: the row of failures stands.
        Outcome::Inconclusive => at.failed_verdicts,
    };
    at.verdict = Some(said);
    let due = canary::verdict_due(&world.valid.rollout, at);
    decisions.wake_at(due, world.now);
}
