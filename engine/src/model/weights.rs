//! A model's weights: which tensors there are, under which names, with which shapes.

use std::ops::Range;

use super::checkpoint::{Checkpoint, Stored, select_rows};
use super::config::Config;
use super::copies::Wanted;
use super::simulated::Simulated;
use super::weight::Weight;
use crate::kernels::Packed;
use crate::quant::QuantisedWeight;
use crate::{Error, Result};

/// One matrix product, with its precise weights and, when attached, their quantised copy.
#[derive(Debug)]
pub(super) struct Linear {
    /// The checkpoint's name without `.weight`.
    pub(super) name: String,
    pub(super) weight: Weight,
    pub(super) bias: Option<Vec<f32>>,
    /// What quantised prefills read.
    pub(super) prefill: Option<PackedCopy>,
    /// What decode reads, where that is neither the precise weights nor the prefill copy.
    pub(super) decode: Option<PackedCopy>,
    /// Computes in place of everything else, while a scheme is simulated.
    pub(super) simulated: Option<Simulated>,
    pub(super) out_features: usize,
    pub(super) in_features: usize,
}

/// A quantised copy of one linear.
#[derive(Debug)]
pub(super) struct PackedCopy {
    pub(super) weights: Packed,
    /// What its input is divided by.
    pub(super) input_scale: Option<Vec<f32>>,
}

/// One block.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) input_norm: Vec<f32>,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) head_norms: Option<HeadNorms>,
    pub(super) o: Linear,
    /// Behind attention.
    pub(super) attention_post_norm: Option<Vec<f32>>,
    /// In front of the MLP.
    pub(super) mlp_norm: Vec<f32>,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
    /// Behind the MLP.
    pub(super) mlp_post_norm: Option<Vec<f32>>,
}

/// Norms of each head's queries and keys, `[head_dim]`.
#[derive(Debug)]
pub(super) struct HeadNorms {
    pub(super) query: Vec<f32>,
    pub(super) key: Vec<f32>,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) embedding: Weight,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// `None` when the embedding is the head.
    pub(super) head: Option<Weight>,
}

/// A norm's weights as the graph multiplies by them.
fn open_norm(
    checkpoint: &dyn Checkpoint,
    config: &Config,
    name: &str,
    width: usize,
) -> Result<Vec<f32>> {
    let mut weight = checkpoint.tensor(name, &[width])?.to_f32();
    if config.norm_offset != 0.0 {
        for x in &mut weight {
            *x += config.norm_offset;
        }
    }
    Ok(weight)
}

/// Finds the linears of one layer.
struct Finder<'a> {
    checkpoint: &'a dyn Checkpoint,
    /// Such as `model.layers.0.self_attn`.
    module: String,
    in_features: usize,
}

/// A linear as it is stored.
struct Found {
    name: String,
    weight: Stored,
    bias: Option<Vec<f32>>,
    shape: [usize; 2],
}

impl Finder<'_> {
    /// One linear.
    fn one(&self, name: &str, out_features: usize, bias: bool) -> Result<Linear> {
        self.find(name, out_features, bias)?.pack()
    }

    fn find(&self, name: &str, out_features: usize, bias: bool) -> Result<Found> {
        let name = format!("{}.{name}", self.module);
        let shape = [out_features, self.in_features];
        let weight = self.checkpoint.linear(&name, shape)?;
        let bias = bias
            .then(|| self.checkpoint.tensor(&format!("{name}.bias"), &shape[..1]))
            .transpose()?;
        Ok(Found {
            name,
            weight,
            bias: bias.map(|bias| bias.to_f32()),
            shape,
        })
    }

    /// Linears that read the same input, with their outputs. A checkpoint may store them as one, named `fused`, rows behind rows.
    fn several<const N: usize>(
        &self,
        fused: &str,
        parts: [(&str, usize); N],
        bias: bool,
    ) -> Result<[Linear; N]> {
        let linears: Vec<Linear> = if self
            .checkpoint
            .has_linear(&format!("{}.{fused}", self.module))
        {
            let whole = self.find(fused, parts.iter().map(|part| part.1).sum(), bias)?;
            let mut first = 0;
            let part = |(name, rows)| {
                let own = first..first + rows;
                first = own.end;
                whole.rows(own, format!("{}.{name}", self.module)).pack()
            };
            parts.into_iter().map(part).collect::<Result<_>>()?
        } else {
            let part = |(name, rows)| self.one(name, rows, bias);
            parts.into_iter().map(part).collect::<Result<_>>()?
        };
        Ok(linears
            .try_into()
            .expect("one linear is found for each part"))
    }
}

impl Found {
    /// The linear of some of the outputs.
    fn rows(&self, rows: Range<usize>, name: String) -> Self {
        let weight = match &self.weight {
            Stored::Dense(tensor) => Stored::Dense(tensor.rows(rows.clone())),
            Stored::Quantised(weight) => {
                let rows: Vec<usize> = rows.clone().collect();
                Stored::Quantised(select_rows(weight, &rows))
            }
        };
        Self {
            name,
            weight,
            bias: self.bias.as_ref().map(|bias| bias[rows.clone()].to_vec()),
            shape: [rows.len(), self.shape[1]],
        }
    }

