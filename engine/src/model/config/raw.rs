//! `config.json` and `generation_config.json` as they are written: Hugging Face's own names, nothing checked yet.

use std::collections::BTreeMap;

use serde::Deserialize;

/// `config.json`.
#[derive(Deserialize)]
pub(super) struct RawConfig {
    pub(super) architectures: Option<Vec<String>>,
    pub(super) hidden_size: Option<u64>,
    pub(super) intermediate_size: Option<u64>,
    pub(super) num_hidden_layers: Option<u64>,
    pub(super) num_attention_heads: Option<u64>,
    pub(super) num_key_value_heads: Option<u64>,
    pub(super) head_dim: Option<u64>,
    pub(super) vocab_size: Option<u64>,
    pub(super) max_position_embeddings: Option<u64>,
    pub(super) rms_norm_eps: Option<f64>,
    pub(super) rope_theta: Option<f64>,
    pub(super) rope_scaling: Option<RawRope>,
    /// Where newer checkpoints keep `rope_theta` and the scaling.
    pub(super) rope_parameters: Option<RawRopes>,
    /// Gemma 3: `rope_theta` of the layers with a window.
    pub(super) rope_local_base_freq: Option<f64>,
    pub(super) partial_rotary_factor: Option<f64>,
    pub(super) hidden_act: Option<String>,
    /// Gemma's name of it.
    pub(super) hidden_activation: Option<String>,
    pub(super) tie_word_embeddings: Option<bool>,
    pub(super) attention_bias: Option<bool>,
    pub(super) mlp_bias: Option<bool>,
    pub(super) query_pre_attn_scalar: Option<f64>,
    pub(super) attn_logit_softcapping: Option<f64>,
    pub(super) final_logit_softcapping: Option<f64>,
    pub(super) use_bidirectional_attention: Option<bool>,
    pub(super) sliding_window: Option<u64>,
    pub(super) use_sliding_window: Option<bool>,
    pub(super) max_window_layers: Option<u64>,
    pub(super) sliding_window_pattern: Option<u64>,
    /// What newer checkpoints call it.
    #[serde(rename = "_sliding_window_pattern")]
    pub(super) own_sliding_window_pattern: Option<u64>,
    pub(super) layer_types: Option<Vec<String>>,
    pub(super) bos_token_id: Option<Ids>,
    pub(super) eos_token_id: Option<Ids>,
    pub(super) quantization_config: Option<serde_json::Value>,
}

/// Rotary parameters of all layers, or of each kind of layer.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum RawRopes {
    /// By the name of the kind of attention.
    Each(BTreeMap<String, RawRope>),
    All(RawRope),
}

#[derive(Deserialize, Clone)]
pub(super) struct RawRope {
    pub(super) rope_type: Option<String>,
    /// The name that older checkpoints use.
    #[serde(rename = "type")]
    pub(super) old_type: Option<String>,
    pub(super) rope_theta: Option<f64>,
    pub(super) partial_rotary_factor: Option<f64>,
    pub(super) factor: Option<f64>,
    pub(super) low_freq_factor: Option<f64>,
    pub(super) high_freq_factor: Option<f64>,
    pub(super) original_max_position_embeddings: Option<f64>,
}

/// `generation_config.json`.
#[derive(Deserialize, Default)]
pub(super) struct RawGeneration {
    pub(super) bos_token_id: Option<Ids>,
    pub(super) eos_token_id: Option<Ids>,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl Ids {
    pub(super) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}
