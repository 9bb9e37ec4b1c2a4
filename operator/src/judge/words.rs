//! Metrics and their amounts as people read them.

use mixquant_crds::rollout::{GateMetric, OnFailure};

use crate::validate::Gate;

/// A gate's metric, as in `TPOT p95`.
pub(super) fn name(gate: &Gate) -> String {
    let metric = match gate.metric {
        GateMetric::TPOT => "TPOT",
        GateMetric::TTFT => "TTFT",
        GateMetric::ITL => "ITL",
        GateMetric::ErrorRate => "error rate",
        GateMetric::ValveFallbackRate => "valve fallback rate",
        GateMetric::FirstTokenKl => "first-token KL",
        GateMetric::ShadowKl => "shadow KL",
        GateMetric::NanLogits => "NaN logits",
        GateMetric::KvCacheUsage => "KV cache usage",
        GateMetric::OutOfMemory => "out-of-memory kills",
        GateMetric::NllIncrease => "NLL increase",
    };
    match gate.quantile {
        Some(quantile) => format!("{metric} p{}", percent(quantile)),
        None => metric.to_owned(),
    }
}

/// A quantile as in `p95` or `p99.5`.
fn percent(quantile: f64) -> String {
    let text = format!("{:.2}", quantile * 100.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// An amount in base units for people.
pub fn amount(metric: GateMetric, value: f64) -> String {
    if value.is_infinite() {
        return "unbounded".into();
    }
    match metric {
        GateMetric::TPOT | GateMetric::TTFT | GateMetric::ITL => {
            let milliseconds = value * 1000.0;
            if milliseconds < 10.0 {
                format!("{milliseconds:.2} ms")
            } else {
                format!("{milliseconds:.0} ms")
            }
        }
        GateMetric::ErrorRate | GateMetric::ValveFallbackRate | GateMetric::KvCacheUsage => {
            format!("{:.2} %", value * 100.0)
        }
        GateMetric::FirstTokenKl | GateMetric::ShadowKl => format!("{value:.4} nats"),
        GateMetric::NllIncrease => format!("{value:.4} nats a token"),
        GateMetric::NanLogits | GateMetric::OutOfMemory => format!("{value:.0}"),
    }
}

/// What a gate allows, as in `TPOT p95, on live traffic: at most 100 ms and at most 25 % over stable`.
pub fn says(gate: &Gate) -> String {
    let absolute = gate
        .max
        .map(|limit| format!("at most {}", amount(gate.metric, limit)));
    let relative = gate
        .max_ratio
        .map(|ratio| format!("at most {:.0} % over stable", (ratio - 1.0) * 100.0));
    let both: Vec<String> = [absolute, relative].into_iter().flatten().collect();
    let does = match gate.on_failure {
        OnFailure::Rollback => "",
        OnFailure::Pause => "; a failure halts the rollout",
        OnFailure::Record => "; recorded only",
    };
    let on = if gate.metric == GateMetric::NllIncrease {
        "over stable on probes"
    } else {
        "on live traffic"
    };
    format!("{}, {on}: {}{does}", name(gate), both.join(" and "))
}
