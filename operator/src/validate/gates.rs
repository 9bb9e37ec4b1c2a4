//! The gates of a service, from `spec.slo` and `spec.gates`, in base units: seconds, shares of 1, nats, counts.

use mixquant_crds::MixQuantServiceSpec;
use mixquant_crds::probe::MAX_TEXTS;
use mixquant_crds::rollout::{GateMetric, GateSpec, LatencySlo, NoData, OnFailure, TrialFailure};
use serde::Serialize;

use super::Problems;

/// A limit on what a canary's pods measure.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Gate {
    /// Its name in status, Events and metrics.
    pub name: String,
    /// What it looks at.
    pub metric: GateMetric,
    /// In [0.5, 0.99]; of a distribution only.
    pub quantile: Option<f64>,
    /// The canary at most, in the metric's base unit.
    pub max: Option<f64>,
    /// The canary over stable at most, such as 1.1.
    pub max_ratio: Option<f64>,
    /// Fewer samples than this are no verdict.
    pub min_samples: u64,
    /// What they are instead.
    pub no_data: NoData,
    /// What its failure does.
    pub on_failure: OnFailure,
}

/// Texts that a comparison of answers needs where the spec does not say.
const TEXTS: u64 = 8;

/// The shape of what a metric measures, which decides how samples are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A distribution of which a quantile is compared.
    Distribution,
    /// A share of requests.
    Share,
    /// Events that are counted one by one.
    Count,
    /// A level of which the greatest counts.
    Level,
    /// Differences of both tracks on the same texts.
    Pairs,
}

/// The shape of a metric.
pub(crate) const fn kind(metric: GateMetric) -> Kind {
    match metric {
        GateMetric::TPOT
        | GateMetric::TTFT
        | GateMetric::ITL
        | GateMetric::FirstTokenKl
        | GateMetric::ShadowKl => Kind::Distribution,
        GateMetric::ErrorRate | GateMetric::ValveFallbackRate => Kind::Share,
        GateMetric::NanLogits | GateMetric::OutOfMemory => Kind::Count,
        GateMetric::KvCacheUsage => Kind::Level,
        GateMetric::NllIncrease => Kind::Pairs,
    }
}

/// How many of the spec's units make the base unit.
fn units(metric: GateMetric) -> f64 {
    match metric {
        GateMetric::TPOT | GateMetric::TTFT | GateMetric::ITL => 1000.0,
        GateMetric::ErrorRate | GateMetric::ValveFallbackRate | GateMetric::KvCacheUsage => 100.0,
        GateMetric::FirstTokenKl
        | GateMetric::ShadowKl
        | GateMetric::NanLogits
        | GateMetric::OutOfMemory
        | GateMetric::NllIncrease => 1.0,
    }
}

fn ratio(percent: i32) -> f64 {
    1.0 + f64::from(percent) / 100.0
}

/// Requests of the operator's own, for a pod of each track in each interval.
pub(super) fn probes(spec: &MixQuantServiceSpec, problems: &mut Problems) -> Option<u32> {
    let compared = spec.gates.iter();
    let compared = compared.filter(|gate| gate.metric == GateMetric::NllIncrease);
    problems.require(
        spec.probe.is_some() || compared.count() == 0,
        "gates: NllIncrease compares how canary and stable answer probes, and nothing sends any: set spec.probe or remove the gate",
    );
    let requests = spec.probe.as_ref()?.requests_per_interval;
    problems.require(
        (1..=64).contains(&requests),
        "probe.requestsPerInterval must lie between 1 and 64",
    );
    u32::try_from(requests).ok()
}

/// What gates take from the whole service.
struct Defaults {
    min_samples: u64,
    no_data: NoData,
    on_failure: OnFailure,
}

