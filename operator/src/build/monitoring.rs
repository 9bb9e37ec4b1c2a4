//! What the Prometheus operator reads where it is installed: a `PodMonitor` and a `PrometheusRule`. Only the fields that we say are typed.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use mixquant_crds::names::{self, engine_metrics};
use serde::{Deserialize, Serialize};

use super::companion::{engine_pods, name};
use super::meta::{COMPONENT_ENGINE, Owner, labels};
use crate::validate::ValidService;

/// The group of both kinds.
pub const GROUP_VERSION: &str = "monitoring.coreos.com/v1";

/// Which pods are scraped, and how.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "monitoring.coreos.com",
    version = "v1",
    kind = "PodMonitor",
    plural = "podmonitors",
    namespaced,
    schema = "disabled",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct PodMonitorSpec {
    /// The pods.
    pub selector: LabelSelector,
    /// Labels of pods that become labels of series.
    #[serde(default)]
    pub pod_target_labels: Vec<String>,
    /// Where they are read.
    #[serde(default)]
    pub pod_metrics_endpoints: Vec<Endpoint>,
}

/// A port that is read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Endpoint {
    /// Its name in the pod.
    pub port: Option<String>,
    /// The page.
    pub path: Option<String>,
    /// How often.
    pub interval: Option<String>,
}

/// Alerts.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "monitoring.coreos.com",
    version = "v1",
    kind = "PrometheusRule",
    plural = "prometheusrules",
    namespaced,
    schema = "disabled",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct PrometheusRuleSpec {
    /// Evaluated one after the other.
    #[serde(default)]
    pub groups: Vec<RuleGroup>,
}

/// Rules that are evaluated together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RuleGroup {
    /// Unique in the object.
    pub name: String,
    /// In order.
    #[serde(default)]
    pub rules: Vec<Alert>,
}

/// An alert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alert {
    /// Its name.
    pub alert: String,
    /// True when it fires.
    pub expr: String,
    /// For how long it must be true.
    #[serde(rename = "for")]
    pub duration: Option<String>,
    /// Labels of the alert.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// What people read.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

/// Scrapes the engine pods; series carry the service and the revision.
pub(super) fn monitor(owner: &Owner) -> PodMonitor {
    PodMonitor {
        metadata: owner.object(name(&owner.name), labels(&owner.name, COMPONENT_ENGINE)),
        spec: PodMonitorSpec {
            selector: engine_pods(owner),
            pod_target_labels: vec![names::LABEL_SERVICE.into(), names::LABEL_REVISION.into()],
            pod_metrics_endpoints: vec![Endpoint {
                port: Some(names::PORT_ADMIN_NAME.into()),
                path: Some("/metrics".into()),
                interval: Some("15s".into()),
            }],
        },
    }
}

/// Warns when no pod answers, and when live traffic breaks an absolute limit of `spec.slo.tpot` or `spec.slo.ttft`.
pub(super) fn rule(owner: &Owner, service: &ValidService) -> PrometheusRule {
    // A label's name in Prometheus: what is neither letter nor digit becomes `_`.
    let label = names::LABEL_SERVICE.replace(['.', '/'], "_");
    let pods = format!(
        "namespace=\"{}\",{label}=\"{}\"",
        owner.namespace, owner.name
    );
    let of = format!("MixQuantService {}/{}", owner.namespace, owner.name);
    let mut rules = vec![alert(
        "MixQuantServiceDown",
        // A series that is gone is as bad as one that says 0.
        format!("(sum(up{{{pods}}}) or vector(0)) == 0"),
        ("5m", "critical"),
        format!("no engine pod of {of} answers Prometheus"),
    )];
    let latencies = [
        (
            "tpot",
            "MixQuantTpotAboveLimit",
            engine_metrics::REQUEST_TIME_PER_OUTPUT_TOKEN,
        ),
        (
            "ttft",
            "MixQuantTtftAboveLimit",
            engine_metrics::TIME_TO_FIRST_TOKEN,
        ),
    ];
    for (name, title, buckets) in latencies {
        let gate = service.gates.iter().find(|gate| gate.name == name);
        let limit = gate.and_then(|gate| Some((gate.quantile?, gate.max?)));
        if let Some((quantile, limit)) = limit {
            rules.push(alert(
                title,
                format!(
                    "histogram_quantile({quantile}, sum by (le) (rate({buckets}_bucket{{{pods}}}[5m]))) > {limit}"
                ),
                ("10m", "warning"),
                format!("{of} is slower than spec.slo.{name}.maxMilliseconds"),
            ));
        }
    }
    PrometheusRule {
        metadata: owner.object(name(&owner.name), labels(&owner.name, COMPONENT_ENGINE)),
        spec: PrometheusRuleSpec {
            groups: vec![RuleGroup {
                name: format!("mixquant-{}", owner.name),
                rules,
            }],
        },
    }
}

fn alert(name: &str, expr: String, (duration, severity): (&str, &str), summary: String) -> Alert {
    Alert {
        alert: name.into(),
        expr,
        duration: Some(duration.into()),
        labels: [("severity".to_owned(), severity.to_owned())].into(),
        annotations: [("summary".to_owned(), summary)].into(),
    }
}
