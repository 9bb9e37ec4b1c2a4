//! A GGUF file's metadata as the `config.json` that it was made from, so that one place checks both.

use serde_json::{Value, json};

use super::header::Header;

/// Architectures: GGUF's name and Hugging Face's.
const ARCHITECTURES: [(&str, &str); 6] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gemma3", "Gemma3ForCausalLM"),
    ("phi3", "Phi3ForCausalLM"),
];

/// Gemma's largest models scale scores by another width than the head's, which the file does not tell: architecture and layers tell them.
const WIDE_SCORES: [(&str, u64); 2] = [("gemma2", 46), ("gemma3", 62)];

/// What `config.json` would say. Fields that the file lacks are absent; what is left checks them.
///
/// # Errors
/// An architecture or a variant that cannot be computed, without the file's name.
pub fn config_json(header: &Header) -> Result<Value, String> {
    let supported = ARCHITECTURES.map(|(name, _)| name).join(", ");
    let Some(own) = header.architecture() else {
        return Err("has no general.architecture: convert the model again".into());
    };
    let Some((_, architecture)) = ARCHITECTURES.iter().find(|(name, _)| *name == own) else {
        let own: String = own.chars().filter(|c| !c.is_control()).take(80).collect();
        return Err(format!(
            "has the architecture {own}, which is not supported: supported are {supported}"
        ));
    };
    let key = |name: &str| format!("{own}.{name}");
    let unsigned = |name: &str| header.unsigned(&key(name));
    let float = |name: &str| header.float(&key(name));
    if unsigned("expert_count").is_some_and(|experts| experts > 0) {
        return Err("has experts: mixtures of experts are not supported, dense models are".into());
    }
    if header.tensor("rope_factors_long.weight").is_some() {
        return Err("has rope_factors_long: supported rotary scalings are linear and llama3; use the model of the shorter context".into());
    }
    let (layers, heads) = (unsigned("block_count"), unsigned("attention.head_count"));
    let hidden = unsigned("embedding_length");
    let wide = layers.is_some_and(|layers| WIDE_SCORES.contains(&(own, layers)));
    let width = hidden.zip(heads).filter(|_| wide);
    let vocabulary = header
        .tensor("token_embd.weight")
        .and_then(|embedding| embedding.shape.first().copied());
    let mut ends: Vec<u64> = ["eos_token_id", "eot_token_id"]
        .iter()
        .filter_map(|name| header.unsigned(&format!("tokenizer.ggml.{name}")))
        .collect();
    ends.dedup();
    let mut config = json!({
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": unsigned("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": unsigned("attention.head_count_kv"),
        "head_dim": unsigned("attention.key_length"),
        "vocab_size": vocabulary,
        "max_position_embeddings": unsigned("context_length"),
        "rms_norm_eps": float("attention.layer_norm_rms_epsilon"),
        "rope_theta": float("rope.freq_base"),
        "sliding_window": unsigned("attention.sliding_window").filter(|window| *window > 0),
        "attn_logit_softcapping": float("attn_logit_softcapping"),
        "final_logit_softcapping": float("final_logit_softcapping"),
        "query_pre_attn_scalar": width.filter(|(_, heads)| *heads > 0).map(|(hidden, heads)| hidden / heads),
        "tie_word_embeddings": header.tensor("output.weight").is_none(),
        "attention_bias": header.tensor("blk.0.attn_output.bias").is_some(),
        "mlp_bias": header.tensor("blk.0.ffn_down.bias").is_some(),
        "bos_token_id": header.unsigned("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends,
    });
    config["rope_scaling"] = rope_scaling(header, own)?;
    Ok(config)
}

fn rope_scaling(header: &Header, own: &str) -> Result<Value, String> {
    match header.text(&format!("{own}.rope.scaling.type")) {
        None | Some("none") => Ok(Value::Null),
        Some("linear") => Ok(json!({
            "rope_type": "linear",
            "factor": header.float(&format!("{own}.rope.scaling.factor")),
        })),
        Some(other) => {
            let other: String = other.chars().filter(|c| !c.is_control()).take(80).collect();
            Err(format!(
                "has rope.scaling.type {other}: supported are none and linear"
            ))
        }
    }
}
