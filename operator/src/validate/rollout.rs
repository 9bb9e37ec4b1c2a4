//! The way of a new revision, from `spec.rollout`, in seconds and pods.

use mixquant_crds::rollout::{RolloutSpec, Step as StepSpec, Surge, TrialFailure};
use serde::Serialize;

use super::Problems;

/// The way of a new revision; times in seconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rollout {
    /// At least one that is no pause, weights rising.
    pub steps: Vec<Step>,
    /// Between verdicts.
    pub interval: u32,
    /// Fail verdicts in a row that end the trial.
    pub failure_limit: i32,
    /// Seconds of a step that are not counted.
    pub warm_up: u32,
    /// A stage or step that takes longer has failed.
    pub progress_deadline: u32,
    /// What a passed deadline does while the canary has traffic.
    pub on_failure: TrialFailure,
    /// Whether the canary's pods are added to stable's.
    pub surge: Surge,
    /// Nothing begins or moves on.
    pub paused: bool,
    /// So many revisions before stable are gone back to without steps.
    pub rollback_window: usize,
    /// Seconds that a failed canary's pods are kept.
    pub keep_failed: u32,
    /// Revisions without a role that are kept.
    pub history: usize,
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Step {
    /// A share of the traffic.
    Weight {
        /// Percent, 1 to 99.
        weight: i32,
        /// Seconds at least.
        hold: u32,
    },
    /// A number of pods.
    Replicas {
        /// At least 1.
        replicas: i32,
        /// Seconds at least.
        hold: u32,
    },
    /// As before.
    Pause {
        /// Seconds; `None` until a person promotes.
        duration: Option<u32>,
    },
}

fn step(spec: &StepSpec, problems: &mut Problems) -> Step {
    let hold = spec.hold.as_ref();
    let hold = hold.map(|hold| problems.seconds("rollout.steps[].hold", hold));
    match (spec.weight, spec.canary_replicas, &spec.pause, hold) {
        (Some(weight), None, None, Some(hold)) => Step::Weight { weight, hold },
        (None, Some(replicas), None, Some(hold)) => Step::Replicas { replicas, hold },
        (None, None, Some(pause), None) => Step::Pause {
            duration: pause
                .duration
                .as_ref()
                .map(|span| problems.seconds("rollout.steps[].pause.duration", span)),
        },
        _ => {
            problems.require(
                false,
                "a step is one of weight, canaryReplicas and pause, the first two with hold: set exactly one",
            );
            Step::Pause { duration: None }
        }
    }
}

pub(super) fn rollout(spec: &RolloutSpec, problems: &mut Problems) -> Rollout {
    let analysis = &spec.analysis;
    let small = |value: i32| u32::try_from(value).unwrap_or(0);
    let count = |value: i32| usize::try_from(value).unwrap_or(0);
    let window = spec.rollback_window.as_ref();
    let valid = Rollout {
        steps: spec.steps.iter().map(|spec| step(spec, problems)).collect(),
        interval: problems.seconds("rollout.analysis.interval", &analysis.interval),
        failure_limit: analysis.failure_limit,
        warm_up: problems.seconds("rollout.analysis.warmUp", &analysis.warm_up),
        progress_deadline: small(spec.progress_deadline_seconds),
        on_failure: spec.on_failure,
        surge: spec.surge,
        paused: spec.paused,
        rollback_window: window.map_or(0, |window| count(window.revisions)),
        keep_failed: small(spec.abort_scale_down_delay_seconds),
        history: count(spec.revision_history_limit),
    };
    check(&valid, problems);
    valid
}

/// What the schema's rules say too, for what went around them.
fn check(valid: &Rollout, problems: &mut Problems) {
    let mut weights = Vec::new();
    let (mut shares, mut long) = (0, false);
    for step in &valid.steps {
        let hold = match *step {
            Step::Weight { weight, hold } => {
                weights.push(weight);
                shares += i32::from((1..=99).contains(&weight));
                hold
            }
            Step::Replicas { replicas, hold } => {
                shares += i32::from((1..=1000).contains(&replicas));
                hold
            }
            Step::Pause { .. } => 0,
        };
        long |= hold.saturating_add(valid.warm_up) >= valid.progress_deadline;
    }
    problems.require(
        shares > 0 && weights.iter().all(|weight| (1..=99).contains(weight)),
        "rollout.steps needs at least one step with a weight between 1 and 99, or with canaryReplicas",
    );
    problems.require(
        weights.windows(2).all(|pair| pair[0] < pair[1]),
        "rollout.steps must have rising weights",
    );
    problems.require(
        !long,
        "rollout.progressDeadlineSeconds is not above the longest step's hold plus analysis.warmUp: raise it",
    );
    problems.require(
        valid.interval >= 1 && valid.failure_limit >= 1,
        "rollout.analysis needs an interval and a failureLimit of at least 1",
    );
}
