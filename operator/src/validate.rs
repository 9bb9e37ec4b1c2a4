//! From the resource to a `ValidService`: parsed, checked, in base units. After it nothing reads the raw spec.
//!
//! CEL refuses nearly everything here at the door; what went around the schema (an older CRD, a raw write) is named with its fix.

use std::fmt;

use mixquant_crds::service::{ConfigMapKey, EngineSpec, KvCacheSpec, Resources};
use mixquant_crds::{
    Decimal, DecodePlan, DecodeScheme, Digest, KvCacheMode, KvCachePlan, MixQuantService,
    MixQuantServiceSpec, PrecisionPlan, PrefillPlan, PrefillScheme, PromptThreshold, Span,
    WeightCopies,
};
use serde::Serialize;

use crate::revision;

mod drift;
mod gates;
mod rollout;
mod scaling;
mod source;
pub mod traffic;

pub use drift::Drift;
pub use gates::Gate;
pub(crate) use gates::{Kind, kind};
pub use rollout::{Rollout, Step};
pub use scaling::{Bounds, Scaling, Scheduled, Targets};
pub use source::{Cache, Source};
pub use traffic::{OwnRoute, Routing};

/// A service whose spec can work.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ValidService {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.generation`.
    pub generation: i64,
    /// Over the spec without `replicas`, `scaling` and `rollout.paused`: what a person asked for. A failed revision is tried again when this changes,
    /// not when an autoscaler changes the number of pods or a person pauses.
    pub request: Digest,
    /// The same, whatever was retried: `request` is another one after a retry.
    pub spec: Digest,
    /// Over what a calibration Job takes from the spec, see `revision::inputs`.
    pub measured: Digest,
    /// Over what engine pods take from the spec, see `revision::intent`.
    pub served: Digest,
    /// The model.
    pub model: Model,
    /// What the calibration Job makes.
    pub plan: PrecisionPlan,
    /// What engine pods hold a quantised prefill to, where the spec says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub safety_valve: Option<SafetyValve>,
    /// How it measures.
    pub calibration: Calibration,
    /// How it is verified.
    pub verification: Verification,
    /// The claim for artifacts.
    pub artifacts_claim: String,
    /// The engine pods.
    pub engine: EngineSpec,
    /// Pods of stable; with `scaling` those that it begins with, and within a pass those that it has chosen.
    pub replicas: i32,
    /// How their number follows the load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Scaling>,
    /// The gates on live traffic.
    pub gates: Vec<Gate>,
    /// Probes for a pod of each track in each interval of a trial, where the spec has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probes: Option<u32>,
    /// From when live traffic is no longer what calibration saw.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drift: Option<Drift>,
    /// The way of a new revision.
    pub rollout: Rollout,
    /// Who splits the traffic.
    pub traffic: Routing,
}

/// The model.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Model {
    /// The served name.
    pub name: String,
    /// Where its files are.
    pub source: Source,
    /// The digest that it must have.
    pub digest: Option<Digest>,
}

/// What a quantised prefill is held to.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SafetyValve {
    /// Nats.
    pub max_kl: f64,
    /// Logits.
    pub min_margin: f64,
    /// Of the quantised prompts, 0 to 100.
    pub shadow_audit_percent: i32,
}

/// How a model is measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Calibration {
    /// The data.
    pub data: ConfigMapKey,
    /// Whether the plan's threshold is measured.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub measures_threshold: bool,
    /// Texts to read.
    pub samples: i32,
    /// Tokens of each.
    pub sequence_length: i32,
    /// When the Job is ended.
    pub active_deadline_seconds: i64,
    /// What its container needs.
    pub resources: Option<Resources>,
}

/// How an artifact is verified.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Verification {
    /// The data.
    pub data: ConfigMapKey,
    /// Windows at most.
    pub samples: i32,
    /// Tokens in each.
    pub sequence_length: i32,
    /// The gate.
    pub limits: PrecisionLimits,
}

/// The precision gate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PrecisionLimits {
    /// Percent.
    pub max_perplexity_increase: f64,
    /// Percent.
    pub min_top1_agreement: f64,
    /// Nats a token.
    pub max_kl_p99: f64,
}

/// Why a spec cannot work: every problem found, each with its fix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidSpec(pub Vec<String>);

