//! The custom resource `MixQuantService`: what a user asks for, with the rules that `kubectl apply` enforces.
//!
//! The comments here become the schema's descriptions (`kubectl explain mqs.spec`). A field that could not act is refused by a rule,
//! never ignored. What CEL cannot see (does the claim exist, does the data parse) becomes a condition.

#![expect(
    unreachable_pub,
    reason = "KubeSchema repeats each struct inside a private scope"
)]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::drift::DriftSpec;
use crate::precision::{DecodeScheme, KvCacheMode, KvPrecision, PrefillScheme, WeightCopies};
use crate::rollout::{GateSpec, ProbeSpec, RolloutSpec, SloSpec};
use crate::scalars::{Decimal, PromptThreshold};
use crate::scaling::ScalingSpec;
pub use crate::source::{
    ClaimPath, ClaimRef, EmptyDirCache, ModelCache, ModelImage, ModelSource, ObjectStore, SecretRef,
};
use crate::status::MixQuantServiceStatus;
use crate::traffic::TrafficSpec;

/// A language model served with quantised prefill, precise decode and a mixed-precision KV cache: calibrated and verified before it serves, rolled out gray, rolled back by itself.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "mixquant.io",
    version = "v1alpha1",
    kind = "MixQuantService",
    plural = "mixquantservices",
    shortname = "mqs",
    category = "all",
    namespaced,
    derive = "PartialEq",
    status = "MixQuantServiceStatus",
    scale(spec_replicas_path = ".spec.replicas", status_replicas_path = ".status.replicas", label_selector_path = ".status.selector"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Stable", type_ = "string", json_path = ".status.stable.revision"),
    printcolumn(name = "Canary", type_ = "string", json_path = ".status.canary.revision"),
    printcolumn(name = "Weight", type_ = "integer", json_path = ".status.rollout.weight"),
    printcolumn(name = "TPOT", type_ = "string", json_path = ".status.tpot"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].reason", priority = 1),
    printcolumn(name = "Step", type_ = "string", json_path = ".status.rollout.step", priority = 1),
    printcolumn(name = "Mirror", type_ = "integer", json_path = ".status.rollout.mirror", priority = 1),
    validation = Rule::new("self.metadata.name.size() <= 40").message("metadata.name is too long: use at most 40 characters, the names of Deployments and Jobs are made from it"),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')").message("metadata.name must start with a letter and hold only a-z, 0-9 and -: the Service takes the same name")
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("self.calibration.dataset.configMap.name != self.verification.dataset.configMap.name || self.calibration.dataset.configMap.key != self.verification.dataset.configMap.key").message("verification.dataset is the calibration data: verify on texts that calibration has not seen"),
    validation = Rule::new("self.calibration.sequenceLength <= self.engine.maxSequenceLength").message("calibration.sequenceLength is above engine.maxSequenceLength: lower it, the engine never sees such a text"),
    validation = Rule::new("self.verification.sequenceLength <= self.engine.maxSequenceLength").message("verification.sequenceLength is above engine.maxSequenceLength: lower it, the engine never sees such a text"),
    validation = Rule::new("!has(self.precision.prefill.minPromptTokens) || type(self.precision.prefill.minPromptTokens) != int || self.precision.prefill.minPromptTokens <= self.engine.maxSequenceLength").message("precision.prefill.minPromptTokens is above engine.maxSequenceLength: no prompt could ever use the quantised prefill"),
    validation = Rule::new("!has(self.precision.kvCache.importance) || self.precision.kvCache.importance.sinkTokens + self.precision.kvCache.importance.recentTokens < self.engine.maxSequenceLength").message("kvCache.importance.sinkTokens + recentTokens reach engine.maxSequenceLength: nothing would ever be stored at the default precision"),
    validation = Rule::new("!has(self.precision.kvCache.importance) || self.precision.kvCache.importance.sinkTokens + self.precision.kvCache.importance.recentTokens < self.calibration.sequenceLength").message("kvCache.importance.sinkTokens + recentTokens reach calibration.sequenceLength: no key could be measured, raise sequenceLength"),
    validation = Rule::new("self.precision.kvCache.default == 'BF16' || (has(self.precision.kvCache.importance) ? self.precision.kvCache.importance.recentTokens : 0) + 2 * self.precision.kvCache.blockSize < self.verification.sequenceLength").message("verification.sequenceLength is not above kvCache.importance.recentTokens + 2 * blockSize: no key would be quantised while the precision is measured, raise it"),
    validation = Rule::new("self.precision.prefill.scheme == 'Precise' || 2 * self.precision.kvCache.blockSize <= self.verification.sequenceLength").message("verification.sequenceLength is below 2 * kvCache.blockSize: the quantised prefill would not be measured, raise it"),
    validation = Rule::new("!has(self.gates) || self.precision.prefill.scheme == 'W8A8' || self.gates.all(gate, !(gate.metric in ['ValveFallbackRate', 'FirstTokenKl', 'ShadowKl']))").message("gates: ValveFallbackRate, FirstTokenKl and ShadowKl measure the quantised prefill, and precision.prefill.scheme is Precise: remove the gate"),
    validation = Rule::new("!has(self.gates) || has(self.probe) || self.gates.all(gate, gate.metric != 'NllIncrease')").message("gates: NllIncrease compares how canary and stable answer probes, and nothing sends any: set spec.probe or remove the gate"),
    validation = Rule::new("!has(self.drift) || !has(self.drift.maxValveFallbackPercent) || (self.precision.prefill.scheme == 'W8A8' && self.precision.decode.scheme != 'W8A8')").message("drift.maxValveFallbackPercent watches a quantised prefill in front of a precise decode: leave it out with prefill.scheme Precise and with weightCopies Single"),
    validation = Rule::new("!has(self.drift) || !has(self.drift.maxKvBeyondRangePercent) || self.precision.kvCache.default != 'BF16'").message("drift.maxKvBeyondRangePercent watches a quantised cache, and kvCache.default is BF16: leave it out"),
    validation = Rule::new("has(self.traffic) && self.traffic.mode == 'GatewayAPI' ? self.rollout.steps.all(step, has(step.weight) || has(step.mirror) || !has(step.canaryReplicas)) : self.rollout.steps.all(step, !has(step.weight) || !has(step.canaryReplicas))").message("rollout.steps: with traffic.mode GatewayAPI a step with canaryReplicas has its weight or mirror too; with ReplicaRatio the pods are the weight, and a step has one of them"),
    validation = Rule::new("!self.rollout.steps.exists(step, has(step.mirror)) || (has(self.traffic) && has(self.traffic.parentRefs))").message("rollout.steps: mirror copies requests by the route that the operator makes, not by the ratio of pods and not by a route of yours: set traffic.mode GatewayAPI with parentRefs, or remove the step with mirror"),
    validation = Rule::new("!has(self.scaling) || !has(oldSelf.scaling) || self.replicas == oldSelf.replicas").message("spec.scaling owns the number of pods: leave replicas as it is and change scaling.minReplicas and maxReplicas, or remove spec.scaling to scale by hand or by another autoscaler")
)]
pub struct MixQuantServiceSpec {
    /// The model and where its files are.
    pub model: ModelSpec,
    /// The arithmetic of prefill, decode and the KV cache.
    pub precision: PrecisionSpec,
    /// How the model is measured before it serves.
    pub calibration: CalibrationSpec,
    /// What the measured precision must be before any pod serves.
    pub verification: VerificationSpec,
    /// Where calibration writes its artifact and engine pods read it.
    pub artifacts: ArtifactsSpec,
    /// The engine pods.
    pub engine: EngineSpec,
    /// Engine pods of the stable revision; with `scaling` those that it begins with.
    #[schemars(range(min = 1, max = 1000))]
    #[serde(default = "one")]
    pub replicas: i32,
    /// How many engine pods there are, by their load. It owns their number: `replicas` can then not be changed, by an autoscaler neither.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<ScalingSpec>,
    /// What live traffic must see, or the canary is rolled back.
    pub slo: SloSpec,
    /// More gates on live traffic.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub gates: Vec<GateSpec>,
    /// Requests of the operator's own, so that a canary without users is judged too, and on the same texts as stable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe: Option<ProbeSpec>,
    /// From when live traffic is no longer what calibration saw, and what follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drift: Option<DriftSpec>,
    /// How a new revision reaches traffic.
    pub rollout: RolloutSpec,
    /// Who splits the traffic between stable and the canary.
    #[serde(default, skip_serializing_if = "is_default")]
    pub traffic: TrafficSpec,
}

