//! Reads and checks `config.json` and `generation_config.json`. Field names are Hugging Face's own.
//!
//! Every number is checked before anything is allocated from it. Code named by `auto_map` is never run: it is ignored.

use std::path::Path;

use serde::Deserialize;

use crate::{Error, Result};

/// The architectures that can be computed.
const SUPPORTED: &[&str] = &["LlamaForCausalLM"];
/// A configuration file above this size is not one.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Bounds that no model of this family comes near; they keep products of two sizes far from overflow.
const MAX_LAYERS: usize = 1_024;
const MAX_SIZE: usize = 1 << 24;
/// Inputs of a linear: INT32 sums of INT8 products hold up to here.
const MAX_WIDTH: usize = 1 << 16;

/// A checked configuration: every size is above 0 and they fit one another.
#[derive(Debug, Clone, PartialEq)]
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
    /// The base of the rotary angles.
    pub rope_theta: f64,
    /// How the angles are stretched for contexts longer than those of pre-training.
    pub rope_scaling: RopeScaling,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether q, k, v and o have a bias.
    pub attention_bias: bool,
    /// Whether gate, up and down have a bias.
    pub mlp_bias: bool,
    /// Put in front of a text, when the checkpoint names one.
    pub bos_token_id: Option<u32>,
    /// A generated one ends the answer; from `generation_config.json` when it is there.
    pub eos_token_ids: Vec<u32>,
}

/// Changes to the rotary angles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// None.
    Default,
    /// All positions are divided by `factor`.
    Linear {
        /// Above 0.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between are interpolated.
    Llama3 {
        /// Above 0.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are scaled whole.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept; above `low_freq_factor`.
        high_freq_factor: f64,
        /// The context of pre-training, in tokens.
        original_max_position_embeddings: f64,
    },
}

#[derive(Deserialize)]
struct RawConfig {
    architectures: Option<Vec<String>>,
    hidden_size: Option<u64>,
    intermediate_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    num_attention_heads: Option<u64>,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    vocab_size: Option<u64>,
    max_position_embeddings: Option<u64>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    /// Where newer checkpoints keep `rope_theta` and the scaling.
    rope_parameters: Option<RawRope>,
    hidden_act: Option<String>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    bos_token_id: Option<Ids>,
    eos_token_id: Option<Ids>,
    quantization_config: Option<serde_json::Value>,
}

#[derive(Deserialize, Clone)]
struct RawRope {
    rope_type: Option<String>,
    /// The name that older checkpoints use.
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

#[derive(Deserialize, Default)]
struct RawGeneration {
    bos_token_id: Option<Ids>,
    eos_token_id: Option<Ids>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl Ids {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
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
        let raw: RawConfig = parse("config.json", &text)?;
        let generation: RawGeneration =
            match read_small_file(&directory.join("generation_config.json"))? {
                Some(text) => parse("generation_config.json", &text)?,
                None => RawGeneration::default(),
            };
        Self::check(raw, generation)
    }

    fn check(raw: RawConfig, generation: RawGeneration) -> Result<Self> {
        let architecture = check_architecture(&raw)?;
        let num_attention_heads = size(
            "num_attention_heads",
            raw.num_attention_heads,
            None,
            MAX_WIDTH,
        )?;
        let hidden_size = size("hidden_size", raw.hidden_size, None, MAX_WIDTH)?;
        if raw.head_dim.is_none() && !hidden_size.is_multiple_of(num_attention_heads) {
            return Err(bad(&format!(
                "hidden_size {hidden_size} is not a multiple of num_attention_heads {num_attention_heads} and head_dim is not given: one of them is wrong"
            )));
        }
        let rope = raw
            .rope_parameters
            .clone()
            .or_else(|| raw.rope_scaling.clone());
        let config = Self {
            architecture,
            hidden_size,
            intermediate_size: size("intermediate_size", raw.intermediate_size, None, MAX_WIDTH)?,
            num_hidden_layers: size("num_hidden_layers", raw.num_hidden_layers, None, MAX_LAYERS)?,
            num_attention_heads,
            num_key_value_heads: size(
                "num_key_value_heads",
                raw.num_key_value_heads,
                Some(num_attention_heads),
                MAX_WIDTH,
            )?,
            head_dim: size(
                "head_dim",
                raw.head_dim,
                Some(hidden_size / num_attention_heads),
                1_024,
            )?,
            vocab_size: size("vocab_size", raw.vocab_size, None, MAX_SIZE)?,
            max_position_embeddings: size(
                "max_position_embeddings",
                raw.max_position_embeddings,
                None,
                MAX_SIZE,
            )?,
            rms_norm_eps: check_epsilon(raw.rms_norm_eps)?,
            rope_theta: check_theta(
                raw.rope_theta
                    .or(rope.as_ref().and_then(|rope| rope.rope_theta)),
            )?,
            rope_scaling: check_rope(rope.as_ref())?,
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            attention_bias: raw.attention_bias.unwrap_or(false),
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

fn bad(message: &str) -> Error {
    Error::model(format!("config.json: {message}"))
}

/// The text of a file that may be missing.
pub(super) fn read_small_file(path: &Path) -> Result<Option<String>> {
    let failed = |error: &std::io::Error| {
        Error::model(format!(
            "{}: cannot be read ({error}): check the path and its permissions",
            path.display()
        ))
    };
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(&error)),
    };
    if metadata.len() > MAX_FILE_BYTES {
        return Err(Error::model(format!(
            "{}: has {} bytes, more than any such file: download the model again",
            path.display(),
            metadata.len()
        )));
    }
    std::fs::read_to_string(path)
        .map(Some)
        .map_err(|error| failed(&error))
}

pub(super) fn parse<'a, T: Deserialize<'a>>(file: &str, text: &'a str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| {
        Error::model(format!(
            "{file}: {error}: correct the file or download the model again"
        ))
    })
}