impl fmt::Display for InvalidSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

impl std::error::Error for InvalidSpec {}

/// Collects problems so that one pass names all of them.
#[derive(Default)]
struct Problems(Vec<String>);

impl Problems {
    fn require(&mut self, holds: bool, message: &str) {
        if !holds {
            self.0.push(message.to_owned());
        }
    }

    fn decimal(&mut self, field: &str, text: &Decimal) -> f64 {
        text.value().unwrap_or_else(|| {
            self.0
                .push(format!("{field} is `{text}`: write a decimal number"));
            0.0
        })
    }

    fn seconds(&mut self, field: &str, span: &Span) -> u32 {
        span.seconds().unwrap_or_else(|| {
            self.0.push(format!(
                "{field} is `{span}`: write a span such as 60s, 5m or 1h"
            ));
            0
        })
    }

    fn text<'a>(&mut self, field: &str, value: Option<&'a str>) -> &'a str {
        value.unwrap_or_else(|| {
            self.0.push(format!("{field} is missing"));
            ""
        })
    }
}

/// Checks a resource and puts it into base units.
///
/// # Errors
/// Every problem of the spec, each with its fix.
pub fn validate(service: &MixQuantService) -> Result<ValidService, InvalidSpec> {
    let spec = &service.spec;
    let mut problems = Problems::default();
    let metadata = &service.metadata;
    let request = request_digest(spec);
    let mut valid = ValidService {
        name: problems
            .text("metadata.name", metadata.name.as_deref())
            .to_owned(),
        namespace: problems
            .text("metadata.namespace", metadata.namespace.as_deref())
            .to_owned(),
        uid: problems
            .text("metadata.uid", metadata.uid.as_deref())
            .to_owned(),
        generation: metadata.generation.unwrap_or(0),
        // These two are over parts of what is being made here, see below.
        measured: request.clone(),
        served: request.clone(),
        spec: request.clone(),
        request,
        model: Model {
            name: spec.model.name.clone(),
            source: source::source(&spec.model, &mut problems),
            digest: spec.model.digest.clone(),
        },
        plan: precision_plan(spec, &mut problems),
        safety_valve: safety_valve(spec, &mut problems),
        calibration: Calibration {
            data: spec.calibration.dataset.config_map.clone(),
            measures_threshold: matches!(
                spec.precision.prefill.min_prompt_tokens,
                Some(PromptThreshold::Measured(_))
            ),
            samples: spec.calibration.samples,
            sequence_length: spec.calibration.sequence_length,
            active_deadline_seconds: spec.calibration.active_deadline_seconds,
            resources: spec.calibration.resources.clone(),
        },
        verification: verification(spec, &mut problems),
        artifacts_claim: spec.artifacts.persistent_volume_claim.claim_name.clone(),
        engine: spec.engine.clone(),
        replicas: spec.replicas,
        scaling: spec
            .scaling
            .as_ref()
            .map(|spec| scaling::scaling(spec, &mut problems)),
        gates: gates::gates(spec, &mut problems),
        probes: gates::probes(spec, &mut problems),
        drift: drift::drift(spec, &mut problems),
        rollout: rollout::rollout(spec, &mut problems),
        traffic: traffic::routing(&spec.traffic),
    };
    traffic::check(&spec.traffic, &mut problems);
    problems.require(
        (1..=1000).contains(&valid.replicas),
        "replicas must lie between 1 and 1000",
    );
    problems.require(
        valid.calibration.data != valid.verification.data,
        "verification.dataset is the calibration data: verify on texts that calibration has not seen",
    );
    valid.measured = revision::measured(&valid);
    valid.served = revision::served(&valid);
    if problems.0.is_empty() {
        Ok(valid)
    } else {
        Err(InvalidSpec(problems.0))
    }
}

/// See [`ValidService::request`].
fn request_digest(spec: &MixQuantServiceSpec) -> Digest {
    let mut asked = spec.clone();
    asked.replicas = 0;
    asked.scaling = None;
    asked.rollout.paused = false;
    Digest::of_json(&asked).expect("a spec is plain data with text keys")
}