/// What a spec does not say is not written out: its digest is the same before and after the field came.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn one() -> i32 {
    1
}

/// The model.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("has(self.digest) || !has(self.source.objectStore) || !self.source.objectStore.uri.startsWith('http://')").message("model.digest is missing: over http:// anybody on the way could put another model in its place"),
    validation = Rule::new("has(self.digest) || !has(self.source.objectStore) || !has(self.source.objectStore.cache) || !has(self.source.objectStore.cache.persistentVolumeClaim)").message("model.digest is missing: pods of several revisions share objectStore.cache.persistentVolumeClaim, and each must find its own model there")
)]
pub struct ModelSpec {
    /// The name that requests ask for.
    #[schemars(
        length(min = 1, max = 128),
        regex(pattern = r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$")
    )]
    pub name: String,
    /// Where the files are.
    pub source: ModelSource,
    /// The model's content digest, as `mixquant-engine inspect` prints it. Checked before the first use; recorded in status when absent.
    pub digest: Option<Digest>,
}

/// The arithmetic.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("self.prefill.scheme == 'W8A8' && !(has(self.weightCopies) && self.weightCopies == 'Single') ? has(self.prefill.minPromptTokens) : !has(self.prefill.minPromptTokens)").message("prefill.minPromptTokens belongs to scheme W8A8 in front of a precise decode: set it there (512 is a good start) and leave it out with Precise and with weightCopies Single"),
    validation = Rule::new("!has(self.weightCopies) || self.prefill.scheme == 'W8A8'").message("precision.weightCopies says how the quantised copy is kept: leave it out with prefill.scheme Precise"),
    validation = Rule::new("(has(self.weightCopies) && self.weightCopies == 'Single') == (self.decode.scheme == 'W8A8')").message("decode.scheme W8A8 and weightCopies Single belong together: one INT8 copy serves prefill and decode"),
    validation = Rule::new("!(has(self.weightCopies) && self.weightCopies == 'OnTheFly' && self.decode.scheme in ['W4A8', 'LUT4'])").message("weightCopies OnTheFly makes the quantised form from precise weights, and decode from a quantised copy keeps none: use Dual"),
    validation = Rule::new("!has(self.safetyValve) || (self.prefill.scheme == 'W8A8' && self.decode.scheme != 'W8A8')").message("precision.safetyValve guards a quantised prefill in front of a precise decode: leave it out with prefill.scheme Precise and with weightCopies Single")
)]
pub struct PrecisionSpec {
    /// Reading the prompt.
    pub prefill: PrefillSpec,
    /// Generating tokens.
    pub decode: DecodeSpec,
    /// Which weights stay in memory: `Dual` (both, the default), `OnTheFly` (the quantised form is made while a prompt is read) or `Single` (one INT8 copy for prefill and decode).
    pub weight_copies: Option<WeightCopies>,
    /// What a quantised prefill must keep of the precise answer, or the engine reads that prompt again precisely.
    pub safety_valve: Option<SafetyValveSpec>,
    /// Storing keys and values.
    pub kv_cache: KvCacheSpec,
}