    /// The linear as it computes.
    fn pack(self) -> Result<Linear> {
        let [out_features, in_features] = self.shape;
        Ok(Linear {
            weight: Weight::new(&self.name, self.weight)?,
            name: self.name,
            bias: self.bias,
            prefill: None,
            decode: None,
            simulated: None,
            out_features,
            in_features,
        })
    }
}

impl Linear {
    /// Refuses quantised weights of another shape.
    pub(super) fn check_shape(&self, weight: &QuantisedWeight) -> Result<()> {
        if (weight.out_features, weight.in_features) == (self.out_features, self.in_features) {
            return Ok(());
        }
        Err(Error::artifact(format!(
            "{}: has the shape [{}, {}] in the artifact and [{}, {}] in the model: calibrate this model",
            self.name, weight.out_features, weight.in_features, self.out_features, self.in_features
        )))
    }
}

impl Layer {
    fn open(checkpoint: &dyn Checkpoint, config: &Config, index: usize) -> Result<Self> {
        let (hidden, ffn) = (config.hidden_size, config.intermediate_size);
        let (query, kv) = (config.query_width(), config.kv_width());
        let norm = |name: &str, width: usize| {
            let name = format!("model.layers.{index}.{name}.weight");
            open_norm(checkpoint, config, &name, width)
        };
        let post_norm = |name| config.post_norms.then(|| norm(name, hidden)).transpose();
        let finder = |module: &str, in_features| Finder {
            checkpoint,
            module: format!("model.layers.{index}.{module}"),
            in_features,
        };
        let [q, k, v] = finder("self_attn", hidden).several(
            "qkv_proj",
            [("q_proj", query), ("k_proj", kv), ("v_proj", kv)],
            config.qkv_bias,
        )?;
        let [gate, up] = finder("mlp", hidden).several(
            "gate_up_proj",
            [("gate_proj", ffn), ("up_proj", ffn)],
            config.mlp_bias,
        )?;
        let head_norms = || {
            Ok(HeadNorms {
                query: norm("self_attn.q_norm", config.head_dim)?,
                key: norm("self_attn.k_norm", config.head_dim)?,
            })
        };
        let (mlp_norm, attention_post_norm) = if config.post_norms {
            (
                "pre_feedforward_layernorm",
                post_norm("post_attention_layernorm")?,
            )
        } else {
            ("post_attention_layernorm", None)
        };
        Ok(Self {
            input_norm: norm("input_layernorm", hidden)?,
            q,
            k,
            v,
            head_norms: config.qk_norm.then(head_norms).transpose()?,
            o: finder("self_attn", query).one("o_proj", hidden, config.output_bias)?,
            attention_post_norm,
            mlp_norm: norm(mlp_norm, hidden)?,
            gate,
            up,
            down: finder("mlp", ffn).one("down_proj", hidden, config.mlp_bias)?,
            mlp_post_norm: post_norm("post_feedforward_layernorm")?,
        })
    }

    /// In the order of the artifact.
    pub(super) fn linears(&self) -> [&Linear; 7] {
        [
            &self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down,
        ]
    }

    pub(super) fn linears_mut(&mut self) -> [&mut Linear; 7] {
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
    pub(super) fn open(checkpoint: &dyn Checkpoint, config: &Config) -> Result<Self> {
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
        let matrix = |name: &str| Weight::new(name, checkpoint.linear(name, table)?);
        let head = match (config.tie_word_embeddings, checkpoint.has_linear("lm_head")) {
            (true, _) => None,
            (false, true) => Some(matrix("lm_head")?),
            (false, false) => {
                let message = "tensor lm_head.weight is missing: set tie_word_embeddings in config.json if the embedding is the head";
                return Err(Error::model(message));
            }
        };
        Ok(Self {
            embedding: matrix("model.embed_tokens")?,
            layers: (0..config.num_hidden_layers)
                .map(|index| Layer::open(checkpoint, config, index))
                .collect::<Result<_>>()?,
            norm: open_norm(checkpoint, config, "model.norm.weight", config.hidden_size)?,
            head,
        })
    }

    /// The block linears in the artifact's order.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.layers.iter().flat_map(Layer::linears)
    }

    /// The matrix that makes logits.
    pub(super) fn head(&self) -> &Weight {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// Makes sure that the wanted matrices can be had in BF16, and frees copies that are not wanted any more.
    pub(super) fn round(&mut self, wanted: Wanted) {
        self.each(wanted, Weight::round);
    }

    /// Moves the wanted matrices from the checkpoint's file into memory of their own, and gives back the memory of the others.
    pub(super) fn hold(&mut self, wanted: Wanted) {
        self.each(wanted, Weight::hold);
    }

    fn each(&mut self, wanted: Wanted, change: impl Fn(&mut Weight, bool)) {
        for linear in self.layers.iter_mut().flat_map(Layer::linears_mut) {
            change(&mut linear.weight, wanted.linears);
        }
        change(&mut self.embedding, wanted.others);
        if let Some(head) = &mut self.head {
            change(head, wanted.others);
        }
    }
}
