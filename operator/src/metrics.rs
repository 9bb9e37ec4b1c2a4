//! The operator's own metrics. Names are `mixquant_crds::names::operator_metrics`; labels are bounded by the number of services.

use std::time::Duration;

use mixquant_crds::names::operator_metrics as names;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::action::Metric;

/// A service.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ServiceLabels {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InfoLabels {
    namespace: String,
    name: String,
    phase: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabels {
    namespace: String,
    name: String,
    cause: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DriftLabels {
    namespace: String,
    name: String,
    signal: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VerdictLabels {
    namespace: String,
    name: String,
    gate: String,
    verdict: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorLabels {
    error: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WriteLabels {
    verb: &'static str,
    kind: String,
}

/// Where a service is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// `status.phase`.
    pub phase: String,
    /// Percent of the ready pods that are the canary's.
    pub weight: i32,
    /// Pods of stable that are wanted.
    pub desired: i32,
}

/// The registry and everything in it.
pub struct Metrics {
    registry: Registry,
    info: Family<InfoLabels, Gauge>,
    weight: Family<ServiceLabels, Gauge>,
    desired: Family<ServiceLabels, Gauge>,
    rollbacks: Family<CauseLabels, Counter>,
    promotions: Family<ServiceLabels, Counter>,
    drifts: Family<DriftLabels, Counter>,
    recalibrations: Family<CauseLabels, Counter>,
    verdicts: Family<VerdictLabels, Counter>,
    reconciles: Histogram,
    errors: Family<ErrorLabels, Counter>,
    writes: Family<WriteLabels, Counter>,
    leader: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            info: Family::default(),
            weight: Family::default(),
            desired: Family::default(),
            rollbacks: Family::default(),
            promotions: Family::default(),
            drifts: Family::default(),
            recalibrations: Family::default(),
            verdicts: Family::default(),
            reconciles: Histogram::new([
                0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
            ]),
            errors: Family::default(),
            writes: Family::default(),
            leader: Gauge::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register(
            names::SERVICE_INFO,
            "1 for the phase that the service is in",
            self.info.clone(),
        );
        registry.register(
            names::CANARY_WEIGHT,
            "Percent of the ready pods that are the canary's",
            self.weight.clone(),
        );
        registry.register(
            names::DESIRED_REPLICAS,
            "Pods of stable that are wanted",
            self.desired.clone(),
        );
        registry.register(
            names::ROLLBACKS,
            "Rollbacks by cause",
            self.rollbacks.clone(),
        );
        registry.register(
            names::PROMOTIONS,
            "Revisions that became stable",
            self.promotions.clone(),
        );
        registry.register(
            names::DRIFTS,
            "Bounds of spec.drift that traffic crossed, by signal",
            self.drifts.clone(),
        );
        registry.register(
            names::RECALIBRATIONS,
            "Recalibrations that were opened, by cause",
            self.recalibrations.clone(),
        );
        registry.register(
            names::VERDICTS,
            "Verdicts by gate and outcome",
            self.verdicts.clone(),
        );
        registry.register(
            names::RECONCILE_DURATION,
            "Seconds that one pass over a service took",
            self.reconciles.clone(),
        );
        registry.register(
            names::RECONCILE_ERRORS,
            "Passes that ended early, by reason",
            self.errors.clone(),
        );
        registry.register(
            names::API_WRITES,
            "Writes to the API by verb and kind",
            self.writes.clone(),
        );
        registry.register(
            names::LEADER,
            "1 while this process leads",
            self.leader.clone(),
        );
    }

    /// The exposition text.
    ///
    /// # Panics
    /// Never: writing to a `String` cannot fail.
    pub fn encode(&self) -> String {
        let mut out = String::new();
        text::encode(&mut out, &self.registry).expect("writing to a String cannot fail");
        out
    }

    /// Counts what a plan asks to count.
    pub fn count(&self, service: &ServiceLabels, metric: &Metric) {
        let ServiceLabels { namespace, name } = service.clone();
        match metric {
            Metric::Rollback { cause } => {
                let cause = cause.as_str();
                let labels = CauseLabels {
                    namespace,
                    name,
                    cause,
                };
                self.rollbacks.get_or_create(&labels).inc();
            }
            Metric::Promotion => {
                self.promotions.get_or_create(service).inc();
            }
            Metric::Drift { signal } => {
                let labels = DriftLabels {
                    namespace,
                    name,
                    signal: signal.clone(),
                };
                self.drifts.get_or_create(&labels).inc();
            }
            Metric::Recalibration { cause } => {
                let cause = cause.as_str();
                let labels = CauseLabels {
                    namespace,
                    name,
                    cause,
                };
                self.recalibrations.get_or_create(&labels).inc();
            }
            Metric::Verdict { gate, outcome } => {
                let labels = VerdictLabels {
                    namespace,
                    name,
                    gate: gate.clone(),
                    verdict: format!("{outcome:?}"),
                };
                self.verdicts.get_or_create(&labels).inc();
            }
        }
    }

    /// Shows where a service is; its phase replaces the one shown before.
    pub fn show(&self, service: &ServiceLabels, before: Option<&str>, shown: &Shown) {
        let phase = shown.phase.as_str();
        let labels = |phase: &str| InfoLabels {
            namespace: service.namespace.clone(),
            name: service.name.clone(),
            phase: phase.to_owned(),
        };
        if let Some(before) = before.filter(|before| *before != phase) {
            self.info.remove(&labels(before));
        }
        self.info.get_or_create(&labels(phase)).set(1);
        let weight = self.weight.get_or_create(service);
        weight.set(shown.weight.into());
        let desired = self.desired.get_or_create(service);
        desired.set(shown.desired.into());
    }

    /// Forgets the gauges of a service that is gone. Counters stay: they would otherwise fall.
    pub fn forget(&self, service: &ServiceLabels, phase: Option<&str>) {
        if let Some(phase) = phase {
            self.info.remove(&InfoLabels {
                namespace: service.namespace.clone(),
                name: service.name.clone(),
                phase: phase.to_owned(),
            });
        }
        self.weight.remove(service);
        self.desired.remove(service);
    }

    /// One pass ended.
    pub fn reconciled(&self, took: Duration, error: Option<&'static str>) {
        self.reconciles.observe(took.as_secs_f64());
        if let Some(error) = error {
            self.errors.get_or_create(&ErrorLabels { error }).inc();
        }
    }

    /// One write was sent to the API.
    pub fn wrote(&self, verb: &'static str, kind: &str) {
        let kind = kind.to_owned();
        self.writes.get_or_create(&WriteLabels { verb, kind }).inc();
    }

    /// Whether this process leads.
    pub fn leading(&self, leading: bool) {
        self.leader.set(leading.into());
    }
}

#[cfg(test)]
mod tests {
    use mixquant_crds::drift::RecalibrationCause;
    use mixquant_crds::status::{Outcome, Reason};

    use super::*;

    #[test]
    fn every_name_of_the_contract_is_exported_and_the_phase_is_one() {
        let metrics = Metrics::default();
        let service = ServiceLabels {
            namespace: "ns".into(),
            name: "chat".into(),
        };
        metrics.count(&service, &Metric::Promotion);
        let cause = Reason::SLOViolated;
        metrics.count(&service, &Metric::Rollback { cause });
        let (gate, outcome) = ("tpot".to_owned(), Outcome::Pass);
        metrics.count(&service, &Metric::Verdict { gate, outcome });
        let signal = "activations".to_owned();
        metrics.count(&service, &Metric::Drift { signal });
        let cause = RecalibrationCause::Drift;
        metrics.count(&service, &Metric::Recalibration { cause });
        let shown = |phase: &str, weight, desired| Shown {
            phase: phase.into(),
            weight,
            desired,
        };
        metrics.show(&service, None, &shown("Calibrating", 0, 2));
        metrics.show(&service, Some("Calibrating"), &shown("Canary", 33, 5));
        metrics.reconciled(Duration::from_millis(3), Some("Conflict"));
        metrics.wrote("apply", "Deployment");
        metrics.leading(true);
        let text = metrics.encode();
        for name in [
            names::SERVICE_INFO,
            names::CANARY_WEIGHT,
            names::DESIRED_REPLICAS,
            names::ROLLBACKS,
            names::PROMOTIONS,
            names::DRIFTS,
            names::RECALIBRATIONS,
            names::VERDICTS,
            names::RECONCILE_DURATION,
            names::RECONCILE_ERRORS,
            names::API_WRITES,
            names::LEADER,
        ] {
            assert!(text.contains(&format!("# HELP {name} ")), "{name}");
        }
        assert!(text.contains(
            "mixquant_rollbacks_total{namespace=\"ns\",name=\"chat\",cause=\"SLOViolated\"} 1"
        ));
        assert!(text.contains("phase=\"Canary\"} 1") && !text.contains("Calibrating"));
        assert!(text.contains("mixquant_canary_weight_percent{namespace=\"ns\",name=\"chat\"} 33"));
        assert!(text.contains("mixquant_desired_replicas{namespace=\"ns\",name=\"chat\"} 5"));
    }
}