/// What a quantised prefill must keep of the precise answer.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SafetyValveSpec {
    /// KL(precise ‖ quantised) of the first token at most, nats.
    #[serde(default = "max_kl")]
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("safetyValve.maxKl must be above 0, such as \"0.05\": at 0 every prompt would be read twice"))]
    pub max_kl: Decimal,
    /// Another most likely token is a breach only where the precise logits of the two most likely tokens are at least so far apart.
    #[serde(default = "min_margin")]
    pub min_margin: Decimal,
    /// Percent of the quantised prompts that are also read precisely, as ground truth.
    #[schemars(range(min = 0, max = 100))]
    #[serde(default = "shadow_audit_percent")]
    pub shadow_audit_percent: i32,
}

fn max_kl() -> Decimal {
    Decimal("0.05".into())
}

fn min_margin() -> Decimal {
    Decimal("0.5".into())
}

fn shadow_audit_percent() -> i32 {
    1
}

/// Reading the prompt.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PrefillSpec {
    /// `W8A8`, or `Precise` for the same arithmetic as decode.
    pub scheme: PrefillScheme,
    /// Prompts shorter than this use the decode scheme: quantised prefill gains nothing on them. `Auto` is the break-even that the calibration Job measures and pins in the artifact.
    #[x_kube(validation = Rule::new("type(self) == int ? self >= 1 && self <= 1048576 : self == 'Auto'").message("prefill.minPromptTokens must be a number from 1 to 1048576, or Auto"))]
    pub min_prompt_tokens: Option<PromptThreshold>,
}

