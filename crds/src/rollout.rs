//! The part of the custom resource that says what live traffic must see and how a new revision reaches it: `slo`, `gates`, `rollout`.
//!
//! The comments here become the schema's descriptions (`kubectl explain mqs.spec.rollout`). A field that could not act is refused by a
//! rule, never ignored.

#![expect(
    unreachable_pub,
    reason = "KubeSchema repeats each struct inside a private scope"
)]

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalars::{Decimal, Span};

/// What live traffic must see.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SloSpec {
    /// Time per output token: (end-to-end - time to first token) / (output tokens - 1), per request.
    pub tpot: LatencySlo,
    /// Time to the first token, per request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft: Option<LatencySlo>,
    /// Of all requests that the canary answers or fails, it may fail so many percent. A limit of p percent needs about 300 / p requests
    /// to be told: see `analysis.minSamples`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("double(self) < 100.0").message("slo.errorRatePercent must be below 100"))]
    pub error_rate_percent: Option<Decimal>,
}

/// A limit on a latency.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = Rule::new("has(self.maxMilliseconds) || has(self.maxRegressionPercent)").message("the latency limits nothing: set maxMilliseconds, maxRegressionPercent or both"))]
pub struct LatencySlo {
    /// Which quantile is compared.
    #[x_kube(validation = Rule::new("double(self) >= 0.5 && double(self) <= 0.99").message("quantile must lie between 0.5 and 0.99: fewer requests cannot decide more"))]
    pub quantile: Decimal,
    /// The canary's quantile may be at most this.
    #[schemars(range(min = 1, max = 120_000))]
    pub max_milliseconds: Option<i32>,
    /// The canary's quantile may be so many percent above stable's in the same window.
    #[schemars(range(min = 1, max = 1000))]
    pub max_regression_percent: Option<i32>,
}

/// A gate on what a canary's pods measure.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("has(self.max) || has(self.maxRegressionPercent)").message("the gate limits nothing: set max, maxRegressionPercent or both"),
    validation = Rule::new("has(self.quantile) == (self.metric in ['TPOT', 'TTFT', 'ITL', 'FirstTokenKl', 'ShadowKl'])").message("quantile belongs to the metrics TPOT, TTFT, ITL, FirstTokenKl and ShadowKl: set it there and leave it out elsewhere"),
    validation = Rule::new("!has(self.maxRegressionPercent) || !(self.metric in ['NanLogits', 'KvCacheUsage', 'OutOfMemory', 'NllIncrease'])").message("maxRegressionPercent does not belong to NanLogits, KvCacheUsage, OutOfMemory and NllIncrease: limit them by max"),
    validation = Rule::new("(!has(self.minSamples) && !has(self.noData)) || !(self.metric in ['KvCacheUsage', 'OutOfMemory'])").message("KvCacheUsage and OutOfMemory count no requests: leave minSamples and noData out"),
    validation = Rule::new("!has(self.minSamples) || self.metric != 'NllIncrease' || (self.minSamples >= 2 && self.minSamples <= 32)").message("minSamples of NllIncrease counts texts: one tells nothing and an artifact keeps 32, write 2 to 32"),
    validation = Rule::new("!has(self.max) || !(self.metric in ['ErrorRate', 'ValveFallbackRate', 'KvCacheUsage']) || double(self.max) <= 100.0").message("max is in percent for ErrorRate, ValveFallbackRate and KvCacheUsage: write at most 100"),
)]
pub struct GateSpec {
    /// Its name in status, Events and metrics; `tpot`, `ttft`, `error-rate` and `precision` are the service's own.
    #[schemars(
        length(min = 1, max = 40),
        regex(pattern = r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
    )]
    #[x_kube(validation = Rule::new("!(self in ['tpot', 'ttft', 'error-rate', 'precision'])").message("gates: tpot, ttft, error-rate and precision are names of spec.slo and spec.verification: choose another"))]
    pub name: String,
    /// What is measured.
    pub metric: GateMetric,
    /// Which quantile of a distribution is compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("double(self) >= 0.5 && double(self) <= 0.99").message("gates: quantile must lie between 0.5 and 0.99: fewer samples cannot decide more"))]
    pub quantile: Option<Decimal>,
    /// The canary may reach this: milliseconds (TPOT, TTFT, ITL), percent (`ErrorRate`, `ValveFallbackRate`, `KvCacheUsage`), nats
    /// (`FirstTokenKl`, `ShadowKl`), nats a token above stable (`NllIncrease`), or a count (`NanLogits`, `OutOfMemory`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<Decimal>,
    /// The canary may be so many percent above stable in the same window.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub max_regression_percent: Option<i32>,
    /// Instead of `analysis.minSamples`; for `NllIncrease` texts, instead of 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub min_samples: Option<i32>,
    /// Instead of `analysis.noData`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_data: Option<NoData>,
    /// Instead of `rollout.onFailure`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_failure: Option<OnFailure>,
}

