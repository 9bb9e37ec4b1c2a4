//! Reads and checks `config.json` and `generation_config.json`. Field names are Hugging Face's own.
//!
//! Every number is checked before anything is allocated from it. Code named by `auto_map` is never run: it is ignored.

mod family;
mod raw;
mod rope;

use std::io::ErrorKind;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use self::family::{AttentionBias, Family};
use self::raw::{Ids, RawConfig, RawGeneration};
pub use self::rope::{RopeParameters, RopeScaling};
use crate::formats::Format;
use crate::{Error, Result, files};

/// A configuration file above this size is not one.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Bounds that no model of these families comes near; they keep products of two sizes far from overflow.
const MAX_LAYERS: usize = 1_024;
const MAX_SIZE: usize = 1 << 24;
/// Inputs of a linear: INT32 sums of INT8 products hold up to here.
const MAX_WIDTH: usize = 1 << 16;

/// A checked configuration: every size is above 0 and they fit one another.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a part that a family has or has not"
)]
pub struct Config {
    /// Such as `LlamaForCausalLM`.
    pub architecture: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Channels a head; even.
    pub head_dim: usize,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// The longest context, in tokens.
    pub max_position_embeddings: usize,
    /// Added under the root of `RMSNorm`.
    pub rms_norm_eps: f32,
    /// Added to the stored weights of norms: 1 where a norm multiplies by `1 + weight`.
    pub norm_offset: f32,
    /// Whether there is a norm behind attention and one behind the MLP, before they are added to the residual stream.
    pub post_norms: bool,
    /// Whether each head's queries and keys are normalised before they are rotated.
    pub qk_norm: bool,
    /// The rotary angles of layers that see the whole context.
    pub rope: RopeParameters,
    /// Those of layers with a window, where they are others.
    pub local_rope: Option<RopeParameters>,
    /// How many tokens each layer sees, the current one included; `None` is the whole context.
    pub windows: Vec<Option<usize>>,
    /// What scores of attention are multiplied by.
    pub query_scale: f32,
    /// Scores of attention are bent below this: `cap * tanh(score / cap)`.
    pub attention_cap: Option<f32>,
    /// Logits are bent below this.
    pub logit_cap: Option<f32>,
    /// What an embedding is multiplied by.
    pub embedding_scale: Option<f32>,
    /// The MLP's.
    pub activation: Activation,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether q, k and v have a bias.
    pub qkv_bias: bool,
    /// Whether o has a bias.
    pub output_bias: bool,
    /// Whether gate, up and down have a bias.
    pub mlp_bias: bool,
    /// Put in front of a text, when the checkpoint names one.
    pub bos_token_id: Option<u32>,
    /// A generated one ends the answer; from `generation_config.json` when it is there.
    pub eos_token_ids: Vec<u32>,
    /// How the linears are stored, when they are quantised.
    pub format: Option<Format>,
}

/// What the gate goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
    GeluTanh,
}

impl Config {
    /// Reads a model directory's `config.json` and, when it is there, `generation_config.json`.
    ///
    /// # Errors
    /// The first field that cannot work, by name, with the fix.
    pub fn read(directory: &Path) -> Result<Self> {
        let text = read_small_file(&directory.join("config.json"))?.ok_or_else(|| {
            Error::model(format!(
                "{}: config.json is missing: point at a Hugging Face model directory",
                directory.display()
            ))
        })?;
        let mut raw: RawConfig = parse("config.json", &text)?;
        if raw.quantization_config.is_none() {
            raw.quantization_config = older_quantization_config(directory)?;
        }
        let generation: RawGeneration =
            match read_small_file(&directory.join("generation_config.json"))? {
                Some(text) => parse("generation_config.json", &text)?,
                None => RawGeneration::default(),
            };
        Self::check(raw, generation)
    }

    /// Checks fields that did not come from a `config.json` but are named as there.
    ///
    /// # Errors
    /// As [`Config::read`].
    pub(crate) fn of_fields(fields: Value) -> Result<Self> {
        let raw = serde_json::from_value(fields).map_err(|error| bad(&error.to_string()))?;
        Self::check(raw, RawGeneration::default())
    }