fn check_architecture(raw: &RawConfig) -> Result<String> {
    let supported = SUPPORTED.join(", ");
    let Some(architecture) = raw.architectures.as_ref().and_then(|names| names.first()) else {
        return Err(bad(&format!(
            "architectures is missing: supported are {supported}"
        )));
    };
    if !SUPPORTED.contains(&architecture.as_str()) {
        let name: String = architecture
            .chars()
            .filter(|c| !c.is_control())
            .take(80)
            .collect();
        return Err(bad(&format!(
            "architecture {name} is not supported: supported are {supported}"
        )));
    }
    if raw.quantization_config.is_some() {
        return Err(bad(
            "quantization_config is present, the checkpoint is quantised already: use the unquantised checkpoint, MixQuant quantises it itself",
        ));
    }
    match raw.hidden_act.as_deref() {
        None | Some("silu" | "swish") => Ok(architecture.clone()),
        Some(other) => {
            let name: String = other.chars().filter(|c| !c.is_control()).take(80).collect();
            Err(bad(&format!(
                "hidden_act {name} is not supported: supported is silu"
            )))
        }
    }
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

fn check_theta(value: Option<f64>) -> Result<f64> {
    let value = value.unwrap_or(10_000.0);
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(bad(&format!(
            "rope_theta is {value}: it must be a finite number above 0, such as 10000"
        )))
    }
}

fn check_rope(raw: Option<&RawRope>) -> Result<RopeScaling> {
    let Some(raw) = raw else {
        return Ok(RopeScaling::Default);
    };
    let positive = |name: &str, value: Option<f64>| match value {
        Some(value) if value.is_finite() && value > 0.0 => Ok(value),
        Some(value) => Err(bad(&format!(
            "rope_scaling.{name} is {value}: it must be a finite number above 0"
        ))),
        None => Err(bad(&format!(
            "rope_scaling.{name} is missing: download the model again"
        ))),
    };
    match raw.rope_type.as_deref().or(raw.old_type.as_deref()) {
        None | Some("default") => Ok(RopeScaling::Default),
        Some("linear") => Ok(RopeScaling::Linear {
            factor: positive("factor", raw.factor)?,
        }),
        Some("llama3") => {
            let low_freq_factor = positive("low_freq_factor", raw.low_freq_factor)?;
            let high_freq_factor = positive("high_freq_factor", raw.high_freq_factor)?;
            if high_freq_factor <= low_freq_factor {
                return Err(bad(
                    "rope_scaling.high_freq_factor must be above low_freq_factor: download the model again",
                ));
            }
            Ok(RopeScaling::Llama3 {
                factor: positive("factor", raw.factor)?,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: positive(
                    "original_max_position_embeddings",
                    raw.original_max_position_embeddings,
                )?,
            })
        }
        Some(other) => {
            let name: String = other.chars().filter(|c| !c.is_control()).take(80).collect();
            Err(bad(&format!(
                "rope_scaling type {name} is not supported: supported are default, linear, llama3"
            )))
        }
    }
}
