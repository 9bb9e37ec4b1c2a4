//! A Llama's weights: which tensors there are, under which names, with which shapes.

use super::checkpoint::Checkpoint;
use super::config::Config;
use super::tensor::Tensor;
use crate::quant::{PackedInt8, QuantisedLinear, QuantisedLinears};
use crate::{Error, Result};

/// One matrix product, with its precise weights and, when attached, their INT8 copy.
#[derive(Debug)]
pub(super) struct Linear {
    /// The checkpoint's name without `.weight`.
    pub(super) name: String,
    pub(super) weight: Tensor,
    pub(super) bias: Option<Vec<f32>>,
    pub(super) quantised: Option<PackedInt8>,
    pub(super) out_features: usize,
    pub(super) in_features: usize,
}

/// One block.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) input_norm: Vec<f32>,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) o: Linear,
    pub(super) post_attention_norm: Vec<f32>,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) embedding: Tensor,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// `None` when the embedding is the head.
    pub(super) head: Option<Tensor>,
}

impl Linear {
    fn open(checkpoint: &Checkpoint, name: String, shape: [usize; 2], bias: bool) -> Result<Self> {
        let [out_features, in_features] = shape;
        let weight = checkpoint.tensor(&format!("{name}.weight"), &shape)?;
        let bias = if bias {
            Some(
                checkpoint
                    .tensor(&format!("{name}.bias"), &shape[..1])?
                    .to_f32(),
            )
        } else {
            None
        };
        Ok(Self {
            name,
            weight,
            bias,
            quantised: None,
            out_features,
            in_features,
        })
    }
}

impl Layer {
    fn open(checkpoint: &Checkpoint, config: &Config, index: usize) -> Result<Self> {
        let (hidden, ffn) = (config.hidden_size, config.intermediate_size);
        let (query, kv) = (config.query_width(), config.kv_width());
        let norm = |name: &str| {
            Ok(checkpoint
                .tensor(&format!("model.layers.{index}.{name}.weight"), &[hidden])?
                .to_f32())
        };
        let attention = |name: &str, shape| {
            Linear::open(
                checkpoint,
                format!("model.layers.{index}.self_attn.{name}"),
                shape,
                config.attention_bias,
            )
        };
        let mlp = |name: &str, shape| {
            Linear::open(
                checkpoint,
                format!("model.layers.{index}.mlp.{name}"),
                shape,
                config.mlp_bias,
            )
        };
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            q: attention("q_proj", [query, hidden])?,
            k: attention("k_proj", [kv, hidden])?,
            v: attention("v_proj", [kv, hidden])?,
            o: attention("o_proj", [hidden, query])?,
            post_attention_norm: norm("post_attention_layernorm")?,
            gate: mlp("gate_proj", [ffn, hidden])?,
            up: mlp("up_proj", [ffn, hidden])?,
            down: mlp("down_proj", [hidden, ffn])?,
        })
    }

    /// In the order of the artifact.
    fn linears(&self) -> [&Linear; 7] {
        [
            &self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down,
        ]
    }

    fn linears_mut(&mut self) -> [&mut Linear; 7] {
        [
            &mut self.q,
            &mut self.k,
            &mut self.v,
            &mut self.o,
            &mut self.gate,
            &mut self.up,
            &mut self.down,
        ]
    }
}

impl Weights {
    /// Finds and checks every tensor.
    pub(super) fn open(checkpoint: &Checkpoint, config: &Config) -> Result<Self> {
        let table = [config.vocab_size, config.hidden_size];
        if let Some(rows) = checkpoint
            .rows("model.embed_tokens.weight")
            .filter(|rows| *rows != config.vocab_size)
        {
            return Err(Error::model(format!(
                "config.json: vocab_size is {}, model.embed_tokens.weight has {rows} rows: config.json and weights are of different models",
                config.vocab_size
            )));
        }
        let head = match (config.tie_word_embeddings, checkpoint.has("lm_head.weight")) {
            (true, _) => None,
            (false, true) => Some(checkpoint.tensor("lm_head.weight", &table)?),
            (false, false) => {
                let message = "tensor lm_head.weight is missing: set tie_word_embeddings in config.json if the embedding is the head";
                return Err(Error::model(message));
            }
        };
        Ok(Self {
            embedding: checkpoint.tensor("model.embed_tokens.weight", &table)?,
            layers: (0..config.num_hidden_layers)
                .map(|index| Layer::open(checkpoint, config, index))
                .collect::<Result<_>>()?,
            norm: checkpoint
                .tensor("model.norm.weight", &[config.hidden_size])?
                .to_f32(),
            head,
        })
    }

    /// The block linears in the artifact's order.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.layers.iter().flat_map(Layer::linears)
    }

    /// The matrix that makes logits.
    pub(super) fn head(&self) -> &Tensor {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// Makes sure that every matrix can be had in BF16 (or frees the copies that were made for it).
    pub(super) fn round(&mut self, wanted: bool) {
        for linear in self.layers.iter_mut().flat_map(Layer::linears_mut) {
            linear.weight.round(wanted);
        }
        self.embedding.round(wanted);
        if let Some(head) = &mut self.head {
            head.round(wanted);
        }
    }

    /// Rounds every block linear to INT8.
    pub(super) fn quantise(&self) -> QuantisedLinears {
        let linears = self.linears().map(|linear| {
            QuantisedLinear::from_rows(
                linear.name.clone(),
                &linear.weight.to_f32(),
                linear.out_features,
                linear.in_features,
            )
        });
        QuantisedLinears::from_tensors(linears.collect())
            .expect("rounding finite weights gives whole tensors with positive scales")
    }

    /// Takes the INT8 copies: exactly the block linears of this model, or none at all.
    pub(super) fn attach(&mut self, quantised: QuantisedLinears) -> Result<()> {
        let mut tensors: std::collections::HashMap<String, QuantisedLinear> =
            std::collections::HashMap::new();
        for tensor in quantised.into_tensors() {
            if let Some(twice) = tensors.insert(tensor.name.clone(), tensor) {
                return Err(Error::artifact(format!(
                    "{}: is in the artifact twice: calibrate again",
                    twice.name
                )));
            }
        }
        let attached = !tensors.is_empty();
        let mut packed = Vec::new();
        for linear in self.linears().filter(|_| attached) {
            let Some(tensor) = tensors.remove(&linear.name) else {
                return Err(Error::artifact(format!(
                    "{}: is missing from the artifact: calibrate this model",
                    linear.name
                )));
            };
            if (tensor.out_features, tensor.in_features)
                != (linear.out_features, linear.in_features)
            {
                return Err(Error::artifact(format!(
                    "{}: has the shape [{}, {}] in the artifact and [{}, {}] in the model: calibrate this model",
                    linear.name,
                    tensor.out_features,
                    tensor.in_features,
                    linear.out_features,
                    linear.in_features
                )));
            }
            packed.push(PackedInt8::pack(&tensor));
        }
        if let Some(name) = tensors.keys().min() {
            return Err(Error::artifact(format!(
                "{name}: is in the artifact but not in the model: calibrate this model"
            )));
        }
        let mut packed = packed.into_iter();
        for linear in self.layers.iter_mut().flat_map(Layer::linears_mut) {
            linear.quantised = packed.next();
        }
        Ok(())
    }

    /// Whether the INT8 copies are there.
    pub(super) fn is_quantised(&self) -> bool {
        self.linears()
            .next()
            .is_some_and(|linear| linear.quantised.is_some())
    }
}