    fn check(raw: RawConfig, generation: RawGeneration) -> Result<Self> {
        let family = Family::of(&raw)?;
        let format = raw.quantization_config.as_ref().map(Format::parse);
        let sizes = Sizes::check(&raw)?;
        let (rope, local_rope) = rope::check(&raw, family.local_rope)?;
        if raw.use_bidirectional_attention == Some(true) {
            return Err(bad(
                "use_bidirectional_attention is true: such a model embeds texts and answers nothing",
            ));
        }
        let has_bias = raw.attention_bias.unwrap_or(false) && family.bias == AttentionBias::Field;
        let scale = positive("query_pre_attn_scalar", raw.query_pre_attn_scalar)?
            .filter(|_| family.gemma)
            .unwrap_or(to_f32(sizes.head_dim));
        let cap = |name, value| positive(name, value).map(|cap| cap.filter(|_| family.gemma));
        let config = Self {
            architecture: family.architecture.to_owned(),
            hidden_size: sizes.hidden_size,
            intermediate_size: size("intermediate_size", raw.intermediate_size, None, MAX_WIDTH)?,
            num_hidden_layers: sizes.layers,
            num_attention_heads: sizes.heads,
            num_key_value_heads: sizes.kv_heads,
            head_dim: sizes.head_dim,
            vocab_size: size("vocab_size", raw.vocab_size, None, MAX_SIZE)?,
            max_position_embeddings: size(
                "max_position_embeddings",
                raw.max_position_embeddings,
                None,
                MAX_SIZE,
            )?,
            rms_norm_eps: check_epsilon(raw.rms_norm_eps)?,
            norm_offset: if family.gemma { 1.0 } else { 0.0 },
            post_norms: family.gemma,
            qk_norm: family.qk_norm,
            rope,
            local_rope,
            windows: family.windows(&raw, sizes.layers)?,
            query_scale: 1.0 / scale.sqrt(),
            attention_cap: cap("attn_logit_softcapping", raw.attn_logit_softcapping)?,
            logit_cap: cap("final_logit_softcapping", raw.final_logit_softcapping)?,
            embedding_scale: family.gemma.then(|| to_f32(sizes.hidden_size).sqrt()),
            activation: family.activation(&raw)?,
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(family.gemma),
            qkv_bias: has_bias || family.bias == AttentionBias::Inputs,
            output_bias: has_bias,
            mlp_bias: raw.mlp_bias.unwrap_or(false),
            bos_token_id: generation
                .bos_token_id
                .or(raw.bos_token_id)
                .and_then(|ids| ids.into_vec().first().copied()),
            eos_token_ids: generation
                .eos_token_id
                .or(raw.eos_token_id)
                .map(Ids::into_vec)
                .unwrap_or_default(),
            format: format.transpose()?,
        };
        config.check_together()?;
        Ok(config)
    }

    /// What no field shows alone.
    fn check_together(&self) -> Result<()> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(bad(&format!(
                "num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}: one of them is wrong"
            )));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(bad(&format!(
                "head_dim {} is odd, rotary embeddings need pairs: one of hidden_size, heads and head_dim is wrong",
                self.head_dim
            )));
        }
        if heads
            .checked_mul(self.head_dim)
            .is_none_or(|width| width > MAX_WIDTH)
        {
            return Err(bad(&format!(
                "num_attention_heads {heads} times head_dim {} is above {MAX_WIDTH}: no such model is supported",
                self.head_dim
            )));
        }
        let outside = self
            .eos_token_ids
            .iter()
            .chain(&self.bos_token_id)
            .find(|id| usize::try_from(**id).is_ok_and(|id| id >= self.vocab_size));
        match outside {
            Some(id) => Err(bad(&format!(
                "token id {id} of bos or eos is outside the vocabulary of {}: correct config.json or generation_config.json",
                self.vocab_size
            ))),
            None => Ok(()),
        }
    }

    /// Width of all query heads together.
    pub fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }
}

