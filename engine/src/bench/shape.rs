//! What is measured: a model directory, or a shape with random weights made in memory; and the schemes its linears can have.

use std::path::PathBuf;
use std::str::FromStr;

use serde_json::{Value, json};

use crate::model::{Config, Model};
use crate::quant::Scheme;
use crate::{Error, Result};

/// Where a model comes from.
#[derive(Debug, Clone)]
pub enum Source {
    /// A Hugging Face directory or a GGUF file.
    Directory(PathBuf),
    /// Random weights.
    Shape(Shape),
}

/// Sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// As on the command line.
    pub name: &'static str,
    hidden: usize,
    ffn: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    vocabulary: usize,
    tied: bool,
}

/// The shapes by name. The first has Llama 3.2's layers and a smaller vocabulary: 1.04 billion weights, 2.08 GB in BF16.
const SHAPES: [Shape; 3] = [
    Shape {
        name: "llama-3.2-1b",
        hidden: 2048,
        ffn: 8192,
        layers: 16,
        heads: 32,
        kv_heads: 8,
        vocabulary: 32_000,
        tied: true,
    },
    Shape {
        name: "kube-llama",
        hidden: 384,
        ffn: 1024,
        layers: 6,
        heads: 6,
        kv_heads: 2,
        vocabulary: 4096,
        tied: false,
    },
    Shape {
        name: "micro",
        hidden: 64,
        ffn: 192,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        vocabulary: 512,
        tied: true,
    },
];

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = SHAPES.iter().find(|shape| shape.name == text).copied();
        found.ok_or_else(|| {
            let shown: String = text.chars().take(40).filter(|c| !c.is_control()).collect();
            let known: Vec<&str> = SHAPES.iter().map(|shape| shape.name).collect();
            format!(
                "the shape `{shown}` is not known: write {}",
                known.join(", ")
            )
        })
    }
}

impl Shape {
    /// As a checkpoint of this shape would say it.
    ///
    /// # Errors
    /// None for the shapes of this file: they are tested.
    pub fn config(&self) -> Result<Config> {
        Config::of_fields(self.fields())
    }

    /// `config.json`.
    pub(super) fn fields(&self) -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
        })
    }

    /// Names and shapes of a checkpoint's tensors.
    pub(super) fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, ffn, kv) = (
            self.hidden,
            self.ffn,
            self.hidden / self.heads * self.kv_heads,
        );
        let table = vec![self.vocabulary, hidden];
        let mut all = vec![("model.embed_tokens.weight".to_owned(), table.clone())];
        for layer in 0..self.layers {
            let parts = [
                ("input_layernorm", vec![hidden]),
                ("self_attn.q_proj", vec![hidden, hidden]),
                ("self_attn.k_proj", vec![kv, hidden]),
                ("self_attn.v_proj", vec![kv, hidden]),
                ("self_attn.o_proj", vec![hidden, hidden]),
                ("post_attention_layernorm", vec![hidden]),
                ("mlp.gate_proj", vec![ffn, hidden]),
                ("mlp.up_proj", vec![ffn, hidden]),
                ("mlp.down_proj", vec![hidden, ffn]),
            ];
            all.extend(
                parts.map(|(part, shape)| (format!("model.layers.{layer}.{part}.weight"), shape)),
            );
        }
        all.push(("model.norm.weight".to_owned(), vec![hidden]));
        if !self.tied {
            all.push(("lm_head.weight".to_owned(), table));
        }
        all
    }
}

/// What the block linears are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// In BF16, or as the directory has them.
    Precise,
    /// Rounded.
    Quantised(Scheme),
}

impl FromStr for Storage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "BF16" => Ok(Self::Precise),
            _ => text
                .parse()
                .map(Self::Quantised)
                .map_err(|error: String| format!("{error}, or BF16")),
        }
    }
}

impl std::fmt::Display for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Precise => f.write_str("BF16"),
            Self::Quantised(scheme) => scheme.fmt(f),
        }
    }
}

impl Source {
    /// For people.
    pub fn name(&self) -> String {
        match self {
            Self::Directory(path) => path.display().to_string(),
            Self::Shape(shape) => format!("{}, random weights", shape.name),
        }
    }

    /// The model with its linears stored so, as it serves.
    ///
    /// # Errors
    /// A model that cannot be opened.
    pub fn model(&self, storage: Storage) -> Result<Model> {
        let mut model = self.open(storage)?;
        model.hold();
        Ok(model)
    }

    fn open(&self, storage: Storage) -> Result<Model> {
        match (self, storage) {
            (Self::Directory(path), Storage::Precise) => Model::open(path),
            (Self::Directory(path), Storage::Quantised(scheme)) => {
                Model::open_as(path, scheme.weights)
            }
            (Self::Shape(shape), Storage::Precise) => Model::random(shape.config()?, None),
            (Self::Shape(shape), Storage::Quantised(scheme)) => {
                Model::random(shape.config()?, Some(scheme.weights))
            }
        }
    }
}

/// Refuses lengths that the model has no context for.
///
/// # Errors
/// The length and the context.
pub(super) fn check_length(config: &Config, tokens: usize) -> Result<()> {
    if tokens <= config.max_position_embeddings {
        return Ok(());
    }
    Err(Error::data(format!(
        "{tokens} tokens are longer than the model's context of {}: measure shorter ones",
        config.max_position_embeddings
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_is_a_configuration() {
        for shape in SHAPES {
            assert_eq!(shape.name.parse(), Ok(shape));
            assert!(shape.config().is_ok_and(|c| c.hidden_size == shape.hidden));
        }
        let error = "llama".parse::<Shape>().unwrap_err();
        assert!(error.contains("llama-3.2-1b"), "{error}");
    }

    #[test]
    fn schemes_read_back_as_they_are_written() {
        for text in ["BF16", "W8A8", "W4A16-g128", "LUT4", "FP8"] {
            assert_eq!(text.parse::<Storage>().unwrap().to_string(), text);
        }
        assert!("bf16".parse::<Storage>().unwrap_err().contains("BF16"));
    }
}
