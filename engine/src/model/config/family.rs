//! What each family of models does in its own way, as values of one graph: biases, norms, activation, caps, attention windows.

use super::raw::RawConfig;
use super::{Activation, bad, shown};
use crate::Result;

/// The differences between families that no field of `config.json` tells.
#[derive(Debug, Clone, Copy)]
pub(super) struct Family {
    /// As `architectures` names it.
    pub(super) architecture: &'static str,
    /// Which linears of attention have a bias.
    pub(super) bias: AttentionBias,
    /// Whether queries and keys are normalised, head by head.
    pub(super) qk_norm: bool,
    /// Gemma: norms multiply by `1 + weight`, and there is one behind attention and MLP too; the embedding is scaled.
    pub(super) gemma: bool,
    /// Whether layers with a window have rotary angles of their own.
    pub(super) local_rope: bool,
    windows: Windows,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttentionBias {
    None,
    /// q, k and v.
    Inputs,
    /// q, k, v and o, where `attention_bias` is true.
    Field,
}

/// Which layers have a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Windows {
    None,
    /// All, where `sliding_window` is given.
    All,
    /// From `max_window_layers` on, where `use_sliding_window` is true.
    Upper,
    /// All but every so many-th.
    Pattern(u64),
}

/// The families that can be computed.
const FAMILIES: [Family; 7] = [
    Family::plain("LlamaForCausalLM", AttentionBias::Field, Windows::None),
    Family::plain("MistralForCausalLM", AttentionBias::None, Windows::All),
    Family::plain("Qwen2ForCausalLM", AttentionBias::Inputs, Windows::Upper),
    Family {
        qk_norm: true,
        ..Family::plain("Qwen3ForCausalLM", AttentionBias::Field, Windows::Upper)
    },
    Family {
        gemma: true,
        ..Family::plain(
            "Gemma2ForCausalLM",
            AttentionBias::Field,
            Windows::Pattern(2),
        )
    },
    Family {
        gemma: true,
        qk_norm: true,
        local_rope: true,
        ..Family::plain(
            "Gemma3ForCausalLM",
            AttentionBias::Field,
            Windows::Pattern(6),
        )
    },
    Family::plain("Phi3ForCausalLM", AttentionBias::None, Windows::All),
];

impl Family {
    const fn plain(architecture: &'static str, bias: AttentionBias, windows: Windows) -> Self {
        Self {
            architecture,
            bias,
            qk_norm: false,
            gemma: false,
            local_rope: false,
            windows,
        }
    }

    /// The family of a configuration.
    pub(super) fn of(raw: &RawConfig) -> Result<Self> {
        let supported = FAMILIES.map(|family| family.architecture).join(", ");
        let Some(name) = raw.architectures.as_ref().and_then(|names| names.first()) else {
            return Err(bad(&format!(
                "architectures is missing: supported are {supported}"
            )));
        };
        if let Some(family) = FAMILIES.iter().find(|family| family.architecture == name) {
            return Ok(*family);
        }
        let fix = if name.starts_with("Gemma3") {
            "; the text model alone, saved as Gemma3ForCausalLM, would load"
        } else {
            ""
        };
        Err(bad(&format!(
            "architecture {} is not supported: supported are {supported}{fix}",
            shown(name)
        )))
    }

    /// The activation of the MLP.
    pub(super) fn activation(self, raw: &RawConfig) -> Result<Activation> {
        let name = raw.hidden_activation.as_ref().or(raw.hidden_act.as_ref());
        match name.map(String::as_str) {
            None if self.gemma => Ok(Activation::GeluTanh),
            None | Some("silu" | "swish") => Ok(Activation::Silu),
            Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
            Some(other) => Err(bad(&format!(
                "hidden_act {} is not supported: supported are silu and gelu_pytorch_tanh",
                shown(other)
            ))),
        }
    }

    /// The window of each of so many layers, in tokens, the current one included; `None` sees the whole context.
    pub(super) fn windows(self, raw: &RawConfig, layers: usize) -> Result<Vec<Option<usize>>> {
        let sliding = self.sliding(raw, layers)?;
        if sliding.iter().all(|sliding| !sliding) {
            return Ok(vec![None; layers]);
        }
        let window = match raw.sliding_window {
            Some(0) => return Err(bad("sliding_window is 0: it must be at least 1")),
            Some(window) => usize::try_from(window).unwrap_or(usize::MAX),
            None => {
                return Err(bad(
                    "sliding_window is missing and layer_types has sliding_attention: one of them is wrong",
                ));
            }
        };
        Ok(sliding
            .into_iter()
            .map(|sliding| sliding.then_some(window))
            .collect())
    }

    fn sliding(self, raw: &RawConfig, layers: usize) -> Result<Vec<bool>> {
        if self.windows == Windows::None
            || self.windows == Windows::Upper && raw.use_sliding_window != Some(true)
        {
            return Ok(vec![false; layers]);
        }
        if let Some(kinds) = raw.layer_types.as_ref() {
            if kinds.len() != layers {
                return Err(bad(&format!(
                    "layer_types has {} entries for {layers} layers: one of them is wrong",
                    kinds.len()
                )));
            }
            return kinds.iter().map(String::as_str).map(is_sliding).collect();
        }
        let has_window = raw.sliding_window.is_some();
        let first = usize::try_from(raw.max_window_layers.unwrap_or(28)).unwrap_or(usize::MAX);
        let given = raw
            .sliding_window_pattern
            .or(raw.own_sliding_window_pattern);
        let whole = |every: u64| match given.unwrap_or(every) {
            0 => Err(bad("sliding_window_pattern is 0: it must be at least 1")),
            pattern => Ok(usize::try_from(pattern).unwrap_or(usize::MAX)),
        };
        let pattern = match self.windows {
            Windows::Pattern(every) => whole(every)?,
            Windows::None | Windows::All | Windows::Upper => 1,
        };
        let sliding = |layer: usize| match self.windows {
            Windows::None => false,
            Windows::All => has_window,
            Windows::Upper => layer >= first,
            Windows::Pattern(_) => !(layer + 1).is_multiple_of(pattern),
        };
        Ok((0..layers).map(sliding).collect())
    }
}

fn is_sliding(kind: &str) -> Result<bool> {
    match kind {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => Err(bad(&format!(
            "layer_types has {}: supported are full_attention and sliding_attention",
            shown(other)
        ))),
    }
}
