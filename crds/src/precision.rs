//! The precision plan: which arithmetic prefill, decode and the KV cache use. Written by calibration, obeyed by the engine.
//!
//! The same words stand in the custom resource's `spec.precision`; the operator hands them to the calibration Job as this JSON.

use serde::{Deserialize, Serialize};

/// How the linears of a block are computed while the prompt is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum PrefillScheme {
    /// INT8 weights (symmetric, one scale an output channel) times INT8 activations (symmetric, one scale a token), INT32 sums.
    W8A8,
    /// The same weights and arithmetic as decode: no switch.
    Precise,
}

/// How the linears of a block are computed while tokens are generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum DecodeScheme {
    /// BF16 weights and activations, FP32 sums; FP32 in norms and softmax.
    BF16,
    /// FP32 arithmetic on the stored weights: the baseline that divergence is measured against.
    FP32,
}

/// How one stored key or value is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum KvPrecision {
    /// 2 bits a channel (aggressive).
    INT2,
    /// 4 bits a channel.
    INT4,
    /// 8 bits a channel.
    INT8,
    /// 16-bit brain float.
    BF16,
}

/// Whether all keys are kept alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum KvCacheMode {
    /// Every key and value at the `default` precision.
    Uniform,
    /// Keys that attention leans on at `important`, the rest at `default`.
    AttentionMixedPrecision,
}

/// The arithmetic of prefill.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PrefillPlan {
    /// The scheme for prompts of at least `min_prompt_tokens`; shorter prompts use the decode scheme.
    pub scheme: PrefillScheme,
    /// Counts prompt tokens that are not served from cache. At least 1.
    pub min_prompt_tokens: u32,
}

/// The arithmetic of decode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DecodePlan {
    /// The scheme of every generated token.
    pub scheme: DecodeScheme,
}

/// How keys and values are stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KvCachePlan {
    /// Whether attention decides.
    pub mode: KvCacheMode,
    /// The precision of keys and values that are neither important, nor a sink, nor recent.
    pub default: KvPrecision,
    /// The precision of important ones; equals `default` in mode `Uniform`.
    pub important: KvPrecision,
    /// A key is important when its normalised attention is at or above this quantile of calibration. In (0, 1).
    pub quantile: f64,
    /// So many first tokens are always important.
    pub sink_tokens: u32,
    /// So many last tokens are not quantised yet.
    pub recent_tokens: u32,
    /// Tokens in a block; a block is quantised once, when it is full and no longer recent.
    pub block_size: u32,
}

/// What an artifact says about precision (`plan.json`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PrecisionPlan {
    /// Prefill.
    pub prefill: PrefillPlan,
    /// Decode.
    pub decode: DecodePlan,
    /// KV cache.
    pub kv_cache: KvCachePlan,
}

impl PrecisionPlan {
    /// The unquantised reference: FP32 arithmetic on the stored weights and a BF16-free cache is what `verify` measures against.
    pub fn baseline() -> Self {
        Self::precise(DecodeScheme::FP32)
    }

    /// One arithmetic for prefill and decode, nothing quantised in the cache.
    pub fn precise(scheme: DecodeScheme) -> Self {
        Self {
            prefill: PrefillPlan {
                scheme: PrefillScheme::Precise,
                min_prompt_tokens: 1,
            },
            decode: DecodePlan { scheme },
            kv_cache: KvCachePlan {
                mode: KvCacheMode::Uniform,
                default: KvPrecision::BF16,
                important: KvPrecision::BF16,
                quantile: 0.9,
                sink_tokens: 0,
                recent_tokens: 0,
                block_size: 16,
            },
        }
    }

    /// The first thing in the plan that cannot work, named with its fix.
    ///
    /// # Errors
    /// The offending field and what to write instead.
    pub fn check(&self) -> Result<(), String> {
        let kv = &self.kv_cache;
        if self.prefill.min_prompt_tokens == 0 {
            return Err("prefill.minPromptTokens is 0: write at least 1".into());
        }
        if !(kv.quantile > 0.0 && kv.quantile < 1.0) {
            return Err(format!(
                "kvCache.quantile is {}: write a number between 0 and 1, such as 0.9",
                kv.quantile
            ));
        }
        if ![8, 16, 32, 64].contains(&kv.block_size) {
            return Err(format!(
                "kvCache.blockSize is {}: write 8, 16, 32 or 64",
                kv.block_size
            ));
        }
        if kv.mode == KvCacheMode::Uniform && kv.important != kv.default {
            return Err("kvCache.important differs from kvCache.default in mode Uniform: make them equal or use AttentionMixedPrecision".into());
        }
        if kv.mode == KvCacheMode::AttentionMixedPrecision && kv.important <= kv.default {
            return Err("kvCache.important must be more precise than kvCache.default".into());
        }
        Ok(())
    }
}