/// The sizes that others are checked by.
struct Sizes {
    hidden_size: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Sizes {
    fn check(raw: &RawConfig) -> Result<Self> {
        let heads = size(
            "num_attention_heads",
            raw.num_attention_heads,
            None,
            MAX_WIDTH,
        )?;
        let hidden_size = size("hidden_size", raw.hidden_size, None, MAX_WIDTH)?;
        if raw.head_dim.is_none() && !hidden_size.is_multiple_of(heads) {
            return Err(bad(&format!(
                "hidden_size {hidden_size} is not a multiple of num_attention_heads {heads} and head_dim is not given: one of them is wrong"
            )));
        }
        let kv_heads = raw.num_key_value_heads;
        Ok(Self {
            hidden_size,
            layers: size("num_hidden_layers", raw.num_hidden_layers, None, MAX_LAYERS)?,
            heads,
            kv_heads: size("num_key_value_heads", kv_heads, Some(heads), MAX_WIDTH)?,
            head_dim: size("head_dim", raw.head_dim, Some(hidden_size / heads), 1_024)?,
        })
    }
}

/// The configuration of a GPTQ or AWQ checkpoint from before `config.json` had it.
fn older_quantization_config(directory: &Path) -> Result<Option<Value>> {
    for (file, method) in [
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
    ] {
        let Some(text) = read_small_file(&directory.join(file))? else {
            continue;
        };
        let mut config: Value = parse(file, &text)?;
        let Some(fields) = config.as_object_mut() else {
            return Err(Error::model(format!(
                "{file}: is not a JSON object: correct the file or download the model again"
            )));
        };
        fields.entry("quant_method").or_insert(json!(method));
        return Ok(Some(config));
    }
    if directory.join("hf_quant_config.json").exists() {
        return Err(Error::model(
            "hf_quant_config.json: ModelOpt's layouts are not supported: use a compressed-tensors, gptq, awq or fp8 checkpoint",
        ));
    }
    Ok(None)
}

fn bad(message: &str) -> Error {
    Error::model(format!("config.json: {message}"))
}

/// A text of the file, fit for one line of an error.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(80).collect()
}

/// The text of a file that may be missing.
pub(super) fn read_small_file(path: &Path) -> Result<Option<String>> {
    let failed = |error: &std::io::Error| {
        let fix = match error.kind() {
            ErrorKind::FileTooLarge | ErrorKind::InvalidData => "download the model again",
            _ => "check the path and its permissions",
        };
        Error::model(format!(
            "{}: cannot be read ({error}): {fix}",
            path.display()
        ))
    };
    match files::read_text(path, MAX_FILE_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(&error)),
    }
}

pub(super) fn parse<'a, T: Deserialize<'a>>(file: &str, text: &'a str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| {
        Error::model(format!(
            "{file}: {error}: correct the file or download the model again"
        ))
    })
}

fn size(name: &str, value: Option<u64>, default: Option<usize>, largest: usize) -> Result<usize> {
    let value = match (value, default) {
        (Some(value), _) => usize::try_from(value).unwrap_or(usize::MAX),
        (None, Some(default)) => default,
        (None, None) => return Err(bad(&format!("{name} is missing: download the model again"))),
    };
    match value {
        0 => Err(bad(&format!("{name} is 0: it must be at least 1"))),
        _ if value > largest => Err(bad(&format!(
            "{name} is {value}: at most {largest} is supported"
        ))),
        _ => Ok(value),
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "widths are at most 2^16, which FP32 holds exactly"
)]
fn to_f32(width: usize) -> f32 {
    width as f32
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "an epsilon needs no more than the precision of f32"
)]
fn check_epsilon(value: Option<f64>) -> Result<f32> {
    let value = value.unwrap_or(1e-6);
    if value.is_finite() && (0.0..1.0).contains(&value) {
        Ok(value as f32)
    } else {
        Err(bad(&format!(
            "rms_norm_eps is {value}: it must be from 0 to below 1, such as 1e-5"
        )))
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "scales and caps are used in FP32"
)]
fn positive(name: &str, value: Option<f64>) -> Result<Option<f32>> {
    match value.map(|value| value as f32) {
        Some(value) if !(value.is_normal() && value > 0.0) => Err(bad(&format!(
            "{name} is {value}: it must be a finite number above 0"
        ))),
        value => Ok(value),
    }
}
