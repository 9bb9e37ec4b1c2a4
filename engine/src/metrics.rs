//! The engine's metrics: what is counted, under which names, with which buckets.
//!
//! Labels never come from a client. Each own series that dashboards and gateways know under a vLLM name is registered under
//! both names: one cell, two names.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mixquant_crds::names::engine_metrics as names;
use mixquant_crds::report::PROMPT_LENGTHS;
use mixquant_crds::{DecodeScheme, Digest, KvPrecision, PrecisionPlan};
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

mod drift;
mod quality;

use self::drift::Drift;
use self::quality::Quality;
use crate::drift::Counts;
use crate::model::WeightBytes;
use crate::valve::read::Check;

/// The arithmetic that read a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[expect(missing_docs, reason = "the words of the precision plan")]
pub enum PrefillPrecision {
    W8A8,
    BF16,
    FP32,
    W4A8,
    LUT4,
}

impl From<DecodeScheme> for PrefillPrecision {
    fn from(scheme: DecodeScheme) -> Self {
        match scheme {
            DecodeScheme::BF16 => Self::BF16,
            DecodeScheme::W8A8 => Self::W8A8,
            DecodeScheme::FP32 => Self::FP32,
            DecodeScheme::W4A8 => Self::W4A8,
            DecodeScheme::LUT4 => Self::LUT4,
        }
    }
}

