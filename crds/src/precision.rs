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
    /// INT8 weights times INT8 activations (symmetric, one scale a token): the quantised copy serves both phases.
    W8A8,
    /// A copy of its own: INT4 weights in groups times INT8 activations (symmetric, one scale a token and group); some INT8 where a budget says.
    W4A8,
    /// A copy of its own: 4-bit indices into 16 values an output channel, times FP32 activations.
    LUT4,
}

impl DecodeScheme {
    /// Whether tokens are generated from a quantised copy that prefill does not read.
    pub const fn has_own_copy(self) -> bool {
        matches!(self, Self::W4A8 | Self::LUT4)
    }
}

/// Which forms of the weights stay in memory beside each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum WeightCopies {
    /// The weights that decode reads and the quantised copy for prefill.
    #[default]
    Dual,
    /// The precise weights; the quantised form of a linear is made from them whenever a prompt is read.
    OnTheFly,
    /// The quantised copy alone, for prefill and decode.
    Single,
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DecodePlan {
    /// The scheme of every generated token.
    pub scheme: DecodeScheme,
    /// Bits a weight that W4A8 may spend where they save most; 4 everywhere, in groups of 128, without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_weight: Option<f64>,
}

impl From<DecodeScheme> for DecodePlan {
    fn from(scheme: DecodeScheme) -> Self {
        Self {
            scheme,
            bits_per_weight: None,
        }
    }
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
    /// Which weights stay in memory; plans made before there was a choice keep both.
    #[serde(default)]
    pub weight_copies: WeightCopies,
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
            decode: scheme.into(),
            weight_copies: WeightCopies::Dual,
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

    /// Whether prompts are read with another arithmetic than tokens are generated with.
    pub fn has_switch(&self) -> bool {
        self.prefill.scheme == PrefillScheme::W8A8 && self.weight_copies != WeightCopies::Single
    }

    /// Whether a quantised copy of the weights is kept for prefill, and so is part of an artifact.
    pub fn keeps_prefill_copy(&self) -> bool {
        self.prefill.scheme == PrefillScheme::W8A8 && self.weight_copies != WeightCopies::OnTheFly
    }

    /// Whether the precise weights of the block linears are ever read.
    pub fn keeps_precise_linears(&self) -> bool {
        self.weight_copies != WeightCopies::Single && !self.decode.scheme.has_own_copy()
    }

    /// The first thing in the plan that cannot work, named with its fix.
    ///
    /// # Errors
    /// The offending field and what to write instead.
    pub fn check(&self) -> Result<(), String> {
        self.check_weights()?;
        self.check_kv_cache()
    }

    fn check_weights(&self) -> Result<(), String> {
        if self.prefill.min_prompt_tokens == 0 {
            return Err("prefill.minPromptTokens is 0: write at least 1".into());
        }
        if (self.weight_copies == WeightCopies::Single)
            != (self.decode.scheme == DecodeScheme::W8A8)
        {
            return Err("decode.scheme W8A8 and weightCopies Single belong together: one INT8 copy serves prefill and decode".into());
        }
        if self.weight_copies != WeightCopies::Dual && self.prefill.scheme != PrefillScheme::W8A8 {
            return Err("weightCopies says how the quantised copy is kept: with prefill.scheme Precise leave it out".into());
        }
        if self.weight_copies == WeightCopies::OnTheFly && self.decode.scheme.has_own_copy() {
            return Err("weightCopies OnTheFly makes the quantised form from precise weights, and decode from a quantised copy keeps none: use Dual".into());
        }
        match self.decode.bits_per_weight {
            Some(_) if self.decode.scheme != DecodeScheme::W4A8 => Err(
                "decode.bitsPerWeight is a budget for W4A8: leave it out with other schemes".into(),
            ),
            Some(bits) if !(bits > 4.0 && bits <= 8.0) => Err(format!(
                "decode.bitsPerWeight is {bits}: write a number above 4 and at most 8, such as 4.5"
            )),
            _ => Ok(()),
        }
    }

    fn check_kv_cache(&self) -> Result<(), String> {
        let kv = &self.kv_cache;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(prefill: PrefillScheme, decode: DecodeScheme, copies: WeightCopies) -> PrecisionPlan {
        let mut plan = PrecisionPlan::precise(decode);
        plan.prefill.scheme = prefill;
        plan.weight_copies = copies;
        plan
    }

    #[test]
    fn copies_and_schemes_must_fit_one_another() {
        use WeightCopies::{Dual, OnTheFly, Single};
        let (w8a8, precise) = (PrefillScheme::W8A8, PrefillScheme::Precise);
        let (bf16, int8) = (DecodeScheme::BF16, DecodeScheme::W8A8);
        for good in [
            (w8a8, bf16, Dual),
            (w8a8, bf16, OnTheFly),
            (w8a8, int8, Single),
            (precise, bf16, Dual),
            (w8a8, DecodeScheme::W4A8, Dual),
            (precise, DecodeScheme::LUT4, Dual),
        ] {
            assert_eq!(plan(good.0, good.1, good.2).check(), Ok(()), "{good:?}");
        }
        for bad in [
            (w8a8, bf16, Single),
            (w8a8, int8, Dual),
            (w8a8, int8, OnTheFly),
            (precise, int8, Single),
            (precise, bf16, OnTheFly),
            (w8a8, DecodeScheme::W4A8, OnTheFly),
            (w8a8, DecodeScheme::LUT4, Single),
        ] {
            assert!(plan(bad.0, bad.1, bad.2).check().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_budget_belongs_to_w4a8_and_lies_between_4_and_8_bits() {
        let budget = |scheme, bits| {
            let mut plan = PrecisionPlan::precise(scheme);
            plan.decode.bits_per_weight = Some(bits);
            plan.check()
        };
        assert_eq!(budget(DecodeScheme::W4A8, 4.5), Ok(()));
        for bits in [4.0, 8.1, f64::NAN, f64::INFINITY] {
            let why = budget(DecodeScheme::W4A8, bits).unwrap_err();
            assert!(why.contains("above 4 and at most 8"), "{why}");
        }
        let why = budget(DecodeScheme::LUT4, 4.5).unwrap_err();
        assert!(why.contains("a budget for W4A8"), "{why}");
    }

    #[test]
    fn a_plan_without_copies_keeps_both() {
        let mut text = serde_json::to_value(plan(
            PrefillScheme::W8A8,
            DecodeScheme::BF16,
            WeightCopies::Dual,
        ))
        .unwrap();
        text.as_object_mut().unwrap().remove("weightCopies");
        let plan: PrecisionPlan = serde_json::from_value(text).unwrap();
        assert_eq!(plan.weight_copies, WeightCopies::Dual);
    }
}
