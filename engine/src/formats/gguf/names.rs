//! Hugging Face's names of tensors to GGUF's, and the rows that llama.cpp's converter reorders.

/// Where a tensor of a Hugging Face name lies in a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// GGUF's name.
    pub name: String,
    /// Whether the rows of each head are interleaved: row `2i + p` is row `p * head_dim / 2 + i` of the head in the Hugging Face checkpoint.
    pub interleaved: bool,
}

/// Parts of a block: Hugging Face's name, GGUF's, and whether the `llama` architecture interleaves it.
const BLOCK: [(&str, &str, bool); 16] = [
    ("input_layernorm", "attn_norm", false),
    ("self_attn.q_proj", "attn_q", true),
    ("self_attn.k_proj", "attn_k", true),
    ("self_attn.v_proj", "attn_v", false),
    ("self_attn.qkv_proj", "attn_qkv", false),
    ("self_attn.o_proj", "attn_output", false),
    ("self_attn.q_norm", "attn_q_norm", false),
    ("self_attn.k_norm", "attn_k_norm", false),
    ("mlp.gate_proj", "ffn_gate", false),
    ("mlp.up_proj", "ffn_up", false),
    ("mlp.gate_up_proj", "ffn_up", false),
    ("mlp.down_proj", "ffn_down", false),
    ("pre_feedforward_layernorm", "ffn_norm", false),
    ("post_feedforward_layernorm", "post_ffw_norm", false),
    // In front of the MLP in most families, behind attention where there are four norms.
    ("post_attention_layernorm", "ffn_norm", false),
    ("post_attention_layernorm", "post_attention_norm", false),
];

/// Finds the tensor `name` (with `.weight` or `.bias`) of an architecture. `None` for a name that GGUF has no tensor for.
pub fn locate(name: &str, architecture: &str) -> Option<Stored> {
    let (module, suffix) = name.rsplit_once('.')?;
    let plain = |name: &str| Stored {
        name: format!("{name}.{suffix}"),
        interleaved: false,
    };
    match module {
        "model.embed_tokens" => return Some(plain("token_embd")),
        "model.norm" => return Some(plain("output_norm")),
        "lm_head" => return Some(plain("output")),
        _ => {}
    }
    let (layer, part) = module.strip_prefix("model.layers.")?.split_once('.')?;
    let four_norms = matches!(architecture, "gemma2" | "gemma3");
    let fused = architecture == "phi3";
    let block = BLOCK.iter().find(|(own, theirs, _)| {
        *own == part
            && match *theirs {
                "ffn_up" => fused == (*own == "mlp.gate_up_proj"),
                "post_attention_norm" => four_norms,
                "ffn_norm" => four_norms == (*own == "pre_feedforward_layernorm"),
                _ => true,
            }
    });
    let (_, theirs, interleaved) = block?;
    Some(Stored {
        name: format!("blk.{layer}.{theirs}.{suffix}"),
        interleaved: *interleaved && architecture == "llama",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_architecture() {
        let name = |name: &str, architecture: &str| {
            locate(name, architecture).map(|stored| (stored.name, stored.interleaved))
        };
        let stored = |name: &str, interleaved| Some((name.to_owned(), interleaved));
        let norm = "model.layers.3.post_attention_layernorm.weight";
        assert_eq!(name(norm, "llama"), stored("blk.3.ffn_norm.weight", false));
        assert_eq!(
            name(norm, "gemma2"),
            stored("blk.3.post_attention_norm.weight", false)
        );
        let query = "model.layers.0.self_attn.q_proj.bias";
        assert_eq!(name(query, "llama"), stored("blk.0.attn_q.bias", true));
        assert_eq!(name(query, "qwen2"), stored("blk.0.attn_q.bias", false));
        let fused = "model.layers.0.mlp.gate_up_proj.weight";
        assert_eq!(name(fused, "phi3"), stored("blk.0.ffn_up.weight", false));
        assert_eq!(name(fused, "llama"), None);
        assert_eq!(
            name("lm_head.weight", "llama"),
            stored("output.weight", false)
        );
    }
}