/// What a gate looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GateMetric {
    /// Time per output token, a request.
    TPOT,
    /// Time to the first token, a request.
    TTFT,
    /// Time between tokens, a token.
    ITL,
    /// Failed requests of all that were answered or failed.
    ErrorRate,
    /// Prompts that the safety valve had read again, of those read with quantised weights.
    ValveFallbackRate,
    /// Divergence of the first token, quantised from precise.
    FirstTokenKl,
    /// Divergence that the shadow audit measures.
    ShadowKl,
    /// Steps whose logits were no numbers.
    NanLogits,
    /// The fullest KV cache among the pods.
    KvCacheUsage,
    /// Containers that the kernel killed for memory.
    OutOfMemory,
    /// How much less likely the canary finds the answers of probes than stable does, nats a token, on the same texts: see `spec.probe`.
    NllIncrease,
}

/// Probes: texts of the calibration set that the operator has the pods of both tracks answer while a canary is judged.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProbeSpec {
    /// So many for a pod of each track in each interval of `rollout.analysis`, while users send either track fewer requests than its gates
    /// need, or while a gate on `NllIncrease` has not seen all texts.
    #[schemars(range(min = 1, max = 64))]
    #[serde(default = "eight")]
    pub requests_per_interval: i32,
}

fn eight() -> i32 {
    8
}

/// What a gate says when too few samples came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NoData {
    /// Nothing: the step is held until they come or the deadline passes.
    #[default]
    Hold,
    /// It fails.
    Fail,
    /// It passes. Metrics that could not be read are never taken for this.
    Pass,
}

/// What a failed gate does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnFailure {
    /// The canary leaves.
    #[default]
    Rollback,
    /// The canary stays where it is until a person decides.
    Pause,
    /// It is told and decides nothing: a gate on trial.
    Record,
}

/// What a trial that fails does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TrialFailure {
    /// The canary leaves.
    #[default]
    Rollback,
    /// The canary stays where it is until a person decides.
    Pause,
}

/// Whether a canary's pods are added to stable's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Surge {
    /// As far as nodes and quotas have room; where they have not, stable's pods make room one for one, and the gap is told first.
    #[default]
    Auto,
    /// Always: a pod without room waits for a node, until the deadline. For clusters that add nodes for pods that wait.
    Always,
    /// Never: each of the canary's pods takes the place of one of stable's.
    Never,
}

/// How a new revision reaches traffic.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("self.steps.all(step, !has(step.hold) || duration(step.hold).getSeconds() + duration(self.analysis.warmUp).getSeconds() + 2 * duration(self.analysis.interval).getSeconds() < self.progressDeadlineSeconds)").message("rollout.progressDeadlineSeconds is not above the longest step's hold plus analysis.warmUp plus two intervals: every rollout would fail, raise it"),
    validation = Rule::new("self.steps.filter(step, has(step.weight)).map(step, step.weight).isSorted()").message("rollout.steps must have rising weights"),
    validation = Rule::new("self.steps.all(step, !has(step.weight) || self.steps.exists_one(other, has(other.weight) && other.weight == step.weight))").message("rollout.steps has the same weight twice: remove one"),
    validation = Rule::new("self.steps.exists(step, !has(step.pause))").message("rollout.steps only pauses: add a step with a weight"),
    validation = Rule::new("!self.steps.exists(step, has(step.mirror)) || self.steps.exists(step, has(step.weight))").message("rollout.steps only mirrors: add a step with a weight, people meet the canary before it takes over"),
    validation = Rule::new("self.steps.filter(step, !has(step.pause)).map(step, has(step.mirror) ? 0 : 1).isSorted()").message("rollout.steps mirrors after a weight: put the steps with mirror first, people get the canary's answers from the first weight on"),
    validation = Rule::new("self.steps.filter(step, has(step.mirror)).map(step, step.mirror).isSorted() && self.steps.all(step, !has(step.mirror) || self.steps.exists_one(other, has(other.mirror) && other.mirror == step.mirror))").message("rollout.steps must mirror rising shares: order the steps with mirror, each percentage once"),
)]
pub struct RolloutSpec {
    /// What the canary passes through: copies of requests first, then rising weights, and pauses between them.
    #[schemars(length(min = 1, max = 20))]
    pub steps: Vec<Step>,
    /// How a step is judged.
    pub analysis: AnalysisSpec,
    /// A phase of the rollout that has not moved on after so many seconds has failed. Pauses do not count.
    #[schemars(range(min = 10, max = 604_800))]
    #[serde(default = "progress_deadline")]
    pub progress_deadline_seconds: i32,
    /// What a broken limit or a passed deadline does while the canary has traffic.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_failure: TrialFailure,
    /// Whether the canary's pods are added to stable's or take their place.
    #[serde(default, skip_serializing_if = "is_default")]
    pub surge: Surge,
    /// No trial begins and none moves on while this is true; one that breaks a limit is rolled back all the same.
    #[serde(default, skip_serializing_if = "is_default")]
    pub paused: bool,
    /// Going back to a revision that was stable lately takes no steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollback_window: Option<RollbackWindow>,
    /// The pods of a failed canary are kept for so many seconds without traffic, to be looked at.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(range(min = 0, max = 604_800))]
    pub abort_scale_down_delay_seconds: i32,
    /// So many revisions that do not serve are kept to go back to.
    #[serde(default = "history_limit", skip_serializing_if = "is_history_limit")]
    #[schemars(range(min = 0, max = 100))]
    pub revision_history_limit: i32,
}

