//! One verdict of a trial, when it is due: judged on this pass's samples, remembered with its evidence.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mixquant_crds::status::{Outcome, RolloutStage, RolloutStatus, VerdictStatus};

use super::{Decisions, World};
use crate::action::{Gate, Metric};
use crate::canary;
use crate::judge::{self, milliseconds};

/// The verdict of this pass; `None` when none is due. Pods that do not all run make it Inconclusive: they would be judged unseen.
pub(super) fn judge(
    world: &World<'_>,
    decisions: &mut Decisions,
    at: &RolloutStatus,
) -> Option<Outcome> {
    let rollout = &world.valid.rollout;
    let due = canary::verdict_due(rollout, at);
    if world.now < due {
        decisions.wake_at(due, world.now);
        return None;
    }
    let memory = &decisions.memory;
    let (stable, canary) = (memory.stable.as_ref()?, memory.canary.as_ref()?);
    let window = canary::window(rollout, at, &stable.revision, &canary.revision)?;
    let wanted = canary::size(rollout, at, world.valid.replicas);
    let mut verdict = judge::tpot(
        &world.valid.tpot,
        rollout,
        &window,
        world.samples,
        world.now,
    );
    if verdict.outcome == Outcome::Pass && !world.runs(&canary.revision, wanted) {
        verdict.outcome = Outcome::Inconclusive;
        verdict.message = format!("not all of the canary's {wanted} pods run");
    }
    // What stable serves is shown until the canary takes its place.
    let shown = match at.stage {
        RolloutStage::Promoting if verdict.outcome == Outcome::Pass => verdict.canary,
        RolloutStage::Starting
        | RolloutStage::Stepping
        | RolloutStage::Promoting
        | RolloutStage::RollingBack => verdict.stable,
    };
    if let Some(shown) = shown {
        decisions.memory.tpot = Some(milliseconds(shown));
    }
    decisions.count(Metric::Verdict {
        gate: Gate::Tpot,
        outcome: verdict.outcome,
    });
    let failed = match verdict.outcome {
        Outcome::Pass => 0,
        Outcome::Fail => at.failed_verdicts.saturating_add(1),
        // It neither proves nor clears: the row of failures stands.
        Outcome::Inconclusive => at.failed_verdicts,
    };
    let said = VerdictStatus {
        outcome: verdict.outcome,
        at: Time(world.now),
        message: verdict.message,
    };
    decisions.verdict = Some(said.clone());
    if let Some(at) = &mut decisions.memory.rollout {
        at.failed_verdicts = failed;
        at.verdict = Some(said);
        let due = canary::verdict_due(rollout, at);
        decisions.wake_at(due, world.now);
    }
    Some(verdict.outcome)
}