/// Generating tokens.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("!has(self.bitsPerWeight) || self.scheme == 'W4A8'").message("decode.bitsPerWeight is a budget for W4A8: leave it out with other schemes")
)]
pub struct DecodeSpec {
    /// `BF16`; `W8A8` where one INT8 copy serves both phases; `W4A8` or `LUT4` for a 4-bit copy that calibration makes for decode alone; or `FP32` for the baseline's own arithmetic.
    pub scheme: DecodeScheme,
    /// Bits a weight, scales included, that calibration spends where they save most: 4 bits in groups of 128, 64 or 32, and 8. Without it 4 bits in groups of 128.
    #[x_kube(validation = Rule::new("double(self) > 4.0 && double(self) <= 8.0").message("decode.bitsPerWeight must be above 4 and at most 8, such as \"4.5\""))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_weight: Option<Decimal>,
}

/// Storing keys and values.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("self.mode == 'AttentionMixedPrecision' ? has(self.important) && has(self.importance) : !has(self.important) && !has(self.importance)").message("kvCache.important and kvCache.importance belong to mode AttentionMixedPrecision: set both there and leave them out with Uniform"),
    validation = Rule::new("!has(self.important) || self.important in ['INT8', 'BF16']").message("kvCache.important must be INT8 or BF16"),
    validation = Rule::new("self.mode != 'AttentionMixedPrecision' || self.default in ['INT2', 'INT4']").message("kvCache.default must be INT4 or INT2 in mode AttentionMixedPrecision: it has to be less precise than kvCache.important")
)]
pub struct KvCacheSpec {
    /// Whether attention decides the precision of a key and its value.
    pub mode: KvCacheMode,
    /// Keys and values that attention does not lean on; in mode Uniform all of them.
    pub default: KvPrecision,
    /// Keys and values that attention leans on.
    pub important: Option<KvPrecision>,
    /// What counts as important.
    pub importance: Option<ImportanceSpec>,
    /// Tokens in a block of the cache.
    #[serde(default = "sixteen")]
    #[x_kube(validation = Rule::new("self in [8, 16, 32, 64]").message("kvCache.blockSize must be 8, 16, 32 or 64"))]
    pub block_size: i32,
}

fn sixteen() -> i32 {
    16
}

/// What counts as important.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImportanceSpec {
    /// A key is important when attention leans on it at least as much as on this share of calibration's keys.
    #[x_kube(validation = Rule::new("double(self) > 0.0 && double(self) < 1.0").message("importance.quantile must lie between 0 and 1, such as \"0.90\""))]
    pub quantile: Decimal,
    /// So many first tokens are always important.
    #[schemars(range(min = 0, max = 1024))]
    pub sink_tokens: i32,
    /// So many last tokens are not quantised yet.
    #[schemars(range(min = 0, max = 65536))]
    pub recent_tokens: i32,
}

/// Data in a ConfigMap.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DatasetSource {
    /// The ConfigMap and the key in it.
    pub config_map: ConfigMapKey,
}

/// A key of a ConfigMap in the service's namespace.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ConfigMapKey {
    /// The ConfigMap's name.
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    )]
    pub name: String,
    /// The key: a file name ending in .jsonl (one JSON object a line with `text` or `messages`) or .txt.
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = r"^[-._a-zA-Z0-9]+\.(jsonl|txt)$")
    )]
    pub key: String,
}

