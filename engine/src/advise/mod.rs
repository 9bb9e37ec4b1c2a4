//! What to run a model with on a device: which schemes fit, how fast they can be, what they cost in quality, and one recommended plan.
//!
//! Pure: a model's sizes, a device's rates and a load in, advice out. `cli::advise` reads the inputs and prints. Predictions are rooflines:
//! they say what the device allows, not what this engine reaches on it; `mixquant-engine bench` measures that.

pub mod cpu;
pub mod device;
mod plan;
mod quality;
mod report;
mod roofline;
pub mod scheme;

use serde::Serialize;

pub use self::device::Device;
pub use self::plan::Recommendation;
pub use self::quality::Task;
use self::roofline::{decode_seconds, prefill_seconds};
use self::scheme::{Kv, SCHEMES, Scheme};
use crate::model::Config;

/// Memory beyond weights and cache: activations, fragments, the process.
pub const HEADROOM: f64 = 1.2;

/// The sizes that decide.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelFacts {
    /// For the heading.
    pub name: String,
    /// Blocks.
    pub layers: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Channels a head.
    pub head_dim: u64,
    /// Weights of the block linears: what schemes quantise.
    pub linear_weights: u64,
    /// Weights of embedding, head and norms: always BF16.
    pub other_weights: u64,
    /// Weights of the head, tied or not: read for every token.
    pub head_weights: u64,
    /// The longest context.
    pub context: u64,
}

impl ModelFacts {
    /// The facts of a checked configuration.
    pub fn of(name: &str, config: &Config) -> Self {
        let number = |value: usize| value as u64;
        let (hidden, ffn) = (number(config.hidden_size), number(config.intermediate_size));
        let (heads, kv_heads, head_dim) = (
            number(config.num_attention_heads),
            number(config.num_key_value_heads),
            number(config.head_dim),
        );
        let layers = number(config.num_hidden_layers);
        let attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim;
        let table = number(config.vocab_size) * hidden;
        let tables = if config.tie_word_embeddings { 1 } else { 2 };
        Self {
            name: name.to_owned(),
            layers,
            hidden,
            heads,
            kv_heads,
            head_dim,
            linear_weights: layers * (attention + 3 * hidden * ffn),
            other_weights: tables * table + (2 * layers + 1) * hidden,
            head_weights: table,
            context: number(config.max_position_embeddings),
        }
    }

    /// Bytes of one token's keys and values in all layers at `bits` a channel.
    pub fn kv_bytes_per_token(&self, bits: f64) -> f64 {
        float(2 * self.layers * self.kv_heads * self.head_dim) * bits / 8.0
    }
}

/// What is asked of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Load {
    /// Tokens of a prompt.
    pub prompt_tokens: u64,
    /// Prompt and answer together.
    pub sequence_length: u64,
    /// Sequences at once.
    pub concurrency: u64,
    /// What the answers are for.
    pub task: Task,
}

/// One row of the table.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// The scheme.
    pub scheme: &'static Scheme,
    /// Bytes of all weights that stay in memory.
    pub weight_bytes: f64,
    /// For each [`Kv`] in order.
    pub kv: Vec<KvFit>,
    /// Seconds to the first token of one prompt.
    pub ttft_seconds: f64,
    /// Seconds a token with all sequences running, at [`Advice::kv`].
    pub tpot_seconds: f64,
    /// What to expect of the answers.
    pub quality: quality::Expectation,
}

/// What one way to keep keys and values takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KvFit {
    /// The way.
    pub kv: Kv,
    /// Bytes of keys and values of all sequences at their longest.
    pub kv_bytes: f64,
    /// [`HEADROOM`] times weights and cache.
    pub needed_bytes: f64,
    /// Whether the device has so much.
    pub fits: bool,
}

/// Everything that is said.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Advice {
    /// The model.
    pub model: ModelFacts,
    /// The device.
    pub device: Device,
    /// The load.
    pub load: Load,
    /// The schemes.
    pub rows: Vec<Row>,
    /// How keys and values are kept in the speeds of the rows.
    pub kv: Kv,
    /// What to do, unless nothing fits.
    pub recommendation: Option<Recommendation>,
    /// The reasons, one a line.
    pub why: Vec<String>,
}

/// The advice for a model on a device under a load.
pub fn advise(model: ModelFacts, device: Device, load: Load) -> Advice {
    let kv = plan::kv_for(&model, &device, &load);
    let rows: Vec<Row> = SCHEMES
        .iter()
        .filter(|scheme| scheme.can_run(&device))
        .map(|scheme| row(scheme, &model, &device, &load, kv))
        .collect();
    let recommendation = plan::recommend(&rows, &model, &device, &load);
    let why = plan::why(&rows, recommendation.as_ref(), &model, &device, &load);
    Advice {
        model,
        device,
        load,
        rows,
        kv,
        recommendation,
        why,
    }
}

fn row(scheme: &'static Scheme, model: &ModelFacts, device: &Device, load: &Load, kv: Kv) -> Row {
    let weight_bytes = scheme.weight_bytes(model);
    let fits = Kv::ALL.iter().map(|kv| {
        let kv_bytes = kv_bytes(model, load, *kv);
        let needed_bytes = HEADROOM * (weight_bytes + kv_bytes);
        KvFit {
            kv: *kv,
            kv_bytes,
            needed_bytes,
            fits: needed_bytes <= device.memory_bytes,
        }
    });
    Row {
        scheme,
        weight_bytes,
        kv: fits.collect(),
        ttft_seconds: prefill_seconds(scheme, model, device, load.prompt_tokens),
        tpot_seconds: decode_seconds(
            (scheme, kv),
            model,
            device,
            (load.concurrency, load.sequence_length),
        ),
        quality: quality::of_weights(scheme, load.task),
    }
}

/// Bytes of keys and values of all sequences at their longest.
fn kv_bytes(model: &ModelFacts, load: &Load, kv: Kv) -> f64 {
    model.kv_bytes_per_token(kv.bits()) * float(load.sequence_length) * float(load.concurrency)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "bytes and operations are shown with three digits"
)]
fn float(number: u64) -> f64 {
    number as f64
}