fn progress_deadline() -> i32 {
    600
}

fn history_limit() -> i32 {
    10
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature that serde calls"
)]
fn is_history_limit(limit: &i32) -> bool {
    *limit == history_limit()
}

/// Defaults are not written out, so that the digest of a spec that says nothing of a field is the same before and after the field came.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The revisions that a rollback without steps may reach.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RollbackWindow {
    /// So many revisions that were stable before the present one.
    #[schemars(range(min = 1, max = 10))]
    pub revisions: i32,
}

/// One step of the canary.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("has(self.pause) != (has(self.weight) || has(self.mirror) || has(self.canaryReplicas))").message("a step is a pause, or it has a weight, a mirror or canaryReplicas: set exactly one"),
    validation = Rule::new("!has(self.mirror) || !has(self.weight)").message("mirror and weight do not go together: a mirror's answers reach nobody, a weight's reach people; write two steps, the one with mirror first"),
    validation = Rule::new("has(self.hold) != has(self.pause)").message("hold belongs to weight, mirror and canaryReplicas: set it there; a pause has its duration"),
)]
pub struct Step {
    /// Percent of the traffic: reached as nearly as whole pods allow, or exactly by a gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 99))]
    pub weight: Option<i32>,
    /// Percent of the requests that the gateway copies to the canary: it is judged by them, and nobody gets its answers. Only by the route
    /// that the operator makes (`traffic.parentRefs`), and before the first weight. A copied request is computed twice.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub mirror: Option<i32>,
    /// So many pods. Instead of a weight their share of the traffic is what it is; beside a weight or mirror (traffic.mode `GatewayAPI`) they
    /// carry it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub canary_replicas: Option<i32>,
    /// The canary stays at this step at least so long.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("duration(self).getSeconds() <= 604800").message("hold is longer than a week"))]
    pub hold: Option<Span>,
    /// The canary stays as it is: for a time, or until a person promotes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause: Option<PauseStep>,
}

/// A pause.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PauseStep {
    /// How long; without it until a person promotes the canary.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("duration(self).getSeconds() <= 604800").message("pause.duration is longer than a week"))]
    pub duration: Option<Span>,
}

/// How a step is judged.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AnalysisSpec {
    /// Time between verdicts.
    #[x_kube(validation = Rule::new("duration(self).getSeconds() >= 1 && duration(self).getSeconds() <= 3600").message("analysis.interval must lie between 1s and 1h"))]
    pub interval: Span,
    /// Fewer requests than this in the window are no verdict.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub min_samples: i32,
    /// So many Fail verdicts in a row roll back.
    #[schemars(range(min = 1, max = 100))]
    #[serde(default = "one")]
    pub failure_limit: i32,
    /// What fewer requests than minSamples say.
    #[serde(default, skip_serializing_if = "is_default")]
    pub no_data: NoData,
    /// The first seconds of a step are not counted.
    #[serde(default = "no_warm_up")]
    #[x_kube(validation = Rule::new("duration(self).getSeconds() <= 86400").message("analysis.warmUp is longer than a day"))]
    pub warm_up: Span,
}

fn one() -> i32 {
    1
}

fn no_warm_up() -> Span {
    Span("0s".into())
}