/// How the model is measured.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CalibrationSpec {
    /// Texts like those that the service will read.
    pub dataset: DatasetSource,
    /// How many of them to read.
    #[schemars(range(min = 1, max = 100_000))]
    #[serde(default = "calibration_samples")]
    pub samples: i32,
    /// Tokens of each to read.
    #[schemars(range(min = 32, max = 1_048_576))]
    #[serde(default = "sequence_length")]
    pub sequence_length: i32,
    /// The Job is ended after so many seconds.
    #[schemars(range(min = 10, max = 604_800))]
    #[serde(default = "active_deadline")]
    pub active_deadline_seconds: i64,
    /// What the Job's container needs.
    pub resources: Option<Resources>,
}

fn calibration_samples() -> i32 {
    128
}

fn sequence_length() -> i32 {
    1024
}

fn active_deadline() -> i64 {
    3600
}

/// What the measured precision must be.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VerificationSpec {
    /// Texts that calibration has not seen.
    pub dataset: DatasetSource,
    /// At most so many windows of it.
    #[schemars(range(min = 1, max = 100_000))]
    #[serde(default = "verification_samples")]
    pub samples: i32,
    /// Tokens in a window.
    #[schemars(range(min = 32, max = 1_048_576))]
    #[serde(default = "sequence_length")]
    pub sequence_length: i32,
    /// Perplexity may be so many percent above the unquantised baseline's.
    pub max_perplexity_increase_percent: Decimal,
    /// So many percent of the tokens must have the baseline's most likely token.
    #[x_kube(validation = Rule::new("double(self) > 0.0 && double(self) <= 100.0").message("verification.minTop1AgreementPercent must lie above 0 and at most at 100"))]
    pub min_top1_agreement_percent: Decimal,
    /// The 99th percentile of KL(baseline ‖ served), nats a token, may be at most this.
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("verification.maxKlP99 must be above 0: no quantised model has no divergence at all"))]
    pub max_kl_p99: Decimal,
}

fn verification_samples() -> i32 {
    64
}

/// Where artifacts are kept.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ArtifactsSpec {
    /// A claim that the calibration Job writes and engine pods read: ReadWriteMany, or ReadWriteOnce on one node.
    pub persistent_volume_claim: ClaimRef,
}

/// The engine pods.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EngineSpec {
    /// The engine's image.
    #[schemars(length(min = 1, max = 512))]
    #[x_kube(validation = Rule::new("self.matches('^[a-zA-Z0-9][a-zA-Z0-9._:/@-]*$')").message("engine.image is not an image reference: write registry/name:tag or registry/name@sha256:…"))]
    pub image: String,
    /// Secrets with registry credentials, for engine and Job pods. They run under an account of their own, so those of `default` do not reach them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub image_pull_secrets: Vec<SecretName>,
    /// CPU and memory of a pod.
    pub resources: Option<Resources>,
    /// Sequences decoded together.
    #[schemars(range(min = 1, max = 1024))]
    #[serde(default = "max_batch_size")]
    pub max_batch_size: i32,
    /// Prompt and answer together, in tokens.
    #[schemars(range(min = 64, max = 1_048_576))]
    #[serde(default = "sequence_length")]
    pub max_sequence_length: i32,
}

/// A Secret in the service's namespace.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretName {
    /// Its name.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("engine.imagePullSecrets: a Secret's name has only a-z, 0-9, - and ."))]
    pub name: String,
}

fn max_batch_size() -> i32 {
    32
}

/// CPU and memory.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = Rule::new("!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)").message("resources.requests is above resources.limits: no pod could be created")
)]
pub struct Resources {
    /// What is set aside.
    #[schemars(extend("maxProperties" = 4))]
    pub requests: Option<BTreeMap<String, Quantity>>,
    /// What may be used at most.
    #[schemars(extend("maxProperties" = 4))]
    pub limits: Option<BTreeMap<String, Quantity>>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::valve_defaults as engine;

    #[test]
    fn the_safety_valve_has_the_same_defaults_here_and_in_the_engine() {
        assert_eq!(max_kl().value(), Some(engine::MAX_KL));
        assert_eq!(min_margin().value(), Some(engine::MIN_MARGIN));
        assert!((f64::from(shadow_audit_percent()) - engine::SHADOW_AUDIT_PERCENT).abs() < 1e-12);
    }
}
