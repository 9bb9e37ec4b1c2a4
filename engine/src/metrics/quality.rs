//! What the safety valve saw, as metrics: how far quantised answers are from precise ones, and what followed.

use mixquant_crds::names::engine_metrics as names;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::geometric;
use crate::valve::log::Observer;
use crate::valve::read::Check;
use crate::valve::{Agreement, Reason};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AgreementLabels {
    agreement: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RecordLabels {
    outcome: &'static str,
}

/// The valve's cells.
#[derive(Debug)]
pub(super) struct Quality {
    fallbacks: Family<ReasonLabels, Counter>,
    first_token_kl: Histogram,
    agreement: Family<AgreementLabels, Counter>,
    audit_kl: Histogram,
    records: Family<RecordLabels, Counter>,
    nan_logits: Counter,
}

impl Quality {
    /// Registers every series. Those with labels begin at 0, so that a rate can be told from the first event on.
    pub(super) fn register(registry: &mut Registry) -> Self {
        let quality = Self {
            fallbacks: Family::default(),
            first_token_kl: Histogram::new(kl_buckets()),
            agreement: Family::default(),
            audit_kl: Histogram::new(kl_buckets()),
            records: Family::default(),
            nan_logits: Counter::default(),
        };
        let help = "Prompts that were read again precisely";
        registry.register(names::VALVE_FALLBACK, help, quality.fallbacks.clone());
        let help = "KL of the precise from the quantised logits of the last prompt token, nats";
        registry.register(names::FIRST_TOKEN_KL, help, quality.first_token_kl.clone());
        let help = "Checked prompts by whether the most likely token is the same";
        registry.register(names::TOP1_AGREEMENT, help, quality.agreement.clone());
        let help = "KL of a full precise prefill from what the valve let pass, nats";
        registry.register(names::SHADOW_AUDIT_KL, help, quality.audit_kl.clone());
        let help = "Records of the difference log";
        registry.register(names::DIFFERENCE_RECORDS, help, quality.records.clone());
        let help = "Steps whose logits were no finite numbers";
        registry.register(names::NAN_LOGITS, help, quality.nan_logits.clone());
        for reason in [Reason::Nan, Reason::Top1, Reason::Kl, Reason::Audit] {
            let _at_zero = quality.fallbacks.get_or_create(&labels(reason));
        }
        quality
    }

    pub(super) fn checked(&self, check: &Check) {
        if let Some(comparison) = check.comparison {
            self.first_token_kl.observe(comparison.kl);
            let agreement = match comparison.agreement {
                Agreement::Same => "same",
                Agreement::Tie => "tie",
                Agreement::Different => "different",
            };
            self.agreement
                .get_or_create(&AgreementLabels { agreement })
                .inc();
        } else {
            self.nan_logits.inc();
        }
        if let Some(Some(comparison)) = check.audit {
            self.audit_kl.observe(comparison.kl);
        }
        if let Some(reason) = check.fallback() {
            self.fallbacks.get_or_create(&labels(reason)).inc();
        }
    }

    pub(super) fn nan_logits(&self) {
        self.nan_logits.inc();
    }
}

impl Observer for super::Metrics {
    fn record(&self, written: bool) {
        let outcome = if written { "written" } else { "dropped" };
        self.quality
            .records
            .get_or_create(&RecordLabels { outcome })
            .inc();
    }
}

fn labels(reason: Reason) -> ReasonLabels {
    ReasonLabels {
        reason: reason.word(),
    }
}

/// Upper bounds in nats: four a factor of ten from 1e-6 to 10. A healthy copy lies below 0.05, and so does the gate.
fn kl_buckets() -> Vec<f64> {
    geometric(1e-6, 10.0, 28)
}