/// All gates of the service: those of `spec.slo` first.
pub(super) fn gates(spec: &MixQuantServiceSpec, problems: &mut Problems) -> Vec<Gate> {
    let analysis = &spec.rollout.analysis;
    let defaults = Defaults {
        min_samples: u64::try_from(analysis.min_samples).unwrap_or(0),
        no_data: analysis.no_data,
        on_failure: match spec.rollout.on_failure {
            TrialFailure::Rollback => OnFailure::Rollback,
            TrialFailure::Pause => OnFailure::Pause,
        },
    };
    let slo = &spec.slo;
    let mut gates = vec![latency(
        ("tpot", GateMetric::TPOT),
        &slo.tpot,
        &defaults,
        problems,
    )];
    if let Some(ttft) = &slo.ttft {
        let gate = latency(("ttft", GateMetric::TTFT), ttft, &defaults, problems);
        gates.push(gate);
    }
    if let Some(percent) = &slo.error_rate_percent {
        let percent = problems.decimal("slo.errorRatePercent", percent);
        gates.push(Gate {
            name: "error-rate".into(),
            metric: GateMetric::ErrorRate,
            quantile: None,
            max: Some(percent / units(GateMetric::ErrorRate)),
            max_ratio: None,
            min_samples: defaults.min_samples,
            no_data: defaults.no_data,
            on_failure: defaults.on_failure,
        });
    }
    for gate in &spec.gates {
        gates.push(from_spec(gate, &defaults, problems));
    }
    gates
}

fn latency(
    (name, metric): (&str, GateMetric),
    slo: &LatencySlo,
    defaults: &Defaults,
    problems: &mut Problems,
) -> Gate {
    let gate = Gate {
        name: name.to_owned(),
        metric,
        quantile: Some(problems.decimal(&format!("slo.{name}.quantile"), &slo.quantile)),
        max: slo
            .max_milliseconds
            .map(|milliseconds| f64::from(milliseconds) / units(metric)),
        max_ratio: slo.max_regression_percent.map(ratio),
        min_samples: defaults.min_samples,
        no_data: defaults.no_data,
        on_failure: defaults.on_failure,
    };
    check(&gate, &format!("slo.{name}"), problems);
    gate
}

fn from_spec(spec: &GateSpec, defaults: &Defaults, problems: &mut Problems) -> Gate {
    let field = format!("gates[{}]", spec.name);
    let decimal = |problems: &mut Problems, name: &str, text: &mixquant_crds::Decimal| {
        problems.decimal(&format!("{field}.{name}"), text)
    };
    let gate = Gate {
        name: spec.name.clone(),
        metric: spec.metric,
        quantile: spec
            .quantile
            .as_ref()
            .map(|text| decimal(problems, "quantile", text)),
        max: spec
            .max
            .as_ref()
            .map(|text| decimal(problems, "max", text) / units(spec.metric)),
        max_ratio: spec.max_regression_percent.map(ratio),
        min_samples: match (spec.min_samples, spec.metric) {
            (Some(samples), _) => u64::try_from(samples).unwrap_or(0),
            (None, GateMetric::NllIncrease) => TEXTS,
            (None, _) => defaults.min_samples,
        },
        no_data: spec.no_data.unwrap_or(defaults.no_data),
        on_failure: spec.on_failure.unwrap_or(defaults.on_failure),
    };
    check(&gate, &field, problems);
    gate
}

/// What the schema's rules say too, for what went around them.
fn check(gate: &Gate, field: &str, problems: &mut Problems) {
    let kind = kind(gate.metric);
    problems.require(
        gate.max.is_some() || gate.max_ratio.is_some(),
        &format!("{field} limits nothing: set a maximum, a regression or both"),
    );
    problems.require(
        gate.quantile.is_some() == (kind == Kind::Distribution),
        &format!("{field}.quantile belongs to a distribution: set it there and nowhere else"),
    );
    problems.require(
        gate.quantile
            .is_none_or(|quantile| (0.5..=0.99).contains(&quantile)),
        &format!("{field}.quantile must lie between 0.5 and 0.99"),
    );
    problems.require(
        gate.max_ratio.is_none() || matches!(kind, Kind::Distribution | Kind::Share),
        &format!("{field}.maxRegressionPercent does not belong to its metric: limit it by max"),
    );
    problems.require(
        gate.min_samples >= 1,
        &format!("{field} needs at least one sample: raise minSamples"),
    );
    problems.require(
        kind != Kind::Pairs || (2..=u64::from(MAX_TEXTS)).contains(&gate.min_samples),
        &format!("{field}.minSamples counts texts: write 2 to {MAX_TEXTS}"),
    );
}
