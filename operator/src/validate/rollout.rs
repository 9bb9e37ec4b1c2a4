//! The way of a new revision, from `spec.rollout`, in seconds and pods.

use mixquant_crds::MixQuantServiceSpec;
use mixquant_crds::rollout::{Step as StepSpec, Surge, TrialFailure};
use mixquant_crds::traffic::{TrafficMode, TrafficSpec};
use serde::Serialize;

use super::Problems;

/// The way of a new revision; times in seconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rollout {
    /// At least one share of the traffic; copies of it before the first share, both rising.
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
    /// A gateway splits the traffic: weights are exact, and a step needs only the pods of its share.
    pub routed: bool,
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Step {
    /// A share of the traffic.
    Weight {
        /// Percent, 1 to 99.
        weight: i32,
        /// Pods that carry it; as many as it needs without.
        replicas: Option<i32>,
        /// Seconds at least.
        hold: u32,
    },
    /// Copies of requests; nobody gets the answers.
    Mirror {
        /// Percent, 1 to 100.
        percent: i32,
        /// Pods that answer them; as many as such a share needs without.
        replicas: Option<i32>,
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

fn step(spec: &StepSpec, traffic: &TrafficSpec, problems: &mut Problems) -> Step {
    let routed = traffic.mode == TrafficMode::GatewayAPI;
    let hold = spec.hold.as_ref();
    let hold = hold.map(|hold| problems.seconds("rollout.steps[].hold", hold));
    if let Some(percent) = spec.mirror {
        problems.require(
            routed && !traffic.parent_refs.is_empty(),
            "rollout.steps: mirror copies requests by the route that the operator makes, not by the ratio of pods and not by a route of yours: set traffic.mode GatewayAPI with parentRefs, or remove the step with mirror",
        );
        problems.require(
            spec.weight.is_none() && spec.pause.is_none() && hold.is_some(),
            "a step with mirror has hold and neither weight nor pause: write two steps, the one with mirror first",
        );
        return Step::Mirror {
            percent,
            replicas: spec.canary_replicas,
            hold: hold.unwrap_or(0),
        };
    }
    match (spec.weight, spec.canary_replicas, &spec.pause, hold) {
        (Some(weight), replicas, None, Some(hold)) if routed || replicas.is_none() => {
            Step::Weight {
                weight,
                replicas,
                hold,
            }
        }
        (None, Some(replicas), None, Some(hold)) if !routed => Step::Replicas { replicas, hold },
        (None, None, Some(pause), None) => Step::Pause {
            duration: pause
                .duration
                .as_ref()
                .map(|span| problems.seconds("rollout.steps[].pause.duration", span)),
        },
        _ => {
            problems.require(
                false,
                "a step is a pause, or it has hold and a weight or canaryReplicas (with traffic.mode GatewayAPI a weight or a mirror, and canaryReplicas beside it): set exactly one",
            );
            Step::Pause { duration: None }
        }
    }
}

pub(super) fn rollout(spec: &MixQuantServiceSpec, problems: &mut Problems) -> Rollout {
    let traffic = &spec.traffic;
    let spec = &spec.rollout;
    let analysis = &spec.analysis;
    let small = |value: i32| u32::try_from(value).unwrap_or(0);
    let count = |value: i32| usize::try_from(value).unwrap_or(0);
    let window = spec.rollback_window.as_ref();
    let valid = Rollout {
        steps: spec
            .steps
            .iter()
            .map(|spec| step(spec, traffic, problems))
            .collect(),
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
        routed: traffic.mode == TrafficMode::GatewayAPI,
    };
    check(&valid, problems);
    valid
}

/// What the schema's rules say too, for what went around them.
fn check(valid: &Rollout, problems: &mut Problems) {
    let (mut weights, mut mirrors) = (Vec::new(), Vec::new());
    let (mut shares, mut long, mut none, mut late) = (0, false, false, false);
    for step in &valid.steps {
        let hold = match *step {
            Step::Mirror {
                percent,
                replicas,
                hold,
            } => {
                mirrors.push(percent);
                none |= replicas.is_some_and(|replicas| !(1..=1000).contains(&replicas));
                late |= shares > 0;
                hold
            }
            Step::Weight {
                weight,
                replicas,
                hold,
            } => {
                weights.push(weight);
                none |= replicas.is_some_and(|replicas| !(1..=1000).contains(&replicas));
                shares += i32::from((1..=99).contains(&weight));
                hold
            }
            Step::Replicas { replicas, hold } => {
                none |= !(1..=1000).contains(&replicas);
                shares += 1;
                hold
            }
            Step::Pause { .. } => 0,
        };
        long |= hold.saturating_add(valid.warm_up) >= valid.progress_deadline;
    }
    problems.require(
        shares > 0 && !none && weights.iter().all(|weight| (1..=99).contains(weight)),
        "rollout.steps needs at least one step with a weight between 1 and 99, or with canaryReplicas between 1 and 1000",
    );
    problems.require(
        weights.windows(2).all(|pair| pair[0] < pair[1]),
        "rollout.steps must have rising weights",
    );
    problems.require(
        !late && mirrors.iter().all(|percent| (1..=100).contains(percent)),
        "rollout.steps: a mirror lies between 1 and 100 and stands before the first weight",
    );
    problems.require(
        mirrors.windows(2).all(|pair| pair[0] < pair[1]),
        "rollout.steps must mirror rising shares: order the steps with mirror, each percentage once",
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