fn precision_plan(spec: &MixQuantServiceSpec, problems: &mut Problems) -> PrecisionPlan {
    let precision = &spec.precision;
    let copies = precision.weight_copies.unwrap_or_default();
    let prefill = match precision.prefill.scheme {
        PrefillScheme::Precise => 1,
        // One copy has no switch, and so no threshold.
        PrefillScheme::W8A8 if copies == WeightCopies::Single => 1,
        PrefillScheme::W8A8 => {
            precision
                .prefill
                .min_prompt_tokens
                .map_or(0, |threshold| match threshold {
                    PromptThreshold::Tokens(tokens) => u32::try_from(tokens).unwrap_or(0),
                    // What calibration measures takes this one's place.
                    PromptThreshold::Measured(_) => 1,
                })
        }
    };
    let plan = PrecisionPlan {
        prefill: PrefillPlan {
            scheme: precision.prefill.scheme,
            min_prompt_tokens: prefill,
        },
        decode: DecodePlan {
            scheme: precision.decode.scheme,
            bits_per_weight: (precision.decode.bits_per_weight.as_ref())
                .map(|bits| problems.decimal("precision.decode.bitsPerWeight", bits)),
        },
        weight_copies: copies,
        kv_cache: kv_cache_plan(&precision.kv_cache, problems),
    };
    if let Err(problem) = plan.check() {
        problems.0.push(format!("precision.{problem}"));
    }
    plan
}

fn safety_valve(spec: &MixQuantServiceSpec, problems: &mut Problems) -> Option<SafetyValve> {
    let precision = &spec.precision;
    let valve = precision.safety_valve.as_ref()?;
    problems.require(
        precision.prefill.scheme == PrefillScheme::W8A8
            && precision.decode.scheme != DecodeScheme::W8A8,
        "precision.safetyValve guards a quantised prefill in front of a precise decode: leave it out with prefill.scheme Precise and with weightCopies Single",
    );
    problems.require(
        (0..=100).contains(&valve.shadow_audit_percent),
        "precision.safetyValve.shadowAuditPercent must lie between 0 and 100",
    );
    Some(SafetyValve {
        max_kl: problems.decimal("precision.safetyValve.maxKl", &valve.max_kl),
        min_margin: problems.decimal("precision.safetyValve.minMargin", &valve.min_margin),
        shadow_audit_percent: valve.shadow_audit_percent,
    })
}

fn kv_cache_plan(spec: &KvCacheSpec, problems: &mut Problems) -> KvCachePlan {
    let count = |value: i32| u32::try_from(value).unwrap_or(0);
    let mut plan = KvCachePlan {
        mode: spec.mode,
        default: spec.default,
        important: spec.important.unwrap_or(spec.default),
        quantile: 0.9,
        sink_tokens: 0,
        recent_tokens: 0,
        block_size: count(spec.block_size),
    };
    match (spec.mode, &spec.importance) {
        (KvCacheMode::AttentionMixedPrecision, Some(importance)) => {
            plan.quantile = problems.decimal(
                "precision.kvCache.importance.quantile",
                &importance.quantile,
            );
            plan.sink_tokens = count(importance.sink_tokens);
            plan.recent_tokens = count(importance.recent_tokens);
        }
        (KvCacheMode::AttentionMixedPrecision, None) => problems.0.push(
            "precision.kvCache.importance is missing: mode AttentionMixedPrecision needs it".into(),
        ),
        (KvCacheMode::Uniform, None) => {}
        (KvCacheMode::Uniform, Some(_)) => problems
            .0
            .push("precision.kvCache.importance cannot act in mode Uniform: leave it out".into()),
    }
    plan
}

fn verification(spec: &MixQuantServiceSpec, problems: &mut Problems) -> Verification {
    let spec = &spec.verification;
    Verification {
        data: spec.dataset.config_map.clone(),
        samples: spec.samples,
        sequence_length: spec.sequence_length,
        limits: PrecisionLimits {
            max_perplexity_increase: problems.decimal(
                "verification.maxPerplexityIncreasePercent",
                &spec.max_perplexity_increase_percent,
            ),
            min_top1_agreement: problems.decimal(
                "verification.minTop1AgreementPercent",
                &spec.min_top1_agreement_percent,
            ),
            max_kl_p99: problems.decimal("verification.maxKlP99", &spec.max_kl_p99),
        },
    }
}

#[cfg(test)]
mod tests;
