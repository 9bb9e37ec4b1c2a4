//! What prompts hold beyond what calibration saw, as metrics.

use mixquant_crds::names::engine_metrics as names;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::drift::{Counts, INPUTS, Share};
use crate::model::LinearInput;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InputLabels {
    input: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RowLabels {
    row: &'static str,
}

/// The cells of rows and of those beyond, by `L`.
#[derive(Debug)]
struct Rows<L> {
    all: Family<L, Counter>,
    beyond: Family<L, Counter>,
}

impl<L> Rows<L>
where
    L: Clone + std::hash::Hash + Eq + std::fmt::Debug + EncodeLabelSet + Send + Sync + 'static,
{
    fn register(
        registry: &mut Registry,
        names: [&'static str; 2],
        help: [&'static str; 2],
    ) -> Self {
        let rows = Self {
            all: Family::default(),
            beyond: Family::default(),
        };
        registry.register(names[0], help[0], rows.all.clone());
        registry.register(names[1], help[1], rows.beyond.clone());
        rows
    }

    fn add(&self, labels: &L, share: Share) {
        self.all.get_or_create(labels).inc_by(share.rows);
        self.beyond.get_or_create(labels).inc_by(share.beyond);
    }
}

/// The cells of drift.
#[derive(Debug)]
pub(super) struct Drift {
    activations: Rows<InputLabels>,
    kv: Rows<RowLabels>,
}

impl Drift {
    /// Registers every series at 0, so that a rate can be told from the first prompt on.
    pub(super) fn register(registry: &mut Registry) -> Self {
        let drift = Self {
            activations: Rows::register(
                registry,
                [names::ACTIVATION_ROWS, names::ACTIVATION_ROWS_BEYOND_RANGE],
                [
                    "Rows that linears read of prompts",
                    "Those whose largest magnitude is beyond what calibration saw",
                ],
            ),
            kv: Rows::register(
                registry,
                [names::KV_ROWS, names::KV_ROWS_BEYOND_RANGE],
                [
                    "Keys and values of prompts that the cache quantises",
                    "Those whose scale is beyond what calibration saw, or saturates",
                ],
            ),
        };
        drift.watched(&Counts::default());
        drift
    }

    pub(super) fn watched(&self, counts: &Counts) {
        for (input, share) in INPUTS.into_iter().zip(counts.inputs) {
            let input = match input {
                LinearInput::Attention => "attention",
                LinearInput::Output => "output",
                LinearInput::FeedForward => "feed_forward",
                LinearInput::Down => "down",
            };
            self.activations.add(&InputLabels { input }, share);
        }
        for (row, share) in [("key", counts.keys), ("value", counts.values)] {
            self.kv.add(&RowLabels { row }, share);
        }
    }
}