/// Why a prompt was read with this arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[expect(non_camel_case_types, reason = "label values are lower case")]
pub enum PrefillReason {
    /// Long enough for the quantised copy.
    length,
    /// Too short for it.
    short,
    /// The plan has no switch.
    plan,
    /// The quantised copy read it first and the safety valve did not let that pass.
    fallback,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[expect(non_camel_case_types, reason = "label values are lower case")]
pub enum Outcome {
    /// Answered to the end.
    ok,
    /// The engine failed.
    error,
    /// The client went away.
    cancelled,
    /// Not taken: a wrong request, or no room.
    rejected,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PrefillLabels {
    precision: PrefillPrecision,
    reason: PrefillReason,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabels {
    tier: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    model_digest: String,
    artifact_digest: String,
    version: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CopyLabels {
    copy: &'static str,
}

type FloatGauge = Gauge<f64, AtomicU64>;

/// Every metric of the process.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    time_to_first_token: Histogram,
    time_per_output_token: Histogram,
    inter_token_latency: Histogram,
    end_to_end: Histogram,
    requests_running: Gauge,
    requests_waiting: Gauge,
    kv_usage: FloatGauge,
    kv_bytes: Family<TierLabels, Gauge>,
    weight_bytes: Family<CopyLabels, Gauge>,
    prefill_precision: Family<PrefillLabels, Counter>,
    min_prompt_tokens: Gauge,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    requests: Family<OutcomeLabels, Counter>,
    probes: Counter,
    quality: Quality,
    drift: Drift,
    request_prompt_tokens: Histogram,
    build_info: Family<BuildLabels, Gauge>,
}

impl Metrics {
    /// Registers everything under the labels `model_name` and `revision`.
    pub fn new(model_name: &str, revision: &str) -> Self {
        let labels = [("model_name", model_name), ("revision", revision)];
        let labels = labels.map(|(name, value)| (name.into(), value.to_owned().into()));
        let histogram = || Histogram::new(latency_buckets());
        let mut registry = Registry::with_labels(labels.into_iter());
        let quality = Quality::register(&mut registry);
        let drift = Drift::register(&mut registry);
        let metrics = Self {
            registry,
            time_to_first_token: histogram(),
            time_per_output_token: histogram(),
            inter_token_latency: histogram(),
            end_to_end: histogram(),
            requests_running: Gauge::default(),
            requests_waiting: Gauge::default(),
            kv_usage: FloatGauge::default(),
            kv_bytes: Family::default(),
            weight_bytes: Family::default(),
            prefill_precision: Family::default(),
            min_prompt_tokens: Gauge::default(),
            prompt_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            requests: Family::default(),
            probes: Counter::default(),
            quality,
            drift,
            request_prompt_tokens: Histogram::new(PROMPT_LENGTHS.map(f64::from)),
            build_info: Family::default(),
        };
        metrics.with_latencies().with_load().with_counters()
    }

    fn with_latencies(mut self) -> Self {
        self.latency(
            names::TIME_TO_FIRST_TOKEN,
            "Seconds from arrival to the first token",
            |m| &m.time_to_first_token,
        );
        let help = "Seconds a token after the first, one observation a request";
        self.latency(names::REQUEST_TIME_PER_OUTPUT_TOKEN, help, |m| {
            &m.time_per_output_token
        });
        self.latency(
            names::INTER_TOKEN_LATENCY,
            "Seconds between two tokens",
            |m| &m.inter_token_latency,
        );
        self.latency(
            names::E2E_REQUEST_LATENCY,
            "Seconds from arrival to the last token",
            |m| &m.end_to_end,
        );
        self
    }

    fn with_load(mut self) -> Self {
        let cell = self.requests_running.clone();
        self.add(
            names::REQUESTS_RUNNING,
            "Sequences that are computed",
            &cell,
        );
        let cell = self.requests_waiting.clone();
        self.add(names::REQUESTS_WAITING, "Sequences that wait", &cell);
        let cell = self.kv_usage.clone();
        self.add(
            names::KV_CACHE_USAGE,
            "Share of the cache's tokens that sequences hold, 0 to 1",
            &cell,
        );
        let cell = self.kv_bytes.clone();
        self.add(
            names::KV_CACHE_BYTES,
            "Bytes of stored keys and values by precision",
            &cell,
        );
        self
    }

    fn with_counters(mut self) -> Self {
        let cell = self.weight_bytes.clone();
        self.add(
            names::WEIGHT_BYTES,
            "Bytes of weights in memory by copy",
            &cell,
        );
        let cell = self.prefill_precision.clone();
        self.add(
            names::PREFILL_PRECISION,
            "Prompts by the arithmetic that read them",
            &cell,
        );
        let cell = self.min_prompt_tokens.clone();
        self.add(
            names::PREFILL_MIN_PROMPT_TOKENS,
            "Tokens from which on the quantised copy reads a prompt; 0 where none does",
            &cell,
        );
        let cell = self.request_prompt_tokens.clone();
        self.add(
            names::REQUEST_PROMPT_TOKENS,
            "Tokens of a prompt, one observation a prompt",
            &cell,
        );
        let cell = self.prompt_tokens.clone();
        self.add(names::PROMPT_TOKENS, "Prompt tokens read", &cell);
        let cell = self.generation_tokens.clone();
        self.add(names::GENERATION_TOKENS, "Tokens generated", &cell);
        let cell = self.requests.clone();
        self.add(names::REQUESTS, "Requests by how they ended", &cell);
        let cell = self.probes.clone();
        self.add(names::PROBES, "Probes that were answered", &cell);
        let cell = self.build_info.clone();
        self.add(names::BUILD_INFO, "What runs: always 1", &cell);
        let start = FloatGauge::default();
        start.set(
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs_f64(),
        );
        self.add(
            names::PROCESS_START_TIME,
            "Seconds since the epoch when the process began",
            &start,
        );
        for outcome in [
            Outcome::ok,
            Outcome::error,
            Outcome::cancelled,
            Outcome::rejected,
        ] {
            let _created = self.requests.get_or_create(&OutcomeLabels { outcome });
        }
        self
    }

    fn latency(
        &mut self,
        name: &'static str,
        help: &'static str,
        cell: impl Fn(&Self) -> &Histogram,
    ) {
        let cell = cell(self).clone();
        self.add(name, help, &cell);
    }

    /// Registers the cell under its own name and under each alias.
    fn add(&mut self, name: &'static str, help: &'static str, cell: &(impl Metric + Clone)) {
        self.registry.register(name, help, cell.clone());
        for (alias, _) in names::VLLM_ALIASES.iter().filter(|(_, own)| *own == name) {
            self.registry.register(*alias, help, cell.clone());
        }
    }

    /// The exposition in the text format of `OpenMetrics`.
    pub fn text(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a String cannot fail");
        text
    }

    /// What runs.
    pub fn set_build_info(&self, model: &Digest, artifact: Option<&Digest>) {
        let labels = BuildLabels {
            model_digest: model.to_string(),
            artifact_digest: artifact.map(ToString::to_string).unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION"),
        };
        self.build_info.get_or_create(&labels).set(1);
    }

    /// The plan that is obeyed.
    pub fn set_plan(&self, plan: &PrecisionPlan) {
        let threshold = if plan.has_switch() {
            i64::from(plan.prefill.min_prompt_tokens)
        } else {
            0
        };
        self.min_prompt_tokens.set(threshold);
    }

    /// What the weights take.
    pub fn set_weight_bytes(&self, bytes: WeightBytes) {
        for (copy, bytes) in [
            ("precise", bytes.precise),
            ("quantised", bytes.quantised),
            ("decode", bytes.decode),
            ("scratch", bytes.scratch),
        ] {
            self.weight_bytes
                .get_or_create(&CopyLabels { copy })
                .set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }

    /// A prompt was read.
    pub fn prefilled(&self, tokens: usize, precision: PrefillPrecision, reason: PrefillReason) {
        self.prompt_tokens.inc_by(tokens as u64);
        #[expect(
            clippy::cast_precision_loss,
            reason = "a prompt has far fewer than 2^53 tokens"
        )]
        self.request_prompt_tokens.observe(tokens as f64);
        self.prefill_precision
            .get_or_create(&PrefillLabels { precision, reason })
            .inc();
    }

    /// A sequence has its first token, so long after its request arrived.
    pub fn first_token(&self, after: Duration) {
        self.generation_tokens.inc();
        self.time_to_first_token.observe(after.as_secs_f64());
    }

    /// A sequence has another token, so long after the one before.
    pub fn next_token(&self, after: Duration) {
        self.generation_tokens.inc();
        self.inter_token_latency.observe(after.as_secs_f64());
    }

    /// A sequence has its last token. `decoding` is the time since its first, `tokens` how many it has.
    pub fn finished(&self, end_to_end: Duration, decoding: Duration, tokens: usize) {
        self.end_to_end.observe(end_to_end.as_secs_f64());
        if let Some(gaps) = tokens
            .checked_sub(1)
            .and_then(|gaps| u32::try_from(gaps).ok())
            .filter(|gaps| *gaps > 0)
        {
            self.time_per_output_token
                .observe(decoding.as_secs_f64() / f64::from(gaps));
        }
    }

    /// Logits were no finite numbers.
    pub fn nan_logits(&self) {
        self.quality.nan_logits();
    }

    /// The valve looked at a prompt.
    pub fn checked(&self, check: &Check) {
        self.quality.checked(check);
    }

    /// Rows of a prompt were compared with what calibration saw.
    pub fn watched(&self, counts: &Counts) {
        self.drift.watched(counts);
    }

    /// A request ended.
    pub fn request(&self, outcome: Outcome) {
        self.requests
            .get_or_create(&OutcomeLabels { outcome })
            .inc();
    }

    /// A probe was answered; as a request it counts like any other.
    pub fn probed(&self) {
        self.probes.inc();
    }

    /// How many sequences run and wait, and which share of the cache's tokens is held.
    pub fn set_load(&self, running: usize, waiting: usize, kv_usage: f64) {
        self.requests_running
            .set(i64::try_from(running).unwrap_or(i64::MAX));
        self.requests_waiting
            .set(i64::try_from(waiting).unwrap_or(i64::MAX));
        self.kv_usage.set(kv_usage);
    }

    /// Bytes of all caches by precision.
    pub fn set_kv_bytes(&self, bytes: &[(KvPrecision, usize)]) {
        for (tier, bytes) in bytes {
            let tier = match tier {
                KvPrecision::INT2 => "INT2",
                KvPrecision::INT4 => "INT4",
                KvPrecision::INT8 => "INT8",
                KvPrecision::BF16 => "BF16",
            };
            self.kv_bytes
                .get_or_create(&TierLabels { tier })
                .set(i64::try_from(*bytes).unwrap_or(i64::MAX));
        }
    }
}

/// Upper bounds in seconds: at most 5 % apart from 1 ms to 2 s, so that a 10 % change of a quantile can be told; then coarser to 120 s.
fn latency_buckets() -> Vec<f64> {
    let mut buckets = geometric(0.001, 2.0, 156);
    buckets.extend(geometric(2.0, 120.0, 19).into_iter().skip(1));
    buckets
}

/// So many equal ratios from `first` to `last`, in 6 digits so that the exposition stays short.
fn geometric(first: f64, last: f64, steps: i32) -> Vec<f64> {
    let ratio = (last / first).powf(1.0 / f64::from(steps));
    (0..=steps)
        .map(|step| {
            format!("{:.5e}", first * ratio.powi(step))
                .parse()
                .expect("a printed number is a number")
        })
        .collect()
}

#[cfg(test)]
mod tests;
